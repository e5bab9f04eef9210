"""Which files of a folder are one model's, one for each rank: by their names alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from xrank.errors import ContradictionError, IncompleteError, UsageError, XrankError
from xrank.formats.regular_file import open_regular
from xrank.words import list_text, ranks_text

__all__ = ["RankFiles", "Scheme", "list_accelerate", "list_verl"]

# verl/utils/checkpoint/fsdp_checkpoint_manager.py: save_checkpoint; SkyRL has taken over the names.
_VERL = re.compile(r"model_world_size_([1-9]\d{0,8})_rank_(0|[1-9]\d{0,8})\.pt")
_VERL_OTHERS = re.compile(r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt")
_VERL_CONFIG = "fsdp_config.json"
# accelerate/utils/fsdp_utils.py: save_fsdp_model. The number is the model's, and LOCAL_STATE_DICT leaves a 0 out.
_ACCELERATE = re.compile(r"pytorch_model_fsdp(?:_(0|[1-9]\d{0,4}))?_rank(0|[1-9]\d{0,8})\.bin")
_MAX_CONFIG_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one model."""

    folder: str
    by_rank: dict[int, str] = field(default_factory=dict)
    """Paths, by rising rank."""
    world_size: int | None = None
    """As the names tell it; None where they do not."""
    skipped: tuple[str, ...] = ()
    """Paths of what is the trainer's own: optimizer, schedules."""

    def check(self, world_size: int) -> None:
        """Check that every rank of a world left its file, and nobody else did.

        Raises:
            IncompleteError: ranks are missing.
            ContradictionError: there are more ranks.
        """
        beyond = [rank for rank in self.by_rank if rank >= world_size]
        if beyond:
            file = self.by_rank[beyond[0]]
            raise ContradictionError(
                f"{file} is of rank {beyond[0]}, and the run has {world_size} ranks",
                rank=beyond[0],
                file=file,
                got=ranks_text(self.by_rank),
                want=f"ranks 0 to {world_size - 1}",
                next_step="remove the files that another run left, then run the same command",
            )
        # A name may claim any number of ranks: what is absent is told by what is there.
        if len(self.by_rank) == world_size:
            return
        first = next(rank for rank in range(world_size) if rank not in self.by_rank)
        file = os.path.join(self.folder, self._name_of(first))
        count = world_size - len(self.by_rank)
        raise IncompleteError(
            f"rank {first} of {world_size} left no {os.path.basename(file)} in {self.folder}"
            + (f", nor did {count - 1} ranks more" if count > 1 else ""),
            rank=first,
            file=file,
            got=f"files of {ranks_text(self.by_rank)}",
            want=f"of all {world_size} ranks",
            next_step=f"copy {os.path.basename(file)} from the node of rank {first}, then run the same command",
        )

    def _name_of(self, rank: int) -> str:
        other, path = next(iter(self.by_rank.items()))
        return re.sub(rf"(rank_?){other}\.", rf"\g<1>{rank}.", os.path.basename(path))


@dataclass(frozen=True, slots=True)
class Scheme:
    """What the files of a folder are called."""

    format: str
    pattern: re.Pattern[str]
    example: str

    def check_name(self, path: str, saved_as: str, rank: int) -> None:
        """Check that a file stands under the name that it was saved under, where it tells one of this scheme.

        Raises:
            ContradictionError: it is another rank's or run's, copied or renamed.
        """
        stem, suffix = os.path.splitext(os.path.basename(path))
        if saved_as != stem and self.pattern.fullmatch(saved_as + suffix):
            raise ContradictionError(
                f"rank {rank}: {path} was saved under another name",
                rank=rank,
                file=path,
                got=saved_as + suffix,
                want=stem + suffix,
                next_step=f"copy the file of rank {rank} again, or let all ranks write again",
            )

    def why_not(self, path: str) -> str | None:
        """Return None if the folder holds such files, otherwise why it is none."""
        if not os.path.isdir(path):
            return "no folder"
        if any(self.pattern.fullmatch(entry) for entry in os.listdir(path)):
            return None
        return f"no {self.example} in it"


