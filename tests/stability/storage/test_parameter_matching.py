"""Numbered optimiser states: given to a parameter where one assignment fits, refused elsewhere."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from stability.core.checkpoint_files import open_checkpoint
from stability.core.parameter_leaves import Leaf, leaves_of
from stability.storage.known_gradients import measured
from stability.storage.parameter_matching import Slot, match
from stability.storage.torch_state import (
    ASSUMED,
    OF_ARCHITECTURE,
    OF_FILE,
    ParameterOrder,
    TorchState,
    exchanged,
    read_state,
    read_states,
    trained_by,
)


class Pair(torch.nn.Module):
    """Two matrices of one shape, whose names sort in another order than the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 8, bias=False)
        self.down = torch.nn.Linear(8, 8, bias=False)
        self.norm = torch.nn.RMSNorm(8)


def trainers(model: torch.nn.Module, decay: float = 0.1, **settings: Any) -> torch.optim.AdamW:
    """Return an optimiser with the two groups of transformers' Trainer."""
    named = dict(model.named_parameters())
    kept = {n for n in named if "norm" in n or "bias" in n}
    groups = [
        {"params": [p for n, p in named.items() if n not in kept], "weight_decay": decay},
        {"params": [p for n, p in named.items() if n in kept], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], **settings)


def stepped(model: torch.nn.Module, optimizer: Any, gradients: dict[str, float] | None = None):
    """Take one step; each parameter's gradient has a size of its own."""
    for i, (name, parameter) in enumerate(model.named_parameters()):
        size = 2.0**-i if gradients is None else gradients.get(name, 1.0)
        parameter.grad = torch.full_like(parameter, size)
    optimizer.step()
    return optimizer


def folder_of(tmp_path: Path, model: torch.nn.Module, optimizer: Any) -> Path:
    """Write what the Trainer writes."""
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(tmp_path)
    else:
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path


def read(folder: Path, names: list[str] | None = None) -> TorchState:
    files = open_checkpoint(folder)
    order = ParameterOrder(files.ordered, names, files.folder)
    return read_states(files.states, files.leaves, order)[0]


