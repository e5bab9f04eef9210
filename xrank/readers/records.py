"""The files of a source: byte records, copies of other ranks' files, and the folders with its config."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from isal import isal_zlib
from msgspec import Struct

from xrank.dtypes import dtype
from xrank.errors import (
    AGAIN,
    ContradictionError,
    IncompleteError,
    LayoutError,
    UnsafeError,
    XrankError,
    make_sentence,
    option,
)
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive
from xrank.layout.stored_model import LOST, NO_CHECKSUM, RecordTable, SourceFile, StoredModel
from xrank.readers.base import RAISING, Faults
from xrank.storage import places
from xrank.storage.regular_file import Origin, open_regular, quote
from xrank.words import plural

if TYPE_CHECKING:
    from xrank.formats.safetensors_header import SafetensorsHeader
    from xrank.storage.regular_file import RegularFile


ENGINE_PART = r"model-(.*-)?(rank|tp)-\d+-part-\d+\.safetensors|rank\d+\.safetensors"
"""Names of files with a rank's part of a model that an inference engine saved."""

ONE_SAVE = "let all ranks save into an empty folder, or copy the folder of one save again from where it was written"
"""Where files of two saves lie in one folder, and the format does not record which belong together.

Moving some of them away could leave a mixture that looks like a model.
"""
ONE_RUN = "all files must come from one save of one run; copy them again"

_Error = TypeVar("_Error", bound=XrankError)


class Subject(Struct, frozen=True):
    """The tensor that errors are about, with the rank and the file or folder that hold it."""

    tensor: str
    rank: int | None = None
    file: str | None = None

    def make(
        self, kind: type[_Error], problem: str, got: str | None, want: str | None, next_step: str | None
    ) -> _Error:
        """Return an error of any kind; its message begins with the tensor and ends with the place."""
        facts = {"tensor": self.tensor, "rank": self.rank, "file": self.file, "got": got, "want": want}
        if self.file is not None and self.file not in problem:
            problem += f" ({Origin(self.file, self.rank).name})"
        return kind(make_sentence(self.tensor, problem), **facts, next_step=next_step)  # type: ignore[arg-type]

    def contradiction(
        self, problem: str, got: str | None = None, want: str | None = None, next_step: str = ONE_RUN
    ) -> ContradictionError:
        """Return the error for a tensor that other ranks or files contradict."""
        return self.make(ContradictionError, problem, got, want, next_step)

    def disagreement(self, other: int, what: str, got: str, want: str, next_step: str = ONE_RUN) -> ContradictionError:
        """Return the error for two ranks that record different facts."""
        problem = f"ranks {other} and {self.rank} disagree about its {what}"
        return self.make(ContradictionError, problem, got, want, next_step)

    def incomplete(
        self, problem: str, got: str | None = None, want: str | None = None, next_step: str | None = None
    ) -> IncompleteError:
        """Return the error for a tensor of which a part is missing."""
        return self.make(IncompleteError, problem, got, want, next_step)

    def layout(
        self, problem: str, got: str | None = None, want: str | None = None, next_step: str | None = None
    ) -> LayoutError:
        """Return the error for an unknown or contradictory layout."""
        error = LayoutError(
            make_sentence(self.tensor, problem), tensor=self.tensor, got=got, want=want, next_step=next_step
        )
        error.about("" if self.file is None else Origin(self.file, self.rank).name, rank=self.rank, file=self.file)
        return error


def outside_error(path: str, entry: str, what: str = "metadata", *, next_step: str | None = None) -> UnsafeError:
    """Return the error for a file that names a place outside its folder, as only a tampered one does."""
    return UnsafeError(
        f"{path} lists a file outside its folder",
        file=path,
        got=quote(entry),
        want="names in the folder",
        next_step=next_step or f"do not use this checkpoint: its {what} was tampered with",
    )


def absent_rank_error(
    folder: str, file: str, rank: int, world_size: int, *, who: str, got: str, next_step: str | None = None
) -> IncompleteError:
    """Return the error for ranks without a file: `file` and `rank` are the first one's, `who` names all in words."""
    name = os.path.relpath(file, folder)
    return IncompleteError(
        f"{who} of {world_size} wrote no {name} in {folder}",
        rank=rank,
        file=file,
        got=got,
        want=f"files of all {world_size} ranks",
        next_step=next_step or f"copy {name} from the node of rank {rank}, then {AGAIN}",
    )


def copied_error(origin: Origin, other: Origin, got: str, want: str) -> ContradictionError:
    """Return the error for a file that is a copy of another rank's."""
    step = f"copy rank {origin.rank}'s file, or rank {other.rank}'s, again from where it was saved"
    return origin.contradiction(f"is a copy of rank {other.rank}'s file", got, want, step)


