"""Recipes against numpy, and against a walk over all indices by name."""

import math
import random
from itertools import product

import numpy as np
import pytest

from xrank.errors import LayoutError
from xrank.layout.nests import Nest, addresses, intersect, size
from xrank.layout.notation import Parts, Product, Size
from xrank.recipes.recipe import Pairing, pair, parse_side, reverse_pairing, single_tensors

pytestmark = pytest.mark.quick

QKV = "[g <q: r d | k: d | v: d>, h]"
TARGETS = {"q": "q [g r d, h]", "k": "k [g d, h]", "v": "v [g d, h]"}
SIZES = {"g": 3, "r": 2, "d": 4, "h": 5}


def copied(pairing: Pairing, source: np.ndarray) -> np.ndarray:
    """Return the target that a pairing makes of a source."""
    target = np.full(math.prod(pairing.target_shape), -1)
    flat = source.ravel()
    for x, y in addresses(pairing.nest):
        assert target[y] == -1
        target[y] = flat[x]
    return target.reshape(pairing.target_shape)


def test_fused_attention_comes_apart():
    found = pair(QKV, TARGETS, SIZES)
    source = np.arange(3 * 16 * 5).reshape(3, 4, 4, 5)  # g, (r + 1 + 1), d, h
    assert (copied(found["q"], source) == source[:, :2].reshape(24, 5)).all()
    assert (copied(found["k"], source) == source[:, 2].reshape(12, 5)).all()
    assert (copied(found["v"], source) == source[:, 3].reshape(12, 5)).all()
    assert found["q"].source_shape == (48, 5) and found["k"].target_shape == (12, 5)
    assert found["k"].nest == Nest(40, 0, ((3, 80, 20), (20, 1, 1)))


def test_reversed_it_splits():
    source = np.arange(3 * 16 * 5)
    whole = np.full(240, -1)
    for pairing in pair(QKV, TARGETS, SIZES).values():
        part, back = copied(pairing, source), reverse_pairing(pairing)
        assert str(back.source) == str(pairing.target) and reverse_pairing(back) == pairing
        for x, y in addresses(back.nest):
            assert whole[y] == -1
            whole[y] = part.ravel()[x]
    assert (whole == source).all()


def test_permutations_transposes_and_swizzles():
    """Example 14 of the notation, and others."""
    sizes = {"n": 3, "two": 2, "half": 4, "h": 5}
    rope = pair("[n half two, h]", {"": "[n two half, h]"}, sizes)[""]
    source = np.arange(3 * 8 * 5)
    expected = source.reshape(3, 4, 2, 5).transpose(0, 2, 1, 3).reshape(24, 5)
    assert (copied(rope, source) == expected).all()
    transposed = pair("[h, n]", {"": "[n, h]"}, sizes)[""]
    assert (copied(transposed, np.arange(15)) == np.arange(15).reshape(5, 3).T).all()
    swizzled = pair("[a b, c d]", {"w": "[a, c, d b]"}, {"a": 2, "b": 4, "c": 3, "d": 4})["w"]
    source = np.arange(96)
    expected = source.reshape(2, 4, 3, 4).transpose(0, 2, 3, 1).reshape(2, 3, 16)
    assert (copied(swizzled, source) == expected).all()


def test_parts_on_both_sides_are_paired_by_name():
    """GPT-2: heads of q, k, v in turn become all of q, then k, then v, and the whole is transposed."""
    sizes = {"n": 3, "d": 4, "h": 5}
    fused = "c_attn [h, <q: n d | k: n d | v: n d>]"
    found = pair("[n <q: d | k: d | v: d>, h]", dict.fromkeys("qkv", fused), sizes)
    source = np.arange(3 * 12 * 5)
    target = np.full(5 * 36, -1)
    for pairing in found.values():
        for x, y in addresses(pairing.nest):
            assert target[y] == -1
            target[y] = source[x]
    assert (target.reshape(5, 36) == source.reshape(3, 3, 4, 5).transpose(1, 0, 2, 3).reshape(36, 5).T).all()


