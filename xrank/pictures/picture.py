"""A picture that a notebook draws, a terminal prints and a file keeps; and `show`, which makes one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xrank.dialects.placements import describe_mesh, from_placements
from xrank.dtypes import by_torch_name
from xrank.errors import UsageError
from xrank.layout import LayoutMap, TensorLayout
from xrank.layout.layout_file import write_whole
from xrank.pictures.html_page import draw_survey
from xrank.pictures.page import fragment, page, page_text
from xrank.pictures.report_page import draw_report
from xrank.pictures.text_picture import survey_text
from xrank.plan.holdings import Holdings, Survey, apply_layout
from xrank.plan.report import Report
from xrank.plan.survey import survey


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """One picture: text in a terminal, HTML in a notebook."""

    title: str
    text: str
    body: tuple[str, ...]
    """Lines of HTML."""

    def __repr__(self) -> str:
        return self.text.rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the picture for a notebook."""
        return fragment(self.body)

    def to_html(self) -> str:
        """Return the picture as a page that needs nothing else."""
        return page(self.title, [f"<h1>{page_text(self.title)}</h1>", *self.body])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page by one rename.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(self.to_html().encode("utf-8"), os.fspath(path))


def show(what: Any, shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None) -> Picture:
    """Return the picture of which rank holds which part; a notebook draws it as the last line of a cell.

    Reads no tensor's values and sends no messages, so one rank may call it alone.

    Args:
        what: a DTensor; a mapping of names to DTensors, such as a state dict; a `TensorLayout` with a mesh; a
            `LayoutMap`; the report of a command; or an object with a method ``picture``, such as a pipeline's
            `Schedule`.
        shape: global shape of a `TensorLayout`, or those of a `LayoutMap` by name.

    Raises:
        UsageError: `what` has no layout, or its shape is missing.
        LayoutError: the layout does not fit the shape.

    Example:
        >>> from xrank.layout import DeviceMesh, TensorLayout
        >>> from xrank.pictures import show
        >>> show(TensorLayout.parse("[f/tp, h]", DeviceMesh((2,), ("tp",))), (4, 2))
        mesh   tp=2: ranks 0-1
        <BLANKLINE>
        tensor [4, 2]  [f/tp, h]
          rank 0  ##..  rows 0-1  local [2, 2], 4 elements
          rank 1  ..##  rows 2-3  local [2, 2], 4 elements
        <BLANKLINE>
        each rank holds
          ranks 0-1  4 elements
    """
    if isinstance(what, Picture):
        return what
    if isinstance(what, Report):
        return Picture(f"xrank {what.command}", str(what), tuple(draw_report(what)))
    if hasattr(what, "picture"):
        made = what.picture()
        assert isinstance(made, Picture)
        return made
    if isinstance(what, LayoutMap):
        if not isinstance(shape, Mapping):
            raise _shape_error("a LayoutMap", "a mapping of names to global shapes")
        return _picture_survey(survey(what, shape))
    if isinstance(what, TensorLayout):
        return _picture_survey(_survey_tensors([_layout_holdings(what, shape)]))
    if isinstance(what, Mapping):
        tensors = [_tensor_holdings(str(name), one) for name, one in what.items() if hasattr(one, "placements")]
        if tensors:
            return _picture_survey(_survey_tensors(tensors))
    elif hasattr(what, "placements"):
        return _picture_survey(_survey_tensors([_tensor_holdings("tensor", what)]))
    raise UsageError(
        "this object has no layout that can be drawn",
        got=type(what).__name__,
        want="a DTensor, a mapping of names to DTensors, a TensorLayout, a LayoutMap, a report or a Schedule",
        next_step="describe it: show(TensorLayout.parse(TEXT, mesh), shape)",
    )


def _shape_error(subject: str, want: str) -> UsageError:
    return UsageError(f"{subject} is drawn over global shapes, and none is given", want=want, next_step="pass shape=")


def _layout_holdings(layout: TensorLayout, shape: Any) -> Holdings:
    if shape is None or isinstance(shape, Mapping):
        raise _shape_error("a TensorLayout", "its global shape")
    if layout.device_mesh is None:
        raise UsageError(
            "a TensorLayout without a mesh has no ranks to draw",
            got=repr(layout),
            want="a layout with a mesh",
            next_step="use layout.with_mesh(mesh)",
        )
    return apply_layout(Holdings("tensor", tuple(shape), rule="tensor"), layout, layout.device_mesh)


def _tensor_holdings(name: str, tensor: Any) -> Holdings:
    """Return the parts of a DTensor on all ranks of its mesh."""
    mesh = describe_mesh(tensor.device_mesh)
    layout = from_placements(mesh, tensor.placements, len(tensor.shape))
    start = Holdings(name, tuple(tensor.shape), by_torch_name(str(tensor.dtype).removeprefix("torch.")).name, rule=name)
    return apply_layout(start, layout, mesh)


def _survey_tensors(tensors: Iterable[Holdings]) -> Survey:
    found = tuple(tensors)
    meshes = {one.mesh.grid: one.mesh for one in found if one.mesh is not None}
    named = {"mesh" if len(meshes) == 1 else f"mesh {number}": mesh for number, mesh in enumerate(meshes.values())}
    return Survey(named, {}, found)


def _picture_survey(found: Survey) -> Picture:
    title = found.tensors[0].name if len(found.tensors) == 1 else "Layouts"
    return Picture(title, survey_text(found), tuple(draw_survey(found)))
