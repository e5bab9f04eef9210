"""Finds the files of one model in a folder, one per rank, by their names alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from xrank.errors import AGAIN, ContradictionError, IncompleteError, UsageError, XrankError
from xrank.formats.regular_file import open_regular
from xrank.stores import places
from xrank.words import list_text, ranks_text

# verl/utils/checkpoint/fsdp_checkpoint_manager.py: save_checkpoint; SkyRL uses the same names.
_VERL = re.compile(r"model_world_size_([1-9]\d{0,8})_rank_(0|[1-9]\d{0,8})\.pt")
_VERL_OTHERS = re.compile(r"(optim|extra_state)_world_size_\d+_rank_\d+\.pt")
_VERL_CONFIG = "fsdp_config.json"
# accelerate/utils/fsdp_utils.py: save_fsdp_model. The number is the model's; LOCAL_STATE_DICT omits a 0.
_ACCELERATE = re.compile(r"pytorch_model_fsdp(?:_(0|[1-9]\d{0,4}))?_rank(0|[1-9]\d{0,8})\.bin")
_MAX_CONFIG_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one model."""

    folder: str
    by_rank: dict[int, str] = field(default_factory=dict)
    """Paths, by rising rank."""
    world_size: int | None = None
    """World size in the names; None if they do not contain it."""
    skipped: tuple[str, ...] = ()
    """Paths of the trainer's own files: optimizer, schedules."""

    def check(self, world_size: int) -> None:
        """Check that exactly the ranks of a world wrote files.

        Raises:
            IncompleteError: ranks are missing.
            ContradictionError: there are more ranks.
        """
        beyond = [rank for rank in self.by_rank if rank >= world_size]
        if beyond:
            file = self.by_rank[beyond[0]]
            raise ContradictionError(
                f"{file} belongs to rank {beyond[0]}, but the run has {world_size} ranks",
                rank=beyond[0],
                file=file,
                got=ranks_text(self.by_rank),
                want=f"ranks 0 to {world_size - 1}",
                next_step=f"move the files of another run to another folder, then {AGAIN}",
            )
        # A name may claim any number of ranks, so count the present ranks, not the absent ones.
        if len(self.by_rank) == world_size:
            return
        first = next(rank for rank in range(world_size) if rank not in self.by_rank)
        file = os.path.join(self.folder, self._name_of(first))
        count = world_size - len(self.by_rank)
        raise IncompleteError(
            f"rank {first} of {world_size} left no {os.path.basename(file)} in {self.folder}"
            + (f", nor did {count - 1} more ranks" if count > 1 else ""),
            rank=first,
            file=file,
            got=f"files of {ranks_text(self.by_rank)}",
            want=f"files of all {world_size} ranks",
            next_step=f"copy {os.path.basename(file)} from the node of rank {first}, then {AGAIN}",
        )

    def _name_of(self, rank: int) -> str:
        other, path = next(iter(self.by_rank.items()))
        return re.sub(rf"(rank_?|_){other}\.", rf"\g<1>{rank}.", os.path.basename(path))


