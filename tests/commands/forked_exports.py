"""Ranks that export a model, forked from a process that has imported torch, so that any of them may be killed.

Run as a program it is the process that forks; what its ranks said is the answer to a job.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.commands.forked_ranks import befall
from tests.commands.forker import Forker, answer_jobs, fork_answer, forker, read_answer
from tests.commands.made_workspaces import MESH, cut, layout_of, wide_model
from tests.commands.strikes import Board, arm, digests, watch
from tests.open_files import open_files
from tests.other_hosts import move_to_host
from xrank.layout import LayoutMap


def parts_of(step: int, rank: int) -> tuple[dict[str, torch.Tensor], LayoutMap]:
    """Return what a rank holds of the model at a step, some of it strided, and how it is cut."""
    layouts, parts = LayoutMap(MESH), {}
    for name, tensor in wide_model(step).items():
        layouts[name] = layout_of(name)
        part = cut(tensor, layout_of(name), MESH, rank)
        if name.endswith("down"):
            part = part.t().contiguous().t()
        elif name.endswith("up"):
            part = torch.cat((part, part), dim=1)[:, : part.shape[1]]
        parts[name] = part
    return parts, layouts


class ForkedExports:
    """The process that forks."""

    def __init__(self, forking: Forker) -> None:
        self._forking = forking
        self.num_processes = forking.num_processes

    def __call__(self, out: object, *, num_ranks: int = 4, **job: Any) -> list[dict[str, Any] | None]:
        """Export the model as so many ranks; return what each said: its report, or its error; None: it was killed.

        Args:
            out: the folder.
            num_ranks: how many.
            **job: ``step`` of the model; ``options`` of `export_model`; ``far``: each on a host of its own, as far as
                it can tell; ``act``: (rank, what befalls it, when), see `befall`; ``raises``: a rank whose call
                raises; ``elsewhere``: (rank, folder): to that rank the output is in that folder; ``differs``: a rank
                whose replica of norm.weight is another; ``absent``: a rank that makes no call; ``again``: call a second
                time after a failure; ``leaves_group``: end torch's process group while an export runs in the
                background; ``strike``: see `arm`; ``watch``: the first rank answers with what it saw at the
            folder, see `watch`; ``task``: "load" that folder or "iterate" instead, which
                answer with digests of what each rank has then.
        """
        return self._forking.ask(out=str(out), num_ranks=num_ranks, **job)


@contextlib.contextmanager
def forked_exports() -> Iterator[ForkedExports]:
    """Start the process, and end it with all that it forked."""
    with forker(__name__, {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}) as forking:
        yield ForkedExports(forking)


# ---- what follows runs in that process and in its ranks


def _export(job: dict[str, Any], parts: dict[str, torch.Tensor], layouts: LayoutMap) -> dict[str, Any]:
    import torch.distributed as dist

    import xrank

    options = {"timeout_seconds": 20, **job.get("options", {})}
    if job.get("task") == "load":
        module = {name: torch.zeros_like(tensor) for name, tensor in parts.items()}
        xrank.load_model(module, job["out"], layouts=layouts, **options)
        return {"digests": digests(module.items()), "right": digests(module.items()) == digests(parts.items())}
    if job.get("task") == "iterate":
        with xrank.iter_model(parts, layouts=layouts, **options) as tensors:
            return {"digests": digests(tensors)}
    report = xrank.export_model(parts, job["out"], layouts=layouts, **{"max_shard_size": "60KB", **options})
    if options.get("background"):
        for part in parts.values():  # the next step of a training
            part.zero_()
        if job.get("leaves_group"):
            dist.destroy_process_group()
        report = report.result()
    return {"report": report.to_dict()}


def _be_rank(job: dict[str, Any], rank: int, number: int, port: int, board: Board) -> dict[str, Any]:
    import torch.distributed as dist

    import xrank
    from xrank.commands import load
    from xrank.engine import executor, rounds, tensor_pairs, windows

    torch.set_num_threads(1)
    for module in (windows, executor, load, tensor_pairs):
        module.WINDOW_NBYTES = 4096  # type: ignore[attr-defined]
    assert rounds.windows is windows and rounds.windows is windows
    rounds.ROUND_NBYTES = job.get("round_nbytes", 20_000)
    if job.get("far"):
        move_to_host(rank)
    store = dist.PrefixStore(str(number), dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job["num_ranks"])
    dist.barrier()  # one that ends at once would break the connections that a slower one is still making
    parts, layouts = parts_of(job.get("step", 0), rank)
    if job.get("raises") == rank:
        parts["0.up"] = parts["0.up"].to_sparse()
    if job.get("differs") == rank:
        parts["norm.weight"][3] += 1
    if "elsewhere" in job:
        from xrank.engine import shared_writing
        from xrank.storage.output_place import OutputPlace

        shared_writing._ELSEWHERE_SECONDS = 0.2
        if job["elsewhere"][0] == rank:
            place = OutputPlace.from_path(os.path.join(job["elsewhere"][1], "out"))
            shared_writing.OutputPlace = type("", (), {"from_path": lambda out: place})  # type: ignore[misc, assignment]
    if job.get("absent") == rank:
        return {"absent": True}
    if "act" in job and job["act"][0] == rank:
        befall(*job["act"][1:])
    if "strike" in job:
        arm(board, rank, job["strike"])
    seen = watch(job["out"]) if job.get("watch") and rank == 0 else []
    said: list[dict[str, Any]] = []
    for attempt in range(2 if job.get("again") else 1):
        started = time.monotonic()
        try:
            if attempt and job.get("raises") == rank:
                parts["0.up"] = parts["0.up"].to_dense()
            said.append(_export(job, parts, layouts))
        except xrank.errors.XrankError as error:
            said.append({**error.to_dict(), "failures": [e.rank for e in getattr(error, "failures", ())]})
        except RuntimeError as error:  # of torch's
            said.append({"type": "RuntimeError", "message": str(error)})
        said[-1]["took_seconds"] = time.monotonic() - started
        if board.struck is not None:
            said[-1]["seconds_after"] = time.monotonic() - board.struck
    gc.collect()  # what an error's frames held
    left = [name for name in open_files().values() if "xrank" in name]
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    # A rank that had to wait for another watches it by a pidfd for as long as their group lives.
    left += [name for name in open_files().values() if "pidfd" in name]
    return {
        **said[-1],
        "first": said[0],
        "seen": seen,
        "left": left,
    }


def _run(job: dict[str, Any], number: int, port: int) -> list[dict[str, Any] | None]:
    board = Board()
    nothing = {"type": "no answer"}
    ranks = [
        fork_answer(partial(_be_rank, job, rank, number, port, board), nothing) for rank in range(job["num_ranks"])
    ]
    stopped = job["act"][0] if "act" in job and job["act"][1] == "stop" else None
    if job.get("strike", {}).get("what") == "stop":
        stopped = job["strike"]["victim"]
    answers: dict[int, Any] = {}
    for rank in sorted(range(len(ranks)), key=lambda rank: rank == stopped):
        answers[rank] = read_answer(*ranks[rank], is_stopped=rank == stopped)
    return [answers[rank] for rank in range(len(ranks))]


def _main() -> None:
    import torch.distributed.tensor  # noqa: F401  every rank has it when it is forked

    import xrank
    import xrank.engine.shared_writing

    _ = xrank.export_model, xrank.load_model, xrank.iter_model
    answer_jobs(_run)


if __name__ == "__main__":
    _main()
