"""A gather of one's own, tested: on virtual devices in milliseconds, then as four real ranks.

    pytest -p xrank.testing.plugin examples/own_gather_test.py

The gather below joins columns that ranks hold unevenly, in the order of ranks. The first test finds wrong sizes and
wrong orders on any mesh, without a process; the second runs the like on torch.distributed, where a rank that hangs is
named with its stack; the third shows what a caller hears of a rank that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from xrank import get_tensors_parallel
from xrank.errors import RankFailedError
from xrank.virtual import VirtualCluster, VirtualDevice

ROWS = 3


def columns_of(rank: int) -> int:
    """Return how many columns a rank holds: all differ."""
    return rank + 1


def gather_columns(device: VirtualDevice, whole: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the whole matrix on every device of a row of the mesh, of which each holds some columns."""
    place = device.coordinate["tp"]
    start = sum(map(columns_of, range(place)))
    joined: np.ndarray[Any, Any] = device.all_gather(whole[:, start : start + columns_of(place)], "tp", dim=1)
    return joined


def whole_matrix(num_ranks: int) -> np.ndarray[Any, Any]:
    """Return a matrix without two equal elements."""
    num_columns = sum(map(columns_of, range(num_ranks)))
    return np.arange(ROWS * num_columns, dtype=np.float32).reshape(ROWS, num_columns)


@pytest.mark.parametrize("algorithm", ["push", "ring"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_device_has_the_whole(
    virtual_cluster: Callable[..., VirtualCluster], make_mesh: Callable[[int], Any], tp: int, algorithm: str
) -> None:
    """Each row of the mesh joins its own columns, and sends no byte more than it must."""
    whole = whole_matrix(tp)
    run = virtual_cluster(make_mesh(tp), algorithm=algorithm).run(gather_columns, whole)
    assert all(np.array_equal(output, whole) for output in run.outputs)
    assert run.statistics.nbytes == 2 * (tp - 1) * whole.nbytes  # two rows, each column to tp - 1 others


@pytest.fixture
def make_mesh() -> Callable[[int], Any]:
    """Return what makes a mesh of two rows of so many devices."""
    from xrank.layout import DeviceMesh

    return lambda tp: DeviceMesh((2, tp), ("dp", "tp"))


@pytest.mark.ranks(4)
def test_four_real_ranks(rank: int, world_size: int) -> None:
    """The body runs on each of four gloo processes."""
    whole = torch.from_numpy(whole_matrix(world_size))
    start = sum(map(columns_of, range(rank)))
    with get_tensors_parallel(whole[:, start : start + columns_of(rank)], list(range(world_size))) as parts:
        if rank == 0:
            assert torch.equal(torch.cat(parts, dim=1), whole)
    dist.barrier()


def test_a_device_that_fails_is_named(virtual_cluster: Callable[..., VirtualCluster]) -> None:
    """The caller hears which device failed, and why; the others do not hang."""

    def gather(device: VirtualDevice) -> Any:
        if device.index == 2:
            raise FileNotFoundError("no shard here")
        return device.all_gather(np.ones(2))

    with pytest.raises(RankFailedError, match="device 2 failed: FileNotFoundError: no shard here"):
        virtual_cluster(4, engine="processes").run(gather)
