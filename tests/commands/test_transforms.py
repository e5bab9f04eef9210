"""Transforms: what a caller's function makes of whole tensors, by any number of ranks, is what one process makes."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import xrank
from tests.commands.exported import tensors_of
from xrank.engine import transformed_files
from xrank.errors import ContradictionError, RankFailedError, UsageError, XrankError
from xrank.storage.folder_stage import FolderStage

pytestmark = pytest.mark.timeout(300)

SHAPES = {
    "embed.weight": (300, 64), "layers.0.up.weight": (1000, 64), "layers.0.down.weight": (64, 1001),
    "layers.0.norm.weight": (64,), "layers.1.up.weight": (1000, 64), "layers.1.down.weight": (64, 1001),
    "layers.1.norm.weight": (64,), "empty": (0, 4), "inv_freq": (16,), "steps": (),
}  # fmt: skip


def whole_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    state["layers.1.up.weight"] = state["layers.1.up.weight"].bfloat16()
    state["steps"] = torch.tensor(7)
    return state


def cut_state() -> dict[str, Any]:
    """The same, cut by rows over all ranks; what is small is whole on every rank, and the head is the embedding."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.ndim == 2 and tensor.numel() else tensor
        for name, tensor in whole_state().items()
    }
    state["head.weight"] = state["embed.weight"]
    return state


def quantized(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if name == "inv_freq":
        return {}
    if name == "embed.weight":
        return {name: tensor.t(), "embed.rows": tensor[::2, :3]}  # views
    if tensor.ndim < 2 or not tensor.numel():
        return {name: tensor}
    scale = tensor.abs().amax(dim=1, keepdim=True).float() / 448
    return {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale, f"{name}_rows": (scale > 0).sum(0)}


def wanted() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in whole_state().items():
        found |= quantized(name, tensor)
    return found


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        ours, theirs = (one.contiguous().flatten().view(torch.uint8) for one in (got[name], tensor))
        assert ours.equal(theirs), name


def pages_apart(are_apart: bool) -> Any:
    """In the body ranks write no page together, as those of several hosts do not."""
    made = transformed_files._RoundOutputs
    on_hosts = lambda outputs, shares_pages: made(outputs, True)  # noqa: E731
    return patch.object(transformed_files, "_RoundOutputs", on_hosts) if are_apart else nullcontext()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", ["one host", "several hosts"])
def test_four_ranks_make_what_one_process_makes(rank: int, tmp_path: Path, hosts: str) -> None:
    counted = []

    def transform(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not torch.is_grad_enabled()
        if not tensor.is_meta:
            counted.append(name)
        return quantized(name, tensor)

    several = hosts == "several hosts"
    with patch.object(transformed_files, "_CHUNK_NBYTES", 10_000 if several else 1 << 20), pages_apart(several):
        report = xrank.export_model(
            cut_state(),
            tmp_path / "out",
            transform=transform,
            max_shard_size="200KB",
            config_overrides={"quantization_config": {"bits": 8}},
        )
    # Each tensor by one rank alone, once.
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, counted)
    transformed = sorted(
        name for name, made in ((n, quantized(n, t)) for n, t in whole_state().items()) if len(made) > 1
    )
    assert sorted(name for names in every for name in names) == transformed
    assert sum(bool(names) for names in every) > 1
    assert report.output["transformed"]["layers.0.up.weight_scale"] == "layers.0.up.weight"
    assert report.output["excluded"] == ["inv_freq"]
    assert report.output["tied"] == [["embed.weight", "head.weight"]]
    if rank == 0:
        assert_equal(tensors_of(tmp_path / "out"), wanted())
        assert xrank.verify_model(tmp_path / "out").ok
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config == {"quantization_config": {"bits": 8}}
        manifest = json.loads((tmp_path / "out" / "xrank_manifest.json").read_text())
        assert manifest["transformed"] == report.output["transformed"]
        made = manifest["tensors"]["layers.0.down.weight_scale"]
        assert (made["dtype"], made["shape"], len(made["sources"])) == ("F32", [64, 1], 4)


def test_one_process_alone(tmp_path: Path) -> None:
    for name, chunk in (("alone", 1 << 20), ("in small chunks", 5000)):
        with patch.object(transformed_files, "_CHUNK_NBYTES", chunk):
            report = xrank.export_model(whole_state(), tmp_path / name, transform=quantized, dtype="bf16")
        found = tensors_of(tmp_path / name)
        cast = {"layers.0.norm.weight", "layers.1.norm.weight", "empty"}  # what is only copied
        assert_equal(found, {n: t.bfloat16() if n in cast else t for n, t in wanted().items()})
        assert set(report.output["cast"]) == cast
    assert sorted(path.name for path in (tmp_path / "alone").iterdir()) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
        "xrank_manifest.json",
    ]  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_a_gpu_is_transformed_there(tmp_path: Path) -> None:
    state = {name: tensor.cuda() for name, tensor in whole_state().items()}

    def doubled(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: (tensor if tensor.is_meta else tensor.cuda()) * 2}

    xrank.export_model(state, tmp_path / "out", transform=doubled)
    assert_equal(tensors_of(tmp_path / "out"), {name: tensor * 2 for name, tensor in whole_state().items()})
    given = {name: tensor.cpu() for name, tensor in xrank.iter_model(state, transform=doubled)}
    assert_equal(given, {name: tensor * 2 for name, tensor in whole_state().items()})


