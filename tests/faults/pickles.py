"""Mutated pickles of real checkpoints into each reader of them: nothing runs, soon and in little memory.

The pickles are changed opcode by opcode, and lie in archives whose checksums are right. An audit hook watches each
read: no import, no code, no process, no file but the input. This module and the readers do not import torch, so any
call of what a pickle names would first import it.
"""

from __future__ import annotations

import pickle
import pickletools
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults.feeding import Target, feed_targets
from tests.faults.findings import Findings
from tests.formats.crafted_zip import archive_of
from xrank.formats.dcp_metadata import read_metadata
from xrank.formats.pickles import read_pickle
from xrank.formats.rank_state import read_saved_state
from xrank.formats.torch_archive import read_archive
from xrank.readers.fsdp.rank_files import RankFileReader
from xrank.storage.regular_file import Origin

__all__ = ["fuzz_pickles"]

_HARMLESS = {"array.__new__", "builtins.id", "sys._getframe"}
_WARM_COUNT = 2_000
MAX_ADDED_NBYTES = 400_000_000
_LARGE_EVERY, _LARGE_NBYTES = 5_000, 10_000_000


class Watch:
    """Hears what reads do beside reading the input, as this process's audit events."""

    def __init__(self, path: Path) -> None:
        self._path, self._is_armed = str(path), False
        self.is_on = False
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if self._is_armed and event not in _HARMLESS and not (event == "open" and args[0] == self._path):
            self._is_armed = False
            self.seen.append(f"{event} {str(args)[:200]}")
            self._is_armed = True
            raise PermissionError("a read may do nothing else")  # so that it is not done

    def guarded(self, read: Callable[[], object]) -> object:
        """Read while the watch listens, if it is on."""
        self._is_armed = self.is_on
        try:
            return read()
        finally:
            self._is_armed = False


class MemoryWatch:
    """Finds reads that take more than 400 MB: each of the large ones, and, as that is slow to ask for, 50 small ones.

    The peak counts from what was taken before the read, which the making of a large input may have raised.
    """

    def __init__(self) -> None:
        self._number = 0
        self._note()

    def _note(self) -> None:
        with open("/proc/self/statm", encoding="ascii") as file:
            self._now = int(file.read().split()[1]) * resource.getpagesize()
        self._peak = _peak_nbytes()

    def guarded(self, content: bytes, read: Callable[[], object]) -> object:
        """Read, and raise MemoryError for too large a peak."""
        is_large = len(content) > 1_000_000
        if is_large:
            self._note()
        try:
            return read()
        finally:
            self._number += 1
            if is_large or self._number % 50 == 0:
                if (peak := _peak_nbytes()) > max(self._peak, self._now + MAX_ADDED_NBYTES):
                    raise MemoryError(f"{(peak - self._now) >> 20} MB, by this input or one of the 50 before it")
                self._note()


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def fuzz_pickles(folder: Path, seed: int, count: int) -> Findings:
    """Feed so many pickles to the readers."""
    (folder / "sources").mkdir()
    subprocess.run([sys.executable, "-m", "tests.faults.pickle_seeds", str(folder)], check=True)
    seeds: list[tuple[str, bytes, list[bytes]]] = pickle.loads((folder / "seeds").read_bytes())
    path = folder / "input"
    watch, memory = Watch(path), MemoryWatch()
    pieces = [_cut(pickled) for _, pickled, _ in seeds]
    targets = [
        Target(reader, PickleMutator(own, pieces), _reader(reader, records, path, watch, memory), 1)
        for (reader, _, records), own in zip(seeds, pieces, strict=True)
    ]
    findings = Findings()

    def check(example: str) -> None:
        for event in watch.seen:
            findings.report(f"{example.split()[2]} does {event.split()[0]}", f"{example}: {event}")
        watch.seen.clear()

    # Readers import some modules at first use. So the first inputs are read once before imports are watched.
    feed_targets(targets, seed, min(count, _WARM_COUNT), Findings())
    watch.is_on = True
    feed_targets(targets, seed, count, findings, slow_seconds=3.0, after=check)
    return findings


def _reader(
    reader: str, records: Sequence[bytes], path: Path, watch: Watch, memory: MemoryWatch
) -> Callable[[bytes], object]:
    reads: dict[str, Callable[[bytes], object]] = {
        "archive": lambda content: read_archive(str(path)),
        "state": lambda content: read_saved_state(str(path), 0),
        "rank file": lambda content: RankFileReader(is_nested=len(content) % 2 == 1).read(str(path), 0),
        "metadata": lambda content: read_metadata(str(path)),
        "pickle": lambda content: read_pickle(content, Origin("input")),
    }

    def call(content: bytes) -> object:
        if reader != "pickle":
            path.write_bytes(content if reader == "metadata" else archive_of(content, records))
        return memory.guarded(content, lambda: watch.guarded(lambda: reads[reader](content)))

    return call


