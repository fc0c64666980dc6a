"""Runs and prints the command `activations`: value ranges of a step, and attention per head.

Source: docs/formats.md "Activations and attention".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalodon_jax.convert import load_from_pretrained
from reports.text import count, for_json
from reports.user_text import first_tokens
from stability.activations.attention import attention_findings, measure_heads
from stability.activations.ranges import measure_ranges, range_findings
from stability.core.findings import Finding, Severity


def examine(path: Path, text: Path | None, report: Callable[[str], None]) -> list[Finding]:
    """Run one training step, without its update, and return findings about narrow formats.

    Args:
        path: Checkpoint: a folder, or a weights file with its `config.json` beside it.
        text: File whose bytes are the tokens of the step; None draws random token ids.
        report: Receives lines of progress.

    Raises:
        FileNotFoundError: the checkpoint or the text does not exist.
        ValueError: the checkpoint is not Megalodon's; or a text is given, and it is shorter than
            256 bytes or the vocabulary is smaller than 256.
    """
    model = load_from_pretrained(path)
    ids = first_tokens(text, model.config.vocab_size)
    report(f"one step on {ids.size} tokens of {text.name if text else 'random ids'}")
    ranges = range_findings(measure_ranges(model, ids))
    report("logits and entropies by head")
    return [*ranges, *attention_findings(measure_heads(model, ids))]


def broken(findings: Sequence[Finding]) -> bool:
    """Return whether any finding is an error, such as values that are not finite."""
    return any(f.severity is Severity.ERROR for f in findings)


def as_document(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return findings as JSON values; numbers that are not finite become None."""
    return [for_json(asdict(f)) for f in findings]


def as_text(findings: Sequence[Finding]) -> str:
    """Return text: errors and warnings, most severe first, and the number of examined arrays."""
    grave = [f for f in findings if f.severity.gravity() >= Severity.WARNING.gravity()]
    grave.sort(key=lambda f: -f.severity.gravity())
    lines = [
        f"{f.severity.upper()} {f.subject}: {f.message}{f'; {f.remedy}' if f.remedy else ''}"
        for f in grave
    ]
    arrays = {f.subject for f in findings if f.probe == "activation_range"}
    lines.append(f"{count(len(arrays), 'array')} examined, {count(len(grave), 'warning')} or worse")
    return "\n".join(lines)
