"""Digests of a torch training: those of JAX, and the module where two runs part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from stability.repeat import (
    DigestLog,
    compare_logs,
    digest,
    digest_callback,
    digest_steps,
    read_log,
    torch_digest,
)
from stability.repeat import torch_steps as module
from stability.repeat.digests import PART
from tests.helpers import double, skip_unless_computed

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(0)
FLOATS = RNG.normal(size=(3, 5))
DTYPES = (
    *(np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
    *(ml_dtypes.float8_e5m2, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_),
    *(np.complex64, np.complex128),
)


def as_torch(x: np.ndarray) -> Any:
    name = x.dtype.name
    bits = x.view(f"i{x.dtype.itemsize}") if "bfloat" in name or "float8" in name else x
    made = torch.from_numpy(np.array(bits))
    return made if bits is x else made.view(getattr(torch, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("block", [4, 1 << 24])
def test_a_tensor_has_the_digest_of_the_same_array(dtype: Any, block: int, monkeypatch) -> None:
    name = np.dtype(dtype).name
    # XLA may widen formats of 8 bits by way of float16.
    skip_unless_computed(name, *(["float16"] if "float8" in name else []))
    monkeypatch.setattr(module, "_BLOCK", block)
    for x in (FLOATS * 100, FLOATS[0, 0] * 100, np.zeros((0, 3)), -np.zeros(2)):
        x = np.asarray(x).astype(dtype)
        with jax.enable_x64(True):
            expected = np.asarray(digest(jnp.asarray(x))).tolist()
        assert [*torch_digest(as_torch(x))] == [*module._on_device(as_torch(x))] == expected
    assert torch_digest(as_torch(FLOATS.T)) == torch_digest(as_torch(FLOATS.T.copy()))
    assert torch_digest(as_torch(FLOATS.T)) != torch_digest(as_torch(FLOATS.reshape(5, 3)))


def test_positions_count_over_the_end_of_a_part(monkeypatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", PART - 5)
    x = RNG.normal(size=(2 * PART + 7, 2)).astype(np.float32)
    expected = np.asarray(jax.jit(digest)(x)).tolist()
    assert [*torch_digest(as_torch(x))] == [*module._on_device(as_torch(x))] == expected
    rows = np.arange(2 * PART + 7)
    for a, b in ((0, PART // 2), (PART - 1, PART), (3, PART + 3)):
        # Whole parts, neighbours of two parts, and the same position of two parts.
        other = rows.copy()
        other[[a, b]] = b, a
        moved = x[other]
        found = torch_digest(as_torch(moved))
        assert [*found] == np.asarray(jax.jit(digest)(moved)).tolist() != expected


@pytest.mark.parametrize("bits", [torch.int16, torch.int32, torch.int64])
def test_all_nan_are_equal(bits: Any) -> None:
    dtype = {torch.int16: torch.bfloat16, torch.int32: torch.float32, torch.int64: torch.float64}
    nan = torch.full((2,), torch.nan, dtype=dtype[bits])
    payload = (nan.view(bits) + 1).view(dtype[bits])
    assert payload.isnan().all()
    for digest_of in (torch_digest, module._on_device):
        assert digest_of(payload) == digest_of(nan)
        assert digest_of(-torch.zeros(1)) != digest_of(torch.zeros(1))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"])
def test_a_not_a_number_has_one_digest_in_torch_and_jax(name: str) -> None:
    skip_unless_computed(name, *(["float16"] if "float8" in name else []))
    x = torch.full((3,), torch.nan).to(getattr(torch, name))
    found = np.asarray(jax.jit(digest)(jnp.full(3, jnp.nan, name))).tolist()
    assert [*torch_digest(x)] == [*module._on_device(x)] == found


def test_a_conjugate_is_another_tensor() -> None:
    """Torch conjugates and negates lazily."""
    x = torch.tensor([1 + 2j, 3 - 1j])
    for digest_of in (torch_digest, module._on_device):
        assert digest_of(x.conj()) == digest_of(torch.tensor([1 - 2j, 3 + 1j])) != digest_of(x)
        assert digest_of(x.conj().imag) == digest_of(torch.tensor([-2.0, 1.0]))


class Net(torch.nn.Module):
    """Two layers; `twist` changes what the second returns in one call."""

    def __init__(self, twist: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.act = torch.nn.Tanh()
        self.calls, self.twist = 0, twist

    def forward(self, x: Any, *, scale: Any) -> dict[str, Any]:
        self.calls += 1
        hidden = self.act(self.up(x)) * (1 + 2**-20 * (self.calls == self.twist))
        return {"y": (self.down(hidden) * scale,), "kind": "net"}


def trained(
    path: Path,
    *,
    twist: int | None = None,
    rate: float = 0.1,
    passes: int = 1,
    before: Callable[[Any, int], None] = lambda net, step: None,
    **how: Any,
) -> Any:
    net = Net(twist)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    with DigestLog(path) as log, digest_steps(net, optimizer, log, **how):
        for step, x in enumerate(BATCHES):
            before(net, step)
            for turn in range(passes):
                net(x + turn, scale=torch.tensor(2.0))["y"][0].pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    # Without the hooks nothing is written.
    net(BATCHES[0], scale=torch.tensor(2.0))
    optimizer.step()
    return read_log(path)


BATCHES = (torch.arange(48) % 7).float().reshape(3, 4, 4)
PARAMETERS = ("up.weight", "up.bias", "down.weight", "down.bias")
NAMES = (
    *(f"parameter/{name}" for name in PARAMETERS),
    *("input/0", "input/scale", "up", "act", "down", "output.y[0]"),
    *(f"grad/{name}" for name in reversed(PARAMETERS)),
)


def test_a_step_has_its_values_in_the_order_of_computation(tmp_path: Path) -> None:
    log = trained(tmp_path / "a", start=5)
    assert [*log.steps] == [5, 6, 7]
    assert all(tuple(step) == NAMES for step in log.steps.values())
    again = trained(tmp_path / "b", start=5)
    answer = compare_logs(log, again)
    assert answer.equal and answer.whole and answer.values == len(NAMES)


def test_passes_of_one_step_are_numbered(tmp_path: Path) -> None:
    log = trained(tmp_path / "a", passes=3)
    step = log.steps[0]
    assert {"up", "up#2", "up#3", "input/0#3", "output.y[0]#2"} <= step.keys()
    assert "up#4" not in step and "parameter/up.bias#2" not in step and "grad/up.bias#2" not in step


@pytest.mark.parametrize(
    ("changed", "step", "name", "before"),
    [
        ({"twist": 2}, 1, "down", "act"),
        ({"rate": 0.1001}, 1, "parameter/up.weight", ""),
        ({"passes": 2}, 0, "grad/down.bias", "output.y[0]"),
    ],
    ids=["an operation", "an update", "a gradient"],
)
def test_two_runs_part_where_they_differ(tmp_path: Path, changed, step, name, before) -> None:
    answer = compare_logs(trained(tmp_path / "a"), trained(tmp_path / "b", **changed))
    assert not answer.equal and (answer.step, answer.names[0]) == (step, name)
    assert answer.before == before
    assert ("by the update before it" in answer.sentence()) == name.startswith("parameter")


def test_an_evaluation_is_no_part_of_a_step(tmp_path: Path) -> None:
    def evaluate(net: Any, step: int) -> None:
        with torch.no_grad():
            net(torch.ones(2, 4) * step, scale=torch.tensor(1.0))
        # A part of the model alone, with gradients, is no forward pass of the model either.
        net.up(torch.ones(2, 4))

    other = trained(tmp_path / "b", before=evaluate)
    answer = compare_logs(trained(tmp_path / "a"), other)
    assert answer.equal and answer.whole


def test_a_step_without_a_forward_pass_has_parameters_and_gradients(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DigestLog(tmp_path / "a") as log, digest_steps(net, optimizer, log):
        net.up.weight.grad = torch.ones(8, 4)
        optimizer.step()
    [step] = read_log(tmp_path / "a").steps.values()
    assert [*step] == [*(f"parameter/{name}" for name in PARAMETERS), "grad/up.weight"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_compiled_model_is_digested_as_an_eager_one(tmp_path: Path) -> None:
    """A compiler that traced the hooks would trace JAX."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled = torch.compile(net, backend="eager")
    with DigestLog(tmp_path / "b") as log, digest_steps(net, optimizer, log):
        for x in BATCHES:
            compiled(x, scale=torch.tensor(2.0))["y"][0].pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    answer = compare_logs(trained(tmp_path / "a"), read_log(tmp_path / "b"))
    assert answer.equal and answer.whole


