"""Program builders: write the programs of all devices of a mesh at once, as steps on sharded values.

A `Value` is one tensor, distributed over the devices by a sharding. Each step appends one instruction with local sizes
to every device's program and returns the resulting value. `redistribute` changes the sharding of a value.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from xrank.errors import ContradictionError, LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import SplitKind
from xrank.virtual.arrays import Array, Arrays, ArraySpec, Specs, bytes_of, check_one_kind, kind_of, reduce, spec_of
from xrank.virtual.programs import Communicate, Compute, Instruction, Operation, Program, Receive, Return
from xrank.virtual.sharding import (
    DimSharding,
    MeshLike,
    ShardingLike,
    TensorSharding,
    as_device_mesh,
    as_sharding,
    bounds_of,
    canonical,
)

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) of a device's shard in each dim."""

Form: TypeAlias = Literal["nn", "nt", "tn"]
"""Form of a product: nn is (..., k) by (k, n); nt is (..., n) by (k, n) transposed; tn is (..., k) transposed by
(..., n), which contracts all dims but the last."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor distributed over all devices of a mesh by one sharding, in a register of one name."""

    register: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    sharding: TensorSharding

    @property
    def sums(self) -> tuple[str, ...]:
        """Axes along which the devices have addends."""
        return self.sharding.sums

    @property
    def spec(self) -> ArraySpec:
        """Spec of the whole tensor."""
        return ArraySpec(self.shape, self.dtype)


