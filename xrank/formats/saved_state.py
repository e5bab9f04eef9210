"""A rank's state as its archive holds it: every part checked, the record read, the tensors' bytes still in the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xrank.errors import ContradictionError, CorruptError
from xrank.formats.rank_state import CONFIG, RECORD, WEIGHT, RankRecord
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive, refuse_inert

__all__ = ["SavedState", "damaged_state", "read_saved_state", "record_of"]


@dataclass(frozen=True, slots=True)
class SavedState:
    """One rank's state: the archive, and what it records of itself."""

    rank: int
    """Whose it should be."""
    archive: TorchArchive
    config: dict[str, Any] | None
    weights: dict[str, ArchivedTensor]
    record: RankRecord | None
    """None: ModelOpt's have none."""

    @property
    def run(self) -> tuple[str | None, str | None, int | None, int] | None:
        """What must be equal for states to belong together; None for a state without a record."""
        record = self.record
        return None if record is None else (record.run_id, record.attempt, record.step, record.world_size)

    def check_rank(self) -> None:
        """Check that it is the rank's whose it should be, where it says.

        Raises:
            ContradictionError: it is another rank's.
        """
        if self.record is None or self.record.rank == self.rank:
            return
        raise ContradictionError(
            f"{self.archive.path} is a copy of another rank's state: it holds the state of rank {self.record.rank}",
            rank=self.rank,
            file=self.archive.path,
            got=f"the state of rank {self.record.rank}",
            want=f"the state of rank {self.rank}",
            next_step=f"let rank {self.rank} write its state again",
        )


def read_saved_state(file: str, rank: int) -> SavedState:
    """Return the state in a file, by its metadata alone.

    Args:
        file: the state's path.
        rank: whose state it should be, which `SavedState.check_rank` checks.

    Raises:
        IncompleteError: there is no such file.
        CorruptError, UnsafeError: it is damaged, or more than data.
        UsageError: it holds what no safetensors file can, or a newer xrank wrote it.
    """
    archive = read_archive(file, rank=rank)
    state = archive.value
    refuse_inert(state, file, rank)
    if not isinstance(state, dict) or not {CONFIG, WEIGHT} <= state.keys():
        raise damaged_state(file, rank, f"a {type(state).__name__}", f'a dict with "{CONFIG}" and "{WEIGHT}"')
    config, weights = state[CONFIG], state[WEIGHT]
    if not (config is None or isinstance(config, dict)):
        raise damaged_state(file, rank, f"a config in a {type(config).__name__}", "a dict")
    if not isinstance(weights, dict):
        raise damaged_state(file, rank, f"weights in a {type(weights).__name__}", "a dict of tensors")
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, ArchivedTensor):
            raise damaged_state(file, rank, f"{ascii(name)[:100]}: {type(tensor).__name__}", "tensors by name")
    return SavedState(rank, archive, config, weights, record_of(archive, rank))


def record_of(archive: TorchArchive, rank: int | None) -> RankRecord | None:
    """Return the record of the state in an archive, of that rank where it is known; None where there is none.

    Raises:
        CorruptError: it is no record.
        UsageError: a newer xrank wrote it.
    """
    text = archive.value.get(RECORD) if isinstance(archive.value, dict) else None
    if text is None:
        return None
    if not isinstance(text, str):
        raise damaged_state(archive.path, rank, f"a record in a {type(text).__name__}", "a text")
    return RankRecord.from_json(text, file=archive.path)


def damaged_state(file: str, rank: int | None, got: str, want: str) -> CorruptError:
    """Return the error that says what was found in a state, and what should be there."""
    whose = "a rank" if rank is None else f"rank {rank}"
    return CorruptError(
        f"{file}: the state of {whose} is not what was written: {got}",
        rank=rank,
        file=file,
        got=got,
        want=want,
        next_step=f"let {'the rank' if rank is None else whose} write its state again",
    )
