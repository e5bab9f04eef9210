"""Follow: an engine's ranks take the versions that a trainer leaves in a folder, without a connection to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrank.engine.executor import Budget, execute
from xrank.engine.file_writing import hash_beside
from xrank.engine.planner import Plan
from xrank.engine.sources import open_source
from xrank.engine.tensor_target import TensorTarget
from xrank.engine.windows import share_all
from xrank.errors import RankTimeoutError, UsageError, XrankError, names_own_arguments
from xrank.layout.nest_table import int_array
from xrank.layout.stored_model import StoredModel
from xrank.ranks.failure import Deadline
from xrank.ranks.store import group_place
from xrank.ranks.team import find_group_team
from xrank.readers.deltas import (
    Chain,
    find_chain,
    identify_version,
    list_versions,
    number_of,
    read_chain,
    read_whole,
)
from xrank.readers.hugging_face.folder import read_facts, read_step
from xrank.readers.live.models import LiveModel
from xrank.recipes.found_source import read_config
from xrank.recipes.options import default_workers
from xrank.recipes.sources import open_base_model
from xrank.refit.directory import TrainerModel
from xrank.refit.proof import EngineProof, plan_proof
from xrank.refit.receive import TakenWeights
from xrank.refit.targets import CountedSource, MemoryPlaces, ModuleTarget, TargetPlan, UpdateReport
from xrank.storage import places
from xrank.storage.url import is_url

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_LOOK_SECONDS = 0.25
"""Time between two looks for a version; four times as much in a store, which counts requests."""


class _Held(Struct, frozen=True):
    """The version that this rank's tensors hold."""

    number: int
    identity: str | None
    """See `identify_version`."""
    places: MemoryPlaces


