"""The live reference: Transformers' DeepSeek-V3 with given weights, as a side for `parity.port`.

If the model is cast to float64, its norms, rotations, softmax and router still cast to float32, and
the sum over experts then fails. The side disables those casts and changes nothing else.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from megalodon_jax.extras import install
from parity.recordings import ReferenceUnavailableError

if TYPE_CHECKING:
    from parity.sides import TorchSide

NAME = "transformers DeepseekV3ForCausalLM"
"""Name of the reference in the provenance of recordings."""
# Supported versions of transformers: from LEAST, below BELOW.
LEAST, BELOW = (4, 57), (5, 0)
INSTALL = install("dev")
CHOSEN = "chosen"
"""Last part of the name of the stage with the experts chosen for each token."""
_INTERMEDIATES = {
    "attn_norm": "input_layernorm",
    "q_latent": "self_attn.q_a_layernorm",
    "kv_latent": "self_attn.kv_a_layernorm",
    "attn": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "router_logits": "mlp.gate.router_logits",
    CHOSEN: "mlp.gate.chosen",
    "mlp": "mlp",
    "block": "",
}


def why_unavailable() -> str | None:
    """Return the reason why the reference cannot run here; None if it can run.

    Only the installed versions are checked; nothing is imported.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed; {INSTALL}"
    version = metadata.version("transformers")
    found = tuple(int(part) for part in version.split(".")[:2])
    if not LEAST <= found < BELOW:
        return f"transformers {version} is installed, the DeepSeek-V3 reference needs >=4.57,<5"
    return None


def provenance() -> dict[str, Any]:
    """Return the reference's name, as `reference`, and the installed versions of transformers and
    torch by name, as `versions`."""
    versions = {name: metadata.version(name) for name in ("transformers", "torch")}
    return {"reference": NAME, "versions": versions}


def side(
    fields: Mapping[str, Any], weights: Mapping[str, np.ndarray], ids: np.ndarray
) -> TorchSide:
    """Return the reference as a side whose output is the mean next-token loss in nats.

    Routers of Transformers (modules called `gate`) have no submodules whose outputs are their
    results. So two are added: one outputs the router logits (T, E), the other, as floats, the
    experts chosen for each token (T, k).

    Args:
        fields: fields of Transformers' configuration.
        weights: float32 weights, by Transformers' names.
        ids: token ids (B, L).

    Raises:
        ReferenceUnavailableError: the reference cannot run here.
    """
    if reason := why_unavailable():
        raise ReferenceUnavailableError(reason)
    from parity.sides import TorchSide

    model = _model(fields, weights)
    model.model.rotary_emb.register_forward_pre_hook(_make_rates)
    for block in model.model.layers:
        if hasattr(block.mlp, "gate"):
            _watch(block.mlp.gate)

    def loss(model: Any, ids: Any) -> Any:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    return TorchSide(model, np.asarray(ids, np.int64), call=loss)


def stages(reference: TorchSide) -> dict[str, str]:
    """Return the names of the side's stages (module paths), by the JAX model's names.

    The JAX model's names are `embed`, `layers.{i}.<intermediate>`, `norm` and `logits`.
    """
    model: Any = reference.module
    known = dict(model.named_modules())
    found = {"embed": "model.embed_tokens", "norm": "model.norm", "logits": "lm_head"}
    for i in range(model.config.num_hidden_layers):
        block = f"model.layers.{i}"
        for name, inner in _INTERMEDIATES.items():
            path = f"{block}.{inner}" if inner else block
            found |= {f"layers.{i}.{name}": path} if path in known else {}
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    """Restrict torch to one thread within this context; no effect if the reference cannot run."""
    # More threads would be slower at these sizes, and make the order of sums machine-dependent.
    if why_unavailable():
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def float64_refusal(reference: TorchSide) -> str:
    """Return the error message of the model when it is cast to float64 and not changed otherwise;
    "" if the cast model runs."""
    import torch

    model = copy.deepcopy(reference.module).to(torch.float64)
    (ids,), _ = reference.arguments
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _model(fields: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Any:
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    model = DeepseekV3ForCausalLM._from_config(
        DeepseekV3Config(**fields), attn_implementation="eager"
    ).eval()
    if fields.get("tie_word_embeddings"):
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    # `np.array` copies: torch must not share memory with arrays that JAX may own.
    model.load_state_dict({n: torch.from_numpy(np.array(w)) for n, w in weights.items()})
    return model


def _make_rates(rotary: Any, _inputs: Any) -> None:
    """Compute the rotation rates anew in each run, in float64 if the run is float64.

    The float32 table that Transformers stores has rounding errors that would hide real differences
    in float64. A pre-forward hook of the module `rotary`.
    """
    rotary.inv_freq, _ = rotary.rope_init_fn(rotary.config, "cpu")


def _watch(gate: Any) -> None:
    """Add two submodules to a router `gate`; they output its logits and the experts it chooses."""
    from torch.nn import Identity
    from torch.nn.functional import linear

    gate.router_logits, gate.chosen = Identity(), Identity()

    def logits(gate: Any, inputs: Any) -> None:
        x = inputs[0].reshape(-1, gate.weight.shape[1])
        gate.router_logits(linear(x.float(), gate.weight.float()))

    def choice(gate: Any, inputs: Any, result: Any) -> None:
        # Cast to floats, because only floating-point outputs count as stages.
        gate.chosen(result[0].to(gate.weight.dtype))

    gate.register_forward_pre_hook(logits)
    gate.register_forward_hook(choice)
