"""Gathers of ranks that share neither memory nor a directory: tensors travel over sockets."""

import json
import time

import pytest
import torch

from tests.other_hosts import move_to_host
from tests.workspace.forked_ranks import attempt, gather, kill_self, run_ranks
from xrank.errors import CorruptError, IncompleteError
from xrank.ranks import byte_service
from xrank.ranks.byte_service import TOKEN_NBYTES, SocketMessages
from xrank.workspace.parallel import get_configs_parallel, get_tensors_parallel

SOON_SECONDS = 40
"""Fifteen seconds on a quiet machine; on a busy one a heartbeat may wait that long for a processor."""


def gather_apart(rank):
    move_to_host(rank)
    lists, results = [[0, 1, 2], [2, 0], [1, 2]], []
    for number in range(3):
        for ranks in lists:
            if rank in ranks:
                for size in (1, 3000, 200_000):
                    with get_tensors_parallel(torch.full((size,), 10 * number + rank), ranks) as parts:
                        want = [(size, 10 * number + r) for r in ranks] if rank == ranks[0] else []
                        got = [(len(part), int(part[0])) for part in parts]
                        results.append(got == want and all((part == part[0]).all() for part in parts))
    with get_configs_parallel({"of": rank, "bias": torch.arange(rank)}, [0, 1, 2], None) as configs:
        results.append([config["of"] for config in configs] == ([0, 1, 2] if rank == 0 else []))
    return results


def test_ranks_without_shared_memory_gather_over_sockets():
    results = run_ranks(gather_apart, 3)
    assert all(len(one) > 10 and all(one) for one in results), results


def share_memory_by_two(rank):
    if rank == 2:
        move_to_host(rank)
    return [gather(rank, [0, 1, 2]), gather(rank, [0, 1]) if rank < 2 else None]


def test_one_rank_apart_moves_all_to_sockets_and_no_other_gather():
    assert run_ranks(share_memory_by_two, 3) == [[[0, 1, 2], [0, 1]], [[], []], [[], None]]


def raise_in_the_body(rank):
    move_to_host(rank)

    def fail_body():
        with get_tensors_parallel(torch.ones(5), [0, 1]):
            if rank == 1:
                raise KeyError("planned")

    failed = attempt(fail_body)
    return [failed, gather(rank, [0, 1])]


def test_a_failure_ends_one_gather_over_sockets_and_the_next_works():
    (first, values), (second, _) = run_ranks(raise_in_the_body, 2)
    assert first["error"] == "RankFailedError" and first["rank"] == 1 and "planned" in first["text"]
    assert second["error"] == "KeyError" and values == [0, 1]


def die(rank, moment):
    move_to_host(rank)
    if moment == "after":
        gather(rank, [0, 1, 2])
        if rank == 1:
            kill_self()
    if moment == "in the transfer" and rank == 1:
        SocketMessages.publish = publish_and_die
    return attempt(lambda: gather(rank, [0, 1, 2]))


def publish_and_die(messages, header, tensors, publish=SocketMessages.publish):
    receipt = publish(messages, header, tensors)
    import threading

    threading.Timer(1.0, kill_self).start()
    messages._service._views = {}  # a reader that asks gets a refusal, and asks again
    return receipt


@pytest.mark.parametrize("moment", ["after", pytest.param("in the transfer", marks=pytest.mark.slow)])
@pytest.mark.timeout(150)
def test_a_death_is_named_on_all_others(moment):
    for result in run_ranks(die, 3, moment)[::2]:
        assert result["error"] == "RankFailedError" and result["rank"] == 1, result
        assert result["seconds"] < SOON_SECONDS, result


# ---- messages


@pytest.fixture
def pair():
    writer, reader = SocketMessages(), SocketMessages()
    yield writer, reader
    writer.close()
    reader.close()


def without_place(receipt, **changes):
    """Return a receipt that leads to the network's port, with other changes."""
    fields = json.loads(receipt)
    fields["service"] |= {"socket": "nowhere", **changes}
    return json.dumps(fields)


def test_a_process_without_the_token_gets_nothing(pair):
    writer, reader = pair
    receipt = writer.publish("secret", [torch.ones(1000)])
    assert reader.fetch(1, without_place(receipt))[0] == "secret"
    with pytest.raises(IncompleteError, match="rank 1"):
        SocketMessages().fetch(1, without_place(receipt, token=bytes(TOKEN_NBYTES).hex()))
    assert reader.fetch(1, without_place(receipt))[0] == "secret", "the service still serves its ranks"


def test_a_service_without_the_token_is_not_believed(pair):
    writer, reader = pair
    other = SocketMessages()
    receipt, false = writer.publish("", [torch.ones(9)]), other.publish("", [torch.zeros(9)])
    service = json.loads(false)["service"]
    with pytest.raises(IncompleteError):
        reader.fetch(1, without_place(receipt, port=service["port"]))
    other.close()


def test_a_change_on_the_way_is_found(pair):
    writer, reader = pair
    receipt = writer.publish("", [torch.zeros(100)])
    writer._contents[1]._content[50] = 1
    with pytest.raises(CorruptError, match="rank 1"):
        reader.fetch(1, receipt)


def test_a_writer_that_does_not_answer_is_incomplete(pair, monkeypatch):
    writer, reader = pair
    receipt, ticks = writer.publish("", [torch.ones(9)]), []
    monkeypatch.setattr(SocketMessages, "patience_seconds", 0.5)
    monkeypatch.setattr(byte_service.PeerService, "_attend", lambda *_: time.sleep(0.01))
    reader._check = lambda: ticks.append(1)
    begun = time.monotonic()
    with pytest.raises(IncompleteError, match="rank 1"):
        reader.fetch(1, receipt)
    assert ticks and time.monotonic() - begun < 20
