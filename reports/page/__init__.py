"""The one self-contained HTML page of a run. Source: docs/reports.md "The page"."""
