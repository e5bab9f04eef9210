"""Models of transformers between memory and files: gathers write what `save_pretrained` writes, loads read it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint

import xrank
from tests.commands.exported import tensors_of
from tests.recipes.made_checkpoints import leave
from xrank.commands.gather import gather_checkpoint
from xrank.commands.reshard import reshard_checkpoint
from xrank.commands.verify import verify_model
from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.recipes.conversions import find_transforms

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

_TEXT = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_CLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "model_type": "clip_vision_model",
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16, "patch_size": 4,
}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**_TEXT, "num_local_experts": 3},
    "qwen3_moe": {**_TEXT, **_EXPERTS, "num_experts": 3, "head_dim": 8, "mlp_only_layers": [1]},
    "deepseek_v3": {
        **_TEXT,
        **_EXPERTS,
        **_LATENT,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "llava": {"text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _CLIP, "image_token_index": 63},
    "qwen2_5_vl": {"text_config": _TEXT, "vision_config": _QWEN_VISION},
}


def make_model(family: str) -> Any:
    import transformers

    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **_CONFIGS[family])
    is_seen = family in ("llava", "qwen2_5_vl")
    auto = transformers.AutoModelForImageTextToText if is_seen else transformers.AutoModelForCausalLM
    return auto.from_config(config).eval()


def save_shards(model: Any, folder: Path, *, with_config: bool = True) -> Path:
    """Save a model as trainers do with torch's distributed checkpoints, under its names in memory."""
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    if with_config:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
    return folder


def assert_same(folder: Path, want: dict[str, torch.Tensor]) -> None:
    found = tensors_of(folder)
    assert sorted(found) == sorted(want)
    assert [name for name in want if not torch.equal(found[name], want[name])] == []


@pytest.mark.parametrize("family", _CONFIGS)
def test_a_gather_writes_what_save_pretrained_writes(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "saved")
    want = tensors_of(tmp_path / "saved")
    assert sorted(want) != sorted(model.state_dict())
    shards = save_shards(model, tmp_path / "shards")
    report = gather_checkpoint(shards, tmp_path / "out")
    assert_same(tmp_path / "out", want)
    assert report.source["recipe"] == f"transformers-{family}"
    gather_checkpoint(shards, tmp_path / "named", base_model=tmp_path / "saved")
    assert_same(tmp_path / "named", want)
    gather_checkpoint(shards, tmp_path / "plain", recipe="none")
    assert sorted(tensors_of(tmp_path / "plain")) == sorted(model.state_dict())


@pytest.mark.parametrize("family", _CONFIGS)
def test_a_load_reads_what_save_pretrained_wrote(tmp_path: Path, family: str) -> None:
    model, module = make_model(family), make_model(family)
    model.save_pretrained(tmp_path / "saved")
    for tensor in module.state_dict().values():
        tensor.zero_()
    xrank.load_model(module, tmp_path / "saved")
    state = module.state_dict()
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(state[name], tensor)] == []


@pytest.mark.parametrize("family", ["qwen3_moe", "llava"])
def test_files_in_their_own_form_keep_it(tmp_path: Path, family: str) -> None:
    """A checkpoint that was saved under the names of files is not converted a second time."""
    model = make_model(family)
    model.save_pretrained(tmp_path / "saved")
    want = tensors_of(tmp_path / "saved")
    checkpoint.save({"model": want}, checkpoint_id=tmp_path / "shards", no_dist=True)
    shutil.copy(tmp_path / "saved" / "config.json", tmp_path / "shards")
    report = gather_checkpoint(tmp_path / "shards", tmp_path / "out")
    assert_same(tmp_path / "out", want)
    assert report.source["recipe"] is None


def test_a_base_model_in_the_form_of_memory_is_followed(tmp_path: Path) -> None:
    """from_pretrained converts nothing there, so save_pretrained undoes nothing."""
    model = make_model("mixtral")
    (tmp_path / "base").mkdir()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    shards = save_shards(model, tmp_path / "shards")
    shutil.copy(shards / "config.json", tmp_path / "base")
    gather_checkpoint(shards, tmp_path / "out", base_model=tmp_path / "base")
    assert_same(tmp_path / "out", state)


def test_a_folder_of_safetensors_is_converted_on_request(tmp_path: Path) -> None:
    model = make_model("mixtral")
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "fused").mkdir()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "fused" / "model.safetensors", {"format": "pt"})
    shutil.copy(tmp_path / "saved" / "config.json", tmp_path / "fused")
    gather_checkpoint(tmp_path / "fused", tmp_path / "kept")
    assert_same(tmp_path / "kept", state)
    gather_checkpoint(tmp_path / "fused", tmp_path / "out", recipe="transformers")
    assert_same(tmp_path / "out", tensors_of(tmp_path / "saved"))


def test_experts_with_scales_stay_as_they_are(tmp_path: Path) -> None:
    """Their scales would have to be taken apart, too."""
    model = make_model("mixtral")
    state = {**model.state_dict(), "model.layers.0.mlp.experts.gate_up_proj_scale": torch.ones(3)}
    checkpoint.save({"model": state}, checkpoint_id=tmp_path / "shards", no_dist=True)
    model.config.save_pretrained(tmp_path / "shards")
    gather_checkpoint(tmp_path / "shards", tmp_path / "out")
    assert sorted(tensors_of(tmp_path / "out")) == sorted(state)


def test_verify_compares_shards_with_files(tmp_path: Path) -> None:
    model = make_model("qwen3_moe")
    model.save_pretrained(tmp_path / "saved")
    shards = save_shards(model, tmp_path / "shards")
    assert verify_model(tmp_path / "saved", against=shards).ok


