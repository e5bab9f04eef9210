"""Small sources of each kind, and the files that users write, for the campaign's commands."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.cli.bench import run
from tests.cli.test_recipe import OWN, SHAPES
from tests.commands.adapted_models import ALPHA, RANK, P, adapter, base_model, leave_adapted
from tests.commands.made_workspaces import LAYOUTS, leave
from tests.readers.made_megatron import Run, write_config, write_legacy
from tests.recipes.test_config_proof import CONFIG
from tests.recipes.test_config_proof import made_model as mixed_model

__all__ = ["UserFile", "make_sources", "user_files"]

LAYOUT_FILE = """[mesh]
grid = "dp=2 tp=2"
order = "tp-dp"
ranks = [0, 1, 2, 3]
view.expert = "ep=4"

[sizes]
n = 16

[tensors]
"embed.weight" = "[16/tp, 8]"
"up.weight" = "[12/tp/~dp, 8] in expert"
"down.weight" = "[8, pad(12, 4)/tp]"
"norm.weight" = "[8]"
"steps" = "[3]"
"layers.{4/dp}.w" = "[<q: 2 | k: 2>/tp{2,2}, 8]"
"flat.*" = "flat(a [4, 4], b [2])/dp"

[alias]
"head" = "embed.weight"
"""
NEW_LAYOUTS = '[mesh]\ngrid = "r=3"\n[tensors]\n' + "".join(
    f'"{name}" = "[{"n/~r, m" if "," in text else "n/~r"}]"\n' for name, text in LAYOUTS.items()
)
LINK_FILE = """read = "2GB/s"
write = "1.5GB/s"
memory = "8GB/s"
bandwidth = "25GB/s"
latency = "5us"
start = "1s"
[dp]
bandwidth = "10GB/s"
latency = "1e1us"
"""


@dataclass(frozen=True)
class UserFile:
    """A file that a user or another program writes as text, and the commands that read it.

    Args:
        path: below the folder of sources.
        commands: each a line of words; ``{}`` stands for the folder.
    """

    path: str
    commands: tuple[str, ...]


def make_sources(folder: Path) -> None:
    """Make all sources in a folder."""
    leave(folder / "ws")
    (folder / "new.toml").write_text(NEW_LAYOUTS)
    (folder / "layout.toml").write_text(LAYOUT_FILE)
    (folder / "link.toml").write_text(LINK_FILE)
    (folder / "own.toml").write_text(OWN)
    (folder / "src").mkdir()
    save_file({name: torch.rand(shape) for name, shape in SHAPES.items()}, folder / "src" / "model.safetensors")
    _made("gather", folder / "ws", "-o", folder / "model", "--max-shard-size", "600")
    _make_folder(folder / "hf")
    run_of_one = Run(tp=2)
    write_legacy(folder / "megatron", run_of_one)
    write_config(folder / "megatron", run_of_one)
    (folder / "megatron.toml").write_text(
        'extends = "megatron-llama"\nframework = "own"\nmodel_types = ["llama"]\n'
        '[rename.targets]\n"model." = "model."\n[must]\nnormalization = "any"\nswiglu = true\n[must_config]\n'
        'hidden_act = ["silu"]\n[config]\nd = ["head_dim", "hidden_size / num_attention_heads"]\n[sizes]\nhalf = 4\n'
        '[tensors]\n"decoder.final_layernorm.weight [h]" = { to = "model.norm.weight [h]", when = "tied" }\n'
        '"blocks.{B}.q.weight [g <q: r d | k: d>, h]".to.q = "q.{B} [g r d, h]"\n'
        '"blocks.{B}.q.weight [g <q: r d | k: d>, h]".to.k = "k.{B} [g d, h]"\n'
        '[kept."model.visual."]\nfrom = ["vision_model."]\ntensors = ["blocks.{B}.norm1.weight [c]"]\n'
    )
    leave_adapted(folder / "lora")
    _make_folder(folder / "base", base_model())
    peft = folder / "peft"
    peft.mkdir()
    save_file({P + n.replace(".default", ""): t for n, t in adapter().items()}, peft / "adapter_model.safetensors")
    (peft / "adapter_config.json").write_text(
        json.dumps(
            {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "rank_pattern": {"q_proj": RANK}, "bias": "none"}
            | {"alpha_pattern": {}, "target_modules": ["q_proj", "down_proj"], "use_rslora": False, "use_dora": False}
        )
    )


def _make_folder(folder: Path, model: dict[str, torch.Tensor] | None = None) -> None:
    folder.mkdir()
    given, model = model, mixed_model() if model is None else model
    names = sorted(model)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, own in shards.items():
        save_file({name: model[name] for name in own}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, own in shards.items() for name in own}
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in model.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": nbytes}, "weight_map": weight_map})
    )
    more = {"layer_types": ["full_attention"] * 2, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more} if given is None else {"model_type": "mine"}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.6}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}", "added_tokens": {"0": {"a": 1.5}}}')


def _made(*words: object) -> None:
    ended = run(*words)
    assert ended.exit_code == 0, ended.stderr


def user_files() -> tuple[UserFile, ...]:
    """Return the files that are mutated, each with its commands."""
    return (
        UserFile("hf/config.json", ("gather {}/hf -o {}/out --dry-run", "inspect {}/hf", "verify {}/hf")),
        UserFile("hf/model.safetensors.index.json", ("gather {}/hf -o {}/out --dry-run", "inspect {}/hf --tensors")),
        UserFile("hf/tokenizer_config.json", ("gather {}/hf -o {}/out --dry-run",)),
        UserFile("hf/generation_config.json", ("gather {}/ws --base-model {}/hf -o {}/out --dry-run",)),
        UserFile(
            "megatron/config.json",
            (
                "gather {}/megatron -o {}/out --dry-run",
                "inspect {}/megatron",
                "recipe check megatron-llama {}/megatron",
                "simulate {}/megatron --recipe megatron-llama",
            ),
        ),
        UserFile("megatron/latest_checkpointed_iteration.txt", ("inspect {}/megatron",)),
        UserFile(
            "megatron.toml",
            (
                "recipe check {}/megatron.toml {}/megatron",
                "gather {}/megatron -o {}/out --dry-run --recipe {}/megatron.toml",
            ),
        ),
        UserFile(
            "own.toml", ("recipe check {}/own.toml {}/src", "gather {}/src -o {}/out --dry-run --recipe {}/own.toml")
        ),
        UserFile(
            "layout.toml",
            (
                "layout check {}/layout.toml",
                "layout show {}/layout.toml",
                "layout check {}/layout.toml {}/ws",
                "layout diff {}/layout.toml {}/ws",
                "simulate {}/layout.toml --operation export",
                "gather {}/ws -o {}/out --dry-run --layout {}/layout.toml",
                "reshard {}/ws --layout {}/layout.toml -o {}/out --dry-run",
            ),
        ),
        UserFile(
            "new.toml", ("reshard {}/ws --layout {}/new.toml -o {}/out --dry-run", "layout check {}/new.toml {}/ws")
        ),
        UserFile("link.toml", ("simulate {}/ws --link {}/link.toml",)),
        UserFile("model/xrank_manifest.json", ("verify {}/model", "inspect {}/model")),
        UserFile("model/config.json", ("verify {}/model", "inspect {}/model")),
        UserFile(
            "lora/lora_train_meta.json",
            ("gather {}/lora -o {}/out --dry-run", "gather {}/lora -o {}/out --dry-run --adapter merge"),
        ),
        UserFile(
            "peft/adapter_config.json",
            (
                "gather {}/peft -o {}/out --dry-run",
                "gather {}/peft -o {}/out --dry-run --adapter merge --base-model {}/base",
                "gather {}/lora -o {}/out --dry-run --adapter-config {}/peft/adapter_config.json",
            ),
        ),
    )
