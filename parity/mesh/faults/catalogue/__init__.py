"""The planted parallel bugs, one module for each witness they are planted in."""
