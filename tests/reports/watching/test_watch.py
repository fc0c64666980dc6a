"""A training that is watched: frozen norms are warned of once, healthy ones not, and nothing that
goes wrong in the watch reaches the training.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from megalodon_jax import files
from reports.page.sections.watching import watching
from reports.page.watching import render
from reports.registry.lookup import find_run, page_of, read_judgeable
from reports.store.manifest import Manifest
from reports.store.run import Run, read_run
from reports.store.runs import list_runs
from reports.store.schema import RunKind, StoreError
from reports.watching import session, trainer_callback, watch_optimizer, watch_updates
from reports.watching.session import to_stderr
from stability.core.findings import Severity
from stability.storage import watch_jax_loop, watch_torch_loop
from stability.storage.torch_narrow import compensate, round_stochastically
from tests.helpers import ROOT

EVERY, STEPS = 2, 12


class Net(torch.nn.Module):
    """A norm at 1, which bfloat16 freezes at a rate of 3e-4, and a matrix near 0, which moves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.ones(64))
        self.matrix = torch.nn.Parameter(torch.full((64, 64), 1e-3))


def trained(
    out: Path,
    dtype: torch.dtype = torch.bfloat16,
    steps: int = STEPS,
    attach: Any = None,
    before_step: Any = lambda net, optimizer, step: None,
    **options: Any,
):
    """Train with gradients of 1, and return what the watch reported."""
    torch.manual_seed(0)
    net = Net().to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=0.0)
    if attach is not None:
        attach(optimizer)
    reports: list[str] = []
    arguments = {"every": EVERY, "out": out, "report": reports.append} | options
    watch = watch_optimizer(optimizer, net.named_parameters(), **arguments)
    for step in range(steps):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        before_step(net, optimizer, step)
        optimizer.step()
    watch.close()
    return net, watch, reports


def stored(out: Path) -> Run:
    (info,), unreadable = list_runs(out)
    assert not unreadable
    return read_run(info.folder)


def document(out: Path) -> dict[str, Any]:
    return dict(stored(out).manifest.stability["watch"])


def test_a_frozen_norm_is_warned_of_once_with_its_remedies(tmp_path: Path) -> None:
    net, watch, (warning,) = trained(tmp_path)
    assert torch.equal(net.norm, torch.ones_like(net.norm)), "the case itself"
    assert "1 of 2 watched parameters stands still, norm (bfloat16)" in warning
    # By bytes: the norms alone, then what changes no storage, then what does.
    order = ["round updates stochastically", "keep parameters in float32", "compensate in bfloat16"]
    places = [warning.index(what) for what in order]
    assert places == sorted(places)
    assert "torch_narrow.round_stochastically" in warning, "in torch's words"
    assert str(watch.page) in warning
    assert watch.warned in warning
    run = stored(tmp_path)
    assert (run.manifest.kind, run.manifest.verdict) == (RunKind.WATCH, "")
    severities = {f.subject: (f.severity, f.value) for f in run.findings}
    assert severities == {"norm": (Severity.WARNING, 1.0), "matrix": (Severity.OK, 0.0)}
    seen = document(tmp_path)
    assert seen["steps"] == list(range(EVERY, STEPS + 1, EVERY))
    assert seen["families"]["norms"]["frozen"] == [None, None, 1.0, 1.0, 1.0, 1.0]
    assert seen["families"]["norms"]["update"] == [0.0] * 6
    assert all(update > 0 for update in seen["families"]["matrices"]["update"])


def test_the_same_training_in_float32_is_silent_and_all_measured(tmp_path: Path) -> None:
    _, watch, reports = trained(tmp_path, torch.float32)
    assert (reports, watch.warned, watch.stopped) == ([], "", "")
    assert {f.severity for f in stored(tmp_path).findings} == {Severity.OK}
    page = render(stored(tmp_path))
    assert ">MOVING<" in page
    assert "No parameter stands still: all 2 were measured" in page


