"""What of the source is written, of which element type, and over how many files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import xrank
from tests.cli.bench import Bench
from tests.commands.made_workspaces import LAYOUTS, assert_holds, leave, leave_plain, made_model, model_in
from xrank import NFSWorkspace
from xrank.commands.gather import gather_checkpoint
from xrank.errors import UnsafeError, UsageError
from xrank.layout import DeviceMesh, LayoutMap

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def cast(model: dict[str, torch.Tensor], dtype: torch.dtype, keep: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return what torch makes of a model."""
    return {
        name: tensor if name in keep or not tensor.is_floating_point() else tensor.to(dtype)
        for name, tensor in model.items()
    }


def config_in(bench: Bench) -> Any:
    return json.loads((bench.out / "config.json").read_text())


# ---- casts


@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_are_torchs(bench: Bench, dtype: str) -> None:
    model = made_model()
    model["norm.weight"] = torch.tensor([0.0, -0.0, 1e-40, -1e-8, 65504.0, 1 / 3, torch.inf, -torch.inf])
    leave(bench.workspace, model)
    report = bench.succeeds(cast(model, DTYPES[dtype]), "--dtype", dtype)
    assert config_in(bench)["dtype"] == str(DTYPES[dtype]).removeprefix("torch.")
    assert [note["code"] for note in report["notes"]] == ["config-dtype"]
    casts = {name for name, tensor in model.items() if tensor.is_floating_point() and tensor.dtype != DTYPES[dtype]}
    assert set(report["output"]["cast"]) == casts
    assert "steps" not in casts
    manifest = json.loads((bench.out / "xrank_manifest.json").read_text())
    assert manifest["cast"] == report["output"]["cast"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_no_number_stays_none(bench: Bench, dtype: str) -> None:
    # Its bits are another's business: torch's own differ between its vectorized and its scalar casts.
    leave_plain(bench.workspace, 0, {"a": torch.tensor([1.0, torch.nan, -torch.nan, 2.0])})
    assert bench.gather("--dtype", dtype).exit_code == 0
    assert model_in(bench.out)["a"].isnan().tolist() == [False, True, True, False]


def test_keep_changes_nothing(bench: Bench) -> None:
    report = bench.succeeds(leave(bench.workspace), "--dtype", "keep")
    assert report["output"]["cast"] == {}
    assert "dtype" not in config_in(bench)


def test_keep_fp32(bench: Bench) -> None:
    model = leave(bench.workspace)
    kept = ("norm.weight", "embed.weight")
    keep = ("--keep-fp32", "norm.*", "--keep-fp32", "em.+")
    report = bench.succeeds(cast(model, torch.bfloat16, kept), "--dtype", "bf16", *keep)
    (told,) = [note["message"] for note in report["notes"] if note["code"] == "kept-fp32"]
    assert all(name in told for name in kept)
    shutil.rmtree(bench.out)
    bench.refused(
        "UsageError", "--dtype", "bf16", "--keep-fp32", "norm", says=["--keep-fp32: 'norm' matches no tensor"]
    )
    for keep in ([], ["--dtype", "keep"]):
        bench.refused("UsageError", *keep, "--keep-fp32", "norm.*", says=["--keep-fp32 was given, but nothing is cast"])
    # It is never below fp32: with --dtype fp32 no bf16 stays behind, which config.json would contradict.
    bench.succeeds(cast(model, torch.float32), "--dtype", "fp32", "--keep-fp32", "up.*")
    assert config_in(bench)["dtype"] == "float32"


def test_the_base_models_dtypes(bench: Bench) -> None:
    model = leave(bench.workspace)
    want = {**cast(model, torch.float16, ("embed.weight",)), "up.weight": model["up.weight"].float()}
    base = bench.folder / "base"
    base.mkdir()
    save_file(want, base / "model.safetensors")
    (base / "config.json").write_text('{"dtype": "float16"}')
    report = bench.succeeds(want, "--dtype", "base", "--base-model", base)
    assert report["output"]["cast"]["up.weight"] == "BF16 -> F32"
    assert config_in(bench) == {"dtype": "float16"}
    shutil.rmtree(bench.out)
    says = [
        "the base model does not have embed.weight, so its type is unknown",
        "give --base-model a folder with weights",
    ]
    bench.refused("UsageError", "--dtype", "base", says=says, tensor="embed.weight")
    # A quantized base model has no type for the values; each half of the advice gives the model.
    save_file({**want, "up.weight": torch.ones(want["up.weight"].shape, dtype=torch.int8)}, base / "model.safetensors")
    says = ["--dtype base: up.weight cannot be cast to I8", "choose another --dtype, or a base model that is not"]
    bench.refused("UsageError", "--dtype", "base", "--base-model", base, says=says, tensor="up.weight")
    bench.succeeds(cast(model, torch.float32), "--dtype", "fp32", "--base-model", base)
    shutil.rmtree(bench.out)
    save_file(want, base / "model.safetensors")
    bench.succeeds(want, "--dtype", "base", "--base-model", base)


def test_the_config_of_a_base_model_follows_the_cast(bench: Bench) -> None:
    model = leave(bench.workspace)
    base = bench.folder / "base"
    base.mkdir()
    (base / "config.json").write_text('{"torch_dtype": "float32", "z": 1}')
    bench.succeeds(cast(model, torch.bfloat16), "--dtype", "bf16", "--base-model", base)
    assert config_in(bench) == {"torch_dtype": "bfloat16", "z": 1}


@pytest.mark.parametrize("value", [70000.0, -65520.0])
def test_what_does_not_fit_is_refused(bench: Bench, value: float) -> None:
    model = made_model()
    model["down.weight"][5, 10] = value  # of rank 1, in a column shard
    leave(bench.workspace, model)
    says = [f"down.weight: {value:g} does not fit F16", f"got   {value:g} in F32 on rank 1", "--keep-fp32"]
    bench.refused("UsageError", "--dtype", "fp16", says=says, tensor="down.weight", rank=1)
    bench.succeeds(cast(model, torch.float16, ("down.weight",)), "--dtype", "fp16", "--keep-fp32", "down.weight")
    shutil.rmtree(bench.out)
    bench.succeeds(cast(model, torch.bfloat16), "--dtype", "bf16")


def test_float8_payloads_are_not_cast(bench: Bench) -> None:
    model = {"q": torch.arange(16.0).to(torch.float8_e4m3fn), "scale": torch.rand(4)}
    leave_plain(bench.workspace, 0, model)
    report = bench.succeeds(model, "--dtype", "bf16")
    assert "not-cast" in [note["code"] for note in report["notes"]]


CODES = torch.ones(32, 8, dtype=torch.int8)
QUANTIZED: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {
    "fp8 in blocks": ({"up.weight": CODES.to(torch.float8_e4m3fn)}, {"up.weight_scale_inv": torch.rand(1, 1)}),
    "int8": ({"up.weight": CODES}, {"up.weight_scale": torch.rand(32, 1), "up.weight_zero_point": torch.rand(32, 1)}),
    "nvfp4": (
        {"up.weight": CODES.view(torch.uint8), "up.weight_scale": CODES.to(torch.float8_e4m3fn)},
        {"up.weight_scale_2": torch.rand(()), "up.input_scale": torch.rand(()), "attn.k_scale": torch.rand(1)},
    ),
    "bitsandbytes 4 bits": (
        {"up.weight": torch.ones(32, 1, dtype=torch.uint8)},
        {f"up.weight.{name}": torch.rand(2) for name in ("absmax", "quant_map", "nested_absmax")},
    ),
    "bitsandbytes 8 bits": ({"up.weight": CODES}, {"up.SCB": torch.rand(32)}),
    "gptq": ({"up.qweight": CODES.int(), "up.qzeros": CODES.int()}, {"up.scales": torch.rand(1, 8)}),
    "gptq, fp16": ({"up.qweight": CODES.int()}, {"up.scales": torch.rand(1, 8).half()}),
    "packed in int32": ({"up.weight_packed": CODES.int()}, {"up.weight_scale": torch.rand(32, 1)}),
    "experts": ({"up.gate_up_proj": CODES.view(torch.uint8)}, {"up.gate_up_proj_scale": torch.rand(32, 1)}),
    "another suffix": ({"up.weight": CODES}, {"up.weight_magnitudes": torch.rand(32, 1)}),
}
"""Kinds of quantized tensors: payloads, and floating-point tensors that scale them."""


@pytest.mark.parametrize("config", [None, {"model_type": "mine"}, {"quantization_config": {"quant_method": "own"}}])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_scales_of_payloads_keep_their_type(tmp_path: Path, kind: str, config: dict[str, Any] | None) -> None:
    payload, scales = QUANTIZED[kind]
    rest = {"up.bias": torch.rand(8), "norm.weight": torch.rand(8)}
    source = tmp_path / "source"
    source.mkdir()
    torch.save({**payload, **scales, **rest}, source / "model.pt")
    if config is not None:
        (source / "config.json").write_text(json.dumps(config))
    for dtype, want in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        report = gather_checkpoint(source, tmp_path / dtype, dtype=dtype)
        assert_holds(tmp_path / dtype, {**payload, **scales, **cast(rest, want)})
        assert any(code == "not-cast" and "scales of quantized values" in text for code, text in report.notes)


@pytest.mark.parametrize("config", [{"model_type": "own"}, {"model_type": "llama"}])
def test_scales_in_ranks_and_live_models_keep_their_type(tmp_path: Path, config: dict[str, Any]) -> None:
    weight, scale, norm = CODES.clone(), torch.rand(32, 1), torch.rand(8)
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["a.weight"], layouts["a.weight_scale"] = "[f/tp, h]", "[f/tp, 1]"
    for rank in range(2):
        part = {"a.weight": weight.chunk(2)[rank].clone(), "a.weight_scale": scale.chunk(2)[rank].clone()}
        workspace = NFSWorkspace(str(tmp_path / "ranks"), rank=rank, world_size=2, run_id="r")
        workspace.write_configs_and_weights(config if config["model_type"] == "own" else {}, part, layouts=layouts)
    gather_checkpoint(tmp_path / "ranks", tmp_path / "gathered", dtype="bf16")
    assert_holds(tmp_path / "gathered", {"a.weight": weight, "a.weight_scale": scale})
    model = {"a.weight": weight, "a.weight_scale": scale, "norm.weight": norm}
    want = {**model, "norm.weight": norm.bfloat16()}
    xrank.export_model(model, tmp_path / "exported", dtype="bf16")
    assert_holds(tmp_path / "exported", want)
    brought = {name: tensor.clone() for name, tensor in xrank.iter_model(model, dtype="bf16")}
    assert {name: tensor.dtype for name, tensor in brought.items()} == {name: each.dtype for name, each in want.items()}
    # A module that was cast as a whole would get other weights.
    module = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    with pytest.raises(UsageError, match=r"a\.weight_scale: as BF16, this scale of a quantized tensor") as raised:
        xrank.load_model({**module, "a.weight_scale": scale.bfloat16()}, tmp_path / "exported")
    assert (raised.value.got, raised.value.want) == ("BF16 in the module", "F32, as in the source")
    xrank.load_model(module, tmp_path / "exported")
    assert torch.equal(module["a.weight_scale"], scale)


def test_tensors_beside_indices_are_cast(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    indices = {"up.table": torch.ones(4, 8, dtype=torch.int64), "up.mask": torch.ones(4, 8, dtype=torch.bool)}
    rest = {"up.rows": torch.rand(8), "logit_scale": torch.rand(())}
    save_file({**indices, **rest}, source / "model.safetensors")
    gather_checkpoint(source, tmp_path / "out", dtype="bf16")
    assert_holds(tmp_path / "out", {**indices, **cast(rest, torch.bfloat16)})


@pytest.mark.parametrize("dtype", ["int8", "BF16", ""])
def test_no_dtype(bench: Bench, dtype: str) -> None:
    leave(bench.workspace)
    says = [f"--dtype must be one of keep, base, bf16, fp16, fp32; got {dtype!r}", "keep, base, bf16, fp16, fp32"]
    bench.refused("UsageError", "--dtype", dtype, says=says)


def test_every_dtype_is_kept_to_the_bit(bench: Bench) -> None:
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    names = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "complex64")
    names += ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")
    model = {name: bits.view(getattr(torch, name)).clone() for name in names}
    model |= {"bool": bits > 7, "empty": torch.empty(0, 3), "scalar": torch.tensor(-0.0)}
    layouts = {name: ("[]", "[n/dp/tp]", "[a, b]")[tensor.ndim] for name, tensor in model.items()}
    leave(bench.workspace, model, layouts=layouts)
    bench.succeeds(model)


# ---- include and exclude


def test_include_and_exclude(bench: Bench) -> None:
    model = leave(bench.workspace)
    report = bench.succeeds(
        {name: model[name] for name in ("embed.weight", "up.weight")},
        "--include", r".*\.weight", "--exclude", "norm.weight", "--exclude", "down.+",
    )  # fmt: skip
    left_out = ["down.weight", "norm.weight", "steps"]
    assert report["output"]["excluded"] == left_out
    assert json.loads((bench.out / "xrank_manifest.json").read_text())["excluded"] == left_out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--include", "weight"], ["--include: 'weight' matches no tensor", "whole names, such as 'embed.weight'"]),
        (["--include", ".*", "--exclude", "nothing"], ["--exclude: 'nothing' matches no tensor"]),
        (["--exclude", "("], ["--exclude must be a regular expression", "unterminated subpattern"]),
        (["--exclude", ".*"], ["no tensor is left to write", "change --include or --exclude"]),
    ],
)
def test_patterns_that_are_refused(bench: Bench, options: list[str], says: list[str]) -> None:
    leave(bench.workspace)
    bench.refused("UsageError", *options, says=says)


