"""The calls by which a pickle makes plain values, redone from their arguments, and the keys a table may have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TypeAlias

__all__ = ["PLAIN_BUILDERS", "Builder", "check_key"]

_MAX_KEY_NODES = 64

Builder: TypeAlias = Callable[[tuple[object, ...]], object]
"""Makes a plain value from the arguments of a call, or returns NotImplemented to leave the call an inert record."""


def _collection(kind: type) -> Builder:
    def build(args: tuple[object, ...]) -> object:
        if len(args) > 1 or (args and not isinstance(args[0], (list, tuple))):
            return NotImplemented
        members = args[0] if args else ()
        assert isinstance(members, (list, tuple))
        if kind in (set, frozenset):
            for member in members:
                check_key(member)
        return kind(members)

    return build


def _ordered_dict(args: tuple[object, ...]) -> object:
    if not args:
        return OrderedDict()
    return NotImplemented


def _encode(args: tuple[object, ...]) -> object:
    # Protocol 2 writes bytes as _codecs.encode(text, "latin1") (Lib/pickle.py: save_bytes).
    if len(args) == 2 and isinstance(args[0], str) and args[1] == "latin1":
        return args[0].encode("latin1")
    return NotImplemented


def _no_bytes(args: tuple[object, ...]) -> object:
    return b"" if not args else NotImplemented


def _complex(args: tuple[object, ...]) -> object:
    match args:
        case (float(real), float(imaginary)):
            return complex(real, imaginary)
    return NotImplemented


# Protocol 2 writes Python 2's name of the builtins module (Lib/_compat_pickle.py).
PLAIN_BUILDERS: Mapping[tuple[str, str], Builder] = {
    ("collections", "OrderedDict"): _ordered_dict,
    ("_codecs", "encode"): _encode,
    **{
        (module, name): builder
        for module in ("builtins", "__builtin__")
        for name, builder in (
            ("set", _collection(set)),
            ("frozenset", _collection(frozenset)),
            ("bytes", _no_bytes),
            ("complex", _complex),
        )
    },
}
"""The calls that make plain Python values."""


def check_key(key: object) -> None:
    """Raise ValueError unless a key is cheap to hash and to compare.

    C hashes nested tuples by unbounded recursion, walks shared parts again each time, and gives integers that differ
    by a multiple of 2**61 - 1 one hash: each a way to make a small file take a process down.
    """
    waiting = [key]
    for _ in range(_MAX_KEY_NODES):
        node = waiting.pop()
        if isinstance(node, (tuple, frozenset)):
            waiting.extend(node)
        elif isinstance(node, int) and not -(1 << 63) <= node < 1 << 64:
            raise ValueError("a key too large")
        if not waiting:
            return
    raise ValueError("a key with too many parts")
