"""Trains cells with transformers' Trainer, two steps each: run by torchrun.

    torchrun --nproc-per-node 2 -m tests.oracle.trainers.train FOLDER CELL...

A cell's folder then holds ``run``, the Trainer's output with ``checkpoint-2``, and ``reference``: what save_pretrained
writes of the model that the ranks hold.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm.torch
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, DistributedType
from deepspeed.utils import safe_get_full_fp32_param
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

from tests.oracle.trainers.cells import CELLS, ENGINES, FRAMEWORKS, Cell
from tests.oracle.trainers.families import FAMILIES, VOCAB_SIZE, Family, load_model, make_batch
from tests.oracle.trainers.frameworks import LOOPS, Trained

__all__ = ["gather_masters", "write_reference"]

LIMIT_SECONDS = 90


class _Examples(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, family: Family) -> None:
        self._family = family

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return make_batch(self._family, index)


def _arguments_class(cell: Cell) -> type[TrainingArguments]:
    if cell.framework == "trl":
        from trl import SFTConfig

        return SFTConfig
    return TrainingArguments


def _arguments(cell: Cell, folder: Path) -> TrainingArguments:
    """Return the arguments of the Trainer, as a user's script has them."""
    options: dict[str, Any] = {}
    engine = (ENGINES | FRAMEWORKS)[cell.engine]
    if "fsdp" in engine:
        options["fsdp"] = True
        options["fsdp_config"] = dict(engine["fsdp"])
        if classes := FAMILIES[cell.family].layer_classes:
            options["fsdp_config"]["transformer_layer_cls_to_wrap"] = list(classes)
    else:
        options["deepspeed"] = {
            "zero_optimization": dict(engine["deepspeed"]),
            "bf16": {"enabled": "auto"},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    return _arguments_class(cell)(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        bf16=cell.kind == "bf16",
        **options,
    )


def allow_fsdp_on_cpu() -> None:
    """Let accelerate shard on a CPU as it does on a GPU: it passes over FSDP where ranks have no accelerator."""
    begin = AcceleratorState.__init__

    def begin_with_fsdp(self: AcceleratorState, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        is_first = options.get("fsdp_plugin") is not None
        if is_first and self._mixed_precision != "no":
            options["fsdp_plugin"].set_mixed_precision(self._mixed_precision)
        if is_first:
            self.fsdp_plugin = options["fsdp_plugin"]
        if self.__dict__.get("fsdp_plugin") is not None:
            # Each later AcceleratorState() takes these two from PartialState, which knows of no FSDP.
            self.distributed_type = DistributedType.FSDP
            self.device = torch.device("cpu")  # FSDP1 compares it with parameters' devices, which have no index

    AcceleratorState.__init__ = begin_with_fsdp
    # torch 2.13 crashes where it copies FSDP1's full state from a CPU to the CPU.
    FullStateDictConfig.offload_to_cpu = property(lambda config: False, lambda config, value: None)


def _prepare(cell: Cell, model: PreTrainedModel) -> nn.Module:
    """Freeze a part of the model, or put adapters on it."""
    family = FAMILIES[cell.family]
    if cell.kind == "frozen":
        layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
        for part in (model.get_input_embeddings(), layers[0]):
            part.requires_grad_(False)
    if cell.is_adapter:
        parameters = list(family.lora_parameters) if cell.kind == "experts" else None
        config = LoraConfig(
            r=4,
            target_modules=list(family.lora_targets),
            target_parameters=parameters,
            fan_in_fan_out=family.model_type == "gpt2",
        )
        return get_peft_model(model, config)
    return model


def gather_masters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the fp32 masters of a model that ZeRO-3 has partitioned, and what is not trained as it is."""
    state = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            state[name] = safe_get_full_fp32_param(parameter).detach().clone()
        else:
            with deepspeed.zero.GatheredParameters([parameter]):
                state[name] = parameter.detach().clone()
    kept = model.state_dict().keys()
    state |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return state


def write_reference(model: nn.Module, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Write what save_pretrained writes of a model with these gathered values.

    A model that is given a gathered state has lost what its tensors share, so the state goes into a fresh model first.
    """
    if isinstance(model, PeftModel):
        model.save_pretrained(folder, state_dict=state)
        return
    fresh = type(model)(model.config)
    lacking = fresh.load_state_dict(state, strict=False, assign=True)
    fresh.tie_weights()
    assert not lacking.unexpected_keys, lacking
    tied = {tensor.data_ptr() for name, tensor in fresh.state_dict().items() if name not in lacking.missing_keys}
    untied = [name for name in lacking.missing_keys if fresh.state_dict()[name].data_ptr() not in tied]
    assert not untied, f"the trainer gathered no {untied}"
    for name, tensor in state.items():
        assert torch.equal(fresh.state_dict()[name], tensor), f"{name} is tied and the ranks hold two values"
    if model.can_generate():
        fresh.generation_config = model.generation_config
    fresh.save_pretrained(folder)


def train(cell: Cell, root: Path) -> None:
    """Train one cell and write its reference."""
    folder = root / cell.name
    torch.manual_seed(0)
    if cell.framework in LOOPS:
        batches = [make_batch(FAMILIES[cell.family], number) for number in range(8)]
        load = functools.partial(_load, cell, root)
        plain, state = LOOPS[cell.framework](FRAMEWORKS[cell.engine], folder / "run", load, batches)
    else:
        plain, state = _run_trainer(cell, root)
    if dist.get_rank() == 0:
        write_reference(plain, state, folder / "writing")
        os.rename(folder / "writing", folder / "reference")
    dist.barrier()


def _load(cell: Cell, root: Path) -> nn.Module:
    """Return the model to train."""
    options = {"dtype": getattr(torch, cell.dtype)}
    return _prepare(cell, load_model(FAMILIES[cell.family], root / "base" / cell.base_model, **options))


def _run_trainer(cell: Cell, root: Path) -> Trained:
    """Train with transformers' Trainer, or with TRL's."""
    arguments = _arguments(cell, root / cell.name / "run")  # before the model: ZeRO-3 partitions while it is loaded
    model = _load(cell, root)
    if cell.framework == "trl":
        from datasets import Dataset as Rows
        from trl import SFTTrainer

        rows = [make_batch(FAMILIES[cell.family], number) for number in range(8)]
        examples = Rows.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows])
        trainer = SFTTrainer(model=model, args=arguments, train_dataset=examples, processing_class=_make_tokenizer())
    else:
        trainer = Trainer(model=model, args=arguments, train_dataset=_Examples(FAMILIES[cell.family]))
    trainer.train()
    plain = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if cell.engine == "zero3-shards":
        return plain, gather_masters(plain)
    return plain, trainer.accelerator.get_state_dict(trainer.model_wrapped)


def _make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of numbers, which TRL asks for also where rows are tokens already."""
    words = {str(number): number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="3"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="1", eos_token="2", pad_token="0")


def main(root: str, *names: str) -> None:
    """Train every cell in a folder of its own."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Else DeepSpeed compiles an operator, for a minute.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    allow_fsdp_on_cpu()
    for name in names:
        begin = time.monotonic()
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)  # ranks that wait for each other end
        train(CELLS[name], Path(root))
        gc.collect()  # transformers holds a ZeRO config by a weak reference: the next model must not be partitioned
        if dist.get_rank() == 0:
            print(f"{name} {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    # Groups are held beyond their end: a gloo thread that drops its last tensor while Python closes aborts or hangs.
    try:
        main(*sys.argv[1:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)
