"""Recovery from bad training steps: a guard inside the compiled step, and rollback outside it.

The function `guard` is not exported here, since its name would hide the module of the same name.
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
