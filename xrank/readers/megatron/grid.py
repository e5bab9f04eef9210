"""The files of a legacy Megatron checkpoint: one per tensor-parallel, pipeline and expert rank.

``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt``: after TT comes the pipeline rank if there are pipeline stages, then the
expert rank if there are expert ranks (megatron/training/checkpointing.py: get_checkpoint_name). Data-parallel ranks
write no files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xrank.errors import AGAIN, ContradictionError, IncompleteError, UsageError
from xrank.readers.megatron.args import ParallelSizes
from xrank.stores import places
from xrank.words import list_text

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?(?:_(\d{3,6}))?", re.ASCII)
_MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Place of a file's rank in the grid; places sort like the ranks of a run without data parallelism."""

    pipeline: int
    expert: int
    tensor: int

    def rank(self, sizes: ParallelSizes) -> int:
        """Return the rank's number; tensor-parallel ranks vary fastest."""
        return self.tensor + sizes.tensor * (self.expert + sizes.expert * self.pipeline)

    def folder(self, sizes: ParallelSizes) -> str:
        """Return the name of the rank's folder."""
        name = f"mp_rank_{self.tensor:02d}"
        if sizes.pipeline > 1:
            name += f"_{self.pipeline:03d}"
        return f"{name}_{self.expert:03d}" if sizes.expert > 1 else name


def list_folders(folder: str) -> list[str]:
    """Return the names of the ranks' folders in a checkpoint."""
    return sorted(
        entry
        for entry in places.list_names(folder)
        if _FOLDER.fullmatch(entry) and places.is_folder(os.path.join(folder, entry))
    )


def places_of(sizes: ParallelSizes, folder: str) -> tuple[Place, ...]:
    """Return the places for which a run writes files.

    Raises:
        UsageError: experts are cut in an unknown way, or in one in which files of this format overwrite each other.
    """
    if sizes.tensor * sizes.pipeline * sizes.expert > _MAX_RANKS:
        raise UsageError(
            f"{folder}: its args record more than a million ranks",
            file=folder,
            got=str(sizes),
            next_step="copy the folder again from where it was written",
        )
    pairs: Iterable[tuple[int, int]] = (
        (tensor, expert) for tensor in range(sizes.tensor) for expert in range(sizes.expert)
    )
    if sizes.expert > 1 and sizes.expert_tensor != sizes.tensor:
        if sizes.tensor % sizes.expert_tensor or sizes.world is None or sizes.world % sizes.pipeline:
            raise UsageError(
                f"{folder}: its experts are cut over another number of ranks than other layers, which is not supported",
                file=folder,
                got=f"{sizes}, world size {sizes.world}",
                want="ETP that divides TP, and a world size",
                next_step="save with --ckpt-format torch_dist",
            )
        pairs = _list_writers(sizes, sizes.world // sizes.pipeline)
    return tuple(sorted(Place(p, expert, tensor) for tensor, expert in set(pairs) for p in range(sizes.pipeline)))


def _list_writers(sizes: ParallelSizes, stage_size: int) -> Iterable[tuple[int, int]]:
    """Yield tensor and expert ranks of the writers: the first rank of each data-parallel group.

    Dense layers and experts divide the ranks of a stage in two ways (parallel_state.py: RankGenerator); tensor
    parallelism varies fastest in both.
    """
    # The world size comes from a file, which may be damaged: the loop must end.
    for rank in range(min(stage_size, _MAX_RANKS)):
        is_first = rank < sizes.tensor * sizes.context or rank < sizes.expert_tensor * sizes.expert
        if is_first:
            yield rank % sizes.tensor, rank // sizes.expert_tensor % sizes.expert


def check_grid(folder: str, found: Sequence[str], sizes: ParallelSizes, cells: Sequence[Place]) -> None:
    """Check that exactly the files of the run's ranks are present.

    Raises:
        IncompleteError: a rank's file is missing.
        ContradictionError: there are files of ranks beyond the run's.
    """
    wanted = {place.folder(sizes): place for place in cells}
    missing = [name for name in wanted if not places.is_present(os.path.join(folder, name, FILE))]
    if missing:
        place = wanted[missing[0]]
        files = list_text((f"{name}/{FILE}" for name in missing), 3)
        raise IncompleteError(
            f"{files}: not in {folder} (TP {place.tensor}, PP {place.pipeline}, EP {place.expert})",
            rank=place.rank(sizes),
            file=os.path.join(folder, missing[0], FILE),
            got=f"{len(wanted) - len(missing)} files; missing: {list_text(missing, 16)}",
            want=f"{len(wanted)}, for {sizes}",
            next_step=f"copy {missing[0]} from where it was written, then {AGAIN}; nothing was written",
        )
    surplus = [name for name in found if name not in wanted]
    if surplus:
        raise ContradictionError(
            f"{folder} has {surplus[0]}, which is not a rank of this run",
            file=os.path.join(folder, surplus[0]),
            got=list_text(surplus),
            want=f"{len(wanted)} folders for {sizes}",
            next_step="move the folders of another run elsewhere, or give the path of the checkpoint's own folder",
        )


def grid_text(found: Sequence[str], sizes: ParallelSizes, cells: Sequence[Place]) -> list[str]:
    """Return, for display, the tensor-parallel ranks with and without files, by stage and expert rank."""
    there = set(found)
    rows: dict[tuple[int, int], list[Place]] = {}
    for place in cells:
        rows.setdefault((place.pipeline, place.expert), []).append(place)
    return [
        f"PP {pipeline}, EP {expert}: "
        + ", ".join(f"TP {p.tensor} {'present' if p.folder(sizes) in there else 'missing'}" for p in row)
        for (pipeline, expert), row in sorted(rows.items())
    ]
