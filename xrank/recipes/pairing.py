"""Pair the elements of one global tensor with those of others; both sides are texts in the notation.

    linear_qkv "[g <q: r d | k: d | v: d>, h]"  ->  q "[g r d, h]", k "[g d, h]", v "[g d, h]"

Each part of the source becomes one nest to the target of the same name. Loops are paired by the names of their sizes,
so a recipe can also express a permutation, a transpose or a swizzle: `"[n half 2, h]" -> "[n 2 half, h]"`. A name that
a side has twice is paired in the order of the text, and a sum is one size: `"[a (s + t), h]"`. Braces move a size into
the names of tensors: `"[L, e, <gate: f | up: f>, h]" -> gate "layers.{L}.experts.{e}.gate_proj.weight [f, h]"`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from xrank.errors import LayoutError
from xrank.layout.binding import check_sizes
from xrank.layout.nests import Loop, Nest, canonical
from xrank.layout.tensor_name import MAX_NAMES
from xrank.recipes.side import Branch, Side, SideLoop, branches_of, global_shape, parse_side


@dataclass(frozen=True, slots=True)
class Pairing:
    """One nest of a recipe. All tensors of a side share one address space, in which the name's dims come first.

    Args:
        key: the part of the source that becomes the target; "" for a source without parts.
        source: the side that the elements come from.
        target: the side that they go to.
        source_shape: the sizes of all dims of the source.
        target_shape: the sizes of all dims of the target.
        x: address of the first element in the source.
        y: address of the first element in the target.
        loops: (count, x stride, y stride), one for each name.
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
    """Pair each part of a source with its target, as one nest each.

    Args:
        source: the source's text, such as ``"[g <q: r d | k: d | v: d>, h]"``.
        targets: part of the source -> text of the tensor that it becomes, or that has a part of the same name. A source
            without parts has one target, under any key.
        sizes: all sizes of both sides, by name.
        makes_copies: whether sizes in the target's names that the source lacks count copies of it.

    Raises:
        LayoutError: a text is not a side of a recipe; a part has no target, or a target no part; one side has a size
            that the other lacks, or has less often; a size is unknown.

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
            raise LayoutError(
                f"the source {whole} has no parts, and {len(targets)} targets", got=str([*targets]), want="one target"
            )
        branches = [replace(branches[0], key=next(iter(targets)))]
    keys = [branch.key for branch in branches]
    for key in (*keys, *targets):
        if key not in targets or key not in keys:
            raise LayoutError(
                f"the recipe of {whole} has the part {key!r} on one side only",
                got=f"parts {keys}, targets {list(targets)}",
                want="a target for each part, and a part for each target",
            )
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
        raise LayoutError(
            f"the target {target} has no part {key!r}",
            got=f"parts {list(ends)}",
            want=f"a part {key!r}, or none at all",
        )
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
    """Yield (name of a source tensor, name of a target tensor, nest between the two), in loop order.

    Raises:
        LayoutError: there are more than `MAX_NAMES` pairs of tensors.
    """
    from_dims, to_dims = len(pairing.source.name.dims), len(pairing.target.name.dims)
    # Addresses within one tensor lie below these, so a loop between tensors has a stride of one of them at least.
    from_step, to_step = prod(pairing.source_shape[from_dims:]), prod(pairing.target_shape[to_dims:])
    between = [loop for loop in pairing.loops if loop[1] >= from_step or loop[2] >= to_step]
    within = tuple(loop for loop in pairing.loops if loop not in between)
    if prod(count for count, _, _ in between) > MAX_NAMES:
        raise LayoutError(
            f"the recipe of {pairing.source} stands for too many tensors",
            got=f"{prod(count for count, _, _ in between):,}",
            want=f"at most {MAX_NAMES:,}",
        )
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
            raise LayoutError(
                f"{ends[0]} -> {ends[1]}: {name!r} is {_times(counts[0][name])} in the source and "
                f"{_times(counts[1][name])} in the target",
                got=repr(name),
                want="each size as often in the source as in the target",
            )
    strides: dict[str, list[int]] = {}
    for loop in target:
        strides.setdefault(loop.name, []).append(loop.stride)
    return tuple((loop.count, loop.stride, strides[loop.name].pop(0)) for loop in source)


def _times(count: int) -> str:
    return ("not", "once", "twice")[count] if count < 3 else f"{count} times"
