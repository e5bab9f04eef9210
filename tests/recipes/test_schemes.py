"""Quantization schemes: the tensors that are quantized, their groups, and what the config files record."""

import json
from pathlib import Path

import pytest

from xrank.engine import encodings
from xrank.errors import UsageError
from xrank.layout.output_files import OutputTensor
from xrank.recipes.options import GatherOptions
from xrank.recipes.schemes import IGNORED, find_scheme, plan_quantization

_WRITTEN = json.loads((Path(__file__).parent / "quantization_configs.json").read_text())
"""Scheme -> ``quantization_config``, as llm-compressor 0.14 and ModelOpt 0.47 wrote it for a Llama."""

_LAYER = "model.layers.0"


def outputs_of(*names: str, shape: tuple[int, ...] = (256, 256), dtype: str = "BF16") -> list[OutputTensor]:
    return [OutputTensor(name, dtype, shape) for name in names]


LLAMA = outputs_of(
    "model.embed_tokens.weight",
    *(f"{_LAYER}.self_attn.{each}_proj.weight" for each in "qkvo"),
    *(f"{_LAYER}.mlp.{each}_proj.weight" for each in ("gate", "up", "down")),
    "lm_head.weight",
)


def plan(name: str, outputs: list[OutputTensor], *ignore: str, dialect: str | None = None) -> set[tuple[str, ...]]:
    groups = plan_quantization(find_scheme(name, dialect), outputs, ignore).groups
    return {tuple(each.removeprefix(f"{_LAYER}.").removesuffix(".weight") for each in group) for group in groups}


@pytest.fixture(autouse=True)
def missing_encodings(monkeypatch):
    """Stand-ins for encodings that are not there yet."""
    for name in ("W8A16", "W4A16", "NVFP4A16", "MXFP4A16", "MXFP8", "MODELOPT_FP8", "MODELOPT_NVFP4"):
        if not hasattr(encodings, name):
            monkeypatch.setattr(encodings, name, encodings.W8A8, raising=False)


def test_find_scheme_takes_any_case():
    assert find_scheme("fp8_block").name == "FP8_BLOCK"
    assert find_scheme("nvfp4", "modelopt").dialect == "modelopt"


@pytest.mark.parametrize("name", ["GPTQ", "FP8", "w4a16_awq", "NVFP4", "int4"])
def test_schemes_with_data_are_refused(name):
    with pytest.raises(UsageError, match="llm-compressor"):
        find_scheme(name)


def test_unknown_scheme_lists_the_known_ones():
    with pytest.raises(UsageError, match="FP8_DYNAMIC, FP8_BLOCK, W8A8") as caught:
        find_scheme("FP9")
    assert "llm-compressor" not in str(caught.value)


def test_heads_embeddings_norms_and_routers_are_kept():
    more = outputs_of("model.norm.weight", shape=(256,)) + outputs_of(
        f"{_LAYER}.mlp.gate.weight",
        f"{_LAYER}.mlp.shared_expert_gate.weight",
        f"{_LAYER}.feed_forward.router.weight",
        "model.visual.blocks.0.attn.qkv.weight",
        "multi_modal_projector.linear_1.weight",
        "transformer.wte.weight",
    )
    planned = plan_quantization(find_scheme("W8A8"), [*LLAMA, *more])
    assert {name for group in planned.groups for name in group} == {each.name for each in LLAMA[1:-1]}
    assert set(planned.ignored) == {each.name.removesuffix(".weight") for each in (LLAMA[0], LLAMA[-1], *more[1:])}


@pytest.mark.parametrize(
    ("ignore", "written"),
    [
        ("re:.*[.]o_proj$", "re:.*[.]o_proj$"),
        (".*[.]o_proj", "re:.*[.]o_proj$"),
        (".*[.]o_proj$", "re:.*[.]o_proj$"),
        (f"{_LAYER}.self_attn.o_proj", f"{_LAYER}.self_attn.o_proj"),
        (r".*\.(o|x)_proj|never", r"re:(?:.*\.(o|x)_proj|never)$"),
    ],
)
def test_ignore_takes_names_and_both_kinds_of_expressions(ignore, written):
    planned = plan_quantization(find_scheme("W8A8"), LLAMA, [ignore])
    assert planned.config["ignore"] == [*IGNORED, written]
    assert f"{_LAYER}.self_attn.o_proj" in planned.ignored
    assert sum(map(len, planned.groups)) == 6


def test_ignore_that_matches_nothing_is_refused_unless_it_is_ignored_anyway():
    with pytest.raises(UsageError, match="matches no module"):
        plan_quantization(find_scheme("W8A8"), LLAMA, ["o_proj"])
    plan_quantization(find_scheme("W8A8"), LLAMA[:-1], ["lm_head", "re:.*vision_tower.*"])


