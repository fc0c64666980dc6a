"""Matching of parameters: by value, by rounded value, then by name where values are ambiguous.

`match_parameters` is the entry point. Each of its steps considers only the parameters that earlier
steps left unmatched.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np

from parity.engine.pairing import naming
from parity.engine.pairing.analogy import by_families, by_siblings
from parity.engine.pairing.constructions import Construction, copied, laid_out
from parity.engine.pairing.irregularities import irregularities
from parity.engine.pairing.layouts import Layout
from parity.engine.pairing.parameter_pairs import Matching, Means, Pair, Unmatched
from parity.engine.pairing.resemblance import resemblance
from parity.engine.pairing.value_search import (
    SMALL,
    Tensors,
    compositions,
    fit,
    locate,
    of_parts,
    orders_of,
    part_of,
    rearranged,
    same_values,
    sum_of,
    whole_matches,
)

ROUNDINGS = tuple(np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16))
"""Dtypes that weights may have been rounded to when they were copied to the port."""
# Some seconds for the largest biases.
SUMS = 1000
"""Largest number of pairs of vectors whose sums are searched for among the port's parameters."""
CANDIDATES = 8
"""Number of parameters of the original that an unmatched parameter of the port is compared with at
most: those with the most similar names."""


def match_parameters(
    original: Mapping[str, np.ndarray], port: Mapping[str, np.ndarray]
) -> Matching:
    """Return a `Matching`: of which parameters of the original each one of the port consists.

    Arrays are read one at a time and hashed in chunks: memory-mapped ones are not loaded whole.

    Args:
        original: the original's parameters by dotted path, of any real dtype.
        port: the port's parameters by dotted path, of any real dtype.
    """
    search = _Search(Tensors(original), Tensors(port))
    search.by_value(search.original, search.port, Means.VALUE, "")
    for dtype in ROUNDINGS:
        wider_o, wider_p = search.wider(dtype)
        note = f"the {{}} holds values rounded to {dtype.name}"
        if wider_o:
            rounded = search.original.rounded(dtype)
            search.by_value(rounded, search.port, Means.ROUNDED, note.format("port"))
        if wider_p:
            rounded = search.port.rounded(dtype)
            search.by_value(search.original, rounded, Means.ROUNDED, note.format("original"))
    search.in_another_order()
    search.as_sums()
    search.in_part()
    search.by_name()
    search.by_resemblance()
    search.as_their_modules()
    return search.matching()


__all__ = ["Matching", "Means", "Pair", "Unmatched", "match_parameters"]


