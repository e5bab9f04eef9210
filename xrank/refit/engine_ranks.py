"""The ranks of one engine, which take a step all together or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import sleep

from xrank.errors import RankFailedError, RankTimeoutError
from xrank.refit.peer_rank import PeerRank, check_phase, wait_until_done
from xrank.refit.status import Phase, Status, StatusBlock

_PAUSE_SECONDS = 0.0005


class EngineRanks:
    """The other ranks of this engine, by their statuses.

    Args:
        block: this rank's status.
        peers: the other ranks.
    """

    def __init__(self, block: StatusBlock, peers: Sequence[PeerRank]) -> None:
        self._block, self._peers = block, peers

    def find_round(self) -> int:
        """Return the number of this rank's next call.

        Ranks that have failed may have repeated their calls before this rank made its own: it joins them. They cannot
        have committed a step without this rank. `check` finds ranks that cannot be read.
        """
        rounds = [self._block.value.round + 1]
        for peer in self._peers:
            with suppress(RankFailedError, RankTimeoutError):
                rounds.append(peer.read().round)
        return max(rounds)

    def check(self) -> None:
        """Raise if another rank has failed in this call of `update`, has ended, or is stopped.

        Raises:
            RankFailedError, RankTimeoutError: it names the rank.
        """
        own = self._block.value.round
        for peer in self._peers:
            status = peer.read()
            if status.phase is Phase.ENDED or status.round == own:
                check_phase(peer, status)
            elif status.round > own > status.committed:
                raise peer.make_error("it has failed in this call, and has repeated it meanwhile")

    def wait_for_all(self, own: Status, check: Callable[[], object]) -> bool:
        """Wait until all ranks hold this rank's step; return False if one holds a newer step, or another trainer's.

        A rank that holds a step leaves it only for a newer one of another rank. So if each rank was seen with the same
        step, even one after the other, all of them keep it.

        Args:
            own: this rank's status, with the step that it holds.
            check: raises if a rank has failed or the time is over.
        """
        waiting = list(self._peers)
        while waiting:
            for peer in list(waiting):
                status = peer.read()
                if status.committed >= own.round:  # it saw all ranks with one step
                    waiting.remove(peer)
                elif status.round == own.round and status.phase in (Phase.DONE, Phase.CLOSED):
                    if status.offer != own.offer or status.step > own.step:
                        return False
                    if status.step == own.step:
                        waiting.remove(peer)
            if waiting:
                check()
                sleep(_PAUSE_SECONDS)
        return True

    def wait_until_seen(self) -> None:
        """Wait until no rank still looks for this rank's last step, for a moment at most: it is about to close."""
        own = self._block.value.round
        wait_until_done(self._peers, lambda status: status.phase is Phase.DONE and status.round == own)

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers:
            peer.close()
