"""Stores whose answers come byte by byte, have no end, or claim 2^40 bytes: commands end in time and little memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.sampled import sampled_rows
from tests.storage.closing_server import ClosingServer

pytest.importorskip("obstore", reason="pip install obstore")

SECONDS = 2
HUGE = 1 << 40
_TABLE = json.dumps({"w": {"dtype": "U8", "shape": [64 << 20], "data_offsets": [0, 64 << 20]}}).encode()
HEAD = len(_TABLE).to_bytes(8, "little") + _TABLE
"""Bytes of a sound file, whose beginning the store sends correctly."""
PROGRAM = """
import sys
from xrank.cli.main import main
from xrank.system import peak_rss_nbytes
try:
    main()
except SystemExit as left:
    print("ended", left.code, peak_rss_nbytes())
"""


class _Endless(BaseHTTPRequestHandler):
    """Answers in the way that the server's `kind` names."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_HEAD(self) -> None:
        """Claim a huge object."""
        self._begin(200, {"Content-Length": str(self._size())})

    def do_GET(self) -> None:
        """Answer a list, or a range of an object, by the server's kind."""
        is_list = "list-type" in self.path
        kind = self.server.kind  # type: ignore[attr-defined]
        with_body = {
            "headers": self._send_headers,
            "drops": self._send_drops,
            "a claim": self._send_claim,
            "no end": self._send_for_ever,
        }
        if kind == "pages":
            self._send_page(is_last=False)
        elif kind == "late" and not is_list and self._range()[1] - self._range()[0] < 1 << 20:
            start, end = self._range()
            self._begin(206, {"Content-Length": str(end + 1 - start)})
            self.wfile.write((HEAD + bytes(end + 1))[start : end + 1])
        elif kind == "lists" or not is_list:
            with_body[self.server.way]()  # type: ignore[attr-defined]
        else:
            self._send_page(is_last=True)

    def _size(self) -> int:
        return len(HEAD) + (64 << 20) if self.server.kind == "late" else HUGE  # type: ignore[attr-defined]

    def _range(self) -> tuple[int, int]:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (0, 99) if found is None else (int(found[1]), int(found[2]))

    def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        start, end = self._range()
        for name, text in {"ETag": '"e"', "Last-Modified": "Mon, 02 Nov 2026 00:00:00 GMT", **headers}.items():
            self.send_header(name, text)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end}/{self._size()}")
        self.end_headers()

    def _send_headers(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while True:
            self.wfile.write(b"x")
            time.sleep(0.02)

    def _send_drops(self) -> None:
        """Send what was asked for, at 50 bytes a second."""
        start, end = self._range()
        self._begin(206, {"Content-Length": str(end + 1 - start)})
        for _ in range(start, end + 1):
            self.wfile.write(b"x")
            time.sleep(0.02)

    def _send_claim(self) -> None:
        self._begin(206, {"Content-Length": str(HUGE)})
        while True:
            self.wfile.write(bytes(1 << 20))

    def _send_for_ever(self) -> None:
        self._begin(206, {"Transfer-Encoding": "chunked"})
        piece = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        while True:
            self.wfile.write(piece)

    def _send_page(self, *, is_last: bool) -> None:
        token = "" if is_last else "<NextContinuationToken>more</NextContinuationToken>"
        text = (
            f"<ListBucketResult><IsTruncated>{str(not is_last).lower()}</IsTruncated>{token}<Contents>"
            f"<Key>model/model.safetensors</Key><Size>{self._size()}</Size><ETag>&quot;e&quot;</ETag>"
            "<LastModified>2026-11-02T00:00:00.000Z</LastModified></Contents></ListBucketResult>"
        ).encode()
        self._begin(200, {"Content-Length": str(len(text)), "Content-Type": "application/xml"})
        self.wfile.write(text)


@contextmanager
def endless_server(kind: str, way: str) -> Iterator[str]:
    server = ClosingServer(("127.0.0.1", 0), _Endless)
    server.kind, server.way = kind, way  # type: ignore[attr-defined]
    try:
        yield server.url
    finally:
        server.close()


CLIENTS = {
    "own requests": ({"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}, "s3://bucket/model"),
    "obstore": ({"AWS_SKIP_SIGNATURE": "true"}, "s3://bucket/model"),
    "a web server": ({}, "{url}/model/model.safetensors"),
}


WAYS = {
    "objects": ("headers", "drops", "no end", "a claim"),
    "late": ("drops", "no end"),
    "lists": ("headers", "drops", "no end", "a claim"),
    "pages": ("pages",),
}
CASES = [
    (client, kind, way)
    for kind, ways in WAYS.items()
    for way in ways
    for client in CLIENTS
    # Web servers give no lists; obstore asks for the memory of a list at once, and ends the process.
    if (client != "a web server" or kind in ("objects", "late")) and (client, way) != ("obstore", "a claim")
]


@pytest.mark.parametrize(("client", "kind", "way"), sampled_rows(CASES, 4))
def test_an_answer_without_end_ends(tmp_path: Path, client: str, kind: str, way: str) -> None:
    variables, place = CLIENTS[client]
    with endless_server(kind, way) as url:
        environ = {
            **{name: text for name, text in os.environ.items() if not name.startswith(("AWS_", "XRANK_"))},
            **variables,
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
            "XRANK_STORE_TIMEOUT": str(SECONDS),
        }
        words = ["gather", place.format(url=url), "--out", str(tmp_path / "out"), "--allow-http"]
        started = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words], env=environ, capture_output=True, text=True, timeout=60
        )
    assert time.monotonic() - started < 10 * SECONDS
    assert "xrank: " in ended.stderr and "Traceback" not in ended.stderr, ended
    ((code, rss_nbytes),) = re.findall(r"^ended (\d+) (\d+)$", ended.stdout, re.MULTILINE)
    assert code in "1234" and not [*tmp_path.iterdir()], ended
    if (client, kind, way) != (
        "obstore",
        "lists",
        "no end",
    ):  # obstore holds what comes of a list until the time is over
        assert int(rss_nbytes) < 400 << 20
    print(code, rss_nbytes, f"{time.monotonic() - started:.1f} s", ended.stderr.splitlines()[:2])
