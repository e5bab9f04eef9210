"""One stage of an MLP's pipeline: its packets, its layers forward and backward, and its step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.arrays import split_lengths
from xrank.virtual.pipelines.optimizers import Optimizer
from xrank.virtual.pipelines.pipeline import Pipeline
from xrank.virtual.pipelines.pipelined_operation import StageProgram
from xrank.virtual.programs.program import Return
from xrank.virtual.programs.program_builder import ProgramBuilder, Value
from xrank.virtual.programs.redistribution import redistribute
from xrank.virtual.sharding import TensorSharding


@dataclass(frozen=True, slots=True)
class Setting:
    """Properties of a step that all its stages share."""

    pipeline: Pipeline
    optimizer: Optimizer | None
    num_layers: int
    relu_last: bool
    specs: Mapping[str, ArraySpec]
    """Specs of the arguments: ``"inputs"``, ``"targets"``, ``"weight.0"``, ``"bias.0"``, ``"mean.weight.0"``, ..."""

    def layers(self, stage: int, chunk: int) -> range:
        """Return the layers of a stage's chunk."""
        part = chunk * self.pipeline.num_stages + stage
        lengths = split_lengths(self.num_layers, self.pipeline.schedule.num_parts)
        return range(sum(lengths[:part]), sum(lengths[: part + 1]))

    def rows(self, run: int) -> range:
        """Return the rows of a run."""
        lengths = split_lengths(self.specs["inputs"].shape[0], self.pipeline.num_runs)
        return range(sum(lengths[:run]), sum(lengths[: run + 1]))

    def has_relu(self, layer: int) -> bool:
        """Return whether relu follows a layer."""
        return self.relu_last or layer < self.num_layers - 1

    def cut(self, rows: bool = False, columns: bool = False) -> TensorSharding:
        """Return the sharding of two dims, rows over `dp` and columns over `tp`."""
        return TensorSharding((self.pipeline.dp if rows else None, self.pipeline.tp if columns else None))

    def parameter_sharding(self, name: str) -> TensorSharding:
        """Return the sharding of a parameter, or of one of its states, by name."""
        if name.rpartition("weight.")[1]:
            return self.cut(columns=True)
        return TensorSharding((self.pipeline.tp,) if name.rpartition("bias.")[1] else ())

    def parameters(self, stage: int) -> Iterator[str]:
        """Yield the names of the parameters of a stage."""
        for chunk in range(self.pipeline.schedule.num_chunks):
            for layer in self.layers(stage, chunk):
                yield f"weight.{layer}"
                yield f"bias.{layer}"

    def packets(self, stage: int) -> Iterator[Packet]:
        """Yield the host's packets for a stage, in the order of their first use."""
        for name in self.parameters(stage):
            yield Packet(name, name, None, self.parameter_sharding(name))
        for run in range(self.pipeline.num_runs):
            if stage == 0:
                yield Packet(f"inputs.{run}", "inputs", self.rows(run), self.cut(rows=True))
            if stage == self.pipeline.num_stages - 1:
                yield Packet(f"targets.{run}", "targets", self.rows(run), self.cut(rows=True, columns=True))
        for state in self.optimizer.states if self.optimizer else ():
            for name in self.parameters(stage):
                if (kept := f"{state}.{name}") in self.specs:
                    yield Packet(kept, kept, None, self.parameter_sharding(kept))
        if "steps" in self.specs:
            yield Packet("steps", "steps", None, TensorSharding(()))


@dataclass(frozen=True, slots=True)
class Packet:
    """An array that the host sends to the devices of a stage; each device receives its shard."""

    name: str
    argument: str
    """Name of the array that the packet is cut from."""
    rows: range | None
    """Rows of the array in the packet; None means all."""
    sharding: TensorSharding


