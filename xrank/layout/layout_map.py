"""Layout maps: name patterns to layouts, with Keras' look-up rules."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING

from xrank.errors import LayoutError
from xrank.layout.companion import Companion, is_companion, parse_companion
from xrank.layout.layout_file import LayoutFile, name_file, read_layout_file, to_text, write_text
from xrank.layout.mesh import DeviceMesh
from xrank.layout.name_pattern import compile_pattern
from xrank.layout.soundness import check_sound
from xrank.layout.tensor_layout import TensorLayout, axis_lengths, flat_of
from xrank.layout.tensor_name import TensorName, has_groups, parse_name

if TYPE_CHECKING:
    from xrank.layout.layout_diff import LayoutDiff


class LayoutMap(MutableMapping[str, TensorLayout | None]):
    r"""An ordered map from patterns to layouts, looked up by a tensor's name.

    A look-up finds the key that equals the name, or else the only key that is a regular expression for the whole name
    (`re.fullmatch`). Several such keys are refused. Without a key the result is None instead of a KeyError, so ``get``
    never returns its default and ``in`` is true for any name, as in Keras. An existing key cannot be set again.

    A key with dims, such as ``layers.{6/pp}.up``, is not a regular expression: it matches names with an index in the
    place of each group. `xrank.layout.tensor_name` defines which tensors a rank holds under it.

    Args:
        device_mesh: attached to each layout that is stored without a mesh.

    Example:
        >>> layouts = LayoutMap(DeviceMesh((2, 2), ("dp", "tp")))
        >>> layouts[r"layers\.\d+\.up"] = "[f/tp, h]"
        >>> str(layouts["layers.3.up"]), layouts["norm"]
        ('[f/tp, h]', None)
    """

    def __init__(self, device_mesh: DeviceMesh | None = None) -> None:
        self._device_mesh = device_mesh
        self._layouts: dict[str, TensorLayout] = {}
        self._expressions: dict[str, re.Pattern[str]] = {}  # compiled at the first look-up, as Keras does
        self.aliases: dict[str, str] = {}
        """Tied name -> the name that it stands for."""
        self.sizes: dict[str, int] = {}
        """Name -> size, for names in layouts that shapes do not define."""
        self.views: dict[str, DeviceMesh] = {}
        """Views of the mesh by name; add a view before setting a layout that names it."""
        self.companions: dict[str, Companion] = {}
        """Pattern -> companion, for tensors such as the scales of a weight."""

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of layouts that are stored without one."""
        return self._device_mesh

    def __getitem__(self, key: str) -> TensorLayout | None:
        rule = self.rule_for(key)
        return None if rule is None else self._layouts[rule]

    def rule_for(self, name: str) -> str | None:
        """Return the key for a tensor's name; None without one."""
        if name in self._layouts:
            return name
        rules = [rule for rule in self._layouts if self._expression(rule).fullmatch(name)]
        if len(rules) > 1:
            raise LayoutError(
                f"Path '{name}' matches multiple layout specification keys: {rules}. Please make sure each "
                "tensor/variable path only matches at most one layout specification key in the LayoutMap.",
                tensor=name,
                got=str(rules),
                want="one key that matches the whole name, or a key that equals it",
            )
        return rules[0] if rules else None

    def __setitem__(self, key: str, layout: TensorLayout | tuple[str | None, ...] | str | None) -> None:
        if key in self._layouts:
            raise LayoutError(
                f"{key} already exist in the LayoutMap with value {self._layouts[key]}. "
                "Please make sure to not use duplicated keys.",
                tensor=key,
                next_step="take the key out first",
            )
        if not isinstance(key, str):
            raise LayoutError(f"the key {key!r} of a LayoutMap is not text", got=type(key).__name__, want="a pattern")
        # Unlike Keras, accept a layout's text. Other strings are refused as in Keras.
        if isinstance(layout, tuple):
            layout = TensorLayout(layout)
        elif isinstance(layout, str) and layout.startswith(("[", "flat(")):
            layout = TensorLayout.parse(layout)
        if not isinstance(layout, TensorLayout):
            raise LayoutError(
                f"{layout} should be a TensorLayout type, got {type(layout)}",
                tensor=key,
                got=repr(layout)[:200],
                want='a TensorLayout, a tuple such as (None, "model"), or text such as "[f/tp, h]"',
            )
        if layout.device_mesh is None and self._device_mesh is not None:
            layout = layout.with_mesh(self._device_mesh, self.views)
        if has_groups(key):
            mesh = layout.device_mesh
            lengths = None if mesh is None else axis_lengths(mesh, layout.view_mesh)
            # The name's dims are cut as well, and an axis must not cut both.
            check_sound(layout.tree, lengths, parse_name(key).dims)
        self._layouts[key] = layout

    def __delitem__(self, key: str) -> None:
        del self._layouts[key]
        self._expressions.pop(key, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LayoutMap):
            return self._parts() == other._parts()
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        rules = {key: str(layout) for key, layout in self._layouts.items()}
        return f"<LayoutMap {rules}, mesh {None if self.device_mesh is None else self.device_mesh.grid}>"

    def name_of(self, rule: str) -> TensorName | None:
        """Parse a key as a name with dims; None for a pattern."""
        is_rule = rule in self._layouts or rule in self.companions
        return parse_name(rule) if is_rule and has_groups(rule) else None

    def companion_rule_for(self, name: str) -> str | None:
        """Return the key of `companions` for a tensor's name; None without one."""
        if name in self.companions:
            return name
        rules = [rule for rule in self.companions if self._expression(rule).fullmatch(name)]
        if len(rules) > 1:
            raise LayoutError(f"{name} matches several companions: {rules}", tensor=name, got=str(rules), want="one")
        return rules[0] if rules else None

    def find_unused(self, names: Iterable[str]) -> list[str]:
        """Return the keys that match none of these tensors, in the map's order.

        The key of a flat buffer also matches the tensors in the buffer.
        """
        known = set(names)
        used = {self.rule_for(name) for name in known} | {self.companion_rule_for(name) for name in known}
        for key, layout in self._layouts.items():
            flat = flat_of(layout)
            if flat is not None and any(member.name in known for member in flat.members):
                used.add(key)
        return [key for key in (*self._layouts, *self.companions) if key not in used]

    def find_unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the names of tensors without a key, in the given order."""
        return [name for name in names if self.rule_for(name) is None and self.companion_rule_for(name) is None]

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, mesh: DeviceMesh | None = None) -> LayoutMap:
        """Read a layout file.

        Args:
            path: the file.
            mesh: a mesh to use instead of the file's; the file's views become views of it.

        Raises:
            UsageError: the file cannot be read.
            LayoutError: it is not TOML, or has unknown content; or the mesh does not fit the layouts.
        """
        file = os.fspath(path)
        content = read_layout_file(file)
        content = content if mesh is None else content.with_mesh(mesh, file)
        return _from_file(content, file, cls)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the map as a layout file, whole or not at all; equal maps in equal order give equal bytes.

        Raises:
            LayoutError: a layout has another mesh than the map, or a name cannot be text in a file.
            UsageError: the file cannot be written.
        """
        write_text(to_text(self._content()), os.fspath(path))

    def diff(self, other: LayoutMap) -> LayoutDiff:
        """Return the differences from this map, the old one, to another map, the new one.

        Raises:
            LayoutError: a file cannot express one of the maps.
        """
        from xrank.layout.layout_diff import diff_files

        return diff_files(self._content(), other._content())

    def _parts(self) -> tuple[object, ...]:
        return self.device_mesh, self.views, self.sizes, self._layouts, self.companions, self.aliases

    def _content(self) -> LayoutFile:
        """Return the map as the content of a layout file."""
        for pattern, layout in self._layouts.items():
            if layout.device_mesh != self.device_mesh:
                mesh = self.device_mesh
                raise LayoutError(
                    f"the layout of {pattern!r} has a mesh that is not the LayoutMap's, which a file cannot express",
                    tensor=pattern,
                    got=repr(layout),
                    want=f"the mesh {None if mesh is None else mesh.grid!r}",
                )
        rules = {pattern: str(value) for pattern, value in (*self._layouts.items(), *self.companions.items())}
        return LayoutFile(self.device_mesh, self.views, self.sizes, rules, self.aliases)

    def _expression(self, rule: str) -> re.Pattern[str]:
        compiled = self._expressions.get(rule)
        if compiled is None:
            try:
                compiled = compile_pattern(parse_name(rule).expression if has_groups(rule) else rule)
            except LayoutError:
                raise
            except ValueError as error:
                raise LayoutError(
                    f"the pattern {rule!r} is not a regular expression: {error}",
                    got=repr(rule),
                    want="a tensor's name, or a regular expression for whole names",
                    next_step="escape literal characters with a backslash",
                ) from error.__cause__
            self._expressions[rule] = compiled
        return compiled


def _from_file(content: LayoutFile, file: str, kind: type[LayoutMap] = LayoutMap) -> LayoutMap:
    """Return the map of a layout file's content."""
    layout_map = kind(content.mesh)
    layout_map.views.update(content.views)
    layout_map.sizes.update(content.sizes)
    layout_map.aliases.update(content.aliases)
    for pattern, text in content.rules.items():
        try:
            if is_companion(text):
                layout_map.companions[pattern] = parse_companion(text)
            else:
                layout_map[pattern] = TensorLayout.parse(text, content.mesh, content.views)
            # Compiled now, so the error of a wrong pattern names the file.
            layout_map._expression(pattern)
        except LayoutError as error:
            raise name_file(error, f"rule {pattern!r}", file) from error
    # After all rules, because a companion may stand before its base.
    for pattern, companion in layout_map.companions.items():
        if companion.of is not None and companion.of not in layout_map._layouts:
            raise LayoutError(
                f"{file}: rule {pattern!r}: there is no rule {companion.of!r}",
                file=file,
                got=str(companion),
                want="a rule of [tensors], as it is written there",
            )
    return layout_map
