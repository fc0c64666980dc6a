"""Families of operations (dot, sum, exp, ...), common to JAX primitives, HLO and ATen operators.

The tables `JAXPR`, `HLO` and `ATEN` give the family of an operation by its name. They list only
operations that round, accumulate or change dtype, not data movement. Source: docs/formats.md "The
dtype audit": dots, reductions, exp/log/rsqrt/softmax, cumsum, fft, converts.
"""

from __future__ import annotations

DOT, SUM, PEAK, ACCUMULATE, SCAN = "dot", "sum", "peak", "accumulate", "cumsum"
EXP, LOG, ROOT, POWER, TRIG = "exp", "log", "sqrt", "power", "trigonometric"
SIGMOID, FFT, CONVERT, ELEMENTWISE = "sigmoid", "fft", "convert", "elementwise"
SOFTMAX = "softmax"

_SUMS = (DOT, SUM, PEAK, ACCUMULATE, SCAN)
_FUNCTIONS = (EXP, LOG, ROOT, POWER, TRIG, SIGMOID, SOFTMAX, FFT)
FAMILIES = (*_SUMS, *_FUNCTIONS, CONVERT, ELEMENTWISE)


def _families(**groups: str) -> dict[str, str]:
    return {op: globals()[family] for family, ops in groups.items() for op in ops.split()}


JAXPR = _families(
    DOT="dot_general conv_general_dilated ragged_dot ragged_dot_general",
    SUM="reduce_sum reduce_prod reduce reduce_window_sum reduce_window",
    PEAK="reduce_max reduce_min argmax argmin cummax cummin",
    ACCUMULATE="add_any scatter-add scatter_add",
    SCAN="cumsum cumprod cumlogsumexp",
    EXP="exp exp2 expm1",
    LOG="log log1p",
    ROOT="rsqrt sqrt cbrt",
    POWER="pow integer_pow square",
    TRIG="sin cos tan atan2",
    SIGMOID="logistic tanh erf erfc erf_inv",
    FFT="fft",
    CONVERT="convert_element_type reduce_precision",
    ELEMENTWISE="add sub mul div neg abs max min rem round floor ceil clamp complex real imag conj",
)

HLO = _families(
    DOT="dot convolution",
    SUM="reduce reduce-window",
    ACCUMULATE="scatter select-and-scatter",
    EXP="exponential exponential-minus-one",
    LOG="log log-plus-one",
    ROOT="rsqrt sqrt cbrt",
    POWER="power",
    TRIG="sine cosine tan atan2",
    SIGMOID="logistic tanh erf",
    FFT="fft",
    CONVERT="convert reduce-precision",
    ELEMENTWISE="add subtract multiply divide negate abs maximum minimum clamp complex real imag",
)

ATEN = _families(
    DOT="mm addmm bmm baddbmm convolution dot mv _scaled_mm linear matmul "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_attention_math",
    SUM="sum mean var var_mean linalg_vector_norm norm native_layer_norm prod nll_loss_forward "
    "native_layer_norm_backward native_group_norm nansum",
    PEAK="amax amin max_pool argmax aminmax",
    ACCUMULATE="index_add index_put embedding_dense_backward scatter_add add_ index_put_ "
    "_index_put_impl_ index_add_ scatter_add_",
    SCAN="cumsum cumprod logcumsumexp cumsum_",
    EXP="exp expm1 exp2 exp_",
    LOG="log log1p logsumexp log_",
    ROOT="rsqrt sqrt rsqrt_ sqrt_",
    POWER="pow pow_ square",
    TRIG="sin cos polar angle",
    SIGMOID="sigmoid silu tanh gelu sigmoid_backward silu_backward tanh_backward "
    "gelu_backward softplus sigmoid_ silu_ logit",
    FFT="_fft_r2c _fft_c2r _fft_c2c",
    CONVERT="_to_copy",
    SOFTMAX="_softmax _safe_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data",
    ELEMENTWISE="add sub rsub mul div neg abs maximum minimum clamp complex view_as_complex "
    "reciprocal mul_ sub_ div_ where masked_fill clamp_min",
)
