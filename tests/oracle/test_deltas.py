"""SGLang's receiver and slime's writer as they are, from slime's repository, beside xrank's.

SLIME_REPO names a clone of github.com/THUDM/slime: SLIME_REPO=~/slime pytest tests/oracle/test_deltas.py
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import xrank
from tests.readers.made_deltas import Model, change_model, make_model, read_folder, write_delta, write_whole
from xrank import dtypes
from xrank.errors import CorruptError
from xrank.formats.deltas import CHECKSUMS, ENCODINGS, version_name

REPO = os.environ.get("SLIME_REPO", "")
pytestmark = pytest.mark.skipif(not REPO, reason="SLIME_REPO names no clone of slime")

_UPDATE = "slime/backends/megatron_utils/update_weight"


def read_file(path: str) -> str:
    return subprocess.run(
        ["git", "-C", REPO, "show", f"HEAD:{path}"], check=True, capture_output=True, text=True
    ).stdout


def load(name: str, source: str) -> ModuleType:
    module = ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def load_receiver() -> ModuleType:
    """Return SGLang's receiver, a file that slime's patch adds."""
    patch = read_file("docker/patch/latest/sglang-pull_weights.patch")
    added = patch.partition("+++ b/python/sglang/srt/weight_sync/local_checkpoint.py\n")[2].partition("\ndiff --git")[0]
    lines = [line[1:] for line in added.splitlines() if line.startswith("+")]
    return load("local_checkpoint", "\n".join(lines))


def load_writer() -> type[Any]:
    """Return slime's writer, whose imports of Ray and Megatron it does not use here."""
    disk_delta = load("slime.utils.disk_delta", read_file("slime/utils/disk_delta.py"))
    known = {
        "slime.utils.disk_delta": disk_delta,
        "slime.utils.distributed_utils": SimpleNamespace(get_gloo_group=lambda: dist.group.WORLD),
        "slime.backends.update_weight.update_weight_from_distributed": SimpleNamespace(
            UpdateWeightFromDistributed=object
        ),
    }
    names = ("ray", "ray.actor", "megatron", "megatron.core", "slime", "slime.utils", "slime.backends")
    stubs = {name: mock.MagicMock() for name in (*names, "slime.backends.update_weight")} | known
    with mock.patch.dict(sys.modules, stubs):  # type: ignore[arg-type]
        source = read_file(f"{_UPDATE}/update_weight_from_disk_delta.py")
        module = ModuleType("slime.backends.update_weight.update_weight_from_disk_delta")
        module.__package__ = "slime.backends.update_weight"
        exec(compile(source, "slime", "exec"), module.__dict__)
    return module.UpdateWeightFromDiskDelta  # type: ignore[no-any-return]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensors_of(model: Model) -> dict[str, torch.Tensor]:
    """Return a model's tensors, in the type that each has."""
    found = {}
    for name, (kind, shape, data) in model.items():
        element = getattr(torch, dtypes.dtype(kind).torch_name)
        found[name] = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(element).view(shape)
    return found


def write_as_slime(deltas: Path, models: Sequence[Model], encoding: str, checksum: str) -> None:
    """Let slime's writer write all versions."""
    writer = load_writer()
    self = writer.__new__(writer)
    self.delta_dir, self.delta_encoding, self.checksum_algorithm = str(deltas), encoding, checksum
    self._is_pp_src_rank = True
    self._snapshot = {name: np.frombuffer(data, np.uint8) for name, (_, _, data) in models[0].items()}
    for version, model in enumerate(models[1:], 1):
        self.weight_version = version
        self._iter_hf_tensors = lambda model=model: iter(tensors_of(model).items())
        self._publish()


def make_models(seed: int, num_versions: int = 3) -> list[Model]:
    generator = np.random.default_rng(seed)
    models = [{name: one for name, one in make_model(generator).items() if one[2]}]
    for _ in range(num_versions):
        models.append(change_model(models[-1], generator))
    return models


