"""JAX's NamedShardings on 8 host devices as the judge: which elements each device holds, over random PartitionSpecs.

JAX reads its number of devices from the environment when it is imported, so it runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from math import prod

import pytest

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.local_part import local_part
from xrank.layout.nests import addresses
from xrank.layout.terms import from_partition_spec, to_partition_spec

CASES = 400
SHAPES = ((8,), (2, 4), (4, 2), (8, 1), (2, 2, 2), (1, 4, 2))
SIZES = (8, 16, 4, 2, 12, 24, 3, 1, 0)

JAX = """
import json, sys
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

def answer(case):
    devices = np.array([jax.devices()[rank] for rank in case["ranks"]]).reshape(case["shape"])
    mesh = Mesh(devices, case["names"], axis_types=(AxisType.Explicit,) * len(case["names"]))
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in case["entries"]]
    try:
        spec = PartitionSpec(*entries, unreduced=frozenset(case["unreduced"]))
        NamedSharding(mesh, spec)
        # Where addends lie is where values would: devices_indices_map takes no spec with unreduced axes.
        sharding = NamedSharding(mesh, PartitionSpec(*entries))
        indices = sharding.devices_indices_map(tuple(case["tensor"]))
        whole = np.arange(int(np.prod(case["tensor"], dtype=int))).reshape(case["tensor"])
        local = sharding.shard_shape(tuple(case["tensor"]))
        held = {device.id: whole[index].ravel().tolist() for device, index in indices.items()}
        return ["is", {"local": list(local), "held": held, "unreduced": sorted(spec.unreduced)}]
    except Exception as error:
        return ["refused", f"{type(error).__name__}: {error}"]

assert len(jax.devices()) == 8
json.dump([answer(case) for case in json.load(sys.stdin)], sys.stdout)
"""


def made_case(rng: random.Random) -> dict:
    shape = rng.choice(SHAPES)
    names = ["x", "y", "z"][: len(shape)]
    ndim = rng.randint(0, 3)
    entries: list = [[] for _ in range(rng.randint(0, ndim))]
    unreduced = []
    for axis in rng.sample(names, len(names)):
        dim = rng.randint(0, len(entries))
        if dim < len(entries):
            entries[dim].append(axis)
        elif rng.random() < 0.3:
            unreduced.append(axis)
    if entries and rng.random() < 0.06:
        rng.choice(entries).append(rng.choice([*names, "w"]))  # an axis twice, or none of the mesh's
    said = [entry[0] if len(entry) == 1 else entry or None for entry in entries]
    tensor = [rng.choice(SIZES) for _ in range(ndim)]
    ranks = rng.sample(range(8), 8)
    return {
        "shape": shape,
        "names": names,
        "ranks": ranks,
        "entries": said,
        "unreduced": unreduced,
        "tensor": tensor,
    }


@pytest.fixture(scope="module")
def answers():
    """Return the cases with JAX's answers."""
    rng = random.Random(2026)
    cases = [made_case(rng) for _ in range(CASES)]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", JAX], input=json.dumps(cases), env=environ, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return list(zip(cases, json.loads(done.stdout), strict=True))


def read(case: dict) -> TensorLayout:
    mesh = DeviceMesh(case["shape"], case["names"], case["ranks"])
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in case["entries"]]
    return from_partition_spec(Spec(entries, case["unreduced"]), mesh, len(case["tensor"]))


class Spec(tuple):
    """Entries with the axes of addends, as JAX's class has them."""

    unreduced: frozenset[str]

    def __new__(cls, entries, unreduced):
        made = super().__new__(cls, entries)
        made.unreduced = frozenset(unreduced)
        return made


def held(layout: TensorLayout, shape) -> dict:
    mesh = layout.device_mesh
    parts = {rank: local_part(layout, mesh, mesh.coordinate(rank), shape) for rank in mesh.ranks}
    return {
        "local": list(parts[mesh.ranks[0]].shape),
        "held": {
            str(rank): [y for _, y in sorted(pair for nest in part.nests for pair in addresses(nest))]
            for rank, part in parts.items()
        },
        "unreduced": sorted(layout.tree.sums),
    }


def test_every_device_holds_the_same_elements(answers):
    counts = dict.fromkeys(("is", "refused", "compound", "unreduced"), 0)
    for case, (verdict, theirs) in answers:
        try:
            layout = read(case)
            mine = held(layout, case["tensor"])
        except LayoutError as error:
            assert verdict == "refused", (case, theirs, str(error))
            counts["refused"] += 1
            continue
        assert verdict == "is" and mine == theirs, (case, verdict, theirs)
        counts["is"] += 1
        counts["compound"] += any(isinstance(entry, list) for entry in case["entries"])
        counts["unreduced"] += bool(case["unreduced"])
        # And back: dims alone say the entries, and the sums the rest.
        entries = to_partition_spec(TensorLayout.from_dims(layout.dims, layout.device_mesh))
        again = from_partition_spec(Spec(entries, layout.tree.sums), layout.device_mesh, len(case["tensor"]))
        assert held(again, case["tensor"]) == theirs and prod(layout.device_mesh.shape) == 8
    assert min(counts.values()) >= 15 and counts["is"] > CASES / 4, counts
