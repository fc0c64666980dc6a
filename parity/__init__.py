"""Parity: the JAX model, megalodon-hf and a float64 oracle compared on the same work.

`engine` compares any two programs, `port` any JAX function with the module it was made from; the
rooms beside them are what was compared so far. Rooms export what they are used for.
"""

from parity.port import Report, check, watched

__all__ = ["Report", "check", "watched"]
