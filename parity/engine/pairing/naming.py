"""Similarity of parameter names from different libraries.

Names are dotted paths such as `model.layers.0.self_attn.q_proj.weight`. Their words are translated
by the tables below and compared as bags of words. Their numbers, which are indices of layers,
experts and blocks, are compared separately.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

LEAVES = {
    # Flax and Haiku call a matrix `kernel` or `w`, a norm's factor `scale`, a table `embedding`.
    "kernel": "weight",
    "w": "weight",
    "scale": "weight",
    "embedding": "weight",
    "gamma": "weight",
    "g": "weight",
    "beta": "bias",
    "b": "bias",
    "offset": "bias",
    "running_mean": "mean",
    "moving_mean": "mean",
    "running_var": "var",
    "moving_var": "var",
    "moving_variance": "var",
    "variance": "var",
}
"""Translation of the last part of a name into torch's vocabulary."""
WORDS = {
    "attn": "attention",
    "crossattention": "cross attention",
    "enc": "encoder",
    "dec": "decoder",
    "q": "query",
    "k": "key",
    "v": "value",
    "o": "output",
    "out": "output",
    "proj": "projection",
    "projections": "projection",
    "ln": "norm",
    "layernorm": "norm",
    "rmsnorm": "norm",
    "bn": "norm",
    "batchnorm": "norm",
    "norms": "norm",
    "normalization": "norm",
    "wte": "token embedding",
    "wpe": "position embedding",
    "emb": "embedding",
    "embed": "embedding",
    "embeds": "embedding",
    "embeddings": "embedding",
    "pos": "position",
    "positions": "position",
    "positional": "position",
    "tok": "token",
    "tokens": "token",
    "word": "token",
    "words": "token",
    "ffn": "mlp",
    "ff": "mlp",
    "feedforward": "mlp",
    "h": "layer",
    "layers": "layer",
    "block": "layer",
    "blocks": "layer",
    "resblocks": "layer",
    "stages": "stage",
    "fc": "dense",
    "linear": "dense",
    "lin": "dense",
    "convolution": "conv",
    "cls": "classifier",
    "head": "classifier",
    "f": "final",
}
"""Translation of words inside names into common words."""
SEGMENTS = {
    "EncDecAttention": "cross attention",
    "encoder_attn": "cross attention",
    # Llama as its authors released it.
    "wq": "query projection",
    "wk": "key projection",
    "wv": "value projection",
    "wo": "output projection",
    "w1": "gate projection",
    "w2": "down projection",
    "w3": "up projection",
    # The two matrices of a feed-forward block.
    "fc1": "up projection",
    "fc2": "down projection",
    "fc_in": "up projection",
    "fc_out": "down projection",
    "c_fc": "up projection",
    "lin1": "up projection",
    "lin2": "down projection",
    "dense_h_to_4h": "up projection",
    "dense_4h_to_h": "down projection",
    "intermediate": "up",
}
"""Translation of whole path segments that cannot be translated word by word."""
_NORM = re.compile(r"(layer|rms|batch|group)_?norm", re.IGNORECASE)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NUMBER = re.compile(r"\d+")
SHORTEST = 3
"""Smallest number of letters of a word that may count as the abbreviation of a longer one."""
RANK = 0.9
"""Similarity of numbers that agree only as ranks, such as layers counted from 1 and from 0."""


def leaf(name: str) -> str:
    """Return the part of a name after its last dot."""
    return name.rpartition(".")[2]


def parent(name: str, levels: int = 1) -> str:
    """Return a name without its last `levels` parts, which dots separate."""
    return ".".join(name.split(".")[:-levels])


def pattern(name: str) -> str:
    """Return a name with placeholders for its numbers: `layers.{}.norm{}.weight`."""
    return _NUMBER.sub("{}", name)


@functools.lru_cache(maxsize=1 << 16)
def numbers(name: str) -> tuple[int, ...]:
    """Return the numbers in a name, in order: (0, 2) for `layers.0.norm2.weight`."""
    return tuple(int(digits) for digits in _NUMBER.findall(name))


