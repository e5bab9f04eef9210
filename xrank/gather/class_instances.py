"""Instances of data classes and enums in messages: found by name, filled without running their code.

Two kinds of class may be made from a message: dataclasses, and pydantic's models. Their authors declared them as data,
and their whole state lies in their attributes. The receiving process must have imported the class already. It makes an
empty instance and sets the attributes where Python stores them, so no `__init__`, `__post_init__`, validator,
`__setattr__` or property runs. Other classes are refused: a stranger could name one whose methods act on such data.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import sys
from collections.abc import Mapping, Sequence
from types import MemberDescriptorType
from typing import Any

from xrank.errors import UnsafeError, UsageError

SAME_VERSION = "let all ranks use the same version of xrank, and of the classes that they send"

_MISSING = object()


def is_data_class(kind: type) -> bool:
    """Return whether instances of a class can be sent: a dataclass or pydantic model that is not also a container."""
    new: object = kind.__new__
    return new is object.__new__ and (dataclasses.is_dataclass(kind) or _is_pydantic(kind))


def _is_pydantic(kind: type) -> bool:
    model = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    return isinstance(model, type) and issubclass(kind, model)


def name_of(kind: type, where: str) -> str:
    """Return the name by which another process finds a class.

    Raises:
        UsageError: its module does not contain it under this name.
    """
    if _look_up(kind.__module__, kind.__qualname__) is not kind:
        raise UsageError(
            f"{where} is of a class that its module does not contain, so no other process can find it",
            got=kind.__qualname__,
            want="a class of a module",
            next_step="move the class to the module's top level",
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(name: str) -> type:
    """Return the data class of this name.

    Raises:
        UsageError: this process has not imported it.
        UnsafeError: it is not a data class.
    """
    found = _find(name)
    if isinstance(found, type) and is_data_class(found):
        return found
    raise _wrong_kind(name, found)


def find_enum(name: str) -> type[enum.Enum]:
    """Return the enum of this name; errors as in `find_class`."""
    found = _find(name)
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return found
    raise _wrong_kind(name, found)


def _find(name: str) -> object:
    module, _, qualified = name.partition(":")
    found = _look_up(module, qualified)
    if found is None:
        raise UsageError(
            f"{qualified} of module {module} was sent, and this process does not have it",
            got=name,
            want="classes of modules that the first rank has imported",
            next_step=f"import {module} on the first rank before the gather",
        )
    return found


def _wrong_kind(name: str, found: object) -> UnsafeError:
    return UnsafeError(
        f"{name} was sent as a class of data, and is not one", got=repr(found)[:100], next_step=SAME_VERSION
    )


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

    Raises:
        UsageError: an attribute has a reserved name.
    """
    kind = type(value)
    stored = dict(_instance_dict(value) or {})
    stored.pop("__orig_class__", None)
    for name in stored:
        if not _is_free_name(name):
            raise UsageError(
                f"{where} has the attribute {name!r}",
                got=repr(name),
                want="attributes whose names are text, without leading and trailing double underscores",
                next_step="send its value beside this one, under another name",
            )
    for name, slot in _slots(kind).items():
        # Not getattr: a slot may be hidden by a property, and an unset one would call __getattr__.
        if (item := _read_slot(slot, value)) is not _MISSING:
            stored[name] = item
    declared = _declared_names(kind)
    return stored, [name for name in stored if name not in declared]


def make_instance(name: str, attributes: Mapping[str, Any], undeclared: Sequence[str]) -> Any:
    """Return an instance of a data class with exactly these attributes.

    All checks come before the instance exists, because an incomplete one may have a `__del__`.

    Raises:
        UsageError: this process has not imported the class.
        UnsafeError: it is not a data class, or has no place for an attribute.
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
        got = ", ".join(sorted(map(str, strange)))
        raise UnsafeError(
            f"{name} has no field {got}", got=got[:100], want=", ".join(sorted(declared)), next_step=SAME_VERSION
        )
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


def _read_slot(slot: MemberDescriptorType, value: object) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _MISSING


def _declared_names(kind: type) -> set[str]:
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    names = inspect.getattr_static(kind, "__pydantic_fields__", None)
    return set(names) if isinstance(names, dict) else set()


def _is_free_name(name: object) -> bool:
    """Return whether an instance may store an attribute under this name: any text that Python does not reserve."""
    return isinstance(name, str) and not (name.startswith("__") and name.endswith("__"))
