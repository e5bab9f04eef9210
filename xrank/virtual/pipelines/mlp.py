"""A multi-layer perceptron trained by a pipeline: forward, backward and an optimizer step, over PP x DP x TP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrank import dtypes
from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.arrays import check_one_kind, concatenate
from xrank.virtual.channels.channel import Array
from xrank.virtual.pipelines.mlp_stage import MLPStage, Setting
from xrank.virtual.pipelines.optimizers import SGD, Optimizer, state_dtype
from xrank.virtual.pipelines.pipeline import Pipeline
from xrank.virtual.pipelines.pipelined_operation import PipelinedOperation, StageProgram
from xrank.virtual.programs.program_builder import ProgramBuilder


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

    def check(self, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]) -> None:
        """Check that the arguments fit each other and that every device has some work.

        Raises:
            LayoutError: a shape or an element type does not fit; a batch has too few rows, a layer too few columns.
            UsageError: the number of arguments is wrong.
        """
        specs = self._name_arguments(activations, parameters)
        inputs = specs["inputs"]
        if len(inputs.shape) != 2 or not dtypes.dtype(inputs.dtype).is_float:
            raise _misfit("inputs", inputs, "rows of floating point numbers")
        width, num_shares = inputs.shape[1], self.pipeline.stage_meshes[0].axis_length(self.pipeline.tp)
        for layer in range(self.num_layers):
            weight = specs[f"weight.{layer}"]
            if len(weight.shape) != 2 or weight != ArraySpec((width, weight.shape[1]), inputs.dtype):
                raise _misfit(f"weight.{layer}", weight, f"({width}, ...) {inputs.dtype}")
            width = weight.shape[1]
            if width < num_shares:
                raise _misfit(
                    f"weight.{layer}",
                    weight,
                    f"{num_shares} columns or more, one for each place of {self.pipeline.tp!r}",
                )
            self._check_like(specs, f"bias.{layer}", ArraySpec((width,), inputs.dtype))
        self._check_like(specs, "targets", ArraySpec((inputs.shape[0], width), inputs.dtype))
        for name in self.state_names:
            _, _, parameter = name.partition(".")
            like = specs.get(parameter, ArraySpec((), "I64"))
            self._check_like(specs, name, ArraySpec(like.shape, state_dtype(like.dtype)))
        num_replicas = self.pipeline.stage_meshes[0].axis_length(self.pipeline.dp)
        if inputs.shape[0] < self.pipeline.num_runs * num_replicas:
            raise LayoutError(
                f"a batch of {inputs.shape[0]} rows has no rows for some of {self.pipeline.num_runs} runs"
                f" x {num_replicas} replicas",
                tensor="inputs",
                got=f"{inputs.shape[0]} rows",
                want=f"{self.pipeline.num_runs * num_replicas} rows or more",
                next_step="take fewer runs, or a larger batch",
            )

    def stage_program(
        self, stage: int, builder: ProgramBuilder, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
    ) -> StageProgram:
        """Return the writer of one stage's program."""
        return MLPStage(self._make_setting(self._name_arguments(activations, parameters)), stage, builder)

    def packets(
        self, mesh: DeviceMesh, device: int, activations: Sequence[Array], parameters: Sequence[Array]
    ) -> dict[str, Array]:
        """Return a device's shards of the arguments of its stage.

        Raises:
            UsageError: some arguments are numpy arrays and some are tensors.
        """
        arrays = self._name_arguments(activations, parameters)
        check_one_kind(arrays)
        # Without element types: packets depend on shapes alone.
        setting = self._make_setting({name: ArraySpec(tuple(array.shape)) for name, array in arrays.items()})
        stage = self.pipeline.stage_of(device)
        devices = self.pipeline.stage_meshes[stage]
        packets: dict[str, Array] = {}
        for packet in setting.packets(stage):
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
                for name, array in _to_mapping(found[device]).items():
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
        """Return the arguments, or their specs, by name."""
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

    def _make_setting(self, specs: Mapping[str, ArraySpec]) -> Setting:
        return Setting(self.pipeline, self.optimizer, self.num_layers, self.relu_last, specs)

    def _check_like(self, specs: Mapping[str, ArraySpec], name: str, want: ArraySpec) -> None:
        if specs.get(name, want) != want:
            raise _misfit(name, specs[name], f"{want.shape} {want.dtype}")


def _misfit(name: str, spec: ArraySpec, want: str) -> LayoutError:
    return LayoutError(f"{name} does not fit the MLP", tensor=name, got=f"{spec.shape} {spec.dtype}", want=want)


def _to_mapping(output: Any) -> Mapping[str, Array]:
    """Return a device's output as a dict; a device with a single output returns it bare, and only one kind can be."""
    if output is None or isinstance(output, Mapping):
        return output or {}
    return {"input_gradients.0": output}
