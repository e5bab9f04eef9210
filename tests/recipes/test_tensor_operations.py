"""Operations on nests against numpy's own: every element comes from where numpy takes it."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xrank.errors import LayoutError
from xrank.layout.nests import addresses
from xrank.recipes.conversions import Direction, Rearrangement, place_input, run_operations

Arrays = Mapping[str, Sequence[np.ndarray]]


def made(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + prod(shape)).reshape(shape)


def run(
    kinds: str | Sequence[tuple[str, dict[str, Any]]],
    arrays: Arrays,
    targets: Sequence[str],
    config: Mapping[str, Any] | None = None,
    module: Mapping[str, tuple[int, ...]] | None = None,
    **arguments: Any,
) -> dict[str, np.ndarray]:
    """Run a converter on arrays, by its nests; `module` has the shapes of the module that it loads."""
    chain = [(kinds, arguments)] if isinstance(kinds, str) else kinds
    operations = tuple(Rearrangement(kind, tuple(each.items())) for kind, each in chain)
    side = Direction(tuple(arrays), tuple(targets), operations)
    inputs = {p: [place_input(f"{p}/{i}", each.shape) for i, each in enumerate(values)] for p, values in arrays.items()}
    sources = {f"{p}/{i}": each.ravel() for p, values in arrays.items() for i, each in enumerate(values)}
    found = {}
    for name, placed in run_operations(
        side, inputs, config or {}, is_save=module is None, module_shapes=module
    ).items():
        flat = np.full(prod(placed.shape), -1)
        for source, nest in placed.parts:
            for x, y in addresses(nest):
                assert flat[y] == -1, "an element has two sources"
                flat[y] = sources[source][x]
        assert (flat >= 0).all(), "an element has no source"
        found[name] = flat.reshape(placed.shape)
    return found


def equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> bool:
    return got.keys() == want.keys() and all(np.array_equal(got[name], want[name]) for name in want)


lengths = st.integers(1, 4)


@given(lengths, lengths, lengths, st.integers(0, 2), st.integers(1, 4))
def test_chunks_and_their_join(a: int, b: int, c: int, dim: int, count: int) -> None:
    shape = [a, b, c]
    shape[dim] *= count
    whole, names = made(*shape), [f"part{index}" for index in range(count)]
    parts = run("Chunk", {"whole": [whole]}, names, dim=dim)
    assert equal(parts, dict(zip(names, np.split(whole, count, dim), strict=True)))
    assert equal(run("Concatenate", {n: [v] for n, v in parts.items()}, ["whole"], dim=dim), {"whole": whole})


@given(lengths, lengths, lengths, st.integers(0, 1))
def test_stacks_of_experts(a: int, b: int, count: int, dim: int) -> None:
    experts = [made(a, b, start=100 * index) for index in range(count)]
    fused = run("MergeModulelist", {"experts.*.up": experts}, ["experts.up"], dim=dim)
    assert equal(fused, {"experts.up": np.stack(experts, dim)})
    apart = run("SplitModulelist", {"experts.up": [fused["experts.up"]]}, ["experts.*.up"], dim=dim)
    assert equal(apart, {f"experts.{index}.up": each for index, each in enumerate(experts)})


@given(lengths, lengths, lengths)
def test_experts_with_two_projections_each(a: int, b: int, count: int) -> None:
    gates = [made(a, b, start=100 * index) for index in range(count)]
    ups = [made(a, b, start=1000 + 100 * index) for index in range(count)]
    fuse = [("MergeModulelist", {"dim": 0}), ("Concatenate", {"dim": 1})]
    fused = run(fuse, {"e.*.gate": gates, "e.*.up": ups}, ["e.gate_up"])
    assert equal(fused, {"e.gate_up": np.concatenate([np.stack(gates), np.stack(ups)], 1)})
    part = [("Chunk", {"dim": 1}), ("SplitModulelist", {"dim": 0})]
    apart = run(part, {"e.gate_up": [fused["e.gate_up"]]}, ["e.*.gate", "e.*.up"])
    want = {f"e.{i}.gate": v for i, v in enumerate(gates)} | {f"e.{i}.up": v for i, v in enumerate(ups)}
    assert equal(apart, want)


@given(lengths, lengths, st.integers(0, 1))
def test_interleaved_halves(half: int, other: int, dim: int) -> None:
    whole = made(2 * half, other) if dim == 0 else made(other, 2 * half)
    first, second = np.split(whole, 2, dim)
    woven = np.stack([first, second], dim + 1).reshape(whole.shape)
    assert equal(run("Interleave", {"a": [whole]}, ["b"], dim=dim, inverse=True), {"b": woven})
    assert equal(run("Interleave", {"b": [woven]}, ["a"], dim=dim), {"a": whole})


@given(lengths, lengths, lengths)
def test_swapped_dims(a: int, b: int, c: int) -> None:
    assert equal(run("Transpose", {"a": [made(a, b, c)]}, ["b"], dim0=2, dim1=0), {"b": made(a, b, c).swapaxes(0, 2)})


def test_a_transpose_that_only_a_module_decides_is_none_when_saving() -> None:
    assert equal(run("Transpose", {"a": [made(2, 3)]}, ["b"], check_dims=True), {"b": made(2, 3)})


def test_the_modules_shapes_decide() -> None:
    module = {"q": (3, 2), "k": (1, 2), "v": (2, 2)}
    parts = {"q": made(6, 2)[:3], "k": made(6, 2)[3:4], "v": made(6, 2)[4:]}
    assert equal(run("Split", {"qkv": [made(6, 2)]}, ["q", "k", "v"], module=module), parts)
    with pytest.raises(LayoutError, match=r"7 rows of qkv are not the module's 3 \+ 1 \+ 2"):
        run("Split", {"qkv": [made(7, 2)]}, ["q", "k", "v"], module=module)
    for shape, want in (((2, 3), made(2, 3)), ((3, 2), made(2, 3).T)):
        assert equal(
            run("Transpose", {"a": [made(2, 3)]}, ["b"], module={"b": shape}, dim1=1, check_dims=True), {"b": want}
        )
    with pytest.raises(LayoutError, match="only a module shows"):
        run("Transpose", {"a": [made(2, 3)]}, ["b"], module={}, dim1=1, check_dims=True)


@given(st.integers(1, 3), st.integers(1, 3), lengths)
def test_rotary_halves(heads: int, half: int, width: int) -> None:
    """Pairs (x0, x1), (x2, x3) … of a head become its halves, as Llama's rotary embedding wants them."""
    whole = made(heads * 2 * half, width)
    want = whole.reshape(heads, half, 2, width).swapaxes(1, 2).reshape(whole.shape)
    config = {"vision_config": {"num_attention_heads": heads}}
    assert equal(run("PermuteForRope", {"q": [whole]}, ["p"], config, subconfig_key="vision_config"), {"p": want})
    back = run("PermuteForRope", {"p": [want]}, ["q"], config, subconfig_key="vision_config", inverse=True)
    assert equal(back, {"q": whole})


