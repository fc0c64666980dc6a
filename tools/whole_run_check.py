"""Compares the predictions of `stability` for whole runs and frozen shares with torch runs.

    python -m tools.whole_run_check docs/stability.md ["Llama, 2 layers, bytes" ...]

Four small models train in torch under autocast (AMP), cast to bfloat16, and with each remedy: the
same weights and batches, for several seeds. `stability` analyses the checkpoint of the cast run
after a quarter of its steps. A second table compares frozen shares: a cast run is analysed after
200 steps and goes on for as many. Both are written between the document's markers; rows of models
that are not named are kept. Takes a quarter of an hour on one core for all of them.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megalodon_jax.files import written_aside
from stability.storage import torch_narrow
from stability.storage.diagnose import report
from stability.storage.whole_run import RunRemedy, WholeRun, family_of

WHOLE, FROZEN = (
    (f"<!-- {name}: begin -->", f"<!-- {name}: end -->") for name in ("whole run", "frozen")
)
"""Markers around each table in the document."""
TEXT = Path(__file__).parents[1] / "LICENSE"
STEPS, SAVED, RATE, LENGTH, ROWS, EVALUATED = 200, 50, 3e-4, 64, 8, 40
SEEDS = (0, 1)
"""Seeds per model; the fastest model has more."""
HALF = torch.bfloat16
FAMILIES = ("embeddings", "matrices", "norms", "biases")


@dataclass(frozen=True)
class Task:
    """A model and its training data."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    seeds: tuple[int, ...] = SEEDS


class Norm(nn.LayerNorm):
    """A LayerNorm that computes in float32, whatever dtype its parameters have."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalised input, float32."""
        scale, shift = self.weight.float(), self.bias.float()
        return nn.functional.layer_norm(input.float(), self.normalized_shape, scale, shift)


