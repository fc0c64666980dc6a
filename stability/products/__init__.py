"""Low-precision matrix products: their accuracy, and what each format would cost.

`measure` compares the backends with float64. `captured` and `costs` analyse a model's own products.
"""

from stability.products.accuracy import measure
from stability.products.what_if import FORMATS, LADDER, Cost, advice, captured, costs, rules

__all__ = ["FORMATS", "LADDER", "Cost", "advice", "captured", "costs", "measure", "rules"]
