"""Files of other formats under the name of a checkpoint: read by content, or named with advice."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from megalodon_jax.tensor_files import file_tensors
from megalodon_jax.torch_files import read_torch_file
from megalodon_jax.weight_files import open_tensors, read_tensors
from stability.core.checkpoint_files import open_checkpoint

LFS = b"version https://git-lfs.github.com/spec" + b"/v1\noid sha256:12ab\nsize 548118077\n"
AGAIN = "download the file again"
FOREIGN = {
    "GGUF": (b"GGUF\3\0\0\0" + bytes(64), "a GGUF file", "take the checkpoint that it was"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(64), "an HDF5 file", "save its weights as safetensors"),
    "page": (b"\n<!DOCTYPE html>\n<html><title>Sign in</title></html>", "a web page", AGAIN),
    "XML": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "an XML", AGAIN),
    "JSON": (b'{"error": "Repository not found"}', "a JSON document", AGAIN),
    "index": (b'{"metadata": {}, "weight_map": {"w": "a"}}', "the index of shards", ".index.json"),
    "answer": (b"Entry not found", "a text that begins 'Entry not found'", AGAIN),
    "pointer": (LFS, "a Git LFS pointer, which stands for a file of 548,118,077 bytes", "lfs pull"),
    "gzip": (gzip.compress(bytes(64)), "a gzip archive", "unpack it"),
    "tar": (b"model.bin".ljust(257, b"\0") + b"ustar" + bytes(250), "a tar archive", "unpack it"),
    "zeros": (bytes(512), "zeros where its header should be", "copy or download it again"),
    "nothing": (b"", "is empty", "the disk was full"),
}
"""Content, what it is called, and part of the advice."""


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_named_with_what_to_do(name: str, ending: str, tmp_path: Path) -> None:
    content, what, advice = FOREIGN[name]
    file = tmp_path / f"model.{ending}"
    file.write_bytes(content)
    for read in (open_checkpoint, open_tensors, read_tensors):
        with pytest.raises(ValueError) as raised:
            read(file)
        said = str(raised.value)
        assert str(file) in said
        assert what in said
        if name != "nothing" or ending == "safetensors":
            assert advice in said
        assert "truncated" not in said, "it is whole, and something else"
        assert "checkpoint before" not in said


@pytest.mark.parametrize("old", [False, True], ids=["zip", "pickle"])
def test_a_torch_file_named_safetensors_is_read_by_its_content(old: bool, tmp_path: Path) -> None:
    """torch.load itself goes by the name, and calls such a file damaged."""
    weights = {"w": torch.arange(12.0).reshape(3, 4), "step": torch.tensor(3)}
    file = tmp_path / "model.safetensors"
    torch.save(weights, file, _use_new_zipfile_serialization=not old)
    found = read_tensors(file)
    assert np.array_equal(found["w"], weights["w"].numpy())
    assert set(open_checkpoint(file).leaves) >= {"w"}
    with pytest.raises(ValueError, match=r"as torch\.save writes.*: read it as a torch file"):
        file_tensors(file)


def test_a_pickle_named_safetensors_runs_nothing(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    file = tmp_path / "model.safetensors"
    torch.save({"w": torch.ones(2, 2), "x": Runs()}, file)
    with pytest.raises(ValueError, match="not readable as tensors"):
        read_torch_file(file)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "cut", [lambda b: b[:-1], lambda b: b[:20], lambda b: b[:4], lambda b: b[:8]]
)
def test_a_truncated_safetensors_file_stays_truncated(
    cut: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    """The control: it begins as one, so it is no other format."""
    file = tmp_path / "model.safetensors"
    save_file({"w": np.ones((3, 4), np.float32)}, file)
    file.write_bytes(cut(file.read_bytes()))
    with pytest.raises(ValueError, match=r"not a readable safetensors file.*may be truncated"):
        open_tensors(file)
