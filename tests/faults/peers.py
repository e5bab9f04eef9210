"""The best peers' tools under the campaign's faults, beside xrank: what each refuses, leaves half-written, or runs.

python -m tests.faults.peers                         in `make oracle`'s environment; the table of docs/campaign.md
python -m tests.faults.peers --count 50 --seed 17    as many corruptions, and kills and errors in proportion

Each try runs in a fork of this process, which has imported everything. All tools of a source get the same damaged
bytes. ``strace`` kills a tool at its N-th call that changes the disk, or lets the call fail: torch and safetensors
write in C++ and Rust, where Python sees no calls.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.faults.corruptions import damage
from tests.readers.made_zero import Zero, made_model, write_zero
from xrank.commands.gather import gather_checkpoint

_Call = Callable[[Path, Path], object]

_CHANGING = (
    "write,pwrite64,writev,pwritev,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,ftruncate,fallocate,"
    "fsync,fdatasync,copy_file_range,sendfile"
)
_CPU_SECONDS = 60
_NUM_RANKS = 2
_BOMB_NBYTES = 10_000_000


@dataclass(frozen=True)
class Tool:
    """A tool that merges a sharded checkpoint.

    Args:
        name: as in its documentation.
        run: merges a source into a new folder; called as the documentation calls it.
        module: is imported before the tries, and after sources that are made with stand-ins for its classes.
    """

    name: str
    run: _Call
    module: str


@dataclass(frozen=True)
class Source:
    """A sharded checkpoint, and the tools that merge it.

    Args:
        name: of its format.
        make: writes it to a folder.
        tools: that read it.
        pickled: a file of it that is a pickle, or torch's archive of one; None: it has no pickles.
    """

    name: str
    make: Callable[[Path], None]
    tools: tuple[Tool, ...]
    pickled: str | None


@dataclass
class Ended:
    """How a try ended, and what stands under the output's name then.

    Args:
        status: exit code: 0, 1 for an error, -N for a signal.
        files: name in the output -> content.
        seconds: of processor time.
        peak_nbytes: memory of the child beyond that of its parent.
    """

    status: int
    files: dict[str, bytes]
    seconds: float = 0.0
    peak_nbytes: int = 0


@dataclass
class Bench:
    """One source and one tool, with the output that an undisturbed run makes."""

    source: Path
    tool: Tool
    out: Path
    known: dict[str, bytes] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def attempt(self, source: Path | None = None, inject: str | None = None) -> Ended:
        """Run the tool in a child on a source, under strace if faults are to be injected; leave no output."""
        self.out.parent.mkdir()
        try:
            status, seconds, peak = _fork(lambda: self.tool.run(source or self.source, self.out), inject)
            return Ended(status, _content(self.out), seconds, peak)
        finally:
            shutil.rmtree(self.out.parent)

    def is_part(self, files: dict[str, bytes]) -> bool:
        """Return whether an output is visible that is not the whole one."""
        return bool(files) and files != self.known


def _content(folder: Path) -> dict[str, bytes]:
    """Return the files under their final names: not the manifest, which has times, nor hidden temporary ones."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.name: path.read_bytes() for path in paths if path.name != "xrank_manifest.json"}


def _fork(work: Callable[[], object], inject: str | None = None) -> tuple[int, float, int]:
    """Run work in a child; return its exit code, its processor seconds, and its memory beyond this process's."""
    ready, go = os.pipe()
    asked, answer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 1))
            signal.alarm(20 * _CPU_SECONDS)
            sys.stdout = sys.stderr = io.StringIO()
            logging.disable(logging.CRITICAL)
            warnings.simplefilter("ignore")
            os.read(ready, 1)
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            before = _peak()
            started = time.process_time()
            try:
                work()
                status = 0
            except BaseException:  # torch's CheckpointException is not an Exception
                pass
            os.write(answer, pickle.dumps((time.process_time() - started, _peak() - before)))
        finally:
            os._exit(status)
    os.close(answer)
    os.close(ready)
    tracer = _trace(pid, inject) if inject else None
    os.close(go)
    with open(asked, "rb") as pipe:
        content = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if tracer is not None:
        tracer.wait()
    seconds, peak = pickle.loads(content) if content else (0.0, 0)
    return status, seconds, peak