_TELLING_ELEMENTS = 8
_ONES = {"F32": b"\0\0\x80\x3f", "BF16": b"\x80\x3f", "F16": b"\0\x3c"}


class CopiedValues:
    """Detects copied files: ranks hold different weights, so the checksums of two files cannot all be equal."""

    def __init__(self, faults: Faults = RAISING) -> None:
        self._seen: dict[tuple[tuple[int, int], ...], Origin] = {}
        self._faults = faults

    def add(self, archive: TorchArchive, tensors: Iterable[ArchivedTensor], num_elements: int, origin: Origin) -> None:
        """Add the tensors that only this rank should hold, with `num_elements` elements besides padding."""
        # A few elements may be equal by chance, and padding often is.
        if not archive.has_checksums or num_elements < _TELLING_ELEMENTS:
            return
        found = tuple(
            (archive.records[t.key].nbytes, archive.records[t.key].crc32) for t in tensors if is_telling(archive, t)
        )
        if not found:
            return
        other = self._seen.setdefault(found, origin)
        if other is not origin:
            got = f"the checksums of all {len(found)} tensors as in {other.path}"
            # Which of the two is the copy is unknown.
            self._faults.lose(copied_error(origin, other, got, "different weights"), origin.path, other.path)


def is_telling(archive: TorchArchive, tensor: ArchivedTensor) -> bool:
    """Return whether a tensor's values tell it from others; zeros or ones (norms, new adapters, padding) do not."""
    record, width = archive.records[tensor.key], dtype(tensor.dtype).nbytes
    if tensor.shape in ((), (0,)) or record.nbytes < width:
        return False
    count = record.nbytes // width
    patterns: Sequence[bytes] = [bytes(width), *([_ONES[tensor.dtype]] if tensor.dtype in _ONES else [])]
    return all(compute_repeated_crc32(pattern, count) != record.crc32 for pattern in patterns)


def compute_repeated_crc32(pattern: bytes, count: int) -> int:
    """Return the CRC-32 of a pattern repeated `count` times, in O(log count) steps."""
    total, total_nbytes = 0, 0
    power, power_nbytes = isal_zlib.crc32(pattern), len(pattern)
    # Square and multiply: `power` is the CRC of 1, 2, 4, ... repetitions, and the bits of the count choose among them.
    while count:
        if count & 1:
            total = isal_zlib.crc32_combine(total, power, power_nbytes) if total_nbytes else power
            total_nbytes += power_nbytes
        power, power_nbytes = isal_zlib.crc32_combine(power, power, power_nbytes), 2 * power_nbytes
        count >>= 1
    return total


# deepspeed/runtime/engine.py: _save_checkpoint; megatron/training/checkpointing.py: get_checkpoint_tracker_filename;
# verl/utils/checkpoint/checkpoint_manager.py; skyrl_train/trainer.py.
_MARKERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt")
_TAG = re.compile(r"[\w.-]{1,255}")
_MAX_NBYTES = 256

# transformers/trainer_utils.py: PREFIX_CHECKPOINT_DIR.
_TRAINER_STEP = re.compile(r"checkpoint-[0-9]+")
# accelerate/utils/fsdp_utils.py: save_fsdp_model; torch/distributed/checkpoint/_hf_utils.py: SHARDED_DIR_NAME;
# verl/utils/checkpoint/checkpoint_manager.py: get_dist_checkpoint_path, for Megatron's part.
_PART = re.compile(r"pytorch_model_fsdp(_[0-9]+)?|sharded|dist_ckpt")
_SHARDED = "sharded"
EXPORT_FOLDER = "huggingface"
"""Subfolder for the config, and perhaps the whole model, that verl and SkyRL write beside the ranks' files."""


def find_checkpoint_folders(asked: str, place: str) -> tuple[str, ...]:
    """Return the folders in which a checkpoint's companions may lie, those nearest to its weights first.

    The order: the folder that a marker in the source names, the source, each parent up to the user's path, and the
    checkpoint's root, recognized by a marker or a name. Each is followed by its subfolder ``huggingface``. The user's
    path `asked` is a file, or a folder at or above the source `place`.
    """
    folder = place if places.is_folder(place) else _parent(place)
    found = [*_find_marked(folder), folder]
    while places.absolute(found[-1]).startswith(os.path.join(places.absolute(asked), "")):
        found.append(_parent(found[-1]))
    above = _parent(folder)
    if (
        any(places.is_file(os.path.join(above, marker)) for marker in _MARKERS)
        or _TRAINER_STEP.fullmatch(os.path.basename(places.absolute(above)))
        or _PART.fullmatch(os.path.basename(places.absolute(folder)))
    ):
        found.append(above)
    return tuple(dict.fromkeys(inner for own in found for inner in (own, os.path.join(own, EXPORT_FOLDER))))


