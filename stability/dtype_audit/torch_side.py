"""Dtype audit of megalodon-hf: the operations that torch dispatches, as rows like those of JAX.

Violations are notes only: this project cannot change the reference, and checkpoints were trained
with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from megalodon_jax.config import MegalodonConfig
from parity.megalodon.reference.dispatch import Dispatched, Mode, dispatched
from stability.core.findings import Finding, Severity
from stability.dtype_audit.families import ATEN, DOT, ELEMENTWISE
from stability.dtype_audit.policy import Policy, load_policy
from stability.dtype_audit.programs import BATCH, shrunk
from stability.dtype_audit.rows import Row, aggregated, is_inexact
from stability.dtype_audit.scopes import ROOT

MODES: tuple[Mode, ...] = ("autocast", "bfloat16")
_SAME = {"lm_head": ROOT, "": ROOT}
"""Name of a module in the JAX model, by its name in the reference, where the names differ."""


def audit_torch(config: MegalodonConfig, mode: Mode) -> tuple[Row, ...]:
    """Return the dtype audit (`Row`s) of megalodon-hf in a configuration, shrunk to small sizes.

    Args:
        config: see `programs.audit_config`.
        mode: `autocast` (float32 weights under `torch.autocast(bfloat16)`), `bfloat16`
            (`model.to(torch.bfloat16)`) or `float32`.

    Raises:
        ReferenceUnavailableError: megalodon-hf is not installed.
    """
    small = shrunk(config)
    return rows_of_dispatch(dispatched(small, (BATCH, 2 * small.chunk_size + 3), mode))


def rows_of_dispatch(calls: Iterable[Dispatched]) -> tuple[Row, ...]:
    """Return the dtype audit (`Row`s) of operations dispatched by torch."""
    return aggregated(row for call in calls if (row := _row(call)) is not None)


def torch_findings(rows: Iterable[Row], policy: Policy | None = None) -> list[Finding]:
    """Return the findings of the policy (None: the committed one) on rows of the reference.

    Violations are notes.
    """
    findings = (policy or load_policy()).check(rows)
    mild = (Severity.OK, Severity.NOTE)
    return [f if f.severity in mild else replace(f, severity=Severity.NOTE) for f in findings]


def _row(call: Dispatched) -> Row | None:
    family = ATEN.get(call.op)
    numbers = [d for d in (*call.inputs, call.output) if d]
    if family is None or not any(map(is_inexact, numbers)):
        return None
    if call.op == "_to_copy" and call.inputs == (call.output,):
        return None
    elementwise, module = family == ELEMENTWISE, re.sub(r"\.\d+(?=\.|$)", ".*", call.module)
    inputs = tuple(sorted(set(call.inputs))) if elementwise else call.inputs
    return Row(
        view="torch",
        phase="backward" if call.backward else "forward",
        module=_SAME.get(module, module),
        family=family,
        op=ELEMENTWISE if elementwise else call.op,
        inputs=inputs[:2] if family == DOT and call.op != "addmm" else inputs,
        output=call.output,
        count=call.count,
    )
