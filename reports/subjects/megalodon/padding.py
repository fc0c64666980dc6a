"""Explains comparisons that seem to contradict each other because only some include padding.

Pure functions from a run to plain data. Source: docs/reports.md "What broke, and where".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from parity.engine.measure.deviation import Deviation
from parity.engine.measure.measurement import Measurement, Verdict
from parity.engine.measure.where import ALL_PADDING
from parity.megalodon.cases import CASES
from parity.megalodon.edges import MegalodonEdge
from reports.subject import Padding
from reports.text import edge_name, label

VALID_ONLY = MegalodonEdge.JAX32_REFERENCE32
"""Comparison that excludes padding, because megalodon-hf computes other values there than JAX."""
NAMED = 3
"""Largest number of cases that the sentence names."""


def padding(rows: Iterable[Measurement], tensors: Sequence[Deviation]) -> Padding:
    """Return notes for padded cases in which `VALID_ONLY` passes while another comparison fails.

    Args:
        rows: Measurements of a run.
        tensors: Failing tensors of the run, with the positions of the elements that differ.
    """
    verdicts: dict[str, dict[str, set[Verdict]]] = defaultdict(lambda: defaultdict(set))
    for m in rows:
        verdicts[m.case][m.edge].add(m.verdict)
    parted: dict[str, list[str]] = {}
    for case in CASES:
        edges = verdicts.get(case.name, {})
        if edges.get(VALID_ONLY, set()) - {Verdict.INFO} != {Verdict.PASS}:
            continue
        failing = [edge for edge, found in edges.items() if Verdict.FAIL in found]
        if failing and case.padding_differs:
            parted[case.name] = failing
    if not parted:
        return Padding()
    full = dict.fromkeys(edge for edges in parted.values() for edge in edges)
    scopes = dict.fromkeys(full, "Padding too.") | {VALID_ONLY: "Valid positions only."}
    return Padding(scopes, _sentence(parted, list(full), tensors))


def _sentence(
    parted: dict[str, list[str]], full: Sequence[str], tensors: Sequence[Deviation]
) -> str:
    first: dict[tuple[str, str], str] = {}
    for tensor in tensors:
        if tensor.edge in parted.get(tensor.case, ()):
            # Only the first failing tensor: its error may have spread to later ones.
            first.setdefault((tensor.case, tensor.edge), tensor.where)
    all_padding = bool(first) and all(ALL_PADDING in where for where in first.values())
    names = list(parted)
    cases = ", ".join(label(name, 48) for name in names[:NAMED])
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    which, valid = " and ".join(edge_name(edge) for edge in full), edge_name(VALID_ONLY)
    see = "compare" if len(full) > 1 else "compares"
    what = "all first differences are at padding" if all_padding else "edges disagree at padding"
    return (
        f"No contradiction: in {cases}{more} {what}. {which} {see} padded positions too; {valid} "
        "leaves them out, because megalodon-hf does not mask padding in its EMA."
    )
