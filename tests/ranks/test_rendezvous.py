"""Meetings: in one process, each rank a thread, through a store in memory."""

import array
import dataclasses
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

import xrank.ranks.rendezvous as rendezvous
from xrank.errors import RankFailedError, RankTimeoutError, UsageError, XrankError
from xrank.ranks.deadline import Deadline
from xrank.ranks.meeting import Meeting
from xrank.ranks.peer import Peer
from xrank.ranks.rendezvous import meet
from xrank.ranks.store import LocalStore

NAME = "meeting/0.1.2/1"


@pytest.fixture(autouse=True)
def nothing_left():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def attend(store, ranks, coming, timeout_seconds=5.0, meanwhile=lambda: None):
    """Return by rank the circle, or the error, that each rank gets."""

    def come(rank):
        try:
            return meet(Meeting(ranks, rank, store, NAME, Deadline(timeout_seconds), "memory"))
        except XrankError as error:
            return error

    with ThreadPoolExecutor(len(coming)) as pool:
        futures = {rank: pool.submit(come, rank) for rank in coming}
        meanwhile()
        return {rank: future.result(20) for rank, future in futures.items()}


def address_of(store):
    while (text := store.peek(NAME)) is None:
        time.sleep(0.001)
    return json.loads(text)


def framed(content):
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
    assert circles[ranks[-1]].absent(4) == ()
    assert store.peek(NAME) is None
    for circle in circles.values():
        circle.close()
        circle.close()


def test_strangers_on_the_socket_neither_join_nor_hold_up(monkeypatch):
    store = LocalStore()
    strangers = []

    def intrude():
        for content in (None, b"", b"no json", framed([]), framed({}), framed({"rank": 1, "nonce": "0" * 32})):
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
    monkeypatch.setattr(rendezvous, "_join", lambda *a: (started.wait(5), original(*a))[1])
    begun = time.monotonic()
    circles = attend(store, [0, 1, 2], [0, 1, 2], meanwhile=first_then_others)
    assert time.monotonic() - begun < 2, "who says nothing holds nobody up"
    for circle in circles.values():
        circle.close()
    for sock in strangers:
        sock.close()


def test_a_wrong_nonce_is_a_stranger():
    store = LocalStore()

    def pretend():
        with connect(store) as sock:
            sock.send(framed({**address_of(store), "rank": 1, "nonce": "f" * 32}))
            assert sock.recv(100) == b"", "it is sent away"

    said = attend(store, [0, 1], [0], 0.5, pretend)
    assert isinstance(said[0], RankTimeoutError) and said[0].waiting_for == (1,)


def test_ranks_that_stay_away_are_named_on_all_that_came():
    said = attend(LocalStore(), [0, 1, 2, 3], [0, 1], 0.4)
    assert isinstance(said[0], RankTimeoutError) and said[0].waiting_for == (2, 3)
    assert isinstance(said[1], RankFailedError) and "ranks [2, 3] did not come" in str(said[1])


def test_a_first_rank_that_stays_away_is_named():
    said = attend(LocalStore(), [0, 1, 2], [1, 2], 0.3)
    assert all(isinstance(error, RankTimeoutError) and error.waiting_for == (0,) for error in said.values())


def test_who_comes_after_the_end_hears_why():
    store = LocalStore()
    attend(store, [0, 1, 2], [0, 1], 0.2)
    late = attend(store, [0, 1, 2], [2])[2]
    assert isinstance(late, RankFailedError) and late.rank == 0 and "rank 2 did not come" in str(late)


def test_a_rank_that_joined_and_died_is_named_at_once():
    store = LocalStore()

    def join_and_die():
        with connect(store) as sock:
            described = {**address_of(store), "rank": 1, "host": "elsewhere", "pid": 7}
            sock.send(framed(described))

    begun = time.monotonic()
    said = attend(store, [0, 1, 2], [0], 20, join_and_die) | attend(store, [0, 1, 2], [2], 20)
    assert time.monotonic() - begun < 2
    for error in said.values():
        assert isinstance(error, RankFailedError) and error.rank == 1 and error.host == "elsewhere"


def test_ranks_of_two_hosts_are_an_error_with_both_names_on_both(monkeypatch):
    # Rank 1 sees an address that nobody on its own host listens on.
    class OtherHost(LocalStore):
        def peek(self, name):
            text = super().peek(name)
            if threading.current_thread() not in first and name == NAME and text is not None and "address" in text:
                return json.dumps({**json.loads(text), "address": "xrank-nobody", "host": "far"})
            return text

    first = []
    original = rendezvous._Host.meet
    monkeypatch.setattr(
        rendezvous._Host, "meet", lambda host: (first.append(threading.current_thread()), original(host))[1]
    )
    describe = Peer.of_this_process
    hosts = ("far", "near")
    monkeypatch.setattr(Peer, "of_this_process", lambda rank: dataclasses.replace(describe(rank), host=hosts[rank]))
    said = attend(OtherHost(), [0, 1], [0, 1])
    assert isinstance(said[1], UsageError) and isinstance(said[0], RankFailedError) and said[0].rank == 1
    for error in said.values():
        assert "far" in str(error) and "near" in str(error)
    assert "workspace_path" in str(said[1].next_step)
