"""A session of `megalodon-numerics stability` on the files that torch training scripts write."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megalodon_jax.torch_files import read_torch_file
from megalodon_jax.weight_files import open_tensors
from stability.core.parameter_leaves import stored_leaves
from stability.storage import simulate
from tests.helpers import cli


class Tied(torch.nn.Module):
    """A model small enough to be probed in a moment, its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(ids)))


def trained(dtype: torch.dtype = torch.float32, **settings):
    """A model and its optimiser after one step."""
    torch.manual_seed(0)
    model = Tied().to(dtype)
    optimiser = torch.optim.AdamW(model.parameters(), **({"lr": 2e-4} | settings))
    loss = torch.nn.functional.cross_entropy(model(torch.arange(8)).float(), torch.arange(8))
    loss.backward()
    optimiser.step()
    return model, optimiser


def saved(tmp_path: Path, content, name: str = "run.pt", **options) -> Path:
    torch.save(content, tmp_path / name, **options)
    return tmp_path / name


def of(model, optimiser) -> dict:
    return {"model": model.state_dict(), "optimizer": optimiser.state_dict()}


def words(result) -> list[str]:
    """The lines of an answer that is one."""
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.fixture
def still(monkeypatch) -> None:
    """No leaf moves, whatever trains it: what is asked is what a file holds, not what a run does.

    Compiling a run takes seconds, for each rule, shape and storage anew.
    """
    monkeypatch.setattr(simulate, "_runner", lambda *_: partial(_stepped, moves=False))


@pytest.fixture
def moving(monkeypatch) -> None:
    """Every leaf goes the way that was asked for."""
    monkeypatch.setattr(simulate, "_runner", lambda *_: partial(_stepped, moves=True))


def _stepped(rows, *_, lr, steps, burn_in, moves):
    way = np.full(rows.shape, -lr * steps)
    return rows + moves * way, way, np.full(rows.shape, moves)


@pytest.mark.sweep
def test_model_and_optimiser_of_one_file_are_both_audited(tmp_path) -> None:
    # Without decay all leaves run together.
    content = of(*trained(torch.bfloat16, weight_decay=0.0)) | {"epoch": 3, "rng": torch.ones(2)}
    lines = words(cli("stability", saved(tmp_path, content), "--quiet"))
    (taken,) = [line for line in lines if line.startswith("Taken")]
    assert taken == (
        "Taken: model (4 tensors), optimizer (optimiser state of 3); left: epoch, rng."
    )
    assert any(line.startswith("WARNING norm.weight: stored in bfloat16") for line in lines)
    moment = "WARNING optimiser state *.exp_avg_sq (3 leaves): second moment in bfloat16"
    assert any(line.startswith(moment) for line in lines)
    assert any("AdamW(lr=0.0002" in line and "from the optimiser state" in line for line in lines)
    # The head is the embedding once more.
    assert any(line.startswith("3 leaves, 80 parameters") for line in lines)


def test_moments_in_float32_and_a_faster_decay_are_no_finding(tmp_path, moving) -> None:
    """The control: the same file with what is wrong put right."""
    for name, content in (("wide", trained()), ("fast", trained(torch.bfloat16, betas=(0.8, 0.9)))):
        result = cli("stability", saved(tmp_path, of(*content), f"{name}.pt"), "--lr", "0.1")
        assert words(result)[0].startswith("Nothing found"), name


def lightning(model, optimiser) -> dict:
    return {
        "state_dict": {f"net.{n}": x for n, x in model.state_dict().items()},
        "optimizer_states": [optimiser.state_dict()],
        "callbacks": {"EMA": {"weights": torch.ones(3)}},
        "hyper_parameters": {"folder": Path("data"), "namespace": argparse.Namespace(lr=1)},
        "epoch": 1,
    }


def data_parallel(model, optimiser) -> dict:
    return {
        "model_state_dict": {f"module.{n}": x for n, x in model.state_dict().items()},
        "optimizer": optimiser.state_dict(),
        "ema": model.state_dict(),
        "best": np.float64(3.0),
    }


@pytest.mark.parametrize(
    ("content", "name", "taken"),
    [
        (lightning, "last.ckpt", "state_dict (4 tensors), optimizer_states.0 (optimiser state of"),
        (data_parallel, "run.pt", "model_state_dict (4 tensors), optimizer (optimiser state of 3)"),
    ],
)
def test_checkpoints_of_other_scripts_are_walked_for_their_parts(
    tmp_path, content, name, taken, still
) -> None:
    path = saved(tmp_path, content(*trained()), name)
    result = cli("stability", path, "--lr", "0.1")
    assert any(line.startswith(f"Taken: {taken}") for line in words(result))
    left = {"lightning": "callbacks", "data_parallel": "ema (4 tensors)"}[content.__name__]
    assert left in result.stdout.split("left: ")[1]
    names = {"lightning": "net.norm.weight", "data_parallel": "norm.weight"}[content.__name__]
    assert names in read_torch_file(path).tensors


