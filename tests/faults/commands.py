"""Mutated files, options and variables of users, through the commands: no raw error, and the exit code of its class."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import click

from tests.cli.bench import EXIT_CODES, Ended, run
from tests.faults.findings import Findings
from tests.faults.made_sources import make_sources, user_files
from tests.faults.mutation import NASTY, Mutator
from xrank.cli import command as command_module
from xrank.cli.main import cli

__all__ = ["fuzz_commands"]

SLOW_SECONDS = 5
"""Longest time of a command with a small input; on a busy machine a start alone takes a part of a second."""
HUNG_SECONDS = 60

_LINES = (
    "gather {}/ws -o {}/out --dry-run",
    "gather {}/hf -o {}/out --dry-run --dtype bf16",
    "gather --workspace {}/ws -o {}/out --overwrite",
    "reshard {}/ws --layout {}/new.toml -o {}/out --dry-run",
    "verify {}/model",
    "verify {}/ws --against {}/model",
    "inspect {}/ws",
    "layout show {}/ws",
    "layout check {}/layout.toml",
    "layout diff {}/layout.toml {}/new.toml",
    "recipe check megatron-llama {}/megatron",
    "recipe show megatron-llama",
    "simulate {}/ws",
    "simulate {}/layout.toml --operation export",
    "clean {}/none",
    "help gather",
)
_PATHS = (
    *("/proc/x", "/proc/self/x", "/dev/null", "/dev/null/x", "/dev/full", "/sys/x", "/", ".", "..", "x" * 300, "~"),
    *("{}/out", "{}/ws", "{}/model", "{}/none", "{}/new.toml", "{}/new.toml/x", "\udcff", "{}/\n", "http://a/b", " "),
    *("s3://a/b", "{}/hf/config.json", "{}/ws/rank_0_state.pth", "a/" * 2000, "{}/out/", "{}/a/b/c"),
)
_WORDS = (
    *("64MB", "1", "0", "-1", "1e9", "5GB", "1.5 MiB", "9" * 400 + "GB", "0.0000001B", "bf16", "keep", "base", "none"),
    *(
        "verify",
        "pick",
        "merge",
        "separate",
        ".*",
        "(",
        "(a+)+$",
        "(" * 300,
        "(" * 5000 + ")" * 5000,
        "a{99999999}",
        "model",
        "ema",
        "dcp",
    ),
    *(
        "dp=2 tp=2",
        "dp=2",
        "dp=",
        "dp=99999999999",
        "tp=0",
        "read=2GB/s",
        "read=1e999GB/s",
        "gather",
        "nan",
        "inf",
        "1e400",
    ),
    *("\u00b2", "\u0663", "\u0661GB", "\udcff", "a\nb", "%s", "{0}", "--", "-x", "=", ""),
)
_VARIABLES = (
    *("XRANK_MAX_MEMORY", "XRANK_WORKERS", "XRANK_TIMEOUT", "XRANK_WORKSPACE", "XRANK_RUN_ID", "TERM", "COLUMNS"),
    *("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HOME", "NO_COLOR", "FORCE_COLOR", "TMPDIR", "LINES"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "MASTER_ADDR", "MASTER_PORT"),
)


class HungError(BaseException):
    """A command did not end."""


class Commands:
    """Commands over the sources in a folder, each judged by how it ends."""

    def __init__(self, folder: Path, findings: Findings) -> None:
        self.folder, self.findings = folder, findings
        self.names = frozenset(os.listdir(folder))
        self.mutators = []
        for file in user_files():
            path = folder / file.path
            seed = path.read_bytes()
            self.mutators.append((path, seed, Mutator([seed], is_text=True), file.commands))

    def words(self, line: str) -> list[str]:
        """Return the words of a line, with the folder in them."""
        return [word.replace("{}", str(self.folder)) for word in line.split(" ")]

    def judge(self, words: list[str], example: str, environ: dict[str, str] | None = None) -> None:
        """Run a command; keep a raw error, a wrong exit code, a wrong grammar, or one that takes too long."""
        started = time.monotonic()
        try:
            with _alarm(), mock.patch.object(command_module, "explain_fault", _raise):
                ended = run(*words, environ=environ)
            ended = replace(ended, stderr=re.sub("\x1b\\[[0-9;]*m", "", ended.stderr))
        except HungError:
            self.findings.report(f"hung: {' '.join(words)[:60]}", example)
            return
        except Exception as error:
            self.findings.report_raw(error, example)
            return
        if time.monotonic() - started > SLOW_SECONDS:
            self.findings.report(f"slow: {words[0]}, {time.monotonic() - started:.0f} s", example)
        self.findings.count(f"exit {ended.exit_code}")
        fault = _find_fault(ended, words)
        if fault is not None:
            self.findings.report(fault, f"{example}\n{ended.stderr[-600:]}")

    def try_file(self, seed: int) -> None:
        """Mutate a file and run one of its commands."""
        rng = random.Random(seed)
        path, content, mutator, lines = rng.choice(self.mutators)
        path.write_bytes(mutator(rng))
        line = rng.choice(lines)
        try:
            self.judge(self.words(line), f"seed {seed}: {path.name} in {line}")
        finally:
            path.write_bytes(content)

    def try_options(self, seed: int) -> None:
        """Run a command with other values of one or two options or arguments, or variables."""
        rng = random.Random(seed)
        words = self.words(rng.choice(_LINES))
        environ: dict[str, str] = {}
        for _ in range(rng.choice((1, 1, 2))):
            match rng.randrange(4):
                case 0:
                    environ[rng.choice(_VARIABLES)] = (
                        self.value(rng).encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
                    )
                case 1:
                    at = rng.randrange(1, len(words))
                    words[at] = self.value(rng)
                case _:
                    words.append(rng.choice(_options_of(words[0])))
                    words += [self.value(rng)] if rng.random() < 0.9 else []
        self.judge(words, f"seed {seed}: {words!r:.300} {environ!r:.200}", environ)
        _clear(self.folder, self.names)

    def value(self, rng: random.Random) -> str:
        """Return a value: a path, a word of some option, or a nasty token."""
        kind = rng.randrange(3)
        token = rng.choice(NASTY)[:3000].decode("utf-8", "replace")
        text = (rng.choice(_PATHS), rng.choice(_WORDS), token)[kind]
        return text.replace("{}", str(self.folder)).replace("\0", "")


def fuzz_commands(folder: Path, seed: int, count: int) -> Findings:
    """Run so many commands over mutated files, and a third as many with other options."""
    findings = Findings()
    make_sources(folder)
    before = os.getcwd()
    os.chdir(folder)  # where relative paths of options lead
    try:
        commands = Commands(folder, findings)
        for number in range(count):
            (commands.try_options if number % 4 == 3 else commands.try_file)(seed + number)
            findings.count("commands")
    finally:
        os.chdir(before)
    return findings


def _find_fault(ended: Ended, words: list[str]) -> str | None:
    """Return how a command's end breaks the promises, or None."""
    is_asked = any(re.fullmatch("-[jqv]*v[jqv]*|--verb.*|--log-.*", word) for word in words)
    if "Traceback" in ended.stderr and not is_asked:
        return "a traceback"
    if ended.exit_code == 0 or is_asked:
        return None
    found = [kind for kind in EXIT_CODES if f"xrank: {kind}: " in ended.stderr]
    if not found:
        return f"exit {ended.exit_code} without an error's line"
    if ended.exit_code not in {EXIT_CODES[kind] for kind in found}:
        return f"{found[0]} with exit {ended.exit_code}"
    if [c for c in ended.stderr if c != "\n" and not c.isprintable()]:
        return f"{found[0]}: a raw control character"
    return None if "\n  try " in ended.stderr else f"{found[0]} without a next step"


def _raise(error: Exception) -> None:
    raise error


@contextmanager
def _alarm() -> Iterator[None]:
    def hang(number: int, frame: object) -> None:
        raise HungError

    previous = signal.signal(signal.SIGALRM, hang)
    signal.alarm(HUNG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _options_of(name: str) -> list[str]:
    found = cli.get_command(click.Context(cli), name)
    commands = list(found.commands.values()) if isinstance(found, click.Group) else [found]
    texts = (text for command in commands if command for parameter in command.params for text in parameter.opts)
    return sorted({"--help", *(text for text in texts if text.startswith("-"))})


def _clear(folder: Path, kept: Collection[str]) -> None:
    for path in folder.iterdir():
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() and not path.is_symlink() else path.unlink()
