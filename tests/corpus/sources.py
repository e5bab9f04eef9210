"""Builds the checkpoints that the corpus reads: once, by the helpers of the tests; no command changes them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.commands import made_workspaces
from tests.commands.adapted_models import adapter, base_model, leave_adapted, merged, saved_names, wrapped
from tests.commands.made_workspaces import flip, layout_of, leave, leave_plain, made_model, rewrite, state_of
from tests.commands.test_given_layouts import FILE as LAYOUT_FILE
from tests.readers import rank_checkpoints as ranks
from tests.readers.dcp_checkpoints import saved as save_dcp
from tests.readers.made_megatron import Run, whole_model, write_config, write_dist, write_legacy
from tests.readers.made_zero import Zero, write_universal, write_zero
from tests.readers.made_zero import made_model as zero_model
from tests.readers.test_hf_shards import saved as save_hf_shards
from tests.readers.test_megatron_dist import stacked as stacked_layers
from tests.readers.test_weight_folders import write as write_folder
from tests.recipes import made_checkpoints as families
from tests.virtual.simulation.made_layouts import llama as llama_layout
from xrank.testing.rank_pool import RankPool

_TWO_RANKS = '[mesh]\ngrid = "r=2"\n\n[tensors]\n'
_RECIPE = '[tensors]\n"w.{L} [a b]" = "x.{L}.weight [b a]"\n[config]\na = "rows"\n'
_LINK = "read=2GB/s write=1GB/s memory=8GB/s bandwidth=25GB/s latency=5us start=1s"


class _Call:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class _PatientPool(RankPool):
    """Waits longer than a test does: the machine may be busy."""

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 600) -> list[Any]:
        """Call a function on every rank."""
        return super().run(world_size, function, *args, timeout_seconds=timeout_seconds)


def build(folder: Path) -> None:
    """Make all sources in a folder, which must not exist."""
    folder.mkdir(parents=True)
    pool = _PatientPool()
    try:
        for make in (_workspaces, _layout_files, _adapters, _recipes, _deepspeed, _megatron, _weights, _places):
            make(folder)
        _of_ranks(folder, pool)
        _models(folder)
    finally:
        pool.close()
    (folder / "build-id").write_text(secrets.token_hex(8))


def _changed(of: Path, name: str, change: Callable[[Path], object]) -> Path:
    """Copy a source beside itself and change the copy."""
    copy = Path(shutil.copytree(of, of.parent / name))
    change(copy)
    return copy


def _flip_tensor(path: Path, tensor: torch.Tensor) -> None:
    """Flip one bit of a tensor's bytes in a file."""
    flip(path, path.read_bytes().index(made_workspaces.raw(tensor)) + 5)


