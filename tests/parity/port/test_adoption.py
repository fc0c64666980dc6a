"""Parameters converted for a port: proposed, tested, corrected, and asked about."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from parity import FunctionSide, Port, PortError, adopt
from parity.port import answers, construction_search
from parity.port.adoption import Adoption
from parity.port.answers import AnswerError
from parity.sides import Side
from tests.helpers import ROOT, cli

D = 6
X = np.random.default_rng(1).normal(size=(5, D)).astype(np.float32)


def dense(x: Any, layer: Mapping[str, Any]) -> Any:
    return x @ layer["kernel"] + layer["bias"]


def original(p: Any, x: Any) -> Any:
    """Attention and a norm, with (in, out) kernels."""
    q, k, v = (checkpoint_name(dense(x, p[name]), name) for name in ("query", "key", "value"))
    mixed = checkpoint_name(jax.nn.softmax(q @ k.T) @ v, "mixed")
    y = dense(mixed, p["out"])
    return y * p["norm"]["scale"] + p["norm"]["bias"]


def renamed(p: Any, x: Any) -> Any:
    """The same under other names: the query is in `wk` and the key in `wq`, and `out` is stored
    (out, in)."""
    q, k, v = (checkpoint_name(dense(x, p[name]), name) for name in ("wk", "wq", "wv"))
    mixed = checkpoint_name(jax.nn.softmax(q @ k.T) @ v, "mixed")
    y = mixed @ p["out"]["kernel"].T + p["out"]["bias"]
    return y * p["norm"]["scale"] + p["norm"]["bias"]


def fused(p: Any, x: Any) -> Any:
    """The same with the value, key and query in one matrix, in this order."""
    v, k, q = jnp.split(dense(x, p["qkv"]), 3, axis=-1)
    mixed = checkpoint_name(jax.nn.softmax(q @ k.T) @ v, "mixed")
    y = dense(mixed, p["out"])
    return y * p["norm"]["scale"] + p["norm"]["bias"]


def parameters(*names: str, width: int = D) -> dict[str, dict[str, np.ndarray]]:
    """Parameters as initialised: random kernels, biases of 0 and a norm's scale of 1."""
    rng = np.random.default_rng(len(names))
    made = {
        name: {
            "kernel": rng.normal(size=(D, width if name == "qkv" else D)).astype(np.float32),
            "bias": np.zeros(width if name == "qkv" else D, np.float32),
        }
        for name in names
    }
    return made | {"norm": {"scale": np.ones(D, np.float32), "bias": np.zeros(D, np.float32)}}


def given(function: Callable[..., Any], port: Mapping[str, Any], **options: Any) -> Port:
    names = ("query", "key", "value", "out")
    left = FunctionSide(original, parameters(*names), X)
    return Port("attention", left, FunctionSide(function, port, X), **options)


@pytest.fixture(scope="module")
def adopted() -> Adoption:
    return adopt(given(renamed, parameters("wq", "wk", "wv", "out")))


def test_an_exchange_and_a_transposition_are_found_by_comparing(adopted: Adoption) -> None:
    assert adopted.holds and not adopted.questions and not adopted.unused, adopted.text()
    # The softmax cancels the bias of the key, which is in `wq`.
    assert len(adopted.confirmed) == 9 and adopted.inferred == {"wq.bias"}
    # In the order in which they were made, as the stages are computed.
    exchange, transposition = adopted.changed
    assert "wk and wq exchanged" in exchange
    assert "out.kernel in the other order of axes" in transposition
    assert "9 of 10 parameters of the port are confirmed" in adopted.text()
    assert "no result depends on wq.bias" in adopted.text()


def test_the_values_are_the_original_s_without_the_noise_of_the_test(adopted: Adoption) -> None:
    source = parameters("query", "key", "value", "out")
    made = adopted.parameters
    assert np.array_equal(made["wk.kernel"], source["query"]["kernel"])
    assert np.array_equal(made["out.kernel"], source["out"]["kernel"].T)
    assert np.array_equal(made["norm.scale"], np.ones(D))
    assert np.array_equal(adopted.side.parameters()["wq.kernel"], source["key"]["kernel"])


