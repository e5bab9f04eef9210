"""The layout of a vLLM engine, recorded from vLLM's own loaders without an engine, its ranks or weights."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload.layerwise import is_deferred_attention_layer
from vllm.model_executor.model_loader.utils import initialize_model

from xrank.errors import UsageError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.recipes.sources import open_base_model
from xrank.refit.recording import EngineRank, record_layouts


def record_vllm_layouts(
    model: str | os.PathLike[str], *, tp: int, pp: int = 1, ep: bool = False, trust_remote_code: bool = False
) -> LayoutMap:
    """Return the parts of a checkpoint that each rank of a vLLM engine takes.

    vLLM's model is made on the meta device for each rank, and its loader runs on tensors without memory. The process
    must not run an engine.

    Args:
        model: the folder of a model with safetensors weights, of which only headers are read.
        tp: tensor_parallel_size of the engine; `pp` is its pipeline_parallel_size.
        pp: number of pipeline stages.
        ep: enable_expert_parallel of the engine.
        trust_remote_code: as vLLM's option.

    Raises:
        UsageError: the folder has no weights, or vLLM cannot run the model in these parts.
        LayoutError: as `record_layouts`.

    Example:
        >>> record_vllm_layouts("model", tp=2).write("engine.toml")  # doctest: +SKIP
    """
    shapes = open_base_model(model).tensors
    if not shapes:
        raise UsageError(
            f"{model} has no weights with readable names and shapes",
            file=os.fspath(model),
            next_step="name the folder of the model's safetensors files",
        )
    with _engine_config(os.fspath(model), tp, pp, ep, trust_remote_code) as config:
        mesh = DeviceMesh((pp, tp), ("pp", "tp")) if pp > 1 else DeviceMesh((tp,), ("tp",))
        return record_layouts(lambda rank: _make_rank(config, rank // tp, rank % tp, shapes), shapes, mesh)


@contextmanager
def _engine_config(model: str, tp: int, pp: int, ep: bool, trust_remote_code: bool) -> Iterator[VllmConfig]:
    """Give vLLM's config of the engine, in a process that counts as the only rank of a world."""
    arguments = EngineArgs(
        model=model, skip_tokenizer_init=True, enforce_eager=True, trust_remote_code=trust_remote_code
    )
    try:
        config = arguments.create_engine_config()
        # vLLM checks at its start that as many devices are there, so the sizes are set afterwards.
        parallel = config.parallel_config
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = tp, pp
        parallel.world_size, parallel.enable_expert_parallel = tp * pp, ep
        config.model_config.verify_with_parallel_config(parallel)
    except ValueError as error:
        raise UsageError(
            f"vLLM cannot run {model} with these sizes of parallelism",
            file=model,
            got=str(error)[:300],
            next_step="choose sizes that vLLM accepts",
        ) from error
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        try:
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
            yield config
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


class _WithoutMemory(TorchFunctionMode):
    """Makes tensors without initial values, as weights are, on the meta device; tables are small, and computed."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **{**kwargs, "device": "meta"} if func is torch.empty else kwargs)


def _make_rank(config: VllmConfig, stage: int, place: int, names: Collection[str]) -> EngineRank:
    """Return the loader and the parameters of a rank, on the meta device."""
    _place_rank(config, stage, place)
    with _WithoutMemory():
        model = initialize_model(config)
    unused = {
        f"{path}.{name}"
        for path, layer in model.named_modules()
        if is_deferred_attention_layer(layer)
        for name in layer._parameters
        if not any(stored.endswith(name) for stored in names)  # scales of the key-value cache, which few models have
    }
    return model.load_weights, {name: tensor for name, tensor in model.named_parameters() if name not in unused}


def _place_rank(config: VllmConfig, stage: int, place: int) -> None:
    """Let vLLM take this process for a rank, of which the next model is made."""
    parallel = config.parallel_config
    sizes = {"_TP": (parallel.tensor_parallel_size, place), "_PP": (parallel.pipeline_parallel_size, stage)}
    sizes["_EP"] = sizes["_TP"]
    for name, (size, at) in sizes.items():
        group: Any = getattr(parallel_state, name)
        if group is not None:
            group.ranks, group.world_size, group.rank, group.rank_in_group = list(range(size)), size, at, at
    config.compilation_config.static_forward_context.clear()
