"""A million shards that differ, proven in a process of its own: with room for a busy machine."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from xrank.engine.holdings import compute_shapes
from xrank.layout import LayoutMap

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "layouts.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_million_shards_are_proven_in_the_time_and_memory_that_are_promised(tmp_path: Path) -> None:
    made = runpy.run_path(str(BENCHMARK))
    file = tmp_path / "layouts.toml"
    file.write_text(made["layout_file"](128, 8, 1000))
    layouts = LayoutMap.read(file)
    shapes, _ = compute_shapes(layouts)
    assert len(shapes) == len(set(shapes.values())) == 1000
    texts = [str(layout) for layout in layouts.values()]
    assert (sum("/~tp" in text for text in texts), sum("<" in text for text in texts)) == (333, 100)
    seconds, _, peak_nbytes, num_parameters = made["checked"](file)
    assert num_parameters >= 10**12
    assert seconds <= 20
    assert peak_nbytes <= 1.5e9
