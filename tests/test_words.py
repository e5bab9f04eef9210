"""Amounts, lists and ranks as text."""

from __future__ import annotations

import pytest

from xrank.words import (
    amount_text,
    clip,
    first_lines,
    join_words,
    likewise_text,
    list_text,
    numbers_text,
    one_line,
    ranks_text,
    runs_text,
)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([4], "4"), ([0, 1], "0-1"), ([2, 0, 1, 4], "0-2, 4"), ([7, 5, 5, 3], "3, 5, 7"), (range(64), "0-63")],
)
def test_numbers_are_sorted_and_joined_to_runs(numbers, text):
    assert numbers_text(numbers) == text
    assert ranks_text(numbers) == ("no rank" if not text else f"rank {text}" if text == "4" else f"ranks {text}")


@pytest.mark.parametrize(
    ("ranks", "text", "compact"),
    [
        (range(0, 16, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14", "ranks 0,2,..,14 (8 ranks)"),
        (range(0, 1024, 8), "ranks 0, 8, .., 1016 (128 ranks)", "ranks 0,8,..,1016 (128 ranks)"),
        ([0, 2, 5, 7, 9], "ranks 0, 2, 5, 7, 9", "ranks 0,2,5,.. (5 ranks)"),
        ([0, 1, 4, 5], "ranks 0-1, 4-5", "ranks 0-1,4-5"),
    ],
)
def test_many_ranks_at_even_distances_are_shortened(ranks, text, compact):
    assert (ranks_text(ranks), ranks_text(ranks, compact=True)) == (text, compact)


def test_uneven_runs_are_listed_in_full_unless_compact():
    runs = [(i * i, i * i) for i in range(10)]
    assert runs_text(runs) == "0, 1, 4, 9, 16, 25, 36, 49, 64, 81"
    assert runs_text(runs, compact=True) == "0,1,4,.."


def test_lists_name_the_first_items_and_count_the_others():
    assert list_text("abc", 3) == "a, b, c"
    assert list_text(range(2003), 3) == "0, 1, 2 and 2,000 more"
    assert (list_text([]), list_text([], empty="no folder")) == ("nothing", "no folder")
    assert (likewise_text([]), likewise_text("ab", 1)) == ("", "; likewise a and 1 more")
    assert first_lines(["a", "b", "c"], 2) == ["a", "b", "and 1 more"]
    assert first_lines(["a", "b"], 2) == ["a", "b"]
    assert (join_words(["a"]), join_words("abc")) == ("a", "a, b and c")


def test_names_stay_one_line_and_amounts_have_a_unit():
    assert (one_line("a\nb\ud800"), clip("abcdef", 5), clip("abc", 3)) == ("a\\nb\\ud800", "ab...", "abc")
    assert (amount_text(16_100_000_000), amount_text(1, is_bytes=False)) == ("16.1 GB", "1 element")
