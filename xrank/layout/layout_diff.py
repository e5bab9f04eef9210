"""Differences between two layout maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xrank.layout.layout_file import LayoutFile


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """One entry that differs.

    Args:
        name: a rule, a size, an alias, or "grid", "ranks", "view NAME" of the mesh.
        old: its text in the first map; None if absent.
        new: its text in the second map; None if absent.
    """

    name: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        return f"{self.name}: {'none' if self.old is None else self.old} -> {'none' if self.new is None else self.new}"


@dataclass(frozen=True, slots=True)
class LayoutDiff:
    """The differences between two layout maps; false if there are none. The order of rules does not count.

    Args:
        added: rules of the second map alone; ``old`` is None.
        removed: rules of the first map alone; ``new`` is None.
        changed: rules of both maps with different texts.
        mesh: differences between the meshes and views.
        sizes: sizes that differ.
        aliases: tied names that differ.
    """

    added: tuple[LayoutChange, ...] = ()
    removed: tuple[LayoutChange, ...] = ()
    changed: tuple[LayoutChange, ...] = ()
    mesh: tuple[LayoutChange, ...] = ()
    sizes: tuple[LayoutChange, ...] = ()
    aliases: tuple[LayoutChange, ...] = ()

    def __bool__(self) -> bool:
        return any((self.added, self.removed, self.changed, self.mesh, self.sizes, self.aliases))


def diff_files(old: LayoutFile, new: LayoutFile) -> LayoutDiff:
    """Return the differences of the second layout file from the first."""
    rules = _changes(old.rules, new.rules)
    return LayoutDiff(
        added=tuple(change for change in rules if change.old is None),
        removed=tuple(change for change in rules if change.new is None),
        changed=tuple(change for change in rules if change.old is not None and change.new is not None),
        mesh=_changes(_mesh_texts(old), _mesh_texts(new)),
        sizes=_changes(_texts(old.sizes), _texts(new.sizes)),
        aliases=_changes(old.aliases, new.aliases),
    )


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[LayoutChange, ...]:
    return tuple(
        LayoutChange(name, old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)
    )


def _texts(numbers: Mapping[str, int]) -> dict[str, str]:
    return {name: str(number) for name, number in numbers.items()}


def _mesh_texts(content: LayoutFile) -> dict[str, str]:
    if content.mesh is None:
        return {}
    texts = {"grid": content.mesh.grid, "ranks": str(list(content.mesh.ranks))}
    if content.mesh.ranks == tuple(range(content.mesh.size)):
        texts["ranks"] = f"0 to {content.mesh.size - 1}"
    return {**texts, **{f"view {name}": view.grid for name, view in content.views.items()}}
