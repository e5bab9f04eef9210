"""Products of sharded tensors: which block of it each device multiplies, forward and backward.

A product is (..., k) by (k, n). Its block is said by three cuts: of the rows, of the inner dim and of the columns. Both
factors are brought to the block, the devices multiply, and what comes of it, summed along the axes that cut the inner
dim, is brought to the sharding that is wanted. The backward products use the same block the other way round: dA is
summed along the axes that cut the columns, dB along those that cut the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from xrank.virtual.programs.program_builder import ProgramBuilder, Value
from xrank.virtual.programs.redistribution import extended, redistribute
from xrank.virtual.sharding import FULL, DimSharding, TensorSharding

__all__ = ["Block", "MatMulShardingPolicy", "block_of", "product", "product_backward"]


class MatMulShardingPolicy(Enum):
    """How the work of a product is shared out."""

    Unsharded = "unsharded"
    """Every device has both factors whole."""
    MatchedInnerSharding = "matched inner"
    """Both factors stay cut along the inner dim, equally; the products are addends."""
    UnmatchedInnerSharding = "unmatched inner"
    """Both factors are gathered."""
    OuterSharding = "outer"
    """The first factor is gathered along its inner dim and keeps its rows; the second is gathered."""
    FullSharding = "full"
    """Both factors are gathered along the inner dim; the first keeps its rows, the second its columns."""


@dataclass(frozen=True, slots=True)
class Block:
    """What a device multiplies."""

    rows: tuple[DimSharding, ...]
    """Of all dims of the first factor but the last."""
    inner: DimSharding
    columns: DimSharding

    @property
    def axes(self) -> set[str]:
        """Every axis that cuts."""
        return {axis for dim in (*self.rows, self.inner, self.columns) for axis in dim.axes}


def block_of(
    builder: ProgramBuilder, left: Value, right: Value, wanted: TensorSharding, policy: MatMulShardingPolicy
) -> Block:
    """Return the block that a policy has the devices multiply.

    Besides what the policy says, rows and columns are cut as the result is wanted, where that is free, and the inner
    dim is cut along the axes along which addends are wanted.
    """
    policies = MatMulShardingPolicy
    size_of_rows, size_of_inner, size_of_columns = left.shape[:-1], left.shape[-1], right.shape[-1]
    sums = [axis for axis in wanted.sums if builder.mesh.axis_length(axis) > 1]
    inner = left.sharding[-1] if policy is policies.MatchedInnerSharding else FULL
    # A cut that divides may no longer do so when more axes cut.
    kind = "/=" if inner.kind == "/" else inner.kind
    inner = DimSharding((*inner.axes, *(axis for axis in sums if axis not in inner.axes)), kind)
    taken = {*inner.axes, *_held_for(left, right, wanted, policy)}
    rows = [FULL] * len(size_of_rows)
    if policy not in (policies.Unsharded, policies.UnmatchedInnerSharding):
        rows = [_untaken(dim, taken) for dim in left.sharding.dims[:-1]]
    taken = {*inner.axes, *(axis for dim in rows for axis in dim.axes)}
    columns = FULL
    if policy in (policies.MatchedInnerSharding, policies.FullSharding):
        columns = _untaken(right.sharding[-1], taken)
        taken |= set(columns.axes)
    wanted_dims = builder.canonical((*size_of_rows, size_of_columns), wanted).dims
    rows = [
        extended(builder, size, own, to, taken)
        for size, own, to in zip(size_of_rows, rows, wanted_dims[:-1], strict=True)
    ]
    columns = extended(builder, size_of_columns, columns, wanted_dims[-1], taken)
    block = builder.canonical((size_of_inner,), TensorSharding((inner,)))
    return Block(tuple(rows), block[0], columns)


def product(builder: ProgramBuilder, left: Value, right: Value, block: Block, wanted: TensorSharding) -> Value:
    """Return the product of two values, held as wanted."""
    left = redistribute(builder, left, TensorSharding((*block.rows, block.inner)))
    right = redistribute(builder, right, TensorSharding((block.inner, block.columns)))
    return redistribute(builder, builder.matmul(left, right), wanted)


def product_backward(
    builder: ProgramBuilder, left: Value, right: Value, gradient: Value, block: Block
) -> tuple[Value, Value]:
    """Return the gradients of both factors, held as these are, from the gradient of the product."""
    taken = block.axes
    *rows, inner = (
        extended(builder, size, own, to, taken)
        for size, own, to in zip(left.shape, (*block.rows, block.inner), left.sharding.dims, strict=True)
    )
    of_left = builder.matmul(
        redistribute(builder, gradient, TensorSharding((*rows, block.columns))),
        redistribute(builder, right, TensorSharding((inner, block.columns))),
        "nt",
    )
    taken = block.axes
    inner, columns = (
        extended(builder, size, own, to, taken)
        for size, own, to in zip(right.shape, (block.inner, block.columns), right.sharding.dims, strict=True)
    )
    of_right = builder.matmul(
        redistribute(builder, left, TensorSharding((*block.rows, inner))),
        redistribute(builder, gradient, TensorSharding((*block.rows, columns))),
        "tn",
    )
    return redistribute(builder, of_left, left.sharding), redistribute(builder, of_right, right.sharding)


def _held_for(left: Value, right: Value, wanted: TensorSharding, policy: MatMulShardingPolicy) -> set[str]:
    """Return the axes that cut rows and columns both and stay with the columns.

    One of the two must be gathered: the one that the result is not cut by, else the one of fewer elements.
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


def _untaken(dim: DimSharding, taken: set[str]) -> DimSharding:
    """Return the cut by the first axes, up to one that is taken."""
    count = next((place for place, axis in enumerate(dim.axes) if axis in taken), len(dim.axes))
    return dim.upto(count)
