"""Live models of which no export can be made, or only one that is told: each is named, and nothing is written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xrank
from tests.commands.exported import llama, qwen3_moe, tensors_of
from xrank.errors import UsageError
from xrank.layout import LayoutMap

pytestmark = pytest.mark.timeout(300)


def partitioned(module: torch.nn.Module) -> torch.nn.Module:
    """Leave of a module's parameters what ZeRO-3 leaves (deepspeed/runtime/zero/partition_parameters.py)."""
    for parameter in module.parameters():
        parameter.ds_id, parameter.ds_shape = id(parameter), parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    return module


def test_what_zero_3_has_partitioned_is_refused_by_name(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "base")
    partitioned(model)
    calls = [
        lambda: xrank.export_model(model, tmp_path / "out"),
        lambda: xrank.export_model(dict(model.named_parameters()), tmp_path / "out"),
        lambda: xrank.iter_model(model),
        lambda: xrank.load_model(model, tmp_path / "base"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="placeholder of DeepSpeed's ZeRO-3") as raised:
            call()
        assert raised.value.tensor == "model.embed_tokens.weight" and "GatheredParameters" in raised.value.next_step
    for detached in (
        lambda: xrank.export_model(model.state_dict(), tmp_path / "out"),
        lambda: xrank.export_model(model.state_dict(), tmp_path / "out", base_model=tmp_path / "base"),
        lambda: xrank.iter_model(model.state_dict()),
    ):
        with pytest.raises(UsageError, match=r"has shape \[0\]"):
            detached()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    for parameter in model.parameters():  # as within GatheredParameters
        parameter.data = torch.ones(parameter.ds_shape)
    assert xrank.export_model(model, tmp_path / "out").num_tensors == 21


def test_a_tensor_of_no_elements_that_the_base_model_has_so_is_one(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "none": torch.empty(0), "rows": torch.empty(0, 3), "ids": torch.empty(0).long()}
    xrank.export_model({**state, "none": torch.empty(0).int()}, tmp_path / "made")
    from safetensors.torch import save_file

    (tmp_path / "base").mkdir()
    save_file(state, tmp_path / "base" / "model.safetensors")
    xrank.export_model(state, tmp_path / "out", base_model=tmp_path / "base")
    assert tensors_of(tmp_path / "out")["none"].shape == (0,)


class OtherAdapter(torch.nn.Module):
    """What PEFT's models of other kinds than LoRA show of themselves."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.base_model = torch.nn.Linear(2, 2)
        self.active_adapter, self.peft_config, self._config = "default", {"default": self}, config

    def get_base_model(self) -> torch.nn.Module:
        return self.base_model

    def to_dict(self) -> dict[str, Any]:
        return self._config


def test_an_adapter_that_is_no_lora_is_refused(tmp_path: Path) -> None:
    model = OtherAdapter(peft_type="IA3")
    for call in (lambda: xrank.export_model(model, tmp_path / "out"), lambda: xrank.iter_model(model)):
        with pytest.raises(UsageError, match="adapter, IA3, is not LoRA") as raised:
            call()
        assert "merge_and_unload()" in raised.value.next_step
    assert not list(tmp_path.iterdir())


LORA = {"q.base_layer.weight": (4, 3), "q.lora_A.default.weight": (2, 3), "q.lora_B.default.weight": (4, 2)}


@pytest.mark.parametrize("choice", ["merge", "separate", None])
def test_a_configuration_that_lies_about_is_no_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: Any
) -> None:
    for name, text in (("latest", "global_step1"), ("adapter_config.json", '{"r": 2, "lora_alpha": 999}')):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    state = {f"base_model.model.{name}": torch.ones(shape) for name, shape in LORA.items()}
    with pytest.raises(UsageError, match="the rank and alpha of the model's adapter are unknown") as raised:
        xrank.export_model(state, tmp_path / "out", adapter=choice)
    assert raised.value.got == "2 tensors of an adapter, and no PeftModel"
    assert raised.value.next_step and "PeftModel" in raised.value.next_step and raised.value.file is None
    assert sorted(os.listdir(tmp_path)) == ["adapter_config.json", "latest"]


def test_what_wrappers_put_into_names_is_taken_off_and_told(tmp_path: Path) -> None:
    plain = {"a.w": torch.ones(2), "a.b": torch.zeros(2), "head.module.w": torch.ones(3)}
    tied = {"tied": plain["a.w"]}
    for number, name_of in enumerate(
        [
            lambda name: f"module.{name}",
            lambda name: f"_orig_mod.module.{name}",
            lambda name: f"module.module.{name.replace('a.', 'a._checkpoint_wrapped_module.')}",
        ]
    ):
        state = {name_of(name): tensor for name, tensor in {**plain, **tied}.items()}
        layouts = LayoutMap()
        if number:  # else the ranks' memory says it
            layouts.aliases[name_of("tied")] = name_of("a.w")
        report = xrank.export_model(state, tmp_path / str(number), layouts=layouts)
        assert sorted(tensors_of(tmp_path / str(number))) == sorted(plain)
        assert report.output["tied"] == [["a.w", "tied"]]
        told = dict(report.notes)["wrapper-names"]
        assert told.endswith(f"{next(iter(state))} is a.w")
    kept = {"module.w": torch.ones(2), "head.w": torch.ones(2)}  # the model's own word
    assert sorted(name for name, _ in xrank.iter_model(kept)) == ["head.w", "module.w"]
    assert "wrapper-names" not in dict(xrank.export_model(kept, tmp_path / "kept").notes)
    with pytest.raises(UsageError, match=r"^a\.w: two tensors would have this name"):
        xrank.iter_model({"a.w": torch.ones(1), "a._orig_mod.w": torch.ones(1)})


def test_arguments_of_wrong_types_are_named(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    both: list[tuple[dict[str, Any], str]] = [
        ({"layouts": {"w": "[h]"}}, "layouts= must be a LayoutMap; got a dict"),
        ({"mesh": 3}, "mesh= must be a DeviceMesh of xrank's or torch's; got a int"),
        ({"group": "x"}, "group= must be a process group of torch's, or None for all ranks; got a str"),
        ({"timeout_seconds": None}, "timeout_seconds= must be a number of seconds; got a NoneType"),
    ]
    export_only: list[tuple[dict[str, Any], str]] = [
        ({"config_overrides": [1]}, "config_overrides= must be a mapping; got a list"),
        ({"dtype": "int4"}, "dtype= must be one of keep, base, bf16, fp16, fp32; got 'int4'"),
        ({"max_shard_size": "5 apples"}, "max_shard_size= must be a size; got '5 apples'"),
        ({"adapter": "merge"}, "contains no adapter to merge"),
    ]
    for options, message in [*both, *export_only]:
        with pytest.raises(UsageError, match=re.escape(message)) as raised:
            xrank.export_model(state, tmp_path / "out", **options)
        assert "--" not in "".join(raised.value.__notes__) and raised.value.next_step
    for options, message in both:
        with pytest.raises(UsageError, match=re.escape(message)):
            xrank.iter_model(state, **options)
        with pytest.raises(UsageError, match=re.escape(message)):
            xrank.load_model(state, tmp_path, **options)
    models: list[tuple[Any, str]] = [
        (None, "the model is a NoneType"),
        ([], "the model is an empty list"),
        ([state], "the model is a list"),
        ({"": torch.ones(2)}, "a tensor has the name ''"),
    ]
    for model, message in models:
        for call in (lambda m: xrank.export_model(m, tmp_path / "out"), xrank.iter_model):
            with pytest.raises(UsageError, match=message):
                call(model)
    with pytest.raises(UsageError, match="the model is a NoneType"):
        xrank.load_model(None, tmp_path)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_what_is_said_is_said_in_pythons_words(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    for number, dtype in enumerate(["bfloat16", "torch.bfloat16", torch.bfloat16, "bf16"]):
        report = xrank.export_model(state, tmp_path / str(number), dtype=dtype)
        assert report.output["cast"] == {"w": "F32 -> BF16"}
        assert dict(report.notes)["no-config"].endswith("give base_model=, and make the same call with overwrite=True")
    with pytest.raises(UsageError, match="exists already") as raised:
        xrank.export_model(state, tmp_path / "0")
    assert raised.value.next_step == "choose another out=, or add overwrite=True to replace it"
    (tmp_path / "0" / "rank_7_state.pth").touch()
    with pytest.raises(UsageError, match="contains the states of 1 rank, so overwrite=True does not") as raised:
        xrank.export_model(state, tmp_path / "0", overwrite=True)
    assert raised.value.file == str(tmp_path / "0" / "rank_7_state.pth")


def test_routers_that_are_not_cast_are_told(tmp_path: Path) -> None:
    report = xrank.export_model(qwen3_moe(), tmp_path / "out", dtype="bf16")
    told = dict(report.notes)["kept-fp32"]
    kept = ["model.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight"]
    assert told.endswith(f": {', '.join(kept)}")
    made = tensors_of(tmp_path / "out")
    assert [name for name, tensor in made.items() if tensor.dtype == torch.float32] == kept
    assert "kept-fp32" not in dict(xrank.export_model(qwen3_moe(), tmp_path / "as it is").notes)


def test_names_that_transformers_would_change_are_told(tmp_path: Path) -> None:
    model = qwen3_moe()
    assert "names-as-in-memory" not in dict(xrank.export_model(model, tmp_path / "renamed").notes)
    report = xrank.export_model(model, tmp_path / "kept", recipe="none")
    assert "save_pretrained" in dict(report.notes)["names-as-in-memory"]
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors_of(tmp_path / "kept")
    assert dict(xrank.export_model(llama(), tmp_path / "llama").notes) == {}


def test_tensors_that_save_pretrained_leaves_out_are_told(tmp_path: Path) -> None:
    model = llama()
    model._keys_to_ignore_on_save = ["none.such"]
    assert dict(xrank.export_model(model, tmp_path / "all").notes) == {}
    model._keys_to_ignore_on_save = {"model.norm.weight", "none.such"}
    report = xrank.export_model(model, tmp_path / "one")
    assert dict(report.notes) == {"not-saved": "save_pretrained leaves out: model.norm.weight"}
    assert set(tensors_of(tmp_path / "all")) - set(tensors_of(tmp_path / "one")) == {"model.norm.weight"}
    model._keys_to_ignore_on_save = [name for name in model.state_dict() if ".0." in name]
    told = dict(xrank.export_model(model, tmp_path / "rest").notes)["not-saved"]
    assert told.endswith(f"{model._keys_to_ignore_on_save[3]} and {len(model._keys_to_ignore_on_save) - 4} more")


@pytest.mark.ranks(2)
def test_a_module_whose_config_differs_on_another_rank_is_told(rank: int, tmp_path: Path) -> None:
    model = llama()
    model.config.bos_token_id = rank
    report = xrank.export_model(model, tmp_path / "out")
    assert dict(report.notes)["config-differs"].endswith("the one that is written: 'bos_token_id' 1, not 0")


@pytest.mark.ranks(3)
def test_a_group_that_lacks_ranks_of_a_mesh_is_refused(rank: int, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    state = {"w": distribute_tensor(torch.arange(12.0).view(6, 2), init_device_mesh("cpu", (3,)), [Shard(0)])}
    for members in ([0, 1], [0, 2]):
        group = dist.new_group(members)
        if rank in members:
            lacking = 3 - sum(members)
            with pytest.raises(UsageError, match=f"^the mesh of w has rank {lacking}, which is not in the group"):
                xrank.export_model(state, tmp_path / "out", group=group)
    dist.barrier()
    assert not list(tmp_path.iterdir())


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


UNWRITABLE = {
    "an integer that Python does not print": ({"x": 10**5000}, "config_overrides['x'] is an integer of 16,610 bits"),
    "such a key": ({10**5000: 1}, "a key of config_overrides is an integer of 16,610 bits"),
    "a set": ({"a": {"b\n": {1}}}, r"config_overrides['a']['b\n'] is a set"),
    "bytes": ({"x": [b"y"]}, "config_overrides['x'][0] is a bytes"),
    "levels": (nested(5000), "nested too deep"),
    "two keys that JSON writes alike": ({1: 2, "1": 3}, "two keys that JSON writes as '1'"),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_what_no_config_holds_is_refused_by_its_place(tmp_path: Path, what: str) -> None:
    overrides, says = UNWRITABLE[what]
    with pytest.raises(UsageError, match=re.escape(says)):
        xrank.export_model({"w": torch.ones(2)}, tmp_path / "out", config_overrides=overrides)
    workspace = xrank.NFSWorkspace(tmp_path / "workspace", rank=0, world_size=1)
    with pytest.raises(UsageError, match=re.escape(says.replace("config_overrides", "config"))):
        workspace.write_configs_and_weights(overrides, {"w": torch.ones(2)})
    assert not (tmp_path / "out").exists() and not list((tmp_path / "workspace").iterdir())
