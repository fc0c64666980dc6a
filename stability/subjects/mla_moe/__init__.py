"""Multi-head latent attention with sparse experts, as DeepSeek-V3 has them.

`config` and `model` are the decoder, `checkpoint` loads it from a DeepSeek-V3 directory, `parity`
compares it with Transformers, `router`, `attention` and `fixed_bugs` probe it, `defects` plants
what they must find, `policy` says which parameters may be narrow, `training` breaks a run and
recovers it.
"""
