"""Symbolic shapes as linear equations: the length of each dim is a sum of products of sizes.

`[g <q: r d | k: d | v: d>]` of length n is  g r d + 2 g d = n. A product of unknown sizes counts as one unknown, so
the equations are linear. Each size that a round finds is put into the equations of the next round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from xrank.layout.notation import Node, Parts, Product, Size

_Monomial = tuple[str, ...]
"""A product of sizes, by their names, sorted."""


@dataclass(frozen=True, slots=True)
class DimLength:
    """A dim of a tensor and its length in elements."""

    tensor: str
    dim: int
    node: Node
    length: int

    def __str__(self) -> str:
        return f"{self.length} in dim {self.dim} of {self.tensor}"


@dataclass(frozen=True, slots=True)
class Conflict:
    """A dim whose length contradicts other dims."""

    at: DimLength
    want: Fraction
    """The length that follows from the others; for `is_quotient`, the quotient, which is not a whole number."""
    others: tuple[DimLength, ...]
    """The dims that determine the sizes; empty if the caller gave the sizes."""
    is_quotient: bool = False


@dataclass(frozen=True, slots=True)
class SolvedSizes:
    """Sizes that solve the lengths, with their origins."""

    sizes: Mapping[str, int]
    """Size -> number, the given sizes included."""
    origins: Mapping[str, tuple[DimLength, ...]]
    """Size -> the dims that determine it; given sizes have no entry."""


def solve_lengths(lengths: Sequence[DimLength], given: Mapping[str, int]) -> SolvedSizes | Conflict:
    """Return the sizes that solve all lengths, or the first conflict.

    Args:
        lengths: dims made of sizes, products and parts.
        given: sizes known beforehand.
    """
    sizes, origins = dict(given), dict[str, tuple[DimLength, ...]]()
    # Each round puts in the sizes that the last one found, which shortens the products with them.
    while True:
        rows = _Rows(sizes, origins)
        for at in lengths:
            conflict = rows.add(at)
            if conflict is not None:
                return conflict
        known = len(sizes)
        for monomial, (value, row_origins) in rows.solve().items():
            # A lone equation contradicts nothing but whole numbers: a size of 5/3 shows that a dim lost rows.
            if value.denominator != 1 or value < 1:
                return Conflict(row_origins[-1], value, row_origins[:-1], is_quotient=True)
            if len(monomial) == 1:
                sizes[monomial[0]] = int(value)
                origins[monomial[0]] = row_origins
        if len(sizes) == known:
            return rows.find_indivisible() or SolvedSizes(sizes, origins)


@dataclass(slots=True)
class _Row:
    """pivot + rest = value."""

    rest: dict[_Monomial, Fraction]
    value: Fraction
    origins: tuple[DimLength, ...]


@dataclass(slots=True)
class _Rows:
    """Linear equations in echelon form: a row holds only unknowns smaller than its pivot."""

    sizes: Mapping[str, int]
    origins: Mapping[str, tuple[DimLength, ...]]
    by_pivot: dict[_Monomial, _Row] = field(default_factory=dict)

    def add(self, at: DimLength) -> Conflict | None:
        """Add the equation of a dim; return its conflict with earlier equations, if any."""
        row = {monomial: Fraction(n) for monomial, n in _polynomial(at.node, self.sizes).items()}
        value = Fraction(at.length) - row.pop((), Fraction(0))
        others = [origin for name in _names(at.node) for origin in self.origins.get(name, ())]
        # Replace every unknown that is the pivot of an earlier row. An empty rest repeats or contradicts earlier rows.
        while pivots := [monomial for monomial in row if monomial in self.by_pivot]:
            # The largest first: its row holds only smaller unknowns, so no pivot comes back and the loop ends.
            pivot = max(pivots, key=_order)
            factor, other = row.pop(pivot), self.by_pivot[pivot]
            value -= factor * other.value
            for monomial, n in other.rest.items():
                row[monomial] = row.get(monomial, Fraction(0)) - factor * n
            row = {monomial: n for monomial, n in row.items() if n}
            others += other.origins
        unique = tuple(dict.fromkeys(others))
        if not row:
            return Conflict(at, at.length - value, unique) if value else None
        pivot = max(row, key=_order)
        factor = row.pop(pivot)
        self.by_pivot[pivot] = _Row(
            {monomial: n / factor for monomial, n in row.items()}, value / factor, (*unique, at)
        )
        return None

    def solve(self) -> dict[_Monomial, tuple[Fraction, tuple[DimLength, ...]]]:
        """Return the unknowns that the equations determine, by back substitution."""
        found: dict[_Monomial, tuple[Fraction, tuple[DimLength, ...]]] = {}
        # Smallest first: whatever a row's rest can ever be solved for is in `found` by its turn.
        for pivot in sorted(self.by_pivot, key=_order):
            row = self.by_pivot[pivot]
            if all(monomial in found for monomial in row.rest):
                value = row.value - sum((n * found[monomial][0] for monomial, n in row.rest.items()), Fraction(0))
                others = [origin for monomial in row.rest for origin in found[monomial][1]]
                found[pivot] = value, tuple(dict.fromkeys((*others, *row.origins)))
        return found

    def find_indivisible(self) -> Conflict | None:
        """Return two products, one a factor of the other, whose quotient is not a whole number."""
        # The equations take `g r` and `g r d` as two unrelated unknowns, so they miss that one divides the other.
        solved = self.solve()
        for larger, (value, origins) in solved.items():
            for smaller, (divisor, others) in solved.items():
                if _holds(larger, smaller) and (value / divisor).denominator != 1:
                    return Conflict(origins[-1], value / divisor, (others[-1],), is_quotient=True)
        return None


def _order(monomial: _Monomial) -> tuple[int, _Monomial]:
    return len(monomial), monomial


def _holds(larger: _Monomial, smaller: _Monomial) -> bool:
    left = list(larger)
    for name in smaller:
        if name not in left:
            return False
        left.remove(name)
    return bool(left)


def _names(node: Node) -> list[str]:
    match node:
        case Size(str() as name):
            return [name]
        case Product(factors):
            return [name for factor in factors for name in _names(factor)]
        case Parts(parts):
            return [name for part in parts for name in _names(part.of)]
    return []


def _polynomial(node: Node, sizes: Mapping[str, int]) -> dict[_Monomial, int]:
    match node:
        case Size(str() as name):
            return {(): sizes[name]} if name in sizes else {(name,): 1}
        case Size(int() as number):
            return {(): number}
        case Product(factors):
            found: dict[_Monomial, int] = {(): 1}
            for factor in factors:
                terms = _polynomial(factor, sizes)
                product: dict[_Monomial, int] = {}
                for a, n in found.items():
                    for b, m in terms.items():
                        key = tuple(sorted((*a, *b)))
                        product[key] = product.get(key, 0) + n * m
                found = product
            return found
        case Parts(parts):
            total: dict[_Monomial, int] = {}
            for part in parts:
                for key, n in _polynomial(part.of, sizes).items():
                    total[key] = total.get(key, 0) + n
            return total
    raise AssertionError(node)  # parse_side refuses other nodes
