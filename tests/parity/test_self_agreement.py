"""One language model in two ways: rows alone and in batches, texts whole and token by token."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable

import numpy as np
import pytest

from parity.self_agreement import LARGE, batch_agreement, stream_agreement
from parity.tasks import LanguageModel, TaskError
from tests.helpers import ROOT, roundoff

WORDS, LENGTH = 11, 9
TABLE = np.random.default_rng(0).standard_normal((WORDS, WORDS))
IDS = np.random.default_rng(1).integers(0, WORDS, (6, LENGTH))
Logits = Callable[[np.ndarray], np.ndarray]


def plain(ids: np.ndarray) -> np.ndarray:
    """Logits (B, L, V) that depend on the running sum of tokens."""
    assert ids.dtype == np.int32
    return TABLE[np.cumsum(ids, axis=1) % WORDS]


def shared_scale(ids: np.ndarray) -> np.ndarray:
    """Rounded to steps of the largest token of the whole batch, as with one scale per tensor."""
    step = ids.max() / 1000
    return np.round(plain(ids) / step) * step


def last_of_batch(ids: np.ndarray) -> np.ndarray:
    """The last of several rows gets a little of its neighbour, from the fifth token on."""
    found = plain(ids).copy()
    if len(ids) > 1:
        found[-1, 4:] += 0.25 * found[-2, 4:]
    return found


def test_rows_that_ignore_one_another_have_equal_bits() -> None:
    for agreement, size in zip(
        batch_agreement(LanguageModel("m", plain), IDS, sizes=[2, 3, 6]), (2, 3, 6), strict=True
    ):
        assert agreement.equal and agreement.within(0.0)
        assert agreement.text() == (
            f"m, a row alone and in a batch of {size}: equal bits at all 54 positions"
        )
        assert (agreement.first, agreement.at) == (None, None)
        assert (agreement.largest, agreement.mean, agreement.divergence) == (0.0, 0.0, 0.0)


def test_a_row_that_sees_its_neighbours_is_named() -> None:
    pairs, whole = batch_agreement(LanguageModel("m", last_of_batch), IDS, sizes=[2, 6])
    # In each of three pairs one row differs at five tokens.
    assert (pairs.unequal, whole.unequal) == (15, 5)
    assert whole.first is not None and whole.first[1] == 4 and not whole.equal
    # In reverse order it is the first row that differs: one of the two is reported.
    assert whole.first[0] in (0, 5)
    alone = LanguageModel("m", plain).log_probabilities(IDS[whole.first[0]][None].astype(np.int32))
    other = {0: 1, 5: 4}[whole.first[0]]
    moved = plain(IDS.astype(np.int32))[whole.first[0]] + (
        0.25 * plain(IDS.astype(np.int32))[other] * (np.arange(LENGTH) >= 4)[:, None]
    )
    there = moved - np.log(np.exp(moved).sum(-1, keepdims=True))
    change = np.abs(there - alone[0])[np.maximum(there, alone[0]) >= math.log(LARGE)]
    assert whole.largest == pytest.approx(change.max(), rel=roundoff(100, np.float64))
    assert whole.within(whole.largest) and not whole.within(whole.largest * 0.999)
    assert f"5 of 54 positions differ, the first in row {whole.first[0]} at token 4" in whole.text()


def test_a_scale_of_the_whole_batch_shows() -> None:
    ids = IDS.copy()
    ids[0], ids[1:] = ids[0] % 3 + 1, np.minimum(ids[1:], 8)
    (found,) = batch_agreement(LanguageModel("m", shared_scale), ids)
    assert not found.equal and 0 < found.largest < 0.1
    # Control: the same steps for every row.
    ids[:, 0] = WORDS - 1
    ids[:, 1] = np.arange(6)
    (found,) = batch_agreement(LanguageModel("m", shared_scale), ids)
    assert found.equal


def test_rows_are_in_other_places_too_and_the_graver_arrangement_is_told() -> None:
    """Only in reverse order is the row that begins with 0 the last of its batch."""
    ids = IDS.copy()
    ids[:, 0] = np.arange(6)

    def one(ids: np.ndarray) -> np.ndarray:
        found = plain(ids).copy()
        if len(ids) > 1 and ids[-1, 0] == 0:
            found[-1, 7, 1] += 0.5
        return found

    (found,) = batch_agreement(LanguageModel("m", one), ids)
    assert (found.unequal, found.first) == (1, (0, 7))

    def many(ids: np.ndarray) -> np.ndarray:
        """In their own order more positions of the last row change, and less."""
        found = one(ids)
        if len(ids) > 1 and ids[-1, 0] == 5:
            found[-1, 3:6, 1] += 2.0**-20
        return found

    (found,) = batch_agreement(LanguageModel("m", many), ids)
    assert (found.unequal, found.first) == (3, (5, 3)) and found.largest < 2.0**-20


def test_the_first_difference_is_that_of_the_first_position() -> None:
    def later(ids: np.ndarray) -> np.ndarray:
        found = stepwise(ids).copy()
        found[1, 6, 0] += 1.0
        found[4, 2, 0] += 1.0
        found[5, 2, 0] += 1.0
        return found

    found = stream_agreement(LanguageModel("m", plain), IDS, later)
    assert (found.first, found.unequal) == ((4, 2), 3)


def stepwise(ids: np.ndarray, lost: int | None = None) -> np.ndarray:
    """Token by token, with the running sum as a cache that loses one token."""
    cache, rows = np.zeros(len(ids), np.int64), []
    for place in range(ids.shape[1]):
        cache = cache + (0 if place == lost else ids[:, place])
        rows.append(TABLE[cache % WORDS])
    return np.stack(rows, axis=1)


def test_a_state_that_is_lost_between_tokens_shows_from_there_on() -> None:
    model = LanguageModel("m", plain)
    assert stream_agreement(model, IDS, stepwise).equal
    lost = 3
    found = stream_agreement(model, IDS, lambda ids: stepwise(ids, lost))
    assert found.first is not None and found.first[1] == lost
    rows = IDS[:, lost] % WORDS != 0
    assert found.first[0] == np.flatnonzero(rows)[0]
    assert found.unequal == rows.sum() * (LENGTH - lost)
    first = model.log_probabilities(IDS.astype(np.int32))
    second = LanguageModel("m", lambda ids: stepwise(ids, lost)).log_probabilities(
        IDS.astype(np.int32)
    )
    own = [
        second[b, t, IDS[b, t + 1]] - first[b, t, IDS[b, t + 1]]
        for b in range(len(IDS))
        for t in range(LENGTH - 1)
    ]
    bound = roundoff(1000, np.float64)
    assert found.mean == pytest.approx(sum(own) / len(own), rel=bound)
    kl = (np.exp(first) * (first - second)).sum(-1).mean()
    assert found.divergence == pytest.approx(kl, rel=bound) and kl > 0
    assert found.at is not None
    row, place = found.at
    large = np.maximum(first, second)[row, place] >= math.log(LARGE)
    assert found.largest == np.abs(second - first)[row, place][large].max()
    assert f"in row {row} behind token {place}" in found.text()


def test_what_one_way_excludes_is_an_infinite_change_and_what_both_exclude_none() -> None:
    barred = TABLE.copy()
    barred[:, 2] = -np.inf
    model = LanguageModel("m", lambda ids: barred[ids])
    ids = np.where(IDS == 2, 3, IDS)
    assert stream_agreement(model, ids, lambda ids: barred[ids] + 0.0).equal
    found = stream_agreement(model, ids, lambda ids: TABLE[ids])
    assert found.largest == math.inf and not found.within(1e300)
    back = stream_agreement(LanguageModel("m", lambda ids: TABLE[ids]), ids, lambda i: barred[i])
    assert back.divergence == math.inf
    # Each way excludes a token of the text that the other expects.
    other = TABLE.copy()
    other[:, 3] = -np.inf
    found = stream_agreement(model, IDS, lambda ids: other[ids])
    assert math.isnan(found.mean) and found.divergence == found.largest == math.inf
    assert "inf nats" in found.text()
    # A position differs if any probability does: that of the excluded token is the same.
    found = stream_agreement(model, ids, lambda ids: barred[ids] * 1.5)
    assert found.unequal == ids.size and 0 < found.largest < math.inf


def test_tokens_that_nobody_expects_do_not_count_for_the_largest_change() -> None:
    rare = TABLE.copy()
    rare[:, 5] = -20.0
    model = LanguageModel("m", lambda ids: rare[ids])
    moved = rare.copy()
    moved[:, 5] += 1.0
    found = stream_agreement(model, IDS, lambda ids: moved[ids])
    # The others lose what it gains: the logarithm of 1 + p (e - 1), less than e p.
    p = float(np.exp(model.log_probabilities(IDS.astype(np.int32))[..., 5]).max())
    assert found.unequal == IDS.size and 0 < found.largest < math.e * p < LARGE


def test_probabilities_that_differ_are_not_equal_however_small() -> None:
    rare, moved = TABLE.copy(), TABLE.copy()
    rare[:, 5], moved[:, 5] = -80.0, -81.0
    found = stream_agreement(LanguageModel("m", lambda ids: rare[ids]), IDS, lambda i: moved[i])
    assert (found.largest, found.at, found.unequal) == (0.0, None, IDS.size) and not found.equal
    assert found.text().startswith("m, whole and token by token: 54 of 54 positions differ")
    assert "largest" not in found.text()


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (IDS[:1], {}, "at least two rows"),
        (np.tile(IDS[:1], (4, 1)), {}, "4 rows of which 1 differ"),
        (IDS[[0, 1, 2, 1]], {}, "4 rows of which 3 differ"),
        (IDS, {"sizes": [4]}, "divide it, got 4"),
        (IDS, {"sizes": [1]}, "got 1: one row is no batch"),
        (IDS, {"sizes": [12]}, "from 2 to 6"),
        (IDS[0], {}, "expected token ids (B, L) of integers, got int64 of shape (9,)"),
        (IDS.astype(np.float32), {}, "got float32"),
        (IDS[:, :0], {}, "of shape (6, 0)"),
        (IDS - 1, {}, "from 0 to 10, got -1 to 9"),
    ],
)
def test_what_shows_nothing_is_refused(ids: np.ndarray, options: dict, message: str) -> None:
    with pytest.raises(TaskError) as error:
        batch_agreement(LanguageModel("m", plain), ids, **options)
    assert message in str(error.value)


def test_a_way_beside_itself_is_refused() -> None:
    model = LanguageModel("m", plain)
    with pytest.raises(TaskError, match="compared with itself"):
        stream_agreement(model, IDS, plain)

    class Program:
        def logits(self, ids: np.ndarray) -> np.ndarray:
            return plain(ids)

    program = Program()
    with pytest.raises(TaskError, match="compared with itself"):
        stream_agreement(LanguageModel("m", program.logits), IDS, program.logits)
    assert stream_agreement(LanguageModel("m", program.logits), IDS, Program().logits).equal
    with pytest.raises(TaskError, match="at least two tokens"):
        stream_agreement(model, IDS[:, :1], stepwise)
    with pytest.raises(TaskError, match="one shape"):
        stream_agreement(model, IDS, lambda ids: stepwise(ids)[..., :-1])


@pytest.mark.sweep
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "docs" / "examples" / "my_serving.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "a row alone and in a batch of 4" in out and "whole and token by token" in out


def test_a_text_of_improbable_tokens_only_agrees_by_its_divergence():
    """Below `LARGE` no token counts for the largest change; garbage must not pass for that."""
    random = np.random.default_rng(9)
    table, other = random.normal(size=(2, 5000, 5000))
    ids = random.integers(0, 5000, (2, 12))
    model = LanguageModel("many", lambda ids: 0.01 * table[ids])
    found = stream_agreement(model, ids, lambda ids: 0.2 * other[ids])
    assert found.largest == 0.0
    assert not found.within(1e-3)
    assert found.within(found.divergence)
