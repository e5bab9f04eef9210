"""README and docs hold: code runs, commands print what is shown but for the numbers, and links lead somewhere."""

import ast
import builtins
import keyword
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from sybil.document import Document
from sybil.parsers.markdown import CodeBlockParser
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.page_blocks import run_program
from xrank import NFSWorkspace
from xrank.cli.main import cli
from xrank.formats.torch_archive import read_archive
from xrank.layout import DeviceMesh, LayoutMap

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
IN_ORACLE = {"from-deepspeed.md", "integrations.md"}
"""Pages with Python that needs frameworks: tests of their names in tests/oracle run it."""
TORCHRUN = "# torchrun --nproc-per-node "
"""How a program of several ranks begins."""
RUN = ("resume-elsewhere.md",)
"""Pages all commands of which run, one after the other."""
LANGUAGES = ("console", "python", "sh", "text", "toml")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Return (line, language, text) of every block of a page."""
    document = Document(page.read_text(), page.name)
    return sorted(
        (document.text[: region.start].count("\n") + 1, language, str(region.parsed))
        for language in LANGUAGES
        for region in CodeBlockParser(language, evaluator=lambda example: None)(document)
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """Make what the commands find: a workspace of 4 ranks, one with a flipped byte, one after a crash, a base model."""
    path = tmp_path_factory.mktemp("docs") / "demo"
    layouts = LayoutMap(DeviceMesh((2, 2), ("dp", "tp")))
    layouts["model.embed_tokens.weight"] = "[v/~tp/~dp, h]"
    layouts["model.norm.weight"] = "[d0/~dp]"
    for name in ("workspace", "damaged"):
        for rank in range(4):
            weights = {"model.embed_tokens.weight": torch.ones(43, 64), "model.norm.weight": torch.ones(48).bfloat16()}
            workspace = NFSWorkspace(path / name, rank=rank, world_size=4, run_id="demo")
            workspace.write_configs_and_weights({"hidden_size": 64}, weights, layouts=layouts, step=8)
    state = path / "damaged" / "rank_0_state.pth"
    archive = read_archive(str(state))
    content = bytearray(state.read_bytes())
    content[archive.records[archive.value["weight"]["model.embed_tokens.weight"].key].offset + 5] ^= 1
    state.write_bytes(content)
    shutil.copytree(path / "damaged", path / "crashed")
    (path / "crashed" / "rank_2_state.pth").unlink()
    (path / "base").mkdir()
    (path / "base" / "config.json").write_text('{"hidden_size": 64}')
    trained = {"model.embed_tokens.weight": torch.zeros(172, 64), "model.norm.weight": torch.zeros(96).bfloat16()}
    save_file(trained, path / "base" / "model.safetensors")
    save_trained(path / "checkpoint-2000")
    return path


def save_trained(folder: Path) -> None:
    """Save a model and its optimizer after a step, as accelerate does."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 43), torch.nn.LayerNorm(43))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    model, moments = get_state_dict(net, optimizer)
    for name, state in (("pytorch_model_fsdp_0", {"model": model}), ("optimizer_0", {"optimizer": moments})):
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state, checkpoint_id=folder / name, no_dist=True)
    torch.save(torch.optim.lr_scheduler.ConstantLR(optimizer).state_dict(), folder / "scheduler.pt")


@each_page
def test_the_blocks_of_a_page_are_true(page: Path, demo: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(demo, "demo")
    found = blocks(page)
    assert len(found) == page.read_text().count("\n```") / 2, f"a block is not of {LANGUAGES}"
    for line, language, text in found:
        printed = capsys.readouterr().out
        if language == "text" and printed:  # the output of the block before
            assert normal(printed) == normal(text)
        elif language == "python":
            code = compile("\n" * line + text, page.name, "exec")
            if page.name not in IN_ORACLE and not text.startswith(TORCHRUN):
                exec(code, {})
        elif language == "console":
            for transcript in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                check_transcript(transcript)
        elif language == "sh":
            for command in text.replace("\\\n", "").splitlines():
                check_arguments(command)
                if page.name in RUN:
                    words = shlex.split(command, comments=True)[1:]
                    subprocess.run([sys.executable, "-m", "xrank", *words], capture_output=True, check=True)
        elif language == "toml":
            Path("layout.toml").write_text(text)
            cut = {"layouts.md": "[f/~tp/~dp, h]", "switching-from-modelopt.md": "[f/tp, h]"}[page.name]
            assert str(LayoutMap.read("layout.toml")["model.layers.17.mlp.up_proj.weight"]) == cut


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if TORCHRUN in page.read_text()], ids=lambda page: page.name)
def test_the_programs_of_several_ranks_run(page: Path, tmp_path: Path):
    if page.name in IN_ORACLE:
        pytest.skip("needs frameworks: make oracle")
    for _, _, text in blocks(page):
        if text.startswith(TORCHRUN):
            run_program(tmp_path, text, num_ranks=int(text.removeprefix(TORCHRUN).split()[0]))


