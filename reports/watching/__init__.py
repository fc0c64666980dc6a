"""Watches a training for parameters that stop changing: warns once, and stores a run with a page.

Source: docs/training.md "Watch a run while it trains".
"""

from reports.watching.callbacks import trainer_callback, watch_optimizer, watch_updates

__all__ = ["trainer_callback", "watch_optimizer", "watch_updates"]
