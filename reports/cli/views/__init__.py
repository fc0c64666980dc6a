"""Output of commands: verdicts, accounts of cases, diagnoses, tables of detections.

This module imports nothing: each command imports its own view, because help must be instant.
"""
