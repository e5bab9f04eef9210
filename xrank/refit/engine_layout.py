"""The layout of an engine, recorded from its own loader: which rank takes which part of each checkpoint tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from xrank.dialects.boxes import Box, box_nests, layout_of_boxes
from xrank.dialects.shard_layout import layout_of_shards
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.binding import bind
from xrank.layout.nests import Nest, canonical
from xrank.layout.notation import LayoutTree
from xrank.layout.tensor_layout import axis_lengths
from xrank.words import list_text

if TYPE_CHECKING:
    import torch

    from xrank.refit.targets import Loader

_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9]\d*)(?=\.|$)")
"""An index in a tensor's name."""

EngineRank: TypeAlias = "tuple[Loader, Mapping[str, torch.Tensor]]"
"""The loader of an engine's rank, and the parameters that it fills, which may be on the meta device."""
Shapes: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor of the checkpoint -> safetensors name of its element type, and shape."""


def record_layouts(make_rank: Callable[[int], EngineRank], shapes: Shapes, mesh: DeviceMesh) -> LayoutMap:
    """Return the layouts of an engine's ranks, from its own loader; no rank is started, and no weights are held.

    The loader of each rank runs once on tensors without memory, as in `xrank.take_weights`: each copy into a parameter
    shows the part that the rank takes. A tensor that the loader changes on the way counts as taken whole.

    Args:
        make_rank: rank -> its loader and its parameters. The loader is called before the next rank is made.
        shapes: the checkpoint's tensors, of which the loader need not take all.
        mesh: the engine's ranks, such as ``pp=2 tp=4``. Parts that repeat along a factor of an axis, such as the heads
            of keys of more ranks than heads, get a view of the mesh.

    Raises:
        UsageError: the loader of a rank leaves elements of a parameter unwritten.
        LayoutError: the parts of a tensor are no cuts by the mesh's axes.

    Example:
        >>> import torch
        >>> from xrank.layout import DeviceMesh
        >>> def make_rank(rank):
        ...     half = torch.empty(2, 3, device="meta")
        ...     def load(weights):
        ...         for _, tensor in weights:
        ...             half.copy_(tensor.narrow(0, 2 * rank, 2))
        ...     return load, {"half": half}
        >>> mesh = DeviceMesh((2,), ("tp",))
        >>> record_layouts(make_rank, {"up.weight": ("BF16", (4, 3))}, mesh)
        <LayoutMap {'up.weight': '[4/tp, 3]'}, mesh tp=2>
    """
    parts: dict[str, dict[int, tuple[Box, ...]]] = {}
    for rank in mesh.ranks:
        for name, boxes in record_parts(*make_rank(rank), shapes).items():
            parts.setdefault(name, {})[rank] = boxes
    search = _Search(mesh, {}, {})
    found = LayoutMap(mesh)
    kinds: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in parts:
        numbers = tuple(int(number) for number in _NUMBER.findall(name))
        kinds.setdefault(_NUMBER.sub("{}", name.replace("{", "{{").replace("}", "}}")), []).append((numbers, name))
    rules: dict[str, TensorLayout] = {}
    sizes: dict[str, int] = {}
    for kind, its in kinds.items():
        layouts = {numbers: search.find(name, parts[name], shapes[name][1]) for numbers, name in its}
        rules |= dict(_join(kind, layouts, sizes))
    found.views |= search.views
    found.sizes |= sizes
    for rule, layout in rules.items():
        found[rule] = layout
    return found


def record_parts(load: Loader, parameters: Mapping[str, torch.Tensor], shapes: Shapes) -> dict[str, tuple[Box, ...]]:
    """Return the parts of the checkpoint's tensors that a loader takes: name -> boxes of the tensor.

    Raises:
        UsageError: as `record_loader`.
        LayoutError: a part is not a box of its tensor.
    """
    from xrank.refit.recording import record_loader  # it imports torch

    recording = record_loader(load, list(parameters.items()), shapes)
    found: dict[str, set[Box]] = {}
    for copy in recording.copies:
        name = copy.output.name
        part = copy.output.part
        whole = tuple((0, size) for size in shapes[name][1])
        box = whole if part is None else _box_of(part.nests, name, shapes[name][1])
        found.setdefault(name, set()).add(box)
    for name in recording.whole:
        found[name] = {tuple((0, size) for size in shapes[name][1])}
    return {name: _merge(boxes) for name, boxes in found.items()}


@dataclass(slots=True)
class _Search:
    """Finds layouts on a mesh, and on views of it with an axis in two."""

    mesh: DeviceMesh
    views: dict[str, DeviceMesh]
    known: dict[object, TensorLayout]

    def find(self, name: str, parts: Mapping[int, tuple[Box, ...]], shape: tuple[int, ...]) -> TensorLayout:
        """Return the layout of a tensor of which each rank takes these boxes, with numbers as sizes.

        Raises:
            LayoutError: no cuts by axes give these boxes.
        """
        key = (shape, tuple(sorted(parts.items())))
        if key not in self.known:
            shards = {rank: parts.get(rank, ()) for rank in self.mesh.ranks}
            layout = _find_layout(shards, self.mesh, shape) or self._find_in_view(shards, shape)
            if layout is None:
                raise LayoutError(
                    f"{name}: the parts that the engine's ranks take are no cuts by the axes of {self.mesh.grid!r}",
                    tensor=name,
                    got=list_text([f"rank {rank}: {boxes}" for rank, boxes in sorted(parts.items())], 4),
                    want="the same cuts on all ranks",
                    next_step="name all axes of the engine in the mesh, the last one fastest",
                )
            lengths = axis_lengths(self.mesh, layout.view_mesh)
            self.known[key] = layout.with_sizes(bind(layout.tree, shape, lengths, {}))
        return self.known[key]

    def _find_in_view(self, shards: Mapping[int, tuple[Box, ...]], shape: tuple[int, ...]) -> TensorLayout | None:
        for axis, length in zip(self.mesh.axis_names, self.mesh.shape, strict=True):
            for outer in range(2, length):
                if length % outer:
                    continue
                name = f"{axis}{outer}"
                grid = self.mesh.grid.replace(f"{axis}={length}", f"{name}={outer} {axis}_rest={length // outer}")
                view = self.mesh.view(grid)
                found = _find_layout(shards, view, shape)
                if found is not None:
                    self.views[name] = view
                    tree = LayoutTree(found.dims, view=name, where=found.tree.where)
                    return TensorLayout.from_tree(tree).with_mesh(self.mesh, self.views)
        return None


def _find_layout(
    shards: Mapping[int, tuple[Box, ...]], mesh: DeviceMesh, shape: tuple[int, ...]
) -> TensorLayout | None:
    """Return the layout of these boxes. A rank without one is left out, or has an empty part: engines pad."""
    found = layout_of_shards(shards, mesh, shape, 0)
    if found is not None or any(len(boxes) > 1 for boxes in shards.values()):
        return found
    return layout_of_boxes({rank: boxes[0] if boxes else None for rank, boxes in shards.items()}, mesh, shape)


def _join(
    kind: str, layouts: Mapping[tuple[int, ...], TensorLayout], sizes: dict[str, int]
) -> Iterator[tuple[str, TensorLayout]]:
    """Yield rules for tensors whose names differ in numbers alone: as few as have one number each in the other places.

    A size in braces, which is added to `sizes`, stands for 0 to it, exclusive (`xrank.layout.tensor_name`). A number in
    braces would be a quantifier of a regular expression.
    """
    width = len(next(iter(layouts)))
    for num_literal in range(width + 1):
        for literal in combinations(range(width), num_literal):
            groups: dict[tuple[int, ...], dict[tuple[int, ...], TensorLayout]] = {}
            for numbers, layout in layouts.items():
                fixed = tuple(numbers[i] for i in literal)
                rest = tuple(number for i, number in enumerate(numbers) if i not in literal)
                groups.setdefault(fixed, {})[rest] = layout
            if all(map(_is_uniform, groups.values())):
                for fixed, group in groups.items():
                    counts = [max(column) + 1 for column in zip(*group, strict=True)]
                    sizes |= {f"n{count}": count for count in counts}
                    own, free = iter(fixed), iter(counts)
                    texts = [str(next(own)) if i in literal else f"{{n{next(free)}}}" for i in range(width)]
                    yield kind.format(*texts), next(iter(group.values()))
                return


def _is_uniform(group: Mapping[tuple[int, ...], TensorLayout]) -> bool:
    """Return whether the indices are all up to their largest ones, and have one layout."""
    counts = [max(column) + 1 for column in zip(*group, strict=True)]
    return prod(counts) == len(group) and len({str(layout) for layout in group.values()}) == 1


def _box_of(nests: Sequence[Nest], name: str, shape: tuple[int, ...]) -> Box:
    """Return the box of a tensor that these nests read."""
    (nest,) = nests
    last = nest.y + sum((n - 1) * y for n, _, y in nest.loops)
    low, high = _indices(nest.y, shape), _indices(last, shape)
    box = tuple((a, b + 1) for a, b in zip(low, high, strict=True))
    # Whatever the order in which the loader reads them, the elements must be those of the box.
    loops: list[tuple[int, int, int]] = []
    for n, _, y in sorted(nest.loops, key=lambda loop: loop[2]):
        loops.insert(0, (n, prod(loop[0] for loop in loops), y))
    if (canonical(Nest(0, nest.y, tuple(loops))),) != box_nests(box, shape):
        raise LayoutError(
            f"{name}: the engine takes elements that are no box of the tensor",
            tensor=name,
            got=str(nest.loops),
            want="a range of each dim",
        )
    return box


def _indices(address: int, shape: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    for size in reversed(shape):
        address, index = divmod(address, size)
        found.insert(0, index)
    return tuple(found)


def _merge(boxes: set[Box]) -> tuple[Box, ...]:
    """Return the same elements as few boxes: those that continue each other along a dim become one."""
    merged = set(boxes)
    for dim in range(len(next(iter(merged)))):
        lines: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        for box in merged:
            lines.setdefault((box[:dim], box[dim + 1 :]), []).append(box[dim])
        merged = set()
        for (before, after), ranges in lines.items():
            low, high = min(ranges)
            for start, end in sorted(ranges):
                if start > high:
                    merged.add((*before, (low, high), *after))  # type: ignore[misc]
                    low = start
                high = max(high, end) if start <= high else end
            merged.add((*before, (low, high), *after))  # type: ignore[misc]
    return tuple(sorted(merged))
