"""Pickles written opcode by opcode: Python and torch read them; other values are refused."""

from __future__ import annotations

import collections
import pickle

import numpy as np
import pytest

from xrank.formats.pickle_writing import Call, Global, Instance, Pairs, size_value, write_pickle


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -5,
        1 << 70,
        0.1,
        float("inf"),
        "",
        "naïve\ud800",
        (),
        [1, "a", None],
        {"a": (1, [2.5, {"b": False}]), 3: {}},
    ],
)
def test_plain_values(value: object) -> None:
    got = pickle.loads(write_pickle(value))
    assert got == value and type(got) is type(value)


def test_numbers_of_numpy_become_pythons() -> None:
    assert type(pickle.loads(write_pickle(np.float64(0.5)))) is float


class Point:
    x = 0


def test_classes_are_named_once_and_made_without_their_constructor() -> None:
    kind = Global(__name__, "Point")
    data = write_pickle([Instance(kind, {"x": 1}), Instance(kind, {"x": 2}), Call(kind, ())])
    one, two, three = pickle.loads(data)
    assert [one.x, two.x, three.x] == [1, 2, 0]
    assert data.count(b"Point") == 1


def test_a_dict_of_keys_that_are_made_first() -> None:
    got = pickle.loads(write_pickle(Pairs([(Call(Global("collections", "Counter"), ()), 1)][:0])))
    assert got == {}
    size = Call(Global("builtins", "complex"), (1, 2))
    assert pickle.loads(write_pickle(Pairs([(size, "a")]))) == {complex(1, 2): "a"}


def test_a_size_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    got = pickle.loads(write_pickle(size_value((2, 3))))
    assert got == (2, 3) and type(got) is torch.Size


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), [collections.deque()]])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="is not a plain value"):
        write_pickle(value)
