"""The team: ranks that share one conversion, fail together, and of which the first decides and reports.

All of it happens in the body of one gather of `xrank.gather`, so that whoever raises, dies or stays away is named on
all others; what ranks tell the first are gathers inside that body, and what it tells them lies in their store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Lock
from time import monotonic, sleep
from typing import Any, TypeVar

from xrank import environment, errors
from xrank.environment import Launch
from xrank.errors import RankFailedError, RankTimeoutError, XrankError
from xrank.gather.sessions import failure_check, forget, gathered
from xrank.ranks.appointment import appoint
from xrank.ranks.store import LaunchedRanks, launched_ranks
from xrank.teams.attempt import Attempt, check_failures, check_plans
from xrank.writers.output_place import OutputPlace

__all__ = ["Team"]

Made = TypeVar("Made")

_looking = Lock()
"""Held while a thread of this process asks for failures; others that would ask go on."""
_LOOK_SECONDS = 0.2
"""How often a rank that works asks whether another has failed."""
_PAUSE_SECONDS = 0.02
_FAREWELL_SECONDS = 5.0
"""How long rank 0 keeps its store for those who have not yet heard how it ended."""
_TOLD_LENGTH = 1 << 20
"""Of what is told at once: a store takes 8 MiB at most (torch, TCPStoreLibUvBackend.cpp: MAX_PAYLOAD_LEN)."""


class Team:
    """The ranks that share one conversion, as one of them sees it.

    Every rank calls `together`, in its body what the conversion needs of `agree`, `decided` and `gathered`, all ranks
    in the same order.

    Args:
        group: their store.
        ranks: their numbers in the world; the first decides and reports.
        rank: this one's.
        directory: a folder that all see, for messages between hosts; None: all are of one host.
        num_here: how many of them share this one's host, as far as that is known.
        timeout_seconds: how long a rank that lives may take to come.
        remedy: what to do where a rank does not come.
    """

    def __init__(
        self,
        group: LaunchedRanks,
        ranks: Sequence[int],
        rank: int,
        directory: str | None,
        *,
        num_here: int,
        timeout_seconds: float,
        remedy: str,
    ) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self.position = self.ranks.index(rank)
        self.is_first, self.is_one_host = self.position == 0, directory is None
        self.num_here = num_here
        self._group, self._directory = group, directory
        self._timeout_seconds, self._remedy = timeout_seconds, remedy
        self._told: list[str] = []
        self._committed = False

    @classmethod
    def launched(cls, launch: Launch, out: str, *, timeout_seconds: float) -> Team:
        """Return the team of all ranks that a launcher started, to make the folder `out`.

        Raises:
            UsageError, RankTimeoutError: the ranks have no store, or rank 0 opened none.
        """
        group = launched_ranks(launch, environment.environ(), timeout_seconds=timeout_seconds)
        # Only torchrun says for sure that all ranks are of one host; the way across hosts is right for one host too.
        is_one_host = launch.launcher == "torchrun" and launch.local_world_size == launch.world_size
        return cls(
            group,
            range(launch.world_size),
            launch.rank,
            None if is_one_host else OutputPlace.of(out).parent,
            num_here=launch.local_world_size or 1,
            timeout_seconds=timeout_seconds,
            remedy="give all ranks the same command, or --timeout if they are slow; it goes on then",
        )

    @classmethod
    def appointed(cls, group: Any, out: str, *, timeout_seconds: float) -> Team | None:
        """Return the team of a process group of torch's, of the world if None; None where that is this rank alone.

        Raises:
            RankTimeoutError, UsageError: as `xrank.ranks.appointment.appoint`.
        """
        found = appoint(group, environment.environ(), timeout_seconds=timeout_seconds)
        if found is None:
            return None
        return cls(
            found.group,
            found.ranks,
            found.rank,
            None if found.is_one_host else OutputPlace.of(out).parent,
            num_here=found.num_here,
            timeout_seconds=timeout_seconds,
            remedy="make the same call on all ranks, or raise timeout_seconds if they are slow; it goes on then",
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do the body on all ranks: all leave when all bodies have ended well, or fail with the first that fails.

        Raises:
            RankFailedError, RankTimeoutError: another rank failed, died, or did not come.
        """
        known_dead: set[int] = set()
        try:
            with self.gathered("all of it", None):
                yield
            for name in self._told:  # after a failure some may still have to hear it
                self._group.store.remove(name)
        except XrankError as error:
            failures = getattr(error, "failures", ()) or (error,)
            known_dead = {failure.rank for failure in failures if failure.rank is not None}
            if not self._committed:
                if isinstance(error, RankTimeoutError):
                    error.next_step = self._remedy
                raise
            # The output stands, and every rank's part is in it: whoever is lost now is missed by nobody.
        finally:
            forget(self._group)
            self._group.end(is_first=self.is_first)
            if self._group.is_own:
                self._part(known_dead)

    def committed(self) -> None:
        """Say, on the first rank, that the output stands: from now on no other rank's failure is one of the whole."""
        self._committed = True

    def gathered(self, key: str, value: object, *, early_exit: bool = False) -> AbstractContextManager[list[Any]]:
        """Give the first rank the values of all; see `xrank.gather.parallel`."""
        return gathered(
            "the shared conversion",
            value,
            self.ranks,
            self._group,
            workspace_path=self._directory,
            timeout_seconds=self._timeout_seconds,
            early_exit=early_exit,
            key=key,
            place="xrank",
        )

    def agree(self, make: Callable[[], Made], digest: Callable[[Made], str]) -> Made:
        """Make a plan on every rank, and return it if all made the same.

        Raises:
            ContradictionError: a rank's differs from rank 0's.
            XrankError: what `make` raised here; RankFailedError where it raised elsewhere only.
        """
        attempt = Attempt.of(make)
        failure = attempt.told(self.rank)
        told = {"failure": failure, "digest": digest(attempt.result()) if failure is None else None}
        try:
            with self.gathered("the plan", told) as parts:
                if parts:
                    attempt.result()  # if there is none, the others hear of it here
                    check_failures(part["failure"] for part in parts)
                    check_plans(self.ranks, [part["digest"] for part in parts])
        except XrankError:
            # A fault that all ranks see is on each of them its own, with its own exit status.
            if failure is None:
                raise
        return attempt.result()

    def failures(self) -> Callable[[], bool]:
        """Return what threads that work for this one, which waits, may ask: raises if a rank failed.

        It returns False, so that it can say whether to cancel.
        """
        check, asked = failure_check(), [monotonic()]

        def look() -> bool:
            if monotonic() - asked[0] >= _LOOK_SECONDS and _looking.acquire(blocking=False):
                try:
                    check()
                finally:
                    _looking.release()
                asked[0] = monotonic()
            return False

        return look

    def check(self) -> None:
        """Raise if another rank has failed.

        Raises:
            RankFailedError: it names it.
        """
        failure_check()()

    def decided(self, key: str, value: object, decide: Callable[[list[Any]], Any]) -> Any:
        """Give the first rank the values of all, and return on every rank what it makes of them: what JSON holds.

        Raises:
            XrankError: what `decide` raised, on every rank.
        """
        told: dict[str, Any] = {}
        try:
            with self.gathered(key, value, early_exit=True) as parts:
                if self.is_first:
                    try:
                        told = {"made": decide(parts)}
                    except XrankError as error:
                        told = {"error": error.to_dict()}
                    self.tell(key, json.dumps(told))
                else:
                    told = json.loads(self.hear(key))
        except RankFailedError:
            # Whoever heard it before this rank may have raised it already: it is the same on all.
            if "error" not in told:
                raise
        if "error" in told:
            raise _error_of(told["error"])
        return told["made"]

    def tell(self, name: str, value: str) -> None:
        """Let all other ranks hear something from the first, once."""
        parts = [value[start : start + _TOLD_LENGTH] for start in range(0, len(value), _TOLD_LENGTH)]
        texts = {f"told/{name}/{number}": part for number, part in enumerate(parts)}
        for told, text in {**texts, f"told/{name}": str(len(parts))}.items():
            self._told.append(told)
            self._group.store.put(told, text)

    def hear(self, name: str) -> str:
        """Return what the first rank tells; waits for it as long as all ranks live.

        Raises:
            RankFailedError: one failed.
        """
        store = self._group.store
        while (count := store.peek(f"told/{name}")) is None:
            try:
                self.check()
            except RankFailedError:
                # The first may have told it just before it failed.
                if (count := store.peek(f"told/{name}")) is None:
                    raise
                break
            sleep(_PAUSE_SECONDS)
        return "".join(store.peek(f"told/{name}/{number}") or "" for number in range(int(count)))

    def _part(self, known_dead: set[int]) -> None:
        """Say farewell, or hear it as rank 0, whose end would be the store's."""
        with suppress(RankFailedError):
            if not self.is_first:
                self._group.store.put(f"left/{self.rank}", "1")
                return
            end = monotonic() + _FAREWELL_SECONDS
            for rank in range(1, self.size):
                while rank not in known_dead and self._group.store.peek(f"left/{rank}") is None and monotonic() < end:
                    sleep(_PAUSE_SECONDS)


def _error_of(told: dict[str, Any]) -> XrankError:
    """Return the error that `XrankError.to_dict` described."""
    kind, message, next_step = told.pop("type"), told.pop("message"), told.pop("try")
    error: XrankError = getattr(errors, kind)(message, **told, next_step=next_step)
    return error
