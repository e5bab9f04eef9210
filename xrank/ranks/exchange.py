"""One gather: values as messages, the leaving of its ranks together, and the failure that ends it for all."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import inspect
import json
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby, islice
from math import inf, prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, NamedTuple

from xrank.errors import ContradictionError, IncompleteError, UnsafeError, UsageError, XrankError
from xrank.ranks.failure import Deadline, FailureRecord, damage_error
from xrank.ranks.group import RankGroup
from xrank.ranks.memory import check_dense, explain_size_limit, has_memory, kind_without_elements
from xrank.ranks.memory_messages import is_as_in_memory
from xrank.ranks.wire import Message, MessageWorkspace
from xrank.system import pause_collection
from xrank.words import repr_text

if TYPE_CHECKING:
    import torch


SAME_VERSION = "let all ranks use the same version of xrank, and of the classes that they send"


def is_data_class(kind: type) -> bool:
    """Return whether instances of a class can be sent: a dataclass or pydantic model that is not also a container."""
    new: object = kind.__new__
    model = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    is_pydantic = isinstance(model, type) and issubclass(kind, model)
    return new is object.__new__ and (dataclasses.is_dataclass(kind) or is_pydantic)


def name_of(kind: type, where: str) -> str:
    """Return the name by which another process finds a class; UsageError if its module does not contain it."""
    if _look_up(kind.__module__, kind.__qualname__) is not kind:
        what = f"{where} has a class that is not at the top level of its module, so other processes cannot find it"
        raise UsageError(what, got=kind.__qualname__, next_step="move the class to its module's top level")
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(name: str, *, is_enum: bool = False) -> Any:
    """Return the data class, or the enum, of this name, among those of imported modules."""
    module, _, qualified = name.partition(":")
    found = _look_up(module, qualified)
    if found is None:
        what = f"{qualified} of module {module} was sent, and this process does not have it"
        raise UsageError(what, got=name, next_step=f"import {module} on the first rank before the gather")
    if isinstance(found, type) and (issubclass(found, enum.Enum) if is_enum else is_data_class(found)):
        return found
    what = f"{name} was sent as a data class, but is not one"
    raise UnsafeError(what, got=repr(found)[:100], next_step=SAME_VERSION)


def _look_up(module: str, qualified: str) -> Any:
    """Return the object of this name in an imported module; None if it has none."""
    found: Any = sys.modules.get(module)
    for part in qualified.split(".") if found is not None else ():
        # Not getattr: modules that import their parts on access would do so.
        found = inspect.getattr_static(found, part, None)
    return found


def read_attributes(value: object, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return all attributes that an instance of a data class stores, and the names that its class does not declare.

    The type arguments of a generic class (`__orig_class__`, set by typing) are annotations and stay behind.
    """
    kind = type(value)
    stored = dict(_instance_dict(value) or {})
    stored.pop("__orig_class__", None)
    for name in stored:
        if not _is_free_name(name):
            raise UsageError(
                f"{where} has the attribute {name!r}, a reserved name",
                want="a name without leading and trailing double underscores",
                next_step="rename the attribute, or send its value separately",
            )
    for name, slot in _slots(kind).items():
        # Not getattr: a slot may be hidden by a property, and an unset one would call __getattr__.
        with suppress(AttributeError):
            stored[name] = slot.__get__(value)
    declared = _declared_names(kind)
    return stored, [name for name in stored if name not in declared]


def make_instance(name: str, attributes: Mapping[str, Any], undeclared: Sequence[str]) -> Any:
    """Return an instance of a data class with exactly these attributes.

    All checks come before the instance exists, because an incomplete one may have a `__del__`.
    """
    kind = find_class(name)
    slots, declared = _slots(kind), _declared_names(kind)
    has_dict = any("__dict__" in vars(base) for base in kind.__mro__)
    strange = [
        item
        for item in attributes
        # The sender's class declared a field that this process's class lacks: it is another version.
        if (item not in declared and item not in undeclared)
        or not (item in slots or (has_dict and _is_free_name(item)))
    ]
    if strange:
        what = f"{name} has no field {', '.join(sorted(map(str, strange)))}"
        raise UnsafeError(what, want=", ".join(sorted(declared)), next_step=SAME_VERSION)
    made: Any = object.__new__(kind)
    stored = _instance_dict(made)
    for attribute, item in attributes.items():
        if attribute in slots:
            slots[attribute].__set__(made, item)
        elif stored is not None:
            stored[attribute] = item
    return made


