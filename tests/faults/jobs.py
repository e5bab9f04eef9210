"""Work that changes a disk, each with what may be seen of it: nothing, the old output or the new one, never a part."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import xrank
from tests.commands.adapted_models import leave_adapted
from tests.commands.made_workspaces import CONFIG, LAYOUTS, MESH, cut, leave, made_model
from tests.faults.findings import Findings
from tests.readers.made_deltas import change_model, write_delta, write_whole
from tests.readers.made_deltas import make_model as make_deltas_model
from tests.storage.gathered import EXTRA
from tests.storage.kill_points import in_child
from xrank.commands.gather import gather_checkpoint
from xrank.commands.reshard import reshard_checkpoint
from xrank.layout import DeviceMesh, LayoutMap
from xrank.storage import disk as disk_calls
from xrank.workspace.nfs import NFSWorkspace

__all__ = ["EXTRA", "Job", "make_jobs"]

_OPTIONS: dict[str, Any] = {"max_shard_size": "600", "workers": 1}
_PLAN = re.compile(rb'"plan": .*')


@dataclass
class Job:
    """Some work in a folder.

    Args:
        name: of the job.
        folder: where everything is.
        out: the folder or file that the work makes.
        work: makes it.
        has_old: whether an old output is in place before.
        is_exchanged: whether the old output is replaced at one instant; if not, it may be absent for an instant.
        begins: leaves the files of an earlier run, from which the work goes on; None: there was no such run.
    """

    name: str
    folder: Path
    out: Path
    work: Callable[[], object]
    has_old: bool = False
    is_exchanged: bool = True
    begins: Callable[[], object] | None = None
    known: dict[str, Any] = field(default_factory=dict)

    def learn(self, make_old: Callable[[], object] | None = None) -> Job:
        """Make the old output and the new one once, to know them; return this job."""
        if make_old is not None:
            make_old()
            self.known["old"] = self.content()
            self._move(self.out, self._kept("old"))
        self.work()
        self.known["new"] = self.content()
        self._remove(self.out)
        if self.begins is not None:
            self.reset()
            self.begins()
            for path in self.beside():
                self._move(path, self.folder / f"kept.{path.name[1:]}")
        self.reset()
        return self

    def content(self) -> Any:
        """Return the output's files, without the plan's digest of manifests, which depends on the sources' times."""
        if self.out.is_file():
            return self.out.read_bytes()
        return {
            str(path.relative_to(self.out)): _PLAN.sub(b"", path.read_bytes())
            for path in sorted(self.out.rglob("*"))
            if path.is_file()
        }

    def seen(self) -> str:
        """Return which output is visible: absent, old, new, or a part of one."""
        if not os.path.lexists(self.out):
            return "absent"
        found = self.content()
        return next((version for version, content in self.known.items() if content == found), "a part")

    @property
    def before(self) -> str:
        """The version of the output that is visible before the work."""
        return "old" if self.has_old else "absent"

    def allowed(self) -> set[str]:
        """Return the versions of the output that may be visible at any moment."""
        return {self.before, "new"} | (set() if self.is_exchanged else {"absent"})

    def beside(self) -> list[Path]:
        """Return the hidden and the half-written files beside the output."""
        return [path for path in self.folder.iterdir() if path.name.startswith(".") or path.name.endswith(".part")]

    def reset(self) -> None:
        """Put the disk into the state before the work."""
        for path in (*self.beside(), self.out):
            self._remove(path)
        if self.has_old:
            self._copy(self._kept("old"), self.out)
        for path in self.folder.glob("kept.*"):
            if path != self._kept("old"):
                self._copy(path, self.folder / f".{path.name.removeprefix('kept.')}")

    def finish(self) -> str | None:
        """Do the work again, as the user would; return the fault of that run, or None."""
        try:
            self.work()
        except Exception as error:
            if self.seen() == "new":  # an output that is there may be refused
                return None
            return f"the next run fails: {type(error).__name__}: {error}"
        if self.seen() != "new":
            return f"after the next run {self.seen()} is visible"
        left = [path.name for path in self.beside()]
        return f"the next run leaves {left[0]}" if left else None

    def judge(self, findings: Findings, where: str, *, after: str = "", is_done: bool = False) -> None:
        """Report an output that may not be visible, then run the job again and report a fault of that.

        Args:
            findings: gets the reports.
            where: the place of the stop.
            after: the event before, such as ``" after a power loss"``.
            is_done: whether the work had ended well, so that the new output must be there.
        """
        seen = self.seen()
        findings.count(f"seen {seen}")
        if seen not in self.allowed():
            findings.report(f"{self.name}: {seen} is visible{after}", where)
        elif is_done and seen != "new":
            findings.report(f"{self.name}: done, and lost{after}", where)
        elif (fault := self.finish()) is not None:
            findings.report(f"{self.name}: {fault[:90]}", f"{where}\n{fault}")

    def _kept(self, version: str) -> Path:
        return self.folder / f"kept.{version}"

    @staticmethod
    def _remove(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()

    @staticmethod
    def _move(source: Path, target: Path) -> None:
        shutil.move(source, target)

    @staticmethod
    def _copy(source: Path, target: Path) -> None:
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, target)


