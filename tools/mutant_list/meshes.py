"""Mutants of what shares a model out over devices, and of what compares a step over meshes."""

from __future__ import annotations

from tools.mutant_list.mutant import of

_AGREEMENT = "test_agreement.py"
_STEPS = "test_sharded_steps.py"
_PARAMETERS = "test_sharded_parameters.py"
_MESH = "test_mesh_comparison.py"
_REPLAY = "test_replay.py"
_PLACEMENT = "test_placement.py"

SEQUENCE = of(
    "megalodon_jax/sharding/sequence.py",
    (
        "state_one_shard_late",
        "a shard's EMA goes on from the state before its left neighbour's",
        "distance = here - 1 - jnp.arange(parts, dtype=jnp.int32)",
        "distance = here - 2 - jnp.arange(parts, dtype=jnp.int32)",
        _AGREEMENT,
    ),
    (
        "state_conjugated",
        "a state is handed over as its conjugate",
        "ends = jax.lax.complex(pairs[:, 0], pairs[:, 1])",
        "ends = jax.lax.complex(pairs[:, 0], -pairs[:, 1])",
        _AGREEMENT,
    ),
    (
        "start_without_powers",
        "the state a stream came with does not decay over the shards before",
        "return before if start is None else before + powers[..., here] * start",
        "return before if start is None else before + start",
        _AGREEMENT,
    ),
    (
        "moments_of_variances",
        "variances of shards are added without the distance of their means",
        "        m2s + weights * jnp.square(moved - mean),",
        "        m2s,",
        _AGREEMENT,
    ),
    (
        "moments_unweighted",
        "every shard's mean counts as much, however many tokens it has",
        "weights = counts.astype(wide)[..., None]",
        "weights = (counts > 0).astype(wide)[..., None]",
        _AGREEMENT,
    ),
    (
        "label_of_the_next_shard_lost",
        "the last token of each shard has no label",
        "return jnp.concatenate([x[..., 1:], jnp.where(last, end, next_first)], axis=-1)",
        "return jnp.concatenate([x[..., 1:], end], axis=-1)",
        _AGREEMENT,
    ),
    (
        "last_of_the_first",
        "the state behind a text is that of its first shard",
        "last = jax.lax.axis_index(SEQUENCE) == jax.lax.axis_size(SEQUENCE) - 1\n\n    def sent",
        "last = jax.lax.axis_index(SEQUENCE) == 0\n\n    def sent",
        f"{_AGREEMENT} test_serving.py",
    ),
)

VOCABULARY = of(
    "megalodon_jax/sharding/vocabulary.py",
    (
        "filled_rows_are_tokens",
        "rows that fill up a vocabulary count in the softmax",
        "return jnp.where(jnp.arange(logits.shape[-1]) < size, logits, -jnp.inf)",
        "return logits",
        _AGREEMENT,
    ),
    (
        "row_clamped",
        "a row that lies on another shard is this one's first",
        "rows = jnp.where(mine[..., None], table[jnp.where(mine, here, 0)], 0.0)",
        "rows = table[jnp.where(mine, here, 0)]",
        _AGREEMENT,
    ),
    (
        "target_not_summed",
        "the logit of a target that lies on another shard is 0",
        "return chosen if parts == 1 else jax.lax.psum(chosen, TENSOR)",
        "return chosen if parts == 1 else jax.lax.pmax(chosen, TENSOR)",
        _AGREEMENT,
    ),
)

REORDERING = of(
    "parity/mesh/reordering.py",
    (
        "order_never_changes",
        "sums are taken as they were, so the floor is nothing",
        "order = (jnp.arange(length, dtype=seed.dtype) * stride + seed + 1) % length",
        "order = jnp.arange(length, dtype=seed.dtype) + 0 * seed",
        f"{_REPLAY} {_MESH}",
    ),
    (
        "half_a_sum",
        "the second half of a sum is left out",
        "return [part(0, half) + part(half, length)]",
        "return [2 * part(0, half)]",
        _REPLAY,
    ),
)

REPLAY = of(
    "parity/mesh/replay.py",
    (
        "marks_unnumbered",
        "a name that is passed again is not another mark",
        '    return f"{name}#{count}" if count else name',
        "    return name",
        f"{_REPLAY} {_MESH}",
    ),
    (
        "forced_not_gone_on_with",
        "a value that should stand in the place of a mark does not",
        "other = forced[name].astype(value.dtype)",
        "other = value",
        f"{_REPLAY} {_MESH}",
    ),
)

COMPARISON = of(
    "parity/mesh/comparison.py",
    (
        "replicas_not_compared",
        "copies of a value may differ from device to device",
        'rows.append(comparison.judged(n, "replicas", float(differing)))',
        'rows.append(comparison.judged(n, "replicas", 0.0))',
        f"{_MESH} {_PLACEMENT}",
    ),
    (
        "whole_numbers_not_compared",
        "integers that differ pass",
        'rows.append(comparison.judged(n, "unequal", _unequal(there.arrays, whole.arrays, n)))',
        'rows.append(comparison.judged(n, "unequal", 0.0))',
        _MESH,
    ),
    (
        "does_not_run_is_an_error_of_ours",
        "a step that does not run on a mesh is none of its failures",
        "                return MeshResult(self.case, tuple(rows))\n            measured",
        "                return MeshResult(self.case, ())\n            measured",
        _MESH,
    ),
)

PLACES = of(
    "reports/page/sections/meshes.py",
    (
        "broken_mesh_last",
        "the mesh that parts from one device stands behind all that hold",
        '"rows": sorted(rows, key=lambda row: row["state"] == "pass"),',
        '"rows": sorted(rows, key=lambda row: row["state"] != "pass"),',
        "test_page_data.py",
    ),
)

MUTANTS = (*SEQUENCE, *VOCABULARY, *REORDERING, *REPLAY, *COMPARISON, *PLACES)
