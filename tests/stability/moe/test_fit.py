"""Options of a training run of MLA + MoE: each changes the run as it says; and the emergency."""

from __future__ import annotations

import dataclasses
import itertools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megalodon_jax.optimiser import optimiser_update
from megalodon_jax.weights import named_leaves
from parity.deepseek_v3.config import MLAMoEConfig
from parity.deepseek_v3.model import MLAMoEForCausalLM
from stability.moe import fit as module
from stability.moe import options as options_module
from stability.moe.fit import emergency, fit, held_out_loss, last_good, make_step
from stability.moe.options import Options, optimiser, read_options, schedule, write_options
from stability.moe.policy import BFLOAT16, FP8, FP8_MLA, emulated
from stability.recovery.guard import GuardConfig, guard
from stability.recovery.rollback import RecoveryFailedError
from tests.helpers import cli, same_leaves

SHORT = Options(
    steps=12, batch_size=4, block_size=16, warmup_iters=2, learning_rate=1e-2, min_lr=1e-3
)
KEY, OTHER = jax.random.split(jax.random.key(1))


@pytest.fixture(scope="module", autouse=True)
def one_layer():
    """One sparse layer: what the options do is the same in two."""
    with pytest.MonkeyPatch.context() as patch:
        small = dataclasses.replace(
            options_module.TINY_LM, num_hidden_layers=1, min_moe_layer=0, hidden_size=16
        )
        patch.setattr(options_module, "TINY_LM", small)
        yield


@pytest.fixture(scope="module")
def model(one_layer):
    return eqx.filter_jit(MLAMoEForCausalLM)(SHORT.config(), key=jax.random.key(0))


def ids(rows: int) -> jax.Array:
    return jax.random.randint(jax.random.key(2), (rows, 16), 0, 256, jnp.int32)


def stepped(options: Options, model: MLAMoEForCausalLM, batches: list[jax.Array]):
    """Return model and guard state after the micro-batches."""
    transform = guard(optimiser(options), GuardConfig(max_norm=None), auxiliary=("router_z",))
    state = transform.init(eqx.filter(model, eqx.is_array))
    step = make_step(options, transform)
    for batch in batches:
        model, state = step(model, state, (batch, KEY))
    return model, state


def first_moment(state) -> dict:
    """Return the first moments by name: after one update, in proportion to its gradient."""
    leaves = jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu"))
    return named_leaves(next(x for x in leaves if hasattr(x, "mu")).mu)


def moves(options: Options, gradients: dict, steps: int = 1) -> dict:
    """Return the updates of the last of `steps` equal gradients."""
    transform = optimiser(options)
    state, updates = transform.init(gradients), gradients
    for _ in range(steps):
        updates, state = optimiser_update(transform, gradients, state, gradients)
    return updates


def test_lion_moves_every_parameter_by_the_rate():
    options = dataclasses.replace(SHORT, optimizer_type="lion", warmup_iters=0)
    gradients = {"a": jnp.array([3.0, -1e-3, 0.0]), "b": jnp.array([[0.2]])}
    lion = moves(options, gradients)
    rate = np.float32(schedule(options)(0))
    assert jax.tree.all(
        jax.tree.map(lambda u, g: bool(jnp.all(u == -rate * jnp.sign(g))), lion, gradients)
    )
    # The control: Adam's second update depends on the size of what came before.
    adam = dataclasses.replace(options, optimizer_type="adam", grad_clip=100.0)
    changing = optimiser(adam)
    state = changing.init(gradients)
    _, state = optimiser_update(changing, gradients, state, gradients)
    half = jax.tree.map(lambda g: g / 2, gradients)
    updates, _ = optimiser_update(changing, half, state, gradients)
    assert float(jnp.abs(updates["a"][0])) < 0.99 * float(schedule(options)(1))


def test_the_cosine_rises_for_the_warm_up_and_ends_at_the_smallest_rate():
    options = dataclasses.replace(SHORT, steps=20, warmup_iters=5)
    rates = [float(schedule(options)(i)) for i in range(21)]
    assert rates[0] == 0.0
    assert max(rates) == rates[5] == pytest.approx(options.learning_rate)
    assert all(a >= b for a, b in itertools.pairwise(rates[5:]))
    assert rates[20] == pytest.approx(options.min_lr)
    # Training that goes on keeps the smallest rate.
    assert float(schedule(options)(1000)) == pytest.approx(options.min_lr)


