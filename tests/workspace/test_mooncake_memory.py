"""Reads by Mooncake, here with a stand-in for its engine; tests/oracle/test_refit_mooncake.py has the real one."""

import ctypes
import sys
import threading
import types
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrank.errors import UsageError
from xrank.ranks.loans import (
    MemoryOffer,
    MooncakeEngine,
    MooncakeMemory,
    PeerOffer,
    UnreadableMemoryError,
    is_mooncake,
    pair_spans,
)
from xrank.ranks.memory import local_bytes

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)


class StandIn:
    """Mooncake's engine, whose other side is this process."""

    made: ClassVar = []
    refused: ClassVar = ()

    def __init__(self):
        self.registered, self.is_deleted = {}, threading.Event()
        StandIn.made.append(types.SimpleNamespace(registered=self.registered, is_deleted=self.is_deleted))

    def __del__(self):
        self.is_deleted.set()

    def initialize(self, host, metadata, protocol, device):
        return 0 if protocol == "tcp" else -1

    def get_rpc_port(self):
        return 16000

    def register_memory(self, address, nbytes):
        assert not any(a < address + nbytes and address < a + n for a, n in self.registered.items())
        self.registered[address] = nbytes
        return 0

    def unregister_memory(self, address):
        del self.registered[address]
        return 0

    def batch_transfer_sync_read(self, session, here, there, nbytes):
        if session in StandIn.refused:
            return -1
        for to, origin, count in zip(here, there, nbytes, strict=True):
            assert any(a <= to and to + count <= a + n for a, n in self.registered.items())
            ctypes.memmove(to, origin, count)
        return 0


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    package, engine = types.ModuleType("mooncake"), types.ModuleType("mooncake.engine")
    engine.TransferEngine = StandIn
    monkeypatch.setitem(sys.modules, "mooncake", package)
    monkeypatch.setitem(sys.modules, "mooncake.engine", engine)
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.setattr(StandIn, "refused", ())
    monkeypatch.delenv("MOONCAKE_PROTOCOL", raising=False)


def spans_of(array, counts, gap=3):
    """Cut an array into spans with gaps between them."""
    starts = np.cumsum([0, *(count + gap for count in counts[:-1])])
    return np.array([(array.ctypes.data + s, c) for s, c in zip(starts, counts, strict=True)], np.uint64)


def sides(there_counts, here_counts):
    total = max(sum(there_counts), sum(here_counts))
    there_counts = [*there_counts, total + 1 - sum(there_counts)]
    here_counts = [*here_counts, total + 1 - sum(here_counts)]
    source = np.arange(4 * total + 100, dtype=np.uint8)
    target = np.zeros(4 * total + 100, np.uint8)
    return source, target, spans_of(source, there_counts), spans_of(target, here_counts)


def bytes_of(spans):
    return b"".join(ctypes.string_at(int(address), int(nbytes)) for address, nbytes in spans)


@given(lengths, lengths)
def test_spans_arrive_however_either_side_is_cut(there_counts, here_counts):
    source, target, there, here = sides(there_counts, here_counts)
    engine = MooncakeEngine([(target.ctypes.data, target.nbytes)])
    MooncakeMemory(engine, "host:1").copy_spans(there, here)
    assert bytes_of(here) == bytes_of(there)
    assert (target != 0).sum() <= sum(here[:, 1])
    assert pair_spans(there, here)[:, 2].sum() == there[:, 1].sum()
    engine.close()
    del source


def test_many_spans_are_cut_into_calls_that_mooncake_takes(monkeypatch):
    source, target = np.arange(1500, dtype=np.uint16), np.zeros(1500, np.uint16)
    sizes, read = [], StandIn.batch_transfer_sync_read
    monkeypatch.setattr(
        StandIn,
        "batch_transfer_sync_read",
        lambda self, *spans: sizes.append(len(spans[1])) or read(self, *spans),
    )
    engine = MooncakeEngine([(target.ctypes.data, target.nbytes)])
    there = np.array([(source.ctypes.data + 2 * i, 2) for i in range(1500)], np.uint64)
    here = np.array([(target.ctypes.data + 2 * i, 2) for i in reversed(range(1500))], np.uint64)
    MooncakeMemory(engine, "host:1").copy_spans(there, here)
    assert (target == source[::-1]).all()
    assert max(sizes) <= 512 and sum(sizes) == 1500


def test_a_failed_read_ends_the_engine_and_the_next_one_begins_anew(monkeypatch):
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    there, here = spans_of(source, [64]), spans_of(target, [64])
    engine = MooncakeEngine([(target.ctypes.data, 64)])
    monkeypatch.setattr(StandIn, "refused", ("dead:1",))
    with pytest.raises(UnreadableMemoryError):
        MooncakeMemory(engine, "dead:1").copy_spans(there, here)
    assert StandIn.made[0].is_deleted.is_set() and not StandIn.made[0].registered
    MooncakeMemory(engine, "live:1").copy_spans(there, here)
    assert (target == source).all() and len(StandIn.made) == 2
    engine.close()
    engine.close()
    assert StandIn.made[1].is_deleted.is_set()


def test_a_failure_ends_the_engine_when_the_last_thread_has_left(monkeypatch):
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    there, here = spans_of(source, [64]), spans_of(target, [64])
    engine = MooncakeEngine([(target.ctypes.data, 64)])
    monkeypatch.setattr(StandIn, "refused", ("dead:1",))
    inside, go_on = threading.Event(), threading.Event()
    read = StandIn.batch_transfer_sync_read

    def wait_and_read(self, session, *spans):
        if session == "slow:1":
            inside.set()
            go_on.wait(60)
        return read(self, session, *spans)

    monkeypatch.setattr(StandIn, "batch_transfer_sync_read", wait_and_read)
    slow = threading.Thread(target=MooncakeMemory(engine, "slow:1").copy_spans, args=(there, here))
    slow.start()
    assert inside.wait(60)
    for session in ("dead:1", "live:1"):  # a new read of a failed engine fails, too
        with pytest.raises(UnreadableMemoryError):
            MooncakeMemory(engine, session).copy_spans(there, here)
    assert not StandIn.made[0].is_deleted.is_set() and StandIn.made[0].registered
    go_on.set()
    slow.join(60)
    assert StandIn.made[0].is_deleted.is_set() and not StandIn.made[0].registered


def test_an_offer_has_its_rows_registered_until_it_closes():
    import torch

    whole = torch.arange(24.0).reshape(4, 6)
    views = [local_bytes(one) for one in (whole, whole[:2], whole.t(), torch.zeros(0))]
    offer = MemoryOffer(views, across_hosts=False, by_mooncake=True)
    (made,) = StandIn.made
    assert made.registered == {whole.data_ptr(): whole.nbytes}
    description = offer.describe()
    assert description["mooncake"].endswith(":16000")
    assert PeerOffer.from_description(0, description).mooncake == description["mooncake"]
    offer.close()
    assert made.is_deleted.is_set()


def test_nothing_is_imported_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    assert not is_mooncake(None, "take_weights")
    with pytest.raises(UsageError, match="cannot load Mooncake") as caught:
        is_mooncake("mooncake", "take_weights")
    assert "pip install mooncake-transfer-engine" in caught.value.next_step
    with pytest.raises(UsageError, match="has no wire= of this name"):
        is_mooncake("rdma", "take_weights")


def test_a_protocol_that_mooncake_lacks_is_refused(monkeypatch):
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "pigeon")
    with pytest.raises(UsageError, match="does not start") as caught:
        MooncakeEngine([])
    assert "MOONCAKE_PROTOCOL=pigeon" in caught.value.got
