"""One rank of Megatron-core on CPU, which trains and saves: ``save_megatron_state.py RANK FOLDER KIND``.

Two ranks of tensor parallelism times two of data parallelism. Beside the checkpoint lies ``expected.pt``: each moment
as the ranks hold it, put together from their own records of their ranges.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import Any, Self

WORLD, TP, STEPS = 4, 2, 3
KINDS = ("fully_reshardable", "dp_reshardable", "plain")
"""What Megatron calls the forms of a distributed optimizer; and an optimizer that is not distributed."""


def main(rank: int, folder: str, kind: str) -> None:
    """Be one rank."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    let_megatron_run_on_cpu()
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{kind}", rank=rank, world_size=WORLD)
    parallel_state.initialize_model_parallel(TP)
    torch.manual_seed(rank % TP)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        use_cpu_initialization=True,
        tensor_model_parallel_size=TP,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    options: dict[str, Any] = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": True}
    inner = Float16Module(config, GPTModel(config, spec, vocab_size=64, max_sequence_length=32, **options))
    is_distributed = kind != "plain"
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, inner)
    adam = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=is_distributed,
        clip_grad=0.0,
    )
    optimizer = get_megatron_optimizer(adam, [model])
    for step in range(STEPS):
        model.zero_grad_buffer()
        for number, parameter in enumerate(model.parameters()):
            # The same on all ranks of data parallelism; of tensor parallelism where the parameter is not cut.
            is_cut = getattr(parameter, "tensor_model_parallel", False)
            torch.manual_seed(1000 * step + 10 * number + (rank % TP if is_cut else 5))
            parameter.main_grad.copy_(torch.randn(parameter.shape))
        optimizer.step()
    sharded = inner.module.sharded_state_dict()
    form = {"distrib_optim_sharding_type": kind}
    moments = optimizer.sharded_state_dict(sharded, **({"metadata": form} if is_distributed else {}))
    args = Namespace(num_layers=2, world_size=WORLD, tensor_model_parallel_size=TP)
    place = os.path.join(folder, f"run-{kind}", f"iter_{STEPS:07d}")
    if rank == 0:
        os.makedirs(place)
    torch.distributed.barrier()
    state = {"model": sharded, "optimizer": moments, "iteration": STEPS, "checkpoint_version": 3.0, "args": args}
    dist_checkpointing.save(state, place)
    held = {n: _moments(optimizer, p, is_distributed) for n, p in inner.module.named_parameters()}
    cuts = {
        n: p.partition_dim for n, p in inner.module.named_parameters() if getattr(p, "tensor_model_parallel", False)
    }
    everywhere: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(everywhere, held)
    if rank == 0:
        torch.save(_join(everywhere, cuts), os.path.join(folder, f"run-{kind}", "expected.pt"))
        with open(os.path.join(folder, f"run-{kind}", "latest_checkpointed_iteration.txt"), "w") as file:
            file.write(str(STEPS))
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in write_megatron.py


def _moments(optimizer: Any, parameter: Any, is_distributed: bool) -> tuple[Any, tuple[int, int], dict[str, Any]]:
    """Return a parameter's shape, the range of its elements that this rank has, and their moments and fp32 weights."""
    (own,) = optimizer.chained_optimizers
    if not is_distributed:
        kinds = {**own.optimizer.state[parameter.main_param], "param": parameter.main_param}
        found = (0, parameter.numel())
    else:
        try:
            part = own._get_model_param_range_map(parameter)["param"]
        except KeyError:  # all of it is another rank's
            return parameter.shape, (0, 0), {}
        kinds, found = own._get_main_param_and_optimizer_states(parameter), (part.start, part.end)
    kept = {kind: tensor.detach().flatten().clone() for kind, tensor in kinds.items() if kind != "step"}
    return parameter.shape, found, kept


def _join(everywhere: list[Any], cuts: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Return each parameter's moments, whole, from those of all ranks."""
    import torch

    found: dict[str, dict[str, Any]] = {}
    for name, (shape, _, _) in everywhere[0].items():
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            parts = []
            for tp in range(TP):
                flat = torch.full((shape.numel(),), float("nan"))
                for held in everywhere[tp::TP]:
                    _, (start, end), own = held[name]
                    if end > start:
                        flat[start:end] = own[kind]
                parts.append(flat.view(shape))
            if name not in cuts:
                whole = parts[0]
            elif "linear_fc1" in name:  # gate and up of each rank lie side by side
                halves = [part.chunk(2) for part in parts]
                whole = torch.cat([half[0] for half in halves] + [half[1] for half in halves])
            else:
                whole = torch.cat(parts, cuts[name])
            found.setdefault(name, {})["fp32_param" if kind == "param" else kind] = whole
    return found


def let_megatron_run_on_cpu() -> None:
    """Answer for a CPU what Megatron asks of a GPU."""
    import torch

    def on_cpu(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Any:
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return make(*args, **options)

        return made

    class Stream:
        def __init__(self, *_: Any) -> None: ...
        def wait_stream(self, *_: Any) -> None: ...
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    type_of = torch.Tensor.type
    fakes: dict[Any, Any] = {"current_device": lambda: "cpu", "synchronize": lambda *_: None, "Stream": Stream}
    fakes |= {"current_stream": lambda *_: Stream(), "stream": lambda stream: stream}
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    # The distributed optimizer tells element types by the names of tensors' types.
    tensor.type = lambda self, *args, **options: (
        type_of(self, *args, **options) if args or options else type_of(self).replace("torch.", "torch.cuda.")
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
