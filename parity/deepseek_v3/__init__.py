"""The second architecture: DeepSeek-V3's MLA and experts in JAX, held against Transformers'.

`comparison` is its suite by the engine for any port; its probes and its training are in
`stability.moe`.
"""