def test_the_written_converter_makes_the_same_parameters(adopted: Adoption) -> None:
    space: dict[str, Any] = {}
    exec(adopted.source(), space)
    left = given(renamed, parameters("wq", "wk", "wv", "out")).original
    made = space["convert"](left.parameters())
    assert made.keys() == adopted.parameters.keys()
    assert all(np.array_equal(made[name], x) for name, x in adopted.parameters.items())


def test_a_port_that_computes_something_else_is_not_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(construction_search, "AT_ONE_STAGE", 2)

    def wrong(p: Any, x: Any) -> Any:
        return renamed(p, x) * jnp.float32(1.01)

    found = adopt(given(wrong, parameters("wq", "wk", "wv", "out")))
    assert not found.holds and not found.confirmed
    assert {name for q in found.questions for name in q.parameters} == found.parameters.keys()
    assert all(question.why == "the programs differ" for question in found.questions)
    assert "diverges" in found.text()
    # What is proposed is converted all the same, to be looked at.
    assert all(f'"{name}"' in found.source() for name in found.parameters)


def test_the_order_of_fused_parts_is_found_by_comparing() -> None:
    port = parameters("qkv", "out", width=3 * D)
    found = adopt(given(fused, port))
    assert found.holds, found.text()
    source = parameters("query", "key", "value", "out")
    parts = [source[name]["kernel"] for name in ("value", "key", "query")]
    assert np.array_equal(found.parameters["qkv.kernel"], np.concatenate(parts, axis=1))


def test_what_no_result_depends_on_and_what_has_no_original_are_questions(tmp_path: Path) -> None:
    port = parameters("query", "key", "value", "out")
    port["idle"] = {"table": np.zeros((3, D), np.float32)}
    port["norm"]["spare"] = np.zeros((2, 2), np.float32)
    port["adapter"] = {"down": np.zeros((0, D), np.float32)}
    file = tmp_path / "answers.json"
    case = given(original, port)
    found = adopt(case, file)
    assert not found.holds
    assert len(found.confirmed) == 9
    open_ = json.loads(file.read_text(encoding="utf-8"))
    assert open_["answers"] == {}
    assert open_["questions"].keys() == {"idle.table", "norm.spare"}
    open_["answers"] = {"idle.table": None, "norm.spare": None}
    file.write_text(json.dumps(open_), encoding="utf-8")
    answered = adopt(case, file)
    assert answered.holds
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert kept == {**open_, "questions": {}}


def test_an_answer_replaces_the_proposal_and_is_not_changed_by_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(construction_search, "AT_ONE_STAGE", 2)
    file = tmp_path / "answers.json"
    said = {
        "wq.kernel": "value.kernel",
        "wv.kernel": {"of": "key.kernel", "transposed": True},
    }
    file.write_text(json.dumps({"answers": said}), encoding="utf-8")
    found = adopt(given(renamed, parameters("wq", "wk", "wv", "out")), file)
    source = parameters("query", "key", "value", "out")
    assert not found.holds
    assert np.array_equal(found.parameters["wq.kernel"], source["value"]["kernel"])
    assert np.array_equal(found.parameters["wv.kernel"], source["key"]["kernel"].T)
    assert json.loads(file.read_text(encoding="utf-8"))["answers"] == said


@pytest.mark.parametrize("gradients", [True, False])
def test_a_bias_of_zeros_that_the_port_lacks_is_named(gradients: bool) -> None:
    def without(p: Any, x: Any) -> Any:
        q, k, v = (checkpoint_name(dense(x, p[name]), name) for name in ("query", "key", "value"))
        y = checkpoint_name(jax.nn.softmax(q @ k.T) @ v, "mixed") @ p["out"]["kernel"]
        return y * p["norm"]["scale"] + p["norm"]["bias"]

    port = parameters("query", "key", "value", "out")
    del port["out"]["bias"]
    found = adopt(given(without, port, gradients=gradients))
    assert not found.questions and not found.holds
    assert "not used, but needed: out.bias (6,)" in found.text()


