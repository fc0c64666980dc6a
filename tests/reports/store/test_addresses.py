"""Addresses of shared storage: a typing error is refused, and never an empty folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from reports.store.addresses import ADDRESS, address_of, check_address, copy_of
from reports.store.runs import check_root
from reports.store.schema import TONIGHT, StoreError
from reports.store.shared import open_copy
from tests.helpers import cli

WRONG = (
    *("s3:b/x", "s3:/b/x", "s3://", "s3:///", "s3:///runs", "s3://b//runs", "s3://b/../runs"),
    *("file:", "file://", "file:///", "file:/tmp/runs", "file://runs", "file:////runs", "gs:b/x"),
    *("://b/x", "S3://b/x", "S3:b/x", "a b://x", "s3://b/x ", "s3://b/x\n", "s3://b/\u202ex"),
    *("http:/b/x", "runs/s3://b/x", "s3 ://b/x", "local://runs", "local:runs", "memory:runs"),
    *("s3a:b", "gcs:b/x", "abfs:b/x", "abfss:b/x", "az:b/x", "adl:b/x"),
)
RIGHT = (
    *("runs", "./s3:b", "/tmp/a:b", "night:2026", "C:/runs", "a/b:c/d", "s3"),
    *("s3://b", "s3://b/x", "s3://b/x/", "s3://b/*/runs/*", "file:///tmp/runs", "gs://b/x y"),
    "local:///tmp/runs",
)


@pytest.mark.parametrize("text", WRONG)
def test_an_address_with_a_typing_error_is_refused(text: str) -> None:
    with pytest.raises(StoreError, match=r"expected a folder, or an address such as"):
        check_address(text)
    with pytest.raises(StoreError):
        open_copy(text)


def test_the_error_says_what_is_missing() -> None:
    with pytest.raises(StoreError, match="nothing comes after 's3://'"):
        check_address("s3://")


@pytest.mark.parametrize("text", RIGHT)
def test_folders_and_complete_addresses_are_taken(text: str) -> None:
    check_address(text)


@pytest.mark.parametrize("text", ["s3:b/x", "s3://", "file://", "s3:b/*"])
@pytest.mark.parametrize("command", ["list", "history", "prune"])
def test_commands_refuse_a_typing_error(command: str, text: str) -> None:
    answer = cli(command, "--out", text)
    assert answer.exit_code == 2 and text in answer.output and "no runs" not in answer.output


@pytest.mark.parametrize("spoilt", ["not UTF-8", "a pipe", "a folder", "words", "endless", "typo"])
def test_a_damaged_address_file_makes_no_copy(spoilt: str, tmp_path: Path) -> None:
    file = tmp_path / ADDRESS
    if spoilt == "a pipe":
        os.mkfifo(file)
    elif spoilt == "a folder":
        file.mkdir()
    else:
        endless = b"file:///" + b"x" * 10000
        contents = {"not UTF-8": b"\xff\xfe", "words": b"hello", "endless": endless}
        file.write_bytes(contents.get(spoilt, b"file://"))
    assert address_of(tmp_path) == str(tmp_path)
    assert cli("list", "--out", tmp_path).exit_code == 0


def test_each_address_has_a_copy_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the cache of the user, named so that a person knows it: the end of its address."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    long = f"s3://bucket/{'x' * 100}/runs"
    names = {}
    for address in (
        "s3://bucket/runs",
        "s3://bucket/runs2",
        "s3://bucket/a b",
        "memory://.é",
        long,
        f"s3://bucket/{'x' * 59}",
        f"s3://bucket/runs.{'x' * 59}",
    ):
        copy = copy_of(address)
        assert copy == copy_of(f"{address}/") and not copy.exists()
        assert copy.parent == tmp_path / "megalodon-numerics" / "runs"
        words, digest = copy.name.rsplit("-", 1)
        assert len(digest) == 12 and set(digest) <= set("0123456789abcdef")
        names[copy.name] = words
    assert list(names.values()) == [
        "s3-bucket-runs",
        "s3-bucket-runs2",
        "s3-bucket-a-b",
        "memory-.-",
        f"{'x' * 55}-runs",
        # No copy is hidden, or looks like an option.
        *["x" * 59] * 2,
    ]
    # Two addresses whose names are alike have two copies.
    assert copy_of("s3://bucket/a b") != copy_of("s3://bucket/a-b")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    place = tmp_path / "home" / ".cache" / "megalodon-numerics" / "runs"
    for name in ("", None):
        if name is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", name)
        assert copy_of("s3://bucket/runs").parent == place


def test_a_copy_whose_address_file_is_damaged_is_a_copy_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = f"file://{tmp_path}/runs"
    copy = open_copy(address)
    (copy / ADDRESS).write_bytes(b"\xff")
    assert open_copy(address) == copy and address_of(copy) == address


@pytest.mark.parametrize("command", [["list"], ["gate", "latest"], ["prune"], ["history"]])
def test_a_folder_of_other_folders_is_no_folder_of_damaged_runs(
    tmp_path: Path, command: list[str]
) -> None:
    """A repository as --out: its sources were "damaged: restore or delete", and got an index."""
    for name in ("docs", "src"):
        (tmp_path / name).mkdir()
    told = cli(*command, "--out", str(tmp_path))
    assert told.exit_code == 2
    assert "has 2 folders and no run among them (docs, src)" in " ".join(told.output.split())
    assert sorted(each.name for each in tmp_path.iterdir()) == ["docs", "src"]
    # The first three are named.
    for names, said in ((["x"], "(docs, src, x)"), (["y"], "(docs, src, x, ...)")):
        for name in names:
            (tmp_path / name).mkdir()
        assert said in " ".join(cli(*command, "--out", str(tmp_path)).output.split())
    # Negative controls: one run, whatever its name, and what may be a run that lost its manifest.
    for name in ("mine/run.json", "2026-10-01T21-30-00Z-0000000/page"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
        told = cli(*command, "--out", str(tmp_path))
        assert "expected a folder of runs" not in told.output
        shutil.rmtree((tmp_path / name).parent)


def test_where_no_run_is_yet_the_reason_is_given(tmp_path: Path) -> None:
    gone, running = tmp_path / "gone", tmp_path / "running"
    running.mkdir()
    assert "there is no folder" in cli("list", "--out", str(gone)).output
    assert "no runs in" in cli("list", "--out", str(running)).output
    (running / TONIGHT).write_text("", encoding="utf-8")
    for command in (["list"], ["gate", "latest"]):
        told = cli(*command, "--out", str(running)).output
        assert "no finished run in" in told and str(running / TONIGHT) in told


@pytest.mark.parametrize(("length", "copy"), [(4096, True), (4097, False)])
def test_an_address_of_a_copy_has_at_most_4096_bytes(
    tmp_path: Path, length: int, copy: bool
) -> None:
    address = "s3://bucket/".ljust(length, "x")
    (tmp_path / ADDRESS).write_text(address, encoding="utf-8")
    assert address_of(tmp_path) == (address if copy else str(tmp_path))


def test_a_copy_that_cannot_be_kept_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    address = f"file://{tmp_path}/runs"
    with pytest.raises(StoreError) as refused:
        open_copy(address)
    assert str(refused.value) == (
        f"expected to keep a copy of {address} at {copy_of(address)}, but Not a directory; "
        "free space there, or set XDG_CACHE_HOME to a folder that can be written"
    )


def test_a_folder_of_other_folders_is_named_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "docs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError) as refused:
        check_root(Path("here"))
    assert str(refused.value) == (
        f"expected a folder of runs, but {tmp_path.resolve() / 'here'} has 1 folder and no run "
        "among them (docs). Give --out the folder that `nightly` wrote to, such as runs"
    )


@pytest.mark.parametrize("text", ["a-b:/x", "x:/y", "a b:/c"])
def test_a_folder_with_a_colon_that_no_protocol_has_is_taken(text: str) -> None:
    check_address(text)


@pytest.mark.parametrize("part", ["", ".", ".."])
def test_an_address_with_a_part_that_names_nothing_is_refused(part: str) -> None:
    with pytest.raises(StoreError, match="a part of the path is empty"):
        check_address(f"s3://bucket/{part}/runs")


def test_a_folder_of_a_run_whose_manifest_is_a_link_to_nothing_holds_runs(tmp_path: Path) -> None:
    """The run is damaged, and reading it says so."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").symlink_to(tmp_path / "nowhere")
    check_root(tmp_path)


def test_no_copy_is_begun_of_a_storage_that_nothing_here_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(StoreError, match="installed package that reads nothing://runs"):
        open_copy("nothing://runs")
    assert not list(tmp_path.iterdir())
