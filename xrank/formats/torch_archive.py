"""Read the output of ``torch.save`` without torch: its tree, and the place of each storage's bytes.

Nothing is executed, and tensors' bytes are not read: a tensor becomes a view (dtype, shape, strides) on a record of the
file. All numbers of the view are checked against the record's size in the archive's directory, which
``torch.load(mmap=True)`` does not do (measured on 2.13).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from isal import isal_zlib

from xrank.errors import CorruptError
from xrank.formats.archived_tensor import ArchivedTensor, ArchiveRecord, TensorRebuilder, load_global
from xrank.formats.inert_record import refuse_inert
from xrank.formats.pickle_reader import MAX_PICKLE_NBYTES, read_pickle
from xrank.formats.plain_values import PLAIN_BUILDERS
from xrank.formats.regular_file import RegularFile, open_regular, quote, refuse_pointer
from xrank.formats.zip_index import ItemBytes, ZipMember, open_item, read_members
from xrank.stores.backend import ObjectStatus

__all__ = ["ArchiveRecord", "ArchivedTensor", "TorchArchive", "is_archive", "read_archive", "read_archive_in"]
__all__ += ["NAMES", "refuse_inert"]

# torch/serialization.py: MAGIC_NUMBER, pickled: the first bytes of files before torch 1.6, which introduced zips.
NAMES = "save the names with the tensors: torch.save(model.state_dict(), file); then gather that"
"""The next step for a file without a state dict."""
_ZIP = b"PK\x03\x04"
_BEFORE_ZIPS = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """The content of a ``torch.save`` archive; its tensors' bytes are still in the file."""

    path: str
    status: os.stat_result | ObjectStatus
    """Status of the file when it was read."""
    records: Mapping[str, ArchiveRecord]
    """Key -> the member ``data/<key>``."""
    value: object
    """Plain values, tuples, lists, dicts (also OrderedDict), sets, `ArchivedTensor` and `InertRecord`.

    An element type is a text such as ``"torch.bfloat16"``, a ``torch.Size`` a tuple, a parameter its tensor; a storage
    outside a tensor is an inert record. No container contains itself.
    """
    name: str
    """Stem of the file's name when it was saved, which a rename or copy does not change; ``archive`` if torch wrote to
    a stream."""
    has_checksums: bool
    """False if all checksums are 0 (``torch.serialization.set_crc32_options(False)``), so bytes cannot be verified."""
    foreign: Mapping[tuple[str, str], int]
    """Classes and functions in the pickle that frameworks do not write (`xrank.formats.pickled_names`)."""


def read_archive(path: str, *, rank: int | None = None) -> TorchArchive:
    """Read the structure of a ``torch.save`` archive.

    Args:
        path: the file.
        rank: the rank that wrote it, for errors.

    Raises:
        CorruptError: the file is not such an archive, is cut short or damaged, or its parts disagree.
        UnsafeError: its pickle needs code to run.
        UsageError: it is undamaged, but safetensors cannot hold its tensors.
        IncompleteError: there is no such file, or a pointer of git-lfs in its place.
    """
    with open_regular(path, rank) as file:
        refuse_pointer(file)
        return read_archive_in(file)


def is_archive(file: RegularFile) -> bool:
    """Return whether an open file begins as ``torch.save`` lets it begin, in its old format, too."""
    start = file.read(0, min(len(_BEFORE_ZIPS), file.nbytes))
    return start.startswith(_ZIP) or start == _BEFORE_ZIPS


def read_archive_in(file: RegularFile, *, start: int = 0, nbytes: int | None = None) -> TorchArchive:
    """Read the structure of a ``torch.save`` archive in an open file; errors as in `read_archive`.

    Args:
        file: the file.
        start: first byte of the archive, for an item inside a larger file (torch DCP's ``.distcp``).
        nbytes: length of the archive; None: to the end of the file.
    """
    item = open_item(file, start, nbytes)
    try:
        stem, members = _strip_folder(item, read_members(item))
    except CorruptError:
        if file.read(start, min(len(_BEFORE_ZIPS), file.nbytes - start)) != _BEFORE_ZIPS:
            raise
        raise file.origin.usage(
            "was written by torch before 1.6, or in its old format",
            got="a bare pickle",
            want="a zip",
            next_step="load it with torch and save it again",
        ) from None
    origin = file.origin
    member = members.get("data.pkl")
    if member is None:
        raise origin.corrupt("the archive holds no data.pkl: torch.save did not write it")
    if member.nbytes > MAX_PICKLE_NBYTES:
        raise origin.corrupt(
            "data.pkl is too large", got=f"{member.nbytes} bytes", want=f"at most {MAX_PICKLE_NBYTES} bytes"
        )
    # torch writes zeros for all checksums or for none; the CRC of an empty member is always 0.
    has_checksums = any(member.crc32 for member in members.values())
    _check_byteorder(item, members.get("byteorder"), has_checksums)
    data = _read_member(item, member, has_checksums)
    records = {
        name[5:]: ArchiveRecord(name[5:], start + member.offset, member.nbytes, member.crc32)
        for name, member in members.items()
        if name.startswith("data/")
    }
    tensors = TensorRebuilder(records, origin)
    pickled = read_pickle(
        data,
        origin,
        builders={**PLAIN_BUILDERS, **tensors.builders()},
        load_global=load_global,
        load_persistent=tensors.load_storage,
    )
    return TorchArchive(
        origin.path,
        file.status,
        MappingProxyType(records),
        pickled.value,
        stem,
        has_checksums,
        MappingProxyType(dict(pickled.foreign)),
    )


def _strip_folder(item: ItemBytes, members: tuple[ZipMember, ...]) -> tuple[str, dict[str, ZipMember]]:
    """Return the folder of all members, and the members by their names in it."""
    prefix = members[0].name.partition("/")[0] + "/" if members else ""
    for member in members:
        if not member.name.startswith(prefix):
            raise item.file.origin.corrupt(
                "the archive has members outside its folder", got=quote(member.name), want=quote(prefix)
            )
    return prefix[:-1], {member.name[len(prefix) :]: member for member in members}


def _read_member(item: ItemBytes, member: ZipMember, has_checksums: bool) -> bytes:
    data = item.read(member.offset, member.nbytes)
    crc32 = isal_zlib.crc32(data)
    if has_checksums and crc32 != member.crc32:
        raise item.file.origin.corrupt(
            f"{quote(member.name)} fails its checksum", got=f"CRC {crc32:08x}", want=f"CRC {member.crc32:08x}"
        )
    return data


def _check_byteorder(item: ItemBytes, member: ZipMember | None, has_checksums: bool) -> None:
    if member is None:  # torch writes it since 2.1; older files are little-endian
        return
    order = _read_member(item, member, has_checksums) if member.nbytes <= 16 else b""
    if order == b"big":
        raise item.file.origin.usage(
            "was written on a big-endian machine", got="big", want="little", next_step="save it on a little-endian one"
        )
    if order != b"little":
        raise item.file.origin.corrupt("its byte order is damaged", got=quote(order), want="little")