class MLPStage(StageProgram):
    """Writes the program of one stage.

    Args:
        setting: properties of the step.
        stage: index of the stage.
        builder: program builder of the stage's devices.
    """

    def __init__(self, setting: Setting, stage: int, builder: ProgramBuilder) -> None:
        self._setting = setting
        self._stage = stage
        self._builder = builder
        self._packets = {packet.name: packet for packet in setting.packets(stage)}
        self._parameters: dict[str, Value] = {}
        self._gradients: dict[str, Value] = {}
        self._kept: dict[tuple[int, int], tuple[Value, Value]] = {}
        """Inputs and outputs of a layer that its backward needs, by run and layer."""
        self._output_gradients: dict[int, Value] = {}
        self._losses: dict[int, Value] = {}

    def begin(self) -> None:
        """Receive the parameters."""
        for name in self._setting.parameters(self._stage):
            self._parameters[name] = self._receive(name)

    def forward(self, run: int, chunk: int, given: Value | None) -> Value | None:
        """Write the chunk's layers; after the last layer also the loss and its gradient."""
        setting, builder = self._setting, self._builder
        x = self._receive(f"inputs.{run}") if given is None else given
        for layer in setting.layers(self._stage, chunk):
            # A weight is cut by columns, so its product needs all columns of the input: an all-gather over `tp`.
            x = redistribute(builder, x, setting.cut(rows=True))
            product = builder.matmul(x, self._parameters[f"weight.{layer}"])
            inputs = (product, self._parameters[f"bias.{layer}"])
            y = builder.compute("add_last", inputs, product.shape, product.sharding)
            if setting.has_relu(layer):
                y = builder.compute("relu", (y,), y.shape, y.sharding)
            self._kept[run, layer] = x, y
            x = y
        if layer < setting.num_layers - 1:
            return x
        target = self._receive(f"targets.{run}")
        size = {"size": setting.specs["targets"].shape[0] * setting.specs["targets"].shape[1]}
        # Each device has the loss of its rows and columns.
        sums = TensorSharding((), sums=(setting.pipeline.dp, setting.pipeline.tp))
        self._losses[run] = builder.compute("squared_error", (x, target), (), sums, options=lambda _: size)
        self._output_gradients[run] = builder.compute(
            "squared_error_gradient", (x, target), x.shape, x.sharding, options=lambda _: size
        )
        return None

    def backward(self, run: int, chunk: int, given: Value | None) -> Value | None:
        """Write the gradients of the chunk's layers, added to those of earlier runs."""
        setting, builder = self._setting, self._builder
        dy = self._output_gradients.pop(run) if given is None else given
        for layer in reversed(setting.layers(self._stage, chunk)):
            x, y = self._kept.pop((run, layer))
            if setting.has_relu(layer):
                # relu's output is positive where its input is, so the output suffices and the input need not be kept.
                dy = builder.compute("relu_backward", (y, dy), dy.shape, dy.sharding)
            self._add(f"weight.{layer}", builder.matmul(x, dy, "tn"))
            sums = TensorSharding((dy.sharding[1],), sums=(setting.pipeline.dp,))
            self._add(f"bias.{layer}", builder.compute("column_sum", (dy,), dy.shape[1:], sums))
            dx = builder.matmul(dy, self._parameters[f"weight.{layer}"], "nt")
            # The layer below needs only its own columns: a reduce-scatter sends half the bytes of an all-reduce.
            dy = redistribute(builder, dx, setting.cut(rows=True, columns=layer > 0))
        if layer > 0:
            return dy
        self._give(dy, f"input_gradients.{run}")
        return None

    def end(self) -> None:
        """Sum gradients and losses over the devices, write the optimizer step, and return the results."""
        setting, builder = self._setting, self._builder
        if self._losses:
            losses = tuple(self._losses[run] for run in range(setting.pipeline.num_runs))
            stacked = TensorSharding((None,), losses[0].sums)
            losses_of_device = builder.compute("stack", losses, (len(losses),), stacked)
            self._give(redistribute(builder, losses_of_device, TensorSharding.replicated(1)), "losses")
        for name in self._setting.parameters(self._stage):
            gradient = self._gradients[name]
            self._gradients[name] = redistribute(builder, gradient, gradient.sharding.without_sums())
            self._give(self._gradients[name], f"gradient.{name}")
        if setting.optimizer is None:
            return
        count = None
        if setting.optimizer.counts_steps:
            like = next(iter(self._gradients.values()))
            before = (self._receive("steps"),) if "steps" in self._packets else ()
            count = builder.compute("count", (like, *before), (), TensorSharding(()), dtype="I64")
            if self._stage == 0:
                self._give(count, "steps")
        for name in self._setting.parameters(self._stage):
            kept = [f"{state}.{name}" for state in setting.optimizer.states]
            states = [self._receive(state) for state in kept if state in self._packets]
            new = setting.optimizer.step(builder, self._parameters[name], self._gradients[name], states, count)
            for value, result_name in zip(new, (name, *kept), strict=True):
                self._give(value, result_name)

    def _receive(self, name: str) -> Value:
        packet = self._packets[name]
        spec = self._setting.specs[packet.argument]
        shape = spec.shape if packet.rows is None else (len(packet.rows), *spec.shape[1:])
        return self._builder.receive(name, shape, spec.dtype, packet.sharding)

    def _add(self, name: str, gradient: Value) -> None:
        """Add one run's gradient to a parameter's sum."""
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
