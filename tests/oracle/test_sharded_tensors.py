"""Megatron-core's own ShardedTensors as the judge: what they compute of random cuts, layers and experts, and refuse."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import is_main_replica

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.local_part import local_part
from xrank.layout.nests import addresses
from xrank.layout.terms import from_sharded_tensor, to_sharded_tensors

CASES = 400
FACTS = (
    *("key", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id"),
    *("prepend_axis_num", "allow_shape_mismatch", "flattened_range"),
)


def made_case(rng: random.Random):
    """Return (layout, mesh, shape): some axes cut dims evenly, one each, the others hold replicas."""
    lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    mesh = DeviceMesh(lengths, ["pp", "dp", "tp"][: len(lengths)])
    ndim = rng.randint(1, 3)
    axes: list[str | None] = [None] * ndim
    for axis in rng.sample(mesh.axis_names, len(lengths)):
        dim = rng.randint(0, ndim)
        if dim < ndim and axes[dim] is None:
            axes[dim] = axis
    shape = tuple((mesh.axis_length(axis) if axis else 1) * rng.randint(1, 3) for axis in axes)
    return TensorLayout(axes, mesh), mesh, shape


def of_megatron(layout: TensorLayout, mesh: DeviceMesh, shape, num_prepended: int):
    """Return rank -> its ShardedTensors, as Megatron's models make them: offsets in fragments along each axis."""
    told = {}
    axes = [cut[0] if cut else None for cut in layout.axes]
    replicated = [axis for axis in mesh.axis_names if axis not in axes]
    for rank in mesh.ranks:
        at = mesh.coordinate(rank)
        part = local_part(layout, mesh, at, shape)
        pairs = sorted(pair for nest in part.nests for pair in addresses(nest))
        values = torch.tensor([y for _, y in pairs], dtype=torch.int64).reshape(part.shape)
        replica = 0
        for axis in replicated:
            replica = replica * mesh.axis_length(axis) + at[axis]
        cuts = [
            (dim, at[axis], mesh.axis_length(axis))
            for dim, axis in enumerate(axes)
            if axis is not None and dim >= num_prepended
        ]
        told[rank] = []
        # A layer or an expert is a tensor of its own here, at its place along an axis that is put in front.
        for index in product(*map(range, part.shape[:num_prepended])):
            places = [
                (dim, (at[axes[dim]] if axes[dim] else 0) * part.shape[dim] + index[dim], shape[dim])
                for dim in range(num_prepended)
            ]
            told[rank].append(
                ShardedTensor.from_rank_offsets(
                    "w", values[index], *places, *cuts, replica_id=replica, prepend_axis_num=num_prepended
                )
            )
    return told


def test_offsets_are_megatrons_over_hundreds_of_random_cuts():
    rng = random.Random(16)
    prepended = replicas = 0
    for _ in range(CASES):
        layout, mesh, shape = made_case(rng)
        count = rng.randint(0, len(shape) - 1)
        theirs = of_megatron(layout, mesh, shape, count)
        mine = to_sharded_tensors(layout, mesh, shape, "w", prepend_axis_num=count)
        for rank in mesh.ranks:
            for one, other in zip(mine[rank], theirs[rank], strict=True):
                assert {name: getattr(one, name) for name in FACTS} == {name: getattr(other, name) for name in FACTS}
                assert one.is_main == is_main_replica(other.replica_id)
                # Megatron finds the same place in the global tensor, of which ours holds the addresses.
                whole = torch.arange(prod(shape)).reshape(shape)
                assert torch.equal(whole[other.global_slice()], other.data), (layout, rank)
        # And back, from Megatron's own objects.
        placed = from_sharded_tensor(theirs, mesh)
        assert placed.shape == shape
        for rank, parts in placed.parts.items():
            held = [y for part in parts for nest in part.nests for _, y in sorted(addresses(nest))]
            assert held == [y for shard in theirs[rank] for y in shard.data.flatten().tolist()]
        assert placed.layout is not None
        assert to_sharded_tensors(placed.layout, mesh, shape, "w", prepend_axis_num=count) == mine
        prepended += count > 0
        replicas += any(not one.is_main for shards in mine.values() for one in shards)
    assert prepended > CASES / 4 and replicas > CASES / 8, (prepended, replicas)


def test_a_tensor_of_one_stage_alone():
    """An embedding on the first stage: the other ranks have no ShardedTensor of its key."""
    mesh = DeviceMesh((2, 2, 2), ("pp", "dp", "tp"))
    data = torch.arange(12).reshape(6, 2)
    told = {
        rank: [ShardedTensor.from_rank_offsets("embed", data.chunk(2)[at["tp"]], (0, at["tp"], 2), replica_id=at["dp"])]
        if at["pp"] == 0
        else []
        for rank in mesh.ranks
        for at in (mesh.coordinate(rank),)
    }
    placed = from_sharded_tensor(told, mesh)
    assert str(placed.layout) == "[d0/tp, d1] where pp=0"
    mine = to_sharded_tensors(placed.layout, mesh, (6, 2), "embed")
    for rank in mesh.ranks:
        for one, other in zip(mine[rank], told[rank], strict=True):
            assert {name: getattr(one, name) for name in FACTS} == {name: getattr(other, name) for name in FACTS}


def test_gate_and_up_are_the_shards_that_megatron_splits_them_into():
    """As transformer/mlp.py:apply_swiglu_sharded_factory builds them: two entries with doubled fragments."""
    mesh = DeviceMesh((2,), ("tp",))
    fused = torch.arange(24).reshape(12, 2)  # gate, then up
    told = {}
    for tp in range(2):
        local = torch.cat([half.chunk(2)[tp] for half in fused.chunk(2)])
        gate, up = local.chunk(2)
        told[tp] = [
            ShardedTensor.from_rank_offsets("fc1", gate, (0, tp, 4)),
            ShardedTensor.from_rank_offsets("fc1", up, (0, tp + 2, 4)),
        ]
    placed = from_sharded_tensor(told, mesh)
    assert str(placed.layout) == "[2 d0/tp, d1]"
    mine = to_sharded_tensors(TensorLayout.parse("[<gate: f/tp | up: f/tp>, h]"), mesh, (12, 2), "fc1")
    for tp in range(2):
        for one, other in zip(mine[tp], told[tp], strict=True):
            assert {name: getattr(one, name) for name in FACTS} == {name: getattr(other, name) for name in FACTS}


@pytest.mark.parametrize("break_it", ["offset", "shape", "fragments", "flat"])
def test_what_megatron_refuses_is_refused(break_it):
    good = ShardedTensor.from_rank_offsets("w", torch.zeros(3, 2), (0, 1, 2))
    match break_it:
        case "offset":
            good.global_offset = (2, 0)
        case "shape":
            good.local_shape = (3,)
        case "fragments":
            good.axis_fragmentations = (3, 1)
        case "flat":
            good.flattened_range = slice(0, 3)
    with pytest.raises(Exception):  # noqa: B017
        good.validate_metadata_integrity()
        good.global_slice()
        good.local_chunk_offset_in_global()
        assert good.axis_fragmentations[0] * good.local_shape[0] == good.global_shape[0]
    with pytest.raises(LayoutError):
        from_sharded_tensor({0: good})
