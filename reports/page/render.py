"""Renders a run and its verdict as one HTML file. Source: docs/reports.md "The page"."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, FunctionLoader, StrictUndefined
from markupsafe import Markup

from parity.engine.measure.measurement import Kind
from reports.page import svg
from reports.page.glossary import Words, anchor, explain, glossary, once
from reports.page.sections import (
    documents,
    facts,
    heat,
    marks,
    meshes,
    ports,
    precision,
    probes,
    records,
    starts,
    tables,
    trends,
    what_if,
)
from reports.page.sections.drilldown import drilldown
from reports.store.runs import Run
from reports.subject import main, registered
from reports.text import edge_name, label, metric_name, number
from reports.verdict.changes import What
from reports.verdict.decide import Decision, ExitCode
from reports.verdict.history import History
from reports.verdict.replays import replays, suite_of

DRILLED = 200
"""Largest number of failing tensors that the page describes element by element; first divergences
have priority."""
SHOWN = 6
"""Largest number of first divergences whose tensors the page shows in detail without JavaScript."""
_HERE = Path(__file__).parent
_ESCAPE = "\\U0010ffff"
"""Longest escape sequence that `label` puts in place of a single character."""
_BY_SHARE = "% of the poles remember less"
"""Label of the horizontal axis of charts over the quantiles of the poles' memory."""


@dataclass(frozen=True, slots=True)
class SoFar:
    """Progress of a nightly run that has no verdict yet.

    Attributes:
        measured: number of parts that are measured so far.
        parts: number of all parts of the night.
        state: "running", or how the night ended before all parts were measured.
        time: time of this progress, ISO 8601 in UTC.
    """

    measured: int
    parts: int
    state: str
    time: str

    @property
    def running(self) -> bool:
        """Whether the night is still running."""
        return self.state == "running"


def notice(text: str, seconds: int | None = None, href: str = "") -> str:
    """Return an HTML page that shows one sentence, and optionally loads another page.

    Args:
        text: the sentence, without its full stop.
        seconds: delay in seconds after which the browser loads `href`; None: it loads nothing.
        href: relative URL of the page to load; "" for this page again.
    """
    template = environment().get_template("notice.html.j2")
    return template.render(text=text, seconds=seconds, href=href)


def stopped(page: str, state: str) -> str:
    """Return the page of a running night, changed to say that the night stopped without verdict.

    Args:
        page: the page as it was last drawn, which may lack the newest parts.
        state: how the night ended, as in `SoFar.state`.
    """
    page = re.sub(r"<!--running-->.*?<!--/running-->", "", page, flags=re.DOTALL)
    return page.replace("<!--state-->Running", state.capitalize(), 1).replace(
        "<!--ended-->", "There is no verdict: the night did not measure the other parts.", 1
    )


def style() -> Markup:
    """Return the style sheet that every page includes, as markup."""
    return Markup((_HERE / "style.css").read_text(encoding="utf-8"))


def script(*names: str) -> Markup:
    """Return the concatenated contents of files of this folder, such as "page.js", unescaped."""
    return Markup("\n".join((_HERE / name).read_text(encoding="utf-8") for name in names))


