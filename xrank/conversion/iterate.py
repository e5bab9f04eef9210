"""Iterate: a model in the memory of many ranks, one whole tensor after another, for whoever loads it elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from xrank import environment
from xrank.decisions.given_layouts import live_layouts
from xrank.decisions.live_arguments import check_calling, check_said, dtype_choice, in_python
from xrank.decisions.options import GatherOptions
from xrank.decisions.transformed_plan import compared_plan
from xrank.decisions.transforms import Transform, transformed
from xrank.errors import UsageError
from xrank.lending.lent_model import AskedModel, LentModel, lend_model
from xrank.making.whole_tensors import TensorsAhead, WholeTensors, shared_budget
from xrank.plan.planner import tensor_plan
from xrank.plan.replicas import nearest
from xrank.teams.agreement import check_alike
from xrank.teams.launches import find_group_team
from xrank.teams.team import Team

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from xrank.layout import LayoutMap

    Tensors = Generator[tuple[str, torch.Tensor], None, None]

__all__ = ["ModelTensors", "iter_model"]


def iter_model(
    model_or_state_dict: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any],
    *,
    layouts: LayoutMap | None = None,
    mesh: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    transform: Transform | None = None,
    ranks: Literal["first", "all"] = "first",
    max_memory: str | int = "64MB",
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800,
) -> ModelTensors:
    """Iterate over a model that lies in the memory of many ranks: (Hugging Face name, whole tensor on the CPU).

    Every rank makes this call, and iterates, or closes what it got. When the call returns, all ranks have the same
    proven plan, replicas have been compared, and the tensors are those of the folder that `xrank.export_model` would
    make, in the model's order. They are made ahead of who takes them, in buckets that the budget bounds; one that was
    yielded is the caller's, in memory of its own. Nobody may change the model before all ranks have ended.

    On ranks that get nothing the iterator waits, lends its part to the others, and ends when they have ended. Whoever
    stops early ends well: others that get tensors go on, those that get none end with it. In a ``with`` block, what
    the body raises is named on all other ranks; a bare ``for`` cannot tell it from a ``break``. A rank that dies is
    named on all.

    Messages between hosts go through the folder of ``XRANK_WORKSPACE``, or the working directory, which all must see.

    Args:
        model_or_state_dict: as `xrank.export_model` takes it.
        layouts: as there.
        mesh: as there.
        recipe: as there.
        dtype: as there; there is no base model.
        transform: as there; called by the thread that iterates, on each rank that gets tensors.
        ranks: who gets the tensors: ``"first"``, the first rank of the group, or ``"all"``.
        max_memory: bounds the buffers of a rank and what is made and not yet taken; one larger tensor may exceed it.
        group: the ranks; None: all of the world.
        timeout_seconds: how long ranks may take to come. Once they have met, a death is noticed in seconds.

    Raises:
        XrankError: as `xrank.export_model`; before anything is yielded, or by the iterator.
    """
    place = os.path.join(environment.environ().get("XRANK_WORKSPACE") or os.curdir, "model")
    with in_python():
        check_calling(group, timeout_seconds)
        team = find_group_team(group, place, timeout_seconds=timeout_seconds)

    def asked() -> AskedModel:
        check_said(layouts, mesh)
        options = GatherOptions(dtype=dtype_choice(dtype), max_memory=max_memory)
        if ranks not in ("first", "all"):
            raise UsageError(f"ranks= takes no {ranks!r}", got=repr(ranks), want="'first' or 'all'")
        shared_budget(options.max_memory_nbytes, options.num_workers)
        return AskedModel(
            model_or_state_dict,
            options,
            live_layouts(layouts, mesh),
            mesh,
            recipe,
            transform=transform,
            timeout_seconds=timeout_seconds,
            call="iter_model",
            takers=ranks,
        )

    tensors = _tensors(asked, team)
    next(tensors)  # comes when all is planned
    return ModelTensors(tensors)


class ModelTensors(Iterator[tuple[str, "torch.Tensor"]]):
    """What `iter_model` returns; one thread uses it. Dropping it is closing it."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)

    def close(self) -> None:
        """Want no more; waits for the ranks that still do. Twice is once."""
        self._tensors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._tensors.throw(error)  # all other ranks hear of it
        except BaseException as raised:
            if raised is not error:
                raise


def _tensors(ask: Callable[[], AskedModel], team: Team) -> Tensors:
    """Yield what this rank gets, after one that is none."""
    import torch

    with in_python(), ExitStack() as lent, team.together():
        asked, _ = team.agree("what is asked", ask, AskedModel.told, check_alike(team.ranks))
        model = lend_model(asked, team, lent)
        with closing(model.source):
            try:
                yield "", torch.empty(0)  # the plan is made
                if asked.takers == "all" or team.is_first:
                    yield from _taken(asked, model, team)
            except GeneratorExit:
                pass  # it wants no more, which is no failure
            # While any rank still takes tensors all others lend theirs.
            team.meet("all that was wanted")
            model.source.check_unchanged()


def _taken(asked: AskedModel, model: LentModel, team: Team) -> Tensors:
    """Yield all tensors, made ahead; those that are transformed are so when they are taken, by this thread."""
    options, gather = asked.options, model.gather
    budget, room_nbytes = shared_budget(options.max_memory_nbytes, options.num_workers)
    transforms = gather.transforms
    compared = {tensor.output.name: tensor for tensor in compared_plan(gather.plan, transforms).tensors}
    names = [output.name for output in gather.selection.outputs] if transforms is None else transforms.order
    plan = tensor_plan(gather.plan, [compared[name] for name in names])
    if team.size > 1:
        plan = nearest(plan, model.holder, team.position)  # all replicas have been compared
    whole = WholeTensors(plan, model.source, budget)
    failures = team.make_failure_check()
    outputs = {} if transforms is None else {tensor.name: tensor.outputs for tensor in transforms.tensors}
    ahead = TensorsAhead(whole, [whole.nbytes(number) for number in range(len(names))], room_nbytes, failures)
    with closing(ahead):
        # No tensor is bound to a name here while it is yielded: it is the caller's alone.
        for number, name in enumerate(names):
            if name not in outputs:
                yield name, ahead.take(number)
                continue
            assert transforms is not None
            made = transformed(transforms.function, name, ahead.take(number), outputs[name])
            for output in outputs[name]:
                yield output.name, made.pop(0).detach()
