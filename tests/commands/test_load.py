"""Loads in one process: real models, every kind of tensor, and what is refused before anything is touched."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import xrank
from tests.commands.loaded_modules import Block, assert_loaded, cut, is_zero, left, watched_reads, weights
from tests.commands.made_workspaces import flip
from tests.recipes.made_checkpoints import tiny
from tests.recipes.made_vision import tiny_vision
from xrank.errors import ContradictionError, CorruptError, LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.testing.workspace_contract import has_same_bytes, tensor_zoo


@pytest.mark.timeout(300)
def test_a_model_of_transformers_is_loaded_where_it_lies(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=30, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(1)
    saved, module = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    saved.save_pretrained(tmp_path / "model")
    assert "lm_head.weight" not in load_file(tmp_path / "model" / "model.safetensors")
    places = {name: tensor.data_ptr() for name, tensor in module.named_parameters()}
    report = xrank.load_model(module, tmp_path / "model")
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(module(tokens).logits, saved(tokens).logits)
    assert {name: tensor.data_ptr() for name, tensor in module.named_parameters()} == places
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert (report.command, report.num_tensors, report.ok) == ("load", 20, True)
    assert report.num_parameters == sum(tensor.numel() for tensor in saved.parameters())
    # What no checkpoint has is said, for to_empty leaves it without values.
    assert "model.rotary_emb.inv_freq" in dict(report.notes)["not-loaded"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_fused_as_transformers_has_them_in_memory(tmp_path, family):
    saved, module = tiny(family).eval(), tiny(family).eval()
    saved.save_pretrained(tmp_path / "model")
    for tensor in module.state_dict().values():
        tensor.zero_()
    report = xrank.load_model(module, tmp_path / "model")
    assert report.source["recipe"] == f"transformers-{family}"
    state = module.state_dict()
    assert any(name.endswith(".experts.gate_up_proj") for name in state)
    assert [name for name, tensor in saved.state_dict().items() if not torch.equal(state[name], tensor)] == []
    with pytest.raises(UsageError, match=r"gate_up_proj: the source has no|down_proj: the source has no|mlp\.gate"):
        xrank.load_model(module, tmp_path / "model", recipe="none")


@pytest.mark.timeout(300)
def test_experts_that_files_hold_the_other_way_round(tmp_path):
    """The Hub's files of Qwen3-VL-MoE; transformers compares their shapes with the module's, too."""
    saved, module = tiny_vision("qwen3_vl_moe"), tiny_vision("qwen3_vl_moe")
    saved.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    turned = {name: t.transpose(1, 2).contiguous() for name, t in tensors.items() if ".experts." in name}
    save_file({**tensors, **turned}, file)
    for tensor in module.state_dict().values():
        tensor.zero_()
    assert len(turned) >= 2 and xrank.load_model(module, tmp_path / "model").source["recipe"] is not None
    state = module.state_dict()
    assert [name for name, tensor in saved.state_dict().items() if not torch.equal(state[name], tensor)] == []


def test_autograd_notices(tmp_path):
    module = Block()
    loss = module(torch.tensor([1, 2]))
    before = module.up.weight._version, module.rope._version
    xrank.load_model(module, left(tmp_path / "model"))
    assert module.up.weight._version > before[0] and module.rope._version == before[1]
    assert module.up.weight.requires_grad and module.up.weight.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert_loaded(module)


def test_tensors_of_every_type_and_of_any_strides(tmp_path):
    """Larger than a window, so that windows begin and end in the middle of rows."""
    zoo = {name: t for name, t in tensor_zoo().items() if t.dtype != torch.complex128}
    torch.manual_seed(2)
    values = torch.randn(70, 90, 110).to(torch.bfloat16)
    targets = {name: torch.zeros_like(tensor.contiguous()) for name, tensor in zoo.items()}
    made = {
        "turned": torch.zeros(110, 70, 90, dtype=torch.bfloat16).permute(1, 2, 0),
        "every other": torch.zeros(140, 90, 220, dtype=torch.bfloat16)[::2, :, 1::2],
        "a row": torch.zeros(700, 5, dtype=torch.float64)[:, 3],
        "conjugate": torch.zeros(300, 7, dtype=torch.complex64).conj().T,
        "nothing": torch.zeros(0, 4)[:, ::2],
        "a number": torch.zeros(()),
    }
    source = {
        **{
            name: tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            for name, tensor in zoo.items()
        },
        "turned": values,
        "every other": values + 1,
        "a row": torch.randn(700, dtype=torch.float64),
        "conjugate": torch.randn(7, 300, dtype=torch.complex64),
        "nothing": torch.zeros(0, 2),
        "a number": torch.tensor(float("nan")),
    }
    folder = left(tmp_path / "model", source)
    state = {**targets, **made}
    report = xrank.load_model(state, folder, max_memory="3MB")
    for name, tensor in source.items():
        assert has_same_bytes(state[name].resolve_conj().resolve_neg(), tensor), name
    assert report.source["format"] == "safetensors" and not report.output["cast"]


def test_casts_to_the_modules_type_and_reads_nothing_twice(tmp_path):
    module, reads = Block().bfloat16(), []
    with watched_reads(reads.append):
        report = xrank.load_model(module, left(tmp_path / "model"))
    assert_loaded(module)
    assert report.output["cast"]["up.weight"] == "F32 -> BF16" and "steps" not in report.output["cast"]
    assert dict(report.notes)["cast"].startswith("7 tensors have the module's element type")
    assert sum(reads) == sum(tensor.nbytes for tensor in weights().values())


@pytest.mark.parametrize(
    ("change", "message", "got"),
    [
        (lambda t: t.pop("odd.bias"), "odd.bias: the source has no such tensor", "odd.bias only in the module"),
        (lambda t: t.update(extra=torch.ones(2)), "extra: no rank has such a tensor", "extra only in the source"),
        (lambda t: t.update({"up.bias": torch.ones(13)}), "up.bias: its shape differs from", "[12] in the module"),
        (lambda t: t.update({"odd.bias": torch.ones(5, 1)}), "odd.bias: its shape differs from", "[5] in the module"),
        (lambda t: t.update(steps=torch.tensor(7, dtype=torch.int32)), "steps: I32 in the source", "I64 in the module"),
        (lambda t: t.update({"up.bias": torch.ones(12).long()}), "up.bias: I64 in the source", "F32 in the module"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_a_byte_is_written(tmp_path, change, message, got):
    tensors, module = weights(), cut("plain")
    change(tensors)
    with pytest.raises(UsageError) as raised:
        xrank.load_model(module, left(tmp_path / "model", tensors))
    assert raised.value.message.startswith(message) and raised.value.got == got and raised.value.next_step
    assert is_zero(module)


def test_all_that_is_wrong_is_named(tmp_path):
    tensors = {name: tensor[None] for name, tensor in weights().items()}
    with pytest.raises(UsageError, match=r"steps: .*\n  got .*; likewise embed\.weight, .* and 2 more"):
        xrank.load_model(Block(), left(tmp_path / "model", tensors))
    with pytest.raises(UsageError) as raised:
        xrank.load_model(Block(), left(tmp_path / "other", {f"own_{name}": t for name, t in weights().items()}))
    assert "8 more" in raised.value.got or "4 more" in raised.value.got
    assert "only in the source" in raised.value.got and "recipe=" in raised.value.next_step


def test_modules_that_cannot_be_filled_are_refused(tmp_path):
    folder = left(tmp_path / "model")
    module = cut("plain", device="meta")
    with pytest.raises(UsageError, match="meta device") as raised:
        xrank.load_model(module, folder)
    assert "to_empty" in raised.value.next_step
    module.to_empty(device="cpu")
    with pytest.raises(UsageError, match=r"head\.weight: the source has no") as raised:
        xrank.load_model(module, folder)
    assert "tie" in raised.value.next_step  # to_empty makes two tensors of one
    module.head.weight = module.embed.weight
    xrank.load_model(module, folder)
    assert_loaded(module)
    state = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    state["up.weight"] = torch.zeros(12, 1).expand(12, 8)
    with pytest.raises(UsageError, match=r"up\.weight: its elements share memory"):
        xrank.load_model(state, folder)
    assert not any(tensor.any() for tensor in state.values())


def test_names_of_one_tensor_are_one(tmp_path):
    both = {**weights(), "head.weight": weights()["embed.weight"].clone()}
    module = cut("plain")
    xrank.load_model(module, left(tmp_path / "both", both))
    assert_loaded(module)
    both["head.weight"][9, 7] += 1
    with pytest.raises(ContradictionError, match=r"head\.weight is tied to embed"):
        xrank.load_model(module, left(tmp_path / "different", both))
    other = {name.replace("embed", "head"): tensor for name, tensor in weights().items()}
    xrank.load_model(module, left(tmp_path / "the other name", other))
    assert_loaded(module)


def test_digests_of_a_manifest_are_compared(tmp_path):
    xrank.gather_checkpoint(left(tmp_path / "model"), tmp_path / "out")
    report = xrank.load_model(Block(), tmp_path / "out")
    assert report.proof["num_digests"] == len(weights())
    assert xrank.load_model(Block().bfloat16(), tmp_path / "out").proof["num_digests"] == 1  # of what is not cast
    file = tmp_path / "out" / "model.safetensors"
    flip(file, file.stat().st_size - 5)
    with pytest.raises(CorruptError) as raised:
        xrank.load_model(Block(), tmp_path / "out")
    assert raised.value.tensor in raised.value.message and "xrank_manifest.json" in raised.value.want


def test_checksums_of_a_workspace_are_compared(tmp_path):
    workspace = xrank.NFSWorkspace(tmp_path / "ws", rank=0, world_size=1)
    workspace.write_configs_and_weights({}, weights())
    module = Block()
    assert xrank.load_model(module, tmp_path / "ws").proof["num_checksums"] == len(weights())
    assert_loaded(module)
    file = tmp_path / "ws" / "rank_0_state.pth"
    flip(file, file.read_bytes().index(weights()["up.weight"].numpy().tobytes()) + 5)
    with pytest.raises(CorruptError, match=r"up\.weight, .*checksum"):
        xrank.load_model(module, tmp_path / "ws")


def test_layouts_of_more_ranks_than_there_are_are_refused(tmp_path):
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["up.weight"] = "[f/tp, h]"
    state = {**weights(), "up.weight": torch.zeros(6, 8)}
    with pytest.raises((LayoutError, UsageError), match="outside the world"):
        xrank.load_model(state, left(tmp_path / "model"), layouts=layouts)
    with pytest.raises(UsageError, match=r"up\.weight: its shape") as raised:
        xrank.load_model(state, tmp_path / "model")
    assert "layouts=" in raised.value.next_step


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path):
    folder = left(tmp_path / "model")
    # Not the time of now, which a file system counts in steps: it may be that of the file that was just written.
    touch = partial(os.utime, folder / "model.safetensors", ns=(1, 1))
    with watched_reads(lambda nbytes: touch()), pytest.raises(ContradictionError, match="changed while it was being"):
        xrank.load_model(Block(), folder)


MEMORY = """
import re, sys, torch, xrank