def _workspaces(folder: Path) -> None:
    base = folder / "ws"
    good, wide = base / "good", made_workspaces.wide_model()
    model = leave(good)
    leave(base / "wide", wide, layouts={name: layout_of(name) for name in wide})
    leave(base / "other-values", made_model(1))
    leave(base / "bare", recorded=False)
    leave(base / "no-run-id", run_id=None)
    leave(base / "no-config", config={})
    leave(base / "missing", ranks=[0, 1, 3])
    stale = _changed(good, "stale", lambda f: leave(f, ranks=[2], run_id="run-old", step=1500))
    leave(stale.parent / "two-runs", ranks=[0, 1])
    leave(stale.parent / "two-runs", ranks=[2, 3], run_id="run-other")
    _changed(good, "flipped", lambda f: flip(state_of(f, 3), state_of(f, 3).read_bytes().index(b"data.pkl") + 900))
    norm = model["norm.weight"]
    _changed(good, "flipped-tensor", lambda f: _flip_tensor(state_of(f, 3), norm))
    _changed(good, "cut-short", lambda f: os.truncate(state_of(f, 1), 9000))
    _changed(good, "replicas", lambda f: rewrite(f, 2, lambda s: s["weight"]["norm.weight"].mul_(2)))
    _changed(good, "configs", lambda f: rewrite(f, 2, lambda s: s["config"].update(hidden_size=9)))
    _changed(good, "lacks-tensor", lambda f: rewrite(f, 1, lambda s: s["weight"].pop("up.weight")))
    evil = _Call(os.system, "touch /tmp/xrank-corpus-was-here")
    _changed(good, "hostile", lambda f: _save_with(state_of(f, 1), optimizer=evil))
    big = {**model, "down.weight": model["down.weight"].clone()}
    big["down.weight"][5, 10] = 70000.0
    leave(base / "too-big-for-fp16", big)
    for rank in range(2):
        leave_plain(base / "plain", rank, {"norm.weight": torch.ones(8), "w": torch.arange(12.0) + rank})
    tied = {"model.embed_tokens.weight": model["embed.weight"], "lm_head.weight": model["embed.weight"].clone()}
    rows, config = dict.fromkeys(tied, "[v/tp, h]"), {"model_type": "toy", "tie_word_embeddings": True}
    leave(base / "tied", tied, layouts=rows, config=config)
    leave(base / "untied", {**tied, "lm_head.weight": tied["lm_head.weight"] + 1}, layouts=rows, config=config)
    leave(
        base / "odd-names" / "x",
        {"a b": torch.ones(4), "ü.weight": torch.ones(4)},
        layouts={"a b": "[n]", "ü.weight": "[n/tp]"},
    )


def _save_with(path: Path, **more: Any) -> None:
    state = torch.load(path, weights_only=True)
    torch.save({**state, **more}, path)


def _layout_files(folder: Path) -> None:
    base = folder / "layouts"
    base.mkdir()
    texts = {
        "good": LAYOUT_FILE,
        "two-ranks": _TWO_RANKS + '".*weight" = "[n/~r, m]"\n"norm.weight" = "[n]"\n"steps" = "[n/~r]"\n',
        "unused-rule": LAYOUT_FILE + '"gone.*" = "[a]"\n',
        "no-norm": LAYOUT_FILE.replace('"norm.weight|steps" = "[n]"', ""),
        "bad-axis": LAYOUT_FILE.replace("f/tp]", "f/pp]"),
        "bad-text": LAYOUT_FILE.replace('"[n]"', '"[n/]"'),
        "not-toml": LAYOUT_FILE + "x == 2",
        "too-large": LAYOUT_FILE.replace("dp=2 tp=2", "dp=4 tp=2"),
        "plain": '[mesh]\ngrid = "tp=2"\n\n[tensors]\n"norm.weight" = "[n]"\n"w" = "[n/tp]"\n',
        "block": _TWO_RANKS
        + '"(embed|up|down|odd).weight" = "[a/~r, b]"\n".*bias|norm.weight|mask" = "[a]"\n"steps" = "[]"\n',
        "nameless": '[mesh]\ngrid = "fsdp=4"\n\n[tensors]\n'
        '"_flat_param" = "flat(embed.weight [10, 6], up.weight [8, 6], up.bias [8], down.weight [6, 8], '
        'down.bias [6], odd.weight [5, 6], odd.bias [5])/~fsdp"\n'
        '"norm._flat_param" = "flat(norm.weight [6], norm.bias [6])/~fsdp"\n',
    }
    for name, text in texts.items():
        (base / f"{name}.toml").write_text(text)
    llama_layout(base, "pp=1 dp=2 tp=4")
    (base / "link.toml").write_text("".join('{} = "{}"\n'.format(*word.split("=")) for word in _LINK.split()))


