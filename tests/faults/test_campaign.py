"""A small part of `make faults` in each run of the tests, and the faults that it found."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.cli.bench import Bench, refusal, run
from tests.commands.made_workspaces import leave
from tests.recipes.families import FAMILIES
from tests.recipes.test_there_and_back import model_of
from tests.sampled import sampled
from xrank.commands import gather as conversion
from xrank.errors import ContradictionError, UsageError
from xrank.layout.layout_map import write_whole
from xrank.recipes.options import parse_size
from xrank.recipes.proofs import prove_family
from xrank.recipes.recipe_choice import choose_recipe, follow_recipe
from xrank.recipes.recipe_file import evaluate, is_term, load_shipped_recipe
from xrank.recipes.sizes import check_requirements
from xrank.storage import disk as disk_calls

pytestmark = pytest.mark.timeout(240)

_COUNTS = {"texts": 500, "documents": 600, "pickles": 600, "commands": 25}


@pytest.mark.parametrize("part", [*_COUNTS])
def test_part_of_the_campaign(part: str) -> None:
    """In a process of its own: the campaign forks, and other tests' libraries (tensorstore) abort on a fork."""
    command = [sys.executable, "-m", "tests.faults", part, "--seed", "20261125", "--count", str(_COUNTS[part])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "WRONG" not in ended.stdout, ended.stdout + ended.stderr
    assert re.search(rf"^ +{_COUNTS[part]:,} (inputs|commands)$", ended.stdout, re.M), ended.stdout


@pytest.mark.parametrize("text", ["9" * 400 + "GB", "9" * 5000, "0.0000001B", "1.5 of GB"])
def test_sizes_beyond_all_numbers(text: str) -> None:
    with pytest.raises(UsageError, match=r"max_memory=? must be a size") as caught:
        parse_size(text, "max_memory")
    assert len(caught.value.message) < 200


def test_terms_of_a_thousand_operands_or_digits() -> None:
    assert not is_term("a" + " * 2" * 1500)
    assert not is_term("9" * 5000)
    assert is_term("a" + " * 2" * 31) and evaluate({"a": 3}, ["a" + " * 2" * 31]) == 3 * 2**31


def test_integers_beyond_all_floats_in_config(tmp_path: Path) -> None:
    recipe = load_shipped_recipe("megatron-llama")
    with pytest.raises(ContradictionError, match="disagree about norm_epsilon"):
        check_requirements(recipe, {"rms_norm_eps": 10**400}, {"norm_epsilon": 1e-5}, str(tmp_path))


@pytest.mark.parametrize("number", [2**62, 10**400])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama", "num_hidden_layers"),
        ("nemotron-nas", "num_hidden_layers"),  # whose layers have rules of their own
        ("deepseek-v3-mtp", "num_nextn_predict_layers"),
    ],
)
def test_counts_in_config_that_no_model_has(name: str, key: str, number: int) -> None:
    """The recipe lists its names: 2**62 of them were a MemoryError, 2**33 filled the machine."""
    family = FAMILIES[name]
    config = family.full_config()
    shapes = {name: tuple(shape) for name, shape in family.recorded["shapes"].items()}
    model = replace(model_of(shapes), args=family.full_args())
    recipe = choose_recipe(model, config, None)
    assert recipe is not None
    names = [shard.name for shard in follow_recipe(model, recipe, config).shards]
    assert prove_family(names, config)
    wrong = {**config, key: number}
    for work in (lambda: prove_family(names, wrong), lambda: follow_recipe(replace(model, args={}), recipe, wrong)):
        with pytest.raises(ContradictionError, match="would match more tensors than any model has"):
            work()


def test_a_link_file_of_two_thousand_tables(tmp_path: Path, bench: Bench) -> None:
    leave(bench.workspace)
    link = tmp_path / "link.toml"
    link.write_text(".".join(["a"] * 2000) + ' = "1GB/s"\n')
    refusal(
        run("simulate", bench.workspace, "--link", link, "--json"), "UsageError", says=["nests deeper than 64 tables"]
    )


def test_a_lock_that_a_killed_run_left_beside_its_output_goes(bench: Bench) -> None:
    model = leave(bench.workspace)
    bench.succeeds(model)
    lock = bench.folder / ".model.xrank.lock"
    lock.touch()
    assert "found" in run("gather", "--workspace", bench.workspace, "-o", bench.out).stdout
    assert not lock.exists()


