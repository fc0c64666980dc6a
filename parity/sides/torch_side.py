"""A side written in torch: every call of a submodule is a stage, read by a forward hook."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np
import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from parity.engine.programs.rounding import digest, is_short
from parity.sides.side import (
    AS_IS,
    OUTPUT,
    Precision,
    Rounding,
    Run,
    SideError,
    Trace,
    check_parameters,
    entry_name,
    exact_number,
    fields_of,
    float_number,
    kind_of_result,
    named_once,
    no_derivative,
    stopped,
)
from parity.sides.torch_lift import Lift, lifted
from parity.sides.torch_precision import full_precision
from parity.sides.torch_state import (
    changed_state,
    held_tensors,
    is_floating,
    is_readable,
    unchanged,
)

DTYPES = {
    Precision.FLOAT32: torch.float32,
    Precision.FLOAT64: torch.float64,
    Precision.BFLOAT16: torch.bfloat16,
}
_COMPILED = "_orig_mod"
"""Attribute of a module made by `torch.compile` that holds the original module."""


class TorchSide:
    """A torch module; stages are the results of its submodules, by path.

    Args:
        module: the module, in the mode to be compared; usually `module.eval()`.
        inputs: positional arguments of the call: tensors, arrays, or anything else. Arrays become
            tensors on the device of the module's parameters and buffers, if they have one device.
        call: function `call(module, *inputs, **keywords)` that is run instead of `module(...)`, for
            other methods or several steps; None: `module(...)`.
        keywords: keyword arguments of the call.

    Raises:
        SideError: `module` is no `torch.nn.Module`.
    """

    kind = "torch"

    def __init__(
        self,
        module: torch.nn.Module,
        *inputs: Any,
        call: Callable[..., Any] | None = None,
        **keywords: Any,
    ) -> None:
        self.module, self.call = module_of(module), call
        device = _device(module)
        self.arguments = _map((inputs, keywords), lambda x: _tensor(x, device))
        self._copies: dict[Precision, torch.nn.Module] = {}
        self._exact: dict[str, np.ndarray] = {}
        """Values that some parameters have in float64 runs only, by parameter name."""
        self._shared: frozenset[bytes] = frozenset()
        """Digests of the tables that the other side holds too (`sharing`)."""
        self._unseen = False
        """Whether tensors report float32 in float64 runs, because the module rejects float64."""

    def parameters(self) -> dict[str, np.ndarray]:
        """Return every parameter and floating-point buffer by path.

        A tied parameter is listed under its first path only. Complex arrays become real pairs
        (..., 2).

        Raises:
            SideError: a parameter or buffer cannot be read as an array, such as a sparse tensor, or
                a tensor was made under `torch.inference_mode`.
        """
        named = dict(self.module.named_parameters())
        buffers = self.module.named_buffers()
        named |= {name: b for name, b in buffers if is_floating(b) and name not in named}
        for name, tensor in named.items():
            if not is_readable(tensor):
                raise SideError(
                    "expected dense tensors of float16, bfloat16, float32 or float64, got "
                    f"{name}, a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout}, on "
                    f"{tensor.device}: initialise or convert it first, or make it no parameter or "
                    "buffer"
                )
        for name, tensor in (*named.items(), *held_tensors(self.module)):
            if tensor.is_inference():
                raise SideError(
                    f"expected tensors that autograd can use, got {name}, made under "
                    "torch.inference_mode: pass copy.deepcopy(module), made outside of it"
                )
        return {name: _array(tensor) for name, tensor in named.items()}

    def with_parameters(self, values: Mapping[str, np.ndarray]) -> TorchSide:
        """Return a copy of this side and its module with other values of some parameters.

        Raises:
            SideError: a name in `values` is unknown, or a value has another shape.
        """
        check_parameters(values, self.parameters())
        side = copy.copy(self)
        side.module, side._copies = _copy(self.module), {}
        _set(side.module, values)
        exact = {name: x for name, x in self._exact.items() if name not in values}
        return side.with_exact(exact) if exact else side

    def with_exact(self, values: Mapping[str, np.ndarray]) -> TorchSide:
        """Return a copy of this side with other values of some parameters in float64 runs.

        See `TakesExactParameters`.

        Raises:
            SideError: a name in `values` is unknown, or a value has another shape.
        """
        check_parameters(values, self.parameters())
        side = copy.copy(self)
        side._exact = {**self._exact, **values}
        wide = _copy(self._in(Precision.FLOAT64))
        side._copies = {**self._copies, Precision.FLOAT64: wide}
        _set(wide, values)
        return side

    def with_inputs(self, change: Callable[[np.ndarray], np.ndarray]) -> TorchSide:
        """Return a copy of this side with `change` applied to each input tensor, as an array,
        except complex ones; see `TakesInputs`."""

        def changed(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.is_complex():
                return x
            return torch.from_numpy(np.array(change(_array(x)), np.float64)).to(x)

        side = copy.copy(self)
        side.arguments = _map(self.arguments, changed)
        return side

    def tables(self) -> list[np.ndarray]:
        """Return the floating-point buffers and tensors held as plain attributes that have several
        elements; see `HoldsTables`."""
        found = [*self.module.buffers(), *(x for _, x in held_tensors(self.module))]
        return [_unpaired(x) for x in found if is_floating(x) and is_readable(x) and x.numel() > 1]

    def sharing(self, tables: Collection[np.ndarray]) -> TorchSide:
        """Return a copy of this side that does not perturb these tables (constant tensors); see
        `HoldsTables`."""
        side = copy.copy(self)
        side._shared = frozenset(map(digest, tables))
        return side

    def inputs(self) -> dict[str, np.ndarray]:
        """Return every input tensor by name; complex tensors as real pairs (..., 2)."""
        inputs, keywords = self.arguments
        named = {str(i): x for i, x in enumerate(inputs)} | keywords
        leaves = (leaf for key, x in named.items() for leaf in fields_of(x, key))
        return {name: _array(x) for name, x in leaves if isinstance(x, torch.Tensor)}

    def operation_results(self) -> list[np.ndarray]:
        """Return the results of all operations of a float64 run, as a list of arrays.

        The intermediate results of fused operations (`torch_lift.FUSED`) are included.
        """
        module = self._in(Precision.FLOAT64)
        with unchanged(module), lifted(None, self._unseen) as mode, torch.no_grad():
            mode.results = []
            inputs, keywords = _map(self.arguments, lambda x: _cast(x, torch.float64))
            (self.call or (lambda m, *a, **k: m(*a, **k)))(module, *inputs, **keywords)
            results, mode.results = mode.results, None
        return [_array(x) for x in results]

    def run(self, how: Run = AS_IS) -> Trace:
        """Run the module once with these settings.

        Raises:
            SideError: the module raises an error; a stage or output that `how` names does not
                exist; `how` requests perturbations in another precision than float64; or the module
                is a TorchScript module, and `how` requests another precision than float32.
        """
        if how.precision is not Precision.FLOAT32 and any(
            isinstance(m, torch.jit.ScriptModule) for m in self.module.modules()
        ):
            raise SideError(
                "a TorchScript module runs in float32 only, since its dtypes are fixed: pass the "
                "module from which torch.jit made it"
            )
        if how.rounding is not None and how.precision is not Precision.FLOAT64:
            raise SideError(
                "a torch side supports perturbation by rounding in float64 only: use "
                "Run(Precision.FLOAT64, rounding=...)"
            )
        try:
            return self._run(how)
        except SideError:
            if how.precision is not Precision.FLOAT64 or self._unseen:
                raise
            self._unseen = True
            with contextlib.suppress(SideError):
                return self._run(how)
            # The module fails for another reason than float64; its first error is the useful one.
            self._unseen = False
            raise

    def _run(self, how: Run) -> Trace:
        precision = self._precision(how)
        module = self._in(precision)
        if how.rounding is Rounding.CONSTANTS:
            module = _with_moved_tables(module, how, self._shared)
        stages: dict[str, torch.Tensor] = {}
        gradients = how.cotangents is not None
        with contextlib.ExitStack() as stack:
            stack.enter_context(full_precision())
            kept = stack.enter_context(unchanged(module))
            unseen = stack.enter_context(_watched(module, stages, how.forced))
            stack.enter_context(self._computing(how))
            stack.enter_context(torch.set_grad_enabled(gradients))
            inputs, keywords = _map(self.arguments, lambda x: _cast(x, DTYPES[precision]))
            try:
                call = self.call or (lambda m, *a, **k: m(*a, **k))
                result = call(module, *inputs, **keywords)
            except Exception as error:
                raise stopped("torch", how.precision, self.inputs(), error) from error
            if lost := sorted(set(how.forced) - set(stages)):
                raise SideError(f"no stage {', '.join(lost)}; there are {', '.join(stages)}")
            results = named_once(fields_of(result, OUTPUT), "results")
            results = {name: _dense(name, x) for name, x in results.items()}
            numbers = _float_numbers(results, how.precision)
            results |= numbers
            # Copied: the result may be a buffer that the next run overwrites.
            outputs = {n: _pairs(x).clone() for n, x in results.items() if is_floating(x)}
            if not outputs:
                kinds = {n: getattr(x, "dtype", type(x).__name__) for n, x in results.items()}
                raise SideError(f"expected the module to return floating tensors, got {kinds}")
            if gradients and how.cotangents and {*how.cotangents} <= {*numbers}:
                raise SideError(no_derivative(how.cotangents))
            derivatives = _gradients(module, outputs, how) if gradients else {}
            updated = tuple(changed_state(module, kept))
            # Read here: a result may be a buffer or an attribute that the next lines restore.
            exact, unread = _other_results({n: x for n, x in results.items() if n not in outputs})
        arrays = {name: self._read(x) for name, x in (stages | outputs).items()}
        notices = []
        for reason in dict.fromkeys(unseen.values()):
            names = ", ".join(name for name, why in unseen.items() if why == reason)
            notices.append(f"{reason} are not captured: {names}")
        if how.precision is Precision.FLOAT64 and self._unseen:
            notices.append(
                "the module refuses float64: it ran in float64 while its tensors reported float32"
            )
        trained = ((name, p.requires_grad) for name, p in module.named_parameters())
        return Trace(
            arrays,
            tuple(outputs),
            derivatives,
            tuple(notices),
            exact=exact,
            unread=unread,
            frozen=tuple(name for name, is_trained in trained if not is_trained),
            updated=updated,
        )

    def _precision(self, how: Run) -> Precision:
        """Return the precision of parameters and inputs in a run."""
        return how.precision

    def _computing(self, how: Run) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the module computes in the precision of a run."""
        if how.precision is not Precision.FLOAT64:
            return contextlib.nullcontext()
        return lifted(how.seed if how.rounding is Rounding.OPERATIONS else None, self._unseen)

    def _read(self, x: torch.Tensor) -> np.ndarray:
        """Return the value of a stage or output of the run that just ended."""
        return _array(x)

    def _in(self, precision: Precision) -> torch.nn.Module:
        floats = (x.dtype for x in self.module.state_dict().values() if is_floating(x))
        if precision is Precision.FLOAT32 and {*floats} <= {torch.float32, torch.complex64}:
            return self.module
        if precision not in self._copies:
            copied = _in_dtype(_copy(self.module), DTYPES[precision])
            if precision is Precision.FLOAT64:
                _widen_attributes(self.module, copied)
            self._copies[precision] = copied
        return self._copies[precision]


