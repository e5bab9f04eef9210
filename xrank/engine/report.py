"""The report of a command: facts that were read, proven and written, as JSON, as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from types import MappingProxyType
from typing import Any, NoReturn, Self, dataclass_transform

from msgspec import Struct, field

from xrank.errors import XrankError
from xrank.layout.stored_model import StoredModel
from xrank.system import peak_rss_nbytes
from xrank.words import one_line, plural, size_text

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Facts(Mapping[str, Any]):
    """Part of a report, made by keywords; a subclass lists its fields with their values where they are not given.

    These are not dataclasses: each would add two milliseconds to the start of every command.
    """

    _given: Mapping[str, Any]

    def __init__(self, **given: Any) -> None:
        unknown = given.keys() - type(self).__annotations__.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        self.__dict__.update(given, _given=given)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

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
    dtypes: Mapping[str, int] = _NONE
    """Number of tensors by element type."""
    has_config: bool = False
    """Whether the source itself holds the model's config."""


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
    num_optimizer_tensors: int = 0
    """Number of an optimizer's moments and masters that were read, in addition to the model."""
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


class FileFacts(Facts):
    """A file of the output."""

    name: str = ""
    nbytes: int = 0
    digest: str | None = None
    num_tensors: int = 0


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
    padding_dropped: Mapping[str, int] = _NONE
    """Rows of padding that outputs lost, by name."""
    excluded: Sequence[str] = ()
    """Names left out."""
    missing: Sequence[Mapping[str, Any]] = ()
    """Tensors that a salvage did not find whole: name, dtype, shape, problem, and the rank and file of lost parts."""
    filled: Sequence[str] = ()
    """Names of the base model's tensors in place of missing ones."""
    cast: Mapping[str, str] = _NONE
    """Name -> ``"F32 -> BF16"``."""
    merged: Sequence[str] = ()
    """Names of tensors that an adapter was merged into."""
    companions: Sequence[str] = ()
    """Small files beside the weights."""
    transformed: Mapping[str, str] = _NONE
    """Output name -> name of the tensor that a transform made it of."""
    quantized: Mapping[str, Any] = _NONE
    """``scheme``, ``num_tensors`` that are quantized, of ``num_sources`` in all, ``ignored`` modules, and if
    asked for ``errors``, by kind of module: ``mean`` relative to the mean magnitude, ``largest`` to the largest."""
    files: Sequence[FileFacts] = ()
    resumed_nbytes: int = 0
    """Bytes that an earlier, interrupted run had finished."""
    shared_nbytes: int = 0
    """Bytes whose blocks the file system shares with the source (reflink); they were not written."""
    peak_buffer_nbytes: int = 0
    """Bytes of all buffers, of a dry run."""
    num_files: int = 0
    files_nbytes: int = 0


class DeltaDetails(Facts):
    """A version of a model that was written as what has changed."""

    version: int = 0
    base_version: int = 0
    encoding: str = ""
    checksum: str = ""
    """Kind of the checksums of the tensors' new bytes."""
    state: str = ""
    """Digest of all tensors of the version."""
    num_compared: int = 0
    """Tensors of the model."""
    num_changed: int = 0


class AppliedDetails(Facts):
    """A model to which versions were applied."""

    version: int | None = None
    earlier_version: int | None = None
    """The version that the output had before; None without one."""
    num_applied: int = 0
    """Versions whose changes were applied in one pass."""
    base: str | None = None
    """The model to which they were applied: an earlier one, the output itself, or a version that is whole."""


class ChainDetails(Facts):
    """Versions of a model."""

    versions: Sequence[Mapping[str, Any]] = ()
    num_checksums: int = 0
    """Checksums of tensors that were compared."""
    num_digests: int = 0
    """Digests of manifests that were compared."""


class InspectDetails(Facts):
    """Facts that only ``xrank inspect`` shows."""

    stage: Mapping[str, Any] | None = None
    """An unfinished output: its files and its owner."""
    problems: Sequence[Mapping[str, Any]] = ()
    """Errors that a gather would raise, each with its exit code."""
    missing: Sequence[Mapping[str, Any]] = ()
    """Tensors that are not whole: name, dtype, shape, problem, and the rank and file of lost parts."""
    commands: Sequence[Mapping[str, str]] = ()
    """What can be had of the source, each with its command."""
    tensors: Sequence[Mapping[str, Any]] = ()
    format: Mapping[str, Any] = _NONE
    """Facts that this format alone has."""
    companions: Sequence[str] = ()
    config_path: str | None = None
    quantization: Mapping[str, Any] | None = None
    """The declared quantization, the number of quantized tensors, and the bytes of codes and of scales."""
    optimizer: Mapping[str, Any] | None = None
    """The optimizer's class, the number of its moments and masters, and their bytes; or its problem."""
    ranks: Sequence[Mapping[str, Any]] = ()


