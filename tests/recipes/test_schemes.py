"""Quantization schemes: the tensors that are quantized, their groups, and what the config files record."""

import json
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from xrank import dtypes
from xrank.engine.buffers import MemoryTarget
from xrank.engine.executor import Budget, execute
from xrank.engine.planner import make_plan
from xrank.engine.sources import open_source
from xrank.errors import UsageError
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.readers.discovery import find_source
from xrank.recipes.conversions import split_experts
from xrank.recipes.options import GatherOptions
from xrank.recipes.schemes import IGNORED, find_scheme, is_ignored, plan_quantization
from xrank.recipes.sources import read_source

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
    odd = outputs_of("model.layers.0.mixer.filter.weight", shape=(256, 1, 3))
    with pytest.raises(UsageError, match="does not fit W8A8") as caught:
        plan_quantization(find_scheme("W8A8"), [*LLAMA, *odd])
    assert caught.value.tensor == odd[0].name
    assert ".*filter" in caught.value.next_step
    plan_quantization(find_scheme("W8A8"), [*LLAMA, *odd], [".*filter"])


def read_split(folder: Path, stacks: dict[str, torch.Tensor], kept: str = "never") -> dict[str, torch.Tensor]:
    """Return the tensors of a model after its stacks of experts are split, except in modules that `kept` matches."""
    save_file(stacks, folder / "model.safetensors")
    place = str(folder)
    source = read_source(place, find_source(place)).model
    outputs = [OutputTensor(shard.name, shard.dtype, shard.shape) for shard in source.shards]
    source, split = split_experts(source, outputs, re.compile(kept).match)
    assert [shard.name for shard in source.shards] == [output.name for output in split]
    plan = make_plan(source, [OutputFile.bare(output) for output in split])
    rooms = [bytearray(output.nbytes) for output in split]
    with closing(open_source(plan.source)) as files:
        execute(plan, files, MemoryTarget([memoryview(room) for room in rooms]), budget=Budget(1, 4096))
    return {
        output.name: torch.frombuffer(room, dtype=torch.float32).view(output.shape)
        for output, room in zip(split, rooms, strict=True)
    }


EXPERTS = "layers.0.mlp.experts"


@pytest.mark.parametrize("is_transposed", [False, True])
def test_stacked_experts_become_matrices(tmp_path, is_transposed):
    gate, up, down = torch.randn(3, 6, 8), torch.randn(3, 6, 8), torch.randn(3, 8, 6)
    stacks = {"gate_up_proj": torch.cat((gate, up), dim=1), "down_proj": down}
    stored = {
        f"{EXPERTS}.{name}": stack.mT.contiguous() if is_transposed else stack.clone() for name, stack in stacks.items()
    }
    split = read_split(tmp_path, stored)
    assert len(split) == 9
    for number in range(3):
        for name, stack in (("gate", gate), ("up", up), ("down", down)):
            assert torch.equal(split[f"{EXPERTS}.{number}.{name}_proj.weight"], stack[number])


def test_experts_with_biases_and_kept_ones_stay_whole(tmp_path):
    stored = {f"{EXPERTS}.gate_up_proj": torch.randn(2, 8, 12), f"{EXPERTS}.down_proj": torch.randn(2, 6, 8)}
    assert read_split(tmp_path, stored, kept=".*experts").keys() == stored.keys()
    biases = {f"{EXPERTS}.{name}_bias": torch.randn(2, size) for name, size in (("gate_up_proj", 12), ("down_proj", 8))}
    whole = read_split(tmp_path, stored | biases)
    assert whole.keys() == stored.keys() | biases.keys()
    outputs = [OutputTensor(name, "F32", tuple(tensor.shape)) for name, tensor in whole.items()]
    with pytest.raises(UsageError, match=r"experts.*does not fit") as caught:
        plan_quantization(find_scheme("W8A8"), [*LLAMA, *outputs])
    assert ".*experts.*" in caught.value.next_step  # vLLM asks for the modules below experts
    planned = plan_quantization(find_scheme("W8A8"), [*LLAMA, *outputs], [".*experts.*"])
    assert EXPERTS in planned.ignored and is_ignored(f"{EXPERTS}.0.w1", planned.patterns)


@pytest.mark.parametrize(("name", "dtype"), [("a.weight", "F8_E4M3"), ("a.weight_packed", "I32"), ("a.qweight", "I32")])
def test_quantized_models_are_refused(name, dtype):
    with pytest.raises(UsageError, match="quantized already") as caught:
        plan_quantization(find_scheme("W8A8"), [*LLAMA, *outputs_of(name, dtype=dtype)])
    assert "dequantize" in caught.value.next_step


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


def test_modelopts_scales_have_the_shapes_of_its_folders():
    made = {name: find_scheme(name, "modelopt").encoding.outputs("w", "BF16", (32, 64)) for name in ("FP8", "NVFP4")}
    assert [(each.name, each.dtype, each.shape) for each in made["FP8"]] == [
        ("w", "F8_E4M3", (32, 64)),
        ("w_scale", "F32", (32,)),
    ]
    assert [(each.name, each.dtype, each.shape) for each in made["NVFP4"]] == [
        ("w", "U8", (32, 32)),
        ("w_scale", "F8_E4M3", (32, 4)),
        ("w_scale_2", "F32", ()),
    ]


def test_modelopts_channels_are_divided_in_fp32():
    values = torch.randn(4, 96).bfloat16()
    scales = values.abs().amax(dim=1).float() / 448.0
    want = (values / scales[:, None]).to(torch.float8_e4m3fn)  # modelopt/torch/export/quant_utils.py
    array = values.view(torch.uint16).numpy().view(dtypes.numpy_dtype("BF16"))
    encoding = find_scheme("FP8", "modelopt").encoding
    codes, made = (elements for _, _, elements in encoding.encode(array, 0, values.shape))
    assert codes.tobytes() == want.view(torch.uint8).numpy().tobytes()
    assert made.ravel().tolist() == scales.tolist()


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
