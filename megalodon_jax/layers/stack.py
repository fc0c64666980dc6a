"""The stack of blocks, run one after another, or as one loop over consecutive equal blocks.

A loop is traced and compiled once, however many blocks it runs. Normally the model stays a tuple of
blocks that are stacked inside the call, so checkpoints, optimiser states and gradients have the
usual names. Alternatively the model holds its blocks stacked (`StackedBlocks`); then the program
around the loop does not grow with the depth either.
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
from jaxtyping import Array, Bool, Float, Int32

from megalodon_jax.roles import named_leaves
from megalodon_jax.sharding.rules import gathered
from megalodon_jax.types import LayerCache


class StackedBlocks(eqx.Module):
    """Blocks of equal sizes with stacked parameters: the first axis of every array is the layer.

    Iterating yields the blocks one by one, as copies.
    """

    block: Any
    """One block whose arrays hold all layers; its `ffn.scale` is 1 and unused."""
    scales: tuple[float, ...] = eqx.field(static=True)
    """The `ffn.scale` of each layer."""

    def __len__(self) -> int:
        return len(self.scales)

    def __iter__(self) -> Iterator[Any]:
        return iter(unstack_blocks(self))

    def __getitem__(self, layer: int) -> Any:
        return unstack_blocks(self)[layer]


def stack_blocks(blocks: Sequence[Any]) -> StackedBlocks:
    """Stack blocks that have equal sizes, dtypes and GEMM backends.

    Raises:
        ValueError: the blocks differ in one of these, there is no block, or a leaf is not an array
            but, for example, a `jax.ShapeDtypeStruct`.
    """
    if not blocks:
        raise ValueError("stack_layers: expected layers, and the model has none.")
    named = [named_leaves(block) for block in blocks]
    if shape := next((n for n, x in named[0].items() if not eqx.is_array(x)), None):
        raise ValueError(
            f"stack_layers: expected arrays, and {shape} is a {type(named[0][shape]).__name__}; "
            "to stack shapes, call eqx.filter_eval_shape(stack_layers, tree)."
        )
    for i, block in enumerate(blocks):
        if _kind(block, None) == _kind(blocks[0], None):
            continue
        found = "settings such as its GEMM backends"
        for name in named[0].keys() & named[i].keys():
            kinds = [f"{x.dtype} {x.shape}" for x in (named[i][name], named[0][name])]
            found = f"{name}, {kinds[0]} and not {kinds[1]}" if kinds[0] != kinds[1] else found
        raise ValueError(
            "stack_layers: expected layers of equal sizes, dtypes and GEMM backends, but layer "
            f"{i} differs from layer 0 in {found}. Do not stack this model; scan_layers=True loops "
            "over those neighbours that are equal."
        )
    scales = tuple(float(block.ffn.scale) for block in blocks)
    return StackedBlocks(_stacked([_unscaled(block) for block in blocks]), scales)


def unstack_blocks(stack: StackedBlocks) -> tuple[Any, ...]:
    """Return the blocks of a stack one by one.

    Raises:
        ValueError: the size of an array's first axis is not the number of layers.
    """
    arrays, static = eqx.partition(stack.block, eqx.is_array)
    for name, leaf in named_leaves(arrays).items():
        if leaf.shape[:1] != (len(stack),):
            raise ValueError(
                f"unstack_layers: expected a first axis of {len(stack)} layers, but {name} has "
                f"shape {leaf.shape}; in an optimiser state, a leaf needs its parameter's shape."
            )
    layers = (jax.tree.map(lambda leaf, i=i: leaf[i], arrays) for i in range(len(stack)))
    return tuple(
        _scaled(eqx.combine(layer, static), scale)
        for layer, scale in zip(layers, stack.scales, strict=True)
    )


def run_blocks(
    blocks: Sequence[Any] | StackedBlocks,
    x: Float[Array, "B L D"],
    mask: Bool[Array, "B L"] | None,
    caches: Sequence[LayerCache | None],
    return_cache: bool,
    keys: Sequence[jax.Array | None],
    *,
    scan: bool,
    rematerialise: bool,
    positions: Int32[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B L D"], tuple[LayerCache, ...]]:
    """Run `blocks` on `x`; return the last block's output and each block's cache after it.

    Args:
        blocks: `MegalodonBlock`s. Stacked ones are one loop, whatever `scan` is.
        x: input of the first block.
        mask: True where a token is valid.
        caches: cache of each block; None for an empty cache.
        return_cache: whether to return caches; False returns an empty tuple.
        keys: dropout key of each block, or None.
        scan: whether consecutive blocks with equal sizes, dtypes and backends become one loop.
            Their parameters and caches are then stacked at every call.
        rematerialise: whether the backward pass recomputes each block.
        positions: index of each token within its document, for packed documents.
    """
    run = _rematerialised if rematerialise else _compiled
    after: list[LayerCache | None] = []
    if isinstance(blocks, StackedBlocks):
        loop = blocks, tuple(caches), tuple(keys)
        x, after = _looped(run, loop, x, mask, return_cache, positions)
        return x, tuple(held for held in after if held is not None)
    for part in _parts(blocks, caches, scan):
        if part.stop - part.start == 1:
            i = part.start
            x, held = run(blocks[i], x, mask, caches[i], return_cache, keys[i], positions=positions)
            after.append(held)
        else:
            loop = tuple(blocks[part]), tuple(caches[part]), tuple(keys[part])
            x, several = _looped(run, loop, x, mask, return_cache, positions)
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
    positions: Int32[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B L D"], LayerCache | None]:
    """Run one block. Equal layers share one trace; outside of jit, one compiled program."""
    options = {"key": key, "scale": scale, "positions": positions}
    return _run(block, x, mask, cache, return_cache, **options)


def _rematerialised(
    block: Any,
    x: Float[Array, "B L D"],
    mask: Bool[Array, "B L"] | None,
    cache: LayerCache | None,
    return_cache: bool,
    key: jax.Array | None,
    scale: Float[Array, ""] | None = None,
    positions: Int32[Array, "B L"] | None = None,
) -> tuple[Float[Array, "B L D"], LayerCache | None]:
    options = {"key": key, "scale": scale, "positions": positions}
    return eqx.filter_checkpoint(_run)(block, x, mask, cache, return_cache, **options)


def _run(block: Any, x: Float[Array, "B L D"], *rest: Any, **options: Any) -> Any:
    # Parameters are gathered inside of the rematerialised function, so the gathered copies are not
    # kept for the backward pass.
    return gathered(block, x)(x, *rest, **options)


@eqx.filter_jit
def _looped(
    run: Callable[..., tuple[Array, LayerCache | None]],
    loop: tuple[Any, tuple[LayerCache | None, ...], tuple[jax.Array | None, ...]],
    x: Float[Array, "B L D"],
    mask: Bool[Array, "B L"] | None,
    return_cache: bool,
    positions: Int32[Array, "B L"] | None,
) -> tuple[Float[Array, "B L D"], list[LayerCache | None]]:
    """Run equal blocks in a loop; return output and caches. `loop` is (blocks, caches, keys)."""
    blocks, caches, keys = loop
    stack = blocks if isinstance(blocks, StackedBlocks) else stack_blocks(blocks)
    arrays, static = eqx.partition(stack.block, eqx.is_array)
    scales = jnp.asarray(np.array(stack.scales), x.dtype)

    def step(x: Array, layer: Any) -> tuple[Array, LayerCache | None]:
        arrays, held, key, scale = layer
        block = eqx.combine(arrays, static)
        return run(block, x, mask, held, return_cache, key, scale, positions)

    x, held = jax.lax.scan(step, x, (arrays, _stacked(caches), _stacked(keys), scales))
    return x, [jax.tree.map(lambda leaf, i=i: leaf[i], held) for i in range(len(stack))]


def _stacked(trees: Sequence[Any]) -> Any:
    """Stack the arrays of trees of equal structure; other leaves are taken from the first tree."""
    arrays, rest = eqx.partition(list(trees), eqx.is_array)
    return eqx.combine(jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays), rest[0])


def _parts(blocks: Sequence[Any], caches: Sequence[Any], scan: bool) -> Iterator[slice]:
    """Yield the slice of each run of consecutive equal blocks if `scan`, else of each block."""
    kinds = map(_kind, blocks, caches) if scan else range(len(blocks))
    start = 0
    for _, run in groupby(kinds):
        stop = start + len(list(run))
        yield slice(start, stop)
        start = stop


def _kind(block: Any, cache: LayerCache | None) -> Any:
    """Return a key that is equal for blocks which may share a program.

    It contains everything except array values and the FFN's scale.
    """
    leaves, structure = jax.tree.flatten((_unscaled(block), cache))
    return structure, [(x.shape, x.dtype) if eqx.is_array(x) else x for x in leaves]


def _unscaled(block: Any) -> Any:
    return _scaled(block, 1.0)


def _scaled(block: Any, scale: float) -> Any:
    # The scale is the only static value that differs between layers (with `rescale_nffn`).
    ffn = copy.copy(block.ffn)
    object.__setattr__(ffn, "scale", scale)
    return eqx.tree_at(lambda b: b.ffn, block, ffn)
