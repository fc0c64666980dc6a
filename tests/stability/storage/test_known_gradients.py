"""Gradients of a real backward: their sizes and signs, whose they are, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stability.core.findings import Severity
from stability.core.number_formats import BF16
from stability.core.parameter_leaves import leaves_of
from stability.storage.diagnose import report
from stability.storage.known_gradients import KnownGradients, RowGradients, measured
from stability.storage.remedies import NOTHING, REMEDIES, try_remedies
from stability.storage.simulate import FLOAT32, GRADIENTS, run
from stability.storage.survival import predict, predict_each
from stability.storage.update_rules import GRADIENT_RMS, SGD, AdamW
from tests.helpers import roundoff

SIGNAL = GRADIENTS.signal


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3)).to(torch.bfloat16)


def losses(of: torch.nn.Module, count: int):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(5, 4, generator=generator).to(torch.bfloat16)
        yield of, of(x).float().square().mean()


def test_a_module_and_its_loss_are_the_gradients_by_name() -> None:
    of = model()
    leaves = leaves_of(of.state_dict())
    by_module = measured(losses(of, 3), leaves, "a test", SIGNAL)
    assert all(p.grad is None for p in of.parameters())
    squares = {n: np.zeros(p.shape) for n, p in of.named_parameters()}
    named = []
    for _, loss in losses(of, 3):
        grads = torch.autograd.grad(loss, list(of.parameters()))
        named.append(dict(zip(squares, grads, strict=True)))
        for n, g in named[-1].items():
            squares[n] += np.square(g.double().numpy())
    for n, rows in by_module.rows.items():
        whole = np.sqrt(np.mean(squares[n] / 3, axis=1 if squares[n].ndim > 1 else None))
        bound = roundoff(3 * squares[n].size)
        assert rows.sizes == pytest.approx(whole, rel=bound), n
        assert rows.rms() == pytest.approx(np.sqrt(squares[n].mean() / 3), rel=bound)
    by_name = measured(named, leaves, "a test", SIGNAL)
    for n, rows in by_name.rows.items():
        assert np.array_equal(rows.sizes, by_module.rows[n].sizes)
        assert np.array_equal(rows.signals, by_module.rows[n].signals)
    assert by_module.source == "as a test gave them in 3 batches"


def test_a_module_that_has_gradients_already_begins_anew() -> None:
    of = model()
    leaves = leaves_of(of.state_dict())
    clean = measured(losses(of, 1), leaves, "a test", SIGNAL)
    for p in of.parameters():
        p.grad = torch.full_like(p, 100.0)
    again = measured(losses(of, 1), leaves, "a test", SIGNAL)
    assert {n: x.rms() for n, x in again.rows.items()} == {
        n: x.rms() for n, x in clean.rows.items()
    }


@pytest.mark.parametrize("signal", [0.0, 0.6, 1.0])
def test_signals_are_the_share_that_keeps_its_sign(signal) -> None:
    rng = np.random.default_rng(0)
    shape, count = (40, 50), 8
    push = rng.choice([-1.0, 1.0], shape)
    noise = (1 - signal**2) ** 0.5
    batches = [{"w": 7 * (signal * push + noise * rng.normal(size=shape))} for _ in range(count)]
    leaves = leaves_of({"w": np.zeros(shape, np.float32)})
    rows = measured(batches, leaves, "a test", SIGNAL).rows["w"]
    # The square of the signal is a mean over 2,000 elements of products of 28 pairs of batches.
    spread = (2 / (40 * 50 * count * (count - 1))) ** 0.5
    assert float(rows.signals) ** 2 == pytest.approx(signal**2, abs=6 * spread)
    assert rows.rms() == pytest.approx(7.0, rel=6 * (2 / (40 * 50 * count)) ** 0.5)


def test_one_batch_says_sizes_and_no_signs() -> None:
    leaves = leaves_of({"w": np.zeros((2, 2), np.float32)})
    gradient = np.array([[3.0, 4.0], [0.0, 0.0]])
    known = measured([{"w": gradient}], leaves, "my.py", 0.25)
    assert known.rows["w"].sizes == pytest.approx([12.5**0.5, 0.0])
    assert float(known.rows["w"].signals) == 0.25
    assert "0.25 is assumed; yield more batches" in known.remarks[0]


def test_what_does_not_fit_is_said_and_what_has_no_gradient_costs_nothing() -> None:
    tree = {"net.fc.weight": np.ones((2, 2), np.float32), "net.norm.weight": np.ones(3, np.float32)}
    known = measured(
        [{"fc.weight": np.ones((2, 2)), "head.weight": np.ones(3)}] * 2,
        leaves_of(tree), "my.py", SIGNAL,
    )  # fmt: skip
    assert float(known.rows["net.fc.weight"].rms()) == 1.0
    assert known.rows["net.norm.weight"].rms() == 0.0
    text = " ".join(known.remarks)
    assert "Assumed untrained, since there is no gradient: net.norm.weight." in text
    assert "Gradients that belong to no parameter: head.weight." in text
    found = report(tree, known=lambda _: known, remedies=())
    assert found.whole is not None
    assert {f.name: f.cost for f in found.whole.families}["norms"] == 0.0
    # At 1 it would freeze, if it were trained.
    warned = {f.subject for f in found.findings if f.severity is Severity.WARNING}
    assert warned == {"net.fc.weight"}
    assert all(line in found.text() for line in known.remarks)


def test_steps_of_gradient_descent_are_as_large_as_its_gradients() -> None:
    values, rule = np.linspace(0.5, 1.5, 300, dtype=np.float32), SGD(0.1)
    sizes = {"small": 1e-4, "large": 1.0}
    shape = values.shape
    known = {n: RowGradients(np.array(x), np.array(SIGNAL), shape) for n, x in sizes.items()}
    ways = run(dict.fromkeys(sizes, values), rule, FLOAT32, known=known)
    small, large = (np.abs(ways[n].intended).mean() / x for n, x in sizes.items())
    assert small == pytest.approx(large, rel=0.1)
    assert predict(values, rule, rms=1e-4).frozen > 0.9
    assert predict(values, rule, rms=1.0).frozen < 0.1
    assert predict(values, rule) == predict(values, rule, rms=GRADIENT_RMS)
    # The rate from which half moves is less for a larger gradient, in proportion.
    rates = [predict(values, rule, rms=x).min_lr for x in sizes.values()]
    assert rates[0] / rates[1] == pytest.approx(1e4, rel=1e-2)


def test_known_gradients_decide_what_is_measured() -> None:
    tree = {"fc.weight": np.full((16, 16), 0.5, np.float32)}

    def known(size: float) -> KnownGradients:
        rows = {"fc.weight": RowGradients(np.array(size), np.array(SIGNAL), (16, 16))}
        return KnownGradients(rows, "as a test says")

    frozen = {}
    for size in (1e-5, 1.0):
        found = report(tree, SGD(0.1), known=lambda _, size=size: known(size), remedies=())
        (frozen[size],) = [f.value for f in found.findings if f.metric == "frozen_fraction"]
        assert "as a test says" in found.text()
    assert frozen[1e-5] == 1.0
    assert frozen[1.0] < 0.1


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_rows_that_decay_alone_moves_are_predicted_as_they_are_measured(decay) -> None:
    """Unused tokens of an embedding: without decay nothing of theirs is lost, with it all is."""
    values = np.random.default_rng(0).normal(0.0, 0.02, (10, 96)).astype(np.float32)
    sizes = np.where(np.arange(10) < 7, 0.0, 1e-3)
    rows = RowGradients(sizes, np.full(10, SIGNAL), values.shape)
    known = KnownGradients({"embed.weight": rows}, "as a test says")
    rule = AdamW(3e-4, weight_decay=decay)
    found = report({"embed.weight": values}, rule, known=lambda _: known, remedies=())
    of = {f.metric: f.value for f in found.findings if f.subject == "embed.weight"}
    assert of["frozen_fraction"] == of["predicted_frozen_fraction"] == (0.7 if decay else 0.0)
    # Where most do not move at this rate, the rate from which half does is a larger one.
    assert (of["min_lr"] > rule.lr) == bool(decay)
    everything = RowGradients(np.array(0.0), np.array(SIGNAL), values.shape)
    assert not any(p.frozen for p in predict_each(values, AdamW(3e-4), (BF16,), True, 0.0,
                                                  everything.idle()).values())  # fmt: skip


def test_rows_without_a_gradient_count_neither_for_nor_against_a_remedy() -> None:
    """Unused positions: weight decay moves them too little for bfloat16 under every remedy."""
    values = np.random.default_rng(0).normal(0.0, 0.02, (10, 96)).astype(np.float32)
    used = np.arange(10) >= 6
    rows = RowGradients(np.where(used, 1e-3, 0.0), np.full(10, SIGNAL), values.shape)
    known = KnownGradients({"wpe.weight": rows}, "as a test says")
    rule = AdamW(3e-4, weight_decay=0.01)
    tried = tuple(r for r in REMEDIES if r.name in ("larger lr", "float32 parameters"))
    found = report({"wpe.weight": values}, rule, known=lambda _: known, remedies=(NOTHING, *tried))
    (trials,) = found.trials.values()
    by_name = {trial.remedy.name: trial for trial in trials}
    # No remedy freezes a row that its gradients move, and the others are not among the frozen.
    assert all(trial.survival.frozen < 0.1 for trial in trials)
    assert all(trial.idle == pytest.approx(0.6) for trial in trials)
    assert "of those with a gradient frozen" in by_name["larger lr"].describe()
    (said,) = [f.message for f in found.findings if f.metric == "frozen_fraction"]
    assert "60% have no gradient and count neither for nor against a remedy" in said
    # Where no row has a gradient, what decay alone does is all there is to judge by.
    nothing = RowGradients(np.array(0.0), np.array(SIGNAL), values.shape)
    (left,) = try_remedies(
        {"wpe.weight": values}, rule, remedies=(NOTHING,), known={"wpe.weight": nothing}
    )["wpe.weight"]
    assert left.survival.frozen > 0.9
    assert not left.idle


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ([], "no batch"),
        ([3.0], "batch 1 is a float: expected gradients by parameter name"),
        ([(1, 2, 3)], "batch 1 is a tuple of int, int, int: expected a torch module and its loss"),
        ([(torch.nn.Linear(2, 2), 3.0)], "expected a loss that is one torch number, got a float"),
        ([(torch.nn.Linear(2, 2), torch.ones(4))], "got a Tensor of shape (4,)"),
        ([(torch.nn.Linear(2, 2), torch.tensor(1.0))], "loss.backward() fails: element 0 of"),
        ([{"weight": np.ones(3)}], "has shape (3,), the checkpoint's parameter (2, 2)"),
        ([{"weight": np.full((2, 2), np.nan)}], "batch 1: the gradient of weight is not finite"),
        ([{"weight": np.zeros((2, 2))}], "all gradients of the checkpoint's 1 parameters are zero"),
        ([{"other": np.ones((2, 2))}], "are weight, gradients came for other names: other"),
    ],
)
def test_what_is_no_gradient_is_refused(batches, told) -> None:
    leaves = leaves_of({"weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(ValueError) as refused:
        measured(iter(batches), leaves, "my.py", SIGNAL)
    assert told in str(refused.value)
