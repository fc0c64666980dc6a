"""Adapters in bfloat16: updates that A and B lose, and changes that merging loses."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megalodon_jax.convert import save_safetensors
from megalodon_jax.lora import add_lora, save_lora
from megalodon_jax.lora_files import Adapter
from megalodon_jax.roles import named_leaves, replace_leaves
from stability.core.findings import Severity
from stability.storage.adapters import findings, merge_findings, merged
from stability.storage.update_rules import AdamW
from tests.helpers import cli, model_of, same_leaves, tiny, tokens

CONFIG = tiny(num_layers=1, model_dim=32)
TARGETS = ("*.attn.wv", "*.ffn.fc1")


def adapted(size: float = 0.0):
    """A model with adapters whose B has elements of this size."""
    model = add_lora(model_of(CONFIG), 4, alpha=4.0, targets=TARGETS, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    values = {
        n: jnp.asarray(size * rng.standard_normal(x.shape), x.dtype)
        for n, x in named_leaves(model).items()
        if n.endswith("lora_B")
    }
    return replace_leaves(model, values)


def shares(found, probe, metric):
    return {f.subject: f.value for f in found if (f.probe, f.metric) == (probe, metric)}


def test_at_a_small_rate_A_stands_still_and_B_which_starts_at_0_does_not() -> None:  # noqa: N802
    found = findings(adapted(), AdamW(lr=1e-5))
    lost = shares(found, "survival", "predicted_frozen_fraction")
    assert len(lost) == 2 * len(TARGETS)
    frozen = shares(found, "survival", "frozen_fraction")
    for name in lost:
        if name.endswith("lora_A"):
            assert lost[name] > 0.5 and frozen[name] > 0.5
        else:
            # Every number is a step from 0.
            assert lost[name] == frozen[name] == 0.0
    warned = {f.subject for f in found if f.severity is Severity.WARNING and f.probe == "survival"}
    assert warned == {name for name in lost if name.endswith("lora_A")}


def test_at_a_large_rate_nothing_is_lost() -> None:
    found = findings(adapted(), AdamW(lr=3e-2))
    assert max(shares(found, "survival", "frozen_fraction").values()) == 0.0


def test_measured_on_text_only_the_adapters_are_trained() -> None:
    model = adapted(0.1)
    before = model
    batches = np.stack([tokens(CONFIG, (2, 8), seed) for seed in range(3)])
    found = findings(model, AdamW(lr=3e-2), batches)
    assert set(shares(found, "survival", "frozen_fraction")) == {
        n for n in named_leaves(model) if "lora_" in n
    }
    assert same_leaves(model, before)


@pytest.mark.parametrize(
    ("size", "severity", "least", "most"),
    [(1e-4, Severity.WARNING, 0.9, 1.0), (3.0, Severity.OK, 0.0, 0.1)],
)
def test_a_small_change_vanishes_in_bfloat16_and_a_large_one_does_not(
    size, severity, least, most
) -> None:
    found = [f for f in findings(adapted(size)) if f.metric == "unchanged_fraction"]
    assert [f.subject for f in found] == [f"model.layers.0.{n[2:]}.weight" for n in TARGETS]
    for f in found:
        assert f.severity is severity and least <= f.value <= most, f.message
        assert bool(f.remedy) == (severity is Severity.WARNING)


def by_hand(W: np.ndarray, change: np.ndarray) -> float:
    first = W.astype(ml_dtypes.bfloat16)
    last = (first.astype(np.float32) + change).astype(ml_dtypes.bfloat16)
    return float(np.mean((first == last)[change != 0]))


def test_the_share_is_that_of_bfloat16_itself() -> None:
    rng = np.random.default_rng(1)
    W, B, A = (rng.standard_normal(s).astype(np.float32) for s in ((40, 30), (40, 2), (2, 30)))
    for size in (1e-4, 1e-3, 1e-2):
        adapter = Adapter(A, np.float32(size) * B, alpha=3.0)
        expected = by_hand(W, np.float32(1.5) * (np.float32(size) * B @ A))
        assert merged(W, adapter).frozen == expected
    # A scale that is forgotten is seen: another share.
    forgotten = merged(W, Adapter(A, np.float32(1e-3) * B, alpha=2.0)).frozen
    assert forgotten != merged(W, Adapter(A, np.float32(1e-3) * B, alpha=3.0)).frozen
    assert merged(W, Adapter(A, 0 * B, alpha=3.0)).frozen == 0.0


@pytest.fixture
def folders(tmp_path):
    save_lora(tmp_path / "adapters", adapted(1e-4))
    base = tmp_path / "base"
    base.mkdir()
    save_safetensors(model_of(CONFIG), base / "model.safetensors")
    return tmp_path / "adapters", base


@pytest.mark.sweep
def test_the_command_names_what_merging_loses(folders) -> None:
    adapters, base = folders
    told = cli("stability", adapters, "--base", base, "--quiet")
    assert told.exit_code == 0, told.output
    assert "stay unchanged although the adapter changes them" in told.output
    assert "fix: keep the adapter beside the weights" in told.output
    assert f"Merging {len(TARGETS)} adapters: at most" in told.output
    document = json.loads(cli("stability", adapters, "--base", base, "--quiet", "--json").output)
    shown = [f for f in document["findings"] if f["metric"] == "unchanged_fraction"]
    expected = {f.subject: f.value for f in merge_findings(adapters, base) if f.remedy}
    assert {f["subject"]: f["value"] for f in shown} == expected
    alone = cli("stability", adapters, "--quiet")
    assert alone.exit_code == 0 and not re.search("[Mm]erg", alone.output)


def test_adapters_of_another_model_are_refused(folders, tmp_path) -> None:
    adapters, base = folders
    save_safetensors(model_of(tiny(num_layers=1)), base / "model.safetensors")
    with pytest.raises(ValueError, match=r"belong to another base model: .*attn\.wv"):
        list(merge_findings(adapters, base))
    told = cli("stability", base, "--base", base, "--quiet")
    assert told.exit_code == 2 and "no adapters at" in told.output
    told = cli("stability", adapters, "--base", base, "--text", base / "model.safetensors")
    assert told.exit_code == 2 and "--text trains a whole model" in told.output
