"""Memory of the objects that a pickle makes: its cost by opcode, its bound, and the memo."""

from __future__ import annotations

__all__ = ["COSTS", "MARK_NBYTES", "MAX_MADE_NBYTES", "MEMO_NBYTES", "STEPS_A_CHECK", "Memo"]

MAX_MADE_NBYTES = 1 << 28
"""Largest memory of the objects that a pickle makes, in bytes; a tensor takes about 1,000."""
STEPS_A_CHECK = 4096
"""Opcodes between two checks of the memory."""
MARK_NBYTES = 72
"""Memory of the stack below a mark."""
MEMO_NBYTES = 16
"""Memory of one memo number."""
COSTS = [8] * 256
"""Opcode -> bytes of memory of the object that it makes.

Empty lists, dicts and sets count twice, and a discarded value counts as 256 bytes: files with millions of them are
made to cost time.
"""
for _codes, _nbytes in {"\x85\x86\x87t\x91": 64, "]}": 136, "\x8f": 448, "cR\x81\x92\x93Q": 216, "01": 256}.items():
    for _code in _codes:
        COSTS[ord(_code)] = _nbytes
for _code in "JM\x8aGX\x8cCB":
    COSTS[ord(_code)] = 40


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
