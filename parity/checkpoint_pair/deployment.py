"""Export of a model as a folder for megalodon-hf, verified before it is put in place.

The folder is read back and compared with the model bit by bit. Then megalodon-hf (with
`from_pretrained`) and the JAX model both load it and run one text. Their logits may differ by the
tolerance of the parity suite for JAX against megalodon-hf, with a noise floor measured for these
weights and this text. Source: docs/guide.md "Deployment".
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.convert import checkpoint_file, exported_tensors, read_config
from megalodon_jax.deployment import SHARD, write_pretrained
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.tensor_files import Tensor
from megalodon_jax.weight_files import open_tensors
from megalodon_jax.weights import HEAD, weight_table
from parity.checkpoint_pair.files import config_differences
from parity.checkpoint_pair.whole_model import text_case
from parity.engine.measure.compare import Comparison
from parity.engine.measure.measurement import Kind, Verdict
from parity.engine.measure.metrics import relative_l2
from parity.engine.measure.quantity import LOGITS
from parity.engine.measure.rounding_noise import row_blocks
from parity.megalodon.edges import MegalodonEdge
from parity.megalodon.noise_floors import forward_responses
from parity.megalodon.reference import identity, why_unavailable
from parity.megalodon.reference.deployed import Deployed
from parity.megalodon.runner import JaxSubject
from parity.megalodon.tolerance_table import NoiseFloors

TOKENS = 40
"""Largest number of tokens of the text on which an export is verified. The limit saves time: the
oracle runs the text eleven times in float64."""
EDGE = MegalodonEdge.JAX32_REFERENCE32
"""Pair of sides whose tolerance applies: JAX against megalodon-hf, both float32."""


class ExportError(ValueError):
    """The exported folder differs from the model. The new folder was removed; an earlier export at
    the same path was kept."""


@dataclass(frozen=True, slots=True)
class Export:
    """An exported folder, and the result of its verification."""

    folder: Path
    verified: bool
    """Whether megalodon-hf loaded the folder and its logits agree with the JAX model's."""
    reason: str
    """The verification in words, or the reason why there was none."""
    record: dict[str, Any]
    """Content of the file `export.json` in the folder."""


def export_pretrained(
    model: MegalodonForCausalLM,
    folder: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    generation: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    dtype: DTypeLike | None = None,
    max_shard_size: int | str = SHARD,
    verify: bool = True,
    report: Callable[[str], None] = lambda line: None,
) -> Export:
    """Write a folder that megalodon-hf can load, and verify it before it is put in place.

    Verification needs memory for the weights twice in float32 and once in float64. For a model that
    is too large for that, set `verify` to False and run `megalodon-numerics parity --torch FOLDER
    --layerwise` afterwards.

    Args:
        model: the model to export.
        folder: destination; an earlier export there is replaced.
        tokenizer: folder whose tokenizer files are copied.
        generation: generation settings: a mapping, a JSON file, or a folder with
            `generation_config.json`.
        dtype: storage dtype of all but the sensitive parameters; None: unchanged.
        max_shard_size: largest size of a weights file in bytes, as a number or text such as "5GB".
        verify: whether to verify the folder. If megalodon-hf is not installed, the folder is only
            read back; `Export.reason` then says so.
        report: called with a line of progress per step.

    Raises:
        ExportError: the folder differs from the model. The message names the first differing
            tensor, configuration field or logit. The new folder is removed; an earlier export at
            `folder` is kept.
        FileNotFoundError, ValueError: see `megalodon_jax.deployment.write_pretrained`.
    """

    def check(aside: Path) -> dict[str, Any]:
        if not verify:
            return {"verified": False, "reason": "not asked for"}
        report("reading the folder back")
        check_tensors(exported_tensors(model, dtype=dtype), aside)
        found = read_config(aside / "config.json")
        _check_config(model.config, found, "config.json")
        if missing := why_unavailable():
            return {
                "verified": False,
                "reason": f"read back bit by bit; megalodon-hf did not run: {missing}",
            }
        return verified(aside, report)

    record = write_pretrained(
        model,
        folder,
        tokenizer=tokenizer,
        generation=generation,
        dtype=dtype,
        max_shard_size=max_shard_size,
        check=check,
    )
    return Export(Path(folder), bool(record["verified"]), str(record["reason"]), record)


def check_tensors(expected: Mapping[str, Tensor], folder: Path) -> None:
    """Check that a folder has exactly the expected tensors, bit by bit.

    Args:
        expected: the model's tensors by name.
        folder: the exported folder with safetensors, in one file or in shards.

    Raises:
        ExportError: a tensor is missing, extra or different; the message names the first one.
    """
    held = open_tensors(checkpoint_file(folder))
    for name in (*expected, *held):
        if name not in held or name not in expected:
            where = "missing from" if name in expected else "no parameter of the model, but is in"
            raise ExportError(f"export: {name} is {where} the folder.")
    for name, tensor in expected.items():
        found = held[name]
        if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            raise ExportError(
                f"export: {name} is {found.dtype} {found.shape} in the folder, expected "
                f"{tensor.dtype} {tensor.shape}."
            )
        for rows in row_blocks(tensor.shape):
            block = tensor.read(rows) if tensor.shape else tensor.read()
            _check_equal(name, block, found.read(rows if tensor.shape else None), rows.start)