def test_wrappers_of_wrappers_are_taken_off(tmp_path) -> None:
    names = {f"module._orig_mod.{n}": x for n, x in Tied().state_dict().items()}
    tensors = read_torch_file(saved(tmp_path, {"model": names})).tensors
    assert list(tensors) == list(Tied().state_dict())


def test_halves_of_a_fused_matrix_are_two_parameters(tmp_path) -> None:
    fused = torch.randn(4, 2)
    content = {"q.weight": fused[:2], "k.weight": fused[2:], "tied.weight": fused[:2]}
    leaves = stored_leaves(read_torch_file(saved(tmp_path, content)).tensors)
    assert list(leaves) == ["q.weight", "k.weight"]


def trainers_folder(tmp_path: Path) -> Path:
    """What the Trainer writes of a model whose norm has a weight and a bias of one shape."""
    model, optimiser = trained(torch.bfloat16)
    folder = tmp_path / "checkpoint-100"
    folder.mkdir()
    tensors = {n: x.clone() for n, x in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    saved(folder, optimiser.state_dict(), "optimizer.pt")
    saved(folder, {"last_epoch": 1}, "scheduler.pt")
    return folder


ORDER = ["embed.weight", "norm.weight", "norm.bias"]


@pytest.mark.parametrize("text", [json.dumps(ORDER), "\n".join(ORDER)], ids=["json", "lines"])
def test_a_folder_of_the_trainer_gives_weights_and_moments(tmp_path, text, still) -> None:
    folder, order = trainers_folder(tmp_path), tmp_path / "order"
    order.write_text(text, encoding="utf-8")
    result = cli("stability", folder, "--order", order)
    assert "Taken: model.safetensors (4 tensors), optimizer.pt (optimiser state" in result.stdout
    assert "Moments of optimizer.pt are given to parameters in the order given." in result.stdout
    assert "Stored twice, one parameter: head.weight is embed.weight." in result.stdout
    assert "WARNING optimiser state *.exp_avg_sq" in result.stdout
    assert "gradients as in the optimiser state" in result.stdout
    assert "not used" not in result.output
    answer = cli("stability", folder, "--order", order, "--json", "--quiet").stdout
    assert json.loads(answer)["optimiser_states"] == [
        {"place": "optimizer.pt", "parameters": 3, "identified": "in the order given", "unused": ""}
    ]


def test_moments_that_could_be_another_parameters_are_refused(tmp_path, still) -> None:
    folder = trainers_folder(tmp_path)
    result = cli("stability", folder)
    assert result.exit_code == 2
    for part in ("optimizer.pt: its parameters are numbered", "norm.bias, norm.weight", "--order",
                 "no config.json"):  # fmt: skip
        assert part in result.output
    # The ways out that it names: the weights alone, or gradients that come from elsewhere.
    alone = cli("stability", folder / "model.safetensors", "--quiet")
    assert "all gradients taken to be alike" in alone.stdout
    text = SCRIPT.replace('torch.load({path!r})["model"]', "load_file({path!r})")
    text = "from safetensors.torch import load_file\n" + text
    file = script(tmp_path, folder / "model.safetensors", text=text)
    result = cli("stability", folder, "--gradients", file, "--json")
    [state] = json.loads(result.stdout)["optimiser_states"]
    assert state["unused"].startswith("gradients as my_gradients.py gave them")
    assert "optimizer.pt: state of 3 parameters not used: gradients as my_grad" in result.stderr


def test_a_state_that_is_not_used_is_named_with_the_reason(tmp_path, still) -> None:
    _, optimiser = trained()
    state = optimiser.state_dict()
    del state["state"][2]
    content = {"model": torch.nn.Linear(5, 5).state_dict(), "optimizer": state}
    result = cli("stability", saved(tmp_path, content))
    told = (
        "optimizer: state of 2 parameters not used: the shapes of its 3 numbered parameters are "
        "not those of the model's 2"
    )
    assert told in result.stderr
    [taken] = [line for line in words(result) if line.startswith("Taken")]
    assert taken.endswith(f"left: none; {told}.")
    assert "all gradients taken to be alike" in result.stdout
    # One without second moments says so: they are what the sizes of gradients are taken from.
    model = Tied()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.arange(8)).sum().backward()
    sgd.step()
    answer = cli("stability", saved(tmp_path, of(model, sgd)), "--quiet").stdout
    assert "state of 3 parameters not used: no finite first and second moments of embed" in answer


