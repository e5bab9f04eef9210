"""The whole way, from the tensors that ranks hold to the files of a model, on anything that a layout can say.

The parts are cut here by `torch.chunk` alone, and read back by the safetensors package: nothing of xrank's judges.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from xrank import NFSWorkspace, gather_checkpoint, verify_model
from xrank.engine import executor, windows
from xrank.errors import XrankError
from xrank.layout import DeviceMesh, LayoutMap

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bytes: NaNs of every kind, subnormals and negative zeros among them."""
    count = math.prod(shape) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    data = random.Random(seed).randbytes(count)
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@dataclass(frozen=True)
class Grid:
    """A mesh, by itself: lengths, names and ranks, and where each rank stands."""

    lengths: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]

    def place(self, rank: int) -> dict[str, int]:
        """Return a rank's place along each axis: row-major, the last axis fastest."""
        position, places = self.ranks.index(rank), {}
        for name, length in reversed(list(zip(self.names, self.lengths, strict=True))):
            position, places[name] = divmod(position, length)
        return places


@dataclass(frozen=True)
class Cut:
    """A tensor's layout, by itself: for each dim the axes that cut it, in that order."""

    axes: tuple[tuple[str, ...], ...]

    def part(self, tensor: torch.Tensor, grid: Grid, rank: int) -> torch.Tensor:
        """Return a rank's part of a tensor, a view of it: each cut is one `torch.chunk`."""
        place = grid.place(rank)
        for dim, axes in enumerate(self.axes):
            for axis in axes:
                chunks = tensor.chunk(grid.lengths[grid.names.index(axis)], dim)
                tensor = chunks[place[axis]] if place[axis] < len(chunks) else tensor.narrow(dim, 0, 0)
        return tensor

    def text(self, grid: Grid, shape: tuple[int, ...], draw) -> str:
        """Return the layout in words; cuts that leave equal parts may be said to be even."""
        dims = []
        for dim, axes in enumerate(self.axes):
            sizes, words = {shape[dim]}, [draw(st.sampled_from([f"n{dim}", str(shape[dim])]))]
            for axis in axes:
                length = grid.lengths[grid.names.index(axis)]
                is_even = all(size % length == 0 for size in sizes)
                words.append(("/" if is_even and draw(st.booleans()) else "/~") + axis)
                steps = {size: -(-size // length) for size in sizes}
                sizes = {min(max(n - i * steps[n], 0), steps[n]) for n in sizes for i in range(length)}
            dims.append(draw(st.sampled_from(["", " "])).join(words))
        return f"[{', '.join(dims)}]"


@st.composite
def grids(draw) -> Grid:
    lengths = draw(
        st.sampled_from([(1,), (2,), (3,), (8,), (2, 2), (2, 3), (4, 2), (1, 5), (2, 2, 2), (2, 1, 3), (3, 2, 1)])
    )
    names = draw(st.permutations(["dp", "tp", "pp"]))[: len(lengths)]
    world_size = math.prod(lengths) + draw(st.sampled_from([0, 0, 0, 2]))
    ranks = draw(st.permutations(range(world_size)))[: math.prod(lengths)]
    return Grid(lengths, tuple(names), tuple(ranks))


@st.composite
def cuts(draw, grid: Grid) -> tuple[Cut, tuple[int, ...]]:
    """Draw a layout and a shape that it fits: any axes on any dims in any order, or on none."""
    ndim = draw(st.integers(0, 3))
    axes: list[list[str]] = [[] for _ in range(ndim)]
    for name in draw(st.permutations(grid.names)):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            axes[dim].append(name)
    shape = tuple(draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 0])) for _ in range(ndim))
    return Cut(tuple(map(tuple, axes))), shape


def as_held(part: torch.Tensor, how: str) -> torch.Tensor:
    """Return the part as some program may hold it."""
    match how:
        case "own":
            return part.clone()
        case "transposed" if part.ndim:
            return part.clone().permute(*reversed(range(part.ndim))).contiguous().permute(*reversed(range(part.ndim)))
        case "parameter" if part.is_floating_point() and part.dtype.itemsize > 1:
            return torch.nn.Parameter(part.clone())
    return part  # a view of the whole tensor


def read_folder(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return what the safetensors package finds in a model's files; checks that the index says the same."""
    found, homes = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            assert name not in found
            found[name], homes[name] = (tensor["dtype"], tensor["shape"], bytes(tensor["data"])), path.name
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (len(set(homes.values())) > 1)
    if index.exists():
        assert json.loads(index.read_text())["weight_map"] == homes
    return found


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, list[int], bytes]]:
    return {name: (DTYPES[t.dtype], list(t.shape), bytes_of(t)) for name, t in tensors.items()}


