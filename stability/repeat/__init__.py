"""Two runs of one training: where their bits first differ.

`hashed_loss` is a training step that also returns a digest of every value; `DigestLog` writes
digests to a file, and `first_difference` compares two files. Source: docs/training.md "Where two
runs part".
"""

from stability.repeat.digests import Digests, digest, digests_of, hashed_loss
from stability.repeat.log import Answer, DigestLog, LogError, compare_logs, read_log

__all__ = [
    "Answer",
    "DigestLog",
    "Digests",
    "LogError",
    "compare_logs",
    "digest",
    "digests_of",
    "hashed_loss",
    "read_log",
]
