"""What commands print: a verdict, an account of a case, a diagnosis, a table of detections.

Nothing is imported here: each command imports its own view, for help must be instant.
"""
