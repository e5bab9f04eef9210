"""``xrank simulate``: what it shows, in text, JSON and a page; how it refuses; four thousand ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.bench import Bench, refusal, run
from tests.commands.made_workspaces import leave
from tests.pictures.test_picture import Page
from tests.virtual.simulation.made_layouts import llama

PEAK = """
import sys
from xrank.cli.main import main
try:
    main()
finally:
    print(*[line for line in open("/proc/self/status") if line.startswith("VmHWM")], file=sys.stderr)
"""
"""Runs the command and says its peak memory last; what getrusage says is the largest of this process, too."""
LINK = "read=2GB/s write=1GB/s memory=8GB/s bandwidth=25GB/s latency=5us start=1s"


def reported(*words: object) -> dict[str, Any]:
    ended = run("simulate", *words, "--json")
    assert (ended.exit_code, ended.stderr) == (0, "")
    return json.loads(ended.stdout)


def test_a_gather_of_a_workspace(bench: Bench) -> None:
    leave(bench.workspace)
    before = bench.names()
    ended = run("simulate", bench.workspace)
    assert (ended.exit_code, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[0].startswith(f"source   {bench.workspace}: workspace; 4 ranks hold ")
    assert lines[1] == "gather   5 tensors, 1 file, 5.2 KB, by 1 rank; every element exactly once"
    assert lines[2] == "seconds  not predicted: no rates were given"
    assert lines[3].startswith("counted  reads cover whole windows, so messages and ")
    assert lines[5].split() == ["rank", "from", "files", "reads", "written", "memory"]
    assert lines[6].split()[0] == "0"
    assert bench.names() == before


def test_the_report(bench: Bench) -> None:
    leave(bench.workspace)
    report = reported(bench.workspace, "--operation", "export", "--link", LINK)
    assert (report["command"], report["status"], report["operation"]) == ("simulate", "ok", "export")
    assert report["source"]["format"] == "workspace" and report["num_ranks"] == 4
    assert [row["rank"] for row in report["ranks"]] == [0, 1, 2, 3]
    totals = report["totals"]
    for name, total in totals.items():
        assert total == sum(row[name] for row in report["ranks"]), name
    assert totals["written_nbytes"] == report["plan"]["files_nbytes"] > report["plan"]["nbytes"]
    assert totals["own_nbytes"] + totals["taken_nbytes"] == report["plan"]["nbytes"]
    prediction = report["prediction"]
    assert prediction["start_seconds"] == 1 < prediction["seconds"] < 1.1 and len(prediction["assumed"]) == 3
    assert set(report["ranks"][0]["seconds"]) == {"compare", "read", "exchange", "write"}
    assert report["rates"]["write_nbytes_per_second"] == 1e9
    assert [note["code"] for note in report["notes"]][-1] == "as-written"
    bare = reported(bench.workspace, "--operation", "export")
    assert bare["prediction"] is bare["rates"] is None and bare["totals"] == totals


def test_few_ranks_are_listed_and_many_are_summed_up(tmp_path: Path) -> None:
    file = llama(tmp_path, "pp=1 dp=1 tp=1")
    few = run("simulate", file, "--mesh", "pp=2 dp=2 tp=2", "--operation", "export", "--link", LINK).stdout
    rows = few.partition("\n\n")[2].splitlines()
    assert [row.split()[0] for row in rows] == ["rank", *map(str, range(8)), "all"]
    assert "assumed  a rank's reads, exchanges and writes follow one another" in few
    many = run("simulate", file, "--mesh", "pp=2 dp=4 tp=4", "--operation", "export", "--link", LINK).stdout
    rows = many.partition("\n\n")[2].splitlines()
    assert rows[0].split() == ["least", "median", "most", "of", "rank", "all"]
    assert [row.split("  ")[0] for row in rows[1:]][-2:] == ["to write", "busy"]


def test_a_link_in_a_file_and_along_axes(tmp_path: Path) -> None:
    file, link = llama(tmp_path, "pp=1 dp=2 tp=4", fsdp=False), tmp_path / "link.toml"
    link.write_text("".join(f'{name} = "{value}"\n' for name, _, value in (w.partition("=") for w in LINK.split())))
    words = (file, "--operation", "export")
    assert reported(*words, "--link", link)["prediction"] == (plain := reported(*words, "--link", LINK)["prediction"])
    slower = reported(*words, "--link", f"{LINK} tp.bandwidth=1GB/s")["prediction"]
    assert slower["seconds"] > plain["seconds"]


def test_a_reshard_and_its_new_layout(bench: Bench) -> None:
    leave(bench.workspace)
    file = llama(bench.folder, "pp=2 dp=1 tp=2")
    new = llama(bench.folder / "new" if (bench.folder / "new").mkdir() is None else bench.folder, "pp=1 dp=1 tp=4")
    report = reported(file, "--operation", "reshard", "--to", new, "--ranks", "3")
    assert report["num_ranks"] == 3 and report["plan"]["num_files"] == 4
    assert report["totals"]["written_nbytes"] == report["plan"]["files_nbytes"]


def test_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "<b>"
    folder.mkdir()
    file, html = llama(folder, "pp=2 dp=8 tp=8", hidden=1024), tmp_path / "page.html"
    ended = run("simulate", file, "--operation", "export", "--link", LINK, "--html", html)
    assert ended.stdout.splitlines()[-1].split() == ["wrote", str(html)]
    text = html.read_text()
    page = Page(text)
    assert "<b>" not in text and "http" not in text.replace("http-equiv", "")
    for words in ("Seconds of each rank", "Bytes of each rank", "compare", "exchange", "write"):
        assert words in page.words, words
    ranks = reported(file, "--operation", "export", "--link", LINK)["ranks"]
    for low in range(0, 128, 2):
        seconds = [sum(row["seconds"].values()) for row in ranks[low : low + 2]]  # rounded to microseconds
        busiest = [low + i for i, each in enumerate(seconds) if each >= max(seconds) - 5e-6]
        assert any(f"rank {rank}, most of {low}-{low + 1}" in page.words for rank in busiest)
    bars = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(bars) == 2 * 64
    widths = [float(attributes["width"] or 0) for tag, attributes in page.tags if tag == "rect"]
    assert min(widths) >= 0 and max(widths) <= 480
    report = reported(file, "--html", html)
    assert report["output"] == {"path": str(html), "nbytes": len(html.read_bytes())}
    assert "Seconds of each rank" not in html.read_text()


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (("--operation", "merge"), "UsageError", ["'merge' cannot be simulated", "gather, export, reshard"]),
        (("--operation", "reshard"), "UsageError", ["--to was not given"]),
        (("--to", "x.toml"), "UsageError", ["--to was given"]),
        (("--operation", "export", "--ranks", "2"), "UsageError", ["--ranks"]),
        (("--ranks", "0"), "UsageError", ["--ranks"]),
        (("--mesh", "tp=2"), "LayoutError", ["pp"]),
        (("--mesh", "pp=1 dp=1 tp=7"), "LayoutError", ["7"]),
        (("--mesh", "pp"), "LayoutError", ["'pp'", "name=length"]),
        (("--link", "bandwith=2GB/s"), "UsageError", ["bandwith"]),
        (("--link", "bandwidth=2GB/s"), "UsageError", ["--link lacks read"]),
        (("--operation", "export", "--link", f"{LINK} xp.latency=1s"), "UsageError", ["'xp'", "pp=2 dp=1 tp=2"]),
        (("--dtype", "int4"), "UsageError", ["int4", "bf16, fp16, fp32"]),
        (("--html", "/nowhere/page.html"), "UsageError", ["/nowhere/page.html"]),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, words: tuple[str, ...], kind: str, says: list[str]) -> None:
    file = llama(tmp_path, "pp=2 dp=1 tp=2")
    error = refusal(run("simulate", file, *words, "--json"), kind, says=says)
    assert error["try"]


def test_options_of_layout_files_are_refused_of_checkpoints(bench: Bench) -> None:
    leave(bench.workspace)
    for words in (("--mesh", "tp=2"), ("--dtype", "bf16")):
        refusal(run("simulate", bench.workspace, *words, "--json"), "UsageError", says=[words[0], "not a layout file"])
    refusal(run("simulate", bench.folder / "nothing", "--json"), "IncompleteError", says=["nothing"])


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_four_thousand_ranks_in_bounded_memory(tmp_path: Path) -> None:
    file = llama(tmp_path, "pp=8 dp=16 tp=32", layers=50, hidden=8192, fsdp=False)
    words = ["simulate", file, "--operation", "export", "--link", LINK, "--json"]
    done = subprocess.run([sys.executable, "-c", PEAK, *map(str, words)], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["num_ranks"] == len(report["ranks"]) == 4096
    assert report["plan"]["num_tensors"] == 453 and not report["is_each_read"]
    assert report["totals"]["written_nbytes"] == report["plan"]["files_nbytes"] > 90e9
    assert int(done.stderr.split()[-2]) * 1024 <= 600e6
