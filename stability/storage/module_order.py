"""Order of the parameters in a checkpoint's torch module, derived from its config.json.

transformers builds the architecture on torch's meta device: no weight is allocated, nothing is
downloaded, and no code from the checkpoint runs. Source: docs/stability.md "Optimiser state".
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalodon_jax.tensor_files import printable
from stability.core.parameter_leaves import Leaf


class UnknownOrderError(ValueError):
    """The order of the parameters is unknown; the message is a clause that gives the reason."""


def module_order(folder: Path, leaves: Mapping[str, Leaf]) -> list[Leaf]:
    """Return the leaves of a checkpoint in the order of its module's parameters.

    A tied parameter has several names in the module; the first one that the checkpoint has is used.
    Leaves that are not parameters, such as buffers and copies of a tied parameter, are omitted.

    Args:
        folder: folder with transformers' config.json.
        leaves: the checkpoint's leaves by name.

    Raises:
        UnknownOrderError: there is no config.json; it refers to code in the checkpoint (auto_map);
            transformers is not installed, or does not have or cannot build the architecture; or the
            architecture has a parameter that the checkpoint lacks.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise UnknownOrderError(f"there is no config.json in {folder}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        name = str(config["architectures"][0])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UnknownOrderError(f"{file} names no architecture of transformers") from error
    if config.get("auto_map"):
        # A class of the same name in transformers may order its parameters differently.
        raise UnknownOrderError(
            f"{file} has an auto_map: the model's own code, which is not run here, decides the "
            "order of its parameters"
        )
    found = []
    for names, shape in _parameters(name, config):
        here = [leaves[n] for n in names if n in leaves and leaves[n].shape == shape]
        if not here:
            raise UnknownOrderError(
                f"{printable(name)} of {file} has a parameter {names[0]} {shape}, which the "
                "checkpoint does not have"
            )
        found.append(here[0])
    return found


def _parameters(
    architecture: str, config: dict[str, Any]
) -> list[tuple[list[str], tuple[int, ...]]]:
    """Return (all names, shape) of each parameter of an architecture, in module order.

    Raises:
        UnknownOrderError: transformers is not installed, or cannot build the architecture.
    """
    shown = printable(architecture)
    try:
        # Import warnings of transformers are of no use to the reader of a diagnosis.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            import transformers
    except ImportError as error:
        raise UnknownOrderError(
            f"transformers, which defines the parameter order of {shown}, is not installed"
        ) from error
    kind = getattr(transformers, architecture, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise UnknownOrderError(f"transformers {transformers.__version__} has no {shown}")
    # A pretrained backbone would be downloaded; parameter names do not need it.
    fields = config | ({"use_pretrained_backbone": False} if "backbone" in config else {})
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            module = kind(kind.config_class.from_dict(fields))  # pyright: ignore[reportOptionalMemberAccess]
    except Exception as error:  # an architecture may raise anything on an unexpected config
        raise UnknownOrderError(
            f"transformers cannot build {shown} from config.json ({type(error).__name__}: {error})"
        ) from error
    named: dict[int, tuple[list[str], tuple[int, ...]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), ([], tuple(parameter.shape)))[0].append(name)
    return list(named.values())
