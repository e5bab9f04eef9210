"""What an engine's own loader does, found by running it once on stand-ins without memory.

A view of a tensor on the meta device keeps the offset and the strides into the stand-in. So each ``copy_`` of such a
view into a parameter is one nest from a Hugging Face tensor to the parameter, whatever narrow, view, transpose or chunk
came before. A result that is not a view ends the chain: the loader then takes that tensor whole at each update, as do
all tensors of the same parameters. Nothing is written to a parameter while the loader runs on stand-ins.

The recordings of all ranks show the engine's layout: which rank takes which part of each checkpoint tensor.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from msgspec import Struct, field
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from xrank import dtypes
from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.coverage import find_fault, range_text
from xrank.layout.local_part import bind
from xrank.layout.nest_table import NestTable
from xrank.layout.nests import Nest, canonical, row_major
from xrank.layout.notation import LayoutTree
from xrank.layout.output_files import OutputTensor, TensorPart
from xrank.layout.tensor_layout import axis_lengths
from xrank.layout.terms.tensors import Box, box_nests, layout_of_boxes, layout_of_shards
from xrank.words import list_text

_aten = torch.ops.aten
_SAME_VALUES = {_aten.clone.default, _aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9]\d*)(?=\.|$)")
"""An index in a tensor's name."""

Loader: TypeAlias = "Callable[[Iterable[tuple[str, torch.Tensor]]], object]"
"""An engine's function that takes a model's tensors by Hugging Face's names, such as ``model.load_weights``."""
EngineRank: TypeAlias = "tuple[Loader, Mapping[str, torch.Tensor]]"
"""The loader of an engine's rank, and the parameters that it fills, which may be on the meta device."""
Shapes: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor of the checkpoint -> safetensors name of its element type, and shape."""


class RecordedCopy(Struct, frozen=True, eq=False):
    """One copy of a part of a Hugging Face tensor into a part of a parameter."""

    output: OutputTensor
    """The part of the Hugging Face tensor, in the parameter's element type."""
    target: torch.Tensor
    parameter: str


class Fill(Struct, frozen=True, eq=False):
    """A part of a parameter that the loader sets to a constant, such as the padding of a vocabulary."""

    target: torch.Tensor
    value: float
    parameter: str
    is_first: bool
    """Whether nothing was written to the parameter before."""


class Recording(Struct, eq=False):
    """The copies of a loader."""

    copies: list[RecordedCopy] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    """Tensor that the loader must take whole -> the reason."""


