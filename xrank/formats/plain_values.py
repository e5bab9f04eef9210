"""Build the plain values that a pickle makes by calls, and check the keys of its tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TypeAlias

_MAX_KEY_NODES = 64
_PLAIN_KEYS = frozenset({str, bytes, float, bool, type(None)})

Builder: TypeAlias = Callable[[tuple[object, ...]], object]
"""Builds a plain value from the arguments of a call; NotImplemented keeps the call an inert record."""


def _collection_builder(kind: type) -> Builder:
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


def _build_ordered_dict(args: tuple[object, ...]) -> object:
    if not args:
        return OrderedDict()
    return NotImplemented


def _build_bytes(args: tuple[object, ...]) -> object:
    # Protocol 2 writes bytes as _codecs.encode(text, "latin1") (Lib/pickle.py: save_bytes).
    if len(args) == 2 and isinstance(args[0], str) and args[1] == "latin1":
        return args[0].encode("latin1")
    return NotImplemented


def _build_empty_bytes(args: tuple[object, ...]) -> object:
    return b"" if not args else NotImplemented


def _build_complex(args: tuple[object, ...]) -> object:
    match args:
        case (float(real), float(imaginary)):
            return complex(real, imaginary)
    return NotImplemented


# Protocol 2 writes Python 2's name of the builtins module (Lib/_compat_pickle.py).
PLAIN_BUILDERS: Mapping[tuple[str, str], Builder] = {
    ("collections", "OrderedDict"): _build_ordered_dict,
    ("_codecs", "encode"): _build_bytes,
    **{
        (module, name): builder
        for module in ("builtins", "__builtin__")
        for name, builder in (
            ("set", _collection_builder(set)),
            ("frozenset", _collection_builder(frozenset)),
            ("bytes", _build_empty_bytes),
            ("complex", _build_complex),
        )
    },
}
"""(Module, name) of each call that makes a plain Python value -> its builder."""


def check_key(key: object) -> None:
    """Raise ValueError if a key is expensive to hash or to compare.

    CPython hashes nested tuples by unbounded recursion, visits shared parts each time, and gives integers that differ
    by a multiple of 2**61 - 1 the same hash: each allows a small file to bring a process down.
    """
    if type(key) in _PLAIN_KEYS:
        return
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
