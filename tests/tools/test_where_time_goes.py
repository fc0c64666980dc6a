"""The kind of an instruction, and the file it comes from, read off a compiled program."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from megalodon_jax.layers.complex_ema import causal_convolution
from megalodon_jax.layers.rotary import RotaryEmbedding
from tools.where_time_goes import program_of


@jax.jit
def program(x, w):
    filtered = causal_convolution(x @ w, x[0])[:, :, None]
    return RotaryEmbedding(8)(filtered, filtered)[0].sum(axis=0)


def test_kinds_and_files_of_a_compiled_program():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 5, 8), (8, 8))]
    read = program_of(program.lower(*shapes).compile().as_text())
    files: dict[str, set[str]] = {}
    for name, kind in read.kinds.items():
        files.setdefault(kind, set()).add(read.sources[name])
    assert files["transforms"] == {"layers/complex_ema.py"}
    assert "layers/rotary.py" in files["arithmetic"]
    # One product is the test's own, another that of the rotation's tables.
    assert files["products"] == {"elsewhere", "layers/rotary.py"}
