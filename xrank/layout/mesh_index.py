"""Mesh indices: a place in a mesh as a value, and its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from xrank.errors import LayoutError
from xrank.layout.mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class MeshIndex:
    """One place of a mesh; ``index["tp"]`` is the place along an axis.

    Args:
        mesh: the mesh.
        places: the place along each axis, outermost first.

    Raises:
        LayoutError: the mesh does not have this place.

    Example:
        >>> index = MeshIndex(DeviceMesh((2, 2), ("dp", "tp")), (1, 0))
        >>> index["dp"], index.rank, index.shift("tp").rank
        (1, 2, 3)
    """

    mesh: DeviceMesh
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.places) != len(self.mesh.shape):
            raise LayoutError(
                f"the place {self.places} is not in the mesh {self.mesh.grid!r}",
                got=f"{len(self.places)} axes",
                want=f"{len(self.mesh.shape)} axes",
            )
        self.mesh.rank_at(self.coordinate)

    def __getitem__(self, axis: str) -> int:
        self.mesh.axis_length(axis)
        return self.coordinate[axis]

    @classmethod
    def from_rank(cls, mesh: DeviceMesh, rank: int) -> MeshIndex:
        """Return a rank's place in a mesh."""
        return cls(mesh, tuple(mesh.coordinate(rank).values()))

    @classmethod
    def list_all(cls, mesh: DeviceMesh) -> tuple[MeshIndex, ...]:
        """Return all places of a mesh, the last axis fastest."""
        return tuple(cls(mesh, places) for places in product(*map(range, mesh.shape)))

    @property
    def coordinate(self) -> dict[str, int]:
        """Axis -> place."""
        return dict(zip(self.mesh.axis_names, self.places, strict=True))

    @property
    def rank(self) -> int:
        """The rank at this place."""
        return self.mesh.rank_at(self.coordinate)

    def with_places(self, **places: int) -> MeshIndex:
        """Return the index with other places along some axes."""
        self.mesh.check_axes(places)
        return MeshIndex(self.mesh, tuple({**self.coordinate, **places}.values()))

    def shift(self, axis: str, by: int = 1) -> MeshIndex:
        """Return the index `by` places further along an axis, cyclically."""
        return self.with_places(**{axis: (self[axis] + by) % self.mesh.axis_length(axis)})

    def neighbours(self, *axes: str) -> tuple[MeshIndex, ...]:
        """Return the indices one place before and after along these axes, each once; without axes along all."""
        self.mesh.check_axes(axes)
        near = (self.shift(axis, by) for axis in axes or self.mesh.axis_names for by in (-1, 1))
        return tuple(index for index in dict.fromkeys(near) if index != self)
