"""Digests of the steps of a torch training, for the same files and comparison as those of JAX.

Hooks on the modules and the optimiser take the digests; the training loop needs no change. Source:
docs/training.md "Where two runs part".
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Array, UInt32

from stability.repeat.digests import FIRST, INPUT, PARAMETER, SECOND, STEP, Digests, digest
from stability.repeat.log import DigestLog

if TYPE_CHECKING:
    import torch

_MASK = 2**32 - 1
_BLOCK = 1 << 24
"""Number of elements whose words are in memory at once on a device, 8 bytes each in ten arrays."""


def torch_digest(x: torch.Tensor) -> tuple[int, int]:
    """Return the digest of a tensor, two 32-bit words, equal to `stability.repeat.digest`."""
    # On a CPU, XLA fuses what takes torch thirty passes over memory. Of a tensor on a GPU, JAX
    # would need a copy, and its first use reserves most of the memory of that GPU.
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
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        first, second = np.asarray(_digest(array)).tolist()
    return first, second


@jax.jit
def _digest(x: Array) -> UInt32[Array, "2"]:
    return digest(x)


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
        mixed = _mixed((seed + place * STEP) & _MASK)
        for word in _words(part):
            mixed = _mixed(mixed ^ word)
        other = ((mixed ^ (mixed >> 15)) * STEP) & _MASK
        sums = (sums + torch.stack([mixed.sum(), (other ^ (other >> 13)).sum()])) & _MASK
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
) -> Iterator[None]:
    """Context in which each optimiser step of a training appends its digests to a file.

    A step's digests are, in order of computation: the parameters as `parameter/NAME`; the model's
    tensor arguments as `input/NAME` or `input/INDEX`; the outputs of all modules by the module's
    path, `output` for the model's own; the gradients that the optimiser gets as `grad/NAME`. A
    value that is computed again within the step, as with gradient accumulation, gets `#2`, `#3` and
    so on. Forward passes without gradients (`torch.no_grad`) are left out.

    Errors of the file are raised inside the training. Modules that `torch.compile` has compiled
    call no hooks: digest an eager training.

    Args:
        model: the model that trains.
        optimizer: the innermost optimiser, whose `step` is called.
        log: the file.
        start: number of the first step.
    """
    steps = _Steps(model, log, start)
    hooks = [
        model.register_forward_pre_hook(steps.begin, with_kwargs=True),
        *(
            module.register_forward_hook(steps.output_of(name))
            for name, module in model.named_modules()
        ),
        optimizer.register_step_pre_hook(steps.end),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Steps:
    """Digests of the running step, and the file that they go to."""

    def __init__(self, model: torch.nn.Module, log: DigestLog, number: int) -> None:
        self.model, self.log, self.number = model, log, number
        self.found: dict[str, tuple[int, int]] = {}
        self.inside = False
        """Whether a forward pass that will be differentiated is running. An evaluation between two
        steps is no part of either, nor is a pass that is recomputed during the backward pass."""

    def begin(self, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        import torch

        self.inside = torch.is_grad_enabled()
        if self.inside:
            self._parameters()
            for name, value in (*enumerate(args), *kwargs.items()):
                self._add(f"{INPUT}{name}", value)

    def output_of(self, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            if self.inside:
                self._add(name or "output", output)
                self.inside = module is not self.model

        return hook

    def end(self, *_: Any) -> None:
        self._parameters()
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self._add(f"grad/{name}", parameter.grad)
        values = np.asarray([*self.found.values()], np.uint32).reshape(-1, 2)
        self.log.write(self.number, Digests(tuple(self.found), values))
        self.found.clear()
        self.number += 1

    def _parameters(self) -> None:
        """Add the parameters, unless the step has them already."""
        if not self.found:
            for name, parameter in self.model.named_parameters():
                self._add(PARAMETER + name, parameter)

    def _add(self, name: str, value: Any) -> None:
        """Add the digests of all tensors in a value; its fields are named by index or key."""
        import torch

        if isinstance(value, torch.Tensor):
            again = (f"{name}#{turn}" for turn in itertools.count(2))
            free = next(each for each in itertools.chain([name], again) if each not in self.found)
            self.found[free] = torch_digest(value)
        elif isinstance(value, Mapping):
            for key, each in value.items():
                self._add(f"{name}.{key}", each)
        elif isinstance(value, list | tuple):
            for index, each in enumerate(value):
                self._add(f"{name}[{index}]", each)


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
            self.running.enter_context(steps)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Remove the hooks and close the file."""
            self.running.close()

    return DigestCallback()
