"""Planted faults: 30 kinds of damage to a file of a checkpoint, with the records that each of them makes useless."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.commands.made_workspaces import leave, made_model
from tests.readers import made_zero
from tests.readers.made_megatron import Run, _Files, whole_model, write_config, write_dist, write_legacy
from tests.readers.rank_checkpoints import verl
from xrank.formats.dcp_metadata import read_metadata
from xrank.layout import DeviceMesh
from xrank.layout.stored_model import StoredModel
from xrank.recipes.sources import read_source
from xrank.testing.rank_pool import RankPool

__all__ = ["KINDS", "SOURCES", "Planted", "Source", "cases", "make_source", "plant"]

MESH = DeviceMesh((3, 2), ("dp", "tp"))


def _workspace(folder: Path, *, step: int = 2000, run: str = "run-7f3a", ranks: int = 6, seed: int = 0) -> None:
    mesh = MESH if ranks == 6 else DeviceMesh((2, 2), ("dp", "tp"))
    model = made_model(seed)
    if seed:
        model = {name: torch.cat((tensor, tensor)) for name, tensor in model.items()}
    leave(folder, model, mesh=mesh, run_id=run, step=step)


def _zero(folder: Path, *, step: int = 2, run: str = "", ranks: int = 6, seed: int = 0) -> None:
    model = made_zero.made_model(seed)
    if seed:
        grown = [{name: torch.cat((t, t)) if t.dim() else t for name, t in group.items()} for group in model.groups]
        model = replace(model, groups=grown)
    changed: dict[str, Any] = {"ds_version": run} if run else {}
    other: dict[str, Any] = {"dynamic_loss_scale": False} if run else {}
    how = made_zero.Zero(stage=3, num_ranks=ranks, step=step, changed_state=changed, changed_optimizer=other)
    made_zero.write_zero(folder, model, how)


def _run(*, step: int, run: str, ranks: int, seed: int) -> Run:
    args = {"seed": 1 if run else 0, "hidden_dropout": 0.1 * seed}
    return Run(tp=ranks // 2, pp=2, chunks=((2, 2),), iteration=step, args=args)


def _legacy(folder: Path, *, step: int = 10, run: str = "", ranks: int = 8, seed: int = 0) -> None:
    how = _run(step=step, run=run, ranks=ranks, seed=seed)
    write_legacy(folder, how, whole_model(how))
    write_config(folder, how)


def _dist(folder: Path, *, step: int = 10, run: str = "", ranks: int = 4, seed: int = 0) -> None:
    how = replace(_run(step=step, run=run, ranks=ranks * 2, seed=seed), pp=1, chunks=((3 if seed else 2,),))
    write_dist(folder, how, whole_model(how))
    write_config(folder, how)


def _dcp(folder: Path, *, step: int = 0, run: str = "", ranks: int = 4, seed: int = 0) -> None:
    """Write as torch's planner does: rows on ranks, and whole tensors on one of them."""
    folder.mkdir(parents=True)
    files, listed, rng = _Files(folder), dict[str, Any](), torch.Generator().manual_seed(seed)
    for number in range(10):
        shape = (8 + 4 * seed, 4 + number) if number % 3 else (5 + number,)
        tensor = torch.rand(shape, generator=rng) + 0.5
        parts = tensor.chunk(ranks) if number % 3 else [tensor]
        start, chunks = 0, []
        for place, part in enumerate(parts):
            offset = torch.Size((start, *[0] * (tensor.dim() - 1)))
            rank = place if number % 3 else number // 3 % ranks
            files.add(rank, MetadataIndex(f"{number}.weight", offset, place), part.clone())
            chunks.append(ChunkStorageMetadata(offset, part.shape))
            start += len(part)
        properties = TensorProperties(dtype=tensor.dtype)
        listed[f"{number}.weight"] = TensorStorageMetadata(properties, tensor.shape, chunks)
    files.finish()
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(listed, None, files.places)))


def _verl(pool: RankPool, folder: Path, *, step: int = 0, run: str = "", ranks: int = 4, seed: int = 0) -> None:
    verl(pool, folder, "fsdp2 x tp" if seed else "hsdp", num_ranks=ranks)


SOURCES: Mapping[str, tuple[Callable[..., None], str]] = {
    "workspace": (_workspace, "rank_*_state.pth"),
    "DCP": (_dcp, "*.distcp"),
    "ZeRO-3": (_zero, "**/*_states.pt"),
    "verl": (_verl, "model_*.pt"),
    "Megatron": (_legacy, "**/model_optim_rng.pt"),
    "torch_dist": (_dist, "**/*.distcp"),
}
"""Format -> its maker, and the files with pieces of tensors."""


