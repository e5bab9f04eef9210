"""Reads a version of a model that is stored as changes of the versions before it; see `xrank.formats.deltas`.

A version's chain goes back over its base versions, among the folders beside it, to a version that is whole, or to a
base model. The model has the whole one's files and names, with the changes of each record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from math import prod
from typing import Any

import msgspec
import xxhash
from msgspec import Struct
from msgspec.structs import replace

from xrank import dtypes
from xrank.errors import (
    AGAIN,
    ContradictionError,
    CorruptError,
    IncompleteError,
    UnknownFormatError,
    UsageError,
    either,
    option,
)
from xrank.formats.deltas import (
    FRAME_HEADER_NBYTES,
    INDEX_NAME,
    DamagedBodyError,
    DeltaFacts,
    frame_content_nbytes,
    new_checksum,
    version_name,
    version_of,
)
from xrank.formats.safetensors_header import SafetensorsHeader
from xrank.layout.stored_model import RecordChange, RecordedHash, StoredModel
from xrank.readers.base import Hints
from xrank.readers.hugging_face.folder import HfFolderReader, read_delta, read_facts, read_headers
from xrank.readers.records import Records, Subject
from xrank.storage import places
from xrank.storage.client import ObjectStatus
from xrank.storage.manifest import MANIFEST_NAME, ManifestVersion
from xrank.storage.regular_file import open_regular
from xrank.storage.url import is_url
from xrank.words import list_text, plural

_COPY = "copy the version again from where it was written"


class Version(Struct, frozen=True):
    """The folder of a version that contains changes."""

    path: str
    facts: DeltaFacts


class Chain(Struct, frozen=True):
    """Versions in their order, each a change of the one before, and the whole model that they begin with."""

    base: str
    versions: tuple[Version, ...]
    is_own: bool = True
    """Whether the whole model is a version beside them, and not one that the caller named."""

    @property
    def last(self) -> DeltaFacts:
        """The facts of the last version."""
        return self.versions[-1].facts


def list_versions(folder: str) -> dict[int, str]:
    """Return number -> folder of the versions in a folder that are written, by rising number.

    A version without an index, or a file of a whole model, is still being written.
    """
    found: dict[int, str] = {}
    for name in places.list_names(folder) if places.is_folder(folder) else ():
        number, path = version_of(name), os.path.join(folder, name)
        if number is not None and any(places.is_file(os.path.join(path, one)) for one in (INDEX_NAME, _WHOLE_NAME)):
            found[number] = path
    return dict(sorted(found.items()))


_WHOLE_NAME = "model.safetensors"


def number_of(path: str) -> int | None:
    """Return the number of a version's folder by its name; None for another folder."""
    return version_of(os.path.basename(places.absolute(path)))


def find_whole(path: str) -> tuple[str, ...] | None:
    """Return the folder of the whole model that a version's chain begins with; None for another folder.

    Empty if no version beside it is whole, or the chain has a hole.
    """
    if number_of(path) is None or read_facts(path) is None:
        return None
    *_, last = _walk_back(path, _list_siblings(path))
    return () if isinstance(last, Version) else (last,)


def find_chain(
    path: str, base: str | None = None, *, known: Mapping[int, str] | None = None, base_number: int | None = 0
) -> Chain:
    """Return the chain of a version.

    Args:
        path: folder of the version, which contains changes.
        base: folder of the model that has the number `base_number`, from which the chain begins at the latest.
        known: number -> folder of the versions that may belong to the chain; None: those beside the version.
        base_number: number of the base model; None: whatever version the chain lacks.

    Raises:
        IncompleteError: a version is missing.
        ContradictionError: a version's states or name contradict the others'.
    """
    siblings = _list_siblings(path) if known is None else known
    found: list[Version] = []
    for one in _walk_back(path, siblings):
        if not isinstance(one, Version):
            return _check_states(Chain(one, tuple(reversed(found))))
        found.append(one)
        if base is not None and base_number == one.facts.base_version:
            break
    wanted = found[-1].facts.base_version
    if base is None or base_number not in (None, wanted):
        name, last = version_name(wanted), found[-1].path
        what = f"{last} contains the changes since version {wanted}, which is missing"
        want = f"{name} in the same folder, or the model that it is based on"
        step = either(
            f"copy {name} into {os.path.dirname(places.absolute(last))}",
            f"give the model of version {wanted} with {option('base_model', metavar='DIR')}",
        )
        if base is not None:
            step = f"copy {name} into {os.path.dirname(places.absolute(last))}"
        got = list_text([version_name(number) for number in siblings], 4, empty="no other version")
        raise IncompleteError(what, file=last, got=got, want=want, next_step=step)
    return _check_states(Chain(base, tuple(reversed(found)), is_own=False))


