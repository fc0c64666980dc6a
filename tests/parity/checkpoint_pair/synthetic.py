"""A synthetic checkpoint, sharded on disk: one shard in memory at a time, the same bytes each time.

`python -m tests.parity.checkpoint_pair.synthetic FOLDER` writes the one of `BIG`, 3.8 GB.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from megalodon_jax import MegalodonConfig
from megalodon_jax.weights import Role, Weight, weight_table

BIG = MegalodonConfig(
    vocab_size=32_000,
    model_dim=1024,
    num_layers=144,
    num_heads=2,
    z_dim=256,
    value_dim=2048,
    ffn_hidden_dim=2560,
    cema_ndim=16,
    chunk_size=64,
    norm_num_groups=32,
)
"""1.89 B parameters, 3.8 GB in bfloat16, in layers thin enough to be next to nothing beside it."""
SPREAD = {Role.EMBEDDING: 0.25, Role.HEAD: 0.3, Role.BIAS: 0.1, Role.NORM: 0.2, Role.CEMA: 1.0}


def write(
    folder: Path, config: MegalodonConfig, dtype: Any = ml_dtypes.bfloat16, changes: Any = None
) -> int:
    """Write a Hugging Face folder, one shard per layer; returns the bytes of all tensors.

    `changes` maps names to functions of the float32 values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = weight_table(dataclasses.replace(config, num_layers=1))
    ends = [row for row in table if ".layers." not in row.name]
    layer = [row for row in table if ".layers." in row.name]
    shards = [ends]
    for i in range(config.num_layers):
        renamed = ((row, row.name.replace(".layers.0.", f".layers.{i}.")) for row in layer)
        shards.append([dataclasses.replace(row, name=name) for row, name in renamed])
    places, total = {}, 0
    for i, rows in enumerate(shards):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors = {row.name: _values(row, changes).astype(dtype) for row in rows}
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    fields = config.to_hf()
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return total


def _values(row: Weight, changes: Any) -> np.ndarray:
    key = int.from_bytes(hashlib.sha256(row.name.encode()).digest()[:16], "little")
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(row.shape, np.float32)
    values *= np.float32(SPREAD.get(row.role, row.shape[-1] ** -0.5))
    if row.name.endswith("ffn.norm.weight"):
        values += 1
    change = (changes or {}).get(row.name)
    return values if change is None else change(values)


if __name__ == "__main__":
    print(write(Path(sys.argv[1]), BIG))
