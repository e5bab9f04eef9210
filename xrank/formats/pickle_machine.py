"""The pickle machine without code: a stack, a memo, and one step for each opcode. It calls nothing.

It is a separate interpreter instead of ``pickle.Unpickler``, for three reasons in CPython 3.11: LONG_BINPUT allocates
any memo index that a file names (python/cpython#115952), nested tuples are hashed by unbounded C recursion, and BUILD
sets attributes on any object. Here no callable ever reaches the stack.

It accepts the opcodes that protocols 2 to 5 write (``Lib/pickletools.py``); the text opcodes, INST, OBJ and the copyreg
extensions are refused, as in ``torch/_weights_only_unpickler.py``.
"""

# ruff: noqa: D102 (`pickletools.opcodes` documents the opcode of each method)

from __future__ import annotations

import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence

from xrank.errors import XrankError
from xrank.formats.inert_record import InertRecord
from xrank.formats.pickle_memory import (
    COSTS,
    MARK_NBYTES,
    MAX_MADE_NBYTES,
    MEMO_NBYTES,
    NAME_NBYTES,
    ODD_NBYTES,
    STEPS_A_CHECK,
    Memo,
)
from xrank.formats.plain_values import Builder, check_key
from xrank.formats.regular_file import Origin, quote

MAX_OPCODES = 20_000_000
"""Largest number of opcodes of a pickle; a tensor takes about 50."""

MAX_INTEGER_NBYTES = 256

_NEVER_MEMOIZED = frozenset({type(None), bool, int, float})


