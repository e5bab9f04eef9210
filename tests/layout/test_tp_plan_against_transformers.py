"""The installed transformers is the judge: its styles cut real (empty) parameters on a world that is not there.

The only file that uses transformers' own names for this.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.layout.cut_layouts import elements
from xrank.layout import DeviceMesh
from xrank.layout.terms import from_placements, from_tp_plan
from xrank.layout.terms.tp_plan import STYLES

MESH = DeviceMesh((2, 2), ("dp", "tp"))


@pytest.fixture(scope="module")
def styles():
    parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
    pytest.importorskip("transformers.distributed.expert_parallel")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield parallel.ALL_PARALLEL_STYLES
    dist.destroy_process_group()


def test_no_style_is_unknown(styles):
    assert set(styles) == set(STYLES)


@pytest.mark.parametrize("style", sorted(STYLES))
def test_parameters_are_cut_as_transformers_cuts_them(styles, style):
    torch_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    mesh = DeviceMesh((2,), ("tp",))
    for parameter in ("weight", "bias", "down_proj_bias"):
        for shape in ((6,), (6, 4), (2, 6, 4), (3, 5), (2, 3, 5))[: 3 if "packed" in style else 5]:
            if style == "embedding_colwise" and len(shape) == 1:
                continue  # neither has a meaning
            module = torch.nn.Module()
            module.register_parameter(parameter, torch.nn.Parameter(torch.empty(shape, device="meta")))
            styles[style].shard_param(module, parameter, torch_mesh)
            cut = getattr(module, parameter)
            placements = getattr(cut, "placements", None)
            name = f"layers.0.module.{parameter}"
            mine = from_tp_plan({"layers.*.module": style}, mesh, {name: shape})[name]
            if placements is None:
                assert not any(mine.axes)
            else:
                theirs = from_placements(mesh, placements, len(shape))
                assert elements(mine, mesh, shape) == elements(theirs, mesh, shape), (parameter, shape)
                assert elements(mine, mesh, shape)[1][0] == tuple(cut.to_local().shape)


def test_rules_are_found_as_transformers_finds_them(styles):
    find = pytest.importorskip("transformers.distributed.parallel_utils")._get_parameter_plan
    plan = {"a.*.up": "colwise", "a.*.up.bias": "replicate", "a.*.1.w": "rowwise", "b": "embedding_rowwise"}
    names = ["a.0.up.weight", "a.0.up.bias", "a.0.1.w", "a.0.2.w", "b.weight", "b.0", "0.up.weight", "w1.up.x"]
    shapes = dict.fromkeys(names, (4, 6))
    layouts = from_tp_plan(plan, MESH, shapes)
    for name in names:
        style = find(name, plan) or "replicate"
        dims = {"colwise": ("tp",), "rowwise": (), "replicate": (), "embedding_rowwise": ("tp",)}[style]
        assert layouts[name].axes == (dims, ("tp",) if style == "rowwise" else ()), name