def test_the_cyclic_rate_returns_to_its_peak_in_every_cycle():
    options = dataclasses.replace(SHORT, steps=30, warmup_iters=2, schedule="cyclic", cycles=3)
    rates = [float(schedule(options)(i)) for i in range(31)]
    peaks = [i for i, r in enumerate(rates) if r == pytest.approx(options.learning_rate)]
    assert peaks == [2, 12, 22]
    assert [rates[i] for i in (10, 20, 30)] == pytest.approx([options.min_lr] * 3)
    assert rates[0] == 0.0 < options.min_lr


def test_the_gradient_is_clipped_to_its_norm():
    options = dataclasses.replace(SHORT, grad_clip=0.5, warmup_iters=0)
    transform = optimiser(options)
    gradients = {"a": jnp.array([30.0, -40.0])}
    _, state = optimiser_update(transform, gradients, transform.init(gradients), gradients)
    # Adam's first moment after one step is a tenth of the gradient it saw.
    seen = [x for x in jax.tree.leaves(state) if x.shape == (2,)]
    first = next(x for x in seen if float(x[1]) < 0)
    assert float(jnp.linalg.norm(first)) * 10 == pytest.approx(0.5)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["adam", "lion"])
def test_accumulated_micro_batches_move_as_the_large_batch_does(model, kind):
    whole = ids(8)
    options = dataclasses.replace(SHORT, optimizer_type=kind, warmup_iters=0, batch_size=2)
    split = dataclasses.replace(options, accumulation=4)

    def mean_gradient(options: Options, batches: list[jax.Array]) -> dict:
        return first_moment(stepped(options, model, batches)[1])

    parts, one = mean_gradient(split, [*whole.reshape(4, 2, 16)]), mean_gradient(options, [whole])
    # The floor: the large batch with its rows in another order, whose sums round otherwise.
    again = mean_gradient(options, [whole[::-1]])
    bound = max(_apart(again, one), float(jnp.finfo(jnp.float32).eps))
    assert _apart(parts, one) <= 8 * bound
    # The control: three of four micro-batches are another gradient, and move nothing yet.
    some = mean_gradient(dataclasses.replace(split, accumulation=3), [*whole.reshape(4, 2, 16)][:3])
    assert _apart(some, one) > 100 * bound
    still, _ = stepped(split, model, [*whole.reshape(4, 2, 16)][:3])
    assert same_leaves(still, model)


def _apart(left: dict, right: dict) -> float:
    """Return the relative L2 distance over all leaves."""
    gap = sum(float(jnp.sum(jnp.square(left[n] - right[n]))) for n in right)
    return math.sqrt(gap / sum(float(jnp.sum(jnp.square(x))) for x in right.values()))


def test_dropout_is_on_in_training_and_off_at_evaluation(model):
    options = dataclasses.replace(SHORT, dropout=0.1)
    dropping = eqx.filter_jit(MLAMoEForCausalLM)(options.config(), key=jax.random.key(0))
    loss = eqx.filter_jit(lambda m, key: m.losses(ids(4), key=key)[0])
    plain = float(loss(model, None))
    assert float(loss(dropping, None)) == plain
    one, other = (float(loss(dropping, jax.random.key(k))) for k in (1, 2))
    assert len({plain, one, other}) == 3
    assert float(loss(model, KEY)) == plain
    assert held_out_loss(dropping, options) == held_out_loss(model, SHORT)
    # A step of training drops, by the key of its micro-batch; what it dropped is in its loss.
    transform = guard(optimiser(options), GuardConfig(max_norm=None), auxiliary=("router_z",))
    start, step = transform.init(eqx.filter(dropping, eqx.is_array)), make_step(options, transform)
    told = {float(step(dropping, start, (ids(4), k))[1].report.loss) for k in (KEY, KEY, OTHER)}
    assert len(told) == 2 and plain not in told


