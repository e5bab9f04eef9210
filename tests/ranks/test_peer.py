"""Peers: what a rank tells of its process, and how others of its host see that process end."""

import dataclasses
import os
import select
import socket
import subprocess
import sys

import pytest

from xrank.errors import CorruptError
from xrank.ranks.processes import Peer, is_readable, process_space

ME = Peer(3, "host", 7, "boot.4026531836")


def test_a_peer_comes_back_from_what_it_told():
    me = Peer.from_this_process(5)
    assert (me.rank, me.host, me.pid, me.space) == (5, socket.gethostname(), os.getpid(), process_space())
    assert Peer.from_dict({**me.to_dict(), "address": "more that is told with it"}) == me


@pytest.mark.parametrize(
    "wrong",
    [{"rank": "3"}, {"rank": True}, {"rank": None}, {"host": 1}, {"pid": 7.0}, {"pid": "7"}, {"space": None}],
    ids=str,
)
def test_what_does_not_say_who_it_is_is_refused(wrong):
    with pytest.raises(CorruptError, match="description of its process"):
        Peer.from_dict({**ME.to_dict(), **wrong})
    with pytest.raises(CorruptError, match="description of its process"):
        Peer.from_dict({})


def test_the_end_of_a_process_of_this_host_is_seen():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    life = dataclasses.replace(ME, pid=child.pid, space=process_space()).open_life()
    assert not is_readable(life)
    child.kill()
    poller = select.poll()
    poller.register(life, select.POLLIN)
    assert poller.poll(30_000), "it is seen before anybody has waited for the child"
    child.communicate()
    os.close(life)


def test_a_process_that_is_gone_is_known_to_have_ended():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = dataclasses.replace(ME, pid=child.pid, space=process_space())
    with pytest.raises(ProcessLookupError):
        gone.open_life()


def test_a_process_of_another_host_is_not_watched():
    # The number may well mean a process here; it is another one.
    assert dataclasses.replace(ME, pid=os.getpid(), space="another boot.1").open_life() is None


def test_the_space_is_the_kernels_and_the_namespaces():
    boot, _, namespace = process_space().rpartition(".")
    assert len(boot) == 36 and int(namespace) > 0
    said = subprocess.run(
        [sys.executable, "-c", "from xrank.ranks.processes import process_space; print(process_space())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == process_space()
