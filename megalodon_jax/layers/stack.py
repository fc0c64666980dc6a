"""The stack of blocks: one after another, or equal neighbours as one loop.

A loop is traced and compiled once however many blocks it runs, and the model outside of it stays a
tuple of blocks: their parameters are stacked inside the call, and the names of a checkpoint, an
optimiser state or a gradient are those of every other model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from megalodon_jax.sharding.rules import gathered
from megalodon_jax.types import LayerCache


def run_blocks(
    blocks: Sequence[Any],
    x: Float[Array, "B L D"],
    mask: Bool[Array, "B L"] | None,
    caches: Sequence[LayerCache | None],
    return_cache: bool,
    keys: Sequence[jax.Array | None],
    *,
    scan: bool,
    rematerialise: bool,
) -> tuple[Float[Array, "B L D"], tuple[LayerCache, ...]]:
    """Run `blocks` on `x` and return the last one's output and the caches after each.

    Args:
        blocks: `MegalodonBlock`s.
        x: the first block's input.
        mask: True where a token is valid.
        caches: what each block carries, None where it starts.
        return_cache: whether to return caches; else there are none.
        keys: a dropout key for each block, or None.
        scan: whether neighbours of one kind (sizes, dtypes, backends) become one loop. Their
            parameters and caches are copied side by side at every call.
        rematerialise: whether the backward pass computes each block again.
    """
    run = _rematerialised if rematerialise else _compiled
    after: list[LayerCache | None] = []
    for part in _parts(blocks, caches, scan):
        if part.stop - part.start == 1:
            i = part.start
            x, held = run(blocks[i], x, mask, caches[i], return_cache, keys[i])
            after.append(held)
        else:
            loop = tuple(blocks[part]), tuple(caches[part]), tuple(keys[part])
            x, several = _looped(run, loop, x, mask, return_cache)
            after.extend(several)
    return x, tuple(held for held in after if held is not None)


@eqx.filter_jit
def _compiled(
    block: Any,
    x: Float[Array, "B L D"],
    mask: Bool[Array, "B L"] | None,
    cache: LayerCache | None,
    return_cache: bool,
    key: jax.Array | None,
    scale: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "B L D"], LayerCache | None]:
    """One block: equal layers share one trace, and a call outside of jit compiles one program."""
    return _run(block, x, mask, cache, return_cache, key=key, scale=scale)


def _rematerialised(
    block: Any,
    x: Float[Array, "B L D"],
    mask: Bool[Array, "B L"] | None,
    cache: LayerCache | None,
    return_cache: bool,
    key: jax.Array | None,
    scale: Float[Array, ""] | None = None,
) -> tuple[Float[Array, "B L D"], LayerCache | None]:
    return eqx.filter_checkpoint(_run)(block, x, mask, cache, return_cache, key=key, scale=scale)


def _run(block: Any, x: Float[Array, "B L D"], *rest: Any, **options: Any) -> Any:
    # Inside of what is rematerialised: gathered parameters are not kept for the backward pass.
    return gathered(block, x)(x, *rest, **options)


@eqx.filter_jit
def _looped(
    run: Callable[..., tuple[Array, LayerCache | None]],
    loop: tuple[tuple[Any, ...], tuple[LayerCache | None, ...], tuple[jax.Array | None, ...]],
    x: Float[Array, "B L D"],
    mask: Bool[Array, "B L"] | None,
    return_cache: bool,
) -> tuple[Float[Array, "B L D"], list[LayerCache | None]]:
    """Run blocks of one kind in a loop: they, their caches and their keys in `loop`."""
    blocks, caches, keys = loop
    arrays, static = eqx.partition([_unscaled(block) for block in blocks], eqx.is_array)
    scales = jnp.asarray(np.array([block.ffn.scale for block in blocks]), x.dtype)

    def step(x: Array, layer: Any) -> tuple[Array, LayerCache | None]:
        arrays, held, key, scale = layer
        return run(eqx.combine(arrays, static[0]), x, mask, held, return_cache, key, scale)

    x, held = jax.lax.scan(step, x, (*map(_stacked, (arrays, caches, keys)), scales))
    return x, [jax.tree.map(lambda leaf, i=i: leaf[i], held) for i in range(len(blocks))]


def _stacked(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _parts(blocks: Sequence[Any], caches: Sequence[Any], scan: bool) -> Iterator[slice]:
    """Cut the stack into runs of one kind, or into single blocks."""
    kinds = map(_kind, blocks, caches) if scan else range(len(blocks))
    start = 0
    for _, run in groupby(kinds):
        stop = start + len(list(run))
        yield slice(start, stop)
        start = stop


def _kind(block: Any, cache: LayerCache | None) -> Any:
    """What two blocks must share to be one program: all but values and the scale of the sum."""
    leaves, structure = jax.tree.flatten((_unscaled(block), cache))
    return structure, [(x.shape, x.dtype) if eqx.is_array(x) else x for x in leaves]


def _unscaled(block: Any) -> Any:
    # The one static number that differs between layers, with `rescale_nffn`: a copy without it.
    ffn = copy.copy(block.ffn)
    object.__setattr__(ffn, "scale", 1.0)
    return eqx.tree_at(lambda b: b.ffn, block, ffn)
