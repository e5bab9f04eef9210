"""Right gradients raise no alarm: 100 seeded runs over every mesh, way and dtype; and torch's own sharded modules."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.gradients.parallel_models import (
    Stage,
    cut,
    place_of,
    reference_gradients,
    run_step,
)
from tests.gradients.wires import batch_of, loss_of, make_module, mean_gradients
from tests.sampled import sampled
from xrank.errors import LayoutError, UsageError
from xrank.gradients import (
    DistributedDataParallel,
    GradientConfig,
    GradientPlan,
    check_gradients,
)
from xrank.layout import DeviceMesh

pytestmark = pytest.mark.timeout(120)

_MESHES: list[dict[str, int]] = [
    {},
    {"cp": 2},
    {"tp": 2},
    {"tp": 4},
    {"tp": 2, "ep": 4},
    {"pp": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "ep": 2},
    {"ep": 2},
    {"cp": 2, "ep": 4},
]
_RUNS_EACH = 5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the first seeds of each test: of 100 runs in `make soak`, else of 20."""
    if "start" in metafunc.fixturenames:
        num_runs = 100 if metafunc.config.getoption("soak") else 20
        metafunc.parametrize("start", sampled(range(0, num_runs, _RUNS_EACH), 4))


@pytest.mark.ranks(4, timeout_seconds=90)
def test_right_gradients_raise_no_alarm(rank: int, world_size: int, start: int) -> None:
    for seed in range(start, start + _RUNS_EACH):
        draw = random.Random(seed)
        sizes, dtype = draw.choice(_MESHES), (torch.float32, torch.bfloat16)[seed % 2]
        options: dict[str, Any] = {"use_distributed_optimizer": draw.random() < 0.5}
        options["grad_reduce_in_fp32"] = draw.random() < 0.5
        if draw.random() < 0.5:
            options |= {"overlap_grad_reduce": True, "bucket_size": draw.choice((16, 64, 200))}
        num_microbatches, by_tokens = draw.choice((1, 2)), draw.random() < 0.3
        place = place_of(rank, world_size, **sizes)
        model = Stage(place, dtype, seed)
        config = GradientConfig(qk_layernorm=True, calculate_per_token_loss=by_tokens, **options)
        ddp = DistributedDataParallel(model, GradientPlan.from_module(model, place.views, config))
        run_step(ddp, place, num_microbatches, by_tokens=by_tokens, seed=seed)
        whole, _ = reference_gradients(by_tokens=by_tokens, dtype=dtype, seed=seed)
        wanted = {name: cut(name, one, place) for name, one in whole.items()}
        check = check_gradients(ddp, ddp.plan, reference=wanted)
        assert check.is_right, f"seed {seed}, {sizes}, {dtype}, {config}: {check}"


def _sharded(mesh: Any, data_axes: Any = None, tensor_axis: str | None = None) -> nn.Module:
    """Return the module cut by torch: columns of the first layer along an axis, then FSDP2 over the data axes."""
    module = make_module()
    if tensor_axis is not None:
        parallelize_module(module, mesh[tensor_axis], {"layers.0": ColwiseParallel(output_layouts=Replicate())})
    over = mesh if data_axes is None else mesh[data_axes]
    for layer in module.layers:
        fully_shard(layer, mesh=over)
    fully_shard(module, mesh=over)
    return module


@pytest.mark.ranks(4, timeout_seconds=90)
def test_torchs_own_sharded_modules_raise_no_alarm(rank: int) -> None:
    """FSDP2 with its own nameless mesh and with names of frameworks, hybrid, beside tp, and over a merged axis."""
    whole = mean_gradients(make_module(), batch_of())
    pairs = [(("dp", "tp"), "dp", "tp"), (("fsdp", "tensor"), "fsdp", "tensor"), (("data", "model"), "data", "model")]
    cases: list[tuple[Any, Any, str | None]] = [(init_device_mesh("cpu", (4,)), None, None)]
    hybrid = [("dp_replicate", "dp_shard"), ("replicate", "shard")]
    cases += [(init_device_mesh("cpu", (2, 2), mesh_dim_names=names), None, None) for names in hybrid]
    cases += [(init_device_mesh("cpu", (2, 2), mesh_dim_names=names), data, model) for names, data, model in pairs]
    merged = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    merged["dp_shard", "cp"]._flatten("dp_shard_cp")
    cases.append((merged, "dp_shard_cp", None))
    for mesh, data_axes, tensor_axis in cases:
        module = _sharded(mesh, data_axes, tensor_axis)
        # Ranks along tp have the same rows.
        rows = batch_of().chunk(2)[rank // 2] if tensor_axis else batch_of().chunk(4)[rank]
        loss_of(module(rows)).backward()
        plan = GradientPlan.from_module(module, mesh)
        assert len(plan.data_ranks) == (2 if tensor_axis else 4)
        check = check_gradients(module, plan, reference=whole)
        assert check.is_right, f"{mesh}: {check}"
        name = "layers.0.weight"
        wrong = {other: one.grad * (2 if other == name else 1) for other, one in module.named_parameters()}
        (finding,) = check_gradients(wrong, plan, reference=whole).findings
        assert (finding.kind, finding.name, finding.ranks) == ("scale", name, (0, 1, 2, 3))


@pytest.mark.ranks(2)
def test_axes_of_other_names_are_mapped(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("nodes",))
    module = make_module()
    fully_shard(module, mesh=mesh)
    with pytest.raises(LayoutError, match="'nodes', but it is unknown how gradients are reduced along it") as caught:
        GradientPlan.from_module(module, mesh)
    assert caught.value.next_step is not None and "axes={'nodes': 'dp'}" in caught.value.next_step
    assert GradientPlan.from_module(module, mesh, axes={"nodes": "dp_replicate"}).data_ranks == (0, 1)
    with pytest.raises(LayoutError, match="two axes of the mesh 'dp=1 data=2' would be 'dp'"):
        GradientPlan.from_module(module, DeviceMesh((1, 2), ("dp", "data")))


@pytest.mark.ranks(2)
def test_a_buffer_with_unknown_slices_is_refused_on_all_ranks(rank: int) -> None:
    module = make_module()
    config = GradientConfig(use_distributed_optimizer=True)
    plan = GradientPlan.from_module(module, DeviceMesh((2,), ("dp",)), config)
    own: Mapping[str, torch.Tensor] = mean_gradients(module, batch_of())
    assert check_gradients(own, plan, reference=own)
    if rank == 1:
        buffer = torch.zeros(sum(one.numel() for one in own.values()))
        own = {name: buffer[: one.numel()].view(one.shape) for name, one in own.items()}
    with pytest.raises(UsageError, match=r"its gradient is a view .* of a buffer that the plan") as caught:
        check_gradients(own, plan)
    assert caught.value.rank == 1