@cache
def environment() -> Environment:
    """Return the Jinja environment of every page: escapes values and explains glossary words."""
    drawing = Environment(
        loader=ChoiceLoader([FileSystemLoader(_HERE), FunctionLoader(_own_section)]),
        autoescape=True,
        undefined=StrictUndefined,
        extensions=[Words],
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawing.filters.update(
        label=lambda value, limit=96: label(str(value), limit),
        number=number,
        edge=edge_name,
        metric=metric_name,
        breakable=_breakable,
        whole_numbers=_whole_numbers,
        explain=explain,
        record=records.id_of,
    )
    drawing.globals.update(
        glossary=glossary(),
        anchor=anchor,
        sparkline=svg.sparkline,
        trend=svg.trend,
        heat_map=svg.heat_map,
        histogram=svg.histogram,
        loss_curve=svg.loss_curve,
        drill_chart=partial(svg.chart, x_label="optimiser step"),
        batch_chart=partial(svg.chart, x_label="batch"),
        memory_chart=partial(svg.chart, x_label=_BY_SHARE, tick_label=lambda y: f"{2.0**y:,.3g}"),
        change_chart=partial(svg.chart, x_label=_BY_SHARE),
        night_chart=partial(svg.chart, x_label="nights before this one", tick_label=_share_tick),
    )
    return drawing


def _own_section(name: str) -> str | None:
    """Return the template of the section that a subject brings, by the section's id; None if there
    is no such section."""
    templates = (s.section.template for s in registered() if s.section and s.section.id == name)
    template = next(templates, None)
    return template and template.read_text(encoding="utf-8")


def _visible(value: Any) -> Any:
    """Escape control and direction characters of a text; return markup and other values unchanged.

    Every inserted value passes through here. Otherwise a name could reverse the text around it, or
    contain half a surrogate pair, which cannot be encoded.
    """
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "\n".join(label(line, len(_ESCAPE) * len(line)) for line in value.split("\n"))


def _share_tick(level: float) -> str:
    """Format a share of a tolerance, given as its log10, as a short label of a chart's axis."""
    value = 10.0**level
    return f"{100 * value:.3g} %" if value < 10 else f"{value:.0e}×".replace("e+0", "e")


def _breakable(text: str) -> Markup:
    """Return markup in which a long name may wrap after each dot and slash; the name is escaped."""
    return Markup("<wbr>").join(re.split(r"(?<=[./])", _visible(text)))


def _whole_numbers(text: str) -> Markup:
    """Return a text as markup whose numbers with an exponent do not wrap.

    A browser would break 1.5e-01 at its sign.
    """
    pieces = re.split(r"(\d[\d.]*e[+-]\d+)", _visible(text))
    whole = Markup('<span class="nowrap">{}</span>')
    return Markup("").join(whole.format(p) if i % 2 else p for i, p in enumerate(pieces))


def _drilled(
    run: Run, decision: Decision
) -> tuple[list[dict[str, Any]], dict[tuple[str, str, str], str]]:
    """Return what the page shows of failing tensors whose errors the run stored, in two forms.

    The first is the data (`drilldown`) of at most `SHOWN` tensors, all first divergences. The
    second is the HTML of at most `DRILLED` tensors, first divergences first, by
    (case, edge, quantity).
    """
    starts = [(m.case, m.edge, m.quantity) for m in decision.starts]
    rank = {key: i for i, key in enumerate(starts)}
    tensors = sorted(run.tensors, key=lambda tensor: rank.get(tensor.key, len(rank)))[:DRILLED]
    views = {tensor.key: drilldown(tensor) for tensor in tensors}
    macro: Any = environment().get_template("drilldown.html.j2").module
    shown = [views[key] for key in starts if key in views][:SHOWN]
    return shown, {key: str(macro.tensor(tensor)) for key, tensor in views.items()}


def render(
    run: Run,
    decision: Decision,
    history: History,
    runs: str = "..",
    progress: SoFar | None = None,
) -> str:
    """Return the page of a run as one HTML text, which loads no other file, font or address.

    Equal arguments give equal bytes. Names from the run are data and always escaped.

    Args:
        run: the run.
        decision: the verdict on the run.
        history: earlier runs, for trends and the baseline.
        runs: relative URL from the page to the folder of runs, for links to other pages.
        progress: progress of an unfinished night, whose page shows no verdict; None for any other
            run.
    """
    if progress is not None:
        # Gates that are not measured yet must not be shown as missing.
        kept = tuple(change for change in decision.changes if change.what is not What.GONE)
        counts = replace(decision.counts, not_run=0)
        decision = replace(decision, changes=kept, counts=counts)
    manifest, rows = run.manifest, run.measurements
    data = tables.frame(rows)
    # Products are not stages of the network, and other architectures have their own section.
    model = main()
    network = tables.frame([m for m in rows if suite_of(m) in (model.suite, "seams")])
    shown, drilldowns = _drilled(run, decision)
    padded = model.padding(rows, run.tensors)
    sections = [subject.section for subject in registered() if subject.section]
    marked = marks.of_sections(rows, run.findings, decision)
    context = {
        "style": style(),
        "script": script("page.js", "records.js", "keys.js"),
        "run": run,
        "manifest": manifest,
        "decision": decision,
        "progress": progress,
        "exit_name": ExitCode(decision.exit_code).name.replace("_", " ").lower(),
        "slug": "incomplete" if progress else decision.word.value.lower().replace(" ", "-"),
        "history": history,
        "unreadable": [(label(f.name), label(why, 300)) for f, why in history.unreadable],
        "when": facts.moment(manifest.created),
        "target": starts.target(decision),
        "tallies": starts.counts(decision),
        "overview": tables.overview(data, history, decision.starts, padded.scopes),
        "padding": padded.sentence,
        "starts": starts.starts(run, decision, history, runs),
        "before": starts.before(run, history, runs),
        "changes": tables.change_rows(decision.changes, decision.baseline_id is not None),
        "against": decision.against,
        "marks": marked,
        "red_sections": sum(state == "fail" for state in marked.values()),
        "replay": replays(run, decision),
        "tensors": shown,
        "tensors_more": len(drilldowns) - len(shown),
        "tensors_omitted": len(run.tensors) - len(drilldowns),
        "record_suites": records.suites(run),
        "records": Markup(records.embed(rows, run, history, drilldowns)),
        "logits": tables.matrix(network, Kind.LOGITS),
        "logit_metrics": tables.metric_tables(network, Kind.LOGITS, history),
        "losses": tables.matrix(network, Kind.LOSS),
        "states": tables.matrix(network, Kind.STATE),
        "tokens": tables.matrix(network, Kind.TOKENS),
        "gradients": tables.matrix(network, Kind.GRADIENT),
        "parameters": tables.parameter_tables(network),
        "trajectory": tables.trajectory_rows(network),
        "precision": tables.precision_rows(network),
        "heats": heat.heat_maps(network, decision),
        "trends": trends.trends(data, history),
        "survival": probes.survival(run),
        "audits": probes.audits(run),
        "remedies": precision.remedies(run),
        "poles": precision.poles(run, documents.drill(run)),
        "drill": precision.drill(run),
        "formats": what_if.section(run),
        "meshes": meshes.meshes(run),
        "ports": ports.ports(run),
        "subject": [label(name, 40) for name in sorted(manifest.subject)][:4],
        "only_ports": ports.only_ports(run),
        "sections": sections,
        "own": {section.id: section.data(run) for section in sections},
        "speed": facts.bench(history.benches),
        "checkpoint": facts.checkpoint(manifest),
        "reference": facts.reference(manifest.environment.reference),
        "machine": facts.environment(
            manifest, history.baseline.manifest if history.baseline else None
        ),
        "suites": facts.suites(manifest),
        "cases": facts.cases(manifest, rows),
        "known_differences": facts.known_differences(manifest),
        "duration": sum(manifest.durations.values()),
    }
    return once(environment().get_template("page.html.j2").render(context))
