"""ESC, NUL, characters that turn the text around and markup, in every string of a stored run."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from parity.engine.measure.deviation import HIGH, LOW, Deviation, Worst
from parity.engine.measure.measurement import Kind, Verdict
from reports.page import side_by_side
from reports.page.render import render
from reports.store.manifest import Manifest
from reports.store.runs import Run
from reports.verdict.decide import decide
from reports.verdict.history import History
from stability.core.findings import Severity
from tests.reports.nights import (
    bench,
    document,
    earlier,
    explained,
    failing,
    finding,
    measurement,
    run,
)
from tests.reports.page.test_page import Page, storage
from tests.reports.page.test_port_page import document as port

HOSTILE = "h\x1b[31m\x00\u202e\u2066\x85</script><img src=x onerror=alert(1)>&\"'"
STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800]")
"""Control and direction characters but the line feed, and half a surrogate pair."""
KEPT = frozenset(("schema", "kind", "status", "created", "direction", "severity", "holds", "state"))
"""Keys whose values are words or times that a reader of run.json refuses if they are others."""


def spoiled(value: Any, key: str = "") -> Any:
    """Return a JSON value with the hostile name in front of each text."""
    if isinstance(value, str):
        # JSON can hold half a surrogate pair, which no UTF-8 file can.
        return value if key in KEPT else f"{HOSTILE}\ud800{value}"
    if isinstance(value, dict):
        return {name: spoiled(item, name) for name, item in value.items()}
    return [spoiled(item, key) for item in value] if isinstance(value, list | tuple) else value


def named(thing: Any, *kept: str) -> Any:
    """Return a measurement or a finding with the hostile name in front of each text but those."""
    texts = {f.name: getattr(thing, f.name) for f in fields(thing)}
    return replace(
        thing,
        **{n: HOSTILE + t for n, t in texts.items() if type(t) is str and n not in kept},
    )


def hostile() -> Run:
    rows = [
        named(failing(kind=kind, quantity="layers.0.q", stage=1, metric=metric, note="n"), *kept)
        for kind in Kind
        for metric in ("rel_l2", "other")
        for kept in (("metric", "edge", "suite", "dtype"), ("case",))
    ]
    rows += [
        named(measurement(verdict=Verdict.NOT_COMPARABLE, note="n"), "metric", "edge", "suite"),
        named(measurement(suite="mesh", edge="mesh64:one64", note="n"), "suite", "metric"),
        named(failing(edge="port32:original32", suite="mla-moe"), "suite", "metric", "edge"),
        named(measurement(edge="jaxbf16:oracle", dtype="bfloat16"), "dtype", "edge", "metric"),
        named(failing(suite="llama", case="llama", note="n"), "suite", "case", "metric"),
    ]
    found = [
        named(finding(severity=severity, probe=probe, metric=metric, remedy="r"), *kept)
        for severity in Severity
        for probe, metric in (("survival", "frozen_fraction"), ("values", "x"), ("poles", "y"))
        for kept in (("probe", "metric"), ())
    ]
    cell = {"gemm": "model.layers.0.a", "format": "nvfp4", "direction": "forward", "error": 0.1,
            "mse": 0.1, "underflow": 0.0, "clipped": 0.0, "fraction": 2.0}  # fmt: skip
    products = [
        {**cell, "gemm": HOSTILE + cell["gemm"], "direction": direction}
        for direction in ("forward", "input_grad", "weight_grad")
    ]
    text = {"title": "t", "why": "w", "hash": "h", "batch": 1, "length": 1, "name": "baseline"}
    changes = spoiled(
        {
            "versions": {"jax": "1"},
            "flags": {"f": "1"},
            "commit": "1a2b3c4",
            "fault": "planted",
            "device": {"kind": "cpu", "name": "x"},
            "reference": {"kind": "live", "commit": "c", "versions": {"torch": "2"}, "detail": "d"},
            "cases": [text],
            "tolerances": [{"edge": "e", "kind": "k", "bound": "b", "reason": "r"}],
            "seams": [{"id": "i", "reason": "r", "bound": "b", "measured": "m", "value": 1.0}],
            "checkpoint": {"name": "c", "parameters": 3, "config": {"a": "b"}, "training": {}},
            "selected": ["case"],
            "suites": [
                {"name": "s", "status": "failed", "planned": 1, "executed": 0, "reason": "r"}
            ],
            "durations": {"s": 1.0},
        }
    )
    ported = {**port("llama"), "title": "llama", "sentence": HOSTILE, "notices": [HOSTILE]}
    ported["matching"] = spoiled(ported["matching"])
    ported["alignment"] = spoiled(ported["alignment"])
    ported["bfloat16"] = spoiled(ported["bfloat16"])
    tensors = tuple(
        Deviation(m.case, m.edge, m.quantity, "float32", (2,), (1, *(0,) * (HIGH - LOW), 1),
                  (Worst((1,), 1.0, 2.0),))
        for m in rows[:2]
    )  # fmt: skip
    night = run(
        *rows,
        findings=tuple(found),
        tensors=tensors,
        **changes,
        stability={**storage(HOSTILE), "what if": products},
        ports=[ported],
    )
    account = replace(explained(), case=rows[0].case, parameters=(HOSTILE,), note=HOSTILE)
    return replace(night, explanations=(account,))


def packed(page: str) -> str:
    template = re.search(r"<template>(.*?)</template>", page, re.DOTALL)
    assert template
    return gzip.decompress(base64.b64decode(template[1])).decode()


def steering(value: Any) -> list[str]:
    """Return the strings of a JSON value that hold a character that steers."""
    if isinstance(value, str):
        return [value] if STEERING.search(value) else []
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    return [s for part in parts for s in steering(part)] if isinstance(parts, list) else []


@pytest.fixture(scope="module")
def night() -> Run:
    return hostile()


@pytest.fixture(scope="module")
def page(night: Run) -> str:
    old = named(measurement(), "metric", "edge", "suite")
    before = earlier(old, versions={HOSTILE: HOSTILE}, commit=HOSTILE)
    history = History(
        baseline=before, runs=(HOSTILE,), series={m.key: (0.5,) for m in night.measurements},
        manifests=(before.manifest,), benches=(bench(),),
    )  # fmt: skip
    return render(night, decide(night, before), history)


def test_nothing_that_steers_reaches_the_markup(page: str) -> None:
    assert not STEERING.search(page), steering(page.splitlines())[:3]
    assert page.encode()
    # A name may also be written as an entity, which a browser reads back.
    shown = html.unescape(re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL))
    assert not STEERING.search(shown.replace("\t", " "))
    assert "h\\u001b[31m\\u0000\\u202e\\u2066\\u0085" in shown


def test_names_are_text_and_no_element(page: str) -> None:
    tags = Page(page).tags
    assert not any(tag == "img" for tag, _ in tags)
    assert [tag for tag, _ in tags].count("script") == 1
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)


def test_nothing_that_steers_travels_in_the_rows(page: str) -> None:
    document = json.loads(packed(page))
    assert steering(document) == []
    for markup in document["tensors"].values():
        assert "<img" not in markup


def test_two_hostile_runs_side_by_side(night: Run) -> None:
    before = earlier(*night.measurements[:3], commit=HOSTILE, fault=HOSTILE, verdict=HOSTILE)
    then, now = decide(before, None), decide(night, before)
    text = side_by_side.render(before, then, night, now, ("../a", "../b"))
    assert not STEERING.search(text), steering(text.splitlines())[:3]
    assert not any(tag == "img" for tag, _ in Page(text).tags)


def test_the_walk_spoils_every_text_of_a_manifest() -> None:
    """Control of the tests above: what they call hostile is."""
    changed = spoiled(document(commit="c"))
    assert changed["commit"].startswith(HOSTILE)
    assert all(name.startswith(HOSTILE) for name in changed["reference"]["versions"].values())
    assert steering(json.loads(json.dumps(changed)))
    assert Manifest.from_json({**document(), "commit": HOSTILE}).commit == HOSTILE
