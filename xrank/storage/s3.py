"""S3 buckets through botocore, which signs, finds credentials and parses answers; xrank bounds and repeats.

Its answers are received here, so that a page of a list or an error takes bounded memory. No redirect is followed.
Conditions (If-None-Match, If-Match) hold for PutObject and CompleteMultipartUpload (Amazon S3 API Reference).
"""

from __future__ import annotations

import base64
import hashlib
import io
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import responses
from typing import Any
from urllib.parse import urlsplit

from isal import isal_zlib

from xrank.environment import environ
from xrank.errors import UsageError, require
from xrank.storage.client import (
    ABSENT,
    FaultError,
    FaultKind,
    Folder,
    ObjectStatus,
    StoreSettings,
    check_https,
    hide_debug_logs,
    is_set,
    make_credentials_error,
    make_fault,
    or_none,
    receive,
)
from xrank.storage.uploads import Body, KnownParts, UploadedObject, UploadedPart, WritableBackend

MARK = "xrank-stage"
"""Name of the metadata that says which stage has written an object."""
_PIECE_NBYTES = 256 << 10


def open_s3(root: str, settings: StoreSettings) -> WritableBackend:
    """Return the backend of a bucket; UsageError without botocore or credentials, or if plain http is not allowed."""
    require("botocore", f"reading {root}")
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    hide_debug_logs("botocore")  # which show keys' ids and tokens
    variables = environ()
    endpoint = find_endpoint(variables)
    allowed = settings.allow_http or is_set(variables.get("AWS_ALLOW_HTTP"))
    check_https(endpoint or "", root, allow_http=allowed)
    is_public = is_set(variables.get("AWS_SKIP_SIGNATURE"))
    in_host = is_set(variables.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST"))
    seconds = settings.answer_seconds
    config = Config(
        signature_version=UNSIGNED if is_public else "s3v4",
        retries={"total_max_attempts": 1},  # `Store` repeats
        connect_timeout=seconds,
        read_timeout=seconds,
        max_pool_connections=settings.connections,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "virtual" if in_host else "auto" if endpoint is None else "path"},
    )
    try:
        session = botocore.session.get_session()
        region = variables.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
        has_key = is_public or session.get_credentials() is not None
        client = session.create_client("s3", region_name=region, endpoint_url=endpoint, config=config)
    except (BotoCoreError, ValueError) as error:  # its text may show parts of the environment
        next_step = "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, or none of them"
        raise make_credentials_error(root, next_step, type(error).__name__) from None
    if not has_key:
        next_step = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_SKIP_SIGNATURE=true for a "
        raise make_credentials_error(root, next_step + "public bucket", "no credentials")
    send = _make_sender(seconds, settings.connections, variables)
    client.meta.events.register("before-send.s3", send)
    return _S3Backend(root.partition("://")[2], client, endpoint)