def verified(folder: Path, report: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Load a folder with megalodon-hf and with JAX, and compare parameters and logits.

    Args:
        folder: the exported folder.
        report: called with a line of progress per step.

    Returns:
        Fields of the folder's `export.json`: `verified` is True, `reason` describes the
        verification in words, `logits` has the error of the logits (relative L2), its bound and the
        number of tokens.

    Raises:
        ExportError: megalodon-hf reports problems in the folder, or the two sides differ; the
            message names the first differing tensor, field or logit.
        ReferenceUnavailableError: megalodon-hf cannot run here.
    """
    report("loading the folder in megalodon-hf")
    theirs = Deployed.load(folder)
    if theirs.problems:
        raise ExportError(
            f"export: megalodon-hf reports problems in the folder: {'; '.join(theirs.problems)}"
        )
    config = _plain(read_config(folder / "config.json"))
    _check_config(config, _plain(theirs.config), "megalodon-hf's configuration")
    held = open_tensors(checkpoint_file(folder))
    weights = {n: held[n].read().astype(np.float32) for n in (r.name for r in weight_table(config))}
    for name, tensor in theirs.tensors():
        stored = "model.embed.weight" if name == HEAD and config.tied else name
        if stored not in weights:
            raise ExportError(
                f"export: megalodon-hf has a parameter {name}, which is not in the folder."
            )
        _check_equal(name, weights[stored], tensor, 0, "megalodon-hf")
    report("running both sides, and the noise floor")
    ids = text(config)
    case = text_case("export", config, ids, weights, digest="export")
    ours, other = JaxSubject("float32").intermediates(case)[LOGITS], theirs.logits(ids)
    with np.errstate(all="ignore"):
        responses = {LOGITS: forward_responses(case)[LOGITS]}
    floors = NoiseFloors({case.name: {"hash": case.hash, "responses": responses}})
    rows = Comparison(case.work, EDGE, floors, EDGE.dtype).run({LOGITS: ours}, {LOGITS: other})
    bound = floors.bound(EDGE, Kind.LOGITS, case.work, LOGITS)
    error = relative_l2(ours, other)
    if any(row.verdict not in (Verdict.PASS, Verdict.INFO) for row in rows):
        raise ExportError(_first_logit(ours, other, bound, error))
    return {
        "verified": True,
        "reason": (
            f"megalodon-hf {identity()} loaded the folder, its parameters are bit-identical, and "
            f"its logits of {ids.size} tokens differ from JAX's by {error:.1e}, relative L2, "
            f"within {bound:.1e} ({EDGE}: noise floor of these weights and this text)"
        ),
        "logits": {"error": error, "bound": bound, "tokens": int(ids.size)},
    }


def text(config: MegalodonConfig) -> np.ndarray:
    """Return random token ids (1, L) without padding, the same in every run.

    L is about 9/8 of the chunk size, but at most `TOKENS` (and at least 2).
    """
    length = min(config.chunk_size + max(1, config.chunk_size // 8), TOKENS)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, max(2, length)))
    pad = config.pad_token_id
    if pad is not None and config.vocab_size > 1:
        ids = np.where(ids == pad, (pad + 1) % config.vocab_size, ids)
    return ids.astype(np.int32)


def _plain(config: MegalodonConfig) -> MegalodonConfig:
    """Return the configuration with float32 dtypes and the default GEMM backend."""
    return dataclasses.replace(config.with_dtype("float32"), gemm_backend="default")


def _check_config(expected: MegalodonConfig, found: MegalodonConfig, what: str) -> None:
    if rows := config_differences(found, expected):
        listing = "; ".join(f"{row.name}: {row.note}" for row in rows)
        raise ExportError(f"export: {what} describes another model: {listing}.")


def _check_equal(
    name: str, expected: np.ndarray, found: np.ndarray, start: int, side: str = "the folder"
) -> None:
    """Check that two arrays, which are rows of tensor `name`, are bit-identical.

    Args:
        name: name of the tensor.
        expected: rows of the model's tensor.
        found: the same rows of the tensor in the folder, or in megalodon-hf.
        start: index of the first of these rows in the tensor.
        side: where `found` comes from, for the message.

    Raises:
        ExportError: the arrays differ.
    """
    if found.shape != expected.shape:
        raise ExportError(
            f"export: {name} has shape {found.shape} in {side}, not {expected.shape}."
        )
    if expected.tobytes() == found.tobytes():
        return
    bits = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (expected, found))
    byte = int(np.argmax(np.not_equal(*bits)))
    at = np.unravel_index(byte // expected.itemsize, expected.shape) if expected.shape else ()
    place = [int(i) for i in at]
    if place:
        place[0] += start
    raise ExportError(
        f"export: {name} differs at {place}: the model has {expected[at]!s}, {side} {found[at]!s}; "
        "parameters must be bit-identical."
    )


def _first_logit(ours: np.ndarray, theirs: np.ndarray, bound: float, error: float) -> str:
    if ours.shape != theirs.shape:
        return f"export: logits have shape {ours.shape} in JAX, {theirs.shape} in megalodon-hf."
    rows, positions = ours.shape[:2]
    places = [(r, p) for r in range(rows) for p in range(positions)]
    # Name the first position whose error exceeds the bound; earlier ones differ within it.
    over = [at for at in places if not relative_l2(ours[at], theirs[at]) <= bound] or places
    row, position = over[0]
    pair = ours[over[0]].astype(np.float64), theirs[over[0]].astype(np.float64)
    token = int(np.argmax(np.nan_to_num(np.abs(pair[0] - pair[1]), nan=np.inf)))
    return (
        f"export: logits differ by {error:.1e}, relative L2, more than {bound:.1e} ({EDGE}: noise "
        f"floor of these weights and this text); first at row {row}, position {position}, most at "
        f"token {token}: JAX {pair[0][token]:.7g}, megalodon-hf {pair[1][token]:.7g}. `megalodon-"
        "numerics parity --torch` on the folder names the stage."
    )