class CleanDetails(Facts):
    """Facts that only ``xrank clean`` shows; each row has path, nbytes, removed and why."""

    stages: Sequence[Mapping[str, Any]] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    num_removed: int = 0
    removed_nbytes: int = 0
    dry_run: bool = False


class DoctorDetails(Facts):
    """Facts that only ``xrank doctor`` shows."""

    checks: Sequence[Mapping[str, Any]] = ()
    """Rows of subject, name, is_there and text."""


class LayoutDetails(Facts):
    """Facts that only ``xrank layout`` shows."""

    tensors: Sequence[Mapping[str, Any]] = ()
    problems: Sequence[Mapping[str, Any]] = ()
    meshes: Mapping[str, Mapping[str, Any]] = _NONE
    unmatched: Sequence[str] = ()
    """Names of tensors that no rule matches."""
    unused_rules: Sequence[str] = ()
    """Rules that match no tensor."""
    ranks: Sequence[Mapping[str, Any]] = ()
    toml: str | None = None
    equal: bool = False
    differences: Mapping[str, Any] = _NONE
    num_rules: int = 0


class RecipeDetails(Facts):
    """Facts of ``xrank recipe`` alone."""

    recipes: Sequence[Mapping[str, Any]] = ()
    toml: str | None = None
    is_reversed: bool = False
    """Whether the source's names are Hugging Face's."""
    sizes: Mapping[str, int] = _NONE
    tensors: Sequence[Mapping[str, Any]] = ()
    """Tensors that a rule matches."""
    wrong_rules: Sequence[Mapping[str, Any]] = ()
    unknown: Sequence[Mapping[str, Any]] = ()
    """Names that no rule matches, equal but for their numbers, with the nearest rule."""
    missing: Sequence[str] = ()
    """Required targets that nothing becomes."""
    ignored: Sequence[str] = ()


class SimulationDetails(Facts):
    """Facts that only ``xrank simulate`` shows."""

    operation: str = ""
    num_ranks: int = 0
    mesh: str | None = None
    num_rounds: int = 0
    is_each_read: bool = False
    rates: Mapping[str, Any] | None = None
    prediction: Mapping[str, Any] | None = None
    totals: Mapping[str, int] = _NONE
    ranks: Sequence[Mapping[str, Any]] = ()


