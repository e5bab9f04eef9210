"""Program builders: the programs of all devices of a mesh at once, written as steps on sharded values.

A `Value` is one tensor, which the devices hold by a sharding. Each step adds one instruction to every device's
program, of the local sizes, and says the value that comes of it. The module ``redistribution`` brings a value from one
sharding to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal, TypeAlias

from xrank.errors import LayoutError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import SplitKind
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.programs.program import Communicate, Compute, Instruction, Program, Receive, Return
from xrank.virtual.sharding import DimSharding, TensorSharding, bounds_of, canonical

__all__ = ["Form", "ProgramBuilder", "Ranges", "Value"]

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Per dim the range that a device holds."""

Form: TypeAlias = Literal["nn", "nt", "tn"]
"""Of a product: nn is (..., k) by (k, n); nt is (..., n) by (k, n) transposed; tn is (..., k) transposed by (..., n),
where all dims but the last are contracted."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that all devices of a builder's mesh hold by one sharding, in a register of one name."""

    register: str
    shape: tuple[int, ...]
    """Global."""
    dtype: str
    sharding: TensorSharding

    @property
    def sums(self) -> tuple[str, ...]:
        """The axes along which devices hold addends."""
        return self.sharding.sums


class ProgramBuilder:
    """Writes the programs of the devices of a mesh.

    Args:
        mesh: the devices; a part of a mesh (`DeviceMesh.submesh`) keeps the devices' numbers, so that the stages of a
            pipeline can each have a builder.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.instructions: dict[int, list[Instruction]] = {device: [] for device in mesh.ranks}
        """By device, in the order of the mesh; what no step here says may be added by hand."""
        self.redistributed: dict[tuple[Value, TensorSharding], Value] = {}
        """What `xrank.virtual.programs.redistribution` has made: a value that is wanted twice is gathered once."""
        self._coordinates = [mesh.coordinate(device) for device in mesh.ranks]
        self._groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        self._bounds: dict[tuple[DimSharding, int], list[tuple[int, int]]] = {}
        self._count = 0

    def programs(self) -> tuple[Program, ...]:
        """Return the programs, in the order of the mesh."""
        return tuple(Program(device, tuple(instructions)) for device, instructions in self.instructions.items())

    def register(self, name: str) -> str:
        """Return a name for a register that no other has."""
        self._count += 1
        return f"{name}.{self._count}"

    def canonical(self, shape: Sequence[int], sharding: TensorSharding) -> TensorSharding:
        """Return the one sharding that cuts a tensor of this shape so; equal ones need no step between them."""
        sharding.check(self.mesh, shape)
        dims = tuple(canonical(dim, size, self.mesh) for dim, size in zip(sharding.dims, shape, strict=True))
        lengths = zip(self.mesh.axis_names, self.mesh.shape, strict=True)
        return TensorSharding(dims, tuple(axis for axis, length in lengths if length > 1 and axis in sharding.sums))

    def ranges(self, shape: Sequence[int], dims: Sequence[DimSharding]) -> list[Ranges]:
        """Return the ranges that each device holds, in the order of the mesh."""
        if not shape:
            return [()] * len(self._coordinates)
        return list(zip(*map(self._bounds_of, dims, shape), strict=True))

    def specs(self, value: Value) -> list[ArraySpec]:
        """Return the spec of what each device holds, in the order of the mesh."""
        return [local_spec(ranges, value.dtype) for ranges in self.ranges(value.shape, value.sharding.dims)]

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Return each device's group along these axes, its members in the order of cutting by them."""
        key = tuple(axes)
        if key not in self._groups:
            self.mesh.check_axes(key)
            place = dict(zip(self.mesh.ranks, self._coordinates, strict=True))
            group_of: dict[int, tuple[int, ...]] = {}
            for members in self.mesh.groups(*key):
                group = tuple(sorted(members, key=lambda device: [place[device][axis] for axis in key]))
                group_of.update(dict.fromkeys(group, group))
            self._groups[key] = [group_of[device] for device in self.mesh.ranks]
        return self._groups[key]

    def receive(self, packet: str, shape: Sequence[int], dtype: str, sharding: TensorSharding) -> Value:
        """Take a tensor from the host: every device its shard, as a packet of this name."""
        value = Value(packet, tuple(shape), dtype, self.canonical(shape, sharding))
        for own, spec in zip(self.instructions.values(), self.specs(value), strict=True):
            own.append(Receive(packet, spec))
        return value

    def give(self, value: Value, name: str) -> None:
        """Send every device's shard to the host."""
        for own, spec in zip(self.instructions.values(), self.specs(value), strict=True):
            own.append(Return(value.register, name, spec))

    def compute(
        self,
        kernel: str,
        inputs: Sequence[Value],
        shape: Sequence[int],
        sharding: TensorSharding,
        *,
        dtype: str | None = None,
        options: Callable[[int], dict[str, Any]] | None = None,
        flops: Callable[[int], int] | None = None,
    ) -> Value:
        """Call a kernel of one output on the devices' shards of the inputs.

        Args:
            kernel: its name.
            inputs: what it gets.
            shape: the output's global shape.
            sharding: how the devices hold the output; that this follows from the kernel is the caller's to know.
            dtype: the output's element type; None: the first input's.
            options: the keyword arguments on the device at a place of the mesh's order.
            flops: the flops there.
        """
        sharding = self.canonical(shape, sharding)
        value = Value(self.register(kernel), tuple(shape), dtype or inputs[0].dtype, sharding)
        names = tuple(each.register for each in inputs)
        for place, (own, spec) in enumerate(zip(self.instructions.values(), self.specs(value), strict=True)):
            told = () if options is None else tuple(options(place).items())
            cost = 0 if flops is None else flops(place)
            own.append(Compute(kernel, names, (value.register,), (spec,), cost, told))
        return value

    def matmul(self, left: Value, right: Value, form: Form = "nn") -> Value:
        """Multiply the shards, which fit each other; axes that cut what is contracted are then summed over.

        Raises:
            LayoutError: the sizes or element types do not fit, or an axis cuts rows and columns both.
        """
        rows, left_inner = (slice(0, -1), slice(-1, None)) if form != "tn" else (slice(-1, None), slice(0, -1))
        right_inner, columns = {"nn": (slice(0, 1), 1), "nt": (slice(1, 2), 0), "tn": (slice(0, -1), -1)}[form]
        if left.dtype != right.dtype or left.shape[left_inner] != right.shape[right_inner]:
            raise LayoutError(
                f"a product of {_told(left)} and {_told(right)} does not fit",
                got=f"{left.shape[left_inner]} and {right.shape[right_inner]} in {left.dtype} and {right.dtype}",
                want="equal sizes of what is contracted, in one element type",
            )
        inner = left.sharding.dims[left_inner]
        if inner != right.sharding.dims[right_inner]:
            raise LayoutError(
                f"a product of {_told(left)} and {_told(right)} is not local: they cut what is contracted differently",
                got=f"{left.sharding} and {right.sharding}",
                want="equal cuts",
            )
        summed = (*(axis for dim in inner for axis in dim.axes), *left.sums, *right.sums)
        dims = (*left.sharding.dims[rows], right.sharding.dims[columns])
        shape = (*left.shape[rows], right.shape[columns])
        left_specs, right_specs = self.specs(left), self.specs(right)

        def flops(place: int) -> int:
            return 2 * prod(left_specs[place].shape) * right_specs[place].shape[columns]

        return self.compute(
            "matmul", (left, right), shape, TensorSharding(dims, summed), options=lambda _: {"form": form}, flops=flops
        )

    def slice(self, value: Value, dim: int, axis: str, kind: SplitKind) -> Value:
        """Keep one's own range of a dim, which an axis cuts further; costs nothing.

        Args:
            value: the value.
            dim: the dim to cut.
            axis: the axis, along which the devices hold the same.
            kind: how sizes are cut that do not divide.
        """
        target = _with_dim(value.sharding, dim, DimSharding((*value.sharding[dim].axes, axis), kind))
        before = self.ranges(value.shape, value.sharding.dims)
        after = self.ranges(value.shape, target.dims)

        def options(place: int) -> dict[str, Any]:
            low = before[place][dim][0]
            return {"dim": dim, "start": after[place][dim][0] - low, "stop": after[place][dim][1] - low}

        return self.compute("slice", (value,), value.shape, target, options=options)

    def all_reduce(self, value: Value, axes: Sequence[str], reduction: str = "sum") -> Value:
        """Add up the addends along these axes."""
        left = tuple(axis for axis in value.sums if axis not in axes)
        target = TensorSharding(value.sharding.dims, left)
        return self.communicate("all_reduce", value, target, axes, reduction=reduction)

    def reduce_scatter(self, value: Value, dim: int, axis: str, kind: SplitKind) -> Value:
        """Add up the addends along an axis, and keep one's own range of a dim, which the axis cuts further."""
        left = TensorSharding(value.sharding.dims, tuple(each for each in value.sums if each != axis))
        target = _with_dim(left, dim, DimSharding((*left[dim].axes, axis), kind))
        return self.communicate("reduce_scatter", value, target, (axis,), dim=dim, reduction="sum")

    def all_gather(self, value: Value, dim: int, count: int) -> Value:
        """Join the shards of a dim, so that only its first `count` axes still cut it."""
        own = value.sharding[dim]
        target = _with_dim(value.sharding, dim, own.upto(count))
        return self.communicate("all_gather", value, target, own.axes[count:], dim=dim)

    def all_gather_blocks(self, value: Value, counts: Sequence[int]) -> Value:
        """Join the shards of several dims in one collective: every member sends its block flat, and all lay them out.

        Args:
            value: the value.
            counts: per dim, how many of the axes that cut it still do afterwards.
        """
        axes = tuple(axis for dim, count in zip(value.sharding.dims, counts, strict=True) for axis in dim.axes[count:])
        target = TensorSharding(
            tuple(dim.upto(count) for dim, count in zip(value.sharding.dims, counts, strict=True)), value.sums
        )
        result = Value(self.register("tile"), value.shape, value.dtype, self.canonical(value.shape, target))
        flat, gathered = self.register("flatten"), self.register("all_gather")
        blocks = dict(zip(self.mesh.ranks, self.ranges(value.shape, value.sharding.dims), strict=True))
        wholes = self.ranges(value.shape, target.dims)
        tilings: dict[int, _Tiling] = {}
        for (device, own), group, whole in zip(self.instructions.items(), self.groups(axes), wholes, strict=True):
            # All members of a group share one tuple, and what is known of it: it may be a whole mesh of thousands.
            if id(group) not in tilings:
                tilings[id(group)] = _tiling([blocks[member] for member in group], whole, value.dtype)
            known = tilings[id(group)]
            own.append(Compute("flatten", (value.register,), (flat,), (known.given[group.index(device)],)))
            own.append(Communicate("all_gather", group, flat, gathered, known.given, known.joined, dim=0, axes=axes))
            own.append(Compute("tile", (gathered,), (result.register,), (known.whole,), 0, known.options))
        return result

    def communicate(
        self,
        collective: str,
        value: Value,
        target: TensorSharding,
        axes: Sequence[str],
        *,
        dim: int | None = None,
        reduction: str | None = None,
    ) -> Value:
        """Have the devices of each group along these axes take part in a collective, by which they hold the target."""
        result = Value(self.register(collective), value.shape, value.dtype, self.canonical(value.shape, target))
        before = dict(zip(self.mesh.ranks, self.specs(value), strict=True))
        given: dict[int, tuple[ArraySpec, ...]] = {}
        for own, group, spec in zip(self.instructions.values(), self.groups(axes), self.specs(result), strict=True):
            if id(group) not in given:
                given[id(group)] = tuple(before[member] for member in group)
            specs = given[id(group)]
            own.append(
                Communicate(
                    collective, group, value.register, result.register, specs, spec, dim, reduction, axes=tuple(axes)
                )
            )
        return result

    def _bounds_of(self, dim: DimSharding, size: int) -> list[tuple[int, int]]:
        """Return the range of one dim that each device holds."""
        key = (dim, size)
        if key not in self._bounds:
            found: dict[tuple[int, ...], tuple[int, int]] = {}
            places = [tuple(at[axis] for axis in dim.axes) for at in self._coordinates]
            for place, at in zip(places, self._coordinates, strict=True):
                if place not in found:
                    found[place] = bounds_of(dim, size, self.mesh, at)
            self._bounds[key] = [found[place] for place in places]
        return self._bounds[key]


