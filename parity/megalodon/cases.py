"""The case matrix: configurations, weights and inputs given to every implementation.

Weights and inputs depend on the case alone and are bytewise equal on every machine: raw bits of a
counter-based generator and exact arithmetic, without transcendental functions. Every parameter
differs from its initial value, because a parameter at 0 hides bugs that involve it. Source:
docs/parity.md "Same work".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.convert import read_config
from megalodon_jax.weight_files import read_tensors
from megalodon_jax.weights import HEAD, Role, Weight, weight_table
from parity.engine.measure.compare import Work
from parity.engine.measure.metrics import IGNORED
from parity.megalodon import COMMITTED, SUITE
from parity.megalodon.intermediates import axes_of, computed, trajectory

BYTE_LM = Path(__file__).parents[1] / "data" / "byte_lm"
"""Folder of the committed byte-level checkpoint, with held-out text; `training.json` has the
options with which the checkpoint was trained."""


def heldout_text(folder: Path) -> Path:
    """Return the path of the held-out text in a checkpoint's folder, `heldout.txt`; if the folder
    has none, the path of the committed text."""
    own = folder / "heldout.txt"
    return own if own.is_file() else BYTE_LM / "heldout.txt"


SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "model_dim": 32,
    "num_layers": 2,
    "num_heads": 2,
    "z_dim": 16,
    "value_dim": 48,
    "ffn_hidden_dim": 40,
    "cema_ndim": 4,
    "chunk_size": 16,
    "norm_num_groups": 4,
}
"""Sizes of the model in every case without a checkpoint; `Case.overrides` changes some."""
C = SMALL["chunk_size"]

_SPREAD = {
    Role.HEAD: 0.3,
    Role.EMBEDDING: 0.25,
    Role.BIAS: 0.1,
    Role.NORM: 0.2,
    Role.CEMA: 1.0,
    Role.QK_AFFINE: 0.3,
}


@dataclass(frozen=True)
class Batch:
    """Inputs of a model: ids (B, L) int32, labels (B, L) int32, mask (B, L) bool.

    Labels are not shifted. `mask` is True at valid tokens. `segments` (B, L) int32 is the number of
    each token's document in packed rows; None if each row is one text.
    """

    ids: np.ndarray
    labels: np.ndarray
    mask: np.ndarray
    segments: np.ndarray | None = None

    @property
    def padded(self) -> bool:
        """True if any token is masked."""
        return not self.mask.all()


@dataclass(frozen=True)
class Case:
    """One piece of work: a configuration with weights, inputs and the reason for testing it."""

    name: str
    why: str
    """Feature that the case tests, in words, for the page and for lists of cases."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the configuration that differ from `SMALL` and the defaults."""
    length: int = 3 * C + 5
    """Tokens per row, L."""
    batch_size: int = 2
    padding: Literal["none", "right", "left", "interior", "ragged"] = "none"
    """Position of the masked tokens of a row; "ragged": rows of a stream begin late or pause."""
    pad_inside: bool = False
    """Use the padding token as an ordinary, unmasked token of the text."""
    decay_shift: float = 0.0
    """Added to CEMA's parameters alpha and delta before the sigmoid; -7 gives a memory of a million
    tokens."""
    mean_shift: float = 0.0
    """Added to every value of the embedding, which gives activations a large common mean."""
    checkpoint: Path | None = None
    """Folder with configuration, weights and text; None: they are generated."""
    cuts: tuple[int, ...] = ()
    """Numbers of tokens per call of a cached stream; empty: one uncached call."""
    steps: int = 0
    """Number of AdamW steps; 0: no training (`parity.megalodon.trajectory`)."""
    labels_at_padding: bool = False
    """Keep labels where the mask is False, so that the loss itself must ignore these labels."""
    documents: tuple[tuple[int, ...], ...] = ()
    """Lengths of the documents packed into each row; empty: one text per row."""
    known_difference: str = ""
    """Id of the known difference because of which megalodon-hf is not compared on this case; empty:
    none."""
    oracle_only: str = ""
    """Reason other than a known difference why megalodon-hf is not compared on this case; empty:
    none."""

    @cached_property
    def config(self) -> MegalodonConfig:
        """The configuration, float32 throughout."""
        if self.checkpoint is not None:
            return read_config(self.checkpoint / "config.json")
        return MegalodonConfig(**(SMALL | self.overrides))

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """Weights by torch name, float32."""
        if self.checkpoint is not None:
            tensors = read_tensors(self.checkpoint / "model.safetensors")
            return {name: t for name, t in tensors.items() if name != HEAD or not self.config.tied}
        return {row.name: self._weight(row) for row in weight_table(self.config)}

    @property
    def _pad(self) -> int:
        """Token id at masked positions."""
        return self.config.pad_token_id or 0

    @cached_property
    def batch(self) -> Batch:
        """Token ids, labels, mask and document numbers of the case."""
        B, L, V = self.batch_size, self.length, self.config.vocab_size
        if self.checkpoint is not None:
            text = np.frombuffer(heldout_text(self.checkpoint).read_bytes(), np.uint8)
            ids = text[: B * L].reshape(B, L).astype(np.int32)
        else:
            pad = self._pad
            bits = _bits(f"{self.name}/ids", B * L).reshape(B, L)
            ids = (bits % np.uint64(V - 1)).astype(np.int32)
            ids += ids >= pad
            if self.pad_inside:
                ids[:, 3::7] = pad
        mask = self._mask()
        kept = mask | self.labels_at_padding
        labels = np.where(kept, ids, IGNORED).astype(np.int32)
        labels[:, 5::11] = IGNORED
        if self.config.output_size > 0:
            labels = np.where(labels >= self.config.output_size, IGNORED, labels).astype(np.int32)
        ids = np.where(mask, ids, self._pad).astype(np.int32)
        return Batch(ids, labels, mask, self._segments())

    @cached_property
    def definition(self) -> dict[str, Any]:
        """Fields of the case as JSON data; `hash` covers them, the weights and the inputs."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["why"], fields["overrides"]
        # Renaming the field must not change hashes: recordings were made under its former name.
        fields["seam"] = fields.pop("known_difference")
        # Omitting unused fields keeps the hashes, and so the recordings, of older cases valid.
        names = ("steps", "labels_at_padding", "documents", "seam", "oracle_only")
        unused = {name for name in names if not fields[name]}
        fields = {name: value for name, value in fields.items() if name not in unused}
        fields["checkpoint"] = self.checkpoint.name if self.checkpoint else None
        return fields | {"config": self.config.to_dict()}

    @cached_property
    def hash(self) -> str:
        """Hash (16 hex digits) of definition, weights and inputs; equal hashes mean equal work."""
        digest = hashlib.sha256(json.dumps(self.definition, sort_keys=True).encode())
        for name, tensor in sorted(self.weights.items()):
            digest.update(name.encode() + np.ascontiguousarray(tensor).tobytes())
        for tensor in (self.batch.ids, self.batch.labels, self.batch.mask):
            digest.update(tensor.tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names of the computed quantities, in order of computation."""
        if self.steps:
            return trajectory([row.name for row in weight_table(self.config)], self.steps)
        return computed(self.config)

    @cached_property
    def targets(self) -> np.ndarray:
        """Token id that each position of the logits should predict, (B, L); `IGNORED` for none."""
        targets = np.full_like(self.batch.labels, IGNORED)
        targets[:, :-1] = self.batch.labels[:, 1:]
        segments = self.batch.segments
        if segments is not None:
            # The last token of a document has no target.
            targets[:, :-1][segments[:, 1:] != segments[:, :-1]] = IGNORED
        return targets

    @cached_property
    def work(self) -> Work:
        """Data of the case for `Comparison`, such as hash, targets, mask and names of axes."""
        axes = partial(axes_of, config=self.config)
        return Work(self.name, self.hash, self.order, self.targets, self.valid, SUITE, axes)

    @property
    def has_reference(self) -> bool:
        """True if the case is compared with megalodon-hf too; False: with the oracle only."""
        return not (self.known_difference or self.oracle_only)

    @property
    def padding_differs(self) -> bool:
        """True if megalodon-hf gives other results at masked tokens, because its EMA includes them.

        The comparison with megalodon-hf then covers valid positions only. False for a stream, whose
        rows megalodon-hf runs one by one, without padding.
        """
        return self.batch.padded and self.config.mask_ema and not self.cuts

    @property
    def valid(self) -> np.ndarray:
        """Mask of valid positions, (B, L) bool."""
        return self.batch.mask

    def _segments(self) -> np.ndarray | None:
        """Return the number (B, L) of each token's document in its row; None without documents.

        Tokens after the listed lengths belong to the last document. If `length` is smaller than
        their sum, the row has fewer documents.
        """
        if not self.documents:
            return None
        segments = np.zeros((self.batch_size, self.length), np.int32)
        for row, lengths in enumerate(self.documents[: self.batch_size]):
            for end in np.cumsum(lengths)[:-1]:
                segments[row, end:] += 1
        return segments

    def _mask(self) -> np.ndarray:
        mask = np.ones((self.batch_size, self.length), bool)
        for row in range(self.batch_size):
            count = 4 + 9 * row
            match self.padding:
                case "right":
                    mask[row, self.length - count :] = False
                case "left":
                    mask[row, :count] = False
                case "interior":
                    mask[row, 7 : 7 + count] = False
                case "ragged":
                    mask[row, :count] = False
        if self.padding == "ragged":
            # Row 0 pauses at the end of call 2 and row 1 during all of call 3: a call of a row with
            # earlier tokens is padded in part, and in full.
            second, third = self.cuts[0] + self.cuts[1], self.cuts[2]
            mask[0, second - 13 : second] = False
            mask[1:2, second : second + third] = False
        return mask

    def _weight(self, row: Weight) -> np.ndarray:
        values = _normal(f"{self.name}/{row.name}", row.shape)
        spread = row.shape[-1] ** -0.5 if row.role is Role.LINEAR else _SPREAD[row.role]
        centre = 1.0 if row.name.endswith("ffn.norm.weight") else 0.0
        if row.name.endswith(("cema.alpha", "cema.delta")):
            centre = self.decay_shift
        if row.role is Role.EMBEDDING:
            centre = self.mean_shift
        return (centre + spread * values).astype(np.float32)


