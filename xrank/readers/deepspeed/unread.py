"""Kinds of DeepSpeed checkpoints that are recognised but not read, and their alternatives."""

from __future__ import annotations

from dataclasses import dataclass

from xrank.errors import UsageError
from xrank.formats.regular_file import Origin


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
            want=f"whole modules; this would need {self.needed}",
            next_step=self.next_step,
        )


SLICES = Unread(
    "slices of tensor-parallel ranks",
    "a map of how each tensor was sliced",
    "convert the checkpoint with DeepSpeed's ds_to_universal.py, then gather what that wrote",
)
UNIVERSAL_STAGES = Unread(
    "the universal checkpoints of pipelines",
    "the layers' buffers and frozen parameters, which ds_to_universal.py leaves out",
    "gather the checkpoint from which the universal one was made",
)
AUTO_EXPERTS = Unread(
    "the experts of AutoEP",
    "each expert's shards put together",
    "load it in a job of as many ranks, and call xrank.export_model on each of them, with a state dict that has its "
    "experts under their numbers in the whole model",
)