def test_parameters_without_telling_names_are_paired_in_the_order_of_use() -> None:
    def numbered_modules(p: Any, x: Any) -> Any:
        for name in ("m_2", "m_0", "m_1"):
            x = checkpoint_name(jnp.tanh(dense(x, p[name])), name)
        return x

    def other(p: Any, x: Any) -> Any:
        for name in ("u", "v", "w"):
            x = checkpoint_name(jnp.tanh(x @ p[name]["kernel"] + p[name]["bias"]), name)
        return x

    left = FunctionSide(numbered_modules, parameters("m_0", "m_1", "m_2"), X)
    right = FunctionSide(other, parameters("u", "v", "w"), X)
    for side in (left, right):
        del side.params["norm"]
    found = adopt(Port("numbered", left, right))
    assert found.holds and not found.changed, found.text()
    kernels = {n: p.originals for n, p in found.matching.by_port.items() if "kernel" in n}
    assert kernels == {"u.kernel": ("m_2.kernel",), "v.kernel": ("m_0.kernel",),
                       "w.kernel": ("m_1.kernel",)}  # fmt: skip


def test_a_parameter_without_a_derivative_is_confirmed_if_the_results_change_with_it() -> None:
    def stopped(p: Any, x: Any) -> Any:
        scale = jax.lax.stop_gradient(p["norm"]["scale"])
        q, k, v = (checkpoint_name(dense(x, p[name]), name) for name in ("query", "key", "value"))
        mixed = checkpoint_name(jax.nn.softmax(q @ k.T) @ v, "mixed")
        return dense(mixed, p["out"]) * scale + p["norm"]["bias"]

    names = ("query", "key", "value", "out")
    left = FunctionSide(stopped, parameters(*names), X)
    case = Port("stopped", left, FunctionSide(stopped, parameters(*names), X), gradients=False)
    found = adopt(case)
    # Without any derivative, everything is tested in this way.
    assert len(found.confirmed) == 9 and found.inferred == {"key.bias"}, found.text()
    assert found.holds


def test_what_a_comparison_cannot_show_is_not_confirmed() -> None:
    """A part of a fused table that no id uses, and an original's constant that the port lacks."""
    rng = np.random.default_rng(0)
    parts = ("type_a", "type_b", "type_c")
    tables = {name: {"w": rng.normal(size=(2, D)).astype(np.float32)} for name in parts}
    ids = np.array([0, 1, 1])

    def apart(p: Any, ids: Any) -> Any:
        return jnp.concatenate([p[n]["w"] for n in parts])[ids] * p["unused"]["scale"]

    def together(p: Any, ids: Any) -> Any:
        return p["types"]["w"][ids]

    left = FunctionSide(apart, tables | {"unused": {"scale": np.ones(D, np.float32)}}, ids)
    right = FunctionSide(together, {"types": {"w": np.zeros((6, D), np.float32)}}, ids)
    found = adopt(Port("tables", left, right, gradients=False))
    assert found.agrees and not found.confirmed and not found.holds
    assert found.lost == ("unused.scale",)
    assert [question.parameter for question in found.questions] == ["types.w"]


def test_a_guard_against_zeros_that_noise_moves_away_is_compared_too() -> None:
    def guarded(p: Any, x: Any) -> Any:
        return x * jnp.where(p["w"] == 0, 7.0, p["w"])

    left = FunctionSide(guarded, {"w": np.array([0, 1, 2, 0, 3, 4], np.float32)}, X)
    right = FunctionSide(lambda p, x: x * p["w"], {"w": np.ones(D, np.float32)}, X)
    found = adopt(Port("guard", left, right))
    assert not found.agrees and not found.confirmed and "diverges" in found.text()


def test_noise_that_leaves_the_domain_is_left_out_with_a_notice() -> None:
    def rate(p: Any, x: Any) -> Any:
        return x * jnp.log(1.0 - p["rate"])

    values = np.array([0.1, 0.5, 0.9, 0.99, 0.999, 0.9999], np.float32)
    left = FunctionSide(rate, {"rate": values}, X)
    found = adopt(Port("rate", left, FunctionSide(rate, {"rate": values * 0}, X)))
    assert found.holds and found.confirmed == {"rate"}
    assert any("infinite or NaN" in notice for notice in found.notices)


