"""What a workspace is: the place through which ranks leave and find each other's tensors and configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Carries tensors between live ranks, each message from one to one; a workspace is this too.

    Call order: the sender publishes, and tells the receipt to the reader by whatever way they have; after that, never
    before, the reader fetches, once (a network file system remembers for half a minute that a name was absent), and
    again only where it did not see the message; when it has said so, the sender retires it. No name is ever used for
    two messages, and nothing here waits for a rank.

    Who may call: every rank publishes and fetches, one thread at a time; only the sender retires.

    A crash leaves at most the messages in flight; the next start of this rank, or ``xrank clean``, removes them.
    """

    patience_seconds: float
    """How long a message may stay invisible to a reader who has its receipt."""

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Leave a message and return its receipt, a text that tells any process where it lies.

        Args:
            header: JSON that tells what the tensors are; never a pickle.
            tensors: dense ones of any strides and device; their elements are left row-major, as bytes.

        Raises:
            NoSpaceError: the medium is full; nothing of the message stays.
        """
        ...

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message: its header, and for each tensor its bytes, in memory that is the caller's.

        It may write there, and what it makes of it holds it: nobody else does, whatever becomes of the message.

        Args:
            rank: the sender.
            receipt: what its `publish` returned.

        Raises:
            IncompleteError: the message is not to be seen; for `patience_seconds` it may still come.
            CorruptError: the message is not what was published.
        """
        ...

    def retire(self, receipt: str) -> None:
        """Let go of a message of this rank's that its reader has fetched."""
        ...

    def close(self) -> None:
        """Let go of all that this rank published; what was fetched stays. Calling it again does nothing."""
        ...
