"""Recipes as data: rules from a framework's tensors to Hugging Face's, and their match with a model's names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod, sqrt

from msgspec import Struct, field
from msgspec.structs import replace

from xrank.errors import LayoutError
from xrank.layout.local_part import check_sizes, global_size
from xrank.layout.nests import Loop, Nest, canonical
from xrank.layout.notation import (
    MAX_SIZE,
    Flat,
    LayoutTree,
    Node,
    Pad,
    Parts,
    Product,
    Size,
    Split,
    TextParser,
    render,
    render_dim,
    size_names_of,
)
from xrank.layout.tensor_name import MAX_NAMES, TensorName

GAP = "_"
"""Name of a part whose tensors are other rules': ``layers.{<_: L | next: M>}`` are M layers that count on from L."""


class Side(Struct, frozen=True):
    """One side of a recipe: a tensor, or many of one kind whose names, possibly empty, hold dims."""

    name: TensorName
    dims: tuple[Node, ...]

    def __str__(self) -> str:
        text = render(LayoutTree(self.dims))
        return f"{self.name} {text}" if str(self.name) else text

    @property
    def all_dims(self) -> tuple[Node, ...]:
        """The dims of the name, then those of the tensor: the shape of all these tensors as one."""
        return (*self.name.dims, *self.dims)


class SideLoop(Struct, frozen=True):
    """A size other than 1: its text (a name, a number or a sum), its count, and its stride in elements."""

    name: str
    count: int
    stride: int


class Branch(Struct, frozen=True):
    """A part of a side: its name ("" without parts), its first address, and its loops with the largest stride first."""

    key: str
    start: int
    loops: tuple[SideLoop, ...]


def parse_side(text: str) -> Side:
    """Parse one side of a recipe: the dims of a layout, with or without a name before them."""
    reader = TextParser(text, "a side of a recipe")
    name = TensorName(*reader.naming())
    tree = reader.layout()
    reader.end()
    side = Side(name, tree.dims)
    for dim in side.all_dims:
        _refuse_ranks(dim, side)
    if (tree.view, tree.where, tree.sums) != (None, (), ()):
        raise LayoutError(f"a recipe describes whole tensors, but {text[:200]!r} has a clause", got=render(tree))
    return side


def _refuse_ranks(node: Node, side: Side) -> None:
    match node:
        case Split() | Pad() | Flat():
            got, want = render_dim(node), "sizes, products and parts"
            step = "describe how ranks share the tensor in the layout, and its parts in the recipe"
            raise LayoutError(
                f"a recipe describes whole tensors, but {side} contains {got}", got=got, want=want, next_step=step
            )
        case Product(factors):
            for factor in factors:
                _refuse_ranks(factor, side)
        case Parts(parts):
            for part in parts:
                _refuse_ranks(part.of, side)