def module_of(program: Any) -> torch.nn.Module:
    """Return `program` if it is a torch module.

    Raises:
        SideError: `program` is something else.
    """
    if isinstance(program, torch.nn.Module):
        return program
    found = f"expected a torch.nn.Module, got {type(program).__name__}"
    if isinstance(program, torch.export.ExportedProgram):
        found += ": pass its `module()`"
    raise SideError(found)


def _float_numbers(results: Mapping[str, Any], precision: Precision) -> dict[str, torch.Tensor]:
    """Return the results that are floating-point or complex numbers, or NumPy arrays of them, as
    tensors by name."""
    # Through float64, which NumPy and torch share; NumPy has no native bfloat16.
    found = {n: float_number(x, np.float64) for n, x in results.items()}
    dtype = DTYPES[precision]
    return {n: torch.from_numpy(x.copy()).to(dtype) for n, x in found.items() if x is not None}


def _other_results(results: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return, both by name, the integer and bool results as arrays, and descriptions of the other
    results, which cannot be compared."""
    exact: dict[str, np.ndarray] = {}
    unread: dict[str, str] = {}
    for name, x in results.items():
        # Copied: the result may be a buffer that the next run overwrites.
        value = _array(x.clone()) if isinstance(x, torch.Tensor) else exact_number(x)
        if value is None:
            unread[name] = kind_of_result(x)
        else:
            exact[name] = value
    return exact, unread


@contextlib.contextmanager
def _watched(
    module: torch.nn.Module, stages: dict[str, torch.Tensor], forced: Mapping[str, np.ndarray]
) -> Iterator[dict[str, str]]:
    """Within this context, store the results of every submodule's calls in `stages`, by path, and
    replace those that `forced` names.

    Yield the results that cannot be stored: by name, a description such as "results inside
    torch.func". The name of a repeated call gets the suffix `#2`, `#3` and so on.
    """
    unseen: dict[str, str] = {}

    def hook_of(path: str) -> Callable[..., Any]:
        def hook(_module: Any, _inputs: Any, result: Any) -> Any:
            names = {}
            # Most modules return one tensor; traversing it would cost as much as copying it.
            one = isinstance(result, torch.Tensor)
            for name, x in [(path, result)] if one else fields_of(result, path):
                if not is_floating(x):
                    continue
                if is_functorch_wrapped_tensor(x):
                    # A wrapper for one row of a `vmap`, or a dual number: it has no plain value.
                    unseen[name] = "results inside torch.func"
                    continue
                if not is_readable(x):
                    unseen[name] = "results that are no dense tensors"
                    continue
                count, unique = 2, name
                while unique in stages:
                    unique, count = f"{name}#{count}", count + 1
                # Copied: a later in-place operation would change it.
                stages[unique] = _pairs(x.detach()).clone()
                names[name] = unique
            if not any(unique in forced for unique in names.values()):
                return None
            return _replaced(result, path, {n: forced[u] for n, u in names.items() if u in forced})

        return hook

    hooks = [
        m.register_forward_hook(hook_of(p))
        for p, m in module.named_modules()
        if p and _stages_at(m, p)
    ]
    try:
        yield unseen
    finally:
        for hook in hooks:
            hook.remove()


def _stages_at(module: torch.nn.Module, path: str) -> bool:
    """Return whether a hook may read the results of a submodule.

    TorchScript has no hooks. Inside a compiled module a hook would split the program that users run
    into several, so only the compiled module's own results are read.
    """
    return not isinstance(module, torch.jit.ScriptModule) and _COMPILED not in path.split(".")


def _replaced(value: Any, name: str, by: Mapping[str, np.ndarray]) -> Any:
    """Return a result with some of its fields replaced.

    Args:
        value: the result, of any structure.
        name: name of the result.
        by: new values, by the name that `fields_of` gives to the field.
    """
    make = cast("Callable[..., Any]", type(value))
    if isinstance(value, torch.Tensor):
        if name not in by:
            return value
        # Copied: the module may write to it. Cast to the dtype that the tensor really has, which
        # may differ from the reported one (`Unseen`).
        other = torch.from_numpy(np.array(by[name])).to(_pairs(value), copy=True)
        other = torch.view_as_complex(other) if value.is_complex() else other
        return other.reshape(value.shape)
    if isinstance(value, Mapping):
        entries = {k: _replaced(v, entry_name(name, k), by) for k, v in value.items()}
        return make(**entries) if dataclasses.is_dataclass(value) else make(entries)
    if fields := getattr(value, "_fields", None):
        return make(*(_replaced(getattr(value, f), f"{name}.{f}", by) for f in fields))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = {f: _replaced(getattr(value, f), f"{name}.{f}", by) for f in names}
        return dataclasses.replace(value, **changed)
    if isinstance(value, (tuple, list)):
        return make(_replaced(v, f"{name}[{i}]", by) for i, v in enumerate(value))
    return value


def _gradients(
    module: torch.nn.Module, outputs: Mapping[str, torch.Tensor], how: Run
) -> dict[str, np.ndarray]:
    cotangents = how.cotangents or {}
    if lost := sorted(set(cotangents) - set(outputs)):
        raise SideError(f"no output {', '.join(lost)}; there are {', '.join(outputs)}")
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    used = {n: c for n, c in cotangents.items() if outputs[n].requires_grad}
    # A frozen module, and outputs that need no gradient, have zero gradients.
    gradients: Sequence[torch.Tensor | None] = [None] * len(named)
    if used and named:
        gradients = torch.autograd.grad(
            [outputs[name] for name in used],
            list(named.values()),
            [torch.as_tensor(np.asarray(c)).to(outputs[n]) for n, c in used.items()],
            allow_unused=True,
        )
    return {
        name: np.zeros_like(_array(p)) if g is None else _array(g)
        for (name, p), g in zip(named.items(), gradients, strict=True)
    }


def _set(module: torch.nn.Module, values: Mapping[str, np.ndarray]) -> None:
    """Write values into the parameters and buffers of these names, cast to their dtypes."""
    named = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    with torch.no_grad():
        for name, value in values.items():
            tensor, other = named[name], torch.from_numpy(np.array(value, np.float64))
            tensor.copy_(torch.view_as_complex(other) if tensor.is_complex() else other)


def _with_moved_tables(
    module: torch.nn.Module, how: Run, shared: Collection[bytes]
) -> torch.nn.Module:
    """Return a copy of a module whose precomputed tables are perturbed by float32 rounding.

    Tables are buffers and tensors held as plain attributes. If the parameters that both sides share
    are known (`Run.shared`), all other parameters are perturbed too: the other side may compute
    them in float64, such as positions.

    Args:
        module: the module, in float64.
        how: settings of the run.
        shared: digests of tables that stay unperturbed (`TorchSide.sharing`).
    """

    def is_moved(value: Any) -> bool:
        if not is_floating(value) or not is_readable(value):
            return False
        return not (shared and digest(_unpaired(value)) in shared)

    moved = _copy(module)
    generator = torch.Generator().manual_seed(how.seed)
    tables = dict(moved.named_buffers())
    # An empty set is known too: a port may hold every parameter in another order or as a sum.
    if how.shared is not None:
        tables |= dict(moved.named_parameters())
    with lifted(how.seed) as mode, torch.no_grad():
        mode.signs = generator
        for name, table in tables.items():
            if name not in (how.shared or ()) and is_moved(table):
                table.copy_(_moved_table(mode, table))
        for inner in moved.modules():
            for name, value in vars(inner).items():
                if is_moved(value):
                    setattr(inner, name, _moved_table(mode, value))
    return moved


def _moved_table(mode: Lift, table: torch.Tensor) -> torch.Tensor:
    """Return a table (constant tensor) perturbed by rounding; numbers of few digits (`is_short`)
    are unchanged."""
    if table.is_complex():
        return torch.view_as_complex(_moved_table(mode, _pairs(table)).contiguous())
    short = torch.from_numpy(is_short(_array(table))).to(table.device)
    return torch.where(short, table, mode.moved(table, 1.0))


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    """Return a deep copy of a module, even of one that stores a result of its last call.

    Raises:
        SideError: the module cannot be copied.
    """
    held = (x for inner in module.modules() for x in vars(inner).values())
    # torch copies neither results of earlier calls nor nested tensors itself.
    alone = (x for x in held if isinstance(x, torch.Tensor) and (x.is_nested or not x.is_leaf))
    try:
        return copy.deepcopy(module, {id(x): x.detach().clone() for x in alone})
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise SideError(
            f"copy.deepcopy of {type(module).__name__} fails, and runs in other precisions need a "
            f"copy: {type(error).__name__}: {reason}; remove what it cannot copy from the module, "
            "or give its class a __deepcopy__"
        ) from error


def _widen_attributes(module: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Cast the tensors that `copied`, a copy of a module, holds as attributes to float64, in place,
    except results of earlier calls.

    A call may write to such a tensor in place, which would be lost in a temporary copy of another
    dtype. A result, such as the weight of `torch.nn.utils.weight_norm`, is computed again by each
    call.
    """
    # By name: a module may copy itself in its own way.
    leaves = {name for name, x in held_tensors(module) if is_floating(x) and x.is_leaf}
    for name, x in held_tensors(copied):
        if name in leaves:
            x.data = x.data.to(_dtype_like(x, torch.float64))


def _in_dtype(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Return a module with its floating-point tensors cast to a dtype, complex ones to the complex
    dtype that goes with it (`_dtype_like`)."""
    if not any(x.is_complex() for x in (*module.parameters(), *module.buffers())):
        # `Module.to` may be overridden to keep certain tensors in a fixed dtype.
        module = module.to(dtype)
    else:
        module = module._apply(lambda x: x.to(_dtype_like(x, dtype)))
    if dtype is torch.float64:
        # Widen also the tensors that the module keeps in float32. Otherwise their gradients would
        # be rounded to float32, or autograd would reject a dtype other than the recorded one.
        for x in (*module.parameters(), *module.buffers()):
            x.data = x.data.to(_dtype_like(x, dtype))
    return module


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _map(v, function) for key, v in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_map(v, function) for v in value)
    if isinstance(value, list):
        return [_map(v, function) for v in value]
    return function(value)


def _device(module: torch.nn.Module) -> torch.device | None:
    """Return the device of a module's parameters and buffers; None if there are several devices or
    none."""
    devices = {x.device for x in (*module.parameters(), *module.buffers())}
    return devices.pop() if len(devices) == 1 else None


def _tensor(x: Any, device: torch.device | None) -> Any:
    """Return an array as a tensor on a device; anything else unchanged."""
    if isinstance(x, np.generic) or type(x).__module__.partition(".")[0] in ("jax", "jaxlib"):
        x = np.asarray(x)
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.astype(np.float32)).to(device, torch.bfloat16)
    tensor = torch.from_numpy(np.array(x)).to(device)
    # torch indices are int64; JAX's are int32.
    return tensor.long() if tensor.dtype in (torch.int32, torch.uint32) else tensor


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """Return a copy of an input in the dtype of the run; other values than tensors unchanged."""
    # Copied even if the dtype is right: a module may modify its input in place.
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(_dtype_like(x, dtype), copy=True)


def _dtype_like(x: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor has in a run in `dtype`.

    Complex tensors become complex128 for float64, else complex64. Integers keep their dtype.
    """
    if x.is_complex():
        return torch.complex128 if dtype is torch.float64 else torch.complex64
    return dtype if x.is_floating_point() else x.dtype


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor (...,) as its parts (..., 2); see `parity.sides.complex_pairs`."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _dense(name: str, x: Any) -> Any:
    """Return a result unchanged, but a sparse tensor as a dense one that can be differentiated.

    Raises:
        SideError: the result is a nested tensor, whose rows may have different lengths.
    """
    if not isinstance(x, torch.Tensor) or (x.layout is torch.strided and not x.is_nested):
        return x
    if x.is_nested:
        raise SideError(
            f"expected dense results, got {name}, a nested tensor: return "
            "torch.nested.to_padded_tensor of it"
        )
    return x.to_dense()


def _unpaired(x: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array; a complex one as a complex array, not as pairs."""
    return x.detach().resolve_conj().resolve_neg().cpu().numpy() if x.is_complex() else _array(x)


def _array(x: torch.Tensor) -> np.ndarray:
    held = _pairs(x.detach()).resolve_neg().cpu()
    if held.dtype is torch.bfloat16:
        return held.float().numpy().astype(ml_dtypes.bfloat16)
    return held.numpy()
