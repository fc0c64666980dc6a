"""Ids of the hub: from a cache made here, offline; a path that exists always wins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalodon_jax.convert import load_from_pretrained, save_safetensors
from megalodon_jax.pretrained import located
from tests.helpers import ROOT, TINY, model_of, same_leaves, tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"


def write(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True)
    save_safetensors(model_of(TINY, seed=seed), folder / "model.safetensors", max_shard_size="3KB")
    (folder / "config.json").write_text(json.dumps(TINY.to_hf()), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A cache with two revisions of org/name, as huggingface_hub lays it out."""
    root = tmp_path_factory.mktemp("hub")
    model = root / "models--org--name"
    for commit, seed, names in ((COMMIT, 0, ["main"]), (OTHER, 5, ["v2", "pr/1"])):
        write(model / "snapshots" / commit, seed)
        for name in names:
            reference = model / "refs" / name
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(commit, encoding="utf-8")
    return root


LOAD = """
import sys
from megalodon_jax.convert import load_from_pretrained, save_safetensors
asked = ("org/name", None, "main"), ("org/name", "v2", "v2"), ("org/none", None, "")
for name, revision, out in asked:
    try:
        save_safetensors(load_from_pretrained(name, revision=revision), out + ".safetensors")
    except FileNotFoundError as error:
        print(error)
"""


def test_an_id_is_loaded_from_the_cache_by_revision(hub: Path, tmp_path: Path) -> None:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub), "PYTHONPATH": str(ROOT)
    }  # fmt: skip
    command = [sys.executable, "-c", LOAD]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for name, seed in (("main", 0), ("v2", 5)):
        loaded = load_from_pretrained(tmp_path / f"{name}.safetensors", TINY)
        assert same_leaves(loaded, model_of(TINY, seed=seed))
    assert f"no checkpoint at org/none: {tmp_path / 'org' / 'none'} is not there" in done.stdout
    assert "the hub's model org/none at revision main cannot be downloaded: " in done.stdout


def test_a_path_that_exists_wins_over_an_id(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path / "org" / "name", 3)
    monkeypatch.chdir(tmp_path)
    assert located("org/name") == Path("org/name")
    assert same_leaves(load_from_pretrained("org/name"), model_of(TINY, seed=3))
    with pytest.raises(ValueError, match="revision='v2' is for an id of the hub"):
        load_from_pretrained("org/name", revision="v2")


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "../org/name", "org/model.safetensors"])
def test_what_is_neither_path_nor_id_is_not_asked_for(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not there, and it is no id of the hub"):
        load_from_pretrained(name)


def test_without_the_client_its_package_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match=r"is not there; .* pip install huggingface_hub"):
        load_from_pretrained("org/name")


def test_a_configuration_that_is_given_wins(hub: Path) -> None:
    folder = hub / "models--org--name" / "snapshots" / COMMIT
    assert load_from_pretrained(folder, tiny(chunk_size=8)).config.chunk_size == 8
