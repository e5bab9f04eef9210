"""Files are opened without waiting, and read exactly."""

import os
import pickle
import socket

import pytest

from xrank.errors import CorruptError, IncompleteError, UsageError, XrankError
from xrank.storage.regular_file import Origin, open_regular, quote


def test_exactly_the_bytes_asked_for(tmp_path):
    (tmp_path / "f").write_bytes(b"0123456789")
    with open_regular(str(tmp_path / "f")) as file:
        assert file.nbytes == 10
        assert file.read(2, 3) == b"234"
        assert file.read(10, 0) == b""
        with pytest.raises(CorruptError, match="ends early"):
            file.read(8, 3)
        with pytest.raises(CorruptError, match="ends early"):
            file.read(0, 1 << 62)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(file.descriptor)


def test_short_reads_are_continued(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"0123456789")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, nbytes, offset: pread(descriptor, min(nbytes, 3), offset))
    with open_regular(str(tmp_path / "f")) as file:
        assert file.read(1, 8) == b"12345678"


def test_a_file_that_shrinks_or_fails_while_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "f"
    path.write_bytes(bytes(10))
    with open_regular(str(path), 4) as file:
        os.truncate(path, 5)
        with pytest.raises(CorruptError, match=r"rank 4.*shrank"):
            file.read(0, 10)

        def fail(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "pread", fail)
        with pytest.raises(XrankError, match=r"Input/output error") as caught:
            file.read(0, 5)
        assert caught.value.exit_code == 1


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(tmp_path / "socket"))
    with bound:
        for path in (
            tmp_path / "fifo",
            tmp_path,
            "/dev/zero",
            "/dev/null",
            tmp_path / "loop",
            tmp_path / "socket",
            "\0",
        ):
            with pytest.raises(CorruptError) as caught, open_regular(str(path), 1):
                pass
            assert caught.value.file == str(path)
    with pytest.raises(IncompleteError), open_regular(str(tmp_path / "none")):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_one_may_not_read(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    (tmp_path / "f").chmod(0)
    with pytest.raises(UsageError, match="Permission"), open_regular(str(tmp_path / "f")):
        pass


def test_errors_name_file_and_rank_and_survive_pickling():
    for error in (
        Origin("p", 3).corrupt("is bad", got="1", want="2"),
        Origin("p", 3).unsafe("is bad"),
        Origin("p", 3).usage("is bad", next_step="do"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == "rank 3: p is bad"
        assert (again.file, again.rank) == ("p", 3)
        assert again.next_step
    assert str(Origin("p").corrupt("is bad")) == "p is bad"


def test_what_a_file_says_is_printed_short_and_plain():
    assert quote("a\x1b[31m\u202e\ud800") == r"'a\x1b[31m\u202e\ud800'"
    assert len(quote("x" * 10_000_000)) < 210
    assert len(quote("\U0001f680" * 1000)) < 210
