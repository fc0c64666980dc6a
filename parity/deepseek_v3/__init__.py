"""The second architecture: DeepSeek-V3's MLA and experts in JAX, compared with Transformers.

`comparison` is its suite, by the engine for any port. Its probes and training are in
`stability.moe`. The names that stored runs use are here, because reading them needs no JAX.
"""

SUBJECT = "mla-moe"
"""Name of the port in measurements and stored runs."""
