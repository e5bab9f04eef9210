"""Calls of the public Python functions, run as ``calls.py SOURCES WORK NAME...`` by one rank or by several.

Only public names of xrank are used, so that the file runs with every version. Each call gets the folder WORK/NAME and
leaves WORK/results/NAME.RANK.json: its report, its tensors' digests, or its error.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import xrank
from xrank.errors import XrankError
from xrank.layout import DeviceMesh, LayoutMap

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SHARED = {"distributed": WORLD > 1, "timeout_seconds": 120.0}


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return _sharded(LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes})))


def _saved(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return _sharded(AutoModelForCausalLM.from_pretrained(path))


def _sharded(model: Any) -> Any:
    """Shard over all ranks, as FSDP2 does."""
    if WORLD > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",)))
    return model


def _zeroed(model: Any) -> Any:
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    return model


class _Adapted(torch.nn.Module):
    """Has what PEFT's models show of themselves."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.active_adapter, self.peft_config = "default", {"default": self}
        for name, tensor in state.items():
            module: Any = self
            *path, leaf = name.split(".")
            for piece in path:
                if piece not in module._modules:
                    module.add_module(piece, torch.nn.Module())
                module = module._modules[piece]
            module.register_parameter(leaf, torch.nn.Parameter(tensor))

    def get_base_model(self) -> torch.nn.Module:
        return torch.nn.Module()

    def to_dict(self) -> dict[str, Any]:
        return {"peft_type": "LORA", "r": 4, "lora_alpha": 10, "target_modules": ["down_proj", "q_proj"]}


def _adapted(src: Path) -> _Adapted:
    return _Adapted(load_file(src / "adapters/live.safetensors"))


def _megatron(src: Path) -> dict[str, torch.Tensor]:
    return load_file(src / "recipes/megatron.safetensors")


def _rows() -> dict[str, Any]:
    """Return a tensor that is cut by rows, and one that is whole, with their layouts."""
    layouts = LayoutMap(DeviceMesh((WORLD,), ("tp",)))
    layouts["w"] = "[f/tp, h]"
    layouts["n"] = "[h]"
    return {"model_or_state_dict": {"w": torch.arange(6.0).view(2, 3) + RANK, "n": torch.ones(3)}, "layouts": layouts}


