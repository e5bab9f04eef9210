"""The part of a live model on a rank: its tensors in place, each view once, under the plain module's names."""

from __future__ import annotations

import json

import pytest
import torch

from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.readers.live.models import local_model


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"not": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def test_nothing_is_copied_and_ties_share_a_view() -> None:
    module = Tied()
    local = local_model(module, rank=0, world_size=1)
    assert sorted(local.tensors) == ["embed.weight", "head.weight", "steps"]
    assert len(local.views) == 2 and local.view_of["embed.weight"] == local.view_of["head.weight"]
    assert local.tensors["embed.weight"].data_ptr() == module.embed.weight.data_ptr()
    assert not any(view.requires_grad for view in local.views)


def test_a_tensor_whose_name_ends_as_an_extra_states_is_no_extra_state() -> None:
    module = Tied()
    module.my_extra_state = torch.nn.Parameter(torch.ones(2))
    outer = torch.nn.Sequential(module)
    names = {"embed.weight", "head.weight", "steps", "my_extra_state"}
    assert set(local_model(module, rank=0, world_size=1).tensors) == names
    assert set(local_model(outer, rank=0, world_size=1).tensors) == {f"0.{name}" for name in names}


def test_names_are_those_of_the_plain_module() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Outer(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.block = inner

    wrapped = torch.compile(Outer(checkpoint_wrapper(torch.nn.Linear(2, 2))), backend="eager")
    assert sorted(local_model(wrapped, rank=0, world_size=1).tensors) == ["block.bias", "block.weight"]


def test_a_stage_without_weights_holds_nothing() -> None:
    stage = torch.nn.Sequential(torch.nn.Dropout())
    stage.register_buffer("hidden", torch.ones(2), persistent=False)
    assert local_model(stage, rank=0, world_size=1).tensors == {}


def test_views_that_only_begin_alike_are_two() -> None:
    base = torch.rand(4, 4)
    empty = {"a": torch.empty(0, 2), "b": torch.empty(0, 2)}
    tensors = {
        "all": base,
        "again": base.view(4, 4),
        "part": base[:2],
        "turned": base.t(),
        "bits": base.view(torch.int32),
    }
    local = local_model({**tensors, **empty}, rank=0, world_size=1)
    assert local.view_of["all"] == local.view_of["again"]
    assert len(local.views) == 6


def test_the_description_has_dtype_shape_view_and_place() -> None:
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["w"] = "[f/tp, h]"
    told = json.loads(
        local_model({"w": torch.rand(2, 3).bfloat16().t().t()}, layouts=layouts, rank=1, world_size=2).describe()
    )
    assert told["tensors"] == {"w": ["bfloat16", [2, 3], 0]} and told["views"] == [12]
    record = json.loads(told["record"])
    assert (record["rank"], record["world_size"]) == (1, 2) and record["tensors"]["w"]["layout"] == "[f/tp, h]"


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(2, device="meta"), torch.eye(2).to_sparse(), [1.0]],
    ids=["meta", "sparse", "list"],
)
def test_tensors_without_bytes_are_refused_by_name(tensor: object) -> None:
    with pytest.raises(UsageError) as caught:
        local_model({"w": tensor}, rank=0, world_size=1)
    assert caught.value.tensor == "w"


def test_a_tensor_whose_storage_was_freed_is_refused_before_it_is_read() -> None:
    freed, short = torch.ones(3, 4), torch.ones(8)[2:].as_strided((2, 2), (4, 1))
    freed.untyped_storage().resize_(0)
    short.untyped_storage().resize_(7 * 4)  # it reaches to the eighth element
    for tensor in (freed, torch.nn.Parameter(freed), short):
        with pytest.raises(UsageError, match="here has no memory: its storage was freed") as raised:
            local_model({"here": tensor}, rank=0, world_size=1)
        assert raised.value.tensor == "here"
    whole = torch.ones(8)[2:].as_strided((2, 2), (4, 1))
    empty = torch.ones(0, 4)
    assert len(local_model({"whole": whole, "empty": empty}, rank=0, world_size=1).views) == 2


def test_a_layout_that_does_not_fit_is_refused_by_name() -> None:
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["w"] = "[f/tp]"
    with pytest.raises(LayoutError) as caught:
        local_model({"w": torch.rand(2, 2)}, layouts=layouts, rank=0, world_size=2)
    assert caught.value.tensor == "w"


@pytest.mark.ranks(2)
def test_a_module_of_fsdp1_is_refused_before_it_gathers_itself(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(UsageError, match="FSDP1"):
        local_model(module, rank=rank, world_size=2)


@pytest.mark.ranks(2)
def test_a_dtensor_is_its_local_part_and_its_placements(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Linear(3, 5)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    local = local_model(module, rank=rank, world_size=2)
    assert [tuple(view.shape) for view in local.views] == [(3, 3), (3,)] if rank == 0 else [(2, 3), (2,)]
    assert local.record.tensors["weight"].shape == (5, 3) and "dp" in str(local.record.tensors["weight"].layout)
    assert local.tensors["weight"].data_ptr() == module.weight.to_local().data_ptr()
