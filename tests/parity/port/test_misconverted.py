"""A square matrix that was not transposed is named where the difference starts at its use."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.ad_checkpoint import checkpoint_name

from parity import FunctionSide, Port, TorchSide, compare
from parity.engine.pairing.matching import match_parameters
from parity.port.conversion import _square, misplaced
from parity.port.narrow import NarrowStage
from parity.sides import SideError
from reports.nightly import accounts
from reports.page.sections.ports import _port
from reports.ports.document import STAGES, document_of
from tests.reports.nights import run

SIZE = 8
TABLED = ("kernel", "bias")
"""Names of a matrix and a vector that the table of conventions knows."""
UNKNOWN = ("mats_in", "shift")


def made(
    *untransposed: str,
    names: tuple[str, str] = TABLED,
    flat: bool = False,
    coarse: bool = False,
    symmetric: bool = False,
    bias: float = 1.0,
    wide: int = SIZE,
):
    """Return a port of two layers and its report.

    Args:
        untransposed: Layers whose kernel is planted as it lies in the original.
        names: What the port calls its matrices and vectors.
        flat: Whether no name of a parameter says in which stage it is used.
        coarse: Whether both layers are one stage, with a name that holds both.
        symmetric: Whether the last kernel is its own transpose.
        bias: Factor by which the last bias is wrong.
        wide: Width between the layers.
    """
    torch.manual_seed(0)
    layers = {"up": torch.nn.Linear(SIZE, wide), "down": torch.nn.Linear(wide, SIZE)}
    module = torch.nn.Sequential()
    for name, layer in layers.items():
        module.add_module(name, layer)
    if symmetric:
        with torch.no_grad():
            weight = layers["down"].weight
            weight.add_(weight.T.clone())
    matrix, vector = names

    def key(layer, kind):
        return (
            f"{kind}_{layer}" if flat else f"block.{layer}.{kind}" if coarse else f"{layer}.{kind}"
        )

    def mark(x, name):
        return x if coarse else checkpoint_name(x, name)

    def forward(p, x):
        x = mark(x @ p[key("up", matrix)] + p[key("up", vector)], "up")
        x = mark(x @ p[key("down", matrix)] + bias * p[key("down", vector)], "down")
        return checkpoint_name(x, "block") if coarse else x

    params = {}
    for name, layer in layers.items():
        weight = layer.weight.detach().numpy()
        kernel = weight if name in untransposed else weight.T
        params[key(name, matrix)] = kernel.copy()
        params[key(name, vector)] = layer.bias.detach().numpy().copy()
    x = np.random.default_rng(0).normal(size=(3, SIZE)).astype(np.float32)
    side = FunctionSide(lambda p, x: jnp.asarray(forward(p, x)), params, x)
    port = Port("square", TorchSide(module, torch.tensor(x)), side, gradients=False, bfloat16=False)
    return port, compare(port)


@pytest.mark.parametrize("layer", ["up", "down"])
@pytest.mark.parametrize("names", [TABLED, UNKNOWN], ids=["tabled", "unknown"])
def test_an_untransposed_square_matrix_is_named(layer, names) -> None:
    _, report = made(layer, names=names)
    assert report.culprit.name == layer
    [hint] = report.hints
    assert hint.startswith(f"parameter {layer}.{names[0]}: not transposed, it seems: {layer} holds")
    assert f"\n{hint}\n" in report.text() + "\n"


def test_it_is_named_where_no_name_says_where_it_is_used() -> None:
    _, report = made("down", names=UNKNOWN, flat=True)
    [hint] = report.hints
    assert hint.startswith("parameter mats_in_down:")


def test_two_of_one_stage_are_named_together() -> None:
    _, report = made("up", "down", coarse=True)
    assert {*report.untransposed} == {"block.up.kernel", "block.down.kernel"}
    both = "with it and the other matrices listed here transposed"
    assert all(both in note for note in report.untransposed.values())


def test_the_stored_run_its_page_and_a_nights_account_have_the_hint() -> None:
    port, report = made("down", names=UNKNOWN)
    document = document_of(port, report)
    assert document["hints"] == list(report.hints) != []
    assert _port(document, run(), 0)["hints"] == list(report.hints)
    account = accounts.of_port(report)
    assert account is not None and account.note == report.hints[0]


def test_the_stored_run_of_a_large_port_keeps_its_last_stages_in_bfloat16() -> None:
    """The results come last; the page and the report have a sentence about the very last."""
    port, report = made()
    narrow = [NarrowStage(f"s{i}", 2e-3, 1e-3, 1e-3) for i in range(STAGES + 3)]
    stored = document_of(port, replace(report, narrow=tuple(narrow)))["bfloat16"]
    assert [each["name"] for each in stored] == [each.name for each in narrow[3:]]


@pytest.mark.parametrize(
    "how",
    [{"symmetric": True}, {"wide": 2 * SIZE}, {}, {"flat": True}, {"coarse": True}],
    ids=["symmetric", "not square", "transposed", "flat", "coarse"],
)
def test_another_bug_is_not_taken_for_one(how) -> None:
    """The control: the bias is wrong, and no matrix is named."""
    port, report = made(bias=2.0, **how)
    assert not report.holds and report.hints == ()
    assert document_of(port, report)["hints"] == []


def test_a_port_that_holds_has_no_hint() -> None:
    _, report = made()
    assert report.holds and report.hints == ()


def linear_sides():
    """Return a side of torch and one of JAX that compute the same, of a matrix and a vector."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(2, 3)
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    params = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    function = FunctionSide(lambda p, x: x @ p["weight"].T + p["bias"], params, x)
    return TorchSide(layer, torch.tensor(x)), function


