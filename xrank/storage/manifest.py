"""``xrank_manifest.json``: the contents of an output, the source of each byte, and digests to verify it.

It contains no time, host or absolute path, so the same input gives the same bytes.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert

from xrank.errors import CorruptError, IncompleteError, either, option
from xrank.storage import places
from xrank.storage.disk import explain_errors
from xrank.storage.output_place import MANIFEST_NAME

__all__ = ["MANIFEST_NAME"]

COPY_AGAIN = "gather the model again, or copy the file again from a good copy"
DIGEST_ALGORITHM = (
    "xxh3: XXH3-128 of the XXH3-128 digests of a tensor's 64 KiB blocks, and for a file of its header and its tensors' "
    "digests; xxh128: XXH3-128 of a file's bytes"
)

_MAX_NBYTES = 2 * 2**30
_BLOCK_NBYTES = 1 << 20


_Count = Annotated[int, Meta(ge=0)]
_Digest = Annotated[str, Meta(pattern=r"\A([a-z0-9_]+:)?[0-9a-f]{8,128}\Z")]
_ElementType = Annotated[str, Meta(pattern=r"\A(?a:BOOL|BF16|C64|F4|F8_E\dM\d\w*|F(?:16|32|64)|[IU](?:8|16|32|64))\Z")]
"""Names of element types, as safetensors writes them."""


@lru_cache(maxsize=1024)  # each of a tensor's parts names its file
def _check_file_name(name: str) -> None:
    # verify opens the files that a manifest names: no name may lead outside the folder.
    if "\0" in name or "\\" in name or any(piece in {"", ".", ".."} for piece in name.split("/")):
        raise ValueError(f"{name!r} is not the name of a file inside the folder")


class ManifestSource(Struct, frozen=True, forbid_unknown_fields=True):
    """The source of a gather."""

    format: str
    world_size: _Count | None
    run_id: str | None
    step: _Count | None


class ManifestFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the output."""

    name: str
    nbytes: _Count
    digest: _Digest

    def __post_init__(self) -> None:
        _check_file_name(self.name)


