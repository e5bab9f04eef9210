"""Frameworks that call xrank at their saves: the folders equal `save_pretrained` of the state that they gather."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.commands.exported import assert_same_folder
from tests.page_blocks import find_block, run_program
from xrank import gather_checkpoint

# Two ranks import torch, transformers and DeepSpeed in each launch.
pytestmark = pytest.mark.timeout(600)

PAGE = "integrations.md"
QUICK = ("trainer-fsdp1", "trainer-fsdp2", "trainer-zero3", "accelerate-zero2", "accelerate-fsdp2")
SLOW = ("trainer-ddp", "trainer-zero1", "trainer-zero2", "accelerate-fsdp1", "accelerate-zero3")

SNIPPETS = ("torchtitan-fsdp2", "torchtitan-pp", "verl-fsdp", "verl-fsdp2")


def launch(folder: Path, cases: tuple[str, ...]) -> Path:
    """Run each way to shard in a launch of its own: accelerate keeps the choice in globals."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    for engine in sorted({case.split("-")[1].rstrip("123") for case in cases}):
        chosen = [case for case in cases if case.split("-")[1].startswith(engine)]
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "tests.oracle.integrate", str(folder), *chosen]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert ended.returncode == 0, ended.stderr[-6000:]
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("quick"), QUICK)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("slow"), SLOW)


@pytest.mark.parametrize("case", QUICK)
def test_a_save_is_a_model_folder(quick: Path, case: str) -> None:
    assert_same_folder(quick / case / "made", quick / case / "want")


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # Lightning's use of torch
@pytest.mark.parametrize("words", ["import LlamaConfig", "export_at_save", "import lightning"])
def test_the_blocks_of_the_page_run(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(find_block(PAGE, words), PAGE, "exec"), {"__name__": "page"})
    made = {"models/checkpoint-2", "checkpoints/1/huggingface", "steps/step-2"}
    assert sum((tmp_path / one / "model.safetensors").exists() for one in made) == 1


@pytest.mark.parametrize("cut", ["fsdp_size=2", pytest.param("tp_size=2", marks=pytest.mark.slow)])
def test_a_model_of_a_distributed_config(cut: str, tmp_path: Path) -> None:
    """The program of the page, which saves the model once more as transformers does, in both ways."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2))
    model.save_pretrained(tmp_path / "base")
    save = 'model.save_pretrained("want")\nmodel.save_pretrained("shards", distributed_checkpoint=True)\nload_model('
    program = find_block(PAGE, "DistributedConfig").replace("fsdp_size=2", cut).replace("\nload_model(", f"\n{save}")
    run_program(tmp_path, program.replace("dist.destroy", 'model.save_pretrained("loaded")\ndist.destroy'), num_ranks=2)
    gather_checkpoint(tmp_path / "shards", tmp_path / "gathered")
    assert_same_folder(tmp_path / "models/step-2", tmp_path / "want")
    assert_same_folder(tmp_path / "gathered", tmp_path / "want")
    assert_same_folder(tmp_path / "models/step-1", tmp_path / "loaded")


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_so_is_it_from_other_engines(slow: Path, case: str) -> None:
    assert_same_folder(slow / case / "made", slow / case / "want")


@pytest.mark.slow
@pytest.mark.parametrize("case", SNIPPETS)
def test_the_snippets_of_the_page_run_in_their_trainers(case: str, tmp_path: Path) -> None:
    package = case.split("-")[0]
    if any(find_spec(name) is None for name in (package, "datasets", "tensorboard")):
        pytest.skip(f"{package} and its requirements are not installed (see tests/oracle/trainers/make.py)")
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.oracle.export_snippets", str(tmp_path), case]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert_same_folder(tmp_path / case / "made", tmp_path / case / "want")
