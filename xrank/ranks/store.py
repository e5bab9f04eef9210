"""The store through which ranks find each other: small values under names, seen by all ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from xrank.errors import RankFailedError, UsageError

__all__ = ["GroupStore", "LocalStore", "Store", "find_store"]

_PREFIX = "xrank/"


class Store(Protocol):
    """Values by name. Nothing here waits for a value.

    Raises:
        RankFailedError: from every method; the store is gone, and with it the process that kept it.
    """

    def put(self, name: str, value: str) -> None:
        """Set a value that all ranks then see."""

    def peek(self, name: str) -> str | None:
        """Return the value, or None where there is none yet."""

    def remove(self, name: str) -> None:
        """Forget a value; one that is not there is no error."""

    def clone(self) -> Store:
        """Return the same store for another thread to use."""


class GroupStore:
    """A torch.distributed store (``torch.distributed.Store``) as a `Store`."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, name: str, value: str) -> None:
        """Set a value that all ranks then see."""
        with _gone_named():
            self._store.set(_PREFIX + name, value)

    def peek(self, name: str) -> str | None:
        """Return the value, or None where there is none yet."""
        with _gone_named():
            # get alone would block until there is one (torch/csrc/distributed/c10d/Store.hpp).
            if not self._store.check([_PREFIX + name]):
                return None
            return str(self._store.get(_PREFIX + name).decode())

    def remove(self, name: str) -> None:
        """Forget a value; one that is not there is no error."""
        with suppress(RuntimeError, NotImplementedError):  # a store that keeps every value; no name is used twice
            self._store.delete_key(_PREFIX + name)

    def clone(self) -> GroupStore:
        """Return the same store for another thread: where it is a connection, one of its own."""
        with _gone_named():
            return GroupStore(self._store.clone())


class LocalStore:
    """A `Store` inside one process: where that is the whole world, and for tests."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def put(self, name: str, value: str) -> None:
        """Set a value that all who have this store then see."""
        self._values[name] = value

    def peek(self, name: str) -> str | None:
        """Return the value, or None where there is none yet."""
        return self._values.get(name)

    def remove(self, name: str) -> None:
        """Forget a value; one that is not there is no error."""
        self._values.pop(name, None)

    def clone(self) -> LocalStore:
        """Return itself: each of its methods is one step of the interpreter."""
        return self


def find_store(group: Any, environ: Mapping[str, str]) -> GroupStore:
    """Return the store of a process group; of the world where the group is None.

    Where torch.distributed is not initialised, a launcher's own store is used (torchrun's agent keeps one for its
    ranks: torch/distributed/elastic/agent/server/api.py).

    Raises:
        UsageError: there is no store that these ranks share.
    """
    import torch.distributed

    distributed: Any = torch.distributed  # its stubs leave the stores out
    if distributed.is_available() and distributed.is_initialized():
        owner: Any = distributed.group.WORLD if group is None else group
        return GroupStore(owner.get_group_store())
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MASTER_ADDR" in environ:
        store = distributed.TCPStore(
            environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return GroupStore(distributed.PrefixStore(f"xrank/attempt_{attempt}", store))
    raise UsageError(
        "the ranks have no store to find each other by",
        got="torch.distributed is not initialised",
        want="an initialised process group, or torchrun",
        next_step="call torch.distributed.init_process_group first",
    )


@contextmanager
def _gone_named() -> Iterator[None]:
    """Turn the store's own error (torch.distributed.DistError, a RuntimeError) into ours."""
    try:
        yield
    except RuntimeError as error:
        cause = f"the store that the ranks meet through is gone: {str(error).splitlines()[0][:200]}"
        raise RankFailedError(
            f"rank 0 failed, or the launcher: {cause}",
            rank=0,
            cause=cause,
            next_step="look at the error of rank 0, or of the launcher, first",
        ) from error
