"""megalodon-hf's results where it is known to differ from the JAX model."""

from __future__ import annotations

from typing import Any

import numpy as np

from megalodon_jax.config import MegalodonConfig
from parity.megalodon.cases import by_name
from parity.megalodon.reference.installed import package


def known_difference_facts(live: Any) -> dict[str, np.ndarray]:
    """Return megalodon-hf's result for every known difference, by id.

    `parity.megalodon.known_differences` measures the differences from these arrays.

    Args:
        live: a `LiveReference`.
    """
    padded, labelled, plain = map(by_name, ("left_padding", "labels_at_padding", "plain"))
    return {
        "ema-mask": live.run(padded)["logits"],
        "loss-mask": live.run(labelled)["loss"],
        "empty-loss": _loss_without_targets(live, plain),
        "untied-head": _head_from_embedding(by_name("untied_head").config),
        "initialisation": _initial_spread(plain.config),
    }


def _loss_without_targets(live: Any, case: Any) -> np.ndarray:
    import torch

    ids = torch.from_numpy(case.batch.ids).long().to(live.device)
    model = live.load(case.config, case.weights)
    with torch.no_grad():
        return _array(model(ids, labels=torch.full_like(ids, -100), use_cache=False).loss)


def _head_from_embedding(config: MegalodonConfig) -> np.ndarray:
    """Return the largest absolute difference of head and embedding; NaN if their shapes differ.

    megalodon-hf's model is newly initialised, without `tie_word_embeddings` in its configuration.
    """
    model = _built(config)
    head, embedding = model.lm_head.weight, model.model.embed.weight
    if head.shape != embedding.shape:
        return np.asarray(np.nan, np.float32)
    return _array((head - embedding).abs().max())


def _initial_spread(config: MegalodonConfig) -> np.ndarray:
    """Return the standard deviation of the initial weights of embedding and linear layers, taken
    over all weights together."""
    import torch

    torch.manual_seed(0)
    named = _built(config).named_parameters()
    drawn = [p for n, p in named if p.ndim == 2 and n.endswith(".weight")]
    return _array(torch.cat([p.flatten() for p in drawn]).std())


def _built(config: MegalodonConfig) -> Any:
    """Return a new megalodon-hf model whose configuration lacks `tie_word_embeddings`."""
    theirs = package()
    fields = config.to_hf()
    del fields["tie_word_embeddings"]
    return theirs.MegalodonForCausalLM(theirs.MegalodonConfig(**fields))


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().float().numpy()