def test_gate_and_up_in_both_orders():
    sizes = {"f": 3, "h": 2}
    halves = pair("[<gate: f | up: f>, h]", {"gate": "[f, h]", "up": "[f, h]"}, sizes)
    source = np.arange(12)
    assert (copied(halves["up"], source) == source.reshape(2, 3, 2)[1]).all()
    turns = pair("[f <gate: 1 | up: 1>, h]", {"gate": "[f, h]", "up": "[f, h]"}, sizes)
    assert (copied(turns["up"], source) == source.reshape(3, 2, 2)[:, 1]).all()


def test_equal_sizes_pair_in_the_order_of_the_text():
    """A square weight of a fused tensor needs no second name; a transpose of one does."""
    sizes = {"h": 3, "d": 2}
    source = np.arange(2 * 3 * 3).reshape(2, 3, 3)
    found = pair("[<q: h | k: h>, h]", {"q": "[h, h]", "k": "[h, h]"}, sizes)
    assert (copied(found["k"], source) == source[1]).all()
    turned = pair("[d, h, h]", {"": "[h, d, h]"}, sizes)[""]
    assert (copied(turned, source) == source.transpose(1, 0, 2)).all()
    numbers = pair("[h 3 2, d]", {"": "[d, 2 h 3]"}, sizes)[""]  # named 3s would be as good
    source = np.arange(36).reshape(3, 3, 2, 2)
    assert (copied(numbers, source) == source.transpose(3, 2, 0, 1).reshape(2, 18)).all()


def test_a_sum_is_one_size():
    """Latent attention: the positions of a head, still and turned, stay together."""
    sizes = {"a": 2, "s": 3, "t": 1, "l": 5}
    found = pair("[a (s + t), l]", {"": "q_b.weight [l, a (s + t)]"}, sizes)[""]
    source = np.arange(2 * 4 * 5).reshape(8, 5)
    assert found.source_shape == (8, 5)
    assert (copied(found, source) == source.T).all()
    in_part = pair("[<c: l | p: a (s + 2 t)>]", {"c": "[l]", "p": "[(s + 2 t) a]"}, sizes)["p"]
    assert (copied(in_part, np.arange(15)) == np.arange(5, 15).reshape(2, 5).T.ravel()).all()


def test_layers_and_experts_move_into_names():
    sizes = {"L": 2, "e": 3, "f": 4, "h": 5}
    name = "layers.{{L}}.experts.{{e}}.{}_proj.weight [f, h]"
    found = pair("[L, e, <gate: f | up: f>, h]", {key: name.format(key) for key in ("gate", "up")}, sizes)
    source = np.arange(2 * 3 * 8 * 5).reshape(2, 3, 8, 5)
    singles = list(single_tensors(found["up"]))
    assert [new for _, new, _ in singles][:4] == [
        "layers.0.experts.0.up_proj.weight",
        "layers.0.experts.1.up_proj.weight",
        "layers.0.experts.2.up_proj.weight",
        "layers.1.experts.0.up_proj.weight",
    ]
    for (old, _, nest), (layer, expert) in zip(singles, product(range(2), range(3)), strict=True):
        assert old == "" and size(nest) == 20 and nest.y == 0
        assert [int(source.ravel()[x]) for x, _ in addresses(nest)] == source[layer, expert, 4:].ravel().tolist()
    # The other way: many tensors stack into one, and names into other names.
    back = reverse_pairing(found["up"])
    assert [(old, new) for old, new, _ in single_tensors(back)][5] == ("layers.1.experts.2.up_proj.weight", "")
    renamed = pair("a.{L}.{e} [f, h]", {"": "b.{e}.{L} [h, f]"}, sizes)[""]
    pairs = {old: (new, nest) for old, new, nest in single_tensors(renamed)}
    assert pairs["a.1.2"][0] == "b.2.1"
    assert sorted(y for _, y in addresses(pairs["a.1.2"][1])) == list(range(20)) and len(pairs) == 6
    split = pair("layers.{V P n}.w [h]", {"": "stages.{P}.{V n}.w [h]"}, {"V": 2, "P": 2, "n": 3, "h": 1})[""]
    assert [new for _, new, _ in single_tensors(split)][3:6] == ["stages.1.0.w", "stages.1.1.w", "stages.1.2.w"]


