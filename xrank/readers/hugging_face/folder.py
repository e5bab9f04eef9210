"""Reads a Hugging Face folder of safetensors: one file, or the shards that an index names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from xrank import dtypes
from xrank.errors import ContradictionError, IncompleteError, UsageError, XrankError, option
from xrank.formats.deltas import INDEX_NAME, DeltaFacts, parse_facts
from xrank.formats.safetensors_header import HeaderTensor, SafetensorsHeader, read_header
from xrank.layout.nest_table import IntArray, NestTable, int_array
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.readers.base import Hints
from xrank.readers.hugging_face.shards import is_shard_name
from xrank.readers.records import ENGINE_PART, NO_CHECKSUMS, Records, Subject, outside_error
from xrank.storage import places
from xrank.storage.entries import parse_json
from xrank.storage.manifest import MANIFEST_NAME
from xrank.storage.output_place import SALVAGE_NAME
from xrank.storage.regular_file import Origin, open_regular
from xrank.words import likewise_text, list_text, plural

# torchtune/training/checkpointing/_checkpointer.py put the epoch behind: model-00001-of-00002_0.safetensors.
_VERIFIABLE = ("no-checksums", f"safetensors files hold no checksums; xrank verify compares {MANIFEST_NAME}'s digests")
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})((?:_\d+)?\.[^.]+)")
_MAX_INDEX_NBYTES = 256 << 20
_OF_ZERO = re.compile(r".*_states\.pt|latest|latest_universal|zero_to_fp32\.py|global_step\d+")
"""Entries of a folder that DeepSpeed saves into."""


class WeightIndex(Struct, frozen=True):
    """Content of an index."""

    file: str
    """Path of the index."""
    weight_map: Mapping[str, str]
    """Tensor -> name of its file."""
    total_size: int | None
    """Bytes of all tensors; None if the index does not record them."""
    delta: DeltaFacts | None = None
    """The facts of a version whose files contain changes; None: they contain a whole model."""
    step: int | None = None
    """The training step of a version, if it records one."""

    def notes(self, nbytes: int) -> tuple[tuple[str, str], ...]:
        """Return notes about an index whose tensors have so many bytes."""
        if self.total_size in (None, nbytes):
            return ()
        name = os.path.basename(self.file)
        text = f"{name} records total_size {self.total_size:,}, and the tensors have {nbytes:,} bytes"
        return (("wrong-total-size", text),)


def read_index(folder: str, name: str, whole: str) -> WeightIndex | None:
    """Return the index of a folder; None without one, and for one that an earlier save left.

    transformers loads the file `whole` of a whole model even beside an index: a save of one file over one of several
    leaves the index behind (modeling_utils.py: save_pretrained).
    """
    index = _parse_index(folder, name)
    if index is None or whole not in places.list_names(folder) or whole in index.weight_map.values():
        return index
    others = sorted(set(index.weight_map.values()).intersection(places.list_names(folder)))
    if not others:
        return None
    path = os.path.join(folder, whole)
    raise Origin(folder).usage(
        f"contains more than one model: {whole}, and the files of {name}",
        f"{whole}, {list_text(others)}",
        "one",
        f"give the path of the file {path}, which transformers loads, or move that file to another folder",
    )


def stale_index_notes(folder: str, name: str, index: WeightIndex | None) -> list[tuple[str, str]]:
    """Return the note about an index that `read_index` ignored."""
    if index is not None or not places.is_file(os.path.join(folder, name)):
        return []
    return [("stale-index", f"{name} is from an earlier save: none of the files that it lists exists")]


def note_left_out(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the note on files beside a model's own, or none."""
    left = sorted(names)
    text = f"{plural(len(left), 'file')} next to the model's own left out, such as {min(left, default='')}"
    return [("left-out", text)] if left else []