class ProgramBuilder:
    """Writes the programs of the devices of a mesh, or of a submesh, such as a pipeline's stage."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.instructions: dict[int, list[Instruction]] = {device: [] for device in mesh.ranks}
        """Instructions by device, in mesh order; callers may append further ones."""
        self.redistributed: dict[tuple[Value, TensorSharding], Value] = {}
        """Cache of `redistribute`: a value used twice is gathered once."""
        self._coordinates = [mesh.coordinate(device) for device in mesh.ranks]
        self._groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        self._bounds: dict[tuple[DimSharding, int], list[tuple[int, int]]] = {}
        self._count = 0

    def programs(self) -> tuple[Program, ...]:
        """Return the programs in mesh order."""
        return tuple(Program(device, tuple(instructions)) for device, instructions in self.instructions.items())

    def register(self, name: str) -> str:
        """Return an unused register name."""
        self._count += 1
        return f"{name}.{self._count}"

    def canonical(self, shape: Sequence[int], sharding: TensorSharding) -> TensorSharding:
        """Return the normal form of a sharding for this shape; shardings with equal forms need no redistribution."""
        sharding.check(self.mesh, shape)
        dims = tuple(canonical(dim, size, self.mesh) for dim, size in zip(sharding.dims, shape, strict=True))
        lengths = zip(self.mesh.axis_names, self.mesh.shape, strict=True)
        return TensorSharding(dims, tuple(axis for axis, length in lengths if length > 1 and axis in sharding.sums))

    def ranges(self, shape: Sequence[int], dims: Sequence[DimSharding]) -> list[Ranges]:
        """Return each device's ranges, in mesh order."""
        if not shape:
            return [()] * len(self._coordinates)
        for key in zip(dims, shape, strict=True):
            if key not in self._bounds:
                found: dict[tuple[int, ...], tuple[int, int]] = {}
                places = [tuple(at[axis] for axis in key[0].axes) for at in self._coordinates]
                for place, at in zip(places, self._coordinates, strict=True):
                    # Devices at equal places along the cutting axes have equal bounds; such places are few.
                    if place not in found:
                        found[place] = bounds_of(*key, self.mesh, at)
                self._bounds[key] = [found[place] for place in places]
        return list(zip(*(self._bounds[key] for key in zip(dims, shape, strict=True)), strict=True))

    def specs(self, value: Value) -> list[ArraySpec]:
        """Return the spec of each device's shard, in mesh order."""
        return [local_spec(ranges, value.dtype) for ranges in self.ranges(value.shape, value.sharding.dims)]

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """Return each device's group along these axes, with members ordered as the axes cut."""
        key = tuple(axes)
        if key not in self._groups:
            self.mesh.check_axes(key)
            place = dict(zip(self.mesh.ranks, self._coordinates, strict=True))
            group_of: dict[int, tuple[int, ...]] = {}
            for members in self.mesh.groups(*key):
                # In the order of the cuts, not of the mesh: a gather joins the shards in the group's order.
                group = tuple(sorted(members, key=lambda device: [place[device][axis] for axis in key]))
                group_of.update(dict.fromkeys(group, group))
            self._groups[key] = [group_of[device] for device in self.mesh.ranks]
        return self._groups[key]

    def receive(self, packet: str, shape: Sequence[int], dtype: str, sharding: TensorSharding) -> Value:
        """Receive a tensor from the host: each device gets its shard, as a packet of this name."""
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
        """Call a kernel on the devices' shards; its output has this global shape, and the first input's element type.

        The caller must ensure that the kernel produces the sharding. `options` and `flops` return the kernel's keyword
        arguments and its flops for the device at a place in mesh order.
        """
        sharding = self.canonical(shape, sharding)
        value = Value(self.register(kernel), tuple(shape), dtype or inputs[0].dtype, sharding)
        names = tuple(each.register for each in inputs)
        for place, (own, spec) in enumerate(zip(self.instructions.values(), self.specs(value), strict=True)):
            keywords = () if options is None else tuple(options(place).items())
            cost = 0 if flops is None else flops(place)
            own.append(Compute(kernel, names, (value.register,), (spec,), cost, keywords))
        return value

    def matmul(self, left: Value, right: Value, form: Form = "nn") -> Value:
        """Multiply shards that match locally; axes that cut the contracted dims become sums."""
        rows, left_inner = (slice(0, -1), slice(-1, None)) if form != "tn" else (slice(-1, None), slice(0, -1))
        right_inner, columns = {"nn": (slice(0, 1), 1), "nt": (slice(1, 2), 0), "tn": (slice(0, -1), -1)}[form]
        if left.dtype != right.dtype or left.shape[left_inner] != right.shape[right_inner]:
            raise LayoutError(
                f"a product of {_describe(left)} and {_describe(right)} does not fit",
                got=f"{left.shape[left_inner]} and {right.shape[right_inner]} in {left.dtype} and {right.dtype}",
                want="equal sizes of the contracted dims, in one element type",
            )
        inner = left.sharding.dims[left_inner]
        if inner != right.sharding.dims[right_inner]:
            raise LayoutError(
                f"a product of {_describe(left)} and {_describe(right)} is not local: it contracts dimensions with "
                f"different layouts",
                got=f"{left.sharding} and {right.sharding}",
                want="equal cuts",
            )
        # A device with a part of the contracted dims has an addend of the product.
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
        """Keep each device's range of a dim that an axis, along which data are equal, cuts further; sends nothing."""
        target = _with_dim(value.sharding, dim, DimSharding((*value.sharding[dim].axes, axis), kind))
        before = self.ranges(value.shape, value.sharding.dims)
        after = self.ranges(value.shape, target.dims)

        def options(place: int) -> dict[str, Any]:
            low = before[place][dim][0]
            return {"dim": dim, "start": after[place][dim][0] - low, "stop": after[place][dim][1] - low}

        return self.compute("slice", (value,), value.shape, target, options=options)

    def all_reduce(self, value: Value, axes: Sequence[str], reduction: str = "sum") -> Value:
        """Sum the addends along these axes."""
        left = tuple(axis for axis in value.sums if axis not in axes)
        target = TensorSharding(value.sharding.dims, left)
        return self.communicate("all_reduce", value, target, axes, reduction=reduction)

    def reduce_scatter(self, value: Value, dim: int, axis: str, kind: SplitKind) -> Value:
        """Sum the addends along an axis and keep each device's range of a dim, which the axis cuts further."""
        left = TensorSharding(value.sharding.dims, tuple(each for each in value.sums if each != axis))
        target = _with_dim(left, dim, DimSharding((*left[dim].axes, axis), kind))
        return self.communicate("reduce_scatter", value, target, (axis,), dim=dim, reduction="sum")

    def all_gather(self, value: Value, dim: int, count: int) -> Value:
        """Join the shards of a dim, so that only its first `count` axes still cut it."""
        own = value.sharding[dim]
        target = _with_dim(value.sharding, dim, own.upto(count))
        return self.communicate("all_gather", value, target, own.axes[count:], dim=dim)

    def all_gather_blocks(self, value: Value, counts: Sequence[int]) -> Value:
        """Join the shards of several dims in one collective; `counts` is how many axes still cut each dim."""
        axes = tuple(axis for dim, count in zip(value.sharding.dims, counts, strict=True) for axis in dim.axes[count:])
        target = TensorSharding(
            tuple(dim.upto(count) for dim, count in zip(value.sharding.dims, counts, strict=True)), value.sums
        )
        result = Value(self.register("tile"), value.shape, value.dtype, self.canonical(value.shape, target))
        flat, gathered = self.register("flatten"), self.register("all_gather")
        blocks = dict(zip(self.mesh.ranks, self.ranges(value.shape, value.sharding.dims), strict=True))
        wholes = self.ranges(value.shape, target.dims)
        tilings: dict[int, tuple[tuple[ArraySpec, ...], Compute]] = {}
        for (device, own), group, whole in zip(self.instructions.items(), self.groups(axes), wholes, strict=True):
            # The members share one tuple and one tiling: the group may be a whole mesh of thousands of devices.
            if id(group) not in tilings:
                shapes = tuple(local_spec(blocks[member], value.dtype).shape for member in group)
                starts = tuple(
                    tuple(low - first for (low, _), (first, _) in zip(blocks[member], whole, strict=True))
                    for member in group
                )
                spec = local_spec(whole, value.dtype)
                options = (("shape", spec.shape), ("starts", starts), ("shapes", shapes))
                tile = Compute("tile", (gathered,), (result.register,), (spec,), 0, options)
                tilings[id(group)] = tuple(ArraySpec((prod(shape),), value.dtype) for shape in shapes), tile
            given, tile = tilings[id(group)]
            joined = ArraySpec((sum(spec.shape[0] for spec in given),), value.dtype)
            own.append(Compute("flatten", (value.register,), (flat,), (given[group.index(device)],)))
            own.append(Communicate("all_gather", group, flat, gathered, given, joined, dim=0, axes=axes))
            own.append(tile)
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
        """Append a collective of each group along these axes; it changes the value's sharding to the target."""
        result = Value(self.register(collective), value.shape, value.dtype, self.canonical(value.shape, target))
        before = dict(zip(self.mesh.ranks, self.specs(value), strict=True))
        given: dict[int, tuple[ArraySpec, ...]] = {}
        for own, group, spec in zip(self.instructions.values(), self.groups(axes), self.specs(result), strict=True):
            # `groups` returns one tuple for all members, and keeps it: its id is a key that costs nothing to hash.
            if id(group) not in given:
                given[id(group)] = tuple(before[member] for member in group)
            specs = given[id(group)]
            own.append(
                Communicate(
                    collective, group, value.register, result.register, specs, spec, dim, reduction, axes=tuple(axes)
                )
            )
        return result


