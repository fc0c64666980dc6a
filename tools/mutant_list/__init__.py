"""The mutants of `tools.mutants`: bugs as small edits of the source, and six that are none."""

from tools.mutant_list import equivalent, interchange, layers, model, parity, reports, stability
from tools.mutant_list.mutant import ROOT, Mutant

MUTANTS = (
    *(*layers.MUTANTS, *model.MUTANTS, *interchange.MUTANTS),
    *(*parity.MUTANTS, *reports.MUTANTS, *stability.MUTANTS),
)
CONTROLS = equivalent.MUTANTS
"""Equivalent mutants: nothing may find them."""

__all__ = ["CONTROLS", "MUTANTS", "ROOT", "Mutant"]
