"""Every reader reads from a bucket what it reads from a folder: the samples of the readers' own tests."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.storage.servers import Bucket
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.readers.discovery import OWN_READERS
from xrank.testing.reader_contract import ReaderContract, SampleSource, read_model, whole

_SAMPLES = {
    "workspace": "test_reader_contract.TestWorkspace",
    "safetensors": "test_reader_contract.TestSafetensors",
    "vllm": "test_vllm.TestVllm",
    "bin": "test_weight_folders.TestBin",
    "megatron-dist": "test_megatron_dist.TestContract",
    "megatron-legacy": "test_megatron_legacy.TestContract",
    "deepspeed": "test_deepspeed_contract.TestZero3",
    "deepspeed universal": "test_deepspeed_contract.TestUniversal",
    "verl": "test_fsdp_ranks.TestVerl",
    "accelerate-ranks": "test_fsdp_ranks.TestAccelerate",
    "torch-checkpointing": "test_torch_checkpointing.TestPt",
    "torch-checkpointing safetensors": "test_torch_checkpointing.TestSafetensors",
    "orbax": "test_orbax.TestOcdbt",
    "orbax folders": "test_orbax.TestFolders",
    "torch-save": "test_torch_save.TestTorchSave",
}


_MODEL = {"up.weight": torch.arange(24.0).reshape(6, 4), "up.bias": torch.ones(6, dtype=torch.bfloat16)}


def _save(writer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process is meant
        dcp.save(dict(_MODEL), storage_writer=writer, no_dist=True)


class _Dcp(ReaderContract):
    def make(self, folder: Path) -> SampleSource:
        _save(dcp.FileSystemWriter(folder / "checkpoint", single_file_per_rank=False))
        return SampleSource(folder / "checkpoint", {name: whole(tensor) for name, tensor in _MODEL.items()})


class _HfShards(ReaderContract):
    def make(self, folder: Path) -> SampleSource:
        numbers = dict.fromkeys(_MODEL, 1)
        _save(dcp.HuggingFaceStorageWriter(str(folder / "sharded"), numbers, save_distributed=True))
        base = folder.parent / f"{folder.name}-base"
        base.mkdir()
        save_file(_MODEL, base / "model.safetensors")
        return SampleSource(folder / "sharded", {name: whole(one) for name, one in _MODEL.items()}, base)


_OWN_SAMPLES = {"dcp": _Dcp, "hf-shards": _HfShards}


def test_every_reader_has_a_sample():
    names = {name.partition(" ")[0] for name in (*_SAMPLES, *_OWN_SAMPLES)}
    assert {own.name for own in OWN_READERS} == names


def _reads_from_a_bucket(self: Any, made: SampleSource, small_bucket: Bucket, tmp_path: Path) -> None:
    url = f"{small_bucket.put_folder(made.path.parent, 'runs')}/{made.path.name}"
    if made.path.is_file():
        small_bucket.put(f"runs/{made.path.name}", made.path.read_bytes())
    gather_checkpoint(url, tmp_path / "out", base_model=made.base_model, recipe=self.recipe)
    assert read_model(tmp_path / "out") == dict(made.expected)
    there, here = (inspect_source(path, base_model=made.base_model) for path in (url, made.path))
    assert there.details["problems"] == []
    assert (there.source.format, there.source.num_tensors, there.source.nbytes) == (
        here.source.format,
        here.source.num_tensors,
        here.source.nbytes,
    )
    assert there.details["companions"] == here.details["companions"]


def _load(path: str) -> type[ReaderContract]:
    module, _, name = path.partition(".")
    contract: type[ReaderContract] = getattr(import_module(f"tests.readers.{module}"), name)
    return contract


for _name, _base in [*((name, _load(path)) for name, path in _SAMPLES.items()), *_OWN_SAMPLES.items()]:
    # A subclass has the sample; of the contract's tests it runs none.
    _none = {name: None for name in dir(ReaderContract) if name.startswith("test_")}
    _class = type(f"Test {_name}".title().replace(" ", "").replace("-", ""), (_base,), _none)
    _class.test_reads_from_a_bucket = _reads_from_a_bucket
    _class.pytestmark = []
    globals()[_class.__name__] = _class
