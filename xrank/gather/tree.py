"""Values as JSON and tensors, the content of a message between ranks. Nothing is pickled, nothing is imported.

A value becomes a tree of tagged JSON lists, with each tensor replaced by its number. Tensors that are the same view
share a number, so ties survive. Classes (dataclasses, enums) are sent by name, and found again only among the modules
that the receiving process has already imported.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
from collections.abc import Sequence
from itertools import islice
from math import prod
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeGuard

from xrank.errors import UnsafeError, UsageError
from xrank.gather.garbage import pause_collection
from xrank.workspace.plain_memory import has_memory, kind_without_elements

if TYPE_CHECKING:
    import torch

__all__ = ["check_sendable", "is_plain", "make_tensors", "pack", "unpack"]

_MAX_DEPTH = 100
"""Levels of a value: far more than configs have, far fewer than the interpreter's stack."""


_NUMPY_SCALARS = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
"""Scalar types whose values a Python number holds exactly."""
_SAME_VERSION = "let all ranks use the same version of xrank, and of the classes that they send"


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor of torch's own class, whose tree is always the same."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Tensor


def check_sendable(tensor: torch.Tensor, where: str = "the value") -> None:
    """Check that a tensor has all of its elements.

    Raises:
        UsageError: it is a subclass, not dense, or without memory.
    """
    import torch

    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        name = type(tensor).__qualname__
        raise UsageError(
            f"{where} is a {type(tensor).__module__}.{name}", got=name, want="a plain tensor or a Parameter",
            next_step="gather its plain tensors (for a DTensor, tensor.to_local())",
        )  # fmt: skip
    kind = kind_without_elements(tensor)
    if kind is not None:
        raise UsageError(
            f"{where} is {kind}", got=kind, want="a dense tensor with data",
            next_step="gather its dense tensors",
        )  # fmt: skip
    if not has_memory(tensor):  # its memory belongs to another tensor by now, or to none
        raise UsageError(
            f"{where} has no memory: its storage was freed",
            got=f"a storage of {tensor.untyped_storage().nbytes():,} bytes",
            want=f"memory of all {tensor.numel():,} elements",
            next_step="gather it while it is in memory, not while FSDP or an offloader keeps it elsewhere",
        )


def pack(value: object, where: str = "the value") -> tuple[Any, list[torch.Tensor]]:
    """Return a JSON-able tree and the tensors it refers to by number.

    Raises:
        UsageError: a part is of a kind that cannot be sent; the error names its place.
    """
    if type(value) is dict and (packed := _pack_tensors(value)) is not None:
        return packed
    packer = _Packer(where)
    return packer.pack(value, where), packer.tensors


def _pack_tensors(value: dict[Any, Any]) -> tuple[Any, list[torch.Tensor]] | None:
    """Return the result of `pack` for a dict that contains only tensors with different memory; None for any other.

    A state of many small tensors is packed in a tenth of the time.
    """
    torch, tensors = sys.modules.get("torch"), list(value.values())
    if torch is None or set(map(type, tensors)) != {torch.Tensor} or set(map(type, value)) != {str}:
        return None
    if not all(map(_is_sendable, tensors)):
        return None
    # Tensors at one address may be one view, which must keep one number: the general way decides.
    places = {tensor.data_ptr() for tensor in tensors}
    if len(places) < len(tensors) or 0 in places:
        return None
    with pause_collection():
        return ["m", list(value)], [tensor.detach() for tensor in tensors]


def _is_sendable(tensor: torch.Tensor) -> bool:
    return kind_without_elements(tensor) is None and has_memory(tensor)


