"""Writes a folder that megalodon-hf loads: weights, configuration, tokenizer, generation settings.

The folder is written beside its target and moved there when it is complete and a check supplied by
the caller has passed. `parity.checkpoint_pair.deployment` supplies the check: a forward pass on
both sides. Source: docs/guide.md "Deployment".
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from megalodon_jax.checkpoint import differences, package_versions, refuse
from megalodon_jax.convert import exported_tensors
from megalodon_jax.files import folder_written_aside, read_json_object
from megalodon_jax.model import MegalodonForCausalLM
from megalodon_jax.shards import save_tensors
from megalodon_jax.weights import weight_table

RECORD = "export.json"
CONFIG, GENERATION, CODE = "config.json", "generation_config.json", "modeling_megalodon.py"
SHARD = "5GB"
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)
"""Vocabulary files; every tokenizer's folder holds at least one of them."""
_TOKENIZER = (
    *VOCABULARIES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_CODE = '''"""Names through which Transformers' Auto classes find the installed megalodon-hf."""

from megalodon import MegalodonConfig, MegalodonForCausalLM

__all__ = ["MegalodonConfig", "MegalodonForCausalLM"]
'''


def write_pretrained(
    model: MegalodonForCausalLM,
    folder: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    generation: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    dtype: DTypeLike | None = None,
    max_shard_size: int | str = SHARD,
    check: Callable[[Path], Mapping[str, Any]] = lambda folder: {},
) -> dict[str, Any]:
    """Write a folder that `MegalodonForCausalLM.from_pretrained` of megalodon-hf loads.

    A tied head is stored once, as the embedding; megalodon-hf ties the head again when it loads.

    Args:
        model: the model, layers stacked or not, with exactly its configuration's parameters.
        folder: target; an earlier export there is replaced.
        tokenizer: folder whose tokenizer files are copied.
        generation: generation settings: a mapping, a JSON file, or a folder with
            `generation_config.json`.
        dtype: see `convert.state_dict`.
        max_shard_size: see `convert.save_safetensors`.
        check: called with the complete folder before the move to `folder`. Its result is added to
            the record; if it raises, nothing is left behind.

    Returns:
        A record of the export (package versions, sizes, file names, and the result of `check`),
        also written to `export.json`.

    Raises:
        FileNotFoundError: `tokenizer` or `generation` names files that do not exist.
        ValueError: the model has other parameters than its configuration, the tokenizer or the
            settings have tokens outside the vocabulary, or `folder` holds something other than an
            export; also as for `convert.save_safetensors`.
    """
    target = Path(os.path.realpath(folder))
    _check_replaceable(target)
    tensors = exported_tensors(model, dtype=dtype)
    expected = {row.name: str(row.shape) for row in weight_table(model.config)}
    refuse(
        differences(expected, {name: str(tensor.shape) for name, tensor in tensors.items()}),
        "export: the model has other parameters than its configuration",
        "megalodon-hf cannot load other parameters: first merge adapters (lora.merge_lora), and "
        "remove what else was added.",
    )
    vocabulary = model.config.vocab_size
    copied = [] if tokenizer is None else _tokenizer_files(Path(tokenizer), vocabulary)
    settings = None if generation is None else _settings(generation, vocabulary)
    with folder_written_aside(target) as aside:
        written = save_tensors(tensors, aside / "model.safetensors", max_shard_size)
        _write_json(aside / CONFIG, _config(model))
        (aside / CODE).write_text(_CODE, encoding="utf-8")
        for file in copied:
            shutil.copyfile(file, aside / file.name)
        if settings is not None:
            _write_json(aside / GENERATION, settings)
        record = {
            "packages": package_versions(),
            "tensors": len(tensors),
            "bytes": sum(file.stat().st_size for file in written),
            "dtype": None if dtype is None else jnp.dtype(dtype).name,
            "weights": [file.name for file in written],
            "tokenizer": [file.name for file in copied],
            "generation": settings is not None,
            **check(aside),
        }
        _write_json(aside / RECORD, record)
    return record


def _config(model: MegalodonForCausalLM) -> dict[str, Any]:
    """Return the content of `config.json`, with the fields that Transformers' Auto classes need."""
    module = CODE.removesuffix(".py")
    names = {"AutoConfig": "MegalodonConfig", "AutoModelForCausalLM": "MegalodonForCausalLM"}
    return model.config.to_hf() | {
        "auto_map": {auto: f"{module}.{name}" for auto, name in names.items()},
        # Used by `torch_dtype="auto"`. A narrower dtype would round the sensitive parameters, which
        # megalodon-hf cannot exclude.
        "torch_dtype": "float32",
    }


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _check_replaceable(target: Path) -> None:
    names = sorted(path.name for path in target.iterdir()) if target.is_dir() else []
    if (target.exists() and not target.is_dir()) or (names and RECORD not in names):
        raise ValueError(
            f"export: {target} was not written by export_pretrained (it holds {names or 'a file'}),"
            " and would be deleted; choose another folder."
        )


def _tokenizer_files(folder: Path, vocabulary: int) -> list[Path]:
    files = [folder / name for name in _TOKENIZER if (folder / name).is_file()]
    if not any(file.name in VOCABULARIES for file in files):
        raise FileNotFoundError(
            f"export: no tokenizer at {folder}; expected a folder with one of "
            f"{', '.join(VOCABULARIES)}, as written by tokenizer.save_pretrained."
        )
    if folder / VOCABULARIES[0] in files:
        fields = read_json_object(folder / VOCABULARIES[0])
        largest = max(_ids(fields), default=0)
        if largest >= vocabulary:
            raise ValueError(
                f"export: {folder / VOCABULARIES[0]} has token {largest}, and the model has "
                f"vocab_size={vocabulary}; pass the tokenizer of this model."
            )
    return files


def _ids(tokenizer: Mapping[str, Any]) -> list[int]:
    """Return the token ids in the content of a tokenizer.json, to find the largest.

    If the vocabulary is a list, only its largest id is returned, with the ids of added tokens.
    """
    model = tokenizer.get("model")
    vocabulary = model.get("vocab", {}) if isinstance(model, Mapping) else {}
    ids = list(vocabulary.values()) if isinstance(vocabulary, Mapping) else [len(vocabulary) - 1]
    added = [row.get("id") for row in tokenizer.get("added_tokens") or [] if isinstance(row, dict)]
    return [token for token in (*ids, *added) if isinstance(token, int)]


def _settings(
    generation: Mapping[str, Any] | str | os.PathLike[str], vocabulary: int
) -> dict[str, Any]:
    if isinstance(generation, Mapping):
        source, fields = "generation settings", dict(generation)
    else:
        file = Path(generation)
        file = file / GENERATION if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError(
                f"export: no generation settings at {file}; expected a JSON file, or a folder with "
                "generation_config.json."
            )
        source, fields = str(file), read_json_object(file)
    for name in _TOKENS:
        tokens = fields.get(name)
        for token in tokens if isinstance(tokens, list) else [tokens]:
            if isinstance(token, int) and not 0 <= token < vocabulary:
                raise ValueError(
                    f"export: {source}: {name}={token} is outside vocab_size={vocabulary}; use the "
                    "generation settings of this model."
                )
    return fields
