"""``xrank_manifest.json``: the contents of an output, the source of each byte, and digests to verify it.

It contains no time, host or absolute path, so the same input gives the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from xrank.errors import CorruptError, IncompleteError, either, option
from xrank.storage import places
from xrank.storage.disk import explain_errors
from xrank.storage.output_place import MANIFEST_NAME

__all__ = ["MANIFEST_NAME"]

DIGEST_ALGORITHM = (
    "xxh3: XXH3-128 of the XXH3-128 digests of a tensor's 64 KiB blocks, and for a file of its header and its tensors' "
    "digests; xxh128: XXH3-128 of a file's bytes"
)

_SCHEMA = 1
_ELEMENT_TYPE = re.compile(r"BOOL|BF16|C64|F4|F8_E\dM\d\w*|F(?:16|32|64)|[IU](?:8|16|32|64)", re.ASCII)
"""Names of element types, as safetensors writes them."""
_MAX_NBYTES = 2 * 2**30
_DIGEST = re.compile(r"([a-z0-9_]+:)?[0-9a-f]{8,128}")


class ManifestSource(Struct, frozen=True):
    """The source of a gather."""

    format: str
    world_size: int | None = None
    run_id: str | None = None
    step: int | None = None


class ManifestFile(Struct, frozen=True):
    """A file of the output."""

    name: str
    nbytes: int
    digest: str


class TensorSource(Struct, frozen=True):
    """A part of a source file that a tensor was made of."""

    file: str
    """Path relative to the source folder."""
    rank: int | None
    offset: int
    """First byte in the file."""
    nbytes: int


class ManifestTensor(Struct, frozen=True):
    """A tensor of the output."""

    dtype: str
    """Safetensors name of the element type."""
    shape: tuple[int, ...]
    """Global shape."""
    file: str
    digest: str
    sources: tuple[TensorSource, ...] = ()
    replicas: int = 0
    """Number of copies that were compared with the written one."""


def manifest_text(
    source: ManifestSource,
    files: Iterable[ManifestFile],
    tensors: Mapping[str, ManifestTensor],
    *,
    companions: Iterable[ManifestFile] = (),
    tied: Mapping[str, str] | None = None,
    excluded: Iterable[str] = (),
    cast: Mapping[str, Any] | None = None,
    merged: Mapping[str, str] | None = None,
    transformed: Mapping[str, str] | None = None,
    padding_dropped: Mapping[str, Any] | None = None,
    notes: Iterable[Any] = (),
    plan: str | None = None,
) -> str:
    """Return the manifest, one line for each file and tensor, sorted by name.

    Args:
        source: the source of the gather.
        files: files of weights, and the index.
        tensors: tensors by name.
        companions: files copied beside the weights.
        tied: name that was not written -> name of the tensor with the same values.
        excluded: names that options left out.
        cast: name -> earlier element type, for tensors that were cast.
        merged: name -> the adapter's tensors that were added to it; the key is left out if empty.
        transformed: name -> tensor that the caller's function made it of; the key is left out if empty.
        padding_dropped: name -> number of padding rows that were removed.
        notes: notes of the report.
        plan: digest that the same command gives again; the key is left out if None.
    """
    sections = {
        "schema": str(_SCHEMA),
        "digest": _line(DIGEST_ALGORITHM),
        "source": _line(_fields(source)),
        "files": _rows(_line(_fields(file)) for file in sorted(files, key=lambda f: f.name)),
        "companions": _rows(_line(_fields(file)) for file in sorted(companions, key=lambda f: f.name)),
        "tensors": _table(
            {
                name: _fields(tensor) | {"sources": [_fields(part) for part in tensor.sources]}
                for name, tensor in tensors.items()
            }
        ),
        "tied": _table(tied or {}),
        "excluded": _rows(_line(name) for name in sorted(excluded)),
        "cast": _table(cast or {}),
        **({"merged": _table(merged)} if merged else {}),
        **({"transformed": _table(transformed)} if transformed else {}),
        "padding_dropped": _table(padding_dropped or {}),
        "notes": _rows(_line(note) for note in notes),
        **({"plan": _line(plan)} if plan is not None else {}),
    }
    return "{\n" + ",\n".join(f'"{key}": {text}' for key, text in sections.items()) + "\n}\n"


def _fields(record: ManifestSource | ManifestFile | ManifestTensor | TensorSource) -> dict[str, Any]:
    """Return the fields by name, as they are; `structs.asdict` copies each value deeply."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


