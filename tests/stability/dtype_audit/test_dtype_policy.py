"""Every rule of the dtype policy finds the defect it is for, planted, and passes its remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stability.core.findings import Finding, Severity
from stability.dtype_audit import audit_step, load_policy
from stability.dtype_audit.policy import Scope
from stability.dtype_audit.rows import Row

POLICY = load_policy()
NARROW, WIDE = jnp.bfloat16, jnp.float32


class Part(eqx.Module):
    """A module that holds a weight and does what it is told."""

    weight: jax.Array
    work: Callable[..., jax.Array] = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.work(self.weight, x)


class Net(eqx.Module):
    """The part, under the name by which the policy knows its kind."""

    norm: Part | None = None
    inner: Part | None = None
    cema: Part | None = None
    router: Part | None = None
    layer: Part | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        for part in (self.norm, self.inner, self.cema, self.router, self.layer):
            x = x if part is None else part(x)
        return x


class LossNet(Net):
    """A net with a loss of its own."""

    dtype: Any = eqx.field(static=True, default=WIDE)

    def compute_loss(self, x: jax.Array) -> jax.Array:
        return jnp.sum(self(x).astype(self.dtype) * 2, dtype=WIDE)


def rms(dtype):
    def work(weight, x):
        x = x.astype(dtype)
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True)) * weight[0].astype(dtype)

    return work


def product(preferred, rounded=NARROW):
    def work(weight, x):
        x, weight = x.astype(rounded), weight.astype(rounded)
        return jax.lax.dot_general(x, weight, (((1,), (0,)), ((), ())), None, preferred)

    return work


def float64_leak(weight, x):
    with jax.enable_x64(True):
        return (x.astype(jnp.float64) * 2.0).astype(x.dtype)


def used_twice(dtype):
    def work(weight, x):
        weight = weight[0].astype(dtype)
        return jnp.sin(x.astype(dtype) * weight).astype(WIDE) + (x.astype(dtype) * weight).astype(
            WIDE
        )

    return work


def promoted(factor):
    def work(weight, x):
        with jax.numpy_dtype_promotion("standard"):
            return x.astype(NARROW) * factor

    return work


def rounded(weight, x):
    return x.astype(NARROW).astype(WIDE) * weight[0]


def rounded_for_good(weight, x):
    return jax.lax.reduce_precision(x, 8, 7) * weight[0]


@dataclass(frozen=True)
class Defect:
    """A defect and its remedy, as the work of a part of a net."""

    where: str
    planted: Callable[..., jax.Array]
    mended: Callable[..., jax.Array]


def plain(dtype, work):
    return lambda weight, x: work(weight.astype(dtype), x.astype(dtype))


DEFECTS = {
    "no_float64": Defect("layer", float64_leak, plain(WIDE, lambda w, x: x * 2.0)),
    "no_float16": Defect(
        "layer", plain(jnp.float16, lambda w, x: x * w[0]), plain(NARROW, lambda w, x: x * w[0])
    ),
    "norms_wide": Defect("norm", rms(NARROW), rms(WIDE)),
    "softmax_wide": Defect(
        "inner",
        plain(NARROW, lambda w, x: jax.nn.softmax(x * w[0])),
        plain(WIDE, lambda w, x: jax.nn.softmax(x * w[0])),
    ),
    "exponentials_wide": Defect(
        "layer", plain(NARROW, lambda w, x: jnp.exp(x)), plain(WIDE, lambda w, x: jnp.exp(x))
    ),
    "cema_wide": Defect(
        "cema", plain(NARROW, lambda w, x: x * w[0]), plain(WIDE, lambda w, x: x * w[0])
    ),
    "router_wide": Defect("router", product(WIDE), product(WIDE, rounded=WIDE)),
    "reductions_wide": Defect(
        "layer",
        # The bias is broadcast in bfloat16, so its gradient is summed in bfloat16.
        plain(NARROW, lambda w, x: x + w[0]),
        lambda w, x: (x.astype(NARROW).astype(WIDE) + w[0]).astype(NARROW),
    ),
    "gradients_accumulate_wide": Defect("layer", used_twice(NARROW), used_twice(WIDE)),
    "products_accumulate_wide": Defect("layer", product(None), product(WIDE)),
    "no_silent_promotion": Defect("layer", promoted(np.float32(2)), promoted(2.0)),
}


def loss_of(model: Net, x: jax.Array) -> jax.Array:
    if isinstance(model, LossNet):
        return model.compute_loss(x)
    return jnp.sum(model(x), dtype=WIDE)


def findings(model: Net, rule: str) -> list[Finding]:
    rows = audit_step(model, loss_of, jnp.ones((4, 8)), compiled=False)
    return [f for f in POLICY.check(rows) if f.metric == rule]


def net(where: str, work) -> Net:
    return Net(**{where: Part(jnp.ones((8, 8)), work)})


@pytest.mark.parametrize("rule", DEFECTS)
def test_a_planted_defect_is_found_and_its_remedy_passes(rule: str) -> None:
    defect = DEFECTS[rule]
    bad = findings(net(defect.where, defect.planted), rule)
    assert bad and all(f.severity in (Severity.ERROR, Severity.WARNING) for f in bad)
    assert all(f.value >= 1 and f.threshold == 0 and f.remedy for f in bad)
    assert any(f.subject.startswith(defect.where) for f in bad)
    assert any("tests/stability/dtype_audit/test_dtype_policy.py:" in f.message for f in bad)
    (good,) = findings(net(defect.where, defect.mended), rule)
    assert good.severity is Severity.OK


def test_a_loss_in_bfloat16_is_found() -> None:
    def model(dtype) -> LossNet:
        return LossNet(layer=Part(jnp.ones((8, 8)), lambda w, x: x * w[0]), dtype=dtype)

    bad = findings(model(NARROW), "loss_wide")
    assert {f.subject.split()[0] for f in bad} == {"compute_loss"}
    (good,) = findings(model(WIDE), "loss_wide")
    assert good.severity is Severity.OK


@pytest.mark.parametrize("elided", [True, False])
def test_a_rounding_the_compiler_left_out_is_found(elided: bool) -> None:
    # What a compiler that leaves it out makes, whether or not this one does.
    def compiled_as(weight, x):
        return x * weight[0] if elided else rounded_for_good(weight, x)

    def audited(work):
        return audit_step(net("layer", work), loss_of, jnp.ones((4, 8)))

    asked = [row for row in audited(rounded) if row.view == "jaxpr"]
    made = [row for row in audited(compiled_as) if row.view == "hlo"]
    forward = [f for f in POLICY.check((*asked, *made)) if f.metric == "rounding_kept"]
    found = [f for f in forward if "forward" in f.message]
    assert bool(found) is elided
    assert all(f.severity is Severity.WARNING and "round trip" in f.message for f in found)
    # Without a compiled program nothing is claimed.
    (silent,) = [f for f in POLICY.check(asked) if f.metric == "rounding_kept"]
    assert silent.severity is Severity.OK


def test_every_rule_has_a_negative_control() -> None:
    assert {rule.name for rule in POLICY.rules} == {*DEFECTS, "loss_wide", "rounding_kept"}


def test_softmax_of_bfloat16_is_found_in_its_three_pieces() -> None:
    bad = findings(net("inner", DEFECTS["softmax_wide"].planted), "softmax_wide")
    assert {"inner exp", "inner reduce_max"} <= {f.subject for f in bad}


def test_a_bias_summed_in_bfloat16_is_only_in_the_backward_pass() -> None:
    weight = jnp.ones((1, 8))
    bad = findings(Net(layer=Part(weight, DEFECTS["reductions_wide"].planted)), "reductions_wide")
    assert {f.message.split(": ")[1].split()[0] for f in bad} == {"backward"}


def test_strict_promotion_refuses_what_the_audit_calls_silent() -> None:
    with pytest.raises(Exception, match="promotion"):
        jnp.ones(2, NARROW) * np.float32(2)


def test_float64_is_allowed_where_the_policy_gives_a_reason() -> None:
    (good,) = findings(net("cema", float64_leak), "no_float64")
    assert good.severity is Severity.OK
    (rule,) = (rule for rule in POLICY.rules if rule.name == "no_float64")
    assert all(reason for _, reason in rule.allowed)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version = 2", "expected version 1"),
        ("version = 1\n[[rule]]\nname = 'x'\nkind = 'odd'", "rule 'x': kind must be one of"),
        ("version = ", "is not TOML"),
        (
            "version = 1\n[[rule]]\nname='x'\nkind='wide'\nseverity='error'\nremedy='y'\n"
            "families=['dots']",
            r"unknown families \['dots'\]",
        ),
        (
            "version = 1\n[[rule]]\nname='x'\nkind='wide'\nseverity='error'\nremedy='y'\n"
            "[[rule.allowed]]\nmodules=['*']",
            "an exception has no reason",
        ),
        (
            "version = 1\n[[rule]]\nname='x'\nkind='wide'\nseverity='error'\nremedy='y'\nsize=3",
            r"unknown keys \['size'\]",
        ),
    ],
)
def test_a_broken_policy_file_is_refused_in_words(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        load_policy(path)


def test_a_scope_holds_what_fits_all_it_names() -> None:
    """An exception for one phase or view must not excuse another."""
    row = Row("jaxpr", "forward", "model.norm", "dot", "dot_general", ("bfloat16",), "bfloat16")
    fits = {
        "modules": ("*.norm",),
        "families": ("dot",),
        "phases": ("forward",),
        "views": ("jaxpr",),
    }
    assert Scope().holds(row) and Scope(**fits).holds(row)
    for name in fits:
        assert not Scope(**{**fits, name: ("another",)}).holds(row), name
