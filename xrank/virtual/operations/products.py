"""Products of sharded tensors: the choice of each device's block, forward and backward.

A product is (..., k) by (k, n). Three cuts define its block: of the rows, the inner dim and the columns. Both factors
are redistributed to the block, the devices multiply, and the result, a sum along the axes that cut the inner dim, is
redistributed to the wanted sharding. The backward products use the same block with the roles exchanged: dA is a sum
along the axes that cut the columns, dB along those that cut the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from xrank.virtual.programs.program_builder import ProgramBuilder, Value
from xrank.virtual.programs.redistribution import extend_cut, redistribute
from xrank.virtual.sharding import FULL, DimSharding, TensorSharding


class MatMulShardingPolicy(Enum):
    """How the devices share the work of a product."""

    Unsharded = "unsharded"
    """Every device has both factors completely."""
    MatchedInnerSharding = "matched inner"
    """Both factors stay cut equally along the inner dim; the products are addends."""
    UnmatchedInnerSharding = "unmatched inner"
    """Both factors are gathered."""
    OuterSharding = "outer"
    """The first factor is gathered along its inner dim and keeps its rows; the second is gathered."""
    FullSharding = "full"
    """Both factors are gathered along the inner dim; the first keeps its rows, the second its columns."""


@dataclass(frozen=True, slots=True)
class MatrixBlock:
    """The block of a product that a device computes."""

    rows: tuple[DimSharding, ...]
    """Cuts of all dims of the first factor except the last."""
    inner: DimSharding
    columns: DimSharding

    @property
    def axes(self) -> set[str]:
        """All axes that cut the block."""
        return {axis for dim in (*self.rows, self.inner, self.columns) for axis in dim.axes}


def choose_block(
    builder: ProgramBuilder, left: Value, right: Value, wanted: TensorSharding, policy: MatMulShardingPolicy
) -> MatrixBlock:
    """Choose the block that the devices multiply under a policy.

    Beyond the policy, rows and columns are cut as in the wanted result where that is free, and the inner dim is cut
    along the axes of the wanted addends.
    """
    policies = MatMulShardingPolicy
    size_of_rows, size_of_inner, size_of_columns = left.shape[:-1], left.shape[-1], right.shape[-1]
    sums = [axis for axis in wanted.sums if builder.mesh.axis_length(axis) > 1]
    inner = left.sharding[-1] if policy is policies.MatchedInnerSharding else FULL
    # A size that divides evenly by fewer axes may not divide by more.
    kind = "/=" if inner.kind == "/" else inner.kind
    inner = DimSharding((*inner.axes, *(axis for axis in sums if axis not in inner.axes)), kind)
    taken = {*inner.axes, *_find_column_axes(left, right, wanted, policy)}
    rows = [FULL] * len(size_of_rows)
    if policy not in (policies.Unsharded, policies.UnmatchedInnerSharding):
        rows = [_cut_untaken(dim, taken) for dim in left.sharding.dims[:-1]]
    # Without the columns' axes, which were taken for the choice of rows only: columns are cut by them next.
    taken = {*inner.axes, *(axis for dim in rows for axis in dim.axes)}
    columns = FULL
    if policy in (policies.MatchedInnerSharding, policies.FullSharding):
        columns = _cut_untaken(right.sharding[-1], taken)
        taken |= set(columns.axes)
    wanted_dims = builder.canonical((*size_of_rows, size_of_columns), wanted).dims
    rows = [
        extend_cut(builder, size, own, to, taken)
        for size, own, to in zip(size_of_rows, rows, wanted_dims[:-1], strict=True)
    ]
    columns = extend_cut(builder, size_of_columns, columns, wanted_dims[-1], taken)
    block = builder.canonical((size_of_inner,), TensorSharding((inner,)))
    return MatrixBlock(tuple(rows), block[0], columns)


def product(builder: ProgramBuilder, left: Value, right: Value, block: MatrixBlock, wanted: TensorSharding) -> Value:
    """Write the product of two values with the wanted sharding."""
    left = redistribute(builder, left, TensorSharding((*block.rows, block.inner)))
    right = redistribute(builder, right, TensorSharding((block.inner, block.columns)))
    return redistribute(builder, builder.matmul(left, right), wanted)


def product_backward(
    builder: ProgramBuilder, left: Value, right: Value, gradient: Value, block: MatrixBlock
) -> tuple[Value, Value]:
    """Write the gradients of both factors, cut as the factors, from the gradient of the product."""
    taken = block.axes
    *rows, inner = (
        extend_cut(builder, size, own, to, taken)
        for size, own, to in zip(left.shape, (*block.rows, block.inner), left.sharding.dims, strict=True)
    )
    # dA contracts the columns, so the axes that cut them give addends; the free axes of A cut its rows and inner dim.
    of_left = builder.matmul(
        redistribute(builder, gradient, TensorSharding((*rows, block.columns))),
        redistribute(builder, right, TensorSharding((inner, block.columns))),
        "nt",
    )
    taken = block.axes
    inner, columns = (
        extend_cut(builder, size, own, to, taken)
        for size, own, to in zip(right.shape, (block.inner, block.columns), right.sharding.dims, strict=True)
    )
    of_right = builder.matmul(
        redistribute(builder, left, TensorSharding((*block.rows, inner))),
        redistribute(builder, gradient, TensorSharding((*block.rows, columns))),
        "tn",
    )
    return redistribute(builder, of_left, left.sharding), redistribute(builder, of_right, right.sharding)


def _find_column_axes(left: Value, right: Value, wanted: TensorSharding, policy: MatMulShardingPolicy) -> set[str]:
    """Return the axes that cut both rows and columns and stay with the columns.

    One side must be gathered: the side that the result is not cut by, otherwise the factor with fewer elements.
    """
    policies = MatMulShardingPolicy
    if policy not in (policies.MatchedInnerSharding, policies.FullSharding):
        return set()
    of_rows = {axis for dim in left.sharding.dims[:-1] for axis in dim.axes}
    wanted_rows = {axis for dim in wanted.dims[:-1] for axis in dim.axes}
    keeps_columns = prod(left.shape) < prod(right.shape)
    return {
        axis
        for axis in right.sharding[-1].axes
        if axis in of_rows and (axis in wanted[-1].axes or (axis not in wanted_rows and keeps_columns))
    }


def _cut_untaken(dim: DimSharding, taken: set[str]) -> DimSharding:
    """Return the cut by the leading axes before the first taken one."""
    count = next((place for place, axis in enumerate(dim.axes) if axis in taken), len(dim.axes))
    return dim.upto(count)