def record_loader(load: Loader, parameters: Sequence[tuple[str, torch.Tensor]], shapes: Shapes) -> Recording:
    """Run a loader on stand-ins, and return its copies, proven to write each element of each parameter once."""
    recorder = _Recorder(parameters, shapes)
    failed: dict[str, str] = {}
    try:
        recorder.run(load, list(shapes))
    except UsageError:
        raise
    except Exception:
        # One tensor after another, to learn which of them the loader cannot take without values.
        recorder = _Recorder(parameters, shapes)
        for name in shapes:
            try:
                recorder.run(load, [name])
            except Exception as failure:
                failed[name] = f"{type(failure).__name__}: {failure}"[:200]
    recording = recorder.finish(failed)
    regions = recorder.list_regions(recording.whole)
    _prove_coverage(regions, recording.fills, parameters, may_have_gaps=bool(failed))
    return recording


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows stand-ins through the operations of a loader."""

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]], shapes: Shapes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = shapes
        self._parameters = sorted(
            (*_start(tensor), _start(tensor)[1] + _span_nbytes(tensor), name) for name, tensor in parameters
        )
        """Storage, first byte and end in it, and name of each parameter."""
        self._storages = {storage for storage, *_ in self._parameters}
        self._stand_ins: dict[str, torch.Tensor] = {}
        self._owner: dict[int, str] = {}
        """Storage of a stand-in -> its name."""
        self._derived: dict[int, frozenset[str]] = {}
        """Storage of a result that is not a view -> the stand-ins it is made of."""
        self._kept: list[torch.Tensor] = []
        """Keeps storages alive, whose addresses are the keys above."""
        self.copies: list[RecordedCopy] = []
        self.fills: list[Fill] = []
        self.whole: dict[str, str] = {}
        self.whole_regions: list[tuple[str, frozenset[str], torch.Tensor]] = []
        """Parameter, names and part of it that is filled from whole tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import torch._dynamo, a second of work and 73 MB."""
        return False

    def run(self, load: Loader, names: Sequence[str]) -> None:
        """Run the loader on the stand-ins of these names."""
        for name in names:
            dtype, shape = self._shapes[name]
            stand_in = torch.empty(shape, dtype=getattr(torch, dtypes.dtype(dtype).torch_name), device="meta")
            self._stand_ins[name] = stand_in
            self._owner[_key(stand_in)] = name
        with torch.no_grad(), self:
            load(iter([(name, self._stand_ins[name]) for name in names]))

    def finish(self, failed: Mapping[str, str]) -> Recording:
        """Return the copies, without those of parameters that are filled from whole tensors."""
        whole = {**self.whole, **failed}
        while True:
            mixed = {parameter for parameter, names, _ in self.whole_regions if names & whole.keys()}
            mixed |= {copy.parameter for copy in self.copies if copy.output.name in whole}
            more = {copy.output.name: copy.parameter for copy in self.copies if copy.parameter in mixed}
            more = {name: parameter for name, parameter in more.items() if name not in whole}
            if not more:
                break
            whole |= {name: f"it fills {parameter} together with a whole tensor" for name, parameter in more.items()}
        copies = [copy for copy in self.copies if copy.output.name not in whole]
        return Recording(copies, self.fills, whole)

    def list_regions(self, whole: Mapping[str, str]) -> dict[str, list[torch.Tensor]]:
        """Return by parameter the parts that the loader fills from tensors, some of which it takes whole."""
        regions: dict[str, list[torch.Tensor]] = {}
        for copy in self.copies:
            regions.setdefault(copy.parameter, []).append(copy.target)
        for parameter, names, target in self.whole_regions:
            if names & whole.keys():
                regions.setdefault(parameter, []).append(target)
        return regions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default and not args[0].numel():
            return args[0]  # such as a rank's part of a vocabulary that is padding alone
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        names = frozenset[str]().union(*(self._names_of(tensor) for tensor in tensors))
        written = [value for value in _written(func, args, kwargs) if isinstance(value, torch.Tensor)]
        parameter = next((found for value in written if (found := self._find_parameter(value)) is not None), None)
        if parameter is not None:
            return self._write(func, args, kwargs, names, parameter)
        if not names:
            return func(*args, **kwargs)
        if func in _SAME_VALUES or (func is _aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype)):
            return args[0].as_strided(args[0].shape, args[0].stride(), args[0].storage_offset())
        if written:
            self._end(names, f"{func} changes it in place")
        # Operations take one device, so tensors with values become stand-ins as well.
        args, kwargs = tree_map_only(
            torch.Tensor, lambda one: one if one.is_meta else torch.empty_like(one, device="meta"), (args, kwargs)
        )
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        result = func(*args, **kwargs)
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor) and not self._names_of(value):
                self._kept.append(value)
                self._derived[_key(value)] = names
        return result

    def _write(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: frozenset[str], parameter: str
    ) -> Any:
        """Record a write to a parameter, which is not carried out."""
        target = args[0]
        if func is _aten.copy_.default and names:
            source = args[1]
            name = self._owner.get(_key(source))
            copy = None if name is None else _make_copy(name, self._shapes[name], source, target, parameter)
            if copy is not None:
                self.copies.append(copy)
            else:
                self._end(names, "it is changed before it is copied")
                self.whole_regions.append((parameter, names, target))
        elif names:
            self._end(names, f"{func} is not a copy")
            self.whole_regions.append((parameter, names, target))
        elif func in (_aten.zero_.default, _aten.fill_.Scalar):
            value = 0.0 if func is _aten.zero_.default else args[1]
            before = {copy.parameter for copy in self.copies} | {region[0] for region in self.whole_regions}
            self.fills.append(Fill(target.detach(), value, parameter, is_first=parameter not in before))
        else:
            raise UsageError(
                f"{parameter}: the loader writes values to it that are not from a checkpoint",
                tensor=parameter,
                got=str(func),
                next_step="give the engine's tensors with layouts=, or load it with iter_model",
            )
        return target

    def _end(self, names: Iterable[str], why: str) -> None:
        for name in names:
            self.whole.setdefault(name, why)

    def _names_of(self, tensor: torch.Tensor) -> frozenset[str]:
        if tensor.device.type != "meta":
            return frozenset()
        key = _key(tensor)
        name = self._owner.get(key)
        return frozenset((name,)) if name is not None else self._derived.get(key, frozenset())

    def _find_parameter(self, tensor: torch.Tensor) -> str | None:
        start = _start(tensor)
        if start[0] not in self._storages or not tensor.numel():
            return None
        at = bisect_right(self._parameters, start, key=lambda parameter: parameter[:2]) - 1
        storage, _, end, name = self._parameters[at]
        return name if at >= 0 and storage == start[0] and start[1] < end else None


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _start(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the storage of a tensor and its first byte there, which the meta device has, too."""
    return _key(tensor), int(tensor.storage_offset()) * tensor.element_size()


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """Yield the arguments that an operation changes in place."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[number] if number < len(args) else kwargs.get(argument.name)


def _make_copy(
    name: str, kind: tuple[str, tuple[int, ...]], source: torch.Tensor, target: torch.Tensor, parameter: str
) -> RecordedCopy | None:
    """Return the copy of a view of a stand-in; None if it is broadcast, or not a cast of floating-point numbers."""
    dtype, shape = kind
    new = dtypes.by_torch_name(str(target.dtype).removeprefix("torch."))
    if source.numel() != target.numel() or (dtype != new.name and not (new.is_float and dtypes.dtype(dtype).is_float)):
        return None
    if str(source.dtype).removeprefix("torch.") != dtypes.dtype(dtype).torch_name or source.is_conj():
        return None  # a view as another element type
    source = source.expand(target.shape)
    if any(n != 1 and y <= 0 for n, y in zip(source.shape, source.stride(), strict=True)):
        return None
    nest, part = _make_nest(source, int(source.storage_offset())), None
    if tuple(target.shape) != shape or nest != _make_nest(torch.empty(shape, device="meta"), 0):
        part = TensorPart(shape, (nest,), (nest,))
    output = OutputTensor(name, new.name, tuple(target.shape), part=part)
    return RecordedCopy(output, target.detach(), parameter)


def _make_nest(view: torch.Tensor, start: int) -> Nest:
    """Return the nest from a contiguous tensor of a view's shape to the view, with loops of more than one step."""
    loops = zip(view.shape, row_major(view.shape), view.stride(), strict=True)
    return canonical(Nest(0, start, tuple((n, x, y) for n, x, y in loops if n != 1)))


