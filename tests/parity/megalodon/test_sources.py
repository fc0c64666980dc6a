"""Cases, intermediates, oracle and recordings: the same work, faithfully watched."""

from __future__ import annotations

import json
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from safetensors.numpy import save_file

from megalodon_jax.weights import build_model, weight_table
from parity import recordings
from parity.engine.programs import instrument
from parity.engine.programs.jaxprs import equations
from parity.megalodon import oracle
from parity.megalodon.cases import BYTE_LM, CASES, Case, by_name
from parity.megalodon.intermediates import capture, stages
from parity.megalodon.recordings import FOLDER, RecordedReference
from parity.recordings import RecordingError


def test_weights_are_the_same_bytes_on_every_machine():
    # Bits of a counter-based generator and exact arithmetic: a change here is a change of the work.
    plain = by_name("plain")
    assert plain.weights["model.norm.bias"][:3].tobytes().hex() == PLAIN_NORM_BIAS
    assert plain.batch.ids[0, :8].tolist() == PLAIN_IDS


def test_every_parameter_is_non_trivial():
    for case in CASES:
        for row in weight_table(case.config):
            values = case.weights[row.name]
            assert values.dtype == np.float32
            assert values.shape == row.shape
            assert len(np.unique(values)) > values.size // 2 or case.checkpoint, row.name


def test_cases_are_distinct_work():
    assert len({case.hash for case in CASES}) == len({case.name for case in CASES}) == len(CASES)


def test_unknown_case_lists_those_there_are():
    with pytest.raises(ValueError, match=r"no case 'plian'; choose one of plain, "):
        by_name("plian")


def operations(function, *args):
    """Every operation of a program in order, calls opened: what it is, of what, and how."""
    plain = (bool, int, float, str, tuple, np.dtype, type(None))

    def described(eqn):
        sides = ([str(v.aval) for v in vs] for vs in (eqn.invars, eqn.outvars))
        how = {k: str(v) for k, v in eqn.params.items() if isinstance(v, plain)}
        how.pop("num_consts", None)  # constants of a closure may come as arguments instead
        return (eqn.primitive.name, *sides, how)

    program = jax.make_jaxpr(function)(*args).jaxpr
    return [described(e) for e in equations(program) if e.primitive.name not in ("jit", "pjit")]


def test_capture_changes_no_operation_and_names_every_stage():
    case = by_name("length_c")
    model = build_model(case.config, case.weights)
    params, static = eqx.partition(model, eqx.is_array)
    ids = jnp.asarray(case.batch.ids)

    def logits(params, ids):
        return eqx.combine(params, static)(ids)[0]

    plain, watched = (operations(f, params, ids) for f in (logits, capture(logits)))
    assert plain == watched
    intermediates = jax.eval_shape(capture(logits), params, ids)[1]
    assert set(intermediates) == set(stages(case.config))
    zero = {"layers.0.cema": jnp.zeros((), jnp.float32)}
    assert operations(capture(logits, offsets=zero), params, ids) != plain


def test_a_mark_that_is_passed_twice_has_two_names_or_none():
    """Without counting, the last value would stand for both, and nobody compare the first."""

    def twice(x):
        return checkpoint_name(checkpoint_name(x, "q") + 1.0, "q")

    counted = instrument.capture(twice, numbered={"q": "blocks.{}.q"})
    _, marks = counted(jnp.float32(2.0))
    assert {name: float(x) for name, x in marks.items()} == {"blocks.0.q": 2.0, "blocks.1.q": 3.0}
    with pytest.raises(ValueError, match="the mark 'q' is passed twice"):
        instrument.capture(twice)(jnp.float32(2.0))