def test_equal_inputs_are_named_and_sides_that_are_one_are_refused() -> None:
    def two(p: Any, a: Any, b: Any) -> Any:
        return a @ p["u"] + b @ p["v"]

    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(D, D)).astype(np.float32) for name in ("u", "v")}
    left, right = (FunctionSide(two, dict(weights), X, X.copy()) for _ in range(2))
    assert any("are equal" in notice for notice in adopt(Port("two", left, right)).notices)
    with pytest.raises(PortError, match="both sides are one object"):
        adopt(Port("two", left, left))
    with pytest.raises(PortError, match="the original has no parameter"):
        adopt(Port("none", FunctionSide(lambda p, x: x, {}, X), right))


def test_square_matrices_that_only_together_have_an_effect_are_transposed() -> None:
    def stored(p: Any, x: Any) -> Any:
        q, k, v = (x @ p[name]["kernel"].T for name in ("query", "key", "value"))
        return jax.nn.softmax(q @ k.T) @ v @ p["out"]["kernel"].T + p["out"]["bias"]

    def plain(p: Any, x: Any) -> Any:
        q, k, v = (x @ p[name]["kernel"] for name in ("query", "key", "value"))
        return dense(jax.nn.softmax(q @ k.T) @ v, p["out"])

    made = parameters("query", "key", "value", "out")
    del made["norm"]
    for name in ("query", "key", "value"):
        del made[name]["bias"]
    left, right = FunctionSide(plain, made, X), FunctionSide(stored, made, X)
    found = adopt(Port("stored", left, right))
    assert found.agrees and "query.kernel" in found.changed[0], found.text()


class Fixed:
    """A side whose parameters cannot be changed, as those of a capture."""

    def __init__(self, side: Side) -> None:
        self.kind, self.parameters = "fixed", side.parameters
        self.inputs, self.run = side.inputs, side.run


