"""Feed-forward layers over a mesh: relu(x w1 + b1) w2 + b2 with any sharding of each tensor, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from xrank.errors import LayoutError, UsageError
from xrank.virtual.builder import ProgramBuilder, Value, redistribute
from xrank.virtual.matmul import (
    MatMulShardingPolicy,
    MatrixBlock,
    check_factors,
    check_gradient,
    check_whole,
    choose_block,
    product,
    product_backward,
)
from xrank.virtual.sharded_operation import ShardedOperation, check_cuts, check_sharding
from xrank.virtual.sharding import ShardingLike, TensorSharding, as_sharding


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
        LayoutError: the numbers of dims do not fit, or a tensor would be a sum of addends.
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
        return cls(
            (
                rows,
                TensorSharding((x, y)),
                TensorSharding((y,)),
                rows,
                TensorSharding((y, x)),
                TensorSharding((y,)),
                rows,
            )
        )

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
        hidden = _write_hidden(builder, inputs, self.sharding)
        w2 = inputs["w2"]
        out = product(
            builder, hidden.after, w2, _choose_block(builder, hidden.after, w2, self.sharding.out), self.sharding.out
        )
        return {"out": _add_bias(builder, out, inputs["b2"])}

    def backward(self) -> FeedForwardBackward:
        """Return the operation that computes the gradients of all five arguments."""
        return FeedForwardBackward(self)


@dataclass(frozen=True, slots=True)
class FeedForwardBackward(ShardedOperation):
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

    @property
    def activation_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of x and of the output's gradient."""
        return {"x": self.forward.sharding.x, "dout": self.forward.sharding.out}

    @property
    def parameter_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the weights and biases."""
        return self.forward.parameter_shardings

    @property
    def output_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the gradients: each as its tensor."""
        return {
            f"d{name}": sharding
            for name, sharding in (*self.forward.activation_shardings.items(), *self.parameter_shardings.items())
        }

    def build(self, builder: ProgramBuilder, inputs: Mapping[str, Value]) -> Mapping[str, Value]:
        """Recompute the layer up to relu, then write all gradients."""
        sharding = self.forward.sharding
        x, dout, w2 = inputs["x"], inputs["dout"], inputs["w2"]
        hidden = _write_hidden(builder, inputs, sharding)
        check_gradient("dout", dout, x.shape, x.dtype)
        block = _choose_block(builder, hidden.after, w2, sharding.out)
        dhidden, dw2 = product_backward(builder, hidden.after, w2, dout, block)
        before = builder.compute("relu_backward", (hidden.before, dhidden), dhidden.shape, dhidden.sharding)
        dx, dw1 = product_backward(builder, x, inputs["w1"], before, hidden.block)
        db1, db2 = _column_sum(builder, before), _column_sum(builder, dout)
        return {"dx": dx, "dw1": dw1, "db1": db1, "dw2": dw2, "db2": db2}


@dataclass(frozen=True, slots=True)
class _Hidden:
    """The middle of the layer: before relu, after it, and the block of the first product."""

    before: Value
    after: Value
    block: MatrixBlock = field(repr=False)


def _write_hidden(builder: ProgramBuilder, inputs: Mapping[str, Value], sharding: FeedForwardSharding) -> _Hidden:
    x, w1 = check_factors("x", inputs["x"], "w1", inputs["w1"])
    sizes = (w1.shape[1], w1.shape[0])
    for name, shape in (("w2", sizes), ("b1", sizes[:1]), ("b2", sizes[1:])):
        if inputs[name].shape != shape or inputs[name].dtype != x.dtype:
            raise LayoutError(
                f"{name} does not fit x {x.shape} and w1 {w1.shape}",
                tensor=name,
                got=f"{inputs[name].shape} {inputs[name].dtype}",
                want=f"{shape} {x.dtype}",
            )
    check_cuts(builder, "hidden", (*x.shape[:-1], w1.shape[1]), sharding.hidden)
    check_cuts(builder, "out", x.shape, sharding.out)
    block = _choose_block(builder, x, w1, sharding.hidden)
    before = _add_bias(builder, product(builder, x, w1, block, sharding.hidden), inputs["b1"])
    after = builder.compute("relu", (before,), before.shape, before.sharding)
    return _Hidden(before, after, block)


def _choose_block(builder: ProgramBuilder, left: Value, right: Value, wanted: TensorSharding) -> MatrixBlock:
    """Choose the block of a product: the inner dim stays cut if both factors cut it equally."""
    is_matched = not left.sharding[-1].full and left.sharding[-1] == right.sharding[0]
    policies = MatMulShardingPolicy
    policy = policies.MatchedInnerSharding if is_matched else policies.FullSharding
    return choose_block(builder, left, right, wanted, policy)


def _add_bias(builder: ProgramBuilder, value: Value, bias: Value) -> Value:
    bias = redistribute(builder, bias, TensorSharding((value.sharding[-1],)))
    return builder.compute("add_last", (value, bias), value.shape, value.sharding)


def _column_sum(builder: ProgramBuilder, value: Value) -> Value:
    # Each device sums its own rows, so along the axes that cut rows the results are addends.
    rows = tuple(axis for dim in value.sharding.dims[:-1] for axis in dim.axes)
    sharding = TensorSharding((value.sharding[-1],), rows)
    return builder.compute("column_sum", (value,), value.shape[-1:], sharding)
