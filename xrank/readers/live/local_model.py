"""A rank's own part of a model in memory: its tensors, and how it describes them to the other ranks."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from xrank.errors import LayoutError, UsageError
from xrank.formats.pickles import is_extra_state
from xrank.formats.rank_state import RankRecord
from xrank.layout import LayoutMap
from xrank.readers.live.modules import LocatedTensors, check_model, locate_tensors, read_flat_module, view_key
from xrank.readers.megatron.live import is_megatron, megatron_mesh, megatron_tensors
from xrank.readers.records import Subject

if TYPE_CHECKING:
    import torch


class LocalModel(Struct, frozen=True, eq=False):
    """A rank's part of a model; nothing is copied."""

    tensors: Mapping[str, torch.Tensor]
    """Local parts by name, detached, with any device and strides."""
    views: tuple[torch.Tensor, ...]
    """The same parts, each once; tied names share one."""
    view_of: Mapping[str, int]
    """Name -> index in `views`."""
    record: RankRecord
    """The rank, and the places of its parts."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied name -> name, of parameters inside flat buffers; others are tied by a common view."""

    def find_global_shapes(self, *, has_layouts: bool) -> dict[str, tuple[int, ...] | None]:
        """Return the global shape of each tensor; None where this rank does not know it.

        If layouts located the tensors, plain ones may be parts.
        """
        found: dict[str, tuple[int, ...] | None] = {}
        for name, tensor in self.tensors.items():
            known = self.record.tensors.get(name)
            is_plain = not has_layouts and (known is None or known.layout is None)
            found[name] = tuple(tensor.shape) if is_plain else None if known is None else known.shape
        return found

    def describe(self) -> str:
        """Return everything except the values, as text for `xrank.readers.live.ranks`."""
        return json.dumps(
            {
                "record": self.record.to_json(),
                "aliases": dict(self.aliases),
                "views": [view.numel() * view.element_size() for view in self.views],
                "tensors": {
                    name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.view_of[name]]
                    for name, tensor in self.tensors.items()
                },
            },
            separators=(",", ":"),
        )


def local_model(
    model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any],
    *,
    layouts: LayoutMap | None = None,
    mesh: Any = None,
    rank: int,
    world_size: int,
    is_read: bool = False,
) -> LocalModel:
    """Return this rank's part of a module, or of a state dict.

    A module's tensors have its plain names, without the parts that wrappers add (DistributedDataParallel,
    torch.compile, checkpoint_wrapper). Values that are not tensors (``_extra_state``) are left out.

    Args:
        model: a module, or tensors by name: plain ones, DTensors, or both. For a module that Megatron cut, or a list of
            its chunks, the names are the whole model's (`xrank.readers.megatron.live`).
        layouts: the layouts of plain tensors; a plain tensor without one is whole on every rank that has it.
        mesh: the layout of a Megatron module's ranks (`xrank.readers.megatron.live`); other models do not need it.
        rank: this rank.
        world_size: the number of ranks.
        is_read: whether the tensors are read, not filled. Parameters that ZeRO-3 or FSDP1 has flattened are then read
            where they are; a module that is filled must not have them, as an optimizer holds further copies.
    """
    import torch

    # DeepSpeed's engine is a module without names of its own.
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    model = model.module if engine is not None and isinstance(model, engine) else model
    check_model(model)
    flat = read_flat_module(model, world_size) if is_read else None
    located: LocatedTensors | None
    if flat is not None:
        located = locate_tensors(flat.tensors, flat.layouts, rank)
    else:
        _check_zero3(model)
        located = _megatron_tensors(model, layouts, mesh, rank, world_size) if is_megatron(model) else None
    if located is None:
        named = _state_dict(model) if isinstance(model, torch.nn.Module) else model
        if isinstance(named, Mapping):
            named = {name: value for name, value in named.items() if not is_extra_state(name)}
        located = locate_tensors(named, layouts, rank)
    views: list[torch.Tensor] = []
    view_of: dict[str, int] = {}
    known: dict[Hashable, int] = {}
    for name, tensor in located.local.items():
        # Tied names share one view, which is how other ranks learn of the tie.
        key = view_key(tensor)
        if key not in known:
            known[key] = len(views)
            views.append(tensor.detach())
        view_of[name] = known[key]
    record = RankRecord(
        run_id=None,
        attempt=None,
        step=None,
        rank=rank,
        world_size=world_size,
        host=socket.gethostname(),
        meshes=located.meshes,
        tensors=located.records,
    )
    tensors = {name: views[view_of[name]] for name in located.local}
    return LocalModel(tensors, tuple(views), view_of, record, {} if flat is None else flat.aliases)


def _megatron_tensors(
    model: Any, layouts: LayoutMap | None, mesh: Any, rank: int, world_size: int
) -> LocatedTensors | None:
    """Return the tensors of a module that Megatron cut, and their places; None if the map describes every tensor."""
    found = megatron_mesh(mesh, rank, world_size)
    if found is not None:
        return megatron_tensors(model, found, layouts=layouts, rank=rank)
    if layouts is not None and not isinstance(model, list | tuple):
        return None
    raise LayoutError(
        "Megatron cut the module, but the layout of its ranks is unknown",
        rank=rank,
        got=f"{world_size} ranks, no mesh",
        want="a mesh with axes among tp, pp, ep, etp, dp and cp",
        next_step='give mesh=, such as DeviceMesh.parse_grid("pp=2 dp=1 tp=2")',
    )


def _check_zero3(model: Any) -> None:
    """Refuse parameters that ZeRO-3 has partitioned: they have no elements left, and only an attribute records that."""
    import torch

    for chunk in model if isinstance(model, list | tuple) else [model]:
        is_module = isinstance(chunk, torch.nn.Module)
        for name, tensor in chunk.named_parameters() if is_module else getattr(chunk, "items", tuple)():
            # deepspeed/runtime/zero/partition_parameters.py: _convert_to_deepspeed_param
            whole = getattr(tensor, "ds_shape", None)
            if whole is not None and tuple(tensor.shape) != tuple(whole):
                raise Subject(name).make(
                    UsageError,
                    "it is a placeholder of DeepSpeed's ZeRO-3, whose values are partitioned",
                    f"shape {tuple(tensor.shape)}",
                    f"shape {tuple(whole)}",
                    "give the module itself to export_model or iter_model; for other calls, make them within "
                    "deepspeed.zero.GatheredParameters(list(module.parameters()))",
                )


def _state_dict(module: torch.nn.Module) -> dict[str, Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    flat = getattr(fsdp, "FullyShardedDataParallel", None)
    if flat is not None and any(isinstance(child, flat) for child in module.modules()):
        raise UsageError(
            "the module is an FSDP1 module, which gathers itself whole on every rank",
            got="FullyShardedDataParallel",
            want="a module of fully_shard (FSDP2), or a state dict",
            next_step="make FSDP with device_mesh=, and give its SHARDED_STATE_DICT, which then contains DTensors: "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model)",
        )
    if next(module.parameters(), None) is None and not module.state_dict():
        return {}  # such as a pipeline stage without weights, for which the function below raises
    # This function removes the wrappers' names and gathers nothing.
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return dict(get_model_state_dict(module))
