"""Any shardings over the axes x, y and z, and the costs of a run."""

from hypothesis import strategies as st

from xrank.virtual.sharding import DimSharding, TensorSharding


@st.composite
def shardings(draw, num_dims, sums=()):
    """Return any cut of so many dims; along some of the axes in `sums`, addends are left."""
    left = tuple(axis for axis in sums if draw(st.booleans()))
    dims = [[] for _ in range(num_dims)]
    for axis in draw(st.permutations([axis for axis in "xyz" if axis not in left])):
        place = draw(st.integers(0, num_dims))
        if place < num_dims:
            dims[place].append(axis)
    return TensorSharding([DimSharding(axes, draw(st.sampled_from(["/=", "/~"]))) for axes in dims], left)


def count_costs(statistics, itemsize=4):
    """Return flops, messages and elements of all devices together."""
    assert statistics.traffic.received_nbytes == statistics.nbytes
    return statistics.flops, statistics.messages, statistics.nbytes / itemsize
