"""What crosses between devices is what the table of docs/sharding.md says, and nothing else."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from megalodon_jax import MegalodonConfig
from megalodon_jax.checks import traced_checks
from megalodon_jax.sharding import partition_specs, shard_batch, shard_model
from megalodon_jax.sharding.axes import spec_of
from megalodon_jax.weights import abstract_model, dotted, weight_table
from tests.helpers import model_of, tiny, tokens
from tests.megalodon_jax.sharding.programs import mesh_named

CONFIG = tiny(
    vocab_size=64,
    model_dim=16,
    num_layers=2,
    num_heads=4,
    z_dim=16,
    value_dim=32,
    ffn_hidden_dim=40,
    norm_num_groups=4,
    scan_layers=False,
)
ROWS, PARTS = 4, 4
BYTES = {"pred": 1, "s32": 4, "f32": 4, "f64": 8}
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


@pytest.fixture(autouse=True)
def unchecked():
    """No checks on traced values: what they find is summed over devices too."""
    with traced_checks(False):
        yield


def collectives(program: str) -> Counter[tuple[str, int]]:
    """Kinds and bytes of the results of what a compiled program sends, part by part.

    The compiler sends several small results as one; here each counts for itself.
    """
    found: Counter[tuple[str, int]] = Counter()
    for line in program.splitlines():
        match = re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line)
        if match:
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match[1]):
                size = math.prod(int(n) for n in shape.split(",") if n)
                found[match[2], BYTES[dtype] * size] += 1
    return found


@cache
def program(axis: str, length: int, derivative: bool) -> Counter[tuple[str, int]]:
    mesh = mesh_named(f"{axis}={PARTS}")
    model = shard_model(model_of(CONFIG), mesh)
    ids = tokens(CONFIG, (ROWS, length))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": np.ones(ids.shape, bool)}

    def loss(model: Any, batch: Any) -> jax.Array:
        return model.compute_loss(**batch)

    run = eqx.filter_value_and_grad(loss) if derivative else loss
    placed = shard_batch(batch, mesh, chunk_size=CONFIG.chunk_size)
    return collectives(eqx.filter_jit(run).lower(model, placed).compile().compiled.as_text())


def states(config: MegalodonConfig, rows: int) -> tuple[int, int]:
    """Bytes of what one shard hands over: moments of a norm, state of an EMA, in float32."""
    return 3 * rows * config.norm_num_groups * 4, 2 * rows * config.model_dim * config.cema_ndim * 4


def forward_on_sequence() -> Counter[tuple[str, int]]:
    moments, state = states(CONFIG, ROWS)
    layers = CONFIG.num_layers
    return Counter(
        {
            # Counts of valid tokens: those of all norms are the same.
            ("all-gather", PARTS * ROWS * 4): 1,
            ("all-gather", PARTS * moments): layers + 1,
            ("all-gather", PARTS * state): layers,
            # One label of each row to the left; the sum of the loss, and its count.
            ("collective-permute", ROWS * 4): 1,
            ("all-reduce", 4): 2,
        }
    )


def test_a_sequence_hands_over_states_and_one_label() -> None:
    assert program("sequence", 32, False) == forward_on_sequence()


@pytest.mark.sweep
def test_what_a_sequence_hands_over_knows_no_length() -> None:
    assert program("sequence", 64, False) == forward_on_sequence()
    short, long = (program("sequence", length, True) for length in (32, 64))
    assert short == long
    moments, state = states(CONFIG, ROWS)
    backward = Counter(
        {
            ("reduce-scatter", moments): CONFIG.num_layers + 1,
            ("reduce-scatter", state): CONFIG.num_layers,
        }
    )
    # What is left are the gradients; the embedding's has two, of the rows and of the head.
    left = short - forward_on_sequence() - backward
    sizes = [4 * math.prod(row.shape) for row in weight_table(CONFIG)]
    assert sum(n * c for (_, n), c in left.items()) == sum(sizes) + sizes[0]
    assert {kind for kind, _ in left} == {"all-reduce"}


@pytest.mark.sweep
def test_rows_hand_over_gradients_alone() -> None:
    found = program("data", 32, True)
    assert {kind for kind, _ in found} == {"all-reduce"}
    every = sum(4 * math.prod(row.shape) for row in weight_table(CONFIG))
    head = 4 * math.prod(weight_table(CONFIG)[0].shape)
    assert sum(n * c for (_, n), c in found.items()) == every + head + 2 * 4


@pytest.mark.sweep
def test_parts_of_parameters_are_gathered_and_their_gradients_summed() -> None:
    forward, both = program("fsdp", 32, False), program("fsdp", 32, True)
    mesh = mesh_named(f"fsdp={PARTS}")
    cuts = partition_specs(abstract_model(CONFIG), mesh)
    whole = {row.name: 4 * math.prod(row.shape) for row in weight_table(CONFIG)}
    gathered = Counter(whole[name] for name, spec in cuts.items() if "fsdp" in spec)
    assert Counter({n: c for (k, n), c in forward.items() if k == "all-gather"}) == gathered
    assert {kind for kind, _ in forward} == {"all-gather", "all-reduce"}
    summed = sum(n * c for (k, n), c in both.items() if k in ("all-reduce", "reduce-scatter"))
    assert summed <= sum(whole.values()) + whole["model.embed.weight"] + 2 * 4


@pytest.mark.sweep
def test_channels_are_gathered_three_times_a_layer_and_summed_twice() -> None:
    found = program("tensor", 32, False)
    activations = ROWS * 32 * CONFIG.model_dim * 4
    layers = CONFIG.num_layers
    assert found["all-gather", activations] == 3 * layers + 1
    assert found["all-reduce", activations] == 2 * layers
    assert found["reduce-scatter", activations // PARTS] == 1
    # Sums of squares and sums of the norms over features, of the loss, and its largest logit.
    numbers = found["all-reduce", ROWS * 32 * 4]
    assert numbers == 3 * layers + 3
    rest = found.total() - numbers - (3 * layers + 1) - 2 * layers - 1
    assert rest == found["all-reduce", 4]


def lowered(mesh: Any, config: MegalodonConfig, length: int) -> Any:
    """The compiled forward pass of one row, from shapes alone."""
    model = abstract_model(config)
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    if mesh is not None:
        specs = partition_specs(model, mesh)
        model = jax.tree_util.tree_map_with_path(
            lambda path, x: x.update(sharding=NamedSharding(mesh, specs[dotted(path)])), model
        )
        spec = spec_of(mesh, tokens.shape, ("batch", "sequence"))
        tokens = tokens.update(sharding=NamedSharding(mesh, spec))
    leaves, structure = jax.tree.flatten(model)

    def run(leaves: Any, tokens: jax.Array) -> jax.Array:
        return jax.tree.unflatten(structure, leaves)(tokens)[0]

    return jax.jit(run).lower(leaves, tokens).compile()


@pytest.mark.sweep
@pytest.mark.optimised
def test_a_long_text_takes_an_eighth_of_work_and_memory_on_eight_shards() -> None:
    config = tiny(vocab_size=256, model_dim=64, num_layers=2, chunk_size=2048, ffn_hidden_dim=128,
                  z_dim=32, value_dim=128, cema_ndim=16)  # fmt: skip
    alone, eighth = (lowered(m, config, 131_072) for m in (None, mesh_named("sequence=8")))
    assert memory(eighth) <= memory(alone) / 6
    assert eighth.cost_analysis()["flops"] <= 1.05 * alone.cost_analysis()["flops"] / 8


def memory(compiled: Any) -> int:
    sizes = compiled.memory_analysis()
    return sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes


def test_the_table_of_the_document_is_the_one_measured_here() -> None:
    page = (Path(__file__).parents[3] / "docs" / "sharding.md").read_text(encoding="utf-8")
    for kind in KINDS.split("|"):
        assert kind == "all-to-all" or f"{kind} " in page
