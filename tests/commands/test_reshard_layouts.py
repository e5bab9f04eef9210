"""Reshards: any layout to any other and back, judged by what torch cut and by what a gather reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xrank
from tests.cli.bench import Bench
from tests.commands.made_workspaces import (
    CONFIG,
    LAYOUTS,
    MESH,
    RUN,
    STEP,
    assert_holds,
    cut,
    flip,
    leave,
    leave_plain,
    made_model,
    raw,
    record,
    rewrite,
    state_of,
)
from tests.sampled import count_of
from xrank.commands.gather import gather_checkpoint
from xrank.commands.reshard import reshard_checkpoint
from xrank.engine import executor, windows
from xrank.errors import ContradictionError, CorruptError, IncompleteError, LayoutError, OutputExistsError, UsageError
from xrank.formats.rank_state import RankRecord, TensorRecord
from xrank.formats.torch_archive import read_archive
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.local_part import LocalPart
from xrank.layout.nests import Nest
from xrank.readers.workspace import read_rank_state
from xrank.recipes import reshard_plan

ELSEWHERE = {
    "embed.weight": "[v, h/~x]",
    "up.weight": "[f/~x, h/y]",
    "down.weight": "[h/~x, f]",
    "norm.weight": "[h/y]",
    "steps": "[n/~x]",
}
MESH_ELSEWHERE = DeviceMesh((3, 2), ("x", "y"))


def told(layouts: Mapping[str, str] = ELSEWHERE, mesh: DeviceMesh = MESH_ELSEWHERE) -> LayoutMap:
    layout_map = LayoutMap(mesh)
    for name, text in layouts.items():
        layout_map[name] = text
    return layout_map


def state(folder: Path, rank: int) -> dict[str, Any]:
    """Return a state as torch itself reads it."""
    loaded: dict[str, Any] = torch.load(state_of(folder, rank), weights_only=True)
    return loaded


def assert_same_states(a: Path, b: Path, world_size: int) -> None:
    """Compare two workspaces rank by rank: names in order, dtypes, shapes, every byte, configs, records."""
    for rank in range(world_size):
        ours, theirs = state(a, rank), state(b, rank)
        assert ours["config"] == theirs["config"]
        assert list(ours["weight"]) == list(theirs["weight"])
        for name, tensor in ours["weight"].items():
            other = theirs["weight"][name]
            assert (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride()), name
            assert raw(tensor) == raw(other), (rank, name)
        mine, its = (RankRecord.from_json(s["xrank"], file="made") for s in (ours, theirs))
        assert (mine.run_id, mine.step, mine.rank, mine.world_size) == (its.run_id, its.step, its.rank, its.world_size)
        assert mine.meshes == its.meshes
        assert {n: t.layout for n, t in mine.tensors.items()} == {n: t.layout for n, t in its.tensors.items()}


def assert_cut(folder: Path, model: Mapping[str, torch.Tensor], layouts: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Compare every rank's state with what torch cuts out of the whole tensors."""
    assert sorted(path.name for path in folder.glob("*.pth")) == sorted(state_of(folder, r).name for r in mesh.ranks)
    for rank in mesh.ranks:
        weights = state(folder, rank)["weight"]
        assert sorted(weights) == sorted(model)
        for name, tensor in model.items():
            part = cut(tensor, layouts[name], mesh, rank)
            assert (weights[name].dtype, weights[name].shape) == (part.dtype, part.shape), (rank, name)
            assert raw(weights[name]) == raw(part), (rank, name)


# ---- there and back


DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint16, torch.uint64, torch.complex64),
)


@st.composite
def meshes(draw: st.DrawFn, names: str) -> DeviceMesh:
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda n: torch.Size(n).numel() <= 8))
    ranks = draw(st.permutations(range(torch.Size(lengths).numel())))
    return DeviceMesh(lengths, names[: len(lengths)], ranks)


