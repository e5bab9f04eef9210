"""The team: the ranks that share one conversion. A process alone is a team of one.

All ranks call the same methods in the same order within `together`. The first rank decides and reports. A rank that
raises, exits or does not arrive is named on all others (`xrank.teams.shared_team`); one process only runs the work.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

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
        """Run the body on all ranks: all bodies end well, or all ranks raise.

        Raises:
            RankFailedError, RankTimeoutError: another rank failed, exited, or did not arrive.
        """
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
        """Wait until all ranks have come to this point.

        Raises:
            RankFailedError: a rank failed on its way.
        """
        self.agree(what, lambda: None, lambda _: None, lambda _, __: None)

    def broadcast(self, what: str, text: str | None = None) -> str:
        """Send a text from the first rank, and return it on every rank; other ranks pass None.

        Raises:
            RankFailedError: a rank failed before the text came.
        """
        assert text is not None, "the first rank gives the text"
        return text

    def collect(self, what: str, value: object) -> AbstractContextManager[list[Any]]:
        """Yield the values of all ranks on the first rank, an empty list on the others, which do not wait."""
        return nullcontext([value])

    def check_failures(self) -> None:
        """Raise if another rank has failed.

        Raises:
            RankFailedError: it names the rank.
        """

    def make_failure_check(self) -> Callable[[], bool]:
        """Return a check for the helper threads of a waiting thread. It raises if a rank failed, as above.

        The check returns False, so that it also answers whether to cancel.
        """
        return lambda: False

    def make_background(self) -> Team:
        """Return the same ranks as a team for another thread, while this one is together.

        It uses nothing of torch's process groups, which may end meanwhile. All ranks make this call.
        """
        return self

    def mark_committed(self) -> None:
        """Record, on the first rank, that the output is in place: later failures of other ranks do not matter."""
