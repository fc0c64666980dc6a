"""The one self-contained HTML page of a run. Source: spec/reports.md "The page"."""
