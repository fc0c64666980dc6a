"""Recovery from bad training steps: a guard in the compiled step, and rollback around it.

The function `guard` is not exported here: it would hide the module `stability.recovery.guard`.
"""

from stability.recovery.guard import GuardConfig, GuardState, Verdict
from stability.recovery.rollback import (
    CheckpointFolder,
    Event,
    RecoveryConfig,
    RecoveryFailedError,
    Run,
    guarded_run,
)

__all__ = [
    "CheckpointFolder",
    "Event",
    "GuardConfig",
    "GuardState",
    "RecoveryConfig",
    "RecoveryFailedError",
    "Run",
    "Verdict",
    "guarded_run",
]
