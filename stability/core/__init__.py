"""What all probes share: findings, number formats, named leaves, rounding in jit, dtype rules."""
