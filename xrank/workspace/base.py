"""What a workspace is: the place through which ranks leave and find each other's tensors and configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap

__all__ = ["MessageWorkspace", "Workspace"]


@runtime_checkable
class Workspace(Protocol):
    """Keeps one durable state for each rank; no call communicates, waits for, or needs any other rank.

    Call order: construct on every rank; write as often as wanted, the last write counts; then anyone reads anyone.
    That a rank *has* written is for the callers to know (a barrier of their own): None for a state means "not there
    yet", and a reader that looks while a rank writes gets its state before or after, never between.

    Who may call: a rank writes only its own state, one thread at a time; reading is free to all.

    A crash leaves the rank's last complete state, and perhaps an unfinished one that no reader takes for a state; the
    next construction for this rank in this place removes it.
    """

    @property
    def is_initialized(self) -> bool:
        """Whether there is a place at all; where there is none, the two methods raise ValueError."""
        ...

    def write_configs_and_weights(
        self,
        config_json: dict[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        layouts: LayoutMap | None = None,
        step: int | None = None,
    ) -> None:
        """Leave this rank's state: complete, or, where this raises, what was there before.

        Args:
            config_json: what JSON can hold, with texts for keys; tuples come back as lists.
            weights: tensors by name. A DTensor is left as its local tensor, and brings its layout.
            layouts: the layouts of the plain tensors among them, by name.
            step: the training step.

        Raises:
            UsageError: uninitialised, or something in config or weights that no state can hold.
            NoSpaceError: the medium is full.
        """
        ...

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | tuple[None, None]:
        """Return what that rank wrote last in this run, or ``(None, None)`` where it wrote nothing.

        The tensors are plain, on the CPU, detached, and the caller's own; names that were one tensor still are.

        Raises:
            UsageError: uninitialised, or no such rank.
            CorruptError: the state is not what was written.
            ContradictionError: the state is another rank's.
            UnsafeError: the state asks to run code.
        """
        ...


@runtime_checkable
class MessageWorkspace(Protocol):
    """Carries one gather's tensors between live ranks; a workspace may be this too.

    Call order: each sender publishes once for each gather, and tells the receipt to the receivers by a store; they
    fetch after that, never before (a network file system remembers for half a minute that a name was absent); the
    sender closes after the last receiver's lease has ended. No name is ever used for two messages.

    Who may call: every rank publishes and fetches; only the sender removes what it published.

    A crash leaves at most the message in flight; the next start of this rank, or ``xrank clean``, removes it.
    """

    def publish(self, key: str, header: str, buffers: Sequence[memoryview]) -> str:
        """Leave a message and return its receipt, which carries name, sizes and checksums.

        Args:
            key: names the gather: the ranks and their call's number.
            header: JSON that tells what the buffers are; never a pickle.
            buffers: the bytes.
        """
        ...

    def fetch(
        self, rank: int, receipt: str, deadline: float
    ) -> AbstractContextManager[tuple[str, Sequence[memoryview]]]:
        """Lend that rank's message: header and views that are valid inside the ``with``, their checksums verified.

        Args:
            rank: the sender.
            receipt: what its `publish` returned.
            deadline: on ``time.monotonic``'s clock.

        Raises:
            RankTimeoutError: the message did not appear before the deadline.
            CorruptError: the message is not what was published.
        """
        ...

    def close(self) -> None:
        """Remove what this rank published; calling it again does nothing."""
        ...
