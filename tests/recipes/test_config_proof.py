"""A config.json with a wrong size is refused by name, with every reader."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from tests.cli.bench import run
from tests.readers.made_zero import MadeModel, Zero, write_universal, write_zero
from tests.recipes.made_checkpoints import config_of, saved, tiny, tiny_of
from xrank import NFSWorkspace
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.commands.verify import verify_model
from xrank.errors import ContradictionError, IncompleteError

Model = dict[str, torch.Tensor]

CONFIG: dict[str, Any] = {
    "architectures": ["MineForSequenceClassification"],
    "model_type": "my_own",  # every key counts for a type that transformers does not have
    "vocab_size": 36,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "max_position_embeddings": 40,
    "type_vocab_size": 5,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "tie_word_embeddings": True,
    "vision_config": {
        "hidden_size": 20,
        "intermediate_size": 28,
        "num_hidden_layers": 1,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 3,
    },
}
VISION_CONFIG: dict[str, Any] = CONFIG["vision_config"]
PATCHES = "vision_tower.embeddings.patch_embedding.weight"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "vocab_size": ({"vocab_size": 33}, "36 in dim 0 of model.embed_tokens.weight"),
    "hidden_size": ({"hidden_size": 32}, "16 in dim 1 of model.embed_tokens.weight"),
    "intermediate_size": ({"intermediate_size": 25}, r"24 in dim [01] of model.layers.0.mlp.\w+_proj.weight"),
    "num_hidden_layers": ({"num_hidden_layers": 4}, "2 layers under model.layers"),
    "fewer layers": ({"num_hidden_layers": 1}, "2 layers under model.layers"),
    "num_attention_heads": ({"num_attention_heads": 8}, "32 in dim 0 of model.layers.0.self_attn.q_proj.weight"),
    "num_key_value_heads": ({"num_key_value_heads": 4}, "16 in dim 0 of model.layers.0.self_attn.k_proj.weight"),
    "head_dim": ({"head_dim": 4}, "32 in dim 0 of model.layers.0.self_attn.q_proj.weight"),
    "num_experts": ({"num_experts": 4}, r"3 experts of model.layers.\*.mlp.experts.\*.\w+_proj.weight"),
    "moe_intermediate_size": (
        {"moe_intermediate_size": 24},
        r"12 in dim [01] of model.layers.1.mlp.experts.0.\w+_proj.weight",
    ),
    "shared experts": ({"n_shared_experts": 1}, r"24 in dim [01] of model.layers.1.mlp.shared_expert.\w+_proj.weight"),
    "shared_expert_intermediate_size": (
        {"shared_expert_intermediate_size": 20},
        r"24 in dim [01] of model.layers.1.mlp.shared_expert.\w+_proj.weight",
    ),
    "max_position_embeddings": ({"max_position_embeddings": 80}, "40 in dim 0 of model.wpe.weight"),
    "type_vocab_size": ({"type_vocab_size": 2}, "5 in dim 0 of model.token_type_embeddings.weight"),
    "q_lora_rank": ({"q_lora_rank": 28}, "14 in dim 0 of model.layers.0.self_attn.q_a_layernorm.weight"),
    "kv_lora_rank": ({"kv_lora_rank": 20}, "10 in dim 0 of model.layers.0.self_attn.kv_a_layernorm.weight"),
    "num_labels": ({"id2label": {"0": "a", "1": "b"}}, "3 in dim 0 of score.weight"),
    "tie_word_embeddings": (
        {"tie_word_embeddings": False, "architectures": ["MineForCausalLM"]},
        "1 tensor with 36 rows, model.embed_tokens.weight",
    ),
    "patch_size": ({"vision_config": {**VISION_CONFIG, "patch_size": 2}}, f"4 in dim 3 of {PATCHES}"),
    "image_size": (
        {"vision_config": {**VISION_CONFIG, "image_size": 16}},
        "4 in dim 0 of vision_tower.embeddings.position_embedding.weight",
    ),
    "num_channels": ({"vision_config": {**VISION_CONFIG, "num_channels": 1}}, f"3 in dim 1 of {PATCHES}"),
    "vision layers": (
        {"vision_config": {**VISION_CONFIG, "num_hidden_layers": 2}},
        "1 layers under vision_tower.encoder.layers",
    ),
    "vision size": (
        {"vision_config": {**VISION_CONFIG, "intermediate_size": 14}},
        r"28 in dim [01] of vision_tower.encoder.layers.0.mlp.fc1.weight",
    ),
}
"""Kinds of sizes, each with a wrong one and the text that names the right one."""


def made_model() -> Model:
    """Return a model whose first layer is dense and whose second has experts."""
    random = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (36, 16), "model.norm.weight": (16,)}
    for layer in range(2):
        path = f"model.layers.{layer}."
        shapes |= {f"{path}{name}.weight": (16,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{path}self_attn.{name}.weight": (n, 16) for name, n in [("q_proj", 32), ("k_proj", 16)]}
        shapes |= {f"{path}self_attn.v_proj.weight": (16, 16), f"{path}self_attn.o_proj.weight": (16, 32)}
        shapes |= {f"{path}self_attn.{name}_a_layernorm.weight": (n,) for name, n in [("q", 14), ("kv", 10)]}
    blocks = {"layers.0.mlp": 24, "layers.1.mlp.shared_expert": 24}
    for path, size in (blocks | {f"layers.1.mlp.experts.{expert}": 12 for expert in range(3)}).items():
        shapes |= {f"model.{path}.{name}_proj.weight": (size, 16) for name in ("gate", "up")}
        shapes[f"model.{path}.down_proj.weight"] = (16, size)
    shapes |= {"model.layers.1.mlp.gate.weight": (3, 16), "score.weight": (3, 16), "model.wpe.weight": (40, 16)}
    shapes |= {"model.token_type_embeddings.weight": (5, 16), PATCHES: (20, 3, 4, 4)}
    shapes |= {"vision_tower.embeddings.position_embedding.weight": (4, 20)}
    shapes |= {"vision_tower.encoder.layers.0.mlp.fc1.weight": (28, 20)}
    return {name: torch.rand(shape, generator=random) for name, shape in shapes.items()}


def save_dcp(folder: Path, model: Model) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": model}, checkpoint_id=str(folder), no_dist=True)


def save_hf_shards(folder: Path, model: Model) -> None:
    with warnings.catch_warnings(action="ignore"):
        writer = HuggingFaceStorageWriter(str(folder), dict.fromkeys(model, 1), save_distributed=True)
        dcp.save(model, storage_writer=writer, no_dist=True)


def save_workspace(folder: Path, model: Model) -> None:
    NFSWorkspace(str(folder), rank=0, world_size=1).write_configs_and_weights({}, model)


def save_zero(folder: Path, model: Model) -> None:
    write_zero(folder, MadeModel([model]), Zero(num_ranks=2))


def save_universal(folder: Path, model: Model) -> None:
    write_universal(folder, MadeModel([model]), Zero(num_ranks=2))


def save_pieces(folder: Path, model: Model) -> None:
    torch.save(model, folder / "model_0.pt")
    torch.save({"state": {}}, folder / "optim_0.pt")


def save_orbax(folder: Path, model: Model) -> None:
    pytest.importorskip("tensorstore", reason="pip install tensorstore zstandard")
    from tests.readers.orbax_checkpoints import save_tree

    save_tree(folder / "default", {("params", *name.split(".")): tensor.numpy() for name, tensor in model.items()})


READERS: dict[str, Callable[[Path, Model], object]] = {
    "workspace": save_workspace,
    "dcp": save_dcp,
    "hf-shards": save_hf_shards,
    "deepspeed": save_zero,
    "universal": save_universal,
    "verl": lambda folder, model: torch.save(model, folder / "model_world_size_1_rank_0.pt"),
    "accelerate-ranks": lambda folder, model: torch.save(model, folder / "pytorch_model_fsdp_rank0.bin"),
    "safetensors": lambda folder, model: save_file(model, folder / "model.safetensors"),
    "bin": lambda folder, model: torch.save(model, folder / "pytorch_model.bin"),
    "torch-save": lambda folder, model: torch.save({"state_dict": model}, folder / "last.ckpt"),
    "torch-checkpointing": save_pieces,
    "orbax": save_orbax,
}


@pytest.fixture(scope="module", params=READERS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    READERS[request.param](folder, made_model())
    return folder


def set_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return path


def test_right_config_is_taken(source: Path, tmp_path: Path) -> None:
    set_config(source)
    base = {"base_model": base_model(tmp_path)} if any("shard-" in path.name for path in source.iterdir()) else {}
    assert gather_checkpoint(source, tmp_path / "out", **base).ok
    assert inspect_source(source, **base).details["problems"] == []


def base_model(folder: Path) -> Path:
    """Save a base model for shapes that a format does not record."""
    base = folder / "base"
    base.mkdir()
    save_file(made_model(), base / "model.safetensors")
    return base


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_size_is_refused_by_name(source: Path, tmp_path: Path, wrong: str) -> None:
    changes, got = WRONG[wrong]
    path = set_config(source, **changes)
    is_sharded = any("shard-" in file.name for file in source.iterdir())
    base = {"base_model": base_model(tmp_path)} if is_sharded else {}
    with pytest.raises(ContradictionError) as raised:
        gather_checkpoint(source, tmp_path / "out", **base)
    error = raised.value
    assert error.exit_code == 4 and not (tmp_path / "out").exists()
    assert error.tensor in made_model() and error.file == str(path)
    assert re.fullmatch(got, error.got or "")
    key = next(iter(changes))
    values = CONFIG[key] if isinstance(CONFIG.get(key), dict) and key != "id2label" else {}
    inner = next((name for name in values if values[name] != changes[key][name]), None)
    assert error.want is not None
    assert f"{key} = {changes[key]}" in error.want if inner is None else f"{key}.{inner} = " in error.want
    (problem,) = inspect_source(source, **base).details["problems"]
    assert (problem["exit_code"], problem["got"]) == (4, error.got)


SAME_AS_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp as hidden": ("llama", {"intermediate_size": 16}),
    "experts as hidden": ("qwen3_moe", {"moe_intermediate_size": 16}),
    "hidden as mlp": ("qwen2", {"hidden_size": 24}),
    "mlp as words": ("mistral", {"intermediate_size": 36}),
    "unknown family": ("my_own", {"intermediate_size": 16}),
    "unknown experts": ("my_own", {"moe_intermediate_size": 16}),
}
"""Families, each with a wrong size that equals another size of the model."""


def made_family(model_type: str) -> tuple[Model, dict[str, Any]]:
    """Return a model whose sizes all differ, and its config.json."""
    if model_type == "my_own":
        return made_model(), CONFIG
    sizes = {"vocab_size": 36, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 6}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if model_type == "qwen3_moe":
        sizes |= {"num_experts": 3, "moe_intermediate_size": 12}
    model = tiny_of(model_type, sizes)
    return saved(model), config_of(model)


@pytest.mark.parametrize("save", ["dcp", "verl", "deepspeed", "safetensors", "workspace"])
@pytest.mark.parametrize("case", SAME_AS_OTHERS)
def test_size_that_equals_another_one_is_refused(tmp_path: Path, case: str, save: str) -> None:
    model_type, wrong = SAME_AS_OTHERS[case]
    model, config = made_family(model_type)
    source = tmp_path / "source"
    source.mkdir()
    READERS[save](source, model)
    path = source / "config.json"
    path.write_text(json.dumps({**config, **wrong}))
    ended = run("gather", source, "--out", tmp_path / "out")
    ((key, number),) = wrong.items()
    assert ended.exit_code == 4 and f"{key} = {number}" in ended.stderr and not (tmp_path / "out").exists()
    path.write_text(json.dumps(config))
    assert run("gather", source, "--out", tmp_path / "out").exit_code == 0


def test_text_of_a_refusal(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step", made_model())
    path = set_config(tmp_path / "step", num_hidden_layers=4)
    ended = run("gather", tmp_path / "step", "--out", tmp_path / "out")
    assert ended.exit_code == 4
    assert ended.stderr == (
        f"xrank: ContradictionError: {path}: num_hidden_layers contradicts the tensors, such as "
        "model.layers.0.input_layernorm.weight\n"
        "  got   2 layers under model.layers; want 4, by num_hidden_layers = 4\n"
        "  try   copy the files of the other layers, such as those of a pipeline stage, or use an earlier checkpoint; "
        f"if the model has 2, put the model's own config.json in place of {path}, then run the same command (exit 4)\n"
    )
    verified = verify_model(tmp_path / "step")
    assert verified.exit_code == 4 and verified.fault is not None and verified.fault.file == str(path)
    # The advice, followed.
    set_config(tmp_path / "step")
    assert run("gather", tmp_path / "step", "--out", tmp_path / "out").exit_code == 0


def test_config_of_the_base_model_is_checked(tmp_path: Path) -> None:
    source, base = tmp_path / "source", tmp_path / "base"
    source.mkdir()
    base.mkdir()
    save_workspace(source, made_model())
    path = set_config(base, vocab_size=64)
    with pytest.raises(ContradictionError, match="vocab_size contradicts the tensors") as raised:
        gather_checkpoint(source, tmp_path / "out", base_model=base)
    assert raised.value.file == str(path) and "give the model that the training started from" in str(
        raised.value.next_step
    )


def test_config_in_states_is_checked(tmp_path: Path) -> None:
    workspace = NFSWorkspace(str(tmp_path / "states"), rank=0, world_size=1)
    workspace.write_configs_and_weights({**CONFIG, "num_experts": 8}, made_model())
    with pytest.raises(ContradictionError, match="num_experts contradicts the tensors") as raised:
        gather_checkpoint(tmp_path / "states", tmp_path / "out")
    assert (
        raised.value.next_step == f"put the model's own config.json into {tmp_path / 'states'}, then make the same call"
    )
    set_config(tmp_path / "states")
    assert gather_checkpoint(tmp_path / "states", tmp_path / "out").ok


def test_config_may_count_what_the_user_leaves_out_or_not(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step", made_model())
    for number in (1, 2):
        set_config(tmp_path / "step", num_hidden_layers=number)
        assert gather_checkpoint(tmp_path / "step", tmp_path / f"out{number}", exclude=r"model\.layers\.1\..*").ok
    set_config(tmp_path / "step", num_hidden_layers=3)
    with pytest.raises(ContradictionError, match="num_hidden_layers"):
        gather_checkpoint(tmp_path / "step", tmp_path / "out3", exclude=r"model\.layers\.1\..*")


def test_head_that_an_untied_model_lacks_is_named(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step", made_model())
    generating = {"architectures": ["MineForCausalLM"]}
    set_config(tmp_path / "step", **generating, tie_word_embeddings=False)
    with pytest.raises(ContradictionError, match="tie_word_embeddings contradicts the tensors") as raised:
        gather_checkpoint(tmp_path / "step", tmp_path / "out")
    assert raised.value.got == "1 tensor with 36 rows, model.embed_tokens.weight"
    set_config(tmp_path / "step", **generating)
    assert gather_checkpoint(tmp_path / "step", tmp_path / "out").ok


OWN = {"own.vector": (1,), "own.matrix": (1, 1)}
"""Names that no family knows: these few tensors are not whole models of their types."""

ENCODER: tuple[dict[str, Any], dict[str, tuple[int, ...]]] = (
    {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "max_position_embeddings": 40,
        "type_vocab_size": 2,
        "id2label": {"0": "a", "1": "b", "2": "c"},
    },
    {
        "bert.embeddings.position_embeddings.weight": (40, 16),
        "bert.embeddings.token_type_embeddings.weight": (2, 16),
        "classifier.weight": (3, 16),
        **OWN,
    },
)
PAIR: tuple[dict[str, Any], dict[str, tuple[int, ...]]] = (
    {"model_type": "bart", "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 20, "decoder_ffn_dim": 24}
    | {"max_position_embeddings": 40},
    {
        "model.encoder.layers.0.fc1.weight": (20, 16),
        "model.encoder.layers.1.fc1.weight": (20, 16),
        "model.decoder.layers.0.fc1.weight": (24, 16),
        "model.decoder.embed_positions.weight": (42, 16),
        **OWN,
    },
)
VISION: tuple[dict[str, Any], dict[str, tuple[int, ...]]] = (
    {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 8, "num_hidden_layers": 2}
        | {"image_size": 28, "patch_size": 14, "num_channels": 3, "intermediate_size": 20},
    },
    {
        "language_model.model.embed_tokens.weight": (32, 16),
        "language_model.model.layers.0.input_layernorm.weight": (16,),
        "vision_tower.vision_model.embeddings.patch_embedding.weight": (8, 3, 14, 14),
        "vision_tower.vision_model.embeddings.position_embedding.weight": (5, 8),
        "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight": (8,),
        "vision_tower.vision_model.encoder.layers.1.layer_norm1.weight": (8,),
        "vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight": (20, 8),
        "multi_modal_projector.linear_1.weight": (16, 8),
    },
)
LATENT: tuple[dict[str, Any], dict[str, tuple[int, ...]]] = (
    {"model_type": "deepseek_v3", "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "kv_lora_rank": 10, "q_lora_rank": 14}
    | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, "n_shared_experts": 2, "moe_intermediate_size": 6},
    {
        "model.layers.0.self_attn.q_b_proj.weight": (24, 14),
        "model.layers.0.self_attn.kv_b_proj.weight": (28, 10),
        "model.layers.0.self_attn.q_a_layernorm.weight": (14,),
        "model.layers.0.self_attn.kv_a_layernorm.weight": (10,),
        "model.layers.0.mlp.shared_experts.up_proj.weight": (12, 16),
        "model.layers.1.input_layernorm.weight": (16,),
        **OWN,
    },
)
FUSED: tuple[dict[str, Any], dict[str, tuple[int, ...]]] = (
    {"model_type": "my_own", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"num_local_experts": 3, "moe_intermediate_size": 10, "intermediate_size": 22},
    {
        "model.layers.0.self_attn.qkv_proj.weight": (32, 16),
        "model.layers.0.mlp.gate_up_proj.weight": (44, 16),
        "model.layers.1.mlp.experts.gate_up_proj": (3, 20, 16),
        "model.layers.1.mlp.experts.down_proj": (3, 16, 10),
    },
)
OTHERS = [
    *((ENCODER, key) for key in ("max_position_embeddings", "type_vocab_size", "id2label")),
    *((PAIR, key) for key in PAIR[0] if key != "model_type"),
    *((VISION, f"vision_config.{key}") for key in VISION[0]["vision_config"] if key != "model_type"),
    *((VISION, f"text_config.{key}") for key in ("hidden_size", "num_hidden_layers")),
    *(
        (LATENT, key)
        for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    ),
    *((LATENT, key) for key in ("num_hidden_layers", "n_shared_experts")),
    *((FUSED, key) for key in FUSED[0] if key != "model_type"),
]


@pytest.mark.parametrize(("family", "key"), OTHERS, ids=[f"{family[0]['model_type']}-{key}" for family, key in OTHERS])
def test_other_families(tmp_path: Path, family: tuple[dict[str, Any], dict[str, tuple[int, ...]]], key: str) -> None:
    config, shapes = json.loads(json.dumps(family[0])), family[1]
    save_file({name: torch.rand(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert gather_checkpoint(tmp_path, tmp_path / "right").ok
    section, _, name = key.rpartition(".")
    values = config[section] if section else config
    values[name] = {"0": "a"} if name == "id2label" else values[name] * 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ContradictionError, match="contradicts the tensors") as raised:
        gather_checkpoint(tmp_path, tmp_path / "wrong")
    assert raised.value.tensor in shapes
    assert f"{key} = " in str(raised.value.want)
    # A model with code of its own may mean other sizes by these keys.
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling.Model"}}))
    assert gather_checkpoint(tmp_path, tmp_path / "own-code").ok


def test_key_that_no_model_of_this_type_reads_is_no_size(tmp_path: Path) -> None:
    """Files on the Hub have such keys; transformers keeps them, and reads others."""
    once = {name: torch.rand(8, 16) for name in ("gpt_neox.embed_in.weight", "embed_out.weight")}
    norm = {f"gpt_neox.final_layer_norm.{name}": torch.rand(16) for name in ("weight", "bias")}
    layer = {"gpt_neox.layers.0.attention.query_key_value.weight": torch.rand(48, 16)}
    save_file({**once, **norm, **layer}, tmp_path / "model.safetensors")
    config = {"model_type": "gpt_neox", "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert gather_checkpoint(tmp_path, tmp_path / "out").ok
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "my_own"}))
    with pytest.raises(ContradictionError, match="contradicts the tensors"):
        gather_checkpoint(tmp_path, tmp_path / "refused")


def test_packed_payloads_show_no_sizes(tmp_path: Path) -> None:
    model = {**made_model(), "model.layers.0.mlp.gate_proj.weight": torch.zeros(192, 1, dtype=torch.uint8)}
    model["model.layers.0.mlp.gate_proj.weight.absmax"] = torch.ones(6)
    save_file(model, tmp_path / "model.safetensors")
    set_config(tmp_path, quantization_config={"quant_method": "bitsandbytes"})
    assert gather_checkpoint(tmp_path, tmp_path / "out").ok


def test_tensor_that_a_state_dict_lacks_is_named(tmp_path: Path) -> None:
    """transformers would give random values to it. No advice leads to such a model."""
    model = tiny("llama")
    tensors, lost = saved(model), "model.layers.1.mlp.up_proj.weight"
    warnings.simplefilter("ignore")
    dcp.save({"model": {k: v for k, v in tensors.items() if k != lost}}, checkpoint_id=tmp_path / "run", no_dist=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps(config_of(model)))
    with pytest.raises(IncompleteError) as caught:
        gather_checkpoint(tmp_path / "run", tmp_path / "m")
    assert (caught.value.tensor, caught.value.want) == (lost, "all tensors of a llama, as in the recipe megatron-llama")
    assert [fault["type"] for fault in inspect_source(tmp_path / "run").to_dict()["problems"]] == ["IncompleteError"]
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(ContradictionError, match=f"{lost} is in the base model but not in the source") as missed:
        gather_checkpoint(tmp_path / "run", tmp_path / "m", base_model=tmp_path / "base")
    assert "exclude= if the model works without it" in str(missed.value.next_step)
    with pytest.raises(IncompleteError, match=lost):
        gather_checkpoint(tmp_path / "run", tmp_path / "m", base_model=tmp_path / "base", exclude=[lost])
    assert not (tmp_path / "m").exists()
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "run", no_dist=True)
    gather_checkpoint(tmp_path / "run", tmp_path / "m", exclude=[lost])  # the user's own choice
