"""The search for garbage is put off, and goes on as before, whatever happens."""

import gc

import pytest

from xrank.gather.garbage import no_search


def test_nothing_is_searched_meanwhile_and_then_as_before():
    assert gc.isenabled()
    with no_search():
        assert not gc.isenabled()
        with no_search():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner one is not the last"
    assert gc.isenabled()
    with pytest.raises(KeyError), no_search():
        raise KeyError
    assert gc.isenabled()


def test_who_has_switched_it_off_keeps_it_so():
    gc.disable()
    try:
        with no_search():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