def _trace(pid: int, inject: str) -> subprocess.Popen[bytes]:
    command = ["strace", "-f", "-qq", "-o", inject.partition(" ")[0], "-p", str(pid), "-e", f"trace={_CHANGING}"]
    if " " in inject:
        command += ["-e", f"inject={_CHANGING}:{inject.partition(' ')[2]}"]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
        assert tracer.poll() is None, "strace does not attach"
        time.sleep(0.002)
    return tracer


def _peak() -> int:
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))


# ---- the faults


def corrupt(bench_of: list[Bench], seed: int, count: int) -> None:
    """Damage the source so often; each tool then reads the same bytes."""
    source = bench_of[0].source
    files = sorted(path for path in source.rglob("*") if path.is_file())
    for number in range(seed, seed + count):
        rng = random.Random(number)
        path = rng.choices(files, [max(512, file.stat().st_size) for file in files])[0]
        good = path.read_bytes()
        bad, _ = damage(good, rng)
        if bad == good:
            continue
        path.write_bytes(bad)
        for bench in bench_of:
            ended = bench.attempt()
            bench.counts["corruptions"] += 1
            if ended.status == 0:
                bench.counts["  same bytes" if ended.files == bench.known else "  silently wrong, exit 0"] += 1
            else:
                bench.counts["  refused" if ended.status == 1 else f"  {_signal(ended.status)}"] += 1
                bench.counts["  refused, and a part of an output left"] += bench.is_part(ended.files)
        path.write_bytes(good)