def test_the_page_shows_the_shares_over_time_and_is_drawn_again(tmp_path: Path) -> None:
    _, watch, _ = trained(tmp_path)
    assert watch.page is not None
    page = watch.page.read_text(encoding="utf-8")
    assert ">FROZEN<" in page
    assert page.count('<svg class="chart wide"') == 3
    # The third look is the first that can know.
    assert f"The first since step {3 * EVERY}." in page
    assert page_of(watch.page.parent) == page
    assert find_run(tmp_path, watch.page.parent.name) == watch.page.parent
    with pytest.raises(StoreError, match="is a watch; its page shows"):
        read_judgeable(watch.page.parent)


@pytest.mark.parametrize("remedy", [round_stochastically, compensate])
def test_the_remedies_of_this_project_are_seen_and_not_warned_of(remedy, tmp_path: Path) -> None:
    _, _, reports = trained(tmp_path, attach=remedy)
    assert not reports
    assert document(tmp_path)["remedied"]


def test_a_large_leaf_is_sampled_and_its_error_is_named(tmp_path: Path) -> None:
    trained(tmp_path)
    matrix = next(leaf for leaf in document(tmp_path)["leaves"] if leaf["name"] == "matrix")
    assert matrix["followed"] == 256
    assert 0 < matrix["error"] < 0.05
    message = next(f.message for f in stored(tmp_path).findings if f.subject == "matrix")
    assert "sampling error" in message


def test_what_has_no_gradient_or_is_not_trained_is_named_as_not_measured(tmp_path: Path) -> None:
    def drop(net: Net, optimizer: Any, step: int) -> None:
        net.norm.grad = None

    _, _, reports = trained(tmp_path, before_step=drop)
    assert not reports
    findings = {f.subject: f for f in stored(tmp_path).findings}
    assert np.isnan(findings["norm"].value)
    assert findings["norm"].message == "not measured: it had no gradient"
    assert findings["norm"].severity is not Severity.OK, "what was not measured is not green"
    page = render(stored(tmp_path))
    assert ">SO FAR MOVING<" in page
    assert "it had no gradient" in page


def test_sharded_and_foreign_parameters_are_named() -> None:
    class Sharded(torch.Tensor):
        def to_local(self):
            return self

    sharded = torch.ones(4).as_subclass(Sharded)
    fixed, foreign = (
        torch.nn.Parameter(torch.ones(2), requires_grad=turn) for turn in (False, True)
    )
    assert "sharded" in watch_torch_loop._why_not(sharded, {})
    assert "requires_grad" in watch_torch_loop._why_not(fixed, {})
    assert "does not train it" in watch_torch_loop._why_not(foreign, {})
    assert "int64" in watch_torch_loop._why_not(torch.arange(2), {})
    assert "no values" in watch_torch_loop._why_not(
        torch.nn.Parameter(torch.ones(2, device="meta")), {}
    )


@pytest.mark.parametrize("fused", [True, False])
def test_steps_that_a_loss_scaler_leaves_out_are_not_frozen(fused: bool, tmp_path: Path) -> None:
    """Infinite gradients: a fused optimiser is stepped and changes nothing, another one is not."""
    net, left_out = Net(), 9
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    watch = watch_optimizer(optimizer, net.named_parameters(), out=tmp_path, every=EVERY)
    for step in range(STEPS):
        optimizer.zero_grad()
        factor = float("inf") if step < left_out else 1.0
        scaler.scale(factor * (net.norm.sum() + net.matrix.sum())).backward()
        scaler.step(optimizer)
        scaler.update()
    watch.close()
    assert not watch.warned
    seen = document(tmp_path)
    assert (seen["total"], seen["skipped"]) == (STEPS - left_out, left_out if fused else 0)
    assert seen["steps"] == [2]


def test_accumulated_and_unscaled_gradients_count_by_optimiser_steps(tmp_path: Path) -> None:
    """Backward passes without a step are none: a step every third pass is one of `EVERY`."""
    net = Net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    watch = watch_optimizer(optimizer, net.named_parameters(), out=tmp_path, every=EVERY)
    for turn in range(3 * STEPS):
        (net.norm.sum() + net.matrix.sum()).backward()
        if turn % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    watch.close()
    assert document(tmp_path)["total"] == STEPS
    assert not watch.warned