def test_the_oracles_derivative_is_its_derivative():
    """Extrapolated central differences along random directions: no automatic differentiation."""
    case = Case("tiny", "few operations", {"num_layers": 1}, length=7, batch_size=1)
    weights = {name: w.astype(np.float64) for name, w in case.weights.items()}
    batch, rng = case.batch, np.random.default_rng(0)
    gradients = oracle.run(case.config, weights, batch.ids, batch.labels, batch.mask)

    def loss(weights):
        return oracle.loss(oracle.forward(case.config, weights, batch.ids), batch.labels, None)

    def slope(name, direction, step):
        moved = [weights | {name: weights[name] + s * step * direction} for s in (1, -1)]
        return (loss(moved[0]) - loss(moved[1])) / (2 * step)

    for name in weights:
        if name == "model.embed.weight":
            continue  # its gradient leaves the padding row out on purpose
        direction = rng.normal(size=weights[name].shape)
        extrapolated = (4 * slope(name, direction, 1e-3) - slope(name, direction, 2e-3)) / 3
        expected = np.vdot(gradients[f"grad/{name}"], direction)
        scale = np.linalg.norm(gradients[f"grad/{name}"]) * np.linalg.norm(direction)
        # Differences keep no more than half the digits.
        assert abs(extrapolated - expected) <= np.sqrt(np.finfo(float).eps) * scale, name


def test_padding_row_gets_no_gradient_from_the_embedding():
    case = by_name("untied_head")
    batch = case.batch
    weights = {name: w.astype(np.float64) for name, w in case.weights.items()}
    ids = np.where(np.arange(case.length) % 5 == 0, case.config.pad_token_id, batch.ids)
    gradient = oracle.run(case.config, weights, ids, batch.labels)["grad/model.embed.weight"]
    assert not gradient[case.config.pad_token_id].any()
    assert gradient[ids[0, 1]].any()


@pytest.fixture
def copied(tmp_path):
    source = FOLDER / "length_c.safetensors"
    (tmp_path / source.name).write_bytes(source.read_bytes())
    return tmp_path


def test_recordings_are_small():
    total = sum(path.stat().st_size for path in FOLDER.iterdir())
    assert total < 12 * 2**20


def test_a_truncated_recording_is_named(copied):
    path = copied / "length_c.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RecordingError, match=r"length_c\.safetensors is not a readable recording"):
        RecordedReference(copied).run(by_name("length_c"))


def test_a_missing_recording_is_named(tmp_path):
    with pytest.raises(RecordingError, match=r"no recording length_c\.safetensors"):
        RecordedReference(tmp_path).run(by_name("length_c"))


def test_a_recording_of_other_work_is_refused(copied):
    (copied / "plain.safetensors").write_bytes((copied / "length_c.safetensors").read_bytes())
    with pytest.raises(RecordingError, match="other work"):
        RecordedReference(copied).run(by_name("plain"))


@pytest.mark.parametrize("schema", [0, recordings.SCHEMA + 1])
def test_a_recording_of_another_schema_is_refused(tmp_path, schema):
    notes = json.dumps({"schema": schema, "case_hash": by_name("length_c").hash})
    tensors = {"loss": np.zeros((), np.float32)}
    save_file(tensors, tmp_path / "length_c.safetensors", metadata={"provenance": notes})
    with pytest.raises(RecordingError, match=f"schema {schema}, expected {recordings.SCHEMA}"):
        RecordedReference(tmp_path).run(by_name("length_c"))


def test_an_interrupted_recording_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(recordings, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        recordings.write("length_c", "hash", {"loss": np.zeros(())}, {}, tmp_path)
    assert not list(tmp_path.iterdir())


PLAIN_NORM_BIAS = "f5c7d53e8cc8003e1cb69b3b"
PLAIN_IDS = [59, 47, 10, 39, 17, 46, 26, 35]


def test_a_checkpoint_without_held_out_text_gets_the_committed_one(tmp_path):
    """`--checkpoint` asks for model.safetensors and config.json alone."""
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).symlink_to(BYTE_LM / name)
    given = replace(by_name("byte_lm"), checkpoint=tmp_path)
    np.testing.assert_array_equal(given.batch.ids, by_name("byte_lm").batch.ids)
    (tmp_path / "heldout.txt").write_bytes(bytes(range(32, 122)) * 40)
    own = replace(by_name("byte_lm"), checkpoint=tmp_path)
    assert own.batch.ids[0, 0] == 32
