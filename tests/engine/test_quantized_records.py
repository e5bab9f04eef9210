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
from xrank.engine.quantized_records import describe_matrix
from xrank.engine.sources import open_source
from xrank.layout.nest_table import int_array
from xrank.layout.stored_model import RecordTable, SourceFile, StoredModel

_NAMES = (
    *("FP8_DYNAMIC", "FP8_BLOCK", "W8A8", "W8A16", "W4A16", "NVFP4A16", "MXFP4A16", "MXFP8", "DEEPSEEK_FP8"),
    *("MODELOPT_FP8", "MODELOPT_FP8_CHANNEL", "MODELOPT_NVFP4", "GPT_OSS"),
)


def make_quantized(
    path: Path, encoding: Encoding, shape: tuple[int, int, int], *, is_transposed: bool = False
) -> tuple[StoredModel, npt.NDArray[Any]]:
    """Return a model with one quantized record in a file of random codes and scales, and the record's values."""
    generator = np.random.default_rng(sum(shape))
    outputs = encoding.outputs("w.weight", "BF16", shape[1:] if len(encoding.suffixes) > 2 else shape)
    rows = [(0, 0, 0, -1)]
    parts, arrays, data = [], [], b"some other bytes"
    for output in outputs:
        kind = dtypes.numpy_dtype(output.dtype)
        bits = generator.integers(0, 256, output.nbytes, np.uint8)
        if output.dtype == "F8_E4M3":
            bits = bits % 127  # every positive number, and no NaN
        if dtypes.dtype(output.dtype).is_float:
            bits = generator.standard_normal(output.shape).astype(kind).reshape(-1).view(np.uint8)
        arrays.append(bits.view(kind).reshape(output.shape))
        parts.append((len(rows), output.dtype))
        rows.append((0, len(data), output.nbytes, -1))
        data += bits.tobytes()
    path.write_bytes(data)
    values = np.empty(shape, dtypes.numpy_dtype("BF16"))
    codes = arrays[0].reshape(*shape[:2], -1)
    scales = arrays[1].reshape(shape[0], -1, -(-shape[2] // (encoding.block[1] or shape[2])))
    for number, row in np.ndindex(shape[:2]):
        above = row // (encoding.block[0] or shape[1])
        each = [codes[number, row : row + 1], scales[number, above : above + 1], *arrays[2:]]
        values[number, row : row + 1] = encoding.decode(each, "BF16")
    whole = values.swapaxes(1, 2) if is_transposed else values
    matrix = describe_matrix(
        encoding, "BF16", shape, parts, shape[2] // outputs[0].shape[-1], is_transposed=is_transposed
    )
    rows[0] = (0, rows[1][1], whole.nbytes, -1)
    records = RecordTable(*(int_array(row[i] for row in rows) for i in range(4)), quantized={0: matrix})
    files = (SourceFile.from_status(str(path), os.stat(path)),)
    return StoredModel("safetensors", str(path.parent), files, records, ()), np.ascontiguousarray(whole)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 300, 520), (3, 70, 64), (2, 129, 5000), (1, 1, 70_000), (1, 9000, 128)])
@pytest.mark.parametrize("name", _NAMES)
def test_any_range_has_the_values_of_the_whole(
    name: str, shape: tuple[int, int, int], is_transposed: bool, tmp_path: Path
) -> None:
    encoding: Encoding = getattr(encodings, name)
    if encoding.misfit(shape) is not None:
        shape = (1 if len(encoding.suffixes) > 2 else shape[0], shape[1], -(-shape[2] // 128) * 128)
    model, want = make_quantized(tmp_path / "a", encoding, shape, is_transposed=is_transposed)
    flat, choose = want.reshape(-1).view(np.uint16), random.Random(1)
    with closing(open_source(model)) as source:
        for _ in range(12):
            start = choose.randrange(len(flat))
            count = min(choose.choice([1, 77, 4000, 300_000]), len(flat) - start)
            got = np.zeros(count, np.uint16)
            source.read_into(0, start * 2, got.data.cast("B"))
            assert np.array_equal(got, flat[start : start + count]), (start, count)
        assert bytes(source.fetch(0, 0, 64, memoryview(bytearray(128)))) == flat[:32].tobytes()
