"""Publish: a trainer's ranks lend their weights to engines of other jobs, step by step."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct

from xrank.engine.transforms import Transform
from xrank.engine.value_digests import digest_parts
from xrank.errors import (
    ContradictionError,
    CorruptError,
    RankFailedError,
    RankTimeoutError,
    UsageError,
    XrankError,
    names_own_arguments,
    option,
    require,
    require_linux,
)
from xrank.ranks.failure import Deadline
from xrank.ranks.loans import MemoryOffer, is_mooncake, share_offers
from xrank.ranks.memory import LocalBytes, local_bytes
from xrank.ranks.team import Team, find_group_team, path_text
from xrank.recipes.lent_model import LentModel, ModelPart, ModelRequest, copy_part, lend_model, locate_part
from xrank.recipes.live_arguments import check_meeting, check_types, live_layouts
from xrank.recipes.options import GatherOptions, default_workers, dtype_choice
from xrank.recipes.quantization import Quantization
from xrank.recipes.sources import open_base_model
from xrank.refit.directory import Address, RankRegistration, find_trainer_ranks, read_trainer_model
from xrank.refit.peers import (
    EngineParts,
    EngineWatch,
    OutcomeBlock,
    Pause,
    PeerRank,
    Phase,
    RankStatus,
    StatusBlock,
    StepOutcome,
    TrainerRanks,
    make_failure,
    open_siblings,
    wait_while,
)
from xrank.refit.prepared_part import PreparedPart, prepare_part
from xrank.refit.proof import DigestTable, HeldPart, find_lent
from xrank.refit.published_versions import PublishedVersions, check_whole_every
from xrank.refit.targets import MemoryPlaces, count_versions, find_moved, list_places
from xrank.storage.url import clean_path
from xrank.words import list_text, plural

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from xrank.layout import LayoutMap

_SIBLING_SECONDS = 0.05
"""Time between two looks at the trainer's other ranks, and at the tensors, while no engine rank waits for checks."""


class PublishReport(Struct, frozen=True):
    """The result of `WeightsOffer.publish`; all but `seconds` is the same on all ranks of the trainer."""

    step: int
    takers: tuple[str, ...]
    """Engine ranks that have taken the step."""
    failed: Mapping[str, str]
    """Engine ranks that have failed and therefore not taken the step, and why: those that ended or were stopped since
    the last report, and those whose last `update` raised."""
    seconds: float


