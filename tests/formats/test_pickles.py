"""Pickles read as data: right where they are plain, inert where they are not, refused where they lie."""

import argparse
import collections
import functools
import io
import os
import pathlib
import pickle
import random
import struct
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from xrank.errors import CorruptError, UnsafeError, UsageError, XrankError
from xrank.formats.pickles import InertRecord, PickleReader, check_tree, read_pickle, refuse_inert
from xrank.storage.regular_file import Origin

pytestmark = pytest.mark.quick

ORIGIN = Origin("state.pt", 3)
PLAIN = {
    "none": None,
    "truth": [True, False],
    "ints": [0, 1, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**63, -(2**200), 2**2000],
    "floats": [0.0, -0.0, 1.5, float("inf"), 5e-324],
    "complex": 1 - 2j,
    "texts": ["", "é🚀\0\n", "x" * 300, "x" * 70000, "\ud800"],
    "bytes": [b"", b"\0\xff", b"x" * 300],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "sets": [set(), {1, "a", (2, 3)}, frozenset(), frozenset([1, (2,)])],
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    ("key", 1): {1: 2, None: 3, 2.5: b"", b"k": frozenset([4])},
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_through(protocol):
    value = read_pickle(pickle.dumps(PLAIN, protocol), ORIGIN).value
    assert value == PLAIN
    assert repr(value) == repr(PLAIN)
    assert type(value["ordered"]) is collections.OrderedDict
    refuse_inert(value, "state.pt")


@pytest.mark.parametrize("protocol", [2, 4])
def test_shared_values_stay_shared(protocol):
    inner = [1]
    value = read_pickle(pickle.dumps([inner, inner], protocol), ORIGIN).value
    assert value[0] is value[1]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(-(2**63), 2**63), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=count_of(200), deadline=None)
@given(values, st.sampled_from([2, 3, 4, 5]))
def test_what_pickle_writes_is_what_is_read(value, protocol):
    assert repr(read_pickle(pickle.dumps(value, protocol), ORIGIN).value) == repr(value)


def test_attributes_of_a_state_dict_are_dropped():
    state = collections.OrderedDict(a=1)
    state._metadata = {"": {"version": 1}}
    state.itemz = "hidden"
    value = read_pickle(pickle.dumps(state, 2).replace(b"itemz", b"items"), ORIGIN).value
    assert list(value.items()) == [("a", 1)]
    assert vars(value) == {}


class Point:
    def __init__(self, x):
        self.x = x


class Keyed(dict):
    pass


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_become_records_that_keep_what_they_were_given(protocol):
    keyed = Keyed(a=1)
    keyed.b = 2
    given = [argparse.Namespace(lr=1.0), collections.defaultdict(list, {"k": [1]}), keyed, pathlib.PurePosixPath("/a")]
    space, default, mapping, path = read_pickle(pickle.dumps(given, protocol), ORIGIN).value
    assert (space.module, space.name, space.args, space.state) == ("argparse", "Namespace", (), {"lr": 1.0})
    assert default.name == "defaultdict"
    assert default.items == [("k", [1])]
    assert mapping.items == [("a", 1)]
    assert mapping.state == {"b": 2}
    assert path.args == ("/", "a")
    record = read_pickle(pickle.dumps(collections.deque([1, 2]), protocol), ORIGIN).value
    assert record.items == [1, 2]
    assert len({record: 1, default: 2}) == 2
    assert repr(default) == "<inert collections.defaultdict(...)>"
    with pytest.raises(AttributeError):
        record.__wrapped__  # noqa: B018


def test_keyword_arguments_are_kept():
    class_ = b"cm\nC\n"
    data = b"\x80\x04" + class_ + b")}X\x01\x00\x00\x00kK\x01s\x92."
    assert read_pickle(data, ORIGIN).value.kwargs == {"k": 1}


def test_the_first_inert_class_is_named_wherever_it_hides():
    for tree in (
        [Point(1), argparse.Namespace()],
        {"a": [1, (2, {"b": Point(1)})]},
        {argparse.Namespace: 1},
        {(1, Point): 2},
        {"s": frozenset([Point])},
    ):
        value = read_pickle(pickle.dumps(tree, 4), ORIGIN).value
        with pytest.raises((UnsafeError, UsageError), match=r"Point|Namespace") as caught:
            refuse_inert(value, "the/file.pt", 7)
        assert caught.value.rank == 7
        assert caught.value.file == "the/file.pt"
        assert "the/file.pt" in str(caught.value)
    first = read_pickle(pickle.dumps([1, [Point(1)], argparse.Namespace()], 4), ORIGIN).value
    with pytest.raises(UnsafeError, match="Point"):
        refuse_inert(first, "f")


