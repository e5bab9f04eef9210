"""Sign a model folder in its stage, and compare a folder with its signature.

An attestation of the files' origin may be signed beside them. Weights are not read again to be signed: they were hashed
as they were written. Only small files, and files that other ranks or an interrupted run wrote, are read from the stage;
in a store no file can be read before the commit, so that one process makes all of them.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from xrank.commands.checks import plan_manifest_check, run_check
from xrank.engine.executor import Budget
from xrank.engine.file_writing import hash_stretch
from xrank.engine.windows import FileHashes
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UsageError, XrankError
from xrank.formats.signature import (
    STATEMENT_TYPE,
    SignedFiles,
    Stretch,
    make_files_statement,
    read_files_statement,
    read_public_key,
    read_signed_statement,
    read_signing_key,
    sign_statement,
)
from xrank.layout.stored_model import NO_CHECKSUM, StoredModel
from xrank.ranks.team import Team
from xrank.recipes.adapters import describe_merges
from xrank.recipes.decision import FolderPlan
from xrank.storage import places
from xrank.storage.commit import Stage
from xrank.storage.disk import explain_errors
from xrank.storage.manifest import MANIFEST_NAME, read_manifest
from xrank.storage.output_place import ATTESTATION_NAME, SIGNATURE_NAME
from xrank.storage.url import is_url
from xrank.words import list_text, ranks_text

_PREDICATE_TYPE = "urn:xrank:gather:1"


def sign_folder(
    gather: FolderPlan,
    out: str,
    stage: Stage,
    names: Sequence[str],
    manifest: bytes,
    hashes: FileHashes | None,
) -> None:
    """Write the signature of a folder, and before it the attestation if one is asked for.

    `names` are all files of the folder but the manifest, `hashes` those of the files that this process wrote whole.
    """
    options = gather.options
    assert options.sign is not None
    key = read_signing_key(os.fspath(options.sign))
    contents = {MANIFEST_NAME: manifest}
    if options.attest:
        contents[ATTESTATION_NAME] = sign_statement(_make_attestation(gather, manifest), key)
        stage.write_file(ATTESTATION_NAME, contents[ATTESTATION_NAME])
    digests = {name: hashlib.sha256(content).digest() for name, content in contents.items()}
    weights = {file.output.name: (index, file.output.nbytes) for index, file in enumerate(gather.plan.files)}
    for name in names:
        known = hashes.of_file(*weights[name]) if name in weights and hashes is not None else None
        digests[name] = known or stage.hash_file(name)
    model = os.path.basename(places.absolute(out))
    stage.write_file(SIGNATURE_NAME, sign_statement(make_files_statement(model, digests, SIGNATURE_NAME), key))


def _make_attestation(gather: FolderPlan, manifest: bytes) -> dict[str, Any]:
    """Return the in-toto statement about the origin of the folder that this manifest describes."""
    from xrank.version import __version__  # its package is slow to import

    source, selection = gather.source, gather.selection
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": MANIFEST_NAME, "digest": {"sha256": hashlib.sha256(manifest).hexdigest()}}],
        "predicateType": _PREDICATE_TYPE,
        "predicate": {
            "builder": {"id": f"xrank {__version__}"},
            "source": {
                "format": source.format,
                "step": source.step,
                "run_id": source.run_id,
                "world_size": source.world_size,
                "files": _describe_files(source),
            },
            "recipe": source.recipe,
            "cast": dict(selection.cast),
            "excluded": list(selection.excluded),
            "tied": {target: list(names) for target, names in selection.tied.items()},
            "merged": describe_merges(gather.plan),
            "notes": [list(note) for note in gather.notes],
        },
    }


def _describe_files(source: StoredModel) -> list[Mapping[str, Any]]:
    """Return each file of the source with its ranks and a digest of the checksums that it records.

    The digest is the SHA-256 of lines ``OFFSET NBYTES CRC32`` of the model's records, by rising offset; None where a
    record has no checksum. It can be made again from the file's metadata alone.
    """
    records = source.records
    ranks: dict[int, set[int]] = {}
    for shard in source.shards:
        for rank, record in zip(shard.rank.tolist(), shard.record.tolist(), strict=True):
            for stored in records.find_stored([record]) if records.quantized or records.changed else [record]:
                ranks.setdefault(int(records.file[stored]), set()).add(rank)
    described: list[Mapping[str, Any]] = []
    for number, file in enumerate(source.files):
        if number not in ranks:
            continue
        (rows,) = np.nonzero((records.file == number) & ~np.isin(np.arange(len(records)), [*records.quantized]))
        rows = rows[np.argsort(records.offset[rows], kind="stable")]
        is_known = bool(len(rows)) and NO_CHECKSUM not in records.crc32[rows]
        lines = "".join(f"{records.offset[row]} {records.nbytes[row]} {records.crc32[row]:08x}\n" for row in rows)
        described.append(
            {
                "name": os.path.relpath(file.path, source.path if os.path.isdir(source.path) else None),
                "nbytes": file.nbytes,
                "ranks": sorted(ranks[number]),
                "checksums_sha256": hashlib.sha256(lines.encode()).hexdigest() if is_known else None,
            }
        )
    return described


_CHECK_NBYTES = 64_000_000


def check_signature(
    folder: str,
    signature: str | None,
    public_key: str,
    workers: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[str, int, int, list[str]]:
    """Compare every byte of a model folder with its signature; `signature` None: ``model.sig`` in the folder.

    All that is in the folder must be signed. Links are not followed: what they lead to is not in the folder. Returns
    the signature's path, the number of files, the bytes in all, and the files that the signature leaves out.
    """
    key = read_public_key(public_key)
    path = os.path.join(folder, SIGNATURE_NAME) if signature is None else signature
    if not places.is_folder(folder):
        raise UsageError(f"{folder} is not a folder of a model", file=folder, next_step="give the signed folder")
    signed = read_files_statement(read_signed_statement(path, key), path)
    if signature is None and os.path.islink(path):
        _check_kind(path, os.lstat(path).st_mode)
    left_out: list[str] = []
    ignored = [one.rstrip("/") for one in signed.ignored]
    sizes = dict(_find_files(folder, "", ignored, places.absolute(path), left_out))
    _check_names(folder, signed, sizes)
    stretches = sorted(signed.digests, key=lambda one: (one.file, one.start))
    total, done = sum(sizes.values()), 0
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda one: _digest(folder, one, signed.hash_name), stretches)
        for stretch, digest in zip(stretches, found, strict=True):
            if digest != signed.digests[stretch]:
                pool.shutdown(wait=True, cancel_futures=True)
                raise _damage_error(folder, stretch, digest, signed.digests[stretch], path)
            done += (sizes[stretch.file] if stretch.end is None else stretch.end) - stretch.start
            if progress is not None:
                progress(done, total)
    return path, len(sizes), total, left_out


def _find_files(
    folder: str, prefix: str, ignored: Sequence[str], signature: str, left_out: list[str]
) -> Iterator[tuple[str, int]]:
    """Yield the files below `prefix` that a signature must name, with their sizes.

    `left_out` gets the paths that are there and that the signature leaves out, as `ignored`; it cannot sign itself.
    """
    with explain_errors(folder):
        entries = sorted(_list_entries(folder))
    for name, mode, nbytes in entries:
        path, relative = os.path.join(folder, name), prefix + name
        if places.absolute(path) == signature and not stat.S_ISDIR(mode):
            continue
        # A signature leaves out its own name, which hides nothing as long as a file has it.
        if relative in ignored and (relative != SIGNATURE_NAME or stat.S_ISREG(mode)):
            left_out.append(f"{relative}/" if stat.S_ISDIR(mode) else relative)
            continue
        if relative == SIGNATURE_NAME and stat.S_ISDIR(mode):
            raise _kind_error(path, "a folder", "move it elsewhere: its files are not signed")
        if stat.S_ISDIR(mode):
            yield from _find_files(path, f"{relative}/", ignored, signature, left_out)
            continue
        _check_kind(path, mode)
        yield relative, nbytes


def _list_entries(folder: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, mode and bytes of each entry of a folder."""
    if is_url(folder):
        for name in places.list_names(folder):
            path = os.path.join(folder, name)
            is_file = places.is_file(path)
            yield name, stat.S_IFREG if is_file else stat.S_IFDIR, places.nbytes_of(path) if is_file else 0
        return
    for entry in os.scandir(folder):
        status = entry.stat(follow_symlinks=False)
        yield entry.name, status.st_mode, status.st_size