class PickleMachine:
    """The pickle virtual machine without code: a stack, the stacks below its marks, and the memo."""

    max_made_nbytes = MAX_MADE_NBYTES

    def __init__(
        self,
        data: bytes,
        origin: Origin,
        builders: Mapping[tuple[str, str], Builder],
        load_global: Callable[[str, str], object],
        load_persistent: Callable[[object], object] | None,
    ) -> None:
        self.data = data
        self.at = 0
        self.origin = origin
        self.builders = builders
        self.load_global = load_global
        self.load_persistent = load_persistent
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: MutableMapping[int, object] = Memo()
        self.memoized: object = self.memo
        """The object that was memoized last."""
        self.globals: dict[tuple[str, str], object] = {}
        """Values of the classes and functions that the pickle names."""
        self.made_nbytes = 0
        """Bytes of the objects that the pickle made, as `COSTS` counts them."""
        self.named: dict[tuple[str, str], int] = {}
        """Each class or function that the pickle names -> the first byte after its first name."""
        self.calls: MutableSequence[InertRecord] = []
        """Calls that stay inert."""
        self.built: set[tuple[str, str]] = set()
        """Names whose calls became plain values."""
        self.dropped: list[object] = []
        """Attributes of dicts, which are left out."""

    def run(self) -> object:
        data, costs, steps = self.data, COSTS, [STEPS.get(opcode) for opcode in range(256)]
        for done in range(0, MAX_OPCODES, STEPS_A_CHECK):
            made_nbytes = 0
            for _ in range(min(STEPS_A_CHECK, MAX_OPCODES - done)):
                opcode = data[self.at]
                self.at += 1
                step = steps[opcode]
                if step is not None:
                    step(self)
                    made_nbytes += costs[opcode]
                elif opcode == STOP:
                    return self.stop()
                else:
                    raise self.refusal(opcode)
            self.check_size(made_nbytes)
        raise self.origin.corrupt("the pickle takes too many steps", want=f"at most {MAX_OPCODES}")

    def check_size(self, made_nbytes: int) -> None:
        """Refuse a pickle whose objects take too much memory; a small file may describe many.

        Args:
            made_nbytes: bytes of the objects made since the last check.
        """
        self.made_nbytes += made_nbytes
        if self.made_nbytes + MARK_NBYTES * len(self.marks) + MEMO_NBYTES * len(self.memo) > self.max_made_nbytes:
            raise self.origin.usage(
                "the pickle holds more objects than xrank reads from one file",
                got=f"{self.max_made_nbytes >> 20} MB of objects in {self.at:,} of its {len(self.data):,} bytes",
                want=f"{self.max_made_nbytes >> 20} MB at most",
                next_step="if you wrote the file, save its tensors in several files, or as safetensors",
            )

    def stop(self) -> object:
        """Return the only value on the stack."""
        value = self.stack.pop()
        if self.stack or self.marks or self.at != len(self.data):
            raise ValueError("values or bytes left over")
        return value

    def refusal(self, opcode: int) -> XrankError:
        known = [info.name for info in pickletools.opcodes if info.code == chr(opcode)]
        if not known:
            return self.origin.corrupt(f"the pickle is damaged at its byte {self.at - 1}", got=f"opcode {opcode:#04x}")
        return self.origin.unsafe(f"the pickle uses opcode {known[0]}, which torch.save never writes", got=known[0])

    def take(self, nbytes: int) -> bytes:
        end = self.at + nbytes
        # Check before slicing, so a false length allocates nothing.
        if end > len(self.data):
            raise EOFError(f"{quote(nbytes)} bytes wanted, {len(self.data) - self.at} left")
        part = self.data[self.at : end]
        self.at = end
        return part

    def take_int(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def take_byte(self) -> int:
        at = self.at
        self.at = at + 1
        return self.data[at]  # an IndexError at the end

    def take_line(self) -> str:
        end = self.data.index(b"\n", self.at)
        line = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return line

    def pop_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def pop_items(self) -> list[object]:
        items = self.pop_mark()
        if not items:  # a pickler adds none where it has none
            self.made_nbytes += ODD_NBYTES
        return items

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def memoize(self, number: int) -> None:
        value = self.stack[-1]
        # A pickler memoizes an object once, and none of these.
        if value is self.memoized or type(value) in _NEVER_MEMOIZED:
            self.made_nbytes += ODD_NBYTES
        self.memoized = self.memo[number] = value

    def skip_protocol(self) -> None:
        protocol = self.take_int(1)
        if protocol > 5:
            raise ValueError(f"protocol {protocol}")

    def push_long(self, length_nbytes: int) -> None:
        nbytes = self.take_int(length_nbytes)
        # Larger integers could not be printed (sys.int_info.default_max_str_digits).
        if nbytes > MAX_INTEGER_NBYTES:
            raise ValueError(f"an integer of {nbytes} bytes")
        self.stack.append(int.from_bytes(self.take(nbytes), "little", signed=True))

    def push_text(self, length_nbytes: int) -> None:
        # As Lib/pickle.py: load_binunicode.
        self.stack.append(self.take(self.take_int(length_nbytes)).decode("utf-8", "surrogatepass"))

    def push_bytes(self, length_nbytes: int) -> None:
        self.stack.append(self.take(self.take_int(length_nbytes)))

    def push_tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError("stack underflow")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def push_marked(self) -> None:
        items = tuple(self.pop_mark())  # first, because it changes the stack
        self.stack.append(items)

    def append(self, items: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif isinstance(target, InertRecord):
            target.items.extend(items)
        else:
            raise TypeError(f"append to {type(target).__name__}")

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        pairs = zip(items[::2], items[1::2], strict=True)
        if isinstance(target, dict):
            for key, value in pairs:
                if type(key) is not str:
                    check_key(key)
                target[key] = value
        elif isinstance(target, InertRecord):
            target.items.extend(pairs)
        else:
            raise TypeError(f"set an item of {type(target).__name__}")

    def set_item(self) -> None:
        value, key, target = self.stack.pop(), self.stack.pop(), self.stack[-1]
        if type(target) is dict:
            check_key(key)
            target[key] = value
        else:
            self.set_items([key, value])

    def add_items(self) -> None:
        items = self.pop_items()
        target = self.stack[-1]
        if isinstance(target, set):
            for item in items:
                check_key(item)
            target.update(items)
        elif isinstance(target, InertRecord):
            target.items.extend(items)
        else:
            raise TypeError(f"add to {type(target).__name__}")

    def push_frozenset(self) -> None:
        items = self.pop_mark()
        for item in items:
            check_key(item)
        self.stack.append(frozenset(items))

    def push_global(self) -> None:
        module = self.take_line()
        self.push_named(module, self.take_line())

    def push_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("a global's name is not a text")
        self.push_named(module, name)

    def push_named(self, module: str, name: str) -> None:
        key = module, name
        if key not in self.globals:
            self.made_nbytes += NAME_NBYTES
            self.named[key] = self.at
            self.globals[key] = self.load_global(module, name)
        self.stack.append(self.globals[key])

    def call(self, kwargs: object = None) -> None:
        args, target = self.stack.pop(), self.stack.pop()
        if not isinstance(args, tuple):
            raise TypeError("arguments that are not a tuple")
        if not isinstance(target, InertRecord):
            raise TypeError(f"call of {type(target).__name__}")
        if target.args is not None:
            raise self.origin.unsafe(
                f"the pickle calls the result of {quote(f'{target.module}.{target.name}')}",
                got=quote(f"{target.module}.{target.name}"),
            )
        builder = self.builders.get((target.module, target.name))
        made = NotImplemented if builder is None or kwargs else builder(args)
        if made is NotImplemented:
            made = InertRecord(target.module, target.name, args)
            self.calls.append(made)
            if kwargs:
                made.kwargs = _keyword_arguments(kwargs)
        else:
            self.built.add((target.module, target.name))
        self.stack.append(made)

    def call_with_keywords(self) -> None:
        self.call(self.stack.pop())

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, InertRecord) and target.args is None:
            name = quote(f"{target.module}.{target.name}")
            raise self.origin.unsafe(f"the pickle sets attributes of {name} itself", got=name)
        if isinstance(target, InertRecord) and target.state is None:
            target.state = state
        # A state dict has the versions of its modules in an attribute, `_metadata` (torch/nn/modules/module.py:
        # state_dict). Attributes of a dict are not data and could hide its methods, so they are dropped.
        elif type(target) is OrderedDict:
            self.dropped.append(state)
        else:
            raise TypeError(f"set the state of {type(target).__name__}")

    def push_persistent(self) -> None:
        if self.load_persistent is None:
            raise self.origin.unsafe("the pickle refers to data outside itself", got="BINPERSID")
        self.stack.append(self.load_persistent(self.stack.pop()))


def _keyword_arguments(kwargs: object) -> dict[str, object]:
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise TypeError("keyword arguments that are not a dict")
    return kwargs


PROTOCOL = b"\x80"
"""First byte of every pickle since protocol 2."""
STOP = ord(".")
_INT32 = struct.Struct("<i")
_FLOAT = struct.Struct(">d")

# All opcodes of pickle protocols 2 to 5, without the extension registry and out-of-band buffers.
STEPS: dict[int, Callable[[PickleMachine], object]] = {
    ord(code): step
    for code, step in {
        "\x80": PickleMachine.skip_protocol,
        "\x95": lambda m: m.take(8),  # FRAME
        "(": PickleMachine.mark,
        "0": lambda m: m.stack.pop(),
        "1": PickleMachine.pop_mark,
        "N": lambda m: m.stack.append(None),
        "\x88": lambda m: m.stack.append(True),
        "\x89": lambda m: m.stack.append(False),
        "K": lambda m: m.stack.append(m.take_byte()),
        "M": lambda m: m.stack.append(m.take_int(2)),
        "J": lambda m: m.stack.append(_INT32.unpack(m.take(4))[0]),
        "\x8a": lambda m: m.push_long(1),
        "\x8b": lambda m: m.push_long(4),
        "G": lambda m: m.stack.append(_FLOAT.unpack(m.take(8))[0]),
        "\x8c": lambda m: m.push_text(1),
        "X": lambda m: m.push_text(4),
        "\x8d": lambda m: m.push_text(8),
        "C": lambda m: m.push_bytes(1),
        "B": lambda m: m.push_bytes(4),
        "\x8e": lambda m: m.push_bytes(8),
        "\x96": lambda m: m.stack.append(bytearray(m.take(m.take_int(8)))),
        ")": lambda m: m.stack.append(()),
        "\x85": lambda m: m.push_tuple(1),
        "\x86": lambda m: m.push_tuple(2),
        "\x87": lambda m: m.push_tuple(3),
        "t": PickleMachine.push_marked,
        "]": lambda m: m.stack.append([]),
        "a": lambda m: m.append([m.stack.pop()]),
        "e": lambda m: m.append(m.pop_items()),
        "}": lambda m: m.stack.append({}),
        "s": PickleMachine.set_item,
        "u": lambda m: m.set_items(m.pop_items()),
        "\x8f": lambda m: m.stack.append(set()),
        "\x90": PickleMachine.add_items,
        "\x91": PickleMachine.push_frozenset,
        "h": lambda m: m.stack.append(m.memo[m.take_byte()]),
        "j": lambda m: m.stack.append(m.memo[m.take_int(4)]),
        "q": lambda m: m.memoize(m.take_byte()),
        "r": lambda m: m.memoize(m.take_int(4)),
        "\x94": lambda m: m.memoize(len(m.memo)),
        "c": PickleMachine.push_global,
        "\x93": PickleMachine.push_stack_global,
        "R": PickleMachine.call,
        "\x81": PickleMachine.call,  # NEWOBJ: for records the same as a call
        "\x92": PickleMachine.call_with_keywords,
        "b": PickleMachine.build,
        "Q": PickleMachine.push_persistent,
    }.items()
}
