"""The weight files of a Hugging Face folder and their index: lists them and checks one against the other.

The index is ``huggingface_hub/serialization/_base.py: StateDictSplit``, for files of ``.safetensors`` and of ``.bin``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from xrank import dtypes
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UnsafeError, UsageError, XrankError, option
from xrank.formats.entries import parse_json
from xrank.formats.regular_file import open_regular, quote
from xrank.readers.base import Hints
from xrank.stores import places
from xrank.words import likewise_text, list_text, plural

# torchtune/training/checkpointing/_checkpointer.py put the epoch behind: model-00001-of-00002_0.safetensors.
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})((?:_\d+)?\.[^.]+)")
_MAX_INDEX_NBYTES = 256 << 20
_OF_ZERO = re.compile(r".*_states\.pt|latest|latest_universal|zero_to_fp32\.py|global_step\d+")
"""Entries of a folder that DeepSpeed saves into."""


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """Content of an index."""

    file: str
    """Path of the index."""
    weight_map: Mapping[str, str]
    """Tensor -> name of its file."""
    total_size: int | None
    """Bytes of all tensors; None if the index does not record them."""

    def notes(self, nbytes: int) -> tuple[tuple[str, str], ...]:
        """Return notes about an index whose tensors have so many bytes."""
        if self.total_size in (None, nbytes):
            return ()
        name = os.path.basename(self.file)
        text = f"{name} records total_size {self.total_size:,}, and the tensors have {nbytes:,} bytes"
        return (("wrong-total-size", text),)


def read_index(folder: str, name: str, whole: str) -> WeightIndex | None:
    """Return the index of a folder; None without one, and for one that an earlier save left.

    Args:
        folder: the model's folder.
        name: the index's name.
        whole: name of the file for a whole model. transformers loads that file even beside an index: a save of one file
            over one of several leaves the index behind (modeling_utils.py: save_pretrained).

    Raises:
        CorruptError, UnsafeError: the index is malformed, or names a path outside the folder.
        UsageError: the files of the index and the whole model are both present, or they hold what changed in a step.
    """
    index = _parse_index(folder, name)
    if index is None or whole not in places.list_names(folder) or whole in index.weight_map.values():
        return index
    others = sorted(set(index.weight_map.values()).intersection(places.list_names(folder)))
    if not others:
        return None
    raise UsageError(
        f"{folder} holds more than one model: {whole}, and the files of {name}",
        file=os.path.join(folder, whole),
        got=f"{whole}, {list_text(others)}",
        want="one",
        next_step=f"give the path of the file {os.path.join(folder, whole)}, which transformers loads, or move that "
        "file to another folder",
    )


def stale_index_notes(folder: str, name: str, index: WeightIndex | None) -> list[tuple[str, str]]:
    """Return the note about an index that `read_index` ignored."""
    if index is not None or not places.is_file(os.path.join(folder, name)):
        return []
    return [("stale-index", f"{name} is of an earlier save: none of the files that it names is there")]


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
        raise CorruptError(
            f"{file} is not an index", file=file, got=str(error)[:200], next_step="copy the file again"
        ) from None
    for entry in weight_map.values():
        if os.path.basename(entry) != entry or "\0" in entry or entry in (".", ".."):
            raise UnsafeError(
                f"{file} names a file outside its folder",
                file=file,
                got=repr(entry),
                want="plain file names",
                next_step="do not use this folder: its index was tampered with",
            )
    metadata = index.get("metadata")
    if isinstance(metadata, dict) and "delta_encoding" in metadata:
        version, base, encoding = (
            quote(str(metadata.get(key))) for key in ("version", "base_version", "delta_encoding")
        )
        raise delta_error(folder, file, f"a delta of version {version} on base {base}", f"delta_encoding {encoding}")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some tools write a float.
    if isinstance(total, float) and total.is_integer():
        total = int(total)
    return WeightIndex(file, dict(weight_map), total if type(total) is int else None)


def is_one_of_several(name: str) -> bool:
    """Return whether a file's name shows that it contains only a part of a model."""
    match = _NUMBERED.fullmatch(name)
    return match is not None and int(match[3]) > 1


def list_files(folder: str, is_weights: Callable[[str], bool], index: WeightIndex | None) -> list[str]:
    """Return the names of a folder's weight files: those in its index, or all without an index.

    Raises:
        IncompleteError: a file that the index or other files' names imply is missing.
    """
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
        raise IncompleteError(
            f"{by} implies {absent[0]}, which is not in {folder}",
            file=os.path.join(folder, absent[0]),
            got=f"{len(names)} files",
            want=f"{len(wanted)} files" if index is not None else absent[0],
            next_step="copy the missing file into the folder",
        )
    return wanted if index is not None else names