@names_own_arguments
def offer_weights(
    model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any],
    address: str | os.PathLike[str],
    *,
    layouts: LayoutMap | None = None,
    mesh: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    base_model: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    transform: Transform | None = None,
    quantize: str | None = None,
    quantize_ignore: str | Sequence[str] = (),
    dialect: str | None = None,
    adapter_only: bool = False,
    snapshot: bool = False,
    proof: bool = False,
    wire: str | None = None,
    on_engine_failure: str = "report",
    deltas: str | os.PathLike[str] | None = None,
    whole_every: int | None = None,
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800.0,
) -> WeightsOffer:
    """Offer a trainer's weights to engines of other jobs; every rank of the trainer makes this call.

    When it returns, all ranks have proven that together they hold each element of each tensor, have compared their
    replicas, and engines find the offer at the address. Nothing can be read before `WeightsOffer.publish`. The offer
    keeps the addresses of the tensors: training changes them in place, as optimizers do.

    Args:
        model: as `xrank.export_model`; so are `layouts`, `mesh`, `recipe` and `base_model`.
        address: a directory that the ranks of both jobs see; it is created if it is absent. One trainer at a time.
        layouts: the layouts of plain tensors.
        mesh: the mesh of `layouts`, if they have none.
        recipe: from training names to Hugging Face's.
        base_model: a model folder whose config and names count, for modules without a config, such as Megatron's.
        dtype: element type of floating-point tensors, which each rank casts at `publish`: as `xrank.export_model`.
        transform: an `xrank.Quantization`, as `quantize`; or a function as of `xrank.export_model`: at each `publish`
            one rank gathers a whole tensor, calls the function, and offers the result. Casts and transforms need host
            memory for the offered bytes.
        quantize: offer quantized matrices, as `xrank.gather_checkpoint` writes them; so are `quantize_ignore` and
            `dialect`. At each `publish` the ranks read each other's parts, band by band, and each makes its share.
        quantize_ignore: modules that stay as they are.
        dialect: the names of the quantized tensors.
        adapter_only: whether to offer only the LoRA adapter of a PeftModel, under the names in PEFT's folders, for
            engines of `xrank.take_adapter`.
        snapshot: whether `publish` copies this rank's part into host memory and returns at once. The copy is as large
            as the part. Without a snapshot, `publish` returns when the engines have copied the step.
        proof: whether `publish` computes digests of the offered weights, for engines of
            ``take_weights(..., proof=True)``. It reads all bytes of this rank once more.
        wire: ``"mooncake"``: engines may also copy with Mooncake's transfer engine; its ports require no token. None:
            the kernel copies on one host, sockets between hosts.
        on_engine_failure: what `publish` does when engine ranks fail or end. ``"report"``: it names them in its report
            (`PublishReport.failed`), and the training continues. ``"raise"``: it raises on all ranks of the trainer,
            once for each failure.
        deltas: a folder that all ranks see, or its URL in a store, into which each `publish` also writes a version for
            engines elsewhere: first a whole model, ``weight_v000000``, then what has changed since the version before
            (`xrank.make_delta`). Each rank keeps a copy of its share of the tensors. If a version cannot be written,
            `publish` raises after the engines have taken the step, and the next one writes a whole model.
        whole_every: number of versions after which one is whole again; None: all others are deltas.
        group: the ranks of the trainer; None: all of the world.
        timeout_seconds: how long ranks may take to arrive.

    Raises:
        UsageError: a different trainer offers its weights at the address.
        XrankError: as `xrank.export_model`, before anything is offered.

    Example:
        >>> import torch, xrank
        >>> trained, served = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> with xrank.offer_weights(trained, "refit", snapshot=True) as offer:
        ...     report = offer.publish(1)
        ...     with xrank.take_weights(served, "refit") as weights:
        ...         weights.update().step, served.weight.equal(trained.weight)
        (1, True)
    """
    require("torch", "offer_weights")
    require_linux("offer_weights")
    check_meeting(group, timeout_seconds)
    place = Address(address)
    team = find_group_team(
        group, os.path.join(place.path, "offer"), timeout_seconds=timeout_seconds, call="offer_weights"
    )

    def read_arguments() -> ModelRequest:
        check_types(layouts, mesh)
        is_mooncake(wire, "offer_weights")
        if on_engine_failure not in ("report", "raise"):
            raise UsageError(
                f"{option('on_engine_failure')} must be one of report, raise",
                got=repr(on_engine_failure),
                next_step="give one of these",
            )
        check_whole_every(whole_every, deltas)
        return ModelRequest(
            model,
            GatherOptions(
                workers=None if team.size == 1 else max(1, default_workers() // team.num_here),
                dtype=dtype_choice(dtype),
                quantize=quantize,
                quantize_ignore=quantize_ignore,
                dialect=dialect,
            ),
            live_layouts(layouts, mesh),
            mesh,
            recipe,
            base_model,
            transform=transform,
            timeout_seconds=timeout_seconds,
            call="offer_weights",
            adapter_only=adapter_only,
            place=place.path,
        )

    def describe(request: ModelRequest) -> dict[str, str | None]:
        return {
            **request.describe(),
            "snapshot": str(snapshot),
            "proof": str(proof),
            "quantization": repr(transform) if isinstance(transform, Quantization) else None,
            "wire": wire,
            "on_engine_failure": on_engine_failure,
            "deltas": path_text(deltas),
            "whole_every": str(whole_every),
        }

    with ExitStack() as loan:
        with team.together():
            request, _ = team.agree("the arguments", read_arguments, describe, team.check_alike)
            options = request.options
            is_prepared = request.transform is not None or options.quantize is not None or options.dtype != "keep"
            part = OwnPart(team, is_snapshot=snapshot, is_prepared=is_prepared, has_proof=proof)
            parts, lent = _lend(request, team, loan, part, place, by_mooncake=is_mooncake(wire, "offer_weights"))
            loan.callback(lent.source.close)
            if deltas is None and part.prepared is None:
                lent.source.close()  # no rank reads another one's part any more
            dropped = () if part.prepared is None else part.prepared.dropped
            registration = _register(place, team, request, parts, dropped, has_proof=proof)
            loan.callback(place.remove, registration)
            part.plan_digests(registration)
        siblings = open_siblings("trainer", team, parts)
        ranks = TrainerRanks(part.block, part.outcomes, siblings, is_first=team.is_first)
        raises = on_engine_failure == "raise"
        versions = None
        if deltas is not None:
            versions = PublishedVersions(clean_path(deltas), lent, team, group, whole_every, timeout_seconds)
        return WeightsOffer(
            place, registration, ranks, part, partial(list_places, model), loan.pop_all(), versions, raises=raises
        )
    raise AssertionError


class OwnPart:
    """This rank's tensors: lent in place, copied aside for each step, or prepared (cast, quantized, transformed)."""

    def __init__(self, team: Team, *, is_snapshot: bool, is_prepared: bool, has_proof: bool) -> None:
        self.rank, self.is_snapshot, self.is_prepared, self._team = team.rank, is_snapshot, is_prepared, team
        self.block, self.outcomes = StatusBlock(RankStatus(committed=-1)), OutcomeBlock()
        self.table = DigestTable() if has_proof else None
        self._digested: list[HeldPart] = []
        self.prepared: PreparedPart | None = None
        self.lent: Sequence[LocalBytes] = ()
        """What engines read."""
        self.tensors: Sequence[torch.Tensor] = ()
        self._copies: Sequence[LocalBytes] = ()
        self.check: Callable[[], object] = lambda: None
        """Raises if another trainer rank has failed; the offer replaces it at each step."""

    def view(self, tensors: Sequence[torch.Tensor]) -> Sequence[LocalBytes]:
        """Return the bytes to lend of these tensors, which it keeps."""
        self.tensors = tensors
        if not self.is_snapshot or self.is_prepared:
            return [local_bytes(tensor) for tensor in tensors]
        self._copies = copy_part(tensors, rank=self.rank, num_here=self._team.num_here, room_nbytes=None)
        return self._copies

    def refill(self) -> None:
        """Copy the present values over those of the last snapshot."""
        for tensor, copy in zip(self.tensors, self._copies, strict=True):
            row = copy.find_row(0, copy.nbytes) if copy.nbytes else None
            if row is not None:
                local_bytes(tensor).read_into(0, row)

    @property
    def shown(self) -> list[LocalBytes]:
        """What others read behind the tensors: digests, if there are any, outcomes, and the status."""
        return [*([] if self.table is None else [self.table]), self.outcomes, self.block]

    def plan_digests(self, registration: RankRegistration) -> None:
        """Find the parts of the model that this rank digests at each step."""
        if self.table is not None:
            self._digested = find_lent(read_trainer_model(registration), self.rank, self.lent)

    def digest(self, step: int) -> None:
        """Digest the values that are lent for a step, and show the result."""
        if self.table is not None:
            blocks = digest_parts([one.part for one in self._digested], default_workers())
            self.table.write((0, 0, step), self._digested, blocks)

    def synchronize(self) -> None:
        """Wait for the work that is queued on the tensors' devices."""
        import torch

        for device in {tensor.device for tensor in self.tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)

    def count_versions(self) -> list[int]:
        """Return torch's counts of changes of the tensors; none of a plain snapshot, which nothing changes."""
        return [] if self.is_snapshot and not self.is_prepared else count_versions(self.tensors)


def _lend(
    request: ModelRequest,
    team: Team,
    loan: ExitStack,
    part: OwnPart,
    place: Address,
    *,
    by_mooncake: bool,
) -> tuple[list[dict[str, Any]], LentModel]:
    """Lend this rank's tensors; return all ranks' parts as their engines read them, and as the trainer's ranks do."""
    located = locate_part(request, team, part.view)
    check = partial(_check_no_trainer, place)
    if not part.is_prepared:
        part.lent = located.views
        located = ModelPart(located.description, [*located.views, *part.shown], located.config)
        part.check = team.make_failure_check()
        lent = lend_model(
            request,
            team,
            loan,
            part=located,
            check=check,
            across_hosts=True,
            failures=lambda: part.check(),
            by_mooncake=by_mooncake,
        )
        return list(lent.parts), lent
    # The ranks of the trainer alone read the tensors in place.
    part.check = team.make_failure_check()
    lent = lend_model(request, team, loan, part=located, check=check, failures=lambda: part.check())
    prepared, _ = team.agree(
        "the prepared tensors",
        lambda: prepare_part(lent, part.tensors, team, is_snapshot=part.is_snapshot),
        lambda _: None,
        lambda _, __: None,
    )
    loan.callback(prepared.close)
    part.lent = prepared.views
    offer = MemoryOffer([*prepared.views, *part.shown], across_hosts=True, by_mooncake=by_mooncake, secret=team.secret)
    loan.callback(offer.close)
    content = {**lent.parts[team.position], "model": prepared.description}
    parts = share_offers(team, "the lent tensors", offer, content)
    part.prepared = prepared
    return parts, lent


def _check_no_trainer(place: Address) -> None:
    """Raise a `UsageError` if a live trainer offers its weights at the address, or may do so on another host."""
    if (registration := place.read_trainer()) is None:
        return
    rank, offer = find_trainer_ranks(registration)[0]
    try:
        peer = PeerRank(f"trainer rank {rank}", rank, offer)
    except CorruptError:
        return
    status, has_ended = peer.try_read(), not peer.may_return
    peer.close()
    if status.phase is Phase.ENDED if status is not None else has_ended:
        return
    raise UsageError(
        f"a different trainer offers its weights at {place.path}",
        file=registration.path,
        got=f"an offer of {peer.place}",
        next_step="close the other offer, or choose another directory",
    )


def _register(
    place: Address,
    team: Team,
    request: ModelRequest,
    parts: Sequence[Mapping[str, Any]],
    dropped: Sequence[str],
    *,
    has_proof: bool,
) -> RankRegistration:
    """Register the trainer on the first rank, and return the registration on every rank.

    Other ranks know its content if they must find what they digest.
    """
    base = None if request.base_model is None or not team.is_first else open_base_model(request.base_model)
    named = {"config": None if base is None else base.config, "names": [] if base is None else list(base.tensors)}
    if has_proof:
        named = json.loads(team.broadcast("the base model's names", json.dumps(named) if team.is_first else None))
    content = {
        "ranks": list(team.ranks),
        "parts": list(parts),
        "recipe": path_text(request.recipe),
        "aliases": {} if request.layouts is None else dict(request.layouts.aliases),
        **named,
        "dropped": list(dropped),
        "proof": has_proof,
    }
    made = place.register_trainer(content) if team.is_first else None
    offer_id = team.broadcast("the offer's registration", None if made is None else made.id)
    return made or RankRegistration(offer_id, content, place.trainer_path)


class WeightsOffer:
    """A trainer rank's offer, made by `xrank.offer_weights`. One thread may use it; it is a context manager, too."""

    def __init__(
        self,
        place: Address,
        registration: RankRegistration,
        ranks: TrainerRanks,
        part: OwnPart,
        list_places: Callable[[], MemoryPlaces],
        loan: ExitStack,
        versions: PublishedVersions | None,
        *,
        raises: bool,
    ) -> None:
        self._place, self._registration, self._ranks, self._block = place, registration, ranks, ranks.block
        self._part, self._list_places, self._places = part, list_places, list_places()
        self._loan, self._versions, self._raises = loan, versions, raises
        self._engines = EngineWatch(place, registration.number, is_first=ranks.is_first)
        self._lock = threading.Lock()
        self._is_closed = False

    @names_own_arguments
    def publish(self, step: int, *, timeout_seconds: float = 600.0) -> PublishReport:
        """Make the present weights visible as those of a step; every rank of the trainer makes this call.

        Without a snapshot it returns when all engine ranks at the address have taken the step: the weights must not
        change before, and torch's counts of changes are compared. Engine ranks that serve and have not called `update`
        are waited for, too. With a snapshot it waits only for engine ranks that still read the last one, and for the
        copies of all ranks of the trainer.

        All ranks of the trainer come to the same outcome: that of the first rank.

        Args:
            step: larger than that of the last call.
            timeout_seconds: how long engine ranks may take. The step is then closed, and they take the next one.

        Raises:
            UsageError: the step is not larger than the last one, or the offer is closed.
            ContradictionError: a tensor has changed its shape or its memory, or was changed in place while it was
                visible; another trainer has replaced this offer; or another rank publishes another step.
            RankFailedError: another trainer rank has failed or ended, and no engine takes the step. With
                ``on_engine_failure="raise"`` also: an engine rank has failed, ended or was stopped; all others have
                taken the step, and the next step may be published.
            RankTimeoutError: engine ranks have not taken the step, or a trainer rank has not come to it.
        """
        started, deadline = monotonic(), Deadline(timeout_seconds)
        with self._lock:
            self._check_call(step)
            outcome = None
            try:
                self._check_places()
                self._engines.begin_step()
                self._part.synchronize()
                outcome = (self._publish_copy if self._part.is_snapshot else self._publish_in_place)(step, deadline)
                if outcome.is_over and outcome.error is not None:
                    raise outcome.error
            except BaseException as raised:
                error = raised
                if outcome is None and isinstance(raised, RankFailedError):
                    # The rank may have ended because of another one's failure, which it has noted before.
                    error = self._find_noted_failure() or error
                self._set(Phase.FAILED, step, f"{type(error).__name__}: {error}")
                if self._ranks.is_first and isinstance(error, RankFailedError | RankTimeoutError):
                    self._ranks.decide(StepOutcome(step, error=error, is_over=True))
                raise error from raised.__cause__
            if not self._part.is_snapshot:
                self._set(Phase.CLOSED, step)
            if outcome.error is not None:  # if the caller then closes, others see why
                cause = f"{type(outcome.error).__name__}: {outcome.error}"
                self._block.update(cause=cause)
                raise outcome.error
            if self._versions is not None:
                check = partial(self._check_values, self._part.count_versions(), step)
                self._versions.write(step, check, self._part)
        return PublishReport(step, outcome.takers, outcome.failed, monotonic() - started)

    @names_own_arguments
    def wait_for_takers(self, count: int, *, timeout_seconds: float = 600.0) -> None:
        """Wait until that many engine ranks are at the address; this rank alone waits.

        Raises:
            RankTimeoutError: fewer came in time.
        """
        deadline, pause = Deadline(timeout_seconds), Pause()
        with self._lock:
            while True:
                found = self._engines.look(self._block.value.step)
                here = len(found.waiting) + len(found.taken)
                if here >= count:
                    return
                if deadline.has_passed:
                    raise RankTimeoutError(
                        f"{here} of {plural(count, 'engine rank')} connected to {self._place.path} in "
                        f"{timeout_seconds:g} s",
                        file=self._place.path,
                        next_step="check that the engine's ranks call take_weights with this directory",
                    )
                pause()

    def close(self) -> None:
        """End the offer; engines that wait or read raise an error. Further calls do nothing.

        Raises:
            RankFailedError: another rank of the trainer has ended without a call of this. The offer is closed.
        """
        if (failure := self._end(None)) is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = self._end(error)
        if failure is not None and error is None:
            raise failure

    def _end(self, error: BaseException | None) -> XrankError | None:
        """Close everything, and return how another trainer rank has ended, if that ends the offer."""
        with self._lock:
            if self._is_closed:
                return None
            self._is_closed = True
            try:
                if error is not None:  # before the others see this rank close
                    self._note_failure(error)
                cause = self._block.value.cause if error is None else f"{type(error).__name__}: {error}"
                lost = self._ranks.leave(cause)
                failure = self._find_noted_failure()
                # A rank that has closed cannot be read, as one that was killed; but it has removed the registration.
                if failure is None and lost is not None and self._place.has(self._registration):
                    self._note_failure(lost)
                    failure = lost
            finally:
                self._ranks.close()
                self._loan.close()
                self._engines.close()
            return failure

    def _note_failure(self, error: BaseException) -> None:
        """Write the reason of the offer's end into the directory, for ranks that come to their calls later."""
        if not self._ranks.peers or self._find_noted_failure() is not None:
            return
        if not isinstance(error, RankFailedError):
            rank = self._part.rank
            error = make_failure(f"trainer rank {rank}", rank, f"{type(error).__name__}: {error}")
        self._place.write_failure(self._registration, error)

    def _find_noted_failure(self) -> XrankError | None:
        return self._place.read_failure(self._registration) if self._ranks.peers else None

    def _publish_in_place(self, step: int, deadline: Deadline) -> StepOutcome:
        versions = self._part.count_versions()
        if self._part.prepared is not None:
            self._refill(step, deadline)
        self._part.digest(step)
        self._set(Phase.OPEN, step)
        self._wait_for_fills(step, deadline)
        pause, next_look = Pause(), 0.0
        while True:
            if (outcome := self._ranks.find_outcome(step)) is not None:
                return outcome
            found, is_due = self._engines.look(step), monotonic() >= next_look
            is_done = self._ranks.is_first and not found.waiting
            if found.must_confirm or is_done or is_due:
                # An engine rank waits for the second check after its reads, as the first may have begun before they
                # ended. Two in a row spare it another pause.
                for _ in range(2):
                    self._check_values(versions, step)
                    self._block.update(checks=self._block.value.checks + 1)
            if is_due or is_done:
                if (outcome := self._decide(found, step, deadline)) is not None:
                    return outcome
                next_look = monotonic() + _SIBLING_SECONDS
            if found.must_confirm:
                pause = Pause()  # the rank goes on at once, and others come to the same point
            pause()

    def _publish_copy(self, step: int, deadline: Deadline) -> StepOutcome:
        pause = Pause()
        while (found := self._engines.look(step)).reading:
            self._ranks.check(step)
            if deadline.has_passed:
                raise self._late_error(found.reading, f"read step {self._block.value.step}", deadline)
            pause()
        self._set(Phase.CLOSED, self._block.value.step)
        versions = self._part.count_versions()
        self._refill(step, deadline)
        self._part.digest(step)
        self._set(Phase.STEADY, step)
        self._wait_for_fills(step, deadline)
        self._check_values(versions, step)
        self._block.update(checks=1)  # this rank needs no other one any more
        pause = Pause()
        while True:
            outcome = self._ranks.find_outcome(step)
            if outcome is None:  # engines take the step when they like: none holds its outcome up
                outcome = self._decide(EngineParts(failed=found.failed), step, deadline)
            if outcome is not None:
                return outcome
            pause()

    def _decide(self, found: EngineParts, step: int, deadline: Deadline) -> StepOutcome | None:
        """Decide the outcome of a step on the first rank, once it is known."""
        if not self._ranks.is_first:
            if deadline.has_passed and self._ranks.peers[0].read().step < step:
                raise self._late_error(self._ranks.peers[:1], f"come to step {step}", deadline)
            return None
        late = self._ranks.find_late(step)
        if late and deadline.has_passed:
            raise self._late_error(late, f"come to step {step}", deadline)
        if late or (found.waiting and not deadline.has_passed):
            return None
        failed, errors = self._engines.settle(found)
        error: XrankError | None = None
        if found.waiting:
            error = self._late_error(found.waiting, f"taken step {step}", deadline)
        elif self._raises and errors:
            error = errors[0]
            if isinstance(error, RankFailedError):
                error.failures = tuple(errors)
        outcome = StepOutcome(step, tuple(found.taken), failed, error)
        self._ranks.decide(outcome)
        self._ranks.wait_until_known(step)
        return outcome

    def _refill(self, step: int, deadline: Deadline) -> None:
        """Fill all copies that are lent, from the present weights of all ranks."""
        prepared = self._part.prepared
        if prepared is None:
            self._part.refill()
            return
        self._part.check = lambda: self._ranks.check(step)
        versions = self._part.count_versions()
        if prepared.is_shared:
            self._set(Phase.READABLE, step)
            self._wait_for_phase(step, deadline, f"come to step {step}", (Phase.READABLE, Phase.OPEN, Phase.STEADY))
        prepared.fill()
        self._check_values(versions, step)

    def _wait_for_fills(self, step: int, deadline: Deadline) -> None:
        """Wait until no other rank reads this rank's weights any more."""
        if self._part.prepared is not None and self._part.prepared.is_shared:
            self._wait_for_phase(step, deadline, f"prepared step {step}", (Phase.OPEN, Phase.STEADY, Phase.CLOSED))

    def _wait_for_phase(self, step: int, deadline: Deadline, what: str, phases: Sequence[Phase]) -> None:
        def is_before(peer: PeerRank) -> bool:
            now = peer.read()
            return now.step < step or (now.step == step and now.phase not in phases)

        def check(waiting: Sequence[PeerRank]) -> None:
            self._ranks.check(step)
            if deadline.has_passed:
                raise self._late_error(waiting, what, deadline)

        wait_while(self._ranks.peers, is_before, between=check)

    def _set(self, phase: Phase, step: int, cause: str = "") -> None:
        generation = self._block.value.generation + 1
        self._block.update(phase=phase, step=step, cause=cause, checks=0, generation=generation)

    def _check_call(self, step: int) -> None:
        if self._is_closed:
            raise UsageError("the offer is closed", next_step="call offer_weights again")
        last = self._block.value.step
        if isinstance(step, bool) or not isinstance(step, int) or step <= last or not 0 <= step < 1 << 62:
            raise UsageError(
                f"step {step} is out of order",
                got=f"step {step!r} after {'no step' if last < 0 else f'step {last}'}",
                want=f"an integer of at least {last + 1}",
                next_step="increase the step with each publish; after a restart make a new offer",
            )
        present = self._place.find_trainer_id()
        # After that look: the rank that closes notes the reason before it removes the registration.
        if (failure := self._find_noted_failure()) is not None:
            raise failure
        if present is None:  # a rank of this trainer has closed its offer
            self._ranks.find_late(step)
        if present != self._registration.id:
            what = "this offer's registration is gone" if present is None else "another trainer has replaced this offer"
            raise ContradictionError(
                f"{what} at {self._place.path}",
                file=self._place.trainer_path,
                next_step="end one of the trainers, or give each its own directory; then call offer_weights again",
            )

    def _check_places(self) -> None:
        if (moved := find_moved(self._places, self._list_places())) is not None:
            name, old, new = moved
            raise ContradictionError(
                f"{name} is not the tensor that was offered",
                tensor=name,
                got=new,
                want=old,
                next_step="close the offer and call offer_weights again: engines then make a new plan",
            )

    def _check_values(self, versions: Sequence[int], step: int) -> None:
        if self._part.count_versions() != versions:
            raise ContradictionError(
                f"a tensor was changed in place while step {step} was offered",
                next_step="do not step the optimizer before publish has returned, in any thread or hook, "
                "or use snapshot=True",
            )

    def _late_error(self, late: Sequence[PeerRank], what: str, deadline: Deadline) -> RankTimeoutError:
        names = list_text([f"{peer.role} ({peer.place})" for peer in late], 4)
        return RankTimeoutError(
            f"{names} has not {what} in {deadline.timeout_seconds:g} s",
            rank=late[0].rank,
            waiting_for=tuple(peer.rank for peer in late),
            next_step=f"check why {late[0].role} is late; it gets the next step that is published",
        )
