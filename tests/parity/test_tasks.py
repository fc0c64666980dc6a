"""Perplexity and greedy agreement of two language models."""

from __future__ import annotations

import math
import sys
import types
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats

from parity.lm_eval_model import BLOCK, NEW_TOKENS, lm_eval_model
from parity.tasks import LanguageModel, TaskError, greedy_agreement, text_agreement
from tests.helpers import ROOT, cli

WORDS = 7
rng = np.random.default_rng(0)
TABLE = rng.standard_normal((WORDS, WORDS, WORDS))
"""Logits of the next token after each two tokens."""
TEXT = rng.integers(0, WORDS, 103)


def of_table(table: np.ndarray, name: str = "table") -> LanguageModel:
    """A model whose logits depend on the last two tokens, and on 0 before the first."""

    def logits(ids: np.ndarray) -> np.ndarray:
        assert ids.dtype == np.int32
        before = np.concatenate([np.zeros_like(ids[:, :1]), ids[:, :-1]], axis=1)
        return table[before, ids]

    return LanguageModel(name, logits)


def probabilities(table: np.ndarray) -> np.ndarray:
    e = np.exp(table)
    return np.log(e / e.sum(-1, keepdims=True))


def likelihoods(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Negative log-likelihood of each token but the first, by a loop."""
    p, before = probabilities(table), [0, *ids[:-2]]
    return np.asarray([-p[b, i, t] for b, i, t in zip(before, ids[:-1], ids[1:], strict=True)])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("window", [10, 25])
def test_a_text_is_scored_window_by_window(rows: int, window: int) -> None:
    other = TABLE + 0.1 * rng.standard_normal(TABLE.shape)
    found = text_agreement(
        of_table(TABLE, "a"), of_table(other, "b"), TEXT, window=window, rows=rows
    )
    count = len(TEXT) // window
    windows = TEXT[: count * window].reshape(count, window)
    a, b = (np.stack([likelihoods(t, w) for w in windows]) for t in (TABLE, other))
    assert (found.windows, found.tokens) == (count, count * (window - 1))
    assert found.perplexities == pytest.approx((math.exp(a.mean()), math.exp(b.mean())))
    means = (a - b).mean(axis=1)
    assert found.difference == pytest.approx(means.mean())
    low, high = found.interval
    assert (low + high) / 2 == pytest.approx(found.difference)
    # Student's t of these degrees of freedom: a fortieth of it is beyond.
    error = means.std(ddof=1) / math.sqrt(count)
    beyond = stats.t.sf((high - low) / 2 / error, count - 1)
    assert beyond == pytest.approx(1 / 40)
    same = sum(
        TABLE[x, y].argmax() == other[x, y].argmax()
        for w in windows
        for x, y in zip([0, *w[:-2]], w[:-1], strict=True)
    )
    assert 0 < found.same_best == same < found.tokens and not found.equal


def test_an_interval_covers_the_truth_in_nineteen_of_twenty_texts() -> None:
    """Half of the noise's difference to the truth is on each side."""
    draws = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        text = draws.integers(0, WORDS, 60)
        # The mean over all contexts, which are equally likely here, is the truth.
        shift = draws.standard_normal(TABLE.shape) * 0.05
        p = probabilities(TABLE) - probabilities(TABLE + shift)
        found = text_agreement(of_table(TABLE), of_table(TABLE + shift), text, window=6)
        covered += found.interval[0] <= -p.mean() <= found.interval[1]
    # 190 are expected; four standard deviations of 200 tries are 12.
    assert covered >= 190 - 12


def test_agreement_is_what_the_text_shows() -> None:
    same = text_agreement(of_table(TABLE, "a"), of_table(TABLE.copy(), "b"), TEXT, window=20)
    assert same.equal and same.interval == (0.0, 0.0) and same.within(1e-12)
    assert "equal bit for bit" in same.text() and f"{same.tokens} of {same.tokens}" in same.text()
    near = text_agreement(
        of_table(TABLE), of_table(TABLE + 1e-3 * rng.standard_normal(TABLE.shape)), TEXT, window=20
    )
    assert not near.equal and "bit for bit" not in near.text()
    # One difference in the first window is one, whatever follows.
    once = TABLE.copy()
    once[0, TEXT[0], 0] += 1.0
    rare = np.concatenate([TEXT[:20], np.full(20, (TEXT[0] + 1) % WORDS)])
    assert not text_agreement(of_table(TABLE), of_table(once), rare, window=20).equal
    reach = max(map(abs, near.interval))
    assert near.within(1.01 * reach) and not near.within(0.99 * reach)
    # Both ends count, and what is no number is no agreement.
    for interval in ((-2.0, 0.0), (0.0, 2.0), (0.0, math.nan), (math.nan, 0.0)):
        assert not replace(near, interval=interval).within(1.0)


@pytest.mark.parametrize("both", [True, False])
def test_a_token_that_a_model_excludes_is_no_agreement(both: bool) -> None:
    excluded = TABLE.copy()
    excluded[:, :, TEXT[5]] = -np.inf
    first = of_table(excluded.copy() if both else TABLE, "a")
    match = f"{'a' if both else 'b'}: .* have probability 0"
    with np.errstate(invalid="ignore"), pytest.raises(TaskError, match=match):
        text_agreement(first, of_table(excluded, "b"), TEXT, window=20)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ids": TEXT[:39]}, r"at least two windows of 20 tokens.*39"),
        ({"ids": TEXT.astype(float)}, "integers"),
        ({"ids": TEXT[None]}, "token ids"),
        ({"ids": np.where(TEXT == 3, -1, TEXT)}, "from 0 to 6, got -1"),
        ({"window": 1}, "window >= 2"),
        ({"rows": 0}, "rows >= 1"),
        ({"second": of_table(TABLE[:, :, :6], "b")}, "7 of a and 6 of b"),
        ({"second": of_table(np.where(TABLE > 2, np.nan, TABLE), "b")}, "b: logits hold NaN"),
        ({"second": of_table(np.where(TABLE > 2, np.inf, TABLE), "b")}, "b: logits hold NaN"),
        ({"second": of_table(np.full_like(TABLE, -np.inf), "b")}, "exclude every token"),
        ({"second": LanguageModel("b", lambda ids: TABLE[0][ids][:, :1])}, r"got \(1, 1, 7\)"),
        ({"second": LanguageModel("b", lambda ids: TABLE[0, 0][ids])}, r"got \(1, 20\)"),
        ({"second": of_table(TABLE + 1j, "b")}, "real logits, got complex128"),
    ],
)
def test_what_is_no_measurement_is_refused(change: dict, match: str) -> None:
    words = {"first": of_table(TABLE, "a"), "second": of_table(TABLE * 2, "b"), "ids": TEXT}
    words |= {"window": 20, "rows": 1} | change
    with pytest.raises(TaskError, match=match):
        text_agreement(words.pop("first"), words.pop("second"), words.pop("ids"), **words)


