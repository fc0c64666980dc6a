"""Output of commands: verdicts, explanations of failing cases, diagnoses, tables of found faults.

This module imports nothing: each command imports its own view, because help must be instant.
"""
