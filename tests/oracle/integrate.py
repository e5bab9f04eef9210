"""Trains a tiny Llama with transformers' Trainer or accelerate, which export at each save: run by torchrun.

    torchrun --nproc-per-node 2 -m tests.oracle.integrate FOLDER CASE...

A case's folder then holds ``made``, what the integration wrote at the last step, and ``want``: what save_pretrained
writes of the state that the framework gathers.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.oracle.trainers.train import allow_fsdp_on_cpu, write_reference
from xrank.integrations.accelerate import export_at_save
from xrank.integrations.transformers import XrankCallback

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp1": {"fsdp": {"version": 1, "state_dict_type": "SHARDED_STATE_DICT", "sync_module_states": False}},
    "fsdp2": {"fsdp": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}},
    "zero1": {"deepspeed": {"stage": 1}},
    "zero2": {"deepspeed": {"stage": 2}},
    "zero3": {"deepspeed": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
}


def make_model(engine: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 65, "hidden_size": 32, "intermediate_size": 49, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": engine == "fsdp1"}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def make_rows() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(0, 65, (8, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def run_trainer(engine: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    options: dict[str, Any] = {}
    if "fsdp" in ENGINES[engine]:
        classes = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        options = {"fsdp": True, "fsdp_config": ENGINES[engine]["fsdp"] | classes}
    elif "deepspeed" in ENGINES[engine]:
        config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": ENGINES[engine]["deepspeed"]}
        options = {"deepspeed": config}
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        use_cpu=True,
        max_steps=2,
        save_steps=1,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )
    callback = XrankCallback(folder / "models")
    trainer = Trainer(make_model(engine), arguments, train_dataset=make_rows(), callbacks=[callback])
    trainer.train()
    assert (folder / "models" / "checkpoint-1" / "model.safetensors").exists()
    if dist.get_rank() == 0:
        (folder / "models" / "checkpoint-2").rename(folder / "made")
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return trainer.accelerator.unwrap_model(trainer.model_wrapped), state


def run_accelerate(engine: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    AcceleratorState._reset_state(reset_partial_state=True)
    if "fsdp" in ENGINES[engine]:
        settings = {key: value for key, value in ENGINES[engine]["fsdp"].items() if key != "version"}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=ENGINES[engine]["fsdp"]["version"],
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
            **settings,
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    else:
        config = {"zero_optimization": ENGINES[engine]["deepspeed"], "train_micro_batch_size_per_gpu": 1}
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    hook = export_at_save(accelerator)
    model: Any = make_model(engine)
    loader: Any = DataLoader(make_rows(), batch_size=1)  # type: ignore[arg-type]
    if engine == "fsdp1":
        model = accelerator.prepare(model)  # it replaces the parameters, which the optimizer must have
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    state: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(loader):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            gathered = accelerator.get_state_dict(model) or {}  # of ZeRO-3 the first rank alone has one
            state = {name: tensor.clone() for name, tensor in gathered.items()}
            accelerator.save_state(str(folder / "run"))
    hook.finish()
    if dist.get_rank() == 0:
        (folder / "run" / "huggingface").rename(folder / "made")
    return accelerator.unwrap_model(model), state


def main(root: str, *cases: str) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    import deepspeed.comm.torch

    # Else DeepSpeed compiles an operator, for a minute.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    assert deepspeed.comm.torch
    allow_fsdp_on_cpu()
    for case in cases:
        framework, engine = case.split("-")
        run = run_trainer if framework == "trainer" else run_accelerate
        plain, state = run(engine, Path(root, case))
        if dist.get_rank() == 0:
            write_reference(plain, state, Path(root, case, "want"))
        dist.barrier()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # a gloo thread that drops its last tensor while Python closes aborts or hangs
