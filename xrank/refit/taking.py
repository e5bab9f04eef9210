"""The entrance of an engine's ranks: they take weights from a trainer, or from versions in a folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from xrank.errors import UsageError, names_own_arguments, option, require
from xrank.ranks.store import group_place
from xrank.readers.live.modules import FilledModule
from xrank.recipes.live_arguments import check_meeting, check_types, live_layouts
from xrank.recipes.options import parse_size
from xrank.refit.receive import TakenWeights, take_into
from xrank.refit.targets import LoaderTarget, ModuleTarget

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from xrank.layout import LayoutMap
    from xrank.refit.recording import Loader


@names_own_arguments
def take_weights(
    target: FilledModule,
    address: str | os.PathLike[str] | None = None,
    *,
    deltas: str | os.PathLike[str] | None = None,
    base_model: str | os.PathLike[str] | None = None,
    layouts: LayoutMap | None = None,
    mesh: Any = None,
    loader: Loader | None = None,
    relay: bool = False,
    proof: bool = False,
    max_memory: str | int = "64MB",
    wire: str | None = None,
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800.0,
) -> TakenWeights:
    """Connect an engine to a trainer's weights; every rank of the engine calls this, before or after the trainer.

    The engine is a separate job, with its own world or none. Each `TakenWeights.update` then loads a step. The first
    update makes a plan: it combines the trainer's layouts with those of the target, and proves that each element of
    each tensor is written once.

    Args:
        target: the rank's module or state dict, as for `xrank.load_model`, under Hugging Face's names; or, with
            `loader`, the engine's module in its own form.
        address: the directory of the trainer's `xrank.offer_weights`; None with `deltas`.
        deltas: a folder of versions, or its URL, instead of a trainer's address: each update loads the newest version,
            and waits until it is newer than the engine's. The first update reads all tensors, later ones only those
            that have changed.
        base_model: the folder of the model on which the first version in `deltas` is based; None: one version is a
            whole model.
        layouts: the layouts of plain tensors that are sharded; other plain tensors are whole.
        mesh: the mesh of `layouts`, if they have none, or of a Megatron module.
        loader: the engine's own function that takes (Hugging Face name, tensor) pairs and fills `target`, such as
            vLLM's ``model.load_weights``. It runs once on tensors without memory, to record its copies; if it changes a
            tensor on the way, it gets that whole tensor at each update (`UpdateReport.whole`). No layouts are needed.
        relay: whether other engines may copy this rank's step from its memory, with `TakenWeights.copy_from_engines`.
            Each update then computes digests of the rank's bytes.
        proof: whether each update compares digests of the engine's tensors with those of a trainer that was made with
            ``offer_weights(..., proof=True)``, and `TakenWeights.check` can find later changes. It reads all bytes of
            the rank once more. With `deltas` it is only for `TakenWeights.check`, as versions have checksums.
        max_memory: bytes of the buffers for tensors that are cast, strided, on a device, or of another host.
        wire: ``"mooncake"``: Mooncake's transfer engine copies runs of bytes, from a trainer with the same `wire`.
            None: the kernel copies on one host, sockets between hosts.
        group: the ranks of the engine, which load each step together; None: all ranks of the world.
        timeout_seconds: how long the engine's ranks may take to arrive.

    Raises:
        UsageError: an argument is wrong, or a tensor has no memory to fill.

    Example:
        >>> import torch, xrank
        >>> weights = xrank.take_weights({"weight": torch.zeros(2, 2)}, "refit")
        >>> offer = xrank.offer_weights({"weight": torch.ones(2, 2)}, "refit", snapshot=True)
        >>> _ = offer.publish(7)
        >>> weights.update().moved_nbytes
        16
        >>> weights.close(); offer.close()
    """

    def make_target() -> ModuleTarget:
        check_types(layouts, mesh)
        if loader is None:
            return ModuleTarget(target, live_layouts(layouts, mesh), mesh, *(group_place() or (0, 1)))
        if layouts is not None or mesh is not None:
            raise UsageError(
                f"{option('loader')} shows how it cuts tensors; {option('layouts')} and {option('mesh')} have no use",
                next_step="leave layouts and mesh out",
            )
        return LoaderTarget(target, loader)

    if deltas is not None or address is None:
        from xrank.refit.followed_deltas import FollowedWeights, check_no_address  # other engines have a trainer

        require("torch", "take_weights")
        check_meeting(group, timeout_seconds)
        check_no_address(address, {"relay": relay, "wire": wire})
        if deltas is None:
            raise UsageError("nothing says where the weights come from", next_step="give address= or deltas=")
        nbytes = parse_size(max_memory, "max_memory")
        return FollowedWeights(make_target, deltas, base_model, nbytes, group, proof=proof)
    return take_into(
        make_target,
        address,
        call="take_weights",
        relay=relay,
        proof=proof,
        max_memory=max_memory,
        wire=wire,
        group=group,
        timeout_seconds=timeout_seconds,
    )
