"""Failure records: bounded text that names who failed, and why."""

import os
import socket

import pytest

from xrank.errors import RankFailedError, UsageError
from xrank.ranks.failure import MAX_NBYTES, FailureRecord


def test_a_record_comes_back_and_makes_the_error_of_all_others():
    record = FailureRecord.from_error(UsageError("no", got="a", want="b"), 3, "call 7")
    want = FailureRecord(3, socket.gethostname(), os.getpid(), "UsageError: no; got a; want b", "call 7", id=record.id)
    assert record == want and record.id
    assert FailureRecord.from_text(record.to_text()) == record
    error = record.to_error()
    assert isinstance(error, RankFailedError) and error.rank == 3 and error.host == record.host
    assert error.cause == record.cause and "call 7" in str(error.got) and str(os.getpid()) in str(error.got)


@pytest.mark.parametrize("letter", ["x", "\0", "ü", "\U0001f600", '"'])
def test_a_long_cause_is_cut(letter):
    record = FailureRecord.from_error(ValueError(letter * 10_000), 0, letter * 10_000)
    content = record.to_text()
    assert len(content) <= MAX_NBYTES
    assert FailureRecord.from_text(content).cause.startswith(f"ValueError: {letter}")