def _list_siblings(path: str) -> dict[int, str]:
    return {} if number_of(path) is None else list_versions(os.path.dirname(places.absolute(path)))


def _walk_back(path: str, siblings: Mapping[int, str]) -> Iterator[Version | str]:
    """Yield a version and those that it is based on, the last one first; at the end the folder of a whole one."""
    while (facts := read_facts(path)) is not None:
        number = number_of(path)
        if number not in (None, facts.version):
            got, want = f"version {facts.version} in its index", f"version {number}"
            problem = f"{path} has the name of a different version"
            raise ContradictionError(problem, file=path, got=got, want=want, next_step=_COPY)
        yield Version(path, facts)
        before = siblings.get(facts.base_version)
        if before is None:
            return
        path = before
    yield path


def _check_states(chain: Chain) -> Chain:
    known = read_held_version(chain.base)
    before, state = chain.base, None if known is None else known.state
    for version in chain.versions:
        if None not in (state, version.facts.base_state) and state != version.facts.base_state:
            problem = f"{version.path} contains changes to different weights than those of {before}"
            want = f"{state}, the state of those"
            step = "copy all versions of one training run again from where they were written"
            got = f"base_state {version.facts.base_state}"
            raise ContradictionError(problem, file=version.path, got=got, want=want, next_step=step)
        before, state = version.path, version.facts.state
    return chain


class _Listed(Struct, frozen=True):
    version: ManifestVersion | None = None


def read_held_version(folder: str) -> ManifestVersion | None:
    """Return the version that a model's manifest records; None if it records none, or there is no manifest."""
    path = os.path.join(folder, MANIFEST_NAME)
    if not places.is_file(path):
        return None
    try:
        return msgspec.json.decode(places.read_content(path), type=_Listed).version
    except (msgspec.DecodeError, OSError):  # whoever reads the manifest itself explains it
        return None


class VersionReader(HfFolderReader):
    """The reader of safetensors folders and files, of whole models and of versions that contain changes."""

    def read_version(self, path: str, hints: Hints, delta: DeltaFacts) -> StoredModel:
        """Return where every tensor is; errors as of `find_chain` and `read_chain`."""
        return read_chain(find_chain(path, hints.base_path), hints)


def read_whole(path: str) -> StoredModel:
    """Return the model of a version that is whole."""
    return HfFolderReader().read(path, Hints())


def read_chain(chain: Chain, hints: Hints = Hints()) -> StoredModel:  # noqa: B008  it is frozen
    """Return the model of a chain's last version.

    Raises:
        ContradictionError: the base model lacks a tensor, or has it in another size.
        CorruptError: a version's files do not have the form of changes.
    """
    model = HfFolderReader().read(chain.base, hints)
    shards = {shard.name: shard for shard in model.shards}
    records, changes = Records(), dict[int, list[RecordChange]]()
    for version in chain.versions:
        found = read_delta(version.path)
        assert found is not None, "its index has an encoding"
        new_checksum(found[0].checksum)  # before any byte is read: its package may not be there
        for header in found[1]:
            record_of = records.add_safetensors(header)
            for name, checksum in _check_bodies(header, found[0].encoding, shards, chain.base):
                body = len(model.records) + record_of(name)
                change = RecordChange(body, found[0].encoding, found[0].checksum, checksum)
                changes.setdefault(int(shards[name].record[0]), []).append(change)
    joined = model.records.join(records.table(), len(model.files))
    whole = {**joined.changed}
    for record, own in changes.items():
        whole[record] = (*whole.get(record, ()), *own)
    last, state = chain.last, chain.versions[0].facts.base_state
    if state is not None:  # a base that differs where no version changes it would go unnoticed
        table, tensors = model.records, list[tuple[str, str, tuple[int, ...], str, int, int]]()
        for shard in model.shards:
            place = ("", 0, 0)  # of a tensor without an element
            for one in shard.record.tolist():
                place = (model.files[table.file[one]].path, int(table.offset[one]), int(table.nbytes[one]))
            tensors.append((shard.name, shard.dtype, shard.shape, *place))
        first = chain.versions[0].path
        hashed = RecordedHash(chain.base, "xxh3_128", bytes.fromhex(state), first, tuple(tensors))
        model = replace(model, hashes=(*model.hashes, hashed))
    text = f"version {last.version}: {chain.base} with the changes of {plural(len(chain.versions), 'version')}"
    return replace(
        model,
        format="deltas",
        path=chain.versions[-1].path,
        files=(*model.files, *records.files),
        records=replace(joined, changed=whole),
        nbytes=model.nbytes + records.nbytes,
        step=last.step,
        notes=(*(note for note in model.notes if note[0] != "no-checksums"), ("chain", text)),
        details={**model.details, "version": last.version, "num_deltas": len(chain.versions)},
    )


