"""The tensors that an engine rank fills: a module's with layouts, or those that an engine's own loader fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from xrank.decisions.load_plan import plan_load
from xrank.errors import UsageError
from xrank.layout import LayoutMap
from xrank.lending.tensor_target import check_fillable
from xrank.plan.output import OutputFile, OutputTensor
from xrank.plan.planner import Plan, make_plan
from xrank.plan.source import StoredModel
from xrank.readers.live.local_model import local_model
from xrank.readers.live.module_tensors import FilledModule, check_materialised, count_changes, list_tensors
from xrank.refit.held_memory import MemoryPlaces, find_moved, list_places
from xrank.refit.trainer_model import TrainerModel
from xrank.words import list_text

if TYPE_CHECKING:
    import torch

    from xrank.refit.recording import Fill, Recording

Loader: TypeAlias = "Callable[[Iterable[tuple[str, torch.Tensor]]], object]"
"""An engine's function that takes a model's tensors by Hugging Face's names, such as ``model.load_weights``."""


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """The proven copies that fill an engine rank's tensors."""

    plan: Plan
    """One file for each of `tensors`."""
    tensors: tuple[torch.Tensor, ...]
    """Detached."""
    unused: tuple[str, ...] = ()
    """Tensors of the trainer of which the rank holds no part."""
    whole: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors among `tensors` that the loader takes whole afterwards."""
    fills: tuple[Fill, ...] = ()
    """Constants that the loader writes."""
    cast: frozenset[str] = frozenset()
    """Tensors that another engine had cast before this rank copied them from it."""


class Target(Protocol):
    """The tensors of an engine rank."""

    def list_places(self) -> MemoryPlaces:
        """Return the places of all tensors now; if they change, `plan` must be called again."""

    def plan(self, model: TrainerModel) -> Filling:
        """Return the proven copies from a trainer's model."""

    def begin(self, filling: Filling) -> None:
        """Prepare the tensors before the copies."""

    def finish(self, filling: Filling) -> None:
        """Complete the tensors after the copies, and count their changes for autograd."""


class ModuleTarget:
    """A module or state dict, whose layouts are known as for `xrank.load_model`.

    Args:
        module: the rank's part.
        layouts: the layouts of plain tensors, with their mesh.
        mesh: the mesh of a Megatron module.
        rank: this rank in the engine's world.
        world_size: the engine's number of ranks.

    Raises:
        UsageError: a tensor has no memory.
    """

    def __init__(self, module: FilledModule, layouts: LayoutMap | None, mesh: Any, rank: int, world_size: int) -> None:
        check_materialised(module)
        self._module, self._layouts, self._mesh = module, layouts, mesh
        self._rank, self._world_size = rank, world_size

    def list_places(self) -> MemoryPlaces:
        """Return the places of the module's tensors."""
        return list_places(self._module)

    def plan(self, model: TrainerModel) -> Filling:
        """Return the proven copies into the module; errors as `xrank.load_model`."""
        local = local_model(
            self._module, layouts=self._layouts, mesh=self._mesh, rank=self._rank, world_size=self._world_size
        )
        source = model.name_as(local.find_global_shapes(has_layouts=self._layouts is not None))
        load = plan_load(local, source, self._layouts, model.padded_names)
        if load.missing:
            raise UsageError(
                f"{load.missing[0]}: the trainer has no such tensor",
                tensor=load.missing[0],
                got=f"{list_text(load.missing)} in the engine alone",
                want="tensors that the trainer has",
                next_step="give both sides the same model, and tie the same tensors in the engine as in the trainer",
            )
        for view, tensor in zip(load.views, load.plan.tensors, strict=True):
            check_fillable(tensor.output.name, local.views[view])
        held = set(load.names)
        unused = tuple(shard.name for shard in source.shards if shard.name not in held)
        return Filling(load.plan, tuple(local.views[view] for view in load.views), unused)

    def begin(self, filling: Filling) -> None:
        """Do nothing: the copies fill all elements."""

    def finish(self, filling: Filling) -> None:
        """Count the changes of all tensors."""
        count_changes(self._module, filling.tensors)


class LoaderTarget:
    """The parameters that an engine's own loader fills. The loader runs once on stand-ins, which shows its copies.

    Args:
        module: the engine's module; the loader fills all of its parameters.
        load: the loader.

    Raises:
        UsageError: a parameter has no memory.
    """

    def __init__(self, module: FilledModule, load: Loader) -> None:
        check_materialised(module)
        self._module, self._load = module, load

    def list_places(self) -> MemoryPlaces:
        """Return the places of the module's tensors."""
        return list_places(self._module)

    def plan(self, model: TrainerModel) -> Filling:
        """Return the proven copies into the loader's parameters.

        Raises:
            UsageError: the loader leaves elements of a parameter unwritten, or writes some twice.
        """
        shards = {shard.name: shard for shard in model.source.shards}
        shapes = {name: (shard.dtype, tuple(shard.shape)) for name, shard in shards.items()}
        places = self.list_places()
        try:
            from xrank.refit.recording import record_loader  # it imports torch

            recording = record_loader(self._load, _list_parameters(self._module), shapes)
        finally:
            moved = find_moved(places, self.list_places())
            if moved is not None:
                raise UsageError(
                    f"{moved[0]}: the loader replaces the parameter in place of filling it",
                    tensor=moved[0],
                    got=moved[2],
                    want=moved[1],
                    next_step="make the engine's model anew, and give its tensors with layouts=, or use iter_model",
                )
        files: list[OutputFile] = []
        tensors: list[torch.Tensor] = []
        for copy in recording.copies:
            files.append(OutputFile.bare(copy.output))
            tensors.append(copy.target)
        whole = {name: _make_staging(name, shards[name].dtype, shapes[name][1]) for name in recording.whole}
        for name, tensor in whole.items():
            files.append(OutputFile.bare(OutputTensor(name, shards[name].dtype, shapes[name][1])))
            tensors.append(tensor)
        plan = make_plan(model.source, files)
        return Filling(plan, tuple(tensors), _find_unused(model.source, recording), whole, tuple(recording.fills))

    def begin(self, filling: Filling) -> None:
        """Write the loader's constants."""
        import torch

        with torch.no_grad():
            for fill in filling.fills:
                fill.target.fill_(fill.value)

    def finish(self, filling: Filling) -> None:
        """Let the loader take its whole tensors, and count the changes of all tensors."""
        import torch

        if filling.whole:
            with torch.no_grad():
                self._load(iter(list(filling.whole.items())))
        count_changes(self._module, ())


def _list_parameters(module: FilledModule) -> list[tuple[str, torch.Tensor]]:
    """Return the distinct parameters of a module, or tensors of a state dict: no loader need fill buffers."""
    import torch

    named = list_tensors(module)
    if not isinstance(module, Mapping):
        named = [(name, tensor) for name, tensor in named if isinstance(tensor, torch.nn.Parameter)]
    found = {(tensor.data_ptr(), tensor.numel()): (name, tensor.detach()) for name, tensor in reversed(named)}
    return list(reversed(found.values()))


def _make_staging(name: str, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    import torch

    from xrank.dtypes import dtype as find_dtype

    return torch.empty(tuple(shape), dtype=getattr(torch, find_dtype(dtype).torch_name), device="cpu")


def _find_unused(source: StoredModel, recording: Recording) -> tuple[str, ...]:
    used = {copy.output.name for copy in recording.copies} | set(recording.whole)
    return tuple(shard.name for shard in source.shards if shard.name not in used)
