"""Quantized folders from ranks' shards are those that other tools make of the folder that a plain gather writes.

Four ranks save and export six models; llm-compressor, DeepSeek's function and ModelOpt quantize the merged ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.bench import run
from tests.oracle.quantized_folders import MODELOPT_SCHEMES, SCHEMES, quantize_by_modelopt, quantize_folder
from tests.oracle.quantized_models import KEPT, MODELS, make_model, read_tensors, write_megatron
from xrank.engine import transforms

pytestmark = pytest.mark.timeout(600)  # the first test waits for four ranks

SOURCES = {"dcp": (), "zero3": ("--dtype", "bf16"), "megatron": (), "live": ()}
"""Source -> options of its gathers, plain and quantized; ZeRO-3 keeps its masters in fp32."""
LAYERS = r"model\.(language_model\.)?layers\.\d\.(self_attn|mlp)\.(?!gate\.|router\.)[a-z0-9_.]+\.weight"
"""Names of the matrices that are quantized."""
UNLISTED = {"gemma3": ["model.embed_tokens"]}
"""Model -> modules that ModelOpt leaves in bf16 without a record: it knows no class of embeddings but torch's."""


def list_cells() -> list[Any]:
    """Return all models x sources x schemes; those are not slow in which each two of them meet."""
    chosen = {
        (name, list(SOURCES)[(i + j) % len(SOURCES)], scheme)
        for (i, name), (j, scheme) in product(enumerate(MODELS), enumerate(SCHEMES))
    }
    slow = pytest.mark.slow
    return [pytest.param(*cell, marks=() if cell in chosen else slow) for cell in product(MODELS, SOURCES, SCHEMES)]


class Sources:
    """The checkpoints of all models, and the folders made of them, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._expected: dict[tuple[str, str, str], Path] = {}

    def start(self, exports: set[tuple[str, str]]) -> subprocess.Popen[bytes]:
        """Start four ranks that save all models, and export some (model, scheme)."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        models = [",".join([name, *(scheme for its, scheme in sorted(exports) if its == name)]) for name in MODELS]
        script = ["-m", "tests.oracle.save_quantized", str(self.root), *models]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        with open(self.root / "errors.txt", "wb") as errors:
            return subprocess.Popen([*launch, *script], env=environment, stdout=errors, stderr=errors)

    def base(self, name: str) -> Path:
        """Return the folder of a model that no rank has cut."""
        folder = self.root / name / "hf"
        if not folder.exists():
            make_model(name).save_pretrained(folder)
        return folder

    def gather(self, name: str, source: str, *options: str) -> Path:
        """Gather a checkpoint with further options."""
        words = [source, *(word.strip("-") for word in options)]
        out = self.root / name / "gathered" / "-".join(words)
        if not out.exists():
            base = ("--base-model", str(self.base(name)))
            kept = [("--quantize-ignore", each) for each in KEPT.get(name, ()) if "--quantize" in options]
            place = self.root / name / source
            ended = run("gather", place, "--out", out, *base, *SOURCES[source], *options, *chain(*kept))
            assert ended.exit_code == 0, ended.stderr
        return out

    def make(self, name: str, source: str, scheme: str) -> tuple[Path, Path]:
        """Return a source's quantized folder, and its plain one."""
        if source == "live":
            return self.root / name / "live" / scheme, self.gather(name, "dcp")
        return self.gather(name, source, "--quantize", scheme), self.gather(name, source)

    def quantize(self, plain: Path, scheme: str, ignore: list[str]) -> Path:
        """Return what the tool of a scheme makes of a plain folder; equal folders are quantized once."""
        key = digest(plain), scheme, json.dumps(ignore)
        if key not in self._expected:
            out = self.root / f"expected-{len(self._expected)}"
            quantize_folder(plain, out, scheme, ignore)
            self._expected[key] = out
        return self._expected[key]


