"""Shards: an array cut for the devices of a mesh, and joined again with a check of every element."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xrank.errors import ContradictionError, LayoutError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.arrays import Array, bytes_of, kind_of, reduce, spec_of
from xrank.virtual.mesh import MeshLike, as_device_mesh
from xrank.virtual.programs.program_builder import Ranges
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
