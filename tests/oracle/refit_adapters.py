"""Adapters of PEFT's models under ZeRO-3 and FSDP2 that an engine takes while the trainer goes on: run by torchrun.

    torchrun --nproc-per-node 2 -m tests.oracle.refit_adapters FOLDER KIND...

The two ranks are both sides. A kind's folder then has ``ENGINE/1`` and ``ENGINE/2``, written by `Adapter.write` after
both steps were taken; in the second one all trained values are larger by 1.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import xrank
from tests.oracle.save_peft import make_adapted


def take(model: Any, engine: str, folder: Path, kind: str) -> None:
    """Offer the adapter of two steps, and take both."""
    address = folder / kind / f"{engine}-address"
    options = {"adapter_only": True, "snapshot": True, "proof": True}
    with xrank.offer_weights(model, address, **options) as offer, xrank.take_adapter(address, proof=True) as taken:
        found = []
        for step in (1, 2):
            offer.publish(step, timeout_seconds=60)
            found.append(taken.update(step, timeout_seconds=60))
            dist.barrier()
            for parameter in model.parameters():
                if parameter.requires_grad:
                    held = getattr(parameter, "ds_tensor", parameter)
                    getattr(held, "_local_tensor", held).data.add_(1)
    assert all(not one.report.unproven and one.report.digests.keys() == one.tensors.keys() for one in found)
    assert all(one.report.moved_nbytes < 1.5 * one.report.nbytes for one in found), found[0].report
    for one in found if dist.get_rank() == 0 else ():
        one.write(folder / kind / engine / str(one.step))


def under_zero3(kind: str) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    }
    model = make_adapted(kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-3), config=config)[0]


def under_fsdp2(kind: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = make_adapted(kind), init_device_mesh("cpu", (2,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(folder: str, *kinds: str) -> None:
    """Take each kind of adapter from each engine."""
    import deepspeed
    import deepspeed.comm.torch

    warnings.simplefilter("ignore")
    # Else DeepSpeed compiles an operator, for a minute.
    deepspeed.comm.torch.build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for kind in kinds:
        (Path(folder) / kind).mkdir(exist_ok=True)
        zero3 = under_zero3(kind)
        take(zero3.module, "zero3", Path(folder), kind)
        zero3.destroy()
        take(under_fsdp2(kind), "fsdp2", Path(folder), kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
