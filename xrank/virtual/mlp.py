"""A multi-layer perceptron trained by a pipeline: forward, backward and an optimizer's step, over PP x DP x TP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, SupportsFloat

from xrank import dtypes
from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.arrays import Array, Arrays, ArraySpec, Specs, check_one_kind, concatenate, misfit, split_lengths
from xrank.virtual.builder import ProgramBuilder, Value, redistribute
from xrank.virtual.pipeline import Pipeline, PipelinedOperation, StageProgram
from xrank.virtual.programs import Return
from xrank.virtual.sharding import TensorSharding

_NO_FIT = "does not fit the MLP"


class Optimizer(ABC):
    """The update rule of parameters; one instance serves all parameters, because it contains only numbers."""

    counts_steps: ClassVar[bool] = False
    """Whether the optimizer stores the number of steps."""

    @property
    @abstractmethod
    def states(self) -> tuple[str, ...]:
        """Names of the arrays that it keeps for each parameter."""

    @abstractmethod
    def step(
        self, builder: ProgramBuilder, parameter: Value, gradient: Value, states: Sequence[Value], count: Value | None
    ) -> tuple[Value, ...]:
        """Write the step of one parameter; return the new parameter and its new states.

        The gradient is cut as the parameter. The states are in the order of `states`, and empty in the first step.
        `count` includes this step; it is None if `counts_steps` is False.
        """


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent: ``v = momentum * v + g``, then ``w = w - learning_rate * v``.

    Args:
        learning_rate: factor of the step.
        momentum: factor of the old velocity in the next step; 0 means no velocity.
    """

    learning_rate: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self.learning_rate, "momentum", self.momentum)

    @property
    def states(self) -> tuple[str, ...]:
        """The velocity, if the momentum is not 0."""
        return ("velocity",) if self.momentum else ()

    def step(
        self, builder: ProgramBuilder, parameter: Value, gradient: Value, states: Sequence[Value], count: Value | None
    ) -> tuple[Value, ...]:
        """Write the step."""
        velocity, wide = gradient, state_dtype(gradient.dtype)
        if self.momentum:
            velocity = _like(builder, "momentum", (gradient, *states), wide, momentum=self.momentum)
        new = _like(builder, "descend", (parameter, velocity), learning_rate=self.learning_rate)
        return (new, velocity) if self.momentum else (new,)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba): steps along the mean of gradients, over the root of the mean of their squares.

    Args:
        learning_rate: factor of the step.
        betas: factors of the old means in the next step.
        epsilon: added to the root.
    """

    counts_steps: ClassVar[bool] = True

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _check_numbers(self.learning_rate, "beta", *self.betas)

    @property
    def states(self) -> tuple[str, ...]:
        """The two means."""
        return ("mean", "square")

    def step(
        self, builder: ProgramBuilder, parameter: Value, gradient: Value, states: Sequence[Value], count: Value | None
    ) -> tuple[Value, ...]:
        """Write the step."""
        assert count is not None
        first, second = self.betas
        old_mean, old_square = ((states[0],), (states[1],)) if states else ((), ())
        wide = state_dtype(gradient.dtype)
        mean = _like(builder, "moving_mean", (gradient, *old_mean), wide, beta=first)
        square = _like(builder, "moving_square", (gradient, *old_square), wide, beta=second)
        options = {"learning_rate": self.learning_rate, "first": first, "second": second, "epsilon": self.epsilon}
        return _like(builder, "adam", (parameter, mean, square, count), None, **options), mean, square


def state_dtype(dtype: str) -> str:
    """Return the element type of the states of a parameter."""
    return dtype if dtypes.dtype(dtype).nbytes >= 4 else "F32"


def _like(
    builder: ProgramBuilder, kernel: str, inputs: Sequence[Value], dtype: str | None = None, **options: float
) -> Value:
    """Call a kernel whose output has the shape of its first input, and its type unless another one is given."""
    first = inputs[0]
    return builder.compute(kernel, inputs, first.shape, first.sharding, dtype=dtype, options=lambda _: dict(options))


def _check_numbers(rate: float, what: str, *parts: float) -> None:
    if not isinstance(rate, SupportsFloat) or not isfinite(rate):
        raise UsageError(
            "the learning rate of an optimizer must be a number", got=repr(rate), want="a number such as 0.01"
        )
    for part in parts:
        if not 0 <= part < 1:
            raise UsageError(f"the {what} of an optimizer is out of range", got=repr(part), want="0 or more, below 1")


@dataclass(frozen=True, slots=True)
class _Packet:
    """An array that the host sends to the devices of a stage; each device receives its shard."""

    name: str
    argument: str
    """Name of the array that the packet is cut from."""
    rows: range | None
    """Rows of the array in the packet; None means all."""
    sharding: TensorSharding


class _MLPStage(StageProgram):
    """Writes the program of one stage, for arguments of these specs by name."""

    def __init__(self, mlp: MLP, specs: Mapping[str, ArraySpec], stage: int, builder: ProgramBuilder) -> None:
        self._mlp = mlp
        self._specs = specs
        self._stage = stage
        self._builder = builder
        self._packets = {packet.name: packet for packet in mlp._list_packets(stage, specs)}
        self._parameters: dict[str, Value] = {}
        self._gradients: dict[str, Value] = {}
        self._kept: dict[tuple[int, int], tuple[Value, Value]] = {}
        """Inputs and outputs of a layer that its backward needs, by run and layer."""
        self._output_gradients: dict[int, Value] = {}
        self._losses: dict[int, Value] = {}

    def begin(self) -> None:
        for name in self._mlp._list_parameters(self._stage):
            self._parameters[name] = self._receive(name)

    def forward(self, run: int, chunk: int, given: Value | None) -> Value | None:
        """Write the chunk's layers; after the last layer also the loss and its gradient."""
        mlp, builder = self._mlp, self._builder
        x = self._receive(f"inputs.{run}") if given is None else given
        for layer in mlp._layers(self._stage, chunk):
            # A weight is cut by columns, so its product needs all columns of the input: an all-gather over `tp`.
            x = redistribute(builder, x, mlp._cut(rows=True))
            product = builder.matmul(x, self._parameters[f"weight.{layer}"])
            inputs = (product, self._parameters[f"bias.{layer}"])
            y = builder.compute("add_last", inputs, product.shape, product.sharding)
            if mlp.relu_last or layer < mlp.num_layers - 1:
                y = builder.compute("relu", (y,), y.shape, y.sharding)
            self._kept[run, layer] = x, y
            x = y
        if layer < mlp.num_layers - 1:
            return x
        target = self._receive(f"targets.{run}")
        size = {"size": self._specs["targets"].shape[0] * self._specs["targets"].shape[1]}
        # Each device has the loss of its rows and columns.
        sums = TensorSharding((), sums=(mlp.pipeline.dp, mlp.pipeline.tp))
        self._losses[run] = builder.compute("squared_error", (x, target), (), sums, options=lambda _: size)
        self._output_gradients[run] = builder.compute(
            "squared_error_gradient", (x, target), x.shape, x.sharding, options=lambda _: size
        )
        return None

    def backward(self, run: int, chunk: int, given: Value | None) -> Value | None:
        """Write the gradients of the chunk's layers, added to those of earlier runs."""
        mlp, builder = self._mlp, self._builder
        dy = self._output_gradients.pop(run) if given is None else given
        for layer in reversed(mlp._layers(self._stage, chunk)):
            x, y = self._kept.pop((run, layer))
            if mlp.relu_last or layer < mlp.num_layers - 1:
                # relu's output is positive where its input is, so the output suffices and the input need not be kept.
                dy = builder.compute("relu_backward", (y, dy), dy.shape, dy.sharding)
            self._add(f"weight.{layer}", builder.matmul(x, dy, "tn"))
            sums = TensorSharding((dy.sharding[1],), sums=(mlp.pipeline.dp,))
            self._add(f"bias.{layer}", builder.compute("column_sum", (dy,), dy.shape[1:], sums))
            dx = builder.matmul(dy, self._parameters[f"weight.{layer}"], "nt")
            # The layer below needs only its own columns: a reduce-scatter sends half the bytes of an all-reduce.
            dy = redistribute(builder, dx, mlp._cut(rows=True, columns=layer > 0))
        if layer > 0:
            return dy
        self._give(dy, f"input_gradients.{run}")
        return None

    def end(self) -> None:
        """Sum gradients and losses over the devices, write the optimizer step, and return the results."""
        mlp, builder = self._mlp, self._builder
        if self._losses:
            losses = tuple(self._losses[run] for run in range(mlp.pipeline.num_runs))
            stacked = TensorSharding((None,), losses[0].sums)
            losses_of_device = builder.compute("stack", losses, (len(losses),), stacked)
            self._give(redistribute(builder, losses_of_device, TensorSharding.replicated(1)), "losses")
        for name in self._mlp._list_parameters(self._stage):
            gradient = self._gradients[name]
            self._gradients[name] = redistribute(builder, gradient, gradient.sharding.without_sums())
            self._give(self._gradients[name], f"gradient.{name}")
        if mlp.optimizer is None:
            return
        count = None
        if mlp.optimizer.counts_steps:
            like = next(iter(self._gradients.values()))
            before = (self._receive("steps"),) if "steps" in self._packets else ()
            count = builder.compute("count", (like, *before), (), TensorSharding(()), dtype="I64")
            if self._stage == 0:
                self._give(count, "steps")
        for name in self._mlp._list_parameters(self._stage):
            kept = [f"{state}.{name}" for state in mlp.optimizer.states]
            states = [self._receive(state) for state in kept if state in self._packets]
            new = mlp.optimizer.step(builder, self._parameters[name], self._gradients[name], states, count)
            for value, result_name in zip(new, (name, *kept), strict=True):
                self._give(value, result_name)

    def _receive(self, name: str) -> Value:
        packet = self._packets[name]
        spec = self._specs[packet.argument]
        shape = spec.shape if packet.rows is None else (len(packet.rows), *spec.shape[1:])
        return self._builder.receive(name, shape, spec.dtype, packet.sharding)

    def _add(self, name: str, gradient: Value) -> None:
        before = self._gradients.get(name)
        if before is not None:
            gradient = self._builder.compute("add", (before, gradient), gradient.shape, gradient.sharding)
        self._gradients[name] = gradient

    def _give(self, value: Value, name: str) -> None:
        """Return a value to the host; of devices with equal data, only the first returns it."""
        builder = self._builder
        free = [axis for axis in builder.mesh.axis_names if axis not in value.sharding.axes]
        for device, spec in zip(builder.mesh.ranks, builder.specs(value), strict=True):
            at = builder.mesh.coordinate(device)
            if not any(at[axis] for axis in free):
                builder.instructions[device].append(Return(value.register, name, spec))