def test_all_is_transformed_or_left_out(tmp_path: Path) -> None:
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5)}
    xrank.export_model(state, tmp_path / "out", transform=lambda n, t: {n: t + 1} if n == "a" else {})
    assert_equal(tensors_of(tmp_path / "out"), {"a": state["a"] + 1})
    assert (tmp_path / "out" / "model.safetensors").exists()
    with pytest.raises(UsageError, match="no tensor is left"):
        xrank.export_model(state, tmp_path / "nothing", transform=lambda n, t: {})


def test_what_is_tied_to_a_tensor_that_is_left_out_is_left_out(tmp_path: Path) -> None:
    state = {"embed.weight": torch.ones(3, 2), "norm": torch.ones(2)}
    state["head.weight"] = state["embed.weight"]
    report = xrank.export_model(state, tmp_path / "out", transform=lambda n, t: {n: t} if n == "norm" else {})
    assert (report.output["excluded"], report.output["tied"]) == (["embed.weight", "head.weight"], [])
    assert_equal(tensors_of(tmp_path / "out"), {"norm": state["norm"]})
    assert xrank.verify_model(tmp_path / "out").ok
    with pytest.raises(UsageError, match=r"head\.weight: two tensors would have this name"):
        xrank.export_model(state, tmp_path / "again", transform=lambda n, t: {n: t, "head.weight": t + 1})


def test_a_change_in_place_is_no_copy(tmp_path: Path) -> None:
    state = {"a": torch.ones(4), "b": torch.ones(4)}

    def doubled(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor.mul_(2)} if name == "a" else {name: tensor}

    with torch.inference_mode():
        report = xrank.export_model(state, tmp_path / "out", transform=doubled)
    assert_equal(tensors_of(tmp_path / "out"), {"a": torch.full((4,), 2.0), "b": torch.ones(4)})
    assert report.output["transformed"] == {"a": "a"} and (state["a"] == 1).all()


def set_anew(x: torch.Tensor) -> None:
    x.data = x.data * 2


def turn(x: torch.Tensor) -> None:
    x.data = x.data.t()


UNCOUNTED = {
    "through data": lambda x: x.data.mul_(2),
    "through a view of it": lambda x: x.data.view(-1)[:6].mul_(2),
    "with others": lambda x: torch._foreach_mul_([torch.empty_like(x), x.data], 2.0),
    "as what is given out": lambda x: torch.mul(x, 2, out=x.data),
    "by an element": lambda x: x.data.__setitem__(0, 5.0),
    "with new data": set_anew,
    "with a new shape": turn,
}


