"""macOS and Windows, as far as one can see from Linux: what they lack is taken away, and files become the same models.

Only a run on those systems proves that xrank works there. This shows that nothing which they lack is assumed.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest
import torch

from tests.test_package import MODULES, bytes_of, leave_states, python, written
from xrank import system
from xrank.errors import UsageError, require_linux

SYSTEMS = pytest.mark.parametrize("name", ["macOS", "Windows"])
ROOT = Path(__file__).parent.parent
BECOME = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
sys.path.insert(0, {str(ROOT)!r})
import foreign_system
foreign_system.become(sys.argv[1])
"""

COMMANDS = """
from xrank.cli.main import cli
for line in '''
inspect workspace
gather workspace --out model
gather workspace --out model --overwrite
verify model --against workspace
simulate workspace
layout show workspace
recipe list
reshard model --layout layouts.toml --out again
gather again --out model2 --dtype keep
clean .
'''.strip().splitlines():
    cli.main(line.split(), standalone_mode=False)
"""


@SYSTEMS
def test_the_commands_on_files_give_the_same_models(name: str, tmp_path: Path):
    whole = leave_states(tmp_path / "workspace")
    layouts = python("from xrank.cli.main import main; main()", "layout", "show", "workspace", "--toml", cwd=tmp_path)
    (tmp_path / "layouts.toml").write_text(layouts)
    python(BECOME + COMMANDS, name, cwd=tmp_path)
    want = {tensor: bytes_of(value) for tensor, value in whole.items()}
    assert written(tmp_path / "model") == written(tmp_path / "model2") == want
    left = {entry for entry in os.listdir(tmp_path) if not entry.endswith(".lock")}
    assert left == {"workspace", "layouts.toml", "model", "again", "model2"}


@SYSTEMS
def test_modules_can_be_imported(name: str):
    code = """
import importlib, json
failed = {}
for module in json.loads(sys.argv[2]):
    try:
        importlib.import_module(module)
    except Exception as error:
        failed[module] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""
    # Torch's own import needs what is taken away, the others run or start devices as forked processes, and
    # integrations import their frameworks.
    not_here = ("xrank.__main__", "xrank.testing.", "xrank.distribution.", "xrank.gradients.")
    not_here += ("xrank.virtual.processes", "xrank.virtual.shared_channels")
    not_here += ("xrank.integrations.", "xrank.refit.recording")
    names = [each for each in MODULES if not each.startswith(not_here)]
    assert json.loads(python(BECOME + code, name, json.dumps(names))) == {}


def test_what_needs_linux_says_so_in_one_sentence(tmp_path: Path):
    code = """
import json, os
import xrank
from xrank.testing.rank_pool import RankPool
from xrank.virtual import VirtualCluster

def gather():
    with xrank.get_configs_parallel(1, [0, 1], None):
        pass

os.environ.update(RANK="0", WORLD_SIZE="2", TORCHELASTIC_RUN_ID="run")
texts = []
for call in (
    gather,
    lambda: xrank.export_model({}, "out"),
    lambda: list(xrank.iter_model({})),
    xrank.SharedMemoryWorkspace,
    lambda: VirtualCluster(2).run(lambda device: 1),
    lambda: RankPool().run_by_name(1, "m", None, "f", (), {}),
):
    try:
        call()
    except xrank.errors.UsageError as error:
        texts.append(str(error))
print(json.dumps(texts))
"""
    # Torch is imported first: on a real system its own import knows what is there.
    printed = python("import torch.distributed\n" + BECOME + code, "macOS", cwd=tmp_path)
    assert json.loads(printed) == [
        "get_configs_parallel of several ranks needs Linux",
        "export_model needs Linux",
        "iter_model needs Linux",
        "SharedMemoryWorkspace needs Linux",
        'VirtualCluster(engine="processes") needs Linux',
        "a test on ranks needs Linux",
    ]
    assert os.listdir(tmp_path) == []


def test_states_are_written_and_read_on_macos(tmp_path: Path):
    code = """
import xrank
workspace = xrank.NFSWorkspace("workspace", rank=0, world_size=1)
for value in (1.0, 2.0):
    workspace.write_configs_and_weights({"layers": 1}, {"w": torch.full((2, 3), value)})
config, weights = workspace.read_configs_and_weights_from_rank(0)
print(config, weights["w"].sum().item())
xrank.gather_checkpoint("workspace", "model")
module = torch.nn.Linear(3, 2, bias=False)
xrank.load_model({"w": module.weight.data}, "model")
print(module.weight.sum().item(), xrank.open_checkpoint("model")["w"].sum().item())
"""
    printed = python("import torch.distributed\n" + BECOME + code, "macOS", cwd=tmp_path)
    assert printed == "{'layers': 1} 12.0\n12.0 12.0\n"


# ---- the pieces


@pytest.mark.parametrize("absent", [(), ("preadv",), ("preadv", "pread", "pwrite")], ids=str)
def test_reads_and_writes_at_offsets(absent, tmp_path: Path, monkeypatch):
    for each in absent:
        monkeypatch.delattr(os, each)
    fd = os.open(tmp_path / "file", system.NEW)
    try:
        content = bytes(range(256)) * 64
        parts = [(start, content[start : start + 512]) for start in range(0, len(content), 512)]

        def work(mine: list[tuple[int, bytes]]) -> None:
            for start, data in mine:
                assert system.write_at(fd, memoryview(data), start) == len(data)
            for start, data in mine:
                into = memoryview(bytearray(len(data)))
                assert system.read_at(fd, into, start) == len(data) and into == data
                assert system.read_bytes_at(fd, 100, start) == data[:100]

        threads = [threading.Thread(target=work, args=(parts[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (tmp_path / "file").read_bytes() == content
        assert system.read_at(fd, memoryview(bytearray(4)), len(content)) == 0
    finally:
        os.close(fd)


def test_a_link_is_not_followed_and_a_new_file_is_new(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(FileExistsError):
        os.open(tmp_path / "file", system.NEW)
    for flags in (system.UPDATE, system.APPEND, system.READ | system.NO_LINK):
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            os.open(tmp_path / "link", flags)


def test_a_process_is_not_asked_where_asking_would_end_it(monkeypatch):
    assert system.process_state(os.getpid()) == system.process_state(1) == "alive"
    assert system.process_state(2**22 + 1) == system.process_state(2**70) == "gone"
    monkeypatch.setattr(system, "_IS_POSIX", False)
    monkeypatch.setattr(os, "kill", lambda *arguments: pytest.fail("a signal was sent"))
    assert system.process_state(os.getpid()) == "unknown"


def test_anonymous_memory_is_writable():
    memory = memoryview(system.anonymous_memory(1 << 22))
    memory[-1] = 7
    assert torch.frombuffer(memory, dtype=torch.uint8).sum().item() == 7


def test_linux_has_what_linux_needs():
    require_linux("this")
    assert system.peak_rss_nbytes() > 1 << 20 and system.descriptor_limit() > 0 and system.free_nbytes("/") >= 0
    assert system.c_function("getpid")() == os.getpid() and system.c_function("no_such_function") is None


def test_the_missing_calls_are_named(monkeypatch):
    monkeypatch.delattr(os, "eventfd")
    with pytest.raises(UsageError, match=r"this needs Linux") as raised:
        require_linux("this")
    assert raised.value.got == "a system without eventfd"
