"""Names of parameters and stages against a plain model of what is promised of them.

The models are written from the documentation, with dictionaries and loops where the module has
matrices; lists of names have unequal lengths, several layers, and names without a number.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from parity.engine.pairing import naming, stage_names
from parity.engine.pairing.naming import (
    RANK,
    assignment,
    context,
    families,
    leaf,
    numbers,
    parent,
    pattern,
    similarity,
    words,
)
from tests.helpers import roundoff

MEANINGS = {
    "attention": "attn",
    "cross attention": "crossattention",
    "encoder": "enc",
    "decoder": "dec",
    "query": "q",
    "key": "k",
    "value": "v",
    "output": "o out",
    "projection": "proj projections",
    "norm": "ln layernorm rmsnorm bn batchnorm norms normalization",
    "token embedding": "wte",
    "position embedding": "wpe",
    "embedding": "emb embed embeds embeddings",
    "position": "pos positions positional",
    "token": "tok tokens word words",
    "mlp": "ffn ff feedforward",
    "layer": "h layers block blocks resblocks",
    "stage": "stages",
    "dense": "fc linear lin",
    "conv": "convolution",
    "classifier": "cls head",
    "final": "f",
}
"""Words in the middle of a name, by what they mean."""
PARTS = {
    "cross attention": "EncDecAttention encoder_attn",
    "query projection": "wq",
    "key projection": "wk",
    "value projection": "wv",
    "output projection": "wo",
    "gate projection": "w1",
    "up projection": "w3 fc1 fc_in c_fc lin1 dense_h_to_4h",
    "down projection": "w2 fc2 fc_out lin2 dense_4h_to_h",
    "up": "intermediate",
}
"""Whole parts of a path, by what they mean."""
LAST = {
    "weight": "kernel w scale embedding gamma g weight",
    "bias": "beta b offset bias",
    "mean": "running_mean moving_mean mean",
    "var": "running_var moving_var moving_variance variance var",
}
"""Last parts of a name, by what they mean."""


def listed(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(word, meaning) for meaning, each in table.items() for word in each.split()]


def test_a_word_means_what_libraries_mean_by_it():
    for word, meaning in listed(MEANINGS):
        assert words(f"{word}.weight") == (*meaning.split(), "weight"), word
        # As a last part it is itself: torch's `embed` is no factor of a norm.
        assert words(f"x.{word}") == ("x", word)
    for part, meaning in listed(PARTS):
        assert words(f"{part}.bias") == (*meaning.split(), "bias"), part
        # The matrices of a feed-forward block are often no modules.
        assert words(f"x.{part}") == ("x", *meaning.split(), "weight"), part
    for last, meaning in listed(LAST):
        assert words(f"a.{last}") == ("a", meaning), last
    assert set(naming.WORDS) == {word for word, _ in listed(MEANINGS)}
    assert set(naming.SEGMENTS) == {part for part, _ in listed(PARTS)}
    assert set(naming.LEAVES) <= {last for last, _ in listed(LAST)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Several words: each, and the part itself without its number.
        ("self_attn.weight", "self attention =self_attn weight"),
        ("q_proj2.weight", "query projection =q_proj weight"),
        ("q_proj_2.weight", "query projection =q_proj weight"),
        ("layers.3.MLP.kernel", "layer mlp weight"),
        ("LayerNorm_0.scale", "norm weight"),
        ("input_layer_norm.scale", "input norm =input_layer_norm weight"),
        ("rms_norm.g", "norm weight"),
        ("groupNorm.beta", "norm bias"),
        ("BatchNorm1.moving_mean", "norm mean"),
        ("GPTModel.x", "gpt model =gptmodel x"),
        ("wte_x.y2z", "token embedding x =wte_x y z"),
        ("weight", "weight"),
        ("conv.Weight12", "conv weight"),
    ],
)
def test_a_name_is_its_words_translated_without_numbers(name: str, expected: str):
    assert words(name) == tuple(expected.split())


def test_parts_of_a_path():
    name = "model.layers.12.norm3.weight"
    assert leaf(name) == "weight" and leaf("weight") == "weight"
    assert parent(name) == "model.layers.12.norm3" and parent(name, 2) == "model.layers.12"
    assert parent(name, 3) == "model.layers" and parent("weight") == ""
    assert pattern(name) == "model.layers.{}.norm{}.weight" and numbers(name) == (12, 3)
    assert numbers("a.b") == () and pattern("a.b") == "a.b"


NAMES = [
    *(f"layers.{i}.experts.{j}.w{k}.weight" for i in (0, 1, 3) for j in (0, 1) for k in (1, 2)),
    *(f"layers.{i}.norm.weight" for i in (0, 1, 3)),
    "norm.weight",
    "head0.bias",
    *(f"deep.{i}.1.2.3.{i}.w" for i in (4, 5)),
]


def families_by_model(names: list[str]) -> set[tuple[str, ...]]:
    """Every choice of numbers that are left open, of at most four; else all of them."""
    found = set()
    for name in names:
        places = range(len(numbers(name)))
        choices = [
            free for n in range(1, len(places) + 1) for free in itertools.combinations(places, n)
        ]
        for free in choices if len(places) <= 4 else [tuple(places)]:
            group = [
                other
                for other in names
                if pattern(other) == pattern(name)
                and all(numbers(other)[k] == numbers(name)[k] for k in places if k not in free)
            ]
            if len(group) > 1:
                found.add(tuple(sorted(group, key=numbers)))
    return found


def test_families_differ_in_the_numbers_that_are_left_open():
    found = families(NAMES[::-1])
    assert len(found) == len(set(found)) and set(found) == families_by_model(NAMES)
    # Of all layers, of one layer's experts, and of both at once.
    assert tuple(f"layers.{i}.norm.weight" for i in (0, 1, 3)) in found
    assert tuple(f"layers.3.experts.{j}.w1.weight" for j in (0, 1)) in found
    assert families(["a.1", "b.1", "c"]) == []
    # In order of the numbers, not of their digits.
    many = [f"h.{n}.w" for n in (0, 2, 10)]
    assert families(many[::-1]) == [tuple(many)]
    # Of five numbers all are left open, and no others.
    five = [f"{i}.{j}.0.0.0" for i in (0, 1) for j in (0, 1)]
    assert families(five) == [tuple(five)]
    four = [f"{i}.{j}.0.0" for i in (0, 1) for j in (0, 1)]
    assert len(families(four)) == 5


def longest(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the length of the longest sequence that is in order in both."""
    return max(
        (
            n
            for n in range(min(len(a), len(b)), 0, -1)
            if set(itertools.combinations(a, n)) & set(itertools.combinations(b, n))
        ),
        default=0,
    )


