"""A cluster of virtual devices that stand for ranks, to try meshes, collectives and pipelines on a laptop.

Names are loaded when they are first used, so that importing this costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.virtual.arrays import ArraySpec, kernel
    from xrank.virtual.builder import ShardedOperation, join_shards, shards_of
    from xrank.virtual.cluster import Run, VirtualCluster, VirtualDevice
    from xrank.virtual.engine import VirtualChannel
    from xrank.virtual.layers import (
        FeedForward,
        FeedForwardSharding,
        FeedForwardShardingPolicy,
        MatMul,
        MatMulSharding,
        MatMulShardingPolicy,
        cheapest,
    )
    from xrank.virtual.link_model import LinkModel
    from xrank.virtual.mlp import MLP, SGD, Adam
    from xrank.virtual.pipeline import (
        Pipeline,
        PipelinedOperation,
        PipelineStage,
        Schedule,
        StageProgram,
        make_schedule,
    )
    from xrank.virtual.programs import Operation, Program, Statistics, plan
    from xrank.virtual.sharding import DimSharding, Mesh, MeshIndex, TensorSharding

__all__ = [
    "MLP",
    "SGD",
    "Adam",
    "ArraySpec",
    "DimSharding",
    "FeedForward",
    "FeedForwardSharding",
    "FeedForwardShardingPolicy",
    "LinkModel",
    "MatMul",
    "MatMulSharding",
    "MatMulShardingPolicy",
    "Mesh",
    "MeshIndex",
    "Operation",
    "Pipeline",
    "PipelineStage",
    "PipelinedOperation",
    "Program",
    "Run",
    "Schedule",
    "ShardedOperation",
    "StageProgram",
    "Statistics",
    "TensorSharding",
    "VirtualChannel",
    "VirtualCluster",
    "VirtualDevice",
    "cheapest",
    "join_shards",
    "kernel",
    "make_schedule",
    "plan",
    "shards_of",
]

_MODULES: dict[str, tuple[str, ...]] = {
    "arrays": ("ArraySpec", "kernel"),
    "builder": ("ShardedOperation", "join_shards", "shards_of"),
    "cluster": ("Run", "VirtualCluster", "VirtualDevice"),
    "engine": ("VirtualChannel",),
    "layers": (
        "FeedForward",
        "FeedForwardSharding",
        "FeedForwardShardingPolicy",
        "MatMul",
        "MatMulSharding",
        "MatMulShardingPolicy",
        "cheapest",
    ),
    "link_model": ("LinkModel",),
    "mlp": ("Adam", "MLP", "SGD"),
    "pipeline": ("Pipeline", "PipelineStage", "PipelinedOperation", "Schedule", "StageProgram", "make_schedule"),
    "programs": ("Operation", "Program", "Statistics", "plan"),
    "sharding": ("DimSharding", "Mesh", "MeshIndex", "TensorSharding"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__getattr__, __dir__ = defer_imports(__name__, _HOMES)
