"""Keeps torch.compile away from gathers: its tracer would follow a gather into the package, for a minute, in vain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def keep_uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Mark a function so that the compiler calls it instead of tracing it (torch/_dynamo/decorators.py: skip)."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@keep_uncompiled
def call_uncompiled(
    function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Result:
    """Return the function's result; if the compiler runs the caller, all that the function calls is left alone."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return function(*args, **kwargs)
    # None and False mean that no frame is traced now (torch/csrc/dynamo/eval_frame.c).
    callback = getattr(sys.modules.get("torch._C._dynamo.eval_frame"), "get_eval_frame_callback", None)
    if callback is not None and callback() in (None, False):
        return function(*args, **kwargs)
    result: Result = dynamo.disable(function)(*args, **kwargs)
    return result