def make_jobs(folder: Path) -> Iterator[Job]:
    """Make the jobs one after the other, each in a folder of its own."""
    for make in _MAKERS:
        yield from make(folder / make.__name__.strip("_"))


def _source(folder: Path, seed: int, version: str) -> None:
    leave(folder / "ws", made_model(seed), config={**CONFIG, "version": version})


def _gathers(folder: Path) -> Iterator[Job]:
    """Gathers of a workspace: new, over an old model with and without an exchange of names, gone on with, read back."""
    for name, options in (
        ("gather", {}),
        ("gather, overwrite", {"overwrite": True}),
        ("gather, overwrite without exchange", {"overwrite": True}),
        ("gather, resumed", {}),
        ("gather, overwrite, resumed", {"overwrite": True}),
        ("gather, verify", {"verify": True, "resume": False}),
        ("gather, one file", {"max_shard_size": "5GB"}),
        ("gather, code and chat templates", {}),
        ("gather, quantized", {"quantize": "FP8_DYNAMIC"}),
        ("gather, quantized, overwrite", {"quantize": "FP8_BLOCK", "overwrite": True}),
        ("gather, quantized, resumed", {"quantize": "W8A8"}),
    ):
        place = folder / name.replace(", ", "-").replace(" ", "-")
        base = place / "base"
        base.mkdir(parents=True)
        (base / "config.json").write_text("{}")
        (base / "tokenizer.json").write_text("{}")
        if "code" in name:
            (base / "code").mkdir()
            (base / "code" / "model.py").write_text("print()")
        has_old = "overwrite" in name
        given = {**_OPTIONS, "base_model": base, **options}
        work = _call(gather_checkpoint, place / "ws", place / "model", **given)
        if "without exchange" in name:
            work = _without_exchange(work)
        job = Job(
            name,
            place,
            place / "model",
            work,
            has_old=has_old,
            is_exchanged="without exchange" not in name,
        )
        if "resumed" in name:
            job.begins = _interrupted(job)
        if has_old:
            _source(place, 1, "old")
            _call(gather_checkpoint, place / "ws", place / "model", **given)()
            old = job.content()
            shutil.move(place / "model", place / "kept.old")
            job.known["old"] = old
        _source(place, 0, "new")
        yield job.learn()


def _adapters(folder: Path) -> Iterator[Job]:
    """A gather that writes an adapter's folder beside the model's weights."""
    folder.mkdir()
    leave_adapted(folder / "ws")
    yield Job(
        "gather, adapter",
        folder,
        folder / "model",
        _call(gather_checkpoint, folder / "ws", folder / "model", **_OPTIONS),
    ).learn()


def _reshards(folder: Path) -> Iterator[Job]:
    """Reshards to three ranks: new, and over an old workspace."""
    layouts = LayoutMap(DeviceMesh((3,), ("r",)))
    for name, tensor in made_model().items():
        layouts[name] = "[n/~r, m]" if tensor.ndim == 2 else "[n/~r]"
    for name, overwrite in (("reshard", False), ("reshard, overwrite", True), ("reshard, resumed", False)):
        place = folder / name.replace(", ", "-")
        place.mkdir(parents=True)
        work = _call(reshard_checkpoint, place / "ws", layouts, place / "new", workers=1, overwrite=overwrite)
        job = Job(name, place, place / "new", work, has_old=overwrite)
        if "resumed" in name:
            job.begins = _interrupted(job)
        if overwrite:
            _source(place, 1, "old")
            work()
            job.known["old"] = job.content()
            shutil.move(place / "new", place / "kept.old")
        _source(place, 0, "new")
        yield job.learn()


def _exports(folder: Path) -> Iterator[Job]:
    """Exports of a model in the memory of one process."""
    for name, overwrite in (("export", False), ("export, overwrite", True)):
        place = folder / name.replace(", ", "-")
        place.mkdir(parents=True)

        def work(seed: int = 0, place: Path = place, overwrite: bool = overwrite) -> None:
            overrides = {"model_type": "toy"}
            xrank.export_model(
                made_model(seed), place / "model", max_shard_size="600", overwrite=overwrite, config_overrides=overrides
            )

        job = Job(name, place, place / "model", work, has_old=overwrite)
        yield job.learn((lambda work=work: work(1)) if overwrite else None)


def _states(folder: Path) -> Iterator[Job]:
    """A rank's state in a workspace: new, and in place of its earlier one."""
    layouts = LayoutMap(MESH)
    for tensor, text in LAYOUTS.items():
        layouts[tensor] = text
    for name, has_old in (("state", False), ("state, again", True)):
        place = folder / name.replace(", ", "-")
        (place / "ws").mkdir(parents=True)

        def work(step: int = 1, place: Path = place) -> None:
            parts = {name: cut(tensor, LAYOUTS[name], MESH, 2) for name, tensor in made_model(step).items()}
            workspace = NFSWorkspace(place / "ws", rank=2, world_size=4, run_id="run")
            workspace.write_configs_and_weights(CONFIG, parts, layouts=layouts, step=step)

        job = _State(name, place, place / "ws" / "rank_2_state.pth", work, has_old=has_old)
        yield job.learn((lambda work=work: work(0)) if has_old else None)


