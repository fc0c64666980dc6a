"""Output of commands as text, JSON or Markdown, one module per command or family.

This module imports nothing: each command imports its own view, because help must be instant.
"""