# --- hostile -------------------------------------------------------------------------------------------------------


class Calls:
    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def text(string):
    raw = string.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def hostile(marker):
    """Pickles that plain pickle would run, each making ``marker``."""
    command = f"touch {marker}"
    opened = Calls(open, (marker, "w"))
    yield from (pickle.dumps(Calls(os.system, (command,)), p) for p in (2, 3, 4, 5))
    yield pickle.dumps(Calls(eval, (f"open({marker!r}, 'w')",)), 2)
    yield pickle.dumps(Calls(exec, (f"open({marker!r}, 'w')",)), 4)
    yield pickle.dumps(opened, 2)
    yield pickle.dumps({"layers": [opened]}, 4)
    yield pickle.dumps({1: Calls(functools.partial, (open, marker, "w"))}, 4)
    # getattr(os, "system")(command): a call of what a call returned.
    chain = b"c__builtin__\ngetattr\ncos\n__dict__\n" + text("system") + b"\x86R" + text(command) + b"\x85R."
    yield b"\x80\x02" + chain
    # NEWOBJ and BUILD, on classes whose making or filling acts.
    yield b"\x80\x02csubprocess\nPopen\n" + text(command) + b"\x85\x81."
    yield b"\x80\x04csubprocess\nPopen\n" + text(command) + b"\x85}\x92."
    yield b"\x80\x02cos\nsystem\n" + text(command) + b"\x85R}X\x05\x00\x00\x00itemsNsb."
    yield b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x0c\x00\x00\x00__defaults__Nsb."
    yield b"\x80\x02cos\nsystem\n" + text(command) + b"a."
    yield b"\x80\x04" + text("os.path") + text("os.system") + b"\x93" + text(command) + b"\x85R."
    yield b"\x80\x02c__builtin__\nset\n]" + text(command) + b"acbuiltins\nmap\n\x86R."
    # INST and OBJ, the text opcodes, the extension registry and out-of-band buffers.
    yield b"(S'" + command.encode() + b"'\nios\nsystem\n."
    yield b"(cos\nsystem\n" + text(command) + b"o."
    yield pickle.dumps(Calls(os.system, (command,)), 0)
    yield b"\x80\x02\x82\x01" + text(command) + b"\x85R."
    yield b"\x80\x02\x83\x01\x00."
    yield b"\x80\x02\x84\x01\x00\x00\x00."
    yield b"\x80\x05\x97."
    yield b"Pstorage\n."
    yield b"\x80\x02" + text("storage") + b"Q."


SYSTEM = b"cos\nsystem\n" + text("true") + b"\x85R"
DISCARDED = {
    "popped": SYSTEM + b"0}.",
    "popped to a mark": b"(" + SYSTEM + b"1}.",
    "kept in the memo alone": SYSTEM + b"q\x010}.",
    "overwritten": b"}X\x01\0\0\0a" + SYSTEM + b"sX\x01\0\0\0aNs.",
    "a name without a call": b"cevil_module\nx\n0}.",
    "of a known function": b"cargparse\nNamespace\n)R0}.",
}
"""Pickles that make an object and leave no trace of it in their value."""


@pytest.mark.parametrize("kind", DISCARDED)
def test_discarded_results_are_refused(kind):
    with pytest.raises(UnsafeError, match="discards the result"):
        read_pickle(b"\x80\x02" + DISCARDED[kind], ORIGIN)


def test_attributes_of_a_function_itself_are_refused():
    with pytest.raises(UnsafeError, match="sets attributes"):
        read_pickle(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}X\x01\0\0\0aNsb0}.", ORIGIN)


def test_names_that_frameworks_do_not_write_are_listed():
    value = {
        "args": argparse.Namespace(mine=Point(1), path=pathlib.PurePosixPath("a")),
        "counts": collections.defaultdict(int),
    }
    pickled = read_pickle(pickle.dumps(value, 2), ORIGIN)
    (name,) = pickled.foreign
    assert name == (Point.__module__, "Point")
    assert pickled.foreign[name] == pickle.dumps(value, 2).index(b"Point\n") + len(b"Point\n")


def test_attributes_of_a_dict_are_searched_too():
    held = collections.OrderedDict()
    held._metadata = {"": {"version": 1}, "mine": Point(1)}
    assert list(read_pickle(pickle.dumps(held, 2), ORIGIN).foreign) == [(Point.__module__, "Point")]


