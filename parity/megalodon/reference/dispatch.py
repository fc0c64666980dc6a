"""Operators that torch runs for megalodon-hf, each with dtypes, module and direction of the pass.

Source: docs/formats.md "The dtype audit": the torch side under autocast and under `.to(bfloat16)`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megalodon_jax.config import MegalodonConfig
from megalodon_jax.weights import weight_table
from parity.megalodon.reference.live import LiveReference

Mode = Literal["float32", "autocast", "bfloat16"]
"""Float32; autocast to bfloat16 with float32 weights; or the whole model cast to bfloat16."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Calls of one operator with equal dtypes in one module, and their number."""

    module: str
    """Path of the innermost module that makes the calls; empty for the model itself."""
    backward: bool
    """Whether the calls belong to the backward pass."""
    op: str
    """ATen name without namespace and overload, such as `addmm`."""
    inputs: tuple[str, ...]
    """Dtypes of the tensor arguments, in order."""
    output: str
    """Dtype of the first returned tensor; empty if there is none."""
    count: int


def dispatched(
    config: MegalodonConfig, shape: tuple[int, int], mode: Mode, device: str = "cpu"
) -> tuple[Dispatched, ...]:
    """Run loss and backward pass of megalodon-hf once; return the operators that torch ran.

    The operators are sorted by module, pass, operator and dtypes.

    Args:
        config: sizes; weights and token ids are random with a fixed seed.
        shape: (B, L) of the ids.
        mode: `float32`; `autocast` to bfloat16 with float32 weights; or a model cast to `bfloat16`.
        device: "cpu" or "cuda".

    Raises:
        ReferenceUnavailableError: megalodon-hf cannot run here.
        ValueError: `mode` is unknown.
    """
    if mode not in ("float32", "autocast", "bfloat16"):
        raise ValueError(f"dispatched: mode={mode!r} must be 'float32', 'autocast' or 'bfloat16'.")
    reference = LiveReference(device)
    import torch

    rng = np.random.default_rng(0)
    weights = {
        row.name: 0.1 * rng.standard_normal(row.shape, np.float32) for row in weight_table(config)
    }
    model = reference.load(config, weights)
    if mode == "bfloat16":
        model = model.to(torch.bfloat16)
    ids = torch.from_numpy(rng.integers(1, config.vocab_size, shape)).to(device)
    counts: Counter[tuple[Any, ...]] = Counter()
    places = _Places(model)
    autocast = (
        torch.autocast(device, torch.bfloat16) if mode == "autocast" else contextlib.nullcontext()
    )
    with _recorder(places, counts):
        with autocast:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        places.turn(loss)
        loss.backward()
    places.remove()
    return tuple(
        Dispatched(module, backward, op, inputs, output, count)
        for (module, backward, op, inputs, output), count in sorted(counts.items())
    )


class _Places:
    """Tracks which module is running: by module hooks forward, by autograd graph node backward.

    A node belongs to the innermost module that was running when it was created. Nodes are assigned
    when a module returns, by traversal from its outputs to its inputs. Nodes that an inner module
    already owns keep their owner.
    """

    def __init__(self, model: Any):
        self.backward, self.now = False, ""
        self._stack = [""]
        self._inputs: list[list[Any]] = []
        self._owner: dict[Any, str] = {}
        self._handles = []
        for name, module in model.named_modules():
            enter = functools.partial(self._enter, name)
            leave = functools.partial(self._leave, name)
            self._handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave),
            ]

    @property
    def module(self) -> str:
        """Path of the module that is running; empty for the model itself."""
        return self.now if self.backward else self._stack[-1]

    def turn(self, loss: Any) -> None:
        """Switch from forward to backward pass; call it before `loss.backward()`."""
        self._claim("", [loss], set())
        self.backward = True
        for node, name in self._owner.items():
            node.register_prehook(functools.partial(self._at, name))

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()

    def _at(self, name: str, _gradients: Any) -> None:
        self.now = name

    def _enter(self, name: str, _module: Any, args: Any, kwargs: Any) -> None:
        self._stack.append(name)
        self._inputs.append(_nodes((args, kwargs)))

    def _leave(self, name: str, _module: Any, _args: Any, output: Any) -> None:
        self._stack.pop()
        self._claim(name, output, set(self._inputs.pop()))

    def _claim(self, name: str, outputs: Any, stop: set[Any]) -> None:
        pending, seen = _nodes(outputs), set(stop)
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self._owner.setdefault(node, name)
            pending += [source for source, _ in node.next_functions]


def _nodes(values: Any) -> list[Any]:
    """Return the graph nodes that created the tensors in a structure."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def _recorder(places: _Places, counts: Counter[tuple[Any, ...]]) -> Any:
    """Return a torch dispatch mode that counts calls in `counts`.

    Keys are module, backward or not, operator, dtypes of inputs and dtype of the output.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def dtypes(values: Any) -> tuple[str, ...]:
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
        return tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            name, output = func.overloadpacket.__name__, (*dtypes(out), "")[0]
            counts[places.module, places.backward, name, dtypes((args, kwargs)), output] += 1
            return out

    return Recorder()
