"""Named leaves (parameter arrays) of any container of parameters, and reproducible samples of them.

Supported containers are pytrees (a Megalodon, another Equinox module, a Flax-style dict), state
dicts of torch tensors, and checkpoints on disk. Leaves are read one at a time. torch is not
imported; an object with `detach` and `cpu` counts as a tensor.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.convert import checkpoint_file
from megalodon_jax.tensor_files import Tensor, printable
from megalodon_jax.torch_files import TorchTensor
from megalodon_jax.weight_files import open_tensors
from megalodon_jax.weights import HEAD, Role, named_leaves, role_of, weight_table

_BUFFER = "inner.rope.inv_freq"
_BUFFERS = ("running_mean", "running_var", "inv_freq")
_MEGALODON = re.compile(
    r"lm_head\.weight|model\.(embed|norm|layers\.\d+\.(attn|ffn))\..+", flags=re.ASCII
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One parameter: its metadata, and a function that reads it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the stored dtype."""
    load: Callable[[], np.ndarray]
    """Function that reads the values in the stored dtype. Those in formats that NumPy lacks, such
    as bfloat16, may be widened to float32, which is exact."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        """Whether the leaf holds real floating-point numbers that an optimiser can update.

        False for buffers, and for formats that pack two numbers into a byte.
        """
        packed = self.dtype.endswith("_x2")
        return self.dtype.startswith(("float", "bfloat")) and not packed and not self.buffer

    @property
    def buffer(self) -> bool:
        """Whether the name is that of a running statistic or RoPE table, which is not trained."""
        return self.name.endswith(_BUFFERS)

    def read(self) -> np.ndarray:
        """Return the values in float32, in the leaf's shape."""
        return np.asarray(self.load(), np.float32)

    def non_finite(self) -> int:
        """Return the number of values that are NaN or infinite."""
        return int(self.size - np.count_nonzero(np.isfinite(self.read())))


def leaves_of(source: Any) -> dict[str, Leaf]:
    """Return the leaves of a pytree, torch state dict or checkpoint by name, in the source's order.

    A Megalodon's table of RoPE frequencies, which is no parameter, is left out.

    Args:
        source: a pytree of arrays; a mapping from names to torch tensors or to `Leaf`s; or the path
            of a safetensors or torch file, a shard index, or a directory with one of them.

    Raises:
        FileNotFoundError: the path holds no checkpoint.
        ValueError: the source has no array, or the file is corrupt.
    """
    if isinstance(source, Mapping) and any(isinstance(x, Leaf) for x in source.values()):
        leaves = dict(source)
    elif isinstance(source, (str, os.PathLike)):
        leaves = stored_leaves(open_tensors(checkpoint_file(Path(source))))
    elif isinstance(source, Mapping) and any(_is_tensor(t) for t in source.values()):
        leaves = {n: _from_tensor(n, t) for n, t in source.items() if _is_tensor(t)}
    else:
        arrays = {n: x for n, x in named_leaves(source).items() if hasattr(x, "shape")}
        leaves = {n: _from_array(n, x) for n, x in arrays.items()}
    leaves = {n: leaf for n, leaf in leaves.items() if not n.endswith(_BUFFER)}
    if not leaves:
        raise ValueError(
            f"no parameters in this {type(source).__name__}: expected a pytree of arrays, a state "
            "dict of tensors or the path of a checkpoint; pass the parameters themselves, such as "
            "model.state_dict() or eqx.filter(model, eqx.is_array)."
        )
    return leaves


def stored_leaves(tensors: Mapping[str, Tensor]) -> dict[str, Leaf]:
    """Return the leaves of a file's tensors by name, with unprintable characters escaped.

    A torch tensor stored under several names, such as a tied head, is one parameter; its first name
    is used.
    """
    leaves, places = {}, set()
    for name, tensor in tensors.items():
        shown = printable(name)
        if isinstance(tensor, TorchTensor) and (place := tensor.place()) is not None:
            if place in places:
                continue
            places.add(place)
        leaves[shown] = Leaf(shown, tensor.shape, tensor.dtype, tensor.read)
    return leaves


def leaf_called(name: str, leaves: Mapping[str, Leaf]) -> Leaf | None:
    """Return the leaf of this name, or the only leaf whose name differs by a dotted prefix.

    Either name may have the prefix. Wrappers add prefixes: `module.fc.weight` and `fc.weight` are
    the same parameter. Return None if no leaf fits, or if several fit.
    """
    name = printable(name)
    if name in leaves:
        return leaves[name]
    fitting = [x for n, x in leaves.items() if n.endswith(f".{name}") or name.endswith(f".{n}")]
    return fitting[0] if len(fitting) == 1 else None