def share(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    return 1.0 if a == b else 2 * longest(a, b) / (len(a) + len(b))


def test_numbers_agree_as_far_as_they_are_in_the_same_order():
    rng = np.random.default_rng(0)
    rows = [tuple(int(n) for n in rng.integers(0, 3, size)) for size in (0, 1, 2, 2, 3, 3, 4, 5)]
    for a, b in itertools.product(rows, rows):
        assert naming._common(a, b) == share(a, b), (a, b)


def ranked(names: list[str]) -> list[tuple[int, ...]]:
    out = []
    for name in names:
        alike = [numbers(other) for other in names if pattern(other) == pattern(name)]
        places = range(len(numbers(name)))
        seen = [sorted({row[k] for row in alike}) for k in places]
        out.append(tuple(seen[k].index(numbers(name)[k]) for k in places))
    return out


def cosines(left: list[tuple[str, ...]], right: list[tuple[str, ...]]) -> np.ndarray:
    """Cosines of bags of words, a word weighed by log(1 + names / names that have it)."""
    every = [*left, *right]

    def weigh(bag: tuple[str, ...]) -> dict[str, float]:
        return {
            word: count * math.log1p(len(every) / sum(word in other for other in every))
            for word, count in Counter(bag).items()
        }

    def norm(bag: dict[str, float]) -> float:
        return math.sqrt(sum(x * x for x in bag.values()))

    out = np.zeros((len(left), len(right)))
    for (i, a), (j, b) in itertools.product(
        enumerate(map(weigh, left)), enumerate(map(weigh, right))
    ):
        if a and b:
            out[i, j] = sum(x * b.get(word, 0.0) for word, x in a.items()) / (norm(a) * norm(b))
    return out


ORIGINALS = [
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.norm1.weight",
    "model.layers.0.norm2.weight",
    "encoder.embed.weight",
    "head.bias",
]
PORTS = [
    "enc.embedding.embedding",
    "blocks.1.attention.query.kernel",
    "blocks.2.attention.query.kernel",
    "blocks.1.attention.key.kernel",
    "blocks.1.norm_2.scale",
    "blocks.1.norm_1.scale",
    "classif.bias",
    "extra",
]


def test_similarity_is_words_pairs_of_words_numbers_and_a_little_order():
    found = similarity(ORIGINALS, PORTS)
    left, right = list(map(words, ORIGINALS)), list(map(words, PORTS))
    # A word of three letters or more of one side alone that begins one word of the other alone.
    assert "classif" in right[6] and "classifier" in left[6]
    right[6] = tuple("classifier" if word == "classif" else word for word in right[6])

    def pairs(bag: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(" ".join, itertools.pairwise(bag))) if len(bag) > 1 else bag

    expected = 0.7 * cosines(left, right)
    expected += 0.3 * cosines(list(map(pairs, left)), list(map(pairs, right)))
    ranks = ranked(ORIGINALS), ranked(PORTS)
    for (i, o), (j, p) in itertools.product(enumerate(ORIGINALS), enumerate(PORTS)):
        expected[i, j] += max(share(numbers(o), numbers(p)), RANK * share(ranks[0][i], ranks[1][j]))
        expected[i, j] += 0.01 * (1 - abs(i / len(ORIGINALS) - j / len(PORTS)))
    # Words are counted in float32.
    assert np.allclose(found, expected, rtol=0, atol=roundoff(16, np.float32))
    # An only word is as good as several words and their order.
    several, one = np.diag(similarity(*[["encoder.bias", "logits"]] * 2))
    assert np.isclose(several, one, rtol=0, atol=roundoff(16, np.float32))
    assert similarity(ORIGINALS, []).shape == (len(ORIGINALS), 0)
    assert similarity([], PORTS).shape == (0, len(PORTS))


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ({"enc"}, {"encoder"}, {"enc": "encoder"}),
        ({"encoder"}, {"enc"}, {"enc": "encoder"}),
        # Of two letters, of a word of both sides, or of two words, nothing is known.
        ({"en"}, {"encoder"}, {}),
        ({"enc", "encoder"}, {"encoder"}, {}),
        ({"enc"}, {"encoder", "encode"}, {}),
        ({"enc"}, {"decoder"}, {}),
        ({"nco"}, {"encoder"}, {}),
    ],
)
def test_a_word_stands_for_the_one_it_begins(left, right, expected):
    assert naming._abbreviations(left, right) == expected