@dataclass(frozen=True)
class Source:
    """A checkpoint in a folder, and others from which foreign files come."""

    name: str
    folder: Path
    files: tuple[Path, ...]
    model: StoredModel
    foreign: Mapping[str, Path]
    items: Mapping[str, tuple[tuple[int, int], ...]]
    """File -> first byte and end of each item, where a file is made of several archives."""


def make_source(name: str, folder: Path, pool: RankPool) -> Source:
    """Make a source, and what its foreign files come from."""
    make, pattern = SOURCES[name]
    first = (pool,) if name == "verl" else ()
    more = {
        "step": {"step": 2050 if name == "workspace" else 12},
        "run": {"run": "another"},
        "world": {"ranks": 2 if name == "verl" else 4},
        "model": {"seed": 1, **({"run": "another"} if name == "workspace" else {})},
    }
    with warnings.catch_warnings(action="ignore"):
        make(*first, folder / "source")
        foreign = {}
        for kind, options in more.items():
            if (name, kind) not in BLIND:
                make(*first, folder / kind, **options)
                foreign[kind] = folder / kind
    model = read_source(str(folder / "source")).model
    files = tuple(sorted((folder / "source").glob(pattern)))
    items = {}
    for path in (folder / "source").rglob(".metadata"):
        metadata = read_metadata(str(path))
        for tensor in metadata.tensors.values():
            columns = (one.tolist() for one in (tensor.file, tensor.start, tensor.nbytes))
            for file, start, nbytes in zip(*columns, strict=True):
                items.setdefault(str(path.parent / metadata.files[file]), []).append((start, start + nbytes))
    return Source(name, folder / "source", files, model, foreign, {file: tuple(own) for file, own in items.items()})


# ---- kinds of damage


@dataclass(frozen=True)
class Planted:
    """A fault that was planted."""

    kind: str
    file: Path
    lost: frozenset[int]
    """Records whose bytes are useless."""
    others: tuple[Path, ...] = ()
    """Files that the error may name instead of the damaged one."""