def test_the_z_loss_is_minimised_by_its_weight(model):
    gradient = {}
    for weight in (0.0, 1.0):
        options = dataclasses.replace(SHORT, router_z_loss_coef=weight, grad_clip=1e9)
        moments = first_moment(stepped(options, model, [ids(4)])[1])
        gradient[weight] = moments["model.layers.0.mlp.gate.weight"]
    assert float(jnp.linalg.norm(gradient[1.0])) > 2 * float(jnp.linalg.norm(gradient[0.0]))


@pytest.mark.parametrize(
    ("policy", "narrow"),
    [(BFLOAT16, ()), (FP8, ("mlp.experts",)), (FP8_MLA, ("mlp.experts", "self_attn"))],
)
def test_emulated_storage_narrows_what_the_policy_says(model, policy, narrow):
    held = named_leaves(eqx.filter_jit(emulated)(model, policy))
    for name, leaf in named_leaves(model).items():
        if policy.dtype(name).itemsize == 4:
            assert np.array_equal(held[name], leaf), name
            continue
        eight = any(part in name for part in narrow) and "norm" not in name
        assert (policy.dtype(name).itemsize == 1) >= eight, name
        assert len(np.unique(held[name])) < len(np.unique(leaf)), name
        # Half a unit in the last place of the format, relative; subnormals of e4m3 have fewer bits.
        half = float(jnp.finfo(policy.dtype(name)).eps) / 2
        size = jnp.linalg.norm(leaf)
        assert float(jnp.linalg.norm(held[name] - leaf) / size) <= half, name
    # Gradients pass, in float32 and unrounded.
    pull = eqx.filter_grad(lambda m: sum(jnp.sum(x) for x in jax.tree.leaves(emulated(m, policy))))
    assert all(np.all(np.asarray(x) == 1) for x in jax.tree.leaves(eqx.filter_jit(pull)(model)))


def test_mla_is_float8_only_where_it_is_asked_for():
    name = "model.layers.0.self_attn.o_proj.weight"
    fp8 = dataclasses.replace(SHORT, storage="float8")
    assert fp8.policy.dtype(name).name == "bfloat16"
    asked = dataclasses.replace(fp8, fp8_mla_params=True)
    assert asked.policy.dtype(name).name == "float8_e4m3fn"
    assert asked.emergency(9, 0).policy.dtype(name).name == "bfloat16"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer_type": "sgd"}, "optimizer_type='sgd' must be one of"),
        ({"min_lr": 1.0}, "min_lr=1.0 must be between 0 and learning_rate"),
        ({"warmup_iters": 12}, "warmup_iters=12 must be from 0 to below the 12 updates"),
        ({"cycles": 2}, "cycles=2 must be 1 where the schedule is not cyclic"),
        ({"fp8_mla_params": True}, "fp8_mla_params=True must be False where storage is not"),
        ({"dropout": 1.0}, "dropout=1.0 must be from 0 to below 1"),
        ({"size": "huge"}, "unknown size 'huge'"),
    ],
)
def test_options_that_contradict_themselves_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SHORT, **change)


def test_options_come_back_and_a_folder_of_others_is_refused(tmp_path):
    write_options(tmp_path, SHORT)
    assert read_options(tmp_path) == SHORT
    with pytest.raises(ValueError, match="holds a run of other options"):
        fit(dataclasses.replace(SHORT, seed=1), tmp_path)
    (tmp_path / "options.json").write_text('{"colour": 1}', "utf-8")
    with pytest.raises(ValueError, match="unknown options colour"):
        read_options(tmp_path)
    with pytest.raises(ValueError, match="expected the folder that `subject fit` wrote"):
        emergency(tmp_path / "nowhere")


def test_an_emergency_is_tighter_in_every_way_and_never_looser():
    calm = dataclasses.replace(SHORT, storage="float8", fp8_mla_params=True).emergency(40, 7)
    assert calm.learning_rate < SHORT.learning_rate and calm.min_lr < SHORT.min_lr
    assert (calm.grad_clip, calm.router_z_loss_coef) == (0.5, 1e-4)
    assert calm.warmup_iters == 3 * SHORT.warmup_iters
    assert calm.activation_limit == 100.0 and calm.guarded and calm.first_batch == 7
    tight = dataclasses.replace(SHORT, grad_clip=0.1, activation_limit=5.0).emergency(40, 0)
    assert (tight.grad_clip, tight.activation_limit) == (0.1, 5.0)