VERL = Scheme("verl", _VERL, "model_world_size_<N>_rank_<r>.pt")
ACCELERATE = Scheme("accelerate-ranks", _ACCELERATE, "pytorch_model_fsdp_rank<r>.bin")
__all__ += ["ACCELERATE", "VERL"]


def list_verl(folder: str) -> RankFiles:
    """Return the model's files in a folder of verl's or SkyRL's.

    Raises:
        ContradictionError: files of several worlds lie there, or ``fsdp_config.json`` tells of another one.
        IncompleteError: a rank is missing.
    """
    entries = sorted(os.listdir(folder))
    worlds: dict[int, dict[int, str]] = {}
    for entry in entries:
        match = _VERL.fullmatch(entry)
        if match is not None:
            worlds.setdefault(int(match[1]), {})[int(match[2])] = os.path.join(folder, entry)
    if not worlds:
        raise _nothing(folder, VERL)
    told = _told_world_size(folder)
    if len(worlds) > 1 or (told is not None and told not in worlds):
        file = next(iter(worlds[max(worlds)].values())) if told is None or len(worlds) > 1 else _config(folder)
        found = "; ".join(f"world of {n}: {ranks_text(ranks)}" for n, ranks in sorted(worlds.items()))
        raise ContradictionError(
            f"{file} is of another run than other files beside it",
            file=file,
            got=found + (f"; {_VERL_CONFIG}: world of {told}" if told is not None else ""),
            want="one world size",
            next_step="remove the files that another run left, then run the same command",
        )
    ((world_size, by_rank),) = worlds.items()
    files = RankFiles(folder, dict(sorted(by_rank.items())), world_size, _paths(folder, entries, _VERL_OTHERS))
    files.check(world_size)
    return files


def _paths(folder: str, entries: Iterable[str], pattern: re.Pattern[str]) -> tuple[str, ...]:
    return tuple(os.path.join(folder, entry) for entry in entries if pattern.fullmatch(entry))


def _config(folder: str) -> str:
    return os.path.join(folder, _VERL_CONFIG)


def _told_world_size(folder: str) -> int | None:
    """Return the world size in ``fsdp_config.json``; None where there is none that can be read, as in older verl."""
    try:
        with open_regular(_config(folder)) as file:
            told = json.loads(file.read(0, min(file.nbytes, _MAX_CONFIG_NBYTES)))
    except (XrankError, ValueError, RecursionError):
        return None
    size = told.get("world_size") if isinstance(told, dict) else None
    return size if type(size) is int else None


def list_accelerate(path: str) -> RankFiles:
    """Return the files of the one model in a folder of accelerate's, or of the model that a file of it belongs to.

    Raises:
        UsageError: several models lie there.
        IncompleteError: a rank below the last one is missing.
    """
    folder = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    models: dict[str, dict[int, str]] = {}
    for entry in sorted(os.listdir(folder)):
        match = _ACCELERATE.fullmatch(entry)
        if match is not None:
            models.setdefault(match[1] or "", {})[int(match[2])] = os.path.join(folder, entry)
    if not models:
        raise _nothing(folder, ACCELERATE)
    if path != folder:
        named = _ACCELERATE.fullmatch(os.path.basename(path))
        models = {k: ranks for k, ranks in models.items() if named is not None and k == (named[1] or "")} or models
    if len(models) > 1:
        files = [next(iter(ranks.values())) for _, ranks in sorted(models.items())]
        raise UsageError(
            f"{folder} holds {len(models)} models",
            file=folder,
            got=list_text(map(os.path.basename, files), 10),
            want="one",
            next_step=f"name a file of the one to take, such as {files[0]}",
        )
    ((_, by_rank),) = models.items()
    found = RankFiles(folder, dict(sorted(by_rank.items())))
    found.check(max(by_rank) + 1)
    return found


def _nothing(folder: str, scheme: Scheme) -> IncompleteError:
    return IncompleteError(
        f"no rank left a file in {folder}", file=folder, want=scheme.example, next_step="check the path"
    )
