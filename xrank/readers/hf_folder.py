"""Reads a Hugging Face folder: whole tensors in safetensors files, with or without an index.

The format: https://huggingface.co/docs/safetensors (metadata parsing); the index ``model.safetensors.index.json`` as
``huggingface_hub/serialization/_base.py: StateDictSplit`` describes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from xrank.errors import ContradictionError, CorruptError, IncompleteError, UnsafeError
from xrank.formats.safetensors_header import HeaderTensor, SafetensorsHeader, read_header
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest
from xrank.plan.output import OutputFile, OutputTensor
from xrank.plan.source import NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.readers.base import Hints
from xrank.readers.shard_grid import is_shard_name

__all__ = ["HfFolderReader", "check_placeholders", "describe_files", "output_file_of", "read_headers"]

_INDEX_NAME = "model.safetensors.index.json"


class HfFolderReader:
    """The reader of safetensors folders and files (`xrank.readers.base.Reader`)."""

    name = "safetensors"

    def recognise(self, path: str) -> str | None:
        """Return None if it is a safetensors file, or a folder with one."""
        if path.endswith(".safetensors") and os.path.isfile(path):
            return "one rank's pieces of tensors" if is_shard_name(os.path.basename(path)) else None
        if os.path.isdir(path) and any(map(_is_model_file, os.listdir(path))):
            return None
        return "no *.safetensors of whole tensors in it"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as `Reader.read` lists them."""
        headers = read_headers(path)
        model = describe_files(path, headers)
        files = {tensor.name: header.path for header in headers for tensor in header.tensors}
        check_placeholders({shard.name: shard.shape for shard in model.shards}, files, hints.shapes)
        return replace(model, notes=(*model.notes, *_size_notes(path, model.nbytes)))


def _is_model_file(name: str) -> bool:
    return name.endswith(".safetensors") and not is_shard_name(name)


def _size_notes(path: str, nbytes: int) -> tuple[tuple[str, str], ...]:
    """Return what is to be said of an index whose total is not that of the tensors."""
    index = _read_index(path) if os.path.isdir(path) else None
    if index is None or index[1] in (None, nbytes):
        return ()
    return (("wrong-total-size", f"{_INDEX_NAME} says total_size {index[1]:,}, and the tensors have {nbytes:,} bytes"),)


