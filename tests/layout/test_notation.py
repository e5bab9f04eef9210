import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrank.errors import LayoutError
from xrank.layout.notation import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_SIZE,
    Size,
    Split,
    axes_of,
    parse,
    render,
    render_dim,
    size_names_of,
)

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,6}", fullmatch=True)
sizes = st.builds(Size, st.integers(0, MAX_SIZE) | names)
dims = st.recursive(sizes, lambda of: st.builds(Split, of, names, st.sampled_from(["/", "/~"])), max_leaves=6)
layouts = st.lists(dims, max_size=5).map(tuple)

VALID = ["[]", "[f/tp, h]", "[f/tp/~dp, h]", "[5/~dp]", "[ a.b_1 / x /~ y , 3 ]", "[\td0,\n0]"]


@given(layouts)
def test_text_and_tree_round_trip(trees):
    text = render(trees)
    assert parse(text) == trees
    assert render(parse(text)) == text


@given(layouts, st.data())
def test_blanks_between_tokens_do_not_matter(trees, data):
    text = render(trees)
    for mark in ("[", "]", ",", "/~", "/"):
        blank = data.draw(st.sampled_from(["", " ", "\n\t"]))
        text = text.replace(mark, blank + mark + blank) if mark != "/" or "/~" not in text else text
    assert parse(text) == trees


def test_reads_trees():
    assert parse("[]") == ()
    assert parse("[f/tp/~dp, 3]") == (Split(Split(Size("f"), "tp", "/"), "dp", "/~"), Size(3))
    dim = parse("[f/tp/~dp]")[0]
    assert axes_of(dim) == ("tp", "dp") and size_names_of(dim) == ("f",) and render_dim(dim) == "f/tp/~dp"
    assert size_names_of(Size(3)) == ()


@pytest.mark.parametrize("text", VALID)
def test_every_truncation_is_refused_at_its_end(text):
    for end in range(len(text)):
        with pytest.raises(LayoutError) as caught:
            parse(text[:end])
        assert f"position {end}" in caught.value.got
        assert "the text ends" in caught.value.message


@pytest.mark.parametrize(
    ("text", "position", "shown", "want"),
    [
        ("", 0, "'>>>'", "begins with"),
        ("f/tp", 0, "'>>>f/tp'", "begins with"),
        ("[f/tp, h", 8, "'[f/tp, h>>>'", '"]"'),
        ("[f/tp,, h]", 6, "'[f/tp,>>>, h]'", "a size"),
        ("[f/tp, h]]", 9, "'[f/tp, h]>>>]'", "the end"),
        ("[,]", 1, "'[>>>,]'", "a size"),
        ("[f/]", 3, "'[f/>>>]'", "an axis"),
        ("[f/2]", 3, "'[f/>>>2]'", "an axis"),
        ("[f/ ~tp]", 4, "'[f/ >>>~tp]'", "an axis"),
        ("[/tp]", 1, "'[>>>/tp]'", "a size"),
        ("[-1]", 1, "'[>>>-1]'", "a size"),
        ("[1.5]", 2, "'[1>>>.5]'", '"]"'),
        ("[2f]", 2, "'[2>>>f]'", "after the integer"),
        ("[f\x00]", 2, "'[f>>>\\x00]'", '"]"'),
        ("[é]", 1, "'[>>>é]'", "a size"),
        ("[٣]", 1, "'[>>>٣]'", "a size"),
        ("[None, 'tp']", 7, "'[None, >>>'tp']'", "a size"),
        (f"[{MAX_SIZE + 1}]", 1, None, "an integer up to"),
        ("[" + "9" * 9000 + "]", 1, None, "an integer up to"),
    ],
)
def test_refusals_name_text_place_and_want(text, position, shown, want):
    with pytest.raises(LayoutError) as caught:
        parse(text)
    error = caught.value
    assert error.got.endswith(f", position {position}")
    assert shown is None or error.got.startswith(shown)
    assert want in error.want
    assert f"position {position}" in str(error) and len(str(error)) < 300


@pytest.mark.parametrize(
    ("text", "construct"),
    [
        ("[g r/tp]", "a product"),
        ("[2 f]", "a product"),
        ("[(g r)/tp]", "a group"),
        ("[pad(v, 4)/tp]", "pad(...)"),
        ("[<a: 1 | b: 2>]", "parts"),
        ("[f/=tp]", "a balanced split"),
        ("[f/tp%128]", "multiples"),
        ("[f/tp{3,0}]", "listed sizes"),
        ("[h] where tp=0", "a clause"),
        ("[h] sum(tp)", "a clause"),
        ('flat(q "[64]")/dp', "flat(...)"),
    ],
)
def test_the_wider_grammar_is_refused_by_name(text, construct):
    with pytest.raises(LayoutError) as caught:
        parse(text)
    assert construct in caught.value.next_step and "yet" in caught.value.next_step


@given(st.text(alphabet="[]/~,(){}<>|:%=* .\n09afé_\x00", max_size=40) | st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        trees = parse(text)
    except LayoutError as error:
        assert error.want
    else:
        assert parse(render(trees)) == trees


def test_length_and_depth_have_limits():
    parse("[" + ",".join(["f"] * (MAX_CHARACTERS // 2 - 1)) + "]")
    with pytest.raises(LayoutError, match="too long"):
        parse("[" * (MAX_CHARACTERS + 1))
    parse("[f" + "/a" * (MAX_DEPTH - 1) + "]")
    with pytest.raises(LayoutError, match="splits in one dim"):
        parse("[f" + "/a" * MAX_DEPTH + "]")
    for mark in ("[", "/", "(", "[f,", "[f/a"):
        with pytest.raises(LayoutError):
            parse((mark * MAX_CHARACTERS)[:MAX_CHARACTERS])


@pytest.mark.parametrize("value", [None, b"[f]", 3])
def test_only_text_is_read(value):
    with pytest.raises(LayoutError, match="not text"):
        parse(value)
