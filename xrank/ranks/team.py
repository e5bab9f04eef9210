"""The team: the ranks that share one conversion, how they agree, and their work in the background.

Ranks send their values to the first rank by gathers within the body of one gather; the first rank decides for all and
answers through the team's store.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Lock
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from xrank import environment
from xrank.errors import AGAIN, ContradictionError, RankFailedError, UsageError, XrankError, option
from xrank.ranks.failure import FailureRecord
from xrank.ranks.store import Launch, LaunchedRanks, connect_launched_ranks, group_place, read_launch
from xrank.storage.url import is_url
from xrank.system import after_fork_in_child

if TYPE_CHECKING:
    from xrank.ranks.gathering import Gather

Made = TypeVar("Made")
Decision = TypeVar("Decision")


class Team:
    """This process alone; `SharedTeam` overrides all methods for several ranks.

    Ranks have their numbers in the world; the first one decides and reports. `num_here` is the number of ranks that are
    known to share this host, and `is_one_host` is whether all of them are.
    """

    def __init__(
        self, ranks: Sequence[int] = (0,), rank: int = 0, *, num_here: int = 1, is_one_host: bool = True
    ) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self.position = self.ranks.index(rank)
        self.is_first, self.is_one_host, self.num_here = self.position == 0, is_one_host, num_here
        self.secret = os.urandom(32)
        """Known to these ranks alone, while they are together."""
        self.needs_ports = False
        """Whether ranks reach each other over the network alone, while they are together."""
        self.addresses: Sequence[str] = ()
        """At which other hosts reach this rank, if ranks need ports."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the body on all ranks: all bodies end well, or all ranks raise."""
        yield

    def agree(
        self,
        what: str,
        make: Callable[[], Made],
        describe: Callable[[Made], Any],
        decide: Callable[[Made, Sequence[Any]], Decision],
    ) -> tuple[Made, Decision]:
        """Make a value on every rank, and return it with one decision for all ranks, or raise on all ranks.

        Args:
            what: name of the value in a few words, for errors; different in each call of one `together`.
            make: makes the value; may differ by rank.
            describe: returns the facts that the first rank needs about a rank's value: JSON values and tensors.
            decide: called on the first rank with its own value and the descriptions of all, in the order of `ranks`;
                checks them, and returns what JSON can hold.

        Raises:
            XrankError: the error of `make`, on the rank where it failed; the error of `decide`, on every rank.
            RankFailedError: `make` failed on another rank only.
        """
        made = make()
        return made, decide(made, [describe(made)])

    def meet(self, what: str) -> None:
        """Wait until all ranks have come to this point."""
        self.agree(what, lambda: None, lambda _: None, lambda _, __: None)

    def broadcast(self, what: str, text: str | None = None) -> str:
        """Send a text from the first rank, and return it on every rank; other ranks pass None."""
        assert text is not None, "the first rank gives the text"
        return text

    def collect(self, what: str, value: object) -> AbstractContextManager[list[Any]]:
        """Yield the values of all ranks on the first rank, an empty list on the others, which do not wait."""
        return nullcontext([value])

    def check_failures(self) -> None:
        """Raise RankFailedError if another rank has failed."""

    def make_failure_check(self) -> Callable[[], bool]:
        """Return `check_failures` for the helper threads of a waiting thread; it returns False, for "do not cancel"."""
        return lambda: False

    def make_background(self) -> Team:
        """Return the same ranks as a team for another thread, while this one is together; all ranks make this call.

        It uses nothing of torch's process groups, which may end meanwhile.
        """
        return self

    def mark_committed(self) -> None:
        """Record, on the first rank, that the output is in place: later failures of other ranks do not matter."""

    def check_alike(self, _: object, calls: Sequence[Mapping[str, str | None]]) -> None:
        """Decide, for `agree`, that all ranks make the same call: UsageError names what differs.

        A rank describes its call by argument -> value as text; "call" is the name of the function.
        """
        for rank, call in zip(self.ranks, calls, strict=True):
            for name, want in calls[0].items():
                if (got := call.get(name)) != want:
                    verb = "calls" if name == "call" else f"has {name}"
                    raise UsageError(
                        f"rank {rank} {verb} {got}, rank {self.ranks[0]} {want}",
                        rank=rank,
                        got=f"{name} {got} on rank {rank}",
                        want=f"{name} {want}, as on rank {self.ranks[0]}",
                        next_step=f"let all ranks {AGAIN}, with the same options",
                    )

    def check_plans(self, _: object, digests: Sequence[str]) -> None:
        """Decide, for `agree`, that all ranks made the same plan; descriptions are digests."""
        for rank, digest in zip(self.ranks, digests, strict=True):
            if digest != digests[0]:
                raise ContradictionError(
                    f"rank {rank} plans a different output than rank {self.ranks[0]}: its source or its arguments "
                    f"differ",
                    rank=rank,
                    got=f"plan {digest}",
                    want=f"plan {digests[0]}: the same names, sizes, times and options",
                    next_step="give all ranks the same options and one file system; if its clients cache metadata, "
                    "wait a minute; then let all ranks {AGAIN}",
                )


