"""Doctor: what this machine, this Python and one folder offer to xrank, each found by trying it."""

from __future__ import annotations

import errno
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

from xrank import system
from xrank.engine.buffers import shares_blocks
from xrank.engine.report import DoctorDetails, Report, timed_report
from xrank.environment import SETTINGS, environ, hub_cache, list_cached_models, setting
from xrank.errors import UsageError, XrankError, require_linux
from xrank.ranks.loans import LendingSign
from xrank.ranks.team import find_launch
from xrank.readers.discovery import find_plugins
from xrank.recipes.options import default_workers
from xrank.storage.disk import allocate, exchange, is_in_memory
from xrank.version import __version__
from xrank.words import one_line, plural, size_text

_PACKAGES = ("numpy", "ml_dtypes", "xxhash", "isal", "click", "msgspec")
_OPTIONAL = {"torch": "models in memory", "tensorstore": "Orbax", "zstandard": "Orbax", "pytest": "tests on ranks"}
_READ_PARENT = """
import sys
from xrank.ranks.loans import PeerMemory
PeerMemory(int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]))
"""
_CHILD_SECONDS = 60

Check = tuple[str, str, bool | None, str]
"""Subject, name, whether it is there (None: a mere fact), and what was found."""


def examine_machine(path: str | os.PathLike[str] = ".") -> Report:
    """Describe what this machine offers: versions, memory, system calls, and the file system of a folder.

    Files of a few kilobytes are made in the folder, in one of their own, and removed. The report is `ok` whatever is
    missing: ``details["checks"]`` has a row for each thing, with its subject, its name, whether it is there (None for
    a mere fact) and a text.

    Args:
        path: the folder to write models to.

    Raises:
        UsageError: there is no such folder.

    Example:
        >>> report = examine_machine()
        >>> [check["text"] for check in report.details["checks"] if check["name"] == "numpy"] != []
        True
    """
    started = time.monotonic()
    folder = os.path.abspath(path)
    if not os.path.isdir(folder):
        raise UsageError(f"{os.fspath(path)} is not a folder", file=os.fspath(path), next_step="check the path")
    names = ("subject", "name", "is_there", "text")
    found = (*_versions(), *_machine(), *_kernel(), *_folder(folder), *_environment())
    checks = [dict(zip(names, check, strict=True)) for check in found]
    return timed_report("doctor", started, path=folder, details=DoctorDetails(checks=checks))


def _versions() -> Iterator[Check]:
    yield "versions", "xrank", None, f"{__version__}, in {os.path.dirname(os.path.dirname(__file__))}"
    yield "versions", "python", None, f"{platform.python_version()}, {sys.executable}"
    for name in _PACKAGES:
        yield "versions", name, None, _version_of(name) or "not installed"
    for name, purpose in _OPTIONAL.items():
        found = _version_of(name)
        yield "versions", name, found is not None, found or f"not installed; needed for {purpose}"


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> Iterator[Check]:
    yield "machine", "system", None, f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "machine", "cores", None, f"{system.count_cores()}, of which a gather uses {default_workers()} by default"
    free = system.available_memory_nbytes()
    if free is not None:
        yield "machine", "memory", None, f"{size_text(free)} available"
    yield "machine", "open files", None, f"{system.descriptor_limit():,} at most (ulimit -n)"
    cards = 0
    with suppress(OSError):
        cards = len(os.listdir("/proc/driver/nvidia/gpus"))
    yield "machine", "gpu", cards > 0, f"{plural(cards, 'NVIDIA GPU')}; gathers of files need none"


def _kernel() -> Iterator[Check]:
    works, text = _reads_processes()
    yield "kernel", "process_vm_readv", works, text
    try:
        require_linux("a live gather")
        yield "kernel", "shared memory", True, "memfd_create, eventfd and pidfd_open"
    except UsageError as error:
        yield "kernel", "shared memory", False, f"{error.got}: no live gathers, no exports"


def _reads_processes() -> tuple[bool, str]:
    """Let a process read this one's memory, as ranks of a host do."""
    sign = LendingSign()
    command = [sys.executable, "-c", _READ_PARENT, str(os.getpid()), str(sign.address), sign.content.hex()]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_CHILD_SECONDS)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, one_line(f"could not be tried: {error}")
    finally:
        sign.end()
    if done.returncode == 0:
        return True, "ranks of a host read each other's memory"
    return False, "not permitted here (seccomp, ptrace scope); exports between ranks use sockets"


def _folder(folder: str) -> Iterator[Check]:
    free = system.free_nbytes(folder)
    yield "folder", "path", None, folder
    yield "folder", "free", None, "not known" if free is None else size_text(free)
    try:
        with tempfile.TemporaryDirectory(prefix=".xrank-doctor-", dir=folder) as own:
            yield from _file_system(own)
    except OSError as error:
        yield "folder", "writable", False, str(error.strerror)


def _file_system(own: str) -> Iterator[Check]:
    one, other = (os.open(os.path.join(own, name), system.NEW, 0o600) for name in ("one", "other"))
    try:
        yield "folder", "writable", True, "yes, in memory" if is_in_memory(one) else "yes"
        system.write_at(one, bytes(64 << 10), 0)
        is_shared = shares_blocks(one, other, 64 << 10)
        text = "blocks are shared with the source (FICLONERANGE)" if is_shared else "no; blocks are copied"
        yield "folder", "reflink", is_shared, text
        try:
            allocate(other, 1 << 20)
            yield "folder", "room reserved", True, "a full disk is found before bytes are written (fallocate)"
        except OSError as error:
            yield "folder", "room reserved", False, f"{errno.errorcode.get(error.errno or 0)}: a full disk shows later"
    finally:
        os.close(one)
        os.close(other)
    folders = [os.path.join(own, name) for name in ("old", "new")]
    for each in folders:
        os.mkdir(each)
    works = False
    with suppress(OSError):
        works = exchange(*folders)
    text = "an overwrite exchanges old and new atomically" if works else "an overwrite needs two renames"
    yield "folder", "exchange", works, text


def _environment() -> Iterator[Check]:
    variables = environ()
    has_obstore = importlib.util.find_spec("obstore") is not None
    text = (
        "URLs such as s3://bucket/run are opened" if has_obstore else "run pip install obstore botocore to open s3://"
    )
    yield "environment", "object stores", has_obstore, text
    models = len(list_cached_models(variables))
    yield "environment", "models cached", None, f"{models} in {hub_cache(variables)}"
    for package, name, error in find_plugins():
        text = f"of the package {package}" + (f": {error}" if error else "")
        yield "environment", f"reader {name}", error is None, text
    try:
        launch, _ = find_launch(variables, distributed=False)
        text = "none: one process"
        if launch is not None:
            text = f"{launch.launcher}: rank {launch.rank} of {launch.world_size}"
        yield "environment", "launcher", None, text
    except XrankError as error:
        yield "environment", "launcher", False, str(error)
    for name in SETTINGS:
        if value := setting(variables, name):
            yield "environment", name, None, value