def test_a_parameter_without_a_state_is_taken_not_to_be_trained(tmp_path, still) -> None:
    model, optimiser = trained()
    del optimiser.state[model.norm.bias]
    answer = cli("stability", saved(tmp_path, of(model, optimiser)), "--quiet").stdout
    assert "gradients as in the optimiser state" in answer
    assert "Assumed untrained, since they have no optimiser state: norm.bias." in answer


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1, 2]", "holds no names: expected a JSON list"),
        ('["a"', "is not readable JSON"),
        ("", "holds no names"),
        ("a\nb", "the order names 2 parameters, but the optimiser state has 3"),
        (None, "no file"),
    ],
)
def test_a_file_without_the_order_is_refused(tmp_path, text, told) -> None:
    order = tmp_path / "order.json"
    if text is not None:
        order.write_text(text, encoding="utf-8")
    result = cli("stability", trainers_folder(tmp_path), "--order", order)
    assert result.exit_code == 2
    assert told in result.output


def test_an_order_without_a_state_is_refused(tmp_path) -> None:
    order = tmp_path / "order.json"
    order.write_text('["norm.weight"]', encoding="utf-8")
    path = saved(tmp_path, {"norm.weight": torch.ones(8)})
    result = cli("stability", path, "--order", order)
    assert result.exit_code == 2
    assert "but the checkpoint has no optimiser state" in result.output


@pytest.mark.parametrize(
    ("write", "tensors", "told"),
    [
        (save_file, {}, "holds no tensor"),
        (torch.save, {}, "holds no state dict but nothing"),
        (save_file, {"w": torch.arange(5)}, "found one tensor of integers, w (int64)"),
        (torch.save, {"w": torch.arange(5)}, "w (one tensor, no floating-point parameter)"),
        (save_file, {"w": torch.full((2,), torch.nan)}, "no finite value in 1 tensors"),
    ],
)
def test_a_file_without_parameters_says_what_it_holds(tmp_path, write, tensors, told) -> None:
    path = tmp_path / ("file.safetensors" if write is save_file else "file.pt")
    write(tensors, path)
    result = cli("stability", path)
    assert result.exit_code == 2
    assert told in result.output
    assert "optimiser state" not in result.output


def test_the_one_file_of_a_folder_is_taken_and_several_are_named(tmp_path, still) -> None:
    save_file({"norm.weight": torch.ones(8)}, tmp_path / "my_weights_v2.safetensors")
    assert cli("stability", tmp_path, "--quiet").stdout.startswith("WARNING norm.weight")
    save_file({"norm.weight": torch.ones(8)}, tmp_path / "other.safetensors")
    result = cli("stability", tmp_path)
    assert result.exit_code == 2
    assert "name one of my_weights_v2.safetensors, other.safetensors" in result.output


def test_an_optimiser_alone_is_audited_alone(tmp_path) -> None:
    path = saved(tmp_path, trained(torch.bfloat16)[1].state_dict(), "optimizer.pt")
    result = cli("stability", path, "--quiet")
    assert result.stdout.startswith("WARNING optimiser state *.exp_avg_sq")
    assert "No parameters here" in result.stdout


def test_squares_that_underflow_and_moments_that_are_not_finite_are_errors(tmp_path, still) -> None:
    model, optimiser = trained()
    kept = optimiser.state[model.norm.weight]
    kept["exp_avg_sq"].zero_()
    result = cli("stability", saved(tmp_path, of(model, optimiser)), "--quiet")
    assert result.exit_code == 1
    assert "100% of the elements with a first moment have a second moment of 0" in result.stdout
    kept["exp_avg_sq"].fill_(torch.nan)
    result = cli("stability", saved(tmp_path, of(model, optimiser)), "--quiet")
    assert result.exit_code == 1
    assert "8 of 8 values are NaN or infinite" in result.stdout


def test_what_trained_it_can_be_said_better_than_the_file_does(tmp_path, still) -> None:
    path = saved(tmp_path, of(*trained()))
    result = cli("stability", path, "--weight-decay", "0.3", "--betas", "0.8", "0.9", "--quiet")
    settings = "AdamW(lr=0.0002, beta2=0.9, weight_decay=0.3, beta1=0.8, eps=1e-08)"
    assert f"{settings}, from the optimiser state, except beta1, beta2, weight" in result.stdout
    result = cli("stability", path, "--optimiser", "sgd", "--weight-decay", "0.3")
    assert result.exit_code == 2
    assert "sgd has no setting weight_decay" in result.output


