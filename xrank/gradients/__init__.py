"""Gradients of data-parallel training: a plan of all reductions, contiguous buffers, and one final synchronization.

Names are loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.gradients.checks import check_gradients
    from xrank.gradients.comparisons import GradientCheck
    from xrank.gradients.config import GradientConfig
    from xrank.gradients.distributed_data_parallel import DistributedDataParallel
    from xrank.gradients.export import export_gradients, export_optimizer_shards, load_optimizer_shards
    from xrank.gradients.finalize import Reduction, finalize_model_grads
    from xrank.gradients.norms import GradScaler, clip_grad_norm, grad_norm
    from xrank.gradients.plan import GradientPlan
    from xrank.gradients.roles import mark
    from xrank.gradients.shards import ParameterShards

__all__ = [
    "DistributedDataParallel",
    "GradScaler",
    "GradientCheck",
    "GradientConfig",
    "GradientPlan",
    "ParameterShards",
    "Reduction",
    "check_gradients",
    "clip_grad_norm",
    "export_gradients",
    "export_optimizer_shards",
    "finalize_model_grads",
    "grad_norm",
    "load_optimizer_shards",
    "mark",
]

_HOMES = {
    "DistributedDataParallel": "distributed_data_parallel",
    "GradScaler": "norms",
    "GradientCheck": "comparisons",
    "GradientConfig": "config",
    "GradientPlan": "plan",
    "ParameterShards": "shards",
    "Reduction": "finalize",
    "check_gradients": "checks",
    "clip_grad_norm": "norms",
    "export_gradients": "export",
    "export_optimizer_shards": "export",
    "finalize_model_grads": "finalize",
    "grad_norm": "norms",
    "load_optimizer_shards": "export",
    "mark": "roles",
}

__getattr__, __dir__ = defer_imports(__name__, _HOMES)
