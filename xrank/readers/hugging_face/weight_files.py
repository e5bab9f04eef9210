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
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UnsafeError, UsageError, XrankError
from xrank.faces import option
from xrank.formats.json_text import parse_json
from xrank.formats.regular_file import open_regular
from xrank.stores import places
from xrank.words import likewise_text, list_text

__all__ = ["WeightIndex", "check_index", "check_placeholders", "is_one_of_several", "list_files", "read_index"]
__all__ += ["stale_index_notes"]

_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[^.]+)")
_MAX_INDEX_NBYTES = 256 << 20


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
        UsageError: the files of the index and the whole model are both present.
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
    names = sorted(filter(is_weights, places.list_names(folder)))
    if index is not None:
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


def check_index(folder: str, tensors: Iterable[tuple[str, str]], index: WeightIndex | None) -> dict[str, str]:
    """Return tensor -> name of its file, checked against the index.

    Args:
        folder: the model's folder, for messages.
        tensors: (name, name of the file) of all tensors in the files.
        index: the folder's index.

    Raises:
        IncompleteError: the index names a tensor that no file contains.
        ContradictionError: the index names another file for a tensor, or two files of one model contain one tensor.
        UsageError: two files contain one tensor, and it is unknown whether they belong to one model.
    """
    seen: dict[str, str] = {}
    for name, file in tensors:
        if name in seen:
            raise _make_twice_error(folder, name, seen[name], file, is_one_model=index is not None)
        seen[name] = file
    if index is None or seen == index.weight_map:
        return seen
    # The first by name, so that the error is the same in every run.
    name = sorted(set(seen.items()) ^ set(index.weight_map.items()))[0][0]
    kind = IncompleteError if name not in seen else ContradictionError
    raise kind(
        f"{name}: the index and the files of {folder} disagree",
        tensor=name,
        file=index.file,
        got=f"the tensor in {seen.get(name, 'no file')}",
        want=f"in {index.weight_map.get(name, 'no file')}, as in the index",
        next_step="copy the folder again from where it was made",
    )


def _make_twice_error(folder: str, name: str, file: str, other: str, *, is_one_model: bool) -> XrankError:
    got = f"{file} and {other}"
    if is_one_model or (is_one_of_several(file) and is_one_of_several(other)):
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
    kinds: Mapping[str, tuple[str, tuple[int, ...]]], files: Mapping[str, str], known: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse float tensors of shape [0], which ZeRO-3 leaves if a rank saves a model whose weights it does not hold.

    Args:
        kinds: dtypes and shapes of the tensors, by name.
        files: path of each tensor's file, by name.
        known: shapes of the base model, which may have such a tensor.

    Raises:
        UsageError: there are such tensors.
    """
    empty = [
        name
        for name, (kind, shape) in kinds.items()
        if shape == (0,) and dtypes.dtype(kind).is_float and known.get(name) != (0,)
    ]
    if empty:
        raise UsageError(
            f"{empty[0]}: a placeholder of shape [0], as DeepSpeed leaves them (ZeRO-3){likewise_text(empty[1:])}",
            tensor=empty[0],
            file=files[empty[0]],
            got=f"{len(empty)} of {len(kinds)} tensors without an element, in {os.path.basename(files[empty[0]])}",
            want="the weights, which are in the ZeRO checkpoint",
            next_step="gather the ZeRO checkpoint itself (the folder with latest and zero_pp_rank_* files)",
        )