@given(st.data())
# Without the phase that explains, a failure is small in half of a test's minute.
@settings(
    max_examples=count_of(100),
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.reuse, Phase.generate, Phase.shrink],
)
def test_what_ranks_hold_becomes_the_model(data):
    draw = data.draw
    grid = draw(grids())
    world_size = max(*grid.ranks, len(grid.ranks) - 1) + 1
    layouts = LayoutMap(DeviceMesh(grid.lengths, grid.names, grid.ranks))
    tensors, held = {}, {}
    for i in range(draw(st.integers(1, 5))):
        name = draw(st.sampled_from(["w{}", "layers.{}.mlp.up.weight", "größe{}"])).format(i)
        cut, shape = draw(cuts(grid))
        tensors[name] = random_tensor(draw(st.sampled_from(list(DTYPES))), shape, draw(st.integers(0, 999)))
        layouts[name] = cut.text(grid, shape, draw)
        how = draw(st.sampled_from(["own", "view", "transposed", "parameter"]))
        held[name] = (cut, how)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        window_nbytes = draw(st.sampled_from([64, 4096, 1 << 20]))
        for module in (windows, executor):  # smaller than the tensors, so that these cross many
            patch.setattr(module, "WINDOW_NBYTES", window_nbytes)
        workspace, out = Path(folder, "workspace"), Path(folder, "out")
        for rank in range(world_size):
            here = rank in grid.ranks
            weights = (
                {n: as_held(cut.part(tensors[n], grid, rank), how) for n, (cut, how) in held.items()} if here else {}
            )
            NFSWorkspace(workspace, rank=rank, world_size=world_size, run_id="run").write_configs_and_weights(
                {"model_type": "made"}, weights, layouts=layouts, step=3
            )
        report = gather_checkpoint(
            workspace,
            out,
            max_shard_size=draw(st.sampled_from([1, 100, 1000, "5GB"])),
            workers=draw(st.integers(1, 3)),
            max_memory=draw(st.sampled_from(["1536KiB", "4MiB", "64MB"])),
        )
        assert read_folder(out) == expected(tensors)
        assert json.loads((out / "config.json").read_text()) == {"model_type": "made"}
        assert report.num_parameters == sum(tensor.numel() for tensor in tensors.values())
        assert verify_model(out).ok


def test_every_dtype_in_one_model(tmp_path):
    grid = Grid((2, 2), ("dp", "tp"), (2, 0, 3, 1))
    cut = Cut((("tp", "dp"), ()))
    layouts = LayoutMap(DeviceMesh(grid.lengths, grid.names, grid.ranks))
    tensors = {f"w.{name}": random_tensor(dtype, (5, 3), i) for i, (dtype, name) in enumerate(DTYPES.items())}
    tensors |= {f"s.{name}": random_tensor(dtype, (), i) for i, (dtype, name) in enumerate(DTYPES.items())}
    for name, tensor in tensors.items():
        layouts[name] = "[n/~tp/~dp, 3]" if tensor.ndim else "[]"
    for rank in range(4):
        weights = {n: cut.part(t, grid, rank) if t.ndim else t for n, t in tensors.items()}
        NFSWorkspace(tmp_path / "w", rank=rank, world_size=4, run_id="run").write_configs_and_weights(
            {}, weights, layouts=layouts
        )
    gather_checkpoint(tmp_path / "w", tmp_path / "out", max_shard_size=64)
    assert read_folder(tmp_path / "out") == expected(tensors)


@given(st.sampled_from(["bf16", "fp16", "fp32"]), st.integers(0, 999), st.sampled_from([1, 50, "5GB"]))
@settings(max_examples=count_of(20), deadline=None)
def test_casts_are_torchs(dtype, seed, max_shard_size):
    target = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    grid, cut = Grid((2, 2), ("dp", "tp"), (0, 1, 2, 3)), Cut((("dp",), ("tp",)))
    layouts = LayoutMap(DeviceMesh(grid.lengths, grid.names, grid.ranks))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"w{i}": torch.randn((5, 7), generator=generator, dtype=torch.float64).to(source)
        for i, source in enumerate([torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float64])
    }
    tensors |= {"ids": torch.arange(35).view(5, 7), "fp8": tensors["w0"].to(torch.float8_e4m3fn)}
    for name in tensors:
        layouts[name] = "[a/~dp, b/~tp]"
    with tempfile.TemporaryDirectory() as folder:
        workspace, out = Path(folder, "workspace"), Path(folder, "out")
        for rank in range(4):
            weights = {name: cut.part(tensor, grid, rank) for name, tensor in tensors.items()}
            NFSWorkspace(workspace, rank=rank, world_size=4, run_id="run").write_configs_and_weights(
                {}, weights, layouts=layouts
            )
        gather_checkpoint(workspace, out, dtype=dtype, keep_fp32="w4", max_shard_size=max_shard_size)
        cast = {
            name: tensor.to(target) if name in ("w0", "w1", "w2", "w3") else tensor for name, tensor in tensors.items()
        }
        assert read_folder(out) == expected(cast)