def _prove_coverage(
    regions: Mapping[str, Sequence[torch.Tensor]],
    fills: Sequence[Fill],
    parameters: Sequence[tuple[str, torch.Tensor]],
    *,
    may_have_gaps: bool,
) -> None:
    """Check that each element of each parameter is written once; a constant for the whole parameter may come before.

    With `may_have_gaps`, some tensors could not be recorded, so that elements may seem unwritten.
    """
    for name, tensor in parameters:
        its = regions.get(name, [])
        own_fills = [fill for fill in fills if fill.parameter == name]
        written = [*its, *(fill.target for fill in own_fills)]
        if any(fill.is_first and fill.target.numel() == tensor.numel() for fill in own_fills):
            # Writes after the constant must not overlap each other.
            later = [fill.target for fill in own_fills if not fill.is_first]
            fault = _find_fault_by_count(tensor, [*its, *later], may_have_gaps=True)
        elif tensor.is_contiguous() and tensor.numel():
            nests = [_make_nest(one, int(one.storage_offset() - tensor.storage_offset())) for one in written]
            found = find_fault(NestTable.from_nests(nests), tensor.numel())
            fault = None if found is None else (found.kind, int(found.address))
        else:
            fault = _find_fault_by_count(tensor, written, may_have_gaps=False)
        if fault is None or (fault[0] == "gap" and may_have_gaps):
            continue
        kind, address = fault
        where = range_text(tuple(tensor.shape), address, address)
        raise UsageError(
            f"{name}, from {where} on: the loader {'never writes' if kind == 'gap' else 'writes twice'}",
            tensor=name,
            index_range=where,
            got=f"{len(its)} copies from the trainer's tensors",
            next_step="offer all tensors that the engine loads; omit engine parameters that no checkpoint contains",
        )