def read_manifest(path: str) -> dict[str, Any]:
    """Read a manifest and check every part of it.

    Raises:
        IncompleteError: there is no manifest.
        CorruptError: it is damaged, contradicts itself or was written by another version.
    """
    return parse_manifest(_read(path), path)


def parse_manifest(content: bytes, path: str) -> dict[str, Any]:
    """Return the content of a manifest, of which every part is checked; errors name `path`.

    Raises:
        CorruptError: it is damaged, contradicts itself or was written by another version.
    """
    try:
        # By itself, json accepts NaN and keeps the last of repeated keys.
        manifest = json.loads(content, object_pairs_hook=_build_unique, parse_constant=_refuse_constant)
        _check_manifest(manifest)
    except (ValueError, RecursionError, _FlawError) as error:
        next_step = "gather the model again; its manifest cannot be trusted"
        what = f"{path}: is not a manifest of xrank: {error}"
        raise CorruptError(what, file=path, got=str(error), next_step=next_step) from error
    result: dict[str, Any] = manifest
    return result


class _FlawError(Exception):
    """A manifest is wrong; the message names the part."""


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _rows(lines: Iterable[str]) -> str:
    text = ",\n  ".join(lines)
    return f"[\n  {text}\n ]" if text else "[]"


def _table(values: Mapping[str, Any]) -> str:
    text = ",\n  ".join(f"{_line(name)}: {_line(values[name])}" for name in sorted(values))
    return f"{{\n  {text}\n }}" if text else "{}"


def _read(path: str) -> bytes:
    try:
        fd = places.open_descriptor(path)
    except (FileNotFoundError, NotADirectoryError):
        again = "gather the model again: only what xrank wrote has a manifest"
        next_step = either(again, f"give {option('against')} another copy to compare with")
        raise IncompleteError(f"{path}: there is no manifest", file=path, next_step=next_step) from None
    except OSError as error:
        with explain_errors(path):
            raise error
    with explain_errors(path), open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_NBYTES:
            next_step = "gather the model again, or copy the manifest again from a good copy"
            what = f"{path}: is not a manifest of xrank: not a regular file, or too large"
            raise CorruptError(what, file=path, next_step=next_step)
        return file.read()


def _build_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _FlawError("a key occurs twice")
    return result


def _refuse_constant(text: str) -> None:
    raise _FlawError(f"{text} is not a valid value")


def _check_manifest(manifest: Any) -> None:
    # `is`, because True and 1.0 are equal to 1.
    if not isinstance(manifest, dict) or manifest.get("schema") is not _SCHEMA:
        raise _FlawError(f"its schema must be {_SCHEMA}")
    _check_keys("the manifest", {key: value for key, value in manifest.items() if key not in _FURTHER_KEYS}, _KEYS)
    if manifest["digest"] != DIGEST_ALGORITHM:
        raise _FlawError(f"its digests are {manifest['digest']!r}, not {DIGEST_ALGORITHM}")
    source = manifest["source"]
    _check_keys("source", source, ("format", "world_size", "run_id", "step"))
    _check_kind("source.format", source["format"], str)
    if source["run_id"] is not None:
        _check_kind("source.run_id", source["run_id"], str)
    for key in ("world_size", "step"):
        if source[key] is not None:
            _check_count(f"source.{key}", source[key])
    files = {*_check_files("files", manifest["files"])}
    companions = {*_check_files("companions", manifest["companions"])}
    if files & companions:
        raise _FlawError(f"{min(files & companions)!r} is a file and a companion")
    _check_kind("tensors", manifest["tensors"], dict)
    for name, tensor in manifest["tensors"].items():
        _check_tensor(f"tensor {name!r}", tensor, files)
    for key in ("tied", "cast", "padding_dropped"):
        _check_kind(key, manifest[key], dict)
    _check_kind("plan", manifest.get("plan", ""), str)
    for key in _MADE_OF_KEYS:
        for name, text in _check_kind(key, manifest.get(key, {}), dict).items():
            _check_kind(key, text, str)
            if name not in manifest["tensors"]:
                raise _FlawError(f"{name!r} was {key}, and is not a tensor")
    for name, target in manifest["tied"].items():
        if not isinstance(target, str) or target not in manifest["tensors"]:
            raise _FlawError(f"{name!r} is tied to {target!r}, which is not a tensor")
    _check_kind("notes", manifest["notes"], list)
    _check_kind("excluded", manifest["excluded"], list)
    for name in manifest["excluded"]:
        _check_kind("excluded", name, str)


