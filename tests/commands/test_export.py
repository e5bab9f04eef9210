"""Exports of live models: any sharding over any ranks is the folder that `save_pretrained` makes of the whole one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import xrank
from tests.commands.adapted_models import adapter, base_model, wrapped
from tests.commands.exported import assert_same_folder, llama, mixtral, qwen3_moe, shard, tensors_of
from tests.sampled import sampled
from xrank.errors import ContradictionError, IncompleteError, LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap

pytestmark = pytest.mark.timeout(300)


def same_as_saved(rank: int, folder: Path, model, kind: str, world_size: int) -> None:
    """Export a sharded model beside what `save_pretrained` makes of it before, and load it in transformers."""
    import transformers

    if rank == 0:
        model.save_pretrained(folder / "want")
        with torch.no_grad():
            logits = model(torch.arange(9)[None]).logits
    report = xrank.export_model(shard(model, kind, world_size), folder / "out")
    assert report.ok and report.source["world_size"] == world_size
    reports = [None] * world_size
    dist.all_gather_object(reports, report)
    assert reports == [report] * world_size
    if rank == 0:
        assert_same_folder(folder / "out", folder / "want")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
        with torch.no_grad():
            assert torch.equal(loaded(torch.arange(9)[None]).logits, logits)
        assert xrank.verify_model(folder / "out").ok


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", sampled(["fsdp tp", "fsdp", "tp", "hsdp"], 4))
def test_a_sharded_llama_is_what_the_whole_one_saves(rank, world_size, tmp_path, kind):
    same_as_saved(rank, tmp_path, llama(), kind, world_size)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("made", [mixtral, qwen3_moe], ids=["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("kind", sampled(["hsdp", "fsdp"], 2))
def test_experts_are_saved_one_by_one(rank, world_size, tmp_path, kind, made):
    same_as_saved(rank, tmp_path, made(), kind, world_size)


@pytest.mark.ranks(8)
def test_a_llama_over_eight_ranks(rank, world_size, tmp_path):
    same_as_saved(rank, tmp_path, llama(tie_word_embeddings=True), "fsdp tp", world_size)


@pytest.mark.ranks(4)
def test_what_is_asked_of_the_output(rank, tmp_path):
    """A cast, small files, other config, a base model for names and config, an output that is replaced."""
    model, want = llama(), llama().bfloat16()
    if rank == 0:
        want.save_pretrained(tmp_path / "want")
        (tmp_path / "want" / "tokenizer.json").write_text("{}")
    shard(model, "fsdp", 4)
    out = tmp_path / "out"
    asked = {"dtype": torch.bfloat16, "max_shard_size": "20KB", "config_overrides": {"rope_parameters": {"x": 1}}}
    report = xrank.export_model(model, out, **asked)
    assert len(report.output["files"]) > 2 and set(report.output["cast"].values()) == {"F32 -> BF16"}
    if rank == 0:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(tensors_of(tmp_path / "want"))
        config, saved = (json.loads((path / "config.json").read_text()) for path in (out, tmp_path / "want"))
        assert config["rope_parameters"] == {**saved["rope_parameters"], "x": 1}
        assert {**config, "rope_parameters": 0} == {**saved, "rope_parameters": 0} and config["dtype"] == "bfloat16"
    again = xrank.export_model(model, out, base_model=tmp_path / "want", dtype="base", overwrite=True)
    assert again.proof["base_model"] == "names and shapes"
    if rank == 0:
        assert_same_folder(out, tmp_path / "want")
        assert (out / "tokenizer.json").read_text() == "{}"
    assert model.config.architectures is None and model.config.dtype != "bfloat16", "the module's own config stays"


@pytest.mark.ranks(4)
def test_ranks_of_a_group_alone(rank, tmp_path):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensors = {"w": torch.full((2, 3), rank), "n": torch.ones(2)}
    layouts = LayoutMap()
    layouts["w"] = "[f/tp, h]"
    mesh = DeviceMesh((2,), ("tp",), (0, 2) if rank % 2 == 0 else (1, 3))
    xrank.export_model(tensors, tmp_path / str(rank % 2), layouts=layouts, mesh=mesh, group=pairs[rank % 2])
    dist.barrier()
    made = tensors_of(tmp_path / str(rank % 2))
    assert made["w"].tolist() == [[rank % 2] * 3] * 2 + [[rank % 2 + 2] * 3] * 2 and made["n"].tolist() == [1, 1]


@pytest.mark.ranks(4)
def test_what_cannot_be_exported_is_refused_on_every_rank(rank, tmp_path):
    mesh, part = DeviceMesh((4,), ("tp",)), torch.arange(6.0).view(2, 3) + rank
    rows = LayoutMap(mesh)
    rows["w"] = "[f/tp, h]"
    cases = [
        # Cut tensors of which nothing says so are compared as replicas.
        ({"w": part}, {}, ContradictionError, "different values than rank 0"),
        ({"w": part} if rank != 2 else {"v": part}, {"layouts": rows}, IncompleteError, "w"),
        ({"w": part.to(torch.float64 if rank == 3 else torch.float32)}, {"layouts": rows}, ContradictionError, "dtype"),
        ({"w": part}, {"layouts": rows, "dtype": "fp8"}, UsageError, "fp8"),
        ({"w": part}, {"layouts": rows, "dtype": torch.int8}, UsageError, "int8"),
        ({"w": part}, {"layouts": rows, "mesh": 4}, UsageError, "mesh"),
        ({"w": part}, {"layouts": rows, "recipe": "llama"}, UsageError, "llama"),
        ({"w": part}, {"layouts": rows, "base_model": tmp_path / "none"}, UsageError, "none"),
        ({"w": part}, {"layouts": rows, "max_memory": "1KB"}, UsageError, "memory"),
        (
            {"w": part},
            {"layouts": rows, "max_memory": "1KB" if rank == 1 else "64MB"},
            UsageError,
            "rank 1 has max_memory",
        ),
        ({"w": part}, {"layouts": rows, "adapter": "merge"}, UsageError, "no adapter"),
        ({"w": part}, {"layouts": rows, "config_overrides": {"x": {1}}}, UsageError, "JSON"),
        ({"w": part, "a/../b": torch.ones(1)}, {"layouts": rows}, xrank.errors.UnsafeError, "name"),
    ]
    for tensors, options, kind, text in cases:
        with pytest.raises(kind) as caught:
            xrank.export_model(tensors, tmp_path / "out", timeout_seconds=20, **options)
        error = caught.value
        assert text in f"{error} {error.got} {error.tensor}", (text, error.to_dict())
        assert error.next_step or kind is not ContradictionError
    assert not list(tmp_path.iterdir())
    layouts = LayoutMap(mesh)
    layouts["w"] = "[f/tp]"
    with pytest.raises(LayoutError, match="w"):
        xrank.export_model({"w": part}, tmp_path / "out", layouts=layouts)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_memory_is_a_budget(rank, tmp_path):
    """300 MB over 2 ranks, 16 MB of buffers: neither rank's peak rises by more than some 40 MB beside what it holds."""
    layouts, tensors = LayoutMap(DeviceMesh((2,), ("tp",))), {}
    for i in range(6):
        name = f"{i}.w"
        # Columns: every window is of both ranks, and half of it comes from the other's memory.
        layouts[name] = "[f, h/tp]" if i % 2 else "[f/tp, h]"
        tensors[name] = torch.full((3125, 2000) if i % 2 else (1562, 4000), float(i))
    xrank.export_model({"w": torch.ones(2)}, tmp_path / "small")
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmHWM")
    xrank.export_model(tensors, tmp_path / "out", layouts=layouts, max_memory="16MB")
    grown = resident("VmHWM") - before
    assert grown < 40e6, f"{grown / 1e6:.0f} MB"