def _parse_index(folder: str, name: str) -> WeightIndex | None:
    file = os.path.join(folder, name)
    if not places.is_file(file):
        return None
    try:
        with open_regular(file) as content:
            if content.nbytes > _MAX_INDEX_NBYTES:
                raise ValueError(f"too large: {content.nbytes:,} bytes")
            index: Any = parse_json(content.read(0, content.nbytes))
        weight_map = index["weight_map"]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in weight_map.items()):
            raise TypeError("weight_map is not a map of names")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Origin(file).corrupt("is not an index", str(error)[:200], next_step="copy the file again") from None
    for entry in weight_map.values():
        if os.path.basename(entry) != entry or "\0" in entry or entry in (".", ".."):
            raise outside_error(file, entry, "index")
    metadata = index.get("metadata")
    delta = parse_facts(metadata, file) if isinstance(metadata, dict) else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some tools write a float.
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    own = metadata.get("xrank") if isinstance(metadata, dict) else None
    step = own.get("step") if isinstance(own, dict) else None
    is_counted = type(total) is int
    return WeightIndex(
        file, dict(weight_map), total if is_counted else None, delta, step if type(step) is int else None
    )


def read_facts(folder: str) -> DeltaFacts | None:
    """Return the facts in the index of a version that contains changes; None for another folder."""
    index = _parse_index(folder, INDEX_NAME)
    return None if index is None else index.delta


def read_step(folder: str) -> int | None:
    """Return the training step that a version records, whole or not; None if it does not record this."""
    index = _parse_index(folder, INDEX_NAME)
    return None if index is None else index.step


def is_one_of_several(name: str) -> bool:
    """Return whether a file's name shows that it contains only a part of a model."""
    match = _NUMBERED.fullmatch(name)
    return match is not None and int(match[3]) > 1


def list_files(folder: str, is_weights: Callable[[str], object], index: WeightIndex | None) -> list[str]:
    """Return the names of a folder's weight files: those in its index, or all without an index."""
    entries = places.list_names(folder)
    names = sorted(filter(is_weights, entries))
    if index is not None:
        names = sorted(set(index.weight_map.values()).intersection(entries))  # whatever their names are
        wanted = sorted(set(index.weight_map.values()))
        by = os.path.basename(index.file)
    else:
        numbered = [match for match in map(_NUMBERED.fullmatch, names) if match is not None]
        series = {(match[1], match[3], match[4]) for match in numbered}
        # A name may claim any number of files: one more than are present suffices to see that one is missing.
        wanted = [
            f"{stem}-{k:05d}-of-{count}{suffix}"
            for stem, count, suffix in sorted(series)
            for k in range(1, min(int(count), len(numbered) + 1) + 1)
        ]
        by = "another file's name"
    absent = sorted(set(wanted) - set(names))
    if absent:
        raise Origin(os.path.join(folder, absent[0])).incomplete(
            f"{by} implies {absent[0]}, which is not there",
            f"{len(names)} files",
            f"{len(wanted)} files" if index is not None else absent[0],
            "copy the missing file into the folder",
        )
    return wanted if index is not None else names


def delta_error(folder: str, file: str, kind: str, got: str) -> UsageError:
    """Return the error for files of a trainer that wrote only what changed since another version of the weights."""
    next_step = (
        "give the folder of a version that is whole (its index has no delta_encoding); the engine that "
        "pulls these deltas applies them to it"
    )
    return UsageError(f"{folder} is {kind}, not a model", file=file, got=got, want="whole tensors", next_step=next_step)


