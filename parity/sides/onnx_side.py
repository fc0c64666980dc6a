"""A side that is an ONNX model: ONNX Runtime runs it, onnx's reference evaluator in float64.

ONNX Runtime has no float64 version of most operations, so float64 runs, and the perturbed ones that
measure the noise floor, are evaluated node by node with `onnx.reference`. A file that torch
exported names the module and the source line of every node; other files have only the names of the
nodes.
Source: docs/your-own-port.md "What is deployed".
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx.inliner import inline_local_functions
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from scipy import special

from parity.engine.measure.rounding_noise import UNIT_ROUNDOFF
from parity.engine.programs.domains import DOMAINS, inside
from parity.engine.programs.operations import Operation, Recorder
from parity.engine.programs.rounding import is_short
from parity.engine.programs.rounding_rules import ELEMENTARY_UNITS
from parity.sides.side import (
    AS_IS,
    OUTPUT,
    Precision,
    Rounding,
    Run,
    SideError,
    Trace,
    check_parameters,
)

_EXACT = """
Abs And ArgMax ArgMin Cast CastLike Ceil Clip Compress Concat Constant ConstantOfShape DepthToSpace
Dropout Equal Expand EyeLike Flatten Floor Gather GatherElements GatherND GlobalMaxPool Greater
GreaterOrEqual Identity IsInf IsNaN LeakyRelu Less LessOrEqual Max MaxPool Min Neg NonZero Not
OneHot Or Pad Range ReduceMax ReduceMin Relu Reshape ReverseSequence Round ScatterElements ScatterND
Shape Sign Size Slice SpaceToDepth Split Squeeze Tile TopK Transpose Trilu Unique Unsqueeze Where
Xor
"""
EXACT = frozenset(_EXACT.split())
"""Operators that do not round."""
_ELEMENTARY = """
Acos Acosh Asin Asinh Atan Atanh Celu Cos Cosh Elu Erf Exp Gelu HardSwish Log LogSoftmax Mish Pow
Selu Sigmoid Sin Sinh Softmax Softplus Swish Tan Tanh
"""
ELEMENTARY = frozenset(_ELEMENTARY.split())
"""Operators that compute an elementary function, with errors of `ELEMENTARY_UNITS` roundoffs."""
_SUMS = """
Attention AveragePool BatchNormalization Conv ConvTranspose CumSum Einsum GRU Gemm
GlobalAveragePool GroupNormalization InstanceNormalization LSTM LayerNormalization LogSoftmax
LpNormalization MatMul RMSNormalization RNN ReduceL1 ReduceL2 ReduceLogSumExp ReduceMean ReduceProd
ReduceSum ReduceSumSquare Softmax
"""
SUMS = frozenset(_SUMS.split())
"""Operators that sum; one of their operands is perturbed as by the rounding of partial sums."""
VIEWS = frozenset(("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))
"""Operators whose result holds every element of their operand, rearranged or cast."""
NORMS = frozenset(
    (
        *("BatchNormalization", "GroupNormalization", "InstanceNormalization"),
        *("LayerNormalization", "RMSNormalization"),
    )
)
"""Operators that normalise, multiply by their second operand, and add the third if there is one."""
_FACTOR = {"MatMul": 1, "Gemm": 1, "Conv": 1, "ConvTranspose": 1, "Attention": 1}
"""Index of the operand that is perturbed, by operator in `SUMS`; 0 for those not listed."""
FLOATS = frozenset((onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16))
"""Element types that become float64 in a float64 run."""
STORED = frozenset((onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE))
"""Element types of the stored tensors that may be parameters."""
_TYPES = frozenset(("to", "dtype"))
"""Attributes that hold an element type."""


class Erf(OpRun):
    """The error function in the dtype of its operand; onnx's own reference returns float32."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (special.erf(x),)


class Gelu(OpRun):
    """GELU, exact or with tanh; onnx's own reference has float32 constants."""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (x * special.ndtr(x),)


