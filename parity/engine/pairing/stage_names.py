"""Similarity of the stage names of two implementations of one model.

A name is a path of words and numbers, such as layer numbers. Words are weighted by their rarity
among the names of both sides, since a word that every name has carries little information.
Different numbers reduce the similarity.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_FIELD = re.compile(r"(\[\d+\])+$")
_NUMBER = re.compile(r"\d+")
_SYNONYMS = {
    word: words[0]
    for words in (
        ("layer", "layers", "h", "block", "blocks"),
        ("attention", "attn"),
        ("norm", "ln", "layernorm", "rmsnorm", "rms"),
        ("dense", "fc", "linear", "proj", "projection", "lin"),
        ("embed", "embedding", "embeddings", "emb", "wte", "embedder"),
        ("mlp", "ffn", "ff", "feedforward"),
        ("output", "out", "o"),
        ("query", "q"),
        ("key", "k"),
        ("value", "v"),
        ("act", "activation", "gelu", "silu", "relu"),
        ("final", "f", "last"),
        ("position", "pos", "wpe"),
        ("dropout", "drop"),
    )
    for word in words
}
"""Words that mean the same in model code, mapped to one of them."""
# Small, since one library may return a tuple where another returns the tuple's only member.
FIELD_WEIGHT = 0.1
"""Weight of a different index at the end of a name, such as `layer[0]` against `layer`, relative to
a word of average rarity."""
# Names of two layers differ in nothing but this number, so the factor is small.
OTHER_LAYER = 0.4
"""Factor on the similarity of names whose first numbers differ."""
# Not small, since `norm1` of one side may be `norm_0` of the other, or another norm.
OTHER_PART = 0.7
"""Factor on the similarity of names for each of their later numbers that differs."""
LEARNED = 0.95
"""Similarity of two names that are paired in another layer, just below that of equal names."""


def words(name: str) -> list[str]:
    """Return the words and numbers of a name in lower case, synonyms replaced by one word."""
    lower = [str(word).lower() for word in _WORD.findall(_FIELD.sub("", name))]
    return [_SYNONYMS.get(word) or word for word in lower]


def similarity(original: Sequence[str], port: Sequence[str]) -> np.ndarray:
    """Return the similarity of all pairs of names, (original, port), from 0 to 1.

    The similarity is twice the weight of the common words, divided by the weight of the words of
    both names, and reduced if numbers differ. The rarer a word, the larger its weight.
    """
    if not original or not port:
        return np.zeros((len(original), len(port)))
    bags = [Counter(words(name)) for name in (*original, *port)]
    fields = [_field(name) for name in (*original, *port)]
    use = Counter(word for bag in bags for word in bag)
    index = {word: n for n, word in enumerate(use)}
    rarity = np.array([math.log(1 + len(bags) / count) for count in use.values()])
    counts = np.zeros((len(bags), len(index)))
    for row, bag in zip(counts, bags, strict=True):
        for word, count in bag.items():
            row[index[word]] = count
    sizes = counts @ rarity
    both = np.zeros((len(original), len(port)))
    for row, count in zip(both, counts[: len(original)], strict=True):
        row[:] = np.minimum(count, counts[len(original) :]) @ rarity
    either = sizes[: len(original), None] + sizes[None, len(original) :]
    field = np.array([[a != b for b in fields[len(original) :]] for a in fields[: len(original)]])
    weight = FIELD_WEIGHT * (float(np.mean(rarity)) if len(rarity) else 1.0)
    alike = 2 * both / np.maximum(either + weight * field, 1e-9)
    return alike * _same_numbers(original, port)


def other_layers(original: Sequence[str], port: Sequence[str]) -> np.ndarray:
    """Return whether the numbers of names indicate different layers, booleans (original, port).

    Layer numbers are compared as in `similarity`: by rank if one side counts from 0, the other
    from 1.
    """
    return _same_numbers(original, port) <= OTHER_LAYER


def learned(
    pairs: Iterable[tuple[str, str]], original: Sequence[str], port: Sequence[str]
) -> np.ndarray:
    """Return `LEARNED` for names that are paired in another layer (with another number), else 0.

    Args:
        pairs: known pairs of names, (original, port).
        original: names of the original.
        port: names of the port.

    Returns:
        An array (original, port).
    """
    votes: dict[str, Counter[str]] = {}
    for one, other in pairs:
        (a, n), (b, m) = _template(one), _template(other)
        if n == m:
            votes.setdefault(a, Counter())[b] += 1
    # A template (name without its layer number) that has several partners keeps the most frequent.
    partner = {a: counter.most_common(1)[0][0] for a, counter in votes.items()}
    columns: dict[tuple[str, str], list[int]] = {}
    for j, name in enumerate(port):
        columns.setdefault(_template(name), []).append(j)
    out = np.zeros((len(original), len(port)))
    for i, name in enumerate(original):
        template, number = _template(name)
        out[i, columns.get((partner.get(template, ""), number), [])] = LEARNED
    return out


def _field(name: str) -> str:
    match = _FIELD.search(name)
    return match.group() if match else ""


def _template(name: str) -> tuple[str, str]:
    """Return a name with its first number replaced by `*`, and that number."""
    match = _NUMBER.search(_FIELD.sub("", name))
    if match is None:
        return name, ""
    return f"{name[: match.start()]}*{name[match.end() :]}", match.group()


def _same_numbers(original: Sequence[str], port: Sequence[str]) -> np.ndarray:
    """Return a factor for each pair of names, (original, port): 1, or less if numbers differ."""
    one, other = _numbers(original), _numbers(port)
    firsts = [sorted({row[0] for row in rows if row}) for rows in (one, other)]
    # One side may count layers from 0 and the other from 1: compare ranks.
    if firsts[0] != firsts[1] and len(firsts[0]) == len(firsts[1]):
        for rows, numbers in zip((one, other), firsts, strict=True):
            for row in rows:
                row[:1] = [numbers.index(row[0])] if row else []
    first, later = np.ones((len(one), len(other))), np.ones((len(one), len(other)))
    for depth in range(max((len(row) for row in (*one, *other)), default=0)):
        a, b = (np.array([r[depth] if len(r) > depth else -1 for r in s]) for s in (one, other))
        differ = (a[:, None] != b) & (a[:, None] >= 0) & (b >= 0)
        (first if depth == 0 else later)[differ] = OTHER_LAYER if depth == 0 else OTHER_PART
    return first * later


def _numbers(names: Sequence[str]) -> list[list[int]]:
    return [[int(number) for number in _NUMBER.findall(_FIELD.sub("", name))] for name in names]
