"""The bug that `megalodon-numerics demo` plants, which every installation has."""

from __future__ import annotations

from megalodon_jax.layers.rotary import RotaryEmbedding, _rotate
from parity.faults.fault import Family, around, fault


@around
def _keys_one_late(call, self, q, k, start_index=0):
    q, _ = call(self, q, k, start_index)
    cos, sin = self.tables(start_index + 1, k.shape[1], k.dtype)
    return q, _rotate(k, cos, sin)


DEMONSTRATION = fault(
    Family.ROPE,
    "rope_keys_one_late",
    "keys counted from 1",
    _keys_one_late,
    stage="layers.0.inner",
    owner=RotaryEmbedding,
)
