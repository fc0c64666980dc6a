"""A Flax model of Transformers and its torch original: how both are made, fed, and compared.

Every parameter of an original is moved before it is converted, so that nothing that was not loaded,
or was made anew, equals it by accident. Both sides are called as their users call them.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from parity.port import Port
from parity.sides import FlaxSide, TorchSide

transformers.logging.set_verbosity_error()

Inputs = dict[str, np.ndarray]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
MOVED = 0.05
"""Standard deviation of what every parameter is moved by: most of them are not much larger."""
STEPS = 2
"""Tokens that are decoded one by one behind the others, which are read at once."""


class Whose(StrEnum):
    """On which side the reason of a difference is."""

    PORT = "the port's bug"
    ORIGINAL = "the original's bug"
    DELIBERATE = "deliberate"
    PACKAGE = "the package"
    """The port uses what this version of JAX does not have any more."""


@dataclass(frozen=True)
class Known:
    """A difference that is understood, and the smallest change that removes it."""

    cause: str
    whose: Whose
    remedy: str
    """That change in words."""
    stage: str = ""
    """The port's first wrong stage; empty where it does not run."""
    error: str = ""
    """What it says where it does not run."""
    patch: Context = contextlib.nullcontext
    """That change at run time, or"""
    instead: Mapping[str, Any] = field(default_factory=dict)
    """what fields of the twin are in its place."""
    issue: str = ""
    """A public one that reports it."""


@dataclass(frozen=True)
class Twin:
    """A Flax model of Transformers and its torch original, in one case."""

    name: str
    flax: str
    """Class of the port; its original's has the name without `Flax`."""
    config: Callable[[], Any]
    inputs: Callable[[Any], Inputs]
    """By the configuration; both sides take them by these names."""
    case: str = "plain"
    padded: bool = False
    """Whether `attention_mask` says which positions mean something."""
    keep: tuple[str, ...] = ()
    """Parameters, by a part of their name, that are not moved."""
    torch_call: Callable[..., Any] | None = None
    """Called with the original and the inputs in place of calling it."""
    flax_call: Callable[..., Any] | None = None
    """Called with the port, its parameters and the inputs in place of calling it."""
    flax_config: Mapping[str, Any] = field(default_factory=dict)
    """What the port's configuration has otherwise."""
    under: Context = contextlib.nullcontext
    """Without which the port does not run here."""
    known: Known | None = None
    whole: bool = True
    """Whether derivatives and bfloat16 are compared too."""

    @property
    def title(self) -> str:
        """What a test and the table call it."""
        return f"{self.name}/{self.case}"

    def remedied(self) -> Twin:
        """Return the same with the change that makes it hold."""
        assert self.known is not None
        known = self.known

        @contextlib.contextmanager
        def under() -> Iterator[None]:
            with self.under(), known.patch():
                yield

        fields = {"known": None, "under": under} | dict(known.instead)
        return replace(self, **fields)

    def models(self) -> tuple[Any, Any]:
        """Return the original, with every parameter moved, and the port converted from it."""
        torch.manual_seed(0)
        original = getattr(transformers, self.flax.removeprefix("Flax"))(self.config()).eval()
        move(original, self.keep)
        with tempfile.TemporaryDirectory() as folder:
            original.save_pretrained(folder)
            port = getattr(transformers, self.flax).from_pretrained(
                folder, from_pt=True, **self.flax_config
            )
        return original, port

    def port(self, **options: Any) -> Port:
        """Return the port of this case; call it, and compare, inside of `running`."""
        original, port = self.models()
        inputs = self.inputs(original.config)
        mask = inputs["attention_mask"].astype(bool) if self.padded else None

        def as_users_call(module: Any, params: Any, **inputs: Any) -> Any:
            port._module = module  # of the precision asked for
            return self.call_flax(port, params if len(params) > 1 else params["params"], inputs)

        return Port(
            self.name,
            TorchSide(original, call=self.torch_call, **inputs),
            FlaxSide(port.module, port.params, call=as_users_call, **inputs),
            case=self.case,
            # A decoder that reads with its cache does so in steps: each has a mask of its own.
            valid=None if mask is None else [mask, mask[:, :-STEPS]],
            **{"gradients": self.whole, "bfloat16": self.whole, **options},
        )

    def call_flax(self, port: Any, params: Any, inputs: Mapping[str, Any]) -> Any:
        """Return what the port makes of inputs."""
        if self.flax_call is not None:
            return self.flax_call(port, params, **inputs)
        return port(params=params, **inputs)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the port runs: Transformers counts on JAX's own promotion of dtypes."""
        with self.under(), jax.numpy_dtype_promotion("standard"):
            yield

    def difference(self) -> float:
        """Return what a test of Transformers compares: the largest difference of any output."""
        original, port = self.models()
        inputs = self.inputs(original.config)
        tensors = {name: torch.as_tensor(value) for name, value in inputs.items()}
        with torch.no_grad():
            theirs = (self.torch_call or (lambda m, **k: m(**k)))(original, **tensors)
        ours = self.call_flax(port, port.params, inputs)
        both = [
            (np.asarray(ours[key]), theirs[key].numpy())
            for key in ours
            if key in theirs and isinstance(theirs[key], torch.Tensor) and ours[key] is not None
        ]
        return max(float(np.abs(a - b).max()) for a, b in both)