def resident(what: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{what}:")[1].split()[0])


class Adapted(torch.nn.Module):
    """What PEFT's models show of themselves, without PEFT: a state's names, the configuration, the model inside."""

    def __init__(self, state) -> None:
        super().__init__()
        self.active_adapter = "default"
        self.peft_config = {"default": self}
        for name, tensor in state.items():
            *path, leaf = name.split(".")
            module = self
            for piece in path:
                if piece not in module._modules:
                    module.add_module(piece, torch.nn.Module())
                module = module._modules[piece]
            module.register_parameter(leaf, torch.nn.Parameter(tensor))

    def get_base_model(self):
        return torch.nn.Module()

    def to_dict(self):
        return {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "target_modules": {"q_proj", "down_proj"}}


@pytest.mark.parametrize("choice", [{}, {"adapter": "separate"}, {"adapter": "merge"}])
def test_adapters_that_cannot_be_exported_are_refused(tmp_path, choice):
    base, lora = base_model(torch.float32), adapter()
    model = Adapted(wrapped(base, lora))
    for call in (lambda model, **options: xrank.export_model(model, tmp_path / "out", **options), xrank.iter_model):
        with pytest.raises(UsageError, match="rank and alpha"):
            call(wrapped(base, lora), **choice)
        with pytest.raises(UsageError, match="a model with an adapter cannot be transformed"):
            call(model, transform=lambda name, tensor: {name: tensor}, **choice)
    assert not list(tmp_path.iterdir())


def test_adapters_are_merged_or_kept_apart(tmp_path):
    base, lora = base_model(torch.float32), adapter()
    model = Adapted(wrapped(base, lora))
    report = xrank.export_model(model, tmp_path / "merged", adapter="merge")
    assert "adapter-choice" not in dict(report.notes)
    for name, made in tensors_of(tmp_path / "merged").items():
        want, module = base[name], name.removesuffix(".weight")
        if (a := lora.get(f"{module}.lora_A.default.weight")) is not None:
            want = want + 2.5 * (lora[f"{module}.lora_B.default.weight"] @ a)
        torch.testing.assert_close(made, want)
    merged = dict(xrank.iter_model(model, adapter="merge"))
    assert same_tensors(merged, tensors_of(tmp_path / "merged"))
    report = xrank.export_model(model, tmp_path / "apart")  # as adapter="separate"
    note = dict(report.notes)["adapter-choice"]
    assert note == 'adapter="separate" is the default; adapter="merge" writes one model, with the adapter added'
    xrank.export_model(model, tmp_path / "asked", adapter="separate")
    for folder in ("", "adapter"):
        assert same_tensors(tensors_of(tmp_path / "apart" / folder), tensors_of(tmp_path / "asked" / folder))
    assert all(torch.equal(made, base[name]) for name, made in tensors_of(tmp_path / "apart").items())
    config = json.loads((tmp_path / "apart" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (4, ["down_proj", "q_proj"])
    own = tensors_of(tmp_path / "apart" / "adapter")
    assert len(own) == 4
    assert same_tensors(dict(xrank.iter_model(model)), {**base, **own})


def same_tensors(got, want):
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_one_process_needs_no_group(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "want")
    report = xrank.export_model(model, tmp_path / "out")
    assert_same_folder(tmp_path / "out", tmp_path / "want")
    assert report.num_tensors == 21 and report.nbytes == sum(t.nbytes for t in tensors_of(tmp_path / "want").values())
    again = xrank.export_model(model.state_dict(), tmp_path / "bare")
    assert [code for code, _ in again.notes] == ["no-config"]
    manifest = json.loads((tmp_path / "bare" / "xrank_manifest.json").read_text())
    source = manifest["tensors"]["model.norm.weight"]["sources"]
    assert source == [{"file": "the memory of rank 0", "rank": 0, "offset": 0, "nbytes": 128}]


def test_an_export_of_one_process_goes_on_with_what_is_still_so(tmp_path, monkeypatch):
    from xrank.storage.folder_stage import FolderStage

    tensors = {f"{i}.w": torch.rand(40, 50) for i in range(4)}
    options = {"max_shard_size": 8000}
    real = FolderStage.finish_part
    finished = []

    def fail_third(self, name, *arguments):
        if len(finished) == 2:
            raise OSError(5, "Input/output error")
        real(self, name, *arguments)
        finished.append(name)

    monkeypatch.setattr("xrank.recipes.options.default_workers", lambda: 1)  # one file after another
    monkeypatch.setattr(FolderStage, "finish_part", fail_third)
    with pytest.raises((xrank.errors.XrankError, OSError)):
        xrank.export_model(tensors, tmp_path / "out", **options)
    monkeypatch.setattr(FolderStage, "finish_part", real)
    assert len(finished) == 2 and not (tmp_path / "out").exists()
    tensors["0.w"][3, 4] += 1
    report = xrank.export_model(tensors, tmp_path / "out", **options)
    assert 8000 <= report.output["resumed_nbytes"] < 16000 * 1.5, "the changed one is written again, the other kept"
    made = tensors_of(tmp_path / "out")
    assert all(torch.equal(made[name], tensor) for name, tensor in tensors.items())
