"""A cluster of virtual devices that stand for ranks, to try meshes, collectives and pipelines on a laptop.

Names are loaded when they are first used, so that importing this costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.virtual.arrays import ArraySpec
    from xrank.virtual.channels import VirtualChannel
    from xrank.virtual.choice import cheapest
    from xrank.virtual.cluster import Run, VirtualCluster
    from xrank.virtual.collectives import Statistics
    from xrank.virtual.device import VirtualDevice
    from xrank.virtual.feed_forward import FeedForward, FeedForwardSharding, FeedForwardShardingPolicy
    from xrank.virtual.kernels import kernel
    from xrank.virtual.link_model import LinkModel
    from xrank.virtual.matmul import MatMul, MatMulSharding, MatMulShardingPolicy
    from xrank.virtual.mesh import Mesh, MeshIndex
    from xrank.virtual.mlp import MLP, SGD, Adam
    from xrank.virtual.pipeline import Pipeline, PipelinedOperation, PipelineStage, StageProgram
    from xrank.virtual.planning import plan
    from xrank.virtual.programs import Operation, Program
    from xrank.virtual.schedule import Schedule
    from xrank.virtual.sharded_operation import ShardedOperation, join_shards, shards_of
    from xrank.virtual.sharding import DimSharding, TensorSharding

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
    "plan",
    "shards_of",
]

_HOMES = {
    "Adam": "mlp",
    "ArraySpec": "arrays",
    "DimSharding": "sharding",
    "FeedForward": "feed_forward",
    "FeedForwardSharding": "feed_forward",
    "FeedForwardShardingPolicy": "feed_forward",
    "LinkModel": "link_model",
    "MLP": "mlp",
    "MatMul": "matmul",
    "MatMulSharding": "matmul",
    "MatMulShardingPolicy": "matmul",
    "Mesh": "mesh",
    "MeshIndex": "mesh",
    "Operation": "programs",
    "Pipeline": "pipeline",
    "PipelineStage": "pipeline",
    "PipelinedOperation": "pipeline",
    "Program": "programs",
    "Run": "cluster",
    "SGD": "mlp",
    "Schedule": "schedule",
    "ShardedOperation": "sharded_operation",
    "StageProgram": "pipeline",
    "Statistics": "collectives",
    "TensorSharding": "sharding",
    "VirtualChannel": "channels",
    "VirtualCluster": "cluster",
    "VirtualDevice": "device",
    "cheapest": "choice",
    "join_shards": "sharded_operation",
    "kernel": "kernels",
    "plan": "planning",
    "shards_of": "sharded_operation",
}

__getattr__, __dir__ = defer_imports(__name__, _HOMES)
