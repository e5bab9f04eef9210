"""Read a pickle as data: plain values are built, everything else becomes a record, and nothing is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from xrank.errors import XrankError
from xrank.formats.inert_record import InertRecord, check_tree
from xrank.formats.pickle_machine import PickleMachine
from xrank.formats.pickled_names import find_foreign_names
from xrank.formats.plain_values import PLAIN_BUILDERS, Builder
from xrank.formats.regular_file import Origin, quote

MAX_PICKLE_NBYTES = 1 << 29
"""Largest pickle that is read, in bytes; a tensor takes about 150."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """The content of a pickle."""

    value: object
    foreign: Mapping[tuple[str, str], int]
    """(Module, name) of each class or function that frameworks do not write -> the byte that names it first."""


def read_pickle(
    data: bytes,
    origin: Origin,
    *,
    builders: Mapping[tuple[str, str], Builder] = PLAIN_BUILDERS,
    load_global: Callable[[str, str], object] = InertRecord,
    load_persistent: Callable[[object], object] | None = None,
) -> Pickled:
    """Read a pickle; its classes and calls are inert records.

    Args:
        data: exactly the bytes of the pickle.
        origin: the file, for errors.
        builders: (module, name) of a call -> the function that builds its value.
        load_global: returns the value of a global name; the default keeps all names inert.
        load_persistent: returns the value of a persistent id; None: persistent ids are refused.

    Raises:
        CorruptError: the pickle is damaged, too long or too deep.
        UnsafeError: it uses an opcode or a call that needs code to run, or discards the result of a call.
    """
    if len(data) > MAX_PICKLE_NBYTES:
        raise origin.corrupt("the pickle is too long", got=f"{len(data)} bytes", want=f"{MAX_PICKLE_NBYTES} at most")
    machine = PickleMachine(data, origin, builders, load_global, load_persistent)
    value = run_machine(machine)
    check_tree(value, 1_000_000 + 4 * len(data), origin)
    roots = [value, *machine.dropped]
    return Pickled(value, find_foreign_names(machine.named, machine.calls, machine.built, roots, origin))


def run_machine(machine: PickleMachine) -> object:
    """Run a machine and return its value.

    Raises:
        CorruptError: the pickle is damaged, or too long.
        UnsafeError: it uses an opcode or a call that needs code to run.
    """
    try:
        return machine.run()
    except XrankError:
        raise
    # Any other failure, such as a pop from an empty stack or a text that is not UTF-8, means a damaged pickle.
    except Exception as error:
        raise machine.origin.corrupt(
            f"the pickle is damaged near its byte {machine.at}",
            got=f"{type(error).__name__}: {quote(str(error))}",
        ) from error
