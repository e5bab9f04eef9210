"""Prove by a recipe that a model has all of its tensors, and that inferred shapes are the whole ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import Any

from msgspec import Struct, field

from xrank.errors import AGAIN, ContradictionError, IncompleteError, LayoutError, XrankError, option
from xrank.layout.local_part import global_size
from xrank.layout.notation import Node, Parts, Product, Size, size_names_of
from xrank.recipes.recipe import Match, Recipe, Rule, Side, active_rules, is_required, match, raised_flags, source_sides
from xrank.recipes.recipe_file import load_recipes_of, load_shipped_recipes
from xrank.recipes.sizes import check_counts, collect_flags, list_model_types, place_names
from xrank.words import list_text

_Monomial = tuple[str, ...]
"""A product of sizes, by their names, sorted."""


class DimLength(Struct, frozen=True):
    """A dim of a tensor and its length in elements."""

    tensor: str
    dim: int
    node: Node
    length: int

    def __str__(self) -> str:
        return f"{self.length} in dim {self.dim} of {self.tensor}"


class Conflict(Struct, frozen=True):
    """A dim whose length contradicts other dims."""

    at: DimLength
    want: Fraction
    """The length that follows from the others; for `is_quotient`, the quotient, which is not a whole number."""
    others: tuple[DimLength, ...]
    """The dims that determine the sizes; empty if the caller gave the sizes."""
    is_quotient: bool = False


class SolvedSizes(Struct, frozen=True):
    """Sizes that solve the lengths, with their origins."""

    sizes: Mapping[str, int]
    """Size -> number, the given sizes included."""
    origins: Mapping[str, tuple[DimLength, ...]]
    """Size -> the dims that determine it; given sizes have no entry."""


def solve_lengths(lengths: Sequence[DimLength], given: Mapping[str, int]) -> SolvedSizes | Conflict:
    """Return the sizes that solve all lengths, or the first conflict."""
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


class _Row(Struct):
    """pivot + rest = value."""

    rest: dict[_Monomial, Fraction]
    value: Fraction
    origins: tuple[DimLength, ...]


class _Rows(Struct):
    """Linear equations in echelon form: a row holds only unknowns smaller than its pivot."""

    sizes: Mapping[str, int]
    origins: Mapping[str, tuple[DimLength, ...]]
    by_pivot: dict[_Monomial, _Row] = field(default_factory=dict)

    def add(self, at: DimLength) -> Conflict | None:
        """Add the equation of a dim; return its conflict with earlier equations, if any."""
        row = {monomial: Fraction(n) for monomial, n in _polynomial(at.node, self.sizes).items()}
        value = Fraction(at.length) - row.pop((), Fraction(0))
        others = [origin for name in size_names_of(at.node) for origin in self.origins.get(name, ())]
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
                # Few products pass the comparison of lengths, which is much cheaper than that of counts.
                is_factor = len(smaller) < len(larger) and Counter(smaller) <= Counter(larger)
                if is_factor and (value / divisor).denominator != 1:
                    return Conflict(origins[-1], value / divisor, (others[-1],), is_quotient=True)
        return None


def _order(monomial: _Monomial) -> tuple[int, _Monomial]:
    return len(monomial), monomial


def _polynomial(node: Node, sizes: Mapping[str, int]) -> Counter[_Monomial]:
    """Return the products of unknown sizes that a dim is the sum of, with their factors."""
    found = Counter[_Monomial]()
    match node:
        case Size(str() as name) if name not in sizes:
            found[name,] = 1
        case Size():
            found[()] = global_size(node, sizes)
        case Product(factors):
            found[()] = 1
            for factor in factors:
                terms, before, found = _polynomial(factor, sizes), found, Counter()
                for (a, n), (b, m) in product(before.items(), terms.items()):
                    found[tuple(sorted((*a, *b)))] += n * m
        case Parts(parts):
            for part in parts:
                found.update(_polynomial(part.of, sizes))
        case _:
            raise AssertionError(node)  # parse_side refuses other nodes
    return found


_Indices = tuple[int, ...]
BRING_FILES = f"copy the files of the missing ranks, then {AGAIN}; or give {option('base_model')} to compare with"
CHECK_CONFIG = f"check that config.json is this model's, or give {option('base_model')}"


def lost_tensor(
    name: str,
    got: str | None,
    want: str,
    step: str = BRING_FILES,
    *,
    kind: type[XrankError] = IncompleteError,
    file: str | None = None,
) -> XrankError:
    """Return the error that a model lacks a tensor."""
    tensor, problem = name.partition(" ")[0], f"{name}: no file holds any of it"
    return kind(problem, tensor=tensor, file=file, got=got, want=want, next_step=step)


def prove_family(
    names: Collection[str], config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> bool:
    """Refuse a model that lacks tensors, if a recipe of config.json's ``model_type`` knows all of its names.

    For formats that record whole shapes: they record no list of a model's tensors, so a state dict from which some were
    left out reads as a whole model, and transformers gives random values to the rest. `shapes` are those of tensors
    that config.json sizes; each must be the recipe's. Return False if no recipe knows the names.
    """
    types = list_model_types(config)
    recipes = sorted(load_recipes_of(types), key=lambda recipe: not recipe.args)
    own = [match(one, names, is_reversed=True) for one in recipes]
    first: XrankError | None = None
    for found in (found for found in own if found.fits):
        try:
            found, told = place_names(found, config, None)
            given = {size: number for size, (number, _) in told.items()}
            check_names(found, SolvedSizes(given, {}), collect_flags(found.recipe, config, None))
            _check_sizes(found, shapes or {}, given)
        except (IncompleteError, ContradictionError) as error:
            first = first or error
        else:
            return True
    if first is not None:
        raise first
    refuse_missing(own)
    return False


def _check_sizes(found: Match, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> None:
    """Refuse a shape that is not the recipe's, with the sizes that config.json has; rows of a vocabulary may be padded.

    Layers of different sizes (``by_layer``) are not compared.
    """
    for side, name in () if found.recipe.by_layer else found.find_sides():
        shape = shapes.get(name, ())
        for dim, (node, length) in enumerate(zip(side.dims, shape, strict=False)):
            names = size_names_of(node)
            if not set(names) <= sizes.keys() - set(found.recipe.padded) or len(shape) != len(side.dims):
                continue
            want = global_size(node, sizes)
            if length != want:
                keys = [(found.recipe.config.get(size) or (size,))[0] for size in names]
                by = " and ".join(f"{key} = {sizes[size]}" for key, size in zip(keys, names, strict=True))
                problem = f"{' or '.join(keys)} in config.json contradicts the tensors, such as {name}"
                got, at = f"{length} in dim {dim} of {name}", f"{want}, by {by}"
                raise ContradictionError(problem, tensor=name, got=got, want=at, next_step=CHECK_CONFIG)


def refuse_missing(own: list[Match]) -> None:
    """Refuse a model that lacks tensors of the recipe of its type, if that recipe knows all of its names."""
    # A few of Hugging Face's own names suffice; those of a trainer, such as norm.weight, may be another one's.
    near = (found for found in own if found.knows_layers or (found.is_reversed and found.used))
    found = next((found for found in near if not found.unknown and found.missing), None)
    if found is not None:
        # A lost file may have held what lies in the model once, but not one kind of all layers.
        is_in_layers = "{" in found.missing[0].partition(" ")[0]
        got = f"{found.num_known} tensors of {found.recipe.name}"
        want = "all of its kinds, because config.json has the model_type of this recipe"
        kind, step = (ContradictionError, CHECK_CONFIG) if is_in_layers else (IncompleteError, BRING_FILES)
        raise lost_tensor(found.missing[0], got, want, step, kind=kind)


def _describe_whole(found: Match) -> str:
    return f"all tensors of a {' or '.join(found.recipe.model_types)}, as in the recipe {found.recipe.name}"


def check_names(found: Match, solved: SolvedSizes, flags: Mapping[str, bool]) -> None:
    """Check that no index exceeds its size, and that every layer has all tensors of its kind of block."""
    indices, counts = _count_indices(found, solved)
    sizes = {**counts, **solved.sizes}
    check_counts(found.recipe, sizes)
    covered, groups = _find_covered(found, indices, sizes)
    _check_blocks(found, sizes, groups)
    raised = raised_flags(found.recipe, found.used)
    for number in active_rules(found.recipe, found.is_reversed):
        rule = found.recipe.rules[number]
        # A model has the tensors of an optional rule in all layers or in none.
        is_begun = any(str(target) in covered for target in rule.targets.values())
        flag = rule.when if rule.unless is None else rule.unless
        is_due = is_required(rule) or rule.when in raised
        is_due = is_due or (flag is not None and flags.get(flag) is (rule.unless is None))
        if is_begun or (is_due and rule.within in (None, *raised)):
            _check_covered(found, rule, sizes, covered, groups)


def _count_indices(found: Match, solved: SolvedSizes) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Return name -> its index in each dim of the name, and dim -> the number of indices that the names need."""
    indices: dict[str, dict[str, int]] = {}
    largest: dict[str, tuple[int, str]] = {}
    for side, name in found.find_sides():
        for dim, index in zip(side.name.dims, side.name.indices(name) or (), strict=True):
            size = str(dim.value) if isinstance(dim, Size) else str(dim)
            indices.setdefault(name, {})[size] = index
            if size not in largest or index > largest[size][0]:
                largest[size] = index, name
    for size, (index, name) in largest.items():
        if index >= solved.sizes.get(size, index + 1):
            origins = solved.origins.get(size, ())
            kind, step = (IncompleteError, BRING_FILES) if origins else (ContradictionError, CHECK_CONFIG)
            want = f"less than {solved.sizes[size]}" + (f", as by {origins[0]}" if origins else "")
            problem = f"{name} is one of more than {size} = {solved.sizes[size]}"
            raise kind(problem, tensor=name, got=f"the index {index}", want=want, next_step=step)
    return indices, {size: index + 1 for size, (index, _) in largest.items()}