class HardSwish(OpRun):
    """x * max(0, min(1, x / 6 + 1 / 2)); onnx's own reference has float32 constants."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x * np.clip(x / 6 + 0.5, 0, 1),)


IN_FLOAT64 = (Erf, Gelu, HardSwish)
"""Operators that replace those of `onnx.reference` that are no more accurate than float32."""


class OnnxSide:
    """An ONNX model in float32; stages are the results of its nodes.

    If torch exported the model, a stage is the result of a module, named by the module's path; else
    the result of each node is a stage, by its name. The outputs of an unmodified run are those of
    ONNX Runtime with all its graph optimisations. Its stages come from a second session that
    returns the stages too; in it ONNX Runtime may fuse fewer nodes.

    Args:
        model: path of the model, or the model itself.
        inputs: arrays, in the order of the model's inputs; their dtypes are cast to those of the
            model.
        providers: execution providers of ONNX Runtime, such as `CUDAExecutionProvider`.
        keywords: arrays by name of the model's input.

    Raises:
        SideError: the model cannot be read, stores floating-point numbers in another dtype than
            float32, or the inputs do not fit its inputs.
    """

    kind = "onnx"

    def __init__(
        self,
        model: str | os.PathLike[str] | onnx.ModelProto,
        *inputs: Any,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        **keywords: Any,
    ) -> None:
        self.model = _read(model)
        self.providers = tuple(providers)
        # Without its provider ONNX Runtime would compute on the CPU, with a warning at most.
        there = onnxruntime.get_available_providers()
        if missing := [name for name in self.providers if name not in there]:
            raise SideError(
                f"ONNX Runtime's provider {', '.join(missing)} is not available here; there are "
                f"{', '.join(there)}"
            )
        self._exact: dict[str, np.ndarray] = {}
        """Values that some parameters have in float64 runs only, by name."""
        self._given = self._named(inputs, keywords)
        self._stages = _stage_names(self.model.graph)
        self._stored = _parameter_names(self.model.graph)
        self._sessions: dict[frozenset[str] | None, onnxruntime.InferenceSession] = {}

    def parameters(self) -> dict[str, np.ndarray]:
        """Return every floating-point tensor that the model stores, by name.

        A name that an exporter made up, such as `val_8` or `onnx::MatMul_3`, is prefixed by the
        path of the module that uses the tensor. Such a tensor counts as a parameter only if it has
        several elements, some of which need many digits (`is_short`): exporters also store numbers
        of the code, such as 0.5 or a factor computed from sizes. A tensor of one element is a
        parameter only if its name has a dot.
        """
        held = {each.name: each for each in self.model.graph.initializer}
        return {n: onnx.numpy_helper.to_array(held[t]) for n, t in self._stored.items()}

    def with_parameters(self, values: Mapping[str, np.ndarray]) -> OnnxSide:
        """Return a copy of this side with other values of some parameters.

        Raises:
            SideError: a name in `values` is unknown, or a value has another shape.
        """
        check_parameters(values, self.parameters())
        side = copy.copy(self)
        side.model, side._sessions = onnx.ModelProto(), {}
        side.model.CopyFrom(self.model)
        own = self.parameters()
        _set(side.model, {self._stored[n]: x.astype(own[n].dtype) for n, x in values.items()})
        side._exact = {name: x for name, x in self._exact.items() if name not in values}
        return side

    def with_exact(self, values: Mapping[str, np.ndarray]) -> OnnxSide:
        """Return a copy of this side with other values of some parameters in float64 runs.

        See `TakesExactParameters`.

        Raises:
            SideError: a name in `values` is unknown, or a value has another shape.
        """
        check_parameters(values, self.parameters())
        side = copy.copy(self)
        side._exact = {**self._exact, **values}
        return side

    def inputs(self) -> dict[str, np.ndarray]:
        """Return every input array, by its position or keyword."""
        return {key: x for key, (_, x) in self._given.items()}

    def made(self, names: Collection[str]) -> list[str]:
        """Return the names in `names` of those parameters of which every element affects the result
        of an operation.

        For example, every element of a bias does, and of the weight of a product or convolution if
        no feature of the other operand is 0 everywhere. A table from which rows are looked up is
        never returned. See `HoldsMade`.
        """
        try:
            results = self._evaluated(Run(Precision.FLOAT64)) if names else {}
        except SideError:
            return []
        results |= dict(self._given.values())
        for name, stored in self.parameters().items():
            results.setdefault(self._stored[name], stored)
        return [name for name in names if self._takes_part(self._stored[name], results)]

    def _takes_part(self, tensor: str, results: Mapping[str, np.ndarray]) -> bool:
        uses = [
            (node, i)
            for node in self.model.graph.node
            for i, name in enumerate(node.input)
            if name == tensor
        ]
        return any(
            _is_whole_use(node, i, results)
            or (i == 0 and node.op_type in VIEWS and self._takes_part(node.output[0], results))
            for node, i in uses
        )

    def operation_results(self) -> list[np.ndarray]:
        """Return the floating-point results of all nodes of a float64 run, as a list of arrays."""
        return [x for x in self._evaluated(Run(Precision.FLOAT64)).values() if x.dtype.kind == "f"]

    def operations_of(
        self, stage: str, forced: Mapping[str, np.ndarray]
    ) -> tuple[dict[int, Operation], dict[int, np.ndarray]]:
        """Return the nodes that compute a stage from the replaced ones, and their results.

        See `TellsOperations`.
        """
        results = self._evaluated(Run(Precision.FLOAT64, forced=forced), computed=stage)
        recorder, producer = Recorder(), {}
        last = None
        fed = {name for name, shown in self._stages.items() if shown in forced}
        for node in self.model.graph.node:
            kept = [name for name in node.output if name in results]
            if not kept:
                continue
            index = len(recorder.operations)
            parents = tuple(dict.fromkeys(producer[x] for x in node.input if x in producer))
            is_fed = kept[0] in fed and self._stages[kept[0]] != stage
            recorder.operations.append(Operation(node.op_type, _source(node), parents, fed=is_fed))
            recorder.values.append(results[kept[0]])
            producer |= dict.fromkeys(node.output, index)
            if self._stages.get(kept[0]) == stage or stage in self._output_names(kept[0]):
                last = index
        if last is None:
            return {}, {}
        window = [i for i in recorder.window(last) if i == last or not recorder.operations[i].fed]
        return (
            {i: recorder.operations[i] for i in window},
            {i: recorder.values[i] for i in window},
        )

    def run(self, how: Run = AS_IS) -> Trace:
        """Run the model once with these settings.

        Raises:
            SideError: `how` requests derivatives or bfloat16, or names an unknown stage, or the
                model does not run.
        """
        if how.cotangents is not None:
            raise SideError("an ONNX model has no derivatives: pass Port(..., gradients=False)")
        if how.precision is Precision.BFLOAT16:
            raise SideError(
                "an ONNX model runs in float32, the dtype it was exported in, not in bfloat16: "
                "pass Port(..., bfloat16=False)"
            )
        if how.rounding is not None and how.precision is not Precision.FLOAT64:
            raise SideError(
                "an ONNX model can be perturbed by rounding in float64 only: use "
                "Run(Precision.FLOAT64, rounding=...)"
            )
        if lost := sorted(set(how.forced) - set(self._stages.values())):
            known = ", ".join(self._stages.values())
            raise SideError(f"no stage {', '.join(lost)}; there are {known}")
        wide = how.precision is Precision.FLOAT64
        results = self._evaluated(how) if wide else self._run(how)
        outputs: dict[str, np.ndarray] = {}
        exact: dict[str, np.ndarray] = {}
        for each in self.model.graph.output:
            for name in self._output_names(each.name):
                value = _in_run(results[each.name], wide)
                (outputs if value.dtype.kind == "f" else exact)[name] = value
        stages = {
            shown: _in_run(results[f"{name}{_COMPUTED}" if shown in how.forced else name], wide)
            for name, shown in self._stages.items()
            if name in results and results[name].dtype.kind == "f"
        }
        if not outputs:
            kinds = {name: str(x.dtype) for name, x in exact.items()}
            raise SideError(f"expected an ONNX model that returns floating arrays, got {kinds}")
        return Trace({**stages, **outputs}, tuple(outputs), exact=exact)

    def _named(
        self, inputs: Sequence[Any], keywords: Mapping[str, Any]
    ) -> dict[str, tuple[str, np.ndarray]]:
        """Return the inputs of the call: for each, by its position (as text) or its keyword, the
        name of the model's input that it becomes, and its array."""
        stored = {each.name for each in self.model.graph.initializer}
        wanted = [each for each in self.model.graph.input if each.name not in stored]
        names = [each.name for each in wanted]
        if len(inputs) > len(names) or not set(keywords) <= set(names):
            raise SideError(
                f"expected the inputs of the ONNX model, {', '.join(names)}; got {len(inputs)} "
                f"arrays by position and {', '.join(keywords) or 'none'} by name"
            )
        given = {str(i): (names[i], x) for i, x in enumerate(inputs)}
        given |= {key: (key, x) for key, x in keywords.items()}
        known = [name for name, _ in given.values()]
        if sorted(known) != sorted(names):
            twice = sorted({name for name in known if known.count(name) > 1})
            missing = [name for name in names if name not in known]
            raise SideError(
                f"expected each input of the ONNX model once, got {', '.join(twice) or 'none'} "
                f"twice and nothing for {', '.join(missing) or 'none'}"
            )
        dtypes = {
            each.name: onnx.helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)
            for each in wanted
        }
        return {key: (n, _cast(n, x, dtypes[n])) for key, (n, x) in given.items()}

    def _output_names(self, name: str) -> tuple[str, ...]:
        """Return the names of a tensor as an output: `output`, or `output[i]` if there are several;
        empty if the tensor is no output. The model's own names, made up by an exporter, are not
        used."""
        names = [each.name for each in self.model.graph.output]
        if len(names) == 1:
            return (OUTPUT,) if name == names[0] else ()
        return tuple(f"{OUTPUT}[{i}]" for i, each in enumerate(names) if each == name)

    def _run(self, how: Run) -> dict[str, np.ndarray]:
        """Run the model in ONNX Runtime; return stages and outputs by name of the tensor."""
        forced = {name: how.forced[s] for name, s in self._stages.items() if s in how.forced}
        feed = dict(self._given.values())
        results = {} if forced else self._answers(None, feed)
        feed |= {name: np.asarray(x, np.float32) for name, x in forced.items()}
        return {**self._answers(frozenset(forced), feed), **results}

    def _answers(
        self, forced: frozenset[str] | None, feed: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the results of an ONNX Runtime session by name of the tensor.

        Args:
            forced: names of the tensors that `feed` replaces. None: the unmodified model, which
                returns its outputs only.
            feed: arrays by name of the model's input or of the replaced tensor.
        """
        try:
            if forced not in self._sessions:
                options = onnxruntime.SessionOptions()
                options.log_severity_level = 3
                model = self.model if forced is None else _with_stages(self, forced)
                self._sessions[forced] = onnxruntime.InferenceSession(
                    model.SerializeToString(), options, providers=list(self.providers)
                )
            session = self._sessions[forced]
            if missing := sorted({*self.providers} - {*session.get_providers()}):
                # Installed, but without what it needs, such as a device.
                raise RuntimeError(f"the provider {', '.join(missing)} does not start here")
            names = [each.name for each in session.get_outputs()]
            return dict(zip(names, map(np.asarray, session.run(names, feed)), strict=True))
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[0]
            raise SideError(f"ONNX Runtime stops: {type(error).__name__}: {line}") from error

    def _evaluated(self, how: Run, computed: str = "") -> dict[str, np.ndarray]:
        """Return the results of all nodes in float64, by name of the tensor.

        The result that the program computed for a replaced stage is named with the suffix
        `_COMPUTED`.

        Args:
            how: settings of the run.
            computed: name of a stage whose computed value is returned under the name of its tensor,
                even if `how` replaces the stage; empty: no stage.
        """
        model = _widened(self.model)
        _set(model, {self._stored[n]: np.asarray(x, np.float64) for n, x in self._exact.items()})
        try:
            evaluator = ReferenceEvaluator(model, new_ops=[*IN_FLOAT64])
        except Exception as error:
            line = (str(error).strip().splitlines() or [""])[0]
            raise SideError(f"onnx's reference evaluator cannot load the model: {line}") from error
        signs = _Signs(how)
        results: dict[str, Any] = {"": None, **evaluator.rt_inits_}
        # With the shared parameters unknown, trained ones are not perturbed (`Run.shared`).
        named = {tensor: name for name, tensor in self._stored.items()}
        kept = self._stored.keys() if how.shared is None else how.shared
        for name, x in evaluator.rt_inits_.items():
            if named.get(name) not in kept:
                results[name] = signs.constant(x)
        results |= {
            name: x.astype(np.float64) if x.dtype.kind == "f" else x
            for name, x in self._given.values()
        }
        forced = {n: how.forced[s] for n, s in self._stages.items() if s in how.forced}
        made: dict[str, np.ndarray] = {}
        for node in evaluator.rt_nodes_:
            proto = node.onnx_node
            inputs = signs.operands(proto, [results[name] for name in proto.input])
            signs.attributes(node)
            more = {"context": results.copy()} if node.need_context() else {}
            try:
                with np.errstate(all="ignore"):
                    outputs = node.run(*inputs, **more)
            except Exception as error:
                line = (str(error).strip().splitlines() or [""])[0]
                raise SideError(
                    f"onnx's ReferenceEvaluator fails in float64 at {proto.op_type} "
                    f"({proto.name}): "
                    f"{type(error).__name__}: {line}"
                ) from error
            constant = proto.op_type == "Constant"
            for name, value in zip(proto.output, outputs, strict=False):
                x = signs.constant(value) if constant else signs.result(proto.op_type, value)
                if isinstance(x, np.ndarray) and name:
                    made[name] = x
                if name in forced:
                    made[f"{name}{_COMPUTED}"] = x
                    x = np.asarray(forced[name], np.float64)
                    if self._stages[name] != computed:
                        made[name] = x
                results[name] = x
        # An output may be an input or a stored tensor, which no node computes.
        return {each.name: results[each.name] for each in model.graph.output} | made


_COMPUTED = "#computed"
"""Suffix of the name of a value that the model computed and that the run replaced."""


@dataclass
class _Signs:
    """Perturbs the values that `Run.rounding` selects in a float64 run, by float32's rounding
    error."""

    how: Run
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.how.seed)

    def constant(self, x: Any) -> Any:
        """Return stored numbers, perturbed in a `Rounding.CONSTANTS` run except those of few
        digits, which count as exact (`is_short`)."""
        if self.how.rounding is not Rounding.CONSTANTS or not _is_float(x):
            return x
        return np.where(is_short(x), x, self._moved(np.asarray(x), 1.0))

    def attributes(self, node: Any) -> None:
        """Perturb the floating-point attributes of a node, which ONNX stores in float32."""
        if self.how.rounding is not Rounding.CONSTANTS:
            return
        # Not only the attributes in the file: defaults, such as Selu's, are float32 numbers too.
        for name, value in [
            (name, x) for name, x in vars(node).items() if isinstance(x, (float, np.floating))
        ]:
            setattr(node, name, float(self.constant(np.asarray(value, np.float64))))

    def operands(self, node: onnx.NodeProto, values: list[Any]) -> list[Any]:
        """Return the operands of a node, changed in perturbed runs only.

        Operands outside the node's domain, such as below 0 for a square root, are reflected into
        it. In a `Rounding.OPERATIONS` run, one operand of a node that sums is perturbed as by the
        rounding of partial sums.
        """
        if self.how.rounding is None:
            return values
        operator = node.op_type
        name = operator.lower()
        if (name in DOMAINS or name == "pow") and all(_is_float(x) for x in values):
            values = inside(name, values, np.where)
        if self.how.rounding is not Rounding.OPERATIONS or operator not in SUMS:
            return values
        which = _FACTOR.get(operator, 0)
        if which >= len(values) or not _is_float(values[which]):
            return values
        units = math.sqrt(1 + _terms(node, values) / 11)
        changed = self._moved(np.asarray(values[which]), units)
        return [*values[:which], changed, *values[which + 1 :]]

    def result(self, operator: str, x: Any) -> Any:
        """Return a result of a node, perturbed by its rounding in a `Rounding.OPERATIONS` run."""
        if self.how.rounding is not Rounding.OPERATIONS or operator in EXACT or not _is_float(x):
            return x
        return self._moved(np.asarray(x), ELEMENTARY_UNITS if operator in ELEMENTARY else 1.0)

    def _moved(self, x: np.ndarray, units: float) -> np.ndarray:
        signs = 2.0 * self.random.integers(0, 2, np.shape(x)) - 1
        with np.errstate(over="ignore", invalid="ignore"):
            moved = np.asarray(x * (1 + signs * (units * UNIT_ROUNDOFF)))
        # The lowest finite number, used as a mask of scores, must not overflow to -inf.
        return np.where(np.isfinite(moved), moved, x)


def _in_run(x: Any, wide: bool) -> np.ndarray:
    """Return a result as an array, a floating-point one in float64 if `wide`, else in float32: a
    float32 model may compute parts in float64."""
    value = np.asarray(x)
    return value.astype(np.float64 if wide else np.float32) if value.dtype.kind == "f" else value


def _is_float(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.floating)) and np.asarray(x).dtype.kind == "f"


def _terms(node: onnx.NodeProto, values: Sequence[Any]) -> int:
    """Return how many terms each sum of a node has; all its sums have equally many."""
    settings = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    kind, shape = node.op_type, np.shape(values[0])
    if kind in ("MatMul", "Gemm"):
        return shape[0 if settings.get("transA") else -1]
    if kind == "Conv":
        return math.prod(np.shape(values[1])[1:])
    if kind == "ConvTranspose":
        inputs, _, *taps = np.shape(values[1])
        return inputs * math.prod(taps) // settings.get("group", 1)
    if kind == "AveragePool":
        return math.prod(settings["kernel_shape"])
    if kind in NORMS:
        # As in torch (`torch_lift`): each element passes its own perturbation on.
        return shape[-1]
    if kind == "GlobalAveragePool":
        axes = range(2, len(shape))
    elif kind.startswith("Reduce"):
        # The axes are an attribute in opsets before 18, and since then an input.
        given = settings.get("axes", values[1] if len(values) > 1 else None)
        axes = range(len(shape)) if given is None or not len(given) else given
    else:
        axes = [settings.get("axis", -1)] if shape else []
    return math.prod(shape[axis] for axis in axes)


def _is_whole_use(node: onnx.NodeProto, operand: int, results: Mapping[str, np.ndarray]) -> bool:
    """Return whether every element of an operand of a node affects the node's result."""
    kind = node.op_type
    if kind in ("Add", "Sub") or (kind in ("Gemm", "Conv", "ConvTranspose") and operand == 2):
        return True
    values = [results.get(name) for name in node.input]
    first, own = values[0], values[operand]
    if first is None or own is None or not first.ndim:
        return False
    if kind in NORMS and operand in (1, 2):
        return operand == 2 or bool(first.any())
    if kind in ("Mul", "Div") and len(values) == 2:
        other = values[1 - operand]
        return other is not None and _is_covered(other, own.shape)
    if kind == "MatMul" and operand == 0:
        other = values[1]
        return other is not None and bool((other != 0).any(axis=-1).all())
    if kind in ("LSTM", "GRU", "RNN"):
        # With one step only the recurrent weights meet a state of 0.
        used = operand in (1, 3) or (operand == 2 and len(first) > 1)
        return used and _is_covered(first, first.shape[-1:])
    transposed = any(each.name == "transA" and each.i for each in node.attribute)
    if kind in ("MatMul", "Gemm") and operand == 1:
        features = first.T if transposed else first
        return _is_covered(features, features.shape[-1:])
    if kind in ("Conv", "ConvTranspose") and operand == 1:
        # A kernel no wider than the data: each tap meets more than padding.
        fits = all(k <= n for k, n in zip(own.shape[2:], first.shape[2:], strict=True))
        return fits and _is_covered(np.moveaxis(first, 1, -1), first.shape[1:2])
    return False


def _is_covered(other: np.ndarray, shape: Sequence[int]) -> bool:
    """Return whether each element of an operand is multiplied by a nonzero element of `other`.

    Args:
        other: the other operand.
        shape: shape of the operand, which is broadcast to `other` as in NumPy.
    """
    used = np.broadcast_to(other != 0, np.broadcast_shapes(other.shape, tuple(shape)))
    lead = used.ndim - len(shape)
    repeated = [lead + i for i, n in enumerate(shape) if n == 1 and used.shape[lead + i] != 1]
    return bool(used.any(axis=(*range(lead), *repeated)).all())


def _read(model: str | os.PathLike[str] | onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with its functions inlined, so that every node is an operator.

    Raises:
        SideError: there is no model at the path, or it stores floating-point numbers in another
            dtype than float32.
    """
    if not isinstance(model, onnx.ModelProto):
        try:
            model = onnx.load(os.fspath(model))
        except (OSError, TypeError, ValueError) as error:
            raise SideError(f"expected the path of an ONNX model, got {model}: {error}") from error
        except Exception as error:  # protobuf's DecodeError is no ValueError
            raise SideError(f"{model} is no ONNX model: {error}") from error
    model = inline_local_functions(model)
    narrow = {
        onnx.TensorProto.DataType.Name(each.data_type)
        for each in model.graph.initializer
        if each.data_type in FLOATS and each.data_type != onnx.TensorProto.FLOAT
    }
    if narrow:
        raise SideError(
            f"expected an ONNX model that stores float32, got {', '.join(sorted(narrow))}: export "
            "the trained model in float32 for the comparison"
        )
    return model


def _cast(name: str, x: Any, dtype: Any) -> np.ndarray:
    """Return an input in the model's dtype.

    Raises:
        SideError: the cast would change a value.
    """
    try:
        plain = x.detach().cpu() if hasattr(x, "detach") else x
        given = np.asarray(
            plain.float() if "bfloat16" in str(getattr(plain, "dtype", "")) else plain
        )
        cast = given.astype(dtype)
    except (TypeError, ValueError, AttributeError) as error:
        raise SideError(
            f"expected an array for the input {name}, got {x!r:.80}: {error}"
        ) from error
    if given.dtype.kind != "f" and not np.array_equal(given, cast):
        raise SideError(
            f"expected {dtype} for the input {name}, got {given.dtype} with values that the cast "
            "would change"
        )
    return cast


def _stage_names(graph: onnx.GraphProto) -> dict[str, str]:
    """Return the name of each stage by name of the tensor that holds it, in the order of the nodes.

    With modules, a stage is the result of a module's last node, named by the module's path. Without
    modules, every result of a node except outputs and constants is a stage.
    """
    last: dict[str, str] = {}
    outputs = {each.name for each in graph.output}
    for node in graph.node:
        for path in _modules(node):
            last.pop(path, None)
            last[path] = node.output[0]
    if last:
        return {name: path for path, name in last.items()}
    names = (name for node in graph.node if node.op_type != "Constant" for name in node.output)
    return {name: name for name in names if name and name not in outputs}


_INVENTED = re.compile(r"::|/|^\d+$|^[^.]*_\d+$")
"""Pattern of names that exporters make up for tensors; names of torch's parameters have a dot."""


def _parameter_names(graph: onnx.GraphProto) -> dict[str, str]:
    """Return the name of the stored tensor of each parameter, by the parameter's name
    (`OnnxSide.parameters`)."""
    user: dict[str, str] = {}
    for node in graph.node:
        for name in node.input:
            if modules := _modules(node):
                user.setdefault(name, modules[-1])
    found = {}
    for each in graph.initializer:
        is_named, one = _INVENTED.search(each.name) is None, math.prod(each.dims) == 1
        is_number = one or is_short(onnx.numpy_helper.to_array(each)).all()
        # A number may also have the name of an operation, such as `exp`, but no dot.
        is_parameter = "." in each.name if one else is_named
        if each.data_type in STORED and (is_parameter or not is_number):
            path = "" if is_named else user.get(each.name, "")
            found[f"{path}.{each.name}".lstrip(".")] = each.name
    return found


def _modules(node: onnx.NodeProto) -> list[str]:
    """Return the paths of the torch modules that a node is part of, outermost first."""
    held = {each.key: each.value for each in node.metadata_props}
    if scopes := held.get("pkg.torch.onnx.name_scopes"):
        # The first is the whole model, the last the node.
        return [path for path in re.findall(r"'([^']*)'", scopes)[1:-1] if path]
    # torch's older exporter: "/layers.0/norm/Add" is a node of the module layers.0.norm.
    parts = node.name.split("/")
    if parts[0] or len(parts) < 3:
        return []
    return [".".join(parts[1:end]) for end in range(2, len(parts))]


def _source(node: onnx.NodeProto) -> tuple[str, ...]:
    """Return where a node comes from: its name, and the source lines of the exported program."""
    held = {each.key: each.value for each in node.metadata_props}
    trace = held.get("pkg.torch.onnx.stack_trace", "")
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', trace)
    lines = (
        f"{Path(file).name}:{line} ({function})"
        for file, line, function in reversed(frames)
        if f"{os.sep}torch{os.sep}" not in file
    )
    return f"node {node.name or node.output[0]} ({node.op_type})", *lines


def _set(model: onnx.ModelProto, values: Mapping[str, np.ndarray]) -> None:
    """Replace stored tensors of a model, by name; their dtypes become those of `values`."""
    for each in model.graph.initializer:
        if each.name in values:
            value = np.asarray(values[each.name])
            each.CopyFrom(onnx.numpy_helper.from_array(value, each.name))


def _widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model whose stored numbers, casts, inputs and outputs are float64 in place
    of narrower dtypes."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for graph in _graphs(wide.graph):
        for each in graph.initializer:
            _widen(each)
    for node in (node for graph in _graphs(wide.graph) for node in graph.node):
        if node.op_type == "GroupNormalization":
            # onnx's reference of this operator casts to this type internally.
            node.attribute.append(onnx.helper.make_attribute("stash_type", onnx.TensorProto.DOUBLE))
        for each in node.attribute:
            _widen_attribute(node, each)
    for each in (*wide.graph.input, *wide.graph.output, *wide.graph.value_info):
        if each.type.tensor_type.elem_type in FLOATS:
            each.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    return wide


def _widen_attribute(node: onnx.NodeProto, attribute: onnx.AttributeProto) -> None:
    if attribute.type == onnx.AttributeProto.TENSOR:
        _widen(attribute.t)
    elif attribute.name in _TYPES and attribute.i in FLOATS:
        attribute.i = onnx.TensorProto.DOUBLE
    elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
        is_one = attribute.name == "value_float"
        value = np.asarray(attribute.f if is_one else attribute.floats, np.float64)
        tensor = onnx.numpy_helper.from_array(value)
        attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the bodies of its loops and conditions."""
    yield graph
    for node in graph.node:
        for each in node.attribute:
            for body in (each.g, *each.graphs):
                yield from _graphs(body)


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in FLOATS:
        value = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))


def _with_stages(side: OnnxSide, forced: Collection[str]) -> onnx.ModelProto:
    """Return a copy of a side's model that returns every stage too.

    A tensor in `forced` becomes an input; the value that the model computes for it is returned with
    the suffix `_COMPUTED`.
    """
    model = onnx.ModelProto()
    model.CopyFrom(side.model)
    graph = model.graph
    outputs = {each.name for each in graph.output}
    for node in graph.node:
        for i, name in enumerate(node.output):
            if name in forced:
                node.output[i] = f"{name}{_COMPUTED}"
    for name in side._stages:
        if name in forced:
            graph.input.append(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
            )
            graph.output.append(onnx.ValueInfoProto(name=f"{name}{_COMPUTED}"))
        if name not in outputs:
            graph.output.append(onnx.ValueInfoProto(name=name))
    return model
