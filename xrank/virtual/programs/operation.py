"""Operations: work that the cluster can compile to programs before it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from xrank.layout.mesh import DeviceMesh
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.channels.channel import Array
from xrank.virtual.programs.program import Program


class Operation(ABC):
    """Work that compiles to one program per device.

    `VirtualCluster.run` calls `compile` once, then `packets` once per device, before any device starts, so invalid
    arguments are reported before anything runs. `plan` calls only `compile`.
    """

    @abstractmethod
    def compile(
        self, mesh: DeviceMesh, activations: Sequence[ArraySpec], parameters: Sequence[ArraySpec]
    ) -> tuple[Program, ...]:
        """Return the programs of all devices, in mesh order.

        Args:
            mesh: the mesh of all devices.
            activations: specs of the arrays that change from call to call.
            parameters: specs of the arrays that persist between calls.

        Raises:
            LayoutError: the operation does not fit this mesh and these sizes; names the dim and the axis.
            UsageError: the operation takes other arguments.
        """

    @abstractmethod
    def packets(
        self, mesh: DeviceMesh, device: int, activations: Sequence[Array], parameters: Sequence[Array]
    ) -> dict[str, Array]:
        """Return the host's arrays for a device: one per `Receive` of its program, by packet name."""