def choose_tensors(
    folder: str, tensors: Iterable[tuple[str, str]], index: WeightIndex | None = None
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return tensor -> name of its file, and a note on the tensors that the index passes over.

    The index decides which file counts: a tool that changes some tensors of a model writes them to a file of their own
    and leaves the old ones where they are.
    """
    seen: dict[str, str] = {}
    passed: dict[str, str] = {}
    for name, file in tensors:
        if index is not None and index.weight_map.get(name) != file:
            passed.setdefault(name, file)
        elif name in seen:
            raise _make_twice_error(folder, name, seen[name], file)
        else:
            seen[name] = file
    if index is None:
        return seen, []
    for name in sorted(index.weight_map.keys() - seen.keys()):
        raise Subject(name, None, index.file).make(
            IncompleteError if name not in passed else ContradictionError,
            f"the index and the files of {folder} disagree",
            f"the tensor in {passed.get(name, 'no file')}",
            f"in {index.weight_map[name]}, as in the index",
            "copy the folder again from where it was made",
        )
    if not passed:
        return seen, []
    name = min(passed)
    where = f"which the index gives to {seen[name]}" if name in seen else "which is not in the index"
    index_name = os.path.basename(index.file)
    text = f"{plural(len(passed), 'tensor')} left out that {index_name} does not list, or lists in a different file"
    return seen, [("not-in-index", f"{text}, such as {name} in {passed[name]}, {where}")]


def _make_twice_error(folder: str, name: str, file: str, other: str) -> XrankError:
    kind: type[XrankError]
    got, problem = f"{file} and {other}", f"{name} is in two files of {folder}"
    if not is_one_of_several(file) or not is_one_of_several(other):
        # Files of two models and ranks' parts of one look alike. Moving one of them away may leave half a model.
        kind, want = UsageError, "each tensor once"
        step = (
            f"if each file is a whole model, give the path of one of them, such as {os.path.join(folder, file)}, "
            f"with {option('base_model', metavar='DIR')} to prove its shapes; if they are the parts of ranks, "
            "gather the checkpoint that was trained"
        )
    elif len({name.partition("-of-")[2][5:] for name in (file, other)}) > 1:
        kind, want = UsageError, "the files of one epoch"
        problem = f"{folder} contains more than one model: {name} is in {got}"
        step = "copy all files of one epoch and config.json into a separate folder, and give its path"
    else:
        kind, want, step = ContradictionError, "each tensor once", "copy the folder again from where it was made"
    return kind(problem, tensor=name, file=os.path.join(folder, other), got=got, want=want, next_step=step)


def check_placeholders(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]], files: Mapping[str, str], hints: Hints
) -> list[tuple[str, str]]:
    """Refuse float tensors of shape [0], which ZeRO-3 leaves if a rank saves a model whose weights it does not hold.

    Without ZeRO's files beside them, a few are a model's own empty tensors, unless they have the name of a module's
    parameter: ZeRO-3 leaves a placeholder for each large parameter. Returns a note on empty tensors that are not
    refused. `kinds` are the tensors' dtypes and shapes, by name; the base model in the hints may have such a tensor.
    """
    is_float = {name: dtypes.dtype(kind).is_float for name, (kind, _) in kinds.items()}
    empty = [
        name
        for name, (_, shape) in kinds.items()
        if shape == (0,)
        and is_float[name]
        and hints.shapes.get(name) != (0,)
        and not (hints.is_left_out is not None and hints.is_left_out(name))
    ]
    if not empty:
        return []
    folder = os.path.dirname(files[empty[0]]) or os.curdir
    num_matrices = sum(
        is_float[name] and len(shape) > 1 and 0 not in shape and ".lora_" not in name
        for name, (_, shape) in kinds.items()
    )
    if (
        len(empty) <= num_matrices
        and not any(name.rpartition(".")[2] in ("weight", "bias") for name in empty)
        and not any(map(_OF_ZERO.fullmatch, places.list_names(folder)))
    ):
        return [("empty-tensors", f"{plural(len(empty), 'float tensor')} of shape [0]: {list_text(empty, 3)}")]
    raise Subject(empty[0], None, files[empty[0]]).make(
        UsageError,
        f"a placeholder of shape [0], as DeepSpeed leaves them (ZeRO-3){likewise_text(empty[1:])}",
        f"{len(empty)} of {len(kinds)} tensors without an element, in {os.path.basename(files[empty[0]])}",
        "the weights, which are in the ZeRO checkpoint",
        "gather the ZeRO checkpoint itself (the folder with latest and zero_pp_rank_* files); if the trained model "
        f"has no values there, give a base model with the same empty tensors as {option('base_model')}",
    )


_NUMBERED_PART = re.compile(r"(.+)_\d+\.safetensors")
_FIRST, _WHOLE = "model_0.safetensors", "model.safetensors"
_METADATA = "metadata.pkl"


def is_rank_part(name: str, beside: Collection[str]) -> bool:
    """Return whether a safetensors file has a rank's parts of tensors; `beside` are all entries of its folder.

    accelerate gives a second whole model a number, too, but its first model has none: ``model.safetensors``,
    ``model_1.safetensors``.
    """
    numbered = _NUMBERED_PART.fullmatch(name)
    if numbered is None:
        return re.fullmatch(ENGINE_PART, name) is not None
    return _METADATA in beside or (numbered[1] == "model" and _FIRST in beside and _WHOLE not in beside)


_STEMS = ("model", "diffusion_pytorch_model")  # of transformers and diffusers
_ADAPTER = "adapter_model.safetensors"


def refuse_salvaged(path: str) -> None:
    """Refuse the tensors that a salvage saved, which are not a whole model; `path` is their folder or a file there."""
    folder = path if places.is_folder(path) else os.path.dirname(path) or os.curdir
    list_path = os.path.join(folder, SALVAGE_NAME)
    if places.is_file(list_path):
        raise IncompleteError(
            f"{folder} is partial: it contains only the undamaged tensors of a salvage, not a complete model",
            file=list_path,
            got=f"a {SALVAGE_NAME}, which lists the missing tensors",
            want="a complete model",
            next_step=f"gather the checkpoint again, with {option('base_model', metavar='DIR')} and "
            f"{option('fill_from_base', metavar='REGEX')} for what is missing; safetensors can open these files",
        )


class HfFolderReader:
    """The reader of safetensors folders and files (`xrank.readers.base.Reader`)."""

    name = "safetensors"

    def recognize(self, path: str) -> str | None:
        """Return None for a safetensors file, or a folder with one."""
        if path.endswith(".safetensors") and places.is_file(path):
            name = os.path.basename(path)
            if is_shard_name(name) or is_rank_part(name, places.list_names(os.path.dirname(path) or os.curdir)):
                return "one rank's pieces of tensors"
            return "one of several files; its folder is the model" if is_one_of_several(name) else None
        if places.is_folder(path):
            with suppress(XrankError):  # a damaged index, in a folder without weights, is of no model
                if _list_model_files(path) or read_facts(path) is not None:
                    return None
        return "no *.safetensors file with whole tensors in it"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor lies; errors as in `Reader.read`."""
        refuse_salvaged(path)
        found = _read_folder(path) if places.is_folder(path) else _Folder(read_headers(path))
        if found.delta is not None:
            return self.read_version(path, hints, found.delta)
        headers = found.headers
        model = describe_files(path, headers)
        files = {tensor.name: header.path for header in headers for tensor in header.tensors}
        kinds = {shard.name: (shard.dtype, shard.shape) for shard in model.shards}
        return replace(
            model, notes=(*model.notes, *found.passed, *check_placeholders(kinds, files, hints), *found.more)
        )

    def read_version(self, path: str, hints: Hints, delta: DeltaFacts) -> StoredModel:
        """Return the model of a version that contains changes; this reader refuses it."""
        raise _refuse_delta(path, delta)


def _is_weight_file(name: str) -> bool:
    # Desktops and editors leave hidden files, such as macOS' ._model.safetensors.
    return name.endswith(".safetensors") and not is_shard_name(name) and not name.startswith(".")


def _list_model_files(folder: str) -> list[str]:
    """Return the files of whole tensors in a folder."""
    names = places.list_names(folder)
    return [name for name in names if _is_weight_file(name) and not is_rank_part(name, names)]


def read_headers(path: str, *, of_delta: bool = False) -> tuple[SafetensorsHeader, ...]:
    """Return the headers of a model's files, by name, with the tensors that its index gives to each file.

    `of_delta`: whether the files may contain changes of a model in the place of one.
    """
    if not of_delta:
        refuse_salvaged(path)
    if places.is_folder(path):
        found = _read_folder(path)
        if found.delta is None or of_delta:
            return found.headers
        raise _refuse_delta(path, found.delta)
    header = read_header(path)
    _check_whole(path, [header])
    return (header,)


def _refuse_delta(folder: str, delta: DeltaFacts) -> UsageError:
    kind = f"a delta of version {delta.version} on base {delta.base_version}"
    return delta_error(folder, os.path.join(folder, INDEX_NAME), kind, f"delta_encoding {delta.encoding}")


def read_delta(folder: str) -> tuple[DeltaFacts, tuple[SafetensorsHeader, ...]] | None:
    """Return the facts and headers of a version's files; None: they contain a whole model."""
    found = _read_folder(folder)
    return None if found.delta is None else (found.delta, found.headers)


class _Folder(NamedTuple):
    headers: tuple[SafetensorsHeader, ...]
    passed: Sequence[tuple[str, str]] = ()
    """Notes on tensors passed over."""
    more: Sequence[tuple[str, str]] = ()
    """Notes on the index and the files."""
    delta: DeltaFacts | None = None


def _read_folder(path: str) -> _Folder:
    entries = places.list_names(path)
    # The names that a whole model's file and an index may have.
    pairs = [(f"{stem}.safetensors", f"{stem}.safetensors.index.json") for stem in _STEMS]
    whole, index_name = next((pair for pair in pairs if not set(pair).isdisjoint(entries)), pairs[0])
    index = read_index(path, index_name, whole)
    # Without an index, a file with the name of a whole model is the model, as for transformers. Other formats' files
    # may lie beside it, such as consolidated.safetensors. Only numbered files contradict it; an adapter belongs to it.
    own = _list_model_files(path)
    if whole in own:
        own = [name for name in own if name in (whole, _ADAPTER) or is_one_of_several(name)]
    is_own = _is_weight_file if index is not None else own.__contains__
    first = sorted(name for name in entries if "-00000-of-" in name and is_own(name))[:1]
    delta = None if index is None else index.delta
    if delta is None:
        _check_whole(path, [read_header(os.path.join(path, name)) for name in first])
    names = list_files(path, is_own, index)
    headers = [read_header(os.path.join(path, name)) for name in names]
    if delta is None:
        _check_whole(path, headers)
    held = ((tensor.name, name) for header, name in zip(headers, names, strict=True) for tensor in header.tensors)
    place_of, notes = choose_tensors(path, held, index)
    if notes:
        headers = [
            replace(header, tensors=tuple(tensor for tensor in header.tensors if place_of.get(tensor.name) == name))
            for header, name in zip(headers, names, strict=True)
        ]
    more = stale_index_notes(path, index_name, index)
    if index is not None:
        kept = [header for header, name in zip(headers, names, strict=True) if name != _ADAPTER]
        more += index.notes(sum(tensor.end - tensor.start for header in kept for tensor in header.tensors))
        if _ADAPTER not in index.weight_map.values() and _ADAPTER in entries:
            headers.append(read_header(os.path.join(path, _ADAPTER)))  # never in an index, never silently left out
            names.append(_ADAPTER)
    more += note_left_out(filter(_is_weight_file, set(entries) - set(names)))
    return _Folder(tuple(headers), notes, more, delta)


def _check_whole(path: str, headers: Sequence[SafetensorsHeader]) -> None:
    """Refuse the files of a delta that lie there without their index: each tensor is a row of compressed bytes.

    slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py: the metadata of a file has a checksum
    for each of its tensors, under the tensor's name.
    """
    tensors = [tensor for header in headers for tensor in header.tensors]
    names = {name for header in headers for name in header.metadata}
    if tensors and all(t.name in names and t.dtype == "U8" and len(t.shape) == 1 for t in tensors):
        raise delta_error(path, headers[0].path, "a delta of one version of weights on another", "rows of bytes")


def describe_files(path: str, headers: Sequence[SafetensorsHeader], *, as_bytes: bool = False) -> StoredModel:
    """Return the stored model of these files; every tensor is one record without checksum."""
    records = Records()
    shards = []
    tables: dict[int, tuple[IntArray, NestTable]] = {}  # of all tensors with so many elements
    for header in headers:
        record_of = records.add_safetensors(header)
        for tensor in header.tensors:
            dtype, shape = _kind(tensor, as_bytes)
            count, record = prod(shape), record_of(tensor.name)
            if count not in tables:
                nests = NestTable.in_order(count)
                tables[count] = int_array([0] * len(nests)), nests
            ranks, table = tables[count]
            shards.append(StoredShard(tensor.name, dtype, shape, ranks, ranks + record, table))
    return StoredModel(
        format="safetensors",
        path=path,
        files=tuple(records.files),
        records=records.table(),
        shards=tuple(shards),
        nbytes=records.nbytes,
        notes=(_VERIFIABLE if os.path.exists(os.path.join(path, MANIFEST_NAME)) else NO_CHECKSUMS,),
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
