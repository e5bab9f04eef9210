"""The servers and the proxy that the tests of stores stand on do what S3 does."""

import os
import subprocess
import sys

import pytest
from botocore.exceptions import ClientError, HTTPClientError
from obstore.store import S3Store

from tests.stores.fault_proxy import FaultProxy, choose_at
from tests.stores.servers import Bucket, open_proxy

MIB = 1 << 20


def test_reads_ranges_and_lists(bucket: Bucket) -> None:
    store = S3Store(bucket.name)
    store.put("a/b c", b"0123456789", mode="create")
    assert bytes(store.get_range("a/b c", start=2, end=5)) == b"234"
    assert store.head("a/b c")["size"] == 10
    assert [row["path"] for page in store.list("a") for row in page] == ["a/b c"]
    with pytest.raises(Exception, match=r"already exists"):
        store.put("a/b c", b"other", mode="create")


def test_completes_an_upload_of_parts(bucket: Bucket) -> None:
    client = bucket.client()
    place = {"Bucket": bucket.name, "Key": "file"}
    upload = client.create_multipart_upload(**place, Metadata={"mark": "1"})["UploadId"]
    bodies = [os.urandom(5 * MIB), b"end"]
    parts = [
        {"PartNumber": n, "ETag": client.upload_part(**place, UploadId=upload, PartNumber=n, Body=body)["ETag"]}
        for n, body in enumerate(bodies, start=1)
    ]
    assert bucket.read_all() == {}
    assert bucket.list_uploads() == ["file"]
    listed = client.list_parts(**place, UploadId=upload)["Parts"]
    assert [(p["PartNumber"], p["ETag"], p["Size"]) for p in listed] == [
        (p["PartNumber"], p["ETag"], len(body)) for p, body in zip(parts, bodies, strict=True)
    ]
    client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*")
    assert bucket.read_all() == {"file": b"".join(bodies)}
    assert client.head_object(**place)["Metadata"] == {"mark": "1"}
    second = client.create_multipart_upload(**place)["UploadId"]
    part = client.upload_part(**place, UploadId=second, PartNumber=1, Body=b"x")["ETag"]
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.complete_multipart_upload(
            **place, UploadId=second, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part}]}, IfNoneMatch="*"
        )
    client.abort_multipart_upload(**place, UploadId=second)
    assert bucket.list_uploads() == []


def test_refuses_the_second_of_two_writers(bucket: Bucket) -> None:
    client = bucket.client()
    place = {"Bucket": bucket.name, "Key": "index"}
    etag = client.put_object(**place, Body=b"1", IfNoneMatch="*")["ETag"]
    client.put_object(**place, Body=b"2", IfMatch=etag)
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(**place, Body=b"3", IfMatch=etag)
    assert bucket.read_all() == {"index": b"2"}


def test_injects_faults(small_bucket: Bucket) -> None:
    small_bucket.client().put_object(Bucket=small_bucket.name, Key="k", Body=bytes(100_000))
    place = {"Bucket": small_bucket.name, "Key": "k"}
    with open_proxy(small_bucket.server) as proxy:
        client = small_bucket.behind(proxy).client()
        client.meta.events.register("needs-retry.s3", lambda **_: None)
        assert client.get_object(**place)["Body"].read() == bytes(100_000)
        for fault in ("reset", "short"):
            proxy.restart(choose_at({1: fault}))
            with pytest.raises(HTTPClientError):
                client.get_object(**place)["Body"].read()
        proxy.restart(choose_at({1: "wrong"}))
        body = client.get_object(**place)["Body"].read()
        assert (len(body), sum(byte != 0 for byte in body)) == (100_000, 1)
        proxy.restart(choose_at({1: "forbidden"}))
        with pytest.raises(ClientError, match="AccessDenied"):
            client.get_object(**place)
        proxy.restart(choose_at({1: "wrong"}))
        with pytest.raises(ClientError, match="XAmzContentSHA256Mismatch"):
            client.put_object(**place, Body=b"other", ContentMD5="eV8gINQFrpo2SZvXVzvQMw==")
    assert proxy.requests[-1].fault == "wrong"


CHILD = """
import sys, http.client
from urllib.parse import urlsplit
for n in range(9):
    connection = http.client.HTTPConnection(sys.argv[1])
    connection.request("PUT", f"/{sys.argv[2]}/{n}", b"x")
    connection.getresponse().read()
"""


@pytest.mark.parametrize(("when", "left"), [("before", 2), ("after", 3)])
def test_kills_the_client_at_a_request(small_bucket: Bucket, when: str, left: int) -> None:
    with open_proxy(small_bucket.server) as proxy:
        _run_killed(proxy, small_bucket, when)
    assert len(small_bucket.read_all()) == left


def _run_killed(proxy: FaultProxy, bucket: Bucket, when: str) -> None:
    holder: list[subprocess.Popen[bytes]] = []
    proxy.kill(lambda: holder[0].pid, 3, "before" if when == "before" else "after")
    place = proxy.url.removeprefix("http://")
    with subprocess.Popen([sys.executable, "-c", CHILD, place, bucket.name]) as child:
        holder.append(child)
        assert child.wait() == -9