def stop(bench: Bench, folder: Path, seed: int, count: int) -> None:
    """Kill the tool at as many of its calls, and let half as many calls fail with ENOSPC or EIO."""
    log = folder / "calls"
    assert bench.attempt(inject=str(log)).status == 0
    num_calls = len(re.findall(r"^\d+ +\w+\(", log.read_text(), re.MULTILINE))
    bench.counts["calls of a run"] = num_calls
    rng = random.Random(seed)
    for _ in range(count):
        point = rng.randint(1, num_calls)
        ended = bench.attempt(inject=f"{log} signal=SIGKILL:when={point}")
        bench.counts["kills"] += 1
        bench.counts["  a part under the final name after a kill"] += bench.is_part(ended.files)
    for _ in range(count // 2):
        point, name = rng.randint(1, num_calls), rng.choice(("ENOSPC", "EIO"))
        ended = bench.attempt(inject=f"{log} error={name}:when={point}")
        bench.counts["errors"] += 1
        bench.counts["  a part under the final name after an error"] += bool(ended.status) and bench.is_part(
            ended.files
        )
        bench.counts["  exit 0 and a part after an error"] += ended.status == 0 and ended.files != bench.known


def attack(bench: Bench, source: Source, folder: Path) -> None:
    """Give the tool a pickle that creates a file, and one of ten million empty lists."""
    if source.pickled is None:
        return
    marker, place = folder / "ran", folder / "hostile"
    for kind, make in (("code", lambda path: _plant(path, marker)), ("bomb", _make_bomb)):
        shutil.copytree(bench.source, place)
        make(next(place.rglob(source.pickled)))
        ended = bench.attempt(place)
        if kind == "code":
            bench.counts["runs code of a pickle"] = int(marker.exists())
        else:
            bench.counts[f"10 MB of empty lists, status {ended.status}: MB of memory"] = ended.peak_nbytes // 10**6
            bench.counts["  ms of processor time"] = round(ended.seconds * 1000)
        marker.unlink(missing_ok=True)
        shutil.rmtree(place)


class _Hostile:
    """Pickles as a call that creates a file, and reads as None."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.marker)!r}, 'w').close()",)


def _plant(path: Path, marker: Path) -> None:
    if path.name == ".metadata":
        metadata = pickle.loads(path.read_bytes())
        metadata.storage_meta = _Hostile(marker)
        path.write_bytes(pickle.dumps(metadata))
    else:
        state = torch.load(path, weights_only=False)
        torch.save({**state, "more": _Hostile(marker)}, path)


def _make_bomb(path: Path) -> None:
    content = b"\x80\x04" + b"]" * _BOMB_NBYTES + b"."
    if path.name == ".metadata":
        path.write_bytes(content)
        return
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, record in records.items():
            archive.writestr(name, content if name.endswith("/data.pkl") else record)


def _signal(status: int) -> str:
    return "hangs" if -status in (signal.SIGALRM, signal.SIGXCPU) else f"crashes by {signal.Signals(-status).name}"


# ---- the sources and tools


def _save_on_ranks(save: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Let two real ranks save a model cut by rows."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(_NUM_RANKS):
            pids.append(os.fork())
            if pids[-1] == 0:
                status = 1
                try:
                    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=_NUM_RANKS)
                    mesh, state = init_device_mesh("cpu", (_NUM_RANKS,)), {}
                    for number in range(8):
                        whole = torch.rand(64, 32, generator=torch.Generator().manual_seed(number))
                        name = f"layers.{number}.weight"
                        state[name] = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
                    save(state)
                    dist.barrier()
                    status = 0
                finally:
                    os._exit(status)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        assert not any(statuses)


def _save_dcp(folder: Path) -> None:
    _save_on_ranks(lambda state: dcp.save(state, checkpoint_id=str(folder)))


def _save_shards(folder: Path) -> None:
    def save(state: dict[str, torch.Tensor]) -> None:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), _mapping(), save_distributed=True))

    _save_on_ranks(save)


def _save_zero(folder: Path) -> None:
    write_zero(folder, made_model(), Zero(stage=3, num_ranks=_NUM_RANKS))


def _mapping() -> dict[str, int]:
    return {f"layers.{number}.weight": 1 for number in range(8)}


def _run_xrank(source: Path, out: Path) -> None:
    # Formats that record no global shapes need the number of ranks; the others ignore it.
    gather_checkpoint(source, out, recipe="none", world_size=_NUM_RANKS)


def _run_torch_save(source: Path, out: Path) -> None:
    out.mkdir()
    dcp_to_torch_save(source, out / "model.pt")


def _run_accelerate(source: Path, out: Path) -> None:
    sys.modules["accelerate.utils"].merge_fsdp_weights(str(source), str(out))


def _run_consolidator(source: Path, out: Path) -> None:
    out.mkdir()
    consolidate_safetensors_files(str(source), str(out), _mapping())


def _run_zero(source: Path, out: Path) -> None:
    sys.modules["deepspeed.utils.zero_to_fp32"].convert_zero_checkpoint_to_fp32_state_dict(str(source), str(out))


_XRANK = Tool("xrank gather", _run_xrank, "xrank.commands.gather")
SOURCES = (
    Source(
        "DCP",
        _save_dcp,
        (
            _XRANK,
            Tool("dcp_to_torch_save", _run_torch_save, "torch.distributed.checkpoint.format_utils"),
            Tool("accelerate merge-weights", _run_accelerate, "accelerate.utils"),
        ),
        ".metadata",
    ),
    Source(
        "torch's HF shards",
        _save_shards,
        (_XRANK, Tool("torch's consolidator", _run_consolidator, "torch.distributed.checkpoint")),
        None,
    ),
    Source(
        "ZeRO-3",
        _save_zero,
        (_XRANK, Tool("zero_to_fp32.py", _run_zero, "deepspeed.utils.zero_to_fp32")),
        "*_rank_0_*_optim_states.pt",
    ),
)


def compare(folder: Path, source: Source, seed: int, count: int) -> Iterator[Bench]:
    """Try all tools of a source; yield each with its counts."""
    place = folder / "source"
    source.make(place)
    benches = [Bench(place, tool, folder / "made" / "out") for tool in source.tools]
    for bench in benches:
        import_module(bench.tool.module)
        bench.out.parent.mkdir()
        with redirect_stdout(io.StringIO()):  # in this process, so that the forks find all modules imported
            bench.tool.run(place, bench.out)
        bench.known = _content(bench.out)
        shutil.rmtree(bench.out.parent)
    corrupt(benches, seed, count)
    for bench in benches:
        stop(bench, folder, seed, count // 2)
        attack(bench, source, folder)
        yield bench


def main() -> None:
    """Print the counts of every tool."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.peers", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    parser.add_argument("--count", type=int, default=200, help="corruptions of each source")
    parser.add_argument("--sources", nargs="*", default=[source.name for source in SOURCES])
    given = parser.parse_args()
    torch.set_num_threads(1)  # a fork cannot use its parent's threads
    names = ("torch", "accelerate", "deepspeed", "safetensors")
    print(f"seed {given.seed}: {', '.join(f'{name} {version(name)}' for name in names)}", flush=True)
    for source in SOURCES:
        if source.name not in given.sources:
            continue
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            for bench in compare(Path(folder), source, given.seed, given.count):
                print(f"{source.name}, {bench.tool.name}")
                for what, number in bench.counts.items():
                    print(f"  {number:>10,} {what}")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