def _split(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if tensor.ndim < 2:
        return {name: tensor * 2}
    return {f"{name}.top": tensor[:1].clone(), name: tensor.to(torch.float16)}


def _raise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    raise ValueError(f"no transform of {name}")


def _export(out: Path, model: Any, **options: Any) -> Any:
    return xrank.export_model(model, out / "out", timeout_seconds=120, **options)


def _export_twice(out: Path, **options: Any) -> Any:
    _export(out, model={"w": torch.zeros(3)})
    if WORLD > 1:
        dist.barrier()
    return _export(out, {"w": torch.ones(3)}, **options)


def _consume(src: Path) -> None:
    with xrank.iter_model(_llama(), timeout_seconds=120) as tensors:
        for name, _ in tensors:
            if "norm" in name:
                raise OSError("the engine is gone")


def _load(model: Any, path: Path, **options: Any) -> Any:
    report = xrank.load_model(model, path, timeout_seconds=120, **options)
    state = model if isinstance(model, dict) else model.state_dict()
    return report, {name: getattr(tensor, "to_local", lambda t=tensor: t)() for name, tensor in state.items()}


def _gather(source: Path, out: Path, **options: Any) -> Any:
    steps: list[tuple[int, int]] = []
    report = xrank.gather_checkpoint(source, out / "out", progress=lambda *at: steps.append(at), **SHARED, **options)
    assert RANK > 0 or options.get("dry_run") or steps[-1][0] == steps[-1][1]
    return report


def _open(path: Path, **options: Any) -> Any:
    found = xrank.open_checkpoint(path, **options)
    facts = {"format": found.format, "world_size": found.world_size, "step": found.step, "names": list(found)}
    return facts, dict(found.items())


def _new_layouts() -> LayoutMap:
    layouts = LayoutMap(DeviceMesh((3,), ("x",)))
    for name, text in {"embed": "[v, h/~x]", "up": "[f/~x, h]", "down": "[h/~x, f]", "norm": "[h]"}.items():
        layouts[f"{name}.weight"] = text
    layouts["steps"] = "[n/~x]"
    return layouts


CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "export": lambda s, w: _export(w, _llama()),
    "export-tied": lambda s, w: _export(w, _llama(tie_word_embeddings=True)),
    "export-cast": lambda s, w: _export(w, _llama(), dtype="bf16", max_shard_size="20KB", config_overrides={"new": 1}),
    "export-base": lambda s, w: _export(w, _saved(s / "hf/llama"), base_model=s / "hf/llama", dtype="base"),
    "export-base-other": lambda s, w: _export(w, _llama(), base_model=s / "weights/base"),
    "export-base-none": lambda s, w: _export(w, _llama(), base_model=s / "none"),
    "export-mixtral": lambda s, w: _export(w, _saved(s / "hf/mixtral")),
    "export-recipe": lambda s, w: _export(w, _megatron(s), base_model=s / "hf/llama"),
    "export-recipe-named": lambda s, w: _export(w, _megatron(s), recipe="megatron-llama", base_model=s / "hf/llama"),
    "export-recipe-other": lambda s, w: _export(w, _megatron(s), recipe="megatron-gpt2", base_model=s / "hf/llama"),
    "export-recipe-unknown": lambda s, w: _export(w, _llama(), recipe="llama"),
    "export-transform": lambda s, w: _export(w, _llama(), transform=_split),
    "export-transform-raises": lambda s, w: _export(w, _llama(), transform=_raise),
    "export-adapter": lambda s, w: _export(w, _adapted(s)),
    "export-adapter-merge": lambda s, w: _export(w, _adapted(s), adapter="merge"),
    "export-adapter-separate": lambda s, w: _export(w, _adapted(s), adapter="separate"),
    "export-adapter-transform": lambda s, w: _export(w, _adapted(s), adapter="merge", transform=_split),
    "export-adapter-none": lambda s, w: _export(w, _llama(), adapter="merge"),
    "export-rows": lambda s, w: xrank.export_model(out=w / "out", **_rows()),
    "export-dtype": lambda s, w: xrank.export_model(out=w / "out", dtype="fp8", **_rows()),
    "export-memory": lambda s, w: xrank.export_model(out=w / "out", max_memory="1KB", **_rows()),
    "export-config": lambda s, w: _export(w, _llama(), config_overrides={"x": {1}}),
    "export-name": lambda s, w: _export(w, {"a/../b": torch.ones(1)}),
    "export-exists": lambda s, w: _export_twice(w),
    "export-overwrite": lambda s, w: _export_twice(w, overwrite=True),
    "export-replicas": lambda s, w: _export(w, {"w": torch.arange(4.0) + RANK}),
    "export-lacks": lambda s, w: _export(w, {"v" if RANK else "w": torch.ones(2)}),
    "export-asks-differ": lambda s, w: _export(w, {"w": torch.ones(2)}, max_memory=f"{64 + RANK}MB"),
    "iter": lambda s, w: dict(xrank.iter_model(_llama())),
    "iter-all": lambda s, w: dict(xrank.iter_model(_llama(), ranks="all", dtype="bf16")),
    "iter-transform": lambda s, w: dict(xrank.iter_model(_llama(), transform=_split)),
    "iter-recipe": lambda s, w: dict(xrank.iter_model(_llama(), recipe="llama")),
    "iter-replicas": lambda s, w: dict(xrank.iter_model({"w": torch.arange(4.0) + RANK})),
    "iter-consumer-raises": lambda s, w: _consume(s),
    "load": lambda s, w: _load(_zeroed(_saved(s / "hf/llama")), s / "hf/llama"),
    "load-megatron": lambda s, w: _load(_zeroed(_saved(s / "hf/llama")), s / "recipes/llama"),
    "load-megatron-named": lambda s, w: _load(
        _zeroed(_saved(s / "hf/llama")), s / "recipes/llama", recipe="megatron-llama"
    ),
    "load-mixtral": lambda s, w: _load(_zeroed(_saved(s / "hf/mixtral")), s / "hf/mixtral"),
    "load-workspace": lambda s, w: _load(
        {n: torch.zeros_like(t) for n, t in _open(s / "ws/good")[1].items()}, s / "ws/good"
    ),
    "load-other": lambda s, w: _load(_llama(), s / "hf/mixtral"),
    "load-other-sizes": lambda s, w: _load(_llama(), s / "hf/llama"),
    "load-missing": lambda s, w: _load({"norm.weight": torch.zeros(8)}, s / "ws/missing"),
    "load-names": lambda s, w: _load({"norm.weight": torch.zeros(8)}, s / "ws/good"),
    "gather": lambda s, w: _gather(s / "ws/wide", w, max_shard_size="60KB"),
    "gather-merge": lambda s, w: _gather(s / "adapters/lora", w, adapter="merge", dtype="fp32"),
    "gather-dry-run": lambda s, w: _gather(s / "dcp/fsdp2", w, dry_run=True),
    "gather-missing": lambda s, w: _gather(s / "ws/missing", w),
    "gather-flipped": lambda s, w: _gather(s / "ws/flipped-tensor", w),
    "gather-not-one": lambda s, w: _gather(s / "dcp/fsdp2", w, workspace=True),
    "open": lambda s, w: _open(s / "ws/wide"),
    "open-bf16": lambda s, w: _open(s / "recipes/llama", dtype="bf16"),
    "open-dcp": lambda s, w: _open(s / "dcp/trainer"),
    "open-missing": lambda s, w: _open(s / "ws/missing"),
    "open-adapter": lambda s, w: _open(s / "adapters/lora"),
    "reshard": lambda s, w: xrank.reshard_checkpoint(s / "ws/good", _new_layouts(), w / "out", **SHARED),
    "reshard-missing": lambda s, w: xrank.reshard_checkpoint(s / "ws/missing", _new_layouts(), w / "out", **SHARED),
    "reshard-no-rule": lambda s, w: xrank.reshard_checkpoint(s / "ws/wide", _new_layouts(), w / "out", **SHARED),
    "verify": lambda s, w: xrank.verify_model(s / "models/good", **SHARED),
    "verify-flipped": lambda s, w: xrank.verify_model(s / "models/flipped", **SHARED),
    "verify-against": lambda s, w: xrank.verify_model(s / "models/good", against=s / "models/other-values", **SHARED),
    "verify-none": lambda s, w: xrank.verify_model(s / "places/empty", **SHARED),
}


def _digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    found = {}
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:32]}"
    return found


def _shown(value: Any) -> Any:
    """Return a call's result as JSON holds it."""
    if isinstance(value, tuple):
        return [_shown(part) for part in value]
    if isinstance(value, dict):
        return _digests(value) if all(isinstance(part, torch.Tensor) for part in value.values()) else value
    return value.to_dict() if hasattr(value, "to_dict") else value


def run_call(name: str, src: Path, work: Path) -> dict[str, Any]:
    """Make a call; return its result or its error."""
    (work / name).mkdir(parents=True, exist_ok=True)
    try:
        return {"result": _shown(CALLS[name](src, work / name))}
    except XrankError as error:
        return {"error": error.to_dict()}
    except Exception as error:
        return {"error": {"type": type(error).__name__, "message": str(error)}}


def main() -> None:
    """Make the calls that are named, one after the other."""
    warnings.simplefilter("ignore")
    src, work, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    if WORLD > 1:
        dist.init_process_group("gloo")
    (work / "results").mkdir(exist_ok=True)
    for name in names or CALLS:
        found = run_call(name, src, work)
        (work / "results" / f"{name}.{RANK}.json").write_text(json.dumps(found))
        if WORLD > 1:
            dist.barrier()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