@pytest.mark.parametrize("how", UNCOUNTED)
def test_a_change_that_torch_does_not_count_is_no_copy(tmp_path: Path, how: str) -> None:
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(4)}

    def changed(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if name == "a":
            UNCOUNTED[how](tensor)
        tensor.data.clone().mul_(3)  # another's
        return {name: tensor}

    report = xrank.export_model(state, tmp_path / "out", transform=changed)
    assert report.output["transformed"] == {"a": "a"}
    want = state["a"].clone()
    UNCOUNTED[how](want)
    assert_equal(tensors_of(tmp_path / "out"), {"a": want, "b": state["b"]})
    assert state["a"].equal(torch.arange(12.0).view(3, 4))


def without_memory(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    made = tensor + 1
    if not made.is_meta:
        made.untyped_storage().resize_(0)
    return {name: made}


def test_what_is_compiled_runs_so(tmp_path: Path) -> None:
    double = torch.compile(lambda tensor: tensor * 2, backend="eager", fullgraph=True)
    xrank.export_model({"a": torch.ones(3)}, tmp_path / "out", transform=lambda n, t: {n: double(t)})
    assert_equal(tensors_of(tmp_path / "out"), {"a": torch.full((3,), 2.0)})


class Wrapped(torch.Tensor):
    """As DTensors and torchao's: what it has as a tensor is a shape alone."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def when_real(make: Any) -> Any:
    return lambda name, tensor: {name: tensor + 1 if tensor.is_meta else make(tensor)}


def other_when_real(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor.half() if tensor.is_meta else tensor.double()}


def more_when_real(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor + 1} | ({} if tensor.is_meta else {"more": tensor})


REFUSED = {
    "looks at values": (lambda n, t: {n: t / t.max().item()}, r"its outputs for a: called with a tensor on the meta"),
    "is no dict": (lambda n, t: t, "returned Tensor"),
    "holds no tensor": (lambda n, t: {n: None}, "returned NoneType under 'a'"),
    "has no such type": (lambda n, t: {n: t.to(torch.complex128)}, "complex128, which safetensors does not support"),
    "gives a name that is none": (lambda n, t: {"a\n": t}, "which is not a name"),
    "keeps metadata": (lambda n, t: {"__metadata__": t}, "keeps for itself"),
    "gives one name twice": (lambda n, t: {"x": t + 1}, "x: two tensors would have this name"),
    "takes a name": (lambda n, t: {n: t} if n == "b" else {"b": t + 1}, "b: two tensors would have this name"),
    "gives another dtype": (other_when_real, "transform of a returns a different a than for meta tensors"),
    "gives what was freed": (without_memory, "transform of a returned a tensor whose storage was freed under 'a'"),
    "gives a shape alone": (when_real(Wrapped), "transform of a returned a Wrapped without memory under 'a'"),
    "gives no values": (lambda n, t: {n: (t + 1).to("meta")}, "returned a tensor that is a meta tensor under 'a'"),
    "gives a nested one": (when_real(lambda t: torch.nested.as_nested_tensor([t])), "that is a nested tensor under"),
    "gives a sparse one": (when_real(torch.Tensor.to_sparse), "that is of layout torch.sparse_coo under 'a'"),
    "gives more": (more_when_real, "transform of a returns a different more than for meta tensors"),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_by_name(tmp_path: Path, what: str) -> None:
    transform, match = REFUSED[what]
    state = {"a": torch.ones(3), "b": torch.ones(4)}
    with pytest.raises(UsageError, match=match) as raised:
        xrank.export_model(state, tmp_path / "out", transform=transform)
    assert raised.value.next_step and not os.listdir(tmp_path)
    with pytest.raises(UsageError, match=match):
        list(xrank.iter_model(state, transform=transform))


def test_what_it_said_and_what_it_makes_stand_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as raised:
        xrank.export_model({"a": torch.ones(3)}, tmp_path / "out", transform=other_when_real)
    assert (raised.value.got, raised.value.want) == ("a, F64 [3]", "a, F16 [3], as for a tensor on the meta device")


def iterated(transform: Any) -> None:
    list(xrank.iter_model(cut_state(), transform=transform))


@pytest.mark.ranks(4)
def test_a_transform_that_raises_on_one_rank_is_named_on_all(rank: int, tmp_path: Path) -> None:
    def failing(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not tensor.is_meta and name == "layers.1.down.weight":
            raise OSError("a scale is infinite")
        return quantized(name, tensor)

    with pytest.raises((OSError, RankFailedError), match="a scale is infinite") as raised:
        xrank.export_model(cut_state(), tmp_path / "out", transform=failing)
    if isinstance(raised.value, OSError):  # its own, and nothing of the disk's
        assert raised.value.__notes__ == ["in transform of layers.1.down.weight"]
    dist.barrier()
    assert not (tmp_path / "out").exists()
    # Of which what the last two make has the same names and kinds.
    for function, other in ((quantized, lambda n, t: {n: t.half()}), (lambda n, t: {n: 2 * t}, lambda n, t: {n: t})):
        with pytest.raises(ContradictionError, match="returns other outputs on rank 1 than on rank 0") as another:
            iterated(other if rank == 1 else function)
        assert another.value.rank == 1 and another.value.tensor == "embed.weight"
    xrank.export_model(cut_state(), tmp_path / "out", transform=quantized)
    if rank == 0:
        assert_equal(tensors_of(tmp_path / "out"), wanted())


def export_and_die(folder: str) -> None:
    def transform(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if not tensor.is_meta and name == "layers.1.up.weight":
            Path(folder, "victim").write_text(str(dist.get_rank()))
            os.kill(os.getpid(), signal.SIGKILL)
        return quantized(name, tensor)

    try:
        xrank.export_model(cut_state(), Path(folder, "out"), transform=transform)
    except RankFailedError as error:
        Path(folder, f"rank {dist.get_rank()}").write_text(str(error.rank))


def export_again(folder: str) -> None:
    xrank.export_model(cut_state(), Path(folder, "out"), transform=quantized)


def test_a_rank_that_is_killed_while_it_transforms_is_named_on_all(rank_pool: Any, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="died"):
        rank_pool.run(4, export_and_die, str(tmp_path), timeout_seconds=150)
    victim = (tmp_path / "victim").read_text()
    told = {path.name: path.read_text() for path in tmp_path.glob("rank *")}
    assert told == {f"rank {rank}": victim for rank in range(4) if str(rank) != victim}
    assert not (tmp_path / "out").exists()
    rank_pool.run(4, export_again, str(tmp_path), timeout_seconds=150)
    assert_equal(tensors_of(tmp_path / "out"), wanted())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("alone", [True, False])
def test_what_was_finished_is_kept_if_it_would_be_made_so_again(rank: int, tmp_path: Path, alone: bool) -> None:
    if alone and rank:
        return
    group = dist.new_group([0], use_local_synchronization=True) if alone else None
    state = whole_state() if alone else cut_state()
    asked: dict[str, Any] = {"max_shard_size": "200KB", "group": group}
    with patch.object(FolderStage, "commit", side_effect=OSError("the power is gone")) as cut_off:
        with pytest.raises(XrankError, match="the power is gone"):
            xrank.export_model(state, tmp_path / "out", transform=quantized, **asked)
        assert cut_off.called == (rank == 0)

    def other(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        made = quantized(name, tensor)
        return made if name != "layers.1.down.weight" else {key: value.clone().fill_(1) for key, value in made.items()}

    report = xrank.export_model(state, tmp_path / "out", transform=other, **asked)
    files = {file["name"]: file["nbytes"] for file in report.output["files"] if not file["name"].endswith("json")}
    manifest = json.loads((tmp_path / "out" / "xrank_manifest.json").read_text())
    changed = manifest["tensors"]["layers.1.down.weight"]["file"]
    assert report.output["resumed_nbytes"] == sum(nbytes for name, nbytes in files.items() if name != changed)
    if rank == 0:
        want = wanted() | other("layers.1.down.weight", whole_state()["layers.1.down.weight"])
        assert_equal(tensors_of(tmp_path / "out"), want)


@pytest.mark.ranks(3)
def test_an_iterator_gives_the_same(rank: int) -> None:
    given = list(xrank.iter_model(cut_state(), transform=quantized, max_memory="2MB"))
    if rank == 0:
        assert_equal(dict(given), wanted())
        assert [name for name, _ in given][:4] == [
            "embed.weight", "embed.rows", "layers.0.up.weight", "layers.0.up.weight_scale"
        ]  # fmt: skip
    assert bool(given) == (rank == 0)
    everywhere = dict(xrank.iter_model(cut_state(), transform=quantized, ranks="all"))
    assert_equal(everywhere, wanted())