def _adapters(folder: Path) -> None:
    base = folder / "adapters"
    weights, lora = leave_adapted(base / "lora")
    shutil.copytree(base / "lora", base / "no-meta")
    (base / "no-meta" / "lora_train_meta.json").unlink()
    leave_adapted(base / "other-rank", meta={"r": 3, "lora_alpha": 10})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "down_proj"]}
    (base / "adapter_config.json").write_text(json.dumps(config))
    ia3 = {"x.weight": torch.ones(4, 4), "base_model.model.x.ia3_l.default": torch.ones(4, 4)}
    leave(base / "ia3", ia3, layouts=dict.fromkeys(ia3, "[m/tp, n]"))
    for name, tensors in {"merged": merged(weights, lora), "base": weights}.items():
        (base / name).mkdir()
        save_file(tensors, base / name / "model.safetensors")
    (base / "peft").mkdir()
    save_file(saved_names(lora), base / "peft" / "adapter_model.safetensors")
    shutil.copy(base / "adapter_config.json", base / "peft")
    save_file(wrapped(base_model(torch.float32), adapter()), base / "live.safetensors")


def _recipes(folder: Path) -> None:
    base = folder / "recipes"
    base.mkdir()
    llama = families.tiny_llama()
    config, tensors = families.config_of(llama), families.as_megatron(llama, te=True)
    cases: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
        "llama": (tensors, config),
        "llama-padded": (families.stacked(families.as_megatron(llama, vocab=40), "decoder.layers."), config),
        "torchtitan": (families.as_torchtitan(llama), config),
        "no-down": ({n: t for n, t in tensors.items() if n != "decoder.layers.1.mlp.linear_fc2.weight"}, config),
        "layer-too-few": (tensors, {**config, "num_hidden_layers": 4}),
        "layer-too-many": (tensors, {**config, "num_hidden_layers": 2}),
        "other-size": (tensors, {**config, "intermediate_size": 21}),
        "other-family": (tensors, {**config, "model_type": "gemma"}),
        "no-vocab": (tensors, {k: v for k, v in config.items() if k != "vocab_size"}),
        "strange-name": ({**tensors, "decoder.layers.0.new.weight": torch.ones(2)}, config),
        "own": ({f"w.{i}": torch.arange(6.0) + 10 * i for i in range(2)}, {"rows": 2}),
    }
    tied = families.tiny_llama(tie_word_embeddings=True)
    cases["llama-tied"] = (families.as_megatron(tied), families.config_of(tied))
    cases["tied-head-gone"] = (families.as_megatron(tied), {**families.config_of(tied), "tie_word_embeddings": False})
    for family in ("gpt2", "mixtral", "qwen2", "qwen3_moe", "mistral", "qwen3"):
        model = families.tiny(family)
        made = families.as_megatron(model, vocab=48)
        cases[family] = (made, families.config_of(model))
    cases["experts-stacked"] = (families.expert_forms(families.tiny("mixtral"))["stacked"], cases["mixtral"][1])
    for name, (made, its_config) in cases.items():
        families.leave(base / name, made, its_config)
    (base / "own.toml").write_text(_RECIPE)
    (base / "bad.toml").write_text(_RECIPE.replace("[b a]", "[b c]"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, base / "megatron.safetensors")
    named = {**tensors, **families.as_megatron(llama)}
    rules = (f'"{name}" = "[a/~r{", b" * (tensor.ndim - 1)}]"\n' for name, tensor in named.items())
    (base / "megatron-rows.toml").write_text(_TWO_RANKS + "".join(rules))
    for name, model in {"llama": llama, "mixtral": families.tiny("mixtral")}.items():
        model.save_pretrained(folder / "hf" / name)
    (folder / "hf" / "llama" / "tokenizer.json").write_text("{}")
    _changed(folder / "hf" / "llama", "config-only", lambda f: (f / "model.safetensors").unlink())


def _deepspeed(folder: Path) -> None:
    base, model = folder / "deepspeed", zero_model()
    ways = {
        "zero0": Zero(stage=0),
        "zero1": Zero(stage=1, prefix=""),
        "zero2": Zero(stage=2, num_ranks=4),
        "zero2-dealt": Zero(stage=2, num_ranks=2, alignment=8, is_dealt=True),
        "zero3": Zero(),
        "bf16": Zero(stage=1, is_bf16_optimizer=True),
    }
    for name, how in ways.items():
        write_zero(base / name, model, how)
    write_universal(base / "universal", model, Zero())
    _changed(base / "zero3", "missing-rank", lambda f: next(f.glob("*/bf16_zero_pp_rank_1_*")).unlink())
    _changed(base / "zero2", "no-model-states", lambda f: next(f.glob("*/mp_rank_00_model_states.pt")).unlink())
    _changed(base / "zero2", "marker-gone", lambda f: (f / "latest").write_text("global_step9"))


def _megatron(folder: Path) -> None:
    base = folder / "megatron"
    small = Run(tp=2, chunks=((1,),))
    dist = Run(tp=2, pp=2, chunks=((1, 1),), args={"vocab_size": 13})
    model = whole_model(small)
    write_dist(base / "dist-stacked", small, stacked_layers(model))
    write_dist(base / "dist-llama", small, model)
    for name in ("dist-stacked", "dist-llama"):
        write_config(base / name, small)
    write_dist(base / "dist-none", dist, whole_model(dist))
    experts = Run(tp=2, pp=2, chunks=((1, 1),), has_experts=True, grouped=True)
    write_dist(base / "dist-experts", experts, whole_model(experts))
    for file in ("common.pt", "__1_0.distcp"):
        _changed(
            base / "dist-none", f"dist-no-{file.strip('_')[:3]}", lambda f, g=file: next(f.glob(f"*/{g}")).unlink()
        )
    write_legacy(base / "legacy-llama", small)
    write_config(base / "legacy-llama", small)
    runs = {
        "tp-pp": Run(tp=2, pp=2, chunks=((2, 2),), bias=True),
        "vpp": Run(tp=2, pp=2, chunks=((1, 1), (1, 1))),
        "tp-pp-ep": Run(tp=2, pp=2, ep=2, chunks=((1, 1),), has_experts=True),
        "tied": Run(tp=2, pp=2, chunks=((1, 1),), tied=True),
    }
    for name, run in runs.items():
        write_legacy(base / f"legacy-{name}", run)
    whole = whole_model(runs["tied"])
    whole["output_layer.weight"] = whole["output_layer.weight"] + 1
    write_legacy(base / "legacy-untied", runs["tied"], whole)
    _changed(base / "legacy-tp-pp", "legacy-missing", lambda f: shutil.rmtree(next(f.glob("*/mp_rank_01_001"))))


def _weights(folder: Path) -> None:
    base = folder / "weights"
    for kind in ("bin", "safetensors"):
        write_folder(base / kind, kind)
    write_folder(base / "single", "safetensors", num_files=1, index=False)
    write_folder(base / "wrong-total", "safetensors", total_size=3)
    name = "model-00002-of-00002.safetensors"
    _changed(base / "safetensors", "missing-file", lambda f: (f / name).unlink())
    _changed(base / "safetensors", "cut-short", lambda f: os.truncate(f / name, 40))
    evil = {"w": torch.ones(2), "x": _Call(os.system, "touch /tmp/xrank-corpus-was-here")}
    (base / "hostile-bin").mkdir()
    torch.save(evil, base / "hostile-bin" / "pytorch_model.bin")
    halves = {n: t.half() if t.is_floating_point() else t for n, t in made_model().items()}
    bases = {
        "base": made_model(),
        "base-fp16": halves,
        "base-other-names": {"a": torch.ones(2)},
        "base-other-shape": {**made_model(), "norm.weight": torch.ones(9)},
    }
    for kind, tensors in bases.items():
        (base / kind).mkdir()
        save_file(tensors, base / kind / "model.safetensors")
        (base / kind / "config.json").write_text('{"model_type": "base", "dtype": "float16"}')
        (base / kind / "tokenizer.json").write_text("{}")


def _places(folder: Path) -> None:
    base = folder / "places"
    for name in ("empty", "text", "run", "marked"):
        (base / name).mkdir(parents=True)
    (base / "text" / "notes.txt").write_text("nothing")
    for step in (9, 30):
        leave(base / "run" / f"step-{step}", step=step)
        write_zero(base / "marked", zero_model(step), Zero(step=step, stage=2))
    from xrank.storage.folder_stage import encode_journal
    from xrank.storage.output_place import JOURNAL_NAME

    stage = base / "stages" / ".model.xrank-0123456789abcdef"
    stage.mkdir(parents=True)
    (stage / "model.safetensors.part").write_bytes(bytes(1000))
    (stage / JOURNAL_NAME).write_bytes(encode_journal("plan", "elsewhere", 1))
    for path in (*stage.iterdir(), stage):
        os.utime(path, (1.6e9, 1.6e9))


def _of_ranks(folder: Path, pool: RankPool) -> None:
    """Make what torch writes on real ranks."""
    dcp = folder / "dcp"
    save_dcp(pool, dcp / "fsdp2", "fsdp2")
    save_dcp(pool, dcp / "trainer", "fsdp2 x tp", "trainer")
    save_dcp(pool, dcp / "hsdp", "hsdp", "flat")
    save_dcp(pool, dcp / "accelerate", "fsdp2", "accelerate", num_ranks=2)
    save_dcp(pool, dcp / "fsdp1-local", "fsdp1 local", "flat", num_ranks=2)
    _changed(dcp / "fsdp2", "missing-file", lambda f: (f / "__2_0.distcp").unlink())
    _changed(dcp / "fsdp2", "no-metadata", lambda f: (f / ".metadata").unlink())
    _changed(dcp / "fsdp2", "cut-short", lambda f: os.truncate(f / "__1_0.distcp", 300))
    _changed(dcp / "fsdp2", "flipped", _flip_in_distcp)
    per_rank = folder / "accelerate"
    for kind in ("sharded", "dtensor", "local", "flat"):
        ranks.accelerate(pool, per_rank / kind, kind)
    _changed(per_rank / "sharded", "missing", lambda f: (f / "pytorch_model_fsdp_0_rank3.bin").unlink())
    shutil.copytree(per_rank / "sharded", per_rank / "both")
    ranks.accelerate(pool, per_rank / "both", "dtensor", number=1)
    ranks.base_model(folder / "base-of-block")
    verl = ranks.verl(pool, folder / "verl" / "global_step_30" / "actor", "fsdp2 x tp")
    _changed(verl.parent, "missing", lambda f: (f / "actor" / "model_world_size_4_rank_2.pt").unlink())
    shards = save_hf_shards(pool, folder / "hf-shards" / "good")
    _changed(shards, "missing", lambda f: sorted(f.glob("shard-00002-*"))[0].unlink())


def _flip_in_distcp(folder: Path) -> None:
    from tests.readers.dcp_checkpoints import built

    _flip_tensor(folder / "__0_0.distcp", built().embed.weight[:3].detach())


def _models(folder: Path) -> None:
    """Gather models of the workspaces, and damage copies."""
    base = folder / "models"
    base.mkdir()
    for name, source in {"good": folder / "ws" / "good", "other-values": folder / "ws" / "other-values"}.items():
        command = [sys.executable, "-m", "xrank", "gather", str(source), "--out", str(base / name), "-q"]
        subprocess.run(command, check=True)
    weights = "model.safetensors"
    norm = made_model()["norm.weight"]
    _changed(base / "good", "flipped", lambda f: _flip_tensor(f / weights, norm))
    _changed(base / "good", "no-manifest", lambda f: (f / "xrank_manifest.json").unlink())
    _changed(base / "good", "no-weights", lambda f: (f / weights).unlink())
    _changed(base / "good", "other-config", lambda f: (f / "config.json").write_text("{}"))
    _changed(base / "good", "cut-short", lambda f: os.truncate(f / weights, 4000))
