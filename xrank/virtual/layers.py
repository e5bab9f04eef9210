"""Layers over a mesh, with any sharding of each tensor: products and feed-forward layers, forward and backward.

A product is (..., k) by (k, n). Three cuts define its block: of the rows, the inner dim and the columns. Both factors
are redistributed to the block, the devices multiply, and the result, a sum along the axes that cut the inner dim, is
redistributed to the wanted sharding. The backward products use the same block with the roles exchanged: dA is a sum
along the axes that cut the columns, dB along those that cut the rows. `cheapest` chooses among operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from xrank.errors import LayoutError, UsageError
from xrank.virtual.arrays import Array, ArraySpec, misfit
from xrank.virtual.builder import (
    ProgramBuilder,
    ShardedOperation,
    Value,
    check_cuts,
    check_sharding,
    extend_cut,
    redistribute,
)
from xrank.virtual.link_model import LinkModel
from xrank.virtual.programs import Operation, Statistics, check_algorithm, compile_operation, count
from xrank.virtual.sharding import FULL, DimSharding, MeshLike, ShardingLike, TensorSharding, as_sharding


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
    builder: ProgramBuilder,
    left: Value,
    right: Value,
    wanted: TensorSharding,
    policy: MatMulShardingPolicy | None = None,
) -> MatrixBlock:
    """Choose the block that the devices multiply; without a policy, an inner dim that both cut equally stays cut.

    Beyond the policy, rows and columns are cut as in the wanted result where that is free, and the inner dim is cut
    along the axes of the wanted addends.
    """
    policies = MatMulShardingPolicy
    if policy is None:
        is_matched = not left.sharding[-1].full and left.sharding[-1] == right.sharding[0]
        policy = policies.MatchedInnerSharding if is_matched else policies.FullSharding
    size_of_rows, size_of_inner, size_of_columns = left.shape[:-1], left.shape[-1], right.shape[-1]
    sums = [axis for axis in wanted.sums if builder.mesh.axis_length(axis) > 1]
    inner = left.sharding[-1] if policy is policies.MatchedInnerSharding else FULL
    # A size that divides evenly by fewer axes may not divide by more.
    kind = "/=" if inner.kind == "/" else inner.kind
    inner = DimSharding((*inner.axes, *(axis for axis in sums if axis not in inner.axes)), kind)
    cuts_columns = policy in (policies.MatchedInnerSharding, policies.FullSharding)
    taken = set(inner.axes)
    if cuts_columns:
        # Axes that cut both rows and columns stay with one of them, and the other is gathered: the one that the result
        # is not cut by, otherwise that of the factor with fewer elements.
        of_rows = {axis for dim in left.sharding.dims[:-1] for axis in dim.axes}
        wanted_rows = {axis for dim in wanted.dims[:-1] for axis in dim.axes}
        keeps_columns = prod(left.shape) < prod(right.shape)
        taken |= {
            axis
            for axis in right.sharding[-1].axes
            if axis in of_rows and (axis in wanted[-1].axes or (axis not in wanted_rows and keeps_columns))
        }
    rows = [FULL] * len(size_of_rows)
    if policy not in (policies.Unsharded, policies.UnmatchedInnerSharding):
        rows = [_cut_untaken(dim, taken) for dim in left.sharding.dims[:-1]]
    # Without the columns' axes, which were taken for the choice of rows only: columns are cut by them next.
    taken = {*inner.axes, *(axis for dim in rows for axis in dim.axes)}
    columns = FULL
    if cuts_columns:
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
        LayoutError: the numbers of dims do not fit, or A or B would be a partial sum.
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

        It depends only on the form of the shardings. `cheapest` tries all `policies`.
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

    If C is sharded or a partial sum, this costs less: rows and columns are split before the product where that is free,
    partial sums are reduce-scattered, and dims that C shards are not gathered at the end.

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
                f"A {self.sharding.a} and B {self.sharding.b} do not fit the policy {self.policy.name}",
                got=self.policy.name,
                want="one of " + ", ".join(policy.name for policy in self.sharding.policies),
                next_step="omit the policy to use the default policy of the shardings",
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


class _Backward(ShardedOperation):
    """Gradients of all arguments, each cut as its tensor, from those of the outputs, which are cut as the outputs."""

    forward: ShardedOperation

    @property
    def activation_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the forward's activations and of its outputs' gradients."""
        outputs = self.forward.output_shardings.items()
        return {**self.forward.activation_shardings, **{f"d{name}": one.without_sums() for name, one in outputs}}

    @property
    def parameter_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the forward's parameters."""
        return self.forward.parameter_shardings

    @property
    def output_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the gradients."""
        named = {**self.forward.activation_shardings, **self.parameter_shardings}
        return {f"d{name}": sharding for name, sharding in named.items()}


@dataclass(frozen=True, slots=True)
class MatMulBackward(_Backward):
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
                f"{name} cannot be a partial sum along {sharding.sums[0]!r}",
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
            got=f"{left_name} {left.spec}, {right_name} {right.spec}",
            want=f"{right_name} of {left.shape[-1]} rows in {left.dtype}",
        )
    return left, right


def check_gradient(name: str, value: Value, shape: tuple[int, ...], dtype: str) -> None:
    """Check that a gradient has the tensor's shape and element type."""
    if value.spec != (want := ArraySpec(shape, dtype)):
        raise misfit(name, "is not the gradient of its tensor", value.spec, want)


