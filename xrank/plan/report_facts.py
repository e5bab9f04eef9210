"""The facts of which a report is made: frozen dataclasses with a field for each figure.

A command gives only the fields it knows; these alone, in the order given, are in the JSON object, and in the facts as a
mapping (``report.output["tied"]``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self


class Facts(Mapping[str, Any]):
    """Part of a report; subclasses are frozen dataclasses, made by keywords alone."""

    _given: tuple[str, ...]

    def __new__(cls, **given: Any) -> Self:
        """Keep which fields are given."""
        self = super().__new__(cls)
        object.__setattr__(self, "_given", tuple(given))
        return self

    def __getitem__(self, name: str) -> Any:
        if name not in self._given:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def extended(self, **more: Any) -> Self:
        """Return these facts with more of them, or with other values."""
        return type(self)(**{**self, **more})

    def to_dict(self) -> dict[str, Any]:
        """Return the given fields as JSON has them."""
        return {name: plain_value(value) for name, value in self.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceFacts(Facts):
    """The source that a command read."""

    path: str | None = None
    format: str | None = None
    """Name of the source's format."""
    recipe: str | None = None
    """Name of the recipe that gave Hugging Face's names; None: the names are the source's."""
    step: int | None = None
    world_size: int | None = None
    """Number of ranks that wrote the source."""
    run_id: str | None = None
    nbytes: int = 0
    skipped_nbytes: int = 0
    """Bytes of what is left out: optimizer, random states."""
    num_tensors: int = 0
    num_parameters: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)
    """Number of tensors by element type."""
    has_config: bool = False
    """Whether the source itself holds the model's config."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProofFacts(Facts):
    """The proofs and comparisons that a command made."""

    coverage: str | None = None
    """``"proven"`` or ``"refused"``: every element of every tensor exactly once."""
    base_model: str | None = None
    """The comparison with the base model."""
    num_replicas_compared: int = 0
    num_replicas_to_compare: int = 0
    """Replicas that a run would compare; only a dry run gives it."""
    num_checksums: int = 0
    """Number of the source's checksums that were compared."""
    num_digests: int = 0
    """Number of tensors whose digest is as in a manifest."""
    manifest: str | None = None
    """Path of the manifest that a model was compared with."""
    signature: str | None = None
    """Path of the signature that a model's files were compared with."""
    against: str | None = None
    """Path of the model or checkpoint that was compared, value by value."""
    num_adapter_tensors: int = 0
    num_merged: int = 0
    """Number of tensors that an adapter was merged into before they were compared."""
    num_rules: int = 0
    """Number of rules of a layout file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrafficFacts(Facts):
    """Requests to object stores, of a command with a URL."""

    requests: int = 0
    """All requests of this process, repetitions included; on the first rank of several, those of all."""
    retries: int = 0
    """Requests that were sent again after a failure."""
    read_nbytes: int = 0
    written_nbytes: int = 0
    planned_requests: int = 0
    """Requests for tensors, of a dry run."""
    planned_nbytes: int = 0
    """Bytes that these requests read."""
    planned_written_requests: int = 0
    """Requests that write the weights, of a dry run."""
    planned_written_nbytes: int = 0
    """Bytes of the weights that these requests write."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FileFacts(Facts):
    """A file of the output."""

    name: str = ""
    nbytes: int = 0
    digest: str | None = None
    num_tensors: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class OutputFacts(Facts):
    """The output that a command wrote, or that a dry run would write."""

    path: str | None = None
    num_tensors: int = 0
    num_parameters: int = 0
    """Number of elements of all tensors."""
    nbytes: int = 0
    """Bytes of all tensors."""
    world_size: int = 0
    """Number of ranks whose states were written."""
    mesh: str | None = None
    """Grid of the ranks whose states were written."""
    run_id: str | None = None
    tied: Sequence[Sequence[str]] = ()
    """Names that share the bytes of the first."""
    padding_dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows of padding that outputs lost, by name."""
    excluded: Sequence[str] = ()
    """Names left out."""
    cast: Mapping[str, str] = field(default_factory=dict)
    """Name -> ``"F32 -> BF16"``."""
    merged: Sequence[str] = ()
    """Names of tensors that an adapter was merged into."""
    companions: Sequence[str] = ()
    """Small files beside the weights."""
    transformed: Mapping[str, str] = field(default_factory=dict)
    """Output name -> name of the tensor that a transform made it of."""
    files: Sequence[FileFacts] = ()
    resumed_nbytes: int = 0
    """Bytes that an earlier, interrupted run had finished."""
    shared_nbytes: int = 0
    """Bytes whose blocks the file system shares with the source (reflink); they were not written."""
    peak_buffer_nbytes: int = 0
    """Bytes of all buffers, of a dry run."""
    num_files: int = 0
    files_nbytes: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class InspectDetails(Facts):
    """Facts that only ``xrank inspect`` shows."""

    stage: Mapping[str, Any] | None = None
    """An unfinished output: its files and its owner."""
    problems: Sequence[Mapping[str, Any]] = ()
    """Errors that a gather would raise, each with its exit code."""
    tensors: Sequence[Mapping[str, Any]] = ()
    format: Mapping[str, Any] = field(default_factory=dict)
    """Facts that this format alone has."""
    companions: Sequence[str] = ()
    config_path: str | None = None
    ranks: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class CleanDetails(Facts):
    """Facts that only ``xrank clean`` shows; each row has path, nbytes, removed and why."""

    stages: Sequence[Mapping[str, Any]] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    num_removed: int = 0
    removed_nbytes: int = 0
    dry_run: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class DoctorDetails(Facts):
    """Facts that only ``xrank doctor`` shows."""

    checks: Sequence[Mapping[str, Any]] = ()
    """Rows of subject, name, is_there and text."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutDetails(Facts):
    """Facts that only ``xrank layout`` shows."""

    tensors: Sequence[Mapping[str, Any]] = ()
    problems: Sequence[Mapping[str, Any]] = ()
    meshes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unmatched: Sequence[str] = ()
    """Names of tensors that no rule matches."""
    unused_rules: Sequence[str] = ()
    """Rules that match no tensor."""
    ranks: Sequence[Mapping[str, Any]] = ()
    toml: str | None = None
    equal: bool = False
    differences: Mapping[str, Any] = field(default_factory=dict)
    num_rules: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class RecipeDetails(Facts):
    """Facts of ``xrank recipe`` alone."""

    recipes: Sequence[Mapping[str, Any]] = ()
    toml: str | None = None
    is_reversed: bool = False
    """Whether the source's names are Hugging Face's."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    tensors: Sequence[Mapping[str, Any]] = ()
    """Tensors that a rule matches."""
    wrong_rules: Sequence[Mapping[str, Any]] = ()
    unknown: Sequence[Mapping[str, Any]] = ()
    """Names that no rule matches, equal but for their numbers, with the nearest rule."""
    missing: Sequence[str] = ()
    """Required targets that nothing becomes."""
    ignored: Sequence[str] = ()
    rules: Sequence[Mapping[str, Any]] = ()
    """Rules of a draft, each with its evidence."""
    undecided: Sequence[Mapping[str, Any]] = ()
    """The source's tensors that a draft has no rule for, with the reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulationDetails(Facts):
    """Facts that only ``xrank simulate`` shows."""

    operation: str = ""
    num_ranks: int = 0
    mesh: str | None = None
    num_rounds: int = 0
    is_each_read: bool = False
    rates: Mapping[str, Any] | None = None
    prediction: Mapping[str, Any] | None = None
    totals: Mapping[str, int] = field(default_factory=dict)
    ranks: Sequence[Mapping[str, Any]] = ()


def plain_value(value: Any) -> Any:
    """Return a value as JSON takes it."""
    if isinstance(value, Mapping):
        return {key: plain_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    return value
