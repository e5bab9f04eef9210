import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.virtual.sample_arrays import NAMES, NUMPY_DTYPES, REDUCIBLE, made, of_kind, plain
from xrank.errors import UsageError
from xrank.virtual import arrays
from xrank.virtual.arrays import ArraySpec

SHAPES = [(), (0,), (5,), (3, 0, 2), (2, 3), (2, 3, 4)]
UFUNCS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}

kinds = pytest.mark.parametrize("kind", ["numpy", "torch"])


@kinds
def test_copies_are_independent_and_contiguous(kind):
    array = of_kind(made((4, 6), "F32", 1), kind)
    for view in (
        array[::2, 1::2],
        array.T,
        array[2],
        array[0, ::2],
        array[:, 1:2],
        array[0, :2:2],
        array[1, 1:2].reshape(()),
    ):
        copied = arrays.copy_of(view)
        assert plain(copied)[1:] == plain(np.asarray(view).copy())[1:]
        assert np.asarray(copied).flags.c_contiguous
        assert not np.shares_memory(np.asarray(copied), np.asarray(array))
        assert arrays.bytes_of(view).tobytes() == np.asarray(view).tobytes()
    view = arrays.from_bytes(arrays.bytes_of(array), ArraySpec((24,), "F32"), kind)
    assert np.shares_memory(np.asarray(view), np.asarray(array))


def test_a_parameter_is_a_tensor_and_gradients_end_here():
    parameter = torch.nn.Parameter(torch.ones(4))
    grown = parameter * 2
    for tensor in (parameter, grown):
        assert arrays.spec_of(tensor) == ArraySpec((4,), "F32")
        for result in (
            arrays.copy_of(tensor),
            arrays.concatenate([tensor, tensor], 0),
            arrays.fold(tensor, tensor, "sum"),
            arrays.reshape(tensor, (2, 2)),
        ):
            assert type(result) is torch.Tensor and not result.requires_grad


def test_a_number_of_numpy_is_an_array_without_dims():
    assert arrays.spec_of(np.float32(3)) == ArraySpec((), "F32")
    assert plain(arrays.copy_of(np.float32(3))) == plain(np.array(3, np.float32))
    assert plain(arrays.fold(np.float32(3), np.float32(4), "sum")) == plain(np.array(7, np.float32))


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        3.0,
        None,
        np.ma.masked_array([1.0]),
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
    ],
    ids=["list", "float", "None", "masked", "sparse", "meta"],
)
def test_arrays_that_are_not_plain_are_refused(value):
    with pytest.raises(UsageError, match="plain arrays") as raised:
        arrays.spec_of(value)
    assert raised.value.got and raised.value.next_step


def test_a_tensor_whose_storage_was_freed_is_refused_before_it_is_read():
    freed = torch.ones(4)[1:]
    freed.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match="plain arrays") as raised:
        arrays.spec_of(freed)
    assert raised.value.got == "a tensor whose storage was freed"


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_other_byte_orders_and_types_are_refused(dtype):
    with pytest.raises(UsageError, match="numpy's >"):
        arrays.spec_of(np.ones(2, np.dtype(dtype).newbyteorder(">")))
    for other in (np.ones(2, np.complex128), np.array([None]), np.array(["a"]), np.ones(2, np.longdouble)):
        with pytest.raises(UsageError, match=f"virtual devices exchange no arrays of numpy's {other.dtype}"):
            arrays.spec_of(other)


@kinds
@pytest.mark.parametrize("dtype", REDUCIBLE)
@pytest.mark.parametrize("reduction", UFUNCS)
def test_reductions_are_numpys_in_order(kind, dtype, reduction):
    if dtype == "C64" and reduction in ("max", "min"):
        pytest.skip("no order")
    for shape in [(), (0,), (7,), (2, 3)]:
        given_arrays = [made(shape, dtype, seed) for seed in range(4)]
        with np.errstate(all="ignore"):
            wanted = np.asarray(functools.reduce(UFUNCS[reduction], given_arrays), NUMPY_DTYPES[dtype])
        found = arrays.reduce([of_kind(array, kind) for array in given_arrays], reduction)
        if dtype == "C64" and reduction == "prod":
            # torch and numpy may fuse one of the four products with one of the two sums.
            np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5)
        else:
            assert plain(found) == plain(of_kind(wanted, kind))


def test_numpy_alone_imports_no_torch():
    code = """
import sys, numpy as np
from xrank.virtual import VirtualCluster
run = VirtualCluster((2, 2), engine="in-process").run(lambda device, x: device.all_reduce(x), np.ones(3))
assert [list(output) for output in run.outputs] == [[4, 4, 4]] * 4
assert not any(name.partition(".")[0] == "torch" for name in sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=50)


@kinds
@pytest.mark.parametrize("dtype", NAMES)
def test_every_element_type_and_shape(kind, dtype):
    for shape in SHAPES:
        array = of_kind(made(shape, dtype, 1), kind)
        assert arrays.kind_of(array) == kind
        assert arrays.spec_of(array) == ArraySpec(shape, dtype)
        assert arrays.spec_of(array).nbytes == len(plain(array)[3])
        copied = arrays.copy_of(array)
        assert plain(copied) == plain(array)
        raw = arrays.bytes_of(array)
        assert raw.dtype == np.uint8 and raw.tobytes() == plain(array)[3]
        assert plain(arrays.from_bytes(raw.copy(), ArraySpec(shape, dtype), kind)) == plain(array)


@given(length=st.integers(0, 50), count=st.integers(1, 12))
def test_parts_are_those_of_array_split(length, count):
    lengths = arrays.split_lengths(length, count)
    assert lengths == tuple(len(part) for part in np.array_split(np.arange(length), count))


@kinds
@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=3), count=st.integers(1, 7), data=st.data())
def test_split_and_joined_again(kind, shape, count, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = made(tuple(shape), "BF16", 3)
    parts = arrays.split_evenly(of_kind(whole, kind), count, dim)
    for part, wanted in zip(parts, np.array_split(whole, count, dim), strict=True):
        assert plain(arrays.copy_of(part))[1:] == plain(wanted.copy())[1:]
    assert plain(arrays.concatenate(parts, dim)) == plain(of_kind(whole, kind))


@kinds
@pytest.mark.parametrize("dtype", [name for name in REDUCIBLE if name[0] == "F" or name == "BF16"])
def test_a_mean_is_a_sum_divided_in_its_own_type(kind, dtype):
    given_arrays = [made((5,), dtype, seed) for seed in range(3)]
    total = functools.reduce(np.add, given_arrays)
    wanted = np.asarray(total / np.asarray(3, NUMPY_DTYPES[dtype]))
    assert wanted.dtype == NUMPY_DTYPES[dtype]
    found = arrays.reduce([of_kind(array, kind) for array in given_arrays], "mean")
    assert plain(found) == plain(of_kind(wanted, kind))


@kinds
def test_reducing_one_gives_a_copy(kind):
    array = of_kind(made((3,), "F32", 1), kind)
    result = arrays.reduce([array], "sum")
    assert plain(result) == plain(array) and result is not array
    result[0] = 99
    assert array[0] != 99