def _check_blocks(found: Match, sizes: Mapping[str, int], groups: Mapping[str, set[_Indices]]) -> None:
    """Check that each layer has a block of each choice, such as a dense or a sparse one."""
    rules = [rule for rule in found.recipe.rules if rule.group in groups]
    for choice in {(rule.within, rule.choice) for rule in rules}:
        own = [rule for rule in rules if (rule.within, rule.choice) == choice]
        rivals = sorted({str(rule.group) for rule in own})
        blocks = {layer for group in rivals for layer in groups[group]}
        layers = next(iter(own[0].targets.values())).name.dims[:1]
        # The layers that count on from others are counted with them.
        count = sizes.get(str(layers[0].value), 0) if layers and isinstance(layers[0], Size) else 0
        bare = next((layer for layer in range(count) if (layer,) not in blocks), None)
        if bare is not None:
            raise IncompleteError(
                f"layer {bare}: no file holds any of {' or '.join(rivals)}",
                got=f"layers with one of them: {len(blocks)} of {count}",
                want=_describe_whole(found),
                next_step=BRING_FILES,
            )


def _check_covered(
    found: Match,
    rule: Rule,
    sizes: Mapping[str, int],
    covered: Mapping[str, set[_Indices]],
    groups: Mapping[str, set[_Indices]],
) -> None:
    """Check that the targets of a rule are covered at all indices, or in all layers of the rule's group."""
    for target in rule.targets.values():
        names = [str(dim.value) for dim in target.name.dims if isinstance(dim, Size)]
        for at in product(*(range(sizes.get(name, 0)) for name in names)):
            in_group = rule.group is None or at[:1] in groups.get(rule.group, set())
            if not in_group or at in covered.get(str(target), set()):
                continue
            wanted = target.name if found.is_reversed else rule.sources[0].name
            place = ", ".join(f"{n} = {i}" for n, i in zip(names, at, strict=True))
            lost = str(wanted.with_indices(*at) if len(wanted.dims) == len(at) else wanted)
            raise lost_tensor(lost, f"other tensors of {place}" if at else None, _describe_whole(found))