Bytes = Callable[[bytes, random.Random], bytes]
WHOLE: Mapping[str, Bytes] = {
    "empty": lambda good, rng: b"",
    "half": lambda good, rng: good[: len(good) // 2],
    "a byte short": lambda good, rng: good[:-1],
    "100 bytes": lambda good, rng: good[:100],
    "zeros": lambda good, rng: bytes(len(good)),
    "zeros at the end": lambda good, rng: good[:-300] + bytes(300),
    "garbage at the end": lambda good, rng: good[:-300] + rng.randbytes(300),
    "garbage": lambda good, rng: rng.randbytes(len(good)),
    "garbage at the start": lambda good, rng: rng.randbytes(64) + good[64:],
    "a byte more within": lambda good, rng: good[: len(good) // 3] + b"x" + good[len(good) // 3 :],
    "a byte less within": lambda good, rng: good[: len(good) // 3] + good[len(good) // 3 + 1 :],
    "a text": lambda good, rng: b"<html>404 Not Found</html>\n",
    "a pointer of git-lfs": lambda good, rng: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n",
    "another archive": lambda good, rng: _saved([1, 2, 3]),
    "a hostile pickle": lambda good, rng: _saved({"model": _Hostile(), "weight": _Hostile(), "module": _Hostile()}),
}
"""Kind -> the file's content; all of a file is useless, or its items from the first changed byte on."""
SHIFTED = {
    *("garbage", "garbage at the start", "garbage at the end", "a byte more within", "a byte less within"),
    *("a text", "a pointer of git-lfs", "another archive", "a hostile pickle"),
}
"""Kinds that leave no item where it was, or one without its ends: the file may be of another save."""
PAYLOAD: Mapping[str, Bytes] = {
    "a bit": lambda good, rng: _changed(good, rng.randrange(len(good)), lambda byte: byte ^ 1 << rng.randrange(8)),
    "the first byte": lambda good, rng: _changed(good, 0, lambda byte: byte ^ 255),
    "the last byte": lambda good, rng: _changed(good, len(good) - 1, lambda byte: byte ^ 1),
    "a burst": lambda good, rng: bytes(byte ^ 85 for byte in good[:16]) + good[16:],
    "zeros within": lambda good, rng: bytes(len(good) // 2) + good[len(good) // 2 :],
    "halves swapped": lambda good, rng: good[len(good) // 2 :] + good[: len(good) // 2],
}
"""Kind -> the content of a record in the file."""
OTHER = ("missing", "a folder", "a link to nothing", "a fifo", "a copy", "a link to another rank's file")
FOREIGN = ("of another step", "of another run", "of another world", "of another model")
KINDS = (*WHOLE, *PAYLOAD, *OTHER, *FOREIGN)
BLIND = {
    *(("DCP", kind) for kind in ("step", "run", "world")),  # their shards record none of it
    *(("torch_dist", kind) for kind in ("step", "run", "world")),
    *(("verl", kind) for kind in ("step", "run")),
}
"""Formats whose files do not record a fact, docs/formats.md, "Blind spots"."""
ALONE = {*FOREIGN, "a copy", "a link to another rank's file"}
"""Kinds of which one is in a checkpoint: the other files outvote it."""


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("true",))


def _saved(value: object) -> bytes:
    stream = BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _changed(good: bytes, at: int, change: Callable[[int], int]) -> bytes:
    return good[:at] + bytes([change(good[at])]) + good[at + 1 :]


def cases(seeds: Iterable[int]) -> list[tuple[str, str, int]]:
    """Return (format, kind, faults in all) of every combination."""
    return [
        (name, kind, 1 + (number + row + seed) % 3)
        for number, name in enumerate(SOURCES)
        for row, kind in enumerate(KINDS)
        if (name, kind.rpartition(" ")[2]) not in BLIND
        for seed in seeds
    ]


def _records_of(source: Source, file: Path) -> list[int]:
    number = next(n for n, one in enumerate(source.model.files) if one.path == str(file))
    return np.flatnonzero(source.model.records.file == number).tolist()


def _names_of(source: Source, file: Path) -> list[str]:
    own = {*_records_of(source, file)}
    return [shard.name for shard in source.model.shards if own & {*shard.record.tolist()}]


def _after(source: Source, file: Path, good: bytes, bad: bytes) -> frozenset[int]:
    """Return the records of items with a changed or missing byte; all records of a file that is one archive."""
    records = _records_of(source, file)
    if str(file) not in source.items:
        return frozenset(records)
    first = next((at for at, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), min(len(good), len(bad)))
    last = len(good)
    if len(good) == len(bad):
        last = len(good) - next(at for at, (a, b) in enumerate(zip(good[::-1], bad[::-1], strict=True)) if a != b)
    spans = [(start, end) for start, end in source.items[str(file)] if start < last and end > first]
    table = source.model.records
    return frozenset(r for r in records if any(start <= int(table.offset[r]) < end for start, end in spans))


def plant(source: Source, kind: str, file: Path, rng: random.Random) -> Planted | None:
    """Damage a file; return what that makes useless, or None if the kind cannot be planted there."""
    good, every = file.read_bytes(), frozenset(_records_of(source, file))
    if kind in WHOLE:
        bad = WHOLE[kind](good, rng)
        lost = _after(source, file, good, bad)
        if not lost:  # of pieces that no gather reads
            return None
        lost = every if kind in SHIFTED else lost
        file.write_bytes(bad)
        return Planted(kind, file, lost)
    if kind in PAYLOAD:
        table = source.model.records
        record = rng.choice([r for r in every if int(table.nbytes[r]) > 3] or [0])
        start = int(table.offset[record])
        content = good[start : start + int(table.nbytes[record])]
        bad = PAYLOAD[kind](content, rng)
        if bad == content or record not in every:
            return None
        file.write_bytes(good[:start] + bad + good[start + len(content) :])
        return Planted(kind, file, frozenset([record]))
    if kind in FOREIGN:
        other = source.foreign[kind.rpartition(" ")[2]]
        name = file.name.replace("_4_rank_", "_2_rank_") if "world" in kind else file.name
        found = [
            path for path in other.rglob(name) if path.parent.name == file.parent.name or source.name != "Megatron"
        ]
        if not found:
            return None
        shutil.copyfile(found[0], file)
        return Planted(kind, file, every)
    shape = re.sub("[0-9]+", "0", file.name)
    alike = [other for other in source.files if other != file and re.sub("[0-9]+", "0", other.name) == shape]
    if kind in ("a copy", "a link to another rank's file"):
        other = rng.choice(alike)
        if other.is_symlink() or not other.is_file():
            return None
        content = other.read_bytes()
        file.unlink()
        file.write_bytes(content) if kind == "a copy" else file.symlink_to(other)
        # If both files should have pieces of the same tensors, one is a copy, and which is unknown.
        is_doubtful = str(file) in source.items and _names_of(source, file) == _names_of(source, other)
        return Planted(kind, file, every | {*_records_of(source, other)} if is_doubtful else every, (other,))
    file.unlink()
    if kind == "a folder":
        file.mkdir()
    elif kind == "a link to nothing":
        file.symlink_to("nothing")
    elif kind == "a fifo":
        os.mkfifo(file)
    return Planted(kind, file, every)
