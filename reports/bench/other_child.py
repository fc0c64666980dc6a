"""`megalodon-jax` of the package index beside ours, in a process whose only one it is.

Both packages are imported as `megalodon_jax`, so this file is run by its path, with the other
package first on `PYTHONPATH`; of this project it loads `worker.py` and `jax_work.py`, by their
paths too. It has been run against version 0.2.2.

    python -P reports/bench/other_child.py CONFIG LENGTH ROWS LOSS

CONFIG is the JSON of the fields both packages know, LOSS that of further arguments of the loss. The
weights are its own initial ones: what it computes follows the original release, and ours follows
megalodon-hf, so equal weights would give other logits. How many numbers its matrices hold is said,
and compared by the parent.
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
"""Fields of a configuration that have one name and one meaning in both packages."""
LOSS = {"loss_chunk": "loss_chunk_size"}
"""Arguments of the loss that have another name there."""
DISTRIBUTION = "megalodon-jax"


def main(config: str, length: str, rows: str, loss: str) -> None:
    """Say what is installed, then do the work that is asked for."""
    # `megalodon_jax` of this project is of another distribution, which has another name.
    version, file = importlib.metadata.version(DISTRIBUTION), str(megalodon_jax.__file__)
    sizes: dict[str, Any] = json.loads(config)
    # Their head is its own matrix unless they are asked to share it.
    fields = {name: sizes[name] for name in SHARED} | {"share_emb": sizes["tied"]}
    fields["compute_dtype"] = jnp.dtype(sizes["compute_dtype"])
    built = megalodon_jax.MegalodonConfig(**fields)
    model = megalodon_jax.MegalodonForCausalLM(built, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    shape = int(rows), int(length)
    ids = jnp.asarray(rng.integers(3, built.vocab_size, shape).astype(np.int32))
    arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
    parameters = sum(x.size for x in arrays if x.ndim > 1)
    # The cache is written in place, as ours is.
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
    """Load a module by its path: its package would bring ours along."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