def status(key):
    return int(re.search(rf"{key}:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

state = {f"layer.{i}": torch.ones(2500, 3000) for i in range(8)}  # 30 MB each, of pages that are there
state["strided"] = torch.ones(3000, 5000, dtype=torch.float32).T
state["cast"] = torch.ones(3000, 5000, dtype=torch.bfloat16)
xrank.load_model({"small": torch.ones(3)}, sys.argv[2])  # whatever is imported only then
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmRSS")
xrank.load_model(state, sys.argv[1], max_memory="16MB")
assert not any(tensor.any() for tensor in state.values())
print(status("VmHWM") - before)
"""


@pytest.mark.slow
def test_memory_is_bounded_whatever_the_size(tmp_path):
    """330 MB: contiguous, strided and cast ones; of zeros, which a disk need not hold."""
    shapes = {**{f"layer.{i}": (2500, 3000) for i in range(8)}, "strided": (5000, 3000), "cast": (3000, 5000)}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    (tmp_path / "model").mkdir()
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    left(tmp_path / "small", {"small": torch.ones(3)})
    ran = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / "model", tmp_path / "small"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < (16 + 40) * 10**6


def test_the_folder_is_named_where_nothing_is(tmp_path: Path):
    with pytest.raises(xrank.errors.XrankError, match="nowhere"):
        xrank.load_model(Block(), tmp_path / "nowhere")
