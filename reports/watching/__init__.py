"""Watches a training: callbacks that measure, warn once, and keep a run in the store.

Source: docs/training.md "Watch a run while it trains".
"""

from reports.watching.callbacks import trainer_callback, watch_optimizer, watch_updates

__all__ = ["trainer_callback", "watch_optimizer", "watch_updates"]
