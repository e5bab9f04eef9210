"""The defects that a known implementation of the same gathers shows, each as a test that ours passes.

The numbers are those of the list in the design notes (live gathers, section 2). 1, 10, 11 and 12, which are about
directories, are in tests/workspace/test_directory_defects.py.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import torch

from tests.named_memory import named_memory
from tests.open_files import open_files, opened_since
from xrank.errors import NoSpaceError, RankFailedError, UsageError
from xrank.workspace.parallel import get_configs_parallel, get_tensors_parallel


class Norm(Enum):
    LAYER = "layer"


@dataclass
class LayernormConfig:
    weight: torch.Tensor | None = None
    kind: Norm = Norm.LAYER


@dataclass
class EmbeddingConfig:
    weight: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16


@dataclass
class ModelConfig:
    vocab_size: int = 0
    embedding: EmbeddingConfig | None = None
    layers: list[LayernormConfig] = field(default_factory=list)


@pytest.mark.ranks(2)
def test_defect_2_a_foreign_segment_is_never_read(rank):
    foreign = None
    if rank == 0:
        with suppress(FileExistsError):  # perhaps another user's ModelOpt: it is as foreign
            foreign = shared_memory.SharedMemory("rank_1", create=True, size=4096)
            foreign.buf[:4] = b"evil"
    try:
        for i in range(3):
            with get_tensors_parallel(torch.tensor([float(rank + i)]), [0, 1]) as parts:
                if rank == 0:
                    assert [t.item() for t in parts] == [i, 1.0 + i]
    finally:
        if foreign is not None:
            foreign.close()
            foreign.unlink()


@pytest.mark.ranks(2)
def test_defect_3_without_a_key_the_classes_show_that_a_rank_is_behind(rank):
    with pytest.raises((ValueError, RankFailedError), match="different classes") as raised:
        for config in ([LayernormConfig(), ModelConfig()], [LayernormConfig(), LayernormConfig(), ModelConfig()])[rank]:
            with get_configs_parallel(config, [0, 1], None):
                pass
    assert "ModelConfig" in str(raised.value) + str(raised.value.want) + str(raised.value.got)
    with get_configs_parallel((LayernormConfig(), ModelConfig())[rank], [0, 1], None, key="meant so") as configs:
        assert [type(config) for config in configs] == ([LayernormConfig, ModelConfig] if rank == 0 else [])


def test_defect_5_nothing_on_the_way_of_a_gather_is_unpickled():
    # The pool's ranks get their tests by pickle, so this one looks at what the modules hold.
    package = Path(sys.modules["xrank.workspace.parallel"].__file__).parents[1]
    modules = [*package.glob("workspace/*.py"), *package.glob("ranks/*.py")]
    assert len(modules) > 10
    for module in modules:
        text = module.read_text()
        for word in ("import pickle", "torch.load", "pickle.load", "eval(", "exec(", "import_module"):
            assert word not in text, (module, word)


@pytest.mark.ranks(2)
def test_defect_5_no_environment_variable_makes_a_gather_unpickle(rank):
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    load, torch.load = torch.load, None
    try:
        with get_configs_parallel({"w": torch.ones(3)}, [0, 1], None) as configs:
            assert rank == 1 or torch.equal(configs[1]["w"], torch.ones(3))
    finally:
        torch.load = load
        del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]


# 6, two jobs on one machine, and 7, the kill of a whole job: below, and tests/workspace/test_killing.py.

GATHER = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from xrank.workspace.parallel import get_tensors_parallel
path, kill = sys.argv[1], sys.argv[2] == "kill"
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
for i in range(3):
    with get_tensors_parallel(torch.full((100_000,), i + rank), [0, 1]) as parts:
        assert rank == 1 or [int(t[-1]) for t in parts] == [i, i + 1]
        if kill and i == 2 and rank == 0:
            os.kill(0, 9)
if rank == 0:
    print("all came", flush=True)
os._exit(0)
"""


def start(path: Path, what: str, *before: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        [*before, sys.executable, "-c", GATHER, str(path), what],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_defects_6_7_8_jobs_beside_and_after_each_other_and_one_killed_whole(tmp_path):
    before = named_memory()
    jobs = [start(tmp_path / "killed", "kill"), start(tmp_path / "a", "live"), start(tmp_path / "b", "live")]
    said = [(*job.communicate(timeout=150), job.returncode) for job in jobs]
    assert said[0][2] == -signal.SIGKILL
    assert said[1][::2] == said[2][::2] == ("all came\n", 0), said
    assert named_memory() == before, "a killed job leaves nothing, and removes nothing of others"


def test_defect_9_no_memory_is_an_error_with_numbers(monkeypatch):
    import errno

    from xrank.ranks.memory_messages import Arena

    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    arena = Arena(1 << 20)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoSpaceError) as raised:
        arena.write(0, torch.ones(1 << 18))
    assert raised.value.needed_nbytes == 1 << 20 and raised.value.free_nbytes > 0
    arena.close()


