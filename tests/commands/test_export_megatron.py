"""Exports of modules that Megatron cut are the folder that `save_pretrained` makes of the whole model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from torch.distributed import ProcessGroup, new_group

import xrank
from tests.commands.exported import assert_same_folder
from tests.readers.made_megatron import Run
from tests.recipes.made_checkpoints import as_megatron, tiny
from tests.workspace.made_modules import chunks_of, mesh_of
from xrank.layout.mesh import megatron_views

pytestmark = pytest.mark.timeout(300)

_RUNS = {
    "llama": Run(tp=2, pp=2, chunks=((1, 2),)),
    "llama in virtual stages": Run(tp=2, pp=2, chunks=((1, 1), (1, 0))),
    "mixtral": Run(pp=2, ep=2, chunks=((1, 2),)),
    "mixtral with etp": Run(tp=2, ep=2, etp=1, chunks=((3,),)),
}


def _groups(run: Run, rank: int) -> ModuleType:
    """Return what stands for megatron.core.parallel_state: its groups, in its order of ranks."""
    views = megatron_views(run.world, tp=run.tp, ep=run.ep, pp=run.pp, etp=run.etp)
    expert = views.view("expert")
    wanted = {
        "tensor_model_parallel": views.main.groups("tp"),
        "pipeline_model_parallel": views.main.groups("pp"),
        "expert_tensor_parallel": expert.groups("etp"),
        "expert_model_parallel": expert.groups("ep"),
        "expert_tensor_and_model_parallel": expert.groups("etp", "ep"),
    }
    module = ModuleType("megatron.core.parallel_state")
    module.model_parallel_is_initialized = lambda: True
    for name, groups in wanted.items():
        made: list[tuple[tuple[int, ...], ProcessGroup]] = [(ranks, new_group(list(ranks))) for ranks in groups]
        own = next(group for ranks, group in made if rank in ranks)
        setattr(module, f"get_{name}_group", lambda own=own: own)
    return module


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "has_mesh"),
    [("llama", True), ("llama in virtual stages", False), ("mixtral", False), ("mixtral with etp", True)],
)
def test_it_loads_in_transformers_and_says_the_same(rank: int, tmp_path: Path, kind: str, has_mesh: bool) -> None:
    run = _RUNS[kind]
    if rank == 0:  # the vocabulary's 37 rows are padded as Megatron pads them
        model = tiny(kind.split()[0])
        model.save_pretrained(tmp_path / "want")
        torch.save(as_megatron(model, vocab=40), tmp_path / "named.pt")
    torch.distributed.barrier()
    chunks = chunks_of(run, torch.load(tmp_path / "named.pt"), rank)
    # Either the caller says where ranks stand, or Megatron's own process groups do.
    with patch.dict(sys.modules, {} if has_mesh else {"megatron.core.parallel_state": _groups(run, rank)}):
        mesh = mesh_of(run) if has_mesh else None
        report = xrank.export_model(chunks, tmp_path / "out", mesh=mesh, base_model=tmp_path / "want")
    assert report.ok and report.source["recipe"] == f"megatron-{kind.split()[0]}"
    if rank == 0:
        import transformers

        assert_same_folder(tmp_path / "out", tmp_path / "want")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        tokens = torch.tensor([[3, 1, 4, 15, 9, 2, 6]])
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, model(tokens).logits)
