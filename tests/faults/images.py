"""Power losses of real file systems: an image is copied as it is when a job is killed, and mounted.

The image lacks the writes that the kernel still kept; a mount replays the file system's own log. Only root may mount.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.faults.findings import Findings
from tests.faults.jobs import EXTRA, make_jobs
from tests.storage.kill_points import kill_points

__all__ = ["lose_images"]

_KINDS = {
    "ext4": ("64M", ["mkfs.ext4", "-q", "-F"]),
    "xfs": ("320M", ["mkfs.xfs", "-q"]),
    "btrfs": ("128M", ["mkfs.btrfs", "-q", "--mixed"]),
}
"""File system -> size of its image, and the command that makes it."""


def lose_images(folder: Path, seed: int, count: int) -> Findings:
    """Lose power at about so many points, over all file systems that this machine can make and mount."""
    findings = Findings()
    for kind, (size, make) in _KINDS.items():
        if os.geteuid() != 0 or shutil.which(make[0]) is None:
            findings.count(f"{kind}: not to be had here")
            continue
        place = folder / kind
        place.mkdir()
        disk = _Disk(place, kind)
        with disk.golden.open("wb") as image:
            image.truncate(int(size[:-1]) << 20)
        _run(*make, disk.golden)
        if not disk.mount(disk.golden):
            findings.count(f"{kind}: may not be mounted here")
            continue
        jobs = list(make_jobs(disk.folder))
        disk.unmount()
        every = max(1, len(_KINDS) * len(jobs) * 60 // count)
        for number, job in enumerate(jobs):
            disk.begin()
            for point in kill_points(job.work, extra=EXTRA, every=every, first=1 + (seed + 7 * number) % every):
                findings.count("states")
                findings.count(f"of {kind}")
                disk.lose_power()
                where = f"{kind}: {job.name}, power is lost after call {point}"
                job.judge(findings, where, after=" after a power loss")
                disk.unmount()
                disk.begin()
            job.work()  # to its end, and then the power is lost
            disk.lose_power()
            if job.seen() != "new":
                findings.report(f"{job.name}: done, and lost by a power loss", kind)
            disk.unmount()
    return findings


class _Disk:
    """Images of one file system, of which one at a time is mounted at the same folder."""

    def __init__(self, place: Path, kind: str) -> None:
        self.golden, self._working, self._lost = place / "golden.img", place / "working.img", place / "lost.img"
        self.folder, self._kind = place / "mounted", kind
        self.folder.mkdir()

    def mount(self, image: Path) -> bool:
        """Mount an image; return whether the system lets it."""
        return (
            subprocess.run(["mount", "-o", "loop", image, self.folder], capture_output=True, check=False).returncode
            == 0
        )

    def unmount(self) -> None:
        """Unmount the mounted image."""
        _run("umount", self.folder)
        if self._kind == "btrfs":  # the next image has the same id
            subprocess.run(["btrfs", "device", "scan", "--forget"], capture_output=True, check=False)

    def begin(self) -> None:
        """Mount a fresh copy of the image in which nothing was done."""
        _run("cp", "--sparse=always", self.golden, self._working)
        assert self.mount(self._working)

    def lose_power(self) -> None:
        """Mount the image as it is now, without the writes that the file system has not made yet."""
        _run("cp", "--sparse=always", self._working, self._lost)
        self.unmount()
        assert self.mount(self._lost), "the file system cannot be mounted any more"


def _run(*words: object) -> None:
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
