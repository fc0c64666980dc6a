"""Sides: programs with named parameters and stages, whatever library they are written in.

`side` says what a side is; one file per library makes one of its modules, without touching it.
"""

from parity.sides.side import (
    OUTPUT,
    Precision,
    Rounding,
    Run,
    Side,
    SideError,
    Trace,
)

__all__ = ["OUTPUT", "Precision", "Rounding", "Run", "Side", "SideError", "Trace"]
