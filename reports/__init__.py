"""What a person sees in the morning: the run folder, its history, the verdict and the page.

Source: docs/reports.md, docs/verdicts.md.
"""
