"""A section of docs/sharding.md is run as written, and its numbers of bugs are counted."""

from __future__ import annotations

import re
from collections import Counter

import jax

from tests.helpers import section
from tests.parity.mesh.faults import FAULTS

TEXT = section("sharding.md", "One device against many")


def test_the_snippets_run_and_print_what_the_page_shows(capsys):
    namespace = {}
    with jax.numpy_dtype_promotion("standard"):
        for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M):
            exec(block, namespace)
    printed = capsys.readouterr().out
    shown = re.findall(r"^```text\n(.*?)^```", TEXT, re.S | re.M)

    def words(text):
        return re.sub(r"\d\.\de-\d\d", "#", text)

    assert words(printed) == words("".join(shown))


def test_the_page_counts_the_planted_bugs():
    rows = re.findall(r"^\| ([a-z, ]+) \| (\d+) \|", TEXT, re.M)
    count = Counter(fault.family.value for fault in FAULTS)
    assert len(FAULTS) >= 40 and f"judged by {len(FAULTS)} bugs" in TEXT
    assert {names: sum(count[n] for n in names.split(", ")) for names, _ in rows} == {
        names: int(number) for names, number in rows
    }
    assert sum(count.values()) == sum(int(number) for _, number in rows)
