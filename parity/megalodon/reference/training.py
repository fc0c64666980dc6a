"""Training of megalodon-hf: the trajectory of a case under torch's AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np

from parity.megalodon.cases import Case
from parity.megalodon.trajectory import HYPER, Diary, batches, decays


def trajectory(model: Any, case: Case, device: str) -> dict[str, np.ndarray]:
    """Train megalodon-hf; return losses, moments and displacements, float32, as `Diary.arrays`.

    Args:
        model: megalodon-hf with the case's weights; training changes them.
        case: a case with steps.
        device: device of the model.
    """
    import torch

    named = dict(model.named_parameters())
    optimiser = torch.optim.AdamW(
        [
            {
                "params": [p for n, p in named.items() if decays(n) == group],
                "weight_decay": HYPER.weight_decay if group else 0.0,
            }
            for group in (True, False)
        ],
        lr=HYPER.lr,
        betas=(HYPER.beta1, HYPER.beta2),
        eps=HYPER.eps,
    )
    diary = Diary(case, _arrays(named), "float32")
    for batch in batches(case):
        optimiser.zero_grad()
        out = model(
            input_ids=torch.from_numpy(batch.ids).long().to(device),
            attention_mask=torch.from_numpy(batch.mask).to(device) if batch.padded else None,
            labels=torch.from_numpy(batch.labels).long().to(device),
            use_cache=False,
        )
        out.loss.backward()
        optimiser.step()
        moments = (
            _arrays({n: optimiser.state[p][key] for n, p in named.items()})
            for key in ("exp_avg", "exp_avg_sq")
        )
        diary.note(out.loss.detach().cpu(), _arrays(named), *moments)
    return diary.arrays()


def _arrays(tensors: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: t.detach().cpu().numpy() for name, t in tensors.items()}
