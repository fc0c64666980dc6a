"""Digests of the steps of a torch training, for the same files and comparison as those of JAX.

Hooks on the modules and the optimiser take the digests; the training loop needs no change. Source:
docs/training.md "Where two runs part".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from stability.repeat.digests import FIRST, INPUT, PARAMETER, PART, SECOND, STEP, Digests
from stability.repeat.log import DigestLog

if TYPE_CHECKING:
    import torch

_MASK = 2**32 - 1
_BLOCK = 1 << 24
"""Number of elements whose words are in memory at once on a device, 8 bytes each in ten arrays."""


def torch_digest(x: torch.Tensor) -> tuple[int, int]:
    """Return the digest of a tensor, two 32-bit words, equal to `stability.repeat.digest`."""
    return _on_host(x) if x.device.type == "cpu" else _on_device(x)


def _on_host(x: torch.Tensor) -> tuple[int, int]:
    import torch

    x = x.detach().resolve_conj().resolve_neg().contiguous()
    name = str(x.dtype).removeprefix("torch.")
    if x.dtype == torch.bfloat16 or name.startswith("float8"):
        # NumPy has these formats from `ml_dtypes`, and torch does not convert to them.
        whole = {1: torch.uint8, 2: torch.int16}[x.element_size()]
        array = x.view(whole).numpy().view(getattr(ml_dtypes, name))
    else:
        array = x.numpy()
    # `ml_dtypes` has other bits for NaN in formats of 8 bits than torch and JAX.
    nan = None
    if name.startswith("float8"):
        nan = torch.full((1,), torch.nan, dtype=x.dtype).view(torch.uint8).numpy()
    flat, seed = array.reshape(-1), zlib.crc32(f"{name}{tuple(x.shape)}".encode())
    places = _places()[: flat.size]
    words = np.empty((2, places.size), np.uint32)
    first = second = 0
    # NumPy works in place on a part that stays in the cache. XLA would need a copy of every array
    # whose size it was not compiled for, and torch has no unsigned shift.
    for start in range(0, flat.size, PART):
        part = flat[start : start + PART]
        mixed, spare = words[0, : part.size], words[1, : part.size]
        one = np.array([(seed + start // PART * STEP) & _MASK], np.uint32)
        _mix(one, np.empty_like(one))
        np.add(places[: part.size], one, out=mixed)
        for word in _words_of(part, nan):
            np.bitwise_xor(mixed, word, out=mixed)
            _mix(mixed, spare)
        np.right_shift(mixed, 16, out=spare)
        np.multiply(spare, mixed, out=spare)
        first += int(mixed.sum(dtype=np.uint32))
        second += int(spare.sum(dtype=np.uint32))
    return first & _MASK, second & _MASK


@functools.cache
def _places() -> np.ndarray:
    """Return a hash of each position in a part (`PART` elements) of an array, uint32 (PART,)."""
    places = np.arange(PART, dtype=np.uint32) * np.uint32(STEP)
    _mix(places, np.empty_like(places))
    return places


def _mix(x: np.ndarray, spare: np.ndarray) -> None:
    """Hash 32-bit words in place as `digests._mixed`; `spare` is scratch memory of their shape."""
    for shift, factor in ((16, FIRST), (13, SECOND), (16, None)):
        np.right_shift(x, shift, out=spare)
        np.bitwise_xor(x, spare, out=x)
        if factor is not None:
            np.multiply(x, np.uint32(factor), out=x)


def _words_of(x: np.ndarray, nan: np.ndarray | None = None) -> list[np.ndarray]:
    """Return the bits of every element as words of at most 32 bits.

    Every NaN gets the bits `nan`; None: the bits of NumPy's NaN.
    """
    if np.iscomplexobj(x):
        pair = x.view(f"f{x.itemsize // 2}").reshape(-1, 2)
        return [*_words_of(pair[:, 0].copy()), *_words_of(pair[:, 1].copy())]
    bits = x.view(f"u{x.itemsize}")
    if x.dtype.kind not in "biu":
        # A floating-point format, of NumPy or `ml_dtypes`.
        unknown = np.isnan(x)
        if unknown.any():
            one = np.full(1, np.nan, x.dtype).view(bits.dtype) if nan is None else nan
            bits = np.where(unknown, one, bits)
    if x.itemsize == 8:
        pair = bits.view("<u4").reshape(-1, 2)
        return [pair[:, 0], pair[:, 1]]
    return [bits]


def _on_device(x: torch.Tensor) -> tuple[int, int]:
    import torch

    name = str(x.dtype).removeprefix("torch.")
    seed = zlib.crc32(f"{name}{tuple(x.shape)}".encode())
    flat = x.detach().reshape(-1)
    sums = torch.zeros(2, dtype=torch.int64, device=x.device)
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK]
        # Torch does not add unsigned integers, so words of 32 bits are held in int64.
        place = torch.arange(start, start + part.numel(), device=x.device)
        inside = _mixed(((place % PART) * STEP) & _MASK)
        mixed = (inside + _mixed((seed + place // PART * STEP) & _MASK)) & _MASK
        for word in _words(part):
            mixed = _mixed(mixed ^ word)
        other = (mixed * (mixed >> 16)) & _MASK
        sums = (sums + torch.stack([mixed.sum(), other.sum()])) & _MASK
    first, second = sums.tolist()
    return first, second


def _mixed(x: torch.Tensor) -> torch.Tensor:
    # A product of two 32-bit words may exceed int64; torch wraps it modulo 2^64, which keeps its
    # lower 32 bits.
    x = ((x ^ (x >> 16)) * FIRST) & _MASK
    x = ((x ^ (x >> 13)) * SECOND) & _MASK
    return x ^ (x >> 16)


def _words(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the bits of every element as words of 32 bits in int64; all NaN have equal bits."""
    import torch

    if x.is_complex():
        pair = torch.view_as_real(x.resolve_conj())
        return [*_words(pair[..., 0]), *_words(pair[..., 1])]
    x = x.contiguous()
    if x.dtype == torch.bool:
        return [x.long()]
    if x.is_floating_point():
        # Formats of 8 bits have no `isnan`; widening them is exact.
        unknown = (x.float() if x.element_size() == 1 else x).isnan()
        x = torch.where(unknown, torch.full_like(x, torch.nan), x)
    size = x.element_size()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bits = x.view(whole).long()
    if size == 8:
        return [bits & _MASK, (bits >> 32) & _MASK]
    return [bits & (256**size - 1)]


