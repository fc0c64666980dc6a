"""Round trip of weights through JAX, torch's layout and a safetensors file, checked byte by byte.

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
    """Convert a case's weights to JAX, torch's layout, file bytes and back to JAX.

    Returns:
        The weights after the conversion, by torch name.
    """
    there = state_dict(JaxSubject("float32").load(case))
    back = build_model(case.config, load(save(there)), source=case.name)
    return {name: np.asarray(leaf) for name, leaf in named_leaves(back).items()}


def changed(held: Arrays, given: Arrays) -> list[str]:
    """Return the names of parameters that a conversion lost, added or changed, sorted.

    Dtype, shape and bytes must be equal. A head that is only in `held` is ignored: it is tied to
    the embedding.

    Args:
        held: parameters after the conversion, by torch name.
        given: parameters before it, by torch name.
    """
    names = (set(held) | set(given)) - ({HEAD} if HEAD not in given else set())
    return sorted(n for n in names if value_hash(held.get(n)) != value_hash(given.get(n)))


def value_hash(array: np.ndarray | None) -> str:
    """Return a hash of an array's dtype, shape and bytes; "" for None."""
    if array is None:
        return ""
    digest = hashlib.sha256(f"{array.dtype.name} {array.shape} ".encode())
    digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
