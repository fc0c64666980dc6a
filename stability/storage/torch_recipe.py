"""Remedies against frozen parameters, as lines of a torch training script.

Source: docs/stability.md "In a torch run".
"""

from __future__ import annotations

from stability.storage.update_rules import SGD, AdamW, Lion, Muon, Optimiser


def recipe(rule: Optimiser) -> list[str]:
    """Return the remedies that apply updates in full, as lines of text and torch code.

    Args:
        rule: the optimiser, whose settings are written into the script.
    """
    made = _made(rule)
    return [
        "In torch, one of",
        "    model.float(); " + made,
        '    with torch.autocast("cuda", dtype=torch.bfloat16): loss = ...  # AMP: float32 stored',
        "or, parameters left in bfloat16,",
        "    from stability.storage.torch_narrow import compensate, round_stochastically",
        f"    {made}; round_stochastically(optimizer)  # or compensate(optimizer), Kahan",
        "    optimizer.load_state_dict(...)  # of a run that goes on: only now",
        "and to be told when parameters stand still",
        "    from stability.storage import watch_torch",
        "    watch_torch(optimizer, model.named_parameters())",
    ]


def _made(rule: Optimiser) -> str:
    match rule:
        case AdamW():
            name = "torch.optim.AdamW"
            more = f"betas=({rule.beta1:g}, {rule.beta2:g}), eps={rule.eps:g}, "
            more += f"weight_decay={rule.weight_decay:g}"
        case SGD():
            name, more = "torch.optim.SGD", f"momentum={rule.momentum:g}"
        case Lion():
            name = "Lion"
            more = f"betas=({rule.beta1:g}, {rule.beta2:g}), weight_decay={rule.weight_decay:g}"
        case Muon():
            name, more = "torch.optim.Muon", f"momentum={rule.beta:g}"
        case _:
            name, more = type(rule).__name__, "..."
    return f"optimizer = {name}(model.parameters(), lr={rule.lr:g}, {more})"