@pytest.mark.ranks(2)
def test_defect_9_the_others_receive_the_failure(rank):
    import xrank.ranks.memory_messages as arena

    pwrite = os.pwrite
    if rank == 1:
        arena.os.pwrite = lambda fd, data, offset: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    try:
        with pytest.raises(NoSpaceError if rank == 1 else RankFailedError) as raised:  # noqa: SIM117
            with get_tensors_parallel(torch.ones(1 << 20), [0, 1]):
                pass
        assert "not enough memory" in str(raised.value)
    finally:
        os.pwrite = pwrite


def test_defect_9_a_small_dev_shm_is_no_limit(tmp_path):
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    probe = subprocess.run(["unshare", "-m", "sh", "-c", mount, "sh", "true"], capture_output=True, check=False)
    if shutil.which("unshare") is None or probe.returncode:
        pytest.skip("mount namespaces need root")
    job = start(tmp_path / "small", "live", "unshare", "-m", "sh", "-c", mount.replace("1m", "64k"), "sh")
    said = job.communicate(timeout=150)
    assert said[0] == "all came\n", said


@pytest.mark.ranks(2)
def test_defect_15_a_failure_inside_fails_the_gathers_around_it(rank):
    with pytest.raises((KeyError, RankFailedError)) as raised:  # noqa: SIM117
        with get_tensors_parallel(torch.ones(1), [0, 1]):
            with get_tensors_parallel(torch.ones(1), [0, 1]):
                if rank == 1:
                    raise KeyError("inside")
    assert "inside" in str(raised.value)
    # A rank that catches it inside still gets it at the end, and the next gathers are complete.
    with pytest.raises(RankFailedError, match="again"):  # noqa: SIM117
        with get_tensors_parallel(torch.ones(1), [0, 1]):
            try:
                with get_tensors_parallel(torch.ones(1), [0, 1]):
                    if rank == 1:
                        raise KeyError("again")
            except (KeyError, RankFailedError):
                pass
    with get_tensors_parallel(torch.tensor(rank), [0, 1]) as parts:
        assert parts == ([0, 1] if rank == 0 else [])


@pytest.mark.ranks(2)
def test_defects_16_17_18_views_expanded_and_parameters(rank):
    big = torch.arange(1000.0).view(100, 10)
    mine = {
        "rows": big[5:9], "columns": big[:, :2], "transposed": big.t(), "expanded": torch.ones(1, 4).expand(1000, 4),
        "parameter": torch.nn.Parameter(big), "scalar": torch.tensor(3), "empty": torch.empty(0, 7),
    }  # fmt: skip
    with get_tensors_parallel(mine, [0, 1]) as parts:
        for part in parts:
            for name, tensor in mine.items():
                assert torch.equal(part[name], tensor.detach()), name
                assert type(part[name]) is torch.Tensor and not part[name].requires_grad
        for part in parts[1:]:  # the first rank's own tensors are those that it gave
            for tensor in part.values():
                tensor.add_(1)
    assert big[0, 0] == 0


@pytest.mark.ranks(2)
def test_defect_18_sparse_tensors_are_refused_on_all_ranks(rank):
    with pytest.raises(UsageError if rank == 1 else RankFailedError) as raised:  # noqa: SIM117
        with get_tensors_parallel(torch.eye(3).to_sparse() if rank == 1 else torch.eye(3), [0, 1]):
            pass
    assert "layout" in str(raised.value)


@pytest.mark.ranks(2)
def test_defects_19_20_configs_of_every_kind_with_and_without_tensors(rank):
    weight = torch.full((3,), float(rank))
    for config in (
        LayernormConfig(),
        ModelConfig(vocab_size=4),
        EmbeddingConfig(weight, torch.float8_e4m3fn),
        ModelConfig(1, EmbeddingConfig(weight), [LayernormConfig(weight), LayernormConfig(weight[1:])]),
    ):
        with get_configs_parallel(config, [0, 1], None) as configs:
            assert [type(c) for c in configs] == ([type(config)] * 2 if rank == 0 else [])
    if rank == 0:
        assert configs[1].embedding.weight is configs[1].layers[0].weight
        assert configs[1].embedding.weight.tolist() == [1.0] * 3 and configs[1].layers[0].kind is Norm.LAYER
        assert configs[0].embedding.dtype is torch.bfloat16


@pytest.mark.ranks(3)
def test_defect_21_ranks_are_each_once_and_others_take_no_part(rank):
    with pytest.raises(ValueError, match="different ranks"), get_tensors_parallel(torch.ones(1), [0, 1, 1]):
        pass
    before = open_files(), named_memory()
    if rank == 2:
        for _ in range(50):
            with get_tensors_parallel("not even looked at", [0, 1]) as parts:
                assert parts == []
        gc.collect()
        assert not opened_since(before[0]) and named_memory() == before[1]
    else:
        with get_tensors_parallel(torch.tensor(rank), [0, 1]) as parts:
            assert parts == ([0, 1] if rank == 0 else [])
