"""Runs of a single layer in JAX, megalodon-hf and the oracle, with only its weights in memory.

Source: docs/parity.md "Big checkpoints".
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.layers.linear import matmul
from megalodon_jax.layers.timestep_norm import TimestepNorm
from megalodon_jax.model import MegalodonBlock
from megalodon_jax.tensor_files import ArrayTensor
from megalodon_jax.weights import EMBEDDING, named_leaves, replace_leaves, weight_table
from parity.checkpoint_pair.files import Stored, WeightRow, compare_values
from parity.engine.measure.rounding_noise import SEEDS, floors, moved, row_blocks
from parity.megalodon import oracle
from parity.megalodon.intermediates import BLOCK_INTERMEDIATES, Intermediate, capture
from parity.megalodon.perturbation import of_weight
from parity.megalodon.reference import LiveReference

FINAL = -1
"""Layer index that stands for the final norm."""
FEW_SEEDS = 1
"""Number of seeds for the noise floor of an expensive layer."""
CHEAP = 1e8
"""Largest product of tokens and a layer's parameters at which the noise floor is measured with
`SEEDS` seeds.

Above this product `FEW_SEEDS` are enough: the response of a large tensor is a mean over its
elements, so one seed is nearly exact.
"""


def prefix_of(index: int) -> str:
    """Return the prefix of the torch names of a layer's parameters, or of the final norm's."""
    return "model.norm." if index == FINAL else f"model.layers.{index}."


def last_intermediate(index: int) -> str:
    """Return the name of the intermediate that is the output of a layer, or of the final norm."""
    return "norm" if index == FINAL else f"layers.{index}.{BLOCK_INTERMEDIATES[-1].name}"


def looked_up(stored: Stored, ids: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
    """Return the embeddings (B, L, D) of token ids (B, L), times sqrt(D) if the configuration has
    `scale_emb`.

    Only the used rows of the table are read.
    """
    used, place = np.unique(ids, return_inverse=True)
    rows = stored.tensors[EMBEDDING].take(used).astype(dtype)[place.reshape(ids.shape)]
    config = stored.config
    return rows * dtype(math.sqrt(config.model_dim)) if config.scale_emb else rows


class JaxLayer:
    """A layer of the JAX model, or its final norm, with its weights in memory.

    Args:
        ours: the JAX checkpoint.
        config: configuration of both sides.
        index: index of the layer, or `FINAL`.
    """

    def __init__(self, ours: Stored, config: MegalodonConfig, index: int):
        self.config, self.index, self._ours = config, index, ours
        names = named_leaves(self._frame("float32"))
        self._weights = {n: jnp.asarray(ours.wide(prefix_of(index) + n)) for n in names}

    @property
    def size(self) -> int:
        """Number of parameters (elements) of the layer."""
        return sum(leaf.size for leaf in self._weights.values())

    def weights(self, theirs: Stored) -> list[WeightRow]:
        """Return one row per parameter: whether its float32 values equal those of the torch
        checkpoint `theirs`."""
        module = named_leaves(self._module("float32"))
        rows = []
        for name, leaf in module.items():
            full = prefix_of(self.index) + name
            ours = ArrayTensor(np.asarray(leaf), self._ours.tensors[full].dtype)
            rows.append(compare_values(full, theirs.tensors[full], ours))
        return rows

    def run(self, x: np.ndarray, dtype: str = "float32") -> dict[str, np.ndarray]:
        """Return the layer's intermediates by name, given activations x (B, L, D).

        `dtype` is "float32" or "float64".
        """
        with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
            module, x_in = self._module(dtype), jnp.asarray(x, dtype)
            if self.index == FINAL:
                return {"norm": np.asarray(_normalised(module, x_in))}
            intermediates = _watched(module, x_in)
            full = {
                n.replace("layers.0.", f"layers.{self.index}.", 1): a
                for n, a in intermediates.items()
            }
            return {name: np.asarray(a) for name, a in full.items()}

    def _module(self, dtype: str) -> Any:
        weights = {name: leaf.astype(dtype) for name, leaf in self._weights.items()}
        return replace_leaves(self._frame(dtype), weights)

    def _frame(self, dtype: str) -> Any:
        # Only the residual scale of `rescale_nffn` depends on the index. Without it, all layers
        # share one frame, and so one compiled program.
        index = self.index if self.config.rescale_nffn or self.index == FINAL else 0
        return _frame(self.config.with_dtype(dtype), index)


@lru_cache(maxsize=4)
def _frame(config: MegalodonConfig, index: int) -> Any:
    """Return a layer or the final norm with shapes in place of arrays."""
    if index != FINAL:
        return eqx.filter_eval_shape(MegalodonBlock, config, index, key=jax.random.key(0))
    sizes = config.model_dim, config.norm_num_groups, config.norm_eps, config.norm_affine
    return eqx.filter_eval_shape(TimestepNorm, *sizes)


def jax_logits(config: MegalodonConfig, x: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Return the logits (B, L, V') of hidden states (B, L, D) and rows of the head (V', D)."""
    with jax.default_matmul_precision("highest"):
        return np.asarray(_projected(jnp.asarray(x), head, config.with_dtype("float32")))