@contextmanager
def digest_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, log: DigestLog, *, start: int = 0
) -> Iterator[Steps]:
    """Context in which each optimiser step of a training appends its digests to a file.

    A step's digests are, in order of computation: the parameters as `parameter/NAME`; the model's
    tensor arguments as `input/NAME` or `input/INDEX`; the outputs of all modules by the module's
    path, `output` for the model's own; the gradients that the optimiser gets as `grad/NAME`, those
    of the last parameters first, as a backward pass computes them. A value that is computed again
    within the step, as with gradient accumulation, gets `#2`, `#3` and so on.

    Left out are forward passes without gradients (`torch.no_grad`), parts of the model that are
    called outside its forward pass, buffers, the optimiser's state, and tensors whose numbers
    cannot be read: nested, quantised, on the meta device, or inside `torch.func`. A warning names
    each such tensor once. Tensors are searched in lists, tuples, mappings and dataclasses. Errors
    of the file are raised inside the training.

    Args:
        model: the model that trains.
        optimizer: the innermost optimiser, whose `step` is called without a closure.
        log: the file.
        start: number of the first step.

    Raises:
        ValueError: `optimizer` is no torch optimiser that takes hooks, such as a wrapper of one;
            or, at a step, it was called with a closure, whose passes come after the hook.
    """
    import torch

    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"expected the innermost torch optimiser, received a {type(optimizer).__name__}; a "
            "wrapper has it as an attribute such as `optimizer`"
        )
    steps = Steps(model, log, start)
    with ExitStack() as hooks:

        def hooked(register: Any, run: Any, **how: Any) -> None:
            # torch.compile would trace the hook, including the calls of JAX in it.
            hooks.callback(register(_Hook(torch.compiler.disable(run)), **how).remove)

        hooked(model.register_forward_pre_hook, steps.begin, with_kwargs=True)
        for name, module in model.named_modules():
            if module is model or not isinstance(module, torch.jit.ScriptModule):
                hooked(module.register_forward_hook, steps.output_of(name))
        hooked(optimizer.register_step_pre_hook, steps.end)
        yield steps


class _Hook(partial):
    """A hook whose copy, in a copied or pickled model, does nothing."""

    def __reduce__(self) -> Any:
        return _Hook, (_nothing,)


def _nothing(*_: Any, **__: Any) -> None:
    pass