def _check_bodies(
    header: SafetensorsHeader, encoding: str, shards: Mapping[str, Any], base: str
) -> Iterator[tuple[str, str]]:
    """Yield name and checksum of each tensor of a version's file, after a look at its size."""
    for tensor in header.tensors:
        checksum = header.metadata.get(tensor.name)
        if tensor.dtype != "U8" or len(tensor.shape) != 1 or checksum is None:
            got = f"{tensor.dtype} {list(tensor.shape)}{', no checksum' if checksum is None else ''}"
            want = "a row of U8, and a checksum in the file's metadata"
            subject = Subject(tensor.name, None, header.path)
            raise subject.make(CorruptError, "is not a change of a tensor", got, want, _COPY)
    for tensor, size in zip(header.tensors, _read_sizes(header), strict=True):
        subject, shard = Subject(tensor.name, None, header.path), shards.get(tensor.name)
        if shard is None or len(shard.record) != 1:
            got = f"no such tensor in {base}" if shard is None or not len(shard.record) else "a tensor in pieces"
            if shard is not None and not prod(shard.shape):
                got = "a tensor without an element"
            step = "give the model that the version is based on"
            raise subject.contradiction("the base lacks this tensor", got, f"one of {len(shards)} tensors", step)
        nbytes = prod(shard.shape) * dtypes.dtype(shard.dtype).nbytes
        if size is not None and (size != nbytes if encoding == "xor" else size > 4 + 5 * nbytes):
            got = f"a body of {size:,} bytes, and {shard.dtype} {list(shard.shape)} in {base}"
            step = "give the model that the version is based on"
            raise subject.contradiction("its size in the base is different", got, f"{nbytes:,} bytes", step)
        yield tensor.name, header.metadata[tensor.name]


def _read_sizes(header: SafetensorsHeader) -> Sequence[int | None]:
    """Return the bytes of each body, as far as its frame records them.

    In a store that would be a request for each tensor: there a wrong size shows when the body is decoded.
    """
    if is_url(header.path):
        return [None] * len(header.tensors)
    found = list[int | None]()
    with open_regular(header.path) as file:
        for tensor in header.tensors:
            start = file.read(header.data_start + tensor.start, min(FRAME_HEADER_NBYTES, tensor.end - tensor.start))
            try:
                size = frame_content_nbytes(BytesIO(start))
            except DamagedBodyError as error:
                subject = Subject(tensor.name, None, header.path)
                raise subject.make(
                    CorruptError, "its changes are damaged", str(error), "a valid zstd frame", _COPY
                ) from error
            found.append(None if size < 0 else size)
    return found


def identify_version(folder: str) -> str:
    """Return a text that no version of the same number from another run has: a digest of checksums or statuses."""
    found, manifest = read_delta(folder), os.path.join(folder, MANIFEST_NAME)
    facts: object
    if found is not None:
        names = ((tensor.name, one.metadata.get(tensor.name)) for one in found[1] for tensor in one.tensors)
        facts = (found[0], sorted(names))
    elif places.is_file(manifest):
        facts = places.read_content(manifest)
    else:
        facts = [(os.path.basename(one.path), *_list_status(one.status)) for one in read_headers(folder)]
    return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def _list_status(status: os.stat_result | ObjectStatus) -> tuple[object, ...]:
    if isinstance(status, os.stat_result):
        return status.st_size, status.st_mtime_ns, status.st_ino
    return (status,)


def find_versions(paths: Sequence[str]) -> dict[int, str]:
    """Return number -> folder of the versions that paths mean: folders of versions, or one that contains them.

    UsageError for another folder, ContradictionError for two versions of a number.
    """
    found: dict[int, str] = {}
    for path in paths:
        number = number_of(path)
        if number is None and places.is_folder(path) and (facts := read_facts(path)) is not None:
            number = facts.version
        own = list_versions(path) if number is None else {number: path}
        if not own:
            want = "the folder of a version, as weight_v000001, or one with such folders in it"
            raise UnknownFormatError(f"{path} contains no version", file=path, want=want, next_step="check the path")
        if both := own.keys() & found.keys():
            number = min(both)
            got = f"{found[number]} and {own[number]}"
            problem, step = f"version {number} is given twice", "give each version once"
            raise UsageError(problem, file=own[number], got=got, next_step=step)
        found |= own
    return dict(sorted(found.items()))


def choose_target(versions: Mapping[int, str], version: int | None) -> str:
    """Return the folder of a version, or of the newest one; IncompleteError if it is not there."""
    number = max(versions) if version is None else version
    if number not in versions:
        got = list_text([version_name(one) for one in versions], 4)
        step = either(f"wait until it is written, then {AGAIN}", f"leave {option('version')} out")
        raise IncompleteError(f"version {number} is missing", got=got, want=version_name(number), next_step=step)
    return versions[number]
