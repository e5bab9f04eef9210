"""Ranks that share an export or a gather: one of them is killed, or its disk fails, at a call of its own."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import xrank
from tests.commands.exported import tensors_of
from tests.commands.forked_exports import ForkedExports, forked_exports
from tests.commands.forked_ranks import ForkedRanks, forked_ranks
from tests.commands.made_workspaces import layout_of, leave, wide_model
from tests.commands.strikes import digests
from tests.commands.test_export_killed import NEW, OLD, Exports
from tests.faults.findings import Findings

__all__ = ["Gathers", "stop_ranks"]

_WHAT = ("kill", "kill", "kill", "ENOSPC", "EIO", "ESTALE", "EDQUOT")
_MOMENTS = {
    ("export", True): 110,
    ("export", False): 40,
    ("gather", True): 90,
    ("gather", False): 30,
    ("delta", True): 110,
    ("delta", False): 60,
}
"""Calls of a rank in a whole run, roughly, by work and by whether it is the first rank."""
_SMALL: dict[str, Any] = {"window_nbytes": 4096, "round_nbytes": 20_000}


def stop_ranks(folder: Path, seed: int, count: int) -> Findings:
    """Stop one of four ranks so often, in turn in an export, a gather, and an export of what has changed."""
    findings = Findings()
    with forked_exports() as exporting, forked_ranks() as gathering:
        (folder / "exports").mkdir()
        exports, gathers = Exports(exporting, folder / "exports"), Gathers(gathering, folder / "gathers")
        deltas = DeltaExports(exporting, folder / "deltas")
        for number in range(seed, seed + count):
            rng = random.Random(number)
            work, victim, what = ("export", "gather", "delta")[number % 3], rng.randrange(4), rng.choice(_WHAT)
            act = (victim, what, rng.randint(1, _MOMENTS[work, victim == 0]))
            overwrite = rng.random() < 0.5
            where = f"seed {number}: {work}, rank {victim}, {what} at call {act[2]}{', overwrite' if overwrite else ''}"
            findings.count(f"{work}: {'kills' if what == 'kill' else 'errors'}")
            try:
                if work == "gather":
                    _stop_gather(gathers, act, overwrite, findings)
                else:
                    _stop_export(exports if work == "export" else deltas, act, overwrite, findings)
            except AssertionError as error:
                findings.report(f"{work}: {str(error)[:80]}", f"{where}\n    {str(error)[:1500]}")
    return findings


class DeltaExports(Exports):
    """Exports of what has changed since the model of a third step."""

    def __init__(self, ranks: ForkedExports, folder: Path) -> None:
        folder.mkdir()
        self.ranks, self.out, self.folder = ranks, folder / "weight_v000001", folder
        base = folder / "weight_v000000"
        ranks(base, step=2)
        self.options: dict[str, Any] = {"delta_from": str(base)}
        self.known = {}
        for step in (OLD, NEW):
            self.right(self(step=step), step)
            xrank.apply_deltas(base, self.out, folder / f"applied {step}")
            want = wide_model(step)
            assert digests(tensors_of(folder / f"applied {step}").items()) == digests(want.items())
            self.known[step] = self.content()
            shutil.move(self.out, folder / f"model of step {step}")

    def __call__(self, *, step: int = NEW, **job: Any) -> list[Any]:
        return self.ranks(self.out, step=step, options={**self.options, **job.pop("options", {})}, **job)


def _stop_export(exports: Exports, act: tuple[int, str, int], overwrite: bool, findings: Findings) -> None:
    exports.clear(old=overwrite)
    options = {"overwrite": overwrite}
    said = exports(options=options, act=act)
    seen = exports.seen()
    findings.count(f"seen { {None: 'absent', OLD: 'old', NEW: 'new'}[seen] }")
    assert seen in ((OLD, NEW) if overwrite else (None, NEW)), "another output is visible"
    victim = act[0]
    ended = [rank for rank, one in enumerate(said) if one is not None and "report" in one]
    assert seen == NEW or not ended, f"ranks {ended} end well without an output"
    for rank, one in enumerate(said):
        if one is not None and rank not in ended:
            is_own = rank == victim and one["type"] != "RankFailedError"
            assert is_own or one.get("rank") == victim, f"rank {rank} does not name rank {victim}: {one}"
            assert not is_own or one.get("file") or "memory" in one["message"], f"an error without a file: {one}"
            assert one["type"] != "RuntimeError", f"a raw error: {one}"
    if seen != NEW or overwrite:
        exports.right(exports(options=options))


class Gathers:
    """Gathers of one workspace by four ranks, and what may be seen of them."""

    def __init__(self, ranks: ForkedRanks, folder: Path) -> None:
        self.ranks, self.out, self.source = ranks, folder / "model", folder / "ws"
        model = wide_model()
        folder.mkdir()
        leave(self.source, model, layouts={name: layout_of(name) for name in model})
        assert not any(rank.exit_code for rank in self())
        self.known = self.content()

    def __call__(self, *options: str, **job: Any) -> list[Any]:
        words = ("gather", self.source, "--out", self.out, "--max-shard-size", "60KB", *options)
        return self.ranks(*words, **_SMALL, **job)

    def content(self) -> dict[str, bytes] | None:
        return {path.name: path.read_bytes() for path in self.out.iterdir()} if self.out.exists() else None


def _stop_gather(gathers: Gathers, act: tuple[int, str, int], overwrite: bool, findings: Findings) -> None:
    shutil.rmtree(gathers.out, ignore_errors=True)
    if overwrite:
        gathers.out.mkdir()
        (gathers.out / "config.json").write_text("old")
    before = gathers.content()
    options = ("--overwrite",) if overwrite else ()
    said = gathers(*options, act=act)
    seen = gathers.content()
    findings.count(f"seen {'new' if seen == gathers.known else 'absent' if seen is None else 'old'}")
    assert seen in (before, gathers.known), "a part of an output is visible"
    ended = [rank for rank, one in enumerate(said) if one.exit_code == 0]
    assert seen == gathers.known or not ended, f"ranks {ended} end well without an output"
    for rank, one in enumerate(said):
        assert one.exit_code in (0, 1, 2) or (rank == act[0] and one.exit_code == -9), (
            f"exit {one.exit_code}: {one.stderr}"
        )
        assert "Traceback" not in one.stderr and "a bug in xrank" not in one.stderr, one.stderr
    again = gathers(*options)
    assert not any(one.exit_code for one in again), f"the next run fails: {[one.stderr for one in again]}"
    assert gathers.content() == gathers.known, "the next run makes another output"
    left = [path.name for path in gathers.out.parent.iterdir() if path.name.startswith(".")]
    assert not left, f"the next run leaves {left}"