@pytest.mark.parametrize("write", [save_file, torch.save], ids=["safetensors", "torch"])
def test_float8_is_read_and_what_no_optimiser_moves_is_named(tmp_path, write, still) -> None:
    tensors = {
        "norm.weight": torch.ones(8).to(torch.float8_e4m3fn),
        "fc.weight": torch.full((4, 4), 0.5).to(torch.float8_e5m2),
        "rope.freqs": torch.ones(4, dtype=torch.complex64),
        "bn.running_mean": torch.ones(4),
        "steps": torch.ones(2, dtype=torch.int64),
    }
    path = tmp_path / "small.safetensors" if write is save_file else tmp_path / "small.pt"
    write(tensors, path)
    result = cli("stability", path, "--format", "float8_e4m3fn", "--quiet")
    assert any(line.startswith("2 leaves, 24 parameters") for line in words(result))
    (left,) = [line for line in words(result) if line.startswith("Not probed")]
    for part in ("complex64 (rope.freqs)", "buffers (bn.running_mean)", "int64 (steps)"):
        assert part in left


class Runs:
    """What a pickle should never do here."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def whole(path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), path)


def whole_of_old(path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), path, _use_new_zipfile_serialization=False)


def cut(path: Path) -> None:
    torch.save({"weight": torch.ones(64)}, path)
    path.write_bytes(path.read_bytes()[:-100])


def cut_of_old(path: Path) -> None:
    torch.save({"weight": torch.ones(64)}, path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-100])


def newer(path: Path) -> None:
    torch.save({"weight": torch.ones(64)}, path, pickle_protocol=4)


def float8_of_old(path: Path) -> None:
    torch.save({"weight": torch.ones(64).to(torch.float8_e5m2)}, path,
               _use_new_zipfile_serialization=False)  # fmt: skip


def damaged(path: Path) -> None:
    torch.save({"weight": torch.ones(64)}, path)
    content = bytearray(path.read_bytes())
    start = content.index(b"data.pkl") + len(b"data.pkl")
    content[start : start + 60] = b"x" * 60
    path.write_bytes(content)


def without_values(path: Path) -> None:
    torch.save({"m\n.weight": torch.empty(4, 4, device="meta")}, path)


def text(path: Path) -> None:
    path.write_text("hello", encoding="utf-8")


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def archive(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, weight=np.ones(3))


def harmful(path: Path) -> None:
    torch.save(
        {"model": torch.nn.Linear(2, 2).state_dict(), "x": Runs(path.with_name("ran"))}, path
    )


def no_weights(path: Path) -> None:
    torch.save({"epoch": 3, "lr": 0.1}, path)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (whole, "holds a pickled object (torch.nn.modules.linear.Linear"),
        (whole_of_old, "it would run torch.nn.modules.linear.Linear, which is not done"),
        (cut, "is cut off"),
        (cut_of_old, "is cut off or damaged"),
        (newer, "pickled with a newer protocol than 2, the one that torch reads"),
        (float8_of_old, "cannot store float8: torch itself cannot read it"),
        (damaged, "is not readable as tensors: it is damaged"),
        (without_values, "m\\n.weight cannot be read: a tensor of shape (4, 4)"),
        (text, "is not a checkpoint: expected a safetensors file, or a torch file"),
        (nothing, "is empty"),
        (archive, "is a NumPy archive (.npz), not a checkpoint"),
        (harmful, "would run"),
        (no_weights, "holds no state dict but epoch, lr; save model.state_dict()"),
    ],
)
def test_what_is_no_checkpoint_is_refused_in_words_of_our_own(tmp_path, write, said) -> None:
    path = tmp_path / "file.pt"
    write(path)
    result = cli("stability", path)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
    # Torch's advice is to switch its protection off.
    assert "weights_only" not in result.output
    assert "safe_globals" not in result.output
    assert not (tmp_path / "ran").exists()


def test_the_control_does_run_where_the_protection_is_off(tmp_path) -> None:
    harmful(tmp_path / "file.pt")
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert (tmp_path / "ran").exists()


def test_names_reach_the_terminal_without_their_escapes(tmp_path, still) -> None:
    path = tmp_path / "small.safetensors"
    save_file({"norm\x1b[31m.weight\n2": torch.ones(8)}, path)
    result = cli("stability", path)
    assert "WARNING norm\\x1b[31m.weight\\n2: " in result.stdout
    assert "\x1b" not in result.output
    found = json.loads(cli("stability", path, "--json", "--quiet").stdout)["findings"]
    assert "norm\\x1b[31m.weight\\n2" in {f["subject"] for f in found}


def test_an_old_file_of_torch_is_read(tmp_path, still) -> None:
    path = saved(tmp_path, of(*trained(torch.bfloat16)), _use_new_zipfile_serialization=False)
    assert (
        "Taken: model (4 tensors), optimizer (optimiser state of 3)"
        in cli("stability", path, "--quiet").stdout
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_float8_without_a_negative_zero_is_read_as_it_was_written(tmp_path, dtype) -> None:
    tensor = torch.tensor([[0.5, -2.0], [0.0, 240.0]]).to(dtype)
    save_file({"fc.weight": tensor, "other": torch.ones(3)}, tmp_path / "small.safetensors")
    read = open_tensors(tmp_path / "small.safetensors")["fc.weight"].read()
    assert np.array_equal(np.asarray(read, np.float32), tensor.float().numpy())


SCRIPT = """
import torch
from beside import Tied

