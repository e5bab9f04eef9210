"""Meetings: in one process, each rank a thread, through a store in memory."""

import array
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import xrank.ranks.meeting as rendezvous
from xrank.errors import RankFailedError, RankTimeoutError, XrankError
from xrank.ranks import waits
from xrank.ranks.failure import Deadline
from xrank.ranks.meeting import Meeting, RanksApartError, meet, meet_across_hosts
from xrank.ranks.store import LocalStore

NAME = "meeting/0.1.2/1"


pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def joined(monkeypatch):
    """The ranks that the first has taken in."""
    joined, welcome = set(), rendezvous._Host._welcome

    def welcome_and_note(host, link):
        welcome(host, link)
        joined.update(host.links)

    monkeypatch.setattr(rendezvous._Host, "_welcome", welcome_and_note)
    return joined


def when(has_happened):
    """A deadline that passes when something has happened, however busy the machine is."""
    return Deadline(30, clock=lambda: 100.0 if has_happened() else 0.0)


def attend(store, ranks, coming, deadline=None, meanwhile=lambda: None, others=lambda: Deadline(30)):
    """Return by rank the circle, or the error, that each rank gets; the deadline is the first rank's."""

    def come(rank):
        until = deadline if deadline is not None and rank == ranks[0] else others()
        try:
            return meet(Meeting(ranks, rank, store, NAME, until, "memory"))
        except XrankError as error:
            return error

    with ThreadPoolExecutor(len(coming)) as pool:
        futures = {rank: pool.submit(come, rank) for rank in coming}
        meanwhile()
        return {rank: future.result(50) for rank, future in futures.items()}


def address_of(store):
    while (text := store.peek(NAME)) is None:
        time.sleep(0.001)
    return json.loads(text)


def encode_message(content):
    """Return JSON as a link sends it."""
    text = json.dumps(content).encode()
    return len(text).to_bytes(4, "little") + text


def connect(store):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect("\0" + address_of(store)["address"])
    return sock


def test_strangers_on_the_socket_neither_join_nor_hold_up(monkeypatch):
    store = LocalStore()
    strangers = []

    def intrude():
        for content in (
            None,
            b"",
            b"no json",
            encode_message([]),
            encode_message({}),
            encode_message({"rank": 1, "nonce": "0" * 32}),
        ):
            sock = connect(store)
            strangers.append(sock)
            if content is not None:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
                with suppress(BrokenPipeError, ConnectionResetError):
                    sock.sendmsg([content], rights)

    def first_then_others():
        intrude()
        started.set()

    started = threading.Event()
    original = rendezvous._join
    monkeypatch.setattr(rendezvous, "_join", lambda *a: (started.wait(25), original(*a))[1])
    begun = time.monotonic()
    circles = attend(store, [0, 1, 2], [0, 1, 2], meanwhile=first_then_others)
    assert time.monotonic() - begun < 20, "who says nothing holds nobody up"
    for circle in circles.values():
        circle.close()
    for sock in strangers:
        sock.close()


def test_a_wrong_nonce_is_a_stranger():
    store, is_sent_away = LocalStore(), threading.Event()

    def pretend():
        with connect(store) as sock:
            sock.send(encode_message({**address_of(store), "rank": 1, "nonce": "f" * 32}))
            assert sock.recv(100) == b"", "it is sent away"
        is_sent_away.set()

    said = attend(store, [0, 1], [0], when(is_sent_away.is_set), pretend)
    assert isinstance(said[0], RankTimeoutError) and said[0].waiting_for == (1,)


def test_who_comes_after_the_end_hears_why(joined):
    store = LocalStore()
    attend(store, [0, 1, 2], [0, 1], when(lambda: 1 in joined))
    late = attend(store, [0, 1, 2], [2])[2]
    assert isinstance(late, RankFailedError) and late.rank == 0 and "rank 2 did not arrive" in str(late)


def test_one_rank_of_another_host_ends_the_meeting_for_all_and_they_meet_through_the_store(monkeypatch, joined):
    spaces = threading.local()

    def find_space():
        return getattr(spaces, "name", "near")

    monkeypatch.setattr(rendezvous, "process_space", find_space)
    monkeypatch.setattr(waits, "process_space", find_space)

    def come(rank):
        if rank == 2:
            while 1 not in joined:
                time.sleep(0.001)
            spaces.name = "far"
        meeting = Meeting([0, 1, 2], rank, store, NAME, Deadline(30), "memory")
        with pytest.raises(RanksApartError):
            meet(meeting)
        return meet_across_hosts(meeting)

    store = LocalStore()
    with ThreadPoolExecutor(3) as pool:
        circles = list(pool.map(come, range(3)))
    for circle in circles:
        assert not circle.wire.shares_memory and len(circle.peers) == 2
        circle.close()


def test_a_rank_of_another_network_is_apart():
    class OtherNetwork(LocalStore):
        def peek(self, name):
            text = super().peek(name)
            if name == NAME and text is not None and "address" in text:
                return json.dumps({**json.loads(text), "address": "xrank-of-another-network"})
            return text

    store = OtherNetwork()
    with ThreadPoolExecutor(2) as pool:
        meetings = [Meeting([0, 1], rank, store, NAME, Deadline(30), "memory") for rank in (0, 1)]
        for come in [pool.submit(meet, meeting) for meeting in meetings]:
            assert isinstance(come.exception(50), RanksApartError)