def own(state: TorchState, model: torch.nn.Module, optimizer: Any) -> bool:
    """Whether every parameter has its own moments."""
    return all(
        torch.equal(state.moments[n]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"])
        for n, p in model.named_parameters()
    )


GRADIENTS = {"up.weight": 1.0, "down.weight": 1e-3}


def test_equal_matrices_in_a_file_that_is_sorted_by_name_are_refused(tmp_path) -> None:
    model = Pair()
    optimizer = stepped(model, trainers(model), GRADIENTS)
    state = read(folder_of(tmp_path, model, optimizer))
    assert state.ambiguous == ("down.weight", "up.weight")
    assert {"down.weight", "up.weight"} & set(state.moments) == set()
    # The norm is the one parameter of its shape, so its moments are certain.
    assert "norm.weight" in state.moments
    with pytest.raises(ValueError, match="could have the moments of another") as refused:
        state.check_settled()
    for part in ("down.weight, up.weight", "safetensors sorts by name", "no config.json", "--order",
                 "for g in optimizer.param_groups"):  # fmt: skip
        assert part in str(refused.value)
    # The danger: taken as the module's, the file's order exchanges the two without a word.
    swapped = read_state("optimizer.pt", optimizer.state_dict(), open_checkpoint(tmp_path).leaves)
    assert swapped.matched
    assert not own(swapped, model, optimizer)


def test_measured_gradients_tell_that_moments_are_exchanged(tmp_path) -> None:
    model = Pair()
    optimizer = stepped(model, trainers(model), GRADIENTS)
    leaves = leaves_of(model.state_dict())
    batch = {n: torch.full_like(p, GRADIENTS.get(n, 1.0)) for n, p in model.named_parameters()}
    known = measured([batch], leaves, "a test", 0.3).rows
    right = ["up.weight", "down.weight", "norm.weight"]
    wrong = ["down.weight", "up.weight", "norm.weight"]
    for names, told in ((right, []), (wrong, ["down.weight and up.weight"])):
        order = ParameterOrder(names=names)
        state = read_state("optimizer", optimizer.state_dict(), leaves, order)
        assert exchanged(state, leaves, known) == told


def named_in_state(model: torch.nn.Module, tmp_path: Path) -> TorchState:
    optimizer = torch.optim.AdamW(model.named_parameters())
    return read(folder_of(tmp_path, model, stepped(model, optimizer, GRADIENTS)))


def named_by_the_user(model: torch.nn.Module, tmp_path: Path) -> TorchState:
    optimizer = stepped(model, trainers(model), GRADIENTS)
    names = {p: n for n, p in model.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    return read(folder_of(tmp_path, model, optimizer), order)


def in_a_torch_file(model: torch.nn.Module, tmp_path: Path) -> TorchState:
    optimizer = stepped(model, trainers(model), GRADIENTS)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    return read(tmp_path)


def in_an_index(model: torch.nn.Module, tmp_path: Path) -> TorchState:
    folder = folder_of(tmp_path, model, stepped(model, trainers(model), GRADIENTS))
    shard = "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(folder / shard)
    index = {"weight_map": dict.fromkeys(model.state_dict(), shard)}
    text = json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return read(folder)


@pytest.mark.parametrize(
    ("settled", "how"),
    [
        (named_in_state, "by the names in it"),
        (named_by_the_user, "in the order given"),
        (in_a_torch_file, OF_FILE + ASSUMED),
        (in_an_index, OF_FILE + ASSUMED),
    ],
)
def test_what_settles_the_order_gives_each_its_own_moments(tmp_path, settled, how) -> None:
    state = settled(Pair(), tmp_path)
    assert state.identified == how
    state.check_settled()
    for name, size in GRADIENTS.items():
        # After one step a second moment is 0.001 of the square of the gradient.
        kept = state.moments[name]["exp_avg_sq"]
        assert torch.unique(kept).tolist() == pytest.approx([1e-3 * size**2])


def test_an_index_that_transformers_sorted_settles_nothing(tmp_path) -> None:
    in_an_index(Pair(), tmp_path)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(index, sort_keys=True), encoding="utf-8")
    assert read(tmp_path).ambiguous == ("down.weight", "up.weight")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def llama(request) -> Any:
    """Two layers with square q, k, v and o, gate and up alike, the head tied or like the table."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=request.param,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_the_architecture_in_config_json_orders_what_safetensors_sorted(tmp_path, llama) -> None:
    optimizer = stepped(llama, trainers(llama))
    folder = folder_of(tmp_path, llama, optimizer)
    state = read(folder)
    # The architecture's order is a guess too: an optimiser may have been given any.
    assert state.identified == OF_ARCHITECTURE + ASSUMED
    assert own(state, llama, optimizer)
    # A model that is built by code of its own may be ordered otherwise.
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own_code = config | {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
    (folder / "config.json").write_text(json.dumps(own_code), encoding="utf-8")
    assert read(folder).ambiguous
    # Without it every kind of the file that has a twin is ambiguous, and said to be.
    (folder / "config.json").unlink()
    state = read(folder)
    ends = {name.split(".")[-2] for name in state.ambiguous}
    assert ends >= {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "norm"}
    assert ("lm_head" in ends) == (not llama.config.tie_word_embeddings)


@pytest.mark.parametrize("llama", [True], indirect=True, ids=["tied"])
def test_an_architecture_whose_tied_head_is_stored_twice_is_ordered_too(tmp_path, llama) -> None:
    optimizer = stepped(llama, trainers(llama))
    folder = folder_of(tmp_path, llama, optimizer)
    # Names sort so that the head comes first and the table counts as its copy.
    tensors = {n: x.detach().clone() for n, x in llama.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    state = read(folder)
    assert state.copies == {"model.embed_tokens.weight": "lm_head.weight"}
    state.moments["model.embed_tokens.weight"] = state.moments["lm_head.weight"]
    assert own(state, llama, optimizer)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"architectures": ["Nothing"]}, "has no Nothing"),
        ({"architectures": ["LlamaConfig"]}, "has no LlamaConfig"),
        ({"architectures": None}, "names no architecture"),
        ({"num_hidden_layers": 3}, "which the checkpoint does not have"),
        ({"hidden_size": "wide"}, "cannot build LlamaForCausalLM"),
    ],
)
def test_a_config_of_another_model_settles_nothing_and_says_why(
    tmp_path, llama, changed, told
) -> None:
    folder = folder_of(tmp_path, llama, stepped(llama, trainers(llama)))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    state = read(folder)
    assert state.ambiguous
    assert told in state.problem


def test_a_tied_matrix_that_is_stored_twice_is_one_parameter(tmp_path) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(8, 4), "fc": torch.nn.Linear(4, 8)})
    model["head"] = torch.nn.Linear(4, 8, bias=False)
    model["head"].weight = model["table"].weight
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    tensors = {n: x.clone() for n, x in model.state_dict().items()}
    state = read_state("optimizer", optimizer.state_dict(), leaves_of(tensors))
    assert state.copies == {"head.weight": "table.weight"}
    assert own(state, model, optimizer)
    # The control: a head with values of its own was trained or not, and nothing tells which.
    tensors["head.weight"] = tensors["head.weight"] + 1
    unsorted = ParameterOrder(stored=False)
    state = read_state("optimizer", optimizer.state_dict(), leaves_of(tensors), unsorted)
    assert not state.copies
    assert "head.weight" in state.ambiguous


def test_vectors_that_decay_are_told_from_biases_by_the_groups_of_the_trainer() -> None:
    model = torch.nn.Module()
    model.gamma = torch.nn.Parameter(torch.ones(4))
    model.norm = torch.nn.RMSNorm(4)
    model.fc = torch.nn.Linear(4, 4)
    optimizer = stepped(model, trainers(model))
    state = read_state("optimizer", optimizer.state_dict(), leaves_of(model.state_dict()))
    assert own(state, model, optimizer)
    # The control: the same groups under names that say nothing fit in several ways.
    names = {"gamma": "a", "norm.weight": "b", "fc.weight": "c", "fc.bias": "d"}
    renamed = {names[n]: x for n, x in model.state_dict().items()}
    state = read_state("optimizer", optimizer.state_dict(), leaves_of(renamed))
    assert state.ambiguous == ("a", "b")


def test_frozen_parameters_are_left_out_where_shapes_tell_which() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)
    )
    for trained, ambiguous in (((0, 1, 2), False), ((0, 1, 3), True)):
        parameters = [p for i in trained for p in model[i].parameters()]
        optimizer = torch.optim.AdamW(parameters)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        state = read_state("optimizer", optimizer.state_dict(), leaves_of(model.state_dict()))
        # Of the two in the middle either may have been the frozen one.
        assert bool(state.ambiguous) == ambiguous
        assert {n for n in state.ambiguous if n.endswith("weight")} <= {"1.weight", "2.weight"}


def test_two_optimisers_share_the_parameters_of_one_model() -> None:
    model = Pair()
    first = stepped(model, torch.optim.SGD([model.up.weight, model.down.weight], 1, 0.9))
    second = stepped(model, torch.optim.AdamW([model.norm.weight]))
    states = {"first": first.state_dict(), "second": second.state_dict()}
    read_both = read_states(states, leaves_of(model.state_dict()))
    assert [set(each.moments) for each in read_both] == [
        {"up.weight", "down.weight"},
        {"norm.weight"},
    ]
    assert torch.equal(
        read_both[0].moments["down.weight"]["momentum_buffer"],
        first.state[model.down.weight]["momentum_buffer"],
    )


def test_two_snapshots_of_one_optimiser_are_read_one_by_one() -> None:
    """Together they have twice as many entries as the model has parameters."""
    model = Pair()
    optimizer = stepped(model, torch.optim.SGD(model.parameters(), 1, 0.9))
    early = copy.deepcopy(optimizer.state_dict())
    late = stepped(model, optimizer).state_dict()
    leaves = leaves_of(model.state_dict())
    order = ParameterOrder(stored=True)
    for states in ({"early": early, "late": late}, {"late": late, "early": early}):
        both = dict(zip(states, read_states(states, leaves, order), strict=True))
        for name, state in states.items():
            for number, parameter in enumerate(model.state_dict()):
                moments = both[name].moments[parameter]["momentum_buffer"]
                assert torch.equal(moments, state["state"][number]["momentum_buffer"])


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["up.weight", "down.weight"], "names 2 parameters, but the optimiser state has 3"),
        (
            ["up.weight", "down.weight", "fc.weight"],
            "names fc.weight as parameter 2, which the model does not have",
        ),
        (
            ["up.weight", "up.weight", "norm.weight"],
            "names up.weight as parameter 1, which the model does not have",
        ),
        (["up.weight", "norm.weight", "down.weight"], "whose moments have shape (8, 8)"),
    ],
)
def test_an_order_that_cannot_be_is_refused(names, told) -> None:
    model = Pair()
    state = stepped(model, trainers(model)).state_dict()
    with pytest.raises(ValueError, match="the order names") as refused:
        read_state("optimizer", state, leaves_of(model.state_dict()), ParameterOrder(names=names))
    assert told in str(refused.value)
    assert "for g in optimizer.param_groups" in str(refused.value)


def test_states_of_another_model_belong_to_no_parameter() -> None:
    model, other = Pair(), torch.nn.Linear(5, 5)
    state = stepped(other, torch.optim.AdamW(other.parameters())).state_dict()
    found = read_state("optimizer", state, leaves_of(model.state_dict()))
    assert not found.matched
    assert found.problem == (
        "the shapes of its 2 numbered parameters are not those of the model's 3"
    )
    assert set(found.moments) == {"parameter 0", "parameter 1"}
    # Its rate and decay are another training's as well: they set every number of a diagnosis.
    state["param_groups"][0] |= {"lr": 0.125, "weight_decay": 0.25}
    rule, whose = trained_by([read_state("optimizer", state, leaves_of(model.state_dict()))])
    assert rule.lr != 0.125 and "optimizer is the state of another model" in whose
    # Negative control: the same state of the model that it trained, and one of unknown order.
    for leaves in (
        leaves_of(other.state_dict()),
        leaves_of({"b": torch.ones(5), "w": torch.ones(5, 5)}),
    ):
        rule, whose = trained_by([read_state("optimizer", state, leaves)])
        assert (rule.lr, whose) == (0.125, "from the optimiser state")
    # Moments by row and column are not those of a vector of either's size.
    of_rows = {"exp_avg_sq_row": torch.ones(8), "exp_avg_sq_col": torch.ones(4)}
    groups = [{"params": [0]}]
    leaves = leaves_of({"norm.weight": torch.ones(8)})
    assert not read_state("o", {"state": {0: of_rows}, "param_groups": groups}, leaves).matched


SHAPES = ((), (2,), (2, 2))


@given(
    leaves=st.lists(st.sampled_from(SHAPES), max_size=5),
    groups=st.lists(st.lists(st.sampled_from((*SHAPES, None)), max_size=3), max_size=2),
    ordered=st.booleans(),
)
def test_what_is_certain_is_what_all_assignments_have_in_common(leaves, groups, ordered) -> None:
    """Every assignment is tried: of a state to a parameter, in order inside a group or in any."""
    named = [Leaf(f"p{i}", shape, "float32", np.zeros) for i, shape in enumerate(leaves)]
    slots = [
        [Slot((g, i), shape) for i, shape in enumerate(group)] for g, group in enumerate(groups)
    ]
    flat = [slot for group in slots for slot in group]
    fitting = []
    for chosen in itertools.permutations(range(len(named)), len(flat)):
        pairs = list(zip(flat, chosen, strict=True))
        in_order = all(
            a < b for (s, a), (t, b) in itertools.pairwise(pairs) if s.key[0] == t.key[0]
        )
        if all(s.fits(named[i]) for s, i in pairs) and (in_order or not ordered):
            fitting.append({named[i].name: s.key for s, i in pairs if s.shape is not None})
    found = match(slots, named, ordered)
    if not fitting:
        assert found is None
        return
    assert found is not None
    options = {leaf.name: {each.get(leaf.name) for each in fitting} for leaf in named}
    assert found.ambiguous == tuple(n for n, keys in options.items() if len(keys) > 1)
    certain = {n: key for n, (key, *rest) in options.items() if key is not None and not rest}
    assert found.keys == certain
