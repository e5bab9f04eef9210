"""A signed model in a bucket: the signature of a folder, also after an interruption, compared where it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

import xrank
from tests.commands.test_signing import make_keys
from tests.storage.servers import Bucket
from tests.storage.small_s3 import SmallS3
from tests.storage.written import leave_states
from xrank.errors import CorruptError, UsageError
from xrank.storage.staging import check_store_writer


def test_signs_into_a_bucket(tmp_path: Path, small_bucket: Bucket, small_server: SmallS3) -> None:
    states = leave_states(tmp_path / "states", rows=800)
    private, public = make_keys(tmp_path)
    out, options = f"{small_bucket.url}/one", {"max_shard_size": "5MB", "sign": private, "attest": True}
    with pytest.raises(ZeroDivisionError):  # after the first file
        xrank.gather_checkpoint(states, out, progress=lambda done, total: 1 // (total * 0.7 > done), **options)
    before = {upload.key: len(upload.parts) for upload in small_server.list_uploads(small_bucket.name)}
    assert before
    xrank.gather_checkpoint(states, out, **options)
    report = xrank.verify_model(out, public_key=public)
    assert report.ok and report.proof.signature == f"{out}/model.sig"
    assert xrank.verify_model(out).ok
    copy = tmp_path / "copy"
    copy.mkdir()
    objects = small_server.read_all(small_bucket.name)
    for key, data in objects.items():
        (copy / key.removeprefix("one/")).write_bytes(data)
    assert {path.name for path in copy.iterdir()} > {"model.sig", "model.attestation.json"}
    assert xrank.verify_model(copy, public_key=public).ok
    key = "one/model-00001-of-00003.safetensors"
    small_bucket.put(key, objects[key][:-1] + bytes([objects[key][-1] ^ 1]))
    report = xrank.verify_model(out, public_key=public)
    assert (report.exit_code, type(report.fault)) == (4, CorruptError)
    assert "a.weight" in str(report.fault)


def test_refuses_to_sign_for_several_ranks() -> None:
    with pytest.raises(UsageError, match="signed by a single process"):
        check_store_writer("s3://bucket/one", ranks=2)
    check_store_writer("s3://bucket/one", ranks=1)
