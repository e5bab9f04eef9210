"""Checks that optional packages, such as torch, are installed.

Checkpoints on disk are gathered, checked and cut anew without torch. Calls that take or return torch's tensors check
first that torch is there, before ranks meet or anything is written.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from xrank.errors import UsageError


def require_torch(what: str) -> None:
    """Check that torch is installed, without importing it.

    Args:
        what: the call that needs torch, for the error.

    Raises:
        UsageError: it is not; the error names the extra that installs it.
    """
    _require(what, "torch", "torch 2.10 or newer", "torch")


def require_cryptography(what: str) -> None:
    """Check that cryptography is installed, as `require_torch` does."""
    _require(what, "cryptography", "cryptography 42 or newer", "sign")


def require_obstore(what: str) -> None:
    """Check that obstore, which talks to object stores, is installed, as `require_torch` does."""
    _require(what, "obstore", "obstore 0.12 or newer", "remote")


def _require(what: str, module: str, want: str, extra: str) -> None:
    try:
        is_there = module in sys.modules or find_spec(module) is not None
    except (ImportError, ValueError):  # an import hook refuses it, or sys.modules bars it
        is_there = False
    if not is_there:
        raise UsageError(
            f"{what} needs {module}, which is not installed",
            got=f"xrank without {module}",
            want=want,
            next_step=f"run pip install 'xrank[{extra}]'",
        )
