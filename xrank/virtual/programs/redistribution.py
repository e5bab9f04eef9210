"""Redistribution: the steps that bring a value from one sharding to another, with little sent."""

from __future__ import annotations

from xrank.errors import LayoutError
from xrank.virtual.programs.program_builder import ProgramBuilder, Value
from xrank.virtual.sharding import DimSharding, TensorSharding, canonical

__all__ = ["common_axes", "extended", "redistribute"]


def redistribute(builder: ProgramBuilder, value: Value, sharding: TensorSharding) -> Value:
    """Return the value as this sharding has it; done once for each value and sharding.

    In this order: dims are cut where every device holds the same (free), and where an axis holds addends by a
    reduce-scatter; what is left of the sum is all-reduced; shards are gathered (of several dims in one collective);
    dims are cut that could not be before.

    Raises:
        LayoutError: the devices hold the tensor, and the sharding wants addends of it.
    """
    target = builder.canonical(value.shape, sharding)
    key = (value, target)
    if key not in builder.redistributed:
        builder.redistributed[key] = _redistribute(builder, value, target)
    return builder.redistributed[key]


def _redistribute(builder: ProgramBuilder, value: Value, target: TensorSharding) -> Value:
    more = [axis for axis in target.sums if axis not in value.sums]
    if more:
        raise LayoutError(
            f"a whole tensor is not held as addends along {more[0]!r}",
            got=str(value.sharding),
            want=str(target),
            next_step="leave the axis out of the sum, or cut by it what is contracted",
        )
    for dim in range(len(value.shape)):
        value = _cut(builder, value, dim, target)
    rest = tuple(axis for axis in value.sums if axis not in target.sums)
    if rest:
        value = builder.all_reduce(value, rest)
    counts = [common_axes(builder, value, dim, target[dim]) for dim in range(len(value.shape))]
    gathered = [dim for dim, count in enumerate(counts) if count < len(value.sharding[dim].axes)]
    if len(gathered) == 1:
        value = builder.all_gather(value, gathered[0], counts[gathered[0]])
    elif gathered:
        value = builder.all_gather_blocks(value, counts)
    for dim in range(len(value.shape)):
        value = _cut(builder, value, dim, target)
    return value


def common_axes(builder: ProgramBuilder, value: Value, dim: int, wanted: DimSharding) -> int:
    """Return how many of the axes that cut a dim of a value cut it so in the wanted sharding too, from the first."""
    own, size = value.sharding[dim], value.shape[dim]
    count = min(len(own.axes), len(wanted.axes))
    while canonical(own.upto(count), size, builder.mesh) != canonical(wanted.upto(count), size, builder.mesh):
        count -= 1
    return count


def extended(builder: ProgramBuilder, size: int, own: DimSharding, wanted: DimSharding, taken: set[str]) -> DimSharding:
    """Return a dim's cut with the further axes that the wanted one has, up to the first that is taken; and take them.

    The dim's own cut comes back where the wanted one does not begin with it.
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
    """Cut a dim as far as the target has it and nothing must be gathered before."""
    wanted = target[dim]
    if common_axes(builder, value, dim, wanted) < len(value.sharding[dim].axes):
        return value
    for axis in wanted.axes[len(value.sharding[dim].axes) :]:
        if axis in value.sums:
            if not _is_even(builder, value, dim, wanted):
                return value
            value = builder.reduce_scatter(value, dim, axis, wanted.kind)
        elif axis in value.sharding.axes:
            return value
        else:
            value = builder.slice(value, dim, axis, wanted.kind)
    return value


def _is_even(builder: ProgramBuilder, value: Value, dim: int, wanted: DimSharding) -> bool:
    """Say whether a reduce-scatter cuts a dim as it is wanted: evenly, or as `numpy.array_split` does."""
    count = len(value.sharding[dim].axes) + 1
    return canonical(wanted.upto(count), value.shape[dim], builder.mesh).kind != "/~"
