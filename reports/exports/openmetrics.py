"""A run as OpenMetrics text, for Prometheus and Grafana.

Labels of gauges describe what was measured and never the run, so that every night continues the
same series; only the metric `run` names the run. Samples carry the time of their run, for `promtool
tsdb create-blocks-from openmetrics`. There is one series per case, comparison and kind of quantity:
one per measurement would be tens of thousands. Source: docs/commands.md "For other tools".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from megalodon_jax.extras import install
from reports.exports.levels import largest_shares
from reports.store.runs import Run
from reports.text import label
from reports.verdict.decide import Decision

PREFIX = "megalodon_numerics"
"""Beginning of the names of all metrics."""


def openmetrics(run: Run, decision: Decision) -> str:
    """Return a run and its verdict as OpenMetrics text, with samples dated to the run.

    Raises:
        ValueError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
        from prometheus_client.openmetrics.exposition import generate_latest
    except ImportError as error:
        raise ValueError(
            "OpenMetrics is written by prometheus_client, which is not installed: "
            f"{install('exports')}"
        ) from error
    manifest, environment = run.manifest, run.manifest.environment
    # Each device and reference has its own series, since error levels differ between them.
    common = {
        "kind": manifest.kind.value,
        "device": _visible(environment.device.kind),
        "reference": _visible(environment.reference.kind),
        "fault": _visible(manifest.fault),
    }
    created = datetime.fromisoformat(manifest.created).timestamp()

    def gauge(name: str, about: str, samples: Mapping[Any, float], *names: str):
        family = GaugeMetricFamily(f"{PREFIX}_{name}", about, labels=[*common, *names])
        shown: dict[tuple[str, ...], float] = {}
        for values, number in samples.items():
            # Two samples in one series would be invalid; the larger one is worse.
            at = tuple(map(_visible, values))
            shown[at] = max(number, shown.get(at, number))
        for values, number in shown.items():
            family.add_metric([*common.values(), *values], number, timestamp=created)
        return family

    counts = {(name,): float(n) for name, n in asdict(decision.counts).items()}
    findings = Counter((f.probe, f.severity.value) for f in run.findings)
    families = [
        gauge("exit_code", "Verdict of the run: 0 is pass or changed.", {(): decision.exit_code}),
        gauge("count", "Number of gates and changes, by outcome.", counts, "what"),
        gauge(
            "tolerance_used_ratio",
            "Largest share of its tolerance that a gate uses; above 1 it is broken.",
            largest_shares(run.measurements),
            "suite",
            "case",
            "edge",
            "quantity_kind",
        ),
        gauge("findings", "Findings of probes.", dict(findings), "probe", "severity"),
        gauge(
            "suite_duration_seconds",
            "Seconds that a suite took.",
            {(name,): float(seconds) for name, seconds in manifest.durations.items()},
            "suite",
        ),
    ]
    info = InfoMetricFamily(f"{PREFIX}_run", "The newest run.", labels=list(common))
    facts = {
        "run": _visible(run.id),
        "commit": _visible(manifest.commit),
        "verdict": str(decision.word),
    }
    info.add_metric(list(common.values()), facts, timestamp=created)

    class Collector:
        def collect(self):
            return [*families, info]

    registry = CollectorRegistry()
    registry.register(Collector())  # pyright: ignore[reportArgumentType]
    return generate_latest(registry).decode()


def _visible(name: str | None) -> str:
    """Return a name as a label value, not shortened, with control characters escaped; None as "".

    By default the OpenMetrics text is printed to the terminal.
    """
    return label(name or "", 1 << 16)