def test_rotary_halves_of_some_of_the_parts_only() -> None:
    chain = [("Chunk", {}), ("PermuteForRope", {"permute_layer_names": ("q",)})]
    found = run(chain, {"qv": [made(8, 1)]}, ["q", "v"], {"num_attention_heads": 1})
    assert equal(found, {"q": made(8, 1)[[0, 2, 1, 3]], "v": made(8, 1)[4:]})


def test_experts_of_two_kinds() -> None:
    gates, ups = [made(2, 3, start=10 * i) for i in range(4)], [made(2, 3, start=100 + 10 * i) for i in range(4)]
    fused = run("ErnieFuseAndSplitTextVisionExperts", {"e.*.gate": gates, "e.*.up": ups}, ["text", "vision"])
    want = {
        "text": np.concatenate([np.stack(gates[:2]), np.stack(ups[:2])], 1),
        "vision": np.concatenate([np.stack(gates[2:]), np.stack(ups[2:])], 1),
    }
    assert equal(fused, want)
    kind = "ErnieSplitAndDecoupleTextVisionExperts"
    apart = run(kind, {name: [value] for name, value in fused.items()}, ["e.*.gate", "e.*.up"])
    assert equal(apart, {f"e.{i}.{p}": v for p, each in (("gate", gates), ("up", ups)) for i, v in enumerate(each)})


def test_as_many_shards_as_the_config_counts() -> None:
    side = ({"a": [made(6, 1)]}, ["part.*"])
    found = run("Chunk", *side, {"text_config": {"parts": 3}}, num_shards_attribute="parts")
    assert equal(found, {f"part.{i}": made(6, 1)[2 * i : 2 * i + 2] for i in range(3)})
    with pytest.raises(LayoutError, match="3 tensors match"):
        run("Concatenate", {"a": [made(1)] * 3}, ["b"], {"parts": 4}, num_shards_attribute="parts")


@pytest.mark.parametrize(
    "kind, arrays, targets",
    [
        ("Concatenate", {"a": [made(2, 3)], "b": [made(2, 4)]}, ["c"]),
        ("Chunk", {"a": [made(3, 1)]}, ["b", "c"]),
        ("Chunk", {"a": [made(2, 1)], "b": [made(2, 1)]}, ["c", "d"]),
        ("Split", {"a": [made(4, 1)]}, ["b", "c"]),
    ],
)
def test_what_transformers_could_not_convert_either(kind: str, arrays: Arrays, targets: list[str]) -> None:
    if kind == "Chunk" and len(arrays) == 1:
        assert [each.shape for each in run(kind, arrays, targets).values()] == [(2, 1), (1, 1)]  # as torch.chunk
        return
    with pytest.raises(LayoutError):
        run(kind, arrays, targets)
