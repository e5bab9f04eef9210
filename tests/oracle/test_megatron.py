"""Megatron-core 0.16's own checkpoints, on CPU: cut by Megatron, merged by xrank where Megatron can't be imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.write_megatron import CASES, world_size
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.readers.base import Hints
from xrank.readers.megatron.dist import MegatronDistReader
from xrank.readers.megatron.legacy import MegatronLegacyReader
from xrank.testing.reader_contract import read_model, whole

# Five processes import Megatron and torch for each case, and each starts one more.
pytestmark = pytest.mark.timeout(240)

_MODEL_TYPES = {
    "dense": "qwen2",
    "experts": "qwen3_moe",
    "experts-tp": "mixtral",
    "experts-whole": "mixtral",
}
_WRITER = Path(__file__).with_name("write_megatron.py")
_MERGE = """
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, full, path=None, target=None):
        if full.partition(".")[0] in ("torch", "megatron"):
            raise ImportError(f"{full} must not be needed")
sys.meta_path.insert(0, Absent())
from xrank.commands.gather import gather_checkpoint
gather_checkpoint(sys.argv[1], sys.argv[2], recipe="none")
"""


def run(folder: Path, name: str, num_ranks: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Files, not pipes: Megatron's helper processes may outlive their rank and would hold a pipe open.
    logs = [folder / f"{name}-{rank}.log" for rank in range(num_ranks)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            command = [sys.executable, "-W", "ignore", str(_WRITER), str(rank), str(folder), name]
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
            )
    try:
        codes = [process.wait(timeout=180) for process in ranks]
    finally:
        for process in ranks:  # and the helpers that outlive it
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert codes == [0] * num_ranks, "\n".join(log.read_text()[-3000:] for log in logs)


@pytest.fixture(scope="module", params=CASES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name: str = request.param
    folder = tmp_path_factory.mktemp("megatron")
    run(folder, f"{name}-single", 1)
    run(folder, name, world_size(CASES[name]))
    return name, folder


def merged(source: Path, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", _MERGE, str(source), str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return read_model(out)


def test_distributed_checkpoint(written: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = written
    expected = torch.load(folder / "global.pt", weights_only=True)
    assert not any(tensor.isnan().any() for tensor in expected.values())
    assert merged(folder / "dist", tmp_path / "out") == {name: whole(t) for name, t in expected.items()}
    model = MegatronDistReader().read(str(folder / "dist"), Hints())
    assert model.step == 10 and model.args is not None and model.args["num_layers"] == 4


def test_legacy_checkpoint(written: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = written
    expected = torch.load(folder / "named.pt", weights_only=True)
    assert merged(folder / "legacy", tmp_path / "out") == {key: whole(t) for key, t in expected.items()}
    model = MegatronLegacyReader().read(str(folder / "legacy"), Hints())
    tied = {"output_layer.weight": "embedding.word_embeddings.weight"}
    assert model.aliases == (tied if name == "dense" else {})


def test_live_modules(written: tuple[str, Path]) -> None:
    """What the ranks held in memory, exported while they lived."""
    name, folder = written
    expected = torch.load(folder / "named.pt", weights_only=True)
    assert read_model(folder / "live") == {key: whole(t) for key, t in expected.items()}
    # The last stage's copy of a tied embedding went out under the embedding's name.
    assert ("output_layer.weight" in expected) == (name != "dense")


@pytest.mark.parametrize("kind", ["dist", "legacy"])
def test_both_formats_are_one_model_of_hugging_faces(written: tuple[str, Path], tmp_path: Path, kind: str) -> None:
    """The recipe gives what Megatron's names stand for: checked on the tensors that it cuts or puts side by side."""
    name, folder = written
    config = {"model_type": _MODEL_TYPES[name], "vocab_size": 64, "num_hidden_layers": 4, "hidden_size": 16}
    config |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "tie_word_embeddings": name == "dense",
    }
    (folder / kind / "config.json").write_text(json.dumps(config))
    report = inspect_source(folder / kind)
    assert (report.source["format"], report.details["problems"]) == (f"megatron-{kind}", [])
    gather_checkpoint(folder / kind, tmp_path / "out")
    found = read_model(tmp_path / "out")
    source = torch.load(folder / "named.pt", weights_only=True)
    for layer in range(4):
        # A group of heads has two queries, a key and a value, of four rows each.
        groups = source[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"].view(2, 4, 4, 16)
        at = f"model.layers.{layer}.self_attn"
        assert found[f"{at}.q_proj.weight"] == whole(groups[:, :2].reshape(16, 16))
        assert found[f"{at}.k_proj.weight"] == whole(groups[:, 2].reshape(8, 16))
        assert found[f"{at}.v_proj.weight"] == whole(groups[:, 3].reshape(8, 16))
    assert ("lm_head.weight" in found) == (name != "dense")
    assert all(key.startswith(("model.", "lm_head.")) for key in found)
