"""A small gather through a stage, and what may be seen where its output is to be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash

from xrank.storage import disk
from xrank.storage.staging import open_stage

EXTRA = ((disk, "renameat2"), (disk, "allocate"))
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NBYTES = 5000


def manifest_of(version: str) -> bytes:
    """Return a manifest that tells two versions apart, and what of the folder is the model's."""
    return json.dumps({"of": version, "files": [], "companions": [{"name": "code/model.py"}]}).encode()


def shard(version: str, name: str) -> bytes:
    return f"{version}/{name}/".encode().ljust(NBYTES, b"x")


def gather(out: Path, version: str = "new", *, overwrite: bool = False, resume: bool = True) -> list[str]:
    """Gather, and return the names of the shards that were gone on with."""
    resumed = []
    companion = out.parent / "companion.txt"
    with open_stage(out, plan_digest=f"plan of {version}", overwrite=overwrite, resume=resume) as stage:
        for name in SHARDS:
            content = shard(version, name)
            digest = xxhash.xxh3_128_hexdigest(content)
            if name in stage.finished:
                if Path(stage.path, name).read_bytes() == content:
                    assert stage.finished[name].digest == digest
                    resumed.append(name)
                    continue
                stage.discard(name)
            fd = stage.create_part(name, NBYTES)
            for start in range(0, NBYTES, 4096):
                os.pwrite(fd, content[start : start + 4096], start)
            stage.finish_part(name, fd, NBYTES, digest)
        stage.write_file("config.json", version.encode())
        stage.copy_file("code/model.py", str(companion))
        stage.write_file("xrank_manifest.json", manifest_of(version))
        stage.commit()
    return resumed


def expected(version: str) -> dict[str, bytes]:
    return {
        **{name: shard(version, name) for name in SHARDS},
        "config.json": version.encode(),
        "code/model.py": b"print()\n",
        "xrank_manifest.json": manifest_of(version),
    }


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def seen(out: Path) -> str:
    """Say what a reader finds: "absent", "old", "new"; anything else fails."""
    if not os.path.lexists(out):
        return "absent"
    found = content(out)
    for version in ("old", "new"):
        if found == expected(version):
            return version
    raise AssertionError(f"half a model is visible: {sorted(found)}")


def beside(out: Path) -> list[str]:
    """List what was left beside the output."""
    return sorted(p.name for p in out.parent.iterdir() if p.name not in (out.name, "companion.txt"))
