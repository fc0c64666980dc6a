"""Only the megalodon-hf we know answers, unless another one was asked for."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import pytest

from parity.megalodon.reference import LiveReference, installed
from parity.recordings import ReferenceUnavailableError


@pytest.fixture
def present(monkeypatch):
    """Everything is installed, as far as anybody can tell; sets version and hash."""

    def install(transformers="4.57.6", sources=installed.SOURCE):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(metadata, "version", lambda name: transformers)
        monkeypatch.setattr(installed, "source_hash", lambda: sources)
        monkeypatch.delenv(installed.ANY, raising=False)

    return install


def test_the_version_we_know_can_answer(present):
    present()
    assert installed.why_unavailable() is None
    assert installed.identity() == installed.COMMIT


def test_another_version_is_named_and_refused(present):
    present(sources="0123456789abcdef")
    reason = installed.why_unavailable()
    assert reason is not None
    for word in ("0123456789abcdef", installed.SOURCE, installed.COMMIT, installed.ANY):
        assert word in reason
    with pytest.raises(ReferenceUnavailableError, match="another megalodon-hf"):
        LiveReference()


def test_another_version_answers_when_asked_to_and_says_what_it_is(present, monkeypatch):
    present(sources="0123456789abcdef")
    monkeypatch.setenv(installed.ANY, "1")
    assert installed.why_unavailable() is None
    assert installed.identity() == "sources 0123456789abcdef"


@pytest.mark.parametrize("version", ["4.44.2", "5.0.0"])
def test_transformers_it_cannot_run_with_are_named(present, version):
    present(transformers=version)
    reason = installed.why_unavailable()
    assert reason is not None
    assert version in reason
    assert ">=4.45,<5" in reason


def test_the_hash_is_of_sources_and_not_of_the_version_file(tmp_path, monkeypatch):
    package = tmp_path / "megalodon"
    package.mkdir()
    for name in ("__init__", "model"):
        (package / f"{name}.py").write_text(name, encoding="utf-8")

    class Spec:
        submodule_search_locations = (str(package),)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Spec)
    before = installed.source_hash()
    (package / "_version.py").write_text("generated", encoding="utf-8")
    assert installed.source_hash() == before
    (package / "model.py").write_text("changed", encoding="utf-8")
    assert installed.source_hash() != before
