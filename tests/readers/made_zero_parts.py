"""DeepSpeed checkpoints of pipelines and of models with experts, for tests; `made_zero` cuts their weights.

That the formats are DeepSpeed's own is what `tests/oracle/test_deepspeed_parts.py` shows.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.readers.made_zero import (
    MadeModel,
    Tensors,
    Zero,
    changed_entries,
    config_of,
    deepspeed_classes,
    model_state,
    optimizer_state,
)

EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts."


@dataclass
class MadePipeline:
    """The trained groups of each stage under their names in the pipeline, and the layers' other tensors."""

    stages: Sequence[Sequence[Tensors]]
    layers: Mapping[int, str]
    """Layer with a file -> the prefix of its names."""
    frozen: Tensors = field(default_factory=dict)
    buffers: Sequence[Tensors] = ()
    """By stage."""

    @property
    def expected(self) -> dict[str, torch.Tensor]:
        trained = {n: t for groups in reversed(self.stages) for group in groups for n, t in group.items()}
        return {**self.frozen, **{n: t for buffers in reversed(self.buffers) for n, t in buffers.items()}, **trained}


def made_pipeline(seed: int = 0) -> MadePipeline:
    """Three stages: an embedding tied to the head, whose second use leaves no file; a function; a frozen layer."""
    random = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random) + 0.5

    tied = {"tied_modules.embed.weight": rand(5, 3)}
    scale = {"tied_modules.embed.scale": rand(2)}
    return MadePipeline(
        stages=[
            [{**tied, "1.up.weight": rand(4, 3)}, {"1.up.bias": rand(4)}],
            [{"3.up.weight": rand(4, 3)}, {"3.up.bias": rand(4)}],
            [{**tied, "5.up.weight": rand(4, 3)}, {"5.up.bias": rand(4)}],
        ],
        layers={0: "tied_modules.embed.", 1: "1.", 3: "3.", 4: "4.", 5: "5.", 6: "6."},
        frozen={"4.weight": rand(3, 3).bfloat16()},
        buffers=[{**scale, "1.mean": rand(3)}, {}, scale],
    )


def write_pipeline(folder: Path, model: MadePipeline, how: Zero, suffix: str = "") -> None:
    """Write a pipeline's checkpoint. Without a stage of ZeRO, `BF16_Optimizer` has the weights, or no optimizer.

    Args:
        folder: gets the checkpoint's folder.
        model: the tensors.
        how: as for `write_zero`; `num_ranks` is the number of ranks of each stage.
        suffix: of the layers' numbers in the files' names: ``-model_00`` with a model axis.
    """
    place = _make(folder, how)
    num_stages = len(model.stages)
    with deepspeed_classes():
        for stage, groups in enumerate(model.stages):
            own = MadeModel(groups, buffers=model.buffers[stage])
            changes = {"mp_world_size": num_stages, **how.changed_state}
            state = changed_entries(model_state(own, groups, how, 0), changes) | {"module": None}
            torch.save(state, place / f"mp_rank_{stage:02d}_model_states.pt")
            for rank in range(how.num_ranks if how.stage or how.is_bf16_optimizer else 0):
                optimizer = changed_entries(optimizer_state(groups, how, rank), how.changed_optimizer)
                name = f"{how.prefix}zero_pp_rank_{rank}_mp_rank_{stage:02d}{how.suffix}"
                torch.save({"optimizer_state_dict": optimizer, "ds_config": config_of(how)}, place / name)
        has_masters = how.stage or how.is_bf16_optimizer
        others = {**model.frozen, **{name: tensor for buffers in model.buffers for name, tensor in buffers.items()}}
        trained = {n: t.bfloat16() if has_masters else t for n, t in model.expected.items() if n not in others}
        for number, prefix in model.layers.items():
            named = {n: t for n, t in {**others, **trained}.items() if n.startswith(prefix)}
            content = OrderedDict({name.removeprefix(prefix): tensor for name, tensor in named.items()})
            torch.save(content, place / f"layer_{number:02d}{suffix}-model_states.pt")


@dataclass
class MadeExperts:
    """A dense model, and the experts of one layer."""

    dense: MadeModel
    experts: Sequence[Tensors]
    """Trained tensors of each expert, under their names in the expert."""
    untrained: Sequence[Tensors]

    @property
    def expected(self) -> dict[str, torch.Tensor]:
        own = {f"{EXPERT}{number}.{name}": t for number, each in enumerate(self.experts) for name, t in each.items()}
        more = {f"{EXPERT}{number}.{name}": t for number, each in enumerate(self.untrained) for name, t in each.items()}
        return {**self.dense.expected, **own, **more}


