"""The page of all runs in a folder: verdicts over time, changes of gates, and links to their pages.

One HTML file beside the runs, drawn from the index. Unreadable folders are shown as damaged and
runs without a verdict as not judged, never as passing. Source: docs/reports.md "All runs".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from reports.page.glossary import once
from reports.page.render import environment, script, style
from reports.page.sections.facts import moment
from reports.store.schema import PAGE, RunKind
from reports.text import count, edge_name, label, record_id
from reports.verdict.decide import Word

STRIP = 90
"""Largest number of runs drawn in each row of the timeline; the newest ones are drawn."""
ROWS = 30
"""Largest number of rows in the timeline; a row has the runs of one kind, set of ports and
device."""
EVENTS = 40
"""Largest number of runs that are listed with the gates whose verdict changed in them."""
GROUPS = 6
"""Largest number of groups of gates listed for each run with changed gates."""
MONTHS = 36
"""Number of newest months in the table that counts runs by month and verdict."""


@dataclass(frozen=True, slots=True)
class GateGroup:
    """Gates of one case and comparison (edge) whose verdict changed between the same two runs.

    Attributes:
        case: name of the case.
        edge: the comparison, such as "jax32:oracle".
        gates: number of these gates.
        quantity: quantity of one of them, to which the page links.
        metric: metric of that gate.
    """

    case: str
    edge: str
    gates: int
    quantity: str
    metric: str


@dataclass(frozen=True, slots=True)
class Event:
    """Gates whose verdict changed between an earlier run and this one.

    Attributes:
        before: folder name of the earlier run.
        commits: description of the commits between the two.
        began: gates that held in the earlier run and fail, or cannot be compared, in this one.
        ceased: gates that failed or could not be compared in the earlier run and hold in this one.
    """

    before: str
    commits: str
    began: tuple[GateGroup, ...]
    ceased: tuple[GateGroup, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One folder in the list of runs: a run, or a damaged folder (`why` is not empty).

    Attributes:
        name: name of the folder.
        created: when the run began, ISO 8601; for a damaged folder the date in its name, or "".
        why: why the folder cannot be read; "" if it can.
        kind: kind of the run, a value of `RunKind`.
        subject: names of the compared ports; empty for Megalodon's own runs.
        device: class and name of the device.
        reference: kind and shortened commit of the reference.
        commit: commit of the measured code; "" if unknown.
        dirty: whether that code had uncommitted changes.
        fault: name of the planted fault; "" for none.
        verdict: verdict given when the run was stored; "" if it was not judged.
        gates: number of measurements with a tolerance.
        broken: number of gates that do not hold.
        selected: number of selected cases; 0 if all were run.
        page: whether the folder has a page to link to.
        events: gates whose verdict changed since they were last measured: one entry per earlier
            run that measured them last, the newest of these runs first.
        first: number of failing gates that no earlier run of the list measured.
        dropped: number of gates that failed in the previous run of all cases on this class of
            device and that this run did not measure; 0 if this run ran only selected cases.
        known: whether the run's failing gates could be read; if not, its changes are unknown.
    """

    name: str
    created: str
    why: str = ""
    kind: str = ""
    subject: tuple[str, ...] = ()
    device: str = ""
    reference: str = ""
    commit: str = ""
    dirty: bool = False
    fault: str = ""
    selected: int = 0
    verdict: str = ""
    gates: int = 0
    broken: int = 0
    page: bool = False
    events: tuple[Event, ...] = ()
    first: int = 0
    dropped: int = 0
    known: bool = True

    @property
    def stream(self) -> tuple[str, ...]:
        """Key of the run's row in the timeline: (kind of run, names of its ports, device, "some
        cases" if it ran only selected ones, else "")."""
        selection = "some cases" if self.selected else ""
        return self.kind, ", ".join(self.subject), self.device, selection


@dataclass(frozen=True, slots=True)
class Standing:
    """Display of a run's verdict or state: word, sign and style, distinguishable without colour."""

    word: str
    sign: str
    """One character shown beside the word."""
    slug: str
    """CSS classes of the run's drawing, separated by spaces."""
    height: int
    """Height of the bar in a timeline, in percent; the worse the state, the higher."""


