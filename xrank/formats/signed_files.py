"""The statement of model-signing about a model's files: the digest of each file, or of each of its shards.

Predicate type and fields are those of model-signing 1.1 (``model_signing/_signing/signing.py``, ``manifest.py``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from xrank.errors import CorruptError
from xrank.formats.entries import Entry
from xrank.formats.signed_statement import STATEMENT_TYPE

_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_GIT_PATHS = (".git", ".gitattributes", ".github", ".gitignore")
_HASHES = ("sha256", "blake2b")
_SHARD = re.compile(r"(?as)(.+):(\d{1,18}):(\d{1,18})")


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a file with one digest: all of it, or a shard."""

    file: str
    """Path relative to the model folder, with "/"."""
    start: int = 0
    end: int | None = None
    """One past the last byte; None: the file's end."""


@dataclass(frozen=True, slots=True)
class SignedFiles:
    """The digests of a signed statement."""

    hash_name: str
    """Name in hashlib."""
    shard_nbytes: int | None
    """Bytes of a shard; None: whole files."""
    digests: Mapping[Stretch, bytes]
    ignored: tuple[str, ...]
    """Paths that the statement leaves out, with all below them."""


def make_files_statement(name: str, digests: Mapping[str, bytes], ignored: str) -> dict[str, Any]:
    """Return the statement about files with these SHA-256 digests.

    By whole files: ``model_signing verify`` has no other way, though its Python API also takes shards.

    Args:
        name: name of the model.
        digests: digest by path relative to the model folder, with "/".
        ignored: the signature's own name.
    """
    # model-signing sorts by the parts of a path.
    files = sorted(digests, key=lambda path: path.split("/"))
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": _hash_all(digests[file] for file in files)}}],
        "predicateType": _PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [ignored, *_GIT_PATHS],
            },
            "resources": [{"name": file, "algorithm": "sha256", "digest": digests[file].hex()} for file in files],
        },
    }


def _hash_all(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def read_files_statement(statement: Mapping[str, Any], path: str) -> SignedFiles:
    """Return the digests of a statement whose signature was checked.

    Raises:
        CorruptError: it is not a statement about a model's files, contradicts itself, or uses another digest.
    """

    def fail(fault: str) -> CorruptError:
        return CorruptError(
            f"{path} does not sign the files of a model",
            file=path,
            got=fault,
            want=f"a statement of model-signing 1, by files or shards, with {' or '.join(_HASHES)}",
            next_step="sign the model again",
        )

    whole = Entry(statement, fail)
    if whole["predicateType"].value != _PREDICATE_TYPE:
        whole["predicateType"].refuse(_PREDICATE_TYPE)
    form, resources = whole["predicate"]["serialization"], whole["predicate"]["resources"].entries()
    hash_name = {"sha256": "sha256", "blake2b": "blake2b", "blake2": "blake2b"}.get(form["hash_type"].text())
    if hash_name is None:
        form["hash_type"].refuse(" or ".join(_HASHES))
    if form["method"].text() not in ("files", "shards"):
        form["method"].refuse("files or shards")
    shard_nbytes = form["shard_size"].count(low=1) if form["method"].text() == "shards" else None
    digests = {_stretch(one["name"], shard_nbytes): one["digest"].digest() for one in resources}
    if len(digests) != len(resources):
        raise fail("a file is named twice")
    subject = whole["subject"].entries(length=1)[0]["digest"]["sha256"]
    if _hash_all(digests.values()) != subject.text():
        raise fail("its digests do not agree with their own digest")
    ignored = form.get("ignore_paths")
    return SignedFiles(hash_name, shard_nbytes, digests, (*(() if ignored is None else ignored.texts()), *_GIT_PATHS))


def _stretch(entry: Entry, shard_nbytes: int | None) -> Stretch:
    name = entry.text()
    if shard_nbytes is None:
        return Stretch(name)
    found = _SHARD.fullmatch(name)
    if found is None or int(found[2]) > int(found[3]):
        entry.refuse("FILE:START:END")
    return Stretch(found[1], int(found[2]), int(found[3]))
