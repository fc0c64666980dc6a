"""Transformers' DeepSeek-V3, run live on given weights: intermediates, loss, gradients, by name.

In float64 its norms, rotations, softmax and router still round to float32, and its sum over experts
then refuses to run. `wide` lifts those casts and nothing else, so that float64 means float64.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import metadata
from typing import Any

import numpy as np

from parity.engine.quantity import Quantity
from parity.port import Arrays, watched
from parity.recordings import ReferenceUnavailableError

NAME = "transformers DeepseekV3ForCausalLM"
LEAST, BELOW = (4, 57), (5, 0)
INSTALL = "pip install 'megalodon-numerics[dev]'"
_INTERMEDIATES = {
    "attn_norm": "input_layernorm",
    "q_latent": "self_attn.q_a_layernorm",
    "kv_latent": "self_attn.kv_a_layernorm",
    "attn": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
    "block": "",
}


def why_unavailable() -> str | None:
    """Return why it cannot run here, or None when it can. Imports nothing heavy."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; {INSTALL}"
    version = metadata.version("transformers")
    found = tuple(int(part) for part in version.split(".")[:2])
    if not LEAST <= found < BELOW:
        return f"transformers {version} is installed, its DeepSeek-V3 is known in >=4.57,<5"
    return None


def provenance() -> dict[str, Any]:
    """Return what a live run is made by."""
    versions = {name: metadata.version(name) for name in ("transformers", "torch")}
    return {"reference": NAME, "versions": versions}


def run(
    fields: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    ids: np.ndarray,
    dtype: str = "float32",
    *,
    wide: bool = False,
    gradients: bool = True,
) -> Arrays:
    """Run the reference, eager attention, on the CPU.

    Args:
        fields: of its configuration, as `config.json` has them.
        weights: its state dict.
        ids: token ids (B, L).
        dtype: "float32", "float64" or "bfloat16"; results are widened to at least float32.
        wide: lift the casts to float32 on the way, for float64.
        gradients: whether those of the loss by every parameter are wanted, as `grad/<parameter>`.

    Returns:
        `embed`, `layers.{i}.<intermediate>`, `layers.{i}.router_logits`, `layers.{i}.chosen` (T, k)
        of integers, `norm`, `logits`, `loss`, and the gradients.

    Raises:
        ReferenceUnavailableError: it cannot run here.
        RuntimeError: from torch, where the reference cannot compute in the dtype.
    """
    if reason := why_unavailable():
        raise ReferenceUnavailableError(reason)
    import torch

    with ExitStack() as stack:
        stack.enter_context(_one_thread())
        if wide:
            stack.enter_context(_no_narrowing())
        model = _model(fields, weights).to(getattr(torch, dtype))
        kept = stack.enter_context(watched(model, _paths(model)))
        routed = stack.enter_context(_routers(model))
        tokens = torch.from_numpy(np.asarray(ids, np.int64))
        with torch.set_grad_enabled(gradients):
            out = model(input_ids=tokens, labels=tokens, use_cache=False)
        if gradients:
            out.loss.backward()
        kept |= routed | {"loss": _numpy(out.loss)}
    if gradients:
        for name, parameter in model.named_parameters():
            given = parameter.grad
            kept[Quantity.gradient(name)] = _numpy(
                torch.zeros_like(parameter) if given is None else given
            )
    return kept


def float64_refusal(
    fields: Mapping[str, Any], weights: Mapping[str, np.ndarray], ids: np.ndarray
) -> str:
    """Return the error that the reference ends in when it is simply cast to float64, or ""."""
    try:
        run(fields, weights, ids, "float64", gradients=False)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context in which torch uses one thread: what it splits among several here takes longer, and
    the order of its sums would follow the machine.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _model(fields: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Any:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM._from_config(
        DeepseekV3Config(**fields), attn_implementation="eager"
    ).eval()
    if fields.get("tie_word_embeddings"):
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    # Copies: loading must not hand torch the memory of arrays JAX may own.
    model.load_state_dict({n: torch.from_numpy(np.array(w)) for n, w in weights.items()})
    return model


def _paths(model: Any) -> dict[str, str]:
    known = dict(model.named_modules())
    paths = {"embed": "model.embed_tokens", "norm": "model.norm", "logits": "lm_head"}
    for i in range(len(model.model.layers)):
        block = f"model.layers.{i}"
        for name, inner in _INTERMEDIATES.items():
            path = f"{block}.{inner}" if inner else block
            paths |= {f"layers.{i}.{name}": path} if path in known else {}
    return paths


@contextmanager
def _routers(model: Any) -> Iterator[Arrays]:
    """Context in which router logits and choices are kept; the logits have no module."""
    from torch.nn.functional import linear

    kept: Arrays = {}

    def keep(i: int):
        def hook(gate: Any, inputs: Any, output: Any) -> None:
            x = inputs[0].detach().reshape(-1, gate.weight.shape[1])
            kind = x.dtype if x.dtype.itemsize > 4 else gate.e_score_correction_bias.float().dtype
            kept[f"layers.{i}.router_logits"] = _numpy(linear(x.to(kind), gate.weight.to(kind)))
            kept[f"layers.{i}.chosen"] = output[0].detach().numpy().astype(np.int32)

        return hook

    gates = [(i, getattr(b.mlp, "gate", None)) for i, b in enumerate(model.model.layers)]
    hooks = [gate.register_forward_hook(keep(i)) for i, gate in gates if gate is not None]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _no_narrowing() -> Iterator[None]:
    """Context in which whatever asks torch for float32 gets float64, constants included."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Wide(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked = dict(kwargs or {})
            if asked.get("dtype") is torch.float32:
                asked["dtype"] = torch.float64
            swap = tuple(torch.float64 if a is torch.float32 else a for a in args)
            return func(*swap, **asked)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def _numpy(tensor: Any) -> np.ndarray:
    held = tensor.detach().cpu()
    return (held.float() if held.dtype.itemsize < 4 else held).numpy().copy()