class FeedForwardShardingPolicy(Enum):
    """How the devices share the work of a feed-forward layer."""

    Unsharded = "unsharded"
    """Every device has all tensors completely."""
    GSPMD = "gspmd"
    """x [b/X, s, m/Y], w1 [m/X, h/Y], b1 [h/Y], hidden [b/X, s, h/Y], w2 [h/Y, m/X], b2 [m/Y], out [b/X, s, m/Y]."""
    Mixed = "mixed"
    """Any other shardings, such as Megatron's (w1 cut by columns, w2 by rows)."""


@dataclass(frozen=True, slots=True, init=False)
class FeedForwardSharding:
    """The shardings of the seven tensors of a feed-forward layer.

    Args:
        tensors: shardings of x (..., m), w1 (m, h), b1 (h), hidden (..., h), w2 (h, m), b2 (m) and out (..., m), each a
            `TensorSharding`, a `TensorLayout` or a layout's text. Hidden is the input and output of relu.

    Raises:
        LayoutError: the numbers of dims do not fit, or a tensor would be a partial sum.
    """

    x: TensorSharding
    w1: TensorSharding
    b1: TensorSharding
    hidden: TensorSharding
    w2: TensorSharding
    b2: TensorSharding
    out: TensorSharding

    def __init__(self, tensors: Sequence[ShardingLike]) -> None:
        names = ("x", "w1", "b1", "hidden", "w2", "b2", "out")
        if len(tensors) != len(names):
            raise UsageError(
                f"a feed-forward layer has the shardings of {', '.join(names)}",
                got=f"{len(tensors)} shardings",
                want=f"{len(names)}",
            )
        shardings = dict(zip(names, map(as_sharding, tensors), strict=True))
        num_dims = len(shardings["x"].dims)
        for name, want in zip(names, (max(num_dims, 2), 2, 1, num_dims, 2, 1, num_dims), strict=True):
            if len(shardings[name].dims) != want:
                raise LayoutError(
                    f"the sharding of {name} does not match a feed-forward layer of x {shardings['x']}",
                    tensor=name,
                    got=str(shardings[name]),
                    want=f"{want} dims",
                )
        # Adding a bias to each addend, or applying relu to it, would not give the sum's result.
        check_whole(**shardings)
        for name, sharding in shardings.items():
            object.__setattr__(self, name, sharding)

    @classmethod
    def unsharded(cls, num_dims: int = 3) -> FeedForwardSharding:
        """Return the sharding with all tensors complete on every device."""
        return cls([TensorSharding.replicated(count) for count in (num_dims, 2, 1, num_dims, 2, 1, num_dims)])

    @classmethod
    def gspmd(cls, x: str = "x", y: str = "y") -> FeedForwardSharding:
        """Return GSPMD's sharding over two axes."""
        rows = TensorSharding((x, None, y))
        w1, b, w2 = (TensorSharding(dims) for dims in ((x, y), (y,), (y, x)))
        return cls((rows, w1, b, rows, w2, b, rows))

    @classmethod
    def megatron(cls, axis: str, num_dims: int = 3) -> FeedForwardSharding:
        """Return Megatron-LM's sharding over one axis: w1 by columns, w2 by rows, x and out whole."""
        whole = TensorSharding.replicated(num_dims)
        hidden = TensorSharding((*(None,) * (num_dims - 1), axis))
        w1, b1, w2, b2 = (TensorSharding(dims) for dims in ((None, axis), (axis,), (axis, None), (None,)))
        return cls((whole, w1, b1, hidden, w2, b2, whole))

    @property
    def policy(self) -> FeedForwardShardingPolicy:
        """The policy of these shardings."""
        policies = FeedForwardShardingPolicy
        tensors = (self.x, self.w1, self.b1, self.hidden, self.w2, self.b2, self.out)
        if all(sharding.full for sharding in tensors):
            return policies.Unsharded
        x, y = self.w1[0].axis, self.w1[1].axis
        if len(self.x.dims) == 3 and x is not None and y is not None:
            pattern = FeedForwardSharding.gspmd(x, y)
            axes = [[dim.axes for dim in sharding.dims] for sharding in tensors]
            wanted = (pattern.x, pattern.w1, pattern.b1, pattern.hidden, pattern.w2, pattern.b2, pattern.out)
            if axes == [[dim.axes for dim in sharding.dims] for sharding in wanted]:
                return policies.GSPMD
        return policies.Mixed


