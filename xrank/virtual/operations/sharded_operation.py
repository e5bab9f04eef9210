"""Sharded operations: the host cuts the arguments by shardings, and each device returns its shard of the results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeVar

from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.arrays import Array, check_one_kind, spec_of
from xrank.virtual.mesh import MeshLike, as_device_mesh
from xrank.virtual.operations.shards import join_shards
from xrank.virtual.programs.operation import Operation
from xrank.virtual.programs.program import Program
from xrank.virtual.programs.program_builder import ProgramBuilder, Value
from xrank.virtual.programs.redistribution import redistribute
from xrank.virtual.sharding import TensorSharding

_T = TypeVar("_T")


class ShardedOperation(Operation):
    """An operation on tensors, each of which has a sharding.

    A subclass defines the three mappings of shardings, by tensor name in argument order, and `build`.
    """

    @property
    @abstractmethod
    def activation_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the activations."""

    @property
    @abstractmethod
    def parameter_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the parameters."""

    @property
    @abstractmethod
    def output_shardings(self) -> Mapping[str, TensorSharding]:
        """Shardings of the outputs."""

    @abstractmethod
    def build(self, builder: ProgramBuilder, inputs: Mapping[str, Value]) -> Mapping[str, Value]:
        """Write the steps and return the outputs by name; their shardings may differ from the wanted except in sums."""

    def compile(
        self, mesh: DeviceMesh, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
    ) -> tuple[Program, ...]:
        """Return the programs of all devices; see `Operation.compile`."""
        builder = ProgramBuilder(mesh)
        inputs: dict[str, Value] = {}
        for name, (spec, sharding) in self._zip_arguments(activations, parameters).items():
            check_cuts(builder, name, spec.shape, sharding)
            inputs[name] = builder.receive(name, spec.shape, spec.dtype, sharding)
        outputs = self.build(builder, inputs)
        for name, sharding in self.output_shardings.items():
            builder.give(redistribute(builder, outputs[name], sharding), name)
        return builder.programs()

    def packets(
        self, mesh: DeviceMesh, device: int, activations: Sequence[Array], parameters: Sequence[Array]
    ) -> dict[str, Array]:
        """Return a device's shards of the arguments.

        Raises:
            UsageError: some arguments are numpy arrays and some are tensors.
        """
        named, at = self._zip_arguments(activations, parameters), mesh.coordinate(device)
        check_one_kind({name: array for name, (array, _) in named.items()})
        return {
            name: array[tuple(slice(low, high) for low, high in sharding.slices(mesh, at, spec_of(array).shape))]
            for name, (array, sharding) in named.items()
        }

    def join(self, outputs: Sequence[Array | Mapping[str, Array]], mesh: MeshLike) -> Array | dict[str, Array]:
        """Join a run's outputs to whole tensors; a dict by name if there are several.

        Raises:
            ContradictionError: devices have the same part with different elements.
        """
        devices, shardings = as_device_mesh(mesh), self.output_shardings
        if len(shardings) == 1:
            [sharding] = shardings.values()
            return join_shards(outputs, sharding, devices)
        return {name: join_shards([each[name] for each in outputs], shardings[name], devices) for name in shardings}

    def _zip_arguments(
        self, activations: Sequence[_T], parameters: Sequence[_T]
    ) -> dict[str, tuple[_T, TensorSharding]]:
        """Return the arguments and their shardings by name."""
        named: dict[str, tuple[_T, TensorSharding]] = {}
        for what, given, shardings in (
            ("activations", activations, self.activation_shardings),
            ("parameters", parameters, self.parameter_shardings),
        ):
            if len(given) != len(shardings):
                raise UsageError(
                    f"{type(self).__name__} takes the {what} {', '.join(shardings)}",
                    got=f"{len(given)} {what}",
                    want=f"{len(shardings)}",
                )
            named |= {name: (each, shardings[name]) for name, each in zip(shardings, given, strict=True)}
        return named


def check_cuts(builder: ProgramBuilder, name: str, shape: Sequence[int], sharding: TensorSharding) -> None:
    """Check that a sharding can cut a tensor of this shape; errors name the tensor."""
    try:
        sharding.check(builder.mesh, shape)
        builder.ranges(shape, sharding.dims)
    except LayoutError as error:
        raise LayoutError(
            f"{name}: {error.message}", tensor=name, got=error.got, want=error.want, next_step=error.next_step
        ) from error


def check_sharding(operation: ShardedOperation, sharding: object, kind: type) -> None:
    """Check that an operation received its kind of shardings.

    Raises:
        UsageError: it received something else.
    """
    if not isinstance(sharding, kind):
        name = type(operation).__qualname__
        raise UsageError(
            f"{name} takes a {kind.__qualname__}", got=repr(sharding), want=f"{name}({kind.__qualname__}(...))"
        )
