"""``xrank_manifest.json``: what an output holds, where each byte came from, and the digests to prove it again.

No time, host or absolute path stands in it: the same input gives the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xrank import dtypes
from xrank.errors import CorruptError, IncompleteError
from xrank.faces import either, option
from xrank.writers.disk import explaining
from xrank.writers.output_place import MANIFEST_NAME

__all__ = [
    "DIGEST_ALGORITHM",
    "MANIFEST_NAME",
    "ManifestFile",
    "ManifestSource",
    "ManifestTensor",
    "TensorSource",
    "manifest_text",
    "read_manifest",
]

DIGEST_ALGORITHM = (
    "xxh3: XXH3-128 of the XXH3-128 digests of a tensor's 64 KiB blocks, and for a file of its header and its tensors' "
    "digests; xxh128: XXH3-128 of a file's bytes"
)

_SCHEMA = 1
_MAX_NBYTES = 2 * 2**30
_DIGEST = re.compile(r"([a-z0-9_]+:)?[0-9a-f]{8,128}")


@dataclass(frozen=True, slots=True)
class ManifestSource:
    """What was gathered."""

    format: str
    world_size: int | None = None
    run_id: str | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file of the output."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A part of a source file that went into a tensor."""

    file: str
    """Relative to the source folder."""
    rank: int | None
    offset: int
    """In bytes from the file's first."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """A tensor of the output."""

    dtype: str
    """Safetensors name."""
    shape: tuple[int, ...]
    """Global shape."""
    file: str
    digest: str
    sources: tuple[TensorSource, ...] = ()
    replicas: int = 0
    """Copies that were compared with the one written."""


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
) -> str:
    """Return the manifest, one line for each file and tensor, sorted by name.

    Args:
        source: what was gathered.
        files: the files of weights, and the index.
        tensors: by name.
        companions: files copied beside them.
        tied: names that were not written, and the tensor each is the same as.
        excluded: names left out as asked.
        cast: names of which the element type changed, and what it was.
        merged: names to which an adapter's tensors were added, and which; without any, the manifest says nothing of it.
        transformed: names of tensors that a caller's function made, and of which tensor; said as `merged` is.
        padding_dropped: names that lost padding rows, and how many.
        notes: what the report said besides.
    """
    sections = {
        "schema": str(_SCHEMA),
        "digest": _line(DIGEST_ALGORITHM),
        "source": _line(asdict(source)),
        "files": _rows(_line(asdict(file)) for file in sorted(files, key=lambda f: f.name)),
        "companions": _rows(_line(asdict(file)) for file in sorted(companions, key=lambda f: f.name)),
        "tensors": _named({name: asdict(tensor) for name, tensor in tensors.items()}),
        "tied": _named(tied or {}),
        "excluded": _rows(_line(name) for name in sorted(excluded)),
        "cast": _named(cast or {}),
        **({"merged": _named(merged)} if merged else {}),
        **({"transformed": _named(transformed)} if transformed else {}),
        "padding_dropped": _named(padding_dropped or {}),
        "notes": _rows(_line(note) for note in notes),
    }
    return "{\n" + ",\n".join(f'"{key}": {text}' for key, text in sections.items()) + "\n}\n"


def read_manifest(path: str) -> dict[str, Any]:
    """Read a manifest and check that every part is what it should be.

    Raises:
        IncompleteError: there is none.
        CorruptError: it is damaged, contradicts itself or was written by another version.
    """
    content = _read(path)
    try:
        manifest = json.loads(content, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        _check(manifest)
    except (ValueError, RecursionError, _FlawError) as error:
        raise CorruptError(
            f"{path}: is no manifest of xrank: {error}",
            file=path,
            got=str(error),
            next_step="gather the model again; its manifest cannot be trusted",
        ) from error
    result: dict[str, Any] = manifest
    return result


class _FlawError(Exception):
    """Says what is wrong in a manifest."""


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _rows(lines: Iterable[str]) -> str:
    text = ",\n  ".join(lines)
    return f"[\n  {text}\n ]" if text else "[]"


def _named(values: Mapping[str, Any]) -> str:
    text = ",\n  ".join(f"{_line(name)}: {_line(values[name])}" for name in sorted(values))
    return f"{{\n  {text}\n }}" if text else "{}"


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise IncompleteError(
            f"{path}: there is no manifest",
            file=path,
            next_step=either(
                "gather the model again: only what xrank wrote has a manifest",
                f"give {option('against')} another copy to compare with",
            ),
        ) from None
    except OSError as error:
        with explaining(path):
            raise error
    with explaining(path), open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_NBYTES:
            raise CorruptError(f"{path}: is no manifest of xrank: no regular file, or too large", file=path)
        return file.read()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise _FlawError("a key stands twice")
    return result


def _refuse_constant(text: str) -> None:
    raise _FlawError(f"{text} is no value of it")


def _check(manifest: Any) -> None:
    if not isinstance(manifest, dict) or manifest.get("schema") is not _SCHEMA:
        raise _FlawError(f"schema {_SCHEMA} was wanted")
    _keys("the manifest", {key: value for key, value in manifest.items() if key not in _FURTHER_KEYS}, _KEYS)
    if manifest["digest"] != DIGEST_ALGORITHM:
        raise _FlawError(f"its digests are {manifest['digest']!r}, not {DIGEST_ALGORITHM}")
    source = manifest["source"]
    _keys("source", source, ("format", "world_size", "run_id", "step"))
    _is("source.format", source["format"], str)
    if source["run_id"] is not None:
        _is("source.run_id", source["run_id"], str)
    for key in ("world_size", "step"):
        if source[key] is not None:
            _count(f"source.{key}", source[key])
    files = {*_check_files("files", manifest["files"])}
    companions = {*_check_files("companions", manifest["companions"])}
    if files & companions:
        raise _FlawError(f"{min(files & companions)!r} is a file and a companion")
    _is("tensors", manifest["tensors"], dict)
    for name, tensor in manifest["tensors"].items():
        _check_tensor(f"tensor {name!r}", tensor, files)
    for key in ("tied", "cast", "padding_dropped"):
        _is(key, manifest[key], dict)
    for key in _FURTHER_KEYS:
        for name, text in _is(key, manifest.get(key, {}), dict).items():
            _is(key, text, str)
            if name not in manifest["tensors"]:
                raise _FlawError(f"{name!r} was {key}, and is no tensor")
    for name, target in manifest["tied"].items():
        if not isinstance(target, str) or target not in manifest["tensors"]:
            raise _FlawError(f"{name!r} is tied to {target!r}, which is no tensor")
    _is("notes", manifest["notes"], list)
    _is("excluded", manifest["excluded"], list)
    for name in manifest["excluded"]:
        _is("excluded", name, str)


_KEYS = (
    *("schema", "digest", "source", "files", "companions", "tensors"),
    *("tied", "excluded", "cast", "padding_dropped", "notes"),
)
_FURTHER_KEYS = ("merged", "transformed")


def _check_files(what: str, entries: Any) -> list[str]:
    _is(what, entries, list)
    names = []
    for entry in entries:
        _keys(what, entry, ("name", "nbytes", "digest"))
        _file_name(f"{what}.name", entry["name"])
        _count(f"{what}.nbytes", entry["nbytes"])
        _digest(f"{what}.digest", entry["digest"])
        names.append(entry["name"])
    if len(set(names)) != len(names):
        raise _FlawError(f"{what}: a name stands twice")
    return names


def _check_tensor(what: str, tensor: Any, files: set[str]) -> None:
    _keys(what, tensor, ("dtype", "shape", "file", "digest", "sources", "replicas"))
    _is(f"{what}.dtype", tensor["dtype"], str)
    if tensor["dtype"] not in dtypes.DTYPES:
        raise _FlawError(f"{what}: no element type {tensor['dtype']!r}")
    _is(f"{what}.shape", tensor["shape"], list)
    for size in tensor["shape"]:
        _count(f"{what}.shape", size)
    _is(f"{what}.file", tensor["file"], str)
    if tensor["file"] not in files:
        raise _FlawError(f"{what} lies in {tensor['file']!r}, which is not among the files")
    _digest(f"{what}.digest", tensor["digest"])
    _count(f"{what}.replicas", tensor["replicas"])
    _is(f"{what}.sources", tensor["sources"], list)
    for source in tensor["sources"]:
        _keys(f"{what}.sources", source, ("file", "rank", "offset", "nbytes"))
        _file_name(f"{what}.sources.file", source["file"])
        if source["rank"] is not None:
            _count(f"{what}.sources.rank", source["rank"])
        _count(f"{what}.sources.offset", source["offset"])
        _count(f"{what}.sources.nbytes", source["nbytes"])


def _keys(what: str, value: Any, keys: Sequence[str]) -> None:
    _is(what, value, dict)
    if set(value) != set(keys):
        raise _FlawError(f"{what} must have {', '.join(keys)}; it has {', '.join(sorted(value)) or 'nothing'}")


def _is(what: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _FlawError(f"{what}: {type(value).__name__} in place of {kind.__name__}")
    return value


def _count(what: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        raise _FlawError(f"{what}: {value!r} is no count")


def _digest(what: str, value: Any) -> None:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise _FlawError(f"{what}: {value!r} is no digest")


def _file_name(what: str, value: Any) -> None:
    # A manifest is read by verify, which opens what it names: nothing outside the folder.
    escapes = not isinstance(value, str) or "\0" in value or "\\" in value
    if escapes or any(piece in {"", ".", ".."} for piece in value.split("/")):
        raise _FlawError(f"{what}: {value!r} names no file inside the folder")
