"""The mutants of `tools.mutants`: one for each module with logic that can be wrong, and
controls."""

from tools.mutant_list import equivalent, model, parity, reports, stability
from tools.mutant_list.mutant import ROOT, Mutant

MUTANTS = (*model.MUTANTS, *parity.MUTANTS, *reports.MUTANTS, *stability.MUTANTS)
CONTROLS = equivalent.MUTANTS
"""Equivalent mutants: no test can find them."""

__all__ = ["CONTROLS", "MUTANTS", "ROOT", "Mutant"]