@pytest.fixture(scope="module")
def broken(one_layer, tmp_path_factory):
    """A run that is sound for 20 updates, then continued at a hundred times the rate."""
    folder = tmp_path_factory.mktemp("run") / "broken"
    wild = dataclasses.replace(
        SHORT, steps=40, save_every=10, guarded=False, learning_rate=5e-3, min_lr=5e-3
    )
    fit(dataclasses.replace(wild, steps=20), folder)
    wild = dataclasses.replace(wild, learning_rate=0.5, min_lr=0.5)
    write_options(folder, wild)
    return folder, wild, fit(wild, folder)


@pytest.mark.sweep
def test_an_unstable_run_is_resumed_from_its_best_checkpoint_and_falls(broken):
    folder, wild, unstable = broken
    # It is broken: the held-out loss is above that of bytes drawn at random.
    assert unstable.held_out > math.log(256)
    said = []
    step, _, good = last_good(folder, wild, said.append)
    assert step == 20 and len(said) == 5
    before = held_out_loss(good, wild)
    rescued = emergency(folder, steps=20, say=said.append)
    assert math.isfinite(rescued.held_out)
    assert rescued.held_out < before < unstable.held_out
    assert rescued.options.first_batch == len(unstable.losses) == 40
    assert all(math.isfinite(loss) for _, loss, _ in rescued.losses)
    # What was unstable stays for whoever looks for the cause; the rescue can be continued.
    assert read_options(folder) == wild
    again = emergency(folder, steps=20, say=said.append)
    assert any("continuing" in line for line in said)
    assert again.held_out == rescued.held_out


def test_a_checkpoint_that_is_not_finite_is_not_gone_back_to(broken, monkeypatch):
    folder, wild, _ = broken
    monkeypatch.setattr(module, "held_out_loss", lambda model, options: math.nan)
    with pytest.raises(ValueError, match="no checkpoint can be read and is finite"):
        last_good(folder, wild)
    with pytest.raises(ValueError, match="no checkpoint can be read and is finite"):
        emergency(folder, folder / "other")


def test_a_run_without_a_guard_ends_when_its_loss_is_lost(tmp_path, monkeypatch, model):
    monkeypatch.setattr(module, "LOST", 2)
    lost = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), model)
    with pytest.raises(RecoveryFailedError, match="subject emergency"):
        fit(dataclasses.replace(SHORT, guarded=False), tmp_path, start=lost)


def test_the_command_trains_and_resumes(tmp_path):
    folder = tmp_path / "run"
    line = "--steps 2 --batch-size 4 --block-size 16 --warmup-iters 1 --learning-rate 1e-2"
    more = "--min-lr 1e-3 --save-every 1 --optimizer-type lion --dropout 0.1 --quiet"
    done = cli("subject", "fit", folder, *line.split(), *more.split())
    assert done.exit_code == 0, done.output
    assert "held-out loss" in done.output
    options = read_options(folder)
    assert (options.optimizer_type, options.dropout, options.warmup_iters) == ("lion", 0.1, 1)
    resumed = cli("subject", "emergency", folder, "--steps", 2, "--quiet")
    assert resumed.exit_code == 0, resumed.output
    assert read_options(folder / "emergency").grad_clip == 0.5
    refused = cli("subject", "fit", folder, "--cycles", 2)
    assert refused.exit_code == 2 and "not cyclic" in refused.output
    assert cli("subject", "emergency", tmp_path).exit_code == 2


def test_the_guides_configuration_is_a_line_of_options():
    stable = Options(
        size="medium",
        batch_size=4,
        grad_clip=0.5,
        learning_rate=1e-4,
        warmup_iters=1999,
        min_lr=1e-5,
        dropout=0.1,
        router_z_loss_coef=1e-4,
    )
    config = stable.config()
    assert isinstance(config, MLAMoEConfig) and config.hidden_size == 768
