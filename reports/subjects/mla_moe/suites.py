"""The suite of the second architecture: each case is compared with Transformers, twice."""

from __future__ import annotations

from collections.abc import Collection

from parity.deepseek_v3 import comparison as mla_moe
from parity.deepseek_v3 import contract as mla_moe_contract
from parity.device import device_kind
from parity.engine.measure.metrics import POOLED
from parity.executors.executor import Log
from parity.megalodon.suite import Reference
from reports.nightly import accounts
from reports.subjects.mla_moe.record import PART
from reports.suite_run import SuiteRun, breakdowns_named, mark_repeats
from stability.core.findings import Finding
from stability.moe.fixed_bugs import reference_scatter


def run_mla_moe(reference: Reference, report: Log, only: Collection[str] = ()) -> SuiteRun:
    """Compare the second architecture with Transformers, in all cases or those named in `only`.

    Transformers runs live if it can and if the night's `reference` is live; else its recorded
    results are used.
    """
    cases = [case for case in mla_moe.CASES if not only or case.title in only]
    suite = SuiteRun(PART.suite, planned=len(cases))
    which = "auto" if reference.kind == "live" else "recorded"
    findings: dict[str, Finding] = {}
    with breakdowns_named(suite):
        for case in cases:
            answer = mla_moe.answer(case, which)
            ours, device = mla_moe.side(case), device_kind()
            suite.contract += mla_moe_contract.gates(case, answer, ours)
            once, again = (mla_moe.compare(case, answer, ours, device=device) for _ in range(2))
            suite.measurements += mark_repeats(once.measurements, again.measurements)
            if (account := accounts.of_port(once.report)) is not None:
                suite.explanations.append(account)
            pool = mla_moe.pooled(case, answer.kind == "live", device)
            suite.responses[case.title, "rel_l2"] = pool.first
            suite.measurements += pool.measurements
            suite.responses[case.title, POOLED] = pool.responses
            suite.executed += 1
            finding = reference_scatter(answer.refusal, answer.versions["transformers"])
            findings[finding.message] = finding
    suite.findings = [finding for finding in findings.values() if finding.value]
    report(f"  mla-moe: {suite.passed} gates hold ({suite.seconds:.1f} s)")
    return suite
