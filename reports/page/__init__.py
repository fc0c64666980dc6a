"""Self-contained HTML pages of runs: `sections` convert a run to plain data, templates draw it.

This module imports nothing, so commands can print the table of a section without loading the
template engine. Source: docs/reports.md "The page".
"""
