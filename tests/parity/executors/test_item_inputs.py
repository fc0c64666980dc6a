"""What an answer depends on: other content, code, versions or settings are other work."""

from __future__ import annotations

import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from parity.executors import identity, inputs
from parity.executors import item as item_module
from parity.executors.identity import Identity
from parity.executors.inputs import MISSING, changed, content, contents
from parity.executors.item import Answer, Item, ItemError, Needs, Place, State, perform
from parity.executors.machine import FIELDS, UNKNOWN
from parity.executors.sweep import ANSWERS, Answers

WORK = "tests.parity.executors.work:"
Change = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with files in it and below it."""
    made = tmp_path / "checkpoint"
    (made / "below").mkdir(parents=True)
    for name in ("weights", "config.json", "below/shard"):
        (made / name).write_text(f"content of {name}", encoding="utf-8")
    return made


def in_place(folder: Path) -> None:
    """Alter a byte, and set the times of the file back to what they were."""
    path = folder / "below" / "shard"
    before = path.stat()
    path.write_text("Content of below/shard", encoding="utf-8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize(
    "change",
    [
        in_place,
        lambda folder: (folder / "more").write_text("", encoding="utf-8"),
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / "weights").rename(folder / "others"),
    ],
    ids=["a byte, its times set back", "a file more", "a file less", "a name"],
)
def test_another_content_at_the_same_path_is_another_input(
    folder: Path, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Also where what was read before is remembered.
    monkeypatch.setattr(inputs, "_SETTLED", -math.inf)
    before = contents([str(folder)])
    assert not changed(before)
    change(folder)
    assert changed(before) == [str(folder)]


def test_another_source_of_an_item_s_function_is_another_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function may be the user's own, in a module outside of the packages."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "their_measurement.py"
    digests = []
    for text in ("value = 1", "value = 2", "value = 1"):
        module.write_text(text, encoding="utf-8")
        item_module._source.cache_clear()
        digests.append(Item("x", "their_measurement:measure").digest())
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    "module", ["no_such_module", "folder_without_init", "no.such", ".relative", "a_script"]
)
def test_a_function_needs_a_module_with_a_source(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder_without_init").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    # As `__main__` is where a script runs.
    monkeypatch.setitem(sys.modules, "a_script", types.ModuleType("a_script"))
    with pytest.raises(ItemError, match=f"expected a module '{module}' that can be imported"):
        Item("x", f"{module}:measure").digest()


@pytest.mark.parametrize("module", ["sys", "builtins"])
def test_a_function_of_the_interpreter_has_no_file_and_may_be_an_item_s(module: str) -> None:
    item_module._source.cache_clear()
    digest = Item("x", f"{module}:any").digest()
    assert digest != Item("x", "json:any").digest()
    assert digest == Item("x", f"{module}:any").digest()


def test_content_is_of_files_and_not_of_their_place(folder: Path, tmp_path: Path) -> None:
    before = content(str(folder))
    assert content(str(folder.rename(tmp_path / "elsewhere"))) == before
    assert content(str(folder)) == MISSING
    # What is hidden, compiled or no file is no content: reading a device might never end.
    moved = tmp_path / "elsewhere"
    (moved / ".hidden").touch()
    (moved / "__pycache__").mkdir()
    (moved / "__pycache__" / "x.py").touch()
    (moved / "x.pyc").touch()
    (moved / "device").symlink_to(os.devnull)
    assert content(str(moved)) == before


def test_a_file_is_read_again_only_after_a_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "weights"
    monkeypatch.setattr(inputs, "_SETTLED", -1.0)
    known = inputs.digest_of_file(path)

    def forbidden(*_: object) -> None:
        raise AssertionError("read again")

    with monkeypatch.context() as patch:
        patch.setattr(inputs.hashlib, "file_digest", forbidden)
        assert inputs.digest_of_file(path) == known
    path.write_text("other", encoding="utf-8")
    assert inputs.digest_of_file(path) != known
    # A change within one step of the system's clock leaves the stamp as it was.
    monkeypatch.setattr(inputs, "_SETTLED", math.inf)
    monkeypatch.setattr(inputs, "_stamp", lambda _: (0, 0, 0, 0))
    known = inputs.digest_of_file(path)
    path.write_text("third", encoding="utf-8")
    assert inputs.digest_of_file(path) != known


def test_a_file_that_was_just_replaced_is_read_again_whatever_its_date(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cp -p` and `rsync` keep the date of the content, so only the time of the change counts."""
    path = folder / "weights"
    path.write_text("other", encoding="utf-8")
    os.utime(path, (0, 0))
    monkeypatch.setattr(inputs, "_SETTLED", 3600.0)
    inputs.digest_of_file(path)
    assert str(path) not in inputs._digests


