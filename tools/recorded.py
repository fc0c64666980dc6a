"""Runs a tool's items on an executor, storing each result in its own file, so none runs twice.

Source: docs/many-machines.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from megalodon_jax.files import written_aside
from parity.executors.item import Answer, Item, State
from parity.executors.sweep import open_executor, run


def add_executor(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options that select the executor."""
    text = "executor: local, local:N processes, or ray"
    parser.add_argument("--executor", default="local", help=text)
    parser.add_argument("--address", help="address of the Ray cluster; auto: this machine")


def run_recorded(items: Mapping[Path, Item], asked: argparse.Namespace) -> Iterator[Answer]:
    """Yield the answers of items as they arrive, each after it was written to its file.

    A failed item is reported and leaves no file, so it is tried again next time.
    """
    paths = {item.name: path for path, item in items.items()}
    engine = open_executor(asked.executor, asked.address)
    for answer in run(list(items.values()), engine, report=_say):
        if answer.state is State.DONE:
            path = paths[answer.name]
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_aside(path) as aside:
                aside.write_text(json.dumps(answer.value, indent=1), encoding="utf-8")
            yield answer


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