@pytest.mark.parametrize("which", [0, 1], ids=["torch", "jax"])
def test_a_side_runs_with_other_parameters_and_is_unchanged(which) -> None:
    side = linear_sides()[which]
    before = side.run().stages["output"]
    weight = np.full((3, 2), 0.5, np.float32)
    other = side.with_parameters({"weight": weight})
    expected = side.inputs()["0"] @ weight.T + side.parameters()["bias"]
    np.testing.assert_array_equal(other.run().stages["output"], expected)
    np.testing.assert_array_equal(side.run().stages["output"], before)


@pytest.mark.parametrize("which", [0, 1], ids=["torch", "jax"])
def test_a_parameter_that_is_not_there_is_refused(which) -> None:
    side = linear_sides()[which]
    with pytest.raises(SideError, match="no parameter wieght; there are "):
        side.with_parameters({"wieght": np.zeros((3, 2))})
    with pytest.raises(SideError, match=r"expected the shape \(3, 2\) of parameter weight"):
        side.with_parameters({"weight": np.zeros((2, 3))})


class Pair(torch.nn.Module):
    """Query and key of one shape, and an output that tells them apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.out = (torch.nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x):
        scores = torch.softmax(self.query(x) @ self.key(x).T, -1)
        return self.out(scores @ x)


def paired(
    swapped: tuple[str, ...],
    *,
    exchanged_in_code: bool = False,
    scale: float = 1.0,
    gradients: bool = False,
    stopped: bool = False,
):
    """Return the report of a port in which the parameters of `swapped` rotate among themselves."""
    module = Pair()
    held = dict(module.named_children())
    sources = dict(zip(swapped, (*swapped[1:], *swapped[:1]), strict=True))
    params = {}
    for name in held:
        layer = held[sources.get(name, name)]
        params[name] = {
            "kernel": layer.weight.detach().numpy().T.copy(),
            "bias": layer.bias.detach().numpy().copy(),
        }

    def forward(p, x):
        q, k = (checkpoint_name(x @ p[n]["kernel"] + p[n]["bias"], n) for n in ("query", "key"))
        q, k = (k, q) if exchanged_in_code else (q, k)
        scores = jnp.exp(q @ k.T - (q @ k.T).max(-1, keepdims=True))
        mixed = scores / scores.sum(-1, keepdims=True) @ x
        mixed = jax.lax.stop_gradient(mixed) if stopped else mixed
        return scale * (mixed @ p["out"]["kernel"] + p["out"]["bias"])

    x = np.random.default_rng(0).normal(size=(3, SIZE)).astype(np.float32)
    port = Port("pair", TorchSide(module, torch.tensor(x)), FunctionSide(forward, params, x),
                gradients=gradients, bfloat16=False)  # fmt: skip
    return compare(port)


@pytest.mark.parametrize("swapped", [("query", "key"), ("query", "key", "out")])
def test_parameters_in_one_anothers_place_are_named_and_no_line_of_code(swapped) -> None:
    report = paired(swapped)
    assert {*report.misplaced} == {f"{n}.{kind}" for n in swapped for kind in ("kernel", "bias")}
    assert report.sentence().startswith(
        f"pair: the conversion is wrong, not the code: parameter {next(iter(report.misplaced))} "
    )
    assert "query.kernel: holds key.weight in place of query.weight: with" in report.text()
    assert not report.place.lines and "by name it would be" not in report.text()


def test_a_bug_of_the_code_is_not_taken_for_one_of_the_conversion() -> None:
    """The controls: the code exchanges them; and the conversion does, but the code is wrong too."""
    code = paired((), exchanged_in_code=True)
    assert not code.holds and code.misplaced == {} and code.place.lines
    both = paired(("query", "key"), scale=1.5)
    assert not both.holds and both.misplaced == {}
    assert "by name it would be" in both.text(), "that they are exchanged is said all the same"
    assert paired(()).holds
    # Every output holds once they are exchanged, and derivatives do not.
    stopped = paired(("query", "key"), gradients=True, stopped=True)
    assert not stopped.holds and stopped.misplaced == {}


def test_only_a_square_matrix_that_its_transpose_would_change_may_be_untransposed() -> None:
    rng = np.random.default_rng(0)
    square, wide = rng.normal(size=(4, 4)), rng.normal(size=(3, 5))
    values = {"square": square, "symmetric": square + square.T, "wide": wide, "bias": wide[0]}
    assert _square(match_parameters(values, values), values) == ["square"]


def test_notes_on_exchanged_parameters_are_in_the_order_of_the_port() -> None:
    draw = np.random.default_rng(0)
    places = [(layer, word) for layer in (2, 10) for word in ("query", "key")]
    theirs = {f"l.{i}.{word}.weight": draw.normal(size=(2, 3)) for i, word in places}
    other = {"query": "key", "key": "query"}
    mine = {f"h.{i}.{word}.kernel": theirs[f"l.{i}.{other[word]}.weight"].T for i, word in places}
    matching = match_parameters(theirs, mine)
    # The names of a side come in another order, as JAX sorts keys.
    side = FunctionSide(
        lambda params, x: x, {n: x.astype(np.float32) for n, x in mine.items()}, 1.0
    )
    assert [*misplaced(matching, theirs, side, lambda side: True)] == [*mine]
    assert not misplaced(matching, theirs, side, lambda side: False)