def _find_marked(folder: str) -> Iterator[str]:
    """Yield the folders with the weights that markers name; never one outside `folder`."""
    for marker in _MARKERS:
        try:
            text = read_start(os.path.join(folder, marker), _MAX_NBYTES).decode().strip()
        except (XrankError, OSError, ValueError):
            continue  # the format's reader reports a damaged marker
        names = [text]
        if text.isdecimal():
            # Megatron's marker contains a number for iter_0000010; verl's and SkyRL's one for global_step_10.
            names = [f"iter_{int(text):07d}", f"global_step_{int(text)}"]
        for name in names:
            path = os.path.join(folder, name)
            if _TAG.fullmatch(name) and name not in (".", "..") and places.is_folder(path):
                yield path
    if places.is_folder(os.path.join(folder, _SHARDED)):
        yield os.path.join(folder, _SHARDED)


def _parent(path: str) -> str:
    """Return the parent folder, spelled as in the user's path if possible."""
    head, name = os.path.split(path.rstrip(os.sep))
    if name in ("", os.curdir, os.pardir):
        return os.path.dirname(places.absolute(path))
    return head or os.curdir


def read_start(path: str, most: int) -> bytes:
    """Return the first bytes of a small file, at most so many."""
    with open_regular(path) as file:
        return file.read(0, min(file.nbytes, most))


def read_object(path: str, most: int) -> dict[str, Any]:
    """Return the JSON object in a small file that only helps to recognize a format; empty without a readable one."""
    with suppress(XrankError, OSError, ValueError, RecursionError):
        content = json.loads(read_start(path, most))
        return content if isinstance(content, dict) else {}
    return {}


def read_small(path: str, most: int) -> bytes:
    """Return the content of a file that may not be larger than so many bytes."""
    with open_regular(path) as file:
        if file.nbytes > most:
            raise file.origin.corrupt("is too large", f"{file.nbytes:,} bytes", f"at most {most:,}")
        return file.read(0, file.nbytes)


def find_step(folder: str, pattern: re.Pattern[str], levels: int = 2) -> int | None:
    """Return the step in the name of a folder, or of one above it, whose first group is the number."""
    path = places.absolute(folder)
    for _ in range(levels):
        found = pattern.fullmatch(os.path.basename(path))
        if found is not None:
            return int(found[1])
        path = os.path.dirname(path)
    return None


def nbytes_of(paths: Iterable[str]) -> int:
    """Return the bytes of files, except dangling links and files that were removed meanwhile."""
    total = 0
    for path in paths:
        with suppress(OSError):
            total += places.nbytes_of(path)
    return total


def nbytes_below(folder: str) -> int:
    """Return the bytes of all files in a folder."""
    return nbytes_of(os.path.join(place, name) for place, _, names in places.walk(folder) for name in names)


NO_CHECKSUMS = ("no-checksums", "safetensors files hold no checksums; damage inside a tensor can't be seen")
"""Note on a source of safetensors."""
_FOREIGN_NAMES = "foreign-names"
"""Code of the note on classes and functions that frameworks do not write into pickles."""