_KEYS = (
    *("schema", "digest", "source", "files", "companions", "tensors"),
    *("tied", "excluded", "cast", "padding_dropped", "notes"),
)
_MADE_OF_KEYS = ("merged", "transformed")
_FURTHER_KEYS = (*_MADE_OF_KEYS, "plan")


def _check_files(what: str, entries: Any) -> list[str]:
    _check_kind(what, entries, list)
    names = []
    for entry in entries:
        _check_keys(what, entry, ("name", "nbytes", "digest"))
        _check_file_name(f"{what}.name", entry["name"])
        _check_count(f"{what}.nbytes", entry["nbytes"])
        _check_digest(f"{what}.digest", entry["digest"])
        names.append(entry["name"])
    if len(set(names)) != len(names):
        raise _FlawError(f"{what}: a name occurs twice")
    return names


def _check_tensor(what: str, tensor: Any, files: set[str]) -> None:
    _check_keys(what, tensor, ("dtype", "shape", "file", "digest", "sources", "replicas"))
    _check_kind(f"{what}.dtype", tensor["dtype"], str)
    if not _ELEMENT_TYPE.fullmatch(tensor["dtype"]):
        raise _FlawError(f"{what}: no element type {tensor['dtype']!r}")
    _check_kind(f"{what}.shape", tensor["shape"], list)
    for size in tensor["shape"]:
        _check_count(f"{what}.shape", size)
    _check_kind(f"{what}.file", tensor["file"], str)
    if tensor["file"] not in files:
        raise _FlawError(f"{what} is in {tensor['file']!r}, which is not among the files")
    _check_digest(f"{what}.digest", tensor["digest"])
    _check_count(f"{what}.replicas", tensor["replicas"])
    _check_kind(f"{what}.sources", tensor["sources"], list)
    for source in tensor["sources"]:
        _check_keys(f"{what}.sources", source, ("file", "rank", "offset", "nbytes"))
        _check_file_name(f"{what}.sources.file", source["file"])
        if source["rank"] is not None:
            _check_count(f"{what}.sources.rank", source["rank"])
        _check_count(f"{what}.sources.offset", source["offset"])
        _check_count(f"{what}.sources.nbytes", source["nbytes"])


def _check_keys(what: str, value: Any, keys: Sequence[str]) -> None:
    _check_kind(what, value, dict)
    if set(value) != set(keys):
        raise _FlawError(f"{what} must have {', '.join(keys)}; it has {', '.join(sorted(value)) or 'nothing'}")


def _check_kind(what: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _FlawError(f"{what}: {type(value).__name__} in place of {kind.__name__}")
    return value


def _check_count(what: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise _FlawError(f"{what}: {value!r} is not a count")


def _check_digest(what: str, value: Any) -> None:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise _FlawError(f"{what}: {value!r} is not a digest")


def _check_file_name(what: str, value: Any) -> None:
    # verify opens the files that a manifest names: no name may lead outside the folder.
    escapes = not isinstance(value, str) or "\0" in value or "\\" in value
    if escapes or any(piece in {"", ".", ".."} for piece in value.split("/")):
        raise _FlawError(f"{what}: {value!r} is not the name of a file inside the folder")
