"""Layout maps: name patterns to layouts, with Keras' look-up rules, and the TOML file that holds one."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.tensor_layout import TensorLayout

__all__ = ["MAX_FILE_NBYTES", "LayoutMap"]

MAX_FILE_NBYTES = 64 << 20
"""The largest layout file read."""


class LayoutMap(MutableMapping[str, TensorLayout | None]):
    """An ordered map from patterns to layouts, looked up by a tensor's name.

    A look-up takes the key that equals the name, else the one key that is a regular expression for the whole name
    (`re.fullmatch`). Several such keys are refused; with none the answer is None, never a KeyError, so ``get`` never
    returns its default and ``in`` is true for any name, as in Keras. A key that is there cannot be set again.

    Args:
        device_mesh: attached to each layout that is stored without a mesh of its own.
    """

    def __init__(self, device_mesh: DeviceMesh | None = None) -> None:
        self._device_mesh = device_mesh
        self._layouts: dict[str, TensorLayout] = {}
        self._expressions: dict[str, re.Pattern[str]] = {}  # compiled at the first look-up, as Keras does
        self.aliases: dict[str, str] = {}

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of layouts that are stored without one."""
        return self._device_mesh

    def __getitem__(self, key: str) -> TensorLayout | None:
        rule = self.rule_for(key)
        return None if rule is None else self._layouts[rule]

    def rule_for(self, name: str) -> str | None:
        """Return the key that decides for a tensor's name; None without one."""
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
                next_step="delete the key first",
            )
        if not isinstance(key, str):
            raise LayoutError(f"the key {key!r} of a LayoutMap is not text", got=type(key).__name__, want="a pattern")
        # Meant departure from Keras: a layout's text. Other strings are refused as there.
        if isinstance(layout, tuple):
            layout = TensorLayout(layout)
        elif isinstance(layout, str) and layout.startswith("["):
            layout = TensorLayout.parse(layout)
        if not isinstance(layout, TensorLayout):
            raise LayoutError(
                f"{layout} should be a TensorLayout type, got {type(layout)}",
                tensor=key,
                got=repr(layout)[:200],
                want='a TensorLayout, a tuple such as (None, "model"), or text such as "[f/tp, h]"',
            )
        if layout.device_mesh is None and self._device_mesh is not None:
            layout = layout.with_mesh(self._device_mesh)
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
            mine = (self.device_mesh, self._layouts, self.aliases)
            return mine == (other.device_mesh, other._layouts, other.aliases)
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        rules = {key: str(layout) for key, layout in self._layouts.items()}
        return f"<LayoutMap {rules}, mesh {None if self.device_mesh is None else self.device_mesh.grid}>"

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the keys that decide for none of these tensors, in the map's order."""
        used = {self.rule_for(name) for name in names}
        return [key for key in self._layouts if key not in used]

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Return the names of tensors that no key decides for, in the given order."""
        return [name for name in names if self.rule_for(name) is None]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> LayoutMap:
        """Read a layout file.

        Raises:
            UsageError: the file cannot be read.
            LayoutError: it is not TOML, or holds what a layout file has not.
        """
        file = os.fspath(path)
        return _from_tables(_read_toml(file), file)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the map as a layout file, whole or not at all; equal maps of equal order give equal bytes.

        Raises:
            LayoutError: a layout has another mesh than the map, or a name cannot be text in a file.
            UsageError: the file cannot be written.
        """
        file = os.fspath(path)
        try:
            content = _to_text(self).encode("utf-8")
        except UnicodeEncodeError as error:
            raise LayoutError(
                "a name in the LayoutMap cannot be written as UTF-8", file=file, got=ascii(error.object[error.start])
            ) from error
        # A part of a layout file would be read as fewer rules, so the name appears once the file is whole.
        part = f"{file}.{os.getpid()}.part"
        try:
            try:
                with open(part, "xb") as stream:
                    stream.write(content)
                os.replace(part, file)
            except BaseException:
                if os.path.exists(part):
                    os.unlink(part)
                raise
        except OSError as error:
            raise UsageError(f"the layout file {file} cannot be written: {error.strerror}", file=file) from error

    def _expression(self, rule: str) -> re.Pattern[str]:
        compiled = self._expressions.get(rule)
        if compiled is None:
            try:
                compiled = re.compile(rule)
            except (re.error, OverflowError, RecursionError) as error:
                raise LayoutError(
                    f"the pattern {rule!r} is not a regular expression: {error}",
                    got=repr(rule),
                    want="a tensor's name, or a regular expression for whole names",
                    next_step="escape what is meant as it stands with a backslash",
                ) from error
            self._expressions[rule] = compiled
        return compiled