def test_a_model_is_not_compared_with_itself() -> None:
    model = of_table(TABLE)
    for other in (model, replace(model, name="b")):
        with pytest.raises(TaskError, match="itself"):
            text_agreement(model, other, TEXT, window=20)
        with pytest.raises(TaskError, match="itself"):
            greedy_agreement(model, other, [TEXT[:3]], new_tokens=2)


class Bound:
    def logits(self, ids: np.ndarray) -> np.ndarray:
        return TABLE[0][ids]


def test_a_bound_method_of_one_object_is_one_model() -> None:
    one = Bound()
    with pytest.raises(TaskError, match="itself"):
        text_agreement(
            LanguageModel("a", one.logits), LanguageModel("b", one.logits), TEXT, window=20
        )


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda ids, n: np.full((1, n), np.nan), "integers, got float64"),
        (lambda ids, n: np.full((1, n), 0.5), "integers"),
        (lambda ids, n: np.full((1, n), 99), "from 0 to 6, got"),
        (lambda ids, n: np.full((1, n), -1), "from 0 to 6, got -1"),
    ],
)
def test_what_is_generated_is_tokens(made, match: str) -> None:
    models = [LanguageModel(n, of_table(t).logits, made) for n, t in (("a", TABLE), ("b", -TABLE))]
    with pytest.raises(TaskError, match=match):
        greedy_agreement(*models, [TEXT[:3]], new_tokens=4)


def test_a_prompt_has_tokens_of_both_models() -> None:
    right = of_table(TABLE, "a")
    for prompt, match in ((np.asarray([3, -1]), "got -1"), (TEXT[:3], "7 of a and 6 of b")):
        other = of_table(TABLE[:, :, :6] if match.startswith("7") else -TABLE, "b")
        with pytest.raises(TaskError, match=match):
            greedy_agreement(right, other, [prompt], new_tokens=2)


def greedy(table: np.ndarray, ids: np.ndarray, count: int) -> list[int]:
    made = [0, *map(int, ids)]
    for _ in range(count):
        made.append(int(table[made[-2], made[-1]].argmax()))
    return made[len(made) - count :]


