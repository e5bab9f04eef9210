"""Trains a tiny Llama on real ranks; each leaves what it holds in a workspace.

The ranks form a mesh of two axes: tensor parallelism over ``tp`` splits the projections and the vocabulary, FSDP2 over
``dp`` splits every parameter once more. xrank needs one line of the training: `leave_shards`.

For the comparison, `save_reference` keeps the model as torch alone puts it together.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from xrank import NFSWorkspace

TP = 2
NUM_STEPS = 6
CONFIG = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=1001,  # odd, so that the ranks hold unequal parts
    hidden_size=96,
    intermediate_size=172,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    dtype="bfloat16",
)


def new_model() -> LlamaForCausalLM:
    """Return the model as it is before training, the same on every rank."""
    torch.manual_seed(0)
    # Not LlamaForCausalLM(CONFIG).to(bfloat16), which would round the rotary frequencies too.
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)


def shard(model: LlamaForCausalLM, num_ranks: int) -> None:
    """Split every parameter over the mesh; norms, which ``tp`` does not split, over its axis ``dp`` only."""
    mesh = init_device_mesh("cpu", (num_ranks // TP, TP), mesh_dim_names=("dp", "tp"))
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def train(model: LlamaForCausalLM, dp_rank: int) -> list[float]:
    """Take a few steps on one batch of random tokens for each ``dp`` rank, and return the losses."""
    tokens = torch.randint(CONFIG.vocab_size, (4, 32), generator=torch.Generator().manual_seed(dp_rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(NUM_STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def leave_shards(model: LlamaForCausalLM, workspace: str) -> None:
    """Leave what this rank holds in the workspace."""
    config = json.loads(model.config.to_json_string())
    NFSWorkspace(workspace).write_configs_and_weights(config, model.state_dict(), step=NUM_STEPS)


def save_reference(model: LlamaForCausalLM, folder: str, rank: int) -> None:
    """Keep what the gather must equal: the tensors as torch puts them together, and logits of the model with them."""
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}  # takes every rank
    if rank != 0:
        return
    unsharded = new_model()
    unsharded.load_state_dict(whole)
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        logits = unsharded(input_ids=tokens).logits
    reference = {"state_dict": unsharded.state_dict(), "tokens": tokens, "logits": logits}
    os.makedirs(folder, exist_ok=True)
    torch.save(reference, os.path.join(folder, "reference.pt"))


def run_rank(rank: int, num_ranks: int, rendezvous: str, workspace: str, reference: str) -> None:
    """Do what one process of the training does."""
    # Of no consequence here: nothing is done to the logits in place, and full_tensor() may take its two steps.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # the ranks share the cores, and compare_model.py computes the same way
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)

    model = new_model()
    shard(model, num_ranks)
    clock = [time.monotonic()]
    losses = train(model, dp_rank=rank // TP)
    clock.append(time.monotonic())
    leave_shards(model, workspace)
    clock.append(time.monotonic())
    save_reference(model, reference, rank)

    if rank == 0:
        mesh = f"{num_ranks} ranks (dp {num_ranks // TP} x tp {TP})"
        print(f"trained  {mesh}, {clock[1] - clock[0]:.1f} s; loss", *(f"{loss:.2f}" for loss in losses))
        held = sum(tensor.to_local().nbytes for tensor in model.state_dict().values())
        whole = sum(tensor.nbytes for tensor in model.state_dict().values())
        print(f"left     rank 0: {held:,} of the model's {whole:,} bytes, {clock[2] - clock[1]:.2f} s")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help=f"a multiple of {TP} (default: 4)")
    parser.add_argument("--workspace", required=True, help="where the ranks leave their shards")
    parser.add_argument("--reference", required=True, help="where torch's own unsharded copy goes")
    options = parser.parse_args()
    if options.ranks < TP or options.ranks % TP:
        parser.error(f"--ranks {options.ranks} is no multiple of {TP}")
    os.environ.setdefault("XRANK_RUN_ID", secrets.token_hex(4))  # torchrun and srun give one themselves
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # saves gloo looking up the name of this host
    with tempfile.TemporaryDirectory() as folder:
        rank_arguments = (options.ranks, os.path.join(folder, "rendezvous"), options.workspace, options.reference)
        torch.multiprocessing.spawn(run_rank, rank_arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
