"""The two context managers that gather tensors or configs of many ranks on the first of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from xrank.errors import UsageError, require
from xrank.ranks.gathering import Gather, keep_uncompiled

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@keep_uncompiled
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

    The first of `ranks` gets a list in the order of `ranks`; None keeps its place. The other ranks get an empty list.
    Ranks that are not in `ranks` also get an empty list, and need not call. The caller owns the yielded tensors: plain,
    detached, writable CPU tensors that stay valid after the body; the first rank's own part shares memory with its
    argument. All ranks leave together, after all bodies have ended well.

    Args:
        tensor: this rank's tensor; or a list or dict of tensors, in one exchange. Any dtype, strides and device.
        ranks: global ranks, the gathering one first; each once.
        group: a process group that contains them, whose store they meet through; None is the world. No collective is
            called on it.
        workspace_path: a directory that all ranks mount; None uses shared memory on one host, and sockets across hosts.
        timeout_seconds: time for ranks to arrive, and to end their bodies after the first rank's. A death is noticed
            within 2 seconds in any case, on another host within 15.
        early_exit: whether this rank, if it is not the first, may leave as soon as the first has its tensors.
        key: a name of the gathered value, equal on all ranks.

    Raises:
        RankFailedError: another rank raised, in the call or its body, or died.
        RankTimeoutError: a rank did not arrive in time; `waiting_for` names it.
        ContradictionError: a rank made another call.
        UsageError: repeated ranks, a value that cannot be sent.
        NoSpaceError: memory, or space in the directory, does not suffice for the tensors.

    Example:
        >>> import torch
        >>> import xrank
        >>> with xrank.get_tensors_parallel(torch.ones(2), ranks=[0]) as parts:
        ...     [part.tolist() for part in parts]
        [[1.0, 1.0]]
    """
    if "torch" not in sys.modules:
        require("torch", "get_tensors_parallel")
    return Gather(
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


@keep_uncompiled
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
    """Gather configs: None, containers, dataclasses, pydantic's models, enums, paths, dtypes, with tensors anywhere.

    Arguments and errors are those of `get_tensors_parallel`. Every value comes back with its own class and all of its
    attributes, also those that are not fields, or a UsageError names the part that cannot be sent. Views of one tensor
    stay one tensor. Classes are found by name among the modules that the first rank has imported. Nothing is imported
    or unpickled, and no method of a sent class is called.

    Example:
        >>> import xrank
        >>> with xrank.get_configs_parallel({"layers": 2}, [0], None) as configs:
        ...     configs
        [{'layers': 2}]
    """
    return Gather(
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

    if type(tensor) is torch.Tensor:
        return
    parts: Sequence[object]
    if isinstance(tensor, Mapping):
        parts = list(tensor.values())
        if not all(isinstance(name, str) for name in tensor):
            raise UsageError(
                "names of tensors must be text", got=", ".join(map(repr, tensor))[:200], want="text for keys"
            )
    elif isinstance(tensor, list | tuple):
        parts = tensor
    else:
        parts = [tensor]
    for part in parts:
        if part is not None and not isinstance(part, torch.Tensor):
            want = "a tensor, or a list or dict of tensors and None; get_configs_parallel gathers other values"
            raise UsageError(f"a {type(part).__name__} is not a tensor", want=want)
