"""Recovery from bad training steps: a guard inside the compiled step, and rollback outside it.

Import the function `guard` from `stability.recovery.guard`; exported here, its name would hide that
module.
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