def test_without_noise_equal_parameters_are_not_confirmed() -> None:
    case = given(original, parameters("query", "key", "value", "out"))
    found = adopt(replace(case, original=Fixed(case.original)))
    assert found.confirmed == {f"{name}.kernel" for name in ("query", "key", "value", "out")}
    assert any("cannot be changed" in notice for notice in found.notices)
    assert found.agrees and not found.lost
    port = parameters("query", "key", "value", "out")
    del port["norm"]["bias"]
    lacking = given(lambda p, x: original({**p, "norm": {**p["norm"], "bias": 0.0}}, x), port)
    unknown = adopt(replace(lacking, original=Fixed(lacking.original), gradients=False))
    # Nothing could show that no result depends on it.
    assert unknown.lost == ("norm.bias",) and not unknown.holds
    assert any("count as needed" in notice for notice in unknown.notices)
    with pytest.raises(PortError, match="parameters can be set"):
        adopt(replace(case, port=Fixed(case.port)))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"none.kernel": None}, "none.kernel is no parameter of the port"),
        ({"w{}.kernel": None}, r"w\{\}.kernel is no parameter of the port"),
        ({"wq.kernel": "lost.kernel"}, "names lost.kernel, which the original does not have"),
        ({"wq.kernel": "query.bias"}, r"does not fit the port's shape \(6, 6\): query.bias \(6,\)"),
        ({"wq.kernel": ["query.kernel", "key.kernel"]}, "does not fit the port's shape"),
        ({"wq.kernel": {"of": "query.kernel", "transpose": True}}, "is not null, a name"),
        ({"wq.kernel": {"of": "query.kernel", "transposed": 1}}, "is not null, a name"),
        ({"wq.kernel": []}, "is not null, a name"),
        ({"wq.kernel": 3}, "is not null, a name"),
        ({"wq.kernel": {"of": "query.kernel", "rows": [0]}}, "is not null, a name"),
        ({"wq.kernel": {"of": "query.kernel", "rows": [False, True]}}, "is not null, a name"),
        ({"wq.kernel": {"of": "query.kernel", "rows": [3, 9]}}, "has the rows 3 to 9"),
        ({"wq.bias": {"of": "query.bias", "transposed": True}}, "is for matrices only"),
        (
            {"wq.kernel": {"of": ["query.kernel", "query.bias"], "transposed": False}},
            "is for matrices only",
        ),
        (["wq.kernel"], "expected under `answers` an object"),
        ([], "expected under `answers` an object"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_and_the_file_stays(
    answer: Any, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "answers.json"
    text = json.dumps({"answers": answer})
    file.write_text(text, encoding="utf-8")
    with pytest.raises(AnswerError, match=says) as error:
        adopt(given(renamed, parameters("wq", "wk", "wv", "out")), file)
    # The message names the file, and the parameter of the port if the answer is for one.
    [name] = answer if len(answer) == 1 else [""]
    assert str(error.value).startswith(f"{file}: ") and name in str(error.value)
    assert file.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "correct or delete it"),
        ('{"answers": {"wq.bias": null, "wq.bias": "query.bias"}}', "wq.bias is there twice"),
        ('{"anwers": {}}', "expected the keys answers and questions, got anwers"),
    ],
)
def test_a_file_that_is_no_file_of_answers_is_refused(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "answers.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(AnswerError, match=says):
        adopt(given(renamed, parameters("wq", "wk", "wv", "out")), file)


def test_a_file_of_answers_is_in_a_folder_that_exists(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    with pytest.raises(AnswerError, match=re.escape(f"expected a folder {folder} for")):
        answers.read_answers(folder / "answers.json")
    folder.mkdir()
    assert answers.read_answers(folder / "answers.json") == {}


def test_a_folder_is_no_file_of_answers(tmp_path: Path) -> None:
    with pytest.raises(AnswerError, match=re.escape(f"expected a file of answers at {tmp_path}")):
        answers.read_answers(tmp_path)


def test_a_file_of_answers_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch) -> None:
    def refuse(file: Path) -> None:
        raise PermissionError(f"no right to read {file.name}")

    file = tmp_path / "answers.json"
    file.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(answers, "read_json_object", refuse)
    with pytest.raises(AnswerError, match=r"no right to read answers\.json; correct or delete"):
        answers.read_answers(file)


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=float).reshape(shape)


@pytest.mark.parametrize(
    ("answer", "made"),
    [
        ("a", lambda a, b: a),
        (["a"], lambda a, b: a),
        ({"of": "a", "transposed": True}, lambda a, b: a.T),
        (["a", "b"], lambda a, b: np.stack([a, b])),
        (["b", "a"], lambda a, b: np.concatenate([b, a])),
        (["a", "b"], lambda a, b: np.concatenate([a, b], 1)),
        ({"of": ["a", "b"], "transposed": True}, lambda a, b: np.concatenate([a.T, b.T], 1)),
        ({"of": ["b", "a"], "transposed": True}, lambda a, b: np.stack([b.T, a.T])),
    ],
)
def test_answers_are_one_parameter_a_stack_or_a_fusion_in_their_order(
    answer: Any, made: Callable[..., np.ndarray]
) -> None:
    arrays = {"a": numbered(3, 3), "b": 100 + numbered(3, 3)}
    expected = made(arrays["a"], arrays["b"])
    built = answers._from_answer(answer, arrays, "p", expected.shape).from_original(arrays)
    # Where a stack and a fusion have one shape, the stack of the first axis is meant.
    assert np.array_equal(built, expected)


def test_vectors_of_the_port_s_shape_are_added() -> None:
    arrays = {name: 10.0**n + numbered(4) for n, name in enumerate("abc")}
    built = answers._from_answer(["a", "c", "b"], arrays, "p", (4,))
    assert built.adds
    assert np.array_equal(built.from_original(arrays), arrays["a"] + arrays["c"] + arrays["b"])
    rows = {"of": ["a", "b"], "rows": [1, 3]}
    assert np.array_equal(
        answers._from_answer(rows, arrays, "p", (2,)).from_original(arrays),
        arrays["a"][1:3] + arrays["b"][1:3],
    )
    # A vector of another length among them is none of the terms; matrices are never added.
    arrays["c"] = numbered(3)
    with pytest.raises(AnswerError, match="does not fit"):
        answers._from_answer(["a", "c"], arrays, "p", (4,))


