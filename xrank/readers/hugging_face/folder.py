"""Reads a Hugging Face folder: whole tensors in safetensors files, with or without an index.

The format: https://huggingface.co/docs/safetensors (metadata parsing).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from xrank.formats.regular_file import open_regular
from xrank.formats.safetensors_header import HeaderTensor, SafetensorsHeader, read_header
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest
from xrank.plan.output import OutputFile, OutputTensor
from xrank.plan.source import StoredModel, StoredShard
from xrank.readers.base import Hints
from xrank.readers.hugging_face.rank_parts import is_rank_part
from xrank.readers.hugging_face.shard_grid import is_shard_name
from xrank.readers.hugging_face.weight_files import (
    check_placeholders,
    choose_tensors,
    delta_error,
    is_one_of_several,
    list_files,
    read_index,
    stale_index_notes,
)
from xrank.readers.records import Records
from xrank.stores import places
from xrank.words import plural

_STEMS = ("model", "diffusion_pytorch_model")  # of transformers and diffusers
_ADAPTER = "adapter_model.safetensors"


class HfFolderReader:
    """The reader of safetensors folders and files (`xrank.readers.base.Reader`)."""

    name = "safetensors"

    def recognise(self, path: str) -> str | None:
        """Return None for a safetensors file, or a folder with one."""
        if path.endswith(".safetensors") and places.is_file(path):
            name = os.path.basename(path)
            if is_shard_name(name) or is_rank_part(name, places.list_names(os.path.dirname(path) or os.curdir)):
                return "one rank's pieces of tensors"
            return "one of several files; its folder is the model" if is_one_of_several(name) else None
        if places.is_folder(path) and _list_model_files(path):
            return None
        return "no *.safetensors of whole tensors in it"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        headers, passed = _read_folder(path) if places.is_folder(path) else (read_headers(path), [])
        model = describe_files(path, headers)
        files = {tensor.name: header.path for header in headers for tensor in header.tensors}
        kinds = {shard.name: (shard.dtype, shard.shape) for shard in model.shards}
        notes = [*model.notes, *passed, *check_placeholders(kinds, files, hints)]
        if not places.is_folder(path):
            return replace(model, notes=tuple(notes))
        whole, index_name = _name_files(path)
        index = read_index(path, index_name, whole)
        notes += stale_index_notes(path, index_name, index)
        if index is not None:
            notes += index.notes(model.nbytes - _nbytes_of_adapter(headers))
        left = sorted(
            filter(_is_weight_file, set(places.list_names(path)) - {os.path.basename(h.path) for h in headers})
        )
        if left:
            notes.append(
                ("left-out", f"{plural(len(left), 'file')} beside the model's own left out, such as {left[0]}")
            )
        return replace(model, notes=tuple(notes))


def _is_weight_file(name: str) -> bool:
    # Desktops and editors leave hidden files, such as macOS' ._model.safetensors.
    return name.endswith(".safetensors") and not is_shard_name(name) and not name.startswith(".")


def _list_model_files(folder: str) -> list[str]:
    """Return the files of whole tensors in a folder."""
    names = places.list_names(folder)
    return [name for name in names if _is_weight_file(name) and not is_rank_part(name, names)]


def _name_files(folder: str) -> tuple[str, str]:
    """Return the names that a whole model's file and an index have in a folder."""
    names = places.list_names(folder)
    pairs = [(f"{stem}.safetensors", f"{stem}.safetensors.index.json") for stem in _STEMS]
    return next((pair for pair in pairs if not set(pair).isdisjoint(names)), pairs[0])


def _choose_filter(names: Sequence[str], whole: str) -> Callable[[str], bool]:
    """Return a function that recognises the model's files in a folder without an index.

    A file with the name of a whole model is the model, as for transformers. Other formats' files may lie beside it,
    such as ``consolidated.safetensors`` or optimizers. Only numbered files contradict it; an adapter belongs to it.

    Args:
        names: the files of whole tensors.
        whole: the name of a whole model's file.
    """
    if whole not in names:
        return lambda name: name in names
    return lambda name: name in (whole, _ADAPTER) or (name in names and is_one_of_several(name))


def read_headers(path: str) -> tuple[SafetensorsHeader, ...]:
    """Return the headers of a model's files, by name, with the tensors that its index gives to each file.

    Raises:
        IncompleteError: a file or tensor that the index names is missing.
        ContradictionError: a tensor is not in the file that the index names, or in two files of one model.
        CorruptError, UnsafeError: the index is malformed, or names a path outside the folder.
        UsageError: a whole model lies beside the files of the index, two other files contain one tensor, or the files
            hold what changed in a step.
    """
    if places.is_folder(path):
        return _read_folder(path)[0]
    header = read_header(path)
    _check_whole(path, [header])
    return (header,)


