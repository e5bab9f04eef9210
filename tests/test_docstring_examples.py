"""The examples (``>>>``) in the docstrings of the library run as doctests, one test per module."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

from xrank.gradients import DistributedDataParallel, GradientPlan
from xrank.layout import DeviceMesh

ROOT = Path(__file__).parent.parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "xrank").rglob("*.py"))
    if any(">>> " in line and "+SKIP" not in line for line in path.read_text().splitlines())
]


@pytest.fixture
def ddp():
    """Wrap a small module on one rank, for the examples that need one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    module = torch.nn.Linear(2, 1)
    yield DistributedDataParallel(module, GradientPlan.from_module(module, DeviceMesh((1,), ("dp",))))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)  # an example may write files
    module = importlib.import_module(name)
    given = {}
    if any(">>> " in line and "ddp" in line for line in Path(module.__file__).read_text().splitlines()):
        given["ddp"] = request.getfixturevalue("ddp")
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE, extraglobs=given)
    assert results.attempted
    assert not results.failed, "see the captured output"
