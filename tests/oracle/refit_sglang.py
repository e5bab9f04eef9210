"""Fills each rank of SGLang's real Llama by its own loader; run it with a Python that has SGLang 0.5.23.

No SGLang engine runs: its model classes are made on the CPU for each rank of TP 2, with stand-ins for its GPU kernels.
"""

from __future__ import annotations

import copy
import importlib.abc
import importlib.machinery
import sys
import tempfile
from typing import Any
from unittest.mock import MagicMock

import torch
from transformers import LlamaConfig

import xrank
from benchmarks.fused_engine import Sizes, whole_shapes

SIZES = Sizes(hidden=64, ffn=96, vocab=99, layers=2, heads=4, kv_heads=2, head=16)
TP = 2


class _WithoutKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that SGLang imports for GPUs, and that no loader uses."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        is_kernel = name.split(".")[0] in ("torchvision", "sgl_kernel", "decord", "flashinfer", "pynvml")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_kernel else None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__, module.__version__ = [], spec, spec.name, "0.0"
        return module

    def exec_module(self, module: Any) -> None:
        """Do nothing."""


def _override(rank: int) -> Any:
    """Let SGLang take this process for a rank of two."""
    from sglang.srt.runtime_context import get_parallel

    places: dict[str, Any] = {"moe_ep_rank": 0, "moe_ep_size": 1, "pp_rank": 0, "pp_size": 1}
    for kind in ("tp", "attn_tp", "moe_tp"):
        group = copy.copy(getattr(get_parallel(), f"{kind}_group"))
        group.world_size, group.rank_in_group = TP, rank
        places |= {f"{kind}_group": group, f"{kind}_rank": rank, f"{kind}_size": TP}
    for kind in ("attn_dp", "attn_cp"):
        places |= {f"{kind}_rank": 0, f"{kind}_size": 1}
    return get_parallel().override(**places)


def main() -> None:
    """Print the figures of each rank."""
    sys.meta_path.insert(0, _WithoutKernels())
    from sglang.srt import distributed, server_args
    from sglang.srt.distributed import parallel_state
    from sglang.srt.models.llama import LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    server_args.set_global_server_args_for_scheduler(server_args.ServerArgs(model_path="dummy"))
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        distributed.init_distributed_environment(
            world_size=1, rank=0, distributed_init_method=store, local_rank=0, backend="gloo"
        )
        parallel_state.initialize_model_parallel()
        config = LlamaConfig(
            hidden_size=SIZES.hidden,
            intermediate_size=SIZES.ffn,
            num_hidden_layers=SIZES.layers,
            num_attention_heads=SIZES.heads,
            num_key_value_heads=SIZES.kv_heads,
            vocab_size=SIZES.vocab,
        )
        whole = {name: torch.randn(shape) for name, shape in whole_shapes(SIZES).items()}
        for rank in range(TP):
            with _override(rank), torch.no_grad():
                model, wanted = LlamaForCausalLM(config), LlamaForCausalLM(config)
                wanted.load_weights(whole.items())
                with (
                    xrank.offer_weights(whole, f"{folder}/{rank}", snapshot=True) as offer,
                    xrank.take_weights(model, f"{folder}/{rank}", loader=model.load_weights) as weights,
                ):
                    offer.publish(1)
                    report = weights.update(timeout_seconds=30)
            assert not report.whole, report.whole
            for (name, got), want in zip(model.named_parameters(), wanted.parameters(), strict=True):
                assert got.view(torch.int16).equal(want.view(torch.int16)), name
            print(
                f"rank {rank} of {TP}: {report.nbytes:,} bytes held, {report.moved_nbytes:,} moved, none whole, equal"
            )


if __name__ == "__main__":
    main()
