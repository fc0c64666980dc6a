"""Comparison of a torch model that is deployed in few bits with the model that was trained.

Three questions are separate, and none needs a chosen tolerance:

1. Is every weight and buffer the trained one, rounded to its format? The bound of an element is
   half a step of the format, computed from the trained weights of its block and not from the stored
   scale.
2. If a layer rounds its inputs too, does it compute what the trained layer with the deployed
   weights computes on the rounded inputs? This module rounds the inputs in the same way, so the
   bound is that of sums in float32.
3. Does everything else compute what the trained program computes with the deployed weights? The two
   programs are compared as a port and its original (`parity.port`), so only rounding may differ. In
   both programs, a layer that rounds its inputs returns the result of the deployed layer, which
   question 2 has tested.

The cost of the format, which is the change of the outputs, is reported too. Source:
docs/your-own-port.md "What is deployed".
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from parity.engine.measure.metrics import relative_l2
from parity.few_bits import (
    EPS,
    InputFormat,
    decoded,
    format_of_weight,
    input_format,
    largest_share,
    rounded,
)
from parity.port.compare import Port, compare
from parity.port.report import Report
from parity.sides.side import AS_IS, Precision, Run, SideError, Trace

if TYPE_CHECKING:
    import torch

UNCHANGED = "unchanged"
_COMPILED = "_orig_mod."
"""Part that `torch.compile` adds to the name of a parameter, after the path of the compiled
module."""
_INPUT = "rounded_input"
"""Last part of the name of the stage that holds the input of a layer which rounds its inputs; the
first part is the layer's path."""


@dataclass(frozen=True)
class DeployedWeight:
    """Comparison of one parameter or buffer of the deployed model with the trained one."""

    name: str
    """Name of the parameter in the trained model."""
    format: str
    """Stored format, such as "int8, blocks of 1 x 32"; "" if the parameter is stored as it was
    trained."""
    share: float
    """Largest error of an element, divided by half a step of the format at that element; at most 1
    if the weight is the trained weight rounded to the format. NaN: the weight was not compared
    (`why`), or an element is NaN."""
    element: tuple[int, ...]
    """Index of the element with the largest share."""
    trained: float
    """Trained value of that element."""
    deployed: float
    """Deployed value of that element."""
    why: str = ""
    """Why the parameter was not compared, such as a format without a rule; empty if it was."""

    @property
    def holds(self) -> bool:
        """Whether every element is the trained value rounded to the format."""
        return self.share <= 1.0


@dataclass(frozen=True)
class DeployedLayer:
    """Comparison of one call of a layer that rounds its inputs with the trained layer.

    The trained layer gets the deployed weights and the same rounded inputs.
    """

    name: str
    """Path of the layer; the second call of the layer is named `path#2`."""
    format: str
    """Format of the inputs, such as "int8 by row"."""
    share: float
    """Largest error of an element of the result, divided by the largest error that float32 sums and
    ties in the rounding of the inputs can cause there; at most 1 if the layer computes what the
    trained layer computes. NaN: the layer was not compared (`why`), or an element is NaN."""
    element: tuple[int, ...]
    """Index of the element of the result with the largest share."""
    why: str = ""
    """Why the layer was not compared; empty if it was."""

    @property
    def holds(self) -> bool:
        """Whether the result is what the trained layer with the deployed weights computes from the
        rounded inputs."""
        return self.share <= 1.0


