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
from xrank.ranks import processes
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


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 0, 1], [5, 3]])
def test_all_meet_and_the_name_is_gone_from_the_store(ranks):
    store = LocalStore()
    circles = attend(store, ranks, ranks)
    for rank, circle in circles.items():
        assert circle.rank == rank and circle.first == ranks[0]
        assert sorted(circle.peers) == sorted(r for r in ranks if r != rank)
        assert sorted(circle.wire.inboxes) == (sorted(ranks[1:]) if rank == ranks[0] else [ranks[0]])
        circle.arrive(4)
    assert circles[ranks[-1]].find_absent(4) == ()
    assert store.peek(NAME) is None
    for circle in circles.values():
        circle.close()
        circle.close()


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


def test_ranks_that_stay_away_are_named_on_all_that_came(joined):
    said = attend(LocalStore(), [0, 1, 2, 3], [0, 1], when(lambda: 1 in joined))
    assert isinstance(said[0], RankTimeoutError) and said[0].waiting_for == (2, 3)
    assert isinstance(said[1], RankFailedError) and "ranks 2-3 did not come" in str(said[1])


def test_a_first_rank_that_stays_away_is_named():
    said = attend(LocalStore(), [0, 1, 2], [1, 2], others=lambda: Deadline(0.3))
    assert all(isinstance(error, RankTimeoutError) and error.waiting_for == (0,) for error in said.values())


def test_who_comes_after_the_end_hears_why(joined):
    store = LocalStore()
    attend(store, [0, 1, 2], [0, 1], when(lambda: 1 in joined))
    late = attend(store, [0, 1, 2], [2])[2]
    assert isinstance(late, RankFailedError) and late.rank == 0 and "rank 2 did not come" in str(late)


def test_a_rank_that_joined_and_died_is_named_at_once():
    store = LocalStore()

    def join_and_die():
        with connect(store) as sock:
            described = {**address_of(store), "rank": 1, "host": "elsewhere", "pid": 7}
            sock.send(encode_message(described))

    begun = time.monotonic()
    said = attend(store, [0, 1, 2], [0], meanwhile=join_and_die) | attend(store, [0, 1, 2], [2])
    assert time.monotonic() - begun < 20
    for error in said.values():
        assert isinstance(error, RankFailedError) and error.rank == 1 and error.host == "elsewhere"


def test_one_rank_of_another_host_ends_the_meeting_for_all_and_they_meet_through_the_store(monkeypatch, joined):
    spaces = threading.local()

    def find_space():
        return getattr(spaces, "name", "near")

    monkeypatch.setattr(rendezvous, "process_space", find_space)
    monkeypatch.setattr(processes, "process_space", find_space)

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
