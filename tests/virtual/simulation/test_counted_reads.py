"""Counting in arrays: elements below an address, reads across gaps, and what a whole export moves."""

from __future__ import annotations

from math import prod
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual.simulation.made_layouts import llama
from xrank.engine.casts import cut_tiles
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest, addresses
from xrank.virtual.simulation.simulation import compute_traffic, plan_work
from xrank.virtual.simulation.traffic import compute_read_overhead, elements_below

BYTES = ("read_nbytes", "own_nbytes", "taken_nbytes", "given_nbytes", "written_nbytes")
STAGING_NBYTES = 2 << 20


@st.composite
def nests(draw: st.DrawFn) -> Nest:
    """Draw a nest of which each y stride is at least the span of all loops within it; x is the other way round."""
    loops, y_span, x_span = [], 1, 1
    for _ in range(draw(st.integers(0, 3))):
        count = draw(st.integers(2, 5))
        ys, xs = y_span + draw(st.integers(0, 3)), x_span + draw(st.integers(0, 9))
        loops.insert(0, (count, xs, ys))
        y_span, x_span = (count - 1) * ys + y_span, (count - 1) * xs + x_span
    order = draw(st.permutations(loops))
    return Nest(draw(st.integers(0, 9)), draw(st.integers(0, 9)), tuple(order))


@given(st.lists(nests(), min_size=1, max_size=5), st.data())
@settings(deadline=None)
def test_elements_below(many: list[Nest], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(0, len(many) - 1), st.integers(-2, 400)), min_size=1))
    found = elements_below(NestTable.from_nests(many), int_array(r for r, _ in rows), int_array(a for _, a in rows))
    assert found.tolist() == [sum(y < address for _, y in addresses(many[row])) for row, address in rows]


@given(nests(), st.integers(1, 60))
@settings(deadline=None)
def test_reads_include_the_gaps_between_pieces(nest: Nest, most: int) -> None:
    told = float(compute_read_overhead(NestTable.from_nests([nest]), most)[0])
    each = list(cut_tiles(nest, most))
    first = each[0]  # a tile of its full length, as the loop is cut
    assert told == first.length / prod(n for n, _, _ in first.loops)
    assert told > 1 or all(tile.is_dense for tile in each)


def test_all_is_made_read_and_given_once(tmp_path: Path) -> None:
    work = plan_work(str(llama(tmp_path, "pp=2 dp=3 tp=2", fsdp=False)), "export")
    traffic = compute_traffic(work, STAGING_NBYTES)
    assert traffic.total("written_nbytes").sum() == work.plan.nbytes
    assert traffic.total("taken_nbytes").sum() == traffic.total("given_nbytes").sum() > 0
    tensors = sum(tensor.output.nbytes for tensor in work.plan.tensors)
    assert traffic.total("own_nbytes").sum() + traffic.total("taken_nbytes").sum() == tensors
    # Each of the three replicas, and the copy that they are compared with.
    assert traffic.compared_nbytes.sum() == work.held_nbytes.sum()