def _find_covered(
    found: Match, indices: Mapping[str, Mapping[str, int]], sizes: Mapping[str, int]
) -> tuple[dict[str, set[_Indices]], dict[str, set[_Indices]]]:
    """Return target -> the indices in its name with a tensor, and group -> the layers with tensors of the group."""
    covered: dict[str, set[_Indices]] = {}
    groups: dict[str, set[_Indices]] = {}
    for (number, form), names in found.used.items():
        rule = found.recipe.rules[number]
        targets = source_sides(rule, True)
        for target in targets[form : form + 1] if found.is_reversed else targets:
            dims = [str(dim.value) for dim in target.name.dims if isinstance(dim, Size)]
            for name in names:
                own = indices.get(name, {})
                # A dim that is not in the name is a dim of the tensor, which has all of its indices.
                ranges = [(own[dim],) if dim in own else range(sizes.get(dim, 0)) for dim in dims]
                covered.setdefault(str(target), set()).update(product(*ranges))
            if rule.group is not None:
                groups.setdefault(rule.group, set()).update(at[:1] for at in covered[str(target)])
    return covered, groups


_Shape = tuple[int, ...]


def prove_shapes(shapes: Mapping[str, _Shape], config: Mapping[str, Any] | None = None) -> str | None:
    """Return the name of a recipe whose symbolic shapes, with the sizes in config.json, equal these shapes.

    For formats that record no global shapes: the reader infers them from the pieces that exist, so a piece missing at
    the end of a tensor makes it shorter. Shapes alone prove nothing, because the loss of the last rank may shorten all
    tensors alike (vocabulary, heads and blocks) and still fit one set of sizes. So config must contain every size, of
    dims and of indices in names; only a contradiction between shapes is evidence without it. The names may be Hugging
    Face's or a training framework's. Every layer that config counts must be complete. Return None if no recipe knows
    all names: then the caller asks for a base model or refuses.
    """

    def find(recipes: Iterable[Recipe]) -> list[Match]:
        # Several know Hugging Face's names of one family; those with a trainer's arguments know most, such as biases.
        ordered = sorted(recipes, key=lambda recipe: not recipe.args)
        return [match(recipe, shapes, is_reversed=back) for recipe in ordered for back in (True, False)]

    # If the recipe of the model's own type knows the names, no other counts: it could prove other shapes of them.
    types = list_model_types(config)
    own = find(load_recipes_of(types))
    candidates = [found for found in own if found.fits]
    if not candidates:
        # Layers of different sizes prove nothing of each other, so their recipes need the model's own config.json.
        others = (one for one in load_shipped_recipes() if not one.by_layer and types.isdisjoint(one.model_types))
        candidates = [found for found in find(others) if found.fits]
    if not candidates:
        refuse_missing(own)
    first: XrankError | None = None
    for found in candidates:
        try:
            _prove(found, shapes, config)
        except (IncompleteError, ContradictionError) as error:
            first = first or error
        except LayoutError as error:  # fits this recipe, so other recipes' misfits do not prove a loss
            first = error if not isinstance(first, LayoutError) else first
        else:
            return found.recipe.name
    if first is not None:
        raise first
    return None


