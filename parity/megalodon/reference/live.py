"""Runs megalodon-hf on a case: intermediates, loss, gradients, streams and trajectories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from megalodon_jax.config import MegalodonConfig
from parity.engine.measure.metrics import IGNORED
from parity.engine.measure.quantity import LOGITS, LOSS, Quantity, Role
from parity.megalodon.cases import NEW_TOKENS, Case
from parity.megalodon.intermediates import BLOCK_INTERMEDIATES, Intermediate
from parity.megalodon.packed import documents, joined_documents
from parity.megalodon.ragged import combine_rows, row_alone
from parity.megalodon.reference.installed import identity, package, why_unavailable
from parity.megalodon.reference.known_differences import known_difference_facts
from parity.megalodon.reference.low_precision import low_precision
from parity.megalodon.reference.timed import workloads
from parity.megalodon.reference.training import trajectory
from parity.recordings import ReferenceUnavailableError


@dataclass(frozen=True)
class LiveReference:
    """Runs megalodon-hf in float32.

    Raises:
        ReferenceUnavailableError: on construction, if megalodon-hf cannot run here.
    """

    device: str = "cpu"
    """torch device: "cpu" or "cuda"."""
    kind = "live"
    omits = "the gate's cotangent, for which megalodon-hf has no separate tensor"

    def gives(self, quantity: str) -> bool:
        """Return whether `run` gives a quantity of the oracle; see `omits`."""
        what = Quantity(quantity)
        return not (what.role is Role.COTANGENT and what.stage == "gate")

    def __post_init__(self) -> None:
        if reason := why_unavailable():
            raise ReferenceUnavailableError(reason)

    @property
    def provenance(self) -> dict[str, Any]:
        """Commit of megalodon-hf, versions of packages, threads and CPU capability, device."""
        import torch

        return {
            "commit": identity(),
            "versions": {
                name: metadata.version(name) for name in ("megalodon-hf", "torch", "transformers")
            },
            "threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "device": self.device,
        }

    def weights(self, case: Case) -> dict[str, np.ndarray]:
        """Return a case's weights by torch name, read from megalodon-hf after it loaded them."""
        held = self.load(case.config, case.weights).state_dict()
        return {n: t.cpu().numpy() for n, t in held.items() if n in case.weights}

    def low_precision(self, case: Case) -> dict[str, np.ndarray]:
        """Return logits and loss, computed in bfloat16, as `<mode>/logits` and `<mode>/loss`; the
        modes are "autocast" and "cast" (`reference.low_precision`)."""
        return low_precision(self.load(case.config, case.weights), case, self.device)

    def known_differences(self) -> dict[str, np.ndarray]:
        """Return megalodon-hf's result for every known difference, by id."""
        return known_difference_facts(self)

    def run(self, case: Case) -> dict[str, np.ndarray]:
        """Return the results of a case as float32 arrays, by name.

        A stream gives logits, states and generated tokens; a trajectory gives losses, moments and
        displacements. Any other case gives intermediates, loss, gradients and cotangents. Padded
        rows of a stream, and packed documents, run one at a time.
        """
        import torch

        batch = case.batch
        model = self.load(case.config, case.weights)
        if case.steps:
            return trajectory(model, case, self.device)
        if case.cuts:
            with torch.no_grad():
                if batch.padded:
                    rows = (row_alone(case, row) for row in range(case.batch_size))
                    return combine_rows(case, [self._stream(model, *row) for row in rows])
                return self._stream(model, batch.ids, case.cuts)
        if batch.segments is not None:
            return self._documents(model, case)
        intermediates: dict[str, np.ndarray] = {}
        hooks = _hooks(model, intermediates)
        mask = torch.from_numpy(batch.mask) if batch.padded else None
        out = model(
            input_ids=torch.from_numpy(batch.ids).long().to(self.device),
            attention_mask=None if mask is None else mask.to(self.device),
            labels=torch.from_numpy(batch.labels).long().to(self.device),
            use_cache=False,
        )
        out.logits.retain_grad()
        out.loss.backward()
        for hook in hooks:
            hook.remove()
        intermediates |= {LOGITS: _numpy(out.logits), LOSS: _numpy(out.loss)}
        intermediates[Quantity.cotangent(LOGITS)] = _numpy(out.logits.grad)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                intermediates[Quantity.gradient(name)] = _numpy(parameter.grad)
        return intermediates

    def _documents(self, model: Any, case: Case) -> dict[str, np.ndarray]:
        """Run every packed document alone, and join the results.

        The loss is the mean over the targets of all documents. A document without targets
        contributes nothing to loss and gradients.
        """
        import torch

        total: Any = 0.0
        targets, pieces = 0, []
        for alone in documents(case):
            found: dict[str, np.ndarray] = {}
            hooks = _hooks(model, found)
            ids, labels, mask = (
                torch.from_numpy(a).to(self.device) for a in (alone.ids, alone.labels, alone.mask)
            )
            count = int((alone.labels[:, 1:] != IGNORED).sum())
            scored = {"labels": labels.long()} if count else {}
            padding = {} if alone.mask.all() else {"attention_mask": mask}
            out = model(input_ids=ids.long(), use_cache=False, **scored, **padding)
            for hook in hooks:
                hook.remove()
            out.logits.retain_grad()
            pieces.append((found, out.logits))
            if count:
                total, targets = total + out.loss * count, targets + count
        loss = total / targets
        loss.backward()
        for found, logits in pieces:
            found[LOGITS] = _numpy(logits)
            if logits.grad is not None:
                found[Quantity.cotangent(LOGITS)] = _numpy(logits.grad)
        gradients = {
            Quantity.gradient(name): _numpy(parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        joined = joined_documents(case, [found for found, _ in pieces])
        return joined | {LOSS: _numpy(loss)} | gradients

    def workloads(
        self,
        config: MegalodonConfig,
        weights: dict[str, np.ndarray],
        ids: np.ndarray,
        autocast: bool = False,
    ) -> dict[str, Callable[[int], None]]:
        """Return megalodon-hf's workloads for benchmarks, by name (`reference.timed.workloads`)."""
        return workloads(self.load(config, weights), ids, self.device, autocast)

    def _stream(self, model: Any, rows: np.ndarray, cuts: tuple[int, ...]) -> dict[str, np.ndarray]:
        import torch

        ids = torch.from_numpy(rows).long().to(self.device)
        cache, pieces = None, []
        for piece in torch.split(ids, list(cuts), dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out.logits)
        outputs = _cache_arrays(cache)
        generated = []
        token = pieces[-1][:, -1:].argmax(-1)
        for _ in range(NEW_TOKENS):
            generated.append(token)
            out = model(token, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            token = out.logits[:, -1:].argmax(-1)
        outputs["logits"] = _numpy(torch.cat(pieces, dim=1))
        outputs["generated"] = _numpy(torch.cat(generated, dim=1))
        return outputs

    def load(self, config: MegalodonConfig, weights: dict[str, np.ndarray]) -> Any:
        """Return megalodon-hf's model with exactly these weights, in evaluation mode."""
        import torch

        theirs = package()
        model = theirs.MegalodonForCausalLM(theirs.MegalodonConfig(**config.to_hf()))
        tensors = {name: torch.from_numpy(np.array(w)) for name, w in weights.items()}
        if config.tied:
            tensors["lm_head.weight"] = tensors["model.embed.weight"]
        model.load_state_dict(tensors, strict=True)
        return model.to(self.device).eval()


def _cache_arrays(cache: Any) -> dict[str, np.ndarray]:
    """Return the contents of megalodon-hf's cache under the names of `intermediates.STATES`."""
    outputs = {}
    *layers, final = cache
    for i, layer in enumerate(layers):
        prefix = Quantity.state(f"layers.{i}.")
        h = layer.ema.detach().cpu().numpy()
        outputs[prefix + "ema"] = np.stack([h.real, h.imag], axis=-1)
        outputs[prefix + "k"] = _numpy(layer.attn.k)
        outputs[prefix + "v"] = _numpy(layer.attn.v)
        outputs |= _norm_arrays(prefix, layer.norm)
    return outputs | _norm_arrays(Quantity.state(""), final)


def _norm_arrays(prefix: str, state: Any) -> dict[str, np.ndarray]:
    return {f"{prefix}norm_{n}": _numpy(getattr(state, n)) for n in ("count", "mean", "var")}


def _hooks(model: Any, intermediates: dict[str, np.ndarray]) -> list[Any]:
    """Make the model store each intermediate and its cotangent.

    An intermediate that is the SiLU of a submodule's output (`Intermediate.silu`) is computed here
    and not by the model, so it has no cotangent.

    Args:
        model: megalodon-hf's model.
        intermediates: filled during forward and backward pass, by name.

    Returns:
        Handles of the hooks; call `remove` on each after the run.
    """

    def keep(name: str, value: Any, row: Intermediate | None = None) -> None:
        def ours(tensor: Any) -> np.ndarray:
            return _numpy(tensor.transpose(1, 2) if row and row.channels_first else tensor)

        if row is not None and row.silu:
            intermediates[name] = ours(torch.nn.functional.silu(value))
            return
        intermediates[name] = ours(value)
        value.register_hook(lambda g: intermediates.__setitem__(Quantity.cotangent(name), ours(g)))

    def after(name: str, row: Intermediate | None = None) -> Callable[..., None]:
        return lambda module, inputs, output: keep(
            name, output[0] if isinstance(output, tuple) else output, row
        )

    def before(name: str, argument: int) -> Callable[..., None]:
        return lambda module, inputs: keep(name, inputs[argument])

    import torch

    decoder = model.model
    hooks = [decoder.layers[0].register_forward_pre_hook(before("embed", 0))]
    for i, layer in enumerate(decoder.layers):
        for row in BLOCK_INTERMEDIATES:
            module, name = layer.get_submodule(row.reference), f"layers.{i}.{row.name}"
            if row.argument is None:
                hooks.append(module.register_forward_hook(after(name, row)))
            else:
                hooks.append(module.register_forward_pre_hook(before(name, row.argument)))
    hooks.append(decoder.norm.register_forward_hook(after("norm")))
    return hooks


def _numpy(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().float().contiguous().numpy().copy()
