"""Workspaces for tests: a small model, cut and left by every rank one after the other in this process.

The cuts are made by torch alone, so what comes out of a gather is judged by what went in and by nothing of xrank's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from xrank.formats.rank_state import RankRecord, TensorRecord
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.storage.places import state_file_name
from xrank.workspace.nfs import NFSWorkspace

MESH = DeviceMesh((2, 2), ("dp", "tp"))
LAYOUTS = {
    "embed.weight": "[v/tp, h]",  # rows; a replica for each dp
    "up.weight": "[f/tp/~dp, h]",  # rows, cut twice: no replica
    "down.weight": "[h, f/tp]",  # columns
    "norm.weight": "[h]",  # whole on every rank
    "steps": "[n]",
}
CONFIG = {"model_type": "toy", "inner_width": 4, "rope": {"theta": 10000.0, "type": "none"}}
RUN, STEP = "run-7f3a", 2000


def made_model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the whole tensors; no two elements of one are likely to be equal, none is 0."""
    random = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.rand(16, 8, generator=random) + 0.5,
        "up.weight": (torch.rand(12, 8, generator=random) + 0.5).to(torch.bfloat16),
        "down.weight": torch.rand(8, 12, generator=random) + 0.5,
        "norm.weight": torch.rand(8, generator=random) + 0.5,
        "steps": torch.tensor([3, 1, 2**40]),
    }


def wide_model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a model of 460 KB: rows, columns, twice cut, replicas; tensors of many windows, and many of none."""
    random = torch.Generator().manual_seed(seed)
    model = {**made_model(seed), "empty": torch.empty(0, 8)}
    for i in range(4):
        model[f"{i}.up"] = torch.rand(120, 101, generator=random)
        model[f"{i}.down"] = torch.rand(101, 120, generator=random)
        model[f"{i}.flat"] = torch.rand(96, 80, generator=random).to(torch.bfloat16)
        model[f"{i}.norm"] = torch.rand(101, generator=random)
    return model


def layout_of(name: str) -> str:
    """Return how a tensor of the wide model is cut."""
    plain = {"up": "[f/tp, h]", "down": "[h, f/tp]", "flat": "[f/tp/~dp, h]", "norm": "[h]", "empty": "[f, h]"}
    return LAYOUTS.get(name) or plain[name.rpartition(".")[2]]


def cut(whole: torch.Tensor, layout: str, mesh: DeviceMesh, rank: int) -> torch.Tensor:
    """Return a rank's part of a tensor: each dim cut by `torch.chunk` once for each of its axes, in order."""
    place = mesh.coordinate(rank)
    part = whole
    for dim, axes in enumerate(TensorLayout.parse(layout).axes):
        for axis in axes:
            chunks = part.chunk(mesh.axis_length(axis), dim)
            none = part.narrow(dim, 0, 0)
            part = chunks[place[axis]] if place[axis] < len(chunks) else none
    return part.clone()


def leave(
    folder: Path,
    model: Mapping[str, torch.Tensor] | None = None,
    *,
    layouts: Mapping[str, str] = LAYOUTS,
    mesh: DeviceMesh = MESH,
    ranks: Iterable[int] | None = None,
    world_size: int | None = None,
    run_id: str | None = RUN,
    step: int | None = STEP,
    config: Mapping[str, Any] = CONFIG,
    recorded: bool = True,
) -> dict[str, torch.Tensor]:
    """Let ranks leave their parts of a model in a workspace; return the whole model.

    Args:
        folder: the workspace.
        model: whole tensors by name.
        layouts: how each is cut.
        mesh: over which ranks.
        ranks: those that write; all if None.
        world_size: the mesh's if None.
        run_id: of the run.
        step: of training.
        config: of the model.
        recorded: whether the states say their layouts.
    """
    whole = made_model() if model is None else dict(model)
    told = LayoutMap(mesh)
    for name in whole:
        told[name] = layouts[name]
    for rank in mesh.ranks if ranks is None else ranks:
        parts = {name: cut(tensor, layouts[name], mesh, rank) for name, tensor in whole.items()}
        workspace = NFSWorkspace(folder, rank=rank, world_size=world_size or mesh.size, run_id=run_id)
        workspace.write_configs_and_weights(dict(config), parts, layouts=told if recorded else None, step=step)
    return whole


def leave_plain(
    folder: Path, rank: int, weights: Mapping[str, torch.Tensor], config: object = None, **more: Any
) -> None:
    """Save a state as NVIDIA ModelOpt does: without a record, unless one is given as ``xrank``."""
    folder.mkdir(exist_ok=True)
    state = {"config": dict(CONFIG) if config is None else config, "weight": dict(weights), **more}
    torch.save(state, state_of(folder, rank))


def record(rank: int, world_size: int, tensors: Mapping[str, TensorRecord] | None = None, **fields: Any) -> str:
    """Return a record's text as a state holds it, made by hand."""
    made = {"run_id": RUN, "attempt": None, "step": STEP, "host": "made", **fields}
    return RankRecord(rank=rank, world_size=world_size, tensors=dict(tensors or {}), **made).to_json()


def state_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's state."""
    return folder / state_file_name(rank)


def rewrite(folder: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Load a rank's state, let `change` alter it in place, and save it again."""
    path = state_of(folder, rank)
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def rewrite_record(folder: Path, rank: int, **fields: Any) -> None:
    """Change fields of a state's record."""

    def change(state: dict[str, Any]) -> None:
        found = RankRecord.from_json(state["xrank"], file="made")
        kept = {name: getattr(found, name) for name in RankRecord.__struct_fields__}
        state["xrank"] = RankRecord(**{**kept, **fields}).to_json()

    rewrite(folder, rank, change)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def copied(folder: Path) -> Path:
    """Copy a workspace aside, to mend it with later; return where."""
    aside = folder.parent / f"{folder.name}.good"
    shutil.copytree(folder, aside)
    return aside


def model_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a Hugging Face folder, as safetensors' own reader finds them."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_holds(folder: Path, model: Mapping[str, torch.Tensor]) -> None:
    """Compare a Hugging Face folder with whole tensors: names, dtypes, shapes and every byte."""
    found = model_in(folder)
    assert sorted(found) == sorted(model)
    for name, want in model.items():
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape), name
        assert raw(found[name]) == raw(want), name


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