_VERDICTS = {
    Word.PASS.value: Standing("PASS", "✓", "pass", 40),
    Word.CHANGED.value: Standing("CHANGED", "!", "changed", 55),
    Word.INCOMPLETE.value: Standing("INCOMPLETE", "…", "incomplete", 70),
    Word.NOT_COMPARABLE.value: Standing("NOT COMPARABLE", "≠", "not-comparable", 85),
    Word.REGRESSED.value: Standing("REGRESSED", "✕", "regressed", 100),
}
_GREEN = (Word.PASS.value, Word.CHANGED.value)
DAMAGED = Standing("damaged", "✕", "regressed damaged", 100)
NOT_JUDGED = Standing("not judged", "?", "note", 25)
NO_VERDICT = Standing("no verdict", "–", "note", 15)
CONTRADICTION = Standing("contradicts its numbers", "✕", "regressed", 100)
_STANDINGS = (
    *_VERDICTS.values(), CONTRADICTION, DAMAGED, NOT_JUDGED, NO_VERDICT,
)  # fmt: skip
_UNJUDGED = frozenset((RunKind.BENCH.value, RunKind.SHARD.value))


def standing(entry: Entry) -> Standing:
    """Return how to display a run: by its verdict, with three exceptions.

    These are a damaged folder; a bench or shard, which has no verdict; and a run whose verdict
    passes although a gate fails or it has no gates, which is shown as a contradiction.
    """
    if entry.why:
        return DAMAGED
    if entry.kind in _UNJUDGED:
        return NO_VERDICT
    found = _VERDICTS.get(entry.verdict, NOT_JUDGED)
    # A passing verdict with failing gates, or without any gate, was not written by this program.
    if entry.verdict in _GREEN and (entry.broken or not entry.gates):
        return CONTRADICTION
    return found


def render(entries: Sequence[Entry], place: str, omitted: Sequence[Entry] = ()) -> str:
    """Return the page of all runs as one HTML text; equal arguments give equal bytes.

    Args:
        entries: Runs to show, oldest first.
        place: Name or address of the folder of runs, for the title.
        omitted: Older runs, which appear only in the counts.
    """
    newest = list(reversed(entries))
    changed = [entry for entry in newest if entry.events or entry.first or entry.dropped]
    context = {
        "style": style(),
        "more_style": script("all_runs.css"),
        "script": script("all_runs.js"),
        "place": label(place, 60),
        "total": len(entries) + len(omitted),
        "omitted": len(omitted),
        "head": _head(newest),
        "streams": _streams(newest),
        "streams_omitted": max(0, len({e.stream for e in entries if _judged(e)}) - ROWS),
        "events": [_event(entry) for entry in changed[:EVENTS]],
        "events_omitted": max(0, len(changed) - EVENTS),
        "rows": [_row(entry) for entry in newest],
        "damaged": [_row(entry) for entry in newest if entry.why],
        "months": _months([*omitted, *entries]),
        "choices": {
            "verdict": list(dict.fromkeys(standing(e).word for e in newest)),
            "kind": sorted({e.kind for e in newest if e.kind}),
            "device": sorted({label(e.device, 60) for e in newest if e.device}),
        },
    }
    return once(environment().get_template("all_runs.html.j2").render(context))


def _judged(entry: Entry) -> bool:
    return not entry.why and entry.kind not in _UNJUDGED


def _healthy(entry: Entry) -> bool:
    """Return whether a run can be read, has a verdict and no planted fault, and ran all cases.

    The verdict itself may be any.
    """
    return _judged(entry) and not (entry.fault or entry.selected)


