"""Help pages: each command has an example that is typed right, options stand in sections, and shells complete words."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import click
import pytest

from tests.cli.bench import run
from xrank.cli.help import Command, CommandGroup
from xrank.cli.main import cli
from xrank.recipes.recipe_file import list_shipped_recipes


def all_commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from all_commands(command, (*path, name))


COMMANDS = dict(all_commands(cli))
each_command = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


@each_command
def test_each_command_has_an_example_that_is_typed_right(words: tuple[str, ...]) -> None:
    found = COMMANDS[words]
    assert isinstance(found, Command | CommandGroup) and found.examples
    for example in found.examples:
        command: click.Command = cli
        arguments = shlex.split(example)
        while isinstance(command, click.Group) and arguments:
            name, *arguments = arguments
            command = command.get_command(click.Context(command), name)  # type: ignore[assignment]
        assert example.startswith(words[0])
        command.make_context(name, arguments[: arguments.index(">>")] if ">>" in arguments else arguments)


@each_command
def test_a_help_page_shows_each_option_once_and_fits(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    for columns in (60, 80, 120):
        with mock.patch("shutil.get_terminal_size", return_value=os.terminal_size((columns, 24))):
            text = run(*words, "--help").stdout
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                option = max(parameter.opts, key=len)
                shown = [re.split("[ ,/]+", line.strip().split("  ")[0]) for line in text.splitlines()]
                assert len([words for words in shown if option in words and words[0].startswith("-")]) == 1, option
        long = [line for line in text.splitlines() if len(line) > columns and "xrank" not in line]
        assert long == []


def test_options_stand_in_sections() -> None:
    lines = run("gather", "--help").stdout.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == [
        *("Examples:", "Source:", "Output:", "Names and values:", "Memory, threads and ranks:", "Messages:"),
    ]
    assert run("help", "layout", "show").stdout == run("layout", "show", "--help").stdout
    assert run("help").stdout == run("--help").stdout
    assert "No such command 'layout no'" in run("help", "layout", "no").stderr


def test_out_has_a_short_form(tmp_path: Path) -> None:
    ended = run("gather", tmp_path / "none", "-o", tmp_path / "out", "--json")
    assert "IncompleteError" in ended.stdout


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("gather x --dtype b", {"base", "bf16"}),
        ("gather x --recipe megatron-ll", {n for n in list_shipped_recipes() if n.startswith("megatron-ll")}),
        ("gather x --recipe non", {"none"}),
        ("gather x --format meg", {"megatron-dist", "megatron-legacy"}),
        ("gather x --replicas p", {"pick"}),
        ("recipe show torchtitan-llama3", {n for n in list_shipped_recipes() if n.startswith("torchtitan-llama3")}),
        ("lay", {"layout"}),
        ("layout ", {"show", "diff", "check", "record"}),
        ("help insp", {"inspect"}),
    ],
)
def test_shells_complete_words(line: str, wanted: set[str]) -> None:
    words = ["xrank", *line.split(" ")]
    environ = {"_XRANK_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    completed = run(environ=environ).stdout
    assert {row.removeprefix("plain,") for row in completed.splitlines()} == wanted


def test_models_in_the_cache_are_completed(tmp_path: Path) -> None:
    (tmp_path / "models--Qwen--Qwen3-8B").mkdir()
    environ = {"_XRANK_COMPLETE": "bash_complete", "COMP_CWORD": "4", "HF_HUB_CACHE": str(tmp_path)}
    completed = run(environ={**environ, "COMP_WORDS": "xrank gather x --base-model Q"}).stdout
    assert completed == "plain,Qwen/Qwen3-8B\n"
    assert run(environ={**environ, "COMP_WORDS": "xrank gather x --base-model ./m"}).stdout == "file,./m\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(shell: str) -> None:
    script = run("completion", shell).stdout
    assert f"_XRANK_COMPLETE={shell}_complete" in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=60, check=False).returncode == 0


def test_a_version_imports_no_command() -> None:
    code = "import sys; sys.argv[1:] = ['-V']\nfrom xrank.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "print([name for name in sys.modules if name.startswith('xrank.cli.')])"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "xrank.cli.main" in printed and "xrank.cli.gather" not in printed
