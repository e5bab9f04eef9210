"""Values as JSON and tensors: what a message between ranks holds. Nothing is pickled, nothing is imported.

A value becomes a tree of tagged JSON lists, with each tensor replaced by its number; tensors that are the same view
keep one number, so ties survive. Classes (dataclasses, enums) are named, and found again only among the modules that
the receiving process has already imported.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from xrank.errors import UnsafeError, UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["pack", "unpack"]


def pack(value: object, where: str = "the value") -> tuple[Any, list[torch.Tensor]]:
    """Return a JSON-able tree and the tensors it refers to by number.

    Raises:
        UsageError: a part is of a kind that can't be sent; its place is named.
    """
    packer = _Packer()
    try:
        return packer.pack(value, where), packer.tensors
    except RecursionError:
        raise UsageError(f"{where} contains itself, or is nested too deep", want="a tree") from None


def unpack(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value of a tree that `pack` made.

    Raises:
        UsageError: it names a class that this process has not imported.
        UnsafeError: it names something that is no class of data.
    """
    kind = tree[0] if isinstance(tree, list) else None
    match kind:
        case None:
            return tree
        case "t":
            return tensors[tree[1]]
        case "l":
            return [unpack(item, tensors) for item in tree[1]]
        case "u":
            return tuple(unpack(item, tensors) for item in tree[1])
        case "d":
            return {unpack(key, tensors): unpack(item, tensors) for key, item in tree[1]}
        case "y":
            import torch

            return getattr(torch, tree[1])
        case "p":
            return Path(tree[1])
        case "e":
            return _find_class(tree[1], enum.Enum)[tree[2]]
        case "c":
            return _make_dataclass(tree, tensors)
    raise UnsafeError(f"a message has a part of an unknown kind: {kind!r}")


def _make_dataclass(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind = _find_class(tree[1], None)
    made = object.__new__(kind)
    # Not by calling the class: what was sent are the fields as they are, and no one's __post_init__ runs twice.
    for name, item in tree[2]:
        object.__setattr__(made, name, unpack(item, tensors))
    return made


def _find_class(name: str, base: type | None) -> Any:
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split(".") if found is not None else ():
        found = getattr(found, part, None)
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


def _name_of(kind: type, where: str) -> str:
    if "<locals>" in kind.__qualname__:
        raise UsageError(
            f"{where} is of a class defined inside a function, which no other process can find",
            got=kind.__qualname__,
            want="a class of a module",
            next_step="move the class to the module's top level",
        )
    return f"{kind.__module__}:{kind.__qualname__}"


class _Packer:
    """Collects tensors while it walks a value."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def pack(self, value: Any, where: str) -> Any:
        """Return the tree of one part."""
        if value is None or (isinstance(value, bool | int | float | str) and type(value) in (bool, int, float, str)):
            return value
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return ["t", self._number(value, where)]
        if torch is not None and isinstance(value, torch.dtype):
            return ["y", str(value).removeprefix("torch.")]
        if isinstance(value, enum.Enum):
            return ["e", _name_of(type(value), where), value.name]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
            return [
                "c",
                _name_of(type(value), where),
                [[n, self.pack(getattr(value, n), f"{where}.{n}")] for n in fields],
            ]
        if isinstance(value, PurePath):
            return ["p", str(value)]
        if isinstance(value, dict):
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
        import torch

        module = sys.modules.get("torch.distributed.tensor")
        if module is not None and isinstance(tensor, module.DTensor):
            raise UsageError(
                f"{where} is a DTensor", got="DTensor", want="a plain tensor",
                next_step="gather tensor.to_local(), or tensor.full_tensor()",
            )  # fmt: skip
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
            kind = "a meta tensor" if tensor.is_meta else f"of layout {tensor.layout}"
            raise UsageError(
                f"{where} is {kind}", got=kind, want="a dense tensor with data",
                next_step="gather the dense tensors it is made of",
            )  # fmt: skip
        view = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        number = self._numbers.setdefault((*view, tensor.is_conj(), tensor.is_neg()), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor.detach())
        return number
