"""Reads a Hugging Face folder: whole tensors in safetensors files, with or without an index.

The format: https://huggingface.co/docs/safetensors (metadata parsing).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from xrank.formats.safetensors_header import HeaderTensor, SafetensorsHeader, read_header
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest
from xrank.plan.output import OutputFile, OutputTensor
from xrank.plan.source import NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.readers.base import Hints
from xrank.readers.shard_grid import is_shard_name
from xrank.readers.weight_files import check_index, check_placeholders, is_one_of_several, list_files, read_index

__all__ = ["HfFolderReader", "describe_files", "output_file_of", "read_headers"]

_INDEX_NAME = "model.safetensors.index.json"


class HfFolderReader:
    """The reader of safetensors folders and files (`xrank.readers.base.Reader`)."""

    name = "safetensors"

    def recognise(self, path: str) -> str | None:
        """Return None if it is a safetensors file, or a folder with one."""
        if path.endswith(".safetensors") and os.path.isfile(path):
            name = os.path.basename(path)
            if is_shard_name(name):
                return "one rank's pieces of tensors"
            return "one of several files; its folder is the model" if is_one_of_several(name) else None
        if os.path.isdir(path) and any(map(_is_model_file, os.listdir(path))):
            return None
        return "no *.safetensors of whole tensors in it"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as `Reader.read` lists them."""
        headers = read_headers(path)
        model = describe_files(path, headers)
        files = {tensor.name: header.path for header in headers for tensor in header.tensors}
        check_placeholders({shard.name: shard.shape for shard in model.shards}, files, hints.shapes)
        index = read_index(path, _INDEX_NAME) if os.path.isdir(path) else None
        return replace(model, notes=(*model.notes, *(() if index is None else index.notes(model.nbytes))))


def _is_model_file(name: str) -> bool:
    return name.endswith(".safetensors") and not is_shard_name(name)


def read_headers(path: str) -> tuple[SafetensorsHeader, ...]:
    """Return the headers of a model's files, by name, checked against its index.

    Raises:
        IncompleteError: the index names a file or tensor that is not there.
        ContradictionError: two files hold one tensor, or the index sends a tensor elsewhere.
        CorruptError, UnsafeError: the index is malformed, or names a path outside the folder.
    """
    if not os.path.isdir(path):
        return (read_header(path),)
    index = read_index(path, _INDEX_NAME)
    headers = tuple(read_header(os.path.join(path, name)) for name in list_files(path, _is_model_file, index))
    check_index(path, ((tensor.name, os.path.basename(h.path)) for h in headers for tensor in h.tensors), index)
    return headers


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