def _prove(found: Match, shapes: Mapping[str, _Shape], config: Mapping[str, Any] | None) -> None:
    found, told = place_names(found, config, None)
    given = {size: number for size, (number, _) in told.items()}
    sides = list(found.find_sides())
    for side, name in sides:
        if len(shapes[name]) != len(side.dims):
            raise ContradictionError(
                f"{name} does not fit {side}",
                tensor=name,
                got=f"shape {list(shapes[name])}",
                want=f"{len(side.dims)} dims",
                next_step=CHECK_CONFIG,
            )
    solved = solve_lengths(_lengths(found, sides, shapes, given), given)
    if isinstance(solved, Conflict):
        raise _refusal(solved)
    flags = collect_flags(found.recipe, config, None)
    check_names(found, solved, flags)
    _check_given(found, sides, shapes, given, flags)


def _lengths(
    found: Match, sides: list[tuple[Side, str]], shapes: Mapping[str, _Shape], given: Mapping[str, int]
) -> list[DimLength]:
    """Return each kind of dim once per length, without rows that padding may follow: they determine no size."""
    kinds: dict[tuple[int, int, int], DimLength] = {}
    for side, name in sides:
        for dim, (node, length) in enumerate(zip(side.dims, shapes[name], strict=True)):
            if (id(side), dim, length) in kinds:
                continue
            is_padded = not found.is_reversed and dim == 0 and bool({*size_names_of(node)} & {*found.recipe.padded})
            # Fewer rows than the vocabulary are not padding but a loss, and stay in the equations.
            if is_padded and isinstance(node, Size) and length >= given.get(str(node.value), 0):
                continue
            kinds.setdefault((id(side), dim, length), DimLength(name, dim, node, length))
    return list(kinds.values())


