"""Comparison of two runs of one training: the first value whose bits differ.

`hashed_loss` makes a training step that also returns a digest of every value. `DigestLog` writes
digests to a file, `read_log` reads the file, and `compare_logs` compares two runs. `digest_steps`
and `digest_callback` do the same for a training in torch or transformers' Trainer. Source:
docs/training.md "Where two runs part".
"""

from stability.repeat.digests import Digests, digest, digests_of, hashed_loss
from stability.repeat.log import Answer, DigestLog, LogError, compare_logs, read_log
from stability.repeat.torch_steps import digest_callback, digest_steps, torch_digest

__all__ = [
    "Answer",
    "DigestLog",
    "Digests",
    "LogError",
    "compare_logs",
    "digest",
    "digest_callback",
    "digest_steps",
    "digests_of",
    "hashed_loss",
    "read_log",
    "torch_digest",
]
