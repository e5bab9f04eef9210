"""A gather from a bucket into a bucket, with nothing on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.servers import SECRET, Bucket
from tests.storage.written import FILE_NBYTES, leave_states, read_folder, run
from xrank.commands.gather import gather_checkpoint


def test_command_leaves_no_file(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    states = leave_states(tmp_path / "states", rows=800)
    gather_checkpoint(states, tmp_path / "model", max_shard_size=FILE_NBYTES)
    client = bucket.client()
    for name, data in read_folder(states).items():
        client.put_object(Bucket=bucket.name, Key=f"run/states/{name}", Body=data)
    room = tmp_path / "room"
    room.mkdir()
    monkeypatch.chdir(room)
    monkeypatch.setenv("TMPDIR", str(room))
    out = f"{bucket.url}/run/model"
    code, text = run(bucket, "gather", f"{bucket.url}/run/states", "--out", out, "--max-shard-size", FILE_NBYTES)
    assert code == 0, text
    assert list(room.iterdir()) == []
    made = {key.removeprefix("run/model/"): data for key, data in bucket.read_all("run/model/").items()}
    expected = read_folder(tmp_path / "model")
    assert made.keys() == expected.keys()
    # The manifest's plan has the identity of the source's files in it, which differs.
    assert [name for name in made if made[name] != expected[name]] == ["xrank_manifest.json"]
    assert bucket.list_uploads() == []
    code, text = run(bucket, "verify", out)
    assert code == 0, text
    assert SECRET not in text