def parameters_of(source: Any) -> dict[str, Leaf]:
    """Return the leaves of `source` after checking that an optimiser could train all of them.

    Raises:
        ValueError: see `leaves_of`; or leaves hold integers, NaN or infinity. The message counts
            these leaves and names the first.
    """
    leaves = leaves_of(source)
    integers = [f"{n} ({leaf.dtype})" for n, leaf in leaves.items() if not leaf.floating]
    if integers:
        raise ValueError(
            f"expected floating-point parameters, found {len(integers)} leaves that are not: "
            f"{listed(integers)}. Pass a tree without these leaves; optimisers do not update them."
        )
    spoiled = [f"{n} ({count:,})" for n, leaf in leaves.items() if (count := leaf.non_finite())]
    if spoiled:
        raise ValueError(
            f"expected finite parameters, found NaN or infinity in {len(spoiled)} leaves: "
            f"{listed(spoiled)}. Restore an earlier checkpoint without such values."
        )
    return leaves


def check_names(leaves: Mapping[str, Leaf], config: MegalodonConfig) -> None:
    """Check that the leaves are those of a Megalodon of this configuration.

    A stored head is allowed even if the configuration ties the head to the embedding.

    Raises:
        ValueError: a parameter of the model is missing or has another shape, or a leaf is none of
            its parameters.
    """
    table = {row.name: row.shape for row in weight_table(config)}
    missing = [n for n in table if n not in leaves]
    extra = [n for n in leaves if n not in table and n != HEAD]
    shapes = {n: leaves[n].shape for n in table if n in leaves}
    wrong = [f"{n} {shape}" for n, shape in shapes.items() if shape != table[n]]
    if missing or extra or wrong:
        raise ValueError(
            "these are not the weights of a Megalodon of this configuration: "
            f"{len(missing)} missing ({listed(missing)}), {len(extra)} of another model "
            f"({listed(extra)}), {len(wrong)} of another shape ({listed(wrong)}). Pass the "
            "config.json the checkpoint was trained with, or no config.json to probe it as any "
            "other model."
        )


def is_megalodon(names: Iterable[str]) -> bool:
    """Whether all names are names of a Megalodon's parameters; not all of them need to be given."""
    return all(_MEGALODON.fullmatch(name) for name in names)


def decays(name: str, shape: tuple[int, ...], megalodon: bool) -> bool:
    """Whether weight decay applies to a parameter.

    In a Megalodon it applies to linear weights and to adapters, in other models to parameters with
    at least two axes.
    """
    return role_of(name) in (Role.LINEAR, Role.LORA) if megalodon else len(shape) >= 2


def kind_of(name: str) -> str:
    """Return the kind of a leaf: its path with * for numbers, as `model.layers.*.attn.norm.weight`.

    Leaves of one kind are the same parameter in different layers.
    """
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)


def sample(values: np.ndarray, name: str, size: int, matrix: bool = False) -> np.ndarray:
    """Return a sample of about `size` elements of a leaf, float32, drawn without replacement.

    Args:
        values: values of the leaf; two axes if `matrix`.
        name: name of the leaf, which seeds the draw: a leaf always has the same sample.
        size: number of elements to draw; a smaller leaf is returned whole.
        matrix: whether to return a matrix instead of a vector: the submatrix of randomly drawn rows
            and columns, with about the leaf's ratio of rows to columns.
    """
    rng = np.random.default_rng(seed_of(name))
    if values.size <= size:
        part = values if matrix else values.reshape(-1)
    elif not matrix:
        drawn = np.sort(rng.choice(values.size, size, replace=False))
        # Indexed by axis: flattening a strided view would copy the whole array.
        part = values[np.unravel_index(drawn, values.shape)]
    else:
        scale = math.sqrt(size / values.size)
        sizes = [max(2, int(n * scale)) for n in values.shape]
        rows, columns = (
            np.sort(rng.choice(n, k, replace=False))
            for n, k in zip(values.shape, sizes, strict=True)
        )
        part = values[np.ix_(rows, columns)]
    return np.asarray(part, np.float32)


def seed_of(name: str) -> int:
    """Return the random seed of a leaf: the CRC-32 of its path, equal on every machine and run."""
    return zlib.crc32(name.encode())


def listed(names: list[str], most: int = 4) -> str:
    """Return text such as "a, b and 3 more", with the first `most` names; "none" if empty."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more if names else "none"


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "cpu")


def _from_array(name: str, array: Any) -> Leaf:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return Leaf(name, tuple(array.shape), "key", lambda: np.zeros(array.shape, np.uint32))
    return Leaf(name, tuple(array.shape), np.dtype(array.dtype).name, lambda: np.asarray(array))


def _from_tensor(name: str, tensor: Any) -> Leaf:
    dtype = str(tensor.dtype).removeprefix("torch.")

    def load() -> np.ndarray:
        host = tensor.detach().cpu()
        # NumPy has no native bfloat16; widening to float32 is exact.
        return (host.float() if dtype.startswith(("bfloat", "float8")) else host).numpy()

    return Leaf(name, tuple(tensor.shape), dtype, load)