@lru_cache(maxsize=65536)
def local_spec(ranges: Ranges, dtype: str) -> ArraySpec:
    """Return the spec of a shard."""
    return ArraySpec(tuple(high - low for low, high in ranges), dtype)


def _with_dim(sharding: TensorSharding, dim: int, to: DimSharding) -> TensorSharding:
    return TensorSharding((*sharding.dims[:dim], to, *sharding.dims[dim + 1 :]), sharding.sums)


def _describe(value: Value) -> str:
    return f"a tensor of shape {value.shape} cut as {value.sharding}"


def redistribute(builder: ProgramBuilder, value: Value, sharding: TensorSharding) -> Value:
    """Return the value with another sharding; computed once per value and sharding.

    The order of steps: cut dims where devices have equal data (free), or by a reduce-scatter where an axis sums;
    all-reduce the remaining sums; gather shards (several dims in one collective); cut the remaining dims.
    """
    target = builder.canonical(value.shape, sharding)
    key = (value, target)
    if key in builder.redistributed:
        return builder.redistributed[key]
    more = [axis for axis in target.sums if axis not in value.sums]
    if more:
        raise LayoutError(
            f"a whole tensor has no partial sums along {more[0]!r}",
            got=str(value.sharding),
            want=str(target),
            next_step="omit the axis from the sum, or split the contracted dim by it",
        )
    for dim in range(len(value.shape)):
        value = _cut(builder, value, dim, target)
    rest = tuple(axis for axis in value.sums if axis not in target.sums)
    if rest:
        value = builder.all_reduce(value, rest)
    # Cutting comes before gathering because it makes the gathered blocks smaller.
    counts = [common_axes(builder, value, dim, target[dim]) for dim in range(len(value.shape))]
    gathered = [dim for dim, count in enumerate(counts) if count < len(value.sharding[dim].axes)]
    if len(gathered) == 1:
        value = builder.all_gather(value, gathered[0], counts[gathered[0]])
    elif gathered:
        value = builder.all_gather_blocks(value, counts)
    for dim in range(len(value.shape)):
        value = _cut(builder, value, dim, target)
    builder.redistributed[key] = value
    return value