def test_a_stack_may_have_axes_of_length_1_more_or_less() -> None:
    arrays = {"a": numbered(3), "b": numbered(1, 3)}
    built = answers._from_answer(["b", "a"], arrays, "p", (2, 1, 1, 3)).from_original(arrays)
    assert np.array_equal(built, np.stack([numbered(3), numbered(3)])[:, None, None])
    with pytest.raises(AnswerError, match="does not fit the port's shape"):
        answers._from_answer(["a", "b"], arrays, "p", (2, 3, 3))
    with pytest.raises(AnswerError, match=r"does not fit the port's shape \(\): a \(3,\)"):
        answers._from_answer("a", arrays, "p", ())


def test_a_matrix_is_transposed_without_being_asked_only_where_nothing_else_fits() -> None:
    arrays = {"a": numbered(2, 3), "b": numbered(4, 3)}
    built = answers._from_answer("a", arrays, "p", (3, 2)).from_original(arrays)
    assert np.array_equal(built, arrays["a"].T)
    both = answers._from_answer(["a", "b"], arrays, "p", (3, 6)).from_original(arrays)
    assert np.array_equal(both, np.concatenate([arrays["a"].T, arrays["b"].T], 1))


def test_a_square_matrix_is_transposed_where_both_libraries_do_so() -> None:
    arrays = {"q.weight": numbered(2, 2), "k.weight": 10 + numbered(2, 2)}
    for names, shape in (("q.weight", (2, 2)), (["q.weight", "k.weight"], (2, 4))):
        built = answers._from_answer(names, arrays, "qk.kernel", shape).from_original(arrays)
        assert np.array_equal(built[:, :2], arrays["q.weight"].T)
        same = answers._from_answer(names, arrays, "qk.weight", shape).from_original(arrays)
        assert np.array_equal(same[:, :2], arrays["q.weight"])


def test_an_answer_that_says_how_a_matrix_lies_decides_against_the_convention() -> None:
    arrays = {"q.weight": numbered(2, 2)}
    for turned in (False, True):
        answer = {"of": "q.weight", "transposed": turned}
        built = answers._from_answer(answer, arrays, "q.kernel", (2, 2)).from_original(arrays)
        assert np.array_equal(built, arrays["q.weight"].T if turned else arrays["q.weight"])
    # The convention holds from either library to the other.
    back = answers._from_answer("q.kernel", {"q.kernel": numbered(2, 2)}, "q.weight", (2, 2))
    assert np.array_equal(back.from_original({"q.kernel": numbered(2, 2)}), numbered(2, 2).T)


def test_an_answer_takes_rows_and_reshapes() -> None:
    arrays = {"in_proj": numbered(6, 4), "out": numbered(4, 4)}
    middle = {"of": "in_proj", "rows": [2, 4], "transposed": True}
    built = answers._from_answer(middle, arrays, "p", (4, 1, 2)).from_original(arrays)
    assert np.array_equal(built, arrays["in_proj"][2:4].T.reshape(4, 1, 2))
    last = answers._from_answer({"of": "in_proj", "rows": [4, 6]}, arrays, "p", (2, 4))
    assert np.array_equal(last.from_original(arrays), arrays["in_proj"][4:])
    heads = {"of": "out", "transposed": True}
    built = answers._from_answer(heads, arrays, "p", (2, 2, 4)).from_original(arrays)
    assert np.array_equal(built, arrays["out"].T.reshape(2, 2, 4))


@pytest.mark.parametrize("rows", [[2, 2], [0, 0], [6, 6], [4, 2], [-2, 4], [5, 7]])
def test_an_answer_takes_at_least_one_row_and_only_rows_that_exist(rows: list[int]) -> None:
    start, stop = rows
    for array in (numbered(6, 4), numbered(6)):
        says = re.escape(f"has the rows {start} to {stop} of an array of shape {array.shape}")
        with pytest.raises(AnswerError, match=says):
            answers._from_answer({"of": "w", "rows": rows}, {"w": array}, "p", (2, 4))