@dataclass(frozen=True, slots=True)
class Scheme:
    """Naming scheme of a folder's files."""

    format: str
    pattern: re.Pattern[str]
    example: str

    def check_name(self, path: str, saved_as: str, rank: int) -> None:
        """Check that a file has the name under which it was saved, if that is a name of this scheme.

        Raises:
            ContradictionError: it is another rank's or run's file, copied or renamed.
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

    def explain_mismatch(self, path: str) -> str | None:
        """Return None if the folder contains such files, otherwise the reason against it."""
        if not places.is_folder(path):
            return "not a folder"
        if any(self.pattern.fullmatch(entry) for entry in places.list_names(path)):
            return None
        return f"no {self.example} in it"


VERL = Scheme("verl", _VERL, "model_world_size_<N>_rank_<r>.pt")
ACCELERATE = Scheme("accelerate-ranks", _ACCELERATE, "pytorch_model_fsdp_rank<r>.bin")


def list_verl(folder: str) -> RankFiles:
    """Return the model's files in a folder of verl's or SkyRL's.

    Raises:
        ContradictionError: the folder contains files of several worlds, or ``fsdp_config.json`` records another one.
        IncompleteError: a rank is missing.
    """
    entries = sorted(places.list_names(folder))
    worlds: dict[int, dict[int, str]] = {}
    for entry in entries:
        match = _VERL.fullmatch(entry)
        if match is not None:
            worlds.setdefault(int(match[1]), {})[int(match[2])] = os.path.join(folder, entry)
    if not worlds:
        raise _empty_error(folder, VERL)
    recorded = _read_world_size(folder)
    if len(worlds) > 1 or (recorded is not None and recorded not in worlds):
        file = next(iter(worlds[max(worlds)].values())) if recorded is None or len(worlds) > 1 else _config(folder)
        found = "; ".join(f"world of {n}: {ranks_text(ranks)}" for n, ranks in sorted(worlds.items()))
        raise ContradictionError(
            f"{file} belongs to another run than other files beside it",
            file=file,
            got=found + (f"; {_VERL_CONFIG}: world of {recorded}" if recorded is not None else ""),
            want="one world size",
            next_step=f"move the files of another run to another folder, then {AGAIN}",
        )
    ((world_size, by_rank),) = worlds.items()
    files = RankFiles(folder, dict(sorted(by_rank.items())), world_size, _paths(folder, entries, _VERL_OTHERS))
    files.check(world_size)
    return files


def _paths(folder: str, entries: Iterable[str], pattern: re.Pattern[str]) -> tuple[str, ...]:
    return tuple(os.path.join(folder, entry) for entry in entries if pattern.fullmatch(entry))


def _config(folder: str) -> str:
    return os.path.join(folder, _VERL_CONFIG)


def _read_world_size(folder: str) -> int | None:
    """Return the world size in ``fsdp_config.json``; None without a readable one, as in older verl."""
    try:
        with open_regular(_config(folder)) as file:
            content = json.loads(file.read(0, min(file.nbytes, _MAX_CONFIG_NBYTES)))
    except (XrankError, ValueError, RecursionError):
        return None
    size = content.get("world_size") if isinstance(content, dict) else None
    return size if type(size) is int else None


def list_accelerate(path: str) -> RankFiles:
    """Return the files of the one model in a folder of accelerate's, or of the model to which a given file belongs.

    Raises:
        UsageError: the folder contains several models.
        IncompleteError: a rank below the last one is missing.
    """
    folder = path if places.is_folder(path) else os.path.dirname(places.absolute(path))
    models: dict[str, dict[int, str]] = {}
    for entry in sorted(places.list_names(folder)):
        match = _ACCELERATE.fullmatch(entry)
        if match is not None:
            models.setdefault(match[1] or "", {})[int(match[2])] = os.path.join(folder, entry)
    if not models:
        raise _empty_error(folder, ACCELERATE)
    if path != folder:
        named = _ACCELERATE.fullmatch(os.path.basename(path))
        models = {k: ranks for k, ranks in models.items() if named is not None and k == (named[1] or "")} or models
    if len(models) > 1:
        files = [next(iter(ranks.values())) for _, ranks in sorted(models.items())]
        raise UsageError(
            f"{folder} contains {len(models)} models",
            file=folder,
            got=list_text(map(os.path.basename, files), 10),
            want="one",
            next_step=f"give the path of a file of one model, such as {files[0]}",
        )
    ((_, by_rank),) = models.items()
    found = RankFiles(folder, dict(sorted(by_rank.items())))
    found.check(max(by_rank) + 1)
    return found


def _empty_error(folder: str, scheme: Scheme) -> IncompleteError:
    return IncompleteError(
        f"no rank left a file in {folder}", file=folder, want=scheme.example, next_step="check the path"
    )
