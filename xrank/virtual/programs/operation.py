"""Operations: what the cluster runs when it knows beforehand what each device does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from xrank.layout.mesh import DeviceMesh
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.channels.channel import Array
from xrank.virtual.programs.program import Program

__all__ = ["Operation"]


class Operation(ABC):
    """Something that compiles to one program a device.

    `VirtualCluster.run` calls `compile` once, then `packets` once for each device, all before any device begins, so
    that what does not fit is refused while nothing runs. `plan` calls `compile` alone.
    """

    @abstractmethod
    def compile(
        self, mesh: DeviceMesh, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
    ) -> tuple[Program, ...]:
        """Return the programs of all devices, in the order of the mesh.

        Args:
            mesh: the devices.
            activations: the specs of what changes from call to call.
            parameters: the specs of what is kept.

        Raises:
            LayoutError: the operation cannot be done on this mesh with these sizes; names the dim and the axis.
            UsageError: the arguments are not those that the operation takes.
        """

    @abstractmethod
    def packets(
        self, mesh: DeviceMesh, device: int, activations: Sequence[Array], parameters: Sequence[Array]
    ) -> dict[str, Array]:
        """Return what the host sends to a device: an array for each `Receive` of its program, by the name there."""
