"""The files of torch's Hugging Face shards: a grid by rank and file, possibly with holes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from xrank.errors import ContradictionError, IncompleteError
from xrank.readers.advice import ONE_SAVE
from xrank.stores import places
from xrank.words import ranks_text

_NAME = re.compile(r"shard-(\d{5,9})-model-(\d{5,9})-of-(\d{5,9})\.safetensors")
_MAX_SHOWN = 20


def is_shard_name(name: str) -> bool:
    """Return whether a file of that name contains pieces, not whole tensors."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """The files that are present."""

    folder: str
    files: Mapping[tuple[int, int], str]
    """(rank, file), both from 1 -> path."""
    num_files: int
    num_ranks: int | None = None
    """Number of ranks that saved, as the user states it; None: it is not known."""

    @property
    def ranks(self) -> list[int]:
        """Ranks with a file, from 1."""
        return sorted({rank for rank, _ in self.files})

    def holes(self) -> list[str]:
        """Return the paths of files that may be missing; a rank without a piece for a file writes none."""
        # A name may claim any rank and number of files, so the list ends at what can be shown.
        absent = (
            self._name(rank, number)
            for rank in range(1, (self.num_ranks or max(self.ranks)) + 1)
            for number in range(1, self.num_files + 1)
            if (rank, number) not in self.files
        )
        return list(islice(absent, _MAX_SHOWN))

    def _name(self, rank: int, number: int) -> str:
        return os.path.join(self.folder, f"shard-{rank:05d}-model-{number:05d}-of-{self.num_files:05d}.safetensors")

    def text(self) -> str:
        """Return a short description of the ranks that wrote files."""
        holes = [os.path.basename(file) for file in self.holes()]
        text = f"files of {ranks_text(self.ranks)} (from 1)"
        return text + (f", without {', '.join(holes[:3])}{' and more' if len(holes) > 3 else ''}" if holes else "")


def shard_grid(folder: str) -> ShardGrid:
    """Return the shards in a folder.

    Raises:
        IncompleteError: the folder contains no shard.
        ContradictionError: they belong to several saves.
    """
    worlds: dict[int, dict[tuple[int, int], str]] = {}
    for entry in sorted(places.list_names(folder) if places.is_folder(folder) else []):
        match = _NAME.fullmatch(entry)
        if match is not None:
            rank, number, count = map(int, match.groups())
            if rank < 1 or not 1 <= number <= count:
                raise ContradictionError(
                    f"{entry}: its name has an impossible rank or file number",
                    file=os.path.join(folder, entry),
                    got=f"rank {rank}, file {number} of {count}",
                    want="numbers from 1",
                    next_step=ONE_SAVE,
                )
            worlds.setdefault(count, {})[rank, number] = os.path.join(folder, entry)
    if not worlds:
        raise IncompleteError(
            f"{folder} contains no shards", file=folder, want="shard-*.safetensors", next_step="check the path"
        )
    if len(worlds) > 1:
        few = min(worlds.values(), key=len)
        file = next(iter(few.values()))
        raise ContradictionError(
            f"{os.path.basename(file)} belongs to another save than the files beside it in {folder}",
            file=file,
            got="; ".join(f"{len(files)} files of -of-{count:05d}" for count, files in sorted(worlds.items())),
            want="files of one save",
            next_step=ONE_SAVE,
        )
    ((count, files),) = worlds.items()
    return ShardGrid(folder, files, count)
