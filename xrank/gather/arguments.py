"""Checks of a gather's arguments, and the place of the user's call."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from operator import index
from typing import Any

from xrank.errors import UsageError
from xrank.ranks.deadline import Deadline
from xrank.ranks.store import LaunchedRanks
from xrank.stores.url import clean_path, is_url
from xrank.words import repr_text


def check_ranks(ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of a gather.

    Raises:
        UsageError: they are not different whole numbers.
    """
    try:
        checked = tuple(map(index, ranks))
    except TypeError:
        raise UsageError(
            "the ranks of a gather must be whole numbers",
            got=repr_text(ranks),
            want="a list of global ranks, the gathering one first",
            next_step="give such a list",
        ) from None
    if not checked or len(set(checked)) != len(checked) or min(checked) < 0:
        raise UsageError(
            "the ranks of a gather must be different ranks",
            got=repr_text(list(ranks)),
            want="each rank once, the gathering one first",
            next_step="take repeated ranks out of the list",
        )
    return checked


def check_exist(ranks: tuple[int, ...], world_size: int, group: Any) -> None:
    """Check that the ranks are in the world and in the group: an absent rank would be noticed only at the deadline.

    Args:
        ranks: the ranks of a gather.
        world_size: number of ranks in the world.
        group: a process group, `LaunchedRanks`, or None for the world.

    Raises:
        UsageError: a rank is not there, or the group is not a process group.
    """
    if max(ranks) >= world_size:
        raise UsageError(
            f"there is no rank {repr_text(max(ranks))} in a world of {world_size}",
            rank=max(ranks),
            got=repr_text(list(ranks)),
            want=f"global ranks from 0 to {world_size - 1}",
            next_step="take ranks of this world",
        )
    if group is None or isinstance(group, LaunchedRanks):
        return
    if isinstance(group, int):  # GroupMember.NON_GROUP_MEMBER: result of new_group on a rank outside of the group
        raise UsageError(
            "this rank is not in the group of the gather",
            got=f"group={group}",
            want=f"a group with all of ranks {list(ranks)}",
            next_step="omit the group, or make it with these ranks",
        )
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(group, distributed.ProcessGroup):
        raise UsageError(
            f"the group of a gather must be a process group, not a {type(group).__name__}",
            got=repr_text(group),
            want="a group of torch.distributed.new_group, or None for all ranks",
            next_step="omit the group, or make one with torch.distributed.new_group",
        )
    members = distributed.get_process_group_ranks(group)
    if foreign := [rank for rank in ranks if rank not in members]:
        raise UsageError(
            f"rank {foreign[0]} is not in the group of the gather",
            rank=foreign[0],
            got=f"ranks {list(ranks)}, and a group of ranks {list(members)}"[:300],
            want="a group with all ranks of the gather",
            next_step="omit the group, or make it with these ranks",
        )


def check_key(key: object) -> None:
    """Check the name of a gathered value.

    Raises:
        UsageError: it is not text.
    """
    if key is not None and not isinstance(key, str):
        raise UsageError(
            f"the key of a gather must be text, not a {type(key).__name__}",
            got=repr_text(key),
            want="text that is equal on all ranks, or None",
            next_step="give such a text, for example '.'.join(map(str, key))",
        )


def begin_deadline(timeout_seconds: Any) -> Deadline:
    """Return the deadline of a gather that begins now.

    Raises:
        UsageError: the time limit is not a positive number.
    """
    if isinstance(timeout_seconds, str | bytes) or not hasattr(timeout_seconds, "__float__"):
        raise UsageError(
            f"timeout_seconds must be a number, not a {type(timeout_seconds).__name__}",
            got=repr_text(timeout_seconds),
            want="seconds above 0",
            next_step="give the seconds as a number",
        )
    try:
        return Deadline(float(timeout_seconds))
    except (OverflowError, TypeError) as error:
        raise UsageError(
            f"timeout_seconds cannot be taken as a number of seconds: {error}",
            got=repr_text(timeout_seconds),
            want="seconds above 0",
            next_step="give fewer seconds",
        ) from None


def path_of(workspace_path: str | os.PathLike[str] | None) -> str | None:
    """Return the directory of a gather as an absolute path, or its URL in a store.

    Raises:
        UsageError: it is neither.
    """
    if workspace_path is None:
        return None
    if not isinstance(workspace_path, str | os.PathLike):
        raise UsageError(
            f"workspace_path must be a path, not a {type(workspace_path).__name__}",
            got=repr_text(workspace_path),
            want="a directory that all ranks mount, s3://bucket/prefix, or None",
            next_step="give its path",
        )
    path = clean_path(workspace_path)
    if is_url(path):
        from xrank.workspace.object_place import ObjectPlace  # directories do not need this module

        return ObjectPlace.from_url(path).url
    return os.path.abspath(path)


_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def find_place() -> tuple[str, int]:
    """Return file and line of the user's call: the first frame outside this package and contextlib."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
