"""Redistribution: the steps from one sharding of a value to another, with little communication."""

from __future__ import annotations

from xrank.errors import LayoutError
from xrank.virtual.programs.program_builder import ProgramBuilder, Value
from xrank.virtual.sharding import DimSharding, TensorSharding, canonical


def redistribute(builder: ProgramBuilder, value: Value, sharding: TensorSharding) -> Value:
    """Return the value with another sharding; computed once per value and sharding.

    The order of steps: cut dims where devices have equal data (free), or by a reduce-scatter where an axis sums;
    all-reduce the remaining sums; gather shards (several dims in one collective); cut the remaining dims.

    Raises:
        LayoutError: the sharding requires addends of a tensor that is not a sum.
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
            f"a whole tensor has no addends along {more[0]!r}",
            got=str(value.sharding),
            want=str(target),
            next_step="leave the axis out of the sum, or cut the contracted dim by it",
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
            if not _is_even(builder, value, dim, wanted):
                return value
            value = builder.reduce_scatter(value, dim, axis, wanted.kind)
        # The axis still cuts another dim; a gather has to free it first.
        elif axis in value.sharding.axes:
            return value
        else:
            value = builder.slice(value, dim, axis, wanted.kind)
    return value


def _is_even(builder: ProgramBuilder, value: Value, dim: int, wanted: DimSharding) -> bool:
    """Return whether a reduce-scatter cuts a dim as wanted: evenly, or as `numpy.array_split` does."""
    count = len(value.sharding[dim].axes) + 1
    return canonical(wanted.upto(count), value.shape[dim], builder.mesh).kind != "/~"
