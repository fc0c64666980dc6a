"""What a person sees in the morning: the run folder, its history, the verdict and the page.

Source: spec/reports.md.
"""
