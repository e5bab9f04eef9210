"""A place to gather in, and what the command line says and leaves there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.commands.made_workspaces import assert_holds
from xrank.cli.main import main

# Written out here, though each class has it too: the number is a promise to schedulers.
EXIT_CODES = {
    "XrankError": 1, "NoSpaceError": 1, "UsageError": 2, "UnknownFormatError": 2, "OutputExistsError": 2,
    "LayoutError": 2, "IncompleteError": 3, "ContradictionError": 4, "CorruptError": 4, "UnsafeError": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


def run(*arguments: object, environ: dict[str, str] | None = None) -> Ended:
    """Run ``xrank`` in this process."""
    stdout, stderr = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    words = ["xrank", *map(str, arguments)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("XRANK_")}
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.dict(os.environ, {**clean, **(environ or {})}, clear=True),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as left:
            code = left.code
    assert isinstance(code, int)
    return Ended(code, *(stream.buffer.getvalue().decode() for stream in (stdout, stderr)))


class Bench:
    """A folder with a workspace and room for its output, where each command is watched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workspace = folder / "run42"
        self.out = folder / "model"

    def names(self) -> list[str]:
        """List everything beside the output, hidden or not."""
        return sorted(os.listdir(self.folder))

    def gather(self, *options: object, source: Sequence[object] | None = None) -> Ended:
        """Gather the workspace with these options."""
        source = ("--workspace", self.workspace) if source is None else source
        return run("gather", *source, "--out", self.out, "--json", *options)

    def refused(self, kind: str, *options: object, says: Sequence[str] = (), **parts: Any) -> dict[str, Any]:
        """Gather, see it refused in the grammar of errors and without a trace on the disk; return the error.

        Args:
            kind: the error's type.
            *options: of the command.
            says: texts that stand on stderr.
            **parts: of the error's JSON object, compared; a file by its last name.
        """
        before = self.names()
        ended = self.gather(*options)
        error = refusal(ended, kind, says=says, **parts)
        assert self.names() == before, "something was left beside the output"
        return error

    def succeeds(self, model: dict[str, torch.Tensor], *options: object) -> dict[str, Any]:
        """Gather, compare every byte with the whole model, and return the report."""
        ended = self.gather(*options)
        assert ended.exit_code == 0, ended.stderr
        assert_holds(self.out, model)
        assert not [name for name in self.names() if name.startswith(".")]
        return json.loads(ended.stdout)


def refusal(ended: Ended, kind: str, *, says: Sequence[str] = (), **parts: Any) -> dict[str, Any]:
    """Check a command's refusal: exit code, the text's grammar, and that text and JSON say the same."""
    assert "Traceback" not in ended.stderr, ended.stderr
    log, found, text = ended.stderr.partition(f"xrank: {kind}: ")
    assert found and "xrank: " not in log, ended.stderr
    lines = text.splitlines()
    labels = [line[:8].strip() for line in lines[1:]]
    assert labels == [label for label in ("got", "want", "try") if label in labels], ended.stderr
    assert "try" in labels, ended.stderr
    assert lines[-1].endswith(f"(exit {EXIT_CODES[kind]})")
    assert ended.exit_code == EXIT_CODES[kind]
    assert not [c for c in ended.stderr if c != "\n" and not c.isprintable()], "a raw control character"
    for text in says:
        assert text in ended.stderr, f"{text!r} is not said in\n{ended.stderr}"
    report = json.loads(ended.stdout)
    assert (report["status"], report["exit_code"]) == ("failed", ended.exit_code)
    error: dict[str, Any] = report["error"]
    assert error["type"] == kind
    assert error["try"], "no next step"
    for name, want in parts.items():
        found = os.path.basename(error[name]) if name == "file" and error[name] else error[name]
        assert found == want, (name, error)
    return error


@contextlib.contextmanager
def made_bench() -> Iterator[Bench]:
    """Yield a bench in memory where there is a file system of memory: the calls are the same, syncing costs nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Bench(Path(folder))
