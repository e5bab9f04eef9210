"""Workspaces on network file systems, between two mounts that know nothing of each other's caches."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from xrank import NFSWorkspace, get_configs_parallel
from xrank.errors import IncompleteError

# ---- what a workspace has to live with: without these, the other tests here would prove nothing


def write_in_place(path, content):
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def hides_what_it_once_missed(here, there):
    if (there / "missed").exists():
        return False
    write_in_place(here / "missed", b"new")
    return not (there / "missed").exists()


def shows_the_last_bearer_of_a_name(here, there):
    write_in_place(here / "reused", b"old")
    assert (there / "reused").read_bytes() == b"old"
    os.unlink(here / "reused")
    write_in_place(here / "reused", b"new")
    return (there / "reused").read_bytes() == b"old"


def shows_an_old_size(here, there):
    write_in_place(here / "grown", b"old")
    assert (there / "grown").read_bytes() == b"old"
    assert (there / "grown").stat().st_size == 3
    write_in_place(here / "grown", b"much more than that")
    return len((there / "grown").read_bytes()) == 3


def shows_an_old_listing(here, there):
    os.listdir(there)
    write_in_place(here / "listed", b"")
    return "listed" not in os.listdir(there)


HAZARDS = {
    "sshfs": [shows_an_old_size, shows_an_old_listing],
    "sshfs-cached": [
        hides_what_it_once_missed,
        shows_the_last_bearer_of_a_name,
        shows_an_old_size,
        shows_an_old_listing,
    ],
    "glusterfs": [shows_the_last_bearer_of_a_name, shows_an_old_size],
}


def test_the_hazards_are_there(two_mounts):
    here, there = two_mounts.paths
    for hazard in HAZARDS[two_mounts.file_system]:
        # A cache may happen to be too old in a slow moment, hardly in each of five.
        tries = [f"{hazard.__name__}-{number}" for number in range(5)]
        for name in tries:
            (here / name).mkdir()
        assert any(hazard(here / name, there / name) for name in tries), hazard.__name__


# ---- states


@pytest.mark.ranks(2)
def test_who_was_told_reads_the_others_state(two_mounts, rank):
    other = 1 - rank
    for number in range(12):
        path = two_mounts.paths[rank] / f"round-{number}"
        workspace = NFSWorkspace(path, rank=rank, world_size=2, run_id=f"run{number}")
        value = float(2 * number + rank)
        workspace.write_configs_and_weights({"value": value}, {"w": torch.full((10_000 * number + 1,), value)})
        dist.barrier()
        value = float(2 * number + other)
        config, weights = workspace.read_configs_and_weights_from_rank(other)
        assert config == {"value": value}
        assert torch.equal(weights["w"], torch.full((10_000 * number + 1,), value))


@pytest.mark.ranks(2)
def test_a_rewritten_state_is_at_worst_an_earlier_one(two_mounts, rank):
    """The name stays, so a cache may give the last file; never parts of two, and never one before what was seen."""
    workspace = NFSWorkspace(two_mounts.paths[rank], rank=rank, world_size=2, run_id="run")
    seen = 0

    def look(number):
        nonlocal seen
        try:
            config, weights = workspace.read_configs_and_weights_from_rank(0)
        except IncompleteError:
            # Each time the name was asked for, the cache gave a file that is no more on the server (ESTALE).
            return
        assert seen <= config["number"] <= number
        seen = config["number"]
        assert torch.equal(weights["w"], torch.full((300_000,), float(seen)))

    for number in range(12):
        if rank == 0:
            workspace.write_configs_and_weights({"number": number}, {"w": torch.full((300_000,), float(number))})
        dist.barrier()
        if rank == 1:
            look(number)
        dist.barrier()
    # The cached mount would take its ten seconds, and more: kernel_cache keeps pages as long as sizes do not change.
    if rank == 1 and two_mounts.file_system != "sshfs-cached":
        deadline = time.monotonic() + 100
        while seen < 11:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            look(11)


# ---- live gathers through a directory

NUM_LAYERS = 12
NUM_TIMES = 20  # a gather takes some ten milliseconds here


@pytest.mark.ranks(2)
def test_every_layer_of_a_live_gather_is_its_own(two_mounts, rank):
    """Each gather is of one layer, as a pipeline's export does it; each value says whose, which and when."""
    path = two_mounts.paths[rank]
    for time_number in range(NUM_TIMES):
        for layer in range(NUM_LAYERS):
            value = float(1000 * time_number + 2 * layer)
            config = None if rank == 1 and layer == 3 else {"layer": layer, "w": torch.full((3,), value + rank)}
            with get_configs_parallel(config, [0, 1], None, workspace_path=path) as configs:
                if rank == 1:
                    assert configs == []
                    continue
                own, others = configs
                assert own["layer"] == layer and own["w"].tolist() == [value] * 3
                if layer == 3:
                    assert others is None
                else:
                    assert os.listdir(two_mounts.served)  # that is the way it came
                    assert others["layer"] == layer and others["w"].tolist() == [value + 1] * 3
    dist.barrier()
    if rank == 0:
        left = [name for _, _, names in os.walk(two_mounts.served) for name in names]
        assert left == []
