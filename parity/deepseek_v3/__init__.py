"""The second architecture, MLA + MoE: DeepSeek-V3 in JAX, compared with Transformers.

MLA is multi-head latent attention, MoE a mixture of experts. `comparison` compares the model as any
user's port (`parity.port`). Probes and training are in `stability.moe`. The name below occurs in
stored runs; it is defined here so that reading a run does not import JAX.
"""

SUBJECT = "mla-moe"
"""Name of the port in measurements and stored runs."""
