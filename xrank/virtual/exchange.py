"""One device's part in a collective, executed over its channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xrank.errors import UsageError
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.arrays import (
    Array,
    concatenate,
    copy_of,
    fold,
    kind_of,
    mean_of,
    nbytes_of,
    reduce,
    reshape,
    spec_of,
    split_evenly,
    with_length,
)
from xrank.virtual.channels.channel import Heading, Links
from xrank.virtual.collectives import Course, ReceiveSlot, SendSlot


@dataclass(slots=True)
class Tally:
    """Counts of one device for one kind of exchange."""

    calls: int = 0
    sent_messages: int = 0
    received_messages: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0

    def count_sent(self, array: Array) -> None:
        """Count one sent message."""
        self.sent_messages += 1
        self.sent_nbytes += nbytes_of(array)

    def count_received(self, array: Array) -> None:
        """Count one received message."""
        self.received_messages += 1
        self.received_nbytes += nbytes_of(array)


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One call of a collective by one device."""

    device: int
    collective: str
    members: tuple[int, ...]
    course: Course
    heading: Heading
    dim: int | None = None
    """The dim along which parts are cut or joined; None for lists."""
    reduction: str | None = None
    slots: dict[int, Array] = field(default_factory=dict)

    @property
    def place(self) -> int:
        """This device's place in the group."""
        return self.members.index(self.device)

    def run(self, brought: Array | Sequence[Array] | None, links: Links, tally: Tally) -> Array | list[Array] | None:
        """Execute all steps and return the result, which the caller owns.

        Args:
            brought: an array; or one part per member if the course starts with ready-made parts.
            links: the device's channels.
            tally: receives the message counts.

        Raises:
            UsageError: another member calls something else, or its array does not match.
        """
        self._fill_slots(brought)
        wanted = self._compute_specs()
        for step in self.course.steps:
            if isinstance(step, SendSlot):
                array = self.slots[step.slot]
                links.to_device(self.members[step.member]).send(array, self.heading)
                tally.count_sent(array)
                continue
            array = links.from_device(self.members[step.member]).receive(self.heading)
            tally.count_received(array)
            if wanted:
                # A ring forwards slots: the array comes from the member of the slot's number, not from the neighbour.
                origin = step.member if self.course.start != "whole" else step.slot
                self._check(array, wanted[step.slot], self.members[origin])
            assert not step.fold or self.reduction is not None
            self.slots[step.slot] = fold(array, self.slots[step.slot], self.reduction or "") if step.fold else array
        return self._result(brought)

    def _fill_slots(self, brought: Array | Sequence[Array] | None) -> None:
        size = len(self.members)
        match self.course.start:
            case "whole":
                self.slots[self.place] = brought
            case "flat":
                assert brought is not None
                flat = reshape(brought, (-1,))
                self.slots.update(enumerate(split_evenly(flat, size, 0)))
            case "parts" if isinstance(brought, list | tuple):
                self.slots.update(enumerate(brought))
            case "parts":
                assert brought is not None and self.dim is not None
                self.slots.update(enumerate(split_evenly(brought, size, self.dim)))

    def _compute_specs(self) -> Mapping[int, ArraySpec]:
        """Return the spec that each slot must receive, as far as this device knows; a length of -1 matches any."""
        own = self.slots.get(self.place)
        if self.reduction is not None:
            if self.course.finish == "reduce":
                return dict.fromkeys(range(len(self.members)), spec_of(own))
            return {slot: spec_of(array) for slot, array in self.slots.items()}
        if self.collective in ("all_gather", "gather") and self.dim is not None:
            return dict.fromkeys(range(len(self.members)), with_length(spec_of(own), self.dim, -1))
        return {}

    def _check(self, array: Array, wanted: ArraySpec, origin: int) -> None:
        found, own = spec_of(array), self.slots[self.place]
        fits = len(found.shape) == len(wanted.shape) and all(
            want in (-1, got) for got, want in zip(found.shape, wanted.shape, strict=True)
        )
        if fits and found.dtype == wanted.dtype and kind_of(array) == kind_of(own):
            return
        mine, its = _text(wanted, kind_of(own)), _text(found, kind_of(array))
        raise UsageError(
            f"{self.collective}: device {origin} brings {its}, which does not match device {self.device}'s {mine}",
            rank=self.device,
            got=its,
            want=mine,
            next_step="let all members of the group bring the same kind, element type and shape"
            + ("" if self.reduction else f", but for the length of dim {self.dim}"),
        )

    def _result(self, brought: Array | Sequence[Array] | None) -> Array | list[Array] | None:
        size = len(self.members)
        match self.course.finish:
            case "all":
                arrays = [self.slots[slot] for slot in range(size)]
                if self.dim is not None and self.collective != "all_to_all":
                    return concatenate(arrays, self.dim)
                # The other arrays came through channels and are new; this one is still the caller's argument.
                arrays[self.place] = copy_of(arrays[self.place])
                return arrays
            case "reduce":
                assert self.reduction is not None
                return reduce([self.slots[slot] for slot in range(size)], self.reduction)
            case "flat":
                whole = concatenate([self.slots[slot] for slot in range(size)], 0)
                return reshape(self._finish_mean(whole), spec_of(brought).shape)
            case "one":
                one = self.slots[self.course.slot]
                received = {step.slot for step in self.course.steps if isinstance(step, ReceiveSlot)}
                return self._finish_mean(one if self.course.slot in received else copy_of(one))
        return None

    def _finish_mean(self, total: Array) -> Array:
        return mean_of(total, len(self.members)) if self.reduction == "mean" else total


def _text(spec: ArraySpec, kind: str) -> str:
    lengths = ", ".join("any" if length == -1 else str(length) for length in spec.shape)
    return f"{kind} {spec.dtype} ({lengths})"