def common_axes(builder: ProgramBuilder, value: Value, dim: int, wanted: DimSharding) -> int:
    """Return the number of leading axes by which a value's dim and the wanted sharding are cut alike."""
    own, size = value.sharding[dim], value.shape[dim]
    count = min(len(own.axes), len(wanted.axes))
    # It ends at 0 at the latest: a cut by no axes is equal to any other.
    while canonical(own.upto(count), size, builder.mesh) != canonical(wanted.upto(count), size, builder.mesh):
        count -= 1
    return count


def extend_cut(
    builder: ProgramBuilder, size: int, own: DimSharding, wanted: DimSharding, taken: set[str]
) -> DimSharding:
    """Extend a dim's cut by further axes of the wanted cut, up to the first taken axis, and add them to `taken`.

    Returns the dim's own cut if the wanted one does not begin with it.
    """
    own, wanted = canonical(own, size, builder.mesh), canonical(wanted, size, builder.mesh)
    count = len(own.axes)
    if canonical(wanted.upto(count), size, builder.mesh) != own:
        return own
    while count < len(wanted.axes) and wanted.axes[count] not in taken:
        taken.add(wanted.axes[count])
        count += 1
    return canonical(wanted.upto(count), size, builder.mesh)


def _cut(builder: ProgramBuilder, value: Value, dim: int, target: TensorSharding) -> Value:
    """Cut a dim by the target's axes as far as possible without a gather."""
    wanted = target[dim]
    if common_axes(builder, value, dim, wanted) < len(value.sharding[dim].axes):
        return value
    for axis in wanted.axes[len(value.sharding[dim].axes) :]:
        if axis in value.sums:
            # A reduce-scatter cuts as array_split; other cuts are all-reduced first and cut afterwards.
            count = len(value.sharding[dim].axes) + 1
            if canonical(wanted.upto(count), value.shape[dim], builder.mesh).kind == "/~":
                return value
            value = builder.reduce_scatter(value, dim, axis, wanted.kind)
        # The axis still cuts another dim; a gather has to free it first.
        elif axis in value.sharding.axes:
            return value
        else:
            value = builder.slice(value, dim, axis, wanted.kind)
    return value


def shards_of(array: Array, sharding: ShardingLike, mesh: MeshLike) -> list[Array]:
    """Return views of each device's shard of an array, in mesh order; `mesh` is as for `VirtualCluster`.

    Raises:
        LayoutError: the sharding does not fit the array, or contains sums.

    >>> [shard.tolist() for shard in shards_of(np.arange(4), "[n/x]", 2)]
    [[0, 1], [2, 3]]
    """
    mesh = as_device_mesh(mesh)
    sharding, shape = as_sharding(sharding), spec_of(array).shape
    if sharding.sums:
        raise LayoutError(
            "an array cannot be split into partial sums", got=str(sharding), want=str(sharding.without_sums())
        )
    ranges = (sharding.slices(mesh, mesh.coordinate(device), shape) for device in mesh.ranks)
    return [array[tuple(slice(low, high) for low, high in each)] for each in ranges]


