"""Pickles that are alike are read once, and give what each of them gives alone."""

import collections
import io
import pickle
import random

import pytest
import torch

from xrank.errors import XrankError
from xrank.formats.pickles import Blank, InertRecord, fill_blanks, new_families, read_pickle
from xrank.formats.torch_archive import read_archive
from xrank.storage.regular_file import Origin

pytestmark = pytest.mark.quick
ORIGIN = Origin("file", 3)


def state(rank=0, text="a text", rows=4):
    layers = [{"name": f"layers.{k}", "shape": (rows, k), "kind": collections.OrderedDict} for k in range(30)]
    built = [b"raw", complex(2, 3), {1, 2}, collections.OrderedDict(a=1)]
    return {"rank": rank, "layers": layers, "text": text, "again": text, 7: [rank, (rank, -rank)], "built": built}


def plain(value):
    """Return a value that compares by content."""
    if isinstance(value, InertRecord):
        return tuple(map(plain, (value.module, value.name, value.args, value.kwargs, value.state, value.items)))
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return type(value)(map(plain, value)) if isinstance(value, (list, tuple)) else value


def read(data, families=None):
    try:
        pickled = read_pickle(data, ORIGIN, families=families)
    except XrankError as error:
        return type(error), str(error)
    own = pickled.own
    value = plain(pickled.value if own is None else fill_blanks(pickled.value, own))
    return repr(value), dict(pickled.foreign)  # as text: a mutation may make a NaN


@pytest.mark.parametrize("other", [{"rank": 1}, {"text": "another text"}, {"rank": 70_000, "text": ""}, {}], ids=str)
def test_a_family_has_one_value(other):
    families = new_families()
    # torch.save writes protocol 2, without frames, whose length would differ.
    first, *others = (pickle.dumps(state(**kwargs), 2) for kwargs in ({}, other, {**other, "text": "third"}))
    assert read(first, families) == read(first)
    values = [read_pickle(data, ORIGIN, families=families) for data in others]
    # A number of another length has another opcode, which is as good.
    assert all(value.own is not None for value in values)
    assert [read(data, families) for data in others] == [read(data) for data in others]
    assert (
        read_pickle(others[0], ORIGIN, families=families).value is read_pickle(first, ORIGIN, families=families).value
    )


def test_a_difference_in_a_key_makes_no_family():
    families = new_families()
    for key in ("a", "b", "a", "b"):
        data = pickle.dumps({"same": 1, key: 2}, 2)
        assert read(data, families) == read(data) and read_pickle(data, ORIGIN).value == {"same": 1, key: 2}


@pytest.mark.parametrize("kind", [lambda n: b"%d" % n, lambda n: {n}, lambda n: frozenset([(n, 1)])], ids=range(3))
def test_a_difference_in_what_is_built_makes_no_family(kind):
    families = new_families()
    for number in (1, 2, 1, 3):
        data = pickle.dumps({"same": 1, "built": [kind(number)]}, 2)
        assert read(data, families) == read(data)
        assert read_pickle(data, ORIGIN, families=families).value == {"same": 1, "built": [kind(number)]}


def test_pickles_that_differ_in_much_are_read_alone():
    families = new_families()
    for rows in (4, 5, 4):
        data = pickle.dumps(state(rows=rows), 2)
        assert read(data, families) == read(data)
    assert read_pickle(pickle.dumps(state(rows=5), 2), ORIGIN, families=families).own == ()


def test_mutated_pickles_give_what_they_give_alone(soak):
    draw = random.Random(7)
    whole = [pickle.dumps(state(rank, f"rank {rank}"), protocol) for protocol in (2, 4) for rank in (0, 1, 300)]
    for _ in range(20_000 if soak else 400):
        families = new_families()
        first, data = (bytearray(draw.choice(whole)) for _ in range(2))
        for _ in range(draw.choice((0, 1, 1, 3))):
            at = draw.randrange(len(data))
            data[at : at + draw.choice((0, 1, 1, 2))] = draw.randbytes(draw.choice((0, 1, 1, 5)))
        for part in (first, data, draw.choice(whole)):
            assert read(bytes(part), families) == read(bytes(part)), bytes(data)


def saved(tmp_path, name, value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    (tmp_path / name).write_bytes(buffer.getvalue())
    return str(tmp_path / name)


def test_archives_with_records_of_equal_sizes_share_tensors_and_keys(tmp_path):
    families = new_families()
    names = [f"layers.{k}.weight" for k in range(20)]
    archives = [
        read_archive(
            saved(tmp_path, f"{rank}", {"rank": rank, **dict.fromkeys(names, torch.full((3, 5), rank))}),
            families=families,
        )
        for rank in range(3)
    ]
    first, second, third = (archive.value for archive in archives)
    assert (
        second is third and second["rank"] == Blank(0) and [archive.own for archive in archives] == [None, (1,), (2,)]
    )
    assert {name: second[name] for name in names} == {name: first[name] for name in names}
    crcs = {archive.records["0"].crc32 for archive in archives}
    assert len(crcs) == 3 and {archive.records["0"].nbytes for archive in archives} == {3 * 5 * 8}


@pytest.mark.parametrize(
    "other",
    [torch.zeros(5, 3), torch.zeros(3, 5).double(), torch.zeros(30, 5)[::10], torch.zeros(4, 5)[1:], torch.zeros(3)],
    ids=["turned", "wider", "with steps", "with an offset", "of one dim"],
)
def test_a_tensor_of_another_form_is_its_own(tmp_path, other):
    families = new_families()
    for name, tensor in (("a", torch.zeros(3, 5)), ("b", other), ("c", torch.zeros(3, 5)), ("d", other)):
        path = saved(tmp_path, name, {"weight": tensor, "more": [1, 2]})
        shared, alone = read_archive(path, families=families), read_archive(path)
        assert fill_blanks(shared.value, shared.own or ()) == alone.value
        assert shared.value["weight"].shape == tuple(tensor.shape)
        assert [*shared.records.items()] == [*alone.records.items()]
