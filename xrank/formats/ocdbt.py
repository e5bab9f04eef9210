"""OCDBT, tensorstore's key-value store in files: where the value of each key lies.

``manifest.ocdbt`` names the root of a B+tree, whose nodes lie in data files (``d/...``) as compressed ranges under
CRC-32C. A leaf contains small values and refers to ranges of data files for large ones. tensorstore decodes manifest
and nodes (tensorstore/kvstore/ocdbt/format); their bytes are read here, so that it opens no file.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from xrank.errors import UnsafeError, UsageError
from xrank.formats.regular_file import Origin, open_regular, quote

MANIFEST = "manifest.ocdbt"
_MAX_NODE_NBYTES = 1 << 28
_MAX_HEIGHT = 64


@dataclass(frozen=True, slots=True)
class StoredValue:
    """Where the value of a key lies."""

    file: str
    """Path in the store's folder: of the value, or of the node that contains it."""
    offset: int
    """First byte of the value in the file; of the node if `data` is given."""
    nbytes: int
    data: bytes | None = None
    """The value, if the node contains it."""


def read_ocdbt(folder: str) -> dict[str, StoredValue]:
    """Return key -> place of its value, for the last version of a store.

    Raises:
        IncompleteError: a file is missing.
        CorruptError, UnsafeError: a file is damaged, or a path leads out of the folder.
        UsageError: tensorstore is not installed.
    """
    tensorstore = _import_tensorstore()
    path = os.path.join(folder, MANIFEST)
    with open_regular(path) as file:
        content = _read(file, 0, file.nbytes)
    manifest = _decode(tensorstore, MANIFEST, content, None, Origin(path))
    versions = manifest.get("versions")
    if not versions:
        raise Origin(path).corrupt("names no version of the store", got=quote(str(sorted(manifest))), want="one")
    found: dict[str, StoredValue] = {}
    root = versions[-1]["root"].get("location")
    if root is not None:  # absent in an empty store
        for key, value in _walk(tensorstore, folder, path, root, b"", 0):
            found[key.decode("utf-8", "surrogateescape")] = value
    return found


def _import_tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError:
        raise UsageError(
            "the checkpoint is Orbax's in OCDBT, and tensorstore is not installed",
            got="no module tensorstore",
            want="the packages of the extra xrank[orbax]",
            next_step='install them: pip install "xrank[orbax]"',
        ) from None
    return tensorstore


def _walk(
    tensorstore: Any, folder: str, above: str, location: str, prefix: bytes, depth: int
) -> Iterator[tuple[bytes, StoredValue]]:
    """Yield all keys below a node with their values; `above` is the file that names the node."""
    kind, base, relative, offset, nbytes = _parse_location(location, above)
    name = base + relative
    path = os.path.join(folder, name)
    origin = Origin(path)
    if depth > _MAX_HEIGHT:
        raise origin.corrupt("the nodes of the store form a circle")
    with open_regular(path) as file:
        content = _read(file, offset, nbytes)
    # Alone under its name, so that it begins at byte 0.
    node = _decode(tensorstore, name, content, f"{kind}:{base}:{relative}:0:{nbytes}", origin)
    for entry in node["entries"]:
        key = prefix + entry["key"]
        if node["height"]:
            below = prefix + entry["subtree_common_prefix"]
            yield from _walk(tensorstore, folder, path, entry["location"], below, depth + 1)
        elif "inline_value" in entry:
            yield key, StoredValue(name, offset, len(entry["inline_value"]), entry["inline_value"])
        else:
            _, base_path, file_path, start, size = _parse_location(entry["indirect_value"], path)
            yield key, StoredValue(base_path + file_path, start, size)


def _read(file: Any, offset: int, nbytes: int) -> bytes:
    if nbytes > _MAX_NODE_NBYTES:
        raise file.origin.corrupt("contains too large a node", got=f"{nbytes:,} bytes", want=f"{_MAX_NODE_NBYTES:,}")
    content: bytes = file.read(offset, nbytes)
    return content


def _decode(tensorstore: Any, name: str, content: bytes, node: str | None, origin: Origin) -> Any:
    """Return a manifest or node as plain values."""
    store = tensorstore.KvStore.open("memory://").result()
    store.write(name, content).result()
    try:
        return tensorstore.ocdbt.dump(store, node).result()
    # tensorstore raises ValueError for damage, and others for what it takes for a fault of the store.
    except Exception as error:
        raise origin.corrupt("is not a sound part of an OCDBT store", got=str(error)[:300]) from None


def _parse_location(location: str, above: str) -> tuple[str, str, str, int, int]:
    """Return kind, base path, relative path, offset and bytes of ``<kind>:<base>:<path>:<offset>:<bytes>``."""
    parts = location.split(":")
    if len(parts) != 5:
        raise Origin(above).corrupt("names a part of the store in an unknown way", got=quote(location))
    kind, base, relative, offset, nbytes = parts
    name = base + relative
    if "\0" in name or name.startswith(("/", "../")) or posixpath.normpath(name) != name:
        raise UnsafeError(
            f"{above} names a file outside its folder",
            file=above,
            got=quote(name),
            want="paths in the folder",
            next_step="do not use this checkpoint: its metadata was tampered with",
        )
    return kind, base, relative, int(offset), int(nbytes)