def _instance_dict(value: object) -> dict[Any, Any] | None:
    try:
        found: dict[Any, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found


def _slots(kind: type) -> dict[str, MemberDescriptorType]:
    """Return the slots of a class by name; a derived class's hides its base's."""
    found: dict[str, MemberDescriptorType] = {}
    for base in reversed(kind.__mro__):
        found |= {name: item for name, item in vars(base).items() if isinstance(item, MemberDescriptorType)}
    return found


def _declared_names(kind: type) -> set[str]:
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    names = inspect.getattr_static(kind, "__pydantic_fields__", None)
    return set(names) if isinstance(names, dict) else set()


def _is_free_name(name: object) -> bool:
    """Return whether an instance may store an attribute under this name: any text that Python does not reserve."""
    return isinstance(name, str) and not (name.startswith("__") and name.endswith("__"))


_MAX_DEPTH = 100
"""Levels of a value: far more than configs have, far fewer than the interpreter's stack."""


_MAX_INTEGER = 1 << 8192
"""Integers below it are sent as JSON's numbers."""
_NUMPY_SCALARS = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
"""Scalar types whose values a Python number holds exactly."""
_SEQUENCES: dict[str, type] = {"l": list, "u": tuple, "x": set, "z": frozenset}
"""Classes of several items, by their tag."""
_MAPPINGS: dict[str, type] = {"OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": defaultdict}
"""Classes of dicts beside dict itself, by their name in a tree."""
_FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, dict, float, frozenset, int, list, set, str, tuple)
}
"""Classes that a defaultdict may call for a missing key, by name."""
_PURE_PATHS: dict[str, type[PurePosixPath | PureWindowsPath]] = {
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
}


def pack(value: object, where: str = "the value") -> tuple[Any, list[torch.Tensor]]:
    """Return a JSON-able tree and the tensors it refers to by number; UsageError names a part that cannot be sent."""
    packer = _Packer(where)
    if type(value) in (dict, OrderedDict) and (packed := _pack_tensors(value)) is not None:
        if type(value) is dict:
            return packed
        tree, tensors = packed
        wrapped = packer.pack_mapping(value, tree, where)
        if not packer.tensors:  # a module's state dict: an OrderedDict with the attribute _metadata
            return wrapped, tensors
        packer = _Packer(where)
    return packer.pack(value, where), packer.tensors


def _pack_tensors(value: Any) -> tuple[Any, list[torch.Tensor]] | None:
    """Return the result of `pack` for a dict that contains only tensors with different memory; None for any other.

    A state of many small tensors is packed in a tenth of the time.
    """
    torch, tensors = sys.modules.get("torch"), list(value.values())
    if torch is None or set(map(type, tensors)) != {torch.Tensor} or set(map(type, value)) != {str}:
        return None
    if any(kind_without_elements(tensor) is not None or not has_memory(tensor) for tensor in tensors):
        return None
    # Tensors at one address may be one view, which must keep one number: the general way decides.
    places = {tensor.data_ptr() for tensor in tensors}
    if len(places) < len(tensors) or 0 in places:
        return None
    with pause_collection():
        return ["m", list(value)], [tensor.detach() for tensor in tensors]