def _check_kind(path: str, mode: int) -> None:
    if stat.S_ISLNK(mode):
        step = "copy the model with cp -rL, which copies files instead of links, and verify the copy"
        raise _kind_error(path, f"a link to {os.readlink(path)!r}", step)
    if not stat.S_ISREG(mode):
        raise _kind_error(path, stat.filemode(mode), "move it elsewhere, and verify the model again")


def _kind_error(path: str, got: str, next_step: str) -> ContradictionError:
    return ContradictionError(
        f"{path} is not a file, so its bytes are not signed",
        file=path,
        got=got,
        want="files, and folders of files",
        next_step=next_step,
    )


def _check_names(folder: str, signed: SignedFiles, sizes: dict[str, int]) -> None:
    """Compare names and sizes of files, before any is read."""
    named = {stretch.file for stretch in signed.digests}
    missing = sorted(named - sizes.keys())
    if missing:
        raise IncompleteError(
            f"{missing[0]} is signed but not in {folder}",
            file=os.path.join(folder, missing[0]),
            got=f"{len(missing)} missing: {list_text(missing)}",
            want="every signed file",
            next_step="copy the file again from a good copy",
        )
    # By shards, an empty file has no digest.
    surplus = sorted(name for name in sizes.keys() - named if sizes[name] or signed.shard_nbytes is None)
    if surplus:
        raise ContradictionError(
            f"{surplus[0]} is in {folder} but not signed",
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
                f"{file} does not have the signed length",
                file=os.path.join(folder, file),
                got=f"{sizes[file]:,} bytes",
                want=f"{end:,} bytes",
                next_step="copy the file again from a good copy",
            )