@functools.lru_cache(maxsize=1 << 16)
def words(name: str) -> tuple[str, ...]:
    """Return the words of a name, translated into common vocabulary, without its numbers."""
    *path, last = name.split(".")
    result: list[str] = []
    for segment in path:
        result += SEGMENTS[segment].split() if segment in SEGMENTS else _segment_words(segment)
    if last in LEAVES:
        return (*result, LEAVES[last])
    if last in SEGMENTS:
        # A parameter with the name of a module, such as `wq`, is that module's weight.
        return (*result, *SEGMENTS[last].split(), "weight")
    return (*result, *(part.lower() for part in _PARTS.findall(last) if not part.isdigit()))


def _segment_words(segment: str) -> list[str]:
    """Return the words of one path segment, and the segment itself if it has several words.

    Without the segment, `dense_h_to_4h` and `dense_4h_to_h` would be the same words.
    """
    parts = [part.lower() for part in _PARTS.findall(_NORM.sub("norm", segment))]
    result = [word for part in parts if not part.isdigit() for word in _meaning(part)]
    whole = segment.lower().rstrip("_0123456789")
    return [*result, f"={whole}"] if len(parts) > 1 and len(result) > 1 else result


def _meaning(word: str) -> list[str]:
    return WORDS[word].split() if word in WORDS else [word]