def test_no_changed_byte_changes_the_model_silently(tmp_path):
    """Whatever byte of whatever state flips, and wherever a state ends: an error, or the very same model."""
    grid, cut = Grid((2, 2), ("dp", "tp"), (0, 1, 2, 3)), Cut((("tp",), ()))
    layouts = LayoutMap(DeviceMesh(grid.lengths, grid.names, grid.ranks))
    tensors = {f"w{i}": random_tensor(torch.bfloat16, (6, 5), i) for i in range(3)}
    config = {"model_type": "made", "tie_word_embeddings": False}
    for name in tensors:
        layouts[name] = "[a/tp, b]"
    for rank in range(4):
        weights = {name: cut.part(tensor, grid, rank) for name, tensor in tensors.items()}
        NFSWorkspace(tmp_path / "w", rank=rank, world_size=4, run_id="run").write_configs_and_weights(
            config, weights, layouts=layouts
        )
    rng = random.Random(20261115)
    errors = same = 0
    for i in range(160):
        path = tmp_path / "w" / f"rank_{rng.randrange(4)}_state.pth"
        good = path.read_bytes()
        used = [at for at, byte in enumerate(good) if byte not in b"\0Z"]  # the rest is mostly padding
        bad = bytearray(good)
        if i % 8:
            bad[rng.choice(used)] ^= 1 << rng.randrange(8)
        else:
            del bad[rng.randrange(len(bad)) :]
        path.write_bytes(bad)
        out = tmp_path / f"out{i}"
        try:
            gather_checkpoint(tmp_path / "w", out)
        except XrankError as error:
            assert error.message
            assert not out.exists()
            errors += 1
        else:
            assert read_folder(out) == expected(tensors)
            assert json.loads((out / "config.json").read_text()) == config
            same += 1
        path.write_bytes(good)
    assert errors > 120, (errors, same)


def random_placements(rng: random.Random, ndim: int, num_axes: int) -> list:
    from torch.distributed.tensor import Replicate, Shard

    return [Shard(rng.randrange(ndim)) if ndim and rng.random() < 0.75 else Replicate() for _ in range(num_axes)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "ranks", [[0, 1, 2, 3], [[0, 2], [1, 3]], [[0], [1], [2], [3]]], ids=["line", "square", "column"]
)
def test_distributed_tensors_become_their_full_tensors(tmp_path, rank, world_size, ranks):
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.distributed.tensor import distribute_tensor

    # Rising along each axis: torch 2.13 sorts the ranks of a group, and then cuts in another order than it gathers.
    ranks = torch.tensor(ranks)
    mesh = TorchMesh("cpu", ranks, mesh_dim_names=("dp", "tp")[: ranks.ndim])
    # Slices too: each rank's own row or column, the others' hold replicas.
    meshes = [mesh] if ranks.ndim == 1 else [mesh, mesh, mesh["dp"], mesh["tp"]]
    rng = random.Random(str(ranks))
    weights, full = {}, {}
    for i in range(25):
        size = [rng.choice([1, 2, 3, 4, 5, 7, 8]) for _ in range(rng.randint(0, 3))]
        torch.manual_seed(i)
        whole = torch.randn(size, dtype=rng.choice([torch.float32, torch.bfloat16, torch.float64]))
        where = rng.choice(meshes)
        weights[f"w{i}"] = distribute_tensor(whole, where, random_placements(rng, len(size), where.ndim))
        full[f"w{i}"] = weights[f"w{i}"].full_tensor()
        assert torch.equal(full[f"w{i}"], whole)
    workspace = NFSWorkspace(tmp_path / "workspace", run_id="run")
    assert (workspace.rank, workspace.world_size) == (rank, world_size)
    workspace.write_configs_and_weights({}, weights)
    dist.barrier()
    if rank == 0:
        gather_checkpoint(tmp_path / "workspace", tmp_path / "out", max_shard_size=100)
        assert read_folder(tmp_path / "out") == expected(full)
    dist.barrier()
