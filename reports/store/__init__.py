"""The run folder: its schema, how it is written aside and renamed, how many of them are queried."""
