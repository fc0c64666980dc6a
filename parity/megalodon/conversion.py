"""The way of weights between the formats, and whether every byte arrives.

Source: docs/parity.md "Same work": conversion round trip with value hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from safetensors.numpy import load, save

from megalodon_jax.convert import state_dict
from megalodon_jax.weights import HEAD, build_model, named_leaves
from parity.megalodon.cases import Case
from parity.megalodon.runner import JaxSubject

Arrays = Mapping[str, np.ndarray]


def round_trip(case: Case) -> dict[str, np.ndarray]:
    """Return the weights of a case after the way to JAX, to torch's layout, a file, and back."""
    there = state_dict(JaxSubject("float32").load(case))
    back = build_model(case.config, load(save(there)), source=case.name)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(back).items()}


def changed(held: Arrays, given: Arrays) -> list[str]:
    """Return the parameters whose name, dtype, shape or bytes differ; a tied head is no parameter.

    Args:
        held: what arrived.
        given: what was sent.
    """
    names = (set(held) | set(given)) - ({HEAD} if HEAD not in given else set())
    return sorted(n for n in names if value_hash(held.get(n)) != value_hash(given.get(n)))


def value_hash(array: np.ndarray | None) -> str:
    """Return a hash of dtype, shape and bytes; empty for nothing."""
    if array is None:
        return ""
    digest = hashlib.sha256(f"{array.dtype.name} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
