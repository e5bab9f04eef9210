"""The team: the ranks that share one conversion, how they agree, and their work in the background."""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

from xrank import environment
from xrank.errors import AGAIN, ContradictionError, UsageError, XrankError, option
from xrank.ranks.launch import Launch, read_launch
from xrank.ranks.store import group_place
from xrank.storage.url import is_url
from xrank.system import after_fork_in_child

Made = TypeVar("Made")
Decision = TypeVar("Decision")


class Team:
    """This process alone; `SharedTeam` overrides all methods for several ranks.

    Args:
        ranks: the ranks' numbers in the world; the first rank decides and reports.
        rank: the number of this rank.
        num_here: how many of the ranks are known to share this host.
        is_one_host: whether all ranks are known to share this host.
    """

    def __init__(
        self, ranks: Sequence[int] = (0,), rank: int = 0, *, num_here: int = 1, is_one_host: bool = True
    ) -> None:
        self.ranks, self.rank, self.size = tuple(ranks), rank, len(ranks)
        self.position = self.ranks.index(rank)
        self.is_first, self.is_one_host, self.num_here = self.position == 0, is_one_host, num_here
        self.secret = secrets.token_bytes(32)
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


def check_alike(ranks: Sequence[int]) -> Callable[[object, Sequence[Mapping[str, str | None]]], None]:
    """Return the decision for `Team.agree` that all ranks make the same call: UsageError names what differs.

    A rank describes its call by argument -> value as text; "call" is the name of the function.
    """

    def check(_: object, calls: Sequence[Mapping[str, str | None]]) -> None:
        for rank, call in zip(ranks, calls, strict=True):
            for name, want in calls[0].items():
                if (got := call.get(name)) != want:
                    verb = "calls" if name == "call" else f"has {name}"
                    raise UsageError(
                        f"rank {rank} {verb} {got}, rank {ranks[0]} {want}",
                        rank=rank,
                        got=f"{name} {got} on rank {rank}",
                        want=f"{name} {want}, as on rank {ranks[0]}",
                        next_step=f"let all ranks {AGAIN}, with the same options",
                    )

    return check


def value_text(value: Any) -> str:
    """Return an argument as text that is the same on all ranks for the same value."""
    try:
        return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__)
    except (TypeError, ValueError):
        return str(value)


def nbytes_text(nbytes: int) -> str:
    """Return a size as text, the same for every spelling of the size."""
    return f"{nbytes:,} bytes"


def path_text(path: str | os.PathLike[str] | None) -> str | None:
    """Return a path or a name as text. Existing paths become absolute."""
    if path is None:
        return None
    text = os.fspath(path) if isinstance(path, os.PathLike) else str(path)
    return os.path.abspath(text) if os.path.exists(text) else text


def check_plans(ranks: Sequence[int]) -> Callable[[object, Sequence[str]], None]:
    """Return the decision for `Team.agree` that all ranks made the same plan; descriptions are digests."""

    def check(_: object, digests: Sequence[str]) -> None:
        for rank, digest in zip(ranks, digests, strict=True):
            if digest != digests[0]:
                raise ContradictionError(
                    f"rank {rank} plans another output than rank {ranks[0]}: its source or its arguments differ",
                    rank=rank,
                    got=f"plan {digest}",
                    want=f"plan {digests[0]}: the same names, sizes, times and options",
                    next_step="give all ranks the same options and one file system; where its clients cache what they "
                    f"saw, wait a minute; then let all ranks {AGAIN}",
                )

    return check


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
        message = f"RANK={launch.rank} and WORLD_SIZE={launch.world_size} were left alone: one process did all of it"
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

    Args:
        group: torch's process group, or None.
        place: a path whose folder carries messages between hosts; beside a URL, sockets do.
        timeout_seconds: how long a live rank may take to arrive.
        call: name of the function that the user called.
        joins_launch: whether a launcher's ranks are a team where torch.distributed is not initialized.
    """
    if group_place() is not None:
        from xrank.ranks.gathering import find_place  # one process does not need these modules
        from xrank.ranks.registration import register
        from xrank.ranks.sessions import WorkWatch
        from xrank.ranks.shared_team import SharedTeam

        file, line = find_place()
        watch = WorkWatch(group, f"{call}, called at {file}:{line}")
        found = register(group, environment.environ(), timeout_seconds=timeout_seconds, watch=watch)
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
    from xrank.ranks.shared_team import SharedTeam
    from xrank.ranks.store import connect_launched_ranks

    group = connect_launched_ranks(launch, environment.environ(), timeout_seconds=timeout_seconds)
    # Only torchrun proves that all ranks are on one host; messages between hosts also work on one host.
    is_one_host = launch.launcher == "torchrun" and launch.local_world_size == launch.world_size
    return SharedTeam(
        group,
        range(launch.world_size),
        launch.rank,
        None if is_one_host else _message_folder(out),
        num_here=launch.local_world_size or 1,
        is_one_host=is_one_host,
        timeout_seconds=timeout_seconds,
    )


def _message_folder(place: str) -> str | None:
    """Return the folder beside a path that carries messages between hosts; None: sockets do, as beside a URL."""
    return None if is_url(place) else os.path.realpath(os.path.dirname(os.path.abspath(place)))


def find_world() -> tuple[int, int]:
    """Return this process's rank in the world of torch.distributed, and the world's size; (0, 1) without one."""
    return group_place() or (0, 1)


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
"""The last piece of work of this process."""
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
