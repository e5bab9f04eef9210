"""Sides of a recipe: the tensors that a text names, their parts, and how the elements of two sides are paired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

from msgspec import Struct
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
        raise LayoutError(f"a recipe describes whole tensors, and {text[:200]!r} has a clause", got=render(tree))
    return side


def _refuse_ranks(node: Node, side: Side) -> None:
    match node:
        case Split() | Pad() | Flat():
            got, want = render_dim(node), "sizes, products and parts"
            step = "describe in the layout how ranks share the tensor, and in the recipe its parts"
            raise LayoutError(
                f"a recipe describes whole tensors, and {side} holds {got}", got=got, want=want, next_step=step
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
                got, want = f"sizes {sorted(sizes)[:16]}", f"the number that {name!r} stands for"
                raise LayoutError(f"the size {name!r} of {side} is not known", got=got, want=want)
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
        end = _end(target, branch.key, known)
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


def _end(target: Side, key: str, sizes: Mapping[str, int]) -> Branch:
    """Return the part of a target that a part of the source becomes: the whole, or the part of the same name."""
    ends = {end.key: end for end in branches_of(target, sizes)}
    end = ends.get("", ends.get(key))
    if end is None:
        problem, want = f"the target {target} has no part {key!r}", f"a part {key!r}, or none at all"
        raise LayoutError(problem, got=f"parts {list(ends)}", want=want)
    return end


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
            ours, theirs = _times(counts[0][name]), _times(counts[1][name])
            problem = f"{ends[0]} -> {ends[1]}: {name!r} is {ours} in the source and {theirs} in the target"
            raise LayoutError(problem, got=repr(name), want="each size as often in the source as in the target")
    strides: dict[str, list[int]] = {}
    for loop in target:
        strides.setdefault(loop.name, []).append(loop.stride)
    return tuple((loop.count, loop.stride, strides[loop.name].pop(0)) for loop in source)


def _times(count: int) -> str:
    return ("not", "once", "twice")[count] if count < 3 else f"{count} times"