def unpack(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value of a tree that `pack` made.

    Raises:
        UsageError: it names a class that this process has not imported.
        UnsafeError: it names an object that is not a class of data, or it is not a tree of `pack`.
    """
    try:
        return _unpack(tree, tensors)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError) as error:
        raise UnsafeError(
            "a message is not a tree of xrank", got=f"{type(error).__name__}: {error}"[:200], next_step=_SAME_VERSION
        ) from None


def _unpack(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    kind = tree[0]
    match kind:
        case "t":
            return tensors[tree[1]]
        case "m":
            return dict(zip(tree[1], tensors, strict=True))
        case "l":
            return [_unpack(item, tensors) for item in tree[1]]
        case "u":
            return tuple(_unpack(item, tensors) for item in tree[1])
        case "d":
            return {_unpack(key, tensors): _unpack(item, tensors) for key, item in tree[1]}
        case "y":
            import torch

            if isinstance(dtype := vars(torch).get(tree[1]), torch.dtype):
                return dtype
        case "p":
            return Path(tree[1])
        case "s":
            return _numpy_scalar(tree[1], tree[2])
        case "e":
            return _find_class(tree[1], enum.Enum).__members__[tree[2]]
        case "c":
            return _make_dataclass(tree, tensors)
    raise UnsafeError(f"a message has a part of an unknown kind: {kind!r}", next_step=_SAME_VERSION)


def _numpy_scalar(dtype: str, item: Any) -> Any:
    import numpy as np

    if dtype in _NUMPY_SCALARS and isinstance(item, bool | int | float):
        return np.dtype(dtype).type(item)
    raise UnsafeError("a message has an invalid number", got=f"{dtype} {item!r}"[:100], next_step=_SAME_VERSION)


def _make_dataclass(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind = _find_class(tree[1], None)
    fields = {field.name for field in dataclasses.fields(kind)}
    items = {name: _unpack(item, tensors) for name, item in tree[2]}
    if strange := items.keys() - fields:
        got = ", ".join(sorted(map(str, strange)))
        raise UnsafeError(
            f"{tree[1]} has no field {got}", got=got[:100], want=", ".join(sorted(fields)), next_step=_SAME_VERSION
        )
    # Set the fields without calling the class: they were sent as they are, and __post_init__ must not run twice.
    # All checks come first: a half-made object may have a __del__.
    made = object.__new__(kind)
    for name, item in items.items():
        object.__setattr__(made, name, item)
    return made


def _find_class(name: str, base: type | None) -> Any:
    module, _, qualified = name.partition(":")
    found = _look_up(module, qualified)
    if found is None:
        raise UsageError(
            f"{qualified} of module {module} was sent, and this process does not have it",
            got=name,
            want="classes of modules that the first rank has imported",
            next_step=f"import {module} on the first rank before the gather",
        )
    is_right = isinstance(found, type) and (
        dataclasses.is_dataclass(found) if base is None else issubclass(found, base)
    )
    if not is_right:
        raise UnsafeError(
            f"{name} was sent as a class of data, and is not one", got=repr(found)[:100], next_step=_SAME_VERSION
        )
    return found


def _look_up(module: str, qualified: str) -> Any:
    """Return the object of this name in an imported module; None if it has none."""
    found: Any = sys.modules.get(module)
    for part in qualified.split(".") if found is not None else ():
        # Not getattr: modules that import their parts on access would do so.
        found = inspect.getattr_static(found, part, None)
    return found


def _name_of(kind: type, where: str) -> str:
    if _look_up(kind.__module__, kind.__qualname__) is not kind:
        raise UsageError(
            f"{where} is of a class that its module does not contain, so no other process can find it",
            got=kind.__qualname__,
            want="a class of a module",
            next_step="move the class to the module's top level",
        )
    return f"{kind.__module__}:{kind.__qualname__}"


class _Packer:
    """Collects the tensors of a value while it walks the value."""

    def __init__(self, whole: str) -> None:
        self.tensors: list[torch.Tensor] = []
        self._whole = whole
        self._depth = 0
        self._numbers: dict[tuple[Any, ...], int] = {}

    def pack(self, value: Any, where: str) -> Any:
        """Return the tree of one part."""
        if self._depth == _MAX_DEPTH:
            raise UsageError(
                f"{self._whole} contains itself, or is nested too deep", want=f"{_MAX_DEPTH} levels at most"
            )
        self._depth += 1
        tree = self._pack(value, where)
        self._depth -= 1
        return tree

    def _pack(self, value: Any, where: str) -> Any:
        if value is None or (isinstance(value, bool | int | float | str) and type(value) in (bool, int, float, str)):
            return value
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return ["t", self._number(value, where)]
        if torch is not None and isinstance(value, torch.dtype):
            return ["y", str(value).removeprefix("torch.")]
        if isinstance(value, enum.Enum) and value.name in type(value).__members__:  # not a combination of flags
            return ["e", _name_of(type(value), where), value.name]
        if dataclasses.is_dataclass(value) and type(value).__new__ is object.__new__:  # not a class, not a dict
            fields = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
            return [
                "c",
                _name_of(type(value), where),
                [[n, self.pack(getattr(value, n), f"{where}.{n}")] for n in fields],
            ]
        if isinstance(value, PurePath):
            return ["p", str(value)]
        # numpy 1 calls its bool "bool_".
        if (dtype := type(value).__name__.rstrip("_")) in _NUMPY_SCALARS and type(value).__module__ == "numpy":
            return ["s", dtype, value.item()]
        if isinstance(value, dict) and not dataclasses.is_dataclass(value):
            items = [[self.pack(k, f"a key of {where}"), self.pack(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return ["d", items]
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return ["u", [self.pack(v, f"{where}[{i}]") for i, v in enumerate(value)]]
        if isinstance(value, list):
            return ["l", [self.pack(v, f"{where}[{i}]") for i, v in enumerate(value)]]
        raise UsageError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent",
            got=type(value).__qualname__,
            want="None, bool, int, float, str, list, tuple, dict, dataclass, Enum, Path, torch.dtype or tensors",
            next_step="omit it, or convert it to one of these",
        )

    def _number(self, tensor: torch.Tensor, where: str) -> int:
        check_sendable(tensor, where)
        # Views of one memory get one number. Empty tensors have no memory: they are one only if they are one object.
        place = tensor.data_ptr() or -id(tensor)
        view = (place, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
        number = self._numbers.setdefault(view, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor.detach())
        return number


def make_tensors(rows: Sequence[Any], buffers: Sequence[memoryview]) -> list[torch.Tensor]:
    """Return tensors over these buffers, without a copy."""
    import torch

    tensors, remaining = [], iter(buffers)
    for name, shape, count in rows:
        dtype = getattr(torch, name)
        if not prod(shape):
            tensors += [torch.empty(shape, dtype=dtype, device="cpu") for _ in islice(remaining, count)]
            continue
        if count == 1:
            flat = [torch.frombuffer(next(remaining), dtype=dtype)]
        else:
            with pause_collection():
                flat = [torch.frombuffer(buffer, dtype=dtype) for buffer in islice(remaining, count)]
        tensors += flat if len(shape) == 1 else [tensor.view(shape) for tensor in flat]
    return tensors