class _Search:
    """The pairs found so far, and the unmatched parameters."""

    def __init__(self, original: Tensors, port: Tensors):
        self.original, self.port = original, port
        self.pairs: dict[str, Pair] = {}
        self.used: set[str] = set()
        self.summed: set[str] = set()
        """Names of the original's vectors that are a term of a sum found in the port
        (`as_sums`)."""
        self.reordered: dict[str, str] = {}
        """Name of the original's parameter that holds the same values in an order that no layout
        (reshape and transposition) gives, by name of the port's parameter."""

    def add(
        self,
        port: str,
        construction: Construction,
        means: Means,
        note: str = "",
        also: Iterable[str] = (),
    ) -> None:
        self.pairs[port] = Pair(port, construction, means, note, tuple(also))
        self.used.update(construction.parameters, also)

    def rest(self, ambiguous: bool | None) -> tuple[list[str], list[str]]:
        """Return the unmatched names of the original and of the port.

        Args:
            ambiguous: True: only arrays that values cannot identify (constants and very small
                ones); False: only the others; None: both.
        """
        rest_o = [name for name in self.original.names if name not in self.used]
        rest_p = [name for name in self.port.names if name not in self.pairs]
        if ambiguous is None:
            return rest_o, rest_p
        return (
            [name for name in rest_o if self.original.ambiguous(name) is ambiguous],
            [name for name in rest_p if self.port.ambiguous(name) is ambiguous],
        )

    def known(self) -> Iterator[tuple[str, str]]:
        """Yield the pairs of names found so far, as (original, port)."""
        for pair in self.pairs.values():
            for name in (*pair.originals, *pair.also):
                yield name, pair.port

    def wider(self, dtype: np.dtype) -> tuple[bool, bool]:
        """Return, for the original and for the port, whether rounding to `dtype` may change any
        unmatched parameter."""
        rest_o, rest_p = self.rest(ambiguous=False)
        return (
            any(self.original.rounds(name, dtype) for name in rest_o),
            any(self.port.rounds(name, dtype) for name in rest_p),
        )

    def likeness(self, originals: Sequence[str], ports: Sequence[str]) -> np.ndarray:
        """Return how well each name of the original fits each name of the port and the pairs found
        so far.

        The result is an array (original, port), the sum of `naming.similarity` and
        `naming.context`; larger values fit better.
        """
        return naming.similarity(originals, ports) + naming.context(originals, ports, self.known())

    def by_value(self, original: Tensors, port: Tensors, means: Means, note: str) -> None:
        """Match arrays of equal values: whole parameters, then fused ones, then split ones.

        Args:
            original: the original's arrays, possibly rounded.
            port: the port's arrays, possibly rounded.
            means: evidence to record for the pairs.
            note: remark to record for the pairs.
        """
        rest_o, rest_p = self.rest(ambiguous=False)
        if not rest_o or not rest_p:
            return
        groups = []
        for names, fits in whole_matches(original, port, rest_o, rest_p):
            self.reordered |= {name: names[0] for name, layouts in fits if not layouts}
            if fitting := {name: layouts for name, layouts in fits if layouts}:
                groups.append((names, fitting))
        # Groups decided by values alone come first: their modules help to decide the others.
        for names, fits in sorted(groups, key=lambda group: len(group[0]) * len(group[1]) > 1):
            self.several(names, fits, means, note)
        rest_o, rest_p = self.rest(ambiguous=False)
        for name, pieces in compositions(port, original, rest_p, rest_o):
            self.add(name, of_parts(port.shapes[name], pieces), means, note)
        rest_o, rest_p = self.rest(ambiguous=False)
        for name, pieces in compositions(original, port, rest_o, rest_p):
            for part, place, layout in pieces:
                self.add(part, part_of(name, place, layout), means, note)

    def several(
        self,
        names: Sequence[str],
        fits: Mapping[str, Mapping[str, Layout]],
        means: Means,
        note: str,
    ) -> None:
        """Match several equal arrays one to one by name.

        A leftover array of the port gets the most similarly named original. A leftover original is
        recorded as tied (`Pair.also`) in the pair of the port's most similarly named array of the
        same layout.

        Args:
            names: names of the original's parameters, all with the same values.
            fits: for each parameter of the port with these values, by name: the layouts (reshape
                and transposition) that map the original's parameters to it, by the original's name.
            means: evidence to record for the pairs.
            note: remark to record for the pairs.
        """
        ports = list(fits)
        if len(names) == len(ports) == 1:
            self.add(ports[0], laid_out(names[0], fits[ports[0]][names[0]]), means, note)
            return
        likeness = self.likeness(names, ports)
        for j, port in enumerate(ports):
            for i, name in enumerate(names):
                if name not in fits[port]:
                    likeness[i, j] = -math.inf
        pairs = naming.assignment(likeness)
        chosen = {port: names[int(likeness[:, j].argmax())] for j, port in enumerate(ports)}
        chosen |= {ports[j]: names[i] for i, j in pairs}
        also = defaultdict(list)
        for i in sorted(set(range(len(names))) - {i for i, _ in pairs}):
            order = np.argsort(-likeness[i], kind="stable").tolist()
            if port := self.tied(names[i], [ports[j] for j in order], fits, chosen):
                also[port].append(names[i])
        if len(names) > 1 and len(ports) > 1:
            means = Means.NAME if means is Means.VALUE else means
            note = "; ".join(filter(None, (note, f"one of {len(names)} that are equal")))
        for port in ports:
            name = chosen[port]
            others = [other for other in ports if other != port and len(names) == 1]
            tied = f"tied with {', '.join(others)}" if others else ""
            text = "; ".join(filter(None, (note, tied)))
            self.add(port, laid_out(name, fits[port][name]), means, text, also[port])

    def tied(
        self,
        name: str,
        ports: Sequence[str],
        fits: Mapping[str, Mapping[str, Layout]],
        chosen: Mapping[str, str],
    ) -> str:
        """Return the first of `ports` to which the same layout leads from `name` as from the chosen
        original; empty if there is none.

        With another layout, the original is recorded as being in another order. Arguments as in
        `several`; `chosen` is the original of each parameter of the port.
        """
        for port in ports:
            if (layout := fits[port].get(name)) == fits[port][chosen[port]]:
                return port
            if layout is not None:
                self.reordered.setdefault(port, name)
        return ""

    def in_another_order(self) -> None:
        """Match arrays with the same rows or columns in another order."""
        _, rest_p = self.rest(ambiguous=False)
        for port in rest_p:
            name = self.reordered.get(port)
            if name is None or name in self.used:
                continue
            found = rearranged(name, self.original[name], self.port[port])
            if found is not None:
                self.add(port, found, Means.REORDERED, f"the rows or columns of {name}")

    def as_sums(self) -> None:
        """Match vectors of the port, such as biases, that are the sum of two vectors of one module.

        The port's vector may also be a block of the sum, hold its elements in another order, or be
        the sum in some blocks only. Vectors of the original that are already matched, whole or in
        part, are tried as terms too: a GRU's biases are summed except those of the last gate.
        """
        _, rest_p = self.rest(ambiguous=False)
        ports = {p: self.port[p] for p in rest_p if len(self.port.shapes[p]) == 1}
        if not ports:
            return
        vectors: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name in sorted(self.original.names, key=lambda name: name in self.used):
            if len(self.original.shapes[name]) == 1 and not self.original.ambiguous(name):
                vectors[naming.parent(name), self.original.size(name)].append(name)
        pairs = (pair for names in vectors.values() for pair in itertools.combinations(names, 2))
        for pair in itertools.islice(pairs, SUMS):
            arrays = [self.original[name] for name in pair]
            total = arrays[0] + arrays[1]
            for port, target in ports.items():
                # Test for one element before all are compared.
                known = any((x.astype(target.dtype) == target[0]).any() for x in (total, *arrays))
                if port in self.pairs or not known:
                    continue
                found = sum_of(pair, arrays, target)
                if found is not None:
                    ordered = len({piece.place for piece in found.pieces}) > 1 or not all(
                        piece.layout.is_identity for piece in found.pieces
                    )
                    means = Means.REORDERED if ordered else Means.ROUNDED
                    self.summed.update(found.parameters)
                    self.add(port, found, means, f"the sum of {' and '.join(pair)}, rounded once")

    def in_part(self) -> None:
        """Match arrays of one side that are a part of a larger, otherwise unmatched array of the
        other side."""
        rest_o, rest_p = self.rest(ambiguous=False)
        # A vector that is in a sum only in part may have its other part here.
        rest_o += sorted(self.summed)
        for port, names in self.nearest(rest_o, rest_p, lambda o, p: o > p):
            for name in names:
                if at := locate(self.original[name], self.port[port]):
                    note = f"all but {at[0].text()} of the original is in no parameter of the port"
                    self.add(port, part_of(name, *at), Means.VALUE, note)
                    break
        rest_o, rest_p = self.rest(ambiguous=False)
        for port, names in self.nearest(rest_o, rest_p, lambda o, p: o < p):
            pieces, held = [], np.zeros(self.port.shapes[port])
            for name in names:
                at = locate(self.port[port], self.original[name])
                # Pieces at one place would be added.
                if at and not at[0](held).any():
                    pieces.append((name, *at))
                    at[0].accumulate(held, np.ones(at[0].shape))
            if pieces:
                construction = of_parts(self.port.shapes[port], pieces)
                inside = ", ".join(place.text() for _, place, _ in pieces)
                note = f"only {inside} of it comes from the original"
                self.add(port, construction, Means.SLICE, note)

    def nearest(
        self, originals: Sequence[str], ports: Sequence[str], sizes
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield parameters of the port, each with the names of at most `CANDIDATES` parameters of
        the original, the most similar name first.

        Args:
            originals: names of the original's parameters to consider.
            ports: names of the port's parameters to consider.
            sizes: returns whether an original's and a port's number of elements fit.
        """
        if not originals or not ports:
            return
        likeness = self.likeness(originals, ports)
        for j, port in enumerate(ports):
            order = np.argsort(-likeness[:, j], kind="stable")
            names = [originals[int(i)] for i in order]
            fitting = [n for n in names if sizes(self.original.size(n), self.port.size(port))]
            if fitting:
                yield port, fitting[:CANDIDATES]

    def by_name(self) -> None:
        """Match constants and small arrays, which can be equal by accident, by name and value."""
        rest_o, rest_p = self.rest(ambiguous=True)
        self.small(rest_o, rest_p)
        rest_o, rest_p = self.rest(ambiguous=True)
        for names, fits in whole_matches(self.original, self.port, rest_o, rest_p):
            self.assigned(names, [port for port, _ in fits])
        for find in (by_siblings, by_families):
            rest_o, rest_p = self.rest(ambiguous=True)
            for port, construction in find(self.original, self.port, rest_o, rest_p, self.pairs):
                self.add(port, construction, Means.NAME, "constant")

    def small(self, rest_o: Sequence[str], rest_p: Sequence[str]) -> None:
        """Match arrays of up to `SMALL` elements with equal values, by name."""
        for size in range(1, SMALL + 1):
            names = [name for name in rest_o if self.original.size(name) == size]
            ports = [name for name in rest_p if self.port.size(name) == size]
            if names and ports:
                self.assigned(names, ports)

    def assigned(self, names: Sequence[str], ports: Sequence[str]) -> None:
        """Pair arrays by the best assignment of names, and drop the pairs with unequal values."""
        likeness = self.likeness(names, ports) - self.conflicts(names, ports)
        alone = len(names) == len(ports) == 1
        for i, j in naming.assignment(likeness):
            name, port = names[i], ports[j]
            if likeness[i, j] <= 0:
                continue
            if layout := fit(self.original[name], self.port[port]):
                constant = self.original.size(name) > SMALL
                note = "constant" if constant else f"{self.original.size(name)} elements"
                means = Means.VALUE if alone else Means.NAME
                self.add(port, laid_out(name, layout), means, note)

    def conflicts(self, names: Sequence[str], ports: Sequence[str]) -> np.ndarray:
        """Return 2 for two names whose modules are paired, but not with each other, else 0.

        The result is an array (original, port), to be subtracted from similarities.
        """
        modules_o, modules_p = defaultdict(set), defaultdict(set)
        for o, p in self.known():
            modules_o[naming.parent(o)].add(naming.parent(p))
            modules_p[naming.parent(p)].add(naming.parent(o))
        return 2.0 * np.array(
            [
                [
                    bool(modules_o[o]) and bool(modules_p[p]) and p not in modules_o[o]
                    for p in map(naming.parent, ports)
                ]
                for o in map(naming.parent, names)
            ]
        )

    def by_resemblance(self) -> None:
        """Match similarly named arrays of one size that are nearly equal, or differ in a slice."""
        rest_o, rest_p = self.rest(ambiguous=None)
        found = []
        for port, names in self.nearest(rest_o, rest_p, lambda o, p: o == p):
            for rank, name in enumerate(names):
                likeness = resemblance(self.original[name], self.port[port])
                if likeness is not None:
                    found.append((likeness.distance, rank, name, port, likeness))
        for _, _, name, port, likeness in sorted(found, key=lambda entry: entry[:2]):
            if name not in self.used and port not in self.pairs:
                means = Means.SLICE if likeness.slices else Means.NEAR
                note = likeness.text()
                if self.reordered.get(port) == name:
                    note += ", the same values in another order"
                self.add(port, laid_out(name, likeness.layout), means, note)

    def as_their_modules(self) -> None:
        """Match vectors that hold the original's values, reordered as the matrices of the same
        module are."""
        pairs = list(self.pairs.values())
        rest_o, rest_p = self.rest(ambiguous=False)
        ports = [name for name in rest_p if name in self.reordered]
        for port, names in self.nearest(rest_o, ports, lambda o, p: o == p):
            shape = self.port.shapes[port]
            for name in names:
                if name in self.used or self.original.shapes[name] != shape:
                    continue
                pair = self.as_its_module(Pair(port, copied(name, shape), Means.NEAR), pairs)
                if pair.is_reordered:
                    self.add(port, pair.construction, pair.means, pair.note)
                    break

    def matching(self) -> Matching:
        """Return the result: pairs in the port's order, and the unmatched parameters."""
        rest_o, rest_p = self.rest(ambiguous=None)
        every_o, every_p = list(self.original.names), list(self.port.names)
        likeness = self.likeness(every_o, rest_p)
        left_p = tuple(
            self.unmatched(name, self.port, every_o, self.original, likeness[:, j], self.reordered)
            for j, name in enumerate(rest_p)
        )
        likeness = self.likeness(rest_o, every_p)
        back = {self.reordered[name]: name for name in every_p[::-1] if name in self.reordered}
        left_o = tuple(
            self.unmatched(name, self.original, every_p, self.port, likeness[i], back)
            for i, name in enumerate(rest_o)
        )
        pairs = [self.pairs[name] for name in self.port.names if name in self.pairs]
        pairs = [self.in_order(pair, pairs) for pair in pairs]
        pairs = [self.as_its_module(pair, pairs) for pair in pairs]
        odd = irregularities(pairs)
        pairs = tuple(
            replace(pair, note="; ".join(filter(None, (pair.note, odd.get(pair.port)))))
            for pair in pairs
        )
        return Matching(pairs, left_o, left_p)

    def in_order(self, pair: Pair, pairs: Sequence[Pair]) -> Pair:
        """Return a pair whose parameter is a sum of two vectors in some blocks only, marked as
        equal instead of reordered if the parameter is complete.

        The parameter is complete if its blocks keep their places and the port holds every element
        of both vectors, as for a GRU, whose last two biases are not summed. Any other pair is
        returned unchanged.
        """
        pieces = pair.construction.pieces
        if not (pair.is_reordered and pair.construction.adds):
            return pair
        if any(p.part.whole != p.place.whole or p.part.starts != p.place.starts for p in pieces):
            return pair
        if not all(piece.layout.is_identity for piece in pieces):
            return pair
        for name in pair.originals:
            held = np.zeros(self.original.shapes[name])
            for piece in (p for each in pairs for p in each.construction.pieces):
                if piece.parameter == name:
                    piece.part.accumulate(held, np.ones(piece.part.shape))
            if not held.all():
                return pair
        return replace(pair, means=Means.ROUNDED)

    def as_its_module(self, pair: Pair, pairs: Sequence[Pair]) -> Pair:
        """Return the pair of a vector, such as a bias, with a construction (recipe) that reorders
        the vector as the matrices of its module are reordered.

        Zero biases of a recurrent cell equal the original's in any order of the gates, but their
        derivatives have the order of the gates. Biases with equal values in several gates, such as
        1 for the forget gate and 0 for the others, do not show their order themselves; they are
        reordered if the original's bias in the order of the matrices equals the port's. The pair is
        returned unchanged if its values do not allow that order, if the matrices of its module are
        not reordered, or if they are reordered in several ways.
        """
        shape, names = pair.construction.shape, pair.originals
        pieces = pair.construction.pieces
        if pair.means is Means.REORDERED or len(shape) != 1:
            return pair
        if not all(p.part.is_whole and p.place.is_whole for p in pieces):
            return pair
        orders = {
            order: other
            for other in pairs
            if other.is_reordered and naming.parent(other.port) == naming.parent(pair.port)
            for each in other.originals
            if naming.parent(each) == naming.parent(names[0])
            for order in orders_of(other.construction, each)
            if len(order) == shape[0]
        }
        if len(orders) != 1:
            return pair
        [(order, like)] = orders.items()
        rows = np.arange(len(order), dtype=np.float64)
        one = rearranged("", rows, rows[list(order)])
        if one is None:
            return pair
        pieces = (replace(piece, parameter=name) for piece in one.pieces for name in names)
        found = Construction(shape, tuple(pieces))
        held = found.from_original({name: np.asarray(self.original[name]) for name in names})
        if not same_values(held.astype(self.port[pair.port].dtype), self.port[pair.port]):
            return pair
        note = f"in the order of {like.port}"
        if not pair.is_equal:
            return replace(pair, construction=found, means=Means.REORDERED, note=note)
        note = "; ".join(filter(None, (pair.note, note)))
        return replace(pair, construction=found, note=note)

    @staticmethod
    def unmatched(
        name: str,
        side: Tensors,
        others: Sequence[str],
        other: Tensors,
        likeness: np.ndarray,
        reordered: Mapping[str, str],
    ) -> Unmatched:
        """Return an unmatched parameter of one side, with the most similar one of the other side.

        Args:
            name: name of the unmatched parameter.
            side: arrays of the parameter's own side.
            others: names of the other side's parameters.
            other: arrays of the other side.
            likeness: for each name in `others`, how well it fits `name`.
            reordered: name of the other side's parameter that holds the same values in an order
                that no layout (reshape and transposition) gives, by name of the own side's
                parameter.
        """
        shape = side.shapes[name]
        if not others:
            return Unmatched(name, shape)
        if name in reordered:
            return Unmatched(name, shape, reordered[name], "the same values in another order")
        same = np.array([other.size(candidate) == side.size(name) for candidate in others])
        # An equal size counts as much as half of the words. It is no condition: for a part of a
        # fused parameter no size is equal.
        closest = others[int(np.argmax(likeness + 0.5 * same))]
        return Unmatched(name, shape, closest, f"of {other.shapes[closest]}, has other values")
