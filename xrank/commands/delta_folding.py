"""Folding: consecutive versions of a model become one, without the model that they begin with."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

from msgspec.structs import replace

from xrank.commands.delta_writing import NewVersion, write_bodies
from xrank.commands.report import counts_requests
from xrank.engine.buffers import OpenSource
from xrank.engine.delta_bodies import Bodies, DeltaBody, FrameFile
from xrank.engine.made_records import RecordStream
from xrank.engine.report import Report
from xrank.engine.sources import open_source
from xrank.errors import ContradictionError, CorruptError, UsageError, names_own_arguments
from xrank.formats.deltas import (
    DamagedBodyError,
    DeltaFacts,
    fold_bodies,
    frame_content_nbytes,
    most_frame_nbytes,
    version_name,
    version_of,
)
from xrank.layout.output_files import OutputTensor
from xrank.layout.stored_model import StoredModel
from xrank.ranks.team import Team
from xrank.readers.deltas import find_versions
from xrank.readers.hugging_face.folder import read_delta
from xrank.readers.records import Records
from xrank.recipes.options import GatherOptions
from xrank.storage import places
from xrank.storage.staging import check_output
from xrank.storage.url import clean_path

_CHUNK_NBYTES = 1 << 20


@names_own_arguments
@counts_requests
def fold_deltas(
    versions: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    resume: bool = True,
) -> Report:
    """Fold consecutive versions into one, with the number of the last and the base of the first.

    ``xor`` changes are combined by xor; of ``overwrite`` changes the later bytes are used; the base is not needed. The
    folder appears by one rename.

    Args:
        versions: folders of versions, or one folder of a chain, whose versions must all be deltas; or their URLs.
        out: the folder to make, named like the last version, in a different place; or its URL.
        max_shard_size: bytes of bodies in a file.
        overwrite: whether an existing version may be replaced.
        resume: whether to keep the finished parts of an interrupted run.

    Raises:
        UsageError: a version is whole, or not based on the one before; or encodings or checksums differ.
        ContradictionError: a version is based on different weights than those of the version before.
        CorruptError: a body is damaged.

    Example:
        >>> import torch, xrank
        >>> for n in range(3):
        ...     _ = xrank.save_model({"norm.weight": torch.full((4,), float(n))}, f"steps/{n}")
        >>> for n in (1, 2):
        ...     _ = xrank.make_delta(f"steps/{n - 1}", f"steps/{n}", f"chain/weight_v00000{n}")
        >>> xrank.fold_deltas("chain", "folded/weight_v000002").details.base_version
        0
    """
    started, path = time.monotonic(), clean_path(out)
    options = GatherOptions(max_shard_size=max_shard_size, overwrite=overwrite, resume=resume)
    given = [versions] if isinstance(versions, str | os.PathLike) else versions
    paths = list(find_versions([places.enter(one) for one in given]).values())
    records = Records()
    bodies: dict[str, list[tuple[int, int, str, str]]] = {}
    facts: DeltaFacts | None = None
    for number, place in enumerate(paths):
        found = read_delta(place)
        before = paths[number - 1] if number else place
        if found is None:
            raise _refuse(place, "a whole model", "changes alone", f"give the versions after {place}")
        facts = found[0] if facts is None else _follow(facts, found[0], before, place, paths, path)
        for header in found[1]:
            record_of = records.add_safetensors(header)
            for tensor in header.tensors:
                one = (record_of(tensor.name), tensor.end - tensor.start, header.metadata[tensor.name], header.path)
                bodies.setdefault(tensor.name, []).append(one)
    assert facts is not None, "there is a version"
    if version_of(os.path.basename(path.rstrip("/"))) != facts.version:
        name = version_name(facts.version)
        step = f"name the folder {name}, in a different parent folder than {paths[-1]}"
        raise _refuse(path, "a different name", name, step)
    check_output(path, overwrite=overwrite)
    model = StoredModel(
        format="deltas",
        path=paths[-1],
        files=tuple(records.files),
        records=records.table(),
        shards=(),
        nbytes=records.nbytes,
    )
    with closing(open_source(model)) as source:
        made, outputs = _fold(facts, bodies, source)
        source.check_unchanged()
    version = NewVersion(Team(), outputs, facts, model, path, options, command="delta fold", started=started)
    return write_bodies(version, made)


def _refuse(place: str, got: str, want: str, next_step: str) -> UsageError:
    problem = f"{place} cannot be folded with the other versions"
    return UsageError(problem, file=place, got=got, want=want, next_step=next_step)


def _follow(
    facts: DeltaFacts, later: DeltaFacts, before: str, place: str, paths: Sequence[str], out: str
) -> DeltaFacts:
    """Return the facts of two versions as one, if the later one follows the other."""
    if later.base_version != facts.version:
        got, want = f"changes of version {later.base_version}", f"those of version {facts.version}"
        raise _refuse(place, got, want, "give all versions in between")
    for name in ("encoding", "checksum"):
        got, want = getattr(later, name), getattr(facts, name)
        if got != want:
            # A byte that one version overwrites and another xors cannot be composed without the base.
            step = f"start from the base: xrank delta make BASE {paths[-1]} -o {out}"
            raise _refuse(place, f"{name} {got}", f"{want}, as in {before}", step)
    if None not in (facts.state, later.base_state) and facts.state != later.base_state:
        raise ContradictionError(
            f"{place} contains changes to different weights than those of {before}",
            file=place,
            got=f"base_state {later.base_state}",
            want=f"{facts.state}, the state of {before}",
            next_step="copy all versions of one training run again from where they were written",
        )
    return replace(later, base_version=facts.base_version, base_state=facts.base_state)


def _fold(
    facts: DeltaFacts, bodies: dict[str, list[tuple[int, int, str, str]]], source: OpenSource
) -> tuple[Bodies, list[OutputTensor]]:
    """Return the composed bodies, and the tensors, as bytes, that they are of."""
    names, found = sorted(bodies), list[DeltaBody]()
    opened = {
        name: [partial(RecordStream, source, record, nbytes) for record, nbytes, _, _ in own]
        for name, own in bodies.items()
    }
    rooms = {}
    for number, name in enumerate(names):
        rooms[number] = bodies[name][0][1]
        if len(bodies[name]) > 1:
            with _explain(name, bodies[name][-1][-1], facts.encoding):
                contents = sum(max(0, frame_content_nbytes(open_body())) for open_body in opened[name])
            rooms[number] = most_frame_nbytes("xor", contents)
    file = FrameFile(rooms)
    for number, name in enumerate(names):
        own, put, is_changed = bodies[name], partial(file.put, number), True
        if len(own) > 1:
            with _explain(name, own[-1][-1], facts.encoding):
                is_changed = fold_bodies(facts.encoding, opened[name], put)
        else:
            stream = opened[name][0]()
            while data := stream.read(_CHUNK_NBYTES):
                put(data)
        found.append(DeltaBody(number, file.frame(number).nbytes if is_changed else 0, own[-1][2]))
    frames = [file.frame(one.number) for one in found if one.nbytes]
    return Bodies(found, frames), [OutputTensor(name, "U8", (0,)) for name in names]


@contextmanager
def _explain(name: str, path: str, encoding: str) -> Iterator[None]:
    try:
        yield
    except DamagedBodyError as error:
        problem, want = f"{name}: its changes contradict each other", f"bodies of {encoding} of one tensor"
        step = "copy the versions again from where they were written"
        raise CorruptError(problem, file=path, tensor=name, got=str(error), want=want, next_step=step) from error