def join_shards(shards: Sequence[Array], sharding: ShardingLike, mesh: MeshLike) -> Array:
    """Join the devices' shards to the whole array: the inverse of `shards_of`, for a run's outputs.

    There is one shard per device, in mesh order. Addends are summed in that order. Replicas are compared bit by bit.
    `mesh` is as for `VirtualCluster`.

    Raises:
        LayoutError: the number, shapes, element types or kinds of the shards do not fit the sharding.
        ContradictionError: devices have the same part with different elements; names the first such device.

    >>> join_shards([np.array([0, 1]), np.array([2, 3])], "[n/x]", 2)
    array([0, 1, 2, 3])
    """
    mesh = as_device_mesh(mesh)
    sharding = as_sharding(sharding)
    if len(shards) != mesh.size:
        raise LayoutError("each device has one shard", got=f"{len(shards)} shards", want=f"{mesh.size} devices")
    shape = _global_shape(shards, sharding, mesh)
    whole = (
        np.empty(shape, shards[0].dtype)
        if isinstance(shards[0], np.ndarray | np.generic)
        else shards[0].new_empty(shape)
    )
    place = {device: number for number, device in enumerate(mesh.ranks)}
    first: dict[Ranges, tuple[int, Array]] = {}
    # Addends are summed first; then each range is written once, and its replicas are compared with it.
    for members in mesh.groups(*sharding.sums) if sharding.sums else [(device,) for device in mesh.ranks]:
        ranges = sharding.slices(mesh, mesh.coordinate(members[0]), shape)
        shard = reduce([shards[place[device]] for device in members], "sum")
        if ranges not in first:
            first[ranges] = (members[0], shard)
            whole[tuple(slice(low, high) for low, high in ranges)] = shard
        elif not np.array_equal(bytes_of(shard), bytes_of(first[ranges][1])):
            raise ContradictionError(
                f"devices {first[ranges][0]} and {members[0]} have the same part with different elements",
                rank=members[0],
                index_range=", ".join(f"{low}:{high}" for low, high in ranges),
                want="equal elements",
                next_step="make the replicas equal: reduce them over the axes that they are replicated on",
            )
    return whole


def _global_shape(shards: Sequence[Array], sharding: TensorSharding, mesh: DeviceMesh) -> tuple[int, ...]:
    at = [mesh.coordinate(device) for device in mesh.ranks]
    specs = [spec_of(shard) for shard in shards]
    for device, spec in zip(mesh.ranks, specs, strict=True):
        if len(spec.shape) != len(sharding.dims) or spec.dtype != specs[0].dtype:
            raise _misfit(device, spec, sharding, f"{len(sharding.dims)} dims in {specs[0].dtype}")
    kinds = [kind_of(shard) for shard in shards]
    if len(set(kinds)) > 1:
        odd = next(number for number, kind in enumerate(kinds) if kind != kinds[0])
        raise LayoutError(
            "shards of different array types cannot be joined",
            rank=mesh.ranks[odd],
            got=f"a {kinds[odd]} array",
            want=kinds[0],
        )
    sharding.check(mesh, specs[0].shape)
    shape = []
    for dim, own in enumerate(sharding.dims):
        lengths = {
            tuple(each[axis] for axis in own.axes): spec.shape[dim] for each, spec in zip(at, specs, strict=True)
        }
        shape.append(sum(lengths.values()))
    for device, each, spec in zip(mesh.ranks, at, specs, strict=True):
        want = tuple(high - low for low, high in sharding.slices(mesh, each, shape))
        if spec.shape != want:
            raise _misfit(device, spec, sharding, f"{want} of a tensor of shape {tuple(shape)}")
    return tuple(shape)