def test_continuations_are_compared_up_to_their_first_difference() -> None:
    other = TABLE + 0.4 * np.random.default_rng(5).standard_normal(TABLE.shape)
    prompts = [TEXT[i : i + 4] for i in range(0, 80, 4)]
    found = greedy_agreement(of_table(TABLE, "a"), of_table(other, "b"), prompts, new_tokens=9)
    expected = {}
    for number, prompt in enumerate(prompts):
        a, b = greedy(TABLE, prompt, 9), greedy(other, prompt, 9)
        if a != b:
            at = next(i for i in range(9) if a[i] != b[i])
            x, y = [*prompt, *a[:at]][-2:]
            pa, pb = probabilities(TABLE)[x, y], probabilities(other)[x, y]
            margins = pa[a[at]] - pa[b[at]], pb[b[at]] - pb[a[at]]
            expected[number] = (at, (a[at], b[at]), margins)
    assert 0 < len(expected) < len(prompts)
    assert {s.prompt: (s.position, s.tokens) for s in found.splits} == {
        n: e[:2] for n, e in expected.items()
    }
    for split in found.splits:
        assert split.margins == pytest.approx(expected[split.prompt][2])
        assert min(split.margins) >= 0
    assert found.same == len(prompts) - len(expected)
    low, high = found.interval
    assert 0 < low < found.same / len(prompts) < high < 1
    assert f"{found.same} of {len(prompts)} prompts" in found.text()
    assert ("more" in found.text()) == (len(found.splits) > 5)


def test_few_prompts_that_agree_show_little() -> None:
    """Wilson's interval of n of n begins at n / (n + z^2)."""
    prompts = [TEXT[i : i + 2] for i in range(10)]
    found = greedy_agreement(of_table(TABLE), of_table(TABLE.copy()), prompts, new_tokens=3)
    assert found.same == 10 and found.splits == ()
    z = NormalDist().inv_cdf(1 - 1 / 40)
    assert found.interval == pytest.approx((10 / (10 + z**2), 1.0))


def test_a_model_s_own_generation_is_used_and_checked() -> None:
    asked = []

    def generate(ids: np.ndarray, count: int) -> np.ndarray:
        asked.append((ids.tolist(), count))
        return np.asarray([greedy(TABLE, ids[0], count)])

    own = replace(of_table(TABLE, "own"), generate=generate)
    found = greedy_agreement(own, of_table(TABLE.copy()), [TEXT[:4]], new_tokens=6)
    assert found.same == 1 and asked == [([TEXT[:4].tolist()], 6)]
    with_prompt = replace(own, generate=lambda ids, n: np.zeros((1, ids.shape[1] + n), int))
    with pytest.raises(TaskError, match="without the prompt"):
        greedy_agreement(with_prompt, of_table(TABLE), [TEXT[:4]], new_tokens=6)
    for prompts, count in (([], 3), ([TEXT[:2]], 0)):
        with pytest.raises(TaskError, match="expected prompts"):
            greedy_agreement(own, of_table(TABLE), prompts, new_tokens=count)
    with pytest.raises(TaskError, match="prompt 1 has no token"):
        greedy_agreement(own, of_table(TABLE), [TEXT[:2], TEXT[:0]], new_tokens=2)


@pytest.mark.sweep
def test_the_example_shows_what_the_document_says() -> None:
    done = cli("tasks", str(ROOT / "docs" / "examples" / "my_tasks.py"), "--margin", "0.01")
    assert done.exit_code == 0, done.output
    shown = done.output.splitlines()
    document = (ROOT / "docs" / "your-own-port.md").read_text(encoding="utf-8")
    # Its numbers depend on the last bits of a machine, the text and its windows do not.
    same = "perplexity of 11220 tokens in 44 windows: float32 "
    assert shown[0].startswith(same) and same in document
    assert shown[-1] == "within 0.01 nats: yes" and shown[-1] in document


# -- lm-eval


class Template:
    """Stands for lm-eval's base class where it is not installed."""

    def __init__(self) -> None:
        self.rank = 0


class Request:
    def __init__(self, *args: object) -> None:
        self.args = args


@pytest.fixture(params=["stand-in", "installed"])
def harness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "installed":
        pytest.importorskip("lm_eval.api.model", reason="lm-eval is not installed")
        return
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["lm_eval.api.model"], "TemplateLM", Template, raising=False)


def encode(text: str) -> list[int]:
    return [int(c) for c in text]


def decode(ids) -> str:
    return "".join(map(str, ids))


def evaluated(window: int = 50, end: int = 0):
    return lm_eval_model(of_table(TABLE), encode, decode, end=end, window=window)


