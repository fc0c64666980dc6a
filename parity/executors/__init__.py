"""Parallel execution: work items (plain data) run on local processes or a Ray cluster.

Knows no model and no nightly run. `sweep.run` yields an `item.Answer` for every `item.Item`.
Nothing is imported here: a worker needs only `item`, and starts in a tenth of the time.
"""
