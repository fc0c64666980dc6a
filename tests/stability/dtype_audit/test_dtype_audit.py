"""The audit's tables: every equation once, under its module, and against the committed ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax import MegalodonConfig
from megalodon_jax.layers import attention, contraction, linear
from stability.core.findings import Severity
from stability.dtype_audit import (
    PROGRAMS,
    announced,
    audit_config,
    audit_function,
    audit_step,
    changes_since,
    diff,
    golden,
    load_policy,
    module_of,
    pinned_findings,
    pinned_rows,
    read_pinned,
    side_by_side,
    write_pinned,
)
from stability.dtype_audit.hlo import parse, rows_of_hlo
from stability.dtype_audit.pinned_rows import NARROW, PLAIN, versions_now
from stability.dtype_audit.programs import dtype_findings, shrunk
from stability.dtype_audit.rows import Row, aggregated, by_view, from_json, to_json
from stability.dtype_audit.scopes import phase_of
from tests.helpers import TINY, model_of, tokens

OURS = ("float32", "bfloat16_compute")
TORCH = ("torch_autocast", "torch_bfloat16")


@cache
def table(name: str) -> tuple[Row, ...]:
    if name == "float32":
        # One program compiled is enough for a test; the nightly compiles both.
        return audit_config(PLAIN, compiled=False)
    return PROGRAMS[name]()


def committed(name: str) -> tuple[Row, ...]:
    """The pinned rows of the views that `table` has."""
    views = {row.view for row in table(name)}
    return tuple(row for row in read_pinned(name).rows if row.view in views)


def coarse(rows) -> set[tuple]:
    """What must not depend on versions: which dtypes each module reduces and multiplies in."""
    kinds = ("dot", "sum", "exp", "cumsum", "fft")
    rows = (row for row in rows if row.view == "jaxpr" and row.family in kinds)
    return {(row.module, row.family, row.inputs, row.output) for row in rows}


@pytest.mark.parametrize("name", OURS)
def test_the_model_computes_as_committed(name: str) -> None:
    assert coarse(committed(name)) == coarse(table(name))
    if read_pinned(name).versions == versions_now(name):
        ours = [c for c in diff(committed(name), table(name)) if c.row.view == "jaxpr"]
        assert not ours, "\n".join(f"{c.kind} {c.row.module}: {c.row.describe()}" for c in ours)


@pytest.mark.parametrize("name", OURS)
def test_the_model_keeps_the_policy(name: str) -> None:
    findings = load_policy().check(table(name))
    broken = [f for f in findings if f.severity in (Severity.ERROR, Severity.WARNING)]
    assert not broken, "\n".join(f.message for f in broken)


def test_every_part_of_the_model_is_in_the_table_by_name() -> None:
    modules = {row.module for row in table("bfloat16_compute") if row.view == "jaxpr"}
    attn, ffn = "model.layers.*.attn", "model.layers.*.ffn"
    expected = {"compute_loss", "model", "model.norm", attn, ffn, f"{ffn}.norm"}
    expected |= {
        f"{attn}.{part}" for part in ("timenorm", "cema", "rmsnorm", "inner", "inner.rope")
    }
    parts = ("timenorm", "cema", "rmsnorm", "inner", "inner.rope", "wz", "wv", "wr", "wh1", "wh2")
    expected |= {f"{attn}.{part}" for part in parts}
    expected |= {f"{ffn}.{part}" for part in ("fc1", "fc2", "fc3")}
    assert modules == expected
    compiled = {row.module for row in table("bfloat16_compute") if row.view == "hlo"}
    assert expected - {"model"} <= compiled | {"model"}


def test_products_of_the_narrow_model_read_bfloat16_and_return_float32() -> None:
    rows = [
        row
        for row in table("bfloat16_compute")
        if (row.module, row.family, row.phase) == ("model.layers.*.ffn.fc1", "dot", "forward")
    ]
    (asked,) = (row for row in rows if row.view == "jaxpr")
    assert (asked.inputs, asked.output, asked.accum) == (("bfloat16",) * 2, "float32", "float32")
    assert asked.source.startswith("megalodon_jax/layers/linear.py:")
    (compiled,) = (row for row in rows if row.view == "hlo")
    assert compiled.output == "float32"


def test_a_narrow_storage_of_norms_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # The whole way: a layer that forgets to widen, in the model itself.
    from megalodon_jax.layers import norms

    monkeypatch.setattr(norms, "widened", lambda dtype: jnp.dtype(jnp.bfloat16))
    config = MegalodonConfig(compute_dtype="bfloat16")
    found = [f for f in dtype_findings(config, compiled=False) if f.severity is Severity.ERROR]
    assert {f.metric for f in found} >= {"norms_wide", "reductions_wide"}
    # Queries and keys are normalised by the attention itself.
    attn = "model.layers.*.attn"
    subjects = {f.subject.split()[0] for f in found}
    assert subjects == {attn, f"{attn}.rmsnorm", "model.layers.*.ffn.norm"}
    assert any("megalodon_jax/layers/norms.py:" in f.message for f in found)


def summed_narrowly(patch: pytest.MonkeyPatch) -> None:
    """Products that add up in bfloat16."""
    healthy = jnp.einsum

    def narrow(*args, preferred_element_type=None, **kwargs):
        wanted = None if preferred_element_type is None else jnp.bfloat16
        out = healthy(*args, preferred_element_type=wanted, **kwargs)
        return out if preferred_element_type is None else out.astype(preferred_element_type)

    patch.setattr(contraction.jnp, "einsum", narrow)


def bias_rounded(patch: pytest.MonkeyPatch) -> None:
    """A bias that is stored in float32 and added in bfloat16."""
    healthy = linear.Linear.__call__

    def rounded(self, x):
        if self.bias is None:
            return healthy(self, x)
        bias = self.bias.astype(jnp.bfloat16).astype(jnp.float32)
        return healthy(eqx.tree_at(lambda m: m.bias, self, bias), x)

    patch.setattr(linear.Linear, "__call__", rounded)


def scores_rounded(patch: pytest.MonkeyPatch) -> None:
    """Attention scores that are left in bfloat16 before the softmax."""
    healthy = jnp.einsum

    def narrow(how, *operands, **kwargs):
        out = healthy(how, *operands, **kwargs)
        return out.astype(jnp.bfloat16).astype(out.dtype) if how == "nqd,nkd->nqk" else out

    patch.setattr(attention.jnp, "einsum", narrow)


@pytest.mark.parametrize(
    ("plant", "module"),
    [
        (summed_narrowly, "model.layers.*.ffn.fc1"),
        (bias_rounded, "model.layers.*.ffn.fc1"),
        (scores_rounded, "model.layers.*.attn.inner"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_rounding_to_bfloat16_is_found_where_it_is(
    plant: Callable, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small beside the rounding of operands, so that no norm of an error tells it."""
    write_pinned("bfloat16_compute", table("bfloat16_compute"), tmp_path)
    with monkeypatch.context() as patch:
        plant(patch)
        jax.clear_caches()
        rows = audit_config(NARROW, compiled=False)
    jax.clear_caches()
    # What is not compiled is not compared.
    found = pinned_findings("bfloat16_compute", rows, tmp_path)
    errors = {f.subject.split()[0] for f in found if f.severity is Severity.ERROR}
    assert module in errors, found