def _find_fault_by_count(
    tensor: torch.Tensor, regions: Sequence[torch.Tensor], *, may_have_gaps: bool
) -> tuple[str, int] | None:
    """Count the writes of each element: one byte for each of the parameter."""
    reach = _span_nbytes(tensor) // tensor.element_size()
    counts = torch.zeros(reach, dtype=torch.uint8)
    for region in regions:
        start = int(region.storage_offset() - tensor.storage_offset())
        counts.as_strided(region.shape, region.stride(), start).add_(1)
    own = counts.as_strided(tensor.shape, tensor.stride(), 0).flatten()
    wrong = own > 1 if may_have_gaps else own != 1
    if not wrong.any():
        return None
    address = int(wrong.nonzero()[0])
    return ("overlap" if own[address] > 1 else "gap"), address


def _span_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor, with the gaps between them."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(0, reach * tensor.element_size()) if tensor.numel() else 0


def record_layouts(make_rank: Callable[[int], EngineRank], shapes: Shapes, mesh: DeviceMesh) -> LayoutMap:
    """Return the layouts of an engine's ranks, from its own loader, without starting ranks or reading weights.

    The loader of each rank runs once on tensors without memory, as in `xrank.take_weights`: each copy into a parameter
    shows the part that the rank takes. A tensor that the loader changes on the way counts as whole on each rank.

    Args:
        make_rank: rank -> its loader and its parameters. The loader is called before the next rank is made.
        shapes: the checkpoint's tensors; the loader need not use all of them.
        mesh: the engine's ranks, such as ``pp=2 tp=4``. Parts that repeat along a factor of an axis, such as the heads
            of keys of more ranks than heads, get a view of the mesh.

    Raises:
        UsageError: the loader of a rank leaves elements of a parameter unwritten.
        LayoutError: the parts of a tensor are not splits by the mesh's axes.

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
        for name, boxes in _record_parts(*make_rank(rank), shapes).items():
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


def _record_parts(load: Loader, parameters: Mapping[str, torch.Tensor], shapes: Shapes) -> dict[str, tuple[Box, ...]]:
    """Return the parts of the checkpoint's tensors that a loader takes: name -> boxes of the tensor."""
    recording = record_loader(load, list(parameters.items()), shapes)
    found: dict[str, set[Box]] = {}
    for copy in recording.copies:
        name, part = copy.output.name, copy.output.part
        shape = shapes[name][1]
        box = tuple((0, size) for size in shape) if part is None else _box_of(part.nests, name, shape)
        found.setdefault(name, set()).add(box)
    for name in recording.whole:
        found[name] = {tuple((0, size) for size in shapes[name][1])}
    return {name: _merge(boxes) for name, boxes in found.items()}


class _Search(Struct):
    """Finds layouts on a mesh, and on views of it with an axis in two."""

    mesh: DeviceMesh
    views: dict[str, DeviceMesh]
    known: dict[object, TensorLayout]

    def find(self, name: str, parts: Mapping[int, tuple[Box, ...]], shape: tuple[int, ...]) -> TensorLayout:
        """Return the layout of a tensor of which each rank takes these boxes, with numbers as sizes."""
        key = (shape, tuple(sorted(parts.items())))
        if key not in self.known:
            shards = {rank: parts.get(rank, ()) for rank in self.mesh.ranks}
            layout = _find_layout(shards, self.mesh, shape) or self._find_in_view(shards, shape)
            if layout is None:
                raise LayoutError(
                    f"{name}: the engine ranks' parts are not splits by the axes of {self.mesh.grid!r}",
                    tensor=name,
                    got=list_text([f"rank {rank}: {boxes}" for rank, boxes in sorted(parts.items())], 4),
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
    ends = (np.unravel_index(address, shape) for address in (nest.y, last))
    box = tuple((int(low), int(high) + 1) for low, high in zip(*ends, strict=True))
    # Whatever the order in which the loader reads them, the elements must be those of the box.
    loops: list[tuple[int, int, int]] = []
    for n, _, y in sorted(nest.loops, key=lambda loop: loop[2]):
        loops.insert(0, (n, prod(loop[0] for loop in loops), y))
    if (canonical(Nest(0, nest.y, tuple(loops))),) != box_nests(box, shape):
        raise LayoutError(
            f"{name}: the engine loads elements that are not a box of the tensor", tensor=name, got=str(nest.loops)
        )
    return box


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