def _refusal(conflict: Conflict) -> XrankError:
    at, others = conflict.at, conflict.others
    if conflict.is_quotient:
        return IncompleteError(
            f"{at.tensor}: no sizes fit both its shape and that of {others[0].tensor if others else 'others'}",
            tensor=at.tensor,
            got=" and ".join(str(dim) for dim in (at, *others[:2])),
            want=f"whole sizes, not {conflict.want}",
            next_step=BRING_FILES,
        )
    want = f"{conflict.want}" + (f", as by {' and '.join(map(str, others[:2]))}" if others else " by config.json")
    if at.length > conflict.want and not others:
        problem = f"{at.tensor} is longer than config.json allows"
        return ContradictionError(problem, tensor=at.tensor, got=str(at), want=want, next_step=CHECK_CONFIG)
    # A loss only shortens: of two dims that disagree, the shorter one is at fault, not the one that was read last.
    if at.length > conflict.want and len(others) == 1:
        at, others = others[0], (at,)
        want = f"as many as fit {others[0]!s}"
    against = f"{others[0].tensor} requires" if others else "config.json requires"
    problem = f"{at.tensor} is shorter than {against}: a rank or file is missing"
    return IncompleteError(problem, tensor=at.tensor, got=str(at), want=want, next_step=BRING_FILES)


def _check_given(
    found: Match,
    sides: list[tuple[Side, str]],
    shapes: Mapping[str, _Shape],
    given: Mapping[str, int],
    flags: Mapping[str, bool],
) -> None:
    """Check that nothing rests on shapes alone: all sizes are given, and so is the flag of each absent tensor."""
    open_terms: dict[str, str] = {}  # size or flag -> a tensor that depends on it
    for side, name in sides:
        for size in (size for dim in side.all_dims for size in size_names_of(dim)):
            if size not in given:
                open_terms.setdefault(size, name)
    used = {number for number, _ in found.used}
    for number in active_rules(found.recipe, found.is_reversed):
        rule = found.recipe.rules[number]
        flag = rule.when if rule.unless is None else rule.unless
        # A model may lack a whole stack of layers of its own, whatever its config.
        if number not in used and flag is not None and rule.within is None and flag not in flags:
            open_terms.setdefault(flag, str(source_sides(rule, found.is_reversed)[0].name))
    if open_terms:
        size, tensor = next(iter(open_terms.items()))
        keys = [repr((found.recipe.config.get(size) or (size,))[0]) for size in open_terms]
        got = f"shape {list(shapes[tensor])}" if tensor in shapes else "no file with any of it"
        alone = "is known only from the existing pieces, and is too small if a rank is missing"
        want = f"config.json with {list_text(keys, 3)}"
        raise LayoutError(f"{tensor}: {size!r} {alone}", tensor=tensor, got=got, want=want)
    # In reverse, ignored tensors keep their names and are written too.
    loose = next((name for name in found.ignored if shapes[name]), None) if found.is_reversed else None
    if loose is not None:
        raise LayoutError(
            f"{loose}: {found.recipe.name} has no shape for it",
            tensor=loose,
            got=f"shape {list(shapes[loose])}",
            want="a base model with it",
        )