@st.composite
def texts(draw: st.DrawFn, shape: tuple[int, ...], mesh: DeviceMesh) -> str:
    """Return some layout of a shape: each axis cuts one dim, or none."""
    dims: list[list[str]] = [[] for _ in shape]
    sizes = [{n} for n in shape]
    for axis in draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim < 0:
            continue
        length = mesh.axis_length(axis)
        even = all(size % length == 0 for size in sizes[dim]) and draw(st.booleans())
        dims[dim].append(("/" if even else "/~") + axis)
        steps = {size: -(-size // length) for size in sizes[dim]}
        sizes[dim] = {min(max(n - i * steps[n], 0), steps[n]) for n in sizes[dim] for i in range(length)}
    return "[" + ", ".join(f"n{i}" + "".join(cuts) for i, cuts in enumerate(dims)) + "]"


def some_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=torch.Generator().manual_seed(seed))
    if not count:
        return torch.empty(shape, dtype=dtype)
    return data.to(torch.uint8).view(dtype).view(shape)


@settings(max_examples=count_of(60), deadline=None)
@given(data=st.data())
def test_there_and_back_is_the_identity(data: st.DataObject) -> None:
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    model = {
        f"t{i}": some_tensor(data.draw(st.sampled_from(DTYPES)), data.draw(shapes), i)
        for i in range(data.draw(st.integers(1, 4)))
    }
    first, second = data.draw(meshes("abc")), data.draw(meshes("uvw"))
    here, there = (
        {name: data.draw(texts(tuple(tensor.shape), mesh)) for name, tensor in model.items()}
        for mesh in (first, second)
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        folder = Path(name)
        leave(folder / "a", model, layouts=here, mesh=first)
        reshard_checkpoint(folder / "a", told(there, second), folder / "b", workers=1)
        assert_cut(folder / "b", model, there, second)
        reshard_checkpoint(folder / "b", told(here, first), folder / "c", workers=1)
        assert_same_states(folder / "a", folder / "c", first.size)


def test_small_windows_and_buffers_change_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = leave(bench.workspace)
    for module in (windows, executor):
        monkeypatch.setattr(module, "WINDOW_NBYTES", 4096)
    for workers in (1, 3):
        report = reshard_checkpoint(bench.workspace, told(), bench.out, workers=workers, overwrite=True)
        assert report.ok
        assert_cut(bench.out, model, ELSEWHERE, MESH_ELSEWHERE)


def test_a_gather_of_it_is_a_gather_of_its_source(bench: Bench) -> None:
    model = leave(bench.workspace)
    gather_checkpoint(bench.workspace, bench.folder / "before")
    report = reshard_checkpoint(bench.workspace, told(), bench.out)
    assert (report.num_tensors, report.num_parameters) == (5, sum(tensor.numel() for tensor in model.values()))
    assert report.proof == {"coverage": "proven", "num_checksums": 20, "num_replicas_compared": 10}
    gather_checkpoint(bench.out, bench.folder / "after")
    before, after = ((bench.folder / name) for name in ("before", "after"))
    for path in before.iterdir():
        if path.name != "xrank_manifest.json":
            assert path.read_bytes() == (after / path.name).read_bytes()
    assert_holds(after, model)


def test_a_model_folder_into_shards_and_back(bench: Bench) -> None:
    model = leave(bench.workspace)
    gather_checkpoint(bench.workspace, bench.folder / "hf", max_shard_size="600")
    (bench.folder / "hf" / "tokenizer.json").write_text('{"a": 1}')
    report = reshard_checkpoint(bench.folder / "hf", told(LAYOUTS, MESH), bench.out)
    assert_cut(bench.out, model, LAYOUTS, MESH)
    assert state(bench.out, 3)["config"] == CONFIG
    # A model has no run: the states get one, or no workspace could tell them from an earlier run's.
    assert report.output is not None
    run_id = report.output["run_id"]
    assert ("new-run-id", f"the source records no run id; the states say run {run_id}") in report.notes
    gather_checkpoint(bench.out, bench.folder / "again", max_shard_size="600")
    assert_holds(bench.folder / "again", model)
    for name in ("tokenizer.json", "config.json"):
        assert (bench.folder / "again" / name).read_bytes() == (bench.folder / "hf" / name).read_bytes()
    again = reshard_checkpoint(bench.folder / "hf", told(LAYOUTS, MESH), bench.folder / "third", dry_run=True)
    assert again.plan is not None
    assert again.plan["run_id"] == run_id


def test_the_states_are_those_that_a_workspace_writes_and_reads(bench: Bench) -> None:
    leave(bench.workspace)
    reshard_checkpoint(bench.workspace, told(), bench.out)
    leave(bench.folder / "written", layouts=ELSEWHERE, mesh=MESH_ELSEWHERE)
    assert_same_states(bench.folder / "written", bench.out, 6)
    for rank in range(6):
        ours, theirs = read_rank_state(str(bench.out), rank), read_rank_state(str(bench.folder / "written"), rank)
        assert ours.archive.has_checksums
        assert ours.weights == theirs.weights
        assert [(r.key, r.nbytes, r.crc32, r.offset % 4096) for r in ours.archive.records.values()] == [
            (r.key, r.nbytes, r.crc32, 0) for r in theirs.archive.records.values()
        ]
    workspace = xrank.NFSWorkspace(bench.out, rank=2, world_size=6, run_id=RUN)
    for rank in range(6):
        config, weights = workspace.read_configs_and_weights_from_rank(rank)
        assert config == CONFIG
        assert weights is not None
        assert {n: raw(t) for n, t in weights.items()} == {
            n: raw(t) for n, t in state(bench.out, rank)["weight"].items()
        }
    assert workspace.read_configs_and_weights_from_rank(0)[0] == CONFIG
    assert xrank.verify_model(bench.out).ok
    assert xrank.verify_model(bench.out, against=bench.workspace).ok


def test_ranks_that_no_mesh_names_have_empty_states(bench: Bench) -> None:
    model = leave(bench.workspace)
    mesh = DeviceMesh((2,), ("r",), [3, 1])
    reshard_checkpoint(
        bench.workspace,
        told(
            dict.fromkeys(model, "[n/~r]") | dict.fromkeys(("embed.weight", "up.weight", "down.weight"), "[n, m/~r]"),
            mesh,
        ),
        bench.out,
    )
    assert [len(state(bench.out, rank)["weight"]) for rank in range(4)] == [0, 5, 0, 5]
    gather_checkpoint(bench.out, bench.folder / "again")
    assert_holds(bench.folder / "again", model)


def test_parts_with_padding_are_filled_with_zeros(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gets two rows more than it holds, one before and one after; whatever a window held before."""
    model = leave(bench.workspace)
    for module in (windows, executor):
        monkeypatch.setattr(module, "WINDOW_NBYTES", 4096)

    def padded(layout: Any, mesh: Any, coordinate: Any, shape: Any, sizes: Any) -> LocalPart | None:
        if mesh.rank_at(coordinate) == 2:
            return None  # a rank without the tensor
        rows = shape[0] // 2
        width = torch.Size(shape[1:]).numel()
        nest = Nest(width, coordinate["r"] * rows * width, ((rows * width, 1, 1),))
        return LocalPart((rows + 2, *shape[1:]), (nest,))

    monkeypatch.setattr(reshard_plan, "local_part", padded)
    reshard_plan._prove.cache_clear()
    mesh = DeviceMesh((3,), ("r",))
    names = ("embed.weight", "up.weight", "down.weight", "norm.weight")
    kept = {name: model[name] for name in names}
    shutil.rmtree(bench.workspace)
    leave(bench.workspace, kept)
    texts = {name: "[n/~r, m]" if tensor.ndim == 2 else "[n/~r]" for name, tensor in kept.items()}
    reshard_checkpoint(bench.workspace, told(texts, mesh), bench.out)
    reshard_plan._prove.cache_clear()
    for rank in range(2):
        for name, tensor in kept.items():
            half = tensor.chunk(2)[rank]
            zero = torch.zeros_like(half[:1])
            assert raw(state(bench.out, rank)["weight"][name]) == raw(torch.cat((zero, half, zero)))
    assert state(bench.out, 2)["weight"] == {}


def test_pads_parts_products_and_places(bench: Bench) -> None:
    model = leave(bench.workspace)
    layouts = {
        "embed.weight": "[pad(v, 5*x)/x, h]",
        "up.weight": "[<a: 5/~y | b: 7>, h/=x]",
        "down.weight": "[h/y, (f 2)/x]",
        "norm.weight": "[n/=x]",
        "steps": "[n] where x=1",
    }
    reshard_checkpoint(bench.workspace, told(layouts), bench.out)
    embed = model["embed.weight"]
    for rank in range(6):
        weights = state(bench.out, rank)["weight"]
        rows = embed[10 * (rank // 2) :][:10]
        assert raw(weights["embed.weight"]) == raw(torch.cat((rows, torch.zeros(10 - len(rows), 8))))
        assert ("steps" in weights) == (rank // 2 == 1)
    gather_checkpoint(bench.out, bench.folder / "again")
    assert_holds(bench.folder / "again", model)
    reshard_checkpoint(bench.out, told(LAYOUTS, MESH), bench.folder / "back")
    assert_same_states(bench.workspace, bench.folder / "back", 4)


def test_a_layout_in_a_view_is_recorded_on_it(bench: Bench) -> None:
    model = leave(bench.workspace)
    mesh, view = DeviceMesh((6,), ("r",)), DeviceMesh((3, 2), ("x", "y"))
    layouts = LayoutMap(mesh)
    for name, text in ELSEWHERE.items():
        layouts[name] = TensorLayout.parse(text + " in two", mesh, {"two": view})
    reshard_checkpoint(bench.workspace, layouts, bench.out)
    assert_cut(bench.out, model, ELSEWHERE, MESH_ELSEWHERE)
    gather_checkpoint(bench.out, bench.folder / "again")
    assert_holds(bench.folder / "again", model)
    shutil.rmtree(bench.out)
    # Axes of the mesh and of the view in one layout: rank 0 alone has the tensor, and by x a third of it.
    mixed = LayoutMap(mesh)
    mixed["norm.weight|steps"] = TensorLayout.parse("[n/~x] where r=0 in two", mesh, {"two": view})
    mixed["embed.*|up.*|down.*"] = TensorLayout.parse("[n, m]", mesh)
    assert "given to no rank by the new layout" in refused(bench, LayoutError, mixed).message
    sums = told({**ELSEWHERE, "steps": "[n] sum(x)"})
    assert "partial sums" in refused(bench, LayoutError, sums).message


def test_neither_torch_nor_more_memory_than_said(bench: Bench) -> None:
    """Four times the budget in one tensor, from rows to columns, in a process of its own that cannot import torch."""
    whole = torch.arange(2**25, dtype=torch.int32).view(2**14, 2**11)
    leave(bench.workspace, {"w": whole}, layouts={"w": "[n/~tp/~dp, m]"})
    (bench.folder / "new.toml").write_text('[mesh]\ngrid = "r=2"\n[tensors]\n"w" = "[n, m/r]"\n')
    code = """
import sys
sys.modules["torch"] = None
import xrank
report = xrank.reshard_checkpoint("run42", "new.toml", "model", max_memory="32MB")
assert report.proof["num_checksums"] == 4
print(report.peak_rss_nbytes)
"""
    environ = os.environ | {"PYTHONPATH": str(Path(xrank.__file__).parent.parent)}
    command = [sys.executable, "-P", "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=bench.folder, env=environ, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 68e6  # the budget, and what a process is anyway
    assert torch.equal(state(bench.out, 1)["weight"]["w"], whole[:, 2**10 :])


# ---- what becomes of tensors


def test_casts_are_those_of_a_gather(bench: Bench) -> None:
    leave(bench.workspace)
    reshard_checkpoint(bench.workspace, told(), bench.out, dtype="bf16")
    gather_checkpoint(bench.workspace, bench.folder / "before", dtype="bf16")
    gather_checkpoint(bench.out, bench.folder / "after")
    for name in ("model.safetensors", "config.json"):
        assert (bench.folder / "after" / name).read_bytes() == (bench.folder / "before" / name).read_bytes()
    assert state(bench.out, 0)["config"] == {**CONFIG, "dtype": "bfloat16"}
    with pytest.raises(UsageError, match="base model"):
        reshard_checkpoint(bench.workspace, told(), bench.folder / "no", dtype="base")
    with pytest.raises(UsageError, match="must be one of"):
        reshard_checkpoint(bench.workspace, told(), bench.folder / "no", dtype="int3")


def tied_model() -> dict[str, torch.Tensor]:
    model = made_model()
    return {**model, "lm_head.weight": model["embed.weight"]}


def test_names_that_share_their_bytes_still_do(bench: Bench) -> None:
    model = made_model()
    for rank in MESH.ranks:
        parts = {name: cut(tensor, LAYOUTS[name], MESH, rank) for name, tensor in model.items()}
        parts["lm_head.weight"] = parts["embed.weight"]
        workspace = xrank.NFSWorkspace(bench.workspace, rank=rank, world_size=4, run_id=RUN)
        layouts = told({**LAYOUTS, "lm_head.weight": LAYOUTS["embed.weight"]}, MESH)
        workspace.write_configs_and_weights(CONFIG, parts, layouts=layouts, step=STEP)
    report = reshard_checkpoint(bench.workspace, told(), bench.out)
    assert report.output is not None
    assert report.output["tied"] == [["embed.weight", "lm_head.weight"]]
    for rank in range(6):
        weights = state(bench.out, rank)["weight"]
        assert list(weights) == [*model, "lm_head.weight"]
        assert weights["lm_head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    gather_checkpoint(bench.out, bench.folder / "again")
    assert_holds(bench.folder / "again", {**model, "lm_head.weight": model["embed.weight"]})
    # As a pipeline has them: the head on other ranks than the embedding it is tied to.
    apart = {**ELSEWHERE, "embed.weight": "[v, h/~y] where x=0", "lm_head.weight": "[v/~y, h] where x=last"}
    report = reshard_checkpoint(bench.workspace, told(apart), bench.folder / "apart")
    assert report.output is not None and (report.output["tied"], report.num_tensors) == ([], 6)
    last = state(bench.folder / "apart", 5)["weight"]
    assert raw(last["lm_head.weight"]) == raw(model["embed.weight"].chunk(2)[1]) and "embed.weight" not in last
    gather_checkpoint(bench.folder / "apart", bench.folder / "whole")
    assert_holds(bench.folder / "whole", {**model, "lm_head.weight": model["embed.weight"]})


def test_an_alias_is_compared_and_shares_its_bytes(bench: Bench) -> None:
    layouts = {**LAYOUTS, "lm_head.weight": "[v, h/~dp]"}
    model = tied_model()
    leave(bench.workspace, model, layouts=layouts)
    new = told()
    new.aliases["lm_head.weight"] = "embed.weight"
    reshard_checkpoint(bench.workspace, new, bench.out)
    for rank in range(6):
        weights = state(bench.out, rank)["weight"]
        assert weights["lm_head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
    gather_checkpoint(bench.out, bench.folder / "again")
    assert_holds(bench.folder / "again", model)
    model["lm_head.weight"] = model["lm_head.weight"].clone()
    model["lm_head.weight"][3, 5] += 1
    leave(bench.workspace, model, layouts=layouts)
    with pytest.raises(ContradictionError, match=r"lm_head.weight is tied to embed.weight, but") as caught:
        reshard_checkpoint(bench.workspace, new, bench.folder / "no")
    assert caught.value.index_range == "element [3, 5]"


# ---- refused


def refused(bench: Bench, kind: type[Exception], layouts: LayoutMap | None = None, **options: Any) -> Any:
    """Reshard, see it refused and nothing appear, and return the error; what was finished may be kept, hidden."""
    before = [name for name in bench.names() if not name.startswith(".")]
    with pytest.raises(kind) as caught:
        reshard_checkpoint(bench.workspace, layouts or told(), bench.out, **options)
    hidden = [name for name in bench.names() if name.startswith(".")]
    assert [name for name in bench.names() if name not in hidden] == before
    assert not hidden or kind in (ContradictionError, CorruptError), "something was written before the proof"
    return caught.value


def test_tensors_without_a_rule_and_rules_without_a_tensor(bench: Bench) -> None:
    leave(bench.workspace)
    error = refused(bench, LayoutError, told({n: t for n, t in ELSEWHERE.items() if n not in ("up.weight", "steps")}))
    assert "up.weight: no rule" in error.message
    assert "likewise steps" in error.message
    assert '"up.weight" = "[d0, d1]"' in error.next_step
    report = reshard_checkpoint(bench.workspace, told({**ELSEWHERE, "bias": "[n]"}), bench.out)
    assert [code for code, _ in report.notes] == ["unused-rule"]


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"embed.weight": "[v/x, h]"}, "embed.weight: v/x: 16 is not divisible by 3"),
        ({"embed.weight": "[v/~x]"}, "embed.weight: "),
        ({"steps": "[n, m]"}, "steps: "),
        ({"steps": "[7/~x]"}, "steps: "),
    ],
)
def test_layouts_that_do_not_fit(bench: Bench, rule: dict[str, str], says: str) -> None:
    leave(bench.workspace)
    error = refused(bench, LayoutError, told({**ELSEWHERE, **rule}))
    assert error.message.startswith(says)
    assert error.tensor == next(iter(rule))


def test_a_layout_without_a_mesh(bench: Bench) -> None:
    leave(bench.workspace)
    layouts = LayoutMap()
    for name, text in ELSEWHERE.items():
        layouts[name] = text
    assert "no [mesh]" in refused(bench, LayoutError, layouts).message


def test_layouts_that_leave_out_or_give_twice(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(bench.workspace)
    for length, start, says in ((10, 6, "given to no rank"), (10, 5, "given to ranks 0-1 in contradicting layouts")):

        def crooked(
            layout: Any, mesh: Any, coordinate: Any, shape: Any, *, sizes: Any, n: int = length, at: int = start
        ) -> LocalPart:
            first = n - 5 if coordinate["r"] == 0 else n - at
            return LocalPart((first,), (Nest(0, 0 if coordinate["r"] == 0 else at - (at == 5), ((first, 1, 1),)),))

        leave(bench.workspace, {"w": torch.arange(10.0) + 1}, layouts={"w": "[n]"})
        monkeypatch.setattr(reshard_plan, "local_part", crooked)
        reshard_plan._prove.cache_clear()
        error = refused(bench, LayoutError, told({"w": "[n/~r]"}, DeviceMesh((2,), ("r",))))
        reshard_plan._prove.cache_clear()
        assert says in error.message
        assert error.tensor == "w"


def test_a_damaged_state_is_named(bench: Bench) -> None:
    leave(bench.workspace)
    path = state_of(bench.workspace, 2)
    archive = read_archive(str(path))
    assert isinstance(archive.value, dict)
    offset = archive.records[archive.value["weight"]["up.weight"].key].offset
    flip(path, offset + 3)
    error = refused(bench, CorruptError)
    assert (error.tensor, error.rank, os.path.basename(error.file)) == ("up.weight", 2, path.name)
    assert error.index_range == "rows 3-5"  # of the whole tensor, not of a part of either layout


def test_replicas_that_differ_are_named_by_their_place_in_the_whole(bench: Bench) -> None:
    leave(bench.workspace)

    def change(state: dict[str, Any]) -> None:
        state["weight"]["down.weight"][5, 4] += 1

    rewrite(bench.workspace, 3, change)
    error = refused(bench, ContradictionError)
    assert (error.tensor, error.rank) == ("down.weight", 3)
    assert error.index_range == "element [5, 10]"
    assert error.got.startswith("1 of ")


def test_sources_that_are_incomplete_or_say_no_layout(bench: Bench) -> None:
    leave(bench.workspace)
    state_of(bench.workspace, 1).unlink()
    assert refused(bench, IncompleteError).rank == 1
    shutil.rmtree(bench.workspace)
    for rank in range(2):
        leave_plain(bench.workspace, rank, {"w": torch.ones(3)})
    error = refused(bench, LayoutError)
    assert "then reshard the model" in error.next_step
    shutil.rmtree(bench.workspace)
    for rank in range(2):
        known = {"w": TensorRecord("[n/r]", 0, (8,))}
        text = record(rank, 2, known, meshes=((("r",), (2,), (0, 1)),))
        leave_plain(bench.workspace, rank, {"w": torch.ones(3)}, xrank=text)
    assert refused(bench, ContradictionError, told({"w": "[n]"})).tensor == "w"


def test_the_output_is_kept_apart(bench: Bench) -> None:
    leave(bench.workspace)
    with pytest.raises(UsageError, match="would replace its source"):
        reshard_checkpoint(bench.workspace, told(), bench.workspace, overwrite=True)
    bench.out.mkdir()
    (bench.out / "notes.txt").write_text("mine")
    refused(bench, OutputExistsError)
    refused(bench, OutputExistsError, overwrite=True)
    shutil.rmtree(bench.out)
    reshard_checkpoint(bench.workspace, told(), bench.out)
    reshard_checkpoint(bench.workspace, told(LAYOUTS, MESH), bench.out, overwrite=True)
    assert len(list(bench.out.glob("*.pth"))) == 4


def test_a_dry_run_writes_nothing(bench: Bench) -> None:
    leave(bench.workspace)
    before = bench.names()
    report = reshard_checkpoint(bench.workspace, told(), bench.out, dry_run=True)
    assert bench.names() == before
    assert report.plan is not None
    assert [file["num_tensors"] for file in report.plan["files"]] == [5] * 6
    made = reshard_checkpoint(bench.workspace, told(), bench.out)
    assert made.output is not None
    sizes = [(bench.out / file["name"]).stat().st_size for file in made.output["files"]]
    assert sizes == [file["nbytes"] for file in report.plan["files"]]


def test_a_dry_run_says_the_memory(bench: Bench) -> None:
    leave(bench.workspace)
    options: dict[str, Any] = {"dry_run": True, "workers": 2}
    report = reshard_checkpoint(bench.workspace, told(), bench.out, **options, max_memory="2MB")
    assert report.plan is not None
    # Room for one worker; its buffers are whole pages.
    assert report.plan["peak_buffer_nbytes"] == (1 << 20) + 2 * 116 * 4096 == 1_998_848
    with pytest.raises(UsageError, match="the memory budget or the number of workers is too small"):
        reshard_checkpoint(bench.workspace, told(), bench.out, **options, max_memory="1MB")


def test_the_manifest_lists_the_states(bench: Bench) -> None:
    leave(bench.workspace)
    report = reshard_checkpoint(bench.workspace, told(), bench.out)
    manifest = json.loads((bench.out / "xrank_manifest.json").read_text())
    assert report.output is not None
    assert [(f["name"], f["nbytes"], f["digest"]) for f in manifest["files"]] == [
        (f["name"], f["nbytes"], f["digest"]) for f in report.output["files"]
    ]
    assert manifest["source"] == {"format": "workspace", "run_id": RUN, "step": STEP, "world_size": 4}


def test_worlds_shrink_and_grow(bench: Bench) -> None:
    model = leave(bench.workspace)
    source = bench.workspace
    for world_size in (2, 8, 3, 1):
        mesh = DeviceMesh((world_size,), ("r",))
        layouts = dict.fromkeys(model, "[n/~r]") | dict.fromkeys(
            ("embed.weight", "up.weight", "down.weight"), "[n/~r, m]"
        )
        target = bench.folder / f"world of {world_size}"
        reshard_checkpoint(source, told(layouts, mesh), target)
        assert_cut(target, model, layouts, mesh)
        source = target