@pytest.mark.usefixtures("harness")
def test_continuations_are_scored_after_their_context() -> None:
    p = probabilities(TABLE)
    [(score, best)] = evaluated()._loglikelihood_tokens([(("", ""), [3, 5], [1, 2])])
    assert score == pytest.approx(p[3, 5, 1] + p[5, 1, 2]) and best is False
    first = int(TABLE[3, 5].argmax())
    second = int(TABLE[5, first].argmax())
    for rest, right in (([first, second], True), ([first, (second + 1) % WORDS], False)):
        [(_, best)] = evaluated()._loglikelihood_tokens([(("", ""), [3, 5], rest)])
        assert best is right
    # Only the last tokens fit into the window; before them the model sees a 0.
    [(score, _)] = evaluated(window=2)._loglikelihood_tokens([(("", ""), [6, 3, 5], [1, 2])])
    assert score == pytest.approx(p[0, 5, 1] + p[5, 1, 2])
    # An empty context, such as blanks that a task moves to the continuation, is the end's token.
    [(score, _)] = evaluated(end=4)._loglikelihood_tokens([(("", ""), [], [1, 2])])
    assert score == pytest.approx(p[0, 4, 1] + p[4, 1, 2])
    for rest, match in (([], "of no token"), ([-1], "below 7"), ([7], "below 7")):
        with pytest.raises(TaskError, match=match):
            evaluated()._loglikelihood_tokens([(("", ""), [3], rest)])
    with pytest.raises(TaskError, match="3 tokens does not fit into a window of 2"):
        evaluated(window=2)._loglikelihood_tokens([(("", ""), [6], [1, 2, 3])])


@pytest.mark.usefixtures("harness")
def test_a_whole_text_is_scored_once_for_each_token() -> None:
    text, p = "3516243", probabilities(TABLE)
    ids, end = encode(text), 2
    [whole] = evaluated(end=end).loglikelihood_rolling([Request(text)])
    before = [0, end, *ids]
    every = [p[before[i], before[i + 1], ids[i]] for i in range(len(ids))]
    assert whole == pytest.approx(sum(every))
    # In windows of 3: the first token of a window has its last token as context, and the last
    # window, which predicts one token, the two before that as well.
    [parts] = evaluated(window=3, end=end).loglikelihood_rolling([Request(text)])
    every[3] = p[0, ids[2], ids[3]]
    assert parts == pytest.approx(sum(every))


@pytest.mark.usefixtures("harness")
def test_generation_ends_where_the_request_says() -> None:
    [plain] = evaluated(end=9).generate_until([Request("35", {"max_gen_toks": 40})])
    expected = decode(greedy(TABLE, np.asarray([3, 5]), 40))
    assert plain == expected
    stop = expected[BLOCK - 1 : BLOCK + 1]
    [cut] = evaluated(end=9).generate_until([Request("35", {"max_gen_toks": 40, "until": [stop]})])
    assert cut == expected[: expected.index(stop)]
    [cut] = evaluated(end=9).generate_until([Request("35", {"until": ["nothing", expected[:3]]})])
    assert cut == ""
    ends = [expected[5:9], expected[3:6]]
    [cut] = evaluated(end=9).generate_until([Request("35", {"until": ends})])
    assert cut == expected[: min(map(expected.index, ends))]
    [empty] = evaluated(end=4).generate_until([Request("", {"max_gen_toks": 1})])
    assert empty == decode(greedy(TABLE, np.asarray([4]), 1))
    greedily = {"do_sample": True, "temperature": 0.0, "max_gen_toks": 3}
    [answer] = evaluated(end=9).generate_until([Request("35", greedily)])
    assert answer == expected[:3]
    [all_of_it] = evaluated(end=9).generate_until([Request("35", {"until": "nothing"})])
    assert len(all_of_it) == NEW_TOKENS
    end = int(expected[4])
    [ended] = evaluated(end=end).generate_until([Request("35", {"max_gen_toks": 40})])
    assert ended == expected[: expected.index(str(end))]
    with pytest.raises(TaskError, match="samples"):
        evaluated().generate_until([Request("35", {"do_sample": True, "temperature": 0.7})])


@pytest.mark.usefixtures("harness")
@pytest.mark.parametrize("window", [2, 7, 8])
def test_generation_sees_what_fits_into_the_window(window: int) -> None:
    """Half of the window is made at a time; before its first token the model sees a 0."""
    widths = []

    def logits(ids: np.ndarray) -> np.ndarray:
        widths.append(ids.shape[1])
        return of_table(TABLE).logits(ids)

    model = lm_eval_model(LanguageModel("a", logits), encode, decode, end=9, window=window)
    [found] = model.generate_until([Request("3516243516", {"max_gen_toks": 20})])
    made, half = encode("3516243516"), window // 2
    while len(made) < 30:
        count = min(half, 30 - len(made))
        made += greedy(TABLE, np.asarray(made[-(window - count) :]), count)
    assert found == decode(made[10:])
    # The last token is made of the ones before it.
    assert max(widths) == window - 1


def test_without_the_harness_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ImportError, match="pip install lm-eval"):
        evaluated()
