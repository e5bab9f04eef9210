"""Stores: values by name, as torch.distributed's own stores and the one inside a process hold them."""

import gc
import socket
import struct
import time

import pytest
import torch.distributed as dist
from msgspec.structs import replace

from tests.free_port import free_port
from xrank.errors import RankFailedError, RankTimeoutError, UsageError
from xrank.ranks import tcp_store
from xrank.ranks.store import GroupStore, Launch, LocalStore, connect_launched_ranks, find_store
from xrank.ranks.tcp_store import StoreServer, TcpStore

VALID = struct.pack("<BI", 0, 0x3C85F7CE)
"""The first request of a rank's connection."""


def tcp_server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def tcp_client(server):
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)


def connection_to(server):
    connection = own_client(server)
    connection.kept = server  # it ends with the last reference
    return connection


def own_client(server):
    return TcpStore("127.0.0.1", server.port, timeout_seconds=5)


def own_store(port=None):
    port = port or free_port()
    return GroupStore(TcpStore("127.0.0.1", port, timeout_seconds=5, server=StoreServer(port)))


@pytest.fixture(params=["local", "hash", "file", "tcp", "a connection to torch's", "xrank's own", "prefix"])
def store(request, tmp_path):
    makers = {
        "local": LocalStore,
        "hash": lambda: GroupStore(dist.HashStore()),
        "file": lambda: GroupStore(dist.FileStore(str(tmp_path / "store"), 2)),
        "tcp": lambda: GroupStore(tcp_server()),
        "a connection to torch's": lambda: GroupStore(connection_to(tcp_server())),
        "xrank's own": own_store,
        "prefix": lambda: GroupStore(dist.PrefixStore("group", tcp_server())),
    }
    return makers[request.param]()


def test_a_value_is_there_until_it_is_removed_and_nobody_waits_for_one(store):
    started = time.monotonic()
    assert store.peek("a") is None
    store.put("a", "1")
    store.put("a", "zwei \u2192 \U0001f600")
    store.put("empty", "")
    assert store.peek("a") == "zwei \u2192 \U0001f600" and store.peek("empty") == "" and store.peek("b") is None
    store.remove("a")
    store.remove("a")
    store.remove("b")
    assert store.peek("a") is None and store.peek("empty") == ""
    assert time.monotonic() - started < 30, "torch's own get waits 300 s for a value"


def test_a_clone_of_a_connection_is_one_of_its_own():
    # Two threads on one connection would wait for each other's answers.
    torchs, own = tcp_server(), own_store()
    assert GroupStore(torchs).clone()._store is not torchs
    assert own.clone()._store is not own._store
    own.put("a", "1")
    assert own.clone().peek("a") == "1" and own.with_prefix("part").clone().peek("a") is None


def test_a_name_is_claimed_by_one_rank_and_a_long_value_is_read_by_all(store):
    assert [store.claim("place", rank) for rank in ("first", "second")] == ["first", "first"]
    text = "long \u2192 " * 100_000
    store.put("text", text)
    assert store.peek("text") == text and store.clone().peek("text") == text


def test_an_answer_that_a_signal_broke_off_is_not_taken_for_the_next_ones(monkeypatch):
    store = own_store()
    store.put("a", "1")
    store.put("b", "2")

    def interrupted(connection, nbytes):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tcp_store, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.peek("a")
    assert store.peek("b") == "2" and store.peek("c") is None


def test_a_value_that_is_removed_between_two_questions_is_empty(monkeypatch):
    for store in (GroupStore(connection_to(tcp_server())), own_store()):
        monkeypatch.setattr(store._store, "check", lambda names: True)
        assert store.peek("removed") == ""


def test_what_is_no_rank_is_hung_up_on_and_the_ranks_are_served_on():
    port = free_port()
    store = own_store(port)
    for sent in (b"GET / HTTP/1.1\r\n\r\n", VALID + bytes([99]), VALID + b"\1" + b"\xff" * 8, VALID[:3]):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    store.put("a", "1")
    assert store.peek("a") == "1"


def test_what_listens_and_does_not_answer_is_no_store(monkeypatch):
    monkeypatch.setattr(tcp_store, "_CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        with pytest.raises(RankTimeoutError, match=r"rank 0 opened no store at .*: timed out"):
            connect_launched_ranks(launch_of(1), environ, timeout_seconds=0.2)


def test_a_store_that_keeps_every_value_may_be_asked_to_forget():
    class Keeping(dist.HashStore):
        def delete_key(self, key):
            raise NotImplementedError("not in this one")

    store = GroupStore(Keeping())
    store.put("a", "1")
    store.remove("a")
    assert store.peek("a") == "1"


@pytest.mark.parametrize("connect", [tcp_client, own_client], ids=["torch's", "xrank's"])
def test_a_store_that_is_gone_is_rank_0s_failure_at_once(connect):
    server = tcp_server()
    store = GroupStore(connect(server))
    store.put("a", "1")
    del server
    gc.collect()
    started = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 0 failed, or the launcher: the store .* is gone") as raised:
        store.peek("a")
    assert raised.value.rank == 0 and "rank 0" in raised.value.next_step and "\n" not in raised.value.cause
    with pytest.raises(RankFailedError):
        for _ in range(3):  # what is told may vanish in the connection, but not for long
            store.put("a", "2")
    store.remove("a")
    assert time.monotonic() - started < 30


def test_torchruns_store_serves_where_there_is_no_process_group():
    server = tcp_server()
    environ = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    first = find_store(None, environ)
    first.put("a", "1")
    assert find_store(None, environ).peek("a") == "1"
    assert find_store(None, {**environ, "TORCHELASTIC_RESTART_COUNT": "1"}).peek("a") is None, "of the attempt before"


def launch_of(rank, launcher="srun"):
    return Launch(rank, 2, 0, 1, run_id=None, attempt=None, launcher=launcher)


def test_launched_ranks_have_torchruns_store_a_new_part_of_it_each_time():
    server = tcp_server()
    environ = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    first, second = (connect_launched_ranks(launch_of(0, "torchrun"), environ, timeout_seconds=5) for _ in range(2))
    assert not first.is_own
    first.store.put("a", "1")
    assert find_store(first, {}) is first.store and second.store.peek("a") is None, "no name is used twice"


def test_without_torchrun_rank_0_keeps_the_store():
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with pytest.raises(RankTimeoutError, match="rank 0 opened no store") as raised:
        connect_launched_ranks(launch_of(1), environ, timeout_seconds=0.2)
    assert raised.value.waiting_for == (0,)
    kept = connect_launched_ranks(launch_of(0), environ, timeout_seconds=5)
    assert kept.is_own
    with pytest.raises(UsageError, match="rank 0 cannot open a store") as refused:
        connect_launched_ranks(launch_of(0), environ, timeout_seconds=5)
    assert "MASTER_PORT" in refused.value.next_step


@pytest.mark.parametrize("environ", [{}, {"MASTER_ADDR": "node1"}, {"MASTER_ADDR": "node1", "MASTER_PORT": "many"}])
def test_ranks_without_a_place_to_meet_are_told_what_to_set(environ):
    with pytest.raises(UsageError, match="srun started have no address to connect") as raised:
        connect_launched_ranks(launch_of(1), environ, timeout_seconds=1)
    assert "MASTER_ADDR" in raised.value.want and "torchrun" in raised.value.next_step
    bare = replace(launch_of(1), launcher="bare")
    with pytest.raises(UsageError, match="the ranks of RANK and WORLD_SIZE have no address to connect"):
        connect_launched_ranks(bare, environ, timeout_seconds=1)
