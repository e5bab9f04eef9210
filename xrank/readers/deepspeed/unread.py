"""Kinds of DeepSpeed checkpoints that are recognised but not read, and their alternatives."""

from __future__ import annotations

from dataclasses import dataclass

from xrank.errors import UsageError
from xrank.formats.regular_file import Origin

__all__ = ["EXPERTS", "SLICES", "STAGES", "Unread"]


@dataclass(frozen=True, slots=True)
class Unread:
    """A kind of parallelism whose files are not read."""

    what: str
    """Description of such a file's content, in the plural."""
    needed: str
    """Requirement for reading it."""
    next_step: str

    def make_error(self, origin: Origin, got: str | None = None) -> UsageError:
        """Return the error for such a file; ``got`` is the evidence, if not the file's name."""
        return origin.usage(
            f"{self.what} are not read",
            got=got or self.what,
            want=f"one slice of every module, mp_rank_00; this would need {self.needed}",
            next_step=self.next_step,
        )


# For experts and pipelines DeepSpeed's own script fails, or loses frozen parameters.
SLICES = Unread(
    "slices of tensor-parallel ranks",
    "a map of how each tensor was sliced",
    "convert the checkpoint with DeepSpeed's ds_to_universal.py, then gather what that wrote",
)
STAGES = Unread(
    "a pipeline's layers",
    "the names that its stages give to layers",
    "load it in a job of as many ranks, and call xrank.export_model(engine.module, OUT) on each of them",
)
EXPERTS = Unread(
    "experts that are spread over ranks",
    "each expert's shards put together",
    "load it in a job of as many ranks, and call xrank.export_model on each of them, with a state dict that has its "
    "experts under their numbers in the whole model",
)