def _head(newest: Sequence[Entry]) -> dict[str, Any]:
    """Return what the top of the page shows: word, sentence, CSS class and the run they describe.

    It is the newest run of all cases without a planted fault; if any such run is a nightly, other
    kinds are not considered. The run is None if there is no such run.
    """
    whole = [entry for entry in newest if _healthy(entry)]
    nights = [entry for entry in whole if entry.kind == RunKind.NIGHTLY.value] or whole
    if not nights:
        sentence = "No whole run with a verdict is here."
        if judged := [entry for entry in newest if _judged(entry)]:
            sentence = (
                "The runs below ran some cases only, or have a planted bug. The newest verdict is "
                f"{standing(judged[0]).word.upper()}."
            )
        return {"slug": "incomplete", "word": "NO WHOLE RUN", "sentence": sentence, "entry": None}
    latest = nights[0]
    how, own = standing(latest), [entry for entry in nights if entry.stream == latest.stream]
    # For a damaged folder the time is known only from its name.
    doubt = [e for e in newest if e.why and (not e.created or e.created >= latest.created)]
    slug, word = how.slug.partition(" ")[0], how.word.upper()
    if doubt:
        slug, word = "incomplete", Word.INCOMPLETE.value
        sentence = (
            f"The newest run that can be read is {how.word}, but "
            f"{count(len(doubt), 'damaged folder')} may be newer: {label(doubt[0].name, 60)}."
        )
    elif len(own) == 1:
        sentence = "This is the only run of its kind."
    else:
        since = _streak(own)
        runs = f"the newest {since:,} runs" if since > 1 else "this run"
        before = f"; {standing(own[since]).word} before" if since < len(own) else ""
        sentence = f"{how.word} in {runs}{before}."
    sentence += _elsewhere(whole, latest)
    slug = "incomplete" if slug == "note" else slug
    return {"slug": slug, "word": word, "sentence": sentence, "entry": _brief(latest)}


def _elsewhere(whole: Sequence[Entry], latest: Entry) -> str:
    """Return a sentence that lists the rows of the timeline whose newest run does not pass.

    The row that contains `latest` is left out. "" if there is no other such row.

    Args:
        whole: Runs of all cases without a planted fault, newest first.
        latest: The run that the top of the page describes.
    """
    newest = {entry.stream: entry for entry in reversed(whole) if entry.stream != latest.stream}
    red = [e for e in newest.values() if standing(e).slug not in ("pass", "changed")]
    if not red:
        return ""
    named = [f"{_what(e)} on {label(e.device, 40)}: {standing(e).word}" for e in red[:3]]
    more = f"; and {len(red) - 3:,} more" if len(red) > 3 else ""
    return f" Newest runs of other kinds that do not pass: {'; '.join(named)}{more}."


def _streak(newest: Sequence[Entry]) -> int:
    """Return how many of the newest runs in a row are displayed with the same word
    (`Standing.word`); `newest` is newest first."""
    words = [standing(entry).word for entry in newest]
    return next((i for i, word in enumerate(words) if word != words[0]), len(words))


def _brief(entry: Entry) -> dict[str, Any]:
    return {"kind": _what(entry), "created": entry.created, "when": moment(entry.created),
            "href": _href(entry), "commit": _commit(entry)}  # fmt: skip


def _what(entry: Entry) -> str:
    """Describe a run: its kind, its ports, and the number of selected cases if any."""
    words = [entry.kind, label(", ".join(entry.subject), 60)]
    if entry.selected:
        words.append(f"({count(entry.selected, 'case')})")
    return " ".join(word for word in words if word)


def _commit(entry: Entry) -> str:
    return label(entry.commit, 60)[:10]


def _streams(newest: Sequence[Entry]) -> list[dict[str, Any]]:
    """Return the rows of the timeline, at most `ROWS`: one per distinct `Entry.stream`.

    `newest` has the newest run first.
    """
    by_stream: dict[tuple[str, ...], list[Entry]] = {}
    for entry in newest:
        if _judged(entry):
            by_stream.setdefault(entry.stream, []).append(entry)
    rows = []
    for entries in list(by_stream.values())[:ROWS]:
        # Runs with a planted fault are drawn but do not count for the streak.
        own = [entry for entry in entries if not entry.fault] or entries
        how, since = standing(own[0]), _streak(own)
        selected = bool(own[0].selected)
        rows.append(
            {
                "what": _what(own[0]) if not selected else f"{own[0].kind}, some cases",
                "device": label(own[0].device, 40),
                "how": how,
                "when": moment(own[0].created),
                "href": _href(own[0]),
                "since": moment(own[since - 1].created),
                "streak": f"{since:,} of {count(len(own), 'run')}",
                "strip": _strip(entries[:STRIP][::-1]),
                "runs": len(entries),
            }
        )
    return rows


