"""Sources of layouts: a layout file, or the records in a workspace's states; a model folder is one piece."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from xrank.decisions.base_model import BaseModel
from xrank.decisions.folder_plan import read_layouts
from xrank.decisions.found_source import read_found
from xrank.decisions.stated_layouts import make_layout_map, survey_stored
from xrank.errors import LayoutError, UsageError, option
from xrank.formats.rank_state import rank_of
from xrank.layout import LayoutMap
from xrank.layout.layout_map import LayoutFile, to_text
from xrank.layout.notation import with_sizes
from xrank.layout.tensor_name import compile_pattern, has_groups, parse_name
from xrank.plan.holdings import Survey, compute_shapes, survey
from xrank.plan.source import StoredModel
from xrank.readers.discovery import find_source
from xrank.stores import places


@dataclass(frozen=True, slots=True)
class LayoutSource:
    """Layouts at a path, and the part of each tensor on each rank by them."""

    path: str
    format: str
    survey: Survey
    layouts: LayoutMap | None
    """The content of a layout file; None for layouts that ranks recorded."""
    stored: StoredModel | None = None
    """The model that ranks saved; None for a layout file."""
    notes: tuple[tuple[str, str], ...] = ()

    def as_map(self) -> LayoutMap:
        """Return the layouts as a map, for a file to start from.

        Raises:
            LayoutError: ranks recorded a layout that a layout file cannot express.
        """
        if self.layouts is not None:
            return self.layouts
        assert self.stored is not None
        return make_layout_map(self.stored)


def is_layout_file(path: str) -> bool:
    """Return whether a path is a layout file: a file that neither a rank nor a model writer wrote."""
    name = os.path.basename(path)
    return places.is_file(path) and rank_of(name) is None and not name.endswith(".safetensors")


def read_source(path: str) -> LayoutSource:
    """Read the layouts at a path: a layout file's, drawn as far as it has sizes, or those that a source records.

    Raises:
        LayoutError, UsageError, IncompleteError, CorruptError, ...: as for the reader of the path's format.
    """
    if not is_layout_file(path):
        place, stored = read_stored(path)
        return LayoutSource(place, stored.format, survey_stored(stored), None, stored)
    layouts = read_layouts(path)
    shapes, untold = compute_shapes(layouts)
    found = survey(layouts, shapes)
    # A rule without sizes is not unused: it decides for tensors that the file does not name.
    found = replace(found, unused=tuple(rule for rule in found.unused if rule not in untold))
    notes = tuple(
        ("no-shape", f"the rule {rule!r} = {found.rules[rule]} is not drawn: {reason}")
        for rule, reason in untold.items()
    )
    return LayoutSource(path, "layout file", found, layouts, notes=notes)


def read_stored(path: str, layouts: LayoutMap | None = None, base: BaseModel | None = None) -> tuple[str, StoredModel]:
    """Read the source at a path, only its metadata; `layouts` and `base` serve where its ranks record no layouts."""
    where = find_source(path)
    try:
        return where.path, read_found(path, where, for_layouts=True).model
    except LayoutError as error:
        if layouts is None and base is None:
            error.advise("describe it in a layout file, and run: xrank layout check FILE PATH")
            raise
        return where.path, read_found(path, where, base=base, layouts=layouts, for_layouts=True).model


def filter_tensors(found: Survey, pattern: str | None) -> Survey:
    """Return the survey of the tensors whose whole names a regular expression matches.

    Raises:
        UsageError: the pattern is not a regular expression, or does not match any tensor.
    """
    if pattern is None:
        return found
    try:
        expression = compile_pattern(pattern)
    except ValueError as error:
        raise UsageError(
            f"{option('tensor')} must be a regular expression: {error}",
            got=repr(pattern),
            next_step="escape what is meant as it stands",
        ) from None
    tensors = tuple(one for one in found.tensors if expression.fullmatch(one.name))
    if not tensors:
        raise UsageError(
            f"{option('tensor')} matches none of {len(found.tensors)} tensors",
            got=repr(pattern),
            want="a regular expression for whole names",
            next_step=f"name one, such as {found.tensors[0].name!r}"
            if found.tensors
            else f"leave {option('tensor')} out",
        )
    return replace(found, tensors=tensors, unmatched=tuple(n for n in found.unmatched if expression.fullmatch(n)))


def layouts_at(path: str, layouts: LayoutMap | None = None, base: BaseModel | None = None) -> LayoutMap:
    """Return the layouts at a path as a map, for a file to start from or a comparison.

    Args:
        path: a layout file, or a source.
        layouts: layouts for tensors whose layout a source does not record.
        base: base model, which gives whole shapes for such tensors.

    Raises:
        LayoutError: ranks recorded a layout that a layout file cannot express; else as for `read_source`.
    """
    return read_layouts(path) if is_layout_file(path) else make_layout_map(read_stored(path, layouts, base)[1])


def with_numbers(layouts: LayoutMap) -> LayoutMap:
    """Return the map with numbers in place of the names that its sizes define, as ranks record it."""
    found = LayoutMap(layouts.device_mesh)
    found.views.update(layouts.views)
    found.aliases.update(layouts.aliases)
    names = {
        rule: str(parse_name(rule).with_sizes(layouts.sizes)) if has_groups(rule) else rule
        for rule in (*layouts, *layouts.companions)
    }
    for rule, layout in layouts.items():
        found[names[rule]] = None if layout is None else layout.with_sizes(layouts.sizes)
    for rule, companion in layouts.companions.items():
        base = None if companion.base is None else with_sizes(companion.base, layouts.sizes)
        of = None if companion.of is None else names[companion.of]
        found.companions[names[rule]] = replace(companion, of=of, base=base)
    return found


def file_text(layouts: LayoutMap) -> str:
    """Return a map as the text of a layout file."""
    rules = {rule: str(value) for rule, value in (*layouts.items(), *layouts.companions.items())}
    return to_text(LayoutFile(layouts.device_mesh, layouts.views, layouts.sizes, rules, layouts.aliases))