def test_a_damaged_tensor_may_be_left_out(bench: Bench) -> None:
    # Nothing is written of what is left out, so nothing of it is read either.
    model = made_model()
    leave(bench.workspace, model)
    path = bench.workspace / "rank_1_state.pth"
    content = bytearray(path.read_bytes())
    place = content.index(bytes(model["norm.weight"].view(torch.uint8).numpy()))
    content[place] ^= 1
    path.write_bytes(content)
    bench.refused("CorruptError", says=["norm.weight, the whole tensor: checksum of rank 1's"], tensor="norm.weight")
    model.pop("norm.weight")
    bench.succeeds(model, "--exclude", "norm.weight")


# ---- files


def test_one_file_has_no_index(bench: Bench) -> None:
    bench.succeeds(leave(bench.workspace))
    assert sorted(path.name for path in bench.out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "xrank_manifest.json",
    ]


def test_several_files_and_their_index(bench: Bench) -> None:
    model = leave(bench.workspace)
    report = bench.succeeds(model, "--max-shard-size", "600")
    index = json.loads((bench.out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in model.values())
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in model.values())
    assert sorted(index["weight_map"]) == sorted(model)
    files = sorted(bench.out.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [file["name"] for file in report["output"]["files"]] == [file.name for file in files]
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert all(index["weight_map"][name] == file.name for name in opened.keys())  # noqa: SIM118
            held = sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118
            assert held <= 600 or len(opened.keys()) == 1


@pytest.mark.parametrize("size", ["0", "zero", "-5", "5XB", "1e3"])
def test_no_size(bench: Bench, size: str) -> None:
    leave(bench.workspace)
    bench.refused("UsageError", "--max-shard-size", size, says=["--max-shard-size must be a size", repr(size), "5GB"])


def test_transformers_loads_it(bench: Bench, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    trained = transformers.LlamaForCausalLM(config).bfloat16()
    state = {name: tensor.detach().clone() for name, tensor in trained.state_dict().items()}
    layouts = {name: "[f/tp, h]" if tensor.ndim == 2 else "[h]" for name, tensor in state.items()}
    leave(bench.workspace, state, layouts=layouts, config=json.loads(config.to_json_string()))
    state.pop("lm_head.weight")
    bench.succeeds(state, "--max-shard-size", "8KB")
    loaded, facts = transformers.AutoModelForCausalLM.from_pretrained(bench.out, output_loading_info=True)
    assert not any(facts.values()), facts
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(tokens).logits, trained(tokens).logits)


def test_the_same_input_gives_the_same_bytes(bench: Bench) -> None:
    model = leave(bench.workspace, layouts=LAYOUTS)
    bench.succeeds(model, "--max-shard-size", "600", "--workers", "1")
    first = {path.name: path.read_bytes() for path in bench.out.iterdir()}
    shutil.rmtree(bench.out)
    bench.succeeds(model, "--max-shard-size", "600", "--workers", "4", "--verify")
    assert {path.name: path.read_bytes() for path in bench.out.iterdir()} == first
    assert_holds(bench.out, model)


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nb", "a\x7fb", "a\x85b", "../b", "a/..\\b"])
def test_a_name_that_steers_a_terminal_or_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.ones(2), name: torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsafeError, match="a tensor's name is invalid"):
        gather_checkpoint(tmp_path, tmp_path / "out")


def test_names_may_have_letters_of_any_language_and_signs_without_width(tmp_path: Path) -> None:
    tensors = {name: torch.ones(2) for name in ("größe", "重み", "a\u200bb", "a..b")}
    save_file(tensors, tmp_path / "model.safetensors")
    gather_checkpoint(tmp_path, tmp_path / "out", dry_run=True)