def _read_folder(path: str) -> tuple[tuple[SafetensorsHeader, ...], list[tuple[str, str]]]:
    """Return the headers of the files in a folder, and notes; errors as in `read_headers`."""
    whole, index_name = _name_files(path)
    index = read_index(path, index_name, whole)
    is_own = _is_weight_file if index is not None else _choose_filter(_list_model_files(path), whole)
    first = sorted(name for name in places.list_names(path) if "-00000-of-" in name and is_own(name))[:1]
    _check_whole(path, [read_header(os.path.join(path, name)) for name in first])
    names = list_files(path, is_own, index)
    headers = [read_header(os.path.join(path, name)) for name in names]
    _check_whole(path, headers)
    held = ((tensor.name, name) for header, name in zip(headers, names, strict=True) for tensor in header.tensors)
    place_of, notes = choose_tensors(path, held, index)
    if notes:
        headers = [
            replace(header, tensors=tuple(tensor for tensor in header.tensors if place_of.get(tensor.name) == name))
            for header, name in zip(headers, names, strict=True)
        ]
    if index is not None and _ADAPTER not in index.weight_map.values() and _ADAPTER in places.list_names(path):
        headers.append(read_header(os.path.join(path, _ADAPTER)))  # never in an index, and never silently left out
    return tuple(headers), notes


def _check_whole(path: str, headers: Sequence[SafetensorsHeader]) -> None:
    """Refuse the files of a delta that lie there without their index: each tensor is a row of compressed bytes.

    slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py: the metadata of a file has a checksum
    for each of its tensors, under the tensor's name.
    """
    tensors = [tensor for header in headers for tensor in header.tensors]
    names = {name for header in headers for name in header.metadata}
    if tensors and all(t.name in names and t.dtype == "U8" and len(t.shape) == 1 for t in tensors):
        raise delta_error(path, headers[0].path, "a delta of one version of weights on another", "rows of bytes")


def _nbytes_of_adapter(headers: Sequence[SafetensorsHeader]) -> int:
    own = (header for header in headers if os.path.basename(header.path) == _ADAPTER)
    return sum(tensor.end - tensor.start for header in own for tensor in header.tensors)


def describe_files(path: str, headers: Sequence[SafetensorsHeader], *, as_bytes: bool = False) -> StoredModel:
    """Return the stored model of these files; every tensor is one record without checksum.

    Args:
        path: the model's folder or file.
        headers: the headers of its files.
        as_bytes: describe each tensor as a row of bytes, whatever its element type.
    """
    records = Records()
    shards = []
    for header in headers:
        record_of = records.add_safetensors(header)
        for tensor in header.tensors:
            dtype, shape = _kind(tensor, as_bytes)
            count = prod(shape)
            nests = [Nest(0, 0, ((count, 1, 1),) if count > 1 else ())] if count else []
            record = int_array([record_of(tensor)] * len(nests))
            zeros = int_array([0] * len(nests))
            shards.append(StoredShard(tensor.name, dtype, shape, zeros, record, NestTable.from_nests(nests)))
    return StoredModel(
        format="safetensors",
        path=path,
        files=tuple(records.files),
        records=records.table(),
        shards=tuple(shards),
        nbytes=records.nbytes,
        notes=(("no-checksums", "safetensors files hold no checksums; damage inside a tensor can't be seen"),),
    )


def _kind(tensor: HeaderTensor, as_bytes: bool) -> tuple[str, tuple[int, ...]]:
    return ("U8", (tensor.end - tensor.start,)) if as_bytes else (tensor.dtype, tensor.shape)


def output_file_of(header: SafetensorsHeader) -> OutputFile:
    """Describe an existing file as an output with tensors of bytes, to read it back.

    As bytes, because another writer's tensors need not start at multiples of their elements' width.
    """
    with open_regular(header.path) as file:
        start = file.read(0, header.data_start)
    tensors = sorted(header.tensors, key=lambda tensor: (tensor.start, tensor.end))
    return OutputFile(
        os.path.basename(header.path),
        start,
        tuple(OutputTensor(t.name, *_kind(t, as_bytes=True), header.data_start + t.start) for t in tensors),
        header.status.st_size,
    )