@dataclass(frozen=True)
class Deployment:
    """Result of `compare_deployed`."""

    weights: tuple[DeployedWeight, ...]
    """Every parameter and buffer, in the order of the trained model."""
    layers: tuple[DeployedLayer, ...]
    """Every call of a layer that rounds its inputs, and every such layer that was not called."""
    program: Report
    """Comparison of the rest of the program: the deployed program with the trained program that has
    the deployed weights."""
    cost: Mapping[str, float]
    """Relative L2 distance between the outputs of the deployed and of the trained model, by name of
    the output: what the format costs on these inputs."""

    @property
    def holds(self) -> bool:
        """Whether all weights are the trained weights rounded to their formats, and everything else
        computes what the trained program computes."""
        return all(part.holds for part in (*self.weights, *self.layers, self.program))

    def text(self) -> str:
        """Return the results as text: weights, layers, program, and what the format costs on these
        inputs (`cost`); every weight or layer that does not pass is listed with its error."""
        parts: dict[str, list[DeployedWeight | DeployedLayer]] = {}
        for weight in self.weights:
            parts.setdefault(f"weights, {weight.format or UNCHANGED}", []).append(weight)
        for layer in self.layers:
            parts.setdefault(f"layers with inputs in {layer.format}", []).append(layer)
        lines = []
        for name, group in parts.items():
            held = sum(part.holds for part in group)
            known = [part.share for part in group if not math.isnan(part.share)]
            worst = f"; largest error {max(known):.2f} of its bound" if known else ""
            lines.append(f"{name}: {held} of {len(group)} hold{worst}")
            lines += [f"  {_line(part)}" for part in group if not part.holds]
        verdict = "is the trained one" if self.program.holds else "is not the trained one"
        lines.append(f"the program with these weights {verdict}:")
        lines += [f"  {line}" for line in self.program.text().splitlines()]
        costs = (f"{name} {value:.2e}" for name, value in self.cost.items())
        lines.append(f"cost of the format on these inputs, relative L2: {', '.join(costs)}")
        return "\n".join(lines)


def compare_deployed(
    trained: torch.nn.Module,
    deployed: torch.nn.Module,
    *inputs: Any,
    call: Callable[..., Any] | None = None,
    **keywords: Any,
) -> Deployment:
    """Compare a deployed torch module with the module that was trained; return a `Deployment`.

    Formats with a rule: float16, bfloat16, float8; integers of 2 to 8 bits of torchao's `quantize_`
    and of `torch.ao.quantization.quantize_dynamic`. A weight in another format does not pass, and
    its `why` says so.

    Args:
        trained: the module with parameters in float32, in the mode (training or evaluation) to be
            compared.
        deployed: the same module, quantised, or returned by `torch.compile`.
        inputs: positional arguments of the call, as in `TorchSide`.
        call: function `call(module, *inputs, **keywords)`; None: `module(...)`.
        keywords: keyword arguments of the call.

    Raises:
        SideError: a parameter of the trained module is not float32, the deployed module lacks a
            parameter or has it in another shape, a module that is neither compiled nor scripted
            shares parameters with the trained one, a compiled module contains layers that round
            their inputs, or a program raises an error.
    """
    from parity.sides.torch_side import TorchSide

    original = TorchSide(trained, *inputs, call=call, **keywords)
    weights, values = _weights(trained, deployed)
    _check_apart(trained, deployed)
    with_these = original.with_parameters({})
    _set_values(with_these.module, values)
    side = _DeployedSide(deployed, with_these, call=call)
    calls = side.rounding_layers()
    shown = sorted({each.path for each in calls.values()})
    for path in shown:
        _show_input(with_these.module.get_submodule(path))
    side.shown = tuple(shown)
    after = side.run()
    fed = {name: after.stages[name] for name in calls}
    layers = [
        _layer(name, each, fed[name], trained.get_submodule(each.path), values)
        for name, each in calls.items()
    ]
    layers += _not_called(deployed, {each.path for each in calls.values()})
    program = compare(
        Port(
            "deployed",
            _Fed(with_these, fed) if fed else with_these,
            side,
            gradients=False,
            bfloat16=False,
        )
    )
    before = original.run(AS_IS)
    cost = {
        name: relative_l2(after.stages[name], before.stages[name])
        for name in before.outputs
        if name in after.outputs and after.stages[name].shape == before.stages[name].shape
    }
    return Deployment(tuple(weights), tuple(layers), program, cost)