def test_equal_sides_are_the_identity_whatever_they_hold():
    for text in ("[h, h]", "[3 2, h 4]", "[]"):
        pairing = pair(text, {"": f"other.name {text}"}, {"h": 2})[""]
        count = math.prod(pairing.source_shape)
        assert list(addresses(pairing.nest)) == [(i, i) for i in range(count)]
    stacked = pair("[L, h, h]", {"": "layers.{L}.w [h, h]"}, {"L": 2, "h": 3})[""]
    assert [(new, nest) for _, new, nest in single_tensors(stacked)] == [
        ("layers.0.w", Nest(0, 0, ((9, 1, 1),))),
        ("layers.1.w", Nest(9, 0, ((9, 1, 1),))),
    ]


@pytest.mark.parametrize(
    ("source", "targets", "message"),
    [
        ("[h, h]", {"": "[h]"}, "'h' is twice in the source and once in the target"),
        ("[a, h]", {"": "[h]"}, "'a' is once in the source and not in the target"),
        ("[h, h, a]", {"": "[a, h]"}, "'h' is twice in the source and once in the target"),
        ("[h]", {"": "[a, h]"}, "'a' is not in the source and once in the target"),
        ("[h, 2]", {"": "[3, h]"}, "'2' is once in the source and not in the target"),
        ("[(a + h), b]", {"": "[b, (h + a)]"}, r"'a \+ h' is once|'\(a \+ h\)' is once in the source and not"),
        ("[(a + h)]", {"": "[<q: a | k: h>]"}, "has no part ''"),
        ("[<q: a | k: h>]", {"q": "[(a + h)]", "k": "[(a + h)]"}, "'a' is once in the source and not in the target"),
        ("[a, b]", {"": "[b, 1 a, x]"}, "size 'x' of .* is not known"),
        ("[a, zero]", {"": "[zero, a]"}, "has no element"),
        ("[<q: a | k: a>]", {"q": "[a]"}, "part 'k' on one side only"),
        ("[<q: a | k: a>]", {"q": "[a]", "k": "[a]", "v": "[a]"}, "part 'v' on one side only"),
        ("[a]", {"q": "[a]", "k": "[a]"}, "has no parts, and 2 targets"),
        ("[a]", {}, "has no parts, and 0 targets"),
        ("[<q: a | k: a>, <x: b | y: b>]", {"q": "[a]"}, "parts in two places"),
        ("[<q: a | k: <q: a>>]", {"q": "[a]"}, "two parts of .* are called 'q'"),
        ("[a]", {"": "[<q: a | k: a>]"}, "has no part ''"),
        ("[<q: a | k: a>]", {"q": "[<k: a | v: a>]", "k": "[<k: a | v: a>]"}, "has no part 'q'"),
        ("[a/tp]", {"": "[a]"}, "contains a/tp"),
        ("[a]", {"": "w.{pad(a, 4)} []"}, r"contains pad\(a, 4\)"),
        ("flat(q [a])", {"": "[a]"}, r"holds flat|cannot be read"),
        ("[a] where tp=0", {"": "[a]"}, "has a clause"),
        ("[a", {"": "[a]"}, "a side of a recipe cannot be read"),
        ("w.{a", {"": "[a]"}, "a side of a recipe cannot be read"),
        ("w", {"": "[a]"}, "a side of a recipe cannot be read"),
        ("[big big2]", {"": "[big2 big]"}, "too many elements"),
    ],
)
def test_refusals(source, targets, message):
    with pytest.raises(LayoutError, match=message):
        pair(source, targets, {"a": 2, "b": 3, "h": 2, "zero": 0, "big": 1 << 40, "big2": 1 << 40})


