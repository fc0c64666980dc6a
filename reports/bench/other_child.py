"""Runs the bench's work with PyPI's package `megalodon-jax`, in a separate process.

That package and this project's model are both imported as `megalodon_jax`. So this file is run by
its path, with PyPI's package first on `PYTHONPATH`, and loads of this project only `worker.py` and
`jax_work.py`, also by their paths. Tested with version 0.2.2.

    python -P reports/bench/other_child.py CONFIG LENGTH ROWS LOSS

CONFIG is JSON with configuration fields of this project, LOSS JSON with further arguments of the
loss. The model has its own initial weights: that package follows the original release and ours
follows megalodon-hf, so equal weights would give different logits. The process reports the number
of parameters in the model's matrices, which the parent compares with ours.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import megalodon_jax

SHARED = (
    "vocab_size", "model_dim", "num_layers", "num_heads", "z_dim", "value_dim", "ffn_hidden_dim",
    "cema_ndim", "chunk_size", "norm_num_groups", "norm_eps", "swiglu", "rescale_nffn", "scale_emb",
    "norm_affine", "use_checkpoint",
)  # fmt: skip
"""Configuration fields that have the same name and meaning in PyPI's package and in this
project."""
LOSS = {"loss_chunk": "loss_chunk_size"}
"""Names in PyPI's package of those arguments of the loss that have another name in this project, by
that name."""
DISTRIBUTION = "megalodon-jax"


def main(config: str, length: str, rows: str, loss: str) -> None:
    """Report version, file and number of parameters, then serve requests for work (`worker.serve`).

    The arguments are those of the command line.
    """
    # This project's `megalodon_jax` belongs to a distribution of another name.
    version, file = importlib.metadata.version(DISTRIBUTION), str(megalodon_jax.__file__)
    sizes: dict[str, Any] = json.loads(config)
    # The head of PyPI's model has a separate matrix unless `share_emb` is set.
    fields = {name: sizes[name] for name in SHARED} | {"share_emb": sizes["tied"]}
    fields["compute_dtype"] = jnp.dtype(sizes["compute_dtype"])
    built = megalodon_jax.MegalodonConfig(**fields)
    model = megalodon_jax.MegalodonForCausalLM(built, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    shape = int(rows), int(length)
    ids = jnp.asarray(rng.integers(3, built.vocab_size, shape).astype(np.int32))
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    parameters = sum(x.size for x in arrays if x.ndim > 1)
    # The cache is donated and updated in place, as in our decode step.
    step = eqx.filter_jit(
        lambda kept, cache: kept[0](kept[1][:, None], cache=cache, return_cache=True),
        donate="all-except-first",
    )

    def advance(model: Any, cache: Any, token: Any) -> Any:
        return step((model, token), cache)

    def generate(model: Any, tokens: Any, count: int) -> Any:
        return megalodon_jax.generate(model, tokens, count, temperature=0.0)[0]

    facts = {"version": version, "file": file, "parameters": parameters}
    here = Path(__file__)
    options: Any = {LOSS.get(name, name): value for name, value in json.loads(loss).items()}
    jax_work = _by_path(here.with_name("jax_work.py")).jax_work
    work = jax_work(model, ids, advance, generate, **options)
    with jax.default_matmul_precision("highest"):
        _by_path(here.with_name("worker.py")).serve(facts, work)


def _by_path(path: Path) -> Any:
    """Load a module by its path: importing its package would load this project's model."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
