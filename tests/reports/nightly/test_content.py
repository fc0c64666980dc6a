"""A night is of one code and one content: nothing measured with another is carried over."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from parity.executors import item as item_module
from parity.executors.identity import Watch
from parity.executors.item import Answer, Item, State
from parity.executors.sweep import ANSWERS
from parity.megalodon.cases import BYTE_LM
from reports.nightly import fan_out as fan_out_module
from reports.nightly.fan_out import UNFINISHED, fan_out, items_of
from reports.nightly.run import Options, nightly
from reports.provenance.code import Start
from reports.store.runs import list_runs, read_run
from reports.store.schema import StoreError
from reports.verdict.decide import Word
from tests.reports.nightly.test_fan_out import Inline, options, quiet

__all__ = ["options"]
PARTS = 3


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A user's checkpoint."""
    return Path(shutil.copytree(BYTE_LM, tmp_path / "checkpoint"))


def spoil(checkpoint: Path) -> None:
    """Set a tensor to NaN."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    name = max(tensors)
    save_file(tensors | {name: np.full_like(tensors[name], np.nan)}, path, {"format": "np"})


def append(name: str) -> Any:
    def change(checkpoint: Path) -> None:
        with (checkpoint / name).open("ab") as file:
            file.write(b"\n")

    return change


@dataclass
class Killed(Inline):
    """Answers the first item; once that is stored, somebody ends the driver."""

    out: Path = Path()
    end: BaseException = field(default_factory=KeyboardInterrupt)

    def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
        first, *rest = items
        waiting: list[Future[Answer]] = [Future() for _ in rest]

        def end() -> None:
            while not any(path.stat().st_size for path in self.out.rglob(ANSWERS)):
                time.sleep(0.01)
            waiting[0].set_exception(self.end)

        threading.Thread(target=end, daemon=True).start()
        return [self._done(first), *waiting]


def test_what_was_measured_is_taken_where_nothing_changed(
    options: Options, checkpoint: Path
) -> None:
    """The negative control of the next test."""
    night, second, lines = replace(options, checkpoint=checkpoint), Inline(), []
    with pytest.raises(KeyboardInterrupt):
        fan_out(night, Killed(out=options.out), lines.append)
    [said] = [line for line in lines if line.startswith("interrupted")]
    assert f"1 of {PARTS} parts are measured and kept in {options.out}" in said
    assert "the same command with --executor inline resumes from them" in said
    outcome = fan_out(night, second, quiet)
    assert len(second.ran) == PARTS - 1
    assert outcome.decision is not None and outcome.decision.word is Word.PASS


@pytest.mark.parametrize(
    "change",
    [spoil, append("heldout.txt"), append("config.json"), append("training.json")],
    ids=["weights", "text", "configuration", "training"],
)
def test_no_part_of_another_content_is_taken(
    options: Options, checkpoint: Path, change: Any
) -> None:
    """Row 1 of issue 35: the path of the checkpoint was in the digest, its content was not."""
    night, second = replace(options, checkpoint=checkpoint), Inline()
    with pytest.raises(KeyboardInterrupt):
        fan_out(night, Killed(out=options.out), quiet)
    change(checkpoint)
    fan_out(night, second, quiet)
    assert len(second.ran) == PARTS


def test_every_option_of_a_night_is_in_the_digest_of_its_parts(
    options: Options, checkpoint: Path
) -> None:
    def digests(options: Options) -> set[str]:
        return {item.digest() for item in items_of(options)}

    before = digests(options)
    for other in (
        digests(replace(options, cases=options.cases[:1])),
        digests(replace(options, fault="rope_keys_one_late")),
        digests(replace(options, checkpoint=checkpoint)),
        digests(replace(options, device="cpu")),
        digests(replace(options, device="cuda")),
    ):
        assert not before & other


def test_a_live_reference_is_an_input_by_its_source(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not items_of(replace(options, checkpoint=None))[0].inputs
    monkeypatch.setattr("parity.megalodon.suite.choose_reference", lambda _: Live)
    assert items_of(replace(options, reference="live"))[0].inputs.keys() == {
        "module:megalodon",
        str(BYTE_LM),
    }


class Live:
    """A reference that answers itself."""

    kind = "live"


@pytest.mark.parametrize("moment", ["while a part runs", "after the last part"])
def test_a_checkpoint_that_changes_meanwhile_makes_no_run(
    options: Options, checkpoint: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    night = replace(options, checkpoint=checkpoint)
    if moment == "while a part runs":

        def contents(folder: Path) -> dict[str, bytes]:
            append("heldout.txt")(checkpoint)
            return {}

        monkeypatch.setattr(item_module, "_contents", contents)
    else:
        done = Start.check

        def late(self: Start, now: bool = True) -> None:
            if now and list(options.out.rglob(ANSWERS)):
                append("heldout.txt")(checkpoint)
            done(self, now)

        monkeypatch.setattr(Start, "check", late)
    with pytest.raises(StoreError, match=r"these changed: .*checkpoint.*--no-resume"):
        fan_out(night, Inline(), quiet)
    assert list_runs(options.out) == ([], [])


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("state", [State.FAILED, State.NOT_RUN])
def test_the_inputs_are_looked_at_as_soon_as_a_part_fails(
    options: Options,
    checkpoint: Path,
    state: State,
    attempts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without waiting for the other parts, which may take an hour."""

    def run(items: Sequence[Item], *_: object) -> Iterator[Answer]:
        append("heldout.txt")(checkpoint)
        yield Answer(items[0].name, state, attempts=attempts)
        raise AssertionError("waits for another part")

    monkeypatch.setattr(fan_out_module, "run", run)
    with pytest.raises(StoreError, match=r"these changed: .*checkpoint"):
        fan_out(replace(options, checkpoint=checkpoint), Inline(), quiet)