def test_a_package_is_an_input_wherever_it_is_installed() -> None:
    found = contents(["module:tests.parity", "module:parity.pins", "module:no_such_package"])
    assert found["module:no_such_package"] == MISSING
    assert found["module:tests.parity"] not in (MISSING, found["module:parity.pins"])


BASE = Item("read", f"{WORK}read", {"path": "x"}, inputs={"x": "1"})


@pytest.mark.parametrize(
    "other",
    [
        {"name": "another"},
        {"function": f"{WORK}double"},
        {"arguments": {"path": "y"}},
        {"inputs": {"x": "2"}},
        {"inputs": {}},
        {"needs": Needs(environment={"XLA_FLAGS": "--x"})},
        {"needs": Needs(threads=1)},
        {"needs": Needs(gpus=1)},
        {"needs": Needs(device="H100")},
    ],
    ids=str,
)
def test_another_work_has_another_digest(other: dict[str, object]) -> None:
    assert replace(BASE).digest() == BASE.digest()
    assert replace(BASE, **other).digest() != BASE.digest()  # pyright: ignore[reportArgumentType]


def test_an_order_or_a_number_that_changes_no_result_is_the_same_work() -> None:
    words = {"path": "x", "text": "y"}
    one, other = (replace(BASE, arguments=dict(w)) for w in (words.items(), [*words.items()][::-1]))
    assert one.digest() == other.digest()
    several = [replace(BASE, needs=Needs(gpus=n, cpus=c, memory=c)) for n, c in ((1, 1), (0.5, 4))]
    assert len({item.digest() for item in several}) == 1


def test_another_value_of_a_variable_is_another_work() -> None:
    one, other = (replace(BASE, needs=Needs(environment={"XLA_FLAGS": v})) for v in ("--x", "--y"))
    assert one.digest() != other.digest()
    # Variables have no order.
    pair = {"XLA_FLAGS": "--x", "HERE": "1"}
    both = [dict(pair.items()), dict(reversed(pair.items()))]
    digests = {replace(BASE, needs=Needs(environment=each)).digest() for each in both}
    assert len(digests) == 1