@pytest.mark.parametrize("code", [b"]", b"}", b"\x8f", b"(", b"N\x85", b"N\x94", b"K\x01Ns", b")R", b"ca\n%x\n"])
def test_many_objects_of_a_small_file_are_refused(code):
    units = (code % k if b"%" in code else code for k in range(100_000))
    with pytest.raises(UsageError, match="more objects than xrank reads"):
        PickleReader(b"\x80\x02" + b"".join(units) + b".", ORIGIN, {}, max_made_nbytes=1 << 20).read()


def test_a_million_names_take_little_memory():
    # Each \x93 names what two values say; here the first has none to take.
    data = b"\x80\x04" + b"\x93" * 1_000_000 + b"."
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            read_pickle(data, ORIGIN)
        assert tracemalloc.get_traced_memory()[1] < 30 * len(data)
    finally:
        tracemalloc.stop()


def test_a_memo_of_sparse_numbers_is_that_of_pickle():
    puts = b"K\x09q\x03K\x01q\x00K\x02q\x01K\x04q\x02K\x05q\x03K\x06r\x09\0\0\0"
    data = b"\x80\x02(" + puts + b"h\x03h\x00h\x02h\x09t."
    assert read_pickle(data, ORIGIN).value == pickle.loads(data)


def test_nothing_runs(tmp_path):
    marker = tmp_path / "marker"
    plain = 0
    for data in hostile(str(marker)):
        with pytest.raises((UnsafeError, CorruptError)):
            refuse_inert(read_pickle(data, ORIGIN).value, "state.pt", 3)
        plain += 1
        assert not marker.exists()
    assert plain > 20


def test_the_payloads_would_run_in_a_plain_unpickler(tmp_path):
    marker = tmp_path / "marker"
    pickle.loads(next(hostile(str(marker))))
    assert marker.exists()


@pytest.mark.parametrize("code", [b"\x82\x01", b"\x83\x01\0", b"\x84\x01\0\0\0", b"I1\n", b"S''\n", b"\x97", b"2"])
def test_opcodes_torch_never_writes_are_unsafe(code):
    with pytest.raises(UnsafeError, match="opcode") as caught:
        read_pickle(b"\x80\x02" + code + b".", ORIGIN)
    assert caught.value.file == "state.pt"
    assert caught.value.rank == 3


# --- bounds --------------------------------------------------------------------------------------------------------

