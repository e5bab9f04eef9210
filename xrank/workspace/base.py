"""The workspace protocols: where ranks write tensors and configs, and read each other's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap


@runtime_checkable
class Workspace(Protocol):
    """Stores one durable state per rank. A call never communicates with another rank or waits for one.

    Call order: construct on every rank; write any number of times, the last write counts; then any rank reads any rank.
    Callers ensure that a rank *has* written (by a barrier of their own): a result of None means "not written yet". A
    reader that runs during a write gets the complete old state or the complete new one.

    A rank writes only its own state, from one thread at a time. Any rank may read.

    A crash leaves the rank's last complete state, and perhaps an unfinished file that no reader accepts as a state.
    The next construction for this rank in this place removes that file.
    """

    @property
    def is_initialized(self) -> bool:
        """Whether the workspace has a place. Without one, the two methods raise UsageError, a ValueError."""
        ...

    def write_configs_and_weights(
        self,
        config_json: dict[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        layouts: LayoutMap | None = None,
        step: int | None = None,
    ) -> None:
        """Write this rank's state. If this raises, the previous state stays.

        Args:
            config_json: a dict that JSON can represent, with text keys. Tuples come back as lists.
            weights: tensors by name. A DTensor is written as its local tensor, together with its layout.
            layouts: layouts of the plain tensors, by name.
            step: the training step.

        Raises:
            UsageError: the workspace is uninitialised, or a state cannot hold the config or a tensor.
            NoSpaceError: the medium is full.
        """
        ...

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | tuple[None, None]:
        """Return what that rank wrote last in this run; ``(None, None)`` if it wrote nothing, or there is no such rank.

        The tensors are plain, detached, on the CPU, and owned by the caller. Tied names still share one tensor.

        Raises:
            UsageError: the workspace is uninitialised, or `target_rank` is not a whole number.
            CorruptError: the bytes differ from those that the rank wrote.
            ContradictionError: the state belongs to another rank.
            UnsafeError: the state asks to run code.
        """
        ...


@runtime_checkable
class MessageWorkspace(Protocol):
    """Carries tensors between live ranks; each message has one sender and one reader.

    Call order: the sender publishes, and passes the receipt to the reader by any channel of its own. The reader fetches
    only after that, because a network file system caches for half a minute that a name is absent. It fetches once, and
    again only if it did not see the message. Once the reader has confirmed, the sender retires the message. A name is
    never used for two messages. A call never waits for another rank.

    Every rank publishes and fetches, from one thread at a time. Only the sender retires.

    A crash leaves at most the messages in flight; the next start of this rank, or ``xrank clean``, removes them.
    """

    patience_seconds: float
    """How long a message may stay invisible to a reader that has its receipt."""

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Write a message and return its receipt, a text by which any process finds it.

        Args:
            header: JSON that describes the tensors; never a pickle.
            tensors: dense tensors of any strides and device. Their elements are written row-major, as bytes.

        Raises:
            NoSpaceError: the medium is full; no part of the message remains.
        """
        ...

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message: its header, and the bytes of each tensor, in memory that the caller owns.

        The caller may write to this memory. It stays valid as long as a tensor uses it, also after the message retires.

        Args:
            rank: the sender.
            receipt: the receipt that the sender's `publish` returned.

        Raises:
            IncompleteError: the message is not visible; within `patience_seconds` it may become so.
            CorruptError: the bytes differ from those that were published.
        """
        ...

    def retire(self, receipt: str) -> None:
        """Release a message of this rank after its reader has fetched it."""
        ...

    def close(self) -> None:
        """Release everything that this rank published. Fetched messages stay valid. A second call does nothing."""
        ...
