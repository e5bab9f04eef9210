"""Adapters that PEFT made, in states that ranks left of its models: merged as PEFT merges, kept apart as PEFT loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import (
    AdaLoraConfig,
    BOFTConfig,
    C3AConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TrainableTokensConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.commands.made_workspaces import leave
from xrank.commands.export import export_model
from xrank.commands.gather import gather_checkpoint
from xrank.commands.verify import verify_model
from xrank.errors import UsageError

TOKENS = torch.arange(24).reshape(2, 12) % 48
LINEAR = ["q_proj", "o_proj", "gate_proj", "down_proj"]
PLAIN: dict[str, dict[str, Any]] = {
    "linear": {"r": 4, "lora_alpha": 10, "target_modules": LINEAR},
    "rslora": {"r": 4, "lora_alpha": 10, "target_modules": LINEAR, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 10,
        "target_modules": LINEAR,
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"down_proj": 3},
    },
    "embedding": {"r": 4, "lora_alpha": 10, "target_modules": ["embed_tokens", "v_proj"]},
    "head": {"r": 4, "lora_alpha": 10, "target_modules": LINEAR, "modules_to_save": ["lm_head"]},
    "one layer": {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj"], "layers_to_transform": [1]},
}


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def adapted(model: Any, *, autocast_adapter_dtype: bool = True, **config: Any) -> Any:
    """Return the model with an adapter that does something: PEFT's own begin as zeros."""
    torch.manual_seed(1)
    lora = LoraConfig(init_lora_weights=False, **config)
    found = get_peft_model(model, lora, autocast_adapter_dtype=autocast_adapter_dtype)
    for name, parameter in found.named_parameters():
        if "modules_to_save" in name:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return found.eval()


