"""The two context managers: tensors, or configs, of many ranks on the first of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from xrank.errors import UsageError
from xrank.gather.sessions import gathered

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["get_configs_parallel", "get_tensors_parallel"]


def get_tensors_parallel(
    tensor: torch.Tensor | Sequence[torch.Tensor | None] | Mapping[str, torch.Tensor | None] | None,
    ranks: Sequence[int],
    group: ProcessGroup | None = None,
    *,
    workspace_path: str | os.PathLike[str] | None = None,
    timeout_seconds: float = 1800,
    early_exit: bool = False,
    key: str | None = None,
) -> AbstractContextManager[list[Any]]:
    """Gather tensors of several ranks on the first of them.

    The first of `ranks` gets a list in the order of `ranks`; position is rank, and None keeps its place. The others,
    and ranks not in `ranks`, which need not even call, get an empty list. What is yielded is the caller's: plain,
    detached, writable CPU tensors that stay valid after the body; the first rank's own part shares memory with what it
    passed in. All ranks leave together, when all bodies have ended well.

    Args:
        tensor: this rank's tensor; or a list or dict of tensors, in one exchange. Any dtype and strides, any device.
        ranks: global ranks, the one that gathers first; each once.
        group: a process group that spans them, whose store they meet through; None is the world. No collective is
            called on it.
        workspace_path: a directory that all ranks mount, for ranks of several hosts; None goes through shared memory.
        timeout_seconds: how long ranks may take to come, and to end their bodies after the first rank's. Whatever it
            says, a death is noticed within 2 seconds, on another host within 15.
        early_exit: whether this rank, if it is not the first, may leave as soon as the first has its tensors.
        key: what is gathered, in words of the caller's; all ranks must say the same.

    Raises:
        RankFailedError: another rank raised, in the call or its body, or died.
        RankTimeoutError: a rank did not come in time; `waiting_for` names it.
        ContradictionError: a rank made another call.
        UsageError: repeated ranks, a value that can't be sent, ranks of several hosts without `workspace_path`.
        NoSpaceError: there is no memory, or no space in the directory, for the tensors.
    """
    return gathered(
        "get_tensors_parallel",
        tensor,
        ranks,
        group,
        workspace_path=workspace_path,
        timeout_seconds=timeout_seconds,
        early_exit=early_exit,
        key=key,
        check=_check_kind,
    )


def get_configs_parallel(
    config: object,
    ranks: Sequence[int],
    group: ProcessGroup | None,
    workspace_path: str | os.PathLike[str] | None = None,
    *,
    timeout_seconds: float = 1800,
    early_exit: bool = False,
    key: str | None = None,
) -> AbstractContextManager[list[Any]]:
    """Gather configs: None, dicts, lists, tuples, dataclasses, enums, paths, dtypes, with tensors anywhere.

    As `get_tensors_parallel`. Tensors that are one stay one. Dataclasses are found by name among the modules that the
    first rank has imported; nothing is imported and nothing is unpickled.
    """
    return gathered(
        "get_configs_parallel",
        config,
        ranks,
        group,
        workspace_path=workspace_path,
        timeout_seconds=timeout_seconds,
        early_exit=early_exit,
        key=key,
    )


def _check_kind(tensor: object) -> None:
    import torch

    parts: Sequence[object]
    if isinstance(tensor, Mapping):
        parts = list(tensor.values())
        if not all(isinstance(name, str) for name in tensor):
            raise UsageError("the names of tensors are texts", got=", ".join(map(repr, tensor))[:200])
    elif isinstance(tensor, list | tuple):
        parts = tensor
    else:
        parts = [tensor]
    for part in parts:
        if part is not None and not isinstance(part, torch.Tensor):
            raise UsageError(
                f"a {type(part).__name__} is no tensor",
                got=type(part).__name__,
                want="a tensor, or a list or dict of tensors and None",
                next_step="gather other values with get_configs_parallel",
            )