def _misfit(device: int, spec: ArraySpec, sharding: TensorSharding, want: str) -> LayoutError:
    text = f"device {device} has no shard of a tensor cut as {sharding}"
    return LayoutError(text, rank=device, got=str(spec), want=want)


_T = TypeVar("_T")


class ShardedOperation(Operation):
    """An operation on tensors, each of which has a sharding.

    A subclass defines the three mappings of shardings, by tensor name in argument order, and `build`.
    """

    @property
    @abstractmethod
    def activation_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the activations."""

    @property
    @abstractmethod
    def parameter_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the parameters."""

    @property
    @abstractmethod
    def output_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the outputs."""

    @abstractmethod
    def build(self, builder: ProgramBuilder, inputs: Mapping[str, Value]) -> Mapping[str, Value]:
        """Write the steps and return the outputs by name; their shardings may differ from the wanted except in sums."""

    def compile(self, mesh: DeviceMesh, activations: Specs, parameters: Specs) -> tuple[Program, ...]:
        """Return the programs of all devices; see `Operation.compile`."""
        builder = ProgramBuilder(mesh)
        inputs: dict[str, Value] = {}
        for name, (spec, sharding) in self._zip_arguments(activations, parameters).items():
            check_cuts(builder, name, spec.shape, sharding)
            inputs[name] = builder.receive(name, spec.shape, spec.dtype, sharding)
        outputs = self.build(builder, inputs)
        for name, sharding in self.output_shardings.items():
            builder.give(redistribute(builder, outputs[name], sharding), name)
        return builder.programs()

    def packets(self, mesh: DeviceMesh, device: int, activations: Arrays, parameters: Arrays) -> dict[str, Array]:
        """Return a device's shards of the arguments.

        Raises:
            UsageError: some arguments are numpy arrays and some are tensors.
        """
        named, at = self._zip_arguments(activations, parameters), mesh.coordinate(device)
        check_one_kind({name: array for name, (array, _) in named.items()})
        return {
            name: array[tuple(slice(low, high) for low, high in sharding.slices(mesh, at, spec_of(array).shape))]
            for name, (array, sharding) in named.items()
        }

    def join(self, outputs: Sequence[Array | Mapping[str, Array]], mesh: MeshLike) -> Array | dict[str, Array]:
        """Join a run's outputs to whole tensors, a dict by name if there are several; errors as in `join_shards`."""
        devices, shardings = as_device_mesh(mesh), self.output_shardings
        if len(shardings) == 1:
            [sharding] = shardings.values()
            return join_shards(outputs, sharding, devices)
        return {name: join_shards([each[name] for each in outputs], shardings[name], devices) for name in shardings}

    def _zip_arguments(
        self, activations: Sequence[_T], parameters: Sequence[_T]
    ) -> dict[str, tuple[_T, TensorSharding]]:
        named: dict[str, tuple[_T, TensorSharding]] = {}
        for what, given, shardings in (
            ("activations", activations, self.activation_shardings),
            ("parameters", parameters, self.parameter_shardings),
        ):
            if len(given) != len(shardings):
                raise UsageError(
                    f"{type(self).__name__} takes the {what} {', '.join(shardings)}",
                    got=f"{len(given)} {what}",
                    want=f"{len(shardings)}",
                )
            named |= {name: (each, shardings[name]) for name, each in zip(shardings, given, strict=True)}
        return named


def check_cuts(builder: ProgramBuilder, name: str, shape: Sequence[int], sharding: TensorSharding) -> None:
    """Check that a sharding can cut a tensor of this shape; errors name the tensor."""
    try:
        sharding.check(builder.mesh, shape)
        builder.ranges(shape, sharding.dims)
    except LayoutError as error:
        error.about(name, tensor=name)
        raise


def check_sharding(operation: ShardedOperation, sharding: object, kind: type) -> None:
    """Check that an operation received its kind of shardings."""
    if not isinstance(sharding, kind):
        name = type(operation).__qualname__
        raise UsageError(
            f"{name} takes a {kind.__qualname__}", got=repr(sharding), want=f"{name}({kind.__qualname__}(...))"
        )
