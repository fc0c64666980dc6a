"""The mutants of `tools.mutants`: bugs as small edits of the source, and six that are none."""

from tools.mutant_list import (
    bench,
    blind,
    blind_second,
    blind_third,
    commands,
    equivalent,
    executors,
    interchange,
    layers,
    lora,
    meshes,
    model,
    packed_streams,
    parity,
    ports,
    reports,
    stability,
    systematic,
    torch_runs,
)
from tools.mutant_list.mutant import ROOT, Mutant

MUTANTS = (
    *(*layers.MUTANTS, *model.MUTANTS, *interchange.MUTANTS),
    *(*parity.MUTANTS, *reports.MUTANTS, *stability.MUTANTS, *ports.MUTANTS, *meshes.MUTANTS),
    *(*torch_runs.MUTANTS, *commands.MUTANTS, *bench.MUTANTS),
    *executors.MUTANTS,
    *blind.MUTANTS,
    *blind_second.MUTANTS,
    *blind_third.MUTANTS,
    *packed_streams.MUTANTS,
    *lora.MUTANTS,
    *systematic.MUTANTS,
)
CONTROLS = equivalent.MUTANTS
"""Equivalent mutants: nothing may find them."""

__all__ = ["CONTROLS", "MUTANTS", "ROOT", "Mutant"]
