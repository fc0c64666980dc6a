"""The sections of the page, one module each: from a run to what a template draws.

Nothing is imported here: `reports.page.render` takes all of them, a command only its own.
"""