def test_a_commit_of_a_document_meanwhile_makes_no_difference(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 3 of issue 35: each part was of another commit, and none of them became a run."""
    commits = iter(f"{i:040x}" for i in range(99))
    monkeypatch.setattr("reports.provenance.code.git_state", lambda *_: (next(commits), False))
    outcome = fan_out(options, Inline(), quiet)
    assert outcome.decision is not None and outcome.decision.word is Word.PASS
    manifest = read_run(outcome.folder).manifest
    assert manifest.code == Start.now().code
    # That of the start: the driver took the first one, its first part the second.
    assert manifest.commit == f"{1:040x}" and manifest.id.split("-")[-1] == "0" * 7


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of the packages that somebody edits; every look is a new one."""
    files: list[str] = []
    monkeypatch.setattr("parity.executors.identity.changed_files", lambda: list(files))
    monkeypatch.setattr(item_module, "_PACKAGES", Watch(every=0.0))
    return files


def test_a_change_of_the_packages_stops_a_shared_night(options: Options, edited: list[str]) -> None:
    class Edited(Inline):
        """Its second item meets other code, and its last would never end."""

        def start(self, items: Sequence[Item]) -> list[Future[Answer]]:
            second: Future[Answer] = Future()

            def meet_other_code() -> None:
                # After the first answer is on disk, however long that takes: of two that are there,
                # either may be taken first.
                while not any(f.stat().st_size for f in options.out.rglob(ANSWERS)):
                    time.sleep(0.01)
                edited.append("parity/engine/measure/compare.py")
                second.set_result(self._done(items[1]).result())

            threading.Thread(target=meet_other_code, daemon=True).start()
            return [self._done(items[0]), second, *(Future() for _ in items[2:])]

    with pytest.raises(StoreError) as refused:
        fan_out(options, Edited(), quiet)
    for words in ("parity/engine/measure/compare.py", "Run the same command again", "--no-resume"):
        assert words in str(refused.value)
    assert list_runs(options.out) == ([], [])
    # With the code as it was, the night goes on.
    edited.clear()
    second = Inline()
    fan_out(options, second, quiet)
    assert len(second.ran) <= PARTS - 1


def test_a_change_of_the_packages_after_the_last_part_makes_no_run(
    options: Options, edited: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(self: Inline) -> None:
        edited.append("parity/engine/measure/compare.py")

    monkeypatch.setattr(Inline, "close", close)
    with pytest.raises(StoreError, match=r"parity/engine/measure/compare\.py"):
        fan_out(options, Inline(), quiet)
    assert list_runs(options.out) == ([], [])
    assert list((options.out / UNFINISHED).rglob(ANSWERS)), "what was measured is kept"


@pytest.mark.parametrize("turn", [0, 1, 2, PARTS])
def test_a_change_of_the_packages_stops_a_night_in_one_process(
    options: Options, edited: list[str], turn: int
) -> None:
    def step(done: int, planned: int, left: str) -> None:
        if done == turn:
            edited.append("stability/suite.py")

    with pytest.raises(StoreError, match=r"stability/suite\.py"):
        nightly(options, quiet, step)
    assert list_runs(options.out) == ([], [])


def test_a_night_does_not_begin_with_packages_that_changed_since_they_were_imported(
    options: Options, edited: list[str]
) -> None:
    edited.append("stability/suite.py")
    for begin in (lambda: nightly(options, quiet), lambda: fan_out(options, Inline(), quiet)):
        with pytest.raises(StoreError, match=r"stability/suite\.py"):
            begin()


def test_a_run_says_which_code_and_which_checkpoint_it_is_of(
    options: Options, checkpoint: Path
) -> None:
    def stored(options: Options) -> tuple[Any, Any]:
        manifest = read_run(nightly(options, quiet).folder).manifest
        return manifest.code, manifest.checkpoint and manifest.checkpoint.content

    code, content = stored(replace(options, checkpoint=checkpoint))
    assert (code, len(content)) == (Start.now().code, 64)
    append("training.json")(checkpoint)
    assert stored(replace(options, checkpoint=checkpoint)) != (code, content)


def test_a_damaged_checkpoint_is_refused_before_any_part_begins(
    options: Options, checkpoint: Path
) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"half")
    executor = Inline()
    with pytest.raises(ValueError, match="safetensors"):
        fan_out(replace(options, checkpoint=checkpoint), executor, quiet)
    assert executor.ran == [] and list_runs(options.out) == ([], [])
