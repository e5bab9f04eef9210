"""Fills the tensors of a live module from files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.decisions.load_plan import Load
from xrank.lending.tensor_target import TensorTarget
from xrank.making.manifest_digests import ManifestDigests
from xrank.plan.buffers import FileSource
from xrank.plan.executor import Budget, Outcome, execute
from xrank.plan.windows import WINDOW_NBYTES
from xrank.readers.live.local_model import LocalModel
from xrank.readers.live.module_tensors import FilledModule, count_changes
from xrank.teams.team import Team

if TYPE_CHECKING:
    pass

__all__ = ["fill_module"]


def fill_module(
    module: FilledModule, local: LocalModel, load: Load, digests: ManifestDigests, budget: Budget, team: Team
) -> Outcome:
    """Read every byte of a rank's load to its place in the module.

    Args:
        module: the live module.
        local: its tensors on this rank.
        load: the proven plan.
        digests: compares whole tensors with the source's manifest.
        budget: threads and buffers.
        team: the ranks that load together.

    Raises:
        CorruptError, ContradictionError: the source is not what its metadata promised.
        RankFailedError: another rank failed.
    """
    views = [local.views[view] for view in load.views]
    plan = load.plan
    target, source = TensorTarget(views), FileSource(plan.source)
    try:
        outcome = execute(
            plan,
            source,
            target,
            budget=budget,
            # As shares of files: of a record that others read, too, nobody reads the rest for its checksum alone.
            shares={index: (range(-(-file.output.nbytes // WINDOW_NBYTES)),) for index, file in enumerate(plan.files)},
            finish_share=digests.compare,
            cancelled=team.make_failure_check(),
        )
        source.check_unchanged()
    finally:
        source.close()
        target.finish()
        count_changes(module, views)
    return outcome