def test_a_conversion_that_nothing_calls_for(tmp_path: Path) -> None:
    shards = save_shards(make_model("mixtral"), tmp_path / "shards", with_config=False)
    with pytest.raises(UsageError, match=r"config\.json"):
        gather_checkpoint(shards, tmp_path / "out", recipe="transformers")


def test_a_merged_adapter_leaves_a_model_in_the_form_of_files(tmp_path: Path) -> None:
    """An adapter of the attention beside a base model with fused experts, as FSDP saves both in one checkpoint."""
    model = make_model("qwen3_moe")
    state = {f"base_model.model.{name}": tensor for name, tensor in model.state_dict().items()}
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    state[f"{module}.base_layer.weight"] = state.pop(f"{module}.weight")
    a, b = torch.randn(2, 16), torch.randn(16, 2)
    state |= {f"{module}.lora_A.default.weight": a, f"{module}.lora_B.default.weight": b}
    checkpoint.save({"model": state}, checkpoint_id=tmp_path / "shards", no_dist=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "shards")
    (tmp_path / "shards" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    gather_checkpoint(tmp_path / "shards", tmp_path / "out", adapter="merge")
    model.model.layers[0].self_attn.q_proj.weight.data += 2.0 * (b @ a)
    model.save_pretrained(tmp_path / "saved")
    found, want = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "saved")
    assert sorted(found) == sorted(want)
    assert [name for name in want if not torch.allclose(found[name], want[name], atol=1e-6)] == []


def test_a_reshard_goes_from_files_to_memory_and_back(tmp_path: Path) -> None:
    """Ranks of expert parallelism get the fused experts that their modules have."""
    model = make_model("mixtral")
    model.save_pretrained(tmp_path / "saved")
    layouts = LayoutMap(DeviceMesh((3,), ("ep",)))
    for name, tensor in model.state_dict().items():
        layouts[name] = ("ep", None, None) if ".experts." in name else (None,) * tensor.ndim
    reshard_checkpoint(tmp_path / "saved", layouts, tmp_path / "ranks", recipe="transformers")
    experts = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    ranks = xrank.open_checkpoint(tmp_path / "ranks", recipe="none")
    assert torch.equal(ranks["model.layers.0.mlp.experts.gate_up_proj"], experts)
    gather_checkpoint(tmp_path / "ranks", tmp_path / "out", base_model=tmp_path / "saved")
    assert_same(tmp_path / "out", tensors_of(tmp_path / "saved"))


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("family", _CONFIGS)
def test_an_export_writes_what_save_pretrained_writes(tmp_path: Path, family: str, is_loaded: bool) -> None:
    model = make_model(family)
    if is_loaded:
        model.save_pretrained(tmp_path / "hub")
        model = type(model).from_pretrained(tmp_path / "hub")
    model.save_pretrained(tmp_path / "saved")
    report = xrank.export_model(model, tmp_path / "out")
    assert_same(tmp_path / "out", tensors_of(tmp_path / "saved"))
    assert "names-as-in-memory" not in dict(report.notes)


def test_an_export_of_a_model_loaded_in_the_form_of_memory_keeps_it(tmp_path: Path) -> None:
    """from_pretrained found nothing to convert, and save_pretrained undoes nothing."""
    made = make_model("qwen2_5_vl")
    (tmp_path / "base").mkdir()
    save_file(
        {n: t.clone() for n, t in made.state_dict().items()}, tmp_path / "base" / "model.safetensors", {"format": "pt"}
    )
    made.config.save_pretrained(tmp_path / "base")
    model = type(made).from_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "saved")
    xrank.export_model(model, tmp_path / "out")
    assert_same(tmp_path / "out", tensors_of(tmp_path / "saved"))


def test_a_missing_expert_is_refused_by_name_and_so_is_the_advice_to_keep_names(tmp_path: Path) -> None:
    module = make_model("mixtral")
    module.save_pretrained(tmp_path / "saved")
    state = tensors_of(tmp_path / "saved")
    (lost,) = [name for name in state if name.endswith("layers.1.block_sparse_moe.experts.1.w1.weight")]
    save_file({n: t for n, t in state.items() if n != lost}, tmp_path / "saved" / "model.safetensors", {"format": "pt"})
    with pytest.raises(LayoutError, match="some of these tensors are missing") as raised:
        xrank.load_model(module, tmp_path / "saved")
    assert raised.value.tensor == "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    assert raised.value.file == str(tmp_path / "saved")
    with pytest.raises(UsageError, match="the source has no"):
        xrank.load_model(module, tmp_path / "saved", recipe="none")


def test_a_class_that_the_table_lacks_is_refused_by_name(tmp_path: Path) -> None:
    config = {"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"]}
    source = leave(tmp_path / "ws", {"model.norm.weight": torch.ones(4)}, config)
    with pytest.raises(LayoutError, match=r"the conversion of Gemma4AssistantForCausalLM is not in xrank's table"):
        gather_checkpoint(source, tmp_path / "out")
    gather_checkpoint(source, tmp_path / "out", recipe="none")
    assert tensors_of(tmp_path / "out").keys() == {"model.norm.weight"}


def test_a_backbone_has_the_conversion_of_its_own_type() -> None:
    """Segmenters and detectors take any backbone; the table has one of each."""
    config = {"model_type": "upernet", "architectures": ["UperNetForSemanticSegmentation"]}
    swin, beit = (find_transforms({**config, "backbone_config": {"model_type": kind}}) for kind in ("swin", "beit"))
    assert all(str(each.scope).startswith("backbone") for each in (*swin, *beit))
    assert swin != beit
