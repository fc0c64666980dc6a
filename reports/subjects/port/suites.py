"""The suite that compares Megalodon with megalodon-hf as any user compares two programs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from parity.device import device_kind
from parity.executors.executor import Log
from parity.megalodon.cases import by_name
from parity.megalodon.suite import Reference
from parity.port import compare as compare_port
from reports.nightly import accounts
from reports.subjects.port.record import PART
from reports.suite_run import SuiteRun, breakdowns_named, mark_repeats

AS_A_PORT = {"port/plain": "plain"}
"""Cases of Megalodon that are also compared as a user's port would be, by the title of the port.
One case is enough: pairing stages without names works in the same way for all."""


def run_port(_: Reference, report: Log, only: Collection[str] = ()) -> SuiteRun:
    """Compare Megalodon with megalodon-hf as a user's port, derivatives included.

    Stages are paired without names, and each tolerance comes from a noise floor measured in the
    same run. Needs the live reference. `only` selects titles of `AS_A_PORT`; empty selects all.
    """
    from parity.megalodon.port import port  # needs torch

    titles = [title for title in AS_A_PORT if not only or title in only]
    suite = SuiteRun(PART.suite, planned=len(titles))
    with breakdowns_named(suite):
        for title in titles:
            made = port(by_name(AS_A_PORT[title]), gradients=True)
            made = replace(made, name="port", case=AS_A_PORT[title], device=device_kind())
            once, again = (compare_port(made) for _ in range(2))
            # The second run must measure the gates of the first, so its contract is used.
            suite.contract += again.contract
            suite.measurements += mark_repeats(once.measurements, again.measurements)
            if (account := accounts.of_port(once)) is not None:
                suite.explanations.append(account)
            suite.executed += 1
    report(f"  as a user's port: {suite.passed} gates hold ({suite.seconds:.1f} s)")
    return suite
