"""xrank gathers models that distributed training left on many ranks into one Hugging Face folder, proven exact.

Names are loaded when they are first used: importing the package imports neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.conversion.checkpoint import open_checkpoint
    from xrank.conversion.clean import clean
    from xrank.conversion.export import export_model, save_model
    from xrank.conversion.gather import gather_checkpoint
    from xrank.conversion.inspect import inspect
    from xrank.conversion.iterate import iter_model
    from xrank.conversion.load import load_model
    from xrank.conversion.reshard import reshard_checkpoint
    from xrank.conversion.verify import verify_model
    from xrank.gather.parallel import get_configs_parallel, get_tensors_parallel
    from xrank.recipes.quantization import Quantization
    from xrank.refit.publish import offer_weights
    from xrank.refit.receive import take_weights
    from xrank.refit.recording import record_layouts
    from xrank.version import __version__
    from xrank.virtual.simulation.simulation import simulate
    from xrank.workspace.nfs import NFSWorkspace
    from xrank.workspace.objects import ObjectWorkspace
    from xrank.workspace.shared_memory import SharedMemoryWorkspace

__all__ = [
    "NFSWorkspace",
    "ObjectWorkspace",
    "Quantization",
    "SharedMemoryWorkspace",
    "__version__",
    "clean",
    "export_model",
    "gather_checkpoint",
    "get_configs_parallel",
    "get_tensors_parallel",
    "inspect",
    "iter_model",
    "load_model",
    "offer_weights",
    "open_checkpoint",
    "record_layouts",
    "reshard_checkpoint",
    "save_model",
    "simulate",
    "take_weights",
    "verify_model",
]

_HOMES = {
    "__version__": "version",
    "NFSWorkspace": "workspace.nfs",
    "ObjectWorkspace": "workspace.objects",
    "Quantization": "recipes.quantization",
    "SharedMemoryWorkspace": "workspace.shared_memory",
    "clean": "conversion.clean",
    "export_model": "conversion.export",
    "gather_checkpoint": "conversion.gather",
    "get_configs_parallel": "gather.parallel",
    "get_tensors_parallel": "gather.parallel",
    "inspect": "conversion.inspect",
    "iter_model": "conversion.iterate",
    "load_model": "conversion.load",
    "offer_weights": "refit.publish",
    "open_checkpoint": "conversion.checkpoint",
    "record_layouts": "refit.recording",
    "reshard_checkpoint": "conversion.reshard",
    "save_model": "conversion.export",
    "simulate": "virtual.simulation.simulation",
    "take_weights": "refit.receive",
    "verify_model": "conversion.verify",
}

__getattr__, __dir__ = defer_imports(__name__, _HOMES)