def value_text(value: Any) -> str:
    """Return an argument as text that is the same on all ranks for the same value."""
    try:
        return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    except (TypeError, ValueError):
        return str(value)


def path_text(path: str | os.PathLike[str] | None) -> str | None:
    """Return a path or a name as text. Existing paths become absolute."""
    if path is None:
        return None
    text = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
    return os.path.abspath(text) if os.path.exists(text) else text


# Only launchers set these: beside them wrong variables are a fault, and without them what a shell has left over.
_MARKS = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def find_launch(environ: Mapping[str, str], *, distributed: bool) -> tuple[Launch | None, tuple[tuple[str, str], ...]]:
    """Return this process's place among the ranks that share a conversion, or None, and notes for the report.

    RANK and WORLD_SIZE alone, which many shells export, count only with `distributed`. UsageError: the launcher's
    variables are wrong, or missing although `distributed` is set.
    """
    try:
        launch = read_launch(environ)
    except UsageError:
        if distributed or not environ.keys().isdisjoint(_MARKS):
            raise
        return None, ()
    if launch is None:
        if distributed:
            raise UsageError(
                f"{option('distributed', True)} was given, but the environment does not name this rank",
                want="RANK and WORLD_SIZE in the environment of every rank",
                next_step="start the ranks by torchrun, srun or mpirun, or set both",
            )
        return None, ()
    if launch.world_size == 1:
        return None, ()
    if launch.launcher == "bare" and not distributed:
        message = f"RANK={launch.rank} and WORLD_SIZE={launch.world_size} were ignored: one process did all the work"
        return None, (("one-process", f"{message}; {option('distributed', True)} shares it among such ranks"),)
    return launch, ()


def find_launched_team(out: str, *, distributed: bool, timeout_seconds: float) -> Team:
    """Return the team of all ranks that a launcher started if they share the work, else of this process alone.

    The folder of `out` carries messages between hosts; beside a URL, sockets do.
    """
    launch = find_launch(environment.environ(), distributed=True)[0] if distributed else None
    return Team() if launch is None else _team_of_launch(launch, out, timeout_seconds)


def find_group_team(group: Any, place: str, *, timeout_seconds: float, call: str, joins_launch: bool = True) -> Team:
    """Return the team of a process group, of the world where the group is None, or of this process alone.

    The folder of `place` carries messages between hosts; beside a URL, sockets do. `call` is the name of the user's
    function. With `joins_launch`, a launcher's ranks are a team where torch.distributed is not initialized.
    """
    if group_place() is not None:
        from xrank.ranks.gathering import find_place  # one process does not need these modules
        from xrank.ranks.registration import register

        file, line = find_place()
        call = f"{call}, called at {file}:{line}"
        found = register(group, environment.environ(), timeout_seconds=timeout_seconds, call=call)
        if found is not None:
            return SharedTeam(
                found.group,
                found.ranks,
                found.rank,
                None if found.is_one_host else _message_folder(place),
                num_here=found.num_here,
                is_one_host=found.is_one_host,
                timeout_seconds=timeout_seconds,
            )
    elif joins_launch:
        launch, _ = find_launch(environment.environ(), distributed=False)
        if launch is not None:
            return _team_of_launch(launch, place, timeout_seconds)
    return Team()


