"""Values as JSON and tensors: what a message between ranks holds. Nothing is pickled, nothing is imported.

A value becomes a tree of tagged JSON lists, with each tensor replaced by its number; tensors that are the same view
keep one number, so ties survive. Classes (dataclasses, enums) are named, and found again only among the modules that
the receiving process has already imported.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeGuard

from xrank.errors import UnsafeError, UsageError
from xrank.gather.garbage import no_search
from xrank.workspace.plain_memory import has_memory, kind_without_elements

if TYPE_CHECKING:
    import torch

__all__ = ["check_sendable", "is_plain", "pack", "unpack"]

_MAX_DEPTH = 100
"""Of a value: far more than configs have, far less than the interpreter's stack."""


_NUMPY_SCALARS = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
"""Those that a Python number holds exactly."""


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Say whether a value is a tensor and nothing else, so that its tree is that of every other such."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Tensor


def check_sendable(tensor: torch.Tensor, where: str = "the value") -> None:
    """Refuse a tensor whose elements are not all there.

    Raises:
        UsageError: it is such a one.
    """
    import torch

    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        name = type(tensor).__qualname__
        raise UsageError(
            f"{where} is a {type(tensor).__module__}.{name}", got=name, want="a plain tensor or a Parameter",
            next_step="gather the plain tensors that it is made of (of a DTensor, tensor.to_local())",
        )  # fmt: skip
    kind = kind_without_elements(tensor)
    if kind is not None:
        raise UsageError(
            f"{where} is {kind}", got=kind, want="a dense tensor with data",
            next_step="gather the dense tensors it is made of",
        )  # fmt: skip
    if not has_memory(tensor):  # what was there is another's by now, or not there at all
        raise UsageError(
            f"{where} has no memory: its storage was freed",
            got=f"a storage of {tensor.untyped_storage().nbytes():,} bytes",
            want=f"memory of all {tensor.numel():,} elements",
            next_step="gather it where it is in memory: not while FSDP or an offloader keeps it elsewhere",
        )


def pack(value: object, where: str = "the value") -> tuple[Any, list[torch.Tensor]]:
    """Return a JSON-able tree and the tensors it refers to by number.

    Raises:
        UsageError: a part is of a kind that can't be sent; its place is named.
    """
    if type(value) is dict and (packed := _pack_tensors(value)) is not None:
        return packed
    packer = _Packer(where)
    return packer.pack(value, where), packer.tensors


def _pack_tensors(value: dict[Any, Any]) -> tuple[Any, list[torch.Tensor]] | None:
    """Return what `pack` does of a dict that holds nothing but tensors, no two of one memory; None of any other.

    A state of many small tensors is packed in a tenth of the time.
    """
    torch, tensors = sys.modules.get("torch"), list(value.values())
    if torch is None or set(map(type, tensors)) != {torch.Tensor} or set(map(type, value)) != {str}:
        return None
    if not all(map(_is_sendable, tensors)):
        return None
    places = {tensor.data_ptr() for tensor in tensors}
    if len(places) < len(tensors) or 0 in places:
        return None
    with no_search():
        return ["m", list(value)], [tensor.detach() for tensor in tensors]


def _is_sendable(tensor: torch.Tensor) -> bool:
    return kind_without_elements(tensor) is None and has_memory(tensor)


def unpack(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value of a tree that `pack` made.

    Raises:
        UsageError: it names a class that this process has not imported.
        UnsafeError: it names something that is no class of data, or is no tree of `pack`.
    """
    try:
        return _unpack(tree, tensors)
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError) as error:
        raise UnsafeError("a message is no tree of xrank's", got=f"{type(error).__name__}: {error}"[:200]) from None


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
    raise UnsafeError(f"a message has a part of an unknown kind: {kind!r}")


def _numpy_scalar(dtype: str, item: Any) -> Any:
    import numpy as np

    if dtype in _NUMPY_SCALARS and isinstance(item, bool | int | float):
        return np.dtype(dtype).type(item)
    raise UnsafeError("a message has no number where it says one", got=f"{dtype} {item!r}"[:100])


def _make_dataclass(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind = _find_class(tree[1], None)
    fields = {field.name for field in dataclasses.fields(kind)}
    items = {name: _unpack(item, tensors) for name, item in tree[2]}
    if strange := items.keys() - fields:
        got = ", ".join(sorted(map(str, strange)))
        raise UnsafeError(f"{tree[1]} has no field {got}", got=got[:100], want=", ".join(sorted(fields)))
    # Not by calling the class: what was sent are the fields as they are, and no one's __post_init__ runs twice. And
    # only when nothing can fail any more: a half-made one may have a __del__.
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
        raise UnsafeError(f"{name} was sent as a class of data and is none", got=repr(found)[:100])
    return found


def _look_up(module: str, qualified: str) -> Any:
    """Return what has this name in a module that is imported; None where there is no such thing."""
    found: Any = sys.modules.get(module)
    for part in qualified.split(".") if found is not None else ():
        # Not getattr: modules that import their parts when asked for them would do so.
        found = inspect.getattr_static(found, part, None)
    return found


def _name_of(kind: type, where: str) -> str:
    if _look_up(kind.__module__, kind.__qualname__) is not kind:
        raise UsageError(
            f"{where} is of a class that has no name in its module, so that no other process can find it",
            got=kind.__qualname__,
            want="a class of a module",
            next_step="move the class to the module's top level",
        )
    return f"{kind.__module__}:{kind.__qualname__}"


class _Packer:
    """Collects tensors while it walks a value."""

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
        if dataclasses.is_dataclass(value) and type(value).__new__ is object.__new__:  # no class, no dict with fields
            fields = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
            return [
                "c",
                _name_of(type(value), where),
                [[n, self.pack(getattr(value, n), f"{where}.{n}")] for n in fields],
            ]
        if isinstance(value, PurePath):
            return ["p", str(value)]
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
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which can't be sent",
            got=type(value).__qualname__,
            want="None, bool, int, float, str, list, tuple, dict, dataclass, Enum, Path, torch.dtype or tensors",
            next_step="leave it out, or turn it into one of these",
        )

    def _number(self, tensor: torch.Tensor, where: str) -> int:
        check_sendable(tensor, where)
        # Views of one memory; empty ones have none, and are one only if they are one object.
        place = tensor.data_ptr() or -id(tensor)
        view = (place, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
        number = self._numbers.setdefault(view, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor.detach())
        return number
