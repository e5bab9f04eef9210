"""Training that goes on elsewhere: real frameworks resume what ``xrank reshard`` made of each other's checkpoints.

Each trains 20 steps on some ranks and saves by its own means. The state is converted on the command line, and another
framework, or the same on other ranks, trains 20 more. Beside it the first framework resumes by its own means on as many
ranks. Losses and weights are then the same bits, or differ by what two frameworks that add gradients in different
orders differ anyway: at most 2e-6 in losses of 1 to 3, which the optimizer's state moves by 1e-2.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytestmark = pytest.mark.timeout(400)

SPREAD = 2e-6
CHECKPOINTS = {"trainer": "checkpoint-20", "torchtitan": "checkpoint/step-20"}
"""Kind of training -> where it saves, if that is not ``checkpoint``."""


class Pair(NamedTuple):
    source: str
    ranks: int
    to: str
    target: str
    new_ranks: int
    spread: float = 0.0
    num_groups: int = 2
    own: str | None = None
    """Kind that resumes the source's own checkpoint, if not the source's kind."""
    options: tuple[str, ...] = ()


PAIRS = {
    "FSDP2 2 to 4": Pair("fsdp2", 2, "dcp", "fsdp2", 4),
    "FSDP2 to ZeRO-2": Pair("fsdp2", 2, "deepspeed-universal", "zero2", 3, SPREAD),
    "ZeRO-2 to FSDP2": Pair("zero2", 2, "dcp", "fsdp2", 3, SPREAD),
}
SLOW_PAIRS = {
    "FSDP2 4 to 2": Pair("fsdp2", 4, "dcp", "fsdp2", 2, options=("--dp", "2")),
    "FSDP2 x TP to FSDP2": Pair("fsdp2-tp", 4, "dcp", "fsdp2", 2, own="fsdp2"),
    "FSDP2 to FSDP2 x TP": Pair("fsdp2", 2, "dcp", "fsdp2-tp", 4, own="fsdp2-tp", options=("--dp", "2", "--tp", "2")),
    "FSDP2 to ZeRO-3": Pair("fsdp2", 2, "deepspeed-universal", "zero3", 3, SPREAD, 1),
    "FSDP2 x TP to ZeRO-1": Pair("fsdp2-tp", 4, "deepspeed-universal", "zero1", 2, SPREAD, own="fsdp2"),
    "ZeRO-2 2 to 3": Pair("zero2", 2, "deepspeed-universal", "zero2", 3),
    "ZeRO-2 3 to 2": Pair("zero2", 3, "deepspeed-universal", "zero2", 2),
    "ZeRO-3 2 to 3": Pair("zero3", 2, "deepspeed-universal", "zero3", 3, num_groups=1),
    "ZeRO-3 3 to 2": Pair("zero3", 3, "deepspeed-universal", "zero3", 2, num_groups=1),
    "ZeRO-2 to ZeRO-3": Pair("zero2", 2, "deepspeed-universal", "zero3", 3, SPREAD, 1),
    "ZeRO-3 to FSDP2 x TP": Pair("zero3", 2, "dcp", "fsdp2-tp", 4, SPREAD, 1),
    "ZeRO-3 to torchtitan": Pair("zero3", 2, "torchtitan", "torchtitan", 3, SPREAD, 1),
    "FSDP2 to torchtitan": Pair("fsdp2", 2, "torchtitan", "torchtitan", 3),
    "torchtitan to FSDP2": Pair("torchtitan", 2, "dcp", "fsdp2", 3),
    "accelerate 2 to 3": Pair("accelerate-fsdp2", 2, "accelerate", "accelerate-fsdp2", 3),
    "accelerate FSDP2 to DeepSpeed": Pair(
        "accelerate-fsdp2", 2, "deepspeed-universal", "accelerate-zero2", 3, SPREAD, options=("--tag", "pytorch_model")
    ),
    "accelerate DeepSpeed to FSDP2": Pair("accelerate-zero2", 2, "accelerate", "accelerate-fsdp2", 2, SPREAD),
    "Trainer 2 to 3": Pair("trainer", 2, "accelerate", "trainer", 3),
}


def run(*command: str | Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]


def train(folder: Path, kind: str, ranks: int, num_groups: int, source: Path | None = None) -> Path:
    """Run the training on ranks of its own; return the folder with its result and checkpoint."""
    folder.mkdir(parents=True)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    script = ("-m", "tests.oracle.resume_training", kind, folder, str(num_groups))
    run(*launch, *script, *(() if source is None else (source,)))
    return folder


def checkpoint_of(folder: Path, kind: str) -> Path:
    return folder / CHECKPOINTS.get(kind, "checkpoint")


class Trainings:
    """The sources, and what each framework makes of its own checkpoint; each is run once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.source = functools.cache(self._source)
        self.own = functools.cache(self._own)

    def _source(self, kind: str, ranks: int, num_groups: int) -> Path:
        return train(self._folder / f"{kind}-{ranks}-{num_groups}", kind, ranks, num_groups)

    def _own(self, kind: str, ranks: int, num_groups: int, resumed: str, new_ranks: int) -> Path:
        folder = self.source(kind, ranks, num_groups)
        source, name = checkpoint_of(folder, kind), f"own-{resumed}-{new_ranks}"
        if kind.startswith("zero") and ranks != new_ranks:
            source = folder / "universal"
            if not source.exists():
                converter = ("-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state")
                workers = ("--num_extract_workers", "1", "--num_merge_workers", "1")
                places = (
                    "--input_folder",
                    folder / "checkpoint" / "global_step20",
                    "--output_folder",
                    source / "step20",
                )
                run(*converter, *workers, *places)
        return train(folder / name, resumed, new_ranks, num_groups, source)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("trainings"))