class Steps:
    """Digests of the running step, and the file to which they are written.

    Attributes:
        number: number of the running step; a loop may set it between steps.
    """

    def __init__(self, model: torch.nn.Module, log: DigestLog, number: int) -> None:
        self.model, self.log, self.number = model, log, number
        self.found: dict[str, tuple[int, int]] = {}
        self.unread: set[str] = set()
        self.inside = False
        """Whether a forward pass that will be differentiated is running. An evaluation between two
        steps is no part of either, nor is a pass that is recomputed during the backward pass."""

    def begin(self, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add digests of the parameters, unless the step has them, and of the model's arguments."""
        import torch

        self.inside = torch.is_grad_enabled()
        if self.inside:
            self._parameters()
            for name, value in (*enumerate(args), *kwargs.items()):
                self._add(f"{INPUT}{name}", value)

    def output_of(self, name: str) -> Any:
        """Return a forward hook for the module with this path; "" for the model."""

        def hook(module: Any, args: Any, output: Any) -> None:
            if self.inside:
                self._add(name or "output", output)
                self.inside = module is not self.model

        return hook

    def end(self, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add digests of the gradients, write the step's digests to the file, and clear them."""
        # The first argument is the optimiser itself.
        if any(each is not None for each in (*args[1:2], kwargs.get("closure"))):
            raise ValueError(
                "digest_steps: the optimiser was called with a closure, whose forward passes get "
                "no digests; digest a training that calls step() without a closure"
            )
        self._parameters()
        for name, parameter in reversed([*self.model.named_parameters()]):
            if parameter.grad is not None:
                self._add(f"grad/{name}", parameter.grad)
        values = np.asarray([*self.found.values()], np.uint32).reshape(-1, 2)
        self.log.write(self.number, Digests(tuple(self.found), values))
        self.found.clear()
        self.number += 1

    def restart(self, number: int) -> None:
        """Begin step `number`; drop digests not written yet, such as those of a skipped step."""
        self.found.clear()
        self.number = number

    def _parameters(self) -> None:
        """Add digests of the parameters, unless the step has some digests already."""
        if not self.found:
            for name, parameter in self.model.named_parameters():
                self._add(PARAMETER + name, parameter)

    def _add(self, name: str, value: Any) -> None:
        """Add digests of all tensors in a value; names are extended by index, key or field."""
        import torch

        if isinstance(value, torch.Tensor):
            self._add_tensor(name, value)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                self._add(f"{name}.{key}", each)
        elif isinstance(value, list | tuple):
            for index, each in enumerate(value):
                self._add(f"{name}[{index}]", each)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                self._add(f"{name}.{field.name}", getattr(value, field.name, None))

    def _add_tensor(self, name: str, value: torch.Tensor) -> None:
        """Add the digest of a tensor; a sparse tensor gets two, of its indices and its values."""
        import torch

        if value.layout is torch.sparse_coo and not value.is_meta:
            value = value.detach().coalesce()
            self._add(f"{name}.indices", value.indices())
            self._add(f"{name}.values", value.values())
        elif _is_readable(value):
            again = (f"{name}#{turn}" for turn in itertools.count(2))
            names = itertools.chain([name], again)
            self.found[next(n for n in names if n not in self.found)] = torch_digest(value)
        elif name not in self.unread:
            self.unread.add(name)
            warnings.warn(
                f"{name} has no digest, since the numbers of this {type(value).__name__} "
                f"({value.dtype}) cannot be read: `same` will not compare it",
                stacklevel=2,
            )


def _is_readable(x: torch.Tensor) -> bool:
    """Return whether a tensor is dense and its numbers can be read."""
    import torch
    from torch._C._functorch import is_functorch_wrapped_tensor

    lazy = torch.nn.parameter.UninitializedBuffer, torch.nn.parameter.UninitializedParameter
    made = not isinstance(x, lazy) and not x.is_meta
    dense = made and x.layout is torch.strided and not x.is_nested and not x.is_quantized
    # A wrapper for one row of a `vmap`, or a dual number, has no numbers of its own.
    wrapped = is_functorch_wrapped_tensor(x)
    few = ("complex32", "float4", "int4", "uint4", "bits")
    return dense and not wrapped and not any(name in str(x.dtype) for name in few)


def digest_callback(path: Path | str, about: Mapping[str, str] | None = None) -> Any:
    """Return a transformers `TrainerCallback` that writes digests as `digest_steps` does.

    Steps have the Trainer's numbers. In a distributed training only the process of rank 0 writes.

    Args:
        path: the file, which `DigestLog` opens when the training begins.
        about: facts that tell runs apart, such as the commit.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import TrainerCallback

    class DigestCallback(TrainerCallback):
        """Trainer callback that writes digests from the beginning of a training to its end."""

        def __init__(self) -> None:
            self.running = ExitStack()
            self.steps: Steps | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Open the file and hook into the model and the innermost optimiser."""
            self.on_train_end(args, state, control)
            if not state.is_world_process_zero:
                return
            optimizer = kwargs["optimizer"]
            # Accelerate wraps the optimiser, and hooks on the wrapper never run.
            while (inner := getattr(optimizer, "optimizer", None)) is not None:
                optimizer = inner
            log = self.running.enter_context(DigestLog(path, about))
            steps = digest_steps(kwargs["model"], optimizer, log, start=state.global_step)
            self.steps = self.running.enter_context(steps)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Number the step as the Trainer does; drop the digests of a step that was skipped."""
            if self.steps is not None:
                self.steps.restart(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Remove the hooks and close the file."""
            self.running.close()
            self.steps = None

    return DigestCallback()
