"""Dequantization: folders of quantized weights become floating-point models, decoded where they are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xrank
from tests.cli.bench import run
from tests.commands.forked_ranks import ForkedRanks, forked_ranks
from xrank.errors import ContradictionError, IncompleteError, UsageError, XrankError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.recipes.schemes import find_scheme

Tensors = dict[str, torch.Tensor]
HIDDEN, INNER = 192, 320
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 24,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
UP = "model.layers.0.mlp.up_proj.weight"


def make_llama() -> Tensors:
    shapes = {"model.embed_tokens": (24, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (24, HIDDEN)}
    shapes |= {f"model.layers.0.{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    shapes |= {f"model.layers.0.self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {f"model.layers.0.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
    shapes |= {"model.layers.0.mlp.down_proj": (HIDDEN, INNER)}
    torch.manual_seed(1)
    return {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def quantize_blocks(plain: Tensors) -> tuple[Tensors, Tensors]:
    """Return a model as DeepSeek quantizes it, and with its values in fp32."""
    made, want = Tensors(), Tensors()
    for name, tensor in plain.items():
        if "_proj" not in name:
            made[name] = want[name] = tensor
            continue
        rows, columns = tensor.shape
        codes, scales = tensor.to(torch.float8_e4m3fn), torch.rand(-(-rows // 128), -(-columns // 128))
        scales = scales.bfloat16() if name == UP else scales  # as in Qwen's folders
        made |= {name: codes, f"{name}_scale_inv": scales}
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        want[name] = codes.float() * wide.float()  # DeepSeek-V3/inference/kernel.py: weight_dequant
    return made, want


def save(folder: Path, tensors: Tensors, quantization: dict[str, Any] | None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    values = CONFIG if quantization is None else {**CONFIG, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def assert_equal(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp32", "fp16"])
def test_a_gather_writes_the_values_that_deepseek_computes(tmp_path: Path, dtype: str) -> None:
    made, want = quantize_blocks(make_llama())
    source, out = save(tmp_path / "quantized", made, DEEPSEEK), tmp_path / "out"
    report = xrank.gather_checkpoint(source, out, dequantize=True, dtype=dtype)
    kind = {"keep": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[dtype]
    assert_equal(load_file(out / "model.safetensors"), {name: tensor.to(kind) for name, tensor in want.items()})
    config = json.loads((out / "config.json").read_text())
    assert config == {**CONFIG, "torch_dtype": str(kind).removeprefix("torch.")}
    assert any(code == "dequantized" and "7 quantized weights" in text for code, text in report.notes)
    assert xrank.verify_model(out, against=source).num_tensors == len(want)
    opened = xrank.open_checkpoint(source, dequantize=True, dtype=dtype)
    assert torch.equal(opened[UP], want[UP].to(kind))


def test_the_command_dequantizes_and_copies_without_the_option(tmp_path: Path) -> None:
    made, want = quantize_blocks(make_llama())
    source = save(tmp_path / "quantized", made, DEEPSEEK)
    run("gather", source, "-o", tmp_path / "plain", "--dequantize")
    assert torch.equal(load_file(tmp_path / "plain/model.safetensors")[UP], want[UP].bfloat16())
    run("gather", source, "-o", tmp_path / "copy")
    assert_equal(load_file(tmp_path / "copy/model.safetensors"), made)
    again = xrank.gather_checkpoint(tmp_path / "plain", tmp_path / "again", dequantize=True)
    assert ("dequantized", "no tensor is quantized; all are copied unchanged") in again.notes


def test_a_quantized_model_is_quantized_otherwise(tmp_path: Path) -> None:
    made, _ = quantize_blocks(make_llama())
    source = save(tmp_path / "quantized", made, DEEPSEEK)
    with pytest.raises(UsageError, match="dequantize=True"):
        xrank.gather_checkpoint(source, tmp_path / "out", quantize="W8A8")
    xrank.gather_checkpoint(source, tmp_path / "out", quantize="W8A8", dequantize=True)
    xrank.gather_checkpoint(source, tmp_path / "plain", dequantize=True)
    xrank.gather_checkpoint(tmp_path / "plain", tmp_path / "want", quantize="W8A8")
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).glob("*.safetensors")} for name in ("out", "want"))
    assert one == two
    assert xrank.verify_model(source, against=tmp_path / "out").num_tensors == len(make_llama()) + 7
    codes = bytearray((tmp_path / "quantized/model.safetensors").read_bytes())
    codes[-5] ^= 1
    (tmp_path / "quantized/model.safetensors").write_bytes(codes)
    for name in ("out", "plain"):
        assert isinstance(xrank.verify_model(source, against=tmp_path / name).fault, ContradictionError)


def test_a_module_gets_values_for_floating_point_and_codes_for_codes(tmp_path: Path) -> None:
    made, want = quantize_blocks(make_llama())
    source = save(tmp_path / "quantized", made, DEEPSEEK)
    for kind in (torch.bfloat16, torch.float32):
        module = {name: torch.zeros_like(tensor, dtype=kind) for name, tensor in want.items()}
        report = xrank.load_model(module, source)
        assert_equal(module, {name: tensor.to(kind) for name, tensor in want.items()})
        assert any(code == "dequantized" for code, _ in report.notes)
    codes = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    assert not any(code == "dequantized" for code, _ in xrank.load_model(codes, source).notes)
    assert_equal({n: t.view(torch.uint8) for n, t in codes.items()}, {n: t.view(torch.uint8) for n, t in made.items()})


def test_what_does_not_fit_is_refused_by_name_before_anything_is_written(tmp_path: Path) -> None:
    made, _ = quantize_blocks(make_llama())
    scale, out = f"{UP}_scale_inv", tmp_path / "out"

    def refused(tensors: Tensors, quantization: dict[str, Any] | None, kind: type[XrankError]) -> str:
        with pytest.raises(kind) as found:
            xrank.gather_checkpoint(save(tmp_path / "wrong", tensors, quantization), out, dequantize=True)
        assert not out.exists()
        return str(found.value)

    for other in ("weight_zero_point", "weight_g_idx", "pre_quant_scale"):
        name = UP.replace("weight", other)
        assert name in refused(made | {name: torch.ones(INNER)}, DEEPSEEK, UsageError)
    assert scale in refused({n: t for n, t in made.items() if n != scale}, DEEPSEEK, IncompleteError)
    assert UP in refused({n: t for n, t in made.items() if n != UP}, DEEPSEEK, IncompleteError)
    assert scale in refused(made | {scale: torch.rand(3, 1)}, DEEPSEEK, ContradictionError)
    assert "_proj" in refused(made, {**DEEPSEEK, "weight_block_size": [64, 64]}, ContradictionError)
    assert "nothing states how" in refused(made, None, UsageError)
    assert "gptq" in refused(made, {"quant_method": "gptq", "bits": 4}, UsageError)
    refused(made | {scale: torch.zeros(3, 2, dtype=torch.uint8)}, DEEPSEEK, ContradictionError)


def test_packed_weights_state_their_shape(tmp_path: Path) -> None:
    parts, _ = quantize_randomly("W4A16", 128, 256)
    source = tmp_path / "q"
    source.mkdir()
    values = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    values |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": find_scheme("W4A16").weights}}}
    (source / "config.json").write_text(json.dumps({"quantization_config": values}))
    save_file({f"a.weight{end}": part for end, part in parts.items()}, source / "model.safetensors")
    assert xrank.gather_checkpoint(source, tmp_path / "out", dequantize=True).num_parameters == 128 * 256
    wrong = {**parts, "_shape": torch.tensor([128, 250])}
    save_file({f"a.weight{end}": part for end, part in wrong.items()}, source / "model.safetensors")
    with pytest.raises(ContradictionError, match=r"a\.weight_shape"):
        xrank.gather_checkpoint(source, tmp_path / "other", dequantize=True)


def test_files_with_checksums_are_gathered_before_they_are_decoded(tmp_path: Path) -> None:
    made, _ = quantize_blocks(make_llama())
    source = tmp_path / "q"
    source.mkdir()
    torch.save(made, source / "pytorch_model.bin")
    (source / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": DEEPSEEK}))
    with pytest.raises(UsageError, match="gather the source as it is first"):
        xrank.gather_checkpoint(source, tmp_path / "out", dequantize=True)


@pytest.fixture(scope="module")
def forked() -> Iterator[ForkedRanks]:
    with forked_ranks() as ranks:
        yield ranks


def test_ranks_share_what_one_process_decodes(forked: ForkedRanks, tmp_path: Path) -> None:
    source = save(tmp_path / "quantized", quantize_blocks(make_llama())[0], DEEPSEEK)
    run("gather", source, "-o", tmp_path / "alone", "--dequantize", "--max-shard-size", "200KB")
    command = ("gather", source, "--out", tmp_path / "shared", "--dequantize", "--max-shard-size", "200KB", "--quiet")
    ended = forked(*command, num_ranks=3, window_nbytes=4096, round_nbytes=20_000)
    assert [rank.exit_code for rank in ended] == [0, 0, 0], ended
    made = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("alone", "shared")]
    assert made[0] == made[1] and len(made[0]) > 4


def test_a_lora_adapter_is_merged_into_decoded_weights(tmp_path: Path) -> None:
    made, want = quantize_blocks(make_llama())
    base, adapter = save(tmp_path / "base", made, DEEPSEEK), tmp_path / "adapter"
    adapter.mkdir()
    a, b = torch.randn(4, HIDDEN), torch.randn(INNER, 4)
    stem = f"base_model.model.{UP.removesuffix('.weight')}"
    save_file({f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    plain = save(tmp_path / "plain", {name: tensor.bfloat16() for name, tensor in want.items()}, None)
    folders = []
    for name, folder, is_quantized in (("one", base, True), ("two", plain, False)):
        options: dict[str, Any] = {"adapter": "merge", "base_model": folder, "dequantize": is_quantized}
        xrank.gather_checkpoint(adapter, tmp_path / name, **options)
        folders.append(tmp_path / name)
    one, two = (load_file(folder / "model.safetensors") for folder in folders)
    assert_equal(one, two)
    assert not torch.equal(one[UP], want[UP].bfloat16())
    assert json.loads((folders[0] / "config.json").read_text()) == CONFIG


@pytest.mark.ranks(4)
def test_ranks_load_their_cuts_of_decoded_weights(rank, tmp_path):  # type: ignore[no-untyped-def]
    made, want = quantize_blocks(make_llama())
    if rank == 0:
        save(tmp_path / "quantized", made, DEEPSEEK)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.barrier()
    for places in ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(1), Shard(0)]):
        state = {
            name: distribute_tensor(torch.zeros_like(tensor), mesh, places if tensor.dim() > 1 else None)
            for name, tensor in want.items()
        }
        xrank.load_model(state, tmp_path / "quantized")
        for name, tensor in want.items():
            part = distribute_tensor(tensor, mesh, places if tensor.dim() > 1 else None).to_local()
            assert torch.equal(state[name].to_local(), part), (name, places)
    # A stage without codes of its own agrees with the others, whose modules have them.
    names = list(made) if rank == 0 else ["model.norm.weight"]
    codes = {name: torch.zeros_like(made[name]) for name in names}
    report = xrank.load_model(codes, tmp_path / "quantized")
    assert not any(code == "dequantized" for code, _ in report.notes)


def test_states_of_ranks_hold_decoded_weights(tmp_path: Path) -> None:
    made, want = quantize_blocks(make_llama())
    source = save(tmp_path / "quantized", made, DEEPSEEK)
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    for name, tensor in want.items():
        layouts[name] = TensorLayout.parse("[a, b/tp]" if tensor.dim() > 1 else "[a]")
    xrank.reshard_checkpoint(source, layouts, tmp_path / "states", dequantize=True)
    xrank.gather_checkpoint(tmp_path / "states", tmp_path / "out")
    assert_equal(load_file(tmp_path / "out/model.safetensors"), {n: t.bfloat16() for n, t in want.items()})
    assert json.loads((tmp_path / "out/config.json").read_text()) == CONFIG


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).view(*codes.shape[:-1], -1).long()


def groups(scales: torch.Tensor, size: int) -> torch.Tensor:
    return scales.repeat_interleave(size, -1)


def random_scales(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return positive and negative numbers, zeros and subnormals, and large ones."""
    found = torch.randn(shape) * 10.0 ** torch.randint(-40, 30, shape)
    found.view(-1)[::11] = 0.0
    return found.to(dtype)