def _cut(pickled: bytes) -> list[bytes]:
    """Return a pickle cut into opcodes with their arguments."""
    places = [at for _, _, at in pickletools.genops(pickled)]
    return [pickled[start:end] for start, end in zip(places, [*places[1:], len(pickled)], strict=True)]


_TEXT = b"X\x0b\0\0\0touch /bait"
_NAMES = (
    *("os system", "posix system", "subprocess Popen", "builtins exec", "builtins eval", "builtins open", "io open"),
    *("builtins __import__", "__builtin__ getattr", "importlib import_module", "bait made", "bait.room made"),
    *("torch load", "torch._utils _rebuild_tensor_v2", "torch.serialization load", "codecs open", "shutil rmtree"),
    *("numpy load", "numpy memmap", "pickle loads", "functools partial", "operator attrgetter", "ctypes CDLL"),
    *("collections OrderedDict", "torch.distributed.tensor DTensor", "xrank.formats.pickles PickleReader"),
)
_GLOBALS = [b"c" + name.replace(" ", "\n").encode() + b"\n" for name in _NAMES]
_STACK_GLOBALS = [
    b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in name.split()) + b"\x93" for name in _NAMES
]
_CALLS = (b"%s%s\x85R", b"%s%s\x85\x81", b"%s%s\x85}\x92", b"%s%s\x85Rb", b"(%s%s\x85R0", b"%s(%so", b"%s)R%s\x85R")
_HOSTILE = [*_GLOBALS, *_STACK_GLOBALS, *(call % (name, _TEXT) for call in _CALLS for name in _GLOBALS)]
_OPCODES = [info.code.encode("latin-1") for info in pickletools.opcodes]
_COUNTS = (0, 1, 2, 3, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
_PLAIN = (b"N", b"]", b"}", b")", b"\x8f", b"(", b"K\x01", b"X\0\0\0\0", b"\x94", b"h\0", b"2", b"a", b"\x85", b"q\0")


class PickleMutator:
    """Mutates one pickle; `others` are those that it is spliced with."""

    def __init__(self, pieces: list[bytes], others: list[list[bytes]]) -> None:
        self._pieces, self._others = pieces, others

    def __call__(self, rng: random.Random) -> bytes:
        """Return a mutant; a few are large."""
        pieces = self._pieces.copy()
        if rng.randrange(_LARGE_EVERY) == 0:
            at = rng.randrange(1, len(pieces))
            part = b"".join(pieces[at : at + rng.choice((1, 2, 5, 30))]) if rng.random() < 0.5 else rng.choice(_PLAIN)
            pieces.insert(at, part * (_LARGE_NBYTES // max(1, len(part))))  # a list would take 80 MB
        for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 6))):
            self._change(rng, pieces)
        return b"".join(pieces)

    def _change(self, rng: random.Random, pieces: list[bytes]) -> None:
        at = rng.randrange(len(pieces)) if pieces else 0
        match rng.randrange(14):
            case 0 | 1 if pieces and pieces[at]:
                piece = bytearray(pieces[at])
                piece[rng.randrange(len(piece))] = rng.choice((rng.randrange(256), *rng.choice(_OPCODES)))
                pieces[at] = bytes(piece)
            case 2:
                pieces.insert(at, rng.choice(_OPCODES) + rng.randbytes(rng.choice((0, 0, 1, 2, 4, 8))))
            case 3:
                pieces.insert(at, rng.choice(_HOSTILE))
            case 4:
                names = [k for k, piece in enumerate(pieces) if piece[:1] in (b"c", b"\x93")]
                at = rng.choice(names) if names else at
                pieces[at : at + 1] = [rng.choice(_HOSTILE)]
            case 5 if pieces:
                other = rng.randrange(len(pieces))
                pieces[at], pieces[other] = pieces[other], pieces[at]
            case 6:
                del pieces[at : at + rng.choice((1, 1, 2, 5, 20))]
            case 7:
                part = pieces[at : at + rng.choice((1, 2, 4, 12))]
                pieces[at:at] = part * rng.choice((1, 2, 10, 200))
            case 8 | 9 if pieces and len(pieces[at]) > 1:
                piece = pieces[at]
                width = min(rng.choice((1, 2, 4, 8)), len(piece) - 1)
                count = rng.choice((*_COUNTS, len(piece), rng.getrandbits(16))) % 256**width
                pieces[at] = piece[:1] + count.to_bytes(width, "little") + piece[1 + width :]
            case 10:
                if rng.random() < 0.5:
                    del pieces[at:]
                else:
                    whole = b"".join(pieces)
                    pieces[:] = [whole[: rng.randrange(len(whole) + 1)]]
            case 11:
                other_pieces = rng.choice(self._others)
                start = rng.randrange(len(other_pieces))
                pieces[at:at] = other_pieces[start : start + rng.choice((1, 3, 10, 60))]
            case 12:
                other_pieces = rng.choice(self._others)
                pieces[at:] = other_pieces[rng.randrange(len(other_pieces)) :]
            case _:
                pieces.insert(at, rng.choice((rng.randbytes(rng.randrange(1, 9)), rng.choice(_PLAIN))))
