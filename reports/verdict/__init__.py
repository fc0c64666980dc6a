"""What a run means: changes, histories, levels, drift, pinned baselines, one word."""
