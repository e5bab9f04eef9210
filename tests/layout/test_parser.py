import pickle
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampled import count_of
from xrank.errors import LayoutError
from xrank.layout.notation import (
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_SIZE,
    Flat,
    LayoutTree,
    Member,
    Pad,
    Part,
    Parts,
    Product,
    Size,
    Split,
    Where,
    axes_of,
    count_names_of,
    parse,
    render,
    render_dim,
    size_names_of,
)

pytestmark = pytest.mark.quick

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,6}", fullmatch=True)
size_names = names.filter(lambda name: name != "pad")
counts = st.lists(st.integers(0, MAX_SIZE) | names, min_size=1, max_size=3).map(tuple)
sizes = st.builds(Size, st.integers(0, MAX_SIZE) | size_names)


def splits(of):
    listed = st.builds(
        Split, of, names, st.just("/"), st.none() | counts, st.lists(counts, min_size=1, max_size=3).map(tuple)
    )
    return st.builds(Split, of, names, st.sampled_from(["/", "/~", "/="]), st.none() | counts) | listed


def flattened(factors):
    return Product(
        tuple(f for factor in factors for f in (factor.factors if isinstance(factor, Product) else (factor,)))
    )


def wider(of):
    parts = st.lists(st.tuples(names, of), min_size=1, max_size=3, unique_by=lambda part: part[0])
    return (
        splits(of)
        | st.lists(of, min_size=2, max_size=3).map(flattened)
        | parts.map(lambda parts: Parts(tuple(Part(*part) for part in parts)))
        | st.lists(of, min_size=2, max_size=3).map(lambda addends: Parts(tuple(Part("", one) for one in addends)))
        | st.builds(Pad, of, counts)
    )


dims = st.recursive(sizes, wider, max_leaves=8)
dim_lists = st.lists(dims, max_size=4).map(tuple)
titles = st.from_regex(r"[A-Za-z0-9_.\-]{1,8}", fullmatch=True).filter(lambda title: title != "pad")
members = st.lists(st.builds(Member, titles, dim_lists), min_size=1, max_size=3, unique_by=lambda member: member.name)
flats = st.builds(Flat, members.map(tuple), st.none() | counts)
flat_dims = (flats | splits(flats) | splits(splits(flats))).map(lambda dim: (dim,))
digits = st.integers(0, 99)
wheres = st.one_of(
    st.builds(Where, names, st.none(), st.none()),
    st.builds(lambda axis, first, more: Where(axis, first, first + more), names, digits, digits),
)
trees = st.builds(
    LayoutTree,
    dim_lists | flat_dims,
    st.none() | names,
    st.lists(wheres, max_size=3, unique_by=lambda where: where.axis).map(tuple),
    st.lists(names, max_size=2, unique=True).map(tuple),
)

VALID = [
    "[]",
    "[f/tp, h]",
    "[f/tp/~dp, h]",
    "[5/~dp]",
    "[ a.b_1 / x /~ y , 3 ]",
    "[\td0,\n0]",
    "[g/tp <q: r d | k: d | v: d>, h]",
    "[pad(v/~tp, 4*tp)/=dp%128/x%2*y{3,0}, (2 f)/tp]",
    'flat(q "[64,64]", b [64], pad 2*dp)/dp/~x',
    "[<a: 7/pp{3,4} | b: 5/pp{4,1}>] in kv where pp=0..1, tp=last sum(dp) sum(cp)",
]


@given(trees)
@settings(max_examples=count_of(60), deadline=None)
def test_text_and_tree_round_trip(tree):
    text = render(tree)
    assert parse(text) == tree
    assert render(parse(text)) == text


@given(trees, st.data())
@settings(max_examples=count_of(40), deadline=None)
def test_blanks_between_tokens_do_not_matter(tree, data):
    text = render(tree)
    for mark in "[],<>|*%{}=":
        blank = data.draw(st.sampled_from(["", " ", "\n\t"]))
        text = text.replace(mark, blank + mark + blank) if mark != "=" or "/=" not in text else text
    assert parse(text) == tree


