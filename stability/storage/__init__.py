"""What storing parameters and optimiser states in few bits does, and what helps.

`diagnose` asks everything of a checkpoint; `survival`, `ema_poles` and `optimiser_state` are the
probes, `remedies` and `narrow_optimisers` what helps, `frozen_watch` the same question inside a
training loop.
"""