def find_endpoint(variables: Mapping[str, str]) -> str | None:
    """Return the address that the environment sends requests to S3 to; None: Amazon's."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((text for name in names if (text := variables.get(name))), None)


def _make_sender(seconds: float, connections: int, variables: Mapping[str, str]) -> Callable[..., Any]:
    """Return a function that sends a request and receives no more of its answer than it may have."""
    from botocore.awsrequest import AWSResponse
    from botocore.httpsession import URLLib3Session
    from botocore.utils import get_environ_proxies

    trusted = variables.get("AWS_CA_BUNDLE") or ssl.get_default_verify_paths().cafile or True
    sessions: dict[str, URLLib3Session] = {}

    def send(request: Any, **_: object) -> Any:
        host = urlsplit(request.url).netloc
        if host not in sessions:
            options = {"timeout": (seconds, seconds), "max_pool_connections": connections}
            sessions[host] = URLLib3Session(verify=trusted, proxies=get_environ_proxies(request.url), **options)
        is_object, request.stream_output = request.stream_output, True
        answer = sessions[host].send(request)
        if is_object and answer.status_code < 300:
            return answer
        return AWSResponse(answer.url, answer.status_code, answer.headers, _Received(receive(answer.raw.read)))

    return send


class _Received(io.BytesIO):
    def stream(self, **_: object) -> Iterator[bytes]:
        yield self.read()


class _S3Backend:
    """One bucket; see `xrank.storage.uploads.WritableBackend`. Requests go to the `endpoint`; None: to Amazon."""

    fills_memory = True
    lists_only_own = False

    def __init__(self, bucket: str, client: Any, endpoint: str | None) -> None:
        self._bucket, self._client, self._endpoint = bucket, client, endpoint

    def check_writable(self, url: str) -> None:
        """Refuse Google's S3 interface, which ignores the conditions of completions.

        Source: Google Cloud Storage documentation, "XML API multipart uploads", limitations.
        """
        host = urlsplit(self._endpoint or "").hostname or ""
        if host == "storage.googleapis.com" or host.endswith(".storage.googleapis.com"):
            what = f"{url}: Google's store replaces any existing object with an upload, even another gather's"
            raise UsageError(what, file=url, next_step="write to gs://, with the credentials for reading it")

    def head(self, key: str) -> ObjectStatus:
        answer = self._ask("head_object", Key=key)
        return _status(answer, answer["ContentLength"])

    def read(
        self, key: str, start: int, end: int, status: ObjectStatus | None, take: Callable[[memoryview | bytes], None]
    ) -> ObjectStatus:
        condition = {"IfMatch": status.version} if status is not None and status.is_etag and status.version else {}
        with _faults():
            wanted = {"Key": key, "Range": f"bytes={start}-{end - 1}", **condition}
            answer = self._client.get_object(Bucket=self._bucket, **wanted)
            body = answer["Body"]
            try:
                while piece := body.read(_PIECE_NBYTES):
                    take(piece)
            except BaseException:
                body.close()  # the connection may still carry the rest of an answer
                raise
            return _status(answer, answer["ContentRange"].rpartition("/")[2])

    def list_folder(self, key: str) -> Folder:
        objects: dict[str, ObjectStatus] = {}
        folders: set[str] = set()
        for page in self._pages("list_objects_v2", Prefix=f"{key}/" if key else "", Delimiter="/"):
            for one in page.get("Contents", ()):
                name = one["Key"].rpartition("/")[2]
                if name:  # an object of the folder's own name, which some tools make
                    objects[name] = ObjectStatus(one["Size"], one["ETag"])
            folders |= {one["Prefix"].rstrip("/").rpartition("/")[2] for one in page.get("CommonPrefixes", ())}
        return Folder(objects, frozenset(folders))

    def put(self, key: str, data: bytes | memoryview, condition: str | None, mark: str = "") -> str:
        crc32 = isal_zlib.crc32(data)
        options = {"ChecksumCRC32": _crc32_text(crc32), **_condition(condition)}
        options |= {"Metadata": {MARK: mark}} if mark else {}
        answer = self._ask("put_object", Key=key, Body=bytes(data), **options)
        _check_confirmed(answer, hashlib.md5(data, usedforsecurity=False).hexdigest(), crc32)
        return str(answer["ETag"])

    def delete(self, key: str) -> None:
        self._ask("delete_object", Key=key)

    def look(self, key: str) -> UploadedObject | None:
        answer = or_none(lambda: self._ask("head_object", Key=key))
        return answer and UploadedObject(answer["ContentLength"], answer["ETag"], answer["Metadata"].get(MARK))

    def create(self, key: str, mark: str) -> str:
        answer = self._ask("create_multipart_upload", Key=key, Metadata={MARK: mark}, ChecksumAlgorithm="CRC32")
        return str(answer["UploadId"])

    def put_part(self, key: str, upload_id: str, part: UploadedPart, data: Body) -> str:
        """Upload a part; return its etag when the store has confirmed its bytes by a checksum."""
        place = {"Key": key, "UploadId": upload_id, "PartNumber": part.number}
        answer = self._ask("upload_part", Body=data, ChecksumCRC32=_crc32_text(part.crc32), **place)
        _check_confirmed(answer, part.etag.strip('"'), part.crc32)
        return str(answer["ETag"])

    def list_parts(self, key: str, upload_id: str) -> KnownParts | None:
        found: KnownParts = {}

        def ask() -> KnownParts:
            for page in self._pages("list_parts", Key=key, UploadId=upload_id):
                for one in page.get("Parts", ()):
                    text = one.get("ChecksumCRC32")
                    crc32 = None if text is None else int.from_bytes(base64.b64decode(text), "big")
                    found[one["PartNumber"]] = one["Size"], one["ETag"], crc32
            return found

        return or_none(ask)

    def complete(
        self, key: str, upload_id: str, parts: Sequence[UploadedPart], mark: str, condition: str | None
    ) -> None:
        crcs = [(part, _crc32_text(part.crc32)) for part in parts]
        rows = [{"PartNumber": part.number, "ETag": part.etag, "ChecksumCRC32": crc32} for part, crc32 in crcs]
        place = {"Key": key, "UploadId": upload_id, **_condition(condition)}
        answer = self._ask("complete_multipart_upload", MultipartUpload={"Parts": rows}, **place)
        if not answer.get("ETag"):
            raise FaultError(FaultKind.PASSING, "an answer without ETag")

    def abort(self, key: str, upload_id: str) -> None:
        or_none(lambda: self._ask("abort_multipart_upload", Key=key, UploadId=upload_id))

    def list_uploads(self, prefix: str) -> list[tuple[str, str]]:
        pages = self._pages("list_multipart_uploads", Prefix=prefix)
        return [(one["Key"], one["UploadId"]) for page in pages for one in page.get("Uploads", ())]

    def _ask(self, operation: str, **arguments: Any) -> Any:
        with _faults():
            return getattr(self._client, operation)(Bucket=self._bucket, **arguments)

    def _pages(self, operation: str, **arguments: Any) -> Iterator[Any]:
        with _faults():
            yield from self._client.get_paginator(operation).paginate(Bucket=self._bucket, **arguments)


def _condition(condition: str | None) -> dict[str, Any]:
    if condition is None:
        return {}
    return {"IfNoneMatch": "*"} if condition == ABSENT else {"IfMatch": condition}


def _status(answer: Any, nbytes: int | str) -> ObjectStatus:
    etag = answer.get("ETag", "")
    is_strong = bool(etag) and not etag.startswith("W/")
    return ObjectStatus(int(nbytes), etag or str(answer.get("LastModified", "")), is_etag=is_strong)


def _crc32_text(crc32: int) -> str:
    return base64.b64encode(crc32.to_bytes(4, "big")).decode()


def _check_confirmed(answer: Any, md5: str, crc32: int) -> None:
    """Raise unless the answer contains the CRC-32 of the data, or their MD5 as etag."""
    confirmed = answer.get("ChecksumCRC32")
    if confirmed is not None:
        if confirmed != _crc32_text(crc32):
            raise FaultError(FaultKind.PASSING, "the store received other bytes")
    elif answer["ETag"].strip('"') != md5:
        # Before 2022 S3 knew no CRC-32, and many stores do not: there the etag is the part's MD5.
        raise FaultError(FaultKind.PASSING, "the store confirms neither the CRC-32 nor the MD5 of the bytes")


@contextmanager
def _faults() -> Iterator[None]:
    """Turn botocore's exceptions into faults. Their texts contain URLs, so only known parts of them are kept."""
    import urllib3
    from botocore import exceptions as boto

    try:
        yield
    except boto.ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
        code = error.response.get("Error", {}).get("Code", "")
        fault = make_fault(status, responses.get(status, ""), code if code.isidentifier() and len(code) <= 60 else "")
        if status in (301, 307):
            fault = FaultError(fault.kind, f"{fault.text}: the bucket is in another region; set AWS_REGION")
        if status == 416:
            fault = FaultError(FaultKind.CHANGED, f"{fault.text}: it has become shorter")
        raise fault from None
    except (boto.ReadTimeoutError, boto.ConnectTimeoutError):
        raise FaultError(FaultKind.PASSING, "no answer in time") from None
    except boto.SSLError:
        raise FaultError(FaultKind.PASSING, "the connection's certificate is not valid") from None
    except (boto.EndpointConnectionError, boto.ProxyConnectionError):
        raise FaultError(FaultKind.PASSING, "no connection") from None
    except (boto.NoCredentialsError, boto.CredentialRetrievalError, boto.TokenRetrievalError) as error:
        raise FaultError(FaultKind.DENIED, type(error).__name__) from None
    except (boto.ParamValidationError, boto.InvalidEndpointConfigurationError) as error:
        raise FaultError(FaultKind.REFUSED, type(error).__name__) from None
    except (boto.BotoCoreError, urllib3.exceptions.HTTPError, OSError):
        raise FaultError(FaultKind.PASSING, "the connection broke") from None
    except (KeyError, ValueError):
        raise FaultError(FaultKind.PASSING, "an incomplete response") from None
