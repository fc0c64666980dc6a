"""The sections of the page, one module each: each converts a run to data for a template.

This module imports nothing: `reports.page.render` needs all sections, a command only its own.
"""
