"""Location of a checkpoint: a path, the weights in a folder, or an id of the Hugging Face hub.

Source: docs/guide.md "Interop".
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", flags=re.ASCII)
_HUB_FILES = ("*.json", "*.safetensors")
_HUB_PICKLES = ("*.bin",)
"""Patterns of files that are downloaded only if a model has no safetensors files, since both would
hold the same weights."""
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SUFFIXES = (".index.json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_BESIDE = re.compile(r"(optimizer|scheduler|scaler|rng_state|training_args)\b.*|rng_state_\d+.*")
"""Pattern for names of files that a training run stores beside the model's weights."""


def located(path: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return an existing path: the given one, or the downloaded files of a Hugging Face hub id.

    An existing path is never treated as an id. The files of an id are downloaded once, by
    huggingface_hub with its settings (`HF_HOME`, `HF_HUB_OFFLINE`, access tokens).

    Raises:
        FileNotFoundError: `path` is neither a path nor a hub id that can be downloaded; the message
            says what was tried.
        ValueError: a revision was given for an existing path.
    """
    here = Path(path)
    if here.exists():
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} is for an id of the hub, but {here} is an existing path; "
                "leave out revision, or rename the path."
            )
        return here
    name = os.fspath(path)
    tried = f"no checkpoint at {path}: {here.absolute()} is not there"
    if not _HUB_ID.fullmatch(name) or name.endswith(_SUFFIXES):
        raise FileNotFoundError(f"{tried}, and it is no id of the hub such as org/name.")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise FileNotFoundError(
            f"{tried}; to look for it on the hub, pip install huggingface_hub."
        ) from error
    at = f"the hub's model {name} at revision {revision or 'main'}"
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(_HUB_FILES)))
        if not any(folder.glob("*.safetensors")):
            patterns = [*_HUB_FILES, *_HUB_PICKLES]
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{tried}, and {at} cannot be downloaded: {type(error).__name__}: {reason}"
        ) from error
    return folder


def checkpoint_file(path: Path) -> Path:
    """Return the weights file at a path: the path itself, or the file inside a folder.

    In a folder, this is the file with the first of the usual names (`_NAMES`) that exists, or else
    the only file with the first of the suffixes (`_SUFFIXES`) that occurs.

    Raises:
        FileNotFoundError: there is no weights file; the message lists the expected names.
        ValueError: there are several candidates; the message lists them.
    """
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"no checkpoint at {path}: give an existing file or folder.")
        return path
    for name in _NAMES:
        if (path / name).is_file():
            return path / name
    files = sorted(f for f in path.iterdir() if f.is_file() and not _BESIDE.fullmatch(f.name))
    for suffix in _SUFFIXES:
        here = [f for f in files if f.name.endswith(suffix)]
        if len(here) > 1:
            names = ", ".join(f.name for f in here[:6])
            more = f" and {len(here) - 6} more" if len(here) > 6 else ""
            raise ValueError(f"{path} holds several checkpoints: name one of {names}{more}.")
        if here:
            return here[0]
    hint = ""
    if any(f.suffix == ".distcp" for f in files):
        hint = (
            " It holds a distributed checkpoint, which "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save converts to a torch file."
        )
    elif any((f / "_CHECKPOINT_METADATA").is_file() for f in (path, *path.iterdir())):
        hint = (
            " It holds steps of Orbax, which load_from_pretrained and `megalodon-numerics "
            "export-model` read."
        )
    raise FileNotFoundError(
        f"{path} holds no checkpoint; expected one of {', '.join(_NAMES)}, or one file that ends "
        f"in {', '.join(_SUFFIXES[1:])}.{hint}"
    )
