"""A team of several ranks: each failure is named on all, and the first rank decides for all.

All of it happens in the body of one gather: if a rank raises, exits or stays away, all other ranks name it. Ranks send
their values to the first rank by gathers within that body; the first rank answers through the team's store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Lock
from time import monotonic, sleep
from typing import Any, TypeVar

from xrank import environment
from xrank.errors import RankFailedError, XrankError
from xrank.ranks.byte_service import used_addresses
from xrank.ranks.failure import FailureRecord
from xrank.ranks.gathering import Gather
from xrank.ranks.sessions import failure_check, find_world, forget
from xrank.ranks.store import LaunchedRanks
from xrank.ranks.team import Team

Made = TypeVar("Made")
Decision = TypeVar("Decision")

_looking = Lock()
"""Held while a thread of this process looks for failures; other threads skip their look meanwhile."""
_LOOK_SECONDS = 0.2
"""Seconds between two looks of a working rank for failures of others."""
_PAUSE_SECONDS = 0.02
_FAREWELL_SECONDS = 5.0
"""Seconds that rank 0 keeps its store for ranks that have not yet read how the conversion ended."""
_PART_LENGTH = 1 << 20
"""Characters of a text in one entry: a store takes 8 MiB at most (torch, TCPStoreLibUvBackend.cpp: MAX_PAYLOAD_LEN)."""


class SharedTeam(Team):
    """Several ranks that share one conversion; see `Team`.

    Args:
        group: the store of the ranks.
        ranks: as of `Team`; so are `rank`, `num_here` and `is_one_host`.
        rank: this rank.
        directory: a folder that all ranks see, for messages between hosts; None: memory, or sockets between hosts.
        num_here: ranks on this host.
        is_one_host: whether all ranks are.
        timeout_seconds: how long a live rank may take to arrive.
    """

    def __init__(
        self,
        group: LaunchedRanks,
        ranks: Sequence[int],
        rank: int,
        directory: str | None,
        *,
        num_here: int,
        is_one_host: bool,
        timeout_seconds: float,
    ) -> None:
        super().__init__(ranks, rank, num_here=num_here, is_one_host=is_one_host)
        self._group, self._store, self._directory = group, group.store, directory
        self._timeout_seconds = timeout_seconds
        self._entries: list[str] = []
        self._is_committed = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the body on all ranks."""
        known_dead: set[int] = set()
        try:
            with (gather := self._gather("all of it", None)):
                self.secret, self.needs_ports = gather.group.secret, not gather.group.is_one_network
                if self.needs_ports:
                    self.addresses = used_addresses(self._store.host, environment.environ())
                yield
            for name in self._entries:  # after a failure some ranks may still have to read them
                self._store.remove(name)
        except XrankError as error:
            failures = getattr(error, "failures", ()) or (error,)
            # Rank 0 need not wait for their reports at the end.
            known_dead = {failure.rank for failure in failures if failure.rank is not None}
            if not self._is_committed:
                raise
            # The output is in place and holds the part of every rank: the failure came too late to matter.
        finally:
            forget(self._group)
            self._group.end(is_first=self.is_first)
            if self._group.is_own:
                self._part(known_dead)

    def agree(
        self,
        what: str,
        make: Callable[[], Made],
        describe: Callable[[Made], Any],
        decide: Callable[[Made, Sequence[Any]], Decision],
    ) -> tuple[Made, Decision]:
        """Make a value and a decision with all ranks."""
        made: list[Made] = []
        failure: XrankError | None = None
        message: dict[str, Any] = {"failure": None}
        answer: dict[str, Any] = {}
        try:
            made.append(make())
            message["description"] = describe(made[0])
        except XrankError as error:
            failure = error
            # A failed rank still sends its part: the others learn the reason now, instead of its absence later.
            message["failure"] = FailureRecord.from_error(error, self.rank, what).to_text()
        try:
            with self.collect(what, message) as parts:
                if self.is_first:
                    try:
                        for text in (part["failure"] for part in parts if part["failure"] is not None):
                            raise FailureRecord.from_text(text).to_error()
                        answer = {"made": decide(made[0], [part["description"] for part in parts])}
                    except XrankError as error:
                        answer = {"error": self._describe_error(error, what)}
                    self._send(what, json.dumps(answer))
                else:
                    answer = json.loads(self._receive(what))
        except XrankError as error:
            # A rank that read the answer first may have raised its error already: all ranks have the same one. If this
            # rank failed as well, its own error is more specific than another's.
            if failure is None and not (isinstance(error, RankFailedError) and "error" in answer):
                raise
        if failure is not None:
            raise failure
        if (content := answer.get("error")) is not None:
            if "record" in content:
                raise FailureRecord.from_text(content["record"]).to_error()
            raise XrankError.from_record(content)
        return made[0], answer["made"]

    def _describe_error(self, error: XrankError, what: str) -> dict[str, Any]:
        if isinstance(error, RankFailedError):  # it has more fields than others
            return {"record": FailureRecord.from_error(error, self.rank, what).to_text()}
        return error.to_record()

    def broadcast(self, what: str, text: str | None = None) -> str:
        """Send a text from the first rank."""
        return self._receive(what) if text is None else self._send(what, text)

    def collect(self, what: str, value: object) -> AbstractContextManager[list[Any]]:
        """Yield the values of all ranks on the first."""
        return self._gather(what, value, early_exit=True)

    def check_failures(self) -> None:
        """Raise if another rank has failed."""
        failure_check()()

    def make_failure_check(self) -> Callable[[], bool]:
        """Return a check for other threads."""
        check, last_look = failure_check(), [monotonic()]

        def look() -> bool:
            if monotonic() - last_look[0] >= _LOOK_SECONDS and _looking.acquire(blocking=False):
                try:
                    check()
                finally:
                    _looking.release()
                last_look[0] = monotonic()
            return False

        return look

    def make_background(self) -> Team:
        """Return the same ranks as a team for another thread."""
        return SharedTeam(
            self._group.make_background(self.rank, max(max(self.ranks) + 1, find_world(self._group).size)),
            self.ranks,
            self.rank,
            self._directory,
            num_here=self.num_here,
            is_one_host=self.is_one_host,
            timeout_seconds=self._timeout_seconds,
        )

    def mark_committed(self) -> None:
        """Record that the output is in place."""
        self._is_committed = True

    def _gather(self, key: str, value: object, *, early_exit: bool = False) -> Gather:
        return Gather(
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

    def _send(self, what: str, text: str) -> str:
        parts = [text[start : start + _PART_LENGTH] for start in range(0, len(text), _PART_LENGTH)]
        entries = {f"told/{what}/{number}": part for number, part in enumerate(parts)}
        # The number of parts comes last: a rank that sees it can read all parts.
        for name, value in {**entries, f"told/{what}": str(len(parts))}.items():
            self._entries.append(name)
            self._store.put(name, value)
        return text

    def _receive(self, what: str) -> str:
        while (count := self._store.peek(f"told/{what}")) is None:
            try:
                self.check_failures()
            except RankFailedError:
                # The first rank may have sent the text just before it failed.
                if (count := self._store.peek(f"told/{what}")) is None:
                    raise
                break
            sleep(_PAUSE_SECONDS)
        return "".join(self._store.peek(f"told/{what}/{number}") or "" for number in range(int(count)))

    def _part(self, known_dead: set[int]) -> None:
        """Report this rank's end to rank 0; on rank 0, which owns the store, wait for the others' reports."""
        with suppress(RankFailedError):
            if not self.is_first:
                self._store.put(f"left/{self.rank}", "1")
                return
            end = monotonic() + _FAREWELL_SECONDS
            for rank in range(1, self.size):
                while rank not in known_dead and self._store.peek(f"left/{rank}") is None and monotonic() < end:
                    sleep(_PAUSE_SECONDS)
