"""FSDP1's flat parameters: buffers with all parameters of a module end to end, cut evenly, also within parameters.

``LOCAL_STATE_DICT`` saves the rank's range of every buffer, a one-dimensional ShardedTensor ``…_flat_param``
(torch/distributed/fsdp/_state_dict_utils.py: _local_post_state_dict_hook). With ``use_orig_params=True`` it also saves
each parameter's name, as a view on the same storage: this determines its place in the buffer, but not its shape.
Otherwise it saves neither names nor shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from xrank.dtypes import dtype
from xrank.errors import ContradictionError, IncompleteError, LayoutError, option
from xrank.layout.nests import Nest
from xrank.plan.source import StoredShard
from xrank.readers.fsdp.rank_files import FsdpRankFile
from xrank.readers.held_tensor import HeldTensor, pieces_of
from xrank.words import likewise_text, ranks_text

_NAME = "_flat_param"
_ALIGNMENT_NBYTES = 16
"""Alignment of parameters (torch/distributed/fsdp/_flat_param.py: _get_aligned_numel)."""

Index: TypeAlias = Callable[[str], int]
"""Key of a record in a rank's file -> its number in the source."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A rank's elements of one parameter."""

    held: HeldTensor
    buffer: str
    start: int
    """Index in the whole buffer."""
    stop: int


@dataclass(frozen=True, slots=True)
class FlatPieces:
    """The pieces of named parameters, and the buffers without names."""

    by_name: Mapping[str, tuple[_Piece, ...]]
    nameless: tuple[str, ...]


def is_flat(name: str) -> bool:
    """Return whether a ShardedTensor of that name is a flat parameter."""
    return name.rpartition(".")[2] == _NAME


def find_flat_pieces(files: Sequence[FsdpRankFile], indexes: Mapping[int, Index]) -> FlatPieces:
    """Return the places of all named parameters in their flat parameters.

    Args:
        files: the files of all ranks.
        indexes: for each rank the numbers of its records.

    Raises:
        ContradictionError: a tensor is a piece on one rank and a whole tensor on another.
        IncompleteError: elements of a buffer belong to no name.
    """
    found: dict[str, list[_Piece]] = {}
    buffers: dict[str, None] = {}
    for file in files:
        at = {}
        for name, part in file.sharded.items():
            if is_flat(name):
                buffers[name] = None
                # Named parameters are views of the buffer's storage, so they share its record's key.
                at.update({tensor.key: (name, box, tensor) for box, tensor in part.shards if len(box) == 1})
        for name, tensor in file.plain.items():
            if tensor.key not in at or len(tensor.shape) != 1 or not tensor.shape[0]:
                continue
            buffer, ((low, high),), whole = at[tensor.key]
            start = low + tensor.storage_offset - whole.storage_offset
            stop = start + tensor.shape[0]
            if not low <= start < stop <= high or tensor.strides != (1,):
                raise file.origin.corrupt(
                    f"{name} reaches beyond the rank's range of {buffer}",
                    got=f"{start}:{stop}",
                    want=f"in {low}:{high}",
                )
            index = indexes[file.rank](tensor.key)
            held = HeldTensor.from_archive(tensor, rank=file.rank, file=file.archive.path, record=index)
            found.setdefault(name, []).append(_Piece(held, buffer, start, stop))
    for file in files:
        for name in found:
            held_by = {piece.held.rank for piece in found[name]}
            if file.rank not in held_by and name in file.plain and 0 not in file.plain[name].shape:
                raise ContradictionError(
                    f"{name}: it is a piece of a flat parameter on {ranks_text(held_by)}, but a whole "
                    f"tensor on rank {file.rank}",
                    tensor=name,
                    rank=file.rank,
                    file=file.archive.path,
                    got=f"shape {list(file.plain[name].shape)}",
                    next_step="all ranks must come from one run; save again",
                )
    named = {piece.buffer for pieces in found.values() for piece in pieces}
    for buffer in named:
        _check_gaps(buffer, files, [piece for pieces in found.values() for piece in pieces if piece.buffer == buffer])
    return FlatPieces(
        {name: tuple(pieces) for name, pieces in found.items()}, tuple(name for name in buffers if name not in named)
    )


def _check_gaps(buffer: str, files: Sequence[FsdpRankFile], pieces: Iterable[_Piece]) -> None:
    """Check that only padding lies between the parameters."""
    parts = [file.sharded[buffer] for file in files if buffer in file.sharded]
    size = parts[0].shape[0]
    padding = _ALIGNMENT_NBYTES // dtype(parts[0].dtype).nbytes
    stand = 0
    # The buffer's end is the last entry, so that the gap before it is checked, too.
    for start, stop in [*sorted({(piece.start, piece.stop) for piece in pieces}), (size, size)]:
        # The end is also padded to a multiple of the number of ranks.
        room = padding if start < size else padding + len(parts)
        if start - stand > room:
            raise ContradictionError(
                f"{buffer}: elements {stand} to {start - 1} belong to no named parameter",
                tensor=buffer,
                file=files[0].archive.path,
                got=f"{start - stand} elements",
                want=f"at most {room} of padding",
                next_step="save the whole state dict, with all its names",
            )
        stand = max(stand, stop)


def flat_shards(pieces: FlatPieces, shapes: Mapping[str, tuple[int, ...]]) -> list[StoredShard]:
    """Return every named parameter with its pieces.

    Args:
        pieces: the result of `find_flat_pieces`.
        shapes: global shapes by name, which the format does not record.

    Raises:
        IncompleteError: pieces of a parameter are missing.
        ContradictionError: its ranks disagree about its type.
        LayoutError: shapes are unknown; the error lists all such parameters.
    """
    unknown = {name: _extent(name, own) for name, own in pieces.by_name.items() if name not in shapes}
    if unknown:
        name, (start, stop) = next(iter(unknown.items()))
        more = likewise_text([other for other in unknown if other != name])
        raise LayoutError(
            f"{name}: a flat parameter contains its elements but not its shape{more}",
            tensor=name,
            file=pieces.by_name[name][0].held.file,
            got=f"{stop - start} elements",
            want="the tensor's whole shape in a base model",
            next_step=f"give {option('base_model', metavar='DIR')}, or save with SHARDED_STATE_DICT or FULL_STATE_DICT",
        )
    return [_shard(name, own, shapes[name]) for name, own in pieces.by_name.items()]


def _extent(name: str, pieces: Sequence[_Piece]) -> tuple[int, int]:
    """Return a parameter's range of its buffer, after checking that its pieces leave no hole."""
    # A set, because replicas repeat a range.
    ranges = sorted({(piece.start, piece.stop) for piece in pieces})
    if len({piece.buffer for piece in pieces}) > 1 or len({piece.held.dtype for piece in pieces}) > 1:
        first, other = pieces[0], next(p for p in pieces if (p.buffer, p.held.dtype) != _kind(pieces[0]))
        raise other.held.contradiction(
            name,
            f"ranks {first.held.rank} and {other.held.rank} disagree about its flat parameter or its type",
            got=str((other.buffer, other.held.dtype)),
            want=str(_kind(first)),
            next_step="all ranks must come from one run; save again",
        )
    stand = ranges[0][0]
    for start, stop in ranges:
        if start != stand:
            raise IncompleteError(
                f"{name}: elements {stand} to {start - 1} of {pieces[0].buffer} are on no rank",
                tensor=name,
                file=pieces[0].held.file,
                got=ranks_text(piece.held.rank for piece in pieces),
                want="a piece on every rank in between",
                next_step="save the state dict of all ranks again",
            )
        stand = stop
    return ranges[0][0], stand