@dataclass(frozen=True, slots=True)
class FeedForward(ShardedOperation):
    """out = relu(x w1 + b1) w2 + b2: ``activations=(x,), parameters=(w1, b1, w2, b2)`` returns the shards of out.

    With P devices, a mesh of X by Y, x (b, s, m), w1 (m, h), and the push algorithm:

    =========  ============  ==================  =======================================
    policy     flops in all  messages in all     elements sent in all
    =========  ============  ==================  =======================================
    Unsharded  P 4bsmh       0                   0
    GSPMD      4bsmh         P 2(X-1 + Y-1)      P[2(Y-1)bsm/XY + 2(X-1)mh/XY]
    =========  ============  ==================  =======================================

    Each of the two products uses `MatMulShardingPolicy.MatchedInnerSharding` if both factors' inner dims are cut
    equally, and `FullSharding` otherwise. Megatron's shardings over g devices thus send P(g-1)bsm elements in one
    all-reduce. Flops count the products.
    """

    sharding: FeedForwardSharding

    def __post_init__(self) -> None:
        check_sharding(self, self.sharding, FeedForwardSharding)

    @property
    def activation_shardings(self) -> Mapping[str, TensorSharding]:
        """Sharding of x."""
        return {"x": self.sharding.x}

    @property
    def parameter_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the weights and biases."""
        sharding = self.sharding
        return {"w1": sharding.w1, "b1": sharding.b1, "w2": sharding.w2, "b2": sharding.b2}

    @property
    def output_shardings(self) -> Mapping[str, TensorSharding]:
        """Sharding of the layer's output."""
        return {"out": self.sharding.out}

    def build(self, builder: ProgramBuilder, inputs: Mapping[str, Value]) -> Mapping[str, Value]:
        """Write the layer."""
        _, hidden, _ = _write_hidden(builder, inputs, self.sharding)
        w2, wanted = inputs["w2"], self.sharding.out
        out = product(builder, hidden, w2, choose_block(builder, hidden, w2, wanted), wanted)
        return {"out": _add_bias(builder, out, inputs["b2"])}

    def backward(self) -> FeedForwardBackward:
        """Return the operation that computes the gradients of all five arguments."""
        return FeedForwardBackward(self)


@dataclass(frozen=True, slots=True)
class FeedForwardBackward(_Backward):
    """The gradients: ``activations=(x, dout), parameters=(w1, b1, w2, b2)``, outputs dx, dw1, db1, dw2 and db2.

    Each gradient is cut as its tensor, and dout as out. The input of relu is recomputed from x. As in torch, relu's
    gradient at 0 is 0. Costs, with the symbols of `FeedForward`:

    =========  ============  =============================  =======================================================
    policy     flops in all  messages in all                elements sent in all
    =========  ============  =============================  =======================================================
    Unsharded  P 10bsmh      0                              0
    GSPMD      10bsmh        P[3(Y-1) + 6(X-1)]             P[3(Y-1)bsm/XY + 4(X-1)mh/XY + (X-1)(m+h)/Y]
    =========  ============  =============================  =======================================================

    GSPMD gathers x, dout, w1 and w2, reduce-scatters dx, dw1 and dw2, and all-reduces both biases' gradients.
    """

    forward: FeedForward

    def build(self, builder: ProgramBuilder, inputs: Mapping[str, Value]) -> Mapping[str, Value]:
        """Recompute the layer up to relu, then write all gradients."""
        sharding = self.forward.sharding
        x, dout, w2 = inputs["x"], inputs["dout"], inputs["w2"]
        before, after, block = _write_hidden(builder, inputs, sharding)
        check_gradient("dout", dout, x.shape, x.dtype)
        dafter, dw2 = product_backward(builder, after, w2, dout, choose_block(builder, after, w2, sharding.out))
        dbefore = builder.compute("relu_backward", (before, dafter), dafter.shape, dafter.sharding)
        dx, dw1 = product_backward(builder, x, inputs["w1"], dbefore, block)
        db1, db2 = _column_sum(builder, dbefore), _column_sum(builder, dout)
        return {"dx": dx, "dw1": dw1, "db1": db1, "dw2": dw2, "db2": db2}


