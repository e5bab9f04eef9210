"""Reports of both sides of an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xrank.refit.targets import Filling
    from xrank.refit.transfer import Transfer


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The result of `WeightsOffer.publish`; all but `seconds` is the same on all ranks of the trainer."""

    step: int
    takers: tuple[str, ...]
    """Engine ranks that have taken the step."""
    failed: Mapping[str, str]
    """Engine ranks that have failed and therefore not taken the step, and why: those that ended or were stopped since
    the last report, and those whose last `update` raised."""
    seconds: float


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The result of `TakenWeights.update` on one engine rank."""

    step: int
    nbytes: int
    """Bytes that this rank holds and has filled."""
    moved_nbytes: int
    """Bytes that were read from trainer ranks for them."""
    direct_nbytes: int
    """Bytes of `moved_nbytes` that the kernel copied straight to their places."""
    seconds: float
    """Duration of the copies and their confirmation, without the wait for the step."""
    copy_seconds: float
    """Duration of the copies alone."""
    plan_seconds: float
    """Duration of the planning; 0 if an earlier update has planned."""
    whole: Mapping[str, int]
    """Tensors that the engine's loader took whole because their way could not be recorded, and their bytes."""
    unused: tuple[str, ...]
    """Tensors of the trainer of which this rank holds no part."""


def make_update_report(
    step: int,
    filling: Filling,
    transfer: Transfer,
    moved: int,
    seconds: float,
    copy_seconds: float,
    plan_seconds: float,
) -> UpdateReport:
    """Return the report of an update in which `moved` bytes were read."""
    return UpdateReport(
        step=step,
        nbytes=transfer.nbytes,
        moved_nbytes=moved,
        direct_nbytes=transfer.direct_nbytes if moved else 0,
        seconds=seconds,
        copy_seconds=copy_seconds,
        plan_seconds=plan_seconds,
        whole={name: tensor.nbytes for name, tensor in filling.whole.items()},
        unused=filling.unused,
    )