@dataclass(frozen=True, slots=True)
class _Tiling:
    """What the members of a group do alike when they join blocks of several dims."""

    given: tuple[ArraySpec, ...]
    """The flat blocks of all members."""
    joined: ArraySpec
    """These, one after another."""
    whole: ArraySpec
    options: tuple[tuple[str, Any], ...]
    """Of the kernel "tile", which lays the blocks out."""


def _tiling(blocks: Sequence[Ranges], whole: Ranges, dtype: str) -> _Tiling:
    shapes = tuple(local_spec(block, dtype).shape for block in blocks)
    given = tuple(ArraySpec((prod(shape),), dtype) for shape in shapes)
    starts = tuple(tuple(low - first for (low, _), (first, _) in zip(block, whole, strict=True)) for block in blocks)
    spec = local_spec(whole, dtype)
    options = (("shape", spec.shape), ("starts", starts), ("shapes", shapes))
    return _Tiling(given, ArraySpec((sum(map(prod, shapes)),), dtype), spec, options)


@lru_cache(maxsize=65536)
def local_spec(ranges: Ranges, dtype: str) -> ArraySpec:
    """Return the spec of a shard."""
    return ArraySpec(tuple(high - low for low, high in ranges), dtype)


def _with_dim(sharding: TensorSharding, dim: int, to: DimSharding) -> TensorSharding:
    """Return the sharding with another cut of one dim."""
    return TensorSharding((*sharding.dims[:dim], to, *sharding.dims[dim + 1 :]), sharding.sums)


def _told(value: Value) -> str:
    return f"a tensor of shape {value.shape} cut as {value.sharding}"