def families(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the families of names: groups of at least two that differ in numbers only.

    Each choice of the numbers that differ gives families. For experts in layers, these are the
    experts of each layer, each expert over all layers, and all experts of all layers. The names of
    a family are sorted by their numbers.
    """
    groups: dict[tuple, list[str]] = defaultdict(list)
    for name in names:
        values = numbers(name)
        for free in range(1, 1 << len(values)) if len(values) <= 4 else [(1 << len(values)) - 1]:
            fixed = tuple(v for i, v in enumerate(values) if not free >> i & 1)
            groups[pattern(name), free, fixed].append(name)
    unique = {tuple(sorted(group, key=numbers)): None for group in groups.values()}
    return [group for group in unique if len(group) > 1]


def similarity(originals: Sequence[str], ports: Sequence[str]) -> np.ndarray:
    """Return the similarity of all pairs of names, (originals, ports), from 0 to 2.01.

    Words count up to 1, numbers up to 1, and a similar place in the two lists up to 0.01. Words are
    weighted by rarity, singly and as pairs of neighbours. Numbers are compared in order of
    occurrence, as values and as ranks among the names that differ in numbers only; the better
    comparison counts.
    """
    if not originals or not ports:
        return np.zeros((len(originals), len(ports)))
    left, right = [words(n) for n in originals], [words(n) for n in ports]
    full = _abbreviations({w for bag in left for w in bag}, {w for bag in right for w in bag})
    left, right = ([tuple(full.get(w, w) for w in bag) for bag in side] for side in (left, right))
    single = _cosine(left, right)
    double = _cosine([_pairs(bag) for bag in left], [_pairs(bag) for bag in right])
    places = [np.arange(len(names)) / len(names) for names in (originals, ports)]
    order = 1 - np.abs(places[0][:, None] - places[1][None])
    return 0.7 * single + 0.3 * double + _numbers_agree(originals, ports) + 0.01 * order


def context(
    originals: Sequence[str], ports: Sequence[str], known: Iterable[tuple[str, str]]
) -> np.ndarray:
    """Return how well all pairs of names fit the known pairs, (originals, ports), from 0 to 1.

    A pair fits well if its two modules, or modules above them, already contain known pairs, and if
    the same names are paired in other layers.

    Args:
        originals: names of the original.
        ports: names of the port.
        known: pairs that are decided, as (original, port).
    """
    known = list(known)
    total = np.zeros((len(originals), len(ports)))
    for weight, key in (
        (0.4, parent),
        (0.15, lambda name: parent(name, 2)),
        (0.05, lambda name: parent(name, 3)),
        (0.4, pattern),
    ):
        total += weight * _shares(originals, ports, known, key)
    return total


def assignment(likeness: np.ndarray) -> list[tuple[int, int]]:
    """Return the one-to-one (row, column) pairs with the largest total likeness.

    Pairs with a likeness of -inf are never returned.
    """
    finite = np.where(np.isfinite(likeness), likeness, -1e6)
    rows, columns = linear_sum_assignment(finite, maximize=True)
    pairs = [(int(i), int(j)) for i, j in zip(rows, columns, strict=True)]
    return [(i, j) for i, j in pairs if np.isfinite(likeness[i, j])]


def _shares(originals, ports, known, key) -> np.ndarray:
    counts = Counter((key(o), key(p)) for o, p in known)
    rows, columns = Counter(), Counter()
    for (row, column), count in counts.items():
        rows[row] += count
        columns[column] += count
    o_keys, p_keys = ({k: i for i, k in enumerate(dict.fromkeys(map(key, s)))} for s in
                      (originals, ports))  # fmt: skip
    table = np.zeros((len(o_keys), len(p_keys)))
    for (row, column), count in counts.items():
        if row in o_keys and column in p_keys:
            table[o_keys[row], p_keys[column]] = count / max(rows[row], columns[column])
    return table[np.ix_([o_keys[key(n)] for n in originals], [p_keys[key(n)] for n in ports])]


def _pairs(sequence: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{a} {b}" for a, b in itertools.pairwise(sequence)) or sequence


def _abbreviations(left: set[str], right: set[str]) -> dict[str, str]:
    """Map each word that only one side has to the longer word of the other side that it
    abbreviates, if exactly one longer word fits."""
    result = {}
    for own, other in ((left - right, right - left), (right - left, left - right)):
        for word in own:
            longer = [w for w in other if w.startswith(word)] if len(word) >= SHORTEST else []
            if len(longer) == 1:
                result[word] = longer[0]
    return result


def _cosine(a: list[tuple[str, ...]], b: list[tuple[str, ...]]) -> np.ndarray:
    """Return cosines between bags of words weighted by rarity: (len(a), len(b))."""
    vocabulary = {word: i for i, word in enumerate(sorted({w for bag in (*a, *b) for w in bag}))}
    frequency = np.zeros(len(vocabulary))
    for bag in (*a, *b):
        for word in set(bag):
            frequency[vocabulary[word]] += 1
    rarity = np.log1p((len(a) + len(b)) / np.maximum(frequency, 1))

    def matrix(bags):
        result = np.zeros((len(bags), len(vocabulary)), np.float32)
        for i, bag in enumerate(bags):
            for word in bag:
                result[i, vocabulary[word]] += rarity[vocabulary[word]]
        norms = np.linalg.norm(result, axis=1, keepdims=True)
        return np.divide(result, norms, out=result, where=norms > 0)

    return (matrix(a) @ matrix(b).T).astype(np.float64)


def _ranks(names: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the numbers of each name as ranks among the names that differ in numbers only."""
    values: dict[tuple[str, int], set[int]] = defaultdict(set)
    for name in names:
        for place, number in enumerate(numbers(name)):
            values[pattern(name), place].add(number)
    order = {
        key: {number: rank for rank, number in enumerate(sorted(group))}
        for key, group in values.items()
    }
    return [
        tuple(order[pattern(name), place][number] for place, number in enumerate(numbers(name)))
        for name in names
    ]


def _numbers_agree(originals: Sequence[str], ports: Sequence[str]) -> np.ndarray:
    def table(left: Sequence[tuple[int, ...]], right: Sequence[tuple[int, ...]]) -> np.ndarray:
        rows, columns = ({key: i for i, key in enumerate(dict.fromkeys(s))} for s in (left, right))
        small = np.array([[_common(a, b) for b in columns] for a in rows])
        return small[np.ix_([rows[key] for key in left], [columns[key] for key in right])]

    plain = table([numbers(n) for n in originals], [numbers(n) for n in ports])
    return np.maximum(plain, RANK * table(_ranks(originals), _ranks(ports)))


@functools.lru_cache(maxsize=1 << 16)
def _common(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """Return the fraction of the numbers of two names that both have in the same order; 1 if
    neither name has numbers.

    For names with m and n numbers, of which k are common, the fraction is 2 k / (m + n).
    """
    if a == b:
        return 1.0
    previous = [0] * (len(b) + 1)
    for x in a:
        row = [0]
        for j, y in enumerate(b):
            row.append(previous[j] + 1 if x == y else max(previous[j + 1], row[j]))
        previous = row
    return 2 * previous[-1] / (len(a) + len(b))