def test_an_output_that_is_found_is_synced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run may have ended before the folder's sync: a power loss would take the name that was called done."""
    bench.succeeds(leave(bench.workspace))
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    assert run("gather", "--workspace", bench.workspace, "-o", bench.out).exit_code == 0
    assert synced == [str(bench.folder)]


def test_a_page_does_not_take_the_place_of_a_device(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="a device, FIFO or socket is there") as caught:
        write_whole(b"page", str(fifo))
    assert caught.value.errno == errno.EINVAL and fifo.is_fifo() and os.listdir(tmp_path) == ["fifo"]


def test_a_small_file_is_synced_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss may keep a rename and lose bytes that were not synced: an empty layout file has no rules."""
    calls = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, function=function: calls.append(name) or function(*a))
    write_whole(b"page", str(tmp_path / "file"))
    assert calls == ["fsync", "replace", "fsync"]
    assert (tmp_path / "file").read_bytes() == b"page"


def test_an_exception_of_no_input_is_one_line_and_a_report(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from xrank.commands import gather

    leave(bench.workspace)
    monkeypatch.setattr(gather, "plan_gather", lambda *_, **__: 1 / 0)
    error = bench.refused("XrankError", says=["this is a bug in xrank", "ZeroDivisionError: division by zero"])
    assert error["try"] == "run again with -v, and report the traceback"
    assert "Traceback" in run("gather", "--workspace", bench.workspace, "-o", bench.out, "-v").stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_without_room_for_the_last_rename(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int, overwrite: bool
) -> None:
    """A directory may need a block more for the name: the work is kept, and the old output too."""
    model = leave(bench.workspace)
    options = ("--overwrite",) if overwrite else ()
    if overwrite:
        bench.out.mkdir()
        (bench.out / "config.json").write_text("{}")

    def full(source: str, target: str, *flags: int) -> None:
        raise OSError(number, os.strerror(number), source, None, target)

    with monkeypatch.context() as disk:
        disk.setattr(disk_calls, "renameat2", full)
        refusal(
            bench.gather(*options),
            "NoSpaceError",
            says=["bytes free", "resumes from the finished files", str(bench.out)],
        )
    assert not bench.out.exists() or os.listdir(bench.out) == ["config.json"]
    report = bench.succeeds(model, *options)
    assert report["output"]["resumed_nbytes"] > 0
    assert [name for name in os.listdir(bench.folder) if name.startswith(".")] == []


def test_a_device_as_output(bench: Bench) -> None:
    leave(bench.workspace)
    for out in ("/proc/x", "/dev/null", "/dev/null/x", "/sys/x", "/proc/self/fd/x"):
        ended = run("gather", "--workspace", bench.workspace, "-o", out, "--json")
        assert ended.exit_code == 2, ended.stderr
        assert os.path.dirname(os.path.realpath(out)) in json.loads(ended.stdout)["error"]["file"]


@pytest.mark.parametrize("where", ["[sizes]\n{} = 3", "[sizes]\n[{}]", "{} = 1", "x = {}", "[mesh]\ngrid.{} = 1"])
@pytest.mark.parametrize("nested", [".".join(["a"] * 2000), "[" * 190 + "]" * 190, "[\n" * 500 + "]" * 500])
def test_a_layout_file_that_nests_is_refused_at_once(tmp_path: Path, where: str, nested: str) -> None:
    path = tmp_path / "layout.toml"
    path.write_text(where.format(nested))
    ended = run("layout", "check", path)
    assert ended.exit_code == 2 and "is not TOML: " in ended.stderr, ended.stderr


def test_a_flat_layout_of_a_thousand_members_is_no_nesting(tmp_path: Path) -> None:
    path = tmp_path / "layout.toml"
    members = ", ".join(f"p{i} [4]" for i in range(1000))
    path.write_text(f'[mesh]\ngrid = "dp=2"\n[tensors]\n"f" = "flat({members})/dp"\n')
    assert run("layout", "check", path).exit_code == 0


@pytest.mark.parametrize("pattern", ["(" * 5000 + ")" * 5000, "a{99999999999}", "("])
@pytest.mark.parametrize("name", ["--include", "--exclude", "--keep-fp32"])
def test_patterns_that_python_cannot_compile(bench: Bench, name: str, pattern: str) -> None:
    leave(bench.workspace)
    ended = run("gather", "--workspace", bench.workspace, "-o", bench.out, "--dtype", "bf16", name, pattern, "--json")
    error = refusal(ended, "UsageError", says=[f"{name} must be a regular expression"])
    assert len(error["got"]) < 200


def _repeat(unit: bytes, start: bytes = b"(") -> bytes:
    return b"\x80\x04" + start + unit * (10_000_000 // len(unit)) + b"."


_BOMBS = {
    "memo": _repeat(b"\x94", b"]"),
    "memo of numbers": _repeat(b"K\x01\x94"),
    "globals": b"\x80\x04(" + b"".join(b"ca\n%x\n" % number for number in range(1_100_000)) + b"t.",
    "frozensets": _repeat(b"(\x91"),
    "no items": _repeat(b"(u", b"}"),
    "nothing": _repeat(b"N", b"](")[:-1] + b"e.",
    "integers": _repeat(b"\x8a\x01\x01", b"](")[:-1] + b"e.",
    "appending": _repeat(b"Na", b"]"),
}
"""Pickles of 10 MB: a few opcodes that cost time or memory, repeated."""


@pytest.mark.parametrize("name", sampled(_BOMBS, 4))
def test_bombs_take_little_time_and_memory(tmp_path: Path, name: str) -> None:
    """They took up to 14 s, or 840 MB; the aim is 3 s, and other programs may run beside the test."""
    path, stream = tmp_path / "model.pt", io.BytesIO()
    torch.save({"w": torch.ones(2)}, stream)
    with zipfile.ZipFile(stream) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as changed:
        for record in archive.namelist():
            changed.writestr(record, _BOMBS[name] if record.endswith("data.pkl") else archive.read(record))
    # Between the two processes, because a child's peak begins with the memory of its parent.
    measure = "import os, sys; pid = os.posix_spawn(sys.executable, [sys.executable, *sys.argv[1:]], os.environ)\n"
    measure += "_, status, used = os.wait4(pid, 0)\n"
    measure += "print(os.waitstatus_to_exitcode(status), used.ru_maxrss, used.ru_utime + used.ru_stime)"
    command = ["-m", "xrank", "gather", str(path), "-o", str(tmp_path / "out")]
    ended = subprocess.run([sys.executable, "-c", measure, *command], capture_output=True, text=True, check=True)
    code, kilobytes, seconds = map(float, ended.stdout.split())
    assert code in (2, 4) and ended.stderr.startswith("xrank: "), ended.stderr
    assert kilobytes < 400_000 and seconds < 20, (kilobytes, seconds)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("added_nbytes", "says"),
    [
        # Whether the windows or the buffer is refused depends on what Python's heap has left.
        (2 << 20, (r"not enough memory for a worker's (windows|buffer)\n", r"want (1,048,576|2,097,152) bytes\n")),
        (8 << 20, ("the system cannot start more threads", "a thread for each of the --workers")),
    ],
)
def test_a_lack_of_memory_says_what_wanted_how_much(tmp_path: Path, added_nbytes: int, says: tuple[str, str]) -> None:
    """Under a limit of address space, as ulimit -v sets it, each was a Python error without a number."""
    torch.save({"w": torch.zeros(64 << 20, dtype=torch.uint8)}, tmp_path / "model.pt")
    program = (
        "import resource, sys, xrank.cli.gather, xrank.commands.gather, xrank.commands.folder_filling\n"
        "from xrank.cli.main import main\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "most = pages * resource.getpagesize() + int(sys.argv.pop(1))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "main()"
    )
    options = ["--workers", "1", "--recipe", "none"]
    command = [str(added_nbytes), "gather", str(tmp_path / "model.pt"), "-o", str(tmp_path / "out"), *options]
    ended = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and ended.stderr.startswith("xrank: NoSpaceError"), ended.stderr
    assert all(re.search(text, ended.stderr) for text in says) and not (tmp_path / "out").exists(), ended.stderr


def test_what_numpy_could_not_allocate_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(bench.workspace)
    monkeypatch.setattr(conversion, "gather_checkpoint", lambda *args, **options: np.empty(1 << 60, np.uint8))
    says = ["not enough memory in the step", "1.00 EiB"]
    refusal(run("gather", "--workspace", bench.workspace, "-o", bench.out, "--json"), "NoSpaceError", says=says)
