"""Training states that frameworks save on real ranks: each moment, step and option as the ranks hold it, to the bit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.save_megatron_state import KINDS, WORLD
from tests.oracle.save_training_states import CASES, OF_FOUR, STEPS
from tests.readers.stored_tensors import read_moments, read_tensors
from xrank.errors import UsageError
from xrank.layout.training_state import TrainingState
from xrank.readers.training_states import read_training_state

# Importing the frameworks and starting ranks takes most of it.
pytestmark = pytest.mark.timeout(300)


def saved(folder: Path, num_ranks: int, cases: tuple[str, ...]) -> Path:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    ended = subprocess.run(
        [*launch, "-m", "tests.oracle.save_training_states", str(folder), *cases],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = tuple(case for case in CASES if case != "titan" or find_spec("torchtitan"))
    return saved(tmp_path_factory.mktemp("of_two"), 2, cases)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("of_four"), 4, OF_FOUR)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], about: str = "") -> None:
    assert sorted(got) == sorted(want), about
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), (about, name)
        assert torch.equal(got[name], tensor), (about, name)


def assert_holds(state: TrainingState, want: dict[str, Any]) -> None:
    moments, steps = read_moments(state), dict(state.steps)
    assert sorted(moments) == sorted(want["states"])
    for name, own in want["states"].items():
        assert steps.pop(name) == float(own["step"])
        assert_same(moments[name], {kind: tensor for kind, tensor in own.items() if kind != "step"}, name)
    assert not steps
    got = {name: dict(group.options) for group in state.groups for name in group.parameters}
    assert got == {name: options for names, options in want["groups"] for name in names}
    assert_same(read_tensors(state.stored, want["tensors"]), want["tensors"])


@pytest.mark.parametrize("case", CASES)
def test_two_ranks(of_two: Path, case: str) -> None:
    place = of_two / case
    if not place.exists():
        pytest.skip("torchtitan is not installed (see the Makefile)")
    state = read_training_state(str(place))
    assert_holds(state, torch.load(place / "expected.pt"))
    assert (state.optimizer, state.stored.world_size) == ("AdamW", 2)
    assert state.values["lr_scheduler"] if case != "titan" else state.values["train_state"]["step"] == STEPS
    if case == "trainer":
        assert state.values["global_steps"] == STEPS
        assert {each.name for each in state.left_out} >= {"rng_state_0.pth", "trainer_state.json"}


@pytest.mark.parametrize("case", OF_FOUR)
def test_four_ranks(of_four: Path, case: str) -> None:
    assert_holds(read_training_state(str(of_four / case)), torch.load(of_four / case / "expected.pt"))


@pytest.fixture(scope="module")
def of_megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    script = Path(__file__).with_name("save_megatron_state.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for kind in KINDS:
        with (folder / "log").open("w") as log:
            # Helper processes of Megatron outlive its ranks for a while, and would keep a pipe open.
            commands = [[sys.executable, str(script), str(rank), str(folder), kind] for rank in range(WORLD)]
            ranks = [subprocess.Popen(command, stdout=log, stderr=log, env=environment) for command in commands]
            ended = [rank.wait(timeout=200) for rank in ranks]
        assert ended == [0] * WORLD, (folder / "log").read_text()[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-core is not installed (see the Makefile)")
@pytest.mark.parametrize("kind", ["fully_reshardable", "plain"])
def test_megatron(of_megatron: Path, kind: str) -> None:
    want = torch.load(of_megatron / f"run-{kind}" / "expected.pt")
    state = read_training_state(str(of_megatron / f"run-{kind}"))
    moments, found = read_moments(state), 0
    for name, own in want.items():
        # Megatron saves norms as those of the layers behind them, as Transformer Engine has them.
        saved_name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        saved_name = saved_name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", saved_name)
        stacked = moments[name if layer is None else f"decoder.layers.{layer[2]}"]
        got = stacked if layer is None else {kind: tensor[int(layer[1])] for kind, tensor in stacked.items()}
        assert_same(got, own, name)
        found += sum(tensor.numel() for tensor in got.values())
    assert found == sum(tensor.numel() for own in moments.values() for tensor in own.values())
    assert set(state.steps.values()) == {STEPS}
    decays = [{name.rpartition(".")[2] for name in group.parameters} for group in state.groups]
    assert decays == [{"weight"}, {"weight", "layer_norm_weight"}]
    assert state.groups[1].options["wd_mult"] == 0.0


@pytest.mark.slow
@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-core is not installed (see the Makefile)")
def test_megatron_buckets_are_refused_with_the_option(of_megatron: Path) -> None:
    with pytest.raises(UsageError, match="buckets") as raised:
        read_training_state(str(of_megatron / "run-dp_reshardable"))
    assert "--dist-ckpt-optim-fully-reshardable" in str(raised.value.next_step)
