"""xrank gathers models that distributed training left on many ranks into one Hugging Face folder, proven exact.

Names are loaded when they are first used: importing the package imports neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xrank.conversion.checkpoint import open_checkpoint
    from xrank.conversion.gather import gather_checkpoint
    from xrank.conversion.reshard import reshard_checkpoint
    from xrank.conversion.verify import verify_model
    from xrank.gather.parallel import get_configs_parallel, get_tensors_parallel
    from xrank.workspace.nfs import NFSWorkspace
    from xrank.workspace.shared_memory import SharedMemoryWorkspace

__version__ = "0.1.0"

__all__ = [
    "NFSWorkspace",
    "SharedMemoryWorkspace",
    "__version__",
    "gather_checkpoint",
    "get_configs_parallel",
    "get_tensors_parallel",
    "open_checkpoint",
    "reshard_checkpoint",
    "verify_model",
]

_HOMES = {
    "NFSWorkspace": "xrank.workspace.nfs",
    "SharedMemoryWorkspace": "xrank.workspace.shared_memory",
    "gather_checkpoint": "xrank.conversion.gather",
    "get_configs_parallel": "xrank.gather.parallel",
    "get_tensors_parallel": "xrank.gather.parallel",
    "open_checkpoint": "xrank.conversion.checkpoint",
    "reshard_checkpoint": "xrank.conversion.reshard",
    "verify_model": "xrank.conversion.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