def test_the_digest_of_an_item_is_of_the_settings_when_it_was_asked_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a worker starts, the driver has the variables of the worker."""
    item = replace(BASE)
    before = item.digest()
    monkeypatch.setenv("XLA_FLAGS", "--of-a-worker")
    assert item.digest() == before != replace(BASE).digest()


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("code", lambda: "another"),
        ("versions", lambda: {"jax": "0.0.1"}),
        ("settings", lambda: {"XLA_FLAGS": "--xla_cpu_max_isa=AVX"}),
    ],
)
def test_another_program_has_another_digest_and_is_refused(
    monkeypatch: pytest.MonkeyPatch, where: str, value: Callable[[], object]
) -> None:
    item = Item("double", f"{WORK}double", {"number": 1})
    before = item.digest()
    assert perform(item, Identity.here()).state is State.DONE
    monkeypatch.setattr(identity, where, value)
    assert replace(item).digest() != before
    answer = perform(item, Identity.here())
    assert answer.state is State.FAILED
    assert "differs from the driver's" in answer.reason and "on every machine" in answer.reason


SAME = Identity("code", {"jax": "1", "numpy": "2"}, {"XLA_FLAGS": "--a", "OMP_NUM_THREADS": "2"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        ({"code": "other"}, ["code"]),
        ({"versions": {"jax": "1"}}, ["numpy"]),
        ({"versions": {**SAME.versions, "torch": "3"}}, ["torch"]),
        ({"versions": {"jax": "2", "numpy": "2"}}, ["jax"]),
        ({"settings": {}}, ["OMP_NUM_THREADS", "XLA_FLAGS"]),
        ({"settings": {**SAME.settings, "MKL_CBWR": "AVX"}}, ["MKL_CBWR"]),
        ({"settings": {**SAME.settings, "XLA_FLAGS": "--b"}}, ["XLA_FLAGS"]),
        ({"code": "other", "versions": {}, "settings": {}}, [
            "code", "jax", "numpy", "OMP_NUM_THREADS", "XLA_FLAGS",
        ]),
    ],
    ids=str,
)  # fmt: skip
def test_whatever_one_process_has_and_another_has_not_is_a_difference(change, named) -> None:
    other = replace(SAME, **change)
    for one, two in ((SAME, other), (other, SAME)):
        assert [line.split(" ")[0] for line in one.differences(two)] == named


def test_settings_are_the_variables_that_change_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "XLA_FLAGS": "--x", "JAX_ENABLE_X64": "1", "OMP_NUM_THREADS": "2", "MKL_CBWR": "",
        "JAX_COMPILATION_CACHE_DIR": "/cache", "HOME": "/home", "NVIDIA_TF32_OVERRIDE": "0",
    }  # fmt: skip
    kept = {"XLA_FLAGS", "JAX_ENABLE_X64", "OMP_NUM_THREADS", "NVIDIA_TF32_OVERRIDE"}
    assert list(identity.settings(environment)) == sorted(kept)
    # Of a process without a variable, and not of this one.
    monkeypatch.setenv("XLA_FLAGS", environment["XLA_FLAGS"])
    assert identity.settings({}) == {} and identity.settings()["XLA_FLAGS"] == "--x"
    monkeypatch.undo()
    # An item of a simulated host has settings of its own, and a variable may be taken away.
    item = Item("x", f"{WORK}double", {"number": 1}, Needs(environment={"XLA_OF_A_TEST": ""}))
    known = replace(Identity.here(), settings={**item_module._own_identity().settings})
    wanted = replace(known, settings={**known.settings, "XLA_OF_A_TEST": "--driver"})
    assert perform(item, wanted).state is State.DONE
    assert perform(replace(item, needs=Needs()), wanted).state is State.FAILED
    # A variable that changes no number is no difference.
    plain = replace(item, needs=Needs(environment={"OF_A_TEST": "1"}))
    assert perform(plain, known).state is State.DONE


def test_a_worker_refuses_an_input_of_another_content(folder: Path) -> None:
    path = str(folder / "weights")
    item = Item("read", f"{WORK}read", {"path": path}, inputs=contents([path]))
    assert perform(item, Identity.here()).value == "content of weights"
    (folder / "weights").write_text("others", encoding="utf-8")
    answer = perform(item, Identity.here())
    assert answer.state is State.FAILED and answer.value is None
    assert "copy the driver's files there" in answer.reason and path in answer.reason


def test_a_worker_looks_at_every_input(folder: Path) -> None:
    paths = [str(folder / name) for name in ("weights", "config.json")]
    item = Item("read", f"{WORK}read", {"path": paths[0]}, inputs=contents(paths))
    (folder / "config.json").write_text("others", encoding="utf-8")
    answer = perform(item, Identity.here())
    assert answer.state is State.FAILED and paths[1] in answer.reason


def test_an_input_that_changes_while_an_item_runs_makes_no_answer(folder: Path) -> None:
    path = str(folder / "weights")
    words = {"path": path, "text": "others"}
    item = Item("alter", f"{WORK}alter", words, inputs=contents([path]))
    answer = perform(item, Identity.here())
    assert answer.state is State.FAILED and path in answer.reason


def test_what_is_no_value_of_json_is_no_answer_and_the_line_is_that_of_the_error() -> None:
    for name, arguments, kind, file in (
        ("Path", {}, "TypeError", "encoder.py"),
        ("refuse", {"text": "not today"}, "ValueError: not today", "work.py"),
    ):
        function = "pathlib:Path" if name == "Path" else f"{WORK}{name}"
        answer = perform(Item("x", function, arguments), Identity.here())
        assert answer.state is State.FAILED and answer.value is None
        assert answer.reason.startswith(kind) and f"({file}:" in answer.reason


def test_a_value_of_an_input_that_changed_meanwhile_is_not_told(folder: Path) -> None:
    path = str(folder / "weights")
    item = Item("alter", f"{WORK}alter", {"path": path, "text": "x"}, inputs=contents([path]))
    assert perform(replace(item, inputs={}), Identity.here()).value is not None
    answer = perform(replace(item, inputs=contents([path]), arguments={"path": path, "text": "y"}),
                     Identity.here())  # fmt: skip
    assert (answer.state, answer.value) == (State.FAILED, None)


def test_a_fingerprint_is_of_accelerators_and_of_values_of_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(item_module, "_processor", lambda: dict.fromkeys((*FIELDS, "name"), "x"))
    monkeypatch.setattr(item_module, "accelerators", lambda: ())
    flag = "NPY_DISABLE_CPU_FEATURES"
    monkeypatch.delenv(flag, raising=False)
    plain = Place.here().fingerprint
    # An empty variable is none.
    monkeypatch.setenv(flag, "")
    assert Place.here().fingerprint == plain
    found = {plain}
    for value in ("AVX2", "FMA3"):
        monkeypatch.setenv(flag, value)
        found.add(Place.here().fingerprint)
    for names in (("NVIDIA H100",), ("NVIDIA H100", "NVIDIA H100"), ("NVIDIA T4",)):
        monkeypatch.setattr(item_module, "accelerators", lambda names=names: names)
        found.add(Place.here().fingerprint)
    assert len(found) == 6


def test_the_place_of_an_answer_has_the_processors_that_the_item_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = [8]
    monkeypatch.setattr(item_module, "_processor", lambda: dict.fromkeys((*FIELDS, "name"), "x"))
    monkeypatch.setattr(item_module, "_PROCESSORS", {17, 9, 1})
    monkeypatch.setattr(item_module, "threads", lambda: used[-1])
    chosen: list[int] = []

    def taken(_: int, cpus: list[int]) -> None:
        chosen.extend(cpus)
        used.append(len(cpus))

    monkeypatch.setattr(item_module.os, "sched_setaffinity", taken, raising=False)
    before = Place.here().fingerprint
    item = Item("x", f"{WORK}double", {"number": 1}, Needs(threads=2))
    found = perform(item, Identity.here()).place.fingerprint
    assert chosen == [1, 9] and used == [8, 2] and found == Place.here().fingerprint != before


@pytest.mark.parametrize("field", [*FIELDS, "name"])
def test_a_machine_of_which_a_field_is_unknown_has_no_fingerprint(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    known = dict.fromkeys((*FIELDS, "name"), "known")
    monkeypatch.setattr(item_module, "_processor", lambda: known)
    assert Place.here().fingerprint not in ("", UNKNOWN) and Place.here().processor == "known"
    monkeypatch.setattr(item_module, "_processor", lambda: {**known, field: UNKNOWN})
    # A name says what processor it is to people only.
    assert (Place.here().fingerprint == UNKNOWN) == (field != "name")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Packages and a catalogue of planted bugs, of a module and a data file each."""
    for name in (*identity.PACKAGES, identity.FAULTS):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "module.py").write_text("x = 1", encoding="utf-8")
        (tmp_path / name / "data" / "floors").write_text("1e-6", encoding="utf-8")
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    for cached in (identity.code, identity._first_files):
        cached.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    for cached in (identity.code, identity._first_files):
        cached.cache_clear()


