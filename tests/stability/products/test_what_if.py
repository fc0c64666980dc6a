"""What a format would cost: known figures, the operands of a real step, and advice that follows."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.layers.linear import linear_maps
from megalodon_jax.policy import resolve
from megalodon_jax.quantization.products import BACKENDS, DIRECTIONS
from megalodon_jax.weights import build_model, named_leaves
from parity.engine.measure.metrics import relative_l2
from parity.tolerances import FIGURES, FORMAT_BOUNDS, INDEPENDENT
from stability.core.findings import Severity
from stability.products import what_if
from stability.products.what_if import (
    FORMATS,
    LADDER,
    Products,
    advice,
    captured,
    costs,
    findings,
    rules,
)
from tests.helpers import ROOT, SAME_PROGRAM, TINY, arrays, double, one_ulp_away
from tools.experiments import gemm_drill
from tools.experiments.drill import DrillResult

DOC = ROOT / "docs" / "formats.md"
BYTES = replace(TINY, vocab_size=256, num_layers=1, output_size=200)


def tensors(shape) -> Products:
    rng = np.random.default_rng(0)
    x, weight, dy = (shape(rng.standard_normal((256, 256))).astype(np.float32) for _ in range(3))
    return Products(x, weight, dy)


NORMAL = tensors(lambda z: z)


def test_normal_numbers_cost_what_is_known() -> None:
    found = {(c.format, c.direction): c for c in costs({"g": NORMAL})}
    assert {f for f, _ in found} == set(FORMATS) == set(FORMAT_BOUNDS)
    for direction in DIRECTIONS:
        four, eight = found["nvfp4", direction], found["mxfp8", direction]
        for name, value in (("nvfp4", four.mse), ("nvfp4 loses", four.underflow)):
            _, figure, slack = FIGURES[name]
            assert abs(value - figure) <= 3 * slack
        assert eight.clipped == 0.0 < found["mxfp8 floor", direction].clipped
        # Errors of the two operands are independent, and add up in the product.
        for cost in (four, eight):
            assert np.isclose(cost.error, np.sqrt(2 * cost.mse), rtol=INDEPENDENT)
        assert all(c.fraction < 1 for c in found.values())


def test_outliers_move_a_product_up_the_ladder() -> None:
    wild = tensors(lambda z: np.exp(4 * z))
    found = list(costs({"model.layers.0.a": NORMAL, "model.layers.1.a": wild}, LADDER))
    chosen = advice(found)
    assert {chosen["model.layers.0.a", d] for d in DIRECTIONS} == {"nvfp4"}
    assert {chosen["model.layers.1.a", d] for d in DIRECTIONS[:2]} == {"bfloat16"}
    # The rotation spreads outliers over their blocks, and only the weight gradient has it.
    assert chosen["model.layers.1.a", "weight_grad"] == "nvfp4"
    said = {f.subject: f for f in findings(found)}
    assert len(said) == 2 * len(DIRECTIONS)
    assert said["model.layers.0.a forward"].severity is Severity.OK
    note = said["model.layers.1.a forward"]
    assert note.severity is Severity.NOTE
    assert "advised format: bfloat16" in note.message
    assert "by a rule" in note.remedy


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["x", "weight", "dy"])
def test_a_product_of_what_is_not_finite_is_an_error_and_not_advised(side, value) -> None:
    small = tensors(lambda z: z[:64, :64])
    spoiled = getattr(small, side).copy()
    spoiled[3, 5] = value
    with np.errstate(invalid="ignore", over="ignore"):
        found = list(costs({"good": small, "bad": replace(small, **{side: spoiled})}, LADDER))
    touched = {
        d for d in DIRECTIONS if not all(np.isfinite(a).all() for a in
                                         replace(small, **{side: spoiled}).operands(d))
    }  # fmt: skip
    assert len(touched) == 2
    chosen, said = advice(found), {f.subject: f for f in findings(found)}
    for direction in DIRECTIONS:
        expected = LADDER[-1] if direction in touched else chosen["good", direction]
        assert chosen["bad", direction] == expected
        severity = Severity.ERROR if direction in touched else Severity.OK
        assert said[f"bad {direction}"].severity is severity
        assert said[f"good {direction}"].severity is Severity.OK
    narrow = [c for c in found if c.format == LADDER[0]]
    assert not max(narrow, key=lambda c: c.graver).measured
    assert not max(narrow[::-1], key=lambda c: c.graver).measured


def test_a_cost_is_that_of_each_product_once_and_of_its_worse_operand() -> None:
    small = tensors(lambda z: z[:64, :64])
    coarse = replace(small, weight=np.exp(6 * small.weight).astype(np.float32))
    found = {(c.gemm, c.direction): c for c in costs({"a": small, "b": coarse}, ("mxfp4",))}
    assert len(found) == 2 * len(DIRECTIONS)
    assert len(list(costs({"a": small, "b": coarse}))) == len(found) * len(FORMATS)
    # Of a matrix times itself both operands are the worse one.
    alone = [
        next(iter(costs({"w": replace(coarse, x=each, weight=each)}, ("mxfp4",))))
        for each in (coarse.x, coarse.weight)
    ]
    both = found["b", "forward"]
    for name in ("underflow", "clipped", "mse"):
        assert getattr(both, name) == max(getattr(each, name) for each in alone)
    assert both.underflow > found["a", "forward"].underflow
    assert found["b", "input_grad"].underflow > found["a", "input_grad"].underflow
    assert found["a", "weight_grad"] == replace(found["b", "weight_grad"], gemm="a")


def test_rules_give_every_matrix_the_widest_of_its_three_products() -> None:
    names = [f"model.layers.{i}.{kind}" for i in range(3) for kind in ("a", "b", "c")]
    wanted = dict.fromkeys(names, "nvfp4") | {f"model.layers.{i}.b": "mxfp8" for i in range(3)}
    wanted["model.layers.1.c"] = "default"
    cost = next(iter(costs({"g": NORMAL}, ("nvfp4",))))

    def row(name: str, direction, fmt: str) -> what_if.Cost:
        bears = LADDER[-1] if wanted[name] == "default" else wanted[name]
        narrow = bears if direction == "weight_grad" else LADDER[0]
        high = LADDER.index(fmt) < LADDER.index(narrow)
        return replace(cost, gemm=name, direction=direction, format=fmt, error=high, underflow=0)

    found = [row(n, d, f) for n in names for d in DIRECTIONS for f in LADDER[:-1]]
    policy = rules(found)
    assert resolve(policy, names, "default", "rules") == wanted
    assert ("model.layers.*.b", "mxfp8") in policy
    assert len(policy) < len(names)


@jax.jit
@jax.grad
def gradients_of(model, ids):
    return model.compute_loss(ids, ids)


def test_the_operands_of_a_step_are_those_its_gradients_are_made_of(monkeypatch) -> None:
    model = build_model(BYTES, arrays(BYTES))
    ids = np.random.default_rng(0).integers(1, 200, (2, 9)).astype(np.int32)
    held = captured(model, ids)
    assert list(held) == [n for n in linear_maps(model) if n != "lm_head"]
    gradients = named_leaves(gradients_of(model, jnp.asarray(ids)))
    moved = [
        named_leaves(gradients_of(one_ulp_away(model, seed), jnp.asarray(ids))) for seed in range(3)
    ]
    for name, products in held.items():
        left, right = products.operands("weight_grad")
        expected = np.asarray(gradients[f"{name}.weight"])
        # Two programs of the same mathematics, by the noise floor of this gradient.
        floor = max(relative_l2(np.asarray(m[f"{name}.weight"]), expected) for m in moved)
        assert relative_l2(left @ right.T, expected) <= SAME_PROGRAM * floor, name
    monkeypatch.setattr(what_if, "TOKENS", 5)
    fewer = captured(model, ids)["model.layers.0.attn.wz"]
    assert fewer.x.shape == (5, BYTES.model_dim)
    assert np.array_equal(fewer.x[[0, -1]], held["model.layers.0.attn.wz"].x[[0, -1]])


def test_the_document_of_a_drill_is_rewritten_between_its_markers(tmp_path) -> None:
    outcomes = [
        double(
            DrillResult, variant=variant, held_out=held_out, loss=[(1, 2 * held_out), (2, held_out)]
        )
        for variant, held_out in zip(gemm_drill.VARIANTS, (1.0, 1.5, 2.0), strict=False)
    ]
    doc = tmp_path / "doc.md"
    doc.write_text(f"before\n{gemm_drill.BEGIN}\nold\n{gemm_drill.END}\nafter\n", encoding="utf-8")
    gemm_drill.write(doc, outcomes, (1.0, 1.25, 1.5))
    text = doc.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.endswith("\nafter\n")
    assert "| mxfp8 | 2.0000 | +100.00% | 1% | +50.00% |" in text
    charts = sorted(p.name for p in tmp_path.glob("*.svg"))
    assert charts == ["formats-distance.svg", "formats-loss.svg"]
    doc.write_text("no markers", encoding="utf-8")
    with pytest.raises(ValueError, match="needs the markers"):
        gemm_drill.write(doc, outcomes, (1.0, 1.25, 1.5))


def test_the_committed_document_says_which_backends_stay_within_their_bounds() -> None:
    rows = re.findall(
        r"^\| (\S+) \| \S+ \| ([+-]\S+)% \| (\d+)% \|", DOC.read_text(encoding="utf-8"), re.M
    )
    found = {name: float(above) <= float(allowed) for name, above, allowed in rows}
    assert set(found) == set(BACKENDS)
    assert found["mxfp8"]
    assert found["mxfp8-nvfp4"]
    # Its forward products are too coarse for this model, which the document explains.
    assert not found["nvfp4"]
