"""Every block of the README is run: commands print what it shows, but for the numbers; code and layouts are true."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sybil.document import Document
from sybil.parsers.markdown import CodeBlockParser

from xrank import NFSWorkspace
from xrank.formats.torch_archive import read_archive
from xrank.layout import DeviceMesh, LayoutMap

ROOT = Path(__file__).parent.parent
LANGUAGES = ("console", "python", "toml", "text")


def blocks() -> list[tuple[str, str, int]]:
    """Return (language, text, line) of every block."""
    document = Document((ROOT / "README.md").read_text(), "README.md")
    found = []
    for language in LANGUAGES:
        for region in CodeBlockParser(language, evaluator=lambda example: None)(document):
            line = document.text[: region.start].count("\n") + 1
            found.append((language, str(region.parsed), line))
    return sorted(found, key=lambda block: block[2])


BLOCKS = blocks()


def test_no_block_is_left_out():
    assert len(BLOCKS) == (ROOT / "README.md").read_text().count("\n```") / 2


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_lines_are_short(name: str):
    text = re.sub(r"^```console.*?^```$", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Make what the README's commands find: a workspace of 4 ranks, and one with a flipped byte."""
    path = tmp_path_factory.mktemp("readme")
    layouts = LayoutMap(DeviceMesh((2, 2), ("dp", "tp")))
    layouts["model.embed_tokens.weight"] = "[v/~tp/~dp, h]"
    layouts["model.norm.weight"] = "[d0/~dp]"
    for name in ("workspace", "damaged"):
        for rank in range(4):
            weights = {"model.embed_tokens.weight": torch.ones(43, 64), "model.norm.weight": torch.ones(48).bfloat16()}
            workspace = NFSWorkspace(path / "demo" / name, rank=rank, world_size=4, run_id="demo")
            workspace.write_configs_and_weights({"hidden_size": 64}, weights, layouts=layouts, step=8)
    state = path / "demo" / "damaged" / "rank_0_state.pth"
    archive = read_archive(str(state))
    content = bytearray(state.read_bytes())
    content[archive.records[archive.value["weight"]["model.embed_tokens.weight"].key].offset + 5] ^= 1
    state.write_bytes(content)
    return path


def normal(text: str) -> str:
    """Return text without what differs from run to run: numbers, sizes, checksums, their plural and their room."""
    text = re.sub(r"\b[0-9a-f]{8}\b", "#", text)
    text = re.sub(r"[0-9][0-9,.]*( [KMG]?B)?", "#", text)
    text = re.sub(r"(?<=\S) +(?=[#\w])", " ", text)
    return re.sub(r"(# [a-z]+?)s\b", r"\1", text).strip()


@pytest.mark.parametrize(("language", "text", "line"), BLOCKS, ids=[f"line-{line}-{kind}" for kind, _, line in BLOCKS])
def test_block(language: str, text: str, line: int, folder: Path, monkeypatch):
    monkeypatch.chdir(folder)
    if language == "python":
        exec(compile("\n" * line + text, "README.md", "exec"), {})
    elif language == "toml":
        (folder / "layout.toml").write_text(text)
        layouts = LayoutMap.read(folder / "layout.toml")
        assert str(layouts["model.layers.17.mlp.up_proj.weight"]) == "[f/~tp/~dp, h]"
    elif language == "text":
        check_layers(text)
    else:
        for transcript in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            check_command(transcript)


def check_command(transcript: str) -> None:
    command, _, shown = transcript.partition("\n")
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":
        subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
        return
    assert program == "xrank"
    done = subprocess.run([sys.executable, "-m", "xrank", *arguments], capture_output=True, text=True, check=False)
    printed = "\n".join(text for text in (done.stdout, done.stderr) if not text.startswith("finished model"))
    assert normal(printed) == normal(shown)


def check_layers(text: str) -> None:
    """Compare the README's line of layers with the contract that the linter checks."""
    contract = (ROOT / "pyproject.toml").read_text()
    layers = re.search(r"layers = \[(.*?)\]", contract, re.DOTALL)
    assert layers
    assert [layer.strip() for layer in text.split(">")] == re.findall(r'"(.*?)"', layers[1])