def test_a_pair_fits_where_its_modules_hold_pairs_and_its_pattern_is_paired():
    """Of each level: pairs of both groups over those of the group that has more."""
    known = [
        ("a.0.x.w", "b.0.y.w"),
        ("a.0.x.v", "b.0.y.v"),
        ("a.1.x.w", "b.1.y.w"),
        ("a.1.x.w", "c.0.z"),
    ]
    originals, ports = ["a.0.x.u", "a.1.x.w", "q.0.x.w", "a.2.x.w"], ["b.0.y.u", "b.1.y.w", "c.7.z"]

    def count(key, o: str | None, p: str | None) -> int:
        return sum(
            (o is None or key(a) == key(o)) and (p is None or key(b) == key(p)) for a, b in known
        )

    keys = (
        (0.4, parent),
        (0.15, lambda n: parent(n, 2)),
        (0.05, lambda n: parent(n, 3)),
        (0.4, pattern),
    )
    expected = np.array(
        [
            [
                sum(
                    w * count(k, o, p) / max(count(k, o, None), count(k, None, p), 1)
                    for w, k in keys
                )
                for p in ports
            ]
            for o in originals
        ]
    )
    found = context(originals, ports, iter(known))
    assert np.allclose(found, expected, rtol=0, atol=roundoff(64, np.float64))
    assert expected.max() > 0.5 and not context(originals, ports, []).any()


def test_modules_that_hold_parts_of_several_fit_each_of_them_less_from_either_side():
    originals, ports, known = ["a.x", "b.x"], ["m.x"], [("a.w", "m.w"), ("b.v", "m.v")]
    found = naming.context(originals, ports, known)
    back = naming.context(ports, originals, [(port, name) for name, port in known])
    assert np.array_equal(found, back.T)
    alone = naming.context(originals, ports, known[:1])
    assert 0 < found[0, 0] < alone[0, 0]


