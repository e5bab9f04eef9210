"""The list of cells: one cell is one folder that one trainer left of one model, trained in one way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.oracle.trainers.families import FAMILIES

__all__ = ["CELLS", "CHOSEN", "ENGINES", "FRAMEWORKS", "Cell", "choose_cells"]

ENGINES: dict[str, dict[str, Any]] = {
    # accelerate finds no device that it could synchronize module states with, where there is a CPU alone.
    "fsdp1-sharded": {"fsdp": {"version": 1, "state_dict_type": "SHARDED_STATE_DICT", "sync_module_states": False}},
    "fsdp1-full": {"fsdp": {"version": 1, "state_dict_type": "FULL_STATE_DICT", "sync_module_states": False}},
    "fsdp2-sharded": {"fsdp": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}},
    "fsdp2-full": {"fsdp": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}},
    "zero1": {"deepspeed": {"stage": 1}},
    "zero2": {"deepspeed": {"stage": 2}},
    "zero3": {"deepspeed": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
    "zero3-shards": {"deepspeed": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}},
}
"""How transformers' Trainer shards and saves -> the options of it."""

FRAMEWORKS: dict[str, dict[str, Any]] = {
    "accelerate-fsdp1": {"fsdp": {"fsdp_version": 1, "use_orig_params": True, "state_dict_type": "SHARDED_STATE_DICT"}},
    "accelerate-fsdp2": {"fsdp": {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT"}},
    "accelerate-zero2": {"deepspeed": {"stage": 2}},
    "accelerate-zero3": {"deepspeed": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
    "trl-fsdp2": {"fsdp": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}},
    "trl-zero2": {"deepspeed": {"stage": 2}},
    "trl-zero3": {"deepspeed": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
    "lightning-fsdp-sharded": {"fsdp": {"state_dict_type": "sharded"}},
    "lightning-fsdp-full": {"fsdp": {"state_dict_type": "full"}},
    "lightning-zero2": {"deepspeed": {"stage": 2}},
    "verl-fsdp1": {"fsdp": {"fsdp_version": 1}},
    "verl-fsdp2": {"fsdp": {"fsdp_version": 2}},
    "torch_checkpointing-pt": {"files": False},
    "torch_checkpointing-safetensors": {"files": True},
    "torchtitan-fsdp2": {"pp": 1},
    "torchtitan-pp2": {"pp": 2},
    "megatron-tp2pp2": {"tp": 2, "pp": 2, "ep": 1, "num_ranks": 4},
    "megatron-pp2ep2": {"tp": 1, "pp": 2, "ep": 2, "num_ranks": 4},
}
"""How other frameworks shard and save -> the options of each."""

_FEWER_FAMILIES = {
    "torch_checkpointing-safetensors": ("llama", "qwen3_moe"),
    "torchtitan-fsdp2": ("llama",),
    "torchtitan-pp2": ("llama",),
    "megatron-tp2pp2": ("gpt2",),
    "megatron-pp2ep2": ("qwen3_moe",),
}
"""Families of frameworks with model code of their own, or that cannot save a tied model."""

KINDS = {
    "full": "all parameters in fp32",
    "bf16": "a bf16 model, trained with bf16=True",
    "frozen": "the embedding and the first layer do not require gradients",
    "tied": "the embedding and the head are one tensor, where the family's own default is two",
    "untied": "two tensors, where the family's own default is one",
    "lora": "PEFT's LoRA",
    "experts": "PEFT's LoRA on fused experts (target_parameters)",
}


@dataclass(frozen=True)
class Cell:
    """One folder.

    Attributes:
        engine: one of `ENGINES` or `FRAMEWORKS`.
        kind: one of `KINDS`.
        family: one of `FAMILIES`.
    """

    engine: str
    kind: str
    family: str

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return f"{self.engine}-{self.kind}-{self.family}"

    @property
    def framework(self) -> str:
        """Return the first word of a framework's engine; empty for transformers' Trainer."""
        return self.engine.partition("-")[0] if self.engine in FRAMEWORKS else ""

    @property
    def checkpoint(self) -> str:
        """Return the checkpoint's path in the cell's folder."""
        return "run/checkpoint-2" if self.framework in ("", "trl") else "run"

    @property
    def is_adapter(self) -> bool:
        """Return whether adapters alone are trained."""
        return self.kind in ("lora", "experts")

    @property
    def is_tied(self) -> bool | None:
        """Return whether embedding and head are one tensor; None: as the family has it."""
        return {"tied": True, "untied": False}.get(self.kind)

    @property
    def dtype(self) -> str:
        """Return the dtype of the model that the user loads."""
        return "bfloat16" if self.kind == "bf16" else "float32"

    @property
    def base_model(self) -> str:
        """Return the name of the folder that the user trains from."""
        return f"{self.family}-{self.kind if self.kind in ('tied', 'untied', 'bf16') else 'full'}"


def _can_train(cell: Cell) -> bool:
    """Return whether the trainer itself can make a cell.

    FSDP parts the embedding that T5's two stacks share, and FSDP2 refuses BERT's tied bias. transformers cannot load
    Whisper under zero.Init, and ZeRO-3 does not end where a vision tower sees no image. PEFT 0.21 finds none of its
    adapters in FSDP1's state: the Trainer saves empty files.
    """
    engine = cell.engine.removeprefix("accelerate-").partition("-")[0]
    if engine == "fsdp1":
        return cell.family != "t5" and not cell.is_adapter
    families = {"fsdp2": ("t5", "bert"), "zero3": ("whisper", "llava", "qwen2_5_vl")}
    return cell.family not in families.get(engine, ())


def _list_cells() -> dict[str, Cell]:
    """Return every engine x family with all parameters, and the other kinds on every family with some engines.

    The engines of the other kinds move on with each family, so that each pair of engine and kind occurs. Each other
    framework trains a dense model, one with experts and a tied one.
    """
    cells = [Cell(engine, "full", family) for family in FAMILIES for engine in ENGINES]
    engines = list(ENGINES)
    for number, (name, family) in enumerate(FAMILIES.items()):
        kinds = ["bf16", "frozen", "lora"]
        kinds += [] if not family.can_tie else ["untied" if family.is_tied else "tied"]
        kinds += ["experts"] if family.lora_parameters else []
        for step, kind in enumerate(kinds):
            places = (number + step, number + step + 3)
            cells += [Cell(engines[place % len(engines)], kind, name) for place in places]
    for engine in FRAMEWORKS:
        families = _FEWER_FAMILIES.get(engine, ("llama", "qwen3_moe", "gemma2"))
        cells += [Cell(engine, "full", family) for family in families]
        if engine.startswith(("accelerate", "trl")):
            cells.append(Cell(engine, "lora", "qwen3"))
    return {cell.name: cell for cell in cells if _can_train(cell)}


CELLS = _list_cells()
"""Name -> cell."""

CHOSEN = (
    "fsdp1-sharded-full-qwen3_moe",
    "fsdp1-sharded-frozen-gpt2",
    "fsdp2-sharded-full-whisper",
    "fsdp1-full-tied-qwen3",
    "fsdp2-sharded-untied-gemma2",
    "fsdp2-sharded-lora-olmo2",
    "fsdp2-full-tied-olmo2",
    "zero1-bf16-falcon",
    "zero1-lora-qwen2",
    "zero2-full-mixtral",
    "zero2-lora-gemma3_text",
    "zero3-full-deepseek_v3",
    "zero3-lora-phi3",
    "zero3-shards-full-qwen2",
    "zero3-shards-bf16-phi3",
    "megatron-tp2pp2-full-gpt2",
)
"""Cells of `make oracle`: each engine and each kind, and the families that are hardest."""


def choose_cells(names: list[str]) -> list[Cell]:
    """Return the cells whose names contain one of the texts; without texts all."""
    return [cell for name, cell in CELLS.items() if not names or any(text in name for text in names)]