def normal(text: str) -> str:
    """Return text without what differs from run to run: numbers, sizes, checksums, their plural and their room."""
    text = re.sub(r"\b[0-9a-f]{8}\b", "#", text)
    text = re.sub(r"[0-9][0-9,.]*( [KMG]?B)?", "#", text)
    text = re.sub(r"(?<=\S) +(?=[#\w])", " ", text)
    return re.sub(r"(# [a-z]+?)s\b", r"\1", text).strip()


def check_transcript(transcript: str) -> None:
    """Run a command and compare what it prints."""
    command, _, shown = transcript.partition("\n")
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":
        subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
        return
    assert program == "xrank"
    done = subprocess.run([sys.executable, "-m", "xrank", *arguments], capture_output=True, text=True, check=False)
    printed = "\n".join(
        text for text in (done.stdout, done.stderr) if not text.startswith(("finished model", "finished salvaged"))
    )
    assert normal(printed) == normal(shown)


def check_arguments(line: str) -> None:
    """Check that a command that cannot run here is typed right: xrank's options, make's targets, files of examples."""
    words = shlex.split(re.sub(r" >>? .*", "", line), comments=True)
    while words and "=" in words[0]:  # variables before a command
        path = ROOT / words.pop(0).partition("=")[2]
        assert path.suffix != ".py" or path.is_file()
    if "xrank" in words:
        command, arguments = cli, words[words.index("xrank") + 1 :]
        while isinstance(command, click.Group):
            name, *arguments = arguments
            command = command.get_command(click.Context(command), name)
            assert command is not None, name
        command.make_context(name, list(arguments))
    elif words[:1] == ["make"]:
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif words[:1] == ["python"] and words[1] != "-m":
        assert (ROOT / words[1]).is_file()
    else:
        assert not words or words[0] in {"bash", "openssl", "pip", "python", "model_signing"}, line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tutorial-tests.md", "tutorial-reader.md"])
def test_the_tests_that_a_tutorial_writes_pass(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _, language, text in blocks(ROOT / "docs" / name):
        if language == "python":
            exec(text, {})
    installed = tmp_path / "rows_reader-1.dist-info"  # stands for pip install ./rows-reader
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: rows-reader\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[xrank.readers]\nrows = rows_reader:RowsReader\n")
    paths = os.pathsep.join([str(ROOT), str(tmp_path / "rows-reader"), str(tmp_path)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xrank.testing.plugin", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


def test_the_page_shows_the_layers_that_the_linter_checks():
    contract = (ROOT / "pyproject.toml").read_text()
    layers = re.search(r"layers = \[(.*?)\]", contract, re.DOTALL)
    shown = [text for _, kind, text in blocks(ROOT / "docs" / "developing.md") if kind == "text" and ">" in text]
    assert layers and len(shown) == 1
    assert [layer.strip() for layer in shown[0].split(">")] == re.findall(r'"(.*?)"', layers[1])


def test_the_readme_and_the_changelog_are_short():
    assert len(README.read_bytes()) <= 6144
    assert len((ROOT / "CHANGELOG.md").read_bytes()) <= 8000


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_are_short_and_links_lead_somewhere(page: Path):
    text = re.sub(r"^```console.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120] == []
    for link in re.findall(r"\]\((?!https?:)([^)]+)", text):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE) if heading else []
        assert not heading or heading in {re.sub(r"[^a-z0-9-]", "", h.lower().replace(" ", "-")) for h in headings}


def test_each_page_is_in_the_navigation_of_the_site():
    names = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    made = {"index.md", "commands.md", "reference.md"}
    assert sorted(names) == sorted({page.name for page in PAGES[1:]} | made)


def test_each_page_is_reached_from_the_readme():
    reached, new = set(), {README}
    while new:
        page = new.pop()
        reached.add(page)
        links = re.findall(r"\]\((?!https?:)([^)#]+\.md)", page.read_text())
        new |= {(page.parent / link).resolve() for link in links} - reached
    assert set(PAGES) <= reached


OTHERS = re.compile(r"(concurrent|numpy|torch)\..*|clip_grad_norm_|(Accelerator\.)?save_state")
"""Names of other packages that docstrings show."""


def test_the_names_in_docstrings_are_those_of_the_code() -> None:
    known, texts = {*dir(builtins), *keyword.kwlist}, []
    for path in sorted((ROOT / "xrank").rglob("*.py")):
        known |= {*path.relative_to(ROOT).with_suffix("").parts}
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    texts.append((f"{path.relative_to(ROOT)}:{node.lineno}", text))
                case ast.Constant(value=str(text)) if len(text) < 80:  # keys, homes of deferred names
                    known.update(re.findall(r"\w+", text))
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                    known.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    known.add(name)
                case ast.alias(name=name):
                    known.update(name.split("."))
    shown = [(at, name) for at, text in texts for name in re.findall(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)`(?!`)", text)]
    assert len(shown) > 500
    assert [
        (at, name) for at, name in shown if not known.issuperset(name.split(".")) and not OTHERS.fullmatch(name)
    ] == []
