"""Checkpoints of the real DeepSpeed: gathered where it can't be imported, equal to what its ranks hold.

3 ranks train in every configuration, 4 in two; the ranks put their weights together themselves and leave them beside
the checkpoint. ``zero_to_fp32.py`` and ``ds_to_universal.py`` are judged by the same weights.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.oracle.train_deepspeed import CASES
from tests.readers.stored_tensors import read_moments
from xrank.readers.training_states import read_training_state

# Importing DeepSpeed and starting ranks takes most of it.
pytestmark = pytest.mark.timeout(300)

UNIVERSAL = ("zero1-bf16-optimizer", "zero2-bf16", "zero2-aligned", "zero3-bf16")

# Runs xrank's command where neither DeepSpeed nor torch can be imported.
GATHER = """
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, full, path=None, target=None):
        if full.partition(".")[0] in ("deepspeed", "torch"):
            raise ImportError(f"{full} must not be needed")
sys.meta_path.insert(0, Absent())
from xrank.cli.main import main
main()
"""


def launched(script: str, folder: Path, num_ranks: int, cases: list[str]) -> Path:
    """Return the folder into which ranks that run a script of this folder have saved these cases."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    ended = subprocess.run(
        [*launch, str(Path(__file__).with_name(script)), str(folder), *cases],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def of_three(tmp_path_factory) -> Path:
    return launched("train_deepspeed.py", tmp_path_factory.mktemp("of_three"), 3, list(CASES))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory) -> Path:
    return launched("train_deepspeed.py", tmp_path_factory.mktemp("of_four"), 4, ["zero2-bf16", "zero3-bf16"])


def gathered(source: Path, out: Path, *options: str) -> dict[str, torch.Tensor]:
    command = [sys.executable, "-c", GATHER, "gather", str(source), "--out", str(out), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return load_file(out / "model.safetensors")


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_the_weights_are_those_of_the_ranks(of_three, tmp_path, case):
    want = torch.load(of_three / case / "expected.pt")
    assert_same(gathered(of_three / case, tmp_path / "model"), want)
    trained_names = [name for name in want if re.match("embed|up|down|gain", name)]
    assert len(trained_names) == 5 and "head.weight" not in want
    assert {want[name].dtype for name in trained_names} == {torch.float32}


@pytest.mark.parametrize("case", ["zero2-bf16", "zero3-bf16"])
def test_the_weights_of_four_ranks(of_four, tmp_path, case):
    assert_same(gathered(of_four / case, tmp_path / "model"), torch.load(of_four / case / "expected.pt"))


def test_zero_to_fp32_does_not_read_what_bf16_optimizer_writes(of_three):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with pytest.raises(ValueError, match="not a zero checkpoint"):
        get_fp32_state_dict_from_zero_checkpoint(str(of_three / "zero1-bf16-optimizer"))


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("zero0", "zero1-bf16-optimizer")])
def test_as_zero_to_fp32_says(of_three, tmp_path, case):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    theirs = get_fp32_state_dict_from_zero_checkpoint(str(of_three / case))
    ours = gathered(of_three / case, tmp_path / "model")
    # It writes ties twice, rounds buffers to fp32, and loses what stage 1 froze.
    assert torch.equal(theirs.pop("head.weight"), ours["embed.weight"])
    lost = {name for name in ours if name not in theirs}
    assert lost == ({"frozen.weight", "frozen.bias"} if CASES[case]["stage"] == 1 else set())
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name].to(tensor.dtype)), name


