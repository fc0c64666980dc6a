"""Generation: it is the loop it abbreviates, and its draws have the probabilities they should."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import megalodon_jax
from megalodon_jax import (
    MegalodonForCausalLM,
    generate,
    generate_jit,
    greedy_token,
    inference,
    init_cache,
    sample_token,
)
from megalodon_jax.inference import GREEDY_BELOW
from parity.megalodon import oracle
from tests.helpers import arrays, logits_of, model_of, tiny, tokens

# A head of its own and a seed whose greedy rows wander: a tied tiny model repeats one token.
CONFIG = tiny(num_layers=1, output_size=16)
SEED = 2
B, PROMPT, NEW, MORE = 2, 5, 8, 5
IDS = tokens(CONFIG, (B, PROMPT))
SAMPLING = {"temperature": 2.0, "top_k": 9, "top_p": 0.9}
MODES = {
    "local": {},
    "sliding": {"max_cache_len": 6},
    "unbounded": {"cache_unbounded": True},
}
STANDARD_DEVIATIONS = 5.0


def model(mode: str = "local") -> MegalodonForCausalLM:
    return model_of(tiny(num_layers=1, output_size=16, **MODES[mode]), SEED)


def run(mode: str = "local", new: int = NEW + MORE, ids: np.ndarray = IDS, key=None, **options):
    if key is None:
        options.setdefault("temperature", 0.0)
    return generate(model(mode), jnp.asarray(ids), new, key, **options)


@cache
def greedy(mode: str = "local") -> np.ndarray:
    return np.asarray(run(mode)[0])


def key(seed: int = 0) -> jax.Array:
    return jax.random.key(seed, impl="rbg")


# Greedy.


def test_greedy_is_the_plain_loop_of_full_forwards() -> None:
    ids = np.concatenate([IDS, np.ones((B, NEW + MORE), np.int32)], axis=1)
    for t in range(PROMPT, ids.shape[1]):
        # What stands behind t does not matter to the logits before it.
        ids[:, t] = np.argmax(logits_of(model(), jnp.asarray(ids), None)[:, t - 1], axis=-1)
    assert greedy().tolist() == ids.tolist()
    assert min(len(set(row)) for row in greedy()[:, PROMPT:].tolist()) >= 4, "a test of one token"


def visible(mode: str, length: int) -> np.ndarray:
    """docs/model.md "Chunked attention" for a prompt of PROMPT tokens and then single ones."""
    C, window = CONFIG.chunk_size, {"sliding": 6, "unbounded": length}[mode]
    seen = np.tri(length, dtype=bool)
    for query in range(length):
        end = min((query // C + 1) * C, PROMPT) if query < PROMPT else query + 1
        seen[query, : max(0, end - window)] = False
    return seen


@pytest.mark.parametrize("mode", [pytest.param("sliding", marks=pytest.mark.sweep), "unbounded"])
def test_other_windows_choose_by_the_keys_they_see(mode: str, monkeypatch) -> None:
    ids = greedy(mode)
    monkeypatch.setattr(oracle, "visibility", lambda *_: visible(mode, ids.shape[1]))
    weights = {n: w.astype(np.float64) for n, w in arrays(CONFIG, SEED).items()}
    logits = oracle.forward(CONFIG, weights, ids)
    assert np.argmax(logits, axis=-1)[:, PROMPT - 1 : -1].tolist() == ids[:, PROMPT:].tolist()


def test_the_windows_generate_different_text() -> None:
    assert len({greedy(mode).tobytes() for mode in MODES}) == len(MODES)


def test_rows_do_not_depend_on_each_other() -> None:
    for row in range(B):
        alone, _, _ = run(ids=IDS[row : row + 1])
        assert alone[0].tolist() == greedy()[row].tolist()


def test_the_result_holds_the_prompt_as_int32() -> None:
    ids, cache, next_key = run()
    assert (ids.shape, ids.dtype) == ((B, PROMPT + NEW + MORE), jnp.int32)
    assert np.array_equal(ids[:, :PROMPT], IDS)
    assert cache is None
    assert next_key is None


def test_no_rows_generate_no_rows() -> None:
    ids, _, _ = run(new=2, ids=IDS[:0])
    assert (ids.shape, ids.dtype) == ((0, PROMPT + 2), jnp.int32)


# Going on.


@pytest.mark.parametrize(
    ("mode", "options"),
    [("unbounded", {}), pytest.param("local", SAMPLING, marks=pytest.mark.sweep)],
)
def test_stopping_and_going_on_is_not_stopping(mode: str, options) -> None:
    start = key() if options else None
    whole, _, _ = run(mode, key=start, **options)
    first, held, after = run(mode, NEW, key=start, return_cache=True, **options)
    assert int(held.position) == PROMPT + NEW - 1
    second, _, _ = run(mode, MORE, first[:, -1:], after, cache=held, **options)
    joined = np.concatenate([first, second[:, 1:]], axis=1)
    assert joined.tolist() == whole.tolist()
    if options:
        assert not jnp.array_equal(jax.random.key_data(after), jax.random.key_data(start))
        other, _, _ = run(mode, MORE, first[:, -1:], start, cache=held, **options)
        assert other.tolist() != second.tolist(), "the key returned must be a new one"


def test_an_unbounded_stream_may_start_from_a_cache_without_arrays() -> None:
    lazily = {"allocate_kv": False, "allocate_norm": False, "allocate_ema": False}
    ids, _, _ = run("unbounded", cache=init_cache(model("unbounded").config, B, **lazily))
    assert ids.tolist() == greedy("unbounded").tolist()


def test_a_finished_row_stays_finished_when_going_on() -> None:
    # A cache that is handed back has seen every token: no early stop.
    first, held, _ = run(new=NEW, eos_token_id=3, return_cache=True)
    assert first.tolist() == ended(greedy()[:, : PROMPT + NEW], 3)
    assert first[:, -1].tolist() == [3, 4], "one row has finished, the other has not"
    assert int(held.position) == PROMPT + NEW - 1
    second, _, _ = run(new=MORE, ids=first[:, -1:], cache=held, eos_token_id=3)
    joined = np.concatenate([first, second[:, 1:]], axis=1)
    assert joined.tolist() == ended(greedy(), 3)


def test_a_cache_that_is_handed_back_has_seen_what_follows_the_end() -> None:
    ids, held, _ = run(eos_token_id=3, return_cache=True)
    assert ids[:, -1].tolist() == [3, 3], "all rows have finished"
    assert int(held.position) == PROMPT + NEW + MORE - 1


def test_an_end_inside_the_prompt_ends_nothing() -> None:
    """Only a row that goes on from a cache has finished: a prompt may hold several texts."""
    end = int(IDS[0, -1])
    assert run(eos_token_id=end)[0].tolist() == ended(greedy(), end)
    assert int(greedy()[0, PROMPT]) != end


# The end of a text.


def ended(ids: np.ndarray, *ends: int) -> list[list[int]]:
    """Rows of greedy output as they must read when each of `ends` ends a row."""
    rows = []
    for row in ids.tolist():
        at = next((i for i in range(PROMPT, len(row)) if row[i] in ends), len(row) - 1)
        rows.append(row[:at] + [row[at]] * (len(row) - at))
    return rows


@pytest.mark.parametrize(
    "eos", [pytest.param(3, marks=pytest.mark.sweep), 14, (np.int64(14), 3)], ids=str
)
def test_a_row_that_ended_repeats_its_end_and_others_go_on(eos: Any) -> None:
    expected = ended(greedy(), *np.atleast_1d(eos))
    assert expected != greedy().tolist()
    stopping, _, _ = run(eos_token_id=eos)
    assert stopping.tolist() == expected


def test_the_cases_of_the_end_are_those_they_should_be() -> None:
    has = {eos: [eos in row[PROMPT:] for row in greedy().tolist()] for eos in (3, 14)}
    assert has == {3: [True, True], 14: [False, True]}


@pytest.mark.parametrize("bos", [None, 7])
def test_an_empty_prompt_starts_from_bos(bos: int | None) -> None:
    ids, _, _ = run(new=4, ids=IDS[:, :0], bos_token_id=bos)
    token = CONFIG.bos_token_id if bos is None else bos
    explicit, _, _ = run(new=4, ids=np.full((B, 1), token, np.int32))
    assert ids[:, 0].tolist() == [token] * B
    assert ids.tolist() == explicit.tolist()


# Padding.


def test_a_right_padded_prompt_gets_one_token_of_its_own_text() -> None:
    lengths, mask = (3, 5), np.arange(PROMPT) < np.array([[3], [5]])
    ids, held, _ = run(new=1, ids=np.where(mask, IDS, 0), attention_mask=jnp.asarray(mask))
    logits = np.asarray(logits_of(model(), jnp.asarray(IDS), None))
    expected = [int(np.argmax(logits[row, n - 1])) for row, n in enumerate(lengths)]
    assert held is None
    assert ids[:, -1].tolist() == expected
    assert np.argmax(logits[0, -1]) != expected[0]


def test_a_full_mask_is_no_mask() -> None:
    ids, _, _ = run(attention_mask=jnp.ones((B, PROMPT), bool))
    assert ids.tolist() == greedy().tolist()


# Sampling.


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-3}])
def test_sampling_from_one_token_is_greedy(narrow) -> None:
    logits = logits_of(model(), jnp.asarray(IDS), None).reshape(B * PROMPT, -1)
    drawn = sample_token(logits, key(), **narrow)
    assert drawn.tolist() == greedy_token(logits).tolist()
    assert sample_token(logits, key()).tolist() != drawn.tolist()


def test_a_key_gives_its_text_and_another_key_another() -> None:
    texts = [run(key=key(seed), **SAMPLING)[0].tolist() for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] != greedy().tolist()


LOGITS = np.log(np.array([0.34, 0.26, 0.17, 0.11, 0.08, 0.04]))


def exact(temperature: float = 1.0, top_k: int = 6, top_p: float = 1.0) -> np.ndarray:
    """Probabilities after the temperature, then top-k, then top-p of what top-k left."""
    p = np.exp(LOGITS / temperature)
    p[top_k:] = 0
    p /= p.sum()
    reached_before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
    p = np.where(reached_before < top_p, p, 0)
    return p / p.sum()


def deviations(options, p: np.ndarray, n: int = 20_000) -> float:
    """Largest |count - n p| in standard deviations; infinite where the impossible was drawn."""
    order = np.random.default_rng(0).permutation(len(LOGITS))
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[order], jnp.float32), (n, len(LOGITS)))
    drawn = sample_token(logits, key(5), **options)
    assert drawn.dtype == jnp.int32
    counts = np.bincount(np.asarray(drawn), minlength=len(LOGITS))[np.argsort(order)]
    impossible = (p == 0) & (counts > 0)
    scale = np.sqrt(np.where(p * (1 - p) > 0, n * p * (1 - p), 1.0))
    return float(np.max(np.where(impossible, np.inf, np.abs(counts - n * p) / scale)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 99},
        {"top_p": 0.5},
        {"top_p": 0.7},
        {"top_p": 1.0},
        # 0.34 / 0.77 < 0.7 <= 0.60 / 0.77: of the three top-k leaves, two reach 0.7.
        {"top_k": 3, "top_p": 0.7},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.8},
    ],
    ids=str,
)
def test_draws_have_the_exact_probabilities(options) -> None:
    p = exact(**options)
    assert deviations(options, p) <= STANDARD_DEVIATIONS
    # The control: a tenth of the first token's probability elsewhere is seen.
    if (p > 0).sum() > 1:
        off = p.copy()
        off[:2] += np.array([-0.1, 0.1]) * p[0]
        assert deviations(options, off) > STANDARD_DEVIATIONS


def test_greedy_token_is_the_first_of_the_largest() -> None:
    chosen = greedy_token(jnp.asarray([[0.0, 2.0, 1.0], [3.0, 3.0, 0.0]]))
    assert (chosen.tolist(), chosen.dtype) == ([1, 0], jnp.int32)


def test_low_precision_logits_are_sampled_in_float32() -> None:
    logits = jnp.asarray([[0.0, 1.0, 2.0]] * 50, jnp.bfloat16)
    wide = sample_token(logits.astype(jnp.float32), key(), top_p=0.9)
    assert sample_token(logits, key(), top_p=0.9).tolist() == wide.tolist()


def test_a_float64_model_can_be_sampled() -> None:
    with jax.enable_x64(True):
        wide = model_of(CONFIG.with_dtype("float64"), SEED)
        ids, _, _ = eqx.filter_eval_shape(generate, wide, jnp.asarray(IDS), 2, key(), **SAMPLING)
    assert (ids.shape, ids.dtype) == ((B, PROMPT + 2), jnp.int32)


def test_temperature_and_top_p_do_not_compile_again(caplog) -> None:
    def compilations() -> int:
        return sum("Compiling" in r.getMessage() for r in caplog.records)

    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        start = key()
        run(key=start, **SAMPLING)
        before = compilations()
        for temperature, top_p in [(0.7, 0.8), (1.3, 0.5), (2.0, 1.0)]:
            run(key=start, **SAMPLING | {"temperature": temperature, "top_p": top_p})
        assert compilations() == before
        run(new=2, key=start, **SAMPLING)
        assert compilations() > before, "the control: the count sees a compilation"


# Temperatures near zero, and logits that are no numbers.

TIED = jnp.asarray([[0.0, 1.0, 1.0, -1.0]] * 64)


@eqx.filter_jit
def draw_traced(logits, temperature, top_p=None):
    return sample_token(logits, key(), temperature, None, top_p)


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-38, 1e-20, GREEDY_BELOW * 0.99])
@pytest.mark.parametrize("draw", [lambda *a: sample_token(a[0], key(), *a[1:]), draw_traced])
def test_a_temperature_near_zero_is_greedy(temperature: float, draw) -> None:
    # A static one is a constant of the program, a traced one an array.
    given = temperature if draw is not draw_traced else jnp.asarray(temperature, jnp.float32)
    assert draw(TIED, given).tolist() == [1] * len(TIED)
    if temperature and draw is draw_traced:
        # The control: from the limit on equals are drawn by chance, and still nothing else.
        above = draw(TIED, jnp.asarray(GREEDY_BELOW * 1.01, jnp.float32))
        assert set(above.tolist()) == {1, 2}


def test_a_temperature_below_the_limit_needs_no_key() -> None:
    near = run(new=2, temperature=GREEDY_BELOW / 2)[0]
    assert near.tolist() == run(new=2, temperature=0.0)[0].tolist()
    with pytest.raises(ValueError, match="sampling needs key"):
        run(new=2, temperature=GREEDY_BELOW)


def test_no_finite_logits_overflow_into_another_token() -> None:
    largest = float(np.finfo(np.float32).max)
    logits = jnp.asarray([[-largest, largest / 2, largest, -np.inf]] * 64, jnp.float32)
    for temperature in (GREEDY_BELOW, 1.0, 1e30):
        assert sample_token(logits, key(), temperature, top_p=0.9).tolist() == [2] * 64


CHOOSERS = {
    "greedy_token": greedy_token,
    "sample_token": lambda x: sample_token(x, key()),
    "sample_token at 0": lambda x: sample_token(x, key(), 0.0),
    "sample_token, traced": lambda x: draw_traced(x, jnp.ones(())),
    "top_k": lambda x: sample_token(x, key(), top_k=2),
    "top_p": lambda x: sample_token(x, key(), top_p=0.5),
}


@pytest.mark.parametrize("name", CHOOSERS)
@pytest.mark.traced_checks
def test_nothing_is_chosen_from_logits_that_are_not_finite(name: str) -> None:
    """One bad row is enough; a token excluded by -inf is not chosen, and no error."""
    good = jnp.asarray([[0.0, 1.0, 2.0, 3.0]] * 8).at[:, 3].set(-jnp.inf)
    for function in (CHOOSERS[name], eqx.filter_jit(CHOOSERS[name])):
        assert set(function(good).tolist()) <= {0, 1, 2}
        for bad in ([jnp.nan, 0, 0, 0], [0, jnp.inf, 0, 0], [-jnp.inf] * 4, [jnp.inf] * 4):
            with pytest.raises(RuntimeError, match="logits hold NaN or"):
                jax.block_until_ready(function(good.at[3].set(jnp.asarray(bad, jnp.float32))))


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, pytest.param({"key": 0}, marks=pytest.mark.sweep)]
)
@pytest.mark.traced_checks
def test_weights_that_are_not_finite_generate_no_text(options) -> None:
    options = {k: key() if k == "key" else v for k, v in options.items()}
    broken = eqx.tree_at(lambda m: m.lm_head.weight, model(), replace_fn=lambda w: w * jnp.nan)
    with pytest.raises(RuntimeError, match="logits hold NaN or"):
        jax.block_until_ready(generate(broken, jnp.asarray(IDS), 2, **options)[0])


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@pytest.mark.traced_checks
def test_a_traced_rate_out_of_range_is_refused(bad: float) -> None:
    with pytest.raises(RuntimeError, match=r"temperature=.* must be 0"):
        draw_traced(TIED, jnp.asarray(bad)).block_until_ready()
    with pytest.raises(RuntimeError, match=r"top_p=.* must be in"):
        draw_traced(TIED, jnp.ones(()), jnp.asarray(bad)).block_until_ready()
    assert draw_traced(TIED, jnp.ones(()), jnp.asarray(0.9)).shape == (64,)


# How it may be called.


def test_the_conventions_of_the_field() -> None:
    logits = logits_of(model(), jnp.asarray(IDS), None)[:, -1]
    positional = sample_token(logits, key(), 2.0, 9, 0.9)
    assert positional.tolist() == sample_token(logits, key(), **SAMPLING).tolist()
    for everything in ({"top_k": 0}, {"top_p": 1.0}, {"top_k": 99}):
        assert sample_token(logits, key(), **everything).tolist() == (
            sample_token(logits, key()).tolist()
        )
    ids, held, _ = generate_jit(model(), jnp.asarray(IDS), NEW + MORE, temperature=0.0)
    assert (ids.tolist(), held) == (greedy().tolist(), None)
    for name in ("init_cache", "index_cache", "trim_cache", "reserve_cache"):
        assert getattr(inference, name) is getattr(megalodon_jax, name)


def test_numpy_integers_and_floats_are_numbers() -> None:
    start, wide = key(), {"eos_token_id": 3, "top_k": 9, "top_p": 0.75, "temperature": 2.0}
    narrow = {name: np.asarray(value)[()] for name, value in wide.items()}
    assert all(isinstance(value, np.generic) for value in narrow.values())
    expected, _, _ = run(new=3, ids=IDS[:, :0], key=start, bos_token_id=7, **wide)
    ids, _, _ = run(new=np.int64(3), ids=IDS[:, :0], key=start, bos_token_id=np.uint8(7), **narrow)
    assert ids.tolist() == expected.tolist()


@pytest.mark.sweep
@pytest.mark.traced_checks
def test_a_padded_prompt_may_be_traced() -> None:
    mask, zero = np.arange(PROMPT) < np.array([[3], [5]]), jnp.zeros(())

    @eqx.filter_jit
    def compiled(mask):
        return generate(model(), jnp.asarray(IDS), 1, key(), temperature=zero, attention_mask=mask)[
            0
        ]

    for bits in (mask, np.ones_like(mask)):
        expected, _, _ = run(new=1, attention_mask=jnp.asarray(bits))
        assert compiled(bits).tolist() == expected.tolist()
    for bad in (mask & (np.arange(PROMPT) != 1), ~mask):
        with pytest.raises(RuntimeError, match="each row of attention_mask must hold a token"):
            jax.block_until_ready(compiled(bad))


LENGTHS = (3, 5)


def padded(side: str) -> dict[str, Any]:
    """IDS with a first row of 3 tokens and padding that is text elsewhere, and the mask."""
    begin = PROMPT - LENGTHS[0] if side == "left" else 0
    ids, mask = IDS.copy(), np.ones((B, PROMPT), bool)
    mask[0] = (np.arange(PROMPT) >= begin) & (np.arange(PROMPT) < begin + LENGTHS[0])
    ids[0] = 5
    ids[0, mask[0]] = IDS[0, : LENGTHS[0]]
    return {"ids": ids, "attention_mask": jnp.asarray(mask)}


@cache
def alone(mode: str) -> list[list[int]]:
    """What is added to each prompt on its own."""
    texts = [run(mode, ids=IDS[b : b + 1, :n])[0][0, n:] for b, n in enumerate(LENGTHS)]
    return [text.tolist() for text in texts]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mode",
    [
        "local",
        pytest.param("sliding", marks=pytest.mark.sweep),
        pytest.param("unbounded", marks=pytest.mark.sweep),
    ],
)
def test_prompts_of_different_lengths_go_on_as_alone(mode: str) -> None:
    for side in ("left", "right"):
        options = padded(side)
        ids, held, _ = run(mode, **options)
        assert ids[:, :PROMPT].tolist() == options["ids"].tolist()
        assert ids[:, PROMPT:].tolist() == alone(mode)
        assert held is None
    # The control: all tokens of the padded row are another text.
    assert run(mode, ids=options["ids"])[0][0, PROMPT:].tolist() != alone(mode)[0]


@pytest.mark.sweep
def test_a_ragged_stream_stops_and_goes_on() -> None:
    first, held, _ = run(new=NEW, return_cache=True, **padded("left"))
    assert held.position.tolist() == [n + NEW - 1 for n in LENGTHS]
    second, held, _ = run(new=2, ids=first[:, -1:], cache=held, return_cache=True)
    texts = np.concatenate([first[:, PROMPT:], second[:, 1:]], axis=1)
    assert texts.tolist() == [text[: NEW + 2] for text in alone("local")]
    # Rows of different lengths again: one goes on with its last token, the other with two more.
    more = np.concatenate([second[:, -1:], IDS[:, 1:3]], axis=1)
    mask = np.arange(3) < np.array([[1], [3]])
    third, _, _ = run(new=3, ids=more, cache=held, attention_mask=jnp.asarray(mask))
    assert third[0, 3:].tolist() == alone("local")[0][NEW + 2 :]
    whole = np.concatenate([IDS[1], texts[1], IDS[1, 1:3]])[None].astype(np.int32)
    assert third[1, 3:].tolist() == run(new=3, ids=whole)[0][0, -3:].tolist()


def test_a_ragged_row_ends_where_it_ends_alone() -> None:
    texts = alone("local")
    end = texts[0][2]
    ids, held, _ = run(eos_token_id=end, return_cache=True, **padded("right"))
    expected = []
    for text in texts:
        at = text.index(end) if end in text else len(text) - 1
        expected.append(text[:at] + [text[at]] * (len(text) - at))
    assert ids[:, PROMPT:].tolist() == expected
    assert held.position.tolist() == [n + NEW + MORE - 1 for n in LENGTHS]
    # On a cache, the last token of a padded row says that it has finished.
    prompt = np.array([[end, 5], [5, 6]], np.int32)
    mask = jnp.asarray([[True, False], [True, True]])
    after, _, _ = run(new=2, ids=prompt, cache=held, attention_mask=mask, eos_token_id=end)
    assert after[0, 2:].tolist() == [end, end]


def test_ragged_prompts_are_sampled_as_the_loop_draws() -> None:
    options, now = padded("left"), key()
    expected, (held, logits) = [], (None, None)
    ids, mask = jnp.asarray(options["ids"]), options["attention_mask"]
    for _ in range(NEW):
        logits, held = stepped(model(), ids, held, mask)
        now, draw = jax.random.split(now)
        token = sample_token(logits[:, -1], draw, **SAMPLING)
        expected.append(token)
        ids, mask = token[:, None], None
    found, _, after = run(new=NEW, key=key(), **options, **SAMPLING)
    assert found[:, PROMPT:].tolist() == jnp.stack(expected, axis=1).tolist()
    assert jnp.array_equal(jax.random.key_data(after), jax.random.key_data(now))


@eqx.filter_jit
def stepped(model, ids, cache, mask):
    return model(ids, mask, cache=cache, return_cache=True)


@pytest.mark.parametrize("mode", ["local", pytest.param("unbounded", marks=pytest.mark.sweep)])
@pytest.mark.traced_checks
def test_generation_may_be_traced(mode: str) -> None:
    """Prompt, mask, key, temperature and cache as arrays of a larger program."""

    @eqx.filter_jit
    def compiled(ids, mask, key, cache, temperature):
        options = {"attention_mask": mask, "cache": cache, "return_cache": True}
        return generate(model(mode), ids, NEW, key, temperature=temperature, **options)

    mask, zero = jnp.ones((B, PROMPT), bool), jnp.zeros(())
    ids, held, _ = compiled(jnp.asarray(IDS), mask, key(), None, zero)
    assert ids.tolist() == greedy(mode)[:, : PROMPT + NEW].tolist()
    more, _, _ = compiled(ids[:, -1:], None, key(), held, zero)
    assert more[:, 1 : 1 + MORE].tolist() == greedy(mode)[:, PROMPT + NEW :].tolist()
    padded_ids, _, _ = compiled(IDS, mask.at[0, 3:].set(False), key(), None, zero)
    assert padded_ids[0, PROMPT:].tolist() == alone(mode)[0][:NEW]


# Bad input.

PADDED = jnp.asarray(np.arange(PROMPT) < np.array([[3], [5]]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"new": 0}, "max_new_tokens=0 must be at least 1"),
        ({"new": 2.5}, "max_new_tokens=2.5 must be at least 1, an integer"),
        ({"new": -2}, "max_new_tokens=-2 must be at least 1"),
        ({"temperature": 1.0}, "sampling needs key"),
        ({"temperature": -0.5}, r"temperature=-0.5 must be 0 \(greedy\) or positive"),
        ({"top_k": -1}, "top_k=-1 must be at least 0, an integer, or None"),
        ({"top_k": 2.0}, "top_k=2.0 must be at least 0, an integer, or None"),
        ({"eos_token_id": 3.0}, "eos_token_id=3.0 must be an integer"),
        ({"eos_token_id": [3, 4.0]}, "eos_token_id=4.0 must be an integer"),
        ({"ids": IDS[:, :0], "bos_token_id": True}, "bos_token_id=True must be an integer"),
        ({"ids": IDS[0]}, r"prompt_ids are int32 \(5,\), expected integers \(B, L\)"),
        ({"temperature": float("inf")}, "temperature=inf must be .* finite"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\], or None"),
        ({"top_p": 1.5}, r"top_p=1.5 must be in \(0, 1\]"),
        ({"top_p": float("nan")}, r"top_p=nan must be in \(0, 1\]"),
        ({"temperature": float("nan"), "key": 0}, "temperature=nan must be"),
        ({"attention_mask": PADDED.at[:, 1].set(False)}, "tokens must stand next to each other"),
        ({"attention_mask": PADDED.at[0].set(False)}, "each row of attention_mask must hold"),
        ({"attention_mask": PADDED.at[0].set(False), "cache": True}, "its first token, such as"),
        (
            {"attention_mask": jnp.ones((B, PROMPT + 1), bool)},
            r"attention_mask has shape \(2, 6\), expected that of prompt_ids, \(2, 5\)",
        ),
        ({"ids": IDS[:, :0], "cache": True}, "an empty prompt cannot continue a cache"),
    ],
)
def test_bad_input_is_refused(options, message: str, monkeypatch) -> None:
    # Annotations are checked in tests only; users meet the messages of `generate`.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    options = dict(options)
    if options.get("cache"):
        options["cache"] = init_cache(CONFIG, B)
    if "key" in options:
        options["key"] = key(options["key"])
    with pytest.raises(ValueError, match=message):
        run(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, r"temperature=-1.0 must be 0 \(greedy\) or positive"),
        ({"top_k": -1}, "top_k=-1 must be at least 0, an integer, or None"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\], or None"),
        ({"top_p": 1.5}, r"top_p=1.5 must be in \(0, 1\], or None"),
    ],
)
def test_a_draw_with_bad_options_is_refused(options, message: str) -> None:
    with pytest.raises(ValueError, match=f"sample_token: {message}"):
        sample_token(jnp.zeros((1, 4)), key(), **options)


@pytest.mark.traced_checks
def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"input_ids must be in \[0, 17\)"):
        run(ids=np.full((B, PROMPT), 17, np.int32))


def test_a_cache_of_another_batch_is_refused() -> None:
    held = init_cache(CONFIG, B + 1, allocate_kv=True, allocate_norm=True, allocate_ema=True)
    with pytest.raises(ValueError, match=r"attn.k has shape \(3, .*expected \(2, "):
        run(cache=held)
