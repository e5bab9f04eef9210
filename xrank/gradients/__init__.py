"""Gradients of data-parallel training: a plan of all reductions, contiguous buffers, and one final synchronization.

Names are loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.gradients.checks import GradientCheck, check_gradients
    from xrank.gradients.config import GradientConfig
    from xrank.gradients.distributed_data_parallel import DistributedDataParallel
    from xrank.gradients.finalize import Reduction, finalize_model_grads
    from xrank.gradients.plan import GradientPlan
    from xrank.gradients.roles import mark
    from xrank.gradients.shards import (
        GradScaler,
        ParameterShards,
        clip_grad_norm,
        export_gradients,
        export_optimizer_shards,
        grad_norm,
        load_optimizer_shards,
    )

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

_MODULES: dict[str, tuple[str, ...]] = {
    "checks": ("GradientCheck", "check_gradients"),
    "config": ("GradientConfig",),
    "distributed_data_parallel": ("DistributedDataParallel",),
    "finalize": ("Reduction", "finalize_model_grads"),
    "plan": ("GradientPlan",),
    "roles": ("mark",),
    "shards": (
        "GradScaler",
        "ParameterShards",
        "clip_grad_norm",
        "export_gradients",
        "export_optimizer_shards",
        "grad_norm",
        "load_optimizer_shards",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__getattr__, __dir__ = defer_imports(__name__, _HOMES)