class Records:
    """Files and records in the order in which they were added, in four arrays even for a million records."""

    def __init__(self) -> None:
        self.files: list[SourceFile] = []
        self.bare: list[str] = []
        """Paths of torch files written without checksums."""
        self._foreign: dict[str, Mapping[tuple[str, str], int]] = {}
        self._indexes: dict[str, Callable[[str], int]] = {}
        self._file, self._offset, self._nbytes, self._crc32 = (array("q") for _ in range(4))

    def add_records(self, archive: TorchArchive, keys: Collection[str]) -> int:
        """Add a file with some of its records, in the order of these keys; return the index of the first one."""
        first, table = len(self._file), archive.records
        rows = np.fromiter(map(table.row, keys), np.int64, len(keys))
        self._file.extend([self._add_file(archive)] * len(rows))
        crc32 = table.crc32[rows] if archive.has_checksums else np.full(len(rows), NO_CHECKSUM)
        for column, values in (
            (self._offset, table.offset[rows]),
            (self._nbytes, table.nbytes[rows]),
            (self._crc32, crc32),
        ):
            column.frombytes(values.tobytes())
        return first

    def _add_file(self, archive: TorchArchive) -> int:
        self.files.append(SourceFile.from_status(archive.path, archive.status))
        if not archive.has_checksums:
            self.bare.append(archive.path)
        self._foreign[archive.path] = archive.foreign
        return len(self.files) - 1

    def add_archive(self, archive: TorchArchive) -> Callable[[str], int]:
        """Add a file; return a function that gives the index of the record with a key, and adds it at first use.

        A file that was added before gives the same function.
        """
        if archive.path in self._indexes:
            return self._indexes[archive.path]
        number = self._add_file(archive)
        known: dict[str, int] = {}

        def index(key: str) -> int:
            if key not in known:
                record = archive.records[key]
                crc32 = record.crc32 if archive.has_checksums else NO_CHECKSUM
                known[key] = self._add(number, record.offset, record.nbytes, crc32)
            return known[key]

        self._indexes[archive.path] = index
        return index

    def add_safetensors(self, header: SafetensorsHeader) -> Callable[[str], int]:
        """Add a file; return a function that adds the record of a tensor by its name, and gives its index."""
        number = len(self.files)
        self.files.append(SourceFile.from_status(header.path, header.status))
        spans = {tensor.name: (tensor.start, tensor.end) for tensor in header.tensors}

        def index(name: str) -> int:
            start, end = spans[name]
            return self._add(number, header.data_start + start, end - start, NO_CHECKSUM)

        return index

    def add_lost(self, path: str) -> int:
        """Add a file that is lost, with one record for all of its pieces; return the record's index."""
        self.files.append(SourceFile.lost(path))
        return self._add(len(self.files) - 1, 0, 0, LOST)

    def _add(self, file: int, offset: int, nbytes: int, crc32: int) -> int:
        self._file.append(file)
        self._offset.append(offset)
        self._nbytes.append(nbytes)
        self._crc32.append(crc32)
        return len(self._file) - 1

    def read_bytes(self, record: int, file: RegularFile, nbytes: int) -> bytes:
        """Return the first bytes of a record, at most so many, from its open file."""
        return bytes(file.read(self._offset[record], min(nbytes, self._nbytes[record])))

    def path(self, record: int) -> str:
        """Return the path of the file that contains a record."""
        return self.files[self._file[record]].path

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(self._nbytes)

    def notes(self) -> list[tuple[str, str]]:
        """Return notes on files without checksums, and on code that their pickles would run elsewhere."""
        return note_foreign_names(self._foreign) + note_bare_files(self.bare)

    def table(self, lost: Collection[str] = ()) -> RecordTable:
        """Return all records; those in the files at paths `lost` are lost."""
        columns = (self._file, self._offset, self._nbytes, self._crc32)
        file, offset, nbytes, crc32 = (np.array(column, dtype=np.int64) for column in columns)
        numbers = [number for number, one in enumerate(self.files) if one.path in lost] if lost else []
        crc32[np.isin(file, numbers)] = LOST
        return RecordTable(file, offset, nbytes, crc32)


def index_lost(path: str, records: Records) -> Callable[[str], int]:
    """Add a lost file; return the function that gives the index of its one record, whatever the key."""
    record = records.add_lost(path)
    return lambda key: record


def note_bare_files(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return a note on files without checksums, or none."""
    if not paths:
        return []
    text = f"{plural(len(paths), 'file')} without checksums, {paths[0]} first"
    return [("no-checksums", f"{text}; damage inside a tensor there can't be seen")]


def note_foreign_names(found: Mapping[str, Mapping[tuple[str, str], int]]) -> list[tuple[str, str]]:
    """Return a note on classes and functions that frameworks do not write into pickles, or none.

    `found` has the `Pickled.foreign` of each file by path.
    """
    places = {name: (path, at) for path, names in reversed([*found.items()]) for name, at in names.items()}
    if not places:
        return []
    name, (path, at) = next(iter(places.items()))
    more = f" ({len(places)} such names in all)" if len(places) > 1 else ""
    text = (
        f"{path} names {quote('.'.join(name))[1:-1]} near byte {at} of its pickle{more}: xrank ran nothing and left "
        "its value out, but torch.load(weights_only=False) would run it"
    )
    return [(_FOREIGN_NAMES, text)]


def refuse_foreign_names(model: StoredModel) -> None:
    """Raise an error if the pickles of a source name classes or functions that frameworks do not write."""
    text = dict(model.notes).get(_FOREIGN_NAMES)
    if text is not None:
        raise UnsafeError(
            text,
            file=model.path,
            got="a name of code",
            want="names that frameworks write",
            next_step="have the file written again with tensors and plain values only, or, if you trust its writer, "
            f"omit {option('strict_pickles')}",
        )
