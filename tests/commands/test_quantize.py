"""Quantized models: what bands, ranks and kills leave is what encoding each whole tensor makes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import xrank
from tests.commands.adapted_models import leave_adapted
from tests.free_port import free_port
from xrank import dtypes
from xrank.engine import transforms
from xrank.errors import ContradictionError, CorruptError, UsageError
from xrank.layout.output_files import OutputTensor
from xrank.pictures.picture import report_page
from xrank.recipes.decision import plan_gather
from xrank.recipes.options import GatherOptions
from xrank.recipes.schemes import find_scheme, plan_quantization

pytestmark = pytest.mark.timeout(300)

SCHEMES = ["FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "NVFP4A16", "MXFP4A16", "MXFP8", "DEEPSEEK_FP8"]
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 640,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 300,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256), "mlp.gate_proj": (640, 256), "mlp.up_proj": (640, 256), "mlp.down_proj": (256, 640),
}  # fmt: skip


def make_state() -> dict[str, torch.Tensor]:
    """Return a Llama of two layers in bf16, whose q, k and v have largest values of their own."""
    generator = torch.Generator().manual_seed(5)
    state = {
        name: torch.randn(300, 256, generator=generator) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    state["model.norm.weight"] = torch.ones(256)
    for layer in ("model.layers.0.", "model.layers.1."):
        for number, (name, shape) in enumerate(SHAPES.items()):
            state[f"{layer}{name}.weight"] = torch.randn(*shape, generator=generator) * (number + 1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{layer}{name}.weight"] = torch.ones(256)
    return {name: tensor.bfloat16() for name, tensor in state.items()}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file(make_state(), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(autouse=True)
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "_BAND_NBYTES", 40_000)


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def encode(state: dict[str, torch.Tensor], scheme: str) -> dict[str, bytes]:
    """Return the bytes of all tensors, each matrix encoded whole."""
    outputs = [OutputTensor(name, "BF16", tuple(tensor.shape)) for name, tensor in state.items()]
    quantizing = plan_quantization(find_scheme(scheme), outputs)
    encoding = quantizing.scheme.encoding
    found = {name: as_bytes(tensor) for name, tensor in state.items()}
    for names in quantizing.groups:
        values = {n: np.frombuffer(found.pop(n), dtypes.numpy_dtype("BF16")).reshape(state[n].shape) for n in names}
        maximum = max(map(encoding.measure, values.values())) if encoding.is_shared else None
        for name, one in values.items():
            made = encoding.outputs(name, "BF16", one.shape)
            for number, first, array in encoding.encode(one, 0, one.shape, maximum):
                assert first == 0
                found[made[number].name] = np.ascontiguousarray(array).tobytes()
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bands_make_what_whole_tensors_make(plain: Path, tmp_path: Path, scheme: str) -> None:
    report = xrank.gather_checkpoint(plain, tmp_path / "made", quantize=scheme, workers=3, max_memory="16MB")
    made = {name: as_bytes(tensor) for name, tensor in read(tmp_path / "made").items()}
    assert made == encode(make_state(), scheme)
    assert report.output is not None and report.output["quantized"]["num_tensors"] == 14
    assert xrank.verify_model(tmp_path / "made").ok
    assert xrank.verify_model(plain, against=tmp_path / "made").ok
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config.pop("quantization_config")
    assert config == CONFIG


def test_a_cast_comes_before(plain: Path, tmp_path: Path) -> None:
    xrank.gather_checkpoint(plain, tmp_path / "cast", dtype="fp32")
    xrank.gather_checkpoint(tmp_path / "cast", tmp_path / "made", dtype="bf16", quantize="FP8_BLOCK")
    made = {name: as_bytes(tensor) for name, tensor in read(tmp_path / "made").items()}
    assert made == encode(make_state(), "FP8_BLOCK")
    assert xrank.verify_model(tmp_path / "cast", against=tmp_path / "made").ok


def test_a_stage_of_another_cast_is_not_gone_on_with(plain: Path, tmp_path: Path) -> None:
    """Where all tensors are quantized, names and types of the outputs are the same after any cast."""
    xrank.gather_checkpoint(plain, tmp_path / "cast", dtype="fp32")
    digests = [
        plan_gather(str(tmp_path / "cast"), GatherOptions(dtype=dtype, quantize="MXFP8", include=r".*\.mlp\..*")).digest
        for dtype in ("bf16", "fp16", "bf16")
    ]
    assert digests[0] == digests[2] != digests[1]


def test_adapters_are_merged_before_or_stay_apart(tmp_path: Path) -> None:
    leave_adapted(tmp_path / "ws")
    xrank.gather_checkpoint(tmp_path / "ws", tmp_path / "merged", adapter="merge")
    xrank.gather_checkpoint(tmp_path / "merged", tmp_path / "twice", quantize="FP8_DYNAMIC")
    xrank.gather_checkpoint(tmp_path / "ws", tmp_path / "once", adapter="merge", quantize="FP8_DYNAMIC")
    once, twice = (read(tmp_path / name) for name in ("once", "twice"))
    assert {n: as_bytes(t) for n, t in once.items()} == {n: as_bytes(t) for n, t in twice.items()}
    xrank.gather_checkpoint(tmp_path / "ws", tmp_path / "apart", adapter="separate", quantize="FP8_DYNAMIC")
    assert load_file(tmp_path / "apart" / "adapter" / "adapter_model.safetensors")
    for name in ("once", "apart"):
        assert xrank.verify_model(tmp_path / "ws", against=tmp_path / name).ok


def test_what_is_ignored_stays(plain: Path, tmp_path: Path) -> None:
    xrank.gather_checkpoint(plain, tmp_path / "made", quantize="fp8_dynamic", quantize_ignore=r".*\.down_proj")
    made = read(tmp_path / "made")
    for name, tensor in make_state().items():
        is_kept = "norm" in name or "embed" in name or "head" in name or "down_proj" in name
        assert (made[name].dtype == torch.bfloat16 and made[name].equal(tensor)) == is_kept, name


def test_a_changed_source_and_a_flipped_bit_are_found(plain: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    xrank.gather_checkpoint(plain, made, quantize="FP8_BLOCK")
    state = make_state()
    name = "model.layers.1.mlp.up_proj.weight"
    state[name][3, 5] *= -4
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    report = xrank.verify_model(plain, against=made)
    assert isinstance(report.fault, ContradictionError)
    assert report.fault.tensor is not None and report.fault.tensor.startswith(name)
    path = sorted(made.glob("*.safetensors"))[-1]
    data = path.read_bytes()
    for at in range(len(data) - 1, 4096, -len(data) // 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert isinstance(xrank.verify_model(made).fault, CorruptError), at


def test_the_plan_tells_the_size(plain: Path, tmp_path: Path) -> None:
    planned = xrank.gather_checkpoint(plain, tmp_path / "made", quantize="W4A16", dry_run=True)
    assert not (tmp_path / "made").exists() and planned.plan is not None
    report = xrank.gather_checkpoint(plain, tmp_path / "made", quantize="W4A16")
    assert report.output is not None
    assert planned.plan["nbytes"] == report.output["nbytes"]
    sizes = {file["name"]: file["nbytes"] for file in planned.plan["files"]}
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "made").glob("*.safetensors")}


def test_the_report_tells_errors_by_kind_of_module(plain: Path, tmp_path: Path) -> None:
    found = {}
    for scheme in ("MXFP8", "W4A16"):
        report = xrank.gather_checkpoint(plain, tmp_path / scheme, quantize=scheme, quantization_error=True)
        assert report.output is not None
        found[scheme] = report.output["quantized"]["errors"]
        assert found[scheme].keys() == {name.rpartition(".")[2] for name in SHAPES}
    for kind, error in found["W4A16"].items():
        assert 0 < found["MXFP8"][kind]["mean"] < error["mean"] < 0.12
        assert 0 < error["largest"] < 0.1
    assert "q_proj" in report_page(report) and "errors of quantization" in report_page(report).lower()
    with pytest.raises(UsageError, match="nothing is quantized"):
        xrank.gather_checkpoint(plain, tmp_path / "other", quantization_error=True)


def test_a_function_does_not_go_with_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="transform"):
        xrank.export_model(make_state(), tmp_path / "made", quantize="W8A8", transform=lambda name, one: {name: one})
    assert not (tmp_path / "made").exists()


def test_rows_that_do_not_fit_the_memory_are_named(plain: Path, tmp_path: Path) -> None:
    state = {"model.layers.0.mlp.up_proj.weight": torch.zeros(128, 16384)}
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text('{"model_type": "toy"}')
    with pytest.raises(UsageError, match=r"up_proj.*128 rows") as raised:
        xrank.gather_checkpoint(plain, tmp_path / "made", quantize="FP8_BLOCK", max_memory="8MB", recipe="none")
    assert "max_memory" in (raised.value.next_step or "")
    assert not (tmp_path / "made").exists()


def cut(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Cut matrices by rows and by columns over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(number % 2) if tensor.ndim == 2 else Replicate()])
        for number, (name, tensor) in enumerate(state.items())
    }


def test_modelopts_rows_of_zeros_have_a_scale_and_infinities_none(plain: Path, tmp_path: Path) -> None:
    state, name = make_state(), "model.layers.0.mlp.down_proj.weight"
    state[name][3] = 0
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    xrank.gather_checkpoint(plain, tmp_path / "made", quantize="FP8", dialect="modelopt")
    made = read(tmp_path / "made")
    assert made[f"{name}_scale"][3] == 1 and not made[name][3].float().any()
    assert made[f"{name}_scale"][4] == state[name][4].abs().max().float() / 448
    state[name][3, 7] = float("inf")
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    with pytest.raises(ContradictionError, match=f"{name} has values that are not finite"):
        xrank.gather_checkpoint(plain, tmp_path / "other", quantize="FP8", dialect="modelopt")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "NVFP4A16", "W4A16"])
def test_ranks_export_and_yield_what_one_process_makes(rank: int, tmp_path: Path, scheme: str) -> None:
    model = cut(make_state())
    report = xrank.export_model(
        model, tmp_path / "made", quantize=scheme, config_overrides=CONFIG, max_shard_size="500KB"
    )
    taken = {n: as_bytes(t) for n, t in xrank.iter_model(model, quantize=scheme, ranks="all", max_memory="8MB")}
    expected = encode(make_state(), scheme)
    assert taken == expected
    assert report.output is not None and len(report.output["files"]) >= 3
    if rank == 0:
        assert {name: as_bytes(tensor) for name, tensor in read(tmp_path / "made").items()} == expected
        assert xrank.verify_model(tmp_path / "made").ok
    dist.barrier()


@pytest.mark.ranks(3)
def test_ranks_gather_what_one_process_gathers(rank: int, tmp_path: Path) -> None:
    xrank.NFSWorkspace(tmp_path / "states", rank=rank, world_size=3).write_configs_and_weights(
        CONFIG, cut(make_state())
    )
    port = [free_port()]
    dist.broadcast_object_list(port)
    marks = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0])}
    with patch.dict(os.environ, marks):
        report = xrank.gather_checkpoint(tmp_path / "states", tmp_path / "made", quantize="NVFP4A16", distributed=True)
    dist.barrier()
    if rank == 0:
        alone = xrank.gather_checkpoint(tmp_path / "states", tmp_path / "alone", quantize="NVFP4A16")
        assert report.proof.num_checksums == alone.proof.num_checksums > 0
        for path in (tmp_path / "alone").glob("*.safetensors"):
            assert path.read_bytes() == (tmp_path / "made" / path.name).read_bytes()
    dist.barrier()


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "NVFP4A16"])
def test_engines_take_what_a_folder_would_hold(tmp_path: Path, scheme: str) -> None:
    state = make_state()
    served = {name: torch.zeros_like(tensor) for name, tensor in xrank.iter_model(state, quantize=scheme)}
    with xrank.offer_weights(state, tmp_path / "refit", snapshot=True, quantize=scheme) as offer:
        for step in (1, 2):
            state["model.layers.0.mlp.up_proj.weight"] *= 3
            offer.publish(step)
            with xrank.take_weights(served, tmp_path / "refit") as weights:
                assert weights.update().step == step
            assert {name: as_bytes(tensor) for name, tensor in served.items()} == encode(state, scheme)
