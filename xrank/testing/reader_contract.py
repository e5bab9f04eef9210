"""The contract of readers, as tests: a subclass with a reader and a maker of sources runs all of them.

Its faults damage the files of a source, each as a change that can be undone. They are independent of formats: they need
the files, the ranges of bytes that hold tensors, and the two containers that every framework uses, a bare pickle and
the zip of ``torch.save``.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import pytest

from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.engine.companions import list_source_companions
from xrank.errors import CorruptError, UnsafeError, XrankError
from xrank.readers.base import Hints, Reader
from xrank.readers.discovery import find_source
from xrank.recipes.proofs import prove_shapes

_Ranges: TypeAlias = Sequence[tuple[int, int]]
"""(first byte, end) of the bytes of a file that hold tensors."""

MARKER = "ran"
"""Name of the file that hostile pickles would leave in the working directory."""


@dataclass(frozen=True, slots=True)
class SourceChange:
    """One change to one file of a source."""

    what: str
    file: Path
    apply: bytes | Callable[[Path], None]
    """The file's new bytes, or a function that makes the change; afterwards the file is always restored."""

    @contextmanager
    def apply_and_undo(self) -> Iterator[None]:
        """Make the change, run the body, and restore the file."""
        content, status = self.file.read_bytes(), self.file.stat()
        try:
            if isinstance(self.apply, bytes):
                self.file.write_bytes(self.apply)
            else:
                self.apply(self.file)
            yield
        finally:
            if self.file.is_dir() and not self.file.is_symlink():
                self.file.rmdir()
            else:
                self.file.unlink(missing_ok=True)
            self.file.write_bytes(content)
            os.utime(self.file, ns=(status.st_atime_ns, status.st_mtime_ns))


_Changes: TypeAlias = Callable[[Path, bytes, Sequence[Path], _Ranges], Iterable[SourceChange]]
"""Changes of a file with its bytes, among all files of the source."""


@dataclass(frozen=True, slots=True)
class SourceFault:
    """A kind of damage, and the exit codes that fit it."""

    exit_codes: frozenset[int]
    changes: _Changes


def _change_each(what: str, apply: bytes | Callable[[Path], None]) -> _Changes:
    return lambda file, *_: [SourceChange(f"{file.name} {what}", file, apply)]


def _truncate(file: Path, content: bytes, files: Sequence[Path], payload: _Ranges) -> Iterator[SourceChange]:
    random_ = random.Random(file.name)  # noqa: S311  seeded: the same lengths on every run
    shares = [0.5, 0.99, *(random_.random() for _ in range(4))]
    lengths = {1, len(content) - 1, *(int(len(content) * share) for share in shares)}
    for length in sorted(length for length in lengths if 0 < length < len(content)):
        yield SourceChange(f"{file.name} cut to {length} of {len(content)} bytes", file, content[:length])


def _zero_tail(file: Path, content: bytes, files: Sequence[Path], payload: _Ranges) -> Iterator[SourceChange]:
    for share in (0.1, 0.6, 0.95):
        start = int(len(content) * share)
        if any(content[start:]):
            zeros = content[:start] + bytes(len(content) - start)
            yield SourceChange(f"{file.name} zeros from byte {start} on", file, zeros)


def _flips(content: bytes, places: Sequence[int], file: Path) -> Iterator[SourceChange]:
    for at in places:
        bit = at % 8
        flipped = bytearray(content)
        flipped[at] ^= 1 << bit
        yield SourceChange(f"{file.name} bit {bit} of byte {at} flipped", file, bytes(flipped))


def _flip_payload(file: Path, content: bytes, files: Sequence[Path], payload: _Ranges) -> Iterator[SourceChange]:
    random_ = random.Random(file.name)  # noqa: S311
    places = {place for first, end in payload for place in (first, random_.randrange(first, end), end - 1)}
    yield from _flips(content, random_.sample(sorted(places), min(len(places), 12)), file)