def test_too_many_names_are_refused():
    pairing = pair("[L, h]", {"": "layers.{L} [h]"}, {"L": 1 << 40, "h": 1})[""]
    with pytest.raises(LayoutError, match="too many tensors"):
        next(single_tensors(pairing))


def test_random_recipes_pair_what_has_the_same_names():
    rng = random.Random(20261111)
    for _ in range(400):
        sizes = {name: rng.randint(1, 3) for name in "abcdef"[: rng.randint(1, 5)]}
        names = list(sizes)
        parts = rng.randint(0, 1) and rng.randint(1, 3)
        at = rng.randint(0, len(names))
        kept = [rng.sample(names[at:], rng.randint(0, len(names) - at)) for _ in range(parts)]
        body = " | ".join(f"p{i}: {' '.join(part) or '1'}" for i, part in enumerate(kept))
        source = grouped(rng, [*names[:at], *([f"<{body}>"] if parts else names[at:])])
        targets = {}
        for i, part in enumerate(kept if parts else [names[at:]]):
            order = rng.sample([*names[:at], *part], at + len(part))
            targets[f"p{i}"] = grouped(rng, order)
        found = pair(source, targets, sizes)
        for key, pairing in found.items():
            assert sorted(addresses(pairing.nest)) == walked(source, targets[key], key if parts else "", sizes)
            by_name = [(new, nest) for _, new, nest in single_tensors(pairing)]
            assert sum(size(nest) for _, nest in by_name) == size(pairing.nest)


def grouped(rng, factors: list[str]) -> str:
    """Return the factors as dims, some in a name, some side by side."""
    dims: list[list[str]] = []
    for factor in factors:
        if dims and rng.randint(0, 1):
            dims[-1].append(factor)
        else:
            dims.append([factor])
    texts = [" ".join(dim) for dim in dims]
    in_name = rng.randint(0, len(texts)) if rng.randint(0, 1) else 0
    return "".join(f"t{{{text}}}." for text in texts[:in_name]) + f" [{', '.join(texts[in_name:])}]"


def walked(source: str, target: str, part: str, sizes: dict[str, int]) -> list[tuple[int, int]]:
    """Return (source address, target address) for every choice of an index for each name of the target."""
    sides = [Product(parse_side(text).all_dims) for text in (source, target)]
    names = sorted(name for name in sizes if f" {name} " in f" {' '.join(words(target))} ")
    found = []
    for indices in product(*(range(sizes[name]) for name in names)):
        at = dict(zip(names, indices, strict=True))
        found.append(tuple(address(side, part, at, sizes)[0] for side in sides))
    return sorted(found)


def words(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.replace("t{", "{")).split()


def address(node, part, at, sizes) -> tuple[int, int]:
    """Return the address of named indices within a node, and the node's size."""
    match node:
        case Size(value):
            return (at.get(value, 0), sizes[value]) if isinstance(value, str) else (0, value)
        case Product(factors):
            where, total = 0, 1
            for factor in factors:
                inner, count = address(factor, part, at, sizes)
                where, total = where * count + inner, total * count
            return where, total
        case Parts(parts):
            where, total = None, 0
            for p in parts:
                inner, count = address(p.of, part, at, sizes)
                where = total + inner if p.name == part else where
                total += count
            assert where is not None
            return where, total


def test_a_recipe_composes_with_a_layout():
    """Rank's nests through the recipe: what a rank of Megatron's fused rows holds of q."""
    pairing = pair(QKV, TARGETS, SIZES)["q"]
    rank = Nest(0, 80, ((80, 1, 1),))  # group 1 of 3
    assert [size(nest) for nest in intersect(rank, pairing.nest)] == [40]
