"""xrank gathers models that distributed training left on many ranks into one Hugging Face folder, proven exact.

Names are loaded when they are first used: importing the package imports neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.commands.checkpoint import open_checkpoint
    from xrank.commands.clean import clean
    from xrank.commands.delta import make_delta
    from xrank.commands.delta_applying import apply_deltas, inspect_deltas, verify_deltas
    from xrank.commands.delta_folding import fold_deltas
    from xrank.commands.export import export_model, save_model
    from xrank.commands.gather import gather_checkpoint
    from xrank.commands.inspect import inspect
    from xrank.commands.iterate import iter_model
    from xrank.commands.load import load_model
    from xrank.commands.reshard import reshard_checkpoint
    from xrank.commands.verify import verify_model
    from xrank.recipes.quantization import Quantization
    from xrank.refit.adapters import take_adapter
    from xrank.refit.publish import offer_weights
    from xrank.refit.recording import record_layouts
    from xrank.refit.taking import take_weights
    from xrank.version import __version__
    from xrank.virtual.simulation.simulation import simulate
    from xrank.workspace.nfs import NFSWorkspace
    from xrank.workspace.objects import ObjectWorkspace
    from xrank.workspace.parallel import get_configs_parallel, get_tensors_parallel
    from xrank.workspace.shared_memory import SharedMemoryWorkspace

__all__ = [
    "NFSWorkspace",
    "ObjectWorkspace",
    "Quantization",
    "SharedMemoryWorkspace",
    "__version__",
    "apply_deltas",
    "clean",
    "export_model",
    "fold_deltas",
    "gather_checkpoint",
    "get_configs_parallel",
    "get_tensors_parallel",
    "inspect",
    "inspect_deltas",
    "iter_model",
    "load_model",
    "make_delta",
    "offer_weights",
    "open_checkpoint",
    "record_layouts",
    "reshard_checkpoint",
    "save_model",
    "simulate",
    "take_adapter",
    "take_weights",
    "verify_deltas",
    "verify_model",
]

_HOMES = {
    "__version__": "version",
    "NFSWorkspace": "workspace.nfs",
    "ObjectWorkspace": "workspace.objects",
    "Quantization": "recipes.quantization",
    "SharedMemoryWorkspace": "workspace.shared_memory",
    "apply_deltas": "commands.delta_applying",
    "clean": "commands.clean",
    "export_model": "commands.export",
    "fold_deltas": "commands.delta_folding",
    "gather_checkpoint": "commands.gather",
    "get_configs_parallel": "workspace.parallel",
    "get_tensors_parallel": "workspace.parallel",
    "inspect": "commands.inspect",
    "inspect_deltas": "commands.delta_applying",
    "iter_model": "commands.iterate",
    "load_model": "commands.load",
    "make_delta": "commands.delta",
    "offer_weights": "refit.publish",
    "open_checkpoint": "commands.checkpoint",
    "record_layouts": "refit.recording",
    "reshard_checkpoint": "commands.reshard",
    "save_model": "commands.export",
    "simulate": "virtual.simulation.simulation",
    "take_adapter": "refit.adapters",
    "take_weights": "refit.taking",
    "verify_deltas": "commands.delta_applying",
    "verify_model": "commands.verify",
}

__getattr__, __dir__ = defer_imports(__name__, _HOMES)
