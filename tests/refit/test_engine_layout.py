"""Layouts of engines, recorded from their own loaders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xrank
from benchmarks.fused_engine import FusedEngine, Sizes, whole_shapes
from tests.refit import jobs
from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.local_part import local_part
from xrank.layout.nests import addresses

SIZES = Sizes(hidden=8, ffn=16, vocab=17, layers=2, heads=4, kv_heads=2, head=4)
SHAPES = {name: ("BF16", shape) for name, shape in whole_shapes(SIZES).items()}


def record(world_size: int) -> LayoutMap:
    def make_rank(rank: int) -> Any:
        engine = FusedEngine(SIZES, rank, world_size).to("meta")
        return engine.load_weights, dict(engine.named_parameters())

    return xrank.record_layouts(make_rank, SHAPES, DeviceMesh((world_size,), ("tp",)))


def test_fused_padded_and_repeated_parts_become_cuts_of_the_checkpoint() -> None:
    layouts = record(4)
    assert {rule: str(layouts[rule]) for rule in layouts} == {
        "model.embed_tokens.weight": "[17/tp{8,8,1,0}, 8]",  # the last rank has padding alone
        "model.layers.{n2}.self_attn.q_proj.weight": "[16/tp, 8]",
        "model.layers.{n2}.self_attn.k_proj.weight": "[8/tp2, 8] in tp2",
        "model.layers.{n2}.self_attn.v_proj.weight": "[8/tp2, 8] in tp2",
        "model.layers.{n2}.self_attn.o_proj.weight": "[8, 16/tp]",
        "model.layers.{n2}.mlp.gate_proj.weight": "[16/tp, 8]",
        "model.layers.{n2}.mlp.up_proj.weight": "[16/tp, 8]",
        "model.layers.{n2}.mlp.down_proj.weight": "[8, 16/tp]",
        "model.layers.{n2}.input_layernorm.weight": "[8]",
        "model.layers.{n2}.post_attention_layernorm.weight": "[8]",
        "model.norm.weight": "[8]",
        "lm_head.weight": "[17/tp{8,8,1,0}, 8]",
    }
    assert layouts.sizes == {"n2": 2}
    assert layouts.rule_for("model.layers.1.self_attn.q_proj.weight") == "model.layers.{n2}.self_attn.q_proj.weight"
    assert {name: view.grid for name, view in layouts.views.items()} == {"tp2": "tp2=2 tp_rest=2"}


def test_each_rank_holds_what_its_loader_reads(tmp_path: Any) -> None:
    """The loader takes numbered elements; those that arrive on a rank are those of its parts."""
    record(4).write(tmp_path / "engine.toml")
    layouts = LayoutMap.read(tmp_path / "engine.toml")
    start, whole = 1, {}
    for name, (_, shape) in SHAPES.items():
        size = torch.Size(shape).numel()
        whole[name] = torch.arange(start, start + size, dtype=torch.float64).view(shape)
        start += size
    for rank in range(4):
        engine = FusedEngine(SIZES, rank, 4, dtype=torch.float64)
        engine.load_weights(whole.items())
        arrived = {int(value) for parameter in engine.parameters() for value in parameter.flatten() if value}
        held = set()
        for name, tensor in whole.items():
            layout = layouts[name]
            assert layout is not None
            part = local_part(layout, layouts.device_mesh, {"tp": rank}, tensor.shape)
            assert part is not None
            held |= {int(tensor.flatten()[y]) for nest in part.nests for _, y in addresses(nest)}
        assert arrived == held


def stage_and_experts(rank: int) -> Any:
    """Return a rank of two stages of two ranks that share three experts; the last layer has none."""
    stage, place = divmod(rank, 2)
    mine = [f"layers.{stage}.experts.{expert}.w" for expert in range(3) if expert % 2 == place and stage == 0]
    parameters = {name: torch.empty(2, 3, device="meta") for name in [*mine, f"layers.{stage}.norm.w"]}

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in parameters:
                parameters[name].copy_(tensor)

    return load, parameters


def test_stages_and_experts_by_name_are_where_they_are() -> None:
    names = [*(f"layers.0.experts.{expert}.w" for expert in range(3)), "layers.0.norm.w", "layers.1.norm.w"]
    shapes = dict.fromkeys(names, ("F32", (2, 3)))
    layouts = xrank.record_layouts(stage_and_experts, shapes, DeviceMesh((2, 2), ("pp", "ep")))
    assert {rule: str(layouts[rule]) for rule in layouts} == {
        "layers.{n1}.experts.0.w": "[2, 3] where pp=0, ep=0",
        "layers.{n1}.experts.1.w": "[2, 3] where pp=0, ep=1",
        "layers.{n1}.experts.2.w": "[2, 3] where pp=0, ep=0",
        "layers.0.norm.w": "[2, 3] where pp=0",
        "layers.1.norm.w": "[2, 3] where pp=1",
    }


def test_a_tensor_that_a_loader_changes_counts_as_whole() -> None:
    def make_rank(rank: int) -> Any:
        half = torch.empty(2, 3, device="meta")
        return lambda weights: [half.copy_(2 * tensor[2 * rank : 2 * rank + 2]) for _, tensor in weights], {"w": half}

    layouts = xrank.record_layouts(make_rank, {"w": ("F32", (4, 3))}, DeviceMesh((2,), ("tp",)))
    assert str(layouts["w"]) == "[4, 3]"


@pytest.mark.parametrize(
    ("starts", "match"), [((0, 1), "not splits by the axes of 'tp=2'"), ((0, None), "never writes")], ids=str
)
def test_parts_that_no_mesh_gives_and_gaps_are_refused(starts: Any, match: str) -> None:
    def make_rank(rank: int) -> Any:
        half, start = torch.empty(2, 3, device="meta"), starts[rank]

        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                if start is not None:
                    half.copy_(tensor[start : start + 2])

        return load, {"half": half}

    with pytest.raises((LayoutError, UsageError), match=match):
        xrank.record_layouts(make_rank, {"w": ("F32", (4, 3))}, DeviceMesh((2,), ("tp",)))


def test_parts_by_a_recorded_file_are_filled(run_jobs: Any, tmp_path: Path) -> None:
    """Each rank has its parts under the checkpoint's names, cut as the file says."""

    def make_rank(rank: int) -> Any:
        engine = FusedEngine(jobs.SIZES, rank, 4).to("meta")
        return engine.load_weights, dict(engine.named_parameters())

    shapes = {name: ("BF16", shape) for name, shape in whole_shapes(jobs.SIZES).items()}
    xrank.record_layouts(make_rank, shapes, DeviceMesh((4,), ("tp",))).write(tmp_path / "engine.toml")
    address = str(tmp_path / "address")
    run_jobs((4, jobs.train, (address, 2, 4)), (4, serve_parts, (address, str(tmp_path / "engine.toml"))))


def serve_parts(address: str, file: str) -> None:
    layouts, rank = LayoutMap.read(file), dist.get_rank()
    steps = [jobs.whole_tensors(step) for step in (1, 2)]
    parts = {name: torch.zeros_like(jobs.part_of(whole, layouts[name], rank)) for name, whole in steps[0].items()}
    with xrank.take_weights(parts, address, layouts=layouts) as weights:
        for step, wanted in enumerate(steps, 1):
            report = weights.update(timeout_seconds=60)
            assert report.step == step and not report.unused, report
            assert all(parts[name].equal(jobs.part_of(whole, layouts[name], rank)) for name, whole in wanted.items())
