"""The kind of an instruction, and the file it comes from, read off a compiled program."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp

from megalodon_jax.layers.complex_ema import causal_convolution
from megalodon_jax.layers.rotary import RotaryEmbedding
from tools.where_time_goes import KEPT, program_of

FAULTS = """
import resource
n = 1 << 27

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

text = b"x" * n; del text
before = faults()
for _ in range(4):
    text = b"x" * n; del text
print(faults() - before)
"""
"""128 MiB are taken and given back, again and again: 32,768 pages of 4 KiB each time."""


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


def page_faults(**settings: str) -> int:
    environment = {**os.environ, **settings}
    command = [sys.executable, "-c", FAULTS]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)


def test_memory_that_is_kept_is_not_touched_for_the_first_time_again():
    kept, given_back = page_faults(**KEPT), page_faults()
    assert kept < given_back / 10, "glibc gives large blocks back unless it is told to keep them"