class FollowedWeights(TakenWeights):
    """An engine rank's weights, made by ``xrank.take_weights(deltas=...)``. One thread may use it."""

    def __init__(
        self,
        make_target: Callable[[], ModuleTarget],
        folder: str | os.PathLike[str],
        base_model: str | os.PathLike[str] | None,
        max_memory_nbytes: int,
        group: ProcessGroup | None,
        *,
        proof: bool,
    ) -> None:
        self._target, self._group = make_target(), group
        self._folder = places.enter(folder)
        self._base = None if base_model is None else open_base_model(base_model).path
        self._budget = Budget.from_memory(max_memory_nbytes, default_workers())
        self._held: _Held | None = None
        self._number, self._is_closed = (group_place() or (0, 1))[0], False
        self._proof = EngineProof(self._number) if proof else None
        self.step: int | None = None

    @names_own_arguments
    def update(self, step: int | None = None, *, timeout_seconds: float = 600.0) -> UpdateReport:
        """Take the newest version, and wait for it if this engine holds it already; every rank makes this call.

        All tensors are filled at first, and later those that have changed since the version that is held. Each record
        is compared with its checksum before a byte of it is used. The tensors are written in place: no request may use
        them during the call.

        Args:
            step: the step of the version to take, or its number if it records no step; None: the newest.
            timeout_seconds: how long the trainer may take to write a version, and the other ranks to arrive.

        Raises:
            UsageError: the version of the step is past and not there, or the engine's tensors do not fit.
            RankTimeoutError: no new version came in time.
            RankFailedError: another rank of the engine has failed; `step` is None, and the next call fills all tensors.
            XrankError: as `xrank.apply_deltas`, and as `xrank.load_model` before a tensor changes.
        """
        if self._is_closed:
            raise UsageError("the weights are closed", next_step="call take_weights again")
        deadline, place = Deadline(timeout_seconds), os.path.join(self._folder, "engine")
        team = find_group_team(self._group, place, timeout_seconds=timeout_seconds, call="update", joins_launch=False)
        with team.together():

            def choose(_: object, ranks: Sequence[int | None]) -> list[Any]:
                return list(self._wait_for_version(None if None in ranks else self._held, step, deadline))

            _, (number, path) = team.agree(
                "the version", lambda: None, lambda _: None if self._held is None else self._held.number, choose
            )
            started = monotonic()
            places.enter(self._folder)
            chain = None if read_facts(path) is None else find_chain(path, self._base)
            model = read_whole(path) if chain is None else read_chain(chain)
            source = self._name(model, path if chain is None else chain.base)
            (planned, plan), _ = team.agree(
                "the plan",
                lambda: self._plan(source, chain),
                lambda _: None,
                lambda _, __: None,
            )
            plan_seconds = monotonic() - started
            held = _Held(number, _identify(path), self._target.list_places())
            step, self.step, self._held = _step_of(path, number), None, None
            copied = monotonic()
            # What no version changes is filled, and compared with the state of the chain's base, at first alone.
            with hash_beside(plan.source.hashes if plan is planned.plan else (), team) as finish_hashes:
                moved = self._fill(planned, plan, team.make_failure_check())
                finish_hashes()
            copied = monotonic() - copied
            if self._proof is not None:
                self._proof.record(plan_proof(planned, source, is_compared=False).parts)
                self._checked_places = held.places
            team.meet("the version is taken")
        self._held, self.step = held, step
        whole = {name: tensor.nbytes for name, tensor in planned.whole.items()}
        times = monotonic() - started, copied, plan_seconds
        return UpdateReport(step, plan.nbytes, moved, 0, *times, whole, planned.unused, {}, {})

    def copy_from_engines(self, *, timeout_seconds: float = 600.0) -> UpdateReport:
        """Refuse: an engine that starts late takes the newest version by `update`."""
        raise UsageError("weights that follow versions cannot be copied from engines", next_step="call update")

    def _end(self, error: BaseException | None) -> None:
        self._is_closed = True

    def _wait_for_version(self, held: _Held | None, step: int | None, deadline: Deadline) -> tuple[int, str]:
        """Return a version's number and folder: that of a step, or the newest once it is another one than is held."""
        while True:
            places.enter(self._folder)
            with suppress(FileNotFoundError):  # the trainer has not made it yet, or begins anew
                versions = list_versions(self._folder)
                number = _find_step(versions, step)
                if number is not None and (step is not None or held is None or self._is_new(held, versions)):
                    return number, versions[number]
            if deadline.has_passed:
                raise RankTimeoutError(
                    f"there is no new version in {self._folder}",
                    file=self._folder,
                    got="none" if held is None else f"version {held.number}, which the engine has",
                    want="a later version, or a version of a different run",
                    next_step="let the trainer write the next version, then repeat the call",
                )
            sleep(_LOOK_SECONDS * (4 if is_url(self._folder) else 1))

    @staticmethod
    def _is_new(held: _Held, versions: Mapping[int, str]) -> bool:
        newest = max(versions)
        # A run that begins anew writes versions of the same numbers.
        return newest != held.number or _identify(versions[newest]) != held.identity

    @staticmethod
    def _name(model: StoredModel, base: str) -> TrainerModel:
        config_path = os.path.join(base, "config.json")
        config = read_config(config_path) if places.is_file(config_path) else None
        return TrainerModel(LiveModel(model, int_array([]), int_array([])), model, config, frozenset())

    def _plan(self, model: TrainerModel, chain: Chain | None) -> tuple[TargetPlan, Plan]:
        """Return the plan of all tensors, and of those that have changed since the version that is held."""
        planned = self._target.plan(model)
        changed = None if planned.fills else self._find_changed(chain, planned.plan.source)
        if changed is None:
            return planned, planned.plan
        files = tuple(
            file
            for file in planned.plan.files
            if any(
                tensor.output.name in planned.whole or np.isin(tensor.copies.record, changed).any()
                for tensor in file.tensors
            )
        )
        return planned, replace(planned.plan, files=files)

    def _find_changed(self, chain: Chain | None, model: StoredModel) -> list[int] | None:
        """Return the records that have changed since the version that is held; None: it is not one of the chain."""
        held = self._held
        if chain is None or held is None or held.places != self._target.list_places():
            return None
        folders = {version.facts.version: version.path for version in chain.versions}
        if chain.is_own and (first := number_of(chain.base)) is not None:
            folders[first] = chain.base
        if held.number not in folders or _identify(folders[held.number]) != held.identity:
            return None
        later = {folder for number, folder in folders.items() if number > held.number}
        is_later = [os.path.dirname(file.path) in later for file in model.files]
        return [
            record
            for record, changes in model.records.changed.items()
            if any(is_later[int(model.records.file[change.body])] for change in changes)
        ]

    def _fill(self, planned: TargetPlan, plan: Plan, cancelled: Callable[[], bool]) -> int:
        """Fill the tensors of a part of a plan; return the bytes that were read."""
        tensors = dict(zip(map(id, planned.plan.files), planned.tensors, strict=True))
        target = TensorTarget({number: tensors[id(file)] for number, file in enumerate(plan.files)})
        self._target.begin(planned)
        with closing(open_source(plan.source)) as files:
            source = CountedSource(files)
            try:
                execute(plan, source, target, budget=self._budget, shares=share_all(plan), cancelled=cancelled)
                files.check_unchanged()
            finally:
                target.finish()
        self._target.finish(planned)
        return source.nbytes


def _step_of(folder: str, number: int) -> int:
    step = read_step(folder)
    return number if step is None else step


def _find_step(versions: Mapping[int, str], step: int | None) -> int | None:
    """Return the version of a step, or the newest; None if it is not there yet, UsageError if it never will be."""
    for number in sorted(versions, reverse=True):
        found = _step_of(versions[number], number) if step is not None else number
        if step in (None, found):
            return number
        if step is not None and found < step:
            return None
    if versions and step is not None:
        want, next_step = "an existing or later step, or None for the newest", "use the newest version"
        raise UsageError(f"step {step} is past", got="no version of it", want=want, next_step=next_step)
    return None


def _identify(folder: str) -> str | None:
    with suppress(XrankError):
        return identify_version(folder)
    return None  # it is being removed


def check_no_address(address: object, surplus: Mapping[str, object]) -> None:
    """Refuse arguments that need a trainer beside ``deltas``."""
    name = "address" if address is not None else next((name for name, value in surplus.items() if value), None)
    if name is not None:
        raise UsageError(
            "versions in a folder are loaded without a trainer",
            got=f"deltas= and {name}=",
            want="one of them",
            next_step=f"omit {name}=, or take the weights from a trainer without deltas=",
        )