class Inner(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return jnp.tanh(x * self.weight)

    def helper(self, x):
        return jnp.exp(x)

    @property
    def doubled(self):
        return self.weight * 2


class Outer(eqx.Module):
    parts: list[Inner]
    named: dict[str, Inner]
    kind: str = eqx.field(static=True, default="outer")

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return self.named["last"].helper(x) * self.named["last"].doubled


def outer() -> Outer:
    return Outer([Inner(jnp.ones(3)), Inner(jnp.ones(3))], {"last": Inner(jnp.ones(3))})


def test_an_announced_model_is_the_same_model_with_names() -> None:
    model, named = outer(), announced(outer())
    assert isinstance(named, Outer)
    assert jnp.array_equal(named(jnp.ones(3)), model(jnp.ones(3)))
    assert named.kind == "outer"
    rows = audit_function(lambda m: m(jnp.ones(3)), named, compiled=False)
    by_family = {row.family: row.module for row in rows if row.family != "elementwise"}
    assert by_family == {"sigmoid": "parts.*", "exp": "named.last"}
    assert announced(3) == 3


def test_name_stacks_give_module_and_phase() -> None:
    stack = "jit(f)/transpose(jvp(~model.layers.*.attn))/jit(_where)/~model.layers.*.attn.inner/exp"
    assert (module_of(stack), phase_of(stack)) == ("model.layers.*.attn.inner", "backward")
    assert (module_of("jit(f)/exp"), phase_of("jit(f)/jvp(x)")) == ("", "jvp")


def loops(x, flag):
    """An exp in each kind of call there is."""

    @jax.custom_vjp
    def ruled(x):
        return jnp.exp(x)

    ruled.defvjp(lambda x: (jnp.exp(x), x), lambda x, g: (g,))
    x, _ = jax.lax.scan(lambda c, _: (jnp.exp(c), None), x, length=5)
    x = jax.lax.cond(flag, lambda x: jnp.exp(x), lambda x: x, x)
    x = jax.lax.while_loop(lambda c: jnp.sum(c) < 0, lambda c: jnp.exp(c), x)
    x = jax.checkpoint(lambda x: jnp.exp(x))(x)
    x = jax.jit(lambda x: jnp.exp(x))(x)
    return ruled(x)


def test_equations_inside_every_kind_of_call_are_counted() -> None:
    rows = audit_function(loops, jnp.ones(2), jnp.asarray(True), compiled=False)
    (exp,) = (row for row in rows if row.family == "exp")
    assert exp.count == 5 + 1 + 1 + 1 + 1 + 1
    assert exp.trips == 5
    assert exp.source.startswith("tests/stability/dtype_audit/test_dtype_audit.py:")


def test_a_function_of_jax_is_given_the_line_that_calls_it() -> None:
    def first(x):
        return jax.nn.softplus(x)

    def second(x):
        return jax.nn.softplus(x)

    lines = []
    for function in (first, second):
        rows = audit_function(function, jnp.ones(2), compiled=False)
        lines.append({row.source for row in rows if row.family == "log"})
    assert lines[0] != lines[1]
    assert all(len(line) == 1 for line in lines)


HLO = """
HloModule jit_f

%region_0.1 (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %add.1 = bf16[] add(%a, %b)
}

%region_1.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %maximum.1 = f32[] maximum(%a, %b)
}

ENTRY %main (p: bf16[4,8], q: bf16[8,4]) -> bf16[] {
  %p = bf16[4,8]{1,0} parameter(0)
  %q = bf16[8,4]{1,0} parameter(1)
  %zero = bf16[] constant(0)
  %dot.1 = f32[4,4]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/~layer/dot_general" stack_frame_id=1}
  %call = (f32[4,4]{1,0}, s8[16]{0}) custom-call(%p, %q), custom_call_target="__cublas$gemm", \
metadata={op_name="jit(f)/transpose(jvp(~layer))/dot_general"}
  %peak = f32[4]{0} reduce(%dot.1, %zero), dimensions={1}, to_apply=%region_1.1
  ROOT %sum = bf16[] reduce(%p, %zero), dimensions={0,1}, to_apply=%region_0.1
}
"""


def test_compiled_text_is_read_with_operand_dtypes_and_combiners() -> None:
    found = {(r.family, r.inputs, r.output, r.module, r.phase) for r in rows_of_hlo(HLO)}
    assert found == {
        ("dot", ("bfloat16", "bfloat16"), "float32", "layer", "forward"),
        ("dot", ("bfloat16", "bfloat16"), "float32", "layer", "backward"),
        ("peak", ("float32", "bfloat16"), "float32", "", "forward"),
        ("sum", ("bfloat16", "bfloat16"), "bfloat16", "", "forward"),
    }
    assert {i.computation for i in parse(HLO)} == {"region_0.1", "region_1.1", "main"}


def test_the_compiled_view_sees_what_a_preferred_dtype_hides() -> None:
    # preferred_element_type=bfloat16 asks for a narrow result; the jaxpr says no more than that.
    def product(x):
        return jax.lax.dot_general(x, x, (((1,), (1,)), ((), ())), None, jnp.bfloat16)

    rows = audit_function(product, jnp.ones((4, 4), jnp.bfloat16))
    views = {row.view for row in rows if row.family == "dot"}
    assert views == {"jaxpr", "hlo"}


def row(**changes) -> Row:
    plain = Row("jaxpr", "forward", "layer", "exp", "exp", ("float32",), "float32", count=2)
    return dataclasses.replace(plain, **changes)


def test_tables_differ_by_rows_and_counts_and_not_by_lines() -> None:
    narrow = row(inputs=("bfloat16",), output="bfloat16")
    old, new = (row(source="a.py:1"), narrow), (row(source="a.py:9", count=3),)
    assert [(c.kind, c.before, c.after) for c in diff(old, new)] == [
        ("removed", 2, 0),
        ("changed", 2, 3),
    ]
    assert [c.kind for c in diff(new, old)] == ["added", "changed"]
    compiled = row(view="hlo"), row(view="hlo", count=7)
    assert diff(compiled[:1], compiled[1:]) == ()
    assert aggregated((*old, *new))[1].count == 5


def test_a_table_returns_from_its_file_and_a_broken_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = aggregated((row(), row(accum="float32", inputs=("float32", "bfloat16"))))
    assert from_json(to_json(rows)) == rows
    write_pinned("float32", rows, tmp_path)
    assert changes_since("float32", rows, tmp_path) == ()
    assert (
        json.loads((tmp_path / "float32.json").read_text(encoding="utf-8"))["versions"]["jax"]
        == jax.__version__
    )
    count, finding = pinned_findings("float32", (*rows, row(op="exp2")), tmp_path)
    assert (count.severity, count.metric, count.value) == (Severity.NOTE, "changes", 1.0)
    assert (finding.severity, finding.metric, finding.value) == (Severity.ERROR, "added", 2.0)
    assert "renew" in finding.remedy
    with monkeypatch.context() as another:
        # Another jax writes other programs, and nobody here changed anything.
        another.setattr(jax, "__version__", "0.0.1")
        _, finding = pinned_findings("float32", (*rows, row(op="exp2")), tmp_path)
        assert finding.severity is Severity.WARNING
    (clean,) = pinned_findings("float32", rows, tmp_path)
    assert (clean.severity, clean.value) == (Severity.OK, 0.0)
    with pytest.raises(ValueError, match="is not there; run"):
        read_pinned("other", tmp_path)
    (tmp_path / "float32.json").write_text('{"schema": 99, "rows": []}', encoding="utf-8")
    with pytest.raises(ValueError, match="has schema 99, expected 1"):
        read_pinned("float32", tmp_path)
    with pytest.raises(ValueError, match="has 2 fields, expected"):
        from_json([["jaxpr", "forward"]])


def test_views_stand_side_by_side_per_module() -> None:
    tables = by_view("ours", table("bfloat16_compute")) | {
        name: read_pinned(name).rows for name in TORCH
    }
    assert set(tables) == {"ours jaxpr", "ours hlo", *TORCH}
    lines = {(x.module, x.phase, x.family): x for x in side_by_side(tables)}
    norm = lines["model.layers.*.attn.rmsnorm", "forward", "sum"]
    assert norm.cells["ours jaxpr"] == norm.cells["torch_autocast"] == "float32 -> float32"
    assert norm.cells["torch_bfloat16"] == "bfloat16 -> bfloat16"
    assert not norm.agrees
    assert lines["model.norm", "forward", "cumsum"].cells["torch_autocast"] == "float32 -> float32"


def test_small_sizes_keep_everything_that_decides_dtypes() -> None:
    config = MegalodonConfig(swiglu=True, compute_dtype="bfloat16", output_size=77, num_layers=3)
    small = shrunk(config)
    assert (small.num_layers, small.swiglu, small.tied) == (1, True, False)
    assert small.compute_dtype == config.compute_dtype


def test_a_step_on_shapes_and_on_arrays_is_the_same_table() -> None:
    ids = jnp.asarray(tokens(TINY, (2, 9)))

    def loss(model, ids):
        return model.compute_loss(ids, ids)

    model = model_of(TINY)
    on_arrays = audit_step(model, loss, ids, compiled=False)
    shapes = jax.ShapeDtypeStruct(ids.shape, ids.dtype)
    assert diff(on_arrays, audit_step(model, loss, shapes, compiled=False)) == ()


@pytest.mark.torch_ref
@pytest.mark.parametrize("name", TORCH)
def test_the_reference_dispatches_as_committed(reference, name: str) -> None:
    rows = read_pinned(name).rows if reference.kind == "recorded" else table(name)
    if reference.kind == "live" and read_pinned(name).versions == versions_now(name):
        assert changes_since(name, rows) == ()
    found = {
        (r.module, r.phase, r.family, r.output) for r in rows if r.module.startswith("model.layers")
    }
    narrow = "bfloat16" if name == "torch_bfloat16" else "float32"
    norm = ("model.layers.*.attn.rmsnorm", "forward", "sum", narrow)
    assert norm in found
    # The trap of the specification: gradients of biases are summed in bfloat16.
    assert ("model.layers.*.attn.wv", "backward", "sum", "bfloat16") in found


def test_the_reference_breaks_the_policy_in_notes_only() -> None:
    from stability.dtype_audit.torch_side import torch_findings

    findings = torch_findings(read_pinned("torch_bfloat16").rows)
    assert {f.severity for f in findings} == {Severity.OK, Severity.NOTE}
    assert {f.metric for f in findings if f.severity is Severity.NOTE} >= {
        *("norms_wide", "exponentials_wide", "reductions_wide")
    }


def test_numpy_is_not_needed_to_be_jax() -> None:
    rows = audit_function(lambda x: jnp.exp(x), np.ones(2, np.float32), compiled=False)
    assert [r.family for r in rows] == ["exp"]


def test_the_former_names_are_the_same_functions() -> None:
    assert (golden.golden_findings, golden.read_golden) == (pinned_findings, read_pinned)
    assert (golden.write_golden, golden.PROGRAMS) == (write_pinned, pinned_rows.PROGRAMS)
