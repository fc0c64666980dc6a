"""Every probe speaks about its planted defect, and only then."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from stability.core.dtype_rules import Policy
from stability.moe.attention_probe import clip_factors
from stability.moe.policy import FP8, FP8_MLA
from tools.experiments import moe_defects as defects


@pytest.mark.parametrize("defect", defects.DEFECTS, ids=lambda d: d.metric)
def test_a_planted_defect_is_caught_and_a_healthy_model_is_not(defect):
    row = defect.row()
    assert row.caught, (row.healthy, row.planted)
    assert row.planted.remedy and not row.healthy.remedy


def test_an_uncaught_defect_is_said_in_the_table():
    clip = next(d for d in defects.DEFECTS if d.metric == "clip_error")
    silent = defects.Defect("clip_error", "nothing", clip.healthy, clip.healthy)
    said = defects.document(defects.rows([silent]))
    assert "| NO |" in defects.table(said)


def test_qk_clip_leaves_heads_below_tau_alone():
    assert clip_factors(np.array([50.0, 100.0, 400.0]), 100.0).tolist() == [1.0, 1.0, 0.25]


def test_a_policy_keeps_mla_wide_unless_asked():
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    assert FP8.dtype(name) == jnp.bfloat16
    assert FP8_MLA.dtype(name) == jnp.float8_e4m3fn
    for policy in (FP8, FP8_MLA):
        assert policy.dtype("model.layers.4.mlp.gate.e_score_correction_bias") == jnp.float32
        assert policy.dtype("model.layers.0.self_attn.kv_a_layernorm.weight") == jnp.float32
        assert policy.dtype("model.layers.4.mlp.experts.up_proj.weight") == jnp.float8_e4m3fn


def test_a_policy_clamps_and_refuses_what_it_does_not_know():
    stored = FP8.apply({"experts": jnp.asarray([1e6, -1e6], jnp.float32)})
    assert stored["experts"].astype(jnp.float32).tolist() == [448.0, -448.0]
    with pytest.raises(ValueError, match="no rule for parameter 'a'"):
        Policy("some", (("b", "float32"),)).dtype("a")
    with pytest.raises(ValueError, match="policy odd: the rule 'b' gives 'float16', expected one"):
        Policy("odd", (("b", "float16"),))
