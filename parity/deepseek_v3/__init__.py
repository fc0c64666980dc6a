"""The second architecture: DeepSeek-V3's MLA and experts in JAX, compared with Transformers.

`comparison` is its suite, by the engine for any port. Its probes and training are in
`stability.moe`.
"""

from parity.deepseek_v3.cases import CASES, Case, by_name
from parity.deepseek_v3.checkpoint import load
from parity.deepseek_v3.comparison import compare
from parity.deepseek_v3.config import MLAMoEConfig
from parity.deepseek_v3.model import MLAMoEForCausalLM

__all__ = [
    "CASES",
    "Case",
    "MLAMoEConfig",
    "MLAMoEForCausalLM",
    "by_name",
    "compare",
    "load",
]
