"""Live modules of Megatron with contradictory or missing places are refused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from tests.readers.made_megatron import HIDDEN, Run, whole_model
from tests.workspace.made_modules import chunks_of, config, cut, locals_of, mesh_of, read_locals, whole_tensors
from xrank.errors import ContradictionError, IncompleteError, LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.readers.live.models import LocalModel, local_model

_DENSE = Run(tp=2, pp=2, chunks=((2, 1),))
_EXPERTS = Run(ep=2, chunks=((1,),), has_experts=True)
_GROUPED = Run(ep=2, chunks=((1,),), has_experts=True, in_one=True)


def test_process_groups_of_other_ranks_are_refused() -> None:
    run = Run(tp=2)
    (chunk,) = chunks_of(run, whole_model(run), 0)
    state = ModuleType("megatron.core.parallel_state")
    groups = {"tensor_model": [2, 3], "expert_tensor": [2, 3], "expert_model": [2], "pipeline_model": [2]}
    groups["expert_tensor_and_model"] = [2, 3]
    for name, ranks in groups.items():
        setattr(state, f"get_{name}_parallel_group", lambda ranks=ranks: ranks)
    state.model_parallel_is_initialized = lambda: True
    with (
        patch.dict(sys.modules, {"megatron.core.parallel_state": state}),
        patch("torch.distributed.get_process_group_ranks", lambda group: group),
    ):
        with pytest.raises(LayoutError, match="not those of rank 0"):
            local_model(chunk, rank=0, world_size=2)
        assert local_model(chunk, rank=2, world_size=4).record.meshes == ((("tp",), (2,), (2, 3)),)
        state.get_expert_tensor_and_model_parallel_group = lambda: [1, 2, 3]
        with pytest.raises(LayoutError, match="are not a grid"):
            local_model(chunk, rank=2, world_size=4)


def _layer(module: torch.nn.Module, name: str) -> torch.Tensor:
    return module.get_parameter(f"decoder.layers.0.{name}")


def _remove(*attributes: str) -> Callable[[torch.nn.Module], None]:
    def change(module: torch.nn.Module) -> None:
        for attribute in attributes:
            delattr(_layer(module, "mlp.linear_fc2.weight"), attribute)

    return change


def _number(*numbers: int | None) -> Callable[[torch.nn.Module], None]:
    def change(module: torch.nn.Module) -> None:
        for layer, number in zip(module.get_submodule("decoder.layers").children(), numbers, strict=False):
            layer.layer_number = number

    return change


def _with(name: str, parameter: torch.Tensor, dim: int | None = None) -> Callable[[torch.nn.Module], None]:
    def change(module: torch.nn.Module) -> None:
        *path, last = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(parameter.clone()))
        if dim is not None:
            cut(module.get_parameter(last), dim)

    return change


def _alone(module: torch.nn.Module) -> None:
    for layer in module.get_submodule("decoder.layers").children():
        del layer.mlp.linear_fc2, layer.mlp.linear_fc1.weight.partition_stride


_REFUSED: dict[str, tuple[Run, Callable[[torch.nn.Module], object], str, str]] = {
    "another dim": (
        _DENSE,
        lambda m: setattr(_layer(m, "mlp.linear_fc2.weight"), "partition_dim", 0),
        "contradict",
        "decoder.layers.0.mlp.linear_fc2.weight",
    ),
    "another stride": (
        _DENSE,
        lambda m: setattr(_layer(m, "self_attention.linear_qkv.weight"), "partition_stride", 3),
        "contradict",
        "decoder.layers.0.self_attention.linear_qkv.weight",
    ),
    "no attributes": (
        _DENSE,
        _remove("tensor_model_parallel", "partition_dim"),
        "contradict",
        "decoder.layers.0.mlp.linear_fc2.weight",
    ),
    "whole by its attributes": (
        _DENSE,
        lambda m: setattr(_layer(m, "mlp.linear_fc2.weight"), "tensor_model_parallel", False),
        "contradict",
        "decoder.layers.0.mlp.linear_fc2.weight",
    ),
    "a norm that is cut": (
        _DENSE,
        lambda m: cut(_layer(m, "pre_mlp_layernorm.weight"), 0),
        "contradict",
        "decoder.layers.0.pre_mlp_layernorm.weight",
    ),
    "a stride of halves where shapes say one projection": (
        Run(tp=2, gated=False),
        lambda m: setattr(_layer(m, "mlp.linear_fc1.weight"), "partition_stride", 2),
        "disagree",
        "decoder.layers.0.mlp.linear_fc1.weight",
    ),
    "a config of one projection where shapes say halves": (
        _DENSE,
        lambda m: setattr(
            m,
            "config",
            config(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, gated_linear_unit=False),
        ),
        "disagree",
        "decoder.layers.0.mlp.linear_fc1.weight",
    ),
    "alternating gate and up rows": (
        _DENSE,
        lambda m: setattr(
            m,
            "config",
            config(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, moe_mlp_glu_interleave_size=32),
        ),
        "alternating",
        "",
    ),
    "linear_fc1 of no known size": (
        _DENSE,
        _with("decoder.layers.0.mlp.linear_fc1.weight", torch.zeros(9, HIDDEN), 0),
        "not that of projections",
        "decoder.layers.0.mlp.linear_fc1.weight",
    ),
    "linear_fc1 alone": (
        Run(),
        _alone,
        "it is unknown whether",
        "decoder.layers.0.mlp.linear_fc1.weight",
    ),
    "layers without a number": (
        _DENSE,
        _number(None, None),
        "the number of this layer in the whole model is unknown",
        "decoder.layers.0",
    ),
    "layers with a gap": (
        _DENSE,
        _number(1, 3),
        "the number of this layer in the whole model is unknown",
        "decoder.layers.0",
    ),
    "layers before the first": (
        _DENSE,
        _number(0, 1),
        "the number of this layer in the whole model is unknown",
        "decoder.layers.0",
    ),
    "layers elsewhere": (
        _DENSE,
        _with("vision.layers.0.norm.weight", torch.ones(3)),
        "the number of this layer in the whole model is unknown",
        "vision.layers.0.norm.weight",
    ),
    "fc1 under an unknown name": (
        _DENSE,
        _with("language_model.mlp.linear_fc1.weight", torch.ones(4, 3), 0),
        "it is unknown how",
        "language_model.mlp.linear_fc1.weight",
    ),
    "experts without a number": (
        _EXPERTS,
        _with("decoder.layers.0.mlp.experts.router.weight", torch.ones(3)),
        "it is unknown how",
        "decoder.layers.0.mlp.experts.router.weight",
    ),
    "an expert that is marked as shared": (
        _EXPERTS,
        lambda m: setattr(_layer(m, "mlp.experts.local_experts.0.linear_fc1.weight"), "allreduce", True),
        "do not place it",
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight",
    ),
    "a norm that is marked as an expert's": (
        _EXPERTS,
        lambda m: setattr(_layer(m, "pre_mlp_layernorm.weight"), "allreduce", False),
        "mark it as an expert's weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
    ),
    "experts with a gap": (
        _EXPERTS,
        lambda m: delattr(m.get_submodule("decoder.layers.0.mlp.experts.local_experts"), "0"),
        "gaps",
        "",
    ),
    "fewer experts than config says": (
        _EXPERTS,
        lambda m: setattr(m, "config", config(expert_model_parallel_size=2, num_moe_experts=8)),
        "its share",
        "",
    ),
    "experts in one of unknown number": (
        _GROUPED,
        lambda m: delattr(m.get_submodule("decoder.layers.0.mlp.experts"), "num_local_experts"),
        "number of experts",
        "decoder.layers.0.mlp.experts.weight1",
    ),
    "experts in one that is turned": (
        _GROUPED,
        lambda m: setattr(
            m.get_submodule("decoder.layers.0.mlp.experts"),
            "weight2",
            torch.nn.Parameter(torch.zeros(HIDDEN, 24).T),
        ),
        "not a plain matrix",
        "decoder.layers.0.mlp.experts.weight2",
    ),
    "another tensor of a known name": (
        _DENSE,
        _with("decoder.layers.0.self_attention.linear_qkv.weight", torch.ones(4), 0),
        "dims",
        "decoder.layers.0.self_attention.linear_qkv.weight",
    ),
    "another mesh than config says": (
        _DENSE,
        lambda m: setattr(m, "config", config(tensor_model_parallel_size=4, pipeline_model_parallel_size=2)),
        "tensor_model_parallel_size",
        "",
    ),
}


@pytest.mark.parametrize(("run", "change", "words", "name"), _REFUSED.values(), ids=_REFUSED.keys())
def test_ambiguous_or_missing_facts_are_refused(
    run: Run, change: Callable[[torch.nn.Module], object], words: str, name: str
) -> None:
    (chunk,) = chunks_of(run, whole_model(run), 0)
    local_model(chunk, mesh=mesh_of(run), rank=0, world_size=run.world)
    change(chunk)
    with pytest.raises(LayoutError, match=words) as info:
        local_model(chunk, mesh=mesh_of(run), rank=0, world_size=run.world)
    assert info.value.rank == 0 and info.value.next_step
    assert (info.value.tensor or "") == name
    # The module as Megatron makes it.
    _assert_whole(run, whole_model(run), locals_of(run, whole_model(run)))


def test_a_mesh_with_other_axes_or_without_any_is_refused() -> None:
    run = Run(tp=2)
    (chunk,) = chunks_of(run, whole_model(run), 0)
    with pytest.raises(LayoutError, match="not one of Megatron's"):
        local_model(chunk, mesh=DeviceMesh.parse_grid("tensor=2"), rank=0, world_size=2)
    with pytest.raises(LayoutError, match="the mesh of its ranks is unknown"):
        local_model(chunk, rank=0, world_size=2)
    with pytest.raises(LayoutError, match="the mesh of its ranks is unknown"):
        local_model([chunk], layouts=LayoutMap(), rank=0, world_size=2)
    with pytest.raises(LayoutError, match="rank 2 is not in the mesh"):
        local_model(chunk, mesh=mesh_of(run), rank=2, world_size=3)
    with pytest.raises(UsageError, match="the model is a list of dicts"):
        local_model([{}], mesh=mesh_of(run), rank=0, world_size=2)
    # Experts' marks show that they lie on several ranks.
    experts = Run(ep=2, chunks=((1,),), has_experts=True)
    (chunk,) = chunks_of(experts, whole_model(experts), 0)
    with pytest.raises(LayoutError, match="mark it as an expert's weight"):
        local_model(chunk, mesh=DeviceMesh.parse_grid("dp=2"), rank=0, world_size=2)


def test_a_chunk_given_twice_is_refused() -> None:
    run = Run(tp=2)
    model = whole_model(run)
    chunks = [chunk for _ in range(2) for chunk in chunks_of(run, model, 0)]
    with pytest.raises(LayoutError, match="holds it twice") as raised:
        local_model(chunks, mesh=mesh_of(run), rank=0, world_size=2)
    assert "give each chunk once" in str(raised.value.next_step)
    _assert_whole(run, model, locals_of(run, model))


def test_ranks_that_do_not_fit_each_other_are_refused() -> None:
    run = Run(tp=2)
    model = whole_model(run)
    one, other = locals_of(run, model)
    (chunk,) = chunks_of(run, model, 1)
    del chunk.decoder.layers._modules["1"].pre_mlp_layernorm
    lacking = local_model(chunk, mesh=mesh_of(run), rank=1, world_size=2)
    with pytest.raises(IncompleteError, match=r"decoder.layers.1.pre_mlp_layernorm.weight: rank 1 .* holds no part"):
        read_locals([one, lacking])
    # Ranks that take themselves to stand elsewhere.
    turned = local_model(chunk, mesh=DeviceMesh((2,), ("tp",), (1, 0)), rank=1, world_size=2)
    with pytest.raises(ContradictionError, match="disagree about its layout or mesh"):
        read_locals([one, turned])
    read_locals([one, other])


_Change = Callable[[torch.nn.Module], object]


def _turn(module: torch.nn.Module, *, is_plain: bool) -> None:
    """Give the second weights of the experts in one the strides of a transposed matrix, or those of a plain one."""
    owner = module.get_submodule("decoder.layers.0.mlp.experts")
    old, values = owner.weight2, owner.weight2.detach()
    owner.weight2 = torch.nn.Parameter(values.contiguous() if is_plain else values.T.contiguous().T)
    vars(owner.weight2).update(vars(old))


def _grouped(module: torch.nn.Module) -> torch.nn.Module:
    return module.get_submodule("decoder.layers.0.mlp.experts")


_FOLLOWED: dict[str, tuple[Run, _Change, _Change]] = {
    "set num_local_experts on the module": (
        _GROUPED,
        lambda m: delattr(_grouped(m), "num_local_experts"),
        lambda m: setattr(_grouped(m), "num_local_experts", 2),
    ),
    "set num_local_experts": (
        _GROUPED,
        lambda m: setattr(_grouped(m), "num_local_experts", 5),
        lambda m: setattr(_grouped(m), "num_local_experts", 2),
    ),
    "make it contiguous": (_GROUPED, lambda m: _turn(m, is_plain=False), lambda m: _turn(m, is_plain=True)),
    "set layer_number on each module": (_DENSE, _number(1, 1), _number(1, 2)),
    "config.gated_linear_unit": (
        Run(tp=2),
        lambda m: setattr(m, "config", config(tensor_model_parallel_size=2, gated_linear_unit=False)),
        lambda m: setattr(m, "config", config(tensor_model_parallel_size=2, gated_linear_unit=True)),
    ),
}


@pytest.mark.parametrize("advice", _FOLLOWED)
def test_advice_that_is_followed(advice: str) -> None:
    """The rank's module, changed as advised, is its part of the whole model."""
    run, break_module, follow = _FOLLOWED[advice]
    model = whole_model(run)
    chunks = [chunks_of(run, model, rank) for rank in range(run.world)]
    assert all(len(each) == 1 for each in chunks)
    break_module(chunks[0][0])
    with pytest.raises(LayoutError) as raised:
        local_model(chunks[0][0], mesh=mesh_of(run), rank=0, world_size=run.world)
    assert advice in str(raised.value.next_step)
    follow(chunks[0][0])
    _assert_whole(
        run, model, [local_model(c, mesh=mesh_of(run), rank=r, world_size=run.world) for r, (c,) in enumerate(chunks)]
    )


