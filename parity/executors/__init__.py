"""Parallel execution: work items (plain data) run on local processes or a Ray cluster.

The process that starts items is the driver, those that run them are workers. `sweep.run` yields an
`item.Answer` for every `item.Item`. The package depends on no model and no nightly run. This file
imports nothing: a worker needs only `item`, and starts in a tenth of the time without the rest.
"""
