"""Checkpoints as mappings: what a look-up gives, what opening proves, what is never read or removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cli.bench import Bench
from tests.commands.made_workspaces import LAYOUTS, leave, made_model, raw, state_of
from xrank import NFSWorkspace, open_checkpoint
from xrank.engine import buffers
from xrank.errors import CorruptError, IncompleteError
from xrank.layout import DeviceMesh, LayoutMap

pytestmark = pytest.mark.quick


def test_whole_tensors_by_name(bench: Bench) -> None:
    model = leave(bench.workspace)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in bench.workspace.iterdir())
    checkpoint = open_checkpoint(bench.workspace)
    assert checkpoint.keys() == model.keys() and len(checkpoint) == 5 and "no such" not in checkpoint
    for name, tensor in model.items():
        found = checkpoint[name]
        assert (found.dtype, found.shape, found.device.type) == (tensor.dtype, tensor.shape, "cpu")
        assert raw(found) == raw(tensor)
        assert checkpoint.tensors[name].shape == tuple(tensor.shape)
    found = checkpoint["norm.weight"]
    found.zero_()  # the caller's own
    assert raw(checkpoint["norm.weight"]) == raw(model["norm.weight"])
    with pytest.raises(KeyError):
        checkpoint["no such"]
    assert (checkpoint.format, checkpoint.world_size, checkpoint.path) == ("workspace", 4, str(bench.workspace))
    assert {name: str(layout) for name, layout in checkpoint.layouts.items()}.keys() == LAYOUTS.keys()
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in bench.workspace.iterdir())


def test_opening_reads_no_tensor_and_a_look_up_only_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = leave(bench.workspace)
    read: list[int] = []
    plain = buffers.FileSource.read_into

    def counting(self: buffers.FileSource, record: int, start: int, into: memoryview) -> None:
        read.append(len(into))
        plain(self, record, start, into)

    monkeypatch.setattr(buffers.FileSource, "read_into", counting)
    checkpoint = open_checkpoint(bench.workspace)
    assert checkpoint.tensors["up.weight"].num_pieces > 1 and read == []
    checkpoint["norm.weight"]
    assert sum(read) == 4 * model["norm.weight"].nbytes  # it, and its three replicas


def test_a_record_of_many_tensors_is_read_whole_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = LayoutMap(DeviceMesh((1,), ("dp",)))
    layouts["flat"] = "flat(a [1000], b [1000], c [1000])/dp"
    whole = torch.arange(3000.0)
    NFSWorkspace(tmp_path, rank=0, world_size=1, run_id="run").write_configs_and_weights(
        {}, {"flat": whole}, layouts=layouts
    )
    read: list[int] = []
    plain = buffers.FileSource.read_into

    def counting(self: buffers.FileSource, record: int, start: int, into: memoryview) -> None:
        read.append(len(into))
        plain(self, record, start, into)

    monkeypatch.setattr(buffers.FileSource, "read_into", counting)
    checkpoint = open_checkpoint(tmp_path)
    for i, name in enumerate("abc"):
        assert torch.equal(checkpoint[name], whole[1000 * i : 1000 * (i + 1)])
    assert sum(read) == whole.nbytes + 2 * 4000


def test_casts(bench: Bench) -> None:
    model = leave(bench.workspace)
    checkpoint = open_checkpoint(bench.workspace, dtype="bf16")
    for name, tensor in model.items():
        expected = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert raw(checkpoint[name]) == raw(expected)


def test_damage_is_met_by_the_look_up_that_reads_it(bench: Bench) -> None:
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 2)
    data = bytearray(path.read_bytes())
    at = data.find(raw(model["embed.weight"].chunk(2)[0])[:64])
    data[at] ^= 1
    path.write_bytes(data)
    checkpoint = open_checkpoint(bench.workspace)
    for _ in range(2):  # what was found once is found again
        with pytest.raises(CorruptError, match=r"embed\.weight"):
            checkpoint["embed.weight"]
    assert raw(checkpoint["steps"]) == raw(model["steps"])


def test_what_is_not_whole_is_not_opened(bench: Bench) -> None:
    leave(bench.workspace)
    state_of(bench.workspace, 1).unlink()
    with pytest.raises(IncompleteError, match="rank 1 of 4 wrote nothing"):
        open_checkpoint(bench.workspace)


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    tensors = {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "flags": torch.tensor([True, False])}
    NFSWorkspace(tmp_path, rank=0, world_size=1, run_id="run").write_configs_and_weights({}, tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in tensors.items())
    assert checkpoint["none"].shape == (0, 4) and made_model().keys().isdisjoint(checkpoint)
