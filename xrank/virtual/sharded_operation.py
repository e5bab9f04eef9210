"""Shards: an array cut for the devices of a mesh, and joined again with a check of every element."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from xrank.errors import ContradictionError, LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.arrays import Array, ArraySpec, bytes_of, check_one_kind, kind_of, reduce, spec_of
from xrank.virtual.builder import ProgramBuilder, Ranges, Value, redistribute
from xrank.virtual.mesh import MeshLike, as_device_mesh
from xrank.virtual.programs import Operation, Program
from xrank.virtual.sharding import ShardingLike, TensorSharding, as_sharding


def shards_of(array: Array, sharding: ShardingLike, mesh: MeshLike) -> list[Array]:
    """Return views of each device's shard of an array, in mesh order.

    Args:
        array: the whole array.
        sharding: the sharding to cut it by.
        mesh: as for `VirtualCluster`.

    Raises:
        LayoutError: the sharding does not fit the array, or contains sums.

    >>> [shard.tolist() for shard in shards_of(np.arange(4), "[n/x]", 2)]
    [[0, 1], [2, 3]]
    """
    mesh = as_device_mesh(mesh)
    sharding, shape = as_sharding(sharding), spec_of(array).shape
    if sharding.sums:
        raise LayoutError("an array cannot be cut into addends", got=str(sharding), want=str(sharding.without_sums()))
    ranges = (sharding.slices(mesh, mesh.coordinate(device), shape) for device in mesh.ranks)
    return [array[tuple(slice(low, high) for low, high in each)] for each in ranges]


def join_shards(shards: Sequence[Array], sharding: ShardingLike, mesh: MeshLike) -> Array:
    """Join the devices' shards to the whole array: the inverse of `shards_of`, for a run's outputs.

    Addends are summed in mesh order. Replicas are compared bit by bit.

    Args:
        shards: one shard per device, in mesh order.
        sharding: the sharding of the shards.
        mesh: as for `VirtualCluster`.

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
    """Return the shape of the whole array."""
    at = [mesh.coordinate(device) for device in mesh.ranks]
    specs = [spec_of(shard) for shard in shards]
    for device, spec in zip(mesh.ranks, specs, strict=True):
        if len(spec.shape) != len(sharding.dims) or spec.dtype != specs[0].dtype:
            raise _misfit(device, spec, sharding, f"{len(sharding.dims)} dims in {specs[0].dtype}")
    kinds = [kind_of(shard) for shard in shards]
    if len(set(kinds)) > 1:
        odd = next(number for number, kind in enumerate(kinds) if kind != kinds[0])
        raise LayoutError(
            "shards of two kinds cannot be joined", rank=mesh.ranks[odd], got=f"a {kinds[odd]} array", want=kinds[0]
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
    return LayoutError(
        f"device {device} has no shard of a tensor cut as {sharding}",
        rank=device,
        got=f"{spec.shape} {spec.dtype}",
        want=want,
    )


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

    def compile(
        self, mesh: DeviceMesh, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
    ) -> tuple[Program, ...]:
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

    def packets(
        self, mesh: DeviceMesh, device: int, activations: Sequence[Array], parameters: Sequence[Array]
    ) -> dict[str, Array]:
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
        """Join a run's outputs to whole tensors; a dict by name if there are several.

        Raises:
            ContradictionError: devices have the same part with different elements.
        """
        devices, shardings = as_device_mesh(mesh), self.output_shardings
        if len(shardings) == 1:
            [sharding] = shardings.values()
            return join_shards(outputs, sharding, devices)
        return {name: join_shards([each[name] for each in outputs], shardings[name], devices) for name in shardings}

    def _zip_arguments(
        self, activations: Sequence[_T], parameters: Sequence[_T]
    ) -> dict[str, tuple[_T, TensorSharding]]:
        """Return the arguments and their shardings by name."""
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
        raise LayoutError(
            f"{name}: {error.message}", tensor=name, got=error.got, want=error.want, next_step=error.next_step
        ) from error


def check_sharding(operation: ShardedOperation, sharding: object, kind: type) -> None:
    """Check that an operation received its kind of shardings."""
    if not isinstance(sharding, kind):
        name = type(operation).__qualname__
        raise UsageError(
            f"{name} takes a {kind.__qualname__}", got=repr(sharding), want=f"{name}({kind.__qualname__}(...))"
        )