def quantize_randomly(scheme: str, rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    """Return codes, scales and constants of a weight, by the ends of their names, and the values that tools give."""
    raw = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    fp8 = torch.where(raw & 127 == 127, 0, raw).view(torch.float8_e4m3fn)
    int8, half = raw.view(torch.int8), raw[:, : columns // 2].contiguous()
    exponents = torch.randint(60, 200, (rows, columns // 32), dtype=torch.uint8)
    powers = 2.0 ** (exponents.int() - 127).bfloat16()
    # compressed-tensors/quantization/lifecycle/forward_helpers.py: _dequantize
    if scheme in ("FP8_DYNAMIC", "W8A8"):
        codes, scales = fp8 if scheme == "FP8_DYNAMIC" else int8, random_scales(rows, 1)
        return {"": codes, "_scale": scales}, codes.bfloat16() * scales
    if scheme == "FP8_BLOCK":
        scales = random_scales(-(-rows // 128), -(-columns // 128))
        wide = groups(scales, 128).repeat_interleave(128, 0)[:rows, :columns]
        return {"": fp8, "_scale": scales}, fp8.bfloat16() * wide
    if scheme in ("W8A16", "W4A16"):
        codes = raw if scheme == "W8A16" else half
        numbers = raw.int() - 128 if scheme == "W8A16" else nibbles(half) - 8
        scales = random_scales(rows, columns // 128)
        parts = {"_packed": codes.view(torch.int32), "_scale": scales, "_shape": torch.tensor([rows, columns])}
        return parts, numbers.bfloat16() * groups(scales, 128)
    if scheme in ("NVFP4A16", "NVFP4"):
        scales = fp8[:, : columns // 16].abs().contiguous()
        if scheme == "NVFP4A16":
            factor = torch.tensor([312.5])
            values = _FP4[nibbles(half)] * groups(scales.bfloat16() / factor, 16)
            return {"_packed": half, "_scale": scales, "_global_scale": factor}, values.bfloat16()
        factor = torch.tensor(0.0123)  # modelopt/torch/quantization/qtensor/nvfp4_tensor.py: dequantize
        values = torch.where(nibbles(half) == 8, 0.0, _FP4[nibbles(half)])  # it has no negative zero
        values = values * groups(scales.float() * factor, 16)
        return {"": half, "_scale": scales, "_scale_2": factor}, values.bfloat16()
    if scheme == "MXFP4A16":
        return {"_packed": half, "_scale": exponents}, _FP4[nibbles(half)].bfloat16() * groups(powers, 32)
    if scheme == "MXFP8":
        return {"": fp8, "_scale": exponents}, fp8.bfloat16() * groups(powers, 32)
    assert scheme == "FP8"  # modelopt/torch/quantization/qtensor/fp8_tensor.py: dequantize
    return {"": fp8, "_scale": torch.tensor(0.0123)}, fp8.bfloat16() * torch.tensor(0.0123).bfloat16()


MODELOPT = {"FP8": "FP8", "NVFP4": "NVFP4"}


@pytest.mark.parametrize(
    "scheme",
    [*("FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "NVFP4A16", "MXFP4A16", "MXFP8"), *MODELOPT],
)
def test_every_scheme_has_the_values_of_its_tool(tmp_path: Path, scheme: str) -> None:
    torch.manual_seed(3)
    made, want = Tensors(), Tensors()
    for name, tensor in make_llama().items():
        if "_proj" not in name:
            made[name] = want[name] = tensor
            continue
        parts, want[name] = quantize_randomly(scheme, *(-(-size // 128) * 128 for size in tensor.shape))
        made |= {name + end: part for end, part in parts.items()}
    sizes = {"hidden_size": 256, "intermediate_size": 384}
    for name in [name for name in made if "_proj" not in name]:
        shape = [sizes["hidden_size"] if size == HIDDEN else size for size in made[name].shape]
        made[name] = want[name] = torch.randn(shape).bfloat16()
    if scheme in MODELOPT:
        made |= {f"model.layers.0.{name}": torch.ones(()) for name in ("mlp.up_proj.input_scale", "self_attn.k_scale")}
    source = tmp_path / "quantized"
    source.mkdir()
    save_file(made, source / "model.safetensors")
    config = {**CONFIG, **sizes}
    if scheme in MODELOPT:
        (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": scheme}}))
        (source / "config.json").write_text(json.dumps(config))
    else:
        known = find_scheme(scheme)
        group = {"targets": ["Linear"], "weights": known.weights}
        values = {"quant_method": "compressed-tensors", "format": known.format, "config_groups": {"group_0": group}}
        (source / "config.json").write_text(json.dumps({**config, "quantization_config": values}))
    report = xrank.gather_checkpoint(source, tmp_path / "out", dequantize=True)
    got = load_file(tmp_path / "out/model.safetensors")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        is_equal = torch.equal(got[name].view(torch.int16), tensor.view(torch.int16))
        assert is_equal, (name, (got[name] != tensor).sum(), got[name][0, :8], tensor[0, :8])
    assert json.loads((tmp_path / "out/config.json").read_text()) == config
    assert not (tmp_path / "out/hf_quant_config.json").exists()
    assert any(code == "scales-dropped" for code, _ in report.notes) == (scheme in MODELOPT)
    module = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    xrank.load_model(module, source)
    assert_equal(module, want)


def test_experts_of_gpt_oss_get_the_form_of_its_bf16_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(3)
    stem, (experts, rows, columns) = "model.layers.0.mlp.experts.gate_up_proj", (3, 96, 64)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    exponents = torch.randint(60, 200, (experts, rows, columns // 32), dtype=torch.uint8)
    exponents[:, ::9], exponents[:, ::7] = 0, 255
    bias = torch.randn(experts, rows).bfloat16()
    made = {f"{stem}_blocks": blocks, f"{stem}_scales": exponents, f"{stem}_bias": bias}
    (tmp_path / "q").mkdir()
    save_file(made, tmp_path / "q/model.safetensors")
    (tmp_path / "q/config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    # transformers/integrations/mxfp4.py: convert_moe_packed_tensors
    numbers = torch.ldexp(_FP4[nibbles(blocks)].bfloat16(), exponents.int()[..., None] - 127)
    want = {stem: numbers.view(experts, rows, columns).transpose(1, 2).contiguous(), f"{stem}_bias": bias}
    assert 2.0**127 in want[stem]
    xrank.gather_checkpoint(tmp_path / "q", tmp_path / "out", dequantize=True)
    assert_equal(load_file(tmp_path / "out/model.safetensors"), want)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"dtype": "bfloat16"}