def test_a_rate_of_zero_means_no_update(tmp_path: Path) -> None:
    def warm_up(net: Net, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.0

    _, _, reports = trained(tmp_path, torch.float32, before_step=warm_up)
    assert not reports
    assert {leaf["why"] for leaf in document(tmp_path)["leaves"]} == {"its learning rate was 0"}


@pytest.mark.parametrize("where", ["Watched.look", "rewrite_run", "sample"])
def test_an_error_in_the_watch_is_reported_once_and_ends_the_watch_alone(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    made: list[Any] = []

    def later(net: Net, optimizer: Any, step: int) -> None:
        made[:] = [optimizer]
        if step == 4:
            if where == "Watched.look":
                monkeypatch.setattr(session.Watched, "look", broken)
            elif where == "rewrite_run":
                monkeypatch.setattr(session, "rewrite_run", broken)
                monkeypatch.setattr(session, "WRITING", float("inf"))
            else:
                monkeypatch.setattr(torch.Tensor, "take", broken)

    net, watch, reports = trained(tmp_path, torch.float32, before_step=later)
    (report,) = reports
    assert "the watch switched itself off (OSError: the disk is full). The training goes on" in (
        report
    )
    assert "nothing is measured after step" in report
    assert made[0].state[net.norm]["step"] == STEPS, "every step was made"
    assert "disk is full" in watch.stopped
    assert document(tmp_path)["steps"] == ([2] if where == "rewrite_run" else [2, 4])
    if where != "rewrite_run":
        assert "switched itself off after step" in document(tmp_path)["reason"]
        assert ">MOVING<" not in render(stored(tmp_path))


@pytest.mark.sweep
def test_a_killed_training_leaves_what_was_measured(tmp_path: Path) -> None:
    """SIGKILL, so nothing can be stored any more. On a GPU a client of JAX would take the memory
    that the training needs, so there is none until then.
    """
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.reports.watching import test_watch as t\n"
        "from reports.watching import session; session.WRITING = float('inf')\n"
        "from jax._src import xla_bridge\n"
        "def die(net, optimizer, step):\n"
        "    if step == 9:\n"
        "        assert not xla_bridge._backends, xla_bridge._backends\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "t.trained(Path(sys.argv[1]), before_step=die)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    seen = document(tmp_path)
    assert seen["steps"] == [2, 4, 6, 8]
    assert seen["reason"] == "not closed: the training is still running, or was killed"
    assert ">FROZEN<" in render(stored(tmp_path))


def test_a_write_that_is_cut_off_leaves_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between writing aside and renaming: the earlier run is whole."""
    monkeypatch.setattr(session, "WRITING", float("inf"))

    def cut(net: Net, optimizer: Any, step: int) -> None:
        if step == 6:
            monkeypatch.setattr(
                files, "_publish", lambda aside, target: (_ for _ in ()).throw(OSError("killed"))
            )

    trained(tmp_path, before_step=cut)
    assert document(tmp_path)["steps"] == [2, 4, 6]


def test_a_training_that_is_too_short_says_that_nothing_was_measured(tmp_path: Path) -> None:
    trained(tmp_path, steps=3, every=100)
    assert "no look: 3 steps, the first look is at step 100" in document(tmp_path)["reason"]
    assert ">NOT MEASURED<" in render(stored(tmp_path))
    assert {f.severity for f in stored(tmp_path).findings} == {Severity.WARNING}


def updated(
    out: Path, dtype: Any, steps: int = STEPS, transform: Any = None, named: bool = True
) -> list[str]:
    """Train a pytree with optax as `trained` does, and return what was reported."""
    params = {"norm": jnp.ones(64, dtype), "matrix": jnp.full((64, 64), 1e-3, dtype)}
    gradients = jax.tree.map(jnp.ones_like, params)
    transform = transform or optax.adamw(3e-4, weight_decay=0.0)
    state, reports = transform.init(params), []
    watch = watch_updates(params, out=out, every=EVERY, report=reports.append)

    @jax.jit
    def step(params, state):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = transform.update(gradients, state, params)
            after = optax.apply_updates(params, updates)
        given = updates if named else {"matrix": updates["matrix"]}
        return after, state, watch.sample(params, given, after)

    for _ in range(steps):
        params, state, seen = step(params, state)
        watch.record(seen)
    watch.close()
    return reports


def test_an_optax_loop_warns_once_of_the_frozen_norm(tmp_path: Path) -> None:
    (warning,) = updated(tmp_path, jnp.bfloat16)
    assert "1 of 2 watched parameters stands still, norm (bfloat16)" in warning
    assert "narrow_optimisers.stochastic_adamw" in warning
    seen = document(tmp_path)
    assert seen["framework"] == "optax"
    assert seen["families"]["norms"]["frozen"] == [None, None, 1.0, 1.0, 1.0, 1.0]


def test_an_optax_loop_in_float32_is_silent(tmp_path: Path) -> None:
    assert not updated(tmp_path, jnp.float32)
    assert {f.severity for f in stored(tmp_path).findings} == {Severity.OK}


def test_a_step_is_sampled_where_a_look_is_due_alone(tmp_path: Path) -> None:
    """As a step does that takes `due` as a static argument."""
    before, after = {"w": jnp.ones(4)}, {"w": jnp.full(4, 2.0)}
    with watch_updates(before, out=tmp_path, every=3) as watch:
        sampled = []
        for _ in range(7):
            sampled.append(watch.due)
            watch.record(watch.sample(before, before, after) if watch.due else None)
    assert sampled == [False, False, True, False, False, True, False]
    assert not watch.due, "closed"
    assert document(tmp_path)["steps"] == [3, 6]


def test_accumulation_of_optax_is_not_frozen_and_looked_at_when_it_steps(tmp_path: Path) -> None:
    three = optax.MultiSteps(optax.adamw(3e-4, weight_decay=0.0), 3)
    assert not updated(tmp_path, jnp.float32, transform=three)
    seen = document(tmp_path)
    assert seen["steps"] == [3, 6, 9, 12]
    assert {f.severity for f in stored(tmp_path).findings} == {Severity.OK}


def test_rows_that_weight_decay_alone_moves_are_no_part_of_the_share() -> None:
    """float32 may lose their updates too, and most rows of an embedding are such."""
    updates = np.array([3e-4, -2e-4, 6e-10, 0.0])
    assert watch_jax_loop.meant(updates).tolist() == [True, True, False, False]
    assert watch_jax_loop.meant(updates[2:3]).tolist() == [True], "where it is all that there is"
    assert not watch_jax_loop.meant(np.zeros(3)).any()


def test_a_leaf_without_an_update_is_named(tmp_path: Path) -> None:
    assert not updated(tmp_path, jnp.bfloat16, named=False)
    finding = next(f for f in stored(tmp_path).findings if f.subject == "norm")
    assert finding.message == "not measured: no such leaf in the updates"


def test_an_error_while_a_step_is_traced_does_not_reach_it(tmp_path: Path) -> None:
    reports: list[str] = []
    params = {"w": jnp.ones(4)}
    watch = watch_updates(params, out=tmp_path, every=1, report=reports.append)
    watch.record(watch.sample(params, params, {"w": jnp.ones(2)}))
    watch.record(watch.sample(params, params, {"w": object()}))
    assert len(reports) == 1
    assert "switched itself off" in reports[0]


def watched(frozen: list[float | None]) -> dict[str, Any]:
    """Return what the page shows of a watch of one leaf with these frozen shares."""
    leaf = {"name": "norm", "family": "norms", "dtype": "bfloat16", "shape": [8], "followed": 8}
    series = {"frozen": frozen, "unchanged": frozen, "update": frozen}
    steps = [10 * (i + 1) for i in range(len(frozen))]
    still = bool(frozen[-1] and frozen[-1] > 0.5)
    document = {
        "steps": steps,
        "patience": 3,
        "leaves": [{**leaf, **series, "still": still}],
        "families": {"norms": series},
    }
    manifest = Manifest("watch", "2026-11-25T00:00:00+00:00", stability={"watch": document})
    return watching(Run(manifest, ()))


@pytest.mark.parametrize(
    ("frozen", "since"),
    [
        ([None, 0.0, 0.6, 0.7], 30),
        ([None, 0.9, 0.5, 0.7], 40),
        ([None, 0.9, None, 0.7], 20),
        ([None, 0.9, 0.9, 0.2], None),
    ],
    ids=["once", "again", "a look without it", "no longer"],
)
def test_a_page_says_since_when_a_parameter_stands_still(frozen, since) -> None:
    view = watched(frozen)
    [row] = view["rows"]
    assert row["since"] == since
    assert (f"The first since step {since}." in view["sentence"]) == (since is not None)


def test_a_warning_beside_a_progress_bar_has_a_line_of_its_own(capsys) -> None:
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(total=2, file=sys.stderr, mininterval=0) as bar:
        bar.update()
        to_stderr("the warning")
    text = capsys.readouterr().err
    # The bar is wiped, with a carriage return, before the line.
    assert text[: text.index("the warning")].endswith("\r")
    assert "the warning\n" in text


def test_wrong_arguments_are_refused_before_the_training(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"every=0 must be a whole number of steps"):
        watch_optimizer(optimizer, net.named_parameters(), out=tmp_path, every=0)
    with pytest.raises(ValueError, match=r"expected a torch\.optim\.Optimizer.*got a dict"):
        watch_optimizer({}, net.named_parameters(), out=tmp_path)
    with pytest.raises(ValueError, match="nothing to watch: expected named parameters"):
        watch_optimizer(optimizer, Net().named_parameters(), out=tmp_path)
    with pytest.raises(ValueError, match="nothing to watch in this dict"):
        watch_updates({"count": jnp.arange(3)}, out=tmp_path)
    with pytest.raises(ValueError, match="expected a folder of this machine"):
        watch_updates({"w": jnp.ones(3)}, out="memory://runs")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="expected a folder that can be written"):
        watch_updates({"w": jnp.ones(3)}, out=tmp_path / "file")


class Wrapped:
    """As accelerate wraps an optimiser: hooks on the wrapper would never run."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def test_the_callback_of_transformers_watches_and_warns_once(tmp_path: Path) -> None:
    """The events that `Trainer.train` sends, from the handler that it sends them with."""
    trainer = pytest.importorskip("transformers.trainer_callback")
    net = Net().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=0.0)
    reports: list[str] = []
    callback = trainer_callback(out=tmp_path, every=EVERY, report=reports.append)
    assert isinstance(callback, trainer.TrainerCallback)
    state, control = trainer.TrainerState(), trainer.TrainerControl()
    handler = trainer.CallbackHandler([callback], net, None, Wrapped(optimizer), None)
    handler.on_train_begin(None, state, control)
    for _ in range(STEPS):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    handler.on_train_end(None, state, control)
    assert len(reports) == 1
    assert "norm (bfloat16)" in reports[0]
    assert "torch_narrow" in reports[0]
    assert document(tmp_path)["framework"] == "transformers"
    assert document(tmp_path)["reason"] == ""
    optimizer.step()
    assert document(tmp_path)["total"] == STEPS, "the hook is gone"


def test_an_optimiser_that_cannot_be_watched_does_not_end_the_training(tmp_path: Path) -> None:
    trainer = pytest.importorskip("transformers.trainer_callback")
    reports: list[str] = []
    callback = trainer_callback(out=tmp_path, every=EVERY, report=reports.append)
    handler = trainer.CallbackHandler([callback], Net(), None, object(), None)
    handler.on_train_begin(None, trainer.TrainerState(), trainer.TrainerControl())
    handler.on_train_end(None, trainer.TrainerState(), trainer.TrainerControl())
    assert len(reports) == 1
    assert "nothing is watched" in reports[0]
    assert "The training goes on" in reports[0]


def test_of_a_distributed_training_the_first_process_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in (("is_initialized", True), ("get_rank", 1)):
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    _, watch, reports = trained(tmp_path)
    assert (reports, watch.page, watch.warned, watch.stopped) == ([], None, "", "")
    assert not list(tmp_path.iterdir())


def test_hostile_names_are_data(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script>"
    parameter = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter], lr=3e-4)
    with watch_optimizer(optimizer, [(name, parameter)], out=tmp_path, every=1) as watch:
        for _ in range(5):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert watch.page is not None
    assert "<script>alert" not in watch.page.read_text(encoding="utf-8")
    assert (
        json.loads((watch.page.parent / "run.json").read_text(encoding="utf-8"))["kind"] == "watch"
    )