@dataclass
class Batch:
    x: Any
    more: Any = None


def fields(value: Any) -> dict[str, Any]:
    steps = module.Steps(torch.nn.Module(), double(DigestLog), 0)
    steps._add("v", value)
    return steps.found


@pytest.mark.filterwarnings("ignore:.*(quantized tensor creation|ComplexHalf):UserWarning")
def test_tensors_are_found_in_containers_and_others_are_left_out() -> None:
    one = torch.ones(2)
    found = fields({"a": [one, (one,)], "b": Batch(one, {"c": one}), "d": 3, "e": None, "f": Batch})
    assert [*found] == ["v.a[0]", "v.a[1][0]", "v.b.x", "v.b.more.c"]
    assert {*found.values()} == {torch_digest(one)}
    others = (
        *(torch.empty(2, device="meta"), torch.quantize_per_tensor(one, 0.1, 0, torch.qint8)),
        *(torch.nn.parameter.UninitializedParameter(), torch.zeros(2, dtype=torch.complex32)),
        torch.eye(2).to_mkldnn(),
    )
    with pytest.warns(UserWarning) as told:
        assert fields([*others, {"a": others[0]}]) == {}
    for index in range(len(others)):
        assert sum(f"v[{index}] has no digest" in str(each.message) for each in told) == 1
    seen = []
    with pytest.warns(UserWarning, match="v has no digest"):
        torch.vmap(lambda row: seen.append(fields(row)) or row)(torch.ones(2, 2))
    assert seen == [{}]
    # Once a name, in however many steps.
    steps = module.Steps(torch.nn.Module(), double(DigestLog), 0)
    with pytest.warns(UserWarning) as told:
        for _ in range(2):
            steps._add("v", others[0])
    assert len(told) == 1