def test_reads_trees():
    assert parse("[]") == LayoutTree(())
    assert parse("[f/tp/~dp, 3]").dims == (Split(Split(Size("f"), "tp", "/"), "dp", "/~"), Size(3))
    assert parse("[2 f/tp]").dims == (Product((Size(2), Split(Size("f"), "tp", "/"))),)
    assert parse("[(2 f)/tp]").dims == (Split(Product((Size(2), Size("f"))), "tp", "/"),)
    assert parse("[a (b (c)) d]") == parse("[a b c d]")
    assert parse("[((f))/tp]") == parse("[f/tp]")
    assert parse("[f/=tp%128, g/dp{0,4*r}]").dims == (
        Split(Size("f"), "tp", "/=", (128,)),
        Split(Size("g"), "dp", "/", None, ((0,), (4, "r"))),
    )
    tree = parse("[h] sum(tp) in kv where pp=0..3, x=last")
    assert (tree.view, tree.where, tree.sums) == ("kv", (Where("pp", 0, 3), Where("x", None, None)), ("tp",))
    assert render(tree) == "[h] in kv where pp=0..3, x=last sum(tp)"
    assert parse('flat(0.weight "[64, h/tp]", a-b [], pad 4)/dp').dims == (
        Split(Flat((Member("0.weight", (Size(64), Split(Size("h"), "tp", "/"))), Member("a-b", ())), (4,)), "dp", "/"),
    )
    # Keywords are words only where they mean something.
    assert parse("[where sum, in flat/last]").dims[1] == Product((Size("in"), Split(Size("flat"), "last", "/")))


def test_what_a_dim_holds():
    dim = parse("[pad(<q: r d/tp | k: d/tp>, 4*x)/dp%u{y,0}]").dims[0]
    assert axes_of(dim) == ("tp", "dp")
    assert size_names_of(dim) == ("r", "d") and count_names_of(dim) == ("x", "u", "y")
    assert render_dim(dim) == "pad(<q: r d/tp | k: d/tp>, 4*x)/dp%u{y,0}"
    assert size_names_of(Size(3)) == ()


@pytest.mark.parametrize("text", VALID)
def test_every_truncation_is_refused_near_its_end(text):
    parse(text)
    for end in range(len(text)):
        try:
            tree = parse(text[:end])
        except LayoutError as error:  # at the end, or at the word that the cut left half
            position = int(error.got.rsplit(" ", 1)[1])
            assert len(text[:end].rstrip()[position:]) < 6 and position <= end
        else:  # a split or a clause less
            assert text[:end].strip()[-1] not in ",/~=%*{(<[|:."
            assert parse(render(tree)) == tree


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
        ("[1.5]", 2, "'[1>>>.5]'", "a term"),
        ("[2f]", 2, "'[2>>>f]'", "after the integer"),
        ("[pad(f, 2f)]", 9, "'[pad(f, 2>>>f)]'", "after the integer"),
        ("[f\x00]", 2, "'[f>>>\\x00]'", "a split"),
        ("[é]", 1, "'[>>>é]'", "a size"),
        ("[٣]", 1, "'[>>>٣]'", "a size"),
        ("[None, 'tp']", 7, "'[None, >>>'tp']'", "a size"),
        (f"[{MAX_SIZE + 1}]", 1, None, "an integer up to"),
        ("[" + "9" * 9000 + "]", 1, None, "an integer up to"),
        ("[H*d/tp]", 2, "'[H>>>*d/tp]'", "a split, a term"),
        ("[f%128/=tp]", 2, "'[f>>>%128/=tp]'", "a split, a term"),
        ("[()]", 2, "'[(>>>)]'", "a size"),
        ("[(a b]", 5, "'[(a b>>>]'", '")"'),
        ("[<>]", 2, "'[<>>>>]'", "a part's name"),
        ("[<a: 1 | a: 2>]", 9, "'[<a: 1 | >>>a: 2>]'", "no other part"),
        ("[<a 1>]", 4, "'[<a >>>1>]'", '":"'),
        ("[pad]", 4, "'[pad>>>]'", '"("'),
        ("[pad(v)]", 6, "'[pad(v>>>)]'", '","'),
        ("[pad(v, )]", 8, "'[pad(v, >>>)]'", "a count"),
        ("[pad(v, 4*)]", 10, "'[pad(v, 4*>>>)]'", "a count"),
        ("[f/~tp{1,2}]", 6, "'[f/~tp>>>{1,2}]'", "no listed sizes"),
        ("[f/tp{}]", 6, "'[f/tp{>>>}]'", "a count"),
        ("[f/tp%]", 6, "'[f/tp%>>>]'", "a count"),
        ("[f/tp{1}%2]", 8, "'[f/tp{1}>>>%2]'", "a split"),
        ("[h] where", 9, "'[h] where>>>'", "an axis"),
        ("[h] where tp", 12, "'[h] where tp>>>'", '"="'),
        ("[h] where tp=first", 13, "'[h] where tp=>>>first'", "an index: an integer, a range"),
        ("[h] where tp=3..1", 16, "'[h] where tp=3..>>>1'", "an index of 3"),
        ("[h] where tp=0, tp=1", 16, "'[h] where tp=0, >>>tp=1'", "without an index"),
        ("[h] where tp=0 where dp=0", 15, None, "a clause"),
        ("[h] in kv in kv", 10, None, "a clause"),
        ("[h] sum(tp) sum(tp)", 16, None, "summed once"),
        ("[h] sum", 7, "'[h] sum>>>'", '"("'),
        ("[h] when tp=0", 4, "'[h] >>>when tp=0'", "a clause"),
        ("flat", 4, "'flat>>>'", '"("'),
        ("flat()", 5, "'flat(>>>)'", "a tensor's name"),
        ("flat(q)", 6, "'flat(q>>>)'", '"["'),
        ("flat(pad 4)", 9, "'flat(pad >>>4)'", '"["'),
        ('flat(q "[4]', 11, "'flat(q \"[4]>>>'", '"""'),
        ("flat(q [4], q [4])", 12, None, "no other member"),
        ("flat(q [4], pad 4, r [4])", 17, None, '"*" or ")"'),
        ("flat(q [4] where tp=0)", 11, None, '"," or ")"'),
        ("[flat(q [4])]", 5, "'[flat>>>(q [4])]'", None),
    ],
)
def test_refusals_name_text_place_and_want(text, position, shown, want):
    with pytest.raises(LayoutError) as caught:
        parse(text)
    error = caught.value
    if want is None:
        return
    assert error.got.endswith(f", position {position}")
    assert shown is None or error.got.startswith(shown)
    assert want in error.want
    assert f"position {position}" in str(error) and len(str(error)) < 300


