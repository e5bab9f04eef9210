"""A cluster of virtual devices that stand for ranks, to try meshes, collectives and pipelines on a laptop.

Names are loaded when they are first used, so that importing this costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.virtual.array_spec import ArraySpec
    from xrank.virtual.channels.channel import VirtualChannel
    from xrank.virtual.cluster import Run, VirtualCluster
    from xrank.virtual.costs.link_model import LinkModel
    from xrank.virtual.costs.planning import plan
    from xrank.virtual.device import VirtualDevice
    from xrank.virtual.mesh import Mesh, MeshIndex
    from xrank.virtual.operations.choice import cheapest
    from xrank.virtual.operations.feed_forward import FeedForward, FeedForwardSharding, FeedForwardShardingPolicy
    from xrank.virtual.operations.matmul import MatMul, MatMulSharding, MatMulShardingPolicy
    from xrank.virtual.operations.sharded_operation import ShardedOperation
    from xrank.virtual.operations.shards import join_shards, shards_of
    from xrank.virtual.pipelines.mlp import MLP
    from xrank.virtual.pipelines.optimizers import SGD, Adam
    from xrank.virtual.pipelines.pipeline import Pipeline, PipelineStage
    from xrank.virtual.pipelines.pipelined_operation import PipelinedOperation, StageProgram
    from xrank.virtual.pipelines.schedule import Schedule
    from xrank.virtual.programs.kernels import kernel
    from xrank.virtual.programs.operation import Operation
    from xrank.virtual.programs.program import Program
    from xrank.virtual.sharding import DimSharding, TensorSharding
    from xrank.virtual.statistics import Statistics

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
    "Adam": "pipelines.optimizers",
    "ArraySpec": "array_spec",
    "DimSharding": "sharding",
    "FeedForward": "operations.feed_forward",
    "FeedForwardSharding": "operations.feed_forward",
    "FeedForwardShardingPolicy": "operations.feed_forward",
    "LinkModel": "costs.link_model",
    "MLP": "pipelines.mlp",
    "MatMul": "operations.matmul",
    "MatMulSharding": "operations.matmul",
    "MatMulShardingPolicy": "operations.matmul",
    "Mesh": "mesh",
    "MeshIndex": "mesh",
    "Operation": "programs.operation",
    "Pipeline": "pipelines.pipeline",
    "PipelineStage": "pipelines.pipeline",
    "PipelinedOperation": "pipelines.pipelined_operation",
    "Program": "programs.program",
    "Run": "cluster",
    "SGD": "pipelines.optimizers",
    "Schedule": "pipelines.schedule",
    "ShardedOperation": "operations.sharded_operation",
    "StageProgram": "pipelines.pipelined_operation",
    "Statistics": "statistics",
    "TensorSharding": "sharding",
    "VirtualChannel": "channels.channel",
    "VirtualCluster": "cluster",
    "VirtualDevice": "device",
    "cheapest": "operations.choice",
    "join_shards": "operations.shards",
    "kernel": "programs.kernels",
    "plan": "costs.planning",
    "shards_of": "operations.shards",
}

__getattr__, __dir__ = defer_imports(__name__, _HOMES)