def digest(folder: Path) -> str:
    """Return a digest of a folder's tensors and config."""
    made = hashlib.sha256((folder / "config.json").read_bytes())
    for name, tensor in sorted(read_tensors(folder).items()):
        made.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        made.update(as_bytes(tensor).numpy())
    return made.hexdigest()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_tensors(got: Path, want: Path) -> None:
    """Compare names, types, shapes and all bits."""
    made, expected = read_tensors(got), read_tensors(want)
    assert made.keys() == expected.keys()
    kinds = {name: (made[name].dtype, made[name].shape) for name in made}
    assert kinds == {name: (tensor.dtype, tensor.shape) for name, tensor in expected.items()}
    assert [name for name in made if not torch.equal(as_bytes(made[name]), as_bytes(expected[name]))] == []


def assert_same(made: Path, plain: Path, scheme: str, sources: Sources) -> None:
    """Compare a quantized folder with what the tool of its scheme makes of the plain one with the same ignored."""
    quantization = read_config(made)["quantization_config"]
    ignored = quantization["ignore" if "ignore" in quantization else "modules_to_not_convert"]
    wanted = sources.quantize(plain, scheme, ignored)
    assert_same_tensors(made, wanted)
    assert read_config(made) == read_config(wanted)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json without the version of the tool that quantized."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["quantization_config"].pop("version", None)
    return config


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Sources:
    made = Sources(tmp_path_factory.mktemp("quantized"))
    found = (item.callspec.params for item in request.session.items if getattr(item, "callspec", None))
    ranks = made.start({(each["name"], each["scheme"]) for each in found if each.get("source") == "live"})
    for number, name in enumerate(MODELS):
        write_megatron(made.root / name / "megatron", name, made.base(name), is_dist=number % 2 == 0)
    assert ranks.wait(400) == 0, (made.root / "errors.txt").read_text(errors="replace")[-4000:]
    return made


@pytest.mark.parametrize(("name", "source", "scheme"), list_cells())
def test_ranks_leave_what_the_tool_makes(sources: Sources, name: str, source: str, scheme: str) -> None:
    assert_same(*sources.make(name, source, scheme), scheme, sources)


@pytest.mark.parametrize("name", MODELS)
def test_matrices_of_layers_are_quantized(sources: Sources, name: str) -> None:
    made, plain = map(read_tensors, sources.make(name, "dcp", "W8A8"))
    wanted = {key for key, tensor in plain.items() if tensor.ndim == 2 and re.fullmatch(LAYERS, key)}
    assert {key for key in plain if made[key].dtype == torch.int8} == wanted - {k for k in wanted if "norm" in k}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_masters_are_quantized_in_their_own_dtype(sources: Sources, scheme: str) -> None:
    keep = ("--dtype", "keep")
    made, plain = (sources.gather("llama", "zero3", *keep, *more) for more in (("--quantize", scheme), ()))
    assert {tensor.dtype for tensor in read_tensors(plain).values()} == {torch.float32}
    assert_same(made, plain, scheme, sources)


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "NVFP4A16"])
def test_bands_and_files_change_nothing(sources: Sources, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """A matrix is encoded in several bands, and those that share a scale lie in several files."""
    monkeypatch.setattr(transforms, "_BAND_NBYTES", 40_000)
    made = sources.gather("deepseek-v3", "dcp", "--quantize", scheme, "--max-shard-size", "100KB")
    assert len(list(made.glob("*.safetensors"))) > 10
    assert_same(made, sources.gather("deepseek-v3", "dcp"), scheme, sources)


@pytest.mark.parametrize(
    ("name", "scheme"), [*product([name for name in MODELS if name not in KEPT], MODELOPT_SCHEMES)]
)
def test_the_dialect_of_modelopt_is_what_it_exports(sources: Sources, name: str, scheme: str) -> None:
    made = sources.gather(name, "dcp", "--quantize", scheme, "--dialect", "modelopt")
    wanted = sources.root / name / f"modelopt-{scheme}"
    quantize_by_modelopt(MODELS[name], sources.gather(name, "dcp"), wanted, scheme)
    assert_same_tensors(made, wanted)
    got, want = (json.loads((folder / "hf_quant_config.json").read_text()) for folder in (made, wanted))
    want["quantization"]["exclude_modules"] += UNLISTED.get(name, [])
    assert got["quantization"] == want["quantization"]
    got, want = (read_config(folder)["quantization_config"] for folder in (made, wanted))
    want["ignore"] += UNLISTED.get(name, [])
    assert {**got, "producer": None} == {**want, "producer": None}