def reshard(source: Path, out: Path, *options: str) -> Path:
    run("-m", "xrank", "reshard", source, "-o", out, *options)
    return out


def assert_goes_on(trainings: Trainings, tmp_path: Path, pair: Pair) -> None:
    source = trainings.source(pair.source, pair.ranks, pair.num_groups)
    made = reshard(checkpoint_of(source, pair.source), tmp_path / "made", "--to", pair.to, *pair.options)
    got = train(tmp_path / "resumed", pair.target, pair.new_ranks, pair.num_groups, made)
    own = pair.own or pair.source
    want = trainings.own(pair.source, pair.ranks, pair.num_groups, own, pair.new_ranks)
    assert_alike(got, want, pair.spread)


def assert_alike(got: Path, want: Path, spread: float) -> None:
    one, other = (torch.load(folder / "result.pt", weights_only=True) for folder in (got, want))
    assert len(one["losses"]) == len(other["losses"]) == 20
    assert max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)) <= spread
    assert one["weights"].keys() == other["weights"].keys()
    for name, weight in one["weights"].items():
        assert float((weight - other["weights"][name]).abs().max()) <= spread, name


@pytest.mark.parametrize("name", PAIRS)
def test_training_goes_on(trainings: Trainings, tmp_path: Path, name: str) -> None:
    assert_goes_on(trainings, tmp_path, PAIRS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_PAIRS)
def test_training_goes_on_elsewhere(trainings: Trainings, tmp_path: Path, name: str) -> None:
    assert_goes_on(trainings, tmp_path, SLOW_PAIRS[name])


@pytest.mark.slow
def test_a_universal_checkpoint_of_deepspeeds_own_converter(trainings: Trainings, tmp_path: Path) -> None:
    want = trainings.own("zero3", 2, 1, "zero3", 3)
    made = reshard(trainings.source("zero3", 2, 1) / "universal", tmp_path / "made", "--to", "dcp")
    assert_alike(train(tmp_path / "resumed", "fsdp2", 3, 1, made), want, SPREAD)


@pytest.mark.slow
def test_there_and_back(trainings: Trainings, tmp_path: Path) -> None:
    """FSDP2, DeepSpeed's form, FSDP2 again: the same bits as without the way."""
    source = checkpoint_of(trainings.source("fsdp2", 2, 2), "fsdp2")
    made = reshard(source, tmp_path / "made", "--to", "deepspeed-universal")
    back = reshard(made, tmp_path / "back", "--to", "dcp")
    want = trainings.own("fsdp2", 2, 2, "fsdp2", 4)
    assert_alike(train(tmp_path / "resumed", "fsdp2", 4, 2, back), want, 0.0)


@pytest.mark.slow
def test_the_spread_is_far_below_what_the_moments_do(trainings: Trainings, tmp_path: Path) -> None:
    """A resumed training without its moments is another one."""
    source = checkpoint_of(trainings.source("fsdp2", 2, 2), "fsdp2")
    made = reshard(source, tmp_path / "made", "--to", "deepspeed-universal")
    for kind in ("exp_avg", "exp_avg_sq"):
        for path in made.glob(f"global_step20/zero/*/{kind}.pt"):
            torch.save({"param": torch.zeros_like(torch.load(path, weights_only=True)["param"])}, path)
    got = train(tmp_path / "resumed", "zero2", 3, 2, made)
    want = trainings.own("fsdp2", 2, 2, "fsdp2", 3)
    losses = [torch.load(folder / "result.pt", weights_only=True)["losses"] for folder in (got, want)]
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) > 1000 * SPREAD