@pytest.mark.parametrize("package", (*identity.PACKAGES, identity.FAULTS))
@pytest.mark.parametrize("name", ["module.py", "data/floors", "data/more"])
def test_code_is_the_packages_with_their_data(packages: Path, package: str, name: str) -> None:
    before, watch = identity.code(), identity.Watch(every=1e9)
    assert not watch.changed()
    (packages / package / name).write_text("x = 2", encoding="utf-8")
    # What this process runs is what it began with.
    assert identity.code() == before != identity.code_on_disk()
    assert identity.changed_files() == [f"{package}/{name}"]
    assert not watch.changed() and watch.changed(now=True) == [f"{package}/{name}"]


def test_a_document_is_no_code(packages: Path) -> None:
    before = identity.code()
    (packages / "README.md").write_text("more words", encoding="utf-8")
    (packages / "reports" / "README.md").write_text("more words", encoding="utf-8")
    (packages / "reports" / "__pycache__").mkdir()
    (packages / "reports" / "__pycache__" / "module.pyc").touch()
    assert identity.code_on_disk() == before and not identity.changed_files()


def test_an_item_that_ran_while_the_packages_changed_gives_no_answer(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_module, "_PACKAGES", identity.Watch(every=0.0))
    monkeypatch.setattr(item_module, "_own_identity", Identity.here)
    path = packages / "parity" / "module.py"
    item = Item("alter", f"{WORK}alter", {"path": str(path), "text": "x = 2"})
    answer = perform(item, Identity.here())
    assert answer.state is State.FAILED
    assert "parity/module.py changed" in answer.reason and "start again" in answer.reason


@pytest.mark.parametrize("damage", ["value", "file", "file more", "file less", "other key"])
def test_an_answer_that_was_altered_on_disk_is_measured_again(tmp_path: Path, damage: str) -> None:
    items = [Item(f"leaves {i}", f"{WORK}leave", {"text": f"{i}"}, folder=True) for i in range(2)]
    with Answers.opened(tmp_path) as stored:
        for turn, item in enumerate(items):
            text = f"{turn}".encode()
            stored.write(item, Answer(item.name, State.DONE, turn, files={"below/text": text}))
        left = stored.files(items[0])
    path = tmp_path / ANSWERS
    if damage == "value":
        text = path.read_text("utf-8").replace('"value": 0', '"value": 5')
        path.write_text(text, "utf-8")
    elif damage == "file":
        (left / "below" / "text").write_text("5", "utf-8")
    elif damage == "file more":
        (left / "more").touch()
    elif damage == "file less":
        (left / "below" / "text").unlink()
    else:
        first, second = path.read_text("utf-8").splitlines()
        key = second.partition('"answer"')[0]
        path.write_text(key + '"answer"' + first.partition('"answer"')[2] + "\n", "utf-8")
    with Answers.opened(tmp_path) as stored:
        answers = [stored.read(item) for item in items]
        assert [answer is not None for answer in answers] == [False, damage != "other key"]
        if damage != "other key":
            assert stored.damaged == ["leaves 0"]
            stored.write(items[0], Answer("leaves 0", State.DONE, 7, files={"a": b"7"}))
    with Answers.opened(tmp_path) as stored:
        again = stored.read(items[0])
        assert (again and again.value) == (None if damage == "other key" else 7)
