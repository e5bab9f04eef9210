"""The rendezvous of ranks of several hosts, through the store alone."""

from __future__ import annotations

import json
import secrets
from typing import Any

from xrank.errors import RankFailedError, RankTimeoutError
from xrank.ranks.circle import Circle
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.heartbeat import PERIOD_SECONDS
from xrank.ranks.meeting import CALL, Meeting
from xrank.ranks.peer import Peer
from xrank.ranks.shared_key import own_key_pair
from xrank.ranks.store_wire import StoreWire

_TICK_SECONDS = 0.02
_KEY = "key"
"""Entry of a rank's public key."""
_GRACE_SECONDS = 2.0
"""Extra wait for the first rank, whose deadline may be a little later, to report the ranks that did not come."""


def meet_across_hosts(meeting: Meeting, *, period_seconds: float = PERIOD_SECONDS) -> Circle:
    """Return the circle of a meeting's ranks; every one of them must call it once.

    Raises:
        RankTimeoutError: ranks did not come; `waiting_for` names them.
        RankFailedError: a rank could not join, failed meanwhile, or came and died.
    """
    is_first = meeting.rank == meeting.ranks[0]
    known: dict[int, Peer] = {}
    keys = own_key_pair()
    if not is_first:
        first = Peer.from_dict(meeting.await_first())
        known[first.rank] = first
    wire = StoreWire(meeting.ranks, meeting.rank, meeting.store, meeting.name, period_seconds=period_seconds)
    try:
        if is_first:
            meeting.announce()  # after the first beat: the others may wait for this rank from now on
        wire.watch(known)
        me = Peer.from_this_process(meeting.rank)
        meeting.store.put(_name(meeting, me.rank), json.dumps({**meeting.describe(), _KEY: keys.public}))
        if is_first:
            publics = _collect(meeting, wire, known)
            secret = secrets.token_bytes(32)
            roster: dict[str, Any] = {
                "peers": [peer.to_dict() for peer in (me, *known.values())],
                _KEY: keys.public,
                "sealed": {
                    rank: keys.seal(secret, public, f"{meeting.name} {rank}") for rank, public in publics.items()
                },
            }
            meeting.store.put(f"{meeting.name}/roster", json.dumps(roster))
        else:
            roster = _await_roster(meeting, wire, known)
            sealed = roster["sealed"][str(meeting.rank)]
            secret = keys.unseal(sealed, roster[_KEY], f"{meeting.name} {meeting.rank}")
        # Each from the moment it is known, so its death is seen while others are still awaited.
        wire.watch(known)
        return Circle(meeting.ranks, meeting.rank, wire, known, secret=secret)
    except BaseException as error:
        if is_first:
            meeting.end(error)
        else:
            # By both ways: others may not have come to the wire yet, and see this rank's end first.
            meeting.refuse(error)
            wire.fail(FailureRecord.from_error(error, meeting.rank, CALL))
        wire.close()
        raise


def _collect(meeting: Meeting, wire: StoreWire, known: dict[int, Peer]) -> dict[int, str]:
    """On the first rank: wait until all have come; return their public keys."""
    threads: set[str] = set()
    publics: dict[int, str] = {}
    while absent := [rank for rank in meeting.ranks[1:] if rank not in known]:
        for rank in absent:
            if (described := _find_description(meeting, rank)) is not None:
                meeting.check_at_large(described)
                threads.add(described.get("thread", ""))
                publics[rank] = str(described.get(_KEY, ""))
                known[rank] = Peer.from_dict(described)
        wire.watch(known)
        meeting.raise_refusal(absent)
        _check(meeting, wire, known)
        if meeting.deadline.has_passed and (absent := [rank for rank in absent if rank not in known]):
            raise meeting.make_timeout_error(absent)
        wire.pump(_TICK_SECONDS)
    meeting.check_threads(threads)
    return publics


def _await_roster(meeting: Meeting, wire: StoreWire, known: dict[int, Peer]) -> dict[str, Any]:
    """On another rank: wait until the first publishes the roster, when all have come; return it."""
    first = meeting.ranks[0]
    patience = Deadline(meeting.deadline.remaining_seconds + _GRACE_SECONDS)
    while (text := meeting.store.peek(f"{meeting.name}/roster")) is None:
        meeting.raise_end()
        try:
            _check(meeting, wire, known)
        except RankFailedError:
            # A rank that met all others may have gone on, and ended, before this one looked.
            if (text := meeting.store.peek(f"{meeting.name}/roster")) is not None:
                break
            raise
        if patience.has_passed:
            raise RankTimeoutError(
                f"rank {first} did not answer at {CALL}",
                rank=first,
                waiting_for=(first,),
                next_step=f"look at rank {first}'s own error first",
            )
        wire.pump(_TICK_SECONDS)
    roster: dict[str, Any] = json.loads(text)
    peers = map(Peer.from_dict, roster["peers"])
    known |= {peer.rank: peer for peer in peers if peer.rank != meeting.rank}
    return roster


def _check(meeting: Meeting, wire: StoreWire, known: dict[int, Peer]) -> None:
    others = [rank for rank in meeting.ranks if rank != meeting.rank]
    # All are watched: a first rank that announced itself for a meeting in memory, and died before its first beat on
    # this wire, is known, and only its beat of the world stands still.
    meeting.check([rank for rank in others if rank not in known], watched=others)
    if failures := wire.failures():
        raise next(iter(failures.values())).to_error()
    for rank in sorted(wire.ended | wire.silent):
        meeting.raise_reason()  # a rank writes it before it ends
        peer = known.get(rank) or _find_peer(meeting, rank)
        host, pid = ("unknown", 0) if peer is None else (peer.host, peer.pid)
        raise FailureRecord(rank, host, pid, "it ended, or gave up, before all had come", CALL).to_error()


def _find_peer(meeting: Meeting, rank: int) -> Peer | None:
    """Return a rank's process, if it has come."""
    described = _find_description(meeting, rank)
    return None if described is None else Peer.from_dict(described)


def _find_description(meeting: Meeting, rank: int) -> dict[str, Any] | None:
    text = meeting.store.peek(_name(meeting, rank))
    return None if text is None else json.loads(text)


def _name(meeting: Meeting, rank: int) -> str:
    return f"{meeting.name}/here/{rank}"
