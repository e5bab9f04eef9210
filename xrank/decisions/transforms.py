"""Transforms: a caller's function on whole tensors. Meta tensors reveal its outputs before any value moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from xrank import dtypes
from xrank.errors import UsageError
from xrank.plan.output import OutputTensor
from xrank.ranks.memory import has_memory, kind_without_elements

if TYPE_CHECKING:
    import torch

Transform: TypeAlias = "Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]"
"""Function of a name and a whole tensor that returns tensors by name."""

_NEXT_STEP = "let names, shapes and dtypes follow from those of the tensor alone; where values are looked at, as by "
_NEXT_STEP += "item() or an if, leave that out if tensor.is_meta, "
_NEXT_STEP += "and return a new tensor: {name: the same one} copies"


def probe_outputs(
    transform: Transform, name: str, dtype: str, shape: tuple[int, ...]
) -> tuple[OutputTensor, ...] | None:
    """Return the outputs of a transform for a tensor of that kind, learnt from a call with a meta tensor.

    Args:
        transform: the caller's function.
        name: the tensor's name.
        dtype: safetensors name of its element type.
        shape: its global shape.

    Returns:
        None if it returns the tensor itself and nothing else; an empty tuple if it leaves the tensor out.

    Raises:
        UsageError: the call fails, or it returns a value that no folder can hold.
    """
    import torch

    from xrank.decisions.change_watch import ChangeWatch

    try:
        # Inference mode does not count changes in place, so leave the caller's.
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.empty(shape, dtype=getattr(torch, dtypes.dtype(dtype).torch_name), device="meta")
            watch = ChangeWatch(tensor)
            with watch:
                made = transform(name, tensor)
    except Exception as error:
        raise UsageError(
            f"transform does not describe its outputs for {name}: called with a tensor on the meta device, which has a "
            "shape and a dtype and no values, it raised",
            tensor=name,
            got=f"{type(error).__name__}: {error}"[:300],
            want="the outputs that it returns for a tensor with values, without values",
            next_step=_NEXT_STEP,
        ) from error
    outputs = tuple(
        OutputTensor(*_kind(name, key, value)) for key, value in _check_outputs(name, made, is_probe=True).items()
    )
    # A tensor changed in place is not the one that the ranks hold.
    if set(made) == {name} and made[name] is tensor and not watch.has_changed:
        return None
    return outputs


def apply_transform(
    transform: Transform, name: str, tensor: torch.Tensor, outputs: tuple[OutputTensor, ...]
) -> list[torch.Tensor]:
    """Return the tensors that a transform makes of a tensor, in the order of `outputs`, which the probe returned.

    Raises:
        UsageError: its outputs differ from the probe's. Its own exceptions propagate with a note that names the tensor.
    """
    import torch

    try:
        with torch.no_grad():
            made = transform(name, tensor)
    except Exception as error:
        error.add_note(f"in transform of {name}")
        raise
    told = {output.name: (output.name, output.dtype, output.shape) for output in outputs}
    found = {key: _kind(name, key, value) for key, value in _check_outputs(name, made).items()}
    for key in (*told, *found):
        if told.get(key) != found.get(key):
            raise UsageError(
                f"transform of {name} makes another {key} than it said",
                tensor=name,
                got=_text(found.get(key)),
                want=f"{_text(told.get(key))}, as of a tensor on the meta device",
                next_step=_NEXT_STEP,
            )
    return [made[output.name] for output in outputs]


def _check_outputs(name: str, made: object, *, is_probe: bool = False) -> Mapping[str, torch.Tensor]:
    if not isinstance(made, Mapping):
        raise _output_error(name, f"returned {type(made).__name__}")
    for key, value in made.items():
        if not isinstance(key, str) or not key.isprintable() or ".." in re.split(r"[/\\]", key):
            raise _output_error(name, f"returned a tensor under {key!r}, which is no name")
        if key == "__metadata__":
            raise _output_error(name, "returned __metadata__, a name that safetensors keeps for itself")
        fault = _fault(value, is_probe=is_probe)
        if fault is not None:
            raise _output_error(name, f"returned {fault} under {key!r}")
    return made


def _fault(value: object, *, is_probe: bool) -> str | None:
    """Describe a value that is not a dense tensor in memory; None if it is one. A probe also accepts meta tensors."""
    import torch

    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if is_probe and value.is_meta:
        return None if value.layout is torch.strided and not value.is_nested else "a tensor that is not dense"
    kind = kind_without_elements(value)
    if kind is not None:
        return f"a tensor that is {kind}"
    if not has_memory(value):
        return "a tensor whose storage was freed"
    # DTensors, and others that hold their values in further tensors, only report the size of their storage.
    return f"a {type(value).__name__} without memory" if value.numel() and not value.data_ptr() else None


def _output_error(name: str, what: str) -> UsageError:
    return UsageError(
        f"transform of {name} {what}",
        tensor=name,
        got=what,
        want="a dict of names and dense tensors: {name: tensor} to copy it, {} to leave it out",
        next_step="correct the transform",
    )


def _kind(name: str, key: str, value: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    torch_name = str(value.dtype).removeprefix("torch.")
    try:
        return key, dtypes.by_torch_name(torch_name).name, tuple(value.shape)
    except UsageError:
        raise _output_error(name, f"returned {key} of torch.{torch_name}, which no safetensors file holds") from None


def _text(kind: tuple[str, str, tuple[int, ...]] | None) -> str:
    return "none" if kind is None else f"{kind[0]}, {kind[1]} {list(kind[2])}"
