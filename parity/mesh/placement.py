"""Assembles the global value of a sharded array from the blocks of the devices.

Replicas (blocks of the same elements on several devices) are compared bit for bit. Source:
docs/sharding.md "Replicas".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

Axes = tuple[str, ...]
Placement = tuple[Axes, ...]
"""Mesh axes that split each dimension of an array, slowest first; () for an unsplit dimension."""


def placement_of(spec: PartitionSpec, ndim: int) -> Placement:
    """Return the placement that a partition spec gives an array: for each of its `ndim` dimensions
    the mesh axes that split it, slowest first."""
    axes = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
    return tuple(axes) + ((),) * (ndim - len(axes))


def spec_of(placement: Placement) -> PartitionSpec:
    """Return the partition spec that is equivalent to a placement (`placement_of`)."""
    return PartitionSpec(*(axes or None for axes in placement))


def placements(
    whole: Sequence[int],
    block: Sequence[int],
    mesh: Mapping[str, int],
    varying: frozenset[str] = frozenset(),
) -> Iterator[Placement]:
    """Yield every placement with which blocks of one shape give the whole shape, likeliest first.

    Nothing is yielded if there is none.

    Args:
        whole: shape of the assembled value.
        block: shape of one device's block.
        mesh: sizes of the mesh axes along which there are blocks.
        varying: axes along which blocks are known to differ; a placement counts as likelier the
            less its axes differ from these.
    """
    if len(whole) != len(block) or any(b == 0 or w % b for w, b in zip(whole, block, strict=True)):
        return
    axes = [axis for axis, size in mesh.items() if size > 1]
    ratios = [w // b for w, b in zip(whole, block, strict=True)]
    ways = list(_ways(ratios, axes, mesh))
    # The sort is stable: equally likely placements keep the order of the mesh's axes.
    yield from sorted(ways, key=lambda way: len(varying ^ {a for axes in way for a in axes}))


def _ways(ratios: Sequence[int], axes: Sequence[str], mesh: Mapping[str, int]) -> Iterator[Any]:
    if not ratios:
        yield ()
        return
    for count in range(len(axes) + 1):
        for chosen in itertools.combinations(axes, count):
            if math.prod(mesh[axis] for axis in chosen) == ratios[0]:
                rest = [axis for axis in axes if axis not in chosen]
                for way in _ways(ratios[1:], rest, mesh):
                    yield (chosen, *way)


def assembled(
    stack: np.ndarray, placement: Placement, mesh: Mapping[str, int]
) -> tuple[np.ndarray, int]:
    """Assemble the blocks of all devices; return the value and the number of unequal replicas.

    A replica is unequal if any bit differs from that of the first replica. The value is assembled
    from first replicas.

    Args:
        stack: (devices, *block); devices are in the order of the mesh's axes, the last one fastest.
        placement: mesh axes that split each dimension of the value.
        mesh: sizes of the mesh axes along which there are blocks.
    """
    axes, sizes = list(mesh), tuple(mesh.values())
    blocks = np.asarray(stack).reshape(*sizes, *stack.shape[1:])
    used = {axis for dimension in placement for axis in dimension}
    differing = 0
    for place in range(len(axes)):
        if axes[place] in used:
            continue
        first = blocks.take([0], axis=place)
        others = blocks.reshape(*blocks.shape[:place], -1, *blocks.shape[place + 1 :])
        differing += _unequal_blocks(others, first, len(sizes))
        blocks = first
    order: list[int] = []
    shape: list[int] = []
    for dimension, along in enumerate(placement):
        order += [axes.index(axis) for axis in along] + [len(axes) + dimension]
        parts = math.prod(mesh[axis] for axis in along)
        shape.append(parts * stack.shape[1 + dimension])
    unused = [i for i in range(len(axes)) if i not in order]
    return blocks.transpose(*unused, *order).reshape(shape), differing


def _unequal_blocks(blocks: np.ndarray, first: np.ndarray, devices: int) -> int:
    """Count the devices whose block differs in any bit from that of the first replica.

    Args:
        blocks: blocks of the devices; the leading axes are those of the mesh.
        first: blocks of the first replica, which broadcast to the shape of `blocks`.
        devices: number of leading axes.
    """
    equal = _bits(blocks) == _bits(np.broadcast_to(first, blocks.shape))
    return int(np.sum(~equal.all(axis=tuple(range(devices, equal.ndim)))))


def _bits(x: np.ndarray) -> np.ndarray:
    """Return the bytes of every element, (..., bytes).

    Compared as bytes, NaN equals itself and 0 differs from -0.
    """
    x = np.ascontiguousarray(x)
    return x.view(np.uint8).reshape(*x.shape, x.dtype.itemsize)


def replica_differences(array: Any) -> int:
    """Return how many shards differ in any bit from the first shard of the same part of the array.

    The result is 0 for an array on one device and for anything that is no JAX array. Only shards on
    devices of this process are compared.
    """
    if not isinstance(array, jax.Array) or len(array.sharding.device_set) == 1:
        return 0
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    first: dict[str, bytes] = {}
    differing = 0
    for shard in array.addressable_shards:
        bits = np.asarray(shard.data).tobytes()
        differing += first.setdefault(str(shard.index), bits) != bits
    return differing


def out_of_sync(tree: Any) -> dict[str, int]:
    """Return the number of unequal shards of each array whose replicas differ, by path.

    An empty result means that all replicas of all arrays of the tree are bit-identical. Intended
    for the parameters and the optimiser state of a training run: replicas that have drifted apart
    stay so in all later steps.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    counts = {path_name(path): replica_differences(leaf) for path, leaf in leaves}
    return {name: count for name, count in counts.items() if count}


def path_name(path: Any) -> str:
    """Return the path of a pytree leaf as text, with "/" between its keys."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
