"""A JSON file is judged as Python's json module judges it, piece by piece."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import xrank
from xrank.errors import CorruptError
from xrank.storage import entries
from xrank.storage.entries import check_json_object, parse_json

VALUE = {
    "model": {"vocab": {'a"b\\': 0, "\u0120x": 1, "": 2}, "merges": [["a", "b"], []], "empty": {}},
    "numbers": [0, -1, 1.5e-7, 10**20, float("inf"), float("-inf"), True, False, None],
    "text": "x" * 300,
}


def is_accepted(path: Path) -> bool:
    try:
        check_json_object(str(path))
    except CorruptError as error:
        assert error.file == str(path) and error.next_step
        return False
    return True


def is_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content.decode()), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("piece_nbytes", [1, 7, 1 << 20])
def test_whole_object_is_accepted_and_every_cut_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, piece_nbytes: int
) -> None:
    monkeypatch.setattr(entries, "_PIECE_NBYTES", piece_nbytes)
    content = json.dumps(VALUE, indent=indent, ensure_ascii=False).encode()
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content + b"\n")
    assert is_accepted(path)
    for end in range(0, len(content), 1 if piece_nbytes > 7 else 41):
        path.write_bytes(content[:end])
        assert not is_accepted(path), end


def test_changed_bytes_are_judged_as_by_python(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    content = json.dumps(VALUE, ensure_ascii=False).encode()
    draw = random.Random(16)
    judged = set()
    for _ in range(3000):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 2))):
            changed[draw.randrange(len(changed))] = draw.choice(b'{}[],:"\\ \n0-.eEtn\x00\xff')
        path.write_bytes(changed)
        judged.add(is_accepted(path))
        assert is_accepted(path) == is_object(bytes(changed)), bytes(changed)
    assert judged == {True, False}


@pytest.mark.parametrize("content", [b"", b" ", b"[]", b"1", b"null", b"{} {}", b"\xef\xbb\xbf{}", b"\0" * 64, b"{]"])
def test_other_content_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "generation_config.json"
    path.write_bytes(content)
    assert not is_accepted(path)


def test_place_of_a_fault_is_named(tmp_path: Path) -> None:
    path = tmp_path / "special_tokens_map.json"
    path.write_text('{"bos_token": "<s>", "eos')
    with pytest.raises(CorruptError, match="is not a whole JSON object") as raised:
        check_json_object(str(path))
    assert raised.value.got == "'\"eos' after 20 characters"


def test_parsing_is_within_a_budget() -> None:
    """Thirty megabytes of brackets or commas would become 1.2 GB of objects."""
    assert parse_json(json.dumps(VALUE).encode()) == VALUE
    assert len(parse_json(b"[%s0]" % (b"0," * 1_000_000))) == 1_000_001
    for text in (b"[%s0]" % (b"0," * 15_000_000), b"[" * 30_000_000, b'{"a":%s{}}' % (b'{"a":' * 5_000_000)):
        with pytest.raises(ValueError, match="xrank parses at most 2,000,000"):
            parse_json(text)


def test_an_index_of_too_many_values_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.index.json").write_bytes(b'{"weight_map":[%s0]}' % (b"{}," * 3_000_000))
    (tmp_path / "model" / "model-00001-of-00001.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(CorruptError, match="is not an index") as caught:
        xrank.gather_checkpoint(tmp_path / "model", tmp_path / "out")
    assert "describes up to 6,000,002 values" in str(caught.value.got) and not (tmp_path / "out").exists()