def _kind(piece: _Piece) -> tuple[str, str]:
    return piece.buffer, piece.held.dtype


def _shard(name: str, pieces: Sequence[_Piece], shape: tuple[int, ...]) -> StoredShard:
    first, stop = _extent(name, pieces)
    if prod(shape) != stop - first:
        raise LayoutError(
            f"{name}: the base model's shape does not fit the number of elements in the flat parameter",
            tensor=name,
            file=pieces[0].held.file,
            got=f"{stop - first} elements",
            want=f"{prod(shape)}, for the shape {list(shape)}",
            next_step="give the base model that was trained",
        )
    nests = []
    for piece in pieces:
        count = piece.stop - piece.start
        nests.append((Nest(0, piece.start - first, ((count, 1, 1),) if count > 1 else ()),))
    return pieces_of(name, [piece.held for piece in pieces], shape, nests)


def make_nameless_error(buffer: str, file: FsdpRankFile) -> LayoutError:
    """Return the error for a buffer whose members' names and shapes are not recorded."""
    return LayoutError(
        f"{buffer}: a flat parameter that records neither names nor shapes of its members",
        tensor=buffer,
        file=file.archive.path,
        rank=file.rank,
        got=f"{file.sharded[buffer].shape[0]} elements",
        want="parameters by name",
        next_step="save with SHARDED_STATE_DICT or FULL_STATE_DICT (load it into the same model first), or give a rule "
        f'like "{buffer}" = "flat(a [7, 10], b [7])/~fsdp" by {option("layouts", metavar="FILE")}',
    )
