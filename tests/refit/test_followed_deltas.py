"""Engines that follow a folder of versions: whole at first, then what has changed, from any layout to any."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import xrank
from tests.readers.made_deltas import Model, write_delta, write_whole
from xrank.errors import ContradictionError, CorruptError, RankTimeoutError, UsageError
from xrank.formats.deltas import version_name

SHAPES = {"a.weight": (64, 32), "b.weight": (96, 8), "c.bias": (7,)}


def make_models(num_versions: int) -> list[Model]:
    """Return models of finite numbers: version 2 changes the bias alone."""
    generator = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> bytes:
        return generator.standard_normal(shape, np.float32).tobytes()

    models: list[Model] = [{name: ("F32", shape, draw(shape)) for name, shape in SHAPES.items()}]
    for version in range(1, num_versions + 1):
        names = ["c.bias"] if version == 2 else list(SHAPES)
        models.append({**models[-1], **{name: ("F32", SHAPES[name], draw(SHAPES[name])) for name in names}})
    return models


def tensors_of(model: Model) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.frombuffer(data, np.float32).reshape(s).copy())
        for name, (_, s, data) in model.items()
    }


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def assert_holds(served: dict[str, torch.Tensor], model: Model) -> None:
    for name, tensor in tensors_of(model).items():
        assert torch.equal(served[name], tensor), name


@pytest.fixture
def models(tmp_path: Path) -> list[Model]:
    """Write a base; return it and three versions."""
    found = make_models(3)
    write_whole(tmp_path / "base", found[0])
    return found


def write(folder: Path, models: list[Model], version: int, **options: Any) -> None:
    write_delta(folder / "deltas", models[version - 1], models[version], version, step=10 * version, **options)


def test_an_engine_follows(tmp_path: Path, models: list[Model]) -> None:
    """Later versions move only what they change; the report has the step."""
    write(tmp_path, models, 1)
    served = empty()
    with xrank.take_weights(served, deltas=tmp_path / "deltas", base_model=tmp_path / "base") as weights:
        first = weights.update(timeout_seconds=60)
        assert_holds(served, models[1])
        nbytes = sum(tensor.nbytes for tensor in served.values())
        assert (first.step, first.nbytes, first.moved_nbytes) == (10, nbytes, nbytes) and weights.step == 10
        threading.Timer(0.5, write, (tmp_path, models, 2)).start()
        second = weights.update(timeout_seconds=60)
        assert_holds(served, models[2])
        assert (second.step, second.moved_nbytes) == (20, served["c.bias"].nbytes)
        with pytest.raises(RankTimeoutError, match="there is no new version") as late:
            weights.update(timeout_seconds=0.3)
        assert late.value.got == "version 2, which the engine has" and weights.step == 20
        write(tmp_path, models, 3)
        assert weights.update(timeout_seconds=60).step == 30
        assert_holds(served, models[3])
        assert weights.update(20).step == 20
        assert_holds(served, models[2])
        with pytest.raises(UsageError, match="step 5 is past"):
            weights.update(5)
        for refused in (weights.check, weights.copy_from_engines):
            with pytest.raises(UsageError):
                refused()
    with pytest.raises(UsageError, match="closed"):
        weights.update()


def test_a_weight_that_changes_behind_the_back_is_named(tmp_path: Path, models: list[Model]) -> None:
    write(tmp_path, models, 1)
    served = empty()
    with xrank.take_weights(served, deltas=tmp_path / "deltas", base_model=tmp_path / "base", proof=True) as weights:
        for version in (1, 2):
            weights.update()
            assert weights.check().num_tensors == len(SHAPES)
            write(tmp_path, models, version + 1)
        served["b.weight"][95, 3] += 1
        with pytest.raises(
            ContradictionError, match=r"b.weight: engine rank 0 has different values than after its last update in row"
        ):
            weights.check()


def test_a_run_that_begins_anew(tmp_path: Path, models: list[Model]) -> None:
    """Its versions have the numbers of the first run's; and a whole version is taken whole."""
    write(tmp_path, models, 1)
    write(tmp_path, models, 2)
    served = empty()
    weights = xrank.take_weights(served, deltas=tmp_path / "deltas", base_model=tmp_path / "base")
    weights.update(timeout_seconds=60)
    shutil.rmtree(tmp_path / "deltas")
    other = [models[0], models[3], models[1]]
    write(tmp_path, other, 1)
    write(tmp_path, other, 2)
    assert weights.update(timeout_seconds=60).moved_nbytes == sum(tensor.nbytes for tensor in served.values())
    assert_holds(served, models[1])
    for model in (models[2], models[1]):
        shutil.rmtree(tmp_path / "deltas" / version_name(3), ignore_errors=True)
        write_whole(tmp_path / "deltas" / version_name(3), model, 3, step=77)
        assert weights.update(timeout_seconds=60).step == 77
        assert_holds(served, model)
    write_delta(tmp_path / "deltas", models[1], models[2], 4)
    assert weights.update(timeout_seconds=60).moved_nbytes == served["c.bias"].nbytes
    assert_holds(served, models[2])