def made_universal(checkpoint: Path, folder: Path) -> Path:
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(checkpoint / "global_step2"),
            output_folder=str(folder / "global_step2_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
    return folder


@pytest.mark.parametrize("case", UNIVERSAL)
def test_universal_checkpoints(of_three, tmp_path, case):
    source = made_universal(of_three / case, tmp_path)
    assert_same(gathered(source, tmp_path / "model"), torch.load(of_three / case / "expected.pt"))


def test_of_dealt_parameters_the_script_itself_makes_others(of_three, tmp_path):
    """`round_robin_gradients`: a gather takes the checkpoint itself, and refuses what the script made of it."""
    source = made_universal(of_three / "zero2-round-robin", tmp_path)
    theirs = torch.load(source / "global_step2_universal" / "zero" / "up.bias" / "fp32.pt")["param"]
    assert not torch.equal(theirs, torch.load(of_three / "zero2-round-robin" / "expected.pt")["up.bias"])
    command = [sys.executable, "-m", "xrank", "gather", str(source), "--out", str(tmp_path / "model")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "mixes up the parameters" in ended.stderr, ended.stderr


def assert_moments(source: Path, folder: Path) -> None:
    """Check moments, masters, steps and options against those of the ranks."""
    want = torch.load(folder / "moments.pt")
    state = read_training_state(str(source))
    moments = read_moments(state)
    assert sorted(moments) == sorted(want["states"])
    for name, own in want["states"].items():
        assert_same(moments[name], own)
    assert state.steps == dict.fromkeys(want["states"], 2)
    options = {name: dict(group.options) for group in state.groups for name in group.parameters}
    assert options == {name: own for names, own in want["groups"] for name in names}


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("zero0", "zero2-round-robin")])
def test_the_moments_are_those_of_the_ranks(of_three, case):
    assert_moments(of_three / case, of_three / case)


@pytest.mark.parametrize("case", ["zero2-bf16", "zero3-bf16"])
def test_the_moments_of_four_ranks(of_four, case):
    assert_moments(of_four / case, of_four / case)


@pytest.mark.parametrize("case", UNIVERSAL)
def test_the_moments_in_universal_checkpoints(of_three, tmp_path, case):
    assert_moments(made_universal(of_three / case, tmp_path), of_three / case)


def test_the_moments_of_dealt_parameters_are_cut_as_their_weights(of_three):
    """Each moment belongs to the weight beside it: Adam's first moment has the sign of what the last steps took."""
    state = read_training_state(str(of_three / "zero2-round-robin"))
    moments, want = read_moments(state), torch.load(of_three / "zero2-round-robin" / "expected.pt")
    assert all(torch.equal(moments[name]["fp32_param"], want[name]) for name in moments)
    assert all(bool((own["exp_avg_sq"] > 0).any()) for own in moments.values()) and len(moments) == 5


def test_a_cast_while_copying(of_three, tmp_path):
    got = gathered(of_three / "zero3-bf16", tmp_path / "model", "--dtype", "bf16")
    want = torch.load(of_three / "zero3-bf16" / "expected.pt")
    assert_same(got, {n: t.bfloat16() if t.is_floating_point() else t for n, t in want.items()})


@pytest.mark.parametrize("case", ["zero2-bf16", "zero3-bf16"])
@pytest.mark.parametrize("kind", ["exchanged", "copied", "copied without its name"])
def test_another_ranks_file_is_seen(of_three, tmp_path, case, kind):
    shutil.copytree(of_three / case, tmp_path / "checkpoint")
    one, two = (
        tmp_path / "checkpoint" / "global_step2" / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        for rank in (1, 2)
    )
    first, second = one.read_bytes(), two.read_bytes()
    if kind == "exchanged":
        one.write_bytes(second)
    # torch writes the name under which it saved into the archive; a program that gives it a stream has none.
    two.write_bytes(first.replace(b"pp_rank_1_mp", b"pp_rank_2_mp") if kind == "copied without its name" else first)
    command = [sys.executable, "-m", "xrank", "gather", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "model")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    says = "renamed or copied"
    if kind == "copied without its name":
        says = "holds rank 1's partition" if case == "zero2-bf16" else "is a copy of rank 1's file"
    assert ended.returncode == 4 and says in ended.stderr, ended.stderr
