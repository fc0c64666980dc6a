"""Tells which tensors of a torch module can be read, and restores its state after a call.

Source: docs/your-own-port.md "Sides".
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def is_floating(x: Any) -> bool:
    """Return whether a value is a tensor of floating-point or complex numbers."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def is_readable(x: torch.Tensor) -> bool:
    """Return whether a tensor's numbers can be read as an array.

    The numbers are readable if the tensor is dense and initialised, and NumPy or ml_dtypes has its
    dtype.
    """
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    plain += (torch.complex64, torch.complex128)
    lazy = torch.nn.parameter.UninitializedBuffer, torch.nn.parameter.UninitializedParameter
    made = not isinstance(x, lazy) and not x.is_meta
    dense = made and not x.is_nested and x.layout is torch.strided
    # Integers, of quantised weights for example, are read unchanged.
    return dense and (x.dtype in plain or not is_floating(x))


@contextlib.contextmanager
def unchanged(module: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Restore a module's parameters, buffers and attributes on exit; yield copies of the values of
    its tensors by name.

    A call may change parameters and buffers: statistics in training mode, or the rows of an
    embedding with `max_norm`. If a port's arrays share memory with the module, such a change would
    reach the port too, and the comparison would miss the difference. A call may also keep a
    recurrent state or a cache as an attribute, and every run must begin with the same one.
    """
    modules, buffers = [*module.modules()], dict(module.named_buffers())
    tensors = dict(_state_of(module))
    # Buffers that a call may fill, such as a cache: `register_buffer("cache", None)`.
    empty = [(inner, n) for inner in modules for n, x in inner._buffers.items() if x is None]
    kept = {name: x.detach().clone() for name, x in (*tensors.items(), *held_tensors(module))}
    attributes = [_Attributes(inner) for inner in modules]
    try:
        yield kept
    finally:
        for inner, name in empty:
            inner._buffers[name] = None
        # Parameters, buffers or modules that a first call made stay, and so do the attributes that
        # record this.
        made = {*dict(_state_of(module))} != {*tensors} or [*module.modules()] != modules
        with torch.no_grad():
            _put_back(module, tensors, kept, buffers)
            for held in attributes if not made else ():
                held.put_back()


def _put_back(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    kept: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> None:
    """Restore the parameters and buffers of a module after a call.

    Args:
        module: the module.
        tensors: its parameters and buffers before the call, by name.
        kept: their values before the call, by name.
        buffers: its buffers before the call, by name.
    """
    state = dict(_state_of(module))
    for name, tensor in tensors.items():
        if state.get(name) is not tensor:
            # Put it back: the new tensor may share memory with the user's arrays.
            path, _, leaf = name.rpartition(".")
            owner = dict(module.named_modules())[path]
            if isinstance(owner, torch.jit.ScriptModule):
                # Its tables of tensors are fixed; only an assignment reaches the compiled module.
                setattr(owner, leaf, tensor)
            else:
                owner._buffers.pop(leaf, None)
                owner._parameters.pop(leaf, None)
                held = owner._buffers if name in buffers else owner._parameters
                held[leaf] = cast("Any", tensor)
        _refill(tensor, kept[name], was_leaf=True)


def changed_state(module: torch.nn.Module, kept: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of parameters, buffers and tensors held as attributes that are new or differ
    from their values in `kept`."""
    # Values are compared because writes through `.data` do not change a tensor's version counter.
    state = [
        name
        for name, x in _state_of(module)
        if name not in kept
        or (kept[name].shape, kept[name].dtype) != (x.shape, x.dtype)
        or not _same(kept[name], x)
    ]
    # A weight that each call computes again, such as that of `torch.nn.utils.weight_norm`, is a
    # float64 tensor after a float64 run, and no state.
    return state + [
        name
        for name, x in held_tensors(module)
        if name not in kept
        or kept[name].shape != x.shape
        or (kept[name].dtype is x.dtype and not _same(kept[name], x))
    ]


_MODULE = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has, such as its parameters and hooks."""
_LISTS, _MAPPINGS = (list, deque), (dict, OrderedDict, defaultdict)
"""Types of containers whose content is restored; a class derived from one may behave otherwise."""


class _Attributes:
    """The attributes of one module before a call, with copies of the tensors and containers in them
    that the call could change in place.

    Attributes that are results of an earlier call are detached during the call, since autograd may
    have freed the graph that computed them.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.held = module, _attributes_of(module)
        self.contents = [*_contents(self.held)]
        tensors = {name: x for name, x in self.held.items() if isinstance(x, torch.Tensor)}
        self.leaves = {name for name, x in tensors.items() if x.is_leaf}
        for name in {*tensors} - self.leaves:
            vars(module)[name] = tensors[name].detach()

    def put_back(self) -> None:
        for name in {*_attributes_of(self.module)} - {*self.held}:
            del vars(self.module)[name]
        vars(self.module).update(self.held)
        for value, content, was_leaf in self.contents:
            _refill(value, content, was_leaf=was_leaf)


def _attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module: not those of every `torch.nn.Module`, which hold its
    parameters, buffers, submodules and hooks."""
    return {name: x for name, x in vars(module).items() if name not in _MODULE}


def held_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the readable tensors that a module and its submodules hold as plain attributes, by
    name."""
    for path, inner in module.named_modules():
        for name, x in _attributes_of(inner).items():
            if isinstance(x, torch.Tensor) and _is_plain(x):
                yield f"{path}.{name}".lstrip("."), x


def _contents(held: Mapping[str, Any]) -> Iterator[tuple[Any, Any, bool]]:
    """Yield the tensors and containers in attributes, at any depth, that a call could change in
    place.

    Yields:
        The tensor or container, a copy of its content, and whether it is a leaf of autograd (False
        for containers).
    """
    seen: set[int] = set()
    waiting = [*held.values()]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:  # a container may hold itself
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if _is_plain(value):
                yield value, value.detach().clone(), value.is_leaf
        elif type(value) in (*_LISTS, *_MAPPINGS, set):
            yield value, value.copy(), False
        if type(value) in (*_LISTS, *_MAPPINGS, tuple):
            waiting += value.values() if isinstance(value, dict) else value


def _refill(value: Any, content: Any, *, was_leaf: bool) -> None:
    """Restore, in place, the content of a tensor or container that `_contents` copied.

    Args:
        value: the tensor or container.
        content: the copy.
        was_leaf: whether the tensor was a leaf of autograd before the call. If it no longer is, the
            call wrote to it in place, and another backward pass would go through the call's graph,
            which is freed.
    """
    if isinstance(value, torch.Tensor):
        if was_leaf and not value.is_leaf:
            value.detach_()
        if content.shape == value.shape and not _same(content, value):
            value.copy_(content)
        return
    value.clear()
    if isinstance(value, (dict, set)):
        value.update(content)
    else:
        value.extend(content)


def _is_plain(x: torch.Tensor) -> bool:
    """Return whether a tensor can be compared and copied."""
    return is_readable(x) and not is_traceable_wrapper_subclass(x)


def _state_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield buffers and parameters by name, except packed ones, which cannot be compared."""
    for name, x in (*module.named_buffers(), *module.named_parameters()):
        # Weights that another library packs, such as torchao's; no forward pass writes to them.
        if not is_traceable_wrapper_subclass(x):
            yield name, x


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
