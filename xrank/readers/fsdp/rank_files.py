"""Reads one rank's file: DTensors, ShardedTensors, plain tensors and other values, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from xrank.formats.pickles import is_extra_state, refuse_inert
from xrank.formats.regular_file import Origin, quote
from xrank.formats.safetensors_header import SafetensorsHeader
from xrank.formats.torch_archive import NAMES, ArchivedTensor, TorchArchive, read_archive
from xrank.readers.fsdp.dtensors import DTensorPart, DTensors
from xrank.readers.fsdp.pickled import read_wrapper, unwrap_parameter
from xrank.readers.fsdp.sharded_tensors import ShardedPart, read_sharded_part


@dataclass(frozen=True, slots=True)
class FsdpRankFile:
    """One rank's file, read from its metadata alone."""

    rank: int
    archive: TorchArchive | SafetensorsHeader
    dtensors: Mapping[str, DTensorPart]
    sharded: Mapping[str, ShardedPart]
    plain: Mapping[str, ArchivedTensor]
    others: tuple[str, ...]
    """Names of plain values that are not tensors."""

    @property
    def origin(self) -> Origin:
        """Makes the errors that name the file."""
        return Origin(self.archive.path, self.rank)


def read_rank_file(path: str, rank: int, *, is_nested: bool = False) -> FsdpRankFile:
    """Return the content of a rank's file.

    Args:
        path: the file.
        rank: the rank in its name.
        is_nested: whether a state dict may contain further ones; the names of tensors in them are joined by dots.

    Raises:
        IncompleteError: the file is missing.
        ContradictionError: it is another rank's.
        CorruptError, UnsafeError: it is damaged, or contains more than tensors by name.
        UsageError: a value contains tensors, which no name of the model's own state dict has.
        LayoutError: the notation cannot express a DTensor's placements.
    """
    archive = read_archive(path, rank=rank)
    origin = Origin(path, rank)
    state = archive.value
    if not isinstance(state, dict):
        refuse_inert(state, path, rank)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        what = "a tensor without a name" if type(state).__name__ == "ArchivedTensor" else type(state).__name__
        raise origin.usage("is not a state dict", got=what, want="a dict of tensors by name", next_step=NAMES)
    reader = DTensors(archive, rank)
    dtensors: dict[str, DTensorPart] = {}
    sharded: dict[str, ShardedPart] = {}
    plain: dict[str, ArchivedTensor] = {}
    others: list[str] = []
    for name, saved in _join_names(state) if is_nested else state.items():
        if is_nested and (name in dtensors or name in sharded or name in plain):
            raise origin.usage(
                f"two tensors have the name {quote(name)}, once their dicts are left out",
                want="different names",
                next_step="save the model's state_dict() alone",
            )
        if is_extra_state(name):  # differs between ranks
            others.append(name)
            continue
        value = unwrap_parameter(saved)
        wrapper = read_wrapper(value, origin)
        if isinstance(value, ArchivedTensor):
            plain[name] = value
        elif wrapper is not None and wrapper.kind == "DTensor":
            part = reader.read_part(name, wrapper)
            if part is not None:
                dtensors[name] = part
        elif wrapper is not None and wrapper.kind == "ShardedTensor":
            sharded[name] = read_sharded_part(name, wrapper, origin)
        elif wrapper is not None:
            raise origin.usage(
                f"{quote(name)} is an unknown kind of tensor",
                got=quote(wrapper.kind),
                want="plain tensors, DTensors and ShardedTensors",
                next_step="save the model's state_dict() with plain tensors",
            )
        else:
            if any(_is_tensor(leaf, origin) for _, leaf in _join_names(value)):
                raise origin.usage(
                    f"is not a model's state dict: {quote(name)} is a {type(value).__name__} of tensors",
                    want="tensors by name",
                    next_step="save the model's state_dict() alone",
                )
            refuse_inert(value, path, rank)
            others.append(name)
    return FsdpRankFile(rank, archive, dtensors, sharded, plain, tuple(others))


def _join_names(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested dicts and lists, under the names of their places."""
    # The archive's reader has checked that the tree is neither deep nor endless.
    if isinstance(value, dict):
        places: Iterable[tuple[object, object]] = value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        places = enumerate(value)
    else:
        yield name, value
        return
    for key, inner in places:
        yield from _join_names(inner, f"{name}.{key}" if name else str(key))


def _is_tensor(value: object, origin: Origin) -> bool:
    return isinstance(value, ArchivedTensor) or read_wrapper(unwrap_parameter(value), origin) is not None