def test_nvfp4_shares_scales_over_q_k_v_and_gate_up():
    q, k, v, o = (f"self_attn.{each}_proj" for each in "qkvo")
    gate, up, down = (f"mlp.{each}_proj" for each in ("gate", "up", "down"))
    assert plan("NVFP4A16", LLAMA) == {(q, k, v), (o,), (gate, up), (down,)}
    assert plan("MXFP4A16", LLAMA) == {(q,), (k,), (v,), (o,), (gate,), (up,), (down,)}
    # An ignored member still makes the set whole; a missing one does not.
    assert plan("NVFP4A16", LLAMA, ".*q_proj") == {(k, v), (o,), (gate, up), (down,)}
    assert plan("NVFP4A16", [*LLAMA[:1], *LLAMA[2:]]) == {(k,), (v,), (o,), (gate, up), (down,)}


def test_experts_share_scales_in_modelopts_dialect_and_as_w1_w3():
    named = [f"{_LAYER}.mlp.experts.{i}.{each}_proj.weight" for i in (0, 1) for each in ("gate", "up", "down")]
    assert all(len(group) == 1 for group in plan("NVFP4A16", outputs_of(*named)))
    assert ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj") in plan("NVFP4", outputs_of(*named), dialect="modelopt")
    mixtral = outputs_of(*(f"{_LAYER}.block_sparse_moe.experts.0.w{each}.weight" for each in (1, 2, 3)))
    experts = "block_sparse_moe.experts.0"
    assert plan("NVFP4A16", mixtral) == {(f"{experts}.w1", f"{experts}.w3"), (f"{experts}.w2",)}


def test_latents_of_attention_share_a_scale_only_in_modelopts_dialect():
    latents = outputs_of(
        *(f"{_LAYER}.self_attn.{each}.weight" for each in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))
    )
    assert plan("NVFP4A16", latents) == {("self_attn.o_proj",)}
    assert ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa") in plan("NVFP4", latents, dialect="modelopt")
    assert len(plan("FP8_BLOCK", latents)) == 3


def test_shapes_that_do_not_fit_are_named_with_what_keeps_them():
    conv = outputs_of("model.layers.0.short_conv.weight", shape=(256, 1, 3))
    with pytest.raises(UsageError, match="does not fit W8A8") as caught:
        plan_quantization(find_scheme("W8A8"), [*LLAMA, *conv])
    assert caught.value.tensor == conv[0].name
    assert ".*short_conv" in caught.value.next_step
    plan_quantization(find_scheme("W8A8"), [*LLAMA, *conv], [".*short_conv"])


def test_nothing_to_quantize_and_transposed_weights_are_refused():
    with pytest.raises(UsageError, match="no tensor is left"):
        plan_quantization(find_scheme("W8A8"), LLAMA[:1])
    with pytest.raises(UsageError, match="gpt2"):
        plan_quantization(find_scheme("W8A8"), LLAMA, model_type="gpt2")


@pytest.mark.parametrize(
    "name", ["FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "NVFP4A16", "MXFP4A16", "MXFP8"]
)
def test_config_is_llm_compressors(name):
    planned = plan_quantization(find_scheme(name), LLAMA)
    texts = planned.texts({"hidden_size": 256, "architectures": ["LlamaForCausalLM"]})
    assert [*texts] == ["config.json"]
    written = json.loads(texts["config.json"])
    assert written["quantization_config"] == {**_WRITTEN[name], "ignore": list(planned.patterns)}
    assert texts["config.json"] == json.dumps(written, indent=2, sort_keys=True) + "\n"


@pytest.mark.parametrize("name", ["FP8", "NVFP4"])
def test_config_is_modelopts(name):
    visual = outputs_of("model.visual.blocks.0.attn.qkv.weight", "model.visual.patch_embed.proj.weight")
    texts = plan_quantization(find_scheme(name, "modelopt"), [*LLAMA, *visual]).texts({})
    ignore = ["lm_head", "model.embed_tokens", "model.visual*"]
    assert json.loads(texts["config.json"])["quantization_config"] == {**_WRITTEN[f"modelopt {name}"], "ignore": ignore}
    assert json.loads(texts["hf_quant_config.json"])["quantization"]["exclude_modules"] == ignore


def test_deepseeks_config_names_what_transformers_and_vllm_leave_alone():
    planned = plan_quantization(find_scheme("deepseek_fp8"), [*LLAMA[:-1], *outputs_of(f"{_LAYER}.mlp.gate.weight")])
    assert planned.config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.embed_tokens", f"{_LAYER}.mlp.gate", "lm_head"],
    }
    assert planned.texts(None) == {}


def test_options_without_a_scheme_are_refused():
    with pytest.raises(UsageError, match="nothing is quantized"):
        GatherOptions(quantize_ignore=[".*o_proj"])
    with pytest.raises(UsageError, match="modelopt"):
        GatherOptions(quantize="FP8", dialect="gguf")
    assert GatherOptions(quantize="w8a8", quantize_ignore="re:.*o_proj$").quantize_ignore == ("re:.*o_proj$",)
