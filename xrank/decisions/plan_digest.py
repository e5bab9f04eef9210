"""The digest of a plan: it shows whether an interrupted output belongs to the same conversion."""

from __future__ import annotations

import xxhash

from xrank.plan.planner import Plan


def digest_of_plan(plan: Plan, *options: str) -> str:
    """Return a digest that is the same for the same source, options and output.

    Args:
        plan: the plan, with its source as it was when its metadata was read.
        *options: further choices that decide the content of the output.
    """
    state = xxhash.xxh3_128()
    for file in plan.source.files:
        state.update(repr(file.identity).encode())
    for tensor in plan.tensors:
        state.update(repr((tensor.output, tensor.source_dtype)).encode())
        if tensor.changed:
            state.update(repr(sorted(tensor.changed.items())).encode())
        if tensor.update is not None:
            a, b, rule = tensor.update.a, tensor.update.b, tensor.update.rule
            place = (rule.num_blocks, rule.start) if rule.num_blocks > 1 or rule.start else ()
            what = (a.output, b.output, rule.scale, rule.is_transposed, *place)
            state.update(repr(what).encode())
        for copies in tensor.read:
            for array in (copies.rank, copies.record, copies.nests.x, copies.nests.y, copies.nests.loops):
                state.update(array.tobytes())
    for made in plan.files:
        state.update(made.output.name.encode() + made.output.header)
    for option in options:
        state.update(option.encode("utf-8", "surrogateescape"))  # a path may hold bytes that are not text
    return state.hexdigest()