def gradients():
    model = Tied()
    model.load_state_dict(torch.load({path!r})["model"])
    for seed in range({batches}):
        ids = torch.randint(0, 8, (6,), generator=torch.Generator().manual_seed(seed))
        yield model, torch.nn.functional.cross_entropy(model(ids), ids)
"""


def script(tmp_path: Path, path: Path, batches: int = 3, text: str = SCRIPT) -> Path:
    (tmp_path / "beside.py").write_text(
        "import sys\nTied = sys.modules['" + __name__ + "'].Tied\n", encoding="utf-8"
    )
    file = tmp_path / "my_gradients.py"
    file.write_text(text.format(path=str(path), batches=batches), encoding="utf-8")
    return file


def test_a_script_of_ten_lines_gives_the_gradients_of_the_run(tmp_path, still) -> None:
    path = saved(tmp_path, of(*trained()))
    result = cli("stability", path, "--gradients", script(tmp_path, path))
    assert any("gradients as my_gradients.py gave them in 3 batches" in x for x in words(result))
    assert "taking gradients from" in result.stderr
    # Without one the state says what gradients are, and without a state nothing does.
    assert "gradients as in the optimiser state" in cli("stability", path, "--quiet").stdout
    path = saved(tmp_path, {"norm.weight": torch.ones(8)})
    result = cli("stability", path, "--quiet", "--schedule", "cosine:warmup=5,steps=50")
    assert any("all gradients taken to be alike; cosine rate, 50 steps, 5 of warmup" in x
               for x in words(result))  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SCRIPT.replace("gradients", "gradient"), "has no function `gradients`"),
        (SCRIPT.replace("range({batches})", "range(0)"), "my_gradients.py: no batch"),
        (SCRIPT.replace("yield model, ", "yield "), "batch 1 is a Tensor: expected gradients by"),
        (SCRIPT.replace("model(ids), ids)", "model(ids), seed)"), "yield model, torch.nn.func"),
        (SCRIPT.replace("(6,)", "(6"), "SyntaxError"),
    ],
)
def test_a_script_that_gives_no_gradients_is_told_what_was_expected(
    tmp_path, still, text, told
) -> None:
    path = saved(tmp_path, of(*trained()))
    result = cli("stability", path, "--gradients", script(tmp_path, path, text=text), "--quiet")
    assert result.exit_code == 2, result.output
    assert told in result.output
    assert "internal error" not in result.output
    assert "known_gradients.py" not in result.output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--schedule", "cosine:steps=ten"], "'ten' is no number"),
        (["--gradients", "nowhere.py"], "nowhere.py does not exist"),
        (["--gradients", "a.py", "--text", "b.txt"], "leave --gradients out"),
        (["--order", "names.json", "--text", "b.txt"], "leave --order out"),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_file_is_probed(
    tmp_path, options, told
) -> None:
    path = saved(tmp_path, {"norm.weight": torch.ones(8)})
    result = cli("stability", path, *options)
    assert result.exit_code == 2
    assert told in result.output
    assert "training samples" not in result.output


def test_a_terminal_sees_how_far_it_is(tmp_path, monkeypatch, still) -> None:
    from reports.cli import console

    path, steps = saved(tmp_path, {"norm.weight": torch.ones(8)}), []
    monkeypatch.setattr(
        console.Progress, "step", lambda self, done, planned: steps.append((done, planned))
    )
    words(cli("stability", path))
    assert steps[0][0] == 1
    assert steps[-1][0] == steps[-1][1]
    assert len({planned for _, planned in steps}) == 1
