"""Low-precision products against float64: every gate holds, and a narrow sum breaks each one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from megalodon_jax import gemm
from parity import products
from parity.results import Verdict


def only(*names: str) -> dict[str, gemm.Backend]:
    return {name: gemm.BACKENDS[name] for name in names}


def test_only_the_operands_are_narrow(monkeypatch) -> None:
    monkeypatch.setattr(products, "BACKENDS", only("mxfp8", "nvfp4"))
    gates = [m for m in products.measure() if m.verdict is not Verdict.INFO]
    assert {m.case for m in gates} == {"mxfp8", "nvfp4"}
    assert {m.quantity for m in gates} == set(products.QUANTITIES)
    assert [m for m in gates if m.verdict is not Verdict.PASS] == []

    emulated = gemm._emulated
    narrow = lambda a, b: emulated(a, b).astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    jax.clear_caches()  # what is compiled already is not narrow
    monkeypatch.setattr(gemm, "_emulated", narrow)
    monkeypatch.setattr(products, "BACKENDS", only("mxfp8"))
    broken = [m for m in products.measure() if m.verdict is not Verdict.INFO]
    assert {m.verdict for m in broken} == {Verdict.FAIL}