def test_a_mesh_that_is_given_as_advised() -> None:
    run = _DENSE
    model = whole_model(run)
    (chunk,) = chunks_of(run, model, 0)
    for options, words in [
        ({}, "give mesh="),
        ({"mesh": DeviceMesh.parse_grid("pp=2 tp=4")}, "give the mesh of the run"),
    ]:
        chunk.config = config(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        with pytest.raises(LayoutError) as raised:
            local_model(chunk, rank=0, world_size=run.world, **options)
        assert words in str(raised.value.next_step)
    _assert_whole(run, model, locals_of(run, model))
    # Another grid of as many ranks is another refusal.
    with pytest.raises(LayoutError):
        local_model(chunk, mesh=DeviceMesh.parse_grid("pp=4"), rank=0, world_size=run.world)


def test_ranks_that_get_the_same_group_as_advised() -> None:
    run = Run(tp=2)
    model = whole_model(run)
    one, other = locals_of(run, model)
    with pytest.raises(ContradictionError, match="rank 0 describes itself as rank 1") as raised:
        read_locals([other, one])
    assert "the same process group" in str(raised.value.next_step)
    _assert_whole(run, model, [one, other])


def _assert_whole(run: Run, model: dict[str, torch.Tensor], locals_: list[LocalModel]) -> None:
    live = read_locals(locals_)
    found = whole_tensors(live.stored, live, [local.views for local in locals_])
    assert found.keys() == model.keys() and all(torch.equal(found[name], model[name]) for name in model)