def _write_hidden(
    builder: ProgramBuilder, inputs: Mapping[str, Value], sharding: FeedForwardSharding
) -> tuple[Value, Value, MatrixBlock]:
    """Write the middle of the layer; return it before relu and after it, and the block of the first product."""
    x, w1 = check_factors("x", inputs["x"], "w1", inputs["w1"])
    sizes = (w1.shape[1], w1.shape[0])
    for name, shape in (("w2", sizes), ("b1", sizes[:1]), ("b2", sizes[1:])):
        if inputs[name].shape != shape or inputs[name].dtype != x.dtype:
            problem = f"does not fit x {x.shape} and w1 {w1.shape}"
            raise misfit(name, problem, inputs[name].spec, ArraySpec(shape, x.dtype))
    check_cuts(builder, "hidden", (*x.shape[:-1], w1.shape[1]), sharding.hidden)
    check_cuts(builder, "out", x.shape, sharding.out)
    block = choose_block(builder, x, w1, sharding.hidden)
    before = _add_bias(builder, product(builder, x, w1, block, sharding.hidden), inputs["b1"])
    after = builder.compute("relu", (before,), before.shape, before.sharding)
    return before, after, block


def _add_bias(builder: ProgramBuilder, value: Value, bias: Value) -> Value:
    bias = redistribute(builder, bias, TensorSharding((value.sharding[-1],)))
    return builder.compute("add_last", (value, bias), value.shape, value.sharding)


def _column_sum(builder: ProgramBuilder, value: Value) -> Value:
    # Each device sums its own rows, so along the axes that cut rows the results are addends.
    rows = tuple(axis for dim in value.sharding.dims[:-1] for axis in dim.axes)
    sharding = TensorSharding((value.sharding[-1],), rows)
    return builder.compute("column_sum", (value,), value.shape[-1:], sharding)


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen operation, with the costs of all candidates."""

    operation: Operation
    statistics: Statistics
    """Planned statistics of the operation."""
    costs: tuple[tuple[Operation, int, int], ...]
    """(operation, bytes sent, flops) of each possible operation, in the order of the candidates."""
    refused: tuple[tuple[Operation, LayoutError], ...] = ()
    """Operations that do not fit this mesh and these sizes, with the reason."""
    seconds: tuple[float, ...] = ()
    """Seconds of each operation of `costs` by the link model; empty without one."""


def cheapest(
    candidates: MatMulSharding | Sequence[Operation | MatMulSharding | FeedForwardSharding],
    mesh: MeshLike,
    *,
    activations: Sequence[Array | ArraySpec | Sequence[int]] = (),
    parameters: Sequence[Array | ArraySpec | Sequence[int]] = (),
    algorithm: str = "push",
    links: LinkModel | None = None,
) -> Choice:
    """Choose the candidate that sends the fewest bytes between devices, or takes the fewest seconds by a link model.

    Ties go to fewer bytes, then to fewer flops, then to the first.

    Args:
        candidates: operations; a `MatMulSharding` means its product by each policy, a `FeedForwardSharding` its layer
        mesh: as for `VirtualCluster`.
        activations: as for `plan`; the same for all candidates.
        parameters: as for `plan`; the same for all candidates.
        algorithm: ``"push"`` or ``"ring"``.
        links: speed of devices and links; bytes decide when None.

    Raises:
        LayoutError: no candidate fits this mesh and these sizes; the first candidate's error.
        UsageError: the candidates are empty.

    >>> choice = cheapest(MatMulSharding(("[m, k/x]", "[k/x, n]")), 4, activations=[(64, 8)], parameters=[(8, 64)])
    >>> choice.operation.policy.name, choice.statistics.nbytes
    ('UnmatchedInnerSharding', 12288)
    """
    check_algorithm(algorithm)
    given = [candidates] if isinstance(candidates, MatMulSharding) else candidates
    planned: list[tuple[Operation, Statistics, float]] = []
    refused: list[tuple[Operation, LayoutError]] = []
    operations: list[Operation] = []
    for one in given:
        if isinstance(one, MatMulSharding):
            operations += (MatMul(one, policy) for policy in one.policies)
        else:
            operations.append(FeedForward(one) if isinstance(one, FeedForwardSharding) else one)
    for operation in operations:
        try:
            programs = compile_operation(operation, mesh, activations, parameters)
        except LayoutError as error:
            refused.append((operation, error))
        else:
            seconds = 0.0 if links is None else links.seconds(programs, algorithm)
            planned.append((operation, count(programs, algorithm), seconds))
    if not planned:
        if refused:
            raise refused[0][1]
        raise UsageError("there are no shardings to choose from", got="no candidate", want="one or more")
    costs = tuple((operation, statistics.nbytes, statistics.flops) for operation, statistics, _ in planned)
    operation, statistics, _ = min(planned, key=lambda each: (each[2], each[1].nbytes, each[1].flops))
    times = () if links is None else tuple(seconds for _, _, seconds in planned)
    return Choice(operation, statistics, costs, tuple(refused), times)