class TensorSource(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a source file that a tensor was made of."""

    file: str
    """Path relative to the source folder."""
    rank: _Count | None
    offset: _Count
    """First byte in the file."""
    nbytes: _Count

    def __post_init__(self) -> None:
        _check_file_name(self.file)


class ManifestTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the output."""

    dtype: _ElementType
    """Safetensors name of the element type."""
    shape: tuple[_Count, ...]
    """Global shape."""
    file: str
    digest: _Digest
    sources: tuple[TensorSource, ...]
    replicas: _Count
    """Number of copies that were compared with the written one."""


class ManifestQuantization(Struct, frozen=True, forbid_unknown_fields=True):
    """The options by which a model's matrices were quantized."""

    scheme: str
    dialect: str | None
    ignore: tuple[str, ...]
    """Modules of ``--quantize-ignore``, besides those that are always ignored."""
    dtype: str
    """The cast before it."""


class ManifestVersion(Struct, frozen=True, forbid_unknown_fields=True):
    """The version of a trainer's weights that an output has; see `xrank.formats.deltas`."""

    number: _Count
    state: str | None = None
    """Digest of all tensors, as the version's index records it."""
    lineage: str | None = None
    """Digest of the version's index and checksums."""


class _Manifest(Struct, forbid_unknown_fields=True):
    schema: Literal[1]
    digest: str
    source: ManifestSource
    files: list[ManifestFile]
    companions: list[ManifestFile]
    tensors: dict[str, Any]
    """Their values are `ManifestTensor`."""
    tied: dict[str, str]
    excluded: list[str]
    cast: dict[str, Any]
    padding_dropped: dict[str, Any]
    notes: list[Any]
    merged: dict[str, str] = {}
    transformed: dict[str, str] = {}
    quantized: ManifestQuantization | None = None
    filled: list[str] = []
    version: ManifestVersion | None = None
    plan: str = ""


def tensor_line(tensor: ManifestTensor, sources: Iterable[tuple[str, int, int, int]]) -> str:
    """Return a tensor's value in a manifest, with the sources (file, rank, offset, bytes) in the place of its own."""
    # By `_line`, each of a million sources would take ten times as long.
    parts = [
        f'{{"file": {_quote(name)}, "nbytes": {nbytes}, "offset": {offset}, "rank": {rank}}}'
        for name, rank, offset, nbytes in sources
    ]
    return f"{_line(tensor).removesuffix(']}')}{', '.join(parts)}]}}"  # its last key is "sources"


def manifest_blocks(
    source: ManifestSource,
    files: Iterable[ManifestFile],
    tensors: Iterable[tuple[str, str]],
    *,
    companions: Iterable[ManifestFile] = (),
    tied: Mapping[str, str] | None = None,
    excluded: Iterable[str] = (),
    cast: Mapping[str, Any] | None = None,
    merged: Mapping[str, str] | None = None,
    transformed: Mapping[str, str] | None = None,
    quantized: ManifestQuantization | None = None,
    padding_dropped: Mapping[str, Any] | None = None,
    filled: Sequence[str] = (),
    notes: Iterable[Any] = (),
    version: ManifestVersion | None = None,
    plan: str | None = None,
) -> Iterator[bytes]:
    """Yield the manifest in blocks, with one line for each file and tensor, sorted by name.

    `files` are those of weights, and the index. `tensors` has name and `tensor_line` of each, by rising name; they may
    be made as they are written, as a large model has a million sources. `tied` has the name that was not written ->
    that of the tensor with the same values; `cast` name -> earlier element type; `merged` name -> the adapter's tensors
    that were added to it; `transformed` name -> tensor that it was made of, by the caller's function or as `quantized`
    says; `filled` are names of the base model's own tensors; `padding_dropped` name -> number of padding rows that were
    removed. `version` is that of a trainer's weights which the output has. `plan` is a digest that the same command
    gives again.
    """
    sections: dict[str, Iterable[str]] = {
        "schema": ["1"],
        "digest": [_line(DIGEST_ALGORITHM)],
        "source": [_line(source)],
        "files": _rows(_line(file) for file in sorted(files, key=lambda f: f.name)),
        "companions": _rows(_line(file) for file in sorted(companions, key=lambda f: f.name)),
        "tensors": _rows((f"{_line(name)}: {line}" for name, line in tensors), "{}"),
        "tied": _table(tied or {}),
        "excluded": _rows(_line(name) for name in sorted(excluded)),
        "cast": _table(cast or {}),
        **({"merged": _table(merged)} if merged else {}),
        **({"transformed": _table(transformed)} if transformed else {}),
        **({"quantized": [_line(quantized)]} if quantized is not None else {}),
        "padding_dropped": _table(padding_dropped or {}),
        "notes": _rows(_line(note) for note in notes),
        **({"filled": _rows(_line(name) for name in sorted(filled))} if filled else {}),
        **({"version": [_line(version)]} if version is not None else {}),
        **({"plan": [_line(plan)]} if plan is not None else {}),
    }
    block, nbytes, before = list[bytes](), 0, "{\n"
    for key, pieces in sections.items():
        block.append(f'{before}"{key}": '.encode())
        before = ",\n"
        for piece in pieces:
            block.append(piece.encode())
            nbytes += len(piece)
            if nbytes > _BLOCK_NBYTES:
                yield b"".join(block)
                block, nbytes = [], 0
    yield b"".join([*block, b"\n}\n"])


def make_damage_error(path: str, file: str, tensor: str | None, got: str, want: str) -> CorruptError:
    """Return the error for a file of a model, or a tensor in it, whose digest is not the manifest's."""
    what = f"{tensor or file}: its bytes differ from those that were gathered" + (f" ({file})" if tensor else "")
    step = f"{COPY_AGAIN}; if another program was to change the weights, delete {MANIFEST_NAME}"
    return CorruptError(what, tensor=tensor, file=os.path.join(path, file), got=got, want=want, next_step=step)


def read_manifest(path: str) -> dict[str, Any]:
    """Read a manifest and check every part of it.

    IncompleteError if there is none; CorruptError if it is damaged, contradicts itself, or another version wrote it.
    """
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
            what = f"{path} is not a valid xrank manifest: not a regular file, or too large"
            raise CorruptError(what, file=path, next_step=next_step)
        return parse_manifest(file.read(), path)


def parse_manifest(content: bytes, path: str) -> dict[str, Any]:
    """Return the content of a manifest, of which every part is checked; errors, as of `read_manifest`, name `path`."""
    try:
        # By itself, json accepts NaN and keeps the last of repeated keys.
        manifest = json.loads(content, object_pairs_hook=_build_unique, parse_constant=_refuse_constant)
        if not isinstance(manifest, dict) or manifest.get("schema") != 1:
            raise ValueError("its schema must be 1")
        _check_manifest(convert(manifest, _Manifest))
    except (ValueError, RecursionError) as error:
        next_step = "gather the model again; its manifest cannot be trusted"
        what = f"{path} is not a valid xrank manifest: {error}"
        raise CorruptError(what, file=path, got=str(error), next_step=next_step) from error
    result: dict[str, Any] = manifest
    return result


def _fields(record: Struct) -> dict[str, Any]:
    """Return the fields by name, as they are; `structs.asdict` copies each value deeply."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


_line = json.JSONEncoder(sort_keys=True, default=_fields).encode
_quote = lru_cache(maxsize=1024)(_line)  # for names of files and types, which come again and again


def _rows(lines: Iterable[str], brackets: str = "[]") -> Iterator[str]:
    """Yield the text of a list, or with other brackets a table, a line for each of its lines."""
    before = brackets[0]
    for line in lines:
        yield f"{before}\n  {line}"
        before = ","
    yield brackets if before != "," else f"\n {brackets[1]}"


def _table(values: Mapping[str, Any]) -> Iterator[str]:
    return _rows((f"{_line(name)}: {_line(values[name])}" for name in sorted(values)), "{}")


def _build_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a valid value")


def _check_manifest(manifest: _Manifest) -> None:
    if manifest.digest != DIGEST_ALGORITHM:
        raise ValueError(f"its digests are {manifest.digest!r}, not {DIGEST_ALGORITHM}")
    files = {file.name for file in manifest.files}
    for name, count in Counter(file.name for file in (*manifest.files, *manifest.companions)).items():
        if count > 1:
            raise ValueError(f"{name!r} occurs twice among the files and companions")
    for name, value in manifest.tensors.items():
        try:
            tensor = convert(value, ManifestTensor)
        except ValidationError as error:
            raise ValueError(f"tensor {name!r}: {error}") from None
        if tensor.file not in files:
            raise ValueError(f"tensor {name!r} is in {tensor.file!r}, which is not among the files")
    for key, names in (("merged", manifest.merged), ("transformed", manifest.transformed)):
        if unknown := names.keys() - manifest.tensors.keys():
            raise ValueError(f"{min(unknown)!r} was {key}, and is not a tensor")
    for name, target in manifest.tied.items():
        if target not in manifest.tensors:
            raise ValueError(f"{name!r} is tied to {target!r}, which is not a tensor")
