"""The one self-contained HTML page of a run: `sections` make plain data of it, templates draw it.

Nothing is imported here: commands print tables of a section without what draws the page. Source:
docs/reports.md "The page".
"""
