"""Detection of changes to a tensor, also those that torch does not count, as through ``.data``; reads no values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ChangeWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes writes to a tensor's storage in its body, under any name, and whether the tensor gets another storage."""

    # The operators that such an operator runs come here again, one by one.
    supports_higher_order_operators = True

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensor = tensor
        self._storage = tensor.untyped_storage()  # a reference, so that no other storage gets its address
        self._place = _place(tensor)
        self._is_written = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run compiled, as it does without a watch."""
        return True

    @property
    def has_changed(self) -> bool:
        """Whether the body wrote to the tensor's storage, or replaced its storage, dtype or shape."""
        return self._is_written or _place(self._tensor) != self._place

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        schema = getattr(func, "_schema", None)
        for position, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._note(args[position] if position < len(args) else given.get(argument.name))
        return func(*args, **given)

    def _note(self, written: Any) -> None:
        for one in written if isinstance(written, list | tuple) else (written,):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                self._is_written |= one.untyped_storage()._cdata == self._storage._cdata


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the location of a tensor's elements, and the number of changes that torch counted."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor._version