def _read_toml(file: str) -> dict[str, Any]:
    try:
        with open(file, "rb") as stream:
            content = stream.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"the layout file {file} cannot be read: {reason}", file=file) from error
    if len(content) > MAX_FILE_NBYTES:
        raise LayoutError(f"{file} is too large for a layout file", file=file, want=f"at most {MAX_FILE_NBYTES} bytes")
    try:
        return tomllib.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LayoutError(
            f"the layout file {file} is not text", file=file, got=f"{error.reason} at byte {error.start}", want="UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:  # tomllib lets int()'s own ValueError through
        raise LayoutError(f"the layout file {file} is not TOML: {error}", file=file, want="TOML") from error


def _from_tables(tables: dict[str, Any], file: str) -> LayoutMap:
    """Return the map that a layout file's tables say; anything else in them is refused."""
    _refuse_unknown(tables, {"mesh", "tensors", "alias"}, "table", file)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise LayoutError(f"{file}: {name!r} is not a table", file=file, got=repr(table)[:80], want=f"[{name}]")
    layout_map = LayoutMap(_mesh(tables["mesh"], file) if "mesh" in tables else None)
    for pattern, text in tables.get("tensors", {}).items():
        if not isinstance(text, str) or not text.lstrip().startswith("["):
            raise LayoutError(
                f"{file}: the rule {pattern!r} has no layout's text",
                file=file,
                got=repr(text)[:80],
                want='"pattern" = "[f/tp, h]", the pattern in quotes',
            )
        try:
            layout_map[pattern] = TensorLayout.parse(text, layout_map.device_mesh)
            layout_map._expression(pattern)
        except LayoutError as error:
            raise _in_file(error, f"rule {pattern!r}", file) from error
    for name, target in tables.get("alias", {}).items():
        if not isinstance(target, str) or name == target:
            raise LayoutError(
                f"{file}: the alias {name!r} names no other tensor", file=file, got=repr(target)[:80], want="a name"
            )
        if target in tables["alias"]:
            raise LayoutError(
                f"{file}: the alias {name!r} stands for {target!r}, an alias itself",
                file=file,
                want="the name of a tensor with a layout",
            )
        layout_map.aliases[name] = target
    return layout_map


def _mesh(table: dict[str, Any], file: str) -> DeviceMesh:
    _refuse_unknown(table, {"grid", "ranks"}, "key of [mesh]", file)
    grid, ranks = table.get("grid"), table.get("ranks")
    if not isinstance(grid, str):
        raise LayoutError(f"{file}: [mesh] has no grid", file=file, got=repr(grid)[:80], want='grid = "dp=2 tp=2"')
    if ranks is not None and (not isinstance(ranks, list) or any(type(rank) is not int for rank in ranks)):
        raise LayoutError(
            f"{file}: the ranks of [mesh] are no list of integers", file=file, got=repr(ranks)[:80], want="[0, 1, 2, 3]"
        )
    try:
        return DeviceMesh.parse_grid(grid, ranks)
    except LayoutError as error:
        raise _in_file(error, "[mesh]", file) from error


def _refuse_unknown(table: dict[str, Any], known: set[str], what: str, file: str) -> None:
    unknown = [name for name in table if name not in known]
    if unknown:
        raise LayoutError(
            f"{file}: {unknown[0]!r} is no {what}", file=file, got=repr(unknown[0]), want=f"one of {sorted(known)}"
        )


def _in_file(error: LayoutError, where: str, file: str) -> LayoutError:
    """Return the error with the place in the file in front."""
    return LayoutError(
        f"{file}: {where}: {error.message}", file=file, got=error.got, want=error.want, next_step=error.next_step
    )


def _to_text(layout_map: LayoutMap) -> str:
    lines: list[str] = []
    mesh = layout_map.device_mesh
    if mesh is not None:
        lines += ["[mesh]", f"grid = {_quoted(mesh.grid)}"]
        if mesh.ranks != tuple(range(mesh.size)):
            lines.append(f"ranks = {list(mesh.ranks)}")
        lines.append("")
    lines.append("[tensors]")
    for pattern, layout in layout_map._layouts.items():
        if layout.device_mesh != mesh:
            raise LayoutError(
                f"the layout of {pattern!r} has a mesh that is not the LayoutMap's, which a file cannot say",
                tensor=pattern,
                got=repr(layout),
                want=f"the mesh {None if mesh is None else mesh.grid!r}",
            )
        lines.append(f"{_quoted(pattern)} = {_quoted(str(layout))}")
    if layout_map.aliases:
        lines += ["", "[alias]"]
        lines += [f"{_quoted(name)} = {_quoted(target)}" for name, target in layout_map.aliases.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return the text as a TOML basic string: quotes, backslashes and control characters escaped."""
    return '"' + "".join(_ESCAPES.get(c, c) for c in text) + '"'


_ESCAPES = {
    **{chr(code): f"\\u{code:04X}" for code in (*range(0x20), 0x7F)},
    "\\": "\\\\",
    '"': '\\"',
    "\t": "\\t",
    "\n": "\\n",
    "\r": "\\r",
}
