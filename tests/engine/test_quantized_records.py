"""Records of quantized matrices: any range of their values, from a few bytes of codes and scales."""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from xrank import dtypes
from xrank.engine import encodings
from xrank.engine.encodings import Encoding
from xrank.engine.quantized_records import _decode_values, describe_matrix
from xrank.engine.sources import open_source
from xrank.layout.nest_table import int_array
from xrank.layout.stored_model import RecordTable, SourceFile, StoredModel

_ENCODINGS = {
    "FP8_DYNAMIC": encodings.FP8_DYNAMIC,
    "FP8_BLOCK": encodings.FP8_BLOCK,
    "W8A8": encodings.W8A8,
    "DEEPSEEK_FP8": encodings.DEEPSEEK_FP8,
}


def make_quantized(
    path: Path, encoding: Encoding, shape: tuple[int, int, int], *, is_transposed: bool = False
) -> tuple[StoredModel, npt.NDArray[Any]]:
    """Return a model with one quantized record in a file of random codes and scales, and the record's values."""
    generator = np.random.default_rng(sum(shape))
    outputs = encoding.outputs("w.weight", "BF16", shape)
    rows = [(0, 0, 0, -1)]
    parts, arrays, data = [], [], b"some other bytes"
    for output in outputs:
        kind = dtypes.numpy_dtype(output.dtype)
        bits = generator.integers(0, 256, output.nbytes, np.uint8)
        if dtypes.dtype(output.dtype).is_float:
            bits = generator.standard_normal(output.shape).astype(kind).reshape(-1).view(np.uint8)
        arrays.append(bits.view(kind).reshape(output.shape))
        parts.append((len(rows), output))
        rows.append((0, len(data), output.nbytes, -1))
        data += bits.tobytes()
    path.write_bytes(data)
    matrices = ([array[number] for array in arrays] for number in range(shape[0]))
    values = [_decode_values(encoding, each, "BF16").astype(dtypes.numpy_dtype("BF16")) for each in matrices]
    whole = np.stack(values).swapaxes(1, 2) if is_transposed else np.stack(values)
    matrix = describe_matrix(encoding, "BF16", shape, parts, is_transposed=is_transposed)
    rows[0] = (0, rows[1][1], whole.nbytes, -1)
    records = RecordTable(*(int_array(row[i] for row in rows) for i in range(4)), quantized={0: matrix})
    files = (SourceFile.from_status(str(path), os.stat(path)),)
    return StoredModel("safetensors", str(path.parent), files, records, ()), np.ascontiguousarray(whole)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 300, 520), (3, 70, 64), (2, 129, 5000), (1, 1, 70_000), (1, 9000, 128)])
@pytest.mark.parametrize("name", _ENCODINGS)
def test_any_range_has_the_values_of_the_whole(
    name: str, shape: tuple[int, int, int], is_transposed: bool, tmp_path: Path
) -> None:
    model, want = make_quantized(tmp_path / "a", _ENCODINGS[name], shape, is_transposed=is_transposed)
    flat, choose = want.reshape(-1).view(np.uint16), random.Random(1)
    with closing(open_source(model)) as source:
        for _ in range(12):
            start = choose.randrange(len(flat))
            count = min(choose.choice([1, 77, 4000, 300_000]), len(flat) - start)
            got = np.zeros(count, np.uint16)
            source.read_into(0, start * 2, got.data.cast("B"))
            assert np.array_equal(got, flat[start : start + count]), (start, count)
        assert bytes(source.fetch(0, 0, 64, memoryview(bytearray(128)))) == flat[:32].tobytes()
