"""One rank's file of a legacy Megatron checkpoint: its model's chunks, and what tells whose and of which run it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from xrank.errors import ContradictionError
from xrank.formats.inert_record import InertRecord
from xrank.formats.regular_file import Origin, shown
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.readers.copies import Copies
from xrank.readers.megatron.args import ParallelSizes, parallel_sizes, plain_args
from xrank.readers.megatron.grid import Place
from xrank.words import list_text

__all__ = ["EXTRA_STATE", "RankFile", "check_identities", "read_rank_file"]

EXTRA_STATE = "_extra_state"
_VERSION = 3.0
_CHUNK = re.compile(r"model(0|[1-9]\d{0,3})", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class RankFile:
    """What a rank left."""

    archive: TorchArchive
    origin: Origin
    args: Mapping[str, Any]
    iteration: object
    chunks: tuple[Mapping[str, ArchivedTensor], ...]
    """The tensors of each virtual chunk, by the names that the rank has for them."""
    num_extra: int
    """Entries of the state that are no tensors, but Transformer Engine's own."""


def read_rank_file(path: str, rank: int) -> RankFile:
    """Return what a rank's file holds, by its metadata alone.

    Raises:
        CorruptError, UnsafeError: it is damaged, or holds what only code can make.
        UsageError: it is of another kind than those that Megatron-core writes.
    """
    archive = read_archive(path, rank=rank)
    origin, state = Origin(path, rank), archive.value
    if not isinstance(state, dict):
        raise origin.unsafe("holds something else than a dict", got=repr(state)[:100])
    args = plain_args(state.get("args"), origin)
    if args is None:
        raise origin.corrupt("holds no args", got=_keys(state), want='a dict with "args" and "model"')
    version = state.get("checkpoint_version")
    if version != _VERSION:
        raise origin.usage(
            "is of another version of the format",
            got=f"checkpoint_version {shown(str(version))}",
            want=str(_VERSION),
            next_step="load and save it once with a newer Megatron",
        )
    sizes = parallel_sizes(args, origin)
    found = {int(match[1]): key for key in state if isinstance(key, str) and (match := _CHUNK.fullmatch(key))}
    keys = [found[number] for number in sorted(found)] if sizes.virtual > 1 else ["model"]
    if (sizes.virtual > 1 and sorted(found) != list(range(sizes.virtual))) or not all(key in state for key in keys):
        want = f"model0 to model{sizes.virtual - 1}" if sizes.virtual > 1 else "model"
        raise origin.corrupt("does not hold the chunks that its args tell", got=_keys(state), want=want)
    chunks, num_extra = [], 0
    for key in keys:
        tensors, extra = _tensors(state[key], origin)
        chunks.append(tensors)
        num_extra += extra
    return RankFile(archive, origin, args, state.get("iteration"), tuple(chunks), num_extra)


def _keys(state: Mapping[object, object]) -> str:
    return list_text((shown(str(key))[1:-1] for key in state), 12)


def _tensors(module: object, origin: Origin) -> tuple[dict[str, ArchivedTensor], int]:
    if isinstance(module, InertRecord):
        raise origin.unsafe("its model is an object that only running code can make", got=repr(module))
    if not isinstance(module, dict):
        raise origin.corrupt("its model is no table of tensors", got=type(module).__name__)
    tensors, num_extra = {}, 0
    for name, value in module.items():
        if not isinstance(name, str):
            raise origin.corrupt("its model has a name that is no text", got=type(name).__name__)
        if name.endswith(EXTRA_STATE):
            num_extra += 1
        elif isinstance(value, ArchivedTensor):
            tensors[name] = value
        elif isinstance(value, dict):
            raise origin.usage(
                f"{shown(name)[1:-1]} is a nested module: a model of the time before Megatron-core",
                got="nested dicts",
                want="tensors by full names",
                next_step="load it with --use-legacy-models and save it as one of Megatron-core's",
            )
        else:
            error = origin.unsafe(f"{shown(name)[1:-1]} is no tensor", got=repr(value)[:100])
            error.about(tensor=name)
            raise error
    return tensors, num_extra


def check_identities(
    files: Mapping[Place, RankFile], sizes: ParallelSizes, own: Mapping[Place, Sequence[ArchivedTensor]]
) -> None:
    """Check that each file is its own rank's, as far as there is evidence: the rank in its args, else its bytes.

    Args:
        files: all files.
        sizes: of the run.
        own: for each file the tensors of which no other file has the same part.

    Raises:
        ContradictionError: a file is another rank's.
    """
    told = {place: file.args.get("rank") for place, file in files.items()}
    # A converter leaves the same rank in all files.
    if len(files) > 1 and len({repr(rank) for rank in told.values()}) > 1:
        seen: set[object] = set()
        for place, rank in told.items():
            if type(rank) is not int or rank in seen or not _fits(rank, place, sizes, files[place].args):
                raise ContradictionError(
                    files[place].origin.named("is another rank's file, or several runs' files are mixed"),
                    rank=files[place].origin.rank,
                    file=files[place].origin.path,
                    got=f"args.rank {shown(str(rank))}",
                    want=f"a rank of its own, TP {place.tensor}, PP {place.pipeline}, EP {place.expert} of {sizes}",
                    next_step=f"copy {place.folder(sizes)} again from where it was written",
                )
            seen.add(rank)
        return
    copies = Copies()
    for place, file in files.items():
        tensors = own.get(place, ())
        copies.add(file.archive, tensors, sum(prod(tensor.shape) for tensor in tensors), file.origin)


def _fits(rank: int, place: Place, sizes: ParallelSizes, args: Mapping[str, Any]) -> bool:
    """Say whether a rank of the run may be at that place (megatron/core/parallel_state.py: the order of ranks)."""
    if rank % sizes.tensor != place.tensor:
        return False
    # Experts come next, with their own tensor parallelism; old versions counted context-parallel ranks before them.
    widths = {sizes.expert_tensor, sizes.tensor * sizes.context}
    if place.expert not in {rank // width % sizes.expert for width in widths}:
        return False
    if args.get("use_tp_pp_dp_mapping"):
        return rank // (sizes.tensor * sizes.context) % sizes.pipeline == place.pipeline
    # Stages last.
    if sizes.world is None or sizes.world % sizes.pipeline:
        return True
    return rank // (sizes.world // sizes.pipeline) == place.pipeline