def _bits(name: str, count: int) -> np.ndarray:
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(count)


def _normal(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of independent values with mean 0 and variance 1, determined by `name`.

    Each is a scaled sum of four uniform 16-bit integers, which is equal on every machine.
    """
    quarters = _bits(name, int(np.prod(shape))).view(np.uint16).reshape(*shape, 4)
    centred = quarters.sum(-1, dtype=np.int64) - 2 * 65535
    return centred / float((4 * (65536**2 - 1) / 12) ** 0.5)


CUTS = (C + 5, C + 5, 1, 1)
"""Tokens per call of streamed cases: calls start and end inside chunks, exceed a chunk, or have a
single token."""
DOCUMENTS = ((7, C, 1, 2 * C + 12), (C + 7 + 2 * C + 13,))
"""Lengths of the documents of each packed row. Only the first document of a row starts at a chunk
boundary of the row."""
STREAMED_DOCUMENTS = ((7, C - 2, 1, C + 6), (C + 14, 13, 1), (sum(CUTS),))
"""Lengths of the documents of each row of a stream with the calls `CUTS`.

Some documents begin inside a call, some where a call begins, one with the last token. Three
continue over several calls, and one is a whole row."""
NEW_TOKENS = 12
"""Number of tokens generated greedily after the text of a stream."""

CASES = (
    Case("plain", "defaults; three chunks and a tail"),
    Case("length_c_minus_1", "one token short of a chunk", length=C - 1),
    Case("length_c", "exactly one chunk", length=C),
    Case("length_c_plus_1", "a tail of one token", length=C + 1),
    Case(
        "swiglu_rescale_scale",
        "gated FFN, layer-wise residual scale, scaled embedding",
        {"swiglu": True, "rescale_nffn": True, "scale_emb": True},
    ),
    Case("no_affine", "norms without parameters", {"norm_affine": False}),
    Case("multi_head", "four heads, another RoPE base", {"num_heads": 4, "rope_base": 500.0}),
    Case("untied_head", "a head of its own, narrower than the vocabulary", {"output_size": 41}),
    Case("right_padding", "padded rows of different lengths", padding="right"),
    Case(
        "left_padding_as_reference",
        "left padding that enters the EMA, as megalodon-hf lets it",
        {"mask_ema": False},
        padding="left",
    ),
    Case(
        "interior_padding_as_reference",
        "masked tokens inside the text that enter the EMA, as megalodon-hf lets them",
        {"mask_ema": False},
        padding="interior",
    ),
    Case("pad_inside", "the padding token as an ordinary token of the text", pad_inside=True),
    Case("slow_decay", "EMA memory of a million tokens, as trained models have", decay_shift=-7.0),
    Case("large_mean", "activations far from zero", mean_shift=30.0),
    Case(
        "stream",
        "a cached stream cut anywhere, chunk-local",
        length=sum(CUTS),
        cuts=CUTS,
    ),
    Case(
        "stream_tokens",
        "a cached stream token by token",
        length=C + 5,
        cuts=(1,) * (C + 5),
    ),
    Case(
        "stream_sliding",
        "a sliding window: where the text is cut decides the result",
        {"max_cache_len": 24},
        length=sum(CUTS),
        cuts=CUTS,
    ),
    Case(
        "stream_unbounded",
        "a cache that forgets nothing",
        {"cache_unbounded": True},
        length=sum(CUTS),
        cuts=CUTS,
    ),
    Case(
        "stream_ragged",
        "rows of different lengths in one cached stream, each as if alone; one begins late, "
        "two pause",
        length=sum(CUTS),
        batch_size=3,
        padding="ragged",
        cuts=CUTS,
    ),
    Case(
        "left_padding",
        "left padding kept out of the EMA",
        padding="left",
        known_difference="ema-mask",
    ),
    Case(
        "labels_at_padding",
        "labels that only the mask keeps out of the loss",
        length=C + 9,
        padding="right",
        labels_at_padding=True,
        known_difference="loss-mask",
    ),
    Case(
        "packed",
        "documents in a row, shorter and longer than a chunk, and a row of one; padding behind",
        length=sum(DOCUMENTS[0]),
        padding="right",
        documents=DOCUMENTS,
    ),
    Case(
        "stream_documents",
        "documents in rows of one cached stream, cut by its calls; each row goes on in its last",
        length=sum(CUTS),
        batch_size=3,
        cuts=CUTS,
        documents=STREAMED_DOCUMENTS,
        oracle_only="megalodon-hf keeps no document beside a cache; alone each is case 'stream'",
    ),
    Case(
        "adamw",
        "50 steps of AdamW",
        length=C + 1,
        steps=50,
    ),
    Case(
        COMMITTED,
        "a trained checkpoint on held-out text",
        length=128 + 29,
        batch_size=1,
        checkpoint=BYTE_LM,
    ),
)


def by_name(name: str) -> Case:
    """Return the case called `name`.

    Raises:
        ValueError: there is no such case; the message lists the names of all cases.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(
        f"there is no case {name!r}; choose one of {', '.join(case.name for case in CASES)}."
    )
