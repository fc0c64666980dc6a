"""Tensors in files: what is read when, and what is said of a file that is none."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megalodon_jax import tensor_files
from megalodon_jax.tensor_files import file_tensors, shard_tensors
from megalodon_jax.torch_files import read_torch_file
from megalodon_jax.weight_files import read_tensors

ARRAYS = {f"w{i}": np.full((2, 3), i, np.float32) for i in range(20)}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are opened, in order."""
    files, safe_open = [], tensor_files.safe_open

    def counted(file, **options):
        files.append(file)
        return safe_open(file, **options)

    monkeypatch.setattr(tensor_files, "safe_open", counted)
    return files


def test_what_is_read_as_a_whole_is_opened_once(tmp_path: Path, opened: list[Path]) -> None:
    """A file of thousands of tensors would else have its header read thousands of times."""
    save_file(ARRAYS, tmp_path / "a.safetensors")
    tensors = read_tensors(tmp_path / "a.safetensors")
    assert tensors.keys() == ARRAYS.keys() and len(opened) == 1
    assert all(np.array_equal(tensors[name], array) for name, array in ARRAYS.items())


def test_names_shapes_and_dtypes_cost_the_header_alone(tmp_path: Path, opened: list[Path]) -> None:
    save_file(ARRAYS, tmp_path / "a.safetensors")
    tensors = file_tensors(tmp_path / "a.safetensors")
    assert {(t.shape, t.dtype) for t in tensors.values()} == {((2, 3), "float32")}
    assert len(opened) == 1
    assert tensors["w3"].read().tolist() == ARRAYS["w3"].tolist()
    assert tensors["w3"].take(np.array([1])).tolist() == [[3.0] * 3]
    assert len(opened) == 3


def test_what_is_not_there_and_what_is_none_are_two_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "none.safetensors")
    (tmp_path / "half.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="may be truncated: copy or export it again"):
        read_tensors(tmp_path / "half.safetensors")


def test_an_index_whose_places_are_no_names_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": 5}}), encoding="utf-8")
    with pytest.raises(ValueError, match="is not a shard index"):
        shard_tensors(index, read_tensors)


@pytest.mark.parametrize(
    "shard", ["model.safetensors.index.json", "../model.safetensors", "other.index.json", ""]
)
def test_an_index_that_leads_elsewhere_or_to_itself_is_refused(tmp_path: Path, shard: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}), encoding="utf-8")
    with pytest.raises(ValueError, match="expected the name of a tensor file beside"):
        read_tensors(index)


def test_an_index_nested_without_end_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(ValueError, match="nested more than"):
        read_tensors(index)


@pytest.mark.parametrize("kind", ["packed", "overlapping"])
def test_an_archive_that_unpacks_to_more_than_it_has_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "model.pt"
    method = zipfile.ZIP_DEFLATED if kind == "packed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("model/data.pkl", bytes(100_000))
        if kind == "overlapping":
            # A second name of the same bytes, as a bomb without compression has them.
            archive.filelist.append(archive.filelist[0])
    expected = "compressed" if kind == "packed" else "would unpack to"
    with pytest.raises(ValueError, match=expected):
        read_torch_file(file)
