"""Times ModelOpt's post-processing, TP2 x PP2 to one rank, through its own gathers and through xrank's in their place.

Both run in the same 4 processes in turn, from the same parts; the time is rank 0's, from a barrier to the merged model.
Each run makes ModelOpt's own process group anew, as an export does, so each has the first meeting of one; the first run
of all, which also meets the world and grows the arenas, is shown apart. Quote the ratios: absolute times belong to one
machine and its noise. Needs the virtual environment of `make oracle`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.oracle.made_models import FORMATS, NUM_STAGES, TENSOR_PARALLEL, Sizes, made_part
from tests.oracle.postprocessing import GATHERS, merged, using
from xrank.testing.rank_pool import RankPool

CASES = {
    "80 layers, calls": Sizes(num_layers=80, hidden=64, ffn=192, vocab=1024),
    "32 layers, bytes": Sizes(num_layers=32, hidden=1024, ffn=2816, vocab=32000),
}


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--format", choices=[name for name in FORMATS if name], default="int8_sq")
    arguments = parser.parse_args()
    print(f"{arguments.format}, {TENSOR_PARALLEL * NUM_STAGES} ranks, {arguments.rounds} rounds: medians (ranges)")
    print("| model | gathers on rank 0 | ModelOpt first | ModelOpt | xrank first | xrank | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    pool = RankPool()
    try:
        for case, sizes in CASES.items():
            answers = pool.run(4, _timed_rounds, arguments.format, sizes, arguments.rounds, timeout_seconds=3600)
            nbytes, num_calls, times = answers[0]
            cells = [f"{case}, {nbytes / 1e6:,.0f} MB", f"{num_calls:,}"]
            for first, *later in times.values():
                cells += [f"{first:.2f} s", _spread(later)]
            ratio = statistics.median(times["ModelOpt"][1:]) / statistics.median(times["xrank"][1:])
            print(f"| {' | '.join(cells)} | {ratio:.1f} |", flush=True)
    finally:
        pool.close()


def _timed_rounds(quantization: str, sizes: Sizes, rounds: int) -> tuple[int, int, dict[str, list[float]]]:
    """Return the merged model's bytes, the gathers of one merge, and the seconds of each merge, the first included."""
    part = made_part(dist.get_rank(), quantization, sizes)
    calls: Counter[str] = Counter()
    counted = {name: partial(_counted, calls, name, gather) for name, gather in GATHERS["xrank"].items()}
    times: dict[str, list[float]] = {name: [] for name in GATHERS}
    for number in range(rounds + 1):
        # Who goes second finds warm caches: each does in turn.
        for name in sorted(GATHERS, reverse=number % 2 == 1):
            seconds, _ = _timed(part, GATHERS[name])
            times[name].append(seconds)
    _, models = _timed(part, counted)
    return sum(tensor.nbytes for tensor in _tensors(models)), calls.total(), times


def _timed(part: Any, gathers: dict[str, Any]) -> tuple[float, Any]:
    # A merge changes the configs and no tensor.
    part = copy.deepcopy(part, {id(tensor): tensor for tensor in _tensors(part)})
    with using(gathers):
        dist.barrier()
        started = time.perf_counter()
        models = merged(part)
        return time.perf_counter() - started, models


def _counted(calls: Counter[str], name: str, gather: Any, *args: Any, **kwargs: Any) -> Any:
    calls[name] += 1
    return gather(*args, **kwargs)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, list) else vars(value).values() if dataclasses.is_dataclass(value) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}) s"


if __name__ == "__main__":
    main()
