"""Write pickles of plain values, tensors in an archive, and instances of classes of other packages, without these.

Only the opcodes of protocol 2 are written, as by ``torch.save``; each class is named once.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from msgspec import Struct

from xrank.dtypes import dtype
from xrank.formats.torch_archive import STORAGE_DTYPES, ArchivedTensor

_STORAGES = {dtype_name: storage for storage, dtype_name in STORAGE_DTYPES.items()}
_PROTOCOL = 2  # torch/serialization.py: DEFAULT_PROTOCOL


class Global(Struct, frozen=True):
    """A class or function, or a constant such as torch's element types."""

    module: str
    name: str


class Call(Struct, frozen=True):
    """The result of a call."""

    function: Global
    arguments: tuple[Any, ...]


class Instance(Struct, frozen=True):
    """An instance of a class, made without its constructor."""

    kind: Global
    state: Any


class Pairs(Struct, frozen=True):
    """A dict of keys that Python cannot hash before they are made."""

    pairs: Sequence[tuple[Any, Any]]


def size_value(shape: tuple[int, ...]) -> Call:
    """Return a ``torch.Size``."""
    return Call(Global("torch", "Size"), (shape,))


def write_pickle(value: Any) -> bytes:
    """Return the pickle of a value: plain values, lists, tuples, dicts, the classes above, and `ArchivedTensor`.

    Each tensor is the whole of its record in the archive; equal ones become one tensor under several names. TypeError
    for other values.
    """
    data = bytearray(pickle.PROTO + bytes([_PROTOCOL]))
    _Writer(data).add(value)
    return bytes(data + pickle.STOP)


class _Writer:
    def __init__(self, data: bytearray) -> None:
        self._data = data
        self._memo: dict[Any, bytes] = {}
        """Global or tensor -> the opcode that gets it again."""

    def add(self, value: Any) -> None:
        data = self._data
        match value:
            case str():
                text = value.encode("utf-8", "surrogatepass")
                data += pickle.BINUNICODE + len(text).to_bytes(4, "little") + text
            case None | bool() | int() | float():
                # The number itself: numpy's float64 is a float, too, and its class is not to be named.
                plain = value if value is None or isinstance(value, bool) else _as_number(value)
                data += pickle.dumps(plain, _PROTOCOL)[2:-1]  # without the protocol and the stop
            case tuple():
                self._add_tuple(value)
            case list():
                data += pickle.EMPTY_LIST + pickle.MARK
                for one in value:
                    self.add(one)
                data += pickle.APPENDS
            case Mapping() | Pairs():
                data += pickle.EMPTY_DICT + pickle.MARK
                for key, one in value.pairs if isinstance(value, Pairs) else value.items():
                    self.add(key)
                    self.add(one)
                data += pickle.SETITEMS
            case Global():
                self._add_once(value, pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
            case Call():
                self.add(value.function)
                self._add_tuple(value.arguments)
                data += pickle.REDUCE
            case Instance():
                self.add(value.kind)
                data += pickle.EMPTY_TUPLE + pickle.NEWOBJ
                self.add(value.state)
                data += pickle.BUILD
            case ArchivedTensor():
                if value in self._memo:
                    data += self._memo[value]
                else:
                    self._add_tensor(value)
                    self._add_once(value, b"")
            case _:
                raise TypeError(f"a {type(value).__name__} is not a plain value")

    def _add_tuple(self, value: tuple[Any, ...]) -> None:
        self._data += pickle.MARK
        for one in value:
            self.add(one)
        self._data += pickle.TUPLE

    def _add_once(self, value: Any, made: bytes) -> None:
        known = self._memo.get(value)
        if known is None:
            number = len(self._memo).to_bytes(4, "little")
            self._memo[value], known = pickle.LONG_BINGET + number, made + pickle.LONG_BINPUT + number
        self._data += known

    def _add_tensor(self, tensor: ArchivedTensor) -> None:
        """Add the call of torch/_utils.py: _rebuild_tensor_v2, or _v3 if the element type has no storage class."""
        element = dtype(tensor.dtype)
        storage = _STORAGES.get(element.torch_name)
        count = prod(tensor.shape) * (1 if storage else element.nbytes)
        self.add(Global("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3"))
        kind = Global("torch", storage) if storage else Global("torch.storage", "UntypedStorage")
        self._data += pickle.MARK
        # ("storage", type, key, location, count): torch/serialization.py: _save.persistent_id.
        self._add_tuple(("storage", kind, tensor.key, "cpu", count))
        self._data += pickle.BINPERSID
        no_hooks = Call(Global("collections", "OrderedDict"), ())
        for one in (tensor.storage_offset, tensor.shape, tensor.strides, False, no_hooks):
            self.add(one)
        if storage is None:
            self.add(Global("torch", element.torch_name))
        self._data += pickle.TUPLE + pickle.REDUCE


def _as_number(value: float) -> float:
    return int(value) if isinstance(value, int) else float(value)