class _State(Job):
    """A state: beside it lie the parts of interrupted writes, in the workspace."""

    def beside(self) -> list[Path]:
        return [path for path in self.out.parent.iterdir() if path != self.out]


class _SmallFile(Job):
    """A small file. Its half-written form has a random name, and stays where a process is killed."""

    def finish(self) -> str | None:
        for path in self.beside():
            path.unlink()
        return super().finish()


def _small_files(folder: Path) -> Iterator[Job]:
    """Files that commands write beside their work: a layout file."""
    layouts = LayoutMap(MESH)
    layouts["embed.weight"] = "[v/tp, h]"
    file = folder / "file"
    folder.mkdir()
    job = _SmallFile("layout file", folder, file, partial(layouts.write, file), has_old=True)
    yield job.learn(partial(file.write_text, "old"))


def _applied_deltas(folder: Path) -> Iterator[Job]:
    """Versions applied to a base, and to what an earlier call left, in one pass and after an interruption."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    models = [make_deltas_model(generator, ["BF16"], 20)]
    write_whole(folder / "base", models[0])
    for version in (1, 2, 3):
        models.append(change_model(models[-1], generator))
        write_delta(folder / "deltas", models[-2], models[-1], version)
    for name in (
        *("delta apply", "delta apply, resumed", "delta apply, following", "delta apply, following, resumed"),
        "delta apply, following without exchange",
    ):
        place = folder / name.replace(", ", "-").replace(" ", "-")
        place.mkdir()
        out, options = place / "engine", {"max_shard_size": "600", "workers": 1}
        work = _call(xrank.apply_deltas, folder / "base", folder / "deltas", out, **options)
        if "without exchange" in name:
            work = _without_exchange(work)
        job = Job(name, place, out, work, has_old="following" in name, is_exchanged="without exchange" not in name)
        if "resumed" in name:
            job.begins = _interrupted(job)
        if job.has_old:
            xrank.apply_deltas(folder / "base", folder / "deltas", out, version=1, **options)
            job.known["old"] = job.content()
            shutil.copytree(out, place / "kept.old")
        yield job.learn()


def _made_deltas(folder: Path) -> Iterator[Job]:
    """Versions made of two models on disk, of versions, and of a model in memory."""
    folder.mkdir()
    generator = np.random.default_rng(1)
    models = [make_deltas_model(generator, ["BF16"], 20)]
    write_whole(folder / "0", models[0])
    for version in (1, 2):
        models.append(change_model(models[-1], generator))
        write_whole(folder / str(version), models[-1])
        write_delta(folder / "deltas", models[-2], models[-1], version)
    exported = made_model(0)
    xrank.save_model(exported, folder / "exported")
    for tensor in exported.values():
        tensor.view(-1)[0] += 1
    for name in (
        *("delta make", "delta make, overwrite", "delta make, resumed", "delta fold", "delta fold, resumed"),
        *("export, delta", "export, delta, resumed"),
    ):
        place = folder / name.replace(", ", "-").replace(" ", "-")
        place.mkdir()
        out, options = place / "weight_v000002", {"max_shard_size": "1", "overwrite": "overwrite" in name}
        make = _call(xrank.make_delta, folder / "1", folder / "2", out, workers=1, **options)
        if "fold" in name:
            make = _call(xrank.fold_deltas, folder / "deltas", out, **options)
        elif "export" in name:
            make = _call(xrank.export_model, exported, out, delta_from=folder / "exported", **options)
        job = Job(name, place, out, make, has_old=options["overwrite"])
        if "resumed" in name:
            job.begins = _interrupted(job)
        old = _call(xrank.make_delta, folder / "0", folder / "2", out, workers=1, **options)
        yield job.learn(old if job.has_old else None)


_MAKERS: tuple[Callable[[Path], Iterator[Job]], ...] = (
    *(_gathers, _adapters, _reshards, _exports, _made_deltas, _applied_deltas, _states, _small_files),
)


def _call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: function(*arguments, **options)


def _without_exchange(work: Callable[[], Any]) -> Callable[[], Any]:
    def unsupported(source: str, target: str, flags: int) -> None:
        raise OSError(22, "not here")

    def call() -> Any:
        with mock.patch.object(disk_calls, "renameat2", unsupported):
            return work()

    return call


def _interrupted(job: Job) -> Callable[[], None]:
    """Return a function that leaves the files of a run that was stopped when two files were finished."""

    def stop(number: int, call: Callable[[], object]) -> object:
        result = call()
        journals = list(job.folder.glob(".*.xrank-*/*journal.jsonl"))
        if journals and journals[0].read_text().count("\n") == 3:  # its head, and a line for each finished file
            raise KeyboardInterrupt
        return result

    def begin() -> None:
        in_child(job.work, stop, EXTRA)
        assert job.seen() == job.before

    return begin