def _flip_metadata(file: Path, content: bytes, files: Sequence[Path], payload: _Ranges) -> Iterator[SourceChange]:
    num_flips = max(8, 120 // len(files))
    is_payload = bytearray(len(content))
    for first, end in payload:
        is_payload[first:end] = b"\1" * (end - first)
    # Zeros and Z are mostly torch's padding, where a flip has no effect.
    places = [at for at, byte in enumerate(content) if not is_payload[at] and byte not in b"\0Z"]
    random_ = random.Random(file.name)  # noqa: S311
    yield from _flips(content, sorted(random_.sample(places, min(len(places), num_flips))), file)


def _copy_other_rank(file: Path, content: bytes, files: Sequence[Path], payload: _Ranges) -> Iterator[SourceChange]:
    for other in files:
        if file.suffix == other.suffix and file.parent == other.parent and file.name != other.name:
            copied = other.read_bytes()
            if len(copied) == len(content) and copied != content:
                yield SourceChange(f"{file.name} is a copy of {other.name}", file, copied)


def _link_outside(file: Path) -> None:
    # The link leads out of the folder, to the same bytes: readers follow links in a user's folder.
    target = file.parent.parent / f".{file.name}.target"
    shutil.copy2(file, target)
    file.unlink()
    file.symlink_to(target)


def _replace(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that makes something else in a file's place."""

    def apply(file: Path) -> None:
        file.unlink()
        make(file)

    return apply


_MISSING, _DAMAGED = frozenset({3}), frozenset({4})

FAULTS: Mapping[str, SourceFault] = {
    "a file missing": SourceFault(_MISSING, _change_each("removed", lambda file: file.unlink())),
    "a link to nothing": SourceFault(
        _MISSING, _change_each("links to nothing", _replace(lambda file: file.symlink_to("nothing-there")))
    ),
    "a file cut short": SourceFault(_DAMAGED, _truncate),
    "an empty file": SourceFault(_MISSING | _DAMAGED, _change_each("is empty", b"")),
    "zeros to the end": SourceFault(_DAMAGED, _zero_tail),
    "a folder in place of a file": SourceFault(_MISSING | _DAMAGED, _change_each("is a folder", _replace(Path.mkdir))),
    "a pipe in place of a file": SourceFault(_MISSING | _DAMAGED, _change_each("is a pipe", _replace(os.mkfifo))),
    "a link out of the folder": SourceFault(_DAMAGED, _change_each("is a link", _link_outside)),
    "a bit of a tensor flipped": SourceFault(_DAMAGED, _flip_payload),
    # A flipped name of a dtype or a layout may be valid, and then requires another command.
    "a bit of the metadata flipped": SourceFault(_MISSING | _DAMAGED | {2}, _flip_metadata),
    "another rank's file": SourceFault(_MISSING | _DAMAGED, _copy_other_rank),
}
"""Name -> fault, in the order of the table in docs/formats.md."""


_COMMAND = f">{MARKER}".encode()
_ARGUMENT = b"X" + struct.pack("<I", len(_COMMAND)) + _COMMAND

HOSTILE_PICKLES: Mapping[str, bytes] = {
    "REDUCE": b"cposix\nsystem\n" + _ARGUMENT + b"\x85R",
    "STACK_GLOBAL": b"\x8c\x05posix\x8c\x06system\x93" + _ARGUMENT + b"\x85R",
    "INST": b"(S'>" + MARKER.encode() + b"'\niposix\nsystem\n",
    "OBJ": b"(cposix\nsystem\n" + _ARGUMENT + b"o",
    "NEWOBJ": b"cposix\nsystem\n" + _ARGUMENT + b"\x85\x81",
    "eval": b"c__builtin__\neval\nX" + struct.pack("<I", 15) + b"open('ran','w')" + b"\x85R",
    "BUILD": b"cbuiltins\nprint\n)\x81}X\x08\0\0\0__call__cposix\nsystem\nsb",
    "a call of a call's result": b"cbuiltins\ngetattr\ncos\npath\nX\x06\0\0\0exists\x86R" + _ARGUMENT + b"\x85R",
    "EXT1": b"\x82\x01",
    "BINPERSID": b"cposix\nsystem\nQ",
}
"""Kind -> opcodes that leave one value on the stack, and would run a command before."""


def hostile_changes(files: Sequence[Path]) -> Iterator[SourceChange]:
    """Yield changes of every pickle in the files, for each hostile kind: it replaces the pickle, or runs before it."""
    for file in files:
        content = file.read_bytes()
        if content[:1] == b"\x80" and content[-1:] == b".":
            for kind, code in HOSTILE_PICKLES.items():
                yield SourceChange(f"{file.name} is a hostile {kind}", file, b"\x80\x04" + code + b".")
                dropped = content[:2] + code + b"0" + content[2:]
                yield SourceChange(f"{file.name} begins with a hostile {kind}", file, dropped)
        # Archives of torch.save, whose first member is <folder>/data.pkl. All items of a file are read in the same way.
        archives = re.finditer(rb"PK\x03\x04.{26}[^/]{1,100}/data\.pkl", content, re.DOTALL)
        for number, archive in enumerate(islice(archives, 3)):
            for kind, code in HOSTILE_PICKLES.items():
                hostile = _with_pickle(content, archive.start(), code)
                if hostile is not None:
                    yield SourceChange(f"item {number} of {file.name} is a hostile {kind}", file, hostile)


def _with_pickle(content: bytes, start: int, code: bytes) -> bytes | None:
    """Return the bytes with another data.pkl in that archive, of the same size and with a right checksum."""
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", content, start + 26)
    payload = start + 30 + name_nbytes + extra_nbytes
    end = content.index(b"PK\x07\x08", payload)
    room = end - payload - len(b"\x80\x02") - len(code) - 1
    if room < 0 or room == 1:
        return None
    # Values that are pushed and popped fill the size: a pickle that ends before its bytes would be refused for that.
    odd = b"K\x000" if room % 2 else b""
    filled = b"\x80\x02" + odd + b"N0" * ((room - len(odd)) // 2) + code + b"."
    old, new = (struct.pack("<I", zlib.crc32(data)) for data in (content[payload:end], filled))
    changed = bytearray(content[:payload] + filled + content[end:])
    # The checksum is in the descriptor after the member, and in the directory at the archive's end.
    at = end
    for _ in range(2):
        at = changed.index(old, at)
        changed[at : at + 4] = new
        at += 4
    return bytes(changed)


_MIN_NAME_NBYTES = 6


def escaping_paths(files: Sequence[Path]) -> Iterator[SourceChange]:
    """Yield changes of every file that contains another file's name: a path that leaves the folder replaces the name.

    The path has the name's length, so that length fields stay right, and leads to the same bytes.
    """
    for file in files:
        content = file.read_bytes()
        for other in files:
            name = other.name.encode()
            if other == file or len(name) < _MIN_NAME_NBYTES or name not in content:
                continue
            for path in (b"../" + b"x" * (len(name) - 3), b"./../" + b"x" * (len(name) - 5)):
                apply = partial(_escape, content.replace(name, path), other, path)
                yield SourceChange(f"{file.name} names {path.decode()} for {other.name}", file, apply)
            absolute = b"/" + b"x" * (len(name) - 1)
            yield SourceChange(f"{file.name} names {absolute.decode()}", file, content.replace(name, absolute))
            with_nul = content.replace(name, name[:-2] + b"\0x")
            yield SourceChange(f"{file.name} names a path with a NUL", file, with_nul)


def _escape(content: bytes, other: Path, path: bytes, file: Path) -> None:
    shutil.copy2(other, file.parent / path.decode())
    file.write_bytes(content)


# ruff: noqa: D102 (a test's name describes the test)


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """The expected result of a gather for one tensor."""

    dtype: str
    """Name of the element type in safetensors."""
    shape: tuple[int, ...]
    data: bytes
    """Row-major bytes."""

    def __repr__(self) -> str:
        return f"<{self.dtype} {list(self.shape)} {self.data[:8].hex()}...>"


@dataclass(frozen=True, slots=True)
class SampleSource:
    """A source that a contract's subclass makes, with the expected result of its gather."""

    path: Path
    """Path for the user; it is in the folder of `make`, and so are all files that it refers to."""
    expected: Mapping[str, WholeTensor]
    """Every tensor of the output, by name."""
    base_model: Path | None = None
    """A folder with weights of these names and shapes, if a gather needs one; it is outside of the folder of `make`."""

    @property
    def hints(self) -> Hints:
        """Hints of a gather about the base model, and the config.json beside the source."""
        shapes = {name: tensor.shape for name, tensor in self.expected.items()}
        file = self.path / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else None
        return Hints(
            shapes={} if self.base_model is None else shapes,
            config=config,
            prove_shapes=None if config is None else lambda found: prove_shapes(found, config),
        )


def whole(tensor: Any) -> WholeTensor:
    """Return the expected result of a gather for a tensor of torch."""
    import torch

    from xrank.dtypes import by_torch_name

    plain = tensor.detach().cpu().contiguous()
    raw = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    return WholeTensor(
        by_torch_name(str(tensor.dtype).removeprefix("torch.")).name, tuple(tensor.shape), bytes(raw.numpy())
    )


def read_model(folder: str | os.PathLike[str]) -> dict[str, WholeTensor]:
    """Return the tensors of a Hugging Face folder, read without xrank's code."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            found[name] = WholeTensor(entry["dtype"], tuple(entry["shape"]), content[start + first : start + end])
    return found


class ReaderContract:
    """The tests; a subclass provides `reader` and `make`, or the fixture `made` if making needs other fixtures."""

    reader: ClassVar[Reader]
    frameworks: ClassVar[tuple[str, ...]] = ("torch",)
    """Modules that the reader must not import."""
    recipe: ClassVar[str | None] = None
    """As a gather's recipe; ``"none"`` if `SampleSource.expected` has a training framework's own names."""
    unseen: ClassVar[Mapping[str, str]] = {}
    """Fault (a name in `xrank.testing.reader_contract.FAULTS`) -> reason why the format cannot show it."""
    exit_codes: ClassVar[Mapping[str, frozenset[int]]] = {}
    """Fault -> fitting exit codes, where they differ from those in `FAULTS`."""

    def make(self, folder: Path) -> SampleSource:
        """Write a source into an empty folder, with the same bytes each time if the format allows it."""
        raise NotImplementedError("override this with a method that writes a source")

    def files(self, made: SampleSource) -> list[Path]:
        """Return the files to damage: all of the source but the companions, which are only copied."""
        root = made.path if made.path.is_dir() else made.path.parent
        companions = {companion.path for companion in list_source_companions(str(root))}
        return sorted(file for file in root.rglob("*") if file.is_file() and str(file) not in companions)

    # ---- fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls) -> Iterator[SampleSource]:
        """Make the source once for all tests, each of which uses a copy or does not change it."""
        with _room() as folder:
            yield cls().make(folder)

    @pytest.fixture
    def source(self, made: SampleSource) -> Iterator[SampleSource]:
        """Return a copy of the source that a test may damage."""
        with _room() as folder:
            # The copy has a parent of its own, so that a path can lead out of it and stay in the temporary folder.
            shutil.copytree(made.path.parent, folder / "room", symlinks=True)
            yield SampleSource(folder / "room" / made.path.name, made.expected, made.base_model)

    # ---- sound sources

    def test_recognizes_its_own_and_says_why_not(self, made: SampleSource, tmp_path: Path) -> None:
        assert self.reader.recognize(str(made.path)) is None
        found = find_source(str(made.path))
        # A reader of another package comes in a wrapper, under its own name.
        assert (found.reader.name, os.path.realpath(found.path)) == (self.reader.name, os.path.realpath(made.path))
        (tmp_path / "empty").mkdir()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "notes.txt").write_text("nothing")
        for other in ("empty", "other", "other/notes.txt", "absent"):
            reason = self.reader.recognize(str(tmp_path / other))
            assert reason is not None and 0 < len(reason) < 100 and "\n" not in reason, other

    def test_every_tensor_comes_bit_for_bit(self, made: SampleSource) -> None:
        with _room() as folder:
            self._gather(made, folder / "out")
            _assert_same(read_model(folder / "out"), made.expected)

    def test_reading_twice_gives_the_same_plan(self, made: SampleSource) -> None:
        one, other = (self.reader.read(str(made.path), made.hints) for _ in range(2))
        assert [(s.name, s.dtype, s.shape, s.record.tolist()) for s in one.shards] == [
            (s.name, s.dtype, s.shape, s.record.tolist()) for s in other.shards
        ]
        assert one.files == other.files and one.notes == other.notes

    def test_inspect_finds_no_problem(self, made: SampleSource) -> None:
        report = inspect_source(made.path)
        assert report.details["problems"] == []
        shown = json.loads(json.dumps(report.to_dict()))
        assert shown["source"]["format"] == self.reader.name
        assert shown["source"]["num_tensors"] == len(made.expected)

    def test_no_framework_is_imported(self, made: SampleSource) -> None:
        with _room() as folder:
            command = [sys.executable, "-c", _CHILD, str(made.path), str(folder / "out"), self.reader.name]
            command += [str(made.base_model or ""), self.recipe or ""]
            ended = subprocess.run([*command, *self.frameworks], capture_output=True, text=True, timeout=50)  # noqa: S603
            assert ended.returncode == 0, ended.stderr
            _assert_same(read_model(folder / "out"), made.expected)

    def test_nothing_is_written_into_the_source(self, source: SampleSource) -> None:
        before = _state_of(source.path.parent)
        with _room() as folder:
            self._gather(source, folder / "out")
        assert _state_of(source.path.parent) == before

    # ---- damaged sources

    @pytest.mark.parametrize("fault", FAULTS)
    def test_fault(self, source: SampleSource, fault: str) -> None:
        files = self.files(source)
        payload = self._payload_ranges(source)
        kind = FAULTS[fault]
        wanted = self.exit_codes.get(fault, kind.exit_codes)
        wrong, blind, refused = [], 0, list[SourceChange]()
        changes = (
            change
            for file in files
            for change in kind.changes(file, file.read_bytes(), files, payload.get(os.path.realpath(file), ()))
        )
        for change in changes:
            error, is_right = self._gather_after(source, change)
            refused += [] if error is None else [change]
            if error is None and not is_right:
                blind += 1
                if fault not in self.unseen:
                    wrong.append(f"{change.what}: wrong bytes, and no error")
            elif error is not None and (error.exit_code not in wanted or not _is_named(error)):
                kind_of_error = f"{type(error).__name__} {error} (exit {error.exit_code}, file {error.file})"
                wrong.append(f"{change.what}: {kind_of_error}")
        assert not wrong, "\n".join(wrong[:20])
        assert fault not in self.unseen or blind, f"declared as unseen, but never is: {fault}"
        for change in refused[:1]:  # follow the advice to copy again: the same command with the intact file
            with _room() as folder:
                with change.apply_and_undo(), pytest.raises(XrankError):
                    self._gather(source, folder / "out")
                self._gather(source, folder / "out")
                _assert_same(read_model(folder / "out"), source.expected)

    def test_hostile_pickles_run_nothing(self, source: SampleSource, monkeypatch: pytest.MonkeyPatch) -> None:
        with _room() as folder:
            monkeypatch.chdir(folder)  # a payload that runs would leave its marker here
            wrong, tried, refused = [], 0, 0
            for change in hostile_changes(self.files(source)):
                error, is_right = self._gather_after(source, change)
                tried += 1
                refused += isinstance(error, (UnsafeError, CorruptError))
                if os.listdir(folder):
                    wrong.append(f"{change.what}: it ran")
                    break
                # Right bytes are fine: the reader does not use the pickle, or the pickle drops the call's result.
                if not is_right and not (isinstance(error, (UnsafeError, CorruptError)) and _is_named(error)):
                    wrong.append(f"{change.what}: {type(error).__name__}: {error}")
        assert not wrong, "\n".join(wrong[:20])
        assert refused or not tried, "no hostile pickle was ever refused"

    def test_paths_in_metadata_do_not_leave_the_folder(self, source: SampleSource) -> None:
        wrong = []
        for change in escaping_paths(self.files(source)):
            if not self.follows_names_in(change.file):
                continue
            error, is_right = self._gather_after(source, change)
            if not (isinstance(error, (UnsafeError, CorruptError)) and _is_named(error)):
                wrong.append(f"{change.what}: {type(error).__name__}: {error}, right bytes: {is_right}")
        assert not wrong, "\n".join(wrong[:20])

    # ---- helpers

    def follows_names_in(self, file: Path) -> bool:
        """Return whether the reader uses every name of a file that stands in this file. Override it for stale names."""
        return True

    def _gather(self, made: SampleSource, out: Path) -> None:
        gather_checkpoint(made.path, out, format=self.reader.name, base_model=made.base_model, recipe=self.recipe)

    def _payload_ranges(self, source: SampleSource) -> dict[str, list[tuple[int, int]]]:
        """Return real path -> (first byte, end) of bytes that hold tensors; all other bytes are metadata."""
        model = self.reader.read(str(source.path), source.hints)
        found: dict[str, list[tuple[int, int]]] = {}
        used = {record for shard in model.shards for record in shard.record.tolist()}
        for record in sorted(used):
            file, offset, nbytes = (
                int(column[record])
                for column in (model.records.file, model.records.offset, model.records.stored_nbytes)
            )
            if nbytes:
                found.setdefault(os.path.realpath(model.files[file].path), []).append((offset, offset + nbytes))
        return found

    def _gather_after(self, source: SampleSource, change: SourceChange) -> tuple[XrankError | None, bool]:
        """Return the error of a gather after the change, and whether its bytes are right; undo the change."""
        with _room() as folder, change.apply_and_undo():
            try:
                self._gather(source, folder / "out")
            except XrankError as error:
                assert not os.path.exists(folder / "out"), f"{change.what}: a refused gather left an output"
                return error, False
            except Exception as error:
                raise AssertionError(f"{change.what}: {type(error).__name__}: {error}") from error
            found = read_model(folder / "out")
        return None, found == dict(source.expected)


_CHILD = """
import sys
from importlib.abc import MetaPathFinder
source, out, name, base_model, recipe, *frameworks = sys.argv[1:]
class Absent(MetaPathFinder):
    def find_spec(self, full, path=None, target=None):
        if full.partition(".")[0] in frameworks:
            raise ImportError(f"{full} must not be needed")
sys.meta_path.insert(0, Absent())
from xrank.commands.gather import gather_checkpoint
gather_checkpoint(source, out, format=name, base_model=base_model or None, recipe=recipe or None)
assert not set(frameworks) & set(sys.modules)
"""


@contextmanager
def _room() -> Iterator[Path]:
    """Yield a folder, in memory if possible: the system calls are the same, and syncing is free."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:  # noqa: S108
        yield Path(folder)


def _assert_same(found: Mapping[str, WholeTensor], expected: Mapping[str, WholeTensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, want in expected.items():
        assert found[name] == want, name


def _is_named(error: XrankError) -> bool:
    """Return whether an error names a file, a tensor or a rank, in its fields and in its text."""
    named = [part for part in (error.file, error.tensor) if part]
    text = f"{error.message} {error.got or ''} {error.want or ''}"
    return any(part in text or os.path.basename(part) in text for part in named) or (
        error.rank is not None and re.search(rf"\branks? {error.rank}\b", text) is not None
    )


def _state_of(folder: Path) -> Sequence[tuple[str, int, int, int, bytes]]:
    state = []
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        state.append((str(path), status.st_mode, status.st_size, status.st_mtime_ns, content))
    return state