def test_a_number_has_no_rows() -> None:
    with pytest.raises(AnswerError, match=r"has the rows 0 to 1 of an array of shape \(\)"):
        answers._from_answer({"of": "w", "rows": [0, 1]}, {"w": np.ones(())}, "p", ())


def test_one_answer_stands_for_all_layers_by_their_numbers() -> None:
    mine = {f"block_{i}.w_{j}": numbered(2) for i in range(2) for j in range(3)}
    said: dict[str, Any] = {"block_{}.w_{}": {"of": ["layers.{}.{}", "layers.{}.x"]}, "head": None}
    said["block_1.w_1"] = "own"
    found = answers._each(said, mine)
    assert found["block_1.w_1"] == "own"
    assert found.keys() == {*mine, "head"}
    assert found["block_1.w_2"] == {"of": ["layers.1.2", "layers.1.x"]}


def test_questions_are_written_in_the_letters_of_their_names(tmp_path: Path) -> None:
    file = tmp_path / "answers.json"
    answers.write_questions(file, {"größe": {"why": "offen"}})
    assert '"größe"' in file.read_text(encoding="utf-8")
    assert json.loads(file.read_text(encoding="utf-8")) == {
        "answers": {},
        "questions": {"größe": {"why": "offen"}},
    }


def test_answers_that_are_kept_elsewhere_are_written_there(tmp_path: Path) -> None:
    file, link = tmp_path / "kept.json", tmp_path / "answers.json"
    file.write_text("{}", encoding="utf-8")
    link.symlink_to(file)
    answers.write_questions(link, {})
    assert link.is_symlink()
    assert json.loads(file.read_text(encoding="utf-8")) == {"questions": {}}


def test_the_command_writes_the_conversion_and_exits_with_what_is_left(tmp_path: Path) -> None:
    file, written = ROOT / "docs/examples/my_port.py", tmp_path / "convert.py"
    done = cli("adopt", file, "--write", written, "--answers", tmp_path / "answers.json")
    assert done.exit_code == 0, done.output
    assert "3 of 3 parameters of the port are confirmed" in done.output
    assert "def convert(original" in written.read_text(encoding="utf-8")
    assert json.loads((tmp_path / "answers.json").read_text(encoding="utf-8"))["questions"] == {}


@pytest.mark.parametrize(("change", "code"), [("approximate=True", 1), ("idle", 3)])
def test_a_conversion_that_is_not_confirmed_is_no_success(
    change: str, code: int, tmp_path: Path
) -> None:
    source = (ROOT / "docs/examples/my_port.py").read_text(encoding="utf-8")
    if change == "idle":
        source = source.replace("    x = rng", '    transposed["idle"] = x = rng')
    else:
        source = source.replace("approximate=APPROXIMATE", change)
    (tmp_path / "port.py").write_text(source, encoding="utf-8")
    assert cli("adopt", tmp_path / "port.py").exit_code == code


def test_a_parameter_that_nothing_shows_is_open_if_its_module_is_not_confirmed() -> None:
    def alone(p: Any, x: Any) -> Any:
        # As before, with the bias of the key apart from its kernel.
        q, v = (checkpoint_name(dense(x, p[name]), name) for name in ("query", "value"))
        k = checkpoint_name(x @ p["key"]["kernel"] + p["extra"]["bias"], "key")
        mixed = checkpoint_name(jax.nn.softmax(q @ k.T) @ v, "mixed")
        return dense(mixed, p["out"]) * p["norm"]["scale"] + p["norm"]["bias"]

    port = parameters("query", "key", "value", "out")
    port["extra"] = {"bias": port["key"].pop("bias")}
    found = adopt(given(alone, port))
    assert found.agrees and not found.inferred and not found.holds
    assert [question.parameter for question in found.questions] == ["extra.bias"]