def _check_apart(trained: torch.nn.Module, deployed: torch.nn.Module) -> None:
    """Raise a SideError if the deployed module holds parameters of the trained one itself.

    torch's `to`, `half` and many functions that quantise change a module in place, and a shallow
    copy shares its layers: the trained module is then changed too, and equal to the deployed one.
    A module that was compiled, scripted or exported shares the parameters of its source.
    """
    import torch

    kinds = (torch._dynamo.OptimizedModule, torch.jit.ScriptModule, torch.fx.GraphModule)
    if isinstance(deployed, kinds):
        return
    own = {id(tensor): name for name, tensor in trained.named_parameters()}
    shared = [own[id(tensor)] for tensor in deployed.parameters() if id(tensor) in own]
    if shared:
        raise SideError(
            f"the deployed module holds {len(shared)} parameters of the trained module itself, "
            f"such as {shared[0]}, so a change of them would be in both: quantise a copy, "
            "copy.deepcopy(trained)"
        )


def _weights(
    trained: torch.nn.Module, deployed: torch.nn.Module
) -> tuple[list[DeployedWeight], dict[str, np.ndarray]]:
    """Compare every parameter and buffer; return also the deployed values, decoded, by name.

    Raises:
        SideError: a parameter is not float32, is missing, or has another shape.
    """
    rows, values = [], {}
    found = dict(_values_of(deployed))
    # Tied parameters may be deployed in different formats, so each name counts.
    parameters = list(trained.named_parameters(remove_duplicate=False))
    for name, tensor in (*parameters, *trained.named_buffers(remove_duplicate=False)):
        is_parameter = len(rows) < len(parameters)
        plain = type(tensor.data).__name__ == "Tensor" and not tensor.is_quantized
        if not plain or (is_parameter and str(tensor.dtype) != "torch.float32"):
            raise SideError(
                f"expected trained parameters in float32, got {name}, a {type(tensor).__name__} of "
                f"{tensor.dtype}: pass the model that was trained, before it was cast or quantised"
            )
        here = tensor.detach().cpu().numpy()
        if name not in found:
            if not is_parameter:
                rows.append(DeployedWeight(name, "", math.nan, (), math.nan, math.nan, "missing"))
                continue
            raise SideError(
                f"the deployed module has no parameter {name}; it has "
                f"{', '.join(list(found)[:5]) or 'none'}. If it is wrapped in another module, pass "
                "the module inside and `call`. Modules that fuse or pack several parameters, such "
                "as quantised RNNs, are not supported"
            )
        stored = decoded(found[name].detach(), here, name)
        value = stored.value
        if value.shape != here.shape:
            raise SideError(
                f"{name}: the trained parameter has shape {here.shape}, the deployed one "
                f"{value.shape}"
            )
        # In float64, so that the difference of two float32 numbers is exact; others are compared
        # for equality.
        wide = value.astype(np.float64)
        differ = wide - here if here.dtype.kind == "f" else value != here
        error = np.abs(np.asarray(differ, np.float64))
        share, at = largest_share(error, stored.half)
        # Of a complex element, such as one of a table of rotations, the real part is shown.
        was, now = (float(np.real(x[at])) if x.size else math.nan for x in (here, value))
        share = math.nan if stored.why else share
        rows.append(DeployedWeight(name, stored.format, share, at, was, now, stored.why))
        values[name] = value
    return rows, values


def _values_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield parameters and buffers by name, also those that quantised modules hold packed."""
    for path, child in module.named_modules():
        if not type(child).__module__.startswith("torch.ao.nn.quantized"):
            continue
        for name in ("weight", "bias"):
            method = getattr(child, name, None)
            if callable(method) and (value := method()) is not None:
                yield f"{path}.{name}".lstrip(".").replace(_COMPILED, ""), value
    named = module.named_parameters(remove_duplicate=False)
    for name, value in (*named, *module.named_buffers(remove_duplicate=False)):
        yield name.replace(_COMPILED, ""), value


def _set_values(module: torch.nn.Module, values: Mapping[str, np.ndarray]) -> None:
    """Set a module's parameters and buffers to `values`, by name; tied ones become separate."""
    import torch

    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        tensor = torch.from_numpy(value.copy())
        if leaf in owner._parameters:
            device = owner._parameters[leaf].device  # type: ignore[union-attr]
            owner._parameters[leaf] = torch.nn.Parameter(tensor.to(device))
        else:
            held: Any = owner._buffers[leaf]
            owner._buffers[leaf] = tensor.to(held.device, held.dtype)