@pytest.mark.parametrize("checksum", CHECKSUMS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_slimes_chains_are_read(tmp_path: Path, group: None, encoding: str, checksum: str) -> None:
    """By every version, to the bit."""
    models = make_models(len(checksum))
    write_whole(tmp_path / "base", models[0])
    write_as_slime(tmp_path / "deltas", models, encoding, checksum)
    for version in (1, 3):
        xrank.apply_deltas(tmp_path / "base", tmp_path / "deltas", tmp_path / "engine", version=version)
        assert read_folder(tmp_path / "engine") == models[version]
    xrank.verify_deltas(tmp_path / "base", tmp_path / "deltas")
    xrank.gather_checkpoint(tmp_path / "deltas", tmp_path / "out", base_model=tmp_path / "base")
    assert read_folder(tmp_path / "out") == models[3]


@pytest.mark.parametrize("checksum", CHECKSUMS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_sglang_applies_xranks_chains(tmp_path: Path, encoding: str, checksum: str) -> None:
    """With a version that is whole, and one that xrank has folded of none."""
    models = make_models(len(checksum) + 1)
    receiver = load_receiver()
    for number, model in enumerate(models):
        write_whole(tmp_path / f"step-{number}", model)
    for number in (1, 2, 3):
        xrank.make_delta(
            tmp_path / "deltas" / version_name(number - 1) if number > 1 else tmp_path / "step-0",
            tmp_path / f"step-{number}",
            tmp_path / "deltas" / version_name(number),
            base_model=tmp_path / "step-0",
            encoding=encoding,
            checksum=checksum,
            max_shard_size="2KB",
        )
    for version in (1, 3):
        receiver.pull(str(tmp_path / "local"), str(tmp_path / "step-0"), str(tmp_path / "deltas"), version)
        assert read_folder(tmp_path / "local") == models[version]
    write_whole(tmp_path / "deltas" / version_name(4), models[1], 4)
    receiver.pull(str(tmp_path / "local"), str(tmp_path / "step-0"), str(tmp_path / "deltas"), 4)
    assert read_folder(tmp_path / "local") == models[1]


def _pull_and_die(local: str, base: str, deltas: str, wrong_at: int) -> None:
    """Pull in a process that is killed when so many tensors have changed."""
    receiver, count = load_receiver(), 0
    receiver.NUM_WORKERS = 1
    new_hasher = receiver._new_hasher

    def hasher(algorithm: str) -> Any:
        nonlocal count
        count += 1
        if count > wrong_at:
            os._exit(9)
        return new_hasher(algorithm)

    receiver._new_hasher = hasher
    receiver.pull(local, base, deltas, 1)


def test_a_killed_receiver(tmp_path: Path) -> None:
    """SGLang's never heals, as it xors in place; xrank's output is the old one or the new one, and goes on."""
    models = make_models(9, 1)
    write_whole(tmp_path / "base", models[0])
    write_delta(tmp_path / "deltas", *models, 1)
    places = [str(tmp_path / name) for name in ("local", "base", "deltas")]
    receiver = load_receiver()
    receiver.pull(*places, 0)
    child = multiprocessing.get_context("fork").Process(target=_pull_and_die, args=(*places, 2))
    child.start()
    child.join()
    assert child.exitcode == 9
    for _ in range(2):
        with pytest.raises(RuntimeError, match="checksum mismatch"):
            receiver.pull(*places, 1)
    # xrank finds the mixture, and makes the model anew from the base.
    with pytest.raises(CorruptError):
        xrank.apply_deltas(tmp_path / "local", tmp_path / "deltas", tmp_path / "engine")
    assert not (tmp_path / "engine").exists()
    xrank.apply_deltas(tmp_path / "base", tmp_path / "deltas", tmp_path / "engine")
    assert read_folder(tmp_path / "engine") == models[1]
    shutil.rmtree(tmp_path / "local")
    assert isinstance(receiver, types.ModuleType)
