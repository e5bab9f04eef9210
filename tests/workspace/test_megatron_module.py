"""Live modules cut as Megatron cuts them are described as what they are: equal to the model before it was cut."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.readers.made_megatron import HIDDEN, Run, whole_model
from tests.recipes.made_checkpoints import MIXED, as_megatron, config_of, saved, tiny
from tests.workspace.made_modules import (
    chunks_of,
    cut,
    locals_of,
    mesh_of,
    module_of,
    read_locals,
    whole_tensors,
)
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.readers.live.models import local_model
from xrank.recipes.recipe_choice import choose_recipe, follow_recipe

_RUNS = {
    "tp2-pp2": Run(tp=2, pp=2, chunks=((1, 1),)),
    "tp2-pp2-vpp2-tied-bias": Run(tp=2, pp=2, chunks=((1, 1), (1, 1)), tied=True, bias=True),
    "uneven-stages": Run(tp=2, pp=2, chunks=((1, 2),)),
    "one-projection": Run(tp=2, gated=False, bias=True),
    "dp2-tp2": Run(tp=2, dp=2, chunks=((1,),)),
    "ep2-pp2-tp2": Run(tp=2, pp=2, ep=2, chunks=((1, 1),), has_experts=True),
    "ep2-dp2-grouped": Run(ep=2, dp=2, chunks=((1,),), has_experts=True, grouped=True),
    "ep2-tp2-in-one": Run(tp=2, ep=2, chunks=((1,),), has_experts=True, in_one=True),
    "tp2-etp1": Run(tp=2, ep=2, etp=1, chunks=((1,),), has_experts=True),
}


_EXPERTS = Run(ep=2, chunks=((1,),), has_experts=True)


def _assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("run", _RUNS.values(), ids=_RUNS.keys())
def test_chunks_of_all_ranks_are_the_model_they_were_cut_from(run: Run) -> None:
    model = whole_model(run)
    locals_ = locals_of(run, model)
    live = read_locals(locals_)
    if run.tied:  # the last stage's copy is a replica of the embedding
        del model["output_layer.weight"]
    _assert_same(whole_tensors(live.stored, live, [local.views for local in locals_]), model)


@pytest.mark.parametrize("family", ["llama", "mixtral", *MIXED])
def test_a_recipe_makes_them_hugging_faces(family: str) -> None:
    model = tiny(family, num_hidden_layers=2)
    # Rows of padding, as Megatron pads a vocabulary to a multiple.
    named = as_megatron(model, vocab=40)
    run = Run(tp=2, pp=2, ep=1 if family == "llama" else 2, chunks=((1, 1),))
    locals_ = locals_of(run, named)
    live = read_locals(locals_)
    match = choose_recipe(live.stored, config_of(model), None)
    assert match is not None and match.recipe.name == f"megatron-{family.replace('_', '-')}"
    stored = follow_recipe(live.stored, match, config_of(model))
    _assert_same(whole_tensors(stored, live, [local.views for local in locals_]), saved(model))


@pytest.mark.ranks(4)
def test_ranks_of_a_torch_mesh(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    run = Run(tp=2, pp=2, chunks=((1, 1), (1, 1)), bias=True)
    model = whole_model(run)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    local = local_model(chunks_of(run, model, rank), mesh=mesh, rank=rank, world_size=4)
    told: list[Any] = [None] * 4
    torch.distributed.all_gather_object(told, (local.describe(), local.views))
    live = read_locals([SimpleNamespace(describe=lambda text=text: text) for text, _ in told])
    _assert_same(whole_tensors(live.stored, live, [views for _, views in told]), model)

    # A module after Megatron and FSDP2: its placements do not contain Megatron's cuts.
    from torch.distributed.tensor import DTensor, Shard

    chunks = chunks_of(run, model, rank)
    owner = chunks[0].get_submodule("decoder.layers.0.mlp.linear_fc2")
    owner.weight = torch.nn.Parameter(DTensor.from_local(owner.weight.detach(), mesh["tp"], [Shard(1)]))
    with pytest.raises(LayoutError, match="it is a DTensor") as info:
        local_model(chunks, mesh=mesh, rank=rank, world_size=4)
    assert info.value.tensor == f"decoder.layers.{rank // 2}.mlp.linear_fc2.weight"


def test_nothing_is_copied() -> None:
    run = Run(tp=2, ep=2, chunks=((1,),), has_experts=True, in_one=True)
    (chunk,) = chunks_of(run, whole_model(run), 1)
    local = local_model(chunk, mesh=mesh_of(run), rank=1, world_size=4)
    held = {parameter.data_ptr() for parameter in chunk.parameters()}
    assert {view.data_ptr() for view in local.views} == held


def test_wrappers_and_their_prefix_are_left_out() -> None:
    run = Run(tp=2)
    (chunk,) = chunks_of(run, whole_model(run), 0)
    half, outer = torch.nn.Module(), torch.nn.Module()
    half.module = chunk  # Float16Module, and DistributedDataParallel around it
    outer.module = half
    plain, wrapped = (local_model(m, mesh=mesh_of(run), rank=0, world_size=2) for m in (chunk, outer))
    assert wrapped.describe() == plain.describe()


def test_sizes_show_the_cut_of_layers_without_attributes() -> None:
    """`perform_initialization=False` leaves weights without attributes; their modules have sizes per partition."""
    run = Run(tp=2, bias=True)
    model = whole_model(run)
    locals_ = []
    for rank in range(2):
        (chunk,) = chunks_of(run, model, rank)
        for name, module in chunk.named_modules():
            if re.search(r"linear_(?:proj|fc2)$", name):
                module.input_size_per_partition = 1
            elif re.search(r"linear_(?:qkv|fc1)$|output_layer$", name):
                module.output_size_per_partition = 1
            elif name.endswith("word_embeddings"):
                module.num_embeddings_per_partition = 1
        for name, parameter in chunk.named_parameters():
            if name.endswith("weight") and hasattr(parameter, "partition_dim"):
                del parameter.partition_dim, parameter.tensor_model_parallel
        locals_.append(local_model(chunk, mesh=mesh_of(run), rank=rank, world_size=2))
    live = read_locals(locals_)
    _assert_same(whole_tensors(live.stored, live, [local.views for local in locals_]), model)


def test_transformer_engines_marks_are_not_believed_where_they_are_not_meant() -> None:
    """For a layer without a parallel mode they contain dim 0, whatever Megatron cut."""
    run = Run(tp=2)
    model = whole_model(run)
    extra = "decoder.layers.0.self_attention.linear_q_down_proj"
    locals_ = []
    for rank in range(2):
        (chunk,) = chunks_of(run, model, rank)
        fc2 = chunk.get_submodule("decoder.layers.1.mlp.linear_fc2")
        fc2.parallel_mode = None
        cut(fc2.weight, 0)
        duplicate = module_of({"weight": torch.arange(6.0).view(2, 3)}, run, 0)
        duplicate.parallel_mode = None
        cut(duplicate.weight, 0)
        chunk.get_submodule(extra.rpartition(".")[0]).add_module("linear_q_down_proj", duplicate)
        locals_.append(local_model(chunk, mesh=mesh_of(run), rank=rank, world_size=2))
    live = read_locals(locals_)
    expected = {**model, f"{extra}.weight": torch.arange(6.0).view(2, 3)}
    found = whole_tensors(live.stored, live, [local.views for local in locals_])
    _assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))


def test_attributes_define_the_cut_of_unknown_names() -> None:
    """`partition_stride` n: n pieces lie end to end, of each every rank has its part."""
    whole = torch.arange(24.0).view(12, 2)
    locals_ = []
    for rank in range(2):
        state = {"a.weight": whole.chunk(2)[rank], "b.weight": whole.chunk(2, 1)[rank].contiguous(), "c.weight": whole}
        state["d.weight"] = whole.view(3, 2, 2, 2)[:, rank].reshape(6, 2)
        module = module_of(state, Run(), 0)
        for name, dim, stride in (("a", 0, 1), ("b", 1, 1), ("d", 0, 3)):
            cut(module.get_submodule(name).weight, dim, stride)
        locals_.append(local_model(module, mesh=DeviceMesh.parse_grid("tp=2"), rank=rank, world_size=2))
    live = read_locals(locals_)
    found = whole_tensors(live.stored, live, [local.views for local in locals_])
    _assert_same(found, {f"{name}.weight": whole for name in "abcd"})


@pytest.mark.parametrize("mesh", [None, DeviceMesh((2,), ("tp",)), DeviceMesh((1, 2), ("x", "tp"))], ids=str)
def test_a_rule_goes_before_names_and_attributes(mesh: DeviceMesh | None) -> None:
    run = Run(tp=2)
    layouts = LayoutMap(mesh)
    layouts["a.in_proj.weight"] = "[<x: 2/tp | y: 4/tp>, h]"
    whole = torch.arange(12.0).view(6, 2)
    locals_ = []
    for rank in range(2):
        part = torch.cat([whole[:2].chunk(2)[rank], whole[2:].chunk(2)[rank]])
        module = module_of({"a.in_proj.weight": part}, run, 0)
        cut(module.get_submodule("a.in_proj").weight, 0)
        locals_.append(local_model(module, layouts=layouts, mesh=mesh_of(run), rank=rank, world_size=2))
        with pytest.raises(LayoutError, match="it is unknown how Megatron splits") as info:
            local_model(module, mesh=mesh_of(run), rank=rank, world_size=2)
        assert info.value.tensor == "a.in_proj.weight" and info.value.rank == rank
    assert locals_[0].record.meshes == ((mesh.axis_names, mesh.shape, (0, 1)),) if mesh else True
    live = read_locals(locals_)
    found = whole_tensors(live.stored, live, [local.views for local in locals_])
    _assert_same(found, {"a.in_proj.weight": whole})


@pytest.mark.parametrize("run", [Run(tp=2, pp=2, chunks=((1, 1),)), _EXPERTS], ids=["stages", "experts"])
def test_a_rule_on_the_mesh_of_all_ranks_is_of_those_that_share_the_tensor(run: Run) -> None:
    """A tensor lies on one stage, and an expert on its own ranks, whatever else the mesh has."""
    model, mesh = whole_model(run), mesh_of(run)
    layouts = LayoutMap(mesh)
    layouts[r".*linear_fc1\.weight"] = "[<gate: f/tp | up: f/tp>, h]"
    layouts[r".*layernorm\.weight"] = "[h]"
    locals_ = locals_of(run, model, layouts=layouts)
    record = locals_[0].record
    norm = record.tensors["decoder.layers.0.pre_mlp_layernorm.weight"].mesh
    assert norm is not None and record.meshes[norm][2] == tuple(range(run.world // run.pp))
    live = read_locals(locals_)
    _assert_same(whole_tensors(live.stored, live, [local.views for local in locals_]), model)


def test_whole_tensors_of_an_expert_are_on_its_own_ranks_alone() -> None:
    run = Run(ep=2, tp=2, chunks=((1,),), has_experts=True)
    model = whole_model(run)
    for expert in range(4):
        model[f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc2.bias"] = torch.rand(HIDDEN)
    locals_ = locals_of(run, model)
    live = read_locals(locals_)
    found = whole_tensors(live.stored, live, [local.views for local in locals_])
    _assert_same(dict(sorted(found.items())), dict(sorted(model.items())))


def test_modules_of_megatrons_are_known_without_attributes() -> None:
    run = Run(pp=2, chunks=((1, 1),))
    (chunk,) = chunks_of(run, whole_model(run), 1)
    expected = local_model(chunk, mesh=mesh_of(run), rank=1, world_size=2).describe()
    for parameter in chunk.parameters():
        parameter.__dict__.clear()
    chunk.decoder.__class__ = type("TransformerBlock", (torch.nn.Module,), {"__module__": "megatron.core.transformer"})
    # Nothing is cut over one rank of tp, whatever the names.
    assert local_model(chunk, mesh=mesh_of(run), rank=1, world_size=2).describe() == expected


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_process_alone_needs_no_mesh(is_marked: bool) -> None:
    run = Run()
    model = whole_model(run)
    (chunk,) = chunks_of(run, model, 0)
    for parameter in () if is_marked else list(chunk.parameters())[1:]:
        parameter.__dict__.clear()
    local = local_model(chunk, rank=0, world_size=1)
    live = read_locals([local])
    _assert_same(whole_tensors(live.stored, live, [local.views]), model)


def test_layers_of_a_whole_model_need_no_number() -> None:
    run = Run(tp=2)
    (chunk,) = chunks_of(run, whole_model(run), 0)
    expected = local_model(chunk, mesh=mesh_of(run), rank=0, world_size=2).describe()
    for layer in chunk.get_submodule("decoder.layers").children():
        del layer.layer_number
    assert local_model(chunk, mesh=mesh_of(run), rank=0, world_size=2).describe() == expected
