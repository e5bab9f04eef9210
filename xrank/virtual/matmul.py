"""Products of sharded tensors: the choice of each device's block, forward and backward.

A product is (..., k) by (k, n). Three cuts define its block: of the rows, the inner dim and the columns. Both factors
are redistributed to the block, the devices multiply, and the result, a sum along the axes that cut the inner dim, is
redistributed to the wanted sharding. The backward products use the same block with the roles exchanged: dA is a sum
along the axes that cut the columns, dB along those that cut the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from xrank.errors import LayoutError, UsageError
from xrank.virtual.builder import ProgramBuilder, Value, extend_cut, redistribute
from xrank.virtual.sharded_operation import ShardedOperation, check_cuts, check_sharding
from xrank.virtual.sharding import FULL, DimSharding, ShardingLike, TensorSharding, as_sharding


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


@dataclass(frozen=True, slots=True, init=False)
class MatMulSharding:
    """The shardings of a product's tensors: A (..., k), B (k, n) and C (..., n).

    Args:
        tensors: shardings of A, B and C, or of A and B with C complete on every device; each a `TensorSharding`, a
            `TensorLayout` or a layout's text: ``("[m/x, k/y]", "[k/x, n/y]", "[m, n]")``.

    Raises:
        LayoutError: the numbers of dims do not fit, or A or B would be a sum of addends.
    """

    a: TensorSharding
    b: TensorSharding
    c: TensorSharding

    def __init__(self, tensors: Sequence[ShardingLike]) -> None:
        if len(tensors) not in (2, 3):
            raise UsageError(
                "a product has the shardings of A, B and C",
                got=f"{len(tensors)} shardings",
                want="3, or 2 with C whole",
            )
        a, b, *rest = map(as_sharding, tensors)
        c = rest[0] if rest else TensorSharding.replicated(len(a.dims))
        if len(a.dims) < 2 or len(b.dims) != 2 or len(c.dims) != len(a.dims):
            raise LayoutError(
                "the shardings are not of a product (..., k) by (k, n)",
                got=f"A {a}, B {b}, C {c}",
                want="A of 2 dims or more, B of 2, C of as many as A",
            )
        check_whole(A=a, B=b)
        for name, value in (("a", a), ("b", b), ("c", c)):
            object.__setattr__(self, name, value)

    @property
    def policy(self) -> MatMulShardingPolicy:
        """The default policy for these shardings of A and B; the sharding of C does not affect it.

        It depends on the form of the shardings alone. `xrank.virtual.choice.cheapest` tries all `policies`.
        """
        policies = MatMulShardingPolicy
        a, b = self.a, self.b
        if a.full and b.full:
            return policies.Unsharded
        if a.sharded_at(len(a.dims) - 1) and b.sharded_at(0):
            is_matched = a[-1].axes == b[0].axes
            return policies.MatchedInnerSharding if is_matched else policies.UnmatchedInnerSharding
        return policies.OuterSharding if b[1].full else policies.FullSharding

    @property
    def policies(self) -> tuple[MatMulShardingPolicy, ...]:
        """All possible policies for these shardings, the default first."""
        policies = MatMulShardingPolicy
        is_matched = not self.a[-1].full and self.a[-1].axes == self.b[0].axes
        # Any shardings can be gathered, but a matched inner dim needs equal cuts.
        possible = [policies.UnmatchedInnerSharding, policies.OuterSharding, policies.FullSharding]
        if is_matched:
            possible.insert(0, policies.MatchedInnerSharding)
        return tuple(dict.fromkeys((self.policy, *possible)))


@dataclass(frozen=True, slots=True)
class MatMul(ShardedOperation):
    """C = A B: ``run(MatMul(sharding), activations=(a,), parameters=(b,))`` returns every device's shard of C.

    With P devices, a mesh of X by Y, A (m, k), B (k, n), C whole on every device, and the push algorithm:

    ==========================  ==============  ====================  ==============================================
    policy                      flops in all    messages in all       elements sent in all
    ==========================  ==============  ====================  ==============================================
    Unsharded                   P 2mkn          0                     0
    MatchedInner, g shards      P 2mkn/g        P(g-1)                P(g-1)mn
    UnmatchedInner (A Y, B X)   P 2mkn          P(Y-1 + X-1)          P[(Y-1)mk/Y + (X-1)kn/X]
    Outer (A X,Y; B X,-)        P 2mkn/X        P(Y-1 + 2(X-1))       P[(Y-1)mk/XY + (X-1)kn/X + (X-1)mn/X]
    Full (A X,Y; B X,Y)         2mkn            P(Y-1 + X-1 + XY-1)   P[(Y-1)mk/XY + (X-1)kn/XY + (XY-1)mn/XY]
    ==========================  ==============  ====================  ==============================================

    A C that is cut, or a sum, costs less: rows and columns are cut before the product where that is free, addends are
    reduce-scattered, and dims that C cuts are not gathered at the end.

    Args:
        sharding: the shardings of A, B and C.
        policy: one of ``sharding.policies``; None means the default policy.

    Raises:
        UsageError: the shardings cannot be multiplied by this policy.
    """

    sharding: MatMulSharding
    policy: MatMulShardingPolicy | None = None

    def __post_init__(self) -> None:
        check_sharding(self, self.sharding, MatMulSharding)
        if self.policy is not None and self.policy not in self.sharding.policies:
            raise UsageError(
                f"A {self.sharding.a} and B {self.sharding.b} cannot be multiplied by {self.policy.name}",
                got=self.policy.name,
                want="one of " + ", ".join(policy.name for policy in self.sharding.policies),
                next_step="leave the policy out to use the default policy of the shardings",
            )

    @property
    def activation_shardings(self) -> Mapping[str, TensorSharding]:
        """Sharding of A."""
        return {"a": self.sharding.a}

    @property
    def parameter_shardings(self) -> Mapping[str, TensorSharding]:
        """Sharding of B."""
        return {"b": self.sharding.b}

    @property
    def output_shardings(self) -> Mapping[str, TensorSharding]:
        """Sharding of C."""
        return {"c": self.sharding.c}

    def build(self, builder: ProgramBuilder, inputs: Mapping[str, Value]) -> Mapping[str, Value]:
        """Write the product."""
        a, b = check_factors("a", inputs["a"], "b", inputs["b"])
        wanted = self.sharding.c
        check_cuts(builder, "c", (*a.shape[:-1], b.shape[1]), wanted)
        block = choose_block(builder, a, b, wanted, self.policy or self.sharding.policy)
        return {"c": product(builder, a, b, block, wanted)}

    def backward(self) -> MatMulBackward:
        """Return the operation that computes dA and dB."""
        return MatMulBackward(self)


@dataclass(frozen=True, slots=True)
class MatMulBackward(ShardedOperation):
    """dA = dC Bᵀ cut as A and dB = Aᵀ dC cut as B: ``activations=(a, dc), parameters=(b,)``, outputs da and db.

    dC is cut as C; if C is a sum of addends, every device has dC. Each device uses its block of the forward product:
    tensors gathered there are gathered here, and their gradients reduce-scattered. Costs, as for `MatMul`:

    ==========================  ====================  ===================  ===========================================
    policy                      flops in all          messages in all      elements sent in all
    ==========================  ====================  ===================  ===========================================
    Unsharded                   P 4mkn                0                    0
    MatchedInner, g shards      P 4mkn/g              0                    0
    UnmatchedInner (A Y, B X)   P 2mkn(1/X + 1/Y)     P(Y-1 + X-1)         P[(Y-1)mk/Y + (X-1)kn/X]
    Outer (A X,Y; B X,-)        2mkn + P 2mkn/X       P(Y-1 + 2(X-1))      P[(Y-1)mk/XY + 2(X-1)kn/X]
    Full (A X,Y; B X,Y)         4mkn                  P 2(Y-1 + X-1)       P 2[(Y-1)mk/XY + (X-1)kn/XY]
    ==========================  ====================  ===================  ===========================================
    """

    forward: MatMul

    @property
    def activation_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of A and of C's gradient."""
        return {"a": self.forward.sharding.a, "dc": self.forward.sharding.c.without_sums()}

    @property
    def parameter_shardings(self) -> Mapping[str, TensorSharding]:
        """Sharding of B."""
        return {"b": self.forward.sharding.b}

    @property
    def output_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the gradients: as A and B."""
        return {"da": self.forward.sharding.a, "db": self.forward.sharding.b}

    def build(self, builder: ProgramBuilder, inputs: Mapping[str, Value]) -> Mapping[str, Value]:
        """Write both products."""
        a, b = check_factors("a", inputs["a"], "b", inputs["b"])
        check_gradient("dc", inputs["dc"], (*a.shape[:-1], b.shape[1]), a.dtype)
        sharding = self.forward.sharding
        block = choose_block(builder, a, b, sharding.c, self.forward.policy or sharding.policy)
        da, db = product_backward(builder, a, b, inputs["dc"], block)
        return {"da": da, "db": db}


def check_whole(**shardings: TensorSharding) -> None:
    """Check that none of these tensors is a sum of addends."""
    for name, sharding in shardings.items():
        if sharding.sums:
            raise LayoutError(
                f"{name} cannot be a sum of addends along {sharding.sums[0]!r}",
                tensor=name,
                got=str(sharding),
                want=str(sharding.without_sums()),
            )


def check_factors(left_name: str, left: Value, right_name: str, right: Value) -> tuple[Value, Value]:
    """Check that the sizes and element types of two factors fit each other, and return both."""
    if left.shape[-1] != right.shape[0] or left.dtype != right.dtype:
        raise LayoutError(
            f"{left_name} cannot be multiplied by {right_name}",
            tensor=right_name,
            got=f"{left_name} {left.shape} {left.dtype}, {right_name} {right.shape} {right.dtype}",
            want=f"{right_name} of {left.shape[-1]} rows in {left.dtype}",
        )
    return left, right


def check_gradient(name: str, value: Value, shape: tuple[int, ...], dtype: str) -> None:
    """Check that a gradient has the tensor's shape and element type."""
    if value.shape != shape or value.dtype != dtype:
        raise LayoutError(
            f"{name} is not the gradient of its tensor",
            tensor=name,
            got=f"{value.shape} {value.dtype}",
            want=f"{shape} {dtype}",
        )
