"""Runs the corpus with one version of xrank and writes down what each command printed and left."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from queue import Queue
from typing import Any

from tests.corpus.commands import COMMANDS, Command, Step

__all__ = ["record"]

_CALLS = Path(__file__).with_name("calls.py")
_SERVER = Path(__file__).with_name("serve.py")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_LEFT_OUT = re.compile(r"XRANK_|HF_|TORCHELASTIC_|SLURM_|OMPI_|(MASTER_|LOCAL_)|(RANK|WORLD_SIZE)$")
_SECONDS = 600.0
_TEXT_NBYTES = 20_000
"""Smaller files of text are kept whole, so that a difference can be shown."""


@dataclass(frozen=True)
class _Place:
    """What commands are run with: sources, scratch, environment, servers that no command uses at the moment."""

    sources: Path
    scratch: Path
    environ: Mapping[str, str]
    servers: Queue[subprocess.Popen[str]]

    def start_server(self) -> None:
        """Start a process that runs commands (`tests.corpus.serve`)."""
        words = [sys.executable, "-P", str(_SERVER), "gather", str(self.sources / "ws/good"), "--out"]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        words.append(str(self.scratch / f"imports-{time.monotonic_ns()}"))
        self.servers.put(subprocess.Popen(words, cwd=self.scratch, env=dict(self.environ), **pipes))

    def serve(self, words: Sequence[str], work: Path) -> dict[str, Any]:
        """Run a command of xrank by one process; return what it printed."""
        server = self.servers.get()
        assert server.stdin is not None and server.stdout is not None
        paths = [tempfile.mkstemp(dir=self.scratch)[1] for _ in range(2)]
        try:
            server.stdin.write(json.dumps([self.filled(words, work), *paths]) + "\n")
            server.stdin.flush()
            exit_code = int(server.stdout.readline())
        finally:
            self.servers.put(server)
        out, err = (self.named(Path(path).read_text(), work) for path in paths)
        return {"words": list(words), "num_ranks": 1, "exit_code": exit_code, "stdout": out, "stderr": err}

    def run(self, words: Sequence[str], work: Path, num_ranks: int = 1) -> dict[str, Any]:
        """Run Python with these words in an empty folder; return what it printed."""
        command = [sys.executable, *(_TORCHRUN if num_ranks > 1 else ()), *self.filled(words, work)]
        ended = subprocess.run(
            command, cwd=self.scratch, env=dict(self.environ), capture_output=True, text=True, timeout=_SECONDS
        )
        out, err = (self.named(text, work) for text in (ended.stdout, ended.stderr))
        return {
            "words": list(words),
            "num_ranks": num_ranks,
            "exit_code": ended.returncode,
            "stdout": out,
            "stderr": err,
        }

    def filled(self, words: Sequence[str], work: Path) -> list[str]:
        """Return words with the paths of the places in place of their names."""
        return [word.replace("$S", str(self.sources)).replace("$W", str(work)) for word in words]

    def named(self, text: str, work: Path) -> str:
        """Return a text with the names of the places in place of their paths."""
        return text.replace(str(work), "$W").replace(str(self.sources), "$S").replace(str(self.scratch), "$T")


def record(sources: Path, *, tree: Path, only: str = "", jobs: int = 2) -> dict[str, Any]:
    """Run all commands whose name has the pattern; return what they did, by name.

    Args:
        sources: what `tests.corpus.sources.build` made.
        tree: the checkout whose xrank is run.
        only: a regular expression, searched in names.
        jobs: commands that run at the same time.
    """
    started, before = time.monotonic(), _listing(sources)
    environ = {name: value for name, value in os.environ.items() if not _LEFT_OUT.match(name)}
    environ |= {
        "PYTHONPATH": str(tree),
        "HF_HUB_CACHE": str(sources / "no-cache"),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    environ |= {"NO_COLOR": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "120"}
    with tempfile.TemporaryDirectory(prefix="xrank-corpus-") as scratch:
        place = _Place(sources, Path(scratch), environ, Queue())
        shown = place.run(["-c", "import xrank; print(xrank.__file__)"], place.scratch)["stdout"].strip()
        if Path(shown) != tree / "xrank" / "__init__.py":
            raise SystemExit(f"{shown} is imported, not xrank of {tree}")
        chosen = [command for command in COMMANDS if re.search(only, command.name)]
        for _ in range(jobs):
            place.start_server()
        with ThreadPoolExecutor(jobs) as pool:
            calls = [pool.submit(_record_calls, place, num_ranks, only) for num_ranks in (2, 1)]
            found = dict(pool.map(_record_command, repeat(place), chosen))
            for call in calls:
                found |= call.result()
        while not place.servers.empty():
            place.servers.get().communicate()
    if _listing(sources) != before:
        raise SystemExit(f"a command changed {sources}: build the sources anew")
    build_id = (sources / "build-id").read_text()
    seconds = round(time.monotonic() - started)
    return {"xrank": shown, "build_id": build_id, "seconds": seconds, "commands": dict(sorted(found.items()))}


def _record_command(place: _Place, command: Command) -> tuple[str, dict[str, Any]]:
    work = Path(tempfile.mkdtemp(prefix="w-", dir=place.scratch))
    steps = [_record_step(place, step, work) for step in command.steps if not _is_copy(step, place, work)]
    files = dict(_files(work, place))
    shutil.rmtree(work)
    return command.name, {"steps": steps, "files": files}


def _is_copy(step: Step, place: _Place, work: Path) -> bool:
    """Copy what the step names, if it is a copy."""
    if step.words[0] != "cp":
        return False
    shutil.copytree(*place.filled(step.words[1:], work))
    return True


def _record_step(place: _Place, step: Step, work: Path) -> dict[str, Any]:
    if step.num_ranks == 1:
        found = place.serve(step.words, work)
    else:
        found = place.run(["-m", "xrank", *step.words], work, step.num_ranks)
    if step.is_json:
        try:
            found["json"] = json.loads(found["stdout"])
            found["stdout"] = ""
        except ValueError:
            found["json"] = None
    return found


def _record_calls(place: _Place, num_ranks: int, only: str) -> dict[str, Any]:
    """Make the Python calls, all by the same processes."""
    names = re.findall(r'^    "([\w-]+)": lambda', _CALLS.read_text(), re.MULTILINE)
    names = [name for name in names if re.search(only, f"python-x{num_ranks}/{name}")]
    if not names:
        return {}
    work = Path(tempfile.mkdtemp(prefix="w-", dir=place.scratch))
    ended = place.run([str(_CALLS), "$S", "$W", *names], work, num_ranks)
    found = {}
    for name in names:
        steps = []
        for rank in range(num_ranks):
            path = work / "results" / f"{name}.{rank}.json"
            told = place.named(path.read_text(), work / name) if path.exists() else "null"
            step = {"words": [name], "num_ranks": num_ranks, "exit_code": ended["exit_code"], "stdout": ""}
            steps.append({**step, "stderr": "" if path.exists() else ended["stderr"], "json": json.loads(told)})
        files = dict(_files(work / name, place)) if (work / name).exists() else {}
        found[f"python-x{num_ranks}/{name}"] = {"steps": steps, "files": files}
    shutil.rmtree(work)
    return found


def _files(work: Path, place: _Place) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return each file below a folder: its digest, and its text where it is short."""
    for path in sorted(work.rglob("*")):
        name = str(path.relative_to(work)) + ("/" if path.is_dir() else "")
        content = b"" if path.is_dir() else path.read_bytes()
        found: dict[str, Any] = {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        if path.suffix in (".json", ".toml", ".md", ".html") and len(content) < _TEXT_NBYTES:
            found["text"] = place.named(content.decode(), work)
        yield name, found


def _listing(folder: Path) -> list[tuple[str, int, int, int]]:
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found.append((str(path), 0 if path.is_dir() else status.st_size, status.st_ino, status.st_mtime_ns))
    return found
