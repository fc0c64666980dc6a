"""All documented names of this project, in a package whose name no other project has.

`import megalodon_numerics` imports nothing else; accessing an attribute imports its module. The
code is in the packages `megalodon_jax`, `parity`, `stability` and `reports`. If another project has
a package of one of these names, Python may find that one first. An attribute whose code needs the
shadowed package then raises an `ImportError` naming the file that was found; all other attributes
work. Source: docs/your-own-port.md "Beside packages of the same name".
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import megalodon_jax
    import parity
    import reports
    import stability
    from parity import (
        Adoption,
        AutocastSide,
        CapturedSide,
        Deployment,
        EquinoxSide,
        FlaxSide,
        FunctionSide,
        LanguageModel,
        NNXSide,
        OnnxSide,
        Port,
        PortError,
        Report,
        SideError,
        TaskError,
        TorchSide,
        adopt,
        batch_agreement,
        capture,
        compare,
        compare_deployed,
        comparison_runs,
        greedy_agreement,
        stream_agreement,
        text_agreement,
    )
    from parity.checkpoint_pair import export_pretrained
    from parity.mesh import MeshComparison, out_of_sync
    from reports.watching import trainer_callback, watch_optimizer, watch_updates
    from stability.dtype_audit import audit_step, load_policy
    from stability.nonfinite.flags import broken, in_order, watched_loss
    from stability.nonfinite.replay import locate
    from stability.recovery.guard import GuardConfig, guard
    from stability.recovery.rollback import RecoveryConfig, guarded_run
    from stability.storage import frozen_watch
    from stability.storage.narrow_optimisers import apply_updates, kahan_adamw, stochastic_adamw
    from stability.storage.torch_narrow import compensate, round_stochastically

PACKAGES = ("megalodon_jax", "parity", "stability", "reports")
"""Top-level packages of this project."""

_HOMES = {
    "parity": (
        "Adoption",
        "AutocastSide",
        "CapturedSide",
        "Deployment",
        "EquinoxSide",
        "FlaxSide",
        "FunctionSide",
        "LanguageModel",
        "NNXSide",
        "OnnxSide",
        "Port",
        "PortError",
        "Report",
        "SideError",
        "TaskError",
        "TorchSide",
        "adopt",
        "batch_agreement",
        "capture",
        "compare",
        "compare_deployed",
        "comparison_runs",
        "greedy_agreement",
        "stream_agreement",
        "text_agreement",
    ),
    "parity.checkpoint_pair": ("export_pretrained",),
    "parity.mesh": ("MeshComparison", "out_of_sync"),
    "reports.watching": ("trainer_callback", "watch_optimizer", "watch_updates"),
    "stability.dtype_audit": ("audit_step", "load_policy"),
    "stability.nonfinite.flags": ("broken", "in_order", "watched_loss"),
    "stability.nonfinite.replay": ("locate",),
    "stability.recovery.guard": ("GuardConfig", "guard"),
    "stability.recovery.rollback": ("RecoveryConfig", "guarded_run"),
    "stability.storage.frozen_watch": ("frozen_watch",),
    "stability.storage.narrow_optimisers": ("apply_updates", "kahan_adamw", "stochastic_adamw"),
    "stability.storage.torch_narrow": ("compensate", "round_stochastically"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Adoption",
    "AutocastSide",
    "CapturedSide",
    "Deployment",
    "EquinoxSide",
    "FlaxSide",
    "FunctionSide",
    "GuardConfig",
    "LanguageModel",
    "MeshComparison",
    "NNXSide",
    "OnnxSide",
    "Port",
    "PortError",
    "RecoveryConfig",
    "Report",
    "SideError",
    "TaskError",
    "TorchSide",
    "adopt",
    "apply_updates",
    "audit_step",
    "batch_agreement",
    "broken",
    "capture",
    "compare",
    "compare_deployed",
    "comparison_runs",
    "compensate",
    "export_pretrained",
    "frozen_watch",
    "greedy_agreement",
    "guard",
    "guarded_run",
    "in_order",
    "kahan_adamw",
    "load_policy",
    "locate",
    "megalodon_jax",
    "out_of_sync",
    "parity",
    "reports",
    "round_stochastically",
    "stability",
    "stochastic_adamw",
    "stream_agreement",
    "text_agreement",
    "trainer_callback",
    "watch_optimizer",
    "watch_updates",
    "watched_loss",
]


def __getattr__(name: str) -> Any:
    if name in PACKAGES:
        return own(name)
    if name not in _MODULES:
        raise AttributeError(f"module 'megalodon_numerics' has no attribute {name!r}")
    home = own(_MODULES[name])
    # The attribute `frozen_watch` is a module itself, not a member of one.
    return home if home.__name__.endswith(f".{name}") else getattr(home, name)


def __dir__() -> list[str]:
    return __all__


def own(module: str) -> ModuleType:
    """Import a module of this project by its full name, such as `parity.port`.

    Raises:
        ImportError: another project's package shadows a package that the module needs.
    """
    package = module.partition(".")[0]
    # A package imports only from those before it in `PACKAGES`, so these must be ours too.
    for needed in PACKAGES[: PACKAGES.index(package) + 1]:
        found = _found(needed)
        if found is not None and not found.is_relative_to(_folder(needed)):
            raise ImportError(
                f"megalodon_numerics needs its own package {needed!r} (in {_folder(needed)}), but "
                f"Python finds another one first: {found}. Rename or move that one, or leave "
                f"{found.parent.parent} out of sys.path (PYTHONPATH, or pytest's rootdir with "
                "--import-mode=importlib) where megalodon_numerics is used. `python -m pytest` "
                "adds the current folder: run `pytest` instead"
            )
    return importlib.import_module(module)


def _folder(package: str) -> Path:
    """Return the folder of one of our packages; all are in the parent folder of this one."""
    return Path(__file__).resolve().parent.parent / package


def _found(package: str) -> Path | None:
    """Return the file that `import package` runs; None if there is no such file."""
    if package in sys.modules:
        file = getattr(sys.modules[package], "__file__", None)
    else:
        spec = importlib.util.find_spec(package)
        file = spec.origin if spec is not None else None
    return Path(file).resolve() if file else None
