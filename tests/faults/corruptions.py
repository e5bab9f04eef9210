"""Damaged sources and outputs: a gather or a verification of them must end with an error, or with the same model."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from tests.commands.made_workspaces import leave
from tests.faults.findings import Findings
from tests.readers.made_megatron import Run, whole_model, write_config, write_dist, write_legacy
from tests.readers.made_zero import Zero, made_model, write_universal, write_zero
from tests.readers.orbax_checkpoints import save_tree
from xrank.commands.gather import gather_checkpoint
from xrank.commands.verify import verify_model
from xrank.errors import XrankError

__all__ = ["SOURCES", "corrupt_sources"]


@dataclass(frozen=True)
class Source:
    """A source of one format.

    Args:
        name: of the format.
        make: makes it in a folder.
        blind: ends of names of files that have no checksums; docs/formats.md, "Blind spots", has the reasons.
    """

    name: str
    make: Callable[[Path], object]
    blind: tuple[str, ...] = ()


def corrupt_sources(folder: Path, seed: int, count: int) -> Findings:
    """Damage sources and outputs so often, gather or verify each, and compare what comes out."""
    findings = Findings()
    sources = [(source, *_made(folder, source)) for source in SOURCES]
    out, shown = folder / "out", {"out": folder / "model"}
    gather_checkpoint(folder / "workspace", shown["out"], max_shard_size="600", recipe="none")
    for number in range(seed, seed + count):
        rng = random.Random(number)
        if number % 8 == 7:
            _corrupt_output(shown["out"], rng, findings, f"seed {number}")
            continue
        source, place, files, known = sources[rng.randrange(len(sources))]
        path = rng.choices(files, [max(512, file.stat().st_size) for file in files])[0]
        good = path.read_bytes()
        bad, how = damage(good, rng)
        if bad == good:
            continue
        status = path.stat()
        path.write_bytes(bad)
        where = f"seed {number}: {source.name}, {path.name}: {how}"
        try:
            gather_checkpoint(place, out, recipe="none", workers=1)
        except XrankError as error:
            findings.count(f"{source.name}: exit {error.exit_code}")
            if error.exit_code == 1:
                findings.report(f"{source.name}: exit 1 of {type(error).__name__}: {error.message[:60]}", where)
            if out.exists():
                findings.report(f"{source.name}: a refused gather leaves an output", where)
        except Exception as error:
            findings.report_raw(error, where)
        else:
            if _content(out) == known:
                findings.count(f"{source.name}: harmless")
            elif path.name.endswith(source.blind):
                findings.count(f"{source.name}: unseen, as the docs say")
            else:
                findings.report(f"{source.name}: silent, {path.name}", where)
        finally:
            path.write_bytes(good)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            shutil.rmtree(out, ignore_errors=True)
            for left in folder.glob(".out.*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        findings.count("corruptions")
    return findings


def _corrupt_output(model: Path, rng: random.Random, findings: Findings, where: str) -> None:
    """Damage a file of an output, and verify it."""
    path = rng.choice(sorted(model.iterdir()))
    good = path.read_bytes()
    bad, how = damage(good, rng)
    if bad == good:
        return
    path.write_bytes(bad)
    where = f"{where}: output, {path.name}: {how}"
    try:
        _raise_fault(model)
    except XrankError as error:
        findings.count(f"output: exit {error.exit_code}")
        if error.file is None:
            findings.report(f"output: no file is named for {path.name}", f"{where}\n{error}")
    except Exception as error:
        findings.report_raw(error, where)
    else:
        if path.name == "xrank_manifest.json":
            findings.count("output: a manifest that is as good")
        else:
            findings.report(f"output: unseen, {path.name}", where)
    finally:
        path.write_bytes(good)
    findings.count("corruptions")


def _raise_fault(model: Path) -> None:
    report = verify_model(model)
    if report.fault is not None:
        raise report.fault


def _made(folder: Path, source: Source) -> tuple[Path, list[Path], dict[str, bytes]]:
    """Make a source; return its folder, its files, and the result of its gather."""
    place = folder / source.name.replace(" ", "-")
    with warnings.catch_warnings(action="ignore"):
        source.make(place)
    gather_checkpoint(place, folder / "known", recipe="none")
    known = _content(folder / "known")
    shutil.rmtree(folder / "known")
    return place, sorted(path for path in place.rglob("*") if path.is_file()), known


def _content(folder: Path) -> dict[str, bytes]:
    """Return the files of an output but its manifest, which knows the source's times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "xrank_manifest.json"}


