"""The place of a rank in Megatron's two factorings of the world: one for dense weights, one for experts.

Axes are ``tp``, ``pp``, ``cp`` and ``dp``; for experts ``etp``, ``ep``, ``edp`` and ``pp``. Without ``etp``, experts
are cut over ``tp``, like dense weights: Megatron's default.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, MeshViews

_AXES = ("tp", "pp", "cp", "dp", "ep", "etp", "edp")


@dataclass(frozen=True, slots=True)
class MegatronMesh:
    """The meshes of one rank; each has the axes that Megatron's layouts use for the tensors on it."""

    dense: DeviceMesh
    """The ranks that share the dense tensors of this rank's stage, with the axis tp."""
    expert: DeviceMesh
    """The ranks that share this rank's experts, with the axis etp."""
    experts: DeviceMesh
    """The ranks that share all experts of this rank's stage, with the axes ep and etp."""
    num_stages: int
    expert_rank: int
    """This rank's place along ep."""
    is_given: bool
    """Whether the caller gave the mesh; False if it is from Megatron's own process groups."""

    @property
    def lengths(self) -> dict[str, int]:
        """Axis -> number of ranks that share the model along it."""
        return {
            "tp": self.dense.axis_length("tp"),
            "pp": self.num_stages,
            "ep": self.experts.axis_length("ep"),
            "etp": self.experts.axis_length("etp"),
        }


def megatron_mesh(mesh: Any, rank: int, world_size: int) -> MegatronMesh | None:
    """Return the meshes of a rank; None if the arrangement of the ranks is unknown.

    Args:
        mesh: a `DeviceMesh`, torch's, or the two factorings from `xrank.layout.mesh.megatron_views`. None:
            Megatron's process groups, if the program has made them; a single process is a mesh of one rank.
        rank: this rank.
        world_size: the number of ranks.

    Raises:
        LayoutError: an axis that Megatron lacks, a mesh of other ranks, or process groups in unknown order.
    """
    if mesh is not None:
        return _from_views(mesh if isinstance(mesh, MeshViews) else MeshViews(_as_device_mesh(mesh)), rank)
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        return _from_groups(state, rank)
    return _from_views(MeshViews(DeviceMesh((1,), ("tp",), (rank,))), rank) if world_size == 1 else None


def _as_device_mesh(mesh: Any) -> DeviceMesh:
    if isinstance(mesh, DeviceMesh):
        return mesh
    from xrank.dialects.placements import describe_mesh

    return describe_mesh(mesh)


def _from_views(views: MeshViews, rank: int) -> MegatronMesh:
    of_experts = next((view for _, view in views.others if {"ep", "etp"} & set(view.axis_names)), views.main)
    for axis in (*views.main.axis_names, *of_experts.axis_names):
        if axis not in _AXES:
            raise LayoutError(
                f"the mesh has the axis {axis!r}, which is not one of Megatron's",
                rank=rank,
                got=views.main.grid,
                want=f"axes among {', '.join(_AXES)}",
                next_step="give the axes of mesh= Megatron's names; dp is for replicas",
            )
    dense = _with_axes(views.main, "tp", "pp")
    if "etp" not in of_experts.axis_names and "tp" in of_experts.axis_names:
        names = ["etp" if axis == "tp" else axis for axis in of_experts.axis_names]
        of_experts = DeviceMesh(of_experts.shape, names, of_experts.ranks)
    of_experts = _with_axes(of_experts, "ep", "etp", "pp")
    at = of_experts.coordinate(rank)
    experts = of_experts.submesh(pp=at["pp"])
    return MegatronMesh(
        dense=dense.submesh(pp=dense.coordinate(rank)["pp"]),
        expert=experts.submesh(ep=at["ep"]),
        experts=experts,
        num_stages=dense.axis_length("pp"),
        expert_rank=at["ep"],
        is_given=True,
    )


def _with_axes(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """Return the mesh with these axes; new axes have length 1."""
    more = [axis for axis in axes if axis not in mesh.axis_names]
    return DeviceMesh((*(1 for _ in more), *mesh.shape), (*more, *mesh.axis_names), mesh.ranks)


def _from_groups(state: Any, rank: int) -> MegatronMesh:
    """Read Megatron's process groups; other groups of the same kind hold replicas or other stages."""
    from torch.distributed import get_process_group_ranks

    def ranks(group: Any) -> list[int]:
        return list(get_process_group_ranks(group))

    tensor = ranks(state.get_tensor_model_parallel_group())
    expert = ranks(state.get_expert_tensor_parallel_group())
    across = ranks(state.get_expert_model_parallel_group())
    if rank not in tensor or rank not in across:
        raise LayoutError(
            f"Megatron's process groups of this process are not those of rank {rank}",
            rank=rank,
            got=f"ranks {tensor} along tp, {across} along ep",
            want=f"rank {rank} among them",
            next_step="let all ranks of the world take part",
        )
    experts = _grid(expert, across, ranks(state.get_expert_tensor_and_model_parallel_group()), rank)
    return MegatronMesh(
        dense=DeviceMesh((len(tensor),), ("tp",), tensor),
        expert=DeviceMesh((len(expert),), ("etp",), expert),
        experts=experts,
        num_stages=len(ranks(state.get_pipeline_model_parallel_group())),
        expert_rank=across.index(rank),
        is_given=False,
    )


def _grid(expert: Sequence[int], across: Sequence[int], both: Sequence[int], rank: int) -> DeviceMesh:
    """Return the mesh of all experts of a stage; the run decides which of the two axes varies faster."""
    sizes = {"ep": len(across), "etp": len(expert)}
    for outer, inner in (("ep", "etp"), ("etp", "ep")):
        if sizes["ep"] * sizes["etp"] == len(both):
            mesh = DeviceMesh((sizes[outer], sizes[inner]), (outer, inner), sorted(both))
            if tuple(expert) in mesh.groups("etp") and tuple(across) in mesh.groups("ep"):
                return mesh
    raise LayoutError(
        "Megatron's process groups of experts are not a grid",
        rank=rank,
        got=f"ranks {list(both)} of {list(expert)} and {list(across)}",
        want="one rank for each pair of a place along etp and one along ep",
        next_step="give mesh=",
    )
