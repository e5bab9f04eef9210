"""Output files before any data moves: the weights of a Hugging Face folder with their index, and states of ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.torch_files import lay_out_archive_file, view
from xrank.errors import UsageError, either, option
from xrank.formats.rank_state import RankRecord, state_pickle
from xrank.formats.safetensors_header import HeaderTensor, build_header
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.storage.places import state_file_name

_STEM = "model"
_DIFFUSERS_STEM = "diffusion_pytorch_model"  # diffusers/utils/constants.py: SAFETENSORS_WEIGHTS_NAME

_NUMBERS = re.compile(r"-\d{5,}-of-\d{5,}")

_ALIGNMENT = 4096
"""Data starts at a multiple of this: whole windows are written aligned, and pieces can be shared by reflink."""

_MAX_HEADER_NBYTES = 100_000_000  # safetensors/src/tensor.rs: MAX_HEADER_SIZE
_HEADER_FRAME_NBYTES = 2 * _ALIGNMENT  # metadata, braces, padding
_ENTRY_FRAME_NBYTES = len('"":{"dtype":"","shape":[],"data_offsets":[,]},') + 2 * 20  # offsets of 20 digits at most
_METADATA = {"format": "pt"}  # transformers refuses files without it


def find_weights_stem(config: Mapping[str, Any] | None) -> str:
    """Return how the names of weight files begin, by a model's config.json: from_pretrained looks for them by name."""
    return _DIFFUSERS_STEM if config is not None and "_diffusers_version" in config else _STEM


def lay_out(
    tensors: Sequence[OutputTensor],
    max_shard_nbytes: int,
    apart: Sequence[Sequence[OutputTensor]] = (),
    *,
    stem: str = _STEM,
    checksums: Mapping[str, str] | None = None,
) -> tuple[OutputFile, ...]:
    """Split tensors over files in the given order and give each its place.

    Inside a file, tensors of whole 4,096-byte blocks come first: safetensors allows no gaps, so all of them start at a
    block. The others follow, widest element first, which keeps each at a multiple of its element's width.

    A tensor of more than `max_shard_nbytes` gets a file of its own. Each group of `apart` is in one file; they come
    last. Files of a delta are numbered from 0 and have the `checksums` of their tensors, by name, as metadata.
    UsageError if there is no tensor, two have one name, or the limit is below 1.
    """
    everything = [*tensors, *chain.from_iterable(apart)]
    if not everything:
        next_step = either(f"change {option('include')} or {option('exclude')}", f"let {option('transform')} keep one")
        raise UsageError("no tensor is left to write", next_step=next_step)
    if max_shard_nbytes < 1:
        raise UsageError(
            f"{option('max_shard_size')} must be 1 byte or more",
            got=str(max_shard_nbytes),
            want=option("max_shard_size", "5GB"),
            next_step="give a larger size",
        )
    seen: set[str] = set()
    for tensor in everything:
        if tensor.name in seen:
            name, next_step = tensor.name, "give one of the two a different name"
            raise UsageError(f"{name}: two tensors have this name", tensor=name, next_step=next_step)
        seen.add(tensor.name)
    groups = _split([[tensor] for tensor in tensors], max_shard_nbytes) + _split(apart, max_shard_nbytes)
    count, first = len(groups), 1 if checksums is None else 0
    names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(first, first + count)]
    if checksums is not None:
        metadata = ({tensor.name: checksums[tensor.name] for tensor in group} for group in groups)
        return tuple(map(lay_out_file, names, groups, metadata))
    return tuple(map(lay_out_file, names if count > 1 else [f"{stem}.safetensors"], groups))


def index_name(files: Sequence[OutputFile]) -> str:
    """Return the name of the index of a model's files."""
    return f"{_NUMBERS.sub('', files[0].name)}.index.json"


def index_text(files: Iterable[OutputFile], metadata: Mapping[str, Any] | None = None) -> str | None:
    """Return the text of the index as the Hub and transformers write it; None for a single file.

    A version of a model that changes step by step has an index with `metadata` in any case.
    """
    files = tuple(files)
    if len(files) == 1 and metadata is None:
        return None
    totals = {
        "total_parameters": sum(t.num_elements for file in files for t in file.tensors),
        "total_size": sum(t.nbytes for file in files for t in file.tensors),
    }
    index = {
        "metadata": metadata if metadata and "delta_encoding" in metadata else {**totals, **(metadata or {})},
        "weight_map": {t.name: file.name for file in files for t in file.tensors},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _split(units: Iterable[Sequence[OutputTensor]], max_shard_nbytes: int) -> list[list[OutputTensor]]:
    groups: list[list[OutputTensor]] = []
    data = header = 0
    for unit in units:
        nbytes = sum(tensor.nbytes for tensor in unit)
        # An upper bound: JSON escaped to ASCII is never shorter than UTF-8.
        entries = sum(
            len(json.dumps(t.name)) + len(t.dtype) + sum(len(str(n)) + 1 for n in t.shape) + _ENTRY_FRAME_NBYTES
            for t in unit
        )
        fits = data + nbytes <= max_shard_nbytes and header + entries <= _MAX_HEADER_NBYTES - _HEADER_FRAME_NBYTES
        if not groups or not fits:
            groups.append([])
            data = header = 0
        groups[-1] += unit
        data += nbytes
        header += entries
    return groups


def lay_out_file(
    name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str] = MappingProxyType(_METADATA)
) -> OutputFile:
    """Return one safetensors file with all these tensors, each at its place."""
    blocks = [t for t in tensors if t.nbytes % _ALIGNMENT == 0]
    others = sorted((t for t in tensors if t.nbytes % _ALIGNMENT), key=lambda t: -dtypes.dtype(t.dtype).nbytes)
    entries = []
    end = 0
    for tensor in (*blocks, *others):
        start, end = end, end + tensor.nbytes
        entries.append(HeaderTensor(tensor.name, tensor.dtype, tensor.shape, start, end))
    header = build_header(entries, metadata, alignment=_ALIGNMENT)
    placed = tuple(
        replace(tensor, offset=len(header) + entry.start)
        for tensor, entry in zip((*blocks, *others), entries, strict=True)
    )
    return OutputFile(name, header, placed, len(header) + end)


def lay_out_state(
    record: RankRecord, config: Mapping[str, Any], tensors: Sequence[OutputTensor], names: Mapping[str, str]
) -> OutputFile:
    """Return one rank's state as a file to be written: ``rank_<r>_state.pth``, as `NFSWorkspace` writes it.

    `tensors` are the rank's parts, with local shapes; `names` has name in the state -> tensor, equal for tied names.
    """
    keys = {tensor.name: str(key) for key, tensor in enumerate(tensors)}
    views = {tensor.name: view(tensor.dtype, tensor.shape, keys[tensor.name]) for tensor in tensors}
    pickled = state_pickle(config, {name: views[tensor] for name, tensor in names.items()}, record.to_json())
    return lay_out_archive_file(state_file_name(record.rank), pickled, tensors)