LONG = 200_000
DAMAGED = {
    "empty": b"",
    "only a stop": b".",
    "two values": b"NN.",
    "open mark": b"(N.",
    "bytes after the stop": b"N.N",
    "no stop": b"N",
    "protocol 6": b"\x80\x06N.",
    "no such opcode": b"\x80\x02\xff.",
    "memo index that is not there": b"h\x05.",
    "pop of nothing": b"0.",
    "tuple of nothing": b"\x87.",
    "text no UTF-8": b"X\x01\0\0\0\xff.",
    "long beyond reason": b"\x8b\xff\xff\xff\x7f.",
    "text longer than the file": b"X\xff\xff\xff\xffab.",
    "text8 longer than memory": b"\x8d" + b"\xff" * 8 + b"ab.",
    "bytes8 longer than memory": b"\x8e" + b"\xff" * 7 + b"\x7fab.",
    "bytearray8 longer than memory": b"\x96" + b"\xff" * 7 + b"\x7fab.",
    "global without lines": b"cos",
    "global named by numbers": b"K\x01K\x02\x93.",
    "arguments no tuple": b"cm\nC\n]R.",
    "call of a list": b"])R.",
    "call of a text": b"X\0\0\0\0)R.",
    "state of a list": b"]}b.",
    "item of a list": b"]NNs.",
    "append to a tuple": b")Na.",
    "add to a dict": b"}(N\x90.",
    "odd items": b"}(NNNu.",
    "list as key": b"}]Ns.",
    "dict in a set": b"\x8f(}\x90.",
    "list in a frozenset": b"(]\x91.",
    "huge integer as key": b"}\x8a\x09" + b"\xff" * 8 + b"\x7fNs.",
    "deep key": b"})" + b"\x85" * LONG + b"Ns.",
    "deep key in a set": b"\x8f()" + b"\x85" * LONG + b"\x90.",
    "key that fans out": b"})" + b"\x86".join(b"q%ch%c" % (k, k) for k in range(40)) + b"\x86Ns.",
    "deep lists": b"]" * LONG + b"a" * (LONG - 1) + b".",
    "deep tuples": b")" + b"\x85" * LONG + b".",
    "deep dicts": b"}N" * LONG + b"N" + b"s" * LONG + b".",
    "marks": b"(" * LONG + b".",
    "a list in itself": b"]q\0h\0a.",
    "a dict in itself": b"}q\0Nh\0s.",
    "a list in itself in an object": b"cm\nC\n)\x81]q\0h\0ab.",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_corrupt_and_quick(kind):
    started = time.process_time()
    with pytest.raises(CorruptError) as caught:
        read_pickle(DAMAGED[kind], ORIGIN)
    assert time.process_time() - started < 5
    assert caught.value.rank == 3
    assert "state.pt" in str(caught.value)


def test_lists_that_double_are_refused_for_what_they_are():
    doubling = b"]q\0" + b"".join(b"0](h%ch%ceq%c" % (k, k, k + 1) for k in range(60)) + b"."
    with pytest.raises(CorruptError, match="too often"):
        read_pickle(doubling, ORIGIN)


def test_a_memo_index_allocates_nothing():
    # pickle.Unpickler would ask for 64 GiB here (python/cpython#115952).
    with pytest.raises(CorruptError, match="damaged") as caught:
        read_pickle(b"Nr\xff\xff\xff\xff.", ORIGIN)
    assert caught.value.got == "memo number 4294967295"


def test_deep_records_are_left_without_recursion():
    # Each record is the argument of the next; what lies under it on the stack is dropped by POP.
    chain = b"N" + b"q\x01cm\nC\nh\x01\x85R" * 50_000 + b"q\x020" + b"0" * 49_999 + b"0h\x02."
    record = read_pickle(chain, ORIGIN).value
    assert isinstance(record, InertRecord)
    with pytest.raises(UnsafeError):
        refuse_inert(record, "f")
    del record


def test_a_cycle_through_an_object_is_no_damage():
    point = Point(1)
    point.x = point
    record = read_pickle(pickle.dumps(point, 2), ORIGIN).value
    assert record.state["x"] is record


def test_the_length_is_bounded(monkeypatch):
    monkeypatch.setattr("xrank.formats.pickles.MAX_PICKLE_NBYTES", 10)
    with pytest.raises(CorruptError, match="too long"):
        read_pickle(b"N0" * 1000 + b"N.", ORIGIN)


def test_a_tree_of_many_shared_parts_is_sound():
    part = list(range(100))
    check_tree([part] * 100, 11_000, ORIGIN)
    with pytest.raises(CorruptError):
        check_tree([part] * 100, 9_000, ORIGIN)


@pytest.mark.parametrize("protocol", [2, 4])
def test_mutants_raise_nothing_foreign(protocol):
    chance = random.Random(protocol)
    small = pickle.dumps(
        {"a": [1, (2, "three")], "s": {4}, "o": collections.OrderedDict(x=argparse.Namespace(y=5))}, protocol
    )
    outcomes = {True: 0, False: 0}
    for _ in range(4000):
        mangled = bytearray(small)
        for _ in range(chance.choice([1, 1, 2, 5])):
            at = chance.randrange(len(mangled))
            mangled[at] = chance.choice([chance.randrange(256), *b"(.0Q]a}stRb\x81\x85\x90\x93qh"])
        try:
            read_pickle(bytes(mangled), ORIGIN)
            outcomes[True] += 1
        except XrankError as error:
            str(error)
            outcomes[False] += 1
    assert outcomes[True] > 100 < outcomes[False]


def test_every_truncation_is_refused():
    whole = pickle.dumps(PLAIN | {"texts": "é"}, 4)
    for length in range(0, len(whole), 3):
        with pytest.raises(CorruptError):
            read_pickle(whole[:length], ORIGIN)


def test_the_reader_agrees_with_pickle_on_random_streams():
    """Where both take a stream of opcodes, both make the same of it."""
    chance = random.Random(11)
    pieces = [b"N", b"K\x05", b"]", b"}", b")", b"(", b"a", b"e", b"s", b"u", b"t", b"\x85", b"\x86", b"\x87", b"q\0"]
    pieces += [b"h\0", b"\x94", b"0", b"1", b"\x8f", b"\x90", b"\x91", b"X\x01\0\0\0k", b"\x88", b"q\x01", b"h\x01"]
    agreed = 0
    for _ in range(20_000):
        data = b"\x80\x04" + b"".join(chance.choices(pieces, k=chance.randrange(1, 9))) + b"."
        try:
            value = read_pickle(data, ORIGIN).value
            plain = pickle.Unpickler(io.BytesIO(data)).load()
        except (XrankError, pickle.UnpicklingError):
            continue
        assert repr(value) == repr(plain)
        agreed += 1
    assert agreed > 500
