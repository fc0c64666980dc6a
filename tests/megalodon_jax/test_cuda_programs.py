"""What a GPU would be handed, read without one; the truth is docs/many-machines.md "Programs"."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from megalodon_jax.layers import complex_ema
from tests.helpers import section
from tests.megalodon_jax.cuda_programs import (
    CONFIG,
    LONG,
    PROGRAMS,
    Contents,
    Program,
    contents,
    forward,
    kinds,
    lowered,
    text_of,
)

PAGE = section("many-machines.md", "On a GPU")


def rows(heading: str) -> list[dict[str, str]]:
    """The rows of the table below a heading of the page, by column."""
    below = PAGE.split(f"### {heading}\n", 1)[1].split("\n### ", 1)[0]
    lines = [line for line in below.splitlines() if line.startswith("|")]
    columns, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(columns, row, strict=True)) for row in body]


def quoted(cell: str) -> frozenset[str]:
    """The names between backquotes of a cell."""
    return frozenset(re.findall(r"`([^`]+)`", cell))


TABLE = {row["program"]: row for row in rows("Programs")}
REASONS = {next(iter(quoted(row["function"]))): row["why"] for row in rows("Float64")}


def told(name: str) -> Contents:
    """What the table says of a program."""
    row, program = TABLE[name], PROGRAMS[name]()
    columns = ("custom calls", "library", "float64 in", "products of", "TF32 in")
    return Contents(*(quoted(row[column]) for column in columns), donated=program.buffers)


def read(text: str) -> Contents:
    return contents(text, frozenset(REASONS))


SWEEPS = ("training step, MXFP8 and NVFP4 on 9.0",)
"""Its parts are other rows."""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.sweep) if n in SWEEPS else n for n in PROGRAMS]
)
def test_a_program_holds_what_the_table_says(name: str) -> None:
    assert read(text_of(name)) == told(name)


def test_the_largest_array_in_float64_is_the_table_of_angles() -> None:
    sizes = re.findall(r"tensor<((?:\d+x)+)f64>", text_of("forward, 131,072 tokens"))
    elements = max(math.prod(map(int, size.split("x")[:-1])) for size in set(sizes))
    root = math.isqrt(LONG)
    # Two tables, rounded up to whole rows; the EMA's would be D N L.
    assert elements == 2 * -(-LONG // root) * root * CONFIG.head_dim // 2


def test_the_table_has_every_program_and_gives_every_reason() -> None:
    assert list(TABLE) == list(PROGRAMS)
    assert all(REASONS.values())
    used = frozenset().union(*(quoted(row["float64 in"]) for row in TABLE.values()))
    assert used == frozenset(REASONS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_given_away_is_what_the_table_says(name: str) -> None:
    arguments = {"parameters": 0, "optimiser's state": 1}
    if "decode" in name:
        arguments = {"cache": 2}
    cell = TABLE[name]["donated"]
    expected = {arguments[words] for words in cell.split(", ")} if cell else set()
    assert set(PROGRAMS[name]().donated) == expected


def widened(logits: jax.Array) -> jax.Array:
    with jax.enable_x64(True):
        return (logits.astype(jnp.float64) * 3.0).astype(jnp.float32)


def factored(logits: jax.Array) -> jax.Array:
    square = jnp.einsum("blv,blw->vw", logits, logits, precision="highest")
    return jnp.linalg.cholesky(square)


CHANGES = {"float64": widened, "custom_calls": factored, "library": lambda x: jnp.sort(x, axis=-1)}


@pytest.mark.parametrize("field", CHANGES)
def test_what_is_added_to_a_program_is_seen(field: str) -> None:
    plain = PROGRAMS["forward"]()

    def run(*arguments: Any) -> Any:
        return CHANGES[field](plain.function(*arguments))

    seen, expected = read(lowered(replace(plain, function=run))), told("forward")
    assert getattr(seen, field) > getattr(expected, field)
    assert replace(seen, **{field: getattr(expected, field)}) == expected


def test_powers_that_may_be_rounded_to_tf32_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complex_ema, "_einsum", jnp.einsum)
    # A configuration of its own: blocks that are alike are traced once for all tests.
    seen = read(lowered(forward(replace(CONFIG, cema_ndim=5))))
    assert seen.tf32 - told("forward").tf32 == {"response"}


def test_a_donation_that_no_result_can_take_is_seen() -> None:
    plain = PROGRAMS["decode"]()
    kept = Program(plain.function, plain.arguments)
    assert read(lowered(kept)) == replace(told("decode"), donated=0)


@pytest.mark.parametrize("name", ["generate", "decode"])
def test_the_same_program_on_a_cpu_differs_in_random_bits_alone(name: str) -> None:
    here, there = text_of(name, "cpu"), text_of(name)
    assert read(here) == read(there)
    # Threefry is a loop on a CPU and twenty rounds written out on a GPU.
    drawn = kinds(here)["stablehlo.while"] > kinds(there)["stablehlo.while"]
    assert (kinds(here) != kinds(there)) == drawn == (name == "generate")