def _team_of_launch(launch: Launch, out: str, timeout_seconds: float) -> Team:
    group = connect_launched_ranks(launch, environment.environ(), timeout_seconds=timeout_seconds)
    return SharedTeam(
        group,
        range(launch.world_size),
        launch.rank,
        None if launch.is_one_host else _message_folder(out),  # messages between hosts also work on one host
        num_here=launch.local_world_size or 1,
        is_one_host=launch.is_one_host,
        timeout_seconds=timeout_seconds,
    )


def _message_folder(place: str) -> str | None:
    """Return the folder beside a path that carries messages between hosts; None: sockets do, as beside a URL."""
    return None if is_url(place) else os.path.realpath(os.path.dirname(os.path.abspath(place)))


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

    `directory` is a folder that all ranks see, for messages between hosts; None: memory, or sockets between hosts.
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
        """Run the body of one gather on all ranks: if a rank raises, exits or stays away, all others name it."""
        from xrank.ranks.byte_service import used_addresses
        from xrank.ranks.gathering import forget

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
                        answer = {"error": error.to_record()}
                        if isinstance(error, RankFailedError):  # it has more fields than others
                            answer = {"error": {"record": FailureRecord.from_error(error, self.rank, what).to_text()}}
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

    def broadcast(self, what: str, text: str | None = None) -> str:
        """Send a text from the first rank."""
        return self._receive(what) if text is None else self._send(what, text)

    def collect(self, what: str, value: object) -> AbstractContextManager[list[Any]]:
        """Yield the values of all ranks on the first."""
        return self._gather(what, value, early_exit=True)

    def check_failures(self) -> None:
        """Raise if another rank has failed."""
        from xrank.ranks.gathering import failure_check

        failure_check()()

    def make_failure_check(self) -> Callable[[], bool]:
        """Return a check for other threads."""
        from xrank.ranks.gathering import failure_check

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
        from xrank.ranks import gathering

        return SharedTeam(
            self._group.make_background(self.rank, max(max(self.ranks) + 1, gathering.find_world(self._group).size)),
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
        from xrank.ranks.gathering import Gather  # not needed by one process

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


_logger = logging.getLogger(__name__)


class BackgroundWork(Future[Made], Generic[Made]):
    """A piece of work in the background: a `concurrent.futures.Future` that remembers whether it was read."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.is_read = name, False

    def result(self, timeout: float | None = None) -> Made:
        """Return the result, or raise the failure, of finished work; TimeoutError if it still runs."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the failure of finished work, or None; errors as `result`."""
        failure = super().exception(timeout)
        self.is_read = True
        return failure

    def __repr__(self) -> str:
        state = "running" if not self.done() else "done" if super().exception() is None else "failed"
        return f"<{self.name} in the background: {state}>"


_last: list[BackgroundWork[Any]] = []
after_fork_in_child(_last.clear)  # the child has neither the thread nor the other ranks


def run_in_background(name: str, work: Callable[[], Made]) -> Future[Made]:
    """Start work in a thread of its own, and return at once. The last work must have ended: `await_background`."""
    assert all(last.done() for last in _last)
    made: BackgroundWork[Made] = BackgroundWork(name)
    made.set_running_or_notify_cancel()
    _last[:] = [made]
    threading.Thread(target=_run, args=(made, work), name=f"xrank: {name}", daemon=False).start()
    return made


def _run(made: BackgroundWork[Made], work: Callable[[], Made]) -> None:
    try:
        result = work()
    except BaseException as error:
        # The result may never be read, so the failure is also logged.
        _logger.error("%s failed in the background: %s", made.name, error)
        # The error outlives the work, and its frames hold what the work held, such as the copy of a model.
        del work
        traceback.clear_frames(error.__traceback__)
        made.set_exception(error)
    else:
        made.set_result(result)


def await_background(name: str) -> None:
    """Wait until the last work in the background has ended; `name` waits."""
    for work in _last:
        if not work.done():
            _logger.info("%s waits for the end of %s", name, work.name)
            Future.exception(work)  # its own limits end it; not a reading by the caller


def raise_background_failure() -> None:
    """Raise the failure of the last work in the background, if no caller has read it. A second call does nothing."""
    for work in _last:
        if not work.is_read and work.done() and (failure := work.exception()) is not None:
            if isinstance(failure, XrankError):
                raise failure
            what = f"{work.name} failed in the background: {type(failure).__name__}: {failure}"
            raise XrankError(what, next_step="look at its cause, then repeat this call") from failure
