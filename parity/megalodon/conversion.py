"""Round trip of weights through all formats, checked byte by byte.

Source: docs/parity.md "Same work": conversion round trip with value hashes.
"""

from __future__ import annotations

import hashlib

import numpy as np
from safetensors.numpy import load, save

from megalodon_jax.convert import state_dict
from megalodon_jax.weights import HEAD, build_model, named_leaves
from parity.engine.measure.arrays import Arrays
from parity.megalodon.cases import Case
from parity.megalodon.runner import JaxSubject


def round_trip(case: Case) -> dict[str, np.ndarray]:
    """Convert a case's weights to JAX, to torch's layout, to a file, and back; return them."""
    there = state_dict(JaxSubject("float32").load(case))
    back = build_model(case.config, load(save(there)), source=case.name)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(back).items()}


def changed(held: Arrays, given: Arrays) -> list[str]:
    """Return parameters that are missing or differ in dtype, shape or bytes, without a tied head.

    Args:
        held: parameters after the conversion.
        given: parameters before it.
    """
    names = (set(held) | set(given)) - ({HEAD} if HEAD not in given else set())
    return sorted(n for n in names if value_hash(held.get(n)) != value_hash(given.get(n)))


def value_hash(array: np.ndarray | None) -> str:
    """Return a hash of dtype, shape and bytes; empty for None."""
    if array is None:
        return ""
    digest = hashlib.sha256(f"{array.dtype.name} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
