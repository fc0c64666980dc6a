"""Low-precision matrix products: accuracy of the backends, and the error that a format would cause.

`measure` compares the backends' products with float64. `captured` returns the operands of a model's
own products, and `costs` the error of each of these products in each format.
"""

from stability.products.accuracy import measure
from stability.products.what_if import FORMATS, LADDER, Cost, advice, captured, costs, rules

__all__ = ["FORMATS", "LADDER", "Cost", "advice", "captured", "costs", "measure", "rules"]
