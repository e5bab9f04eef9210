"""Forward passes of Megatron-core on CPU: ``forward_megatron.py FOLDER [FAMILY ...]`` writes a file for each family.

Its shapes and last logits; what the file has beside them stays. To record them anew, FOLDER is
tests/recipes/families/logits.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.oracle.megatron_cores import CORES
from tests.oracle.megatron_cores.core import run_core
from tests.recipes.families import FAMILIES


def main(folder: str, *names: str) -> None:
    """Run the families of these names, or all."""
    place = Path(folder).resolve()
    torch.distributed.init_process_group("gloo", init_method=f"file://{place / 'store'}", rank=0, world_size=1)
    # Megatron asks CUDA for the device of its buffers and for a random state, which no dropout of 0 needs.
    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    moe_utils.te_general_gemm = None  # which it reads, but defines only beside Transformer Engine
    multi_latent_attention.HAVE_TE = False  # it is true beside a module whose layers are None
    _let_values_be_narrower_than_keys()
    parallel_state.initialize_model_parallel()
    for name in names or CORES:
        file = place / f"{name}.json"
        found = {**(json.loads(file.read_text()) if file.exists() else {}), **run_core(FAMILIES[name], CORES[name])}
        file.write_text(_text(found))
    (place / "store").unlink()
    # The process group's threads need no end of their own.
    sys.stdout.flush()
    os._exit(0)


def _text(content: dict[str, Any]) -> str:
    """Return JSON with a line for each tensor."""
    parts = []
    for key, value in content.items():
        if isinstance(value, dict):
            rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(its)}" for name, its in value.items())
            parts.append(f" {json.dumps(key)}: {{\n{rows}\n }}")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _let_values_be_narrower_than_keys() -> None:
    """Give the attention without Transformer Engine the two options that latent attention passes."""
    made = DotProductAttention.__init__

    def make(self: Any, *, k_channels: int | None = None, v_channels: int | None = None, **options: Any) -> None:
        made(self, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = make


if __name__ == "__main__":
    main(*sys.argv[1:])
