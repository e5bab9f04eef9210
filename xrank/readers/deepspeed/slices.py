"""The partitions' own records of which parameters they hold (``param_slice_mappings``).

deepspeed/runtime/zero/stage_1_and_2.py and bf16_optimizer.py: _create_param_mapping. Each partition names the
parameters in each of its groups, with first element and number of elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from xrank.errors import ContradictionError
from xrank.readers.deepspeed.partitions import stretches, undo_dealing
from xrank.readers.deepspeed.states import Partition, Shape, Shapes


def shapes_of_slices(partitions: Sequence[Partition], number: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a group in the order of its flat buffer, where no model state records them.

    Args:
        partitions: the group's partitions, in order.
        number: the group.
        shapes: shapes of the model's tensors.

    Raises:
        UsageError: the partitions do not name their parameters, or a parameter has no shape.
        ContradictionError: a shape has another number of elements than the partitions.
    """
    numels: dict[str, int] = {}
    for partition in partitions:
        recorded = partition.slices[number] if partition.slices and number < len(partition.slices) else None
        if recorded is None:
            raise partition.origin.usage(
                "does not record the names of the fp32 weights",
                got="no param_slice_mappings, and no param_shapes in the model states",
                next_step="save again with a newer DeepSpeed, or with a stage of ZeRO",
            )
        for name, (_, numel) in recorded.items():
            numels[name] = numels.get(name, 0) + numel
    origin = partitions[0].origin
    for name, numel in numels.items():
        shape = shapes.get(name)
        if shape is None or prod(shape) != numel:
            raise ContradictionError(
                origin.locate(f"its partition has another size of {name} than the model states"),
                tensor=name,
                rank=origin.rank,
                file=origin.path,
                got=f"{numel:,} elements",
                want="a tensor in the model states" if shape is None else f"{prod(shape):,}, of {list(shape)}",
                next_step="all files must come from one save of one run; copy them again",
            )
    return {name: shapes[name] for name in numels}


def check_slices(
    partitions: Sequence[Partition], number: int, shapes: Shapes, places: Sequence[tuple[int, int]], size: int
) -> None:
    """Check each partition's record of its parameters; it identifies the rank, unless one tensor fills several.

    Args:
        partitions: the group's partitions, in order.
        number: the group.
        shapes: shapes of its parameters.
        places: first element and end of each parameter in the group's flat buffer.
        size: elements of a partition.

    Raises:
        ContradictionError: a partition holds another one's parameters.
    """
    recorded = [
        dict(partition.slices[number]) if partition.slices is not None and number < len(partition.slices) else None
        for partition in partitions
    ]
    ranks = range(len(recorded))
    expected = [_expect_slices(shapes, places, size, rank) for rank in ranks]
    if all(found in (None, want) for found, want in zip(recorded, expected, strict=True)):
        return
    # With round_robin_gradients DeepSpeed records the places of the undealt parameters (stage_1_and_2.py:
    # _link_all_hp_params).
    before = undo_dealing(shapes, len(recorded))
    ends = stretches(list(before.values()), None)
    if all(found in (None, _expect_slices(before, ends, size, rank)) for rank, found in enumerate(recorded)):
        return
    for rank, found in enumerate(recorded):
        if found in (None, expected[rank]):
            continue
        owner = next((partitions[other].origin.rank for other in ranks if expected[other] == found), None)
        whose = f"rank {owner}'s partition" if owner is not None else "parameters of no rank's partition"
        origin = partitions[rank].origin
        raise ContradictionError(
            origin.locate(f"holds {whose} of group {number}"),
            rank=origin.rank,
            file=origin.path,
            got=ascii(found)[:200],
            want=ascii(expected[rank])[:200],
            next_step=f"copy rank {origin.rank}'s file again from where it was saved",
        )


def _expect_slices(
    shapes: Shapes, places: Sequence[tuple[int, int]], size: int, rank: int
) -> dict[str, tuple[int, int]]:
    low, high = rank * size, (rank + 1) * size
    ends = np.array([end for _, end in places], dtype=np.int64)
    names = list(shapes)
    found: dict[str, tuple[int, int]] = {}
    # Start at the first parameter that ends behind `low`: for each rank to pass all parameters would be quadratic.
    for at in range(int(np.searchsorted(ends, low, side="right")), len(places)):
        first, end = places[at]
        if first >= high:
            break
        if max(first, low) < min(end, high):
            found[names[at]] = (max(first, low) - low, min(end, high) - max(first, low))
    return found
