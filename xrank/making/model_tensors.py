"""Yield the whole tensors of a live model, one after another, on the ranks that take them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from types import TracebackType
from typing import TYPE_CHECKING, Self

from xrank.decisions.transformed_plan import plan_held_tensors
from xrank.decisions.transforms import apply_transform
from xrank.lending.lent_model import LentModel, ModelRequest, lend_model
from xrank.making.whole_tensors import TensorsAhead, WholeTensors, split_budget
from xrank.plan.planner import select_tensors
from xrank.plan.replicas import prefer_own_copies
from xrank.teams.agreement import check_alike
from xrank.teams.team import Team

if TYPE_CHECKING:
    import torch

    Tensors = Generator[tuple[str, torch.Tensor], None, None]


class ModelTensors(Iterator[tuple[str, "torch.Tensor"]]):
    """The iterator of `iter_model`, for one thread. Garbage collection closes it."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._tensors)

    def close(self) -> None:
        """Stop taking tensors, and wait for the ranks that still take them. A second call does nothing."""
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
            self._tensors.throw(error)  # `Team.together` reports it to all other ranks
        except BaseException as raised:
            if raised is not error:
                raise


def make_tensors(ask: Callable[[], ModelRequest], team: Team, errors: AbstractContextManager[None]) -> Tensors:
    """Yield an empty tensor once the plan is made, then the tensors that this rank takes.

    `errors` wraps the whole iteration.
    """
    import torch

    with errors, ExitStack() as loan, team.together():
        request, _ = team.agree("the arguments", ask, ModelRequest.describe, check_alike(team.ranks))
        model = lend_model(request, team, loan)
        with closing(model.source):
            try:
                yield "", torch.empty(0)  # the plan is made
                if request.takers == "all" or team.is_first:
                    yield from _take_tensors(request, model, team)
            except GeneratorExit:
                pass  # the caller stopped early, which is not a failure
            # Ranks lend their parts until the last rank has taken its tensors.
            team.meet("the end of the iteration")
            model.source.check_unchanged()


def _take_tensors(request: ModelRequest, model: LentModel, team: Team) -> Tensors:
    """Yield all tensors, made ahead. The calling thread applies the transform when it takes a tensor."""
    options, gather = request.options, model.gather
    budget, room_nbytes = split_budget(options.max_memory_nbytes, options.num_workers)
    transforms = gather.transforms
    compared = {tensor.output.name: tensor for tensor in plan_held_tensors(gather.plan, transforms).tensors}
    names = [output.name for output in gather.selection.outputs] if transforms is None else transforms.order
    plan = select_tensors(gather.plan, [compared[name] for name in names])
    if team.size > 1:
        plan = prefer_own_copies(plan, model.holder, team.position)  # all replicas have been compared
    whole = WholeTensors(plan, model.source, budget)
    failures = team.make_failure_check()
    outputs = {} if transforms is None else {tensor.name: tensor.outputs for tensor in transforms.tensors}
    ahead = TensorsAhead(whole, [whole.nbytes(number) for number in range(len(names))], room_nbytes, failures)
    with closing(ahead):
        # This frame keeps no reference to a yielded tensor, so that the caller can free it.
        for number, name in enumerate(names):
            if name not in outputs:
                yield name, ahead.take(number)
                continue
            assert transforms is not None
            made = apply_transform(transforms.function, name, ahead.take(number), outputs[name])
            for output in outputs[name]:
                yield output.name, made.pop(0).detach()
