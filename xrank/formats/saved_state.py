"""Read a rank's state: check all parts of its archive and parse the record, but leave the tensors in the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xrank.errors import ContradictionError, CorruptError
from xrank.formats.rank_state import CONFIG, RECORD, WEIGHT, RankRecord
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive, refuse_inert


@dataclass(frozen=True, slots=True)
class SavedState:
    """One rank's state: the archive and its record."""

    rank: int
    """The expected rank."""
    archive: TorchArchive
    config: dict[str, Any] | None
    weights: dict[str, ArchivedTensor]
    record: RankRecord | None
    """None for a state of ModelOpt."""

    @property
    def run(self) -> tuple[str | None, str | None, int | None, int] | None:
        """(run id, attempt, step, world size), equal for states of one run; None without a record."""
        record = self.record
        return None if record is None else (record.run_id, record.attempt, record.step, record.world_size)

    def check_rank(self) -> None:
        """Check that the record, if there is one, has the expected rank.

        Raises:
            ContradictionError: it has another rank.
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
    """Read the state in a file without its tensors' bytes.

    Args:
        file: the state's path.
        rank: the expected rank, which `SavedState.check_rank` checks.

    Raises:
        IncompleteError: there is no such file.
        CorruptError, UnsafeError: it is damaged, or holds more than data.
        UsageError: safetensors cannot hold its tensors, or a newer xrank wrote it.
    """
    archive = read_archive(file, rank=rank)
    state = archive.value
    refuse_inert(state, file, rank)
    if not isinstance(state, dict) or not {CONFIG, WEIGHT} <= state.keys():
        raise state_error(file, rank, f"a {type(state).__name__}", f'a dict with "{CONFIG}" and "{WEIGHT}"')
    config, weights = state[CONFIG], state[WEIGHT]
    if not (config is None or isinstance(config, dict)):
        raise state_error(file, rank, f"a config in a {type(config).__name__}", "a dict")
    if not isinstance(weights, dict):
        raise state_error(file, rank, f"weights in a {type(weights).__name__}", "a dict of tensors")
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, ArchivedTensor):
            raise state_error(file, rank, f"{ascii(name)[:100]}: {type(tensor).__name__}", "tensors by name")
    return SavedState(rank, archive, config, weights, record_of(archive, rank))


def record_of(archive: TorchArchive, rank: int | None) -> RankRecord | None:
    """Return the record of a state's archive; None if it has no record. Errors name the rank, if known.

    Raises:
        CorruptError: the record is malformed.
        UsageError: a newer xrank wrote it.
    """
    text = archive.value.get(RECORD) if isinstance(archive.value, dict) else None
    if text is None:
        return None
    if not isinstance(text, str):
        raise state_error(archive.path, rank, f"a record in a {type(text).__name__}", "a text")
    return RankRecord.from_json(text, file=archive.path)


def state_error(file: str, rank: int | None, got: str, want: str) -> CorruptError:
    """Return the error for an unexpected value in a state."""
    whose = "a rank" if rank is None else f"rank {rank}"
    return CorruptError(
        f"{file}: the state of {whose} is not what was written: {got}",
        rank=rank,
        file=file,
        got=got,
        want=want,
        next_step=f"let {'the rank' if rank is None else whose} write its state again",
    )
