"""Mutants drawn at random by cosmic-ray: which edits of a folder do the folder's tests not find?

    python -m tools.drawn_mutants reports/verdict --number 60 --seed 402

cosmic-ray lists every edit that its operators can make in a file or folder; `--number` of them are
drawn and tried one by one, in a copy of the tree. The tests are those of the same folder below
`tests/`, or `--tests`. Edits that survive are printed as diffs. The session, a SQLite file that
cosmic-ray's own commands read (`cr-report`, `cr-html`), stays in `build/`.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from tools.mutants import ENVIRONMENT, ROOT, copied

EXCLUDED = (
    # Annotations are not evaluated (`from __future__ import annotations`): `int | None` as
    # `int + None` changes nothing.
    "core/ReplaceBinaryOperator_BitOr_",
    # A dataclass, fixture or command without its decorator already fails at import.
    "core/RemoveDecorator",
)
"""Operators of cosmic-ray, by the beginning of their names, that are left out."""
LIMIT = 900.0
"""Seconds that the tests may take for one mutant; a mutant that exceeds them counts as found."""


Edit: TypeAlias = tuple[str, str, int]
"""File, operator, and index of the edited place among those that the operator can edit in the
file."""


def drawn(edits: Iterable[Edit], number: int, seed: int) -> set[Edit]:
    """Return `number` edits, drawn without replacement: the same ones for the same seed.

    Args:
        edits: all possible edits.
        number: number of edits to draw; all are returned if there are fewer.
        seed: seed of the draw.
    """
    left = sorted(edit for edit in edits if not edit[1].startswith(EXCLUDED))
    return set(random.Random(seed).sample(left, min(number, len(left))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if every drawn mutant was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("place", help="a file or folder of a package, relative to the repository")
    parser.add_argument("--tests", nargs="+", help="files or folders of tests")
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, required=True)
    asked = parser.parse_args(arguments)
    place = Path(asked.place.rstrip("/"))
    if not (ROOT / place).exists():
        parser.error(f"{place} is not in the repository")
    tests = asked.tests or [str("tests" / (place if (ROOT / place).is_dir() else place.parent))]
    try:
        from cosmic_ray.commands import execute, init
        from cosmic_ray.config import ConfigDict
        from cosmic_ray.modules import find_modules
        from cosmic_ray.testing import run_tests
        from cosmic_ray.work_db import use_db
        from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult
    except ImportError:
        parser.error("cosmic-ray is not installed: pip install -c constraints.txt cosmic-ray")
    command = [sys.executable, *("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests)]
    session = (
        ROOT / "build" / f"mutants-{'-'.join(place.with_suffix('').parts)}-{asked.seed}.sqlite"
    )
    session.parent.mkdir(exist_ok=True)
    session.unlink(missing_ok=True)
    config = ConfigDict({"test-command": shlex.join(command), "timeout": LIMIT})
    config["distributor"] = {"name": "local"}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, use_db(str(session)) as work:
        # cosmic-ray edits the files in place, and runs the tests in the folder it is called in.
        os.chdir(copied(Path(folder)))
        os.environ.update(ENVIRONMENT, PYTHONPATH=folder)
        init(find_modules([place]), work, {})
        # cosmic-ray numbers its jobs at random, so that the draw is of what they edit.
        edits = {
            item.job_id: (str(m.module_path), m.operator_name, m.occurrence)
            for item in work.work_items
            for m in item.mutations
        }
        drawn_edits = drawn(edits.values(), asked.number, asked.seed)
        chosen = {job for job, edit in edits.items() if edit in drawn_edits}
        # Every mutant would count as found by a test that fails anyway.
        outcome, output = run_tests(config.test_command, LIMIT)
        if outcome != "survived":
            parser.error(f"without a mutant, the tests do not pass:\n{output[-2000:]}")
        skipped = WorkResult(worker_outcome=WorkerOutcome.SKIPPED)
        work.set_multiple_results([job for job in edits if job not in chosen], skipped)
        execute(work, config)
        results = [r for job, r in work.results if job in chosen]
        os.chdir(ROOT)
    # An edit that could not be made or tried counts as survived: no test found it.
    survived = [r for r in results if r.test_outcome is not TestOutcome.KILLED]
    for result in survived:
        print(result.diff or result.output, end="\n\n")
    print(
        f"{place}: {len(results) - len(survived)} of {len(results)} mutants found, {session.name}"
    )
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
