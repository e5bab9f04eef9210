"""The commands of `xrank layout`: prove, show and compare layouts, and write them as a page."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from xrank.dtypes import DTYPES
from xrank.engine.holdings import Holdings, Survey, compute_shapes, find_problem, sum_held_nbytes, survey
from xrank.engine.report import LayoutDetails, OutputFacts, ProofFacts, Report, SourceFacts, timed_report
from xrank.errors import LayoutError, UsageError, option
from xrank.layout import LayoutMap
from xrank.layout.layout_map import LayoutDiff, write_whole
from xrank.pictures.text_picture import share_words
from xrank.recipes.decision import read_layouts
from xrank.recipes.layout_sources import (
    file_text,
    filter_tensors,
    is_layout_file,
    layouts_at,
    read_layout_source,
    read_stored,
    with_numbers,
)
from xrank.recipes.sources import open_base_model
from xrank.words import numbers_text


def check_layouts(
    layouts: LayoutMap | str | os.PathLike[str],
    shapes: Mapping[str, Sequence[int]],
    *,
    dtypes: Mapping[str, str] | None = None,
) -> Report:
    """Check that ranks with these layouts hold every element of every tensor exactly once per replica.

    The report is ``ok``, or its ``error`` is the first gap, overlap or misfit, with ranks and index range. ``details``
    lists all of them under ``problems``, tensors without a rule, which are problems too, under ``unmatched``, and
    rules without a tensor under ``unused_rules``.

    Args:
        layouts: the layout of each tensor, with a mesh; or the path of a layout file.
        shapes: global shape by name.
        dtypes: safetensors name of the element type by name, to count the bytes of each rank.

    Raises:
        LayoutError, UsageError: the layout file or a shape is not valid.

    Example:
        >>> from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
        >>> layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
        >>> layouts["weight"] = TensorLayout.parse("[rows/tp, columns]")
        >>> check_layouts(layouts, {"weight": (4, 2)}).ok, check_layouts(layouts, {"weight": (4, 2), "bias": (4,)}).ok
        (True, False)
    """
    started = time.monotonic()
    read = layouts if isinstance(layouts, LayoutMap) else read_layouts(layouts)
    return _report_survey(survey(read, shapes, dtypes=dtypes), started)


def check_file(file: str, path: str | None, *, base_model: str | os.PathLike[str] | None = None) -> Report:
    """Return the report of a layout file's proof, whose fault is its first problem.

    The source at `path` has names, shapes and types, and `base_model` whole shapes that it lacks; without `path`, the
    sizes in the file count.
    """
    started = time.monotonic()
    layouts = read_layouts(file)
    if path is None and base_model is not None:
        raise UsageError(
            f"{option('base_model')} was given without PATH",
            got=option("base_model", os.fspath(base_model)),
            want="PATH, a source whose shapes the base model has",
            next_step=f"run: xrank layout check {file} {os.fspath(base_model)}, if its tensors are meant",
        )
    if path is None:
        shapes, skipped = compute_shapes(layouts, is_strict=True)
        if not shapes and len(layouts):
            raise LayoutError(
                f"{file} does not contain the sizes of any tensor, so nothing can be proven",
                file=file,
                got=next(iter(skipped.values()), "no rule"),
                want="numbers in [sizes], or a source of shapes",
                next_step=f"run: xrank layout check {file} PATH, with a workspace or model folder",
            )
        found = survey(layouts, shapes)
        found = replace(found, unused=tuple(rule for rule in found.unused if rule not in skipped))
        notes = [("not-proven", f"the rule {rule!r} is not proven: {reason}") for rule, reason in skipped.items()]
        return _report_survey(found, started, notes, path=file)
    try:
        place, stored = read_stored(path, layouts, open_base_model(base_model) if base_model is not None else None)
    except LayoutError as error:
        error.advise(f"add its rule to {file}, or give a base model that has the tensor by {option('base_model')}")
        raise
    dtypes = {shard.name: shard.dtype for shard in stored.shards}
    found = survey(layouts, {shard.name: shard.shape for shard in stored.shards}, dtypes=dtypes)
    return _report_survey(found, started, path=file, source=SourceFacts(path=place, format=stored.format))


def _report_survey(found: Survey, started: float, notes: Iterable[tuple[str, str]] = (), **facts: Any) -> Report:
    """Return the report of a check of a layout file, whose fault is its first problem.

    `notes` are further ones, such as rules that could not be proven.
    """
    problems = [error for one in found.tensors if (error := find_problem(one)) is not None]
    addends = [one for one in found.tensors if one.sums]
    return timed_report(
        "layout check",
        started,
        fault=problems[0] if problems else None,
        proof=ProofFacts(coverage="refused" if problems else "proven", num_rules=len(found.rules)),
        plan=OutputFacts(
            num_tensors=len(found.tensors),
            num_parameters=sum(prod(one.shape) for one in found.tensors),
            nbytes=sum(prod(one.shape) * _width(one.dtype) for one in found.tensors),
        ),
        notes=(
            *notes,
            *(("unused-rule", f"the rule {rule!r} matches no tensor") for rule in found.unused),
            *(("addends", f"{one.name}: the ranks hold partial sums over {', '.join(one.sums)}") for one in addends),
        ),
        details=LayoutDetails(problems=[problem.to_dict() for problem in problems], **_survey_facts(found)),
        **facts,
    )


def _survey_facts(found: Survey) -> dict[str, Any]:
    """Return the facts of a survey beside its tensors, for JSON."""
    held = sum_held_nbytes(found.tensors, _width)
    return {
        "meshes": {name: {"grid": mesh.grid, "ranks": numbers_text(mesh.ranks)} for name, mesh in found.meshes.items()},
        "unmatched": list(found.unmatched),
        "unused_rules": list(found.unused),
        "ranks": [{"rank": rank, "nbytes": nbytes} for rank, nbytes in held.items()],
    }


def _width(dtype: str | None) -> int:
    return DTYPES[dtype].nbytes if dtype in DTYPES else 0


def show_layouts(path: str, *, tensor: str | None = None, toml: bool = False) -> tuple[Report, Survey, str | None]:
    """Return the report of the layouts at a path, the survey of ranks' parts, and, with `toml`, a layout file's text.

    `tensor` is a regular expression for whole names.
    """
    started = time.monotonic()
    source = read_layout_source(path)
    found = filter_tensors(source.survey, tensor)
    text = file_text(source.as_map()) if toml else None
    report = timed_report(
        "layout show",
        started,
        path=source.path,
        source=SourceFacts(path=source.path, format=source.format),
        notes=source.notes if text is None else (),
        details=LayoutDetails(
            tensors=[_row(one) for one in found.tensors],
            **_survey_facts(found) | ({} if text is None else {"toml": text}),
        ),
    )
    return report, found, text


def write_page(report: Report, page: str, file: str) -> Report:
    """Write the page of a report by one rename, and return the report with its path."""
    content = page.encode("utf-8")
    try:
        write_whole(content, file)
    except OSError as error:
        raise UsageError(
            f"the page {file} cannot be written: {error.strerror}",
            file=file,
            next_step="name a place that can be written",
        ) from error
    return replace(report, path=file, output=OutputFacts(path=file, nbytes=len(content)))


def diff_layouts(a: str, b: str) -> tuple[Report, LayoutDiff]:
    """Return the differences of the layouts at `a` and `b`."""
    started = time.monotonic()
    old, new = layouts_at(a), layouts_at(b)
    if is_layout_file(a) != is_layout_file(b):
        # Ranks record numbers where a file has names of sizes.
        old, new = with_numbers(old), with_numbers(new)
    found = old.diff(new)
    report = timed_report(
        "layout diff",
        started,
        path=b,
        source=SourceFacts(path=a),
        details=LayoutDetails(equal=not found, differences=to_builtins(found)),
    )
    return report, found


def _row(one: Holdings) -> dict[str, Any]:
    misfit = None if one.misfit is None else {**to_builtins(one.misfit), "ranks": list(one.misfit.ranks)}
    return {
        "name": one.name,
        "dtype": one.dtype,
        "shape": list(one.shape),
        "rule": one.rule,
        "layout": one.text,
        "parts": [
            {
                "ranks": list(share.ranks),
                "holds": share_words(one, share),
                "local_shape": None if share.shape is None else list(share.shape),
                "num_elements": share.num_elements,
                "num_padding": share.num_pads,
            }
            for share in one.shares
        ],
        "absent_ranks": list(one.absent),
        "sums": list(one.sums),
        "misfit": misfit,
        "problem": None if one.problem is None else one.problem.to_dict(),
    }


_ENGINES = {"vllm": "xrank.integrations.vllm_layout"}
"""Engine -> the module that records its layouts; it imports the engine."""


def record_engine_layout(engine: str, model: str, out: str, *, tp: int = 1, pp: int = 1, ep: bool = False) -> Report:
    """Write the layout file of an engine that would serve a model, and return the report.

    This reads only config.json and the headers of the weights from the model's folder. `tp` is the number of tensor
    parallel ranks, `pp` of pipeline stages; with `ep`, tensor parallel ranks share experts and cut none.
    """
    started = time.monotonic()
    if engine not in _ENGINES:
        raise UsageError(f"no engine {engine!r} is known", got=repr(engine), want=f"one of {', '.join(_ENGINES)}")
    if find_spec("vllm") is None:
        raise UsageError(
            "vLLM, whose own loaders show the layout, is not installed here",
            got=f"{sys.executable} without vllm",
            next_step="run this command where vLLM is installed, such as in the engine's container",
        )
    with redirect_stdout(sys.stderr):  # vLLM's log
        layouts: LayoutMap = import_module(_ENGINES[engine]).record_vllm_layouts(model, tp=tp, pp=pp, ep=ep)
    layouts.write(out)
    assert layouts.device_mesh is not None
    return timed_report(
        "layout record",
        started,
        path=out,
        source=SourceFacts(path=model, format=engine, world_size=layouts.device_mesh.size),
        output=OutputFacts(path=out),
        details=LayoutDetails(num_rules=len(layouts)),
    )
