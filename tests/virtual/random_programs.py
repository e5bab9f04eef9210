"""Random operations: programs with every instruction, and numpy's results for them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from tests.virtual.sample_arrays import made, of_kind
from xrank.layout import DeviceMesh
from xrank.virtual import ArraySpec, Operation, Program, kernel
from xrank.virtual.programs import COLLECTIVES, Communicate, Compute, Receive, Return, Send, Take

UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


@kernel("test.double_and_head")
def double_and_head(x, *, length):
    return x + x, x[:length]


def spec(array: np.ndarray) -> ArraySpec:
    return ArraySpec(array.shape, {"int64": "I64", "int16": "I16", "uint8": "U8"}[array.dtype.name])


@dataclass
class RandomOperation(Operation):
    """Integers, so that the order of reductions has no effect; registers differ only in dim 0."""

    mesh: DeviceMesh
    seed: int
    kind: str = "numpy"
    num_steps: int = 12
    programs: dict[int, list] = field(default_factory=dict)
    values: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    wanted: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self):
        rng = random.Random(self.seed)
        dtype = rng.choice(["I64", "I16", "U8"])
        columns = rng.randint(1, 4)
        for device in self.mesh.ranks:
            array = made((rng.randint(0, 6), columns), dtype, device)
            self.programs[device] = [Receive("x0", spec(array))]
            self.values[device] = {"x0": array}
            self.wanted[device] = {}
        shared = made((rng.randint(1, 6), columns), dtype, 99)
        for device in self.mesh.ranks:
            self.add(device, Receive("y", spec(shared)), {"y": shared})
        for number in range(self.num_steps):
            getattr(self, rng.choice(["collective"] * 4 + ["compute", "shift", "give"]))(rng, f"r{number}")
        self.give(rng, "last")

    def add(self, device, instruction, written):
        self.programs[device].append(instruction)
        self.values[device].update(written)

    def common(self, rng):
        """Return the name of a register that all devices have."""
        return rng.choice(sorted(set.intersection(*map(set, self.values.values()))))

    def collective(self, rng, name):
        axes = tuple(rng.sample(self.mesh.axis_names, rng.randint(1, len(self.mesh.axis_names))))
        what = rng.choice(COLLECTIVES)
        source, reduction, place = self.common(rng), rng.choice(sorted(UFUNCS)), rng.randint(0, 99)
        for group in self.mesh.groups(*axes):
            given = [self.values[member][source] for member in group]
            if what in ("all_reduce", "reduce_scatter") and len({array.shape for array in given}) > 1:
                source, given = "y", [self.values[member]["y"] for member in group]
            root = group[place % len(group)]
            for number, member in enumerate(group):
                parts = [np.array_split(array, len(group))[number] for array in given]
                match what:
                    case "all_reduce":
                        output = UFUNCS[reduction].reduce(given, dtype=given[0].dtype)
                    case "reduce_scatter":
                        output = UFUNCS[reduction].reduce(parts, dtype=given[0].dtype)
                    case "broadcast":
                        output = given[group.index(root)]
                    case "scatter":
                        output = parts[group.index(root)]
                    case "all_to_all":
                        output = np.concatenate(parts)
                    case _:
                        output = np.concatenate(given) if what != "gather" or member == root else None
                self.add(
                    member,
                    Communicate(
                        what,
                        group,
                        "" if what in ("broadcast", "scatter") and member != root else source,
                        "" if output is None else name,
                        tuple(map(spec, given)),
                        spec(given[number] if output is None else output),
                        dim=0,
                        reduction=reduction if what in ("all_reduce", "reduce_scatter") else None,
                        root=root if what in ("broadcast", "gather", "scatter") else None,
                        axes=axes,
                    ),
                    {} if output is None else {name: output},
                )

    def compute(self, rng, name):
        source, length = self.common(rng), rng.randint(0, 3)
        for device in self.mesh.ranks:
            array = self.values[device][source]
            written = {name: array + array, f"{name}.head": array[:length]}
            specs = tuple(map(spec, written.values()))
            flops, options = device + 3, (("length", length),)
            self.add(device, Compute("test.double_and_head", (source,), tuple(written), specs, flops, options), written)

    def shift(self, rng, name):
        source, by = self.common(rng), rng.randint(1, 5) % self.mesh.size
        ranks = self.mesh.ranks
        for place, device in enumerate(ranks):
            if by:
                self.add(device, Send(source, ranks[place - by], spec(self.values[device][source])), {})
        for place, device in enumerate(ranks):
            if by:
                other = ranks[(place + by) % len(ranks)]
                array = self.values[other][source]
                self.add(device, Take(name, other, spec(array)), {name: array})

    def give(self, rng, name):
        for device in self.mesh.ranks:
            source = rng.choice(sorted(self.values[device]))
            array = self.values[device][source]
            self.add(device, Return(source, name, spec(array)), {})
            self.wanted[device][name] = array

    def compile(self, mesh, activations, parameters):
        assert mesh == self.mesh
        return tuple(Program(device, tuple(self.programs[device])) for device in mesh.ranks)

    def packets(self, mesh, device, activations, parameters):
        return {name: of_kind(self.values[device][name], self.kind) for name in ("x0", "y")}