def _digest(folder: str, stretch: Stretch, hash_name: str) -> bytes:
    path = os.path.join(folder, *stretch.file.split("/"))
    return hash_stretch(path, stretch.start, stretch.end, hash_name, follow_links=False)


def _damage_error(folder: str, stretch: Stretch, got: bytes, want: bytes, signature: str) -> CorruptError:
    """Return the error for bytes that differ, with the tensor among them if the manifest shows it."""
    part = "" if stretch.end is None else f", bytes {stretch.start:,}-{stretch.end - 1:,}"
    tensor = None
    try:
        # The check against the manifest, whose digests are by tensor.
        run_check(plan_manifest_check(folder, None), Budget.from_memory(_CHECK_NBYTES, 1), None, Team())
    except XrankError as error:
        tensor = error.tensor
    origin = "" if tensor is None else _describe_origin(folder, tensor)
    subject = stretch.file if tensor is None else f"{tensor} ({stretch.file})"
    return CorruptError(
        f"{subject}: its bytes differ from those that were signed{part}",
        tensor=tensor,
        file=os.path.join(folder, *stretch.file.split("/")),
        got=got.hex(),
        want=f"{want.hex()}, as in {signature}",
        next_step=f"copy the file again from a good copy, or gather the model again{origin}",
    )


def _describe_origin(folder: str, tensor: str) -> str:
    """Return the ranks whose files a tensor was made of, as the manifest records them."""
    sources = read_manifest(os.path.join(folder, MANIFEST_NAME))["tensors"][tensor]["sources"]
    ranks = {source["rank"] for source in sources if source["rank"] is not None}
    files = list_text(sorted({source["file"] for source in sources}), 3)
    if not ranks:
        return ""
    return f"; the tensor was made of {ranks_text(ranks)} ({files}); a gather compares their checksums"