def test_an_update_that_fails(tmp_path: Path, models: list[Model]) -> None:
    """The engine holds no step then, and the next call fills all tensors."""
    write(tmp_path, models, 1)
    served = empty()
    weights = xrank.take_weights(served, deltas=tmp_path / "deltas", base_model=tmp_path / "base")
    weights.update(timeout_seconds=60)
    write(tmp_path, models, 2)
    (file,) = (path for path in (tmp_path / "deltas" / version_name(2)).glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-9] + bytes([content[-9] ^ 255]) + content[-8:])
    with pytest.raises(CorruptError, match=r"c\.bias"):
        weights.update(timeout_seconds=60)
    assert weights.step is None
    file.write_bytes(content)
    assert weights.update(timeout_seconds=60).moved_nbytes == sum(tensor.nbytes for tensor in served.values())
    assert_holds(served, models[2])


def test_another_base_is_found(tmp_path: Path, models: list[Model]) -> None:
    """One that differs in tensors which no version changes; the version changes the bias alone."""
    write_delta(tmp_path / "deltas", models[1], models[2], 1)
    other = {**models[1], "a.weight": models[0]["a.weight"]}
    for base, error in ((other, CorruptError), (models[1], None)):
        shutil.rmtree(tmp_path / "base")
        write_whole(tmp_path / "base", base)
        served = empty()
        with xrank.take_weights(served, deltas=tmp_path / "deltas", base_model=tmp_path / "base") as weights:
            if error is not None:
                with pytest.raises(error, match=r"hash that .*weight_v000001 records"):
                    weights.update()
                assert weights.step is None
            else:
                assert weights.update().step == 1
                assert_holds(served, models[2])


def test_what_does_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without a trainer"):
        xrank.take_weights(empty(), tmp_path / "address", deltas=tmp_path / "deltas")
    with pytest.raises(UsageError, match="without a trainer"):
        xrank.take_weights(empty(), deltas=tmp_path / "deltas", relay=True)
    with pytest.raises(UsageError, match="nothing says where"):
        xrank.take_weights(empty())


def load_fused(served: dict[str, torch.Tensor], weights: Any) -> None:
    """Fill an engine's form: two tensors in one, and one that is doubled on the way."""
    for name, tensor in weights:
        if name == "c.bias":
            served["c"].copy_(2 * tensor)
        else:
            start = 0 if name == "a.weight" else 2048
            served["ab"][start : start + tensor.numel()].copy_(tensor.view(-1))


def test_an_engines_own_loader(tmp_path: Path, models: list[Model]) -> None:
    """Parts that it copies are filled, and others given to it whole, also where they have not changed."""
    write(tmp_path, models, 1)
    served = {"ab": torch.zeros(2816), "c": torch.zeros(7)}
    weights = xrank.take_weights(
        served, deltas=tmp_path / "deltas", base_model=tmp_path / "base", loader=lambda pairs: load_fused(served, pairs)
    )
    for version in (1, 2, 3):
        if version > 1:
            write(tmp_path, models, version)
        weights.update(timeout_seconds=60)
        want = {"ab": torch.zeros(2816), "c": torch.zeros(7)}
        load_fused(want, tensors_of(models[version]).items())
        assert all(torch.equal(served[name], want[name]) for name in want)


def follow(folder: str) -> None:
    """Follow on two ranks, each with half of the rows of one tensor."""
    rank, place = dist.get_rank(), Path(folder)
    served = empty()
    served["a.weight"] = torch.zeros(32, 32)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module = {**served, "a.weight": DTensor.from_local(served["a.weight"], mesh, [Shard(0)])}
    models = make_models(3)
    weights = xrank.take_weights(module, deltas=place / "deltas", base_model=place / "base")
    for version in (1, 2):
        if rank == 0:
            write(place, models, version)
        assert weights.update(timeout_seconds=60).step == 10 * version
        want = tensors_of(models[version])
        assert torch.equal(served["a.weight"], want["a.weight"][32 * rank : 32 * rank + 32])
        assert torch.equal(served["b.weight"], want["b.weight"])
    weights.close()


@pytest.mark.timeout(200)
def test_ranks_of_an_engine_take_a_version_together(rank_pool: Any, tmp_path: Path, models: list[Model]) -> None:
    rank_pool.run(2, follow, str(tmp_path), timeout_seconds=100)