@given(
    st.text(alphabet='[]/~,(){}<>|:%=* .\n09afé_\x00"', max_size=40)
    | st.lists(
        st.sampled_from(
            [
                "flat(",
                "pad(",
                "[",
                "]",
                "(",
                ")",
                "<a:",
                "|b:",
                ">",
                "f",
                "3",
                "/tp",
                "/=x",
                "%2",
                "{1,2}",
                ",",
                "where",
                "sum(x)",
                "in v",
                "tp=0",
                '"',
            ]
        ),
        max_size=14,
    ).map(" ".join)
    | st.text(max_size=40)
)
def test_any_text_is_read_or_refused(text):
    try:
        tree = parse(text)
    except LayoutError as error:
        assert error.want
    else:
        assert parse(render(tree)) == tree


def test_length_and_depth_have_limits():
    parse("[" + ",".join(["f"] * (MAX_CHARACTERS // 2 - 1)) + "]")
    with pytest.raises(LayoutError, match="too long"):
        parse("[" * (MAX_CHARACTERS + 1))
    parse("[f" + "/a" * (MAX_DEPTH - 1) + "]")
    with pytest.raises(LayoutError, match="splits in one dim"):
        parse("[f" + "/a" * MAX_DEPTH + "]")
    parse("[" + "(" * (MAX_DEPTH - 1) + "f" + ")" * (MAX_DEPTH - 1) + "]")
    with pytest.raises(LayoutError, match="groups in each other"):
        parse("[" + "(" * MAX_DEPTH + "f" + ")" * MAX_DEPTH + "]")
    for opened in ("(2 ", "<a: ", "pad("):
        for closed in (")/x", "> 3", ", 2)/x"):
            for depth in (12, 31, 40):
                with pytest.raises(LayoutError):
                    parse("[" + opened * depth + "f" + closed * depth + "]x")
    with pytest.raises(LayoutError, match="at most"):
        parse("[" + "(2 " * 20 + "f" + ")/x/y" * 20 + "]")


@pytest.mark.parametrize(
    "mark",
    ["[", "/", "(", "<", "{", "[f,", "[f/a", "[(", "[<a:", "[<a:f|", "[pad(", "flat(", "flat(a[],", "[f/a{1,",
     "[f/a%2*", "[] sum(a) ", "[] where a=1,", "[f ", "[(f) ", "[f/a f", "[<a: 1> ", "[pad(f, 2) ", "\t", "9", "\""],
)  # fmt: skip
def test_long_texts_end_soon(mark):
    begun = time.process_time()
    with pytest.raises(LayoutError):
        parse((mark[0] + mark[1:] * MAX_CHARACTERS)[:MAX_CHARACTERS])
    with pytest.raises(LayoutError):
        parse((mark * MAX_CHARACTERS)[:MAX_CHARACTERS])
    body = "[" + ("<" + "|".join(f"p{i}:1" for i in range(900)) + ">")
    parse(body + "]")
    assert time.process_time() - begun < 3


@pytest.mark.parametrize("value", [None, b"[f]", 3])
def test_only_text_is_read(value):
    with pytest.raises(LayoutError, match="not text"):
        parse(value)


def test_a_tree_in_another_process_has_that_process_hash():
    code = "import pickle, sys; from xrank.layout.notation import parse; "
    tree = parse("[f/tp, h] where pp=last")
    ask = f"print(pickle.loads(bytes.fromhex({pickle.dumps(tree).hex()!r})) in {{parse('[f/tp, h] where pp=last')}})"
    done = subprocess.run([sys.executable, "-c", code + ask], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