def damage(good: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return damaged content, and how it was damaged."""
    bad = bytearray(good)
    at = rng.randrange(len(bad)) if bad else 0
    size = min(len(bad) - at, rng.choice((1, 2, 8, 64, 512, 4096)))
    match rng.choice(
        ("bit", "bit", "bit", "bits", "burst", "zeros", "cut", "tail", "swap", "copy", "insert", "delete")
    ):
        case "bit" if bad:
            bad[at] ^= 1 << rng.randrange(8)
            return bytes(bad), f"a bit of byte {at}"
        case "bits":
            for _ in range(rng.randrange(2, 9)):
                place = rng.randrange(max(1, len(bad)))
                if bad:
                    bad[place] ^= 1 << rng.randrange(8)
            return bytes(bad), "some bits"
        case "burst":
            bad[at : at + size] = rng.randbytes(size)
            return bytes(bad), f"{size} bytes at {at}"
        case "zeros":
            bad[at : at + size] = bytes(size)
            return bytes(bad), f"{size} zeros at {at}"
        case "cut":
            return bytes(bad[:at]), f"cut to {at} bytes"
        case "tail":
            return bytes(bad[:at]).ljust(len(bad), b"\0"), f"zeros from {at} on"
        case "swap":
            block = min(512, max(1, len(bad) // 4))
            other = rng.randrange(max(1, len(bad) - block + 1))
            at = min(at, len(bad) - block) if len(bad) >= block else 0
            one, two = bytes(bad[at : at + block]), bytes(bad[other : other + block])
            bad[at : at + block], bad[other : other + block] = two, one
            return bytes(bad), f"{block} bytes at {at} and {other} swapped"
        case "copy":
            other = rng.randrange(max(1, len(bad) - size + 1))
            bad[at : at + size] = bad[other : other + size]
            return bytes(bad), f"{size} bytes at {at} are those at {other}"
        case "insert":
            bad[at:at] = rng.randbytes(rng.randrange(1, 9))
            return bytes(bad), f"bytes inserted at {at}"
    del bad[at : at + size]
    return bytes(bad), f"{size} bytes at {at} deleted"


def _save_dcp(folder: Path) -> None:
    model = made_model()
    dcp.save({"model": dict(model.expected)}, checkpoint_id=str(folder), no_dist=True)


def _save_torch(folder: Path) -> None:
    folder.mkdir()
    torch.save({"model": dict(made_model().expected), "step": 3}, folder / "model.pt")


def _save_bin(folder: Path) -> None:
    folder.mkdir()
    torch.save(dict(made_model().expected), folder / "pytorch_model.bin")
    (folder / "config.json").write_text('{"model_type": "mine"}')


def _save_safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    model = made_model().expected
    save_file({name: tensor.contiguous().clone() for name, tensor in model.items()}, folder / "model.safetensors")


def _save_orbax(folder: Path) -> None:
    tree = {
        ("params", name): np.arange(number, number + 24, dtype=np.float32).reshape(4, 6)
        for number, name in enumerate("abc")
    }
    save_tree(folder, tree)


def _megatron(write: Callable[..., Path], folder: Path) -> None:
    run = Run(tp=2, pp=2, chunks=((1, 1),))
    write(folder, run, whole_model(run))
    write_config(folder, run)


SOURCES = (
    Source("workspace", leave),
    Source("DCP", _save_dcp, (".metadata",)),
    Source("ZeRO-3", lambda folder: write_zero(folder, made_model(), Zero(stage=3, num_ranks=2))),
    Source("ZeRO-2", lambda folder: write_zero(folder, made_model(), Zero(stage=2, num_ranks=3))),
    Source("universal", lambda folder: write_universal(folder, made_model(), Zero(num_ranks=2))),
    Source("Megatron", lambda folder: _megatron(write_legacy, folder), ("config.json",)),
    Source("Megatron torch_dist", lambda folder: _megatron(write_dist, folder), (".metadata", "config.json")),
    Source("torch-save", _save_torch),
    Source("bin", _save_bin, ("config.json",)),
    Source("safetensors", _save_safetensors, ("model.safetensors",)),
    Source("orbax", _save_orbax),
)
