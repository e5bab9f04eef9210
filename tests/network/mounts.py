"""Network file systems for tests: one directory, mounted twice, as two hosts would have it.

Each file system lives in namespaces of its own, of mounts, network and processes: its ports and addresses are in
nobody's way, and its mounts are seen through /proc only. One process holds the namespaces, and reads a pipe from here,
so it ends when this process does, whatever ends it; the kernel then ends all processes, and removes all mounts,
addresses and links in them. Nothing is installed, and nothing is written outside the given folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FILE_SYSTEMS", "FileSystem", "MissingError", "TwoMounts", "mount_twice"]

_START_SECONDS = 120
_UNSHARE = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


class MissingError(Exception):
    """What a file system needs and this machine does not have."""


@dataclass(frozen=True)
class FileSystem:
    """How one directory is mounted twice."""

    programs: Mapping[str, str]
    """The programs that it needs, and Debian's package of each."""
    probe: str
    """Shell commands that fail, and say why, where this machine's kernel or disk is not up to it."""
    start: str
    """Shell commands that serve ``served`` and mount it at ``mnt/0`` and ``mnt/1``."""


@dataclass(frozen=True)
class TwoMounts:
    """One directory as two hosts see it, each through a cache of its own."""

    file_system: str
    paths: tuple[Path, Path]
    served: Path
    """What lies there in truth: the directory on its server."""


@contextmanager
def mount_twice(name: str, folder: Path) -> Iterator[TwoMounts]:
    """Yield the two mounts of a new directory; everything that belongs to them lies in the given empty folder.

    Raises:
        MissingError: this machine cannot have this file system.
    """
    file_system = FILE_SYSTEMS[name]
    _demand_needs(file_system)
    with _namespaces() as holder:
        status, said = _run_inside(holder, folder, _NETWORK + file_system.probe)
        if status != 0:
            raise MissingError(f"this machine is not up to it: {'; '.join(said.splitlines()[-2:])}")
        status, said = _run_inside(holder, folder, file_system.start)
        if status != 0:
            raise RuntimeError(f"{name} cannot be mounted: {said}")
        seen = Path(f"/proc/{holder}/root{folder}/mnt")
        yield TwoMounts(name, (seen / "0", seen / "1"), folder / "served")


def _demand_needs(file_system: FileSystem) -> None:
    if sys.platform != "linux":
        raise MissingError(f"needs Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise MissingError("needs root, which mounts and makes namespaces")
    needed = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", **file_system.programs}
    missing = [
        f"{program} (Debian: {needed[program]})" for program in needed if not shutil.which(program, path=_path())
    ]
    if missing:
        raise MissingError(f"needs {', '.join(missing)}")
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise MissingError(f"needs FUSE: {error}") from None


@contextmanager
def _namespaces() -> Iterator[int]:
    """Yield the process that lives in the new namespaces of mounts and network, and whose children's processes are new.

    It is known by its number here; in there the first process is its child, and ends with it, and all with that one.
    """
    holder = subprocess.Popen(
        [*_UNSHARE, "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environ(),
        # A Ctrl-C is for the tests; this goes when they have finished.
        start_new_session=True,
    )
    with holder:
        try:
            if not holder.stdout.readline():
                raise MissingError(f"needs namespaces: {holder.stderr.read().decode().strip()}")
            yield holder.pid
        finally:
            holder.stdin.close()
            try:
                # The first process in there ends when no other is left.
                holder.wait(10)
            except subprocess.TimeoutExpired:
                # What was forked here and lives on holds the pipe open.
                holder.kill()


def _run_inside(holder: int, folder: Path, script: str) -> tuple[int, str]:
    """Run a script in the folder, inside the namespaces; return its status and what it said."""
    log = folder / "log"
    # Daemons keep the output that they were started with: of a pipe, nobody would ever see the end.
    with open(log, "wb") as output:
        done = subprocess.run(
            [
                *("nsenter", f"--target={holder}", "--mount", "--net", f"--pid=/proc/{holder}/ns/pid_for_children"),
                *("sh", "-euxc", 'cd "$1"\n' + script, "sh", str(folder)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environ(),
            timeout=_START_SECONDS,
        )
    return done.returncode, log.read_text(errors="replace").strip()


def _environ() -> dict[str, str]:
    return {**os.environ, "PATH": _path()}


def _path() -> str:
    # A root that came by su may not have the places of root's programs.
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


_NETWORK = """
ip link set lo up
mount -t tmpfs none /run
mkdir -p served mnt/0 mnt/1
"""


def _sshfs(options: str) -> FileSystem:
    # sshd goes into the background before it listens, so a connection may need a second attempt, a second later.
    return FileSystem(
        programs={
            "sshfs": "sshfs",
            "sshd": "openssh-server",
            "ssh": "openssh-client",
            "ssh-keygen": "openssh-client",
        },
        probe="""
! grep -q '^root:!' /etc/shadow || { echo 'root is locked, and sshd lets nobody in'; exit 1; }
""",
        start=f"""
mkdir /run/sshd
ssh-keygen -q -t ed25519 -N '' -f key
cat >sshd_config <<end
ListenAddress 127.0.0.1:22
HostKey $PWD/key
AuthorizedKeysFile $PWD/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
Subsystem sftp internal-sftp
end
cat >ssh_config <<end
IdentityFile $PWD/key
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
ConnectionAttempts 60
end
"$(command -v sshd)" -f sshd_config -E sshd.log
for i in 0 1; do sshfs -F "$PWD/ssh_config" {options} "127.0.0.1:$PWD/served" mnt/$i; done
""",
    )


# Gluster wants to know its servers by other names than 127.0.0.1, so here they are two hosts to the network as well.
_GLUSTERFS = FileSystem(
    programs={
        "glusterd": "glusterfs-server",
        "gluster": "glusterfs-cli",
        "mount.glusterfs": "glusterfs-client",
        "setfattr": "attr",
    },
    probe="""
setfattr -n trusted.probe -v 1 served
setfattr -x trusted.probe served
ip netns add other
ip link add here type veth peer name there netns other
""",
    start="""
mkdir state log.d /run/gluster
mount --bind state /var/lib/glusterd
mount --bind log.d /var/log/glusterfs
ip address add 10.0.0.1/24 dev here
ip link set here up
ip -netns other address add 10.0.0.2/24 dev there
ip -netns other link set there up
glusterd
gluster --mode=script volume create shared "10.0.0.1:$PWD/served" force
gluster --mode=script volume start shared
mount -t glusterfs 10.0.0.1:/shared mnt/0
nsenter --net=/run/netns/other mount -t glusterfs 10.0.0.1:/shared mnt/1
""",
)

FILE_SYSTEMS = {
    "sshfs": _sshfs(""),
    # Remembers what lies where, and what does not, for as long as NFS clients do; and keeps what it has read.
    "sshfs-cached": _sshfs("-o negative_timeout=10,attr_timeout=10,entry_timeout=10,kernel_cache"),
    "glusterfs": _GLUSTERFS,
}
