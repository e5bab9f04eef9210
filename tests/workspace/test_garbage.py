"""The search for garbage is put off, and goes on as before, whatever happens."""

import gc

import pytest

from xrank.system import pause_collection


def test_nothing_is_searched_meanwhile_and_then_as_before():
    assert gc.isenabled()
    with pause_collection():
        assert not gc.isenabled()
        with pause_collection():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner one is not the last"
    assert gc.isenabled()
    with pytest.raises(KeyError), pause_collection():
        raise KeyError
    assert gc.isenabled()


def test_collection_stays_disabled_if_it_was():
    gc.disable()
    try:
        with pause_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
