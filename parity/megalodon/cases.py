"""The case matrix: configuration, weights and inputs that every implementation is given.

Weights and inputs are functions of the case alone and the same bytes on every machine: raw bits of
a counter-based generator and exact arithmetic, no transcendental function. Every parameter is
non-trivial, because a parameter at its initial 0 hides the bugs that touch it. Source:
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
from megalodon_jax.convert import read_config, read_tensors
from megalodon_jax.weights import HEAD, Role, Weight, weight_table
from parity.engine.compare import Work
from parity.engine.metrics import IGNORED
from parity.megalodon.intermediates import axes_of, computed, trajectory

SUITE = "parity"
"""What measurements of Megalodon are filed under."""
BYTE_LM = Path(__file__).parents[1] / "data" / "byte_lm"
"""The committed checkpoint: a byte-level model trained by `train`, with held-out text."""

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
    """What a model is fed: ids (B, L) int32, labels (B, L) int32, mask (B, L) bool.

    segments (B, L) int32 has the documents of packed rows, None where rows are one text.
    """

    ids: np.ndarray
    labels: np.ndarray
    mask: np.ndarray
    segments: np.ndarray | None = None

    @property
    def padded(self) -> bool:
        """Whether any position is masked."""
        return not self.mask.all()


@dataclass(frozen=True)
class Case:
    """One piece of work: a configuration with weights, inputs and a reason to exist."""

    name: str
    why: str
    overrides: dict[str, Any] = field(default_factory=dict)
    length: int = 3 * C + 5
    batch_size: int = 2
    padding: Literal["none", "right", "left", "interior"] = "none"
    pad_inside: bool = False
    decay_shift: float = 0.0
    """Added to the logits of alpha and delta: -7 each is a memory of a million tokens."""
    mean_shift: float = 0.0
    """Added to the embedding: activations with a large common mean."""
    checkpoint: Path | None = None
    cuts: tuple[int, ...] = ()
    """How a cached stream cuts the text into calls; empty means one uncached call."""
    steps: int = 0
    """How many steps of AdamW are taken; 0 means none (`parity.megalodon.trajectory`)."""
    labels_at_padding: bool = False
    """Leave labels where the mask is False, for the loss to leave out by itself."""
    documents: tuple[tuple[int, ...], ...] = ()
    """Lengths of the documents packed into each row; empty means one text per row."""
    known_difference: str = ""
    """The deliberate difference (`known_differences`) that keeps the reference out of this case."""
    oracle_only: str = ""
    """Why the reference takes no part although nothing differs deliberately; empty if it does."""

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
        """What stands at masked positions."""
        return self.config.pad_token_id or 0

    @cached_property
    def batch(self) -> Batch:
        """The inputs."""
        B, L, V = self.batch_size, self.length, self.config.vocab_size
        if self.checkpoint is not None:
            text = np.frombuffer((self.checkpoint / "heldout.txt").read_bytes(), np.uint8)
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
        """What identifies the case besides its bytes, as JSON values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["why"], fields["overrides"]
        # The hash of a case knows the field by the name it had when recordings were made.
        fields["seam"] = fields.pop("known_difference")
        # What a case does not use leaves its hash, and so its recording, as it was.
        names = ("steps", "labels_at_padding", "documents", "seam", "oracle_only")
        unused = {name for name in names if not fields[name]}
        fields = {name: value for name, value in fields.items() if name not in unused}
        fields["checkpoint"] = self.checkpoint.name if self.checkpoint else None
        return fields | {"config": self.config.to_dict()}

    @cached_property
    def hash(self) -> str:
        """Hash of definition, weights and inputs: equal hashes mean equal work."""
        digest = hashlib.sha256(json.dumps(self.definition, sort_keys=True).encode())
        for name, tensor in sorted(self.weights.items()):
            digest.update(name.encode() + np.ascontiguousarray(tensor).tobytes())
        for tensor in (self.batch.ids, self.batch.labels, self.batch.mask):
            digest.update(tensor.tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names of what is computed, in order."""
        if self.steps:
            return trajectory([row.name for row in weight_table(self.config)], self.steps)
        return computed(self.config)

    @cached_property
    def targets(self) -> np.ndarray:
        """The id that is right for each position of the logits (B, L), `IGNORED` for none."""
        targets = np.full_like(self.batch.labels, IGNORED)
        targets[:, :-1] = self.batch.labels[:, 1:]
        segments = self.batch.segments
        if segments is not None:
            # The last token of a document has no target.
            targets[:, :-1][segments[:, 1:] != segments[:, :-1]] = IGNORED
        return targets

    @cached_property
    def work(self) -> Work:
        """What the comparer needs to know of it."""
        axes = partial(axes_of, config=self.config)
        return Work(self.name, self.hash, self.order, self.targets, self.valid, SUITE, axes)

    @property
    def has_reference(self) -> bool:
        """Whether megalodon-hf is compared with."""
        return not (self.known_difference or self.oracle_only)

    @property
    def padding_differs(self) -> bool:
        """Whether megalodon-hf computes something else at padding, which it lets into its EMA: it
        is compared with at valid positions only. The rows of a stream it is given one by one.
        """
        return self.batch.padded and self.config.mask_ema and not self.cuts

    @property
    def valid(self) -> np.ndarray:
        """Where tokens are valid, (B, L) bool."""
        return self.batch.mask

    def _segments(self) -> np.ndarray | None:
        """Return the number of each token's document in its row; what is left over is of the last
        one, and a shortened case has fewer.
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
    """Sum of four 16-bit uniforms, centred and scaled to unit variance: exact in float64."""
    quarters = _bits(name, int(np.prod(shape))).view(np.uint16).reshape(*shape, 4)
    centred = quarters.sum(-1, dtype=np.int64) - 2 * 65535
    return centred / float((4 * (65536**2 - 1) / 12) ** 0.5)


CUTS = (C + 5, C + 5, 1, 1)
"""Calls that start and end inside chunks, longer than a chunk and single tokens."""
DOCUMENTS = ((7, C, 1, 2 * C + 12), (C + 7 + 2 * C + 13,))
"""Lengths of documents in packed rows: none but the first begins where a chunk of the row does."""
STREAMED_DOCUMENTS = ((7, C - 2, 1, C + 6), (C + 14, 13, 1), (sum(CUTS),))
"""Lengths of documents that the calls of `CUTS` cut: they begin inside a call, where one begins and
with the last token; two go on over several calls, and one is the row."""
NEW_TOKENS = 12
"""Tokens a stream goes on for, greedily, after its text."""

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
        "rows of different lengths in one cached stream, each as if alone; one begins late",
        length=sum(CUTS),
        batch_size=3,
        padding="left",
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
        "byte_lm",
        "a trained checkpoint on held-out text",
        length=128 + 29,
        batch_size=1,
        checkpoint=BYTE_LM,
    ),
)


def by_name(name: str) -> Case:
    """Return the case called `name`.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"no case {name!r}; there are {', '.join(case.name for case in CASES)}.")