def left(folder: Path, model: Any, config: Any = None) -> Path:
    """Let four ranks leave a PEFT model's state, matrices cut in columns by some and in rows by others."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    cuts = {1: "[n/~tp]", 2: "[m/~dp, n/~tp]"}
    inner = model.get_base_model().config.to_dict() if config is None else config
    leave(folder, state, layouts={name: cuts[tensor.dim()] for name, tensor in state.items()}, config=inner)
    for adapter in model.peft_config.values():
        adapter.save_pretrained(str(folder))
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("kind", PLAIN)
def test_merged_as_peft_merges(tmp_path: Path, kind: str) -> None:
    model = adapted(llama(), **PLAIN[kind])
    left(tmp_path / "run", model)
    gather_checkpoint(tmp_path / "run", tmp_path / "model", adapter="merge")
    found = load_file(tmp_path / "model/model.safetensors")
    before = logits(model)
    theirs = model.merge_and_unload()
    expected = theirs.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(logits(loaded(tmp_path / "model")), before, atol=1e-4, rtol=1e-4)
    assert verify_model(tmp_path / "model", against=tmp_path / "run").ok


@pytest.mark.parametrize("kind", PLAIN)
def test_kept_apart_as_peft_loads(tmp_path: Path, kind: str) -> None:
    model = adapted(llama(), **PLAIN[kind])
    left(tmp_path / "run", model)
    gather_checkpoint(tmp_path / "run", tmp_path / "model", adapter="separate")
    again = PeftModel.from_pretrained(loaded(tmp_path / "model"), str(tmp_path / "model/adapter")).eval()
    assert torch.equal(logits(again), logits(model))
    model.save_pretrained(tmp_path / "theirs")
    theirs, ours = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "theirs", tmp_path / "model/adapter")
    )
    assert verify_model(tmp_path / "model", against=tmp_path / "run").ok
    assert verify_model(tmp_path / "theirs", against=tmp_path / "run").ok
    theirs.pop("base_model.model.model.embed_tokens.base_layer.weight", None)  # it is in our base
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert verify_model(tmp_path / "model").ok


def test_half_precision_is_rounded_once_where_peft_rounds_twice(tmp_path: Path) -> None:
    half: dict[str, Any] = {"autocast_adapter_dtype": False, **PLAIN["linear"]}
    model = adapted(llama(torch.bfloat16), **half)
    left(tmp_path / "run", model)
    gather_checkpoint(tmp_path / "run", tmp_path / "model", adapter="merge")
    found = load_file(tmp_path / "model/model.safetensors")
    exact = adapted(llama(torch.bfloat16), **half).float().merge_and_unload().state_dict()
    theirs = model.merge_and_unload().state_dict()
    ours_off = theirs_off = 0.0
    for name, tensor in exact.items():
        assert torch.equal(found[name], tensor.bfloat16()) or "proj" in name
        torch.testing.assert_close(found[name].float(), tensor, atol=0, rtol=2**-8)
        ours_off += float((found[name].float() - tensor).abs().sum())
        theirs_off += float((theirs[name].float() - tensor).abs().sum())
    assert 0 < ours_off < theirs_off
    assert verify_model(tmp_path / "model", against=tmp_path / "run").ok


def test_weights_that_lie_the_other_way(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    model = adapted(GPT2LMHeadModel(config).eval(), r=4, lora_alpha=8, target_modules=["c_attn", "c_proj"])
    before = logits(model)
    for choice in ("merge", "separate"):
        source = left(tmp_path / f"run-{choice}", model)
        gather_checkpoint(source, tmp_path / choice, adapter=choice)
        assert verify_model(tmp_path / choice, against=source).ok
    torch.testing.assert_close(logits(loaded(tmp_path / "merge")), before, atol=1e-4, rtol=1e-4)
    again = PeftModel.from_pretrained(loaded(tmp_path / "separate"), str(tmp_path / "separate/adapter")).eval()
    assert torch.equal(logits(again), before)


def test_dora(tmp_path: Path) -> None:
    model = adapted(llama(), r=4, lora_alpha=10, target_modules=LINEAR, use_dora=True)
    left(tmp_path / "run", model)
    with pytest.raises(UsageError, match="cannot be merged"):
        gather_checkpoint(tmp_path / "run", tmp_path / "model", adapter="merge")
    gather_checkpoint(tmp_path / "run", tmp_path / "model", adapter="separate")
    again = PeftModel.from_pretrained(loaded(tmp_path / "model"), str(tmp_path / "model/adapter")).eval()
    assert torch.equal(logits(again), logits(model))
    assert verify_model(tmp_path / "model", against=tmp_path / "run").ok
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    with pytest.raises(UsageError, match=r"cannot be computed: .* cannot be merged"):
        verify_model(tmp_path / "merged", against=tmp_path / "run")


@pytest.mark.parametrize("kind", ["linear", "head", "one layer"])
def test_a_configuration_completed_of_rank_and_alpha(tmp_path: Path, kind: str) -> None:
    model = adapted(llama(), **PLAIN[kind])
    source = left(tmp_path / "run", model)
    (source / "adapter_config.json").unlink()
    (source / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 10, "task_type": "CAUSAL_LM"}))
    gather_checkpoint(source, tmp_path / "model", adapter="separate")
    again = PeftModel.from_pretrained(loaded(tmp_path / "model"), str(tmp_path / "model/adapter")).eval()
    assert torch.equal(logits(again), logits(model))


def test_a_base_that_the_start_of_the_training_changed(tmp_path: Path) -> None:
    """PiSSA's: the state's base lacks what the adapter began with, and PEFT must not take it away again."""
    torch.manual_seed(1)
    config = LoraConfig(init_lora_weights="pissa", **PLAIN["linear"])
    model = get_peft_model(llama(), config).eval()
    source = left(tmp_path / "run", model)
    assert json.loads((source / "adapter_config.json").read_text())["init_lora_weights"] == "pissa"
    gather_checkpoint(source, tmp_path / "model", adapter="separate")
    again = PeftModel.from_pretrained(loaded(tmp_path / "model"), str(tmp_path / "model/adapter")).eval()
    assert torch.equal(logits(again), logits(model))


def test_a_dcp_checkpoint_of_a_peft_model(tmp_path: Path) -> None:
    model = adapted(llama(), **PLAIN["linear"])
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    next(iter(model.peft_config.values())).save_pretrained(str(tmp_path / "checkpoint"))
    (tmp_path / "checkpoint/config.json").write_text(model.get_base_model().config.to_json_string())
    gather_checkpoint(tmp_path / "checkpoint", tmp_path / "model", adapter="merge")
    torch.testing.assert_close(logits(loaded(tmp_path / "model")), logits(model), atol=1e-4, rtol=1e-4)
    assert verify_model(tmp_path / "model", against=tmp_path / "checkpoint").ok


@pytest.mark.parametrize("kind", ["head", "embedding"])
def test_a_folder_that_peft_saved(tmp_path: Path, kind: str) -> None:
    model = adapted(llama(), **PLAIN[kind])
    model.save_pretrained(tmp_path / "saved")
    gather_checkpoint(tmp_path / "saved", tmp_path / "out", adapter="separate")
    ours, theirs = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("out", "saved"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    again = PeftModel.from_pretrained(llama(), str(tmp_path / "out")).eval()
    assert torch.equal(logits(again), logits(model))
    assert verify_model(tmp_path / "out", against=tmp_path / "saved").ok


def moe(kind: str) -> Any:
    """Return a small model with fused experts: taken apart in files (Qwen3, Mixtral), or fused there too (GPT-OSS)."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
    }
    if kind == "qwen3":
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=20, num_experts=4, tie_word_embeddings=False)
        return Qwen3MoeForCausalLM(config).eval()
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4)).eval()
    return GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=4)).eval()


