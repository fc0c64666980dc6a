"""Storing, judging and showing runs: the run folder, history, verdict, page and command line.

Source: docs/reports.md, docs/verdicts.md.
"""