def plain_value(value: Any) -> Any:
    """Return a value as JSON takes it."""
    if isinstance(value, Mapping):
        return {key: plain_value(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(part) for part in value]
    return value


Row = tuple[str, str]


def report_rows(report: Report) -> list[Row]:
    """Return a report as rows of a label and a text: its state, the source, the proof, the output, notes, the fault."""
    rows = [(report.command, f"{report.status}, {report.seconds:.1f} s" + (f": {report.path}" if report.path else ""))]
    source, proof, made = report.source, report.proof, report.made
    if source.format is not None:
        ranks = f", by {plural(source.world_size, 'rank')}" if source.world_size else ""
        step = f", step {source.step}" if source.step is not None else ""
        recipe = f", named by the recipe {source.recipe}" if source.recipe else ""
        left_out = f", {size_text(source.skipped_nbytes)} left out" if source.skipped_nbytes else ""
        rows.append(("source", f"{source.format}{ranks}{step}, {size_text(source.nbytes)}{left_out}{recipe}"))
    counts = [(proof.num_checksums, "checksum", "good"), (proof.num_digests, "digest", "good")]
    counts.append((proof.num_replicas_compared, "replica", "equal"))
    facts = ["every element exactly once"] if proof.coverage == "proven" else []
    facts += [f"{plural(count, noun)} {state}" for count, noun, state in counts if count]
    facts += [f"{proof.base_model} as in the base model"] if proof.base_model else []
    rows += [("proof", "; ".join(facts))] if facts else []
    if made.num_tensors:
        files = f" in {plural(len(made.files), 'file')}" if made.files else ""
        size = f"{made.num_parameters:,} parameters, {size_text(made.nbytes)}{files}"
        label = "plan" if report.output is None else "output"
        rows.append((label, f"{plural(made.num_tensors, 'tensor')}, {size}"))
    for name, value in report.details.items():
        if isinstance(value, list | tuple) and value:
            rows.append((name, f"{len(value):,}"))
    rows += [("note", str(message)) for _, message in report.notes]
    if report.fault is not None:
        rows.append((type(report.fault).__name__, str(report.fault)))
        remedies = (("got", report.fault.got), ("want", report.fault.want), ("try", report.fault.next_step))
        rows += [(label, text) for label, text in remedies if text]
    return rows


def align_rows(rows: Sequence[Row]) -> str:
    """Return rows as lines, the texts in one column."""
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(f"{label:<{width}}  {one_line(text)}" for label, text in rows)


class Report(Struct, frozen=True):
    """The result of a command or call; `to_dict` is its JSON form, whose keys are stable."""

    command: str
    path: str | None = None
    """The output folder, or the path that was read."""
    status: str = "ok"
    exit_code: int = 0
    seconds: float = 0.0
    peak_rss_nbytes: int = 0
    """Peak memory of the whole process."""
    source: SourceFacts = field(default_factory=SourceFacts)
    proof: ProofFacts = field(default_factory=ProofFacts)
    output: OutputFacts | None = None
    plan: OutputFacts | None = None
    """In place of `output` where nothing was written."""
    traffic: TrafficFacts | None = None
    """None: no path is a URL."""
    notes: tuple[tuple[str, str], ...] = ()
    """(code, message) pairs."""
    fault: XrankError | None = None
    """The error that ended the command, or the first fault that it found."""
    details: Facts = field(default_factory=Facts)
    """Facts that only this command has; their keys stand beside the others."""

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The parts of the fault, as JSON has them."""
        return None if self.fault is None else self.fault.to_dict()

    @property
    def ok(self) -> bool:
        """Whether the command succeeded."""
        return self.exit_code == 0

    @property
    def num_tensors(self) -> int:
        """Tensors written, or planned."""
        return self.made.num_tensors

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return self.made.num_parameters

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.made.nbytes

    @property
    def made(self) -> OutputFacts:
        """The output, or the plan where nothing was written."""
        return self.output or self.plan or OutputFacts()

    def __str__(self) -> str:
        """Return the report as lines for people.

        Example:
            >>> print(Report("gather", path="model", seconds=2.0))
            gather  ok, 2.0 s: model
        """
        return align_rows(report_rows(self))

    def _repr_html_(self) -> str:
        """Return the report as a table of a notebook, in the notebook's own colors."""
        from html import escape  # only notebooks need it

        style = 'style="text-align: left; vertical-align: top"'
        cells = ((escape(label), escape(text)) for label, text in report_rows(self))
        rows = (f"<tr><th>{label}</th><td {style}>{text}</td></tr>" for label, text in cells)
        return f'<table class="xrank-report" {style}>{"".join(rows)}</table>'

    def to_dict(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        parts = {
            "schema": 1,
            "command": self.command,
            "status": self.status,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "peak_rss_nbytes": self.peak_rss_nbytes,
            "source": self.source,
            "proof": self.proof,
            "output": self.output,
            **({} if self.plan is None else {"plan": self.plan}),
            **({} if self.traffic is None else {"traffic": self.traffic}),
            **self.details,
            "notes": [{"code": code, "message": message} for code, message in self.notes],
            "error": self.error,
        }
        return {name: plain_value(part) for name, part in parts.items()}


def timed_report(command: str, started: float, *, fault: XrankError | None = None, **facts: Any) -> Report:
    """Return the report of a command that has ended, well or with a fault; `started` is on the monotonic clock."""
    ended: dict[str, Any] = {} if fault is None else {"status": "failed", "exit_code": fault.exit_code, "fault": fault}
    seconds = monotonic() - started
    return Report(command, seconds=seconds, peak_rss_nbytes=peak_rss_nbytes(), **ended, **facts)


def source_facts(source: StoredModel) -> SourceFacts:
    """Return the facts of a source."""
    names = ("path", "format", "recipe", "step", "world_size", "run_id", "nbytes", "skipped_nbytes")
    return SourceFacts(**{name: getattr(source, name) for name in names})