EXPERTS: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 10,
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("parameters", [["experts.gate_up_proj", "experts.down_proj"], ["experts.down_proj"]], ids=len)
def test_experts_of_an_adapter_alone(tmp_path: Path, kind: str, parameters: list[str]) -> None:
    """The names of the adapter are those in memory; the base model lies in files, as the Hub has it."""
    base = moe(kind)
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, **{**EXPERTS, "target_parameters": parameters})
    model.save_pretrained(tmp_path / "adapter")
    gather_checkpoint(tmp_path / "adapter", tmp_path / "model", base_model=tmp_path / "base", adapter="merge")
    gather_checkpoint(tmp_path / "adapter", tmp_path / "apart", base_model=tmp_path / "base")
    before = logits(model)
    theirs, ours = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("adapter", "apart"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    found, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "merged"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(logits(loaded(tmp_path / "model")), before, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [*PLAIN, "tied"])
def test_an_adapter_alone_and_its_base_model(tmp_path: Path, kind: str) -> None:
    base = llama()
    if kind == "tied":
        base.config.tie_word_embeddings = True
        base.tie_weights()
    base.save_pretrained(tmp_path / "base")
    model = adapted(base, **PLAIN.get(kind, PLAIN["linear"]))
    model.save_pretrained(tmp_path / "adapter")
    gather_checkpoint(tmp_path / "adapter", tmp_path / "model", base_model=tmp_path / "base", adapter="merge")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    found, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "merged"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)


OTHERS: dict[str, tuple[Any, str]] = {
    "IA3": (
        lambda: IA3Config(target_modules=["k_proj"], feedforward_modules=[], modules_to_save=["lm_head"]),
        "contains IA3",
    ),
    "LOHA": (lambda: LoHaConfig(r=2, target_modules=["q_proj"]), "contains LoHa"),
    "LOKR": (lambda: LoKrConfig(r=2, target_modules=["q_proj"]), "contains LoKr"),
    "OFT": (lambda: OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj"]), "contains OFT"),
    "BOFT": (lambda: BOFTConfig(boft_block_size=4, target_modules=["q_proj"]), "contains BOFT"),
    "ADALORA": (lambda: AdaLoraConfig(total_step=10, target_modules=["q_proj"]), "contains AdaLoRA"),
    "VERA": (lambda: VeraConfig(r=2, target_modules=["q_proj"]), "contains VeRA"),
    "C3A": (lambda: C3AConfig(block_size=8, target_modules=["q_proj"]), "an adapter of PEFT that is not LoRA"),
    "TRAINABLE_TOKENS": (
        lambda: TrainableTokensConfig(token_indices=[1], target_modules=["embed_tokens"]),
        "trainable tokens without LoRA",
    ),
    "PROMPT_TUNING": (lambda: PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "contains a prompt"),
    "PREFIX_TUNING": (lambda: PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "contains a prompt"),
    "P_TUNING": (lambda: PromptEncoderConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "contains a prompt"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    """In the folder that PEFT saves, in a DCP checkpoint of the whole model, and alive."""
    make_config, says = OTHERS[kind]
    model = get_peft_model(llama(), make_config())
    model.save_pretrained(tmp_path / "saved")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    for source in ("saved", "checkpoint"):
        with pytest.raises(UsageError, match=says) as caught:
            gather_checkpoint(tmp_path / source, tmp_path / "out")
        assert "PEFT" in str(caught.value.next_step)
        assert source != "saved" or kind == "ADALORA" or f"peft_type {kind}" in str(caught.value.got)
    with pytest.raises(UsageError, match=f"{kind}, is not LoRA|{says}"):
        export_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
