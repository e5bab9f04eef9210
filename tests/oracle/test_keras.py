"""Keras on 8 devices of JAX as the judge: which part each device holds, and what is refused, over random cases.

Keras reads its backend, and JAX its number of devices, from the environment when they are imported, so that they run in
a process of their own: it gets the cases, and answers for each with the parts of all devices, or with who refused.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.local_part import local_part
from xrank.layout.nests import addresses

SEED = 2026
CASES = 400
AXES = ("data", "model", "x")
SHAPES = ((8,), (1, 8), (2, 4), (4, 2), (8, 1), (2, 2, 2), (1, 4, 2), (2, 1, 4))
SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24)

KERAS = """
import json, sys
import jax
import numpy as np
from keras.distribution import DeviceMesh, LayoutMap, TensorLayout, distribute_tensor

def parts(case):
    mesh = DeviceMesh(case["shape"], case["names"], [f"cpu:{rank}" for rank in case["ranks"]])
    layout = TensorLayout([axis or None for axis in case["axes"]], mesh)
    size = int(np.prod(case["tensor"], dtype=int))
    whole = np.arange(size, dtype=np.int32).reshape(case["tensor"])
    placed = distribute_tensor(jax.numpy.asarray(whole), layout)
    return {shard.device.id: np.asarray(shard.data).ravel().tolist() for shard in placed.addressable_shards}

def found(case):
    layout_map = LayoutMap(None)
    for number, key in enumerate(case["keys"]):
        layout_map[key] = TensorLayout((f"rule{number}",))
    layout = layout_map[case["path"]]
    return layout and layout.axes[0]

def answer(function, case):
    try:
        return ["is", function(case)]
    except Exception as error:
        return ["refused", str(error)]

assert len(jax.devices()) == 8
cases = json.load(sys.stdin)
json.dump([[answer(parts, case) for case in cases[0]], [answer(found, case) for case in cases[1]]], sys.stdout)
"""


def made_case(rng: random.Random) -> dict:
    shape = list(rng.choice(SHAPES))
    if rng.random() < 0.1:
        shape[0] += 1  # not as many places as devices
    names = list(AXES[: len(shape)])
    if rng.random() < 0.05:
        names.pop()
    ndim = rng.randint(0, 3)
    axes = [rng.choice([None, None, *AXES[: len(shape)]]) for _ in range(rng.randint(0, ndim))]
    if rng.random() < 0.1:
        axes.append(rng.choice(["y", "model", None]))
    return {
        "shape": shape,
        "names": names,
        "ranks": rng.sample(range(8), 8) if rng.random() < 0.5 else list(range(8)),
        "axes": axes,
        "tensor": [rng.choice(SIZES) for _ in range(ndim)],
    }


def made_map(rng: random.Random) -> dict:
    pieces = ["a", "b", ".", ".*", ".*", ".+", "[ab]", "a+", "(a|b)", "\\.", "^", "A"]
    keys = list(dict.fromkeys("".join(rng.choices(pieces, k=rng.randint(1, 2))) for _ in range(rng.randint(0, 5))))
    path = rng.choice(keys) if keys and rng.random() < 0.2 else "".join(rng.choices("aab.A\n", k=rng.randint(1, 2)))
    return {"keys": keys, "path": path}


def parts(case: dict) -> dict[str, list[int]]:
    mesh = DeviceMesh(case["shape"], case["names"], [f"cpu:{rank}" for rank in case["ranks"]])
    layout = TensorLayout(case["axes"], mesh)
    if len(case["axes"]) > len(case["tensor"]):
        raise LayoutError("more axes than dims")
    layout = TensorLayout([*case["axes"], *[None] * (len(case["tensor"]) - len(case["axes"]))], mesh)
    held = {}
    for rank in mesh.ranks:
        part = local_part(layout, mesh, mesh.coordinate(rank), case["tensor"])
        elements = np.zeros(int(np.prod(part.shape)), dtype=int)
        for nest in part.nests:
            local, whole = np.array(list(addresses(nest))).reshape(-1, 2).T
            elements[local] = whole
        held[str(rank)] = elements.tolist()
    return held


def found(case: dict) -> str | None:
    layout_map = LayoutMap(None)
    for number, key in enumerate(case["keys"]):
        layout_map[key] = TensorLayout((f"rule{number}",))
    layout = layout_map[case["path"]]
    return None if layout is None else layout.axes[0][0]


def answer(function, case):
    try:
        return ["is", function(case)]
    except LayoutError as error:
        return ["refused", str(error)]


@pytest.fixture(scope="module")
def answers():
    """Return the cases with Keras' answers."""
    rng = random.Random(SEED)
    cases = [[made_case(rng) for _ in range(CASES)], [made_map(rng) for _ in range(CASES)]]
    environ = os.environ | {
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, "-c", KERAS], input=json.dumps(cases), env=environ, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return [list(zip(*pair, strict=True)) for pair in zip(cases, json.loads(done.stdout), strict=True)]


@pytest.mark.timeout(120)
def test_every_device_holds_the_same_part(answers):
    counts = {"is": 0, "refused": 0}
    for case, theirs in answers[0]:
        ours = answer(parts, case)
        assert ours[0] == theirs[0], (case, ours, theirs)
        assert ours == theirs or ours[0] == "refused", case
        counts[ours[0]] += 1
    assert min(counts.values()) > CASES / 8, counts


# The words that Keras says itself; what is only met later comes in JAX's.
WORDS = ("should have same size", "does not match the number of devices", "Invalid axis names for Layout")


def test_refusals_are_in_keras_words(answers):
    met = set()
    for case, theirs in answers[0]:
        for words in WORDS:
            if theirs[0] == "refused" and words in theirs[1]:
                assert words in answer(parts, case)[1], case
                met.add(words)
    assert met == set(WORDS)


def test_paths_find_the_same_rules(answers):
    counts = dict.fromkeys(("is", "none", "refused"), 0)
    for case, theirs in answers[1]:
        ours = answer(found, case)
        assert ours[0] == theirs[0], (case, ours, theirs)
        assert ours == theirs or "matches multiple layout specification keys" in ours[1], case
        counts["none" if ours == ["is", None] else ours[0]] += 1
    assert min(counts.values()) > CASES / 20, counts