def made_experts(seed: int = 0) -> MadeExperts:
    """Four experts with a buffer each, beside a dense model."""
    random = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random) + 0.5

    dense = MadeModel(
        [{"embed.weight": rand(5, 3), "moe.deepspeed_moe.gate.wg.weight": rand(4, 3)}],
        buffers={"mean": rand(3)},
        shared={"head.weight": "embed.weight"},
    )
    experts = [{"up.weight": rand(3, 3), "up.bias": rand(3)} for _ in range(4)]
    return MadeExperts(dense, experts, [{"gain": rand(2)} for _ in range(4)])


def write_experts(folder: Path, model: MadeExperts, how: Zero, ep_size: int = 2, *, is_last: bool = False) -> None:
    """Write a checkpoint of `how.num_ranks` ranks, of which `ep_size` share a set of experts.

    Args:
        folder: gets the checkpoint's folder.
        model: the tensors.
        how: as for `write_zero`.
        ep_size: ranks that share all experts.
        is_last: whether ranks with the same experts follow each other (``use_data_before_expert_parallelism``).
    """
    place, share = _make(folder, how), len(model.experts) // ep_size
    own = replace(how, num_ranks=how.num_ranks // ep_size)
    more = {"use_data_before_expert_parallelism": is_last}
    with deepspeed_classes():
        groups = [*model.dense.groups, _local(model.experts[:share])]
        changes = (
            {"param_shapes": [OrderedDict({n: t.shape for n, t in g.items()}) for g in groups]} if how.stage else {}
        )
        buffers = [*model.dense.buffers, *_local(model.untrained[:share])]
        state = model_state(model.dense, model.dense.groups, how, 0) | {"buffer_names": buffers, "num_experts": [4]}
        state["ds_config"] = {**config_of(how), **more}
        torch.save(changed_entries(state, {**changes, **how.changed_state}), place / "mp_rank_00_model_states.pt")
        for rank in range(how.num_ranks if how.stage else 0):
            share_of, part = divmod(rank, own.num_ranks) if is_last else (rank % ep_size, rank // ep_size)
            local = _local(model.experts[share_of * share : (share_of + 1) * share])
            optimizer = _joined(optimizer_state(model.dense.groups, how, rank), optimizer_state([local], own, part))
            saved = {"optimizer_state_dict": optimizer, "ds_config": {**config_of(how), **more}}
            torch.save(saved, place / f"{how.prefix}zero_pp_rank_{rank}_mp_rank_00{how.suffix}")
        for number, (trained, untrained) in enumerate(zip(model.experts, model.untrained, strict=True)):
            rounded = {name: tensor.bfloat16() if how.stage else tensor for name, tensor in trained.items()}
            content = {f"{EXPERT}{number}.{name}": tensor for name, tensor in {**untrained, **rounded}.items()}
            torch.save(content, place / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")


def _local(experts: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    return {f"{EXPERT}{number}.{name}": t for number, each in enumerate(experts) for name, t in each.items()}


def _joined(dense: Mapping[str, Any], experts: Mapping[str, Any]) -> dict[str, Any]:
    """Return one optimizer's state of both groups: values that are lists have an entry for each group."""
    joined = {key: [*value, *experts[key]] if isinstance(value, list) else value for key, value in dense.items()}
    inner = [each["base_optimizer_state"] for each in (dense, experts)]
    state = dict(enumerate(moments for each in inner for moments in each["state"].values()))
    joined["base_optimizer_state"] = {
        "state": state,
        "param_groups": [g for each in inner for g in each["param_groups"]],
    }
    return joined


def _make(folder: Path, how: Zero) -> Path:
    place = folder / f"global_step{how.step}"
    place.mkdir(parents=True)
    (folder / "latest").write_text(place.name)
    return place


def rename_saved(file: Path, content: bytes) -> None:
    """Put another file's content in a file's place as if it had been saved there."""
    stem = file.name.removesuffix(".pt")
    pattern = rb"(layer_\d+[-\w]*|(\w+_)?mp_rank_\d+)_(model|optim)_states|layer_\d+(-model_\d+)?-model_states"
    found = re.search(pattern, content)
    assert found is not None and len(found[0]) == len(stem)
    file.write_bytes(content.replace(found[0], stem.encode()))