def move(model: torch.nn.Module, keep: tuple[str, ...] = ()) -> None:
    """Move every parameter and every buffer that is saved with them, but those to keep."""
    generator = torch.Generator().manual_seed(1)
    saved = model.state_dict()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name not in saved or not tensor.is_floating_point() or any(k in name for k in keep):
                continue
            if "running_var" in name:
                tensor.mul_(torch.exp(MOVED * noise))
            else:
                tensor.add_(MOVED * noise)


def cached_torch(model: Any, input_ids: Any, attention_mask: Any, **positions: Any) -> Any:
    """Return the logits of a decoder that reads, and then decodes with its cache."""
    length = input_ids.shape[1]
    cache, results = None, {}
    for start, end in _steps(length):
        output = model(
            input_ids[:, start:end],
            attention_mask=attention_mask[:, :end],
            past_key_values=cache,
            use_cache=True,
            **{name: value[:, start:end].contiguous() for name, value in positions.items()},
        )
        cache, results[f"until_{end}"] = output.past_key_values, output.logits
    return results


def cached_flax(
    model: Any, params: Any, input_ids: Any, attention_mask: Any, **positions: Any
) -> Any:
    """Return the logits of a decoder that reads, and then decodes with its cache."""
    rows, length = input_ids.shape
    cache = _empty(lambda: model.init_cache(rows, length))
    results = {}
    for start, end in _steps(length):
        output = model(
            input_ids[:, start:end],
            attention_mask=attention_mask,
            past_key_values=cache,
            params=params,
            **{name: value[:, start:end] for name, value in positions.items()},
        )
        cache, results[f"until_{end}"] = output.past_key_values, output.logits
    return results


def cached_torch_pair(
    model: Any, attention_mask: Any, decoder_input_ids: Any, **inputs: Any
) -> Any:
    """Return the logits of an encoder and a decoder that decodes with its cache."""
    inputs.pop("decoder_attention_mask", None)
    encoded = model.get_encoder()(attention_mask=attention_mask, **inputs)
    cache, results = None, {}
    for start, end in _steps(decoder_input_ids.shape[1]):
        output = model(
            encoder_outputs=encoded,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        cache, results[f"until_{end}"] = output.past_key_values, output.logits
    return results


def cached_flax_pair(
    model: Any,
    params: Any,
    attention_mask: Any,
    decoder_input_ids: Any,
    decoder_attention_mask: Any,
    positions: bool = True,
    **inputs: Any,
) -> Any:
    """Return the logits of an encoder and a decoder that decodes with its cache."""
    rows, length = decoder_input_ids.shape
    encoded = model.encode(attention_mask=attention_mask, params=params, **inputs)
    cache = _empty(lambda: model.init_cache(rows, length, encoded))
    results = {}
    for start, end in _steps(length):
        where = {}
        if positions:
            where["decoder_position_ids"] = jnp.tile(jnp.arange(start, end), (rows, 1))
        output = model.decode(
            decoder_input_ids[:, start:end],
            encoded,
            encoder_attention_mask=attention_mask,
            decoder_attention_mask=decoder_attention_mask,
            past_key_values=cache,
            params=params,
            **where,
        )
        cache, results[f"until_{end}"] = output.past_key_values, output.logits
    return results


def _steps(length: int) -> list[tuple[int, int]]:
    ends = [*range(length - STEPS, length + 1)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _empty(make: Callable[[], Any]) -> Any:
    """Return a cache of zeros: to make one a model runs once, which would be a stage of its own."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make))
