"""Reads one rank's file of a legacy Megatron checkpoint, and checks that it is that rank's file of that run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from xrank.errors import ContradictionError
from xrank.formats.pickles import inert_error
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.readers.copies import CopiedValues
from xrank.readers.megatron.args import ParallelSizes, parallel_sizes, plain_args
from xrank.readers.megatron.grid import Place
from xrank.words import list_text

EXTRA_STATE = "_extra_state"
_VERSION = 3.0
_CHUNK = re.compile(r"model(0|[1-9]\d{0,3})", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class MegatronRankFile:
    """Content of a rank's file."""

    archive: TorchArchive
    origin: Origin
    args: Mapping[str, Any]
    iteration: object
    chunks: tuple[Mapping[str, ArchivedTensor], ...]
    """The tensors of each virtual chunk, by the rank's names."""
    num_extra: int
    """Number of Transformer Engine's own entries in the state, which are not tensors."""


def read_rank_file(path: str, rank: int) -> MegatronRankFile:
    """Return the content of a rank's file, from its metadata alone.

    Raises:
        CorruptError, UnsafeError: it is damaged, or contains objects that only code can make.
        UsageError: Megatron-core does not write files of this kind.
    """
    archive = read_archive(path, rank=rank)
    origin, state = Origin(path, rank), archive.value
    if not isinstance(state, dict):
        raise inert_error(state, origin)
    args = plain_args(state.get("args"), origin)
    if args is None:
        raise origin.corrupt("contains no args", got=_keys(state), want='a dict with "args" and "model"')
    version = state.get("checkpoint_version")
    if version != _VERSION:
        raise origin.usage(
            "has another version of the format",
            got=f"checkpoint_version {quote(str(version))}",
            want=str(_VERSION),
            next_step="load and save it once with a newer Megatron",
        )
    sizes = parallel_sizes(args, origin)
    found = {int(match[1]): key for key in state if isinstance(key, str) and (match := _CHUNK.fullmatch(key))}
    keys = [found[number] for number in sorted(found)] if sizes.virtual > 1 else ["model"]
    if (sizes.virtual > 1 and sorted(found) != list(range(sizes.virtual))) or not all(key in state for key in keys):
        want = f"model0 to model{sizes.virtual - 1}" if sizes.virtual > 1 else "model"
        raise origin.corrupt("lacks chunks that its args require", got=_keys(state), want=want)
    chunks, num_extra = [], 0
    for key in keys:
        tensors, extra = _tensors(state[key], origin)
        chunks.append(tensors)
        num_extra += extra
    return MegatronRankFile(archive, origin, args, state.get("iteration"), tuple(chunks), num_extra)


def _keys(state: Mapping[object, object]) -> str:
    return list_text((quote(str(key))[1:-1] for key in state), 12)


def _tensors(module: object, origin: Origin) -> tuple[dict[str, ArchivedTensor], int]:
    if not isinstance(module, dict):
        raise inert_error(module, origin, "its model")
    tensors, num_extra = {}, 0
    for name, value in module.items():
        if not isinstance(name, str):
            raise origin.corrupt("its model has a name that is not a text", got=type(name).__name__)
        if name.endswith(EXTRA_STATE):
            num_extra += 1
        elif isinstance(value, ArchivedTensor):
            tensors[name] = value
        elif isinstance(value, dict):
            raise origin.usage(
                f"{quote(name)[1:-1]} is a nested module: the model is older than Megatron-core",
                got="nested dicts",
                want="tensors by full names",
                next_step="load it with --use-legacy-models and save it as a Megatron-core model",
            )
        else:
            error = inert_error(value, origin, quote(name)[1:-1])
            error.about(tensor=name)
            raise error
    return tensors, num_extra


def check_identities(
    files: Mapping[Place, MegatronRankFile], sizes: ParallelSizes, own: Mapping[Place, Sequence[ArchivedTensor]]
) -> None:
    """Check that each file is its own rank's: by the rank in its args, else by its bytes.

    Args:
        files: all files.
        sizes: the run's sizes.
        own: for each file the tensors of which no other file has the same part.

    Raises:
        ContradictionError: a file is another rank's.
    """
    recorded = {place: file.args.get("rank") for place, file in files.items()}
    # A converter writes the same rank into all files, so equal ranks prove nothing.
    if len(files) > 1 and len({repr(rank) for rank in recorded.values()}) > 1:
        seen: set[object] = set()
        for place, rank in recorded.items():
            if type(rank) is not int or rank in seen or not _fits(rank, place, sizes, files[place].args):
                raise ContradictionError(
                    files[place].origin.locate("is another rank's file, or several runs' files are mixed"),
                    rank=files[place].origin.rank,
                    file=files[place].origin.path,
                    got=f"args.rank {quote(str(rank))}",
                    want=f"a rank that fits TP {place.tensor}, PP {place.pipeline}, EP {place.expert} of {sizes}",
                    next_step=f"copy {place.folder(sizes)} again from where it was written",
                )
            seen.add(rank)
        return
    copies = CopiedValues()
    for place, file in files.items():
        tensors = own.get(place, ())
        copies.add(file.archive, tensors, sum(prod(tensor.shape) for tensor in tensors), file.origin)


def _fits(rank: int, place: Place, sizes: ParallelSizes, args: Mapping[str, Any]) -> bool:
    """Return whether a rank of the run may be at that place (megatron/core/parallel_state.py: the order of ranks)."""
    if rank % sizes.tensor != place.tensor:
        return False
    # Experts come next, with their own tensor parallelism; old versions counted context-parallel ranks before them.
    widths = {sizes.expert_tensor, sizes.tensor * sizes.context}
    if place.expert not in {rank // width % sizes.expert for width in widths}:
        return False
    if args.get("use_tp_pp_dp_mapping"):
        return rank // (sizes.tensor * sizes.context) % sizes.pipeline == place.pipeline
    # Otherwise stages vary slowest.
    if sizes.world is None or sizes.world % sizes.pipeline:
        return True
    return rank // (sizes.world // sizes.pipeline) == place.pipeline