@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (4, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_an_assignment_has_the_largest_sum_and_nothing_that_cannot_be(shape, seed):
    likeness = np.random.default_rng(seed).random(shape)
    likeness[0, :2] = -np.inf
    pairs = assignment(likeness)
    rows, columns = zip(*pairs, strict=True)
    assert len(set(rows)) == len(rows) and len(set(columns)) == len(columns)
    small = min(shape)
    best = max(
        sum(likeness[i, j] for i, j in zip(a, b, strict=True))
        for a in itertools.permutations(range(shape[0]), small)
        for b in itertools.combinations(range(shape[1]), small)
    )
    total = sum(likeness[i, j] for i, j in pairs)
    assert np.isfinite(total)
    if np.isfinite(best):
        assert total == pytest.approx(best)
    assert assignment(np.full((2, 2), -np.inf)) == []


SYNONYMS = (
    "layer layers h block blocks",
    "attention attn",
    "norm ln layernorm rmsnorm rms",
    "dense fc linear proj projection lin",
    "embed embedding embeddings emb wte embedder",
    "mlp ffn ff feedforward",
    "output out o",
    "query q",
    "key k",
    "value v",
    "act activation gelu silu relu",
    "final f last",
    "position pos wpe",
    "dropout drop",
)


def test_words_of_stages_are_one_where_libraries_mean_one_thing():
    for line in SYNONYMS:
        first, *rest = line.split()
        for word in (first, *rest):
            assert stage_names.words(f"{word}.3") == [first, "3"]
    assert stage_names.words("model.layers.12.selfAttn.q_proj[0][1]") == (
        ["model", "layer", "12", "self", "attention", "query", "dense"]
    )
    # A field is one at the end alone.
    assert stage_names.words("a[0].b") == ["a", "0", "b"]
    assert stage_names.words("GELUAct_1") == ["act", "act", "1"]


STAGES = [
    "layers.0.attn.out",
    "layers.0.mlp",
    "layers.2.attn.out[0]",
    "layers.2.mlp.norm1",
    "final_norm",
    "layers.2.mlp.norm2",
]
OTHERS = [
    "h.1.attention.o[0]",
    "h.1.ffn",
    "h.2.attention.o",
    "h.2.ffn.ln_2",
    "head",
    "f.norm",
    "relu",
    "relu[1]",
]


def words_in_common(original: list[str], port: list[str]) -> np.ndarray:
    bags = [Counter(stage_names.words(name)) for name in (*original, *port)]
    use = Counter(word for bag in bags for word in bag)
    rarity = {word: math.log(1 + len(bags) / n) for word, n in use.items()}
    average = sum(rarity.values()) / len(rarity)

    def field(name: str) -> str:
        start = name.find("[")
        return name[start:] if start >= 0 and name.endswith("]") else ""

    out = np.zeros((len(original), len(port)))
    for (i, a), (j, b) in itertools.product(
        enumerate(bags[: len(original)]), enumerate(bags[len(original) :])
    ):
        both = sum(n * rarity[word] for word, n in (a & b).items())
        either = sum(n * rarity[word] for bag in (a, b) for word, n in bag.items())
        either += stage_names.FIELD_WEIGHT * average * (field(original[i]) != field(port[j]))
        out[i, j] = 2 * both / either
    return out


def test_stages_are_alike_by_rare_words_fields_and_layers():
    """Layers 0 and 2 of one side are layers 1 and 2 of the other, by their order."""
    found = stage_names.similarity(STAGES, OTHERS)
    one = [[0], [0], [1], [1, 1], [], [1, 2]]
    other = [[0], [0], [1], [1, 2], [], [], [], []]
    factor = np.ones(found.shape)
    for (i, a), (j, b) in itertools.product(enumerate(one), enumerate(other)):
        for depth, (n, m) in enumerate(zip(a, b, strict=False)):
            if n != m:
                first = depth == 0
                factor[i, j] *= stage_names.OTHER_LAYER if first else stage_names.OTHER_PART
    expected = words_in_common(STAGES, OTHERS) * factor
    assert np.allclose(found, expected, rtol=0, atol=roundoff(64, np.float64))
    assert {stage_names.OTHER_LAYER, stage_names.OTHER_PART} <= {*factor.ravel().tolist()}
    far = stage_names.other_layers(STAGES, OTHERS)
    assert np.array_equal(far, factor <= stage_names.OTHER_LAYER) and far.any()
    assert stage_names.similarity([], OTHERS).shape == (0, len(OTHERS))
    assert stage_names.similarity(STAGES, []).shape == (len(STAGES), 0)
    # Without a word nothing is in common.
    assert stage_names.similarity(["", "a"], ["", "a"]).tolist() == [[0.0, 0.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("original", "port", "far"),
    [
        # As many layers, counted from another number: the n-th is the n-th.
        (["a.0", "a.1"], ["a.1", "a.2"], [[False, True], [True, False]]),
        # One layer more on one side: numbers are what they are.
        (["a.0", "a.1"], ["a.0", "a.1", "a.2"], [[False, True, True], [True, False, True]]),
        (["a.0", "b"], ["a.1", "b"], [[False, False], [False, False]]),
    ],
)
def test_layers_are_counted_from_anywhere_where_both_have_as_many(original, port, far):
    assert stage_names.other_layers(original, port).tolist() == far


def test_names_are_learned_from_pairs_of_the_same_layer():
    pairs = [
        ("l.0.mix", "b.0.attn"),
        ("l.1.mix", "b.1.attn"),
        ("l.2.mix", "b.2.mlp"),
        # Of two layers, of which nothing is learned.
        ("l.0.up", "b.1.up"),
        ("head", "out[0]"),
    ]
    original = ["l.3.mix", "l.4.mix", "l.3.up", "head", "new"]
    port = ["b.3.mlp", "b.3.attn", "b.4.attn", "b.3.up", "out[0]", "out", "new"]
    expected = np.zeros((5, 7))
    expected[0, 1] = expected[1, 2] = expected[3, 4] = stage_names.LEARNED
    # The most frequent partner counts, whichever pair was found first.
    for each in (pairs, pairs[::-1]):
        assert np.array_equal(stage_names.learned(each, original, port), expected)


def test_a_field_is_a_tenth_of_a_word_and_numbers_count_by_half():
    """Of one word each: twice what both say, over what either says and a tenth of a word."""
    found = stage_names.similarity(["norm"], ["norm[0]"])
    assert found.item() == pytest.approx(2 / 2.1)
    # Fields alike are none; another layer is 0.4 of it, and another part of one 0.7.
    assert stage_names.similarity(["norm[0]"], ["norm[0]"]).item() == 1.0
    layers = ["x.0.a.0", "x.1.a.0", "x.0.a.1"]
    first = stage_names.similarity(layers, [*layers, "x.2.a.0"])
    assert stage_names.OTHER_LAYER == 0.4 and stage_names.OTHER_PART == 0.7
    assert first[0, 0] == first[2, 2] == 1.0 and first[0, 1] < 0.4 and 0.4 < first[0, 2] < 0.7
    # The same in another layer is nearly as good as the name itself.
    assert stage_names.LEARNED == 0.95 and RANK == 0.9


def test_layers_are_compared_by_rank_only_if_both_sides_have_as_many() -> None:
    def factor(originals: list[str], ports: list[str]) -> np.ndarray:
        return stage_names._same_numbers(originals, ports)

    # From 0 and from 1: the first of one is the first of the other.
    ranked = factor(["h.0.mlp", "h.1.mlp"], ["layers_1.mlp", "layers_2.mlp"])
    assert (ranked == np.where(np.eye(2), 1.0, stage_names.OTHER_LAYER)).all()
    # A port of the last two layers of four: its layer 2 is layer 2.
    some = factor([f"h.{n}.mlp" for n in range(4)], ["layers_2.mlp", "layers_3.mlp"])
    assert (some == np.where(np.eye(4)[:, 2:], 1.0, stage_names.OTHER_LAYER)).all()


def test_a_word_is_as_rare_as_the_names_that_have_it_are_few():
    """A name that says a word twice makes it no more common."""
    twice, once, both = ("a", "a"), ("b",), ("a", "b")
    assert naming._cosine([twice, once], [both])[:, 0].tolist() == pytest.approx([0.5**0.5] * 2)


def test_numbers_are_ranked_among_names_of_one_pattern():
    names = ["l.1.w", "l.3.w", "m.2.w", "l.1.b"]
    assert naming._ranks(names) == [(0,), (1,), (0,), (0,)]
