"""The team: ranks of a launcher that share one conversion, fail together, and of which rank 0 reports.

All of it happens in the body of one gather of `xrank.gather`, so that whoever raises, dies or stays away is named on
all others; what ranks tell rank 0 are gathers inside that body, and what rank 0 tells them lies in their store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from time import monotonic, sleep
from typing import Any, TypeVar

from xrank import environment
from xrank.environment import Launch
from xrank.errors import ContradictionError, RankFailedError, RankTimeoutError, XrankError
from xrank.gather.sessions import failure_check, forget, gathered
from xrank.ranks.failure import FailureRecord
from xrank.ranks.store import launched_ranks
from xrank.writers.output_place import OutputPlace

__all__ = ["Team"]

Made = TypeVar("Made")

_LOOK_SECONDS = 0.2
"""How often a rank that works asks whether another has failed."""
_PAUSE_SECONDS = 0.02
_FAREWELL_SECONDS = 5.0
"""How long rank 0 keeps its store for those who have not yet heard how it ended."""


class Team:
    """The ranks that share one conversion, as one of them sees it.

    Every rank calls `together`, in its body `agree`, then what rank 0 needs: `gathered`, in the same order.

    Args:
        launch: this rank's place.
        out: what is to be made; messages between hosts go through the folder that it will be in.
        timeout_seconds: how long a rank that lives may take to come.

    Raises:
        UsageError, RankTimeoutError: the ranks have no store, or rank 0 opened none.
    """

    def __init__(self, launch: Launch, out: str, *, timeout_seconds: float) -> None:
        self.rank, self.size = launch.rank, launch.world_size
        self.is_first = launch.rank == 0
        self._timeout_seconds = timeout_seconds
        self._group = launched_ranks(launch, environment.environ(), timeout_seconds=timeout_seconds)
        # Only torchrun says for sure that all ranks are of one host; the way across hosts is right for one host too.
        is_one_host = launch.launcher == "torchrun" and launch.local_world_size == launch.world_size
        self._directory = None if is_one_host else OutputPlace.of(out).parent
        self._committed = False

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
        except XrankError as error:
            failures = getattr(error, "failures", ()) or (error,)
            known_dead = {failure.rank for failure in failures if failure.rank is not None}
            if not self._committed:
                if isinstance(error, RankTimeoutError):
                    error.next_step = "give all ranks the same command, or --timeout if they are slow; it goes on then"
                raise
            # The output stands, and every rank's part is in it: whoever is lost now is missed by nobody.
        finally:
            forget(self._group)
            if self._group.is_own:
                self._part(known_dead)

    def committed(self) -> None:
        """Say, on rank 0, that the output stands: from now on no other rank's failure is one of the whole."""
        self._committed = True

    def gathered(self, key: str, value: object, *, early_exit: bool = False) -> AbstractContextManager[list[Any]]:
        """Give rank 0 the values of all ranks; see `xrank.gather.parallel`."""
        return gathered(
            "the shared conversion",
            value,
            range(self.size),
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
        made, failure = None, None
        try:
            made = make()
        except XrankError as error:
            failure = error
        told = {
            "digest": None if made is None else digest(made),
            "failure": None
            if failure is None
            else FailureRecord.of(failure, self.rank, "its plan").to_bytes().decode(),
        }
        try:
            with self.gathered("the plan", told) as parts:
                if parts and failure is None:
                    self._compare(parts)
                elif parts:
                    assert failure is not None
                    raise failure
        except XrankError:
            # A fault that all ranks see is on each of them its own, with its own exit status.
            if failure is None:
                raise
        if failure is not None:
            raise failure
        assert made is not None
        return made

    def _compare(self, parts: list[dict[str, str | None]]) -> None:
        for part in parts:
            if (text := part["failure"]) is not None:
                raise FailureRecord.from_bytes(text.encode()).to_error()
        for rank, part in enumerate(parts):
            if part["digest"] != parts[0]["digest"]:
                raise ContradictionError(
                    f"rank {rank} plans another output than rank 0: it sees another source, or was told otherwise",
                    rank=rank,
                    got=f"plan {part['digest']}",
                    want=f"plan {parts[0]['digest']}, as on rank 0: the same names, sizes, times and options",
                    next_step="give all ranks the same command, and one file system; where its clients keep what they "
                    "saw for a while, wait a minute; then run the same command",
                )

    def failures(self) -> Callable[[], bool]:
        """Return what threads that work for this one, which waits, may ask one at a time: raises if a rank failed.

        It returns False, so that it can say whether to cancel.
        """
        check, asked = failure_check(), [monotonic()]

        def look() -> bool:
            if monotonic() - asked[0] >= _LOOK_SECONDS:
                check()
                asked[0] = monotonic()
            return False

        return look

    def check(self) -> None:
        """Raise if another rank has failed.

        Raises:
            RankFailedError: it names it.
        """
        failure_check()()

    def tell(self, name: str, value: str) -> None:
        """Let all other ranks hear something from rank 0, once."""
        self._group.store.put(f"told/{name}", value)

    def hear(self, name: str) -> str:
        """Return what rank 0 tells; waits for it as long as all ranks live.

        Raises:
            RankFailedError: one failed.
        """
        while (value := self._group.store.peek(f"told/{name}")) is None:
            self.check()
            sleep(_PAUSE_SECONDS)
        return value

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
