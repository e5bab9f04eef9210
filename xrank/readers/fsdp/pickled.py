"""Objects of torch.distributed in a pickle: their classes and attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xrank.dtypes import by_torch_name
from xrank.errors import UsageError
from xrank.formats.pickles import InertRecord, inert_error
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor

_PACKAGE = "torch.distributed."
_MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A tensor subclass around local tensors (torch/_utils.py: _rebuild_wrapper_subclass)."""

    kind: str
    """Name of the class."""
    dtype: str
    """Safetensors name of the element type."""
    shape: tuple[int, ...]
    """Global shape."""
    state: object
    """State that the class saved."""


def is_object(value: object, *names: str) -> bool:
    """Return whether a pickled value is an object of one of these classes of torch.distributed.

    Releases moved the modules (``torch.distributed._tensor``, ``torch.distributed.tensor``) but kept the class names.
    """
    return (
        isinstance(value, InertRecord)
        and value.args is not None
        and value.name in names
        and value.module.startswith(_PACKAGE)
    )


def attributes(value: object) -> Mapping[str, Any]:
    """Return an object's attributes, from a ``__dict__`` or slots (a pair of both); empty without either."""
    state = value.state if isinstance(value, InertRecord) else value
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    found: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, dict):
            found.update((key, value) for key, value in part.items() if isinstance(key, str))
    return found


def unwrap_parameter(value: object) -> object:
    """Return the data of a parameter; other values unchanged."""
    # torch/_utils.py: _rebuild_parameter(data, requires_grad, hooks); already resolved for plain tensors.
    match value:
        case InertRecord(module="torch._utils", name="_rebuild_parameter", args=(data, bool(), hooks)) if not hooks:
            return data
    return value


def read_wrapper(value: object, origin: Origin) -> Wrapper | None:
    """Return a DTensor or a ShardedTensor as its class and state; None for other values.

    Raises:
        CorruptError: its element type or shape is invalid.
    """
    # torch/_tensor.py: _rebuild_from_type_v2(func, new_type, args, state), with func _rebuild_wrapper_subclass(cls,
    # dtype, size, stride, storage_offset, layout, device, requires_grad).
    match value:
        case InertRecord(
            module="torch._tensor",
            name="_rebuild_from_type_v2",
            args=(
                InertRecord(module="torch._utils", name="_rebuild_wrapper_subclass", args=None),
                InertRecord(args=None) as kind,
                tuple() as parts,
                state,
            ),
        ) if kind.module.startswith(_PACKAGE) and len(parts) >= 3:
            return Wrapper(kind.name, element_type(parts[1], origin), sizes_of(parts[2], origin), state)
    return None


def element_type(value: object, origin: Origin) -> str:
    """Return the safetensors name of an element type that torch names.

    Raises:
        CorruptError: it is not a name.
        UsageError: safetensors cannot hold the type.
    """
    if not isinstance(value, str):
        raise origin.corrupt("a tensor's element type is invalid", got=type(value).__name__)
    try:
        return by_torch_name(value.removeprefix("torch.")).name
    except UsageError as error:
        error.about(origin.name, file=origin.path, rank=origin.rank)
        raise


def sizes_of(value: object, origin: Origin) -> tuple[int, ...]:
    """Return sizes or offsets, one per dim.

    Raises:
        CorruptError: they are not counts.
    """
    if (
        not isinstance(value, (tuple, list))
        or len(value) > _MAX_DIMENSIONS
        or not all(type(part) is int and 0 <= part < 1 << 63 for part in value)
    ):
        got = quote(tuple(value)) if isinstance(value, (tuple, list)) else type(value).__name__
        raise origin.corrupt("a tensor's sizes are not counts", got=got)
    return tuple(value)


def read_local_tensor(value: object, name: str, dtype: str, origin: Origin) -> ArchivedTensor:
    """Return a rank's plain tensor inside a tensor subclass.

    Raises:
        CorruptError: its type differs from the outer tensor's.
        UnsafeError: it is not a plain tensor.
    """
    value = unwrap_parameter(value)
    if not isinstance(value, ArchivedTensor):
        raise inert_error(value, origin, f"{name}: the rank's part")
    if value.dtype != dtype:
        raise origin.corrupt(f"{name}: the rank's part has another type than the tensor", got=value.dtype, want=dtype)
    return value