@dataclass(frozen=True, slots=True)
class MLPResult:
    """The joined results of a step, in arrays of the same kind as the arguments."""

    losses: Array
    """Loss of each run; their sum is the mean squared error of the batch."""
    input_gradients: Array
    """Gradients with respect to the inputs of the whole batch."""
    gradients: tuple[Array, ...]
    """Gradients with respect to the parameters, in their order."""
    parameters: tuple[Array, ...]
    """Parameters after the step; empty without an optimizer."""
    states: tuple[Array, ...]
    """Optimizer states after the step."""

    @property
    def loss(self) -> float:
        """The mean squared error of the batch, before the step."""
        return float(self.losses.sum())

    @property
    def next_parameters(self) -> tuple[Array, ...]:
        """Parameters of the next step: ``run(mlp, activations=..., parameters=result.next_parameters)``."""
        return self.parameters + self.states


class MLP(PipelinedOperation):
    """Dense layers with relu between them, mean squared error, all gradients, and an optimizer step.

    A layer is ``x @ weight + bias``. The parts of the model (`Schedule.num_parts`) divide the layers as evenly as
    `numpy.array_split`; so do the runs divide a batch's rows, `dp` the rows of each run, and `tp` the columns of every
    weight and bias.

    The activations of a step are inputs and targets. Its parameters are the weight and bias of every layer in turn;
    after the first step the optimizer's states follow: those of each parameter, by the names of `Optimizer.states`,
    then the number of steps if the optimizer counts them. `result` joins the devices' outputs.

    Communication of a run over `tp`: the inputs of every layer except the first are all-gathered and their gradients
    reduce-scattered (as many bytes as one all-reduce, in a ring); the gradients of the first layer's inputs are
    all-reduced. Between stages, each device sends its columns. After the last cycle, the gradients summed over the runs
    are all-reduced over `dp`, and the losses over both axes. Of devices with equal results, only the first returns
    them. Flops count the products: 2 for each row and weight in the forward, 4 in the backward.

    Args:
        pipeline: the stages and their schedule.
        learning_rate: shorthand for an `SGD` without momentum.
        optimizer: the optimizer; without it and a learning rate, the parameters do not change.
        num_layers: number of layers.
        relu_last: whether relu also follows the last layer.

    Raises:
        LayoutError: there are fewer layers than parts of the model.
        UsageError: both a learning rate and an optimizer are given.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        learning_rate: float | None = None,
        *,
        optimizer: Optimizer | None = None,
        num_layers: int = 4,
        relu_last: bool = False,
    ) -> None:
        super().__init__(pipeline)
        if learning_rate is not None and optimizer is not None:
            raise UsageError(
                "an MLP has one learning rate", got=f"learning_rate={learning_rate} and {optimizer}", want="either"
            )
        schedule = pipeline.schedule
        if not isinstance(num_layers, int):
            raise UsageError("the number of layers must be an integer", got=repr(num_layers), want="an integer")
        if num_layers < schedule.num_parts:
            raise LayoutError(
                f"{num_layers} layers cannot be divided over {schedule.num_parts} parts of a model",
                got=f"{num_layers} layers",
                want=f"a layer or more for each of {schedule.num_stages} stages x {schedule.num_chunks} chunks",
                next_step="take fewer stages or chunks, or more layers",
            )
        self.optimizer = SGD(learning_rate) if learning_rate is not None else optimizer
        self.num_layers = num_layers
        self.relu_last = relu_last

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the layers' parameters: ``"weight.0"``, ``"bias.0"``, ``"weight.1"``, ..."""
        return tuple(f"{what}.{layer}" for layer in range(self.num_layers) for what in ("weight", "bias"))

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the optimizer's arrays: ``"mean.weight.0"``, ..., ``"steps"``."""
        if self.optimizer is None:
            return ()
        each = tuple(f"{state}.{name}" for state in self.optimizer.states for name in self.parameter_names)
        return (*each, "steps") if self.optimizer.counts_steps else each

    def check(self, activations: Specs, parameters: Specs) -> None:
        """Check that the arguments fit each other and that every device has some work.

        Raises:
            LayoutError: a shape or an element type does not fit; a batch has too few rows, a layer too few columns.
            UsageError: the number of arguments is wrong.
        """
        specs = self._name_arguments(activations, parameters)
        inputs = specs["inputs"]
        if len(inputs.shape) != 2 or not dtypes.dtype(inputs.dtype).is_float:
            raise misfit("inputs", _NO_FIT, inputs, "rows of floating point numbers")
        width, num_shares = inputs.shape[1], self.pipeline.stage_meshes[0].axis_length(self.pipeline.tp)
        for layer in range(self.num_layers):
            weight = specs[f"weight.{layer}"]
            if len(weight.shape) != 2 or weight != ArraySpec((width, weight.shape[1]), inputs.dtype):
                raise misfit(f"weight.{layer}", _NO_FIT, weight, f"({width}, ...) {inputs.dtype}")
            width = weight.shape[1]
            if width < num_shares:
                want = f"{num_shares} columns or more, one for each place of {self.pipeline.tp!r}"
                raise misfit(f"weight.{layer}", _NO_FIT, weight, want)
            self._check_like(specs, f"bias.{layer}", ArraySpec((width,), inputs.dtype))
        self._check_like(specs, "targets", ArraySpec((inputs.shape[0], width), inputs.dtype))
        for name in self.state_names:
            _, _, parameter = name.partition(".")
            like = specs.get(parameter, ArraySpec((), "I64"))
            self._check_like(specs, name, ArraySpec(like.shape, state_dtype(like.dtype)))
        runs, replicas = self.pipeline.num_runs, self.pipeline.stage_meshes[0].axis_length(self.pipeline.dp)
        if inputs.shape[0] < runs * replicas:
            raise LayoutError(
                f"a batch of {inputs.shape[0]} rows has no rows for some of {runs} runs x {replicas} replicas",
                tensor="inputs",
                got=f"{inputs.shape[0]} rows",
                want=f"{runs * replicas} rows or more",
                next_step="take fewer runs, or a larger batch",
            )

    def stage_program(self, stage: int, builder: ProgramBuilder, activations: Specs, parameters: Specs) -> StageProgram:
        """Return the writer of one stage's program."""
        return _MLPStage(self, self._name_arguments(activations, parameters), stage, builder)

    def packets(self, mesh: DeviceMesh, device: int, activations: Arrays, parameters: Arrays) -> dict[str, Array]:
        """Return a device's shards of the arguments of its stage.

        Raises:
            UsageError: some arguments are numpy arrays and some are tensors.
        """
        arrays = self._name_arguments(activations, parameters)
        check_one_kind(arrays)
        # Without element types: packets depend on shapes alone.
        specs = {name: ArraySpec(tuple(array.shape)) for name, array in arrays.items()}
        stage = self.pipeline.stage_of(device)
        devices = self.pipeline.stage_meshes[stage]
        packets: dict[str, Array] = {}
        for packet in self._list_packets(stage, specs):
            array = arrays[packet.argument]
            if packet.rows is not None:
                array = array[packet.rows.start : packet.rows.stop]
            cuts = packet.sharding.slices(devices, devices.coordinate(device), tuple(array.shape))
            packets[packet.name] = array[tuple(slice(low, high) for low, high in cuts)] if cuts else array
        return packets

    def result(self, outputs: Sequence[Any]) -> MLPResult:
        """Join the outputs of a run.

        Args:
            outputs: output of each device, in mesh order (`Run.outputs`).

        Raises:
            UsageError: the outputs are not from this operation.
        """
        if len(outputs) != self.pipeline.mesh.size:
            raise UsageError(
                "an MLP's result needs all devices' outputs",
                got=f"{len(outputs)} outputs",
                want=f"{self.pipeline.mesh.size}, as Run.outputs has them",
            )
        pieces: dict[str, list[Array]] = {}
        found = dict(zip(self.pipeline.mesh.ranks, outputs, strict=True))
        for devices in self.pipeline.stage_meshes:
            for device in devices.ranks:
                output = found[device]
                if not isinstance(output, Mapping):  # a single output comes bare, and only one kind can
                    output = {} if output is None else {"input_gradients.0": output}
                for name, array in output.items():
                    pieces.setdefault(name, []).append(array)

        def whole(name: str) -> Array:
            """Join weights along columns, other pieces along their first dim; return a single piece unchanged."""
            parts = pieces.get(name)
            if parts is None:
                raise UsageError(
                    f"no device returned {name!r}: these are not outputs of this MLP",
                    tensor=name,
                    got=str(list(pieces)[:16]),
                    want="Run.outputs of its own run",
                )
            return parts[0] if len(parts) == 1 else concatenate(parts, 1 if "weight." in name else 0)

        learns = self.optimizer is not None
        return MLPResult(
            losses=whole("losses"),
            input_gradients=concatenate([whole(f"input_gradients.{run}") for run in range(self.pipeline.num_runs)], 0),
            gradients=tuple(whole(f"gradient.{name}") for name in self.parameter_names),
            parameters=tuple(whole(name) for name in self.parameter_names) if learns else (),
            states=tuple(whole(name) for name in self.state_names),
        )

    def _name_arguments(self, activations: Sequence[Any], parameters: Sequence[Any]) -> dict[str, Any]:
        if len(activations) != 2:
            raise UsageError(
                "the activations of an MLP are inputs and targets", got=f"{len(activations)} arrays", want="2 arrays"
            )
        first, later = self.parameter_names, self.parameter_names + self.state_names
        if len(parameters) not in (len(first), len(later)):
            raise UsageError(
                f"the parameters of an MLP of {self.num_layers} layers are the weight and bias of each"
                + (", and after a step the optimizer's states" if self.state_names else ""),
                got=f"{len(parameters)} arrays",
                want=" or ".join(str(len(names)) for names in dict.fromkeys((first, later))) + " arrays",
            )
        names = later if len(parameters) == len(later) else first
        return {"inputs": activations[0], "targets": activations[1], **dict(zip(names, parameters, strict=True))}

    def _layers(self, stage: int, chunk: int) -> range:
        part = chunk * self.pipeline.num_stages + stage
        lengths = split_lengths(self.num_layers, self.pipeline.schedule.num_parts)
        return range(sum(lengths[:part]), sum(lengths[: part + 1]))

    def _list_parameters(self, stage: int) -> Iterator[str]:
        for chunk in range(self.pipeline.schedule.num_chunks):
            for layer in self._layers(stage, chunk):
                yield f"weight.{layer}"
                yield f"bias.{layer}"

    def _cut(self, rows: bool = False, columns: bool = False) -> TensorSharding:
        """Return the sharding of two dims, rows over `dp` and columns over `tp`."""
        return TensorSharding((self.pipeline.dp if rows else None, self.pipeline.tp if columns else None))

    def _list_packets(self, stage: int, specs: Mapping[str, ArraySpec]) -> Iterator[_Packet]:
        """Yield the host's packets for a stage, in the order of their first use."""

        def whole(name: str) -> _Packet:
            if "weight." in name:
                return _Packet(name, name, None, self._cut(columns=True))
            return _Packet(name, name, None, TensorSharding((self.pipeline.tp,) if "bias." in name else ()))

        yield from map(whole, self._list_parameters(stage))
        lengths, last = split_lengths(specs["inputs"].shape[0], self.pipeline.num_runs), self.pipeline.num_stages - 1
        for run in range(self.pipeline.num_runs):
            rows = range(sum(lengths[:run]), sum(lengths[: run + 1]))
            if stage == 0:
                yield _Packet(f"inputs.{run}", "inputs", rows, self._cut(rows=True))
            if stage == last:
                yield _Packet(f"targets.{run}", "targets", rows, self._cut(rows=True, columns=True))
        for state in self.optimizer.states if self.optimizer else ():
            names = (f"{state}.{name}" for name in self._list_parameters(stage))
            yield from (whole(name) for name in names if name in specs)
        if "steps" in specs:
            yield whole("steps")

    def _check_like(self, specs: Mapping[str, ArraySpec], name: str, want: ArraySpec) -> None:
        if specs.get(name, want) != want:
            raise misfit(name, _NO_FIT, specs[name], want)