class Residual(nn.Module):
    """Six blocks of two linear layers each, on vectors."""

    def __init__(self, width: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(32, width), nn.Linear(width, 10)
        self.norms = nn.ModuleList(Norm(width) for _ in range(blocks + 1))
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map vectors (B, 32) to logits (B, 10)."""
        x = self.enter(x)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=False):
            x = x + down(torch.relu(up(norm(x))))
        return self.leave(self.norms[-1](x))


def _text_batch(generator: torch.Generator) -> torch.Tensor:
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(0, len(text) - LENGTH, (ROWS,), generator=generator).tolist()
    return torch.stack([text[start : start + LENGTH] for start in starts])


def _vector_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(256, 32, generator=generator)
    fixed = torch.Generator().manual_seed(5)
    teacher = torch.randn(32, 64, generator=fixed), torch.randn(64, 10, generator=fixed)
    return x, (torch.tanh(x @ teacher[0] / 4) @ teacher[1]).argmax(1)


def _llama(width: int = 64, layers: int = 4) -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": width // 16,
        "num_key_value_heads": width // 16,
        "max_position_embeddings": LENGTH,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads))


def _gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with mock.patch.object(nn, "LayerNorm", Norm):
        return GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes, **off))


def _next_byte(model: nn.Module, ids: Any) -> torch.Tensor:
    logits = model(ids).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _class(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


TASKS = (
    Task("Llama, 2 layers, bytes", partial(_llama, 32, 2), _text_batch, _next_byte, (0, 1, 2, 3)),
    Task("Llama, 4 layers, bytes", _llama, _text_batch, _next_byte),
    Task("GPT-2, 4 layers, bytes", _gpt2, _text_batch, _next_byte),
    Task("residual network, vectors", Residual, _vector_batch, _class),
)


def train(task: Task, way: str, seed: int, saved: Path | None = None) -> float:
    """Train with one remedy and return the loss on held-out batches."""
    torch.manual_seed(seed)
    model = task.model()
    for name, parameter in model.named_parameters():
        if way != "AMP" and family_of(name, tuple(parameter.shape)) != way:
            parameter.data = parameter.data.to(HALF)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    if way == "stochastic rounding":
        torch_narrow.round_stochastically(optimizer)
    elif way == "Kahan":
        torch_narrow.compensate(optimizer)
    elif way == "moments":
        torch_narrow.round_stochastically(optimizer)
    rounded = mock.patch.object(torch_narrow, "stochastic", lambda x: x.to(HALF))
    batches, held_out = (torch.Generator().manual_seed(each + seed) for each in (1, 99))
    with rounded if way == "moments" else mock.MagicMock():
        for step in range(STEPS):
            optimizer.zero_grad()
            # Autocast caches the narrow copies of weights until its context ends.
            with torch.autocast("cpu", HALF):
                loss = task.loss(model, task.batch(batches))
            loss.backward()
            optimizer.step()
            if saved is not None and step + 1 == SAVED:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, saved)
    with torch.no_grad(), torch.autocast("cpu", HALF):
        losses = [task.loss(model, task.batch(held_out)) for _ in range(EVALUATED)]
    return float(torch.stack(losses).mean())


def rows(task: Task, folder: Path) -> list[str]:
    """Return the table rows for one model: predicted and observed effect of each remedy."""
    expected: dict[str, list[RunRemedy]] = defaultdict(list)
    returned: dict[str, list[float]] = defaultdict(list)
    for seed in task.seeds:
        right = train(task, "AMP", seed)
        cast = train(task, "to(bfloat16)", seed, folder / "run.pt")
        print(task.name, seed, right, cast, file=sys.stderr, flush=True)
        whole = report(folder / "run.pt", remedies=()).whole
        assert whole is not None
        for way, remedy in expected_of(whole).items():
            expected[way].append(remedy)
            returned[way].append((cast - train(task, way, seed)) / (cast - right))
            print(task.name, seed, remedy, returned[way][-1], file=sys.stderr, flush=True)
    lines = []
    for way in sorted(expected, key=lambda way: -_mean(r.returns for r in expected[way])):
        what = f"{way} alone in float32" if way in (*FAMILIES, "moments") else way
        about, low, high = (
            f"{_mean(getattr(remedy, each) for remedy in expected[way]):.0%}"
            for each in ("returns", "low", "high")
        )
        came = ", ".join(f"{share:.0%}" for share in returned[way])
        lines.append(f"| {task.name} | {what} | {about} | {low} to {high} | {came} |")
    return lines


def frozen_rows(task: Task, folder: Path) -> list[str]:
    """Return the table rows for one model: predicted and observed frozen share by family and
    seed."""
    shares: dict[str, list[str]] = defaultdict(list)
    for seed in task.seeds[:2]:
        found = frozen(task, seed, folder / "frozen.pt")
        said = {f.subject: f.value for f in report(folder / "frozen.pt", remedies=()).findings
                if f.metric == "frozen_fraction"}  # fmt: skip
        shapes = {n: tuple(p.shape) for n, p in task.model().named_parameters()}
        for family in FAMILIES:
            inside = [n for n in found if family_of(n, shapes[n]) == family and n in said]
            sizes = [found[n][1] for n in inside]
            if inside:
                for values in ([said[n] for n in inside], [found[n][0] for n in inside]):
                    shares[family].append(f"{np.average(values, weights=sizes):.0%}")
        print(task.name, seed, dict(shares), file=sys.stderr, flush=True)
    return [
        f"| {task.name} | {family} | {', '.join(of[::2])} | {', '.join(of[1::2])} |"
        for family, of in shares.items()
    ]


def frozen(task: Task, seed: int, saved: Path) -> dict[str, tuple[float, int]]:
    """Train a model cast to bfloat16, save it after `STEPS` steps, and return what froze in `STEPS`
    more.

    Returns:
        By parameter: fraction of the elements with a gradient that never changed, and their number.
    """
    torch.manual_seed(seed)
    model = task.model().to(HALF)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    batches = torch.Generator().manual_seed(1 + seed)
    moved, pushed = (
        {n: torch.zeros_like(p, dtype=torch.bool) for n, p in model.named_parameters()}
        for _ in range(2)
    )
    for step in range(2 * STEPS):
        if step == STEPS:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        with torch.autocast("cpu", HALF):
            loss = task.loss(model, task.batch(batches))
        loss.backward()
        optimizer.step()
        if step >= STEPS:
            for name, parameter in model.named_parameters():
                moved[name] |= parameter.detach() != before[name]
                if parameter.grad is not None:
                    pushed[name] |= parameter.grad != 0
    return {
        n: (1 - float(moved[n][pushed[n]].double().mean()), int(pushed[n].sum()))
        for n in moved
        if pushed[n].any()
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def expected_of(whole: WholeRun) -> dict[str, RunRemedy]:
    """Return the remedies that are tried in training, by the names that `train` uses."""
    ways = {"stochastic rounding": "round stochastically", "Kahan": "Kahan"}
    ways |= {f: f"{f} alone" for f in FAMILIES} | {"moments": "moments alone"}
    found = {
        way: next((r for r in whole.remedies if r.what.startswith(begin)), None)
        for way, begin in ways.items()
    }
    return {way: remedy for way, remedy in found.items() if remedy is not None}


def main(document: Path, names: Collection[str] = ()) -> None:
    """Train, analyse, compare, and write the table into the document.

    Args:
        document: Has the markers, and the table between them.
        names: Models whose rows are written again; none for all.

    Raises:
        ValueError: No model has one of the names.
    """
    known = [task.name for task in TASKS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"expected models among {', '.join(known)}; got {', '.join(unknown)}")
    torch.set_num_threads(1)
    text = document.read_text(encoding="utf-8")
    heads = {
        WHOLE: "| model | remedy | expected to return | range | returned |",
        FROZEN: "| model | family | said | found |",
    }
    with tempfile.TemporaryDirectory() as folder:
        for markers, of_task in ((WHOLE, rows), (FROZEN, frozen_rows)):
            before, rest = text.split(markers[0])
            old, after = rest.split(markers[1])
            head = heads[markers]
            lines = [head, "| --- " * (head.count("|") - 1) + "|"]
            for task in TASKS:
                if names and task.name not in names:
                    lines += [x for x in old.splitlines() if x.startswith(f"| {task.name} |")]
                else:
                    lines += of_task(task, Path(folder))
            text = "\n".join([before + markers[0], *lines, markers[1] + after])
    with written_aside(document) as aside:
        aside.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
