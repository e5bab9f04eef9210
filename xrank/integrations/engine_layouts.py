"""The layouts of inference engines, recorded by their name for ``xrank layout record``."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from importlib.util import find_spec

from xrank.errors import UsageError
from xrank.plan.report import LayoutDetails, OutputFacts, Report, SourceFacts
from xrank.system import peak_rss_nbytes

ENGINES = ("vllm",)


def record_engine_layout(engine: str, model: str, out: str, *, tp: int = 1, pp: int = 1, ep: bool = False) -> Report:
    """Write the layout file of an engine that would serve a model, and return the report.

    Args:
        engine: a name of `ENGINES`.
        model: the folder of the model, of which only config.json and the headers of weights are read.
        out: the layout file.
        tp: number of tensor parallel ranks.
        pp: number of pipeline stages.
        ep: whether tensor parallel ranks share the experts in place of cutting each.

    Raises:
        UsageError: the engine is unknown, not installed here, or cannot run the model in these parts.
        LayoutError: its ranks' parts are no cuts by axes.
    """
    started = time.monotonic()
    if engine not in ENGINES:
        raise UsageError(f"no engine {engine!r} is known", got=repr(engine), want=f"one of {', '.join(ENGINES)}")
    if find_spec("vllm") is None:
        raise UsageError(
            "vLLM, whose own loaders show the layout, is not installed here",
            got=f"{sys.executable} without vllm",
            next_step="run this command where vLLM is installed, such as in the engine's container",
        )
    with redirect_stdout(sys.stderr):  # vLLM's log
        from xrank.integrations.vllm_layout import record_vllm_layouts

        layouts = record_vllm_layouts(model, tp=tp, pp=pp, ep=ep)
    layouts.write(out)
    assert layouts.device_mesh is not None
    return Report(
        command="layout record",
        path=out,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=SourceFacts(path=model, format=engine, world_size=layouts.device_mesh.size),
        output=OutputFacts(path=out),
        details=LayoutDetails(num_rules=len(layouts)),
    )
