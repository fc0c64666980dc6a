"""A training run that survives bad steps: a guard in the compiled step, rollback around it."""

from stability.recovery.guard import GuardConfig
from stability.recovery.rollback import RecoveryConfig, guarded_run

__all__ = ["GuardConfig", "RecoveryConfig", "guarded_run"]
