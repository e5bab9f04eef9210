import ast
import os
from pathlib import Path

import pytest

import xrank
from xrank import environment
from xrank.environment import hub_cache, setting
from xrank.errors import UsageError
from xrank.ranks.store import Launch, read_launch, read_run_id

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_NTASKS": "64",
    "SLURM_JOB_ID": "881",
    "SLURM_STEP_ID": "0",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        (TORCHRUN, Launch(5, 8, 1, 4, "job-7", "2", "torchrun")),
        (TORCHRUN | SRUN, Launch(5, 8, 1, 4, "job-7", "2", "torchrun")),
        # torchrun's own default is no id: every such run has it
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, Launch(5, 8, 1, 4, None, "2", "torchrun")),
        (SRUN, Launch(5, 7, 1, 3, "881.0", None, "srun")),
        (SRUN | {"SLURM_RESTART_COUNT": "1"}, Launch(5, 7, 1, 3, "881.0", "1", "srun")),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),3"}, Launch(5, 7, 1, 2, "881.0", None, "srun")),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "?"}, Launch(5, 7, 1, 2, "881.0", None, "srun")),
        # a shell of sbatch or salloc, outside srun
        ({k: v for k, v in SRUN.items() if not k.startswith("SLURM_STEP")}, None),
        (MPIRUN, Launch(3, 4, 1, 2, None, None, "mpirun")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Launch(1, 2, 0, 1, None, None, "bare")),
        ({"RANK": "1"}, None),
        ({"WORLD_SIZE": "2"}, None),
    ],
)
def test_read_launch(environ, launch):
    assert read_launch(environ) == launch


def test_the_users_run_id_wins_everywhere():
    for environ in (TORCHRUN, SRUN, MPIRUN, {"RANK": "0", "WORLD_SIZE": "1"}, {}):
        assert read_run_id(environ | {"XRANK_RUN_ID": "mine"}) == "mine"
        assert read_run_id(environ | {"XRANK_RUN_ID": ""}) == read_run_id(environ)
    assert read_run_id({}) is None


@pytest.mark.parametrize("bad", ["", "x", "-1", "+1", "1.0", " 1", "\u0661", "9" * 40, "8"])
def test_numbers_that_are_none_are_named(bad):
    with pytest.raises(UsageError, match="RANK" if bad != "8" else "rank 8 of 8"):
        read_launch(TORCHRUN | {"RANK": bad})


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (TORCHRUN, "LOCAL_RANK"),
        (TORCHRUN, "WORLD_SIZE"),
        (SRUN, "SLURM_STEP_NUM_TASKS"),
        (SRUN, "SLURM_LOCALID"),
        (SRUN, "SLURM_NODEID"),
        (MPIRUN, "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_the_variable_is_named(environ, name):
    with pytest.raises(UsageError, match=rf"environment variable {name} is 'many'") as caught:
        read_launch(environ | {name: "many"})
    assert name in caught.value.next_step


def test_settings():
    assert setting({"XRANK_WORKERS": "4"}, "XRANK_WORKERS") == "4"
    assert setting({"XRANK_WORKERS": ""}, "XRANK_WORKERS") is None
    with pytest.raises(KeyError):
        setting({}, "HOME")


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
        ({"HF_HOME": "/h"}, "/h/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HOME": "/me"}, "/me/.cache/huggingface/hub"),
    ],
)
def test_hub_cache(environ, folder):
    assert hub_cache(environ) == folder


def test_it_is_the_process_environment():
    assert environment.environ() is os.environ


def test_no_other_module_reads_the_environment():
    root = Path(xrank.__file__).parent
    readers = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb") and _is_os(node.value)
    }
    assert readers == {"environment.py"}


def _is_os(node):
    return isinstance(node, ast.Name) and node.id == "os"