def _strip(entries: Sequence[Entry]) -> Markup:
    """Draw one bar per run, oldest first.

    The bars of different verdicts differ in height, and the worst have a cross, so that colour is
    not needed.
    """
    width, high = 7, 30
    counts = Counter(standing(entry).word for entry in entries)
    said = ", ".join(f"{n:,} {word}" for word, n in counts.most_common())
    text = f"{count(len(entries), 'run')}, oldest first: {said}"
    bars = []
    for i, entry in enumerate(entries):
        how = standing(entry)
        tall = round(high * how.height / 100)
        x, y = i * width, high - tall
        classes = how.slug + (" planted" if entry.fault else "")
        told = f"{moment(entry.created)}: {how.word}"
        if entry.fault:
            told += f", planted: {label(entry.fault, 60)}"
        mark = ""
        if how.height == 100:
            mark = Markup('<path class="cross" d="M{} 2l3 3m0-3l-3 3"/>').format(x + 1.5)
        bars.append(
            Markup(
                '<g class="{}" data-run="{}"><rect x="{}" y="{}" width="6" height="{}"/>{}'
                "<title>{}</title></g>"
            ).format(classes, _anchor(entry), x, y, tall, mark, told)
        )
    box = f"0 0 {max(1, len(entries)) * width} {high}"
    head = Markup('<svg class="strip" viewBox="{}" width="{}" height="{}" role="img">').format(
        box, len(entries) * width, high
    )
    return (
        head + Markup("<title>{}</title>").format(text) + Markup("").join(bars) + Markup("</svg>")
    )


def _href(entry: Entry, row: str = "") -> str:
    if not entry.page:
        return ""
    # A folder name may contain bytes that are not valid text.
    return f"{quote(entry.name, errors='surrogateescape')}/{PAGE}{row}"


def _row(entry: Entry) -> dict[str, Any]:
    how = standing(entry)
    began = sum(group.gates for event in entry.events for group in event.began)
    ceased = sum(group.gates for event in entry.events for group in event.ceased)
    commit = _commit(entry)
    return {
        "id": _anchor(entry),
        "name": label(entry.name, 80),
        "href": _href(entry),
        "how": how,
        "verdict": label(entry.verdict, 40) if how in (NOT_JUDGED, CONTRADICTION) else "",
        "created": entry.created,
        "when": moment(entry.created) if entry.created else "time not known",
        "what": _what(entry),
        "kind": entry.kind,
        "device": label(entry.device, 60),
        "reference": label(entry.reference, 40),
        "commit": commit,
        "dirty": entry.dirty,
        "fault": label(entry.fault, 60),
        "why": label(entry.why, 300),
        "gates": entry.gates,
        "broken": entry.broken,
        "began": began,
        "ceased": ceased,
        "first": entry.first,
        "dropped": entry.dropped,
        "known": entry.known,
        "changed": bool(began or ceased or entry.first or entry.dropped),
    }


def _anchor(entry: Entry) -> str:
    return f"run-{record_id('', '', entry.name, '')}"


def _event(entry: Entry) -> dict[str, Any]:
    return _row(entry) | {
        "parts": [
            {
                "before": label(event.before, 80),
                "commits": event.commits,
                "began": _groups(event.began, entry),
                "ceased": _groups(event.ceased, entry),
            }
            for event in entry.events
        ]
    }


def _groups(groups: Sequence[GateGroup], entry: Entry) -> dict[str, Any]:
    return {
        "gates": sum(group.gates for group in groups),
        "shown": [
            {
                "case": label(group.case, 48),
                "edge": edge_name(group.edge),
                "gates": group.gates,
                "quantity": label(group.quantity),
                "href": _href(
                    entry,
                    f"#r-{record_id(group.case, group.edge, group.quantity, group.metric)}",
                ),
            }
            for group in groups[:GROUPS]
        ],
        "more": max(0, len(groups) - GROUPS),
    }


def _months(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the table that counts runs by month and displayed verdict, newest month first."""
    counts: dict[str, Counter[str]] = {}
    for entry in entries:
        month = entry.created[:7] if entry.created else "not known"
        counts.setdefault(label(month, 12), Counter())[standing(entry).word] += 1
    heads = [how for how in _STANDINGS if any(how.word in month for month in counts.values())]
    months = sorted(counts, reverse=True)
    rows = [(month, [counts[month][how.word] for how in heads]) for month in months[:MONTHS]]
    return {"heads": heads, "rows": rows, "omitted": max(0, len(months) - MONTHS)}