def check_placeholders(
    shapes: Mapping[str, tuple[int, ...]], files: Mapping[str, str], known: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse tensors of shape [0], which ZeRO-3 leaves where a rank saves a model that it does not hold.

    Args:
        shapes: of the tensors, by name.
        files: the file of each, by name.
        known: shapes of the base model, which may have such a tensor.

    Raises:
        IncompleteError: there are such tensors.
    """
    empty = [name for name, shape in shapes.items() if shape == (0,) and known.get(name) != (0,)]
    if empty:
        more = f"; likewise {', '.join(empty[1:6])}" + (f" and {len(empty) - 6} more" if len(empty) > 6 else "")
        raise IncompleteError(
            f"{empty[0]}: a placeholder of shape [0], as DeepSpeed leaves them (ZeRO-3){more if empty[1:] else ''}",
            tensor=empty[0],
            file=files[empty[0]],
            got=f"{len(empty)} of {len(shapes)} tensors without an element",
            want="the weights, which are in the ZeRO checkpoint",
            next_step="gather the ZeRO checkpoint itself (the folder with latest and zero_pp_rank_* files)",
        )


def read_headers(path: str) -> tuple[SafetensorsHeader, ...]:
    """Return the headers of a model's files, by name, checked against its index.

    Raises:
        IncompleteError: the index names a file or tensor that is not there.
        ContradictionError: two files hold one tensor, or the index sends a tensor elsewhere.
        CorruptError, UnsafeError: the index is malformed, or names a path outside the folder.
    """
    if not os.path.isdir(path):
        return (read_header(path),)
    names = sorted(filter(_is_model_file, os.listdir(path)))
    index = _read_index(path)
    weight_map = None if index is None else index[0]
    if weight_map is not None:
        absent = sorted(set(weight_map.values()) - set(names))
        if absent:
            raise IncompleteError(
                f"{_INDEX_NAME} names {absent[0]}, which is not in {path}",
                file=os.path.join(path, absent[0]),
                got=f"{len(names)} files",
                want=f"{len(set(weight_map.values()))} files",
                next_step="copy the missing file into the folder",
            )
        names = sorted(set(weight_map.values()))
    headers = tuple(read_header(os.path.join(path, name)) for name in names)
    _check_names(path, headers, weight_map)
    return headers


def _read_index(path: str) -> tuple[dict[str, str], int | None] | None:
    """Return where the index sends each tensor, and how many bytes it says that all have."""
    file = os.path.join(path, _INDEX_NAME)
    if not os.path.isfile(file):
        return None
    try:
        with open(file, encoding="utf-8") as stream:
            index: Any = json.load(stream)
        weight_map = index["weight_map"]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in weight_map.items()):
            raise TypeError("weight_map is no map of names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(
            f"{file} is not an index", file=file, got=str(error)[:200], next_step="copy the file again"
        ) from None
    for name in weight_map.values():
        if os.path.basename(name) != name or "\0" in name or name in (".", ".."):
            raise UnsafeError(
                f"{file} names a file outside its folder",
                file=file,
                got=repr(name),
                want="plain file names",
                next_step="do not use this folder: its index was tampered with",
            )
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return dict(weight_map), int(total) if isinstance(total, (int, float)) and total == total // 1 else None


def _check_names(path: str, headers: Sequence[SafetensorsHeader], weight_map: dict[str, str] | None) -> None:
    seen: dict[str, str] = {}
    for header in headers:
        file = os.path.basename(header.path)
        for tensor in header.tensors:
            if tensor.name in seen:
                raise ContradictionError(
                    f"{tensor.name} lies in two files of {path}",
                    tensor=tensor.name,
                    file=header.path,
                    got=f"{seen[tensor.name]} and {file}",
                    want="each tensor once",
                    next_step="remove the file that does not belong to this model",
                )
            seen[tensor.name] = file
    if weight_map is None or seen == weight_map:
        return
    name = sorted(set(seen.items()) ^ set(weight_map.items()))[0][0]
    kind = IncompleteError if name not in seen else ContradictionError
    raise kind(
        f"{name}: the index and the files of {path} disagree",
        tensor=name,
        file=os.path.join(path, _INDEX_NAME),
        got=f"the tensor in {seen.get(name, 'no file')}",
        want=f"in {weight_map.get(name, 'no file')}, as the index says",
        next_step="copy the folder again from where it was made",
    )


def describe_files(path: str, headers: Sequence[SafetensorsHeader], *, as_bytes: bool = False) -> StoredModel:
    """Return the stored model of these files: every tensor one record without checksum.

    Args:
        path: the model's folder or file.
        headers: of its files.
        as_bytes: describe each tensor as a row of bytes, whatever its element type.
    """
    rows: list[tuple[int, int, int, int]] = []
    shards = []
    for index, header in enumerate(headers):
        for tensor in header.tensors:
            dtype, shape = _kind(tensor, as_bytes)
            count = prod(shape)
            nests = [Nest(0, 0, ((count, 1, 1),) if count > 1 else ())] if count else []
            record = int_array([len(rows)] * len(nests))
            zeros = int_array([0] * len(nests))
            rows.append((index, header.data_start + tensor.start, tensor.end - tensor.start, NO_CHECKSUM))
            shards.append(StoredShard(tensor.name, dtype, shape, zeros, record, NestTable.of(nests)))
    return StoredModel(
        format="safetensors",
        path=path,
        files=tuple(SourceFile.of(header.path, header.status) for header in headers),
        records=RecordTable(*(int_array(row[i] for row in rows) for i in range(4))),
        shards=tuple(shards),
        nbytes=sum(row[2] for row in rows),
        notes=(("no-checksums", "safetensors files hold no checksums; damage inside a tensor can't be seen"),),
    )


def _kind(tensor: HeaderTensor, as_bytes: bool) -> tuple[str, tuple[int, ...]]:
    return ("U8", (tensor.end - tensor.start,)) if as_bytes else (tensor.dtype, tensor.shape)


def output_file_of(header: SafetensorsHeader) -> OutputFile:
    """Return an existing file as if it were still to be written, its tensors as rows of bytes: for reading it back.

    As bytes, because another writer's tensors need not start at a multiple of their element's width.
    """
    with open(header.path, "rb") as stream:
        start = stream.read(header.data_start)
    tensors = sorted(header.tensors, key=lambda tensor: (tensor.start, tensor.end))
    return OutputFile(
        os.path.basename(header.path),
        start,
        tuple(OutputTensor(t.name, *_kind(t, as_bytes=True), header.data_start + t.start) for t in tensors),
        header.status.st_size,
    )
