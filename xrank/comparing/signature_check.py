"""Compares the files of a model folder with a signed statement about them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from xrank.comparing.manifest_check import plan_manifest_check
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UsageError, XrankError
from xrank.formats.signed_files import SignedFiles, Stretch, read_files_statement
from xrank.formats.signed_statement import read_public_key, read_signed_statement
from xrank.making.check import run_check
from xrank.plan.budget import Budget
from xrank.plan.file_hashes import hash_file
from xrank.stores import places
from xrank.stores.url import is_url
from xrank.teams.team import Team
from xrank.words import list_text, ranks_text
from xrank.writers.manifest import MANIFEST_NAME, read_manifest
from xrank.writers.output_place import SIGNATURE_NAME

__all__ = ["check_signature"]

_CHECK_NBYTES, _CHUNK_NBYTES = 64_000_000, 1 << 20


def check_signature(
    folder: str,
    signature: str | None,
    public_key: str,
    workers: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[str, int, int]:
    """Compare every byte of a model folder with its signature.

    Args:
        folder: the model.
        signature: the bundle; None: ``model.sig`` in the folder.
        public_key: file of the public key.
        workers: number of threads.
        progress: called with (bytes read so far, bytes in all).

    Returns:
        The signature's path, the number of files, and the bytes in all.

    Raises:
        UsageError: a path cannot be read, or the key is of another kind.
        IncompleteError: a signed file is missing.
        ContradictionError: a file is not signed.
        CorruptError: the key did not sign this, or bytes differ; the error names the tensor and the source's ranks.
    """
    key = read_public_key(public_key)
    path = os.path.join(folder, SIGNATURE_NAME) if signature is None else signature
    if not places.is_folder(folder):
        raise UsageError(f"{folder} is not a folder of a model", file=folder, next_step="give the signed folder")
    signed = read_files_statement(read_signed_statement(path, key), path)
    sizes = dict(_find_files(folder, signed, path))
    _check_names(folder, signed, sizes)
    stretches = sorted(signed.digests, key=lambda one: (one.file, one.start))
    total, done = sum(sizes.values()), 0
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda one: _digest(folder, one, signed.hash_name, sizes[one.file]), stretches)
        for stretch, digest in zip(stretches, found, strict=True):
            if digest != signed.digests[stretch]:
                pool.shutdown(wait=True, cancel_futures=True)
                raise _damage_error(folder, stretch, digest, signed.digests[stretch], path)
            done += (sizes[stretch.file] if stretch.end is None else stretch.end) - stretch.start
            if progress is not None:
                progress(done, total)
    return path, len(sizes), total


def _find_files(folder: str, signed: SignedFiles, signature: str) -> Iterator[tuple[str, int]]:
    """Yield the files that a signature must name, with their sizes."""
    for place, _, names in places.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            relative = path[len(folder) :].replace(os.sep, "/").lstrip("/")
            is_ignored = any(relative == one or relative.startswith(f"{one.rstrip('/')}/") for one in signed.ignored)
            if not is_ignored and places.absolute(path) != places.absolute(signature):
                yield relative, places.nbytes_of(path)


def _check_names(folder: str, signed: SignedFiles, sizes: dict[str, int]) -> None:
    """Compare names and sizes of files, before any is read."""
    named = {stretch.file for stretch in signed.digests}
    missing = sorted(named - sizes.keys())
    if missing:
        raise IncompleteError(
            f"{missing[0]} is signed and not in {folder}",
            file=os.path.join(folder, missing[0]),
            got=f"{len(missing)} missing: {list_text(missing)}",
            want="every signed file",
            next_step="copy the file again from a good copy",
        )
    # By shards, an empty file has no digest.
    surplus = sorted(name for name in sizes.keys() - named if sizes[name] or signed.shard_nbytes is None)
    if surplus:
        raise ContradictionError(
            f"{surplus[0]} is in {folder} and not signed",
            file=os.path.join(folder, surplus[0]),
            got=f"{len(surplus)} unsigned: {list_text(surplus)}",
            want="only signed files",
            next_step="move the file elsewhere, or sign the model again if the file belongs to it",
        )
    ends: dict[str, int] = {}
    for stretch in signed.digests:
        if stretch.end is not None:
            ends[stretch.file] = max(ends.get(stretch.file, 0), stretch.end)
    for file, end in ends.items():
        if sizes[file] != end:
            raise CorruptError(
                f"{file} is not as long as it was signed",
                file=os.path.join(folder, file),
                got=f"{sizes[file]:,} bytes",
                want=f"{end:,} bytes",
                next_step="copy the file again from a good copy",
            )


def _digest(folder: str, stretch: Stretch, hash_name: str, nbytes: int) -> bytes:
    path = os.path.join(folder, *stretch.file.split("/"))
    if is_url(path):
        return _digest_object(path, stretch.start, nbytes if stretch.end is None else stretch.end, hash_name)
    if stretch.end is None:
        return hash_file(path, hash_name)
    with open(path, "rb", buffering=0) as file:
        state, left = hashlib.new(hash_name), stretch.end - stretch.start
        file.seek(stretch.start)
        while left and (data := file.read(min(left, _CHUNK_NBYTES))):
            state.update(data)
            left -= len(data)
    return state.digest()


def _digest_object(url: str, start: int, end: int, hash_name: str) -> bytes:
    from xrank.stores.client import open_store  # folders do not need this module

    (store, key), status = open_store(url), places.object_status(url)
    state = hashlib.new(hash_name)
    for offset in range(start, end, _CHUNK_NBYTES):
        state.update(store.read(key, offset, min(_CHUNK_NBYTES, end - offset), status))
    return state.digest()


def _damage_error(folder: str, stretch: Stretch, got: bytes, want: bytes, signature: str) -> CorruptError:
    """Return the error for bytes that differ, with the tensor among them if the manifest shows it."""
    part = "" if stretch.end is None else f", bytes {stretch.start:,}-{stretch.end - 1:,}"
    found = _find_damage(folder)
    origin = "" if found is None or found.tensor is None else _describe_origin(folder, found.tensor)
    subject = stretch.file if found is None or found.tensor is None else f"{found.tensor} ({stretch.file})"
    return CorruptError(
        f"{subject}: its bytes are not those that were signed{part}",
        tensor=None if found is None else found.tensor,
        file=os.path.join(folder, *stretch.file.split("/")),
        got=got.hex(),
        want=f"{want.hex()}, as in {signature}",
        next_step=f"copy the file again from a good copy, or gather the model again{origin}",
    )


def _find_damage(folder: str) -> XrankError | None:
    """Return the error of the check against the manifest, whose digests are by tensor; None: it has none."""
    try:
        run_check(plan_manifest_check(folder, None), Budget.from_memory(_CHECK_NBYTES, 1), None, Team())
    except XrankError as error:
        return error
    return None


def _describe_origin(folder: str, tensor: str) -> str:
    """Return the ranks whose files a tensor was made of, as the manifest records them."""
    sources = read_manifest(os.path.join(folder, MANIFEST_NAME))["tensors"][tensor]["sources"]
    ranks = {source["rank"] for source in sources if source["rank"] is not None}
    files = list_text(sorted({source["file"] for source in sources}), 3)
    if not ranks:
        return ""
    return f"; the tensor was made of {ranks_text(ranks)} ({files}), whose checksums a gather compares"
