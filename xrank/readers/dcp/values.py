"""Checks the values that a DCP checkpoint pickled whole: tensors inside one would be missing from the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from xrank.errors import UsageError, XrankError, either, option
from xrank.formats.dcp_metadata import DcpMetadata
from xrank.formats.regular_file import open_regular, quote
from xrank.formats.torch_archive import ArchivedTensor, read_archive_in
from xrank.words import plural


def check_values(
    folder: str, metadata: DcpMetadata, values: Mapping[str, str], is_left_out: Callable[[str], bool]
) -> tuple[str, ...]:
    """Refuse values that contain tensors; return the names of those that the caller leaves out.

    torch's planner takes dicts and lists apart. It pickles other values whole, such as tuples, and dicts with
    ``flatten_state_dict=False`` (torch/distributed/checkpoint/_traverse.py: traverse_state_dict). torch cannot load
    tensors from an unreadable value either; other checks report the damage.

    Args:
        folder: the checkpoint's folder.
        metadata: its metadata.
        values: the model's values: name -> flat name. The names of their files must be checked already.
        is_left_out: returns whether the caller leaves a name out.

    Raises:
        UsageError: a value contains a tensor; the error names the first such value.
    """
    by_file: dict[int, list[tuple[str, int, int]]] = {}
    for name, flat in values.items():
        number, start, nbytes = metadata.byte_items[flat]
        by_file.setdefault(number, []).append((name, start, nbytes))
    left_out: list[str] = []
    for number, items in by_file.items():
        path = os.path.join(folder, metadata.files[number])
        for name, value, count in _with_tensors(path, items):
            if not is_left_out(name):
                raise UsageError(
                    f"{quote(name)[1:-1]} was pickled whole, with {plural(count, 'tensor')} in it",
                    tensor=name,
                    file=path,
                    got=f"a {type(value).__name__}",
                    want="tensors by name, as torch's default planner saves them from dicts and lists",
                    next_step=either("load it and save it that way", f"leave it out with {option('exclude')}"),
                )
            left_out.append(name)
    return tuple(left_out)


def _with_tensors(path: str, items: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, object, int]]:
    """Yield name, value and number of tensors of a file's items (name, first byte, bytes) that contain tensors."""
    with suppress(XrankError), open_regular(path) as file:
        for name, start, nbytes in items:
            try:
                archive = read_archive_in(file, start=start, nbytes=nbytes)
            except XrankError:
                continue
            if archive.records and (count := _num_tensors(archive.value)):
                yield name, archive.value, count


def _num_tensors(value: object) -> int:
    """Count the tensors in a tree, whose depth `read_archive_in` bounds."""
    if isinstance(value, ArchivedTensor):
        return 1
    parts: Iterable[object] = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    return sum(map(_num_tensors, parts))