def _show_input(module: Any) -> Callable[[], None]:
    """Make the input of a layer a stage, `PATH.rounded_input`; return a function that removes the
    stage again."""
    import torch

    module.add_module(_INPUT, torch.nn.Identity())

    def hook(layer: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if positional:
            return (getattr(layer, _INPUT)(positional[0]), *positional[1:]), keywords
        return positional, keywords | {"input": getattr(layer, _INPUT)(keywords["input"])}

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)

    def undo() -> None:
        handle.remove()
        del module._modules[_INPUT]

    return undo


def _not_called(module: torch.nn.Module, called: set[str]) -> Iterator[DeployedLayer]:
    """Yield an entry of `Deployment.layers` for every layer that rounds its inputs but was not
    called as a module."""
    forms = {path: form for path, child in module.named_modules() if (form := input_format(child))}
    for name, weight in module.named_parameters():
        path = name.rpartition(".")[0]
        if path not in forms and (form := format_of_weight(weight)) is not None:
            forms[path] = form
    for path, form in forms.items():
        if path.replace(_COMPILED, "") not in called:
            why = "not called as a module on these inputs"
            yield DeployedLayer(path, form.text, math.nan, (), why)


class _DeployedSide:
    """The deployed module, run unmodified; its parameters are reported decoded to float32.

    Low-bit kernels do not compute in float64, so this side can only run unmodified. It is compared
    with the trained program, which gets the same decoded parameters.
    """

    kind = "torch"

    def __init__(
        self, module: torch.nn.Module, like: Any, *, call: Callable[..., Any] | None
    ) -> None:
        from parity.sides.torch_side import TorchSide

        inputs, keywords = like.arguments
        self._side = TorchSide(module, *inputs, call=call, **keywords)
        # Otherwise a module with parameters in another dtype would run as a copy in float32.
        self._side._copies[Precision.FLOAT32] = module
        self._parameters = like.parameters()
        self.shown: tuple[str, ...] = ()
        """Paths of the layers whose inputs are stages."""

    def parameters(self) -> Mapping[str, np.ndarray]:
        """Return the decoded parameters, by the names of the trained module."""
        return self._parameters

    def inputs(self) -> dict[str, np.ndarray]:
        """Return the inputs, by name."""
        return self._side.inputs()

    def rounding_layers(self) -> dict[str, _RoundedInputs]:
        """Run once and return the inputs of each call of a layer that rounds its inputs.

        Keys are names of stages: the layer's path, `path#2` for its second call.

        Raises:
            SideError: such a layer is inside of a compiled module, whose stages cannot be read.
        """
        found: dict[str, _RoundedInputs] = {}
        counts: dict[str, int] = {}
        modules = self._side.module.named_modules()
        layers = {path: form for path, m in modules if path and (form := input_format(m))}
        if inside := [path for path in layers if _COMPILED in f"{path}."]:
            raise SideError(
                f"{inside[0].replace(_COMPILED, '')} rounds its inputs inside of a compiled "
                "module, where they cannot be seen: pass the quantised module before torch.compile"
            )

        def hook_of(path: str, form: InputFormat) -> Callable[..., None]:
            def hook(_module: Any, positional: tuple[Any, ...], keywords: dict[str, Any]) -> None:
                counts[path] = counts.get(path, 0) + 1
                name = path if counts[path] == 1 else f"{path}#{counts[path]}"
                x = positional[0] if positional else keywords["input"]
                values = x.detach().float().cpu().numpy().astype(np.float64)
                found[name] = _RoundedInputs(path, form, values)

            return hook

        hooks = [
            self._side.module.get_submodule(path).register_forward_pre_hook(
                hook_of(path, form), with_kwargs=True
            )
            for path, form in layers.items()
        ]
        try:
            self._side.run()
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def run(self, how: Run = AS_IS) -> Trace:
        """Run the deployed module, unmodified.

        Raises:
            SideError: the settings ask for another run, or the module raises an error.
        """
        if how != AS_IS:
            raise SideError(
                "a deployed module runs only unmodified, in its own precision: call run() without "
                "`how`"
            )
        with contextlib.ExitStack() as stack:
            for path in self.shown:
                stack.callback(_show_input(self._side.module.get_submodule(path)))
            return self._side.run()