def global_shape(side: Side, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the sizes of all dims of a side, its name's first."""
    for dim in side.all_dims:
        for name in size_names_of(dim):
            if name not in sizes:
                raise LayoutError(
                    f"the size {name!r} of {side} is not known",
                    got=f"sizes {sorted(sizes)[:16]}",
                    want=f"the number that {name!r} stands for",
                )
    shape = tuple(global_size(dim, sizes) for dim in side.all_dims)
    if 0 in shape:
        raise LayoutError(f"{side} has no element", got=f"shape {shape}", want="sizes of 1 or more")
    if prod(shape) > MAX_SIZE:
        raise LayoutError(f"{side} has too many elements", got=f"{prod(shape):,}", want=f"at most {MAX_SIZE:,}")
    return shape


def part_names(side: Side) -> tuple[str, ...]:
    """Return the names of the innermost parts of a side, in the order of the text.

    Example:
        >>> part_names(parse_side("[g <q: r d | kv: <k: d | v: d>>, h]"))
        ('q', 'k', 'v')
    """
    return tuple(name for dim in side.all_dims for name in _part_names(dim))


def _part_names(node: Node) -> list[str]:
    match node:
        case Product(factors):
            return [name for factor in factors for name in _part_names(factor)]
        case Parts(parts) if not node.is_sum:
            real = [part for part in parts if part.name != GAP]
            if len(real) == 1 < len(parts):
                return _part_names(real[0].of)
            return [name for part in real for name in _part_names(part.of) or [part.name]]
    return []


def find_range(dim: Node, sizes: Mapping[str, int]) -> tuple[int, int | None]:
    """Return the first index of a name's dim and the one after its last; None while a size is unknown."""
    gaps = [part.of for part in dim.parts if part.name == GAP] if isinstance(dim, Parts) else []
    first = sum(global_size(gap, sizes) for gap in gaps if {*size_names_of(gap)} <= sizes.keys())
    return first, global_size(dim, sizes) if {*size_names_of(dim)} <= sizes.keys() else None


def branches_of(side: Side, sizes: Mapping[str, int]) -> list[Branch]:
    """Return the innermost parts of a side; a side without parts is one branch without a key."""
    found = _combine(side.all_dims, sizes)
    keys = [branch.key for branch in found]
    for key in keys:
        if keys.count(key) > 1:
            raise LayoutError(f"two parts of {side} are called {key!r}", got=repr(key), want="each part's name once")
    return found


def _combine(nodes: Sequence[Node], sizes: Mapping[str, int]) -> list[Branch]:
    """Return the parts of a product of nodes, major node first."""
    found = [Branch("", 0, ())]
    for node in nodes:
        size = global_size(node, sizes)
        minors = _parts_of(node, sizes)
        # Parts in two places would make one part of each pair, and pairs have no names of their own.
        if len(found) > 1 and len(minors) > 1:
            got, want = render_dim(node), "parts in one place, or parts in parts"
            problem = f"a side of a recipe has parts in two places, {got} the second"
            step = "split them with two recipes"
            raise LayoutError(problem, got=got, want=want, next_step=step)
        found = [
            Branch(
                minor.key or major.key,
                major.start * size + minor.start,
                (*(SideLoop(loop.name, loop.count, loop.stride * size) for loop in major.loops), *minor.loops),
            )
            for major in found
            for minor in minors
        ]
    return found


def _parts_of(node: Node, sizes: Mapping[str, int]) -> list[Branch]:
    match node:
        case Size(value):
            return [Branch("", 0, () if value == 1 else (SideLoop(str(value), global_size(node, sizes), 1),))]
        case Product(factors):
            return _combine(factors, sizes)
        case Parts() if node.is_sum:
            return [Branch("", 0, (SideLoop(render_dim(node), global_size(node, sizes), 1),))]
        case Parts(parts):
            found: list[Branch] = []
            start = 0
            # Beside gaps, a single part is the whole of what the side has, and needs no name.
            is_named = sum(part.name != GAP for part in parts) > 1 or len(parts) == 1
            for part in parts:
                if part.name != GAP:
                    inner = _parts_of(part.of, sizes)
                    name = part.name if is_named else ""
                    found += [Branch(b.key or name, b.start + start, b.loops) for b in inner]
                start += global_size(part.of, sizes)
            return found
    raise AssertionError(node)  # parse_side refuses other nodes


class Pairing(Struct, frozen=True):
    """One nest of a recipe. All tensors of a side share one address space, in which the name's dims come first.

    `key` is the part of the source that becomes the target, "" for a source without parts; `x` and `y` are the
    addresses of the first element in source and target, and `loops` (count, x stride, y stride), one for each name.
    """

    key: str
    source: Side
    target: Side
    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    x: int
    y: int
    loops: tuple[Loop, ...]

    @property
    def nest(self) -> Nest:
        """The whole pairing as one canonical nest."""
        return canonical(Nest(self.x, self.y, self.loops))


def pair(
    source: str, targets: Mapping[str, str], sizes: Mapping[str, int], *, makes_copies: bool = False
) -> dict[str, Pairing]:
    """Pair each part of a source, such as ``"[g <q: r d | k: d | v: d>, h]"``, with its target, as one nest each.

    A target is the text of the tensor that a part becomes, or that has a part of the same name. A source without parts
    has one target, under any key. With `makes_copies`, sizes in the target's names that the source lacks count copies.

    Example:
        >>> found = pair("[<k: d | v: d>, h]", {"k": "[d, h]", "v": "[d, h]"}, {"d": 2, "h": 3})
        >>> found["v"].nest  # the second half of the source
        Nest(x=6, y=0, loops=((6, 1, 1),))
    """
    whole = parse_side(source)
    known = check_sizes(sizes)
    source_shape = global_shape(whole, known)
    branches = branches_of(whole, known)
    if [branch.key for branch in branches] == [""]:
        if len(targets) != 1:
            problem = f"the source {whole} has no parts, and {len(targets)} targets"
            raise LayoutError(problem, got=str([*targets]), want="one target")
        branches = [replace(branches[0], key=next(iter(targets)))]
    keys = [branch.key for branch in branches]
    for key in (*keys, *targets):
        if key not in targets or key not in keys:
            problem = f"the recipe of {whole} has the part {key!r} on one side only"
            raise LayoutError(problem, got=f"parts {keys}, targets {list(targets)}", want="each part on both sides")
    found: dict[str, Pairing] = {}
    for branch in branches:
        target = parse_side(targets[branch.key])
        target_shape = global_shape(target, known)
        ends = {end.key: end for end in branches_of(target, known)}
        # The whole of the target, or its part of the same name.
        end = ends.get("", ends.get(branch.key))
        if end is None:
            raise LayoutError(
                f"the target {target} has no part {branch.key!r}",
                got=f"parts {list(ends)}",
                want=f"a part {branch.key!r}, or none at all",
            )
        if whole.all_dims == target.all_dims:  # equal sides pair by place: names are not needed
            loops = tuple((a.count, a.stride, b.stride) for a, b in zip(branch.loops, end.loops, strict=True))
        else:
            own = prod(target_shape[len(target.name.dims) :])
            shared = {loop.name for loop in branch.loops} if makes_copies else {loop.name for loop in end.loops}
            copies = [loop for loop in end.loops if loop.stride >= own and loop.name not in shared]
            named = tuple(loop for loop in end.loops if loop not in copies)
            loops = _pair_by_name(branch.loops, named, (branch.key or whole, target))
            loops = (*((copy.count, 0, copy.stride) for copy in copies), *loops)
        found[branch.key] = Pairing(
            branch.key, whole, target, source_shape, target_shape, branch.start, end.start, loops
        )
    return found


def reverse_pairing(pairing: Pairing) -> Pairing:
    """Return the pairing from the target back to the part of the source."""
    return Pairing(
        pairing.key,
        pairing.target,
        pairing.source,
        pairing.target_shape,
        pairing.source_shape,
        pairing.y,
        pairing.x,
        tuple((count, ys, xs) for count, xs, ys in pairing.loops),
    )


def single_tensors(pairing: Pairing) -> Iterator[tuple[str, str, Nest]]:
    """Yield (name of a source tensor, name of a target tensor, nest between the two), in loop order."""
    from_dims, to_dims = len(pairing.source.name.dims), len(pairing.target.name.dims)
    # Addresses within one tensor lie below these, so a loop between tensors has a stride of one of them at least.
    from_step, to_step = prod(pairing.source_shape[from_dims:]), prod(pairing.target_shape[to_dims:])
    between = [loop for loop in pairing.loops if loop[1] >= from_step or loop[2] >= to_step]
    within = tuple(loop for loop in pairing.loops if loop not in between)
    if prod(count for count, _, _ in between) > MAX_NAMES:
        problem = f"the recipe of {pairing.source} stands for too many tensors"
        got = f"{prod(count for count, _, _ in between):,}"
        raise LayoutError(problem, got=got, want=f"at most {MAX_NAMES:,}")
    for at in product(*(range(count) for count, _, _ in between)):
        x = pairing.x + sum(i * stride for i, (_, stride, _) in zip(at, between, strict=True))
        y = pairing.y + sum(i * stride for i, (_, _, stride) in zip(at, between, strict=True))
        yield (
            pairing.source.name.with_indices(*_digits(x // from_step, pairing.source_shape[:from_dims])),
            pairing.target.name.with_indices(*_digits(y // to_step, pairing.target_shape[:to_dims])),
            canonical(Nest(x % from_step, y % to_step, within)),
        )


def _digits(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    digits = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        digits.append(digit)
    return tuple(reversed(digits))


def _pair_by_name(
    source: tuple[SideLoop, ...], target: tuple[SideLoop, ...], ends: tuple[object, Side]
) -> tuple[Loop, ...]:
    """Pair the loops of both sides by their sizes' texts, equal texts in order; errors name `ends`."""
    counts = Counter(loop.name for loop in source), Counter(loop.name for loop in target)
    for name in {**counts[0], **counts[1]}:
        if counts[0][name] != counts[1][name]:
            times = ("not", "once", "twice")
            ours, theirs = (times[n] if n < 3 else f"{n} times" for n in (counts[0][name], counts[1][name]))
            problem = f"{ends[0]} -> {ends[1]}: {name!r} is {ours} in the source and {theirs} in the target"
            raise LayoutError(problem, got=repr(name), want="each size as often in the source as in the target")
    strides: dict[str, list[int]] = {}
    for loop in target:
        strides.setdefault(loop.name, []).append(loop.stride)
    return tuple((loop.count, loop.stride, strides[loop.name].pop(0)) for loop in source)


_SIZE = r"(?:[A-Za-z_]\w*|[1-9][0-9]{0,8})"
_ROOT = rf"sqrt\(({_SIZE}(?: {_SIZE}){{0,7}})\)"


def size_texts(times: str) -> tuple[str, ...]:
    """Return the sizes in ``sqrt(SIZE SIZE ...)``; none if the text is not of this form."""
    found = re.fullmatch(_ROOT, times)
    return () if found is None else tuple(found[1].split())


class Rule(Struct, frozen=True):
    """One source tensor, or many of one kind, and the tensors that they become.

    Args:
        sources: the source as the file writes it, then its stacked forms.
        targets: part of the source -> the tensor that it becomes; one entry for a source without parts.
        unless: a flag; if it is true, the source may lack the tensor.
        when: a flag; a model has the tensor exactly if it is true. A model has all tensors of one flag or none.
        group: the kind of block, such as dense or sparse, that the tensor belongs to; each layer has one kind. Where
            layers have several choices, the text before a dot names the choice: ``mixer.attention``, ``mlp.dense``.
        optional: whether a model may lack the tensor.
        add: a number that is added to the source's values, and backwards taken from the target's.
        times: the root of a product of sizes, ``sqrt(n d)``, by which values are multiplied, and backwards divided.
        beside: groups; backwards, where several sources become the target, the rule is for layers with their blocks.
    """

    sources: tuple[Side, ...]
    targets: Mapping[str, Side]
    unless: str | None = None
    when: str | None = None
    group: str | None = None
    optional: bool = False
    beside: tuple[str, ...] = ()
    add: int = 0
    times: str | None = None
    within: str | None = None
    """A flag that only tensors raise: the rule's tensors exist in models with the stack of layers of this name."""
    is_copy: bool = False
    """Whether the targets are copies of what another rule makes of the source."""
    line: str | None = None
    """The source in the recipe's file, of a rule for one layer."""

    def factor(self, sizes: Mapping[str, int]) -> float:
        """Return the number that `times` stands for; 1 without it."""
        texts = size_texts(self.times) if self.times is not None else ()
        return sqrt(prod(int(text) if text.isdecimal() else sizes[text] for text in texts))

    @property
    def choice(self) -> str:
        """The choice between kinds of blocks that the group belongs to; empty if there is only one, or no group."""
        return (self.group or "").rpartition(".")[0]

    @property
    def outcome(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The rule as texts, equal for rules of two recipes with the same effect."""
        targets = tuple((part, str(side)) for part, side in sorted(self.targets.items()))
        if self.add:
            targets += (("add", str(self.add)),)
        return str(self.sources[0]), targets if self.times is None else (*targets, ("times", self.times))


class Recipe(Struct, frozen=True, eq=False):
    """The content of a recipe file."""

    name: str
    framework: str
    rules: tuple[Rule, ...]
    model_types: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    keep_fp32: tuple[str, ...] = ()
    config: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Size, flag, group or fact -> terms over the keys of config.json; the first known term counts."""
    args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    """Groups that some layers of every model have."""
    must: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Key of the trainer's arguments -> the values it may have, if it is present."""
    must_config: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """The same of the keys of config.json."""
    dropped: tuple[str, ...] = ()
    """Patterns of names of trained tensors that the target model lacks a place for."""
    by_layer: tuple[str, ...] = ()
    """Sizes and flags that each layer has of its own."""
    depth: int = 0
    """Number of recipes that it extends, one after the other."""


Place = tuple[int, int]


class Match(Struct, frozen=True):
    """The result of matching one recipe with the names of a model."""

    recipe: Recipe
    is_reversed: bool
    """Whether the recipe is read from its targets to its sources."""
    used: Mapping[Place, tuple[str, ...]]
    """(number of the rule, index in its `source_sides`) -> the names that match."""
    unknown: tuple[str, ...]
    """Names that match no rule and are not ignored."""
    ignored: tuple[str, ...]
    """Names that the recipe leaves out, those of trained tensors among them."""
    missing: tuple[str, ...]
    """Hugging Face's tensors in the recipe that are required, and that no name becomes (or is)."""

    def side_at(self, place: Place) -> Side:
        """Return the side of a rule that the names at a place match."""
        return source_sides(self.recipe.rules[place[0]], self.is_reversed)[place[1]]

    def find_sides(self) -> Iterator[tuple[Side, str]]:
        """Yield each name that matches, with the side that it matches."""
        for place, names in self.used.items():
            side = self.side_at(place)
            yield from ((side, name) for name in names)

    def find_places(self) -> dict[str, list[Place]]:
        """Return name -> the places that match it, copies aside."""
        return _find_places({at: names for at, names in self.used.items() if not self.recipe.rules[at[0]].is_copy})

    @property
    def fits(self) -> bool:
        """Whether all names are known and all required tensors are present."""
        return bool(self.used) and not self.unknown and not self.missing

    @property
    def dropped(self) -> tuple[str, ...]:
        """Those ignored names that belong to trained tensors."""
        patterns = [re.compile(pattern) for pattern in self.recipe.dropped]
        return tuple(name for name in self.ignored if any(pattern.fullmatch(name) for pattern in patterns))

    @property
    def num_known(self) -> int:
        """Number of names that match a rule."""
        return sum(map(len, self.used.values()))

    @property
    def num_telling(self) -> int:
        """Number of names that match a rule and become others; a name that stays is Hugging Face's already."""
        return sum(len(names) for (number, _), names in self.used.items() if not _keeps_name(self.recipe.rules[number]))

    @property
    def knows_layers(self) -> bool:
        """Whether a framework's own name of a layer's tensor matches.

        Names such as ``norm.weight`` occur in many frameworks, and trainers keep Hugging Face's modules of vision under
        other prefixes.
        """
        rules = (self.recipe.rules[number] for number, _ in self.used)
        return any(rule.sources[0].name.dims and not _keeps_name(rule) for rule in rules)


def _keeps_name(rule: Rule) -> bool:
    """Return whether a name stays, or from the number of the layer on: a module of Hugging Face's own."""
    source = rule.sources[0]
    if source.name.dims:
        return _tail(source) in map(_tail, rule.targets.values())
    return any(source.name == target.name for target in rule.targets.values())


def _tail(side: Side) -> str:
    """Return a side's text from the number of the layer on."""
    return str(side).partition("{")[2]


def source_sides(rule: Rule, is_reversed: bool) -> tuple[Side, ...]:
    """Return the sides of a rule that the names of a model are matched with."""
    return tuple(rule.targets.values()) if is_reversed else rule.sources


def target_sides(rule: Rule, is_reversed: bool) -> tuple[Side, ...]:
    """Return the sides of a rule that matched names become."""
    return rule.sources[:1] if is_reversed else tuple(rule.targets.values())


def is_required(rule: Rule) -> bool:
    """Return whether every model with the rule's stack of layers has its tensors, whatever its configuration."""
    return not rule.optional and rule.unless is None and rule.when is None


@lru_cache(maxsize=256)
def active_rules(recipe: Recipe, is_reversed: bool) -> tuple[int, ...]:
    """Return the rules of a direction; if several sources become one target, only the first rule is reversible."""
    if not is_reversed:
        return tuple(range(len(recipe.rules)))
    found: list[int] = []
    taken: set[tuple[str, str]] = set()  # name, and part of it; "" for all of it
    for number, rule in enumerate(recipe.rules):
        made = [(str(side.name), part if part in part_names(side) else "", side) for part, side in rule.targets.items()]
        if rule.beside or any(taken.isdisjoint({(name, part), (name, "")}) for name, part, _ in made):
            found.append(number)
        taken.update((name, part) for name, part, _ in made)
        taken.update(
            (name, "") for name, _, side in made if taken.issuperset((name, part) for part in part_names(side))
        )
    return tuple(found)


def match(recipe: Recipe, names: Iterable[str], *, is_reversed: bool = False) -> Match:
    """Match a recipe with these names: the training framework's, or, reversed, Hugging Face's."""
    kinds = _index(recipe, is_reversed)
    ignored = [re.compile(pattern) for pattern in (*recipe.ignored, *recipe.dropped)]
    used: dict[Place, list[str]] = {}
    unknown: list[str] = []
    left_out: list[str] = []
    for name in names:
        places = [at for at, expression in kinds.get(_generalize(name), ()) if re.fullmatch(expression, name)]
        for place in places:
            used.setdefault(place, []).append(name)
        if not places:
            # Not by `any`: most recipes know none of ten thousand names, and a generator for each takes longer.
            fitting = [pattern for pattern in ignored if pattern.fullmatch(name)]
            (left_out if fitting else unknown).append(name)
    if is_reversed and any(rule.beside for rule in recipe.rules):
        before = {name for names in used.values() for name in names}
        used = _keep_beside(recipe, used)
        unknown += sorted(before.difference(*used.values()))
    # A name of two stacks of layers is not evidence of either. Each stack has names of its own.
    sure = {places[0] for places in _find_places(used).values() if len(places) == 1}
    flags = raised_flags(recipe, sure)
    kept = {at: tuple(used[at]) for at in sorted(used) if recipe.rules[at[0]].within in (None, *flags)}
    missing = tuple(_missing(recipe, kept, is_reversed, flags))
    return Match(recipe, is_reversed, kept, tuple(unknown), tuple(left_out), missing)


def settle(found: Match, sizes: Mapping[str, int]) -> Match:
    """Return the match with each name only at the places that have its indices.

    Layers of two stacks may count on from each other in the names of one side: ``layers.{L}`` and then
    ``layers.{<_: L | next: M>}``. A name alone fits both; the number of layers decides.
    """
    wrong: set[tuple[Place, str]] = set()
    for name, each in found.find_places().items():
        right = [at for at in each if len(each) == 1 or _has_indices(found.side_at(at).name, name, sizes)]
        wrong.update((at, name) for at in each if right and at not in right)
    if not wrong:
        return found
    used = {at: tuple(n for n in names if (at, n) not in wrong) for at, names in found.used.items()}
    used = {at: names for at, names in used.items() if names}
    flags = raised_flags(found.recipe, used)
    return replace(found, used=used, missing=tuple(_missing(found.recipe, used, found.is_reversed, flags)))


def _find_places(used: Mapping[Place, Iterable[str]]) -> dict[str, list[Place]]:
    places: dict[str, list[Place]] = {}
    for place, names in used.items():
        for name in names:
            places.setdefault(name, []).append(place)
    return places


def _has_indices(name: TensorName, text: str, sizes: Mapping[str, int]) -> bool:
    """Return whether the indices in a text lie in the dims of the name, as far as their sizes are known."""
    for dim, index in zip(name.dims, name.indices(text) or (), strict=True):
        first, last = find_range(dim, sizes)
        if index < first or (last is not None and index >= last):
            return False
    return True


def raised_flags(recipe: Recipe, used: Iterable[Place]) -> set[str]:
    """Return the flags that these places show to be true."""
    rules = [recipe.rules[number] for number, _ in used]
    return {flag for rule in rules if not rule.is_copy for flag in (rule.when, rule.within) if flag is not None}


def _keep_beside(recipe: Recipe, used: Mapping[Place, list[str]]) -> dict[Place, list[str]]:
    """Return the names of each place without those in layers that lack the blocks which a rule is beside."""

    def layers_of(place: Place) -> list[tuple[int, ...]]:
        side = source_sides(recipe.rules[place[0]], True)[place[1]]
        return [(side.name.indices(name) or ())[:1] for name in used[place]]

    groups: dict[str, set[tuple[int, ...]]] = {}
    for place in used:
        group = recipe.rules[place[0]].group
        if group is not None:
            groups.setdefault(group, set()).update(layers_of(place))
    found: dict[Place, list[str]] = {}
    for place, names in used.items():
        beside = recipe.rules[place[0]].beside
        own = set[tuple[int, ...]]().union(*(groups.get(group, set()) for group in beside))
        kept = [name for name, layer in zip(names, layers_of(place), strict=True) if not beside or layer in own]
        if kept:
            found[place] = kept
    return found


@lru_cache(maxsize=256)
def _index(recipe: Recipe, is_reversed: bool) -> dict[str, list[tuple[Place, str]]]:
    """Return kind of name -> (place, regular expression) of the rules that may match.

    A model has thousands of names of a few dozen kinds, so few expressions are ever compiled.
    """
    found: dict[str, list[tuple[Place, str]]] = {}
    for number in active_rules(recipe, is_reversed):
        for form, side in enumerate(source_sides(recipe.rules[number], is_reversed)):
            kind = _generalize(side.name.with_indices(*(0 for _ in side.name.dims)))
            found.setdefault(kind, []).append(((number, form), side.name.expression))
    return found


@lru_cache(maxsize=1 << 17)
def _generalize(name: str) -> str:
    return re.sub(r"[0-9]+", "0", name)


def _missing(recipe: Recipe, used: Iterable[Place], is_reversed: bool, raised: set[str]) -> list[str]:
    """Return the targets that a model must have and that no used rule makes (or has)."""
    texts = _target_texts(recipe)
    made: set[str] = set()
    for number, form in used:
        targets = texts[number]
        made.update(name for name, _ in (targets[form : form + 1] if is_reversed else targets))
    # A dense model lacks the sparse blocks rightly, but one without any block lacks all kinds: its layers are lost.
    present = {recipe.rules[number].group for number, _ in used} - {None}
    chosen = {recipe.rules[number].choice for number, _ in used if recipe.rules[number].group is not None}
    wanted: list[tuple[str, str]] = []
    for number in active_rules(recipe, is_reversed):
        rule = recipe.rules[number]
        # One tensor of a flag shows that the flag is true, so the others of the flag are due, too.
        is_due = (is_required(rule) or rule.when in raised) and rule.within in (None, *raised)
        is_due = is_due and not rule.is_copy
        is_needed = rule.group in (None, *present, *recipe.needed) or rule.choice not in chosen
        if is_due and is_needed:
            wanted += texts[number]
    return [text for name, text in dict.fromkeys(wanted) if name not in made]


@lru_cache(maxsize=256)
def _target_texts(recipe: Recipe) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Return by rule the name of each target, and the target, as texts."""
    return tuple(tuple((str(side.name), str(side)) for side in rule.targets.values()) for rule in recipe.rules)