def unpack(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value of a tree that `pack` made; UsageError and UnsafeError name classes that may not be made."""
    try:
        return _unpack(tree, tensors)
    except XrankError:
        raise
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise UnsafeError(
            "a message is not a tree of xrank", got=f"{type(error).__name__}: {error}"[:200], next_step=SAME_VERSION
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
        case "l" | "u" | "x" | "z":
            return _SEQUENCES[kind]([_unpack(item, tensors) for item in tree[1]])
        case "d":
            return {_unpack(key, tensors): _unpack(item, tensors) for key, item in tree[1]}
        case "y":
            import torch

            if isinstance(dtype := vars(torch).get(tree[1]), torch.dtype):
                return dtype
        case "i":
            return int(tree[1], 16)
        case "h":
            import torch

            return torch.Size(tree[1])
        case "o":
            _, name, items, attributes, factory = tree
            made: Any = _MAPPINGS[name]()
            made.update(_unpack(items, tensors))
            if isinstance(made, defaultdict) and factory is not None:
                made.default_factory = _FACTORIES[factory]
            for attribute, item in attributes:
                made.__dict__[attribute] = _unpack(item, tensors)
            return made
        case "p":
            return Path(tree[1])
        case "q":
            return _PURE_PATHS[tree[1]](tree[2])
        case "s":
            if tree[1] in _NUMPY_SCALARS and isinstance(tree[2], bool | int | float):
                import numpy as np

                return np.dtype(tree[1]).type(tree[2])
            got = repr_text((tree[1], tree[2]), 100)
            raise UnsafeError("a message has an invalid number", got=got, next_step=SAME_VERSION)
        case "e":
            return find_class(tree[1], is_enum=True).__members__[tree[2]]
        case "c":
            attributes = {name: _unpack(item, tensors) for name, item in tree[2]}
            return make_instance(tree[1], attributes, tree[3])
    raise UnsafeError(f"a message has a part of an unknown kind: {kind!r}", next_step=SAME_VERSION)


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
                f"{self._whole} contains itself, or is nested too deep",
                want=f"at most {_MAX_DEPTH} levels of dicts and lists, without cycles",
            )
        self._depth += 1
        tree = self._pack(value, where)
        self._depth -= 1
        return tree

    def _pack(self, value: Any, where: str) -> Any:
        if value is None or (isinstance(value, bool | int | float | str) and type(value) in (bool, int, float, str)):
            if type(value) is int and not -_MAX_INTEGER < value < _MAX_INTEGER:
                return ["i", hex(value)]  # Python writes, and reads, no more than 4,300 decimal digits
            return value
        kind = type(value)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return ["t", self._number(value, where)]
        if kind is dict:
            return self._pack_dict(value, where)
        if kind is list or kind is tuple:
            items = [self.pack(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return ["l" if kind is list else "u", items]
        if is_data_class(kind):
            attributes, undeclared = read_attributes(value, where)
            return ["c", name_of(kind, where), self._pack_attributes(attributes, where), undeclared]
        if isinstance(value, enum.Enum) and value.name in kind.__members__:  # not a combination of flags
            return ["e", name_of(kind, where), value.name]
        if torch is not None and isinstance(value, torch.dtype):
            return ["y", str(value).removeprefix("torch.")]
        if torch is not None and kind is torch.Size:
            return ["h", list(value)]
        if kind is set or kind is frozenset:
            tag = "x" if kind is set else "z"
            return [tag, [self.pack(item, f"an item of {where}") for item in value]]
        if kind in _MAPPINGS.values():
            return self.pack_mapping(value, self._pack_dict(value, where), where)
        if kind is type(Path()):
            return ["p", str(value)]
        if kind in _PURE_PATHS.values():
            return ["q", kind.__name__, str(value)]
        # numpy 1 calls its bool "bool_".
        if (dtype := kind.__name__.rstrip("_")) in _NUMPY_SCALARS and kind.__module__ == "numpy":
            return ["s", dtype, value.item()]
        raise _refusal(kind, where)

    def pack_mapping(self, value: Any, items: Any, where: str) -> Any:
        """Return the tree of an OrderedDict, Counter or defaultdict, given the tree of its items."""
        factory = getattr(value, "default_factory", None)
        if factory is not None and factory not in _FACTORIES.values():
            raise UsageError(
                f"{where} is a defaultdict whose default_factory cannot be sent",
                got=repr(factory)[:100],
                want=", ".join(_FACTORIES),
                next_step="convert it with dict(...), or use one of these types",
            )
        # A module's state dict has an attribute of its own, _metadata.
        attributes = self._pack_attributes(getattr(value, "__dict__", {}), where)
        return ["o", type(value).__name__, items, attributes, None if factory is None else factory.__name__]

    def _pack_dict(self, value: dict[Any, Any], where: str) -> Any:
        return [
            "d",
            [[self.pack(k, f"a key of {where}"), self.pack(v, f"{where}[{repr_text(k)}]")] for k, v in value.items()],
        ]

    def _pack_attributes(self, attributes: Mapping[str, Any], where: str) -> list[Any]:
        return [[name, self.pack(item, f"{where}.{name}")] for name, item in attributes.items()]

    def _number(self, tensor: torch.Tensor, where: str) -> int:
        import torch

        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            name, step = type(tensor).__qualname__, "gather its plain tensors (for a DTensor, tensor.to_local())"
            what = f"{where} is a {type(tensor).__module__}.{name}"
            raise UsageError(what, got=name, want="a plain tensor or a Parameter", next_step=step)
        check_dense(tensor, where)
        # Views of one memory get one number. Empty tensors have no memory: they are one only if they are one object.
        place = tensor.data_ptr() or -id(tensor)
        view = (place, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
        number = self._numbers.setdefault(view, len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor.detach())
        return number


def _refusal(kind: type, where: str) -> UsageError:
    name = f"{kind.__module__}.{kind.__qualname__}"
    has_dict = callable(getattr(kind, "to_dict", None))
    return UsageError(
        f"{where} is a {name}, which cannot be sent",
        got=name,
        want="None, bool, int, float, str, list, tuple, set, dict, OrderedDict, defaultdict, Counter, dataclass, "
        "pydantic model, Enum, Path, torch.dtype, torch.Size or tensors, and no subclass of a container",
        next_step="send its to_dict()" if has_dict else "omit it, or convert it to one of these",
    )


def make_tensors(rows: Sequence[Any], buffers: Sequence[memoryview]) -> list[torch.Tensor]:
    """Return tensors over these buffers, without a copy."""
    if not rows:
        return []  # without torch, which may not be there
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


_INLINE_NBYTES = 32768
"""Bytes of a header; a larger one goes through the workspace."""
_HEAD = struct.Struct("<qII")
"""Head of a message's payload: number of the call, bytes of its description, bytes of the receipt."""
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_ALIGNMENT = 16
"""Alignment in bytes of a tensor in a message's payload: that of the largest element."""


class WriterMessage(NamedTuple):
    """One writer's message, parsed by the first rank."""

    call: int
    description: tuple[str, str | None, tuple[str, int], Any, Any]
    """Function, key, place, tree and rows."""
    receipt: str
    content: bytearray
    """Bytes of the tensors that came in the message itself."""

    @classmethod
    def from_message(cls, message: Message, rank: int) -> WriterMessage:
        """Return the parsed message of a rank; CorruptError if it is not a message of a gather."""
        payload = message.payload or message.content.get("told", "").encode("latin-1")
        try:
            call, num_described, num_receipt = _HEAD.unpack_from(payload)
            receipt_at = _HEAD.size + num_described
            content_at = receipt_at + num_receipt
            description = _parse_description(payload[_HEAD.size : receipt_at])
            return cls(call, description, payload[receipt_at:content_at].decode(), bytearray(payload[content_at:]))
        except (ValueError, TypeError, struct.error) as error:
            raise damage_error(
                f"the message of rank {rank} is not from a gather", str(error)[:200], rank=rank
            ) from None


@lru_cache(maxsize=64)
def _encode_description(function: str, key: str | None, place: tuple[str, int], header: str) -> bytes:
    """Return the description of a call, with the header of its tensors if they are in the message."""
    return f"[{_to_json([function, key, place])},{header or 'null'}]".encode()


@lru_cache(maxsize=64)
def _parse_description(description: bytes) -> tuple[str, str | None, tuple[str, int], Any, Any]:
    """Return the arguments of `_encode_description`. They are cached: do not change them."""
    (function, key, (file, line)), header = json.loads(description)
    tree, rows = header or (None, None)
    return function, key, (file, line), tree, rows


def split_value(value: Any) -> tuple[str, list[torch.Tensor]]:
    """Return the header and the tensors of a value."""
    if type(value) is getattr(sys.modules.get("torch"), "Tensor", None):
        check_dense(value, "the value")
        return _header_of_one(value.dtype, value.shape), [value.detach() if value.requires_grad else value]
    tree, tensors = pack(value)
    kinds = groupby([(tensor.dtype, tensor.shape) for tensor in tensors])
    return _to_json([tree, [_row(dtype, shape, len(list(alike))) for (dtype, shape), alike in kinds]]), tensors


def _row(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> list[Any]:
    """Return the header's row for `count` consecutive tensors of one dtype and shape."""
    return [str(dtype).removeprefix("torch."), list(shape), count]


@lru_cache(maxsize=64)
def _header_of_one(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return the header of a single tensor, as `pack` would make it."""
    return _to_json([["t", 0], [_row(dtype, shape, 1)]])


def _pad_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements, row-major, with padding that aligns the next tensor."""
    if not is_as_in_memory(tensor):
        tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) + bytes(-tensor.nbytes % _ALIGNMENT)


def inline_tensors(rows: Sequence[Any], content: bytearray) -> list[torch.Tensor]:
    """Return the tensors of a message's own content."""
    if not rows:
        return []
    import torch

    if len(rows) == 1 and rows[0][2] == 1 and content:  # a single tensor, as most gathers have
        dtype, shape, _ = rows[0]
        flat = torch.frombuffer(content, dtype=getattr(torch, dtype), count=prod(shape))
        return [flat if len(shape) == 1 else flat.view(shape)]
    memory, buffers, start = memoryview(content), [], 0
    for dtype, shape, count in rows:
        nbytes = prod(shape) * getattr(torch, dtype).itemsize
        for _ in range(count):
            buffers.append(memory[start : start + nbytes])
            start += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return make_tensors(rows, buffers)


class Call(NamedTuple):
    """One gather: its number, the user's call, and the deadline for the other ranks."""

    number: int
    """Number among the calls of the group; 0 before it is counted."""
    function: str
    key: str | None
    place: tuple[str, int]
    """File and line of the user's call, or a name and 0; only for errors."""
    deadline: Deadline = Deadline(inf)

    def __str__(self) -> str:
        key = f" for {self.key!r}" if self.key is not None else ""
        number = f" number {self.number}" if self.number else ""
        file, line = self.place
        return f"{self.function}{number}{key}, called at {file}{f':{line}' if line else ''}"


class GatherExchange:
    """The gathers of one group of ranks; one thread at a time uses it.

    `messages` is a workspace that only this exchange uses, for values that are too large for the group's wire.
    `meeting` is the number of the meeting that made the group.
    """

    def __init__(self, group: RankGroup, messages: MessageWorkspace, meeting: int = 0) -> None:
        self.group = group
        self.meeting = meeting
        self._messages = messages
        self.is_leaving = False
        """Whether this rank's innermost body has ended, and it waits for the others' bodies."""
        self.num_calls = 0
        self._calls: dict[int, Call] = {}  # begun and not left
        self._receipts: dict[int, str] = {}  # of unfinished calls
        self._failure: FailureRecord | None = None
        self._early: dict[tuple[int, int], WriterMessage] = {}  # (rank, call) -> message that came before its turn

    def begin(self, function: str, key: str | None, place: tuple[str, int], deadline: Deadline) -> Call:
        """Count a call, and begin it."""
        self.num_calls += 1
        call = self._calls[self.num_calls] = Call(self.num_calls, function, key, place, deadline)
        self.group.begin(call.number)
        return call

    @property
    def is_open(self) -> bool:
        """Whether this rank is in a call."""
        return bool(self._calls)

    def describe(self, number: int) -> str:
        """Return a call that this rank is in, for people."""
        return str(self._calls.get(number, f"gather number {number}"))

    def check(self, call: Call) -> None:
        """Raise if a rank is known to have failed, possibly in an earlier call. This asks no other process."""
        self._raise_failure()
        self.group.check(call.number)

    def look(self, call: Call) -> None:
        """Look for ranks that ended meanwhile, then raise as `check` does."""
        self._raise_failure()
        self.group.look(call.number)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.to_error()

    # ---- the writers' side

    def send(self, call: Call, value: object) -> None:
        """Publish a value where the first rank can read it, and notify the first rank."""
        header, tensors = split_value(value)
        max_nbytes, receipt = self.group.wire.max_payload_nbytes, b""
        if len(header) > _INLINE_NBYTES or sum([tensor.nbytes + _ALIGNMENT for tensor in tensors]) > max_nbytes:
            with explain_size_limit("the value of this rank", sum(tensor.nbytes for tensor in tensors)):
                # Published before the message is sent: a receipt promises that the value can be read.
                text = self._receipts[call.number] = self._messages.publish(header, tensors)
            header, tensors, receipt = "", [], text.encode()
        description = _encode_description(call.function, call.key, call.place, header)
        head = _HEAD.pack(call.number, len(description), len(receipt))
        payload = b"".join((head, description, receipt, *map(_pad_bytes, tensors)))
        # A wire without payloads carries JSON only.
        message = Message({}, payload) if max_nbytes else Message({"told": payload.decode("latin-1")})
        self.group.send(self.group.first, message, call.number)
        self.group.arrive(call.number)

    # ---- the first rank's side

    def collect(self, call: Call, own: Any) -> list[Any]:
        """Return the values of all ranks, `own` first. The caller owns the others' values."""
        values: dict[int, Any] = {}
        for rank in self.group.others:
            if (rank, call.number) in self._early:
                values[rank] = self._value(call, rank, self._early.pop((rank, call.number)))
        pending = set(self.group.others) - values.keys()
        while pending:
            rank, message = self.group.receive(pending, call.number, call.deadline)
            received = WriterMessage.from_message(message, rank)
            # A writer with early_exit may be one call ahead: keep its message until its turn.
            if received.call > call.number:
                self._early[rank, received.call] = received
                continue
            values[rank] = self._value(call, rank, received)
            pending.discard(rank)
        self.group.arrive(call.number)
        parts = [own, *(values[rank] for rank in self.group.others)]
        if call.key is None:
            self._check_classes(call, parts)
        return parts

    def _check_classes(self, call: Call, parts: Sequence[Any]) -> None:
        """Check that configs without a key are of one class: with several classes, a rank may be a layer behind."""
        if len({type(part) for part in parts}) == 1:
            return
        ranks = zip(self.group.ranks, parts, strict=True)
        classes = {type(part): rank for rank, part in ranks if is_data_class(type(part))}
        if len(classes) > 1:
            (one, rank), (other, other_rank) = list(classes.items())[:2]
            raise ContradictionError(
                f"rank {other_rank} seems to be in a different gather than rank {rank}: they sent different classes",
                rank=other_rank,
                got=f"a {other.__qualname__}",
                want=f"a {one.__qualname__}, as of rank {rank}, in {call}",
                next_step="make the same gathers on all ranks; if these belong together, give both the same key=",
            )

    def _value(self, call: Call, rank: int, received: WriterMessage) -> Any:
        function, key, place, tree, rows = received.description
        if received.call != call.number or function != call.function or key != call.key:
            made = str(Call(received.call, function, key, place, call.deadline))
            what = f"rank {rank} is in a different gather than rank {self.group.rank}"
            next_step = "all ranks in `ranks` must make the same gathers in the same order"
            raise ContradictionError(what, rank=rank, got=made, want=str(call), next_step=next_step)
        if not received.receipt:
            return unpack(tree, inline_tensors(rows, received.content))
        header, buffers = self._fetch(call, rank, received.receipt)
        tree, rows = json.loads(header)
        return unpack(tree, make_tensors(rows, buffers))

    def _fetch(self, call: Call, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a published message. It may become visible on this host a little later than its receipt."""
        fetched: list[tuple[str, list[memoryview]]] = []
        unseen: list[IncompleteError] = []

        def is_seen() -> bool:
            try:
                fetched.append(self._messages.fetch(rank, receipt))
            except IncompleteError as error:
                unseen.append(error)
            return bool(fetched)

        # The summand keeps the deadline above 0, as none of the call's time may be left.
        patience = Deadline(min(self._messages.patience_seconds, call.deadline.remaining_seconds) + 0.001)
        if not self.group.await_sight(is_seen, call.number, patience):
            raise unseen[-1]
        return fetched[0]

    # ---- both

    def finish(self, call: Call, *, early_exit: bool) -> None:
        """Leave a call together with all other ranks; with `early_exit`, as soon as the first rank has the value."""
        self._raise_failure()
        self.group.end_body()
        self.is_leaving = True
        if self.group.rank == self.group.first:
            if self.group.find_open_bodies():
                # Bodies get the timeout anew: they may take as long as the ranks' arrival may.
                self.group.await_bodies(call.number, Deadline(call.deadline.timeout_seconds))
            self.group.release()
        elif early_exit:
            self.group.await_arrival(self.group.first, call.number, call.deadline)
        else:
            self.group.await_bodies(call.number, call.deadline)
        # Not earlier: the first rank arrives, and ends its body, only after it has fetched all values.
        if (receipt := self._receipts.pop(call.number, None)) is not None:
            self._messages.retire(receipt)
        self.is_leaving = False
        self._calls.pop(call.number, None)
        self.group.leave(call.number)

    def fail(self, call: Call, error: BaseException) -> bool:
        """Send the other ranks the reason why this rank ends the call. A rank that follows a failure names that one.

        Return whether the others make this call elsewhere: they failed in an earlier one, which this rank left early.
        """
        is_behind = self._failure is None and self.group.has_failed_before()
        self.is_leaving = False
        self._calls.pop(call.number, None)
        self.fail_next(FailureRecord.from_error(error, self.group.rank, str(call), call.number))
        return is_behind

    def fail_next(self, record: FailureRecord) -> None:
        """Send the other ranks a failure of this one; the first stays. The calls that this rank is in fail as well."""
        if self._failure is None:
            self.group.fail(record)
            self._failure = record

    def __del__(self) -> None:
        self.close()  # its process group is gone

    def close(self) -> None:
        """Close the group and the workspace."""
        self.group.close()
        self._messages.close()
