"""Effects of storing parameters and optimiser states in few bits, and remedies.

`report` runs all probes on a checkpoint. `probe` measures which parameters freeze, `audit_*` check
stored values. `try_remedies` compares remedies, and the narrow optimisers implement them.
`Watch` and `watch_torch` detect frozen parameters during training.
"""

from stability.storage.diagnose import report
from stability.storage.diagnosis import Diagnosis
from stability.storage.ema_pole_findings import memory_rows
from stability.storage.ema_poles import Poles, find_poles
from stability.storage.frozen_watch import Watch, watch_torch
from stability.storage.narrow_optimisers import (
    apply_updates,
    float32_master,
    kahan,
    kahan_adamw,
    nearest_storage,
    stochastic_adamw,
    stochastic_rounding,
)
from stability.storage.optimiser_state import audit_global_norm, audit_state
from stability.storage.remedies import REMEDIES, Remedy, Trial, try_remedies
from stability.storage.simulate import Gradients, Storage, Survival
from stability.storage.survival import Prediction, predict, probe
from stability.storage.update_rules import SGD, AdamW, Lion, Muon, Optimiser, optimiser
from stability.storage.value_audit import audit_parameters

__all__ = [
    "REMEDIES",
    "SGD",
    "AdamW",
    "Diagnosis",
    "Gradients",
    "Lion",
    "Muon",
    "Optimiser",
    "Poles",
    "Prediction",
    "Remedy",
    "Storage",
    "Survival",
    "Trial",
    "Watch",
    "apply_updates",
    "audit_global_norm",
    "audit_parameters",
    "audit_state",
    "find_poles",
    "float32_master",
    "kahan",
    "kahan_adamw",
    "memory_rows",
    "nearest_storage",
    "optimiser",
    "predict",
    "probe",
    "report",
    "stochastic_adamw",
    "stochastic_rounding",
    "try_remedies",
    "watch_torch",
]
