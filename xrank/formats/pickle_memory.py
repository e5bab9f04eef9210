"""Memory of the objects that a pickle makes: its cost by opcode, its bound, and the memo."""

from __future__ import annotations

MAX_MADE_NBYTES = 1 << 28
"""Largest memory of the objects that a pickle makes, in bytes; a tensor takes about 1,000."""
STEPS_A_CHECK = 4096
"""Opcodes between two checks of the memory."""
MARK_NBYTES = 72
"""Memory of the stack below a mark."""
MEMO_NBYTES = 16
"""Memory of one memo number."""
NAME_NBYTES = 600
"""Memory of the record of a class or function, and of its names; a pickle that repeats a name makes it once."""
ODD_NBYTES = 256
"""What a step counts that no pickler writes, such as a discarded value: files with millions of them cost time."""
COSTS = [8] * 256
"""Opcode -> bytes of memory of the object that it makes.

Empty lists, dicts and sets count twice: files with millions of them are made to cost time.
"""
for _codes, _nbytes in {
    "\x85\x86\x87t": 64,
    "]}": 136,
    "\x91": 224,
    "\x8f": 448,
    "R\x81\x92Q": 216,
    "01\x80\x95": ODD_NBYTES,
}.items():
    for _code in _codes:
        COSTS[ord(_code)] = _nbytes
for _code in "JMGX\x8cCB":
    COSTS[ord(_code)] = 40
for _code in "as\x8a":  # items alone in their list or dict, and integers of 4 bytes or more, are few
    COSTS[ord(_code)] = 64


class Memo(dict[int, object]):
    """The memo. Pickle numbers its values in order, and a list of them takes a tenth of a dict's memory."""

    def __init__(self) -> None:
        super().__init__()
        self._ordered: list[object] = []

    def __setitem__(self, number: int, value: object) -> None:
        ordered = self._ordered
        if number <= len(ordered) and super().__len__():
            self.pop(number, None)
        if number == len(ordered):
            ordered.append(value)
        elif number < len(ordered):
            ordered[number] = value
        else:
            super().__setitem__(number, value)

    def __missing__(self, number: int) -> object:
        return self._ordered[number]

    def __len__(self) -> int:
        return super().__len__() + len(self._ordered)