class _Fed:
    """The trained program as a side, with given results in place of those of some stages.

    Args:
        side: the trained program.
        values: results by name of the stage; later stages are computed from them.
    """

    def __init__(self, side: Any, values: Mapping[str, np.ndarray]) -> None:
        self.kind, self.parameters, self.inputs = side.kind, side.parameters, side.inputs
        self._side, self._values = side, values

    def run(self, how: Run = AS_IS) -> Trace:
        """Run with the settings `how`; replaced stages are returned with their given results.

        Raises:
            SideError: the module raises an error.
        """
        trace = self._side.run(replace(how, forced={**self._values, **how.forced}))
        given = {n: v.astype(trace.stages[n].dtype) for n, v in self._values.items()}
        return replace(trace, stages=trace.stages | given)


@dataclass(frozen=True)
class _RoundedInputs:
    """Inputs of one call of a layer that rounds its inputs."""

    path: str
    format: InputFormat
    values: np.ndarray
    """The inputs before they are rounded, (..., in), float64."""


def _layer(
    name: str,
    inputs: _RoundedInputs,
    result: np.ndarray,
    trained: torch.nn.Module,
    values: Mapping[str, np.ndarray],
) -> DeployedLayer:
    """Compare one call of a linear layer with the trained layer on the rounded inputs.

    Both layers have the deployed weights.

    Args:
        name: name of the stage.
        inputs: the deployed layer's inputs.
        result: the deployed layer's result, (..., out).
        trained: the trained layer; only its class is used.
        values: the deployed module's parameters, decoded, by name of the parameter.
    """
    form, x = inputs.format, inputs.values
    why = form.why
    if type(trained).__name__ not in ("Linear", "NonDynamicallyQuantizableLinear"):
        why = f"no rule for inputs of a {type(trained).__name__}"
    elif not x.size:
        why = "no rows on these inputs"
    if why:
        return DeployedLayer(name, form.text, math.nan, (), why)
    weight = values[f"{inputs.path}.weight"].astype(np.float64).T
    bias = np.asarray(values.get(f"{inputs.path}.bias", 0.0), np.float64)
    size = np.abs(weight)
    best = (math.inf, ())
    for numbers, ties in rounded(x, form):
        error = np.abs(result.astype(np.float64) - (numbers @ weight + bias))
        # A sum of n products in float32 is off by at most n roundings of the sum of magnitudes.
        sums = np.abs(numbers) @ size + np.abs(bias)
        share = largest_share(error, ties @ size + (x.shape[-1] + 4) * EPS * sums + 2.0**-149)
        if math.isnan(share[0]):
            return DeployedLayer(name, form.text, *share)
        best = min(best, share)
    return DeployedLayer(name, form.text, *best)


def _line(part: DeployedWeight | DeployedLayer) -> str:
    if part.why:
        return f"{part.name}: {part.why}, so it was not compared"
    text = f"{part.name}: {part.share:.3g} of its bound at {list(part.element)}"
    if isinstance(part, DeployedLayer):
        return text
    return f"{text}: trained {part.trained:.6g}, deployed {part.deployed:.6g}"