@eqx.filter_jit
def _watched(block, x):
    params, static = eqx.partition(block, eqx.is_array)
    return capture(lambda params, x: eqx.combine(params, static)(x)[0])(params, x)[1]


@eqx.filter_jit
def _normalised(norm, x):
    return norm(x)[0]


@eqx.filter_jit
def _projected(x, head, config: MegalodonConfig):
    return matmul(x, jnp.asarray(head), config)


class ReferenceLayer:
    """A single layer of megalodon-hf in float32, into which the weights of any layer are loaded.

    Raises:
        ReferenceUnavailableError: megalodon-hf cannot run here.
    """

    def __init__(self, config: MegalodonConfig):
        self.config = config
        # A vocabulary of four, so that embedding and head take no memory.
        vocabulary = {"vocab_size": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        small = replace(config, num_layers=1, output_size=-1, **vocabulary)
        zeros = {row.name: np.zeros(row.shape, np.float32) for row in weight_table(small)}
        self._model = LiveReference().load(small, zeros).requires_grad_(False)
        self._block, self._index = self._model.model.layers[0], 0
        for parameter in self._block.parameters():
            parameter.data = parameter.new_empty(0)

    def run(self, theirs: Stored, index: int, x: np.ndarray) -> dict[str, np.ndarray]:
        """Return the intermediates (float32) of a layer or the final norm, by name.

        Args:
            theirs: the torch checkpoint.
            index: index of the layer, or `FINAL`.
            x: input activations (B, L, D).
        """
        if index == FINAL:
            with self._filled(self._model.model.norm, theirs, index) as norm:
                return {"norm": _array(norm(self._tensor(x))[0])}
        if self.config.rescale_nffn and index != self._index:
            # The residual scale follows from the index that the constructor gets.
            block = type(self._block)(self._model.config, index)
            self._block, self._index = block.requires_grad_(False).eval(), index
        intermediates: dict[str, np.ndarray] = {}
        hooks = [
            self._watch(row, f"layers.{index}.{row.name}", intermediates)
            for row in BLOCK_INTERMEDIATES
        ]
        try:
            with self._filled(self._block, theirs, index) as block:
                block(self._tensor(x))
        finally:
            for hook in hooks:
                hook.remove()
        return intermediates

    def logits(self, x: np.ndarray, head: np.ndarray) -> np.ndarray:
        """Compute in torch the logits (B, L, V') of hidden states x (B, L, D).

        `head` has the rows (V', D) of the head for a block of the vocabulary.
        """
        return _array(self._tensor(x) @ self._tensor(head).T)

    @contextlib.contextmanager
    def _filled(self, module: Any, theirs: Stored, index: int) -> Iterator[Any]:
        """Load the weights of layer `index` into a module within this context; free the weights
        afterwards."""
        for name, parameter in module.named_parameters():
            tensor = theirs.tensors[prefix_of(index) + name]
            parameter.data = parameter.new_empty(tensor.shape)
            for rows in row_blocks(tensor.shape):
                parameter[rows].copy_(self._tensor(tensor.read(rows)))
        yield module
        for parameter in module.parameters():
            parameter.data = parameter.new_empty(0)

    def _watch(self, row: Intermediate, name: str, intermediates: dict[str, np.ndarray]) -> Any:
        def keep(value: Any) -> None:
            value = value * value.sigmoid() if row.silu else value
            intermediates[name] = _array(value.transpose(1, 2) if row.channels_first else value)

        module = self._block.get_submodule(row.reference)
        if row.argument is not None:
            return module.register_forward_pre_hook(lambda _, given: keep(given[row.argument]))
        return module.register_forward_hook(
            lambda _, given, out: keep(out[0] if isinstance(out, tuple) else out)
        )

    def _tensor(self, array: np.ndarray) -> Any:
        # Only `parity.megalodon.reference` may import torch, so a parameter creates the tensor.
        return self._model.model.embed.weight.new_tensor(np.asarray(array, np.float32))


def return_freed_memory() -> None:
    """Make the C library (glibc) return buffers above 256 KiB to the system when they are freed.

    By default glibc keeps freed buffers of up to 32 MiB. Such buffers do not fit the next layer's
    tensors, so the process would grow with the number of layers. The setting affects the whole
    process. It has no effect with other C libraries.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if set_option is not None:
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            set_option(option, _LARGE)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGE = -1, -3, 1 << 18


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().contiguous().numpy().copy()


class OracleLayer:
    """A layer of the oracle, or its final norm, whose weights are read when they are used.

    Args:
        theirs: the torch checkpoint.
        index: index of the layer, or `FINAL`.
    """

    def __init__(self, theirs: Stored, index: int):
        self.theirs, self.index = theirs, index
        prefix = prefix_of(index)
        named = (t for name, t in theirs.tensors.items() if name.startswith(prefix))
        self.size = sum(math.prod(t.shape) for t in named)

    def run(self, x: np.ndarray, rng: np.random.Generator | None = None) -> dict[str, np.ndarray]:
        """Return the layer's intermediates by name, float64.

        Args:
            x: input activations (B, L, D).
            rng: generator of random signs for the noise floor: the input and every intermediate are
                perturbed by one float32 unit roundoff, weights by `perturbation.of_weight`, all
                relative to each element. None: nothing is perturbed.
        """
        intermediates: dict[str, np.ndarray] = {}

        def hook(name: str, value: np.ndarray) -> np.ndarray:
            intermediates[name] = value if rng is None else moved(value, rng)
            return intermediates[name]

        weights, start = Widened(self.theirs, prefix_of(self.index), rng), x.astype(np.float64)
        start = start if rng is None else moved(start, rng)
        context = _context(self.theirs.config, x.shape[:2], hook)
        if self.index == FINAL:
            hook("norm", oracle.timestep_norm(context, start, weights, "", ""))  # pyright: ignore[reportArgumentType]
        else:
            oracle.block(context, weights, start, self.index)  # pyright: ignore[reportArgumentType]
        return intermediates

    def floors(self, x: np.ndarray, exact: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the noise floor of every intermediate as relative L2, by name.

        It is the root mean square over several perturbed runs.

        Args:
            x: input activations (B, L, D).
            exact: unperturbed intermediates, from `run`.
        """
        seeds = SEEDS if self.size * x.shape[0] * x.shape[1] <= CHEAP else FEW_SEEDS
        return floors(exact, lambda rng: self.run(x, rng), seeds)


class Widened:
    """Weights of a checkpoint in float64, read at each access and not kept in memory.

    Args:
        stored: the checkpoint.
        prefix: prefix of the weights' names, which is left out of the keys.
        rng: generator of random signs: each element is multiplied by 1 +- the roundoff that
            `perturbation.of_weight` gives. None: weights are not perturbed.
    """

    def __init__(self, stored: Stored, prefix: str, rng: np.random.Generator | None):
        self._stored, self._prefix, self._rng = stored, prefix, rng

    def __getitem__(self, name: str) -> np.ndarray:
        full = self._prefix + name
        value = self._stored.tensors[full].read().astype(np.float64)
        return value if self._rng is None else moved(value, self._rng, of_weight(full, value.shape))


def _context(
    config: MegalodonConfig, shape: tuple[int, ...], hook: Callable[[str, Any], Any]
) -> oracle.Context:
    visible = oracle.visibility(config, shape[1], ())
    mask, positions = np.ones(shape, bool), np.broadcast_to(np.arange(shape[1]), shape)
    return oracle.Context(config, mask, visible, positions, True, hook, {}, frozenset())
