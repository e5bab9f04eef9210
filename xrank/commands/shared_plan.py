"""A gather's plan for all ranks of a team: the first reads and proves, and the others get its tables.

The plan is one text under the secret of the ranks: no stranger who writes into their store decides what they read.
"""

from __future__ import annotations

import hashlib
import hmac
import zlib
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import xxhash
from msgspec import Struct
from msgspec.structs import asdict

from xrank.commands.report import WrittenOutput, folder_report, read_report, report_text
from xrank.engine.companions import CompanionFile
from xrank.engine.planner import FilePlan, Plan
from xrank.engine.report import Report, timed_report
from xrank.engine.transforms import TransformedTensor, Transforms
from xrank.layout.stored_model import RecordedHash, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.ranks.failure import damage_error
from xrank.ranks.team import Team
from xrank.recipes.decision import FolderPlan
from xrank.recipes.options import GatherOptions

_BESIDE = "also-here"
"""Code of the notes on another form of the model beside it, with which all ranks compare it, each a share."""


class _Source(Struct, frozen=True, eq=False):
    """The fields of a `StoredModel` that the other ranks need to write their share."""

    format: str
    path: str
    files: tuple[SourceFile, ...]
    records: RecordTable
    shards: tuple[StoredShard, ...]
    hashes: tuple[RecordedHash, ...]


class _SentTransforms(Struct, frozen=True, eq=False):
    """The tensors to encode; no caller's function is sent."""

    files: tuple[FilePlan, ...]
    tensors: tuple[TransformedTensor, ...]
    order: tuple[str, ...]


class _SentPlan(Struct, frozen=True, eq=False):
    """A plan as the first rank sends it."""

    source: _Source
    files: tuple[FilePlan, ...]
    digest: str
    report: str
    """The report before anything is written, by `report_text`."""
    transforms: _SentTransforms | None


class ReceivedPlan(Struct, frozen=True, eq=False):
    """A plan that the first rank has proven, in the place of a `FolderPlan` on the others."""

    plan: Plan
    transforms: Transforms | None
    digest: str
    options: GatherOptions
    """This rank's own."""
    facts: str
    """The report before anything was written."""
    companions: ClassVar[tuple[CompanionFile, ...]] = ()
    texts: ClassVar[Mapping[str, str]] = {}

    @property
    def source(self) -> StoredModel:
        """The model to read."""
        return self.plan.source

    def report(self, written: WrittenOutput, started: float) -> Report:
        """Return this rank's report, as `folder_report`."""
        known = read_report(self.facts)
        assert known.output is not None, "it is the report of an output"
        return timed_report(
            known.command,
            started,
            path=known.path,
            source=known.source,
            proof=known.proof,
            output=known.output.extended(files=list(written.files)),
            notes=(*known.notes, *written.notes),
        )


def plan_together(
    team: Team,
    asked: Mapping[str, object],
    out: str,
    options: GatherOptions,
    prove: Callable[[tuple[int, int]], FolderPlan],
) -> FolderPlan | ReceivedPlan:
    """Return the plan of all ranks, proven by the first, or raise its error on all of them.

    `asked` are the arguments that determine the plan; they must be equal on all ranks. `prove` takes a rank's share of
    a comparison with another form of the model, as in `read_best`. If there is such a form, every rank proves.
    """
    place = team.position, team.size
    proven: list[FolderPlan] = []

    def decide(_: None, digests: Sequence[str]) -> str:
        team.check_plans(None, digests)
        proven.append(planned := prove(place))
        if any(code == _BESIDE for code, _ in planned.notes):
            return ""
        report = folder_report("gather", planned, WrittenOutput(()), out, 0.0)
        return _seal(team.secret, _encode_plan(planned, report_text(report)))

    digest = xxhash.xxh3_128_hexdigest(repr(sorted(asked.items())).encode("utf-8", "surrogateescape"))
    _, sent = team.agree("the plan", lambda: None, lambda _: digest, decide)
    if not sent:
        own, _ = team.agree(
            "the comparison", lambda: proven[0] if proven else prove(place), lambda plan: plan.digest, team.check_plans
        )
        return own
    return proven[0] if proven else _decode_plan(_unseal(team.secret, sent), options)


def _encode_plan(planned: FolderPlan, report: str) -> bytes:
    source = planned.plan.source
    parts = {name: getattr(source, name) for name in _Source.__struct_fields__}
    whole = _Source(**parts | {"hashes": planned.source.hashes})
    found = planned.transforms
    transforms = None if found is None else _SentTransforms(found.sources.files, found.tensors, found.order)
    sent = _SentPlan(whole, planned.plan.files, planned.digest, report, transforms)
    return msgspec.msgpack.encode(sent, enc_hook=_array_parts)


def _array_parts(value: object) -> tuple[str, tuple[int, ...], bytes]:
    assert isinstance(value, np.ndarray), f"a plan with a {type(value).__name__} cannot be sent"
    return value.dtype.str, value.shape, value.tobytes()


def _decode_plan(data: bytes, options: GatherOptions) -> ReceivedPlan:
    known: dict[tuple[str, tuple[int, ...], bytes], Any] = {}

    def make_array(_: object, parts: Sequence[Any]) -> Any:
        # Tensors alike have the same tables: memory holds each once.
        key = parts[0], tuple(parts[1]), parts[2]
        if key not in known:
            known[key] = np.frombuffer(parts[2], parts[0]).reshape(parts[1])
        return known[key]

    sent = msgspec.msgpack.decode(data, type=_SentPlan, dec_hook=make_array)
    source, found = StoredModel(**asdict(sent.source)), sent.transforms
    transforms = None if found is None else Transforms(Plan(source, found.files), found.tensors, found.order)
    return ReceivedPlan(Plan(source, sent.files), transforms, sent.digest, options, sent.report)


def _seal(secret: bytes, data: bytes) -> str:
    packed = zlib.compress(data, 1)
    return b2a_base64(hmac.digest(secret, packed, hashlib.sha256) + packed, newline=False).decode()


def _unseal(secret: bytes, text: str) -> bytes:
    content = a2b_base64(text)
    mark, packed = content[:32], content[32:]
    if not hmac.compare_digest(mark, hmac.digest(secret, packed, hashlib.sha256)):
        raise damage_error("the plan of rank 0 is not the one that it sent", f"{len(content):,} bytes")
    return zlib.decompress(packed)
