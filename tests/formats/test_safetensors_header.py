"""The strict header: what the format forbids is refused, what it allows comes through unchanged."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.sampled import count_of
from xrank.errors import CorruptError, IncompleteError, UsageError, XrankError
from xrank.formats.safetensors_header import HeaderTensor, build_header, read_header

pytestmark = pytest.mark.quick

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]}


def write(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return str(path)


def test_a_sound_header_is_read_in_the_order_of_its_bytes(tmp_path):
    path = write(tmp_path / "a", {"b": B, "__metadata__": {"k": "v"}, "a": A}, bytes(11))
    header = read_header(path)
    assert [tensor.name for tensor in header.tensors] == ["a", "b"]
    assert header.tensors[0] == HeaderTensor("a", "F32", (2,), 0, 8)
    assert header.metadata == {"k": "v"}
    assert header.data_start + 11 == os.path.getsize(path) == header.status.st_size


def test_what_the_real_package_writes_is_read(tmp_path):
    arrays = {"x": np.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 4), np.int16), "scalar": np.array(True)}
    save_file(arrays, tmp_path / "real.safetensors", metadata={"format": "pt"})
    header = read_header(str(tmp_path / "real.safetensors"))
    assert {t.name: (t.dtype, t.shape) for t in header.tensors} == {
        "x": ("F64", (2, 3)),
        "empty": ("I16", (0, 4)),
        "scalar": ("BOOL", ()),
    }


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_what_is_built_is_opened_by_the_real_package(tmp_path, alignment):
    name = 'odd "name"\\ \n\0\x1b\x7f é \u2028 🚀 %s ' + "x" * 65536
    tensors = [HeaderTensor(name, "F32", (2, 1), 0, 8), HeaderTensor("", "BF16", (0,), 8, 8)]
    header = build_header(tensors, {"k": "v\n"}, alignment=alignment)
    assert len(header) % alignment == 0
    assert header[8:].startswith(b'{"__metadata__":{"k":"v\\n"},"":')
    path = tmp_path / "x"
    path.write_bytes(header + np.array([1.5, -0.0], np.float32).tobytes())
    with safe_open(path, "np") as file:
        assert sorted(file.keys()) == ["", name]
        assert file.metadata() == {"k": "v\n"}
        assert file.get_tensor(name).tolist() == [[1.5], [0.0]]
    back = read_header(str(path))
    assert sorted(back.tensors, key=lambda t: t.name) == sorted(tensors, key=lambda t: t.name)
    assert back.data_start == len(header)


def test_the_order_of_the_arguments_leaves_no_trace():
    tensors = [HeaderTensor(f"t{k}", "U8", (1,), k, k + 1) for k in range(20)]
    want = build_header(tensors, {"a": "1", "b": "2"})
    assert build_header(tensors[::-1], {"b": "2", "a": "1"}) == want
    assert len(build_header([], {})) == 4096


@pytest.mark.parametrize(
    "tensors",
    [
        [HeaderTensor("a", "F6_E2M3", (4,), 0, 3)],
        [HeaderTensor("a", "F4", (), 0, 1)],
        [HeaderTensor("a", "U8", (2,), 0, 3)],
        [HeaderTensor("a", "U8", (2,), 1, 3)],
        [HeaderTensor("a", "U8", (-2,), 0, -2)],
        [HeaderTensor("a", "U8", (True,), 0, 1)],
        [HeaderTensor("a", "U8", (1,), 0, 1), HeaderTensor("a", "U8", (1,), 1, 2)],
        [HeaderTensor("a", "U8", (1,), 0, 1), HeaderTensor("b", "U8", (1,), 0, 1)],
        [HeaderTensor("__metadata__", "U8", (1,), 0, 1)],
        [HeaderTensor("\ud800", "U8", (1,), 0, 1)],
    ],
)
def test_a_header_that_could_not_be_read_is_not_built(tensors):
    with pytest.raises(UsageError):
        build_header(tensors, {})


def test_a_header_over_the_limit_is_not_built():
    with pytest.raises(UsageError, match="too long") as caught:
        build_header([HeaderTensor("x" * 100_000_000, "U8", (1,), 0, 1)], {})
    assert caught.value.next_step


def other(**changes):
    return {"a": A | changes}


REFUSED = {
    "hole at the start": ({"a": A | {"data_offsets": [1, 9]}}, bytes(9)),
    "hole between": ({"a": A, "b": B | {"data_offsets": [9, 12]}}, bytes(12)),
    "overlap": ({"a": A, "b": B | {"data_offsets": [7, 10]}}, bytes(10)),
    "same bytes": ({"a": A, "b": A}, bytes(8)),
    "bytes left over": ({"a": A}, bytes(9)),
    "bytes missing": ({"a": A}, bytes(7)),
    "no tensors but bytes": ({}, bytes(1)),
    "reversed": (other(data_offsets=[8, 0]), bytes(8)),
    "one offset": (other(data_offsets=[8]), bytes(8)),
    "three offsets": (other(data_offsets=[0, 8, 8]), bytes(8)),
    "negative offset": (other(data_offsets=[-8, 0]), bytes(8)),
    "float offset": (other(data_offsets=[0, 8.0]), bytes(8)),
    "huge offset": (other(data_offsets=[0, 2**64]), bytes(8)),
    "size is not the shape's": (other(shape=[3]), bytes(8)),
    "shape overflows": (other(shape=[2**62, 4]), bytes(8)),
    "bool extent": (other(dtype="U8", shape=[8, True]), bytes(8)),
    "text extent": (other(shape=["2"]), bytes(8)),
    "negative extents": (other(shape=[-1, -2]), bytes(8)),
    "null shape": (other(shape=None), bytes(8)),
    "unknown dtype": (other(dtype="F33"), bytes(8)),
    "lower-case dtype": (other(dtype="f32"), bytes(8)),
    "number as dtype": (other(dtype=1), bytes(8)),
    "extra key": (other(x=1), bytes(8)),
    "missing key": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "entry is a list": ({"a": [1]}, b""),
    "metadata number": ({"__metadata__": {"a": 1}}, b""),
    "metadata of null": ({"__metadata__": {"a": None}}, b""),
    "metadata list": ({"__metadata__": ["a"]}, b""),
    "metadata nested": ({"__metadata__": {"a": {}}}, b""),
    "leading space": (b" {}", b""),
    "leading mark": (b"\xef\xbb\xbf{}", b""),
    "trailing newline": (b"{}\n", b""),
    "trailing NUL": (b"{}\0", b""),
    "two objects": (b"{}{}", b""),
    "a list": (b"[]", b""),
    "empty": (b"", b""),
    "blanks": (b"    ", b""),
    "no UTF-8": (b'{"\xff":1}', b""),
    "UTF-16": ("{}".encode("utf-16"), b""),
    "raw newline in a name": (b'{"\n":1}', b""),
    "half a surrogate pair": (b'{"__metadata__":{"\\ud800":""}}', b""),
    "half a pair as value": (b'{"__metadata__":{"a":"\\udfff"}}', b""),
    "NaN": (b'{"a":NaN}', b""),
    "Infinity": (b'{"__metadata__":{"a":-Infinity}}', b""),
    "digits without end": (b'{"a":' + b"9" * 1_000_000 + b"}", b""),
    "deep lists": (b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}", b""),
    "deep objects": (b'{"a":' * 500_000 + b"1" + b"}" * 500_000, b""),
    "a tensor twice": (b'{"a":%s,"a":%s}' % ((json.dumps(A).encode(),) * 2), bytes(8)),
    "a tensor twice, one escaped": (b'{"a":%s,"\\u0061":%s}' % ((json.dumps(A).encode(),) * 2), bytes(8)),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', b""),
    "a metadata key twice": (b'{"__metadata__":{"a":"1","a":"2"}}', b""),
    "dtype twice": (b'{"a":{"dtype":"U8","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_every_broken_rule_is_refused(tmp_path, kind):
    path = write(tmp_path / "bad", *REFUSED[kind])
    with pytest.raises(CorruptError) as caught:
        read_header(path)
    assert caught.value.file == path
    assert path in str(caught.value)
    assert caught.value.next_step


def test_many_huge_extents_take_no_time(tmp_path):
    shape = [2**63] * 64
    with pytest.raises(CorruptError, match="does not have the size of its shape"):
        read_header(write(tmp_path / "bad", other(shape=shape), bytes(8)))
    header = read_header(write(tmp_path / "zero", {"a": A | {"shape": [*shape[1:], 0], "data_offsets": [0, 0]}}))
    assert header.tensors[0].end == 0
    with pytest.raises(CorruptError, match="not described as"):
        read_header(write(tmp_path / "more", other(shape=[1] * 300_000), bytes(8)))


_HOSTILE = {
    "brackets": lambda: b'{"a":%s}' % (b"[" * 30_000_000),
    "a list": lambda: b'{"a":[%s0]}' % (b"0," * 15_000_000),
    "a shape of lists": lambda: b'{"a":{"dtype":"F32","shape":[%s0],"data_offsets":[0,0]}}' % (b"[]," * 10_000_000),
    "empty tables": lambda: b'{"a":{}%s}' % (b',"a":{}' * 4_000_000),
    "metadata": lambda: b'{"__metadata__":{%s}}' % b",".join(b'"%x":""' % i for i in range(2_500_000)),
    "a name": lambda: '{"é%s":{}}'.encode() % (b"a" * 30_000_000),
}


@pytest.mark.parametrize("header", _HOSTILE)
def test_thirty_megabytes_are_refused_within_300(tmp_path, header):
    """A parser of the whole text would make up to 1.1 GB of objects first."""
    content = _HOSTILE[header]()
    (tmp_path / "bad").write_bytes(len(content).to_bytes(8, "little") + content)
    code = (
        "import resource, sys\nfrom xrank.errors import CorruptError\n"
        "from xrank.formats.safetensors_header import read_header\n"
        "resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))\n"
        "try:\n    read_header(sys.argv[1])\nexcept CorruptError:\n    print('refused')\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "bad")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("refused\n", "")


def test_an_element_type_xrank_does_not_move_is_named(tmp_path):
    path = write(tmp_path / "f6", other(dtype="F6_E2M3", shape=[16]), bytes(12))
    with pytest.raises(UsageError, match="F6_E2M3") as caught:
        read_header(path)
    assert caught.value.file == path
    assert caught.value.tensor == "a"


def test_half_an_element_of_a_packed_type_is_named(tmp_path):
    """torch packs two values of four bits into an element, along the last dim."""
    with pytest.raises(UsageError, match=r"F4 of shape \[2, 3\]"):
        read_header(write(tmp_path / "odd", other(dtype="F4", shape=[2, 3]), bytes(3)))


def test_blanks_at_the_end_and_no_tensors_are_sound(tmp_path):
    assert read_header(write(tmp_path / "a", b"{}" + b" " * 4000)).tensors == ()
    assert read_header(write(tmp_path / "b", b'{"__metadata__":{}}')).metadata == {}


def test_metadata_of_null_are_none_as_safetensors_has_it(tmp_path):
    path = write(tmp_path / "a", {"__metadata__": None, "a": A}, bytes(8))
    assert read_header(path).metadata == {}
    with safe_open(path, "np") as file:
        assert file.metadata() is None and list(file.keys()) == ["a"]


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_file_without_room_for_the_length(tmp_path, length):
    (tmp_path / "short").write_bytes(bytes(length))
    with pytest.raises(CorruptError, match="too short"):
        read_header(str(tmp_path / "short"))


@pytest.mark.parametrize("length", [3, 100_000_001, 2**63, 2**64 - 1])
def test_a_length_that_lies(tmp_path, length):
    with pytest.raises(CorruptError, match="length is wrong"):
        read_header(write(tmp_path / "bad", b"{}", length=length))


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, "/dev/zero", "a\0b"):
        with pytest.raises(CorruptError):
            read_header(str(path))
    with pytest.raises(IncompleteError):
        read_header(str(tmp_path / "none"))


def test_every_truncation_is_refused(tmp_path):
    path = write(tmp_path / "a", {"a": A, "b": B}, bytes(11))
    whole = (tmp_path / "a").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "a").write_bytes(whole[:length])
        with pytest.raises(CorruptError):
            read_header(path)


def test_damage_is_refused_or_read_as_it_stands(tmp_path):
    chance = random.Random(5)
    path = tmp_path / "a"
    whole = build_header([HeaderTensor("a", "F32", (2,), 0, 8), HeaderTensor("b", "U8", (3,), 8, 11)], {}, alignment=8)
    whole += bytes(11)
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        mangled = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 8])):
            mangled[chance.randrange(len(whole) - 11)] = chance.choice([chance.randrange(256), *b'{}[]",:0129eE-. '])
        path.write_bytes(mangled)
        try:
            header = read_header(str(path))
        except XrankError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        assert sum(t.end - t.start for t in header.tensors) == 11
        # Where we say yes, so does the reference reader.
        with safe_open(path, "np") as file:
            assert sorted(file.keys()) == sorted(t.name for t in header.tensors)
    assert outcomes[True] > 50 < outcomes[False]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name != "__metadata__")


@settings(max_examples=count_of(200), deadline=None)
@given(
    st.dictionaries(names, st.tuples(st.sampled_from(["U8", "BF16", "C64"]), st.lists(st.integers(0, 3), max_size=3))),
    st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]))),
)
def test_a_round_trip_keeps_everything(tmp_path_factory, tensors, metadata):
    listed, offset = [], 0
    for name, (kind, shape) in tensors.items():
        nbytes = {"U8": 1, "BF16": 2, "C64": 8}[kind] * int(np.prod(shape, dtype=int))
        listed.append(HeaderTensor(name, kind, tuple(shape), offset, offset + nbytes))
        offset += nbytes
    path = tmp_path_factory.getbasetemp() / "round"
    path.write_bytes(build_header(listed, metadata, alignment=16) + bytes(offset))
    header = read_header(str(path))
    assert set(header.tensors) == set(listed)
    assert header.metadata == metadata
