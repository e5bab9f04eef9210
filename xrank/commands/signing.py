"""Signs a model folder in its stage: the statement about its files, and an attestation of their origin.

Weights are not read again: they were hashed as they were written. Only small files, and files that other ranks or an
interrupted run wrote, are read from the stage; in a store no file can be read before the commit, so that one process
makes all of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from xrank.engine.windows import FileHashes
from xrank.formats.signature import STATEMENT_TYPE, make_files_statement, read_signing_key, sign_statement
from xrank.layout.stored_model import NO_CHECKSUM, StoredModel
from xrank.recipes.adapters import describe_merges
from xrank.recipes.decision import FolderPlan
from xrank.storage import places
from xrank.storage.output_place import ATTESTATION_NAME, MANIFEST_NAME, SIGNATURE_NAME

_PREDICATE_TYPE = "urn:xrank:gather:1"


def sign_folder(
    gather: FolderPlan,
    out: str,
    hash_small: Callable[[str], bytes],
    names: Sequence[str],
    manifest: bytes,
    hashes: FileHashes | None,
    write_file: Callable[[str, bytes], object],
) -> None:
    """Write the signature of a folder, and before it the attestation if one is asked for.

    `hash_small` returns the SHA-256 of a file in the stage that this process has not written window by window, `names`
    are all files of the folder but the manifest, and `hashes` those of the files that this process wrote whole.
    """
    options = gather.options
    assert options.sign is not None
    key = read_signing_key(os.fspath(options.sign))
    contents = {MANIFEST_NAME: manifest}
    if options.attest:
        contents[ATTESTATION_NAME] = sign_statement(_make_attestation(gather, manifest), key)
        write_file(ATTESTATION_NAME, contents[ATTESTATION_NAME])
    digests = {name: hashlib.sha256(content).digest() for name, content in contents.items()}
    weights = {file.output.name: (index, file.output.nbytes) for index, file in enumerate(gather.plan.files)}
    for name in names:
        known = hashes.of_file(*weights[name]) if name in weights and hashes is not None else None
        digests[name] = known or hash_small(name)
    model = os.path.basename(places.absolute(out))
    write_file(SIGNATURE_NAME, sign_statement(make_files_statement(model, digests, SIGNATURE_NAME), key))


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
            ranks.setdefault(int(records.file[record]), set()).add(rank)
    described: list[Mapping[str, Any]] = []
    for number, file in enumerate(source.files):
        if number not in ranks:
            continue
        (rows,) = np.nonzero(records.file == number)
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