def test_a_sparse_gradient_is_its_indices_and_values(tmp_path: Path) -> None:
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with DigestLog(tmp_path / "a") as log, digest_steps(table, optimizer, log):
        table(torch.tensor([3, 1, 3])).sum().backward()
        optimizer.step()
    [step] = read_log(tmp_path / "a").steps.values()
    assert [*step][-2:] == ["grad/weight.indices", "grad/weight.values"]
    found = fields(table.weight.grad)
    assert found["v.indices"] == torch_digest(torch.tensor([[1, 3]]))
    assert found["v.values"] == torch_digest(torch.tensor([[1.0] * 4, [2.0] * 4]))


def test_copies_of_a_hooked_model_have_no_hooks(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with DigestLog(tmp_path / "a") as log, digest_steps(net, optimizer, log) as steps:
        torch.save(net.up, tmp_path / "up.pt")
        other = copy.deepcopy(net)
        other(BATCHES[0], scale=torch.tensor(2.0))
        assert steps.found == {}


def test_what_cannot_be_hooked_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    net = Net()
    wrapper: Any = SimpleNamespace(optimizer=torch.optim.SGD(net.parameters()))
    with DigestLog(tmp_path / "a") as log:
        refused = pytest.raises(ValueError, match="innermost torch optimiser, received a SimpleN")
        with refused, digest_steps(net, wrapper, log):
            raise AssertionError
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
        lbfgs = torch.optim.LBFGS(net.parameters())
        with digest_steps(net, lbfgs, log), pytest.raises(ValueError, match="with a closure"):
            lbfgs.step(lambda: torch.tensor(0.0))


def test_the_trainer_s_callback_writes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    log = trained(tmp_path / "a", start=7)
    callback = digest_callback(tmp_path / "b", {"commit": "1a2b3c4"})
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))

    def told(event: str, zero: bool = True, number: int = 7) -> None:
        state = SimpleNamespace(global_step=number, is_world_process_zero=zero)
        getattr(callback, event)(None, state, None, model=net, optimizer=wrapped)

    def step(x: Any) -> None:
        net(x, scale=torch.tensor(2.0))["y"][0].pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    told("on_train_begin", zero=False)
    step(torch.zeros(1, 4))
    assert not (tmp_path / "b").exists()
    net.load_state_dict(Net().state_dict())
    # A training that was interrupted has not ended: its hooks go with the next one.
    told("on_train_begin")
    told("on_train_begin")
    for number, x in enumerate(BATCHES, 7):
        told("on_step_begin", number=number)
        if number == 8:
            # A step that was skipped, as by a scaler of gradients: its number is not used up.
            net(x * 2, scale=torch.tensor(1.0))
            told("on_step_begin", number=number)
        step(x)
    told("on_train_end")
    step(torch.zeros(1, 4))
    told("on_train_end")
    found = read_log(tmp_path / "b")
    assert found.steps == log.steps and found.about == {"commit": "1a2b3c4"}
