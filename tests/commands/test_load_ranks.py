"""Loads by four real ranks: every cut, sources of other cuts, and failures that all of them hear of."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import xrank
from tests.commands.loaded_modules import CUTS, assert_loaded, cut, is_zero, left, watched_reads, weights
from tests.readers.made_megatron import Run
from tests.recipes.made_checkpoints import as_megatron, tiny
from tests.workspace.made_modules import chunks_of, mesh_of
from xrank.errors import ContradictionError, RankFailedError, UsageError
from xrank.layout import DeviceMesh, LayoutMap

pytestmark = pytest.mark.timeout(300)  # the first of them starts the ranks, and imports what shards modules

EXAMPLE = Path(__file__).parents[2] / "examples" / "megatron_tp2_pp2.toml"


@pytest.mark.ranks(4)
def test_modules_of_every_cut_are_filled(rank, tmp_path):
    if rank == 0:
        left(tmp_path / "model")
    for how in CUTS:
        module = cut(how)
        places = {name: local_of(tensor).data_ptr() for name, tensor in module.state_dict().items()}
        versions = module.up.weight._version, local_of(module.up.weight.data)._version
        dist.barrier()
        report = xrank.load_model(module, tmp_path / "model")
        assert_loaded(module)
        assert {name: local_of(tensor).data_ptr() for name, tensor in module.state_dict().items()} == places, how
        assert module.up.weight._version > versions[0], how
        assert report.num_parameters == sum(local_of(parameter).numel() for parameter in module.parameters()) + 1, how
        module(torch.tensor([rank, 9])).backward() if how == "rows" else None


@pytest.mark.ranks(4)
def test_a_part_without_elements_may_have_any_shape(rank, tmp_path):
    """One column over two ranks leaves one of them none, and its rows are then cut to [0, 0] by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Sequential(nn.Linear(1, 8, bias=False))
    parallelize_module(module, mesh["tp"], {"0": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    assert local_of(module[0].weight).shape == ((0, 0) if rank % 2 else (4, 1))
    column = {"0.weight": torch.arange(8.0).view(8, 1)}
    if rank == 0:
        left(tmp_path / "model", column)
    dist.barrier()
    xrank.load_model(module, tmp_path / "model")
    if rank % 2 == 0:
        assert torch.equal(local_of(module[0].weight), column["0.weight"][2 * rank : 2 * rank + 4])


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.ranks(4)
def test_each_rank_reads_its_own_bytes_alone(rank, tmp_path):
    if rank == 0:
        left(tmp_path / "model")
    rows, columns = cut("rows"), cut("columns and rows")
    dist.barrier()
    reads = []
    with watched_reads(reads.append):
        report = xrank.load_model(rows, tmp_path / "model")
    own = sum(local_of(parameter).nbytes for parameter in rows.parameters()) + 8
    assert report.nbytes == own == sum(reads)
    # A format with checksums: what another rank reads of a record is not read here for its checksum alone.
    if rank == 0:
        xrank.NFSWorkspace(tmp_path / "ws", rank=0, world_size=1).write_configs_and_weights({}, weights())
    dist.barrier()
    reads.clear()
    with watched_reads(reads.append):
        proof = xrank.load_model(rows, tmp_path / "ws").proof
    assert sum(reads) == own and proof["num_checksums"] == 1  # of the tensor that each has whole
    reads.clear()
    with watched_reads(reads.append):
        report = xrank.load_model(columns, tmp_path / "model")
    # Of down.weight every rank has half of each row, and reads past the other halves between its own.
    assert report.nbytes <= sum(reads) <= report.nbytes + 8 * 6 * 4


@pytest.mark.ranks(4)
def test_wide_columns_are_read_alone(rank, tmp_path):
    """A cut of an inner dim whose rows are far apart: nothing between them is read."""
    name, whole = "wide", torch.arange(8 * 400_000, dtype=torch.float32).view(8, 400_000)
    if rank == 0:
        left(tmp_path / "model", {name: whole})
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    state = {name: distribute_tensor(torch.zeros_like(whole), mesh, [Shard(1)])}
    dist.barrier()
    reads = []
    with watched_reads(reads.append):
        report = xrank.load_model(state, tmp_path / "model", max_memory="2MB")
    assert torch.equal(state[name].to_local(), whole[:, rank * 100_000 : (rank + 1) * 100_000])
    assert sum(reads) == report.nbytes == whole.nbytes // 4


@pytest.mark.ranks(4)
def test_a_dcp_checkpoint_of_another_mesh_is_loaded(rank, tmp_path):
    for saved, loaded in (("rows", "both"), ("both", "replicated rows"), ("columns and rows", "plain")):
        module = cut(saved)
        if rank == 0:
            left(tmp_path / f"{saved} first")
        dist.barrier()
        xrank.load_model(module, tmp_path / f"{saved} first")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(module.state_dict(), checkpoint_id=str(tmp_path / saved))
        other = cut(loaded)
        report = xrank.load_model(other, tmp_path / saved)
        assert report.source["format"] == "dcp"
        assert_loaded(other)


@pytest.mark.ranks(4)
def test_what_was_exported_is_loaded_into_any_other_cut(rank, tmp_path):
    if rank == 0:
        left(tmp_path / "model")
    dist.barrier()
    for how, other in (("rows", "both"), ("both", "columns and rows"), ("replicated rows", "plain")):
        module, again = cut(how), cut(other)
        xrank.load_model(module, tmp_path / "model")
        xrank.export_model(module, tmp_path / how)
        report = xrank.load_model(again, tmp_path / how)
        assert_loaded(again)
        # What a rank holds whole, the manifest proves.
        assert report.proof["num_digests"] >= (7 if other == "plain" else 1)


@pytest.mark.ranks(4)
def test_stages_have_names_of_their_own(rank, tmp_path):
    """Each rank a part of the names, one of them two names; what no rank has is refused on all of them."""
    layers = {f"layer.{i}": torch.full((3,), float(i)) for i in range(5)}
    if rank == 0:
        left(tmp_path / "model", layers)
        left(tmp_path / "more", {**layers, "layer.5": torch.ones(3), "layer.6": torch.ones(3)})
        left(tmp_path / "less", {name: tensor for name, tensor in layers.items() if name != "layer.2"})
    dist.barrier()
    state = {name: torch.zeros(3) for name in (f"layer.{rank}", *(["layer.4"] if rank == 3 else []))}
    for folder, tensor in (("more", "layer.5"), ("less", "layer.2")):
        with pytest.raises(UsageError) as raised:
            xrank.load_model(state, tmp_path / folder)
        assert raised.value.tensor == tensor
        assert not any(tensor.any() for tensor in state.values())
    assert "layer.5, layer.6 only in the source" in state_error(tmp_path / "more", state)
    xrank.load_model(state, tmp_path / "model")
    assert all(torch.equal(tensor, layers[name]) for name, tensor in state.items())


def state_error(folder: Path, state: dict[str, torch.Tensor]) -> str:
    with pytest.raises(UsageError) as raised:
        xrank.load_model(state, folder)
    return str(raised.value.got)


@pytest.mark.ranks(4)
def test_what_is_wrong_on_one_rank_is_named_on_all(rank, tmp_path):
    if rank == 0:
        left(tmp_path / "model")
        left(tmp_path / "another")
    dist.barrier()
    module = cut("plain")
    if rank == 2:
        module.odd = nn.Linear(8, 6)
    with pytest.raises(UsageError if rank == 2 else RankFailedError, match=r"odd\.weight: its shape") as raised:
        xrank.load_model(module, tmp_path / "model")
    assert rank == 2 or raised.value.rank == 2
    assert not module.up.weight.any()
    module = cut("rows")
    with pytest.raises(ContradictionError, match="rank 1 sees a different source than rank 0"):
        xrank.load_model(module, tmp_path / ("another" if rank == 1 else "model"))
    assert is_zero(module)
    xrank.load_model(module, tmp_path / "model")
    assert_loaded(module)


@pytest.mark.ranks(4)
def test_a_rank_that_fails_while_bytes_move_is_named_on_all(rank, tmp_path):
    if rank == 0:
        left(tmp_path / "model")
    dist.barrier()
    module = cut("rows")

    def fail(nbytes: int) -> None:
        if rank == 1:
            raise OSError("the disk is gone")

    with watched_reads(fail), pytest.raises((OSError, RankFailedError), match="the disk is gone") as raised:
        xrank.load_model(module, tmp_path / "model")
    assert rank == 1 or raised.value.rank == 1
    xrank.load_model(module, tmp_path / "model")  # the same call again fills all
    assert_loaded(module)


@pytest.mark.ranks(4)
def test_a_group_of_some_ranks_loads_alone(rank, tmp_path):
    if rank == 0:
        left(tmp_path / "model")
    dist.barrier()
    pair = dist.new_group([1, 3])
    layouts = LayoutMap()
    layouts["up.weight"] = "[f/tp, h]"
    state = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    state["up.weight"] = torch.zeros(6, 8)
    if rank in (1, 3):
        mesh = DeviceMesh((2,), ("tp",), (1, 3))
        xrank.load_model(state, tmp_path / "model", layouts=layouts, mesh=mesh, group=pair)
        half = weights()["up.weight"][:6] if rank == 1 else weights()["up.weight"][6:]
        assert torch.equal(state["up.weight"], half) and state["steps"] == weights()["steps"]
        alone = dist.new_group([rank], use_local_synchronization=True)
        state["up.weight"] = torch.zeros(12, 8)
        xrank.load_model(state, tmp_path / "model", group=alone)
        assert torch.equal(state["up.weight"], weights()["up.weight"])


@pytest.mark.ranks(4)
def test_modules_of_megatrons_are_filled(rank, tmp_path):
    """Tensor parallel 2 x pipeline parallel 2, two chunks on each rank, by recipe; rank 1 has rows of padding alone."""
    run = Run(tp=2, pp=2, chunks=((1, 1), (1, 1)))
    if rank == 0:
        model = tiny("llama", num_hidden_layers=4)
        model.save_pretrained(tmp_path / "model")
        torch.save(as_megatron(model, vocab=80), tmp_path / "named.pt")
    dist.barrier()
    named = torch.load(tmp_path / "named.pt", weights_only=True)
    expected = [chunk.state_dict() for chunk in chunks_of(run, named, rank)]
    chunks = chunks_of(run, {name: torch.full_like(tensor, 9.0) for name, tensor in named.items()}, rank)
    report = xrank.load_model(chunks, tmp_path / "model", mesh=mesh_of(run), recipe="megatron-llama")
    for chunk, state in zip(chunks, expected, strict=True):
        found = chunk.state_dict()
        for name, tensor in state.items():
            is_padded = name.endswith(("word_embeddings.weight", "output_layer.weight"))
            num_rows = min(len(tensor), max(0, 37 - rank % 2 * 40)) if is_padded else len(tensor)
            assert torch.equal(found[name][:num_rows], tensor[:num_rows]) and not found[name][num_rows:].any(), name
    assert "43 of " in dict(report.notes)["padded"]


@pytest.mark.ranks(8)
def test_megatrons_parts_come_from_a_model_folder(rank, tmp_path):
    """Names counted by stage, fused projections, experts on a view of the mesh, a padded vocabulary: by recipe."""
    names = {
        "model.embed_tokens.weight": (300, 24), "lm_head.weight": (300, 24), "model.norm.weight": (24,),
    }  # fmt: skip
    for layer in range(4):
        at = f"model.layers.{layer}."
        names |= {
            f"{at}input_layernorm.weight": (24,), f"{at}post_attention_layernorm.weight": (24,),
            f"{at}self_attn.q_proj.weight": (48, 24), f"{at}self_attn.k_proj.weight": (16, 24),
            f"{at}self_attn.v_proj.weight": (16, 24), f"{at}self_attn.o_proj.weight": (24, 48),
            f"{at}mlp.gate_proj.weight": (20, 24), f"{at}mlp.up_proj.weight": (20, 24),
            f"{at}mlp.down_proj.weight": (24, 20),
        }  # fmt: skip
    layout = tmp_path / "layout.toml"
    if rank == 0:
        torch.manual_seed(4)
        left(tmp_path / "model", {name: torch.randn(shape) for name, shape in names.items()})
        (tmp_path / "model" / "config.json").write_text(
            '{"model_type": "llama", "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 4, '
            '"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, '
            '"tie_word_embeddings": false}'
        )
        text = EXAMPLE.read_text()
        for name, size in {"L": 4, "r": 3, "d": 8}.items():
            text = re.sub(rf"^{name} = \d+", f"{name} = {size}", text, flags=re.MULTILINE)
        layout.write_text(text)
        xrank.reshard_checkpoint(tmp_path / "model", layout, tmp_path / "ws", recipe="megatron-llama")
    dist.barrier()
    expected = torch.load(tmp_path / "ws" / f"rank_{rank}_state.pth", weights_only=True)["weight"]
    assert any(name.startswith("decoder.layers.1.") for name in expected)
    state = {name: torch.full_like(tensor, 9.0) for name, tensor in expected.items()}
    report = xrank.load_model(state, tmp_path / "model", layouts=layout, recipe="megatron-llama")
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
    assert report.source["recipe"] == "megatron-llama"
    # And back: the states of those ranks into a module under Hugging Face's names, whole on every rank.
    whole = {name: torch.zeros(shape) for name, shape in names.items()}
    xrank.load_model(whole, tmp_path / "ws", recipe="megatron-llama")
    assert all(tensor.any() for tensor in whole.values())
    if rank == 0:
        saved = xrank.open_checkpoint(tmp_path / "model")
        assert [name for name, tensor in saved.items() if not torch.equal(whole[name], tensor)] == []