def delta_error(folder: str, file: str, kind: str, got: str) -> UsageError:
    """Return the error for files of a trainer that wrote only what changed since another version of the weights."""
    return UsageError(
        f"{folder} is {kind}, not a model",
        file=file,
        got=got,
        want="whole tensors",
        next_step="give the folder of a version that is whole (its index has no delta_encoding); the engine that "
        "pulls these deltas applies them to it",
    )


def choose_tensors(
    folder: str, tensors: Iterable[tuple[str, str]], index: WeightIndex | None = None
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return tensor -> name of its file, and a note on the tensors that the index passes over.

    The index decides which file counts: a tool that changes some tensors of a model writes them to a file of their own
    and leaves the old ones where they are.

    Args:
        folder: the model's folder, for messages.
        tensors: (name, name of the file) of all tensors in the files.
        index: the folder's index.

    Raises:
        IncompleteError: the index names a tensor that no file contains.
        ContradictionError: only another file contains it, or two files of one model without an index contain a tensor.
        UsageError: two files contain one tensor, and it is unknown whether they belong to one model.
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
    for name in sorted(index.weight_map.keys() - seen.keys()) if index is not None else ():
        kind = IncompleteError if name not in passed else ContradictionError
        raise kind(
            f"{name}: the index and the files of {folder} disagree",
            tensor=name,
            file=index.file if index is not None else folder,
            got=f"the tensor in {passed.get(name, 'no file')}",
            want=f"in {index.weight_map[name] if index is not None else 'a file'}, as in the index",
            next_step="copy the folder again from where it was made",
        )
    if not passed:
        return seen, []
    assert index is not None
    name = min(passed)
    where = f"which the index gives to {seen[name]}" if name in seen else "which the index does not name"
    text = f"{plural(len(passed), 'tensor')} that {os.path.basename(index.file)} gives to no or another file left out"
    return seen, [("not-in-index", f"{text}, such as {name} in {passed[name]}, {where}")]


def _make_twice_error(folder: str, name: str, file: str, other: str) -> XrankError:
    got = f"{file} and {other}"
    ends = {name.partition("-of-")[2][5:] for name in (file, other)}
    if is_one_of_several(file) and is_one_of_several(other):
        if len(ends) > 1:
            return UsageError(
                f"{folder} holds more than one model: {name} is in {got}",
                tensor=name,
                file=os.path.join(folder, other),
                got=got,
                want="the files of one epoch",
                next_step="copy all files of one epoch and config.json into a folder of their own, and give its path",
            )
        return ContradictionError(
            f"{name} lies in two files of {folder}",
            tensor=name,
            file=os.path.join(folder, other),
            got=got,
            want="each tensor once",
            next_step="copy the folder again from where it was made",
        )
    # Files of two models and ranks' parts of one look alike. Moving one of them away may leave half a model.
    return UsageError(
        f"{name} lies in two files of {folder}",
        tensor=name,
        file=os.path.join(folder, other),
        got=got,
        want="each tensor once",
        next_step=f"if each file is a whole model, give the path of one of them, such as {os.path.join(folder, file)}, "
        f"with {option('base_model', metavar='DIR')}, whose shapes prove it; if they are the parts of ranks, gather "
        "the checkpoint that was trained",
    )


def check_placeholders(
    kinds: Mapping[str, tuple[str, tuple[int, ...]]], files: Mapping[str, str], hints: Hints
) -> list[tuple[str, str]]:
    """Refuse float tensors of shape [0], which ZeRO-3 leaves if a rank saves a model whose weights it does not hold.

    Without ZeRO's files beside them, a few are a model's own empty tensors, unless they have the name of a module's
    parameter: ZeRO-3 leaves a placeholder for each large parameter.

    Args:
        kinds: dtypes and shapes of the tensors, by name.
        files: path of each tensor's file, by name.
        hints: with the shapes of the base model, which may have such a tensor, and the tensors that are left out.

    Returns:
        A note on empty tensors that are not refused.

    Raises:
        UsageError: there are placeholders.
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
    raise UsageError(
        f"{empty[0]}: a placeholder of shape [0], as DeepSpeed leaves them (ZeRO-3){likewise_text(empty[1:])}",
        tensor=empty[0],
        file=files[empty[0]],
        got=f"{len(empty)} of {len(kinds)} tensors without an element, in {os.path.basename(files[empty[0]])}",
        want="the weights, which are in the ZeRO checkpoint",
        next_step="gather the ZeRO checkpoint itself (the folder with latest and zero_pp_rank_* files); if the trained "
        f"model has no values there, give a base model that has it so with {option('base_model')}",
    )
