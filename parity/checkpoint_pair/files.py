"""Users' checkpoints: opened without reading all data, and compared by name and value.

Opening reads only headers. Tensors are read on access, by rows where possible, so that a checkpoint
may be larger than memory. Source: docs/parity.md "Big checkpoints", docs/parity.md "Fail closed".
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.convert import checkpoint_file, load_from_pretrained, read_config, unprefixed
from megalodon_jax.convert import state_dict as exported
from megalodon_jax.tensor_files import ArrayTensor, FileTensor, Tensor
from megalodon_jax.weight_files import open_tensors
from megalodon_jax.weights import EMBEDDING, HEAD, weight_table
from parity.engine.measure.measurement import Verdict
from parity.engine.measure.rounding_noise import row_blocks

_BUFFER = "inner.rope.inv_freq"
"""Suffix of the names of buffers (RoPE's rates), which are ignored because they are no
parameters."""
# Fields of the configuration that do not affect an uncached evaluation: precision, streams and
# training.
_SILENT = frozenset(
    {
        *("max_cache_len", "cache_unbounded", "max_positions", "mask_ema"),
        *("dropout", "attention_dropout", "hidden_dropout", "init_mode", "use_checkpoint"),
        "scan_layers",
        *("bos_token_id", "eos_token_id", "gemm_backend"),
        *("param_dtype", "compute_dtype", "accum_dtype", "softmax_dtype"),
    }
)


@dataclass(frozen=True)
class Stored:
    """An open checkpoint: configuration and tensors."""

    label: str
    """Name of the side in messages: "torch" or "jax"."""
    path: Path
    config: MegalodonConfig
    tensors: dict[str, Tensor]
    """Parameters by torch name."""
    lazy: bool
    """Whether all tensors are in safetensors files and read on use. False: some are in a torch file
    or in memory."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors in float32, the dtype in which they are compared."""
        return 4 * sum(math.prod(t.shape) for t in self.tensors.values())

    def wide(self, name: str) -> np.ndarray:
        """Return the tensor called `name` in float32."""
        return self.tensors[name].read().astype(np.float32)

    def problems(self, config: MegalodonConfig) -> list[WeightRow]:
        """Return a `WeightRow` for each tensor that a model of this configuration would reject.

        These are missing, extra and differently shaped tensors, and tensors whose dtype is no
        float. The verdict of the rows is "not comparable". No values are read.
        """
        table = {row.name: row.shape for row in weight_table(config)}
        allowed = set(table) | ({HEAD} if config.tied else set())
        rows = [self._problem(n, f"missing, expected {table[n]}") for n in table if n not in self]
        for name, tensor in self.tensors.items():
            if name not in allowed:
                rows.append(self._problem(name, f"extra, {tensor.shape}"))
            elif name in table and tensor.shape != table[name]:
                rows.append(self._problem(name, f"shape {tensor.shape}, expected {table[name]}"))
            elif not tensor.dtype.startswith(("float", "bfloat")):
                rows.append(self._problem(name, f"dtype {tensor.dtype}, expected a float"))
        return rows

    def untied(self) -> list[WeightRow]:
        """Compare a tied head, if it is stored, with the embedding.

        Return a list of one failing `WeightRow` if the values differ, else an empty list.
        """
        if not self.config.tied or HEAD not in self or EMBEDDING not in self:
            return []
        row = compare_values(HEAD, self.tensors[EMBEDDING], self.tensors[HEAD])
        if row.verdict is Verdict.PASS:
            return []
        note = f"{self.label}: the head is tied and differs from {EMBEDDING}: {row.note}"
        return [dataclasses.replace(row, verdict=Verdict.FAIL, note=note)]

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def _problem(self, name: str, note: str) -> WeightRow:
        return WeightRow(name, Verdict.NOT_COMPARABLE, f"{self.label}: {note}")


@dataclass(frozen=True, slots=True)
class WeightRow:
    """Result of comparing one parameter, or one field of the configurations."""

    name: str
    """Torch name of the parameter, or `config.<field>`."""
    verdict: Verdict
    note: str = ""
    """The difference in words; may be empty."""
    rel_l2: float = math.nan
    """Relative L2 difference in float32; NaN if values were not compared or are not finite,
    infinite if torch's are all 0 and JAX's are not."""
    hashes: tuple[str, str] = ("", "")
    """Hashes of the values in float32, first of the torch side, then of the JAX side; equal hashes
    mean equal values. Both are empty if values were not compared."""


def open_checkpoint(label: str, path: Path, config: Path | MegalodonConfig | None = None) -> Stored:
    """Open a checkpoint, read its headers and return it as a `Stored`.

    A torch file (`.bin`, `.pt`) in torch's zip format is memory-mapped; an older one is read as a
    whole.

    Args:
        label: name of the side in messages: "torch" or "jax".
        path: a directory of Hugging Face or of this project, a safetensors file or index, or a
            torch file.
        config: the configuration or the path of its `config.json`; None: the `config.json` beside
            the file.

    Raises:
        FileNotFoundError: there is no checkpoint or no configuration.
        ValueError: a file is corrupt or truncated, a shard is missing, or the index contradicts the
            shards.
    """
    file = checkpoint_file(path)
    if not isinstance(config, MegalodonConfig):
        config = read_config(file.parent / "config.json" if config is None else config)
    # The GEMM backend is an option of a run and irrelevant for weights.
    config = dataclasses.replace(config, gemm_backend="default")
    named = unprefixed(open_tensors(file), str(file)).items()
    tensors = {name: t for name, t in named if not name.endswith(_BUFFER)}
    lazy = all(isinstance(tensor, FileTensor) for tensor in tensors.values())
    return Stored(label, path, config, tensors, lazy)


def converted(theirs: Stored) -> Stored:
    """Load a torch checkpoint into the JAX model; return the model's weights as the JAX side.

    Raises:
        ValueError: the checkpoint does not match its configuration.
    """
    model = load_from_pretrained(theirs.path, theirs.config)
    tensors: dict[str, Tensor] = {n: ArrayTensor(a) for n, a in exported(model).items()}
    return Stored("jax", theirs.path, theirs.config, tensors, lazy=False)


def config_differences(theirs: MegalodonConfig, ours: MegalodonConfig) -> list[WeightRow]:
    """Return a "not comparable" `WeightRow` for each field in which two configurations differ.

    Fields that do not affect an evaluation without a cache, such as dtypes, are ignored.
    """
    left, right = theirs.to_dict(), ours.to_dict()
    left["rope_base"], right["rope_base"] = theirs.effective_rope_base, ours.effective_rope_base
    left["output_size"], right["output_size"] = theirs.tied, ours.tied
    return [
        WeightRow(f"config.{name}", Verdict.NOT_COMPARABLE, f"torch {value!r}, jax {right[name]!r}")
        for name, value in left.items()
        if name not in _SILENT and value != right[name]
    ]


def compare_values(name: str, theirs: Tensor, ours: Tensor) -> WeightRow:
    """Compare two tensors of equal shape by value in float32, a few rows at a time.

    The result passes only if all values are finite and equal. If only the stored dtypes differ, it
    passes with a note.
    """
    digests = [hashlib.sha256()] * 2
    spoiled, difference, scale, only_rounded = [0, 0], 0.0, 0.0, True
    for rows in row_blocks(theirs.shape):
        stored = theirs.read(rows), ours.read(rows)
        left, right = (np.ascontiguousarray(a, np.float32) for a in stored)
        same = np.array_equal(left, right)
        if not same and digests[0] is digests[1]:
            digests[1] = digests[0].copy()
        digests[0].update(left.data)
        if digests[0] is not digests[1]:
            digests[1].update(right.data)
        for i, block in enumerate((left, right)[: 1 if same else 2]):
            spoiled[i] += int(block.size - np.isfinite(block).sum())
        scale += float(np.sum(np.square(left, dtype=np.float64)))
        if not same and not any(spoiled):
            difference += float(np.sum(np.square(right - left, dtype=np.float64)))
            only_rounded = only_rounded and _equal_in_bfloat16(left, right)
    hashes = digests[0].hexdigest()[:16], digests[1].hexdigest()[:16]
    types = "" if theirs.dtype == ours.dtype else f"stored as {theirs.dtype} and {ours.dtype}"
    if any(spoiled):
        counts = f"{spoiled[0]} values in torch, {spoiled[1]} in jax"
        return WeightRow(name, Verdict.FAIL, f"not finite: {counts}", math.nan, hashes)
    if difference == 0.0:
        return WeightRow(name, Verdict.PASS, types, 0.0, hashes)
    note = "values differ" + (", equal once rounded to bfloat16" if only_rounded else "")
    note += f"; {types}" if types else ""
    size = math.sqrt(difference / scale) if scale else math.inf
    return WeightRow(name, Verdict.FAIL, note, size, hashes)


def compare_all(theirs: Stored, ours: Stored) -> Iterator[WeightRow]:
    """Compare every parameter of two checkpoints that match `theirs.config`; yield the results."""
    for row in weight_table(theirs.config):
        yield compare_values(row.name, theirs.tensors[row.name], ours.tensors[row.name])


def _equal_in_bfloat16(left: np.ndarray, right: np.ndarray) -> bool:
    import ml_dtypes

    return np.array_equal(left.astype(ml_dtypes.bfloat16), right.astype(ml_dtypes.bfloat16))
