"""Layout maps: name patterns to layouts with Keras' look-up rules, as TOML files, their differences, and companions.

A companion has a base tensor's dims, divided by blocks: a scale has one element per block of a weight; a packed weight
holds several elements in one.

    companion = "scale(" base "," integer { "x" integer } ")"          a block's length in each dim of the base
              | "packed(" base "," "dim" "=" integer "," integer ")"   elements of that dim in one element
    base      = layout | '"' rule '"'                                  a rule of the same layout map, as written there
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from xrank import system
from xrank.errors import AGAIN, LayoutError, UsageError, make_sentence
from xrank.layout.local_part import (
    DimPart,
    LocalPart,
    bind_dims,
    check_shape,
    check_sizes,
    compile_bound_dims,
    holds,
    places_of,
    product_of,
)
from xrank.layout.mesh import NAME_RULE, DeviceMesh, is_name, mesh_from_order
from xrank.layout.nests import Nest, canonical, size
from xrank.layout.notation import LayoutTree, TextParser, render, render_dim
from xrank.layout.tensor_layout import TensorLayout, axis_lengths, check_sound, flat_of
from xrank.layout.tensor_name import TensorName, compile_pattern, has_groups, parse_name
from xrank.storage import places

_MAX_PARTS = 64
_MAX_BRACKETS = 200
_MANY_PARTS = re.compile(rf"(?<![\w-])(?:[\w-]++\s*\.\s*){{{_MAX_PARTS}}}")
_TEXT = re.compile(r"\"(?:[^\"\\]|\\.)*+\"|'[^']*+'")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    ValueError if it is not TOML, or nests too deeply; its message ends with ``(at line N)`` where that is known.

    Example:
        >>> parse_toml("a.b = 1")
        {'a': {'b': 1}}
    """
    for number, line in enumerate(text.splitlines(), 1):
        # tomllib would take minutes for names of thousands of parts, and end in the depth of its recursion.
        brackets = line.count("[") + line.count("{")
        if brackets > _MAX_BRACKETS:  # those within texts do not count
            bare = _TEXT.sub("", line)
            brackets = bare.count("[") + bare.count("{")
        if brackets > _MAX_BRACKETS or (line.count(".") >= _MAX_PARTS and _MANY_PARTS.search(line)):
            raise ValueError(f"it nests deeper than {_MAX_PARTS} tables (at line {number})")
    try:
        import tomllib  # few models need a layout file

        tables = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    except ValueError as error:
        if "int_max_str_digits" not in str(error):
            raise
        digits = re.search(r"\d{1000,}", text)
        place = f" (at line {text.count(chr(10), 0, digits.start()) + 1})" if digits else ""
        raise ValueError(f"an integer has too many digits{place}") from error
    # Code that follows values nested deeper would end in the depth of its recursion.
    level: list[Any] = [tables]
    for _ in range(_MAX_PARTS):
        inner = [part for one in level for part in (one.values() if isinstance(one, dict) else one)]
        level = [part for part in inner if isinstance(part, dict | list)]
        if not level:
            return tables
    raise ValueError(f"it nests deeper than {_MAX_PARTS} tables")


MAX_FILE_NBYTES = 64 << 20
"""The largest layout file that is read, in bytes."""


class LayoutFile(Struct, frozen=True):
    """The content of a layout file; rules are still texts."""

    mesh: DeviceMesh | None = None
    views: Mapping[str, DeviceMesh] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)
    """Pattern -> text, in the file's order."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied name -> the name that it stands for."""


def read_layout_file(file: str) -> LayoutFile:
    """Read a layout file; UsageError if it cannot be read, LayoutError if it is not TOML or has unknown content."""
    file = places.enter(file)
    try:
        with places.open_file(file) as stream:
            # One byte more than allowed is enough to refuse a file of any size.
            content = stream.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = (isinstance(error, OSError) and error.strerror) or error
        next_step = "give a readable layout file; xrank layout show PATH --toml prints one that you can edit"
        raise UsageError(f"the layout file {file} cannot be read: {reason}", file=file, next_step=next_step) from error
    if len(content) > MAX_FILE_NBYTES:
        raise LayoutError(f"{file} is too large for a layout file", file=file, want=f"at most {MAX_FILE_NBYTES} bytes")
    try:
        tables = parse_toml(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        got = f"{error.reason} at byte {error.start}"
        raise LayoutError(f"the layout file {file} is not text", file=file, got=got, want="UTF-8") from error
    except ValueError as error:
        what = f"the layout file {file} is not TOML: {error}"
        raise LayoutError(what, file=file, want="TOML", next_step=f"correct the file, then {AGAIN}") from error
    return parse_tables(tables, file)


def parse_tables(tables: dict[str, Any], file: str) -> LayoutFile:
    """Check a layout file's tables and return their content."""
    _refuse_unknown(tables, {"mesh", "sizes", "tensors", "alias"}, "table", file)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise _wrong(file, f"{name!r} is not a table", table, f"[{name}]")
    mesh, views = _meshes(tables["mesh"], file) if "mesh" in tables else (None, {})
    sizes = _sizes(tables.get("sizes", {}), [m for m in (mesh, *views.values()) if m is not None], file)
    for pattern, text in tables.get("tensors", {}).items():
        if not isinstance(text, str) or not text.lstrip().startswith(("[", "flat(", "scale(", "packed(")):
            want = '"pattern" = "[f/tp, h]", the pattern in quotes'
            raise _wrong(file, f"the rule {pattern!r} has no layout's text", text, want)
    aliases = tables.get("alias", {})
    for name, target in aliases.items():
        if not isinstance(target, str) or name == target:
            raise _wrong(file, f"the alias {name!r} does not name a different tensor", target, "a name")
        if target in aliases:
            problem = f"the alias {name!r} stands for {target!r}, an alias itself"
            raise _wrong(file, problem, want="the name of a tensor with a layout")
    return LayoutFile(mesh, views, sizes, tables.get("tensors", {}), aliases)


def _wrong(file: str, problem: str, got: object = None, want: str | None = None) -> LayoutError:
    return LayoutError(make_sentence(file, problem), file=file, got=None if got is None else repr(got)[:80], want=want)


def _sizes(table: dict[str, Any], meshes: list[DeviceMesh], file: str) -> dict[str, int]:
    for name in table:
        if not is_name(name):
            raise _wrong(file, f"{name!r} is not a name of a size", name, NAME_RULE)
        if any(name in mesh.axis_names for mesh in meshes):
            raise _wrong(file, f"{name!r} is both a size and an axis", want="another name for the size")
    try:
        return check_sizes(table)
    except LayoutError as error:
        raise name_file(error, "[sizes]", file) from error


def _meshes(table: dict[str, Any], file: str) -> tuple[DeviceMesh, dict[str, DeviceMesh]]:
    _refuse_unknown(table, {"grid", "order", "ranks", "view"}, "key of [mesh]", file)
    grid, order, ranks, views = (table.get(key) for key in ("grid", "order", "ranks", "view"))
    if not isinstance(grid, str):
        raise LayoutError(f"{file}: [mesh] has no grid", file=file, got=repr(grid)[:80], want='grid = "dp=2 tp=2"')
    if order is not None and not isinstance(order, str):
        raise _wrong(file, "the order of [mesh] is not a text", order, 'order = "tp-dp-pp"')
    if ranks is not None and (not isinstance(ranks, list) or any(type(rank) is not int for rank in ranks)):
        raise _wrong(file, "ranks of [mesh] is not a list of integers", ranks, "[0, 1, 2, 3]")
    views = {} if views is None else views
    if not isinstance(views, dict) or any(
        not isinstance(text, str) or not is_name(name) for name, text in views.items()
    ):
        raise _wrong(file, "a view of [mesh] is not a grid with a name", views, 'view.expert = "pp=2 ep=4"')
    try:
        mesh = DeviceMesh.parse_grid(grid, None if order is not None else ranks)
        if order is not None:
            mesh = mesh_from_order(order, dict(zip(mesh.axis_names, mesh.shape, strict=True)), ranks)
        return mesh, {name: mesh.view(text) for name, text in views.items()}
    except LayoutError as error:
        raise name_file(error, "[mesh]", file) from error


def _refuse_unknown(table: dict[str, Any], known: set[str], kind: str, file: str) -> None:
    unknown = [name for name in table if name not in known]
    if unknown:
        raise _wrong(file, f"{unknown[0]!r} is not a {kind}", unknown[0], f"one of {sorted(known)}")


def name_file(error: LayoutError, where: str, file: str) -> LayoutError:
    """Return the error with the file and the place in it before the message."""
    what = f"{file}: {where}: {error.message}"
    return LayoutError(what, file=file, got=error.got, want=error.want, next_step=error.next_step)


def to_text(content: LayoutFile) -> str:
    """Return the canonical text of a layout file, which `parse_tables` reads back."""
    lines: list[str] = []
    if content.mesh is not None:
        mesh = content.mesh
        lines += ["[mesh]", f"grid = {_quote(mesh.grid)}"]
        if mesh.ranks != tuple(range(mesh.size)):
            lines.append(f"ranks = {list(mesh.ranks)}")
        lines += [f"view.{_quote(name)} = {_quote(view.grid)}" for name, view in content.views.items()]
        lines.append("")
    if content.sizes:
        lines += ["[sizes]", *(f"{_quote(name)} = {size}" for name, size in content.sizes.items()), ""]
    lines.append("[tensors]")
    lines += [f"{_quote(pattern)} = {_quote(text)}" for pattern, text in content.rules.items()]
    if content.aliases:
        lines += ["", "[alias]"]
        lines += [f"{_quote(name)} = {_quote(target)}" for name, target in content.aliases.items()]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
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


def write_whole(content: bytes, file: str) -> None:
    """Write a small file under a name that appears once it is whole; on an OSError the old file remains."""
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
        # A rename would put a file in the place of /dev/stdout or /dev/null.
        raise OSError(errno.EINVAL, "a device, FIFO or socket is there", file)
    # Random, because ranks in separate containers may share the folder and the process number.
    part = f"{file}.{os.urandom(8).hex()}.part"
    try:
        with open(os.open(part, system.NEW, 0o666), "wb", buffering=0) as stream:
            system.write_all(stream.fileno(), content)
            # Before the rename: a power loss may keep a name and lose the bytes.
            os.fsync(stream.fileno())
        # Readers see the old file or the whole new one.
        os.replace(part, file)
        system.sync_folder(os.path.dirname(file) or os.curdir)
    except BaseException:
        if os.path.exists(part):
            os.unlink(part)
        raise


class LayoutChange(Struct, frozen=True):
    """One entry that differs."""

    name: str
    """A rule, a size, an alias, or "grid", "ranks", "view NAME" of the mesh."""
    old: str | None
    """Its text in the first map; None if absent."""
    new: str | None

    def __str__(self) -> str:
        return f"{self.name}: {'none' if self.old is None else self.old} -> {'none' if self.new is None else self.new}"


class LayoutDiff(Struct, frozen=True):
    """The differences between two layout maps, whatever the order of their rules; false for equal maps."""

    added: tuple[LayoutChange, ...] = ()
    """Rules of the second map alone; ``old`` is None."""
    removed: tuple[LayoutChange, ...] = ()
    """Rules of the first map alone; ``new`` is None."""
    changed: tuple[LayoutChange, ...] = ()
    """Rules of both maps with different texts."""
    mesh: tuple[LayoutChange, ...] = ()
    sizes: tuple[LayoutChange, ...] = ()
    aliases: tuple[LayoutChange, ...] = ()

    def __bool__(self) -> bool:
        return any((self.added, self.removed, self.changed, self.mesh, self.sizes, self.aliases))


def _changes(old: Mapping[str, object], new: Mapping[str, object]) -> tuple[LayoutChange, ...]:
    texts = [{name: str(value) for name, value in each.items()} for each in (old, new)]
    changes = (LayoutChange(name, *(each.get(name) for each in texts)) for name in {**old, **new})
    return tuple(change for change in changes if change.old != change.new)


def _mesh_texts(content: LayoutFile) -> dict[str, str]:
    if content.mesh is None:
        return {}
    texts = {"grid": content.mesh.grid, "ranks": str(list(content.mesh.ranks))}
    if content.mesh.ranks == tuple(range(content.mesh.size)):
        texts["ranks"] = f"0 to {content.mesh.size - 1}"
    return {**texts, **{f"view {name}": view.grid for name, view in content.views.items()}}


class LayoutMap(MutableMapping[str, TensorLayout | None]):
    r"""An ordered map from patterns to layouts, looked up by a tensor's name.

    A look-up finds the key that equals the name, or else the only key that is a regular expression for the whole name
    (`re.fullmatch`). Several such keys are refused. Without a key the result is None instead of a KeyError, so ``get``
    never returns its default and ``in`` is true for any name, as in Keras. An existing key cannot be set again.

    A key with dims, such as ``layers.{6/pp}.up``, is not a regular expression: it matches names with an index instead
    of each group. `xrank.layout.tensor_name` defines which tensors a rank holds under it.

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
        rules = self._find_rules(name, self._layouts)
        if len(rules) > 1:
            # Keras' words (keras/src/distribution).
            what = f"Path '{name}' matches multiple layout specification keys: {rules}. Please make sure each "
            what += "tensor/variable path only matches at most one layout specification key in the LayoutMap."
            want = "one key that matches the whole name, or a key that equals it"
            raise LayoutError(what, tensor=name, got=str(rules), want=want)
        return rules[0] if rules else None

    def __setitem__(self, key: str, layout: TensorLayout | tuple[str | None, ...] | str | None) -> None:
        if key in self._layouts:
            what = f"{key} already exist in the LayoutMap with value {self._layouts[key]}. "
            what += "Please make sure to not use duplicated keys."
            raise LayoutError(what, tensor=key, next_step="take the key out first")
        if not isinstance(key, str):
            raise LayoutError(f"the key {key!r} of a LayoutMap is not text", got=type(key).__name__, want="a pattern")
        # Unlike Keras, accept a layout's text. Other strings are refused as in Keras.
        if isinstance(layout, tuple):
            layout = TensorLayout(layout)
        elif isinstance(layout, str) and layout.startswith(("[", "flat(")):
            layout = TensorLayout.parse(layout)
        if not isinstance(layout, TensorLayout):
            what = f"{layout} should be a TensorLayout type, got {type(layout)}"
            want = 'a TensorLayout, a tuple such as (None, "model"), or text such as "[f/tp, h]"'
            raise LayoutError(what, tensor=key, got=repr(layout)[:200], want=want)
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
        rules = self._find_rules(name, self.companions)
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
        if mesh is not None:
            try:
                views = {name: mesh.view(view.grid) for name, view in content.views.items()}
            except LayoutError as error:
                raise name_file(error, "a view of [mesh]", file) from error
            _sizes(dict(content.sizes), [mesh, *views.values()], file)  # none may have the name of an axis
            content = replace(content, mesh=mesh, views=views)
        return _from_file(content, file, cls)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the map as a layout file, whole or not at all; equal maps in equal order give equal bytes.

        Raises:
            LayoutError: a layout has a different mesh than the map, or a name cannot be written as text.
            UsageError: the file cannot be written.
        """
        text, file = to_text(self._content()), os.fspath(path)
        try:
            write_whole(text.encode("utf-8"), file)  # an incomplete file would be read as one with fewer rules
        except UnicodeEncodeError as error:
            what = "a name in the LayoutMap cannot be written as UTF-8"
            raise LayoutError(what, file=file, got=ascii(error.object[error.start])) from error
        except OSError as error:
            what = f"the layout file {file} cannot be written: {error.strerror}"
            next_step = "write the file into an existing, writable folder"
            raise UsageError(what, file=file, next_step=next_step) from error

    def diff(self, other: LayoutMap) -> LayoutDiff:
        """Return the differences from this map (old) to the given map (new).

        Raises:
            LayoutError: a file cannot express one of the maps.
        """
        old, new = self._content(), other._content()
        rules = _changes(old.rules, new.rules)
        return LayoutDiff(
            added=tuple(change for change in rules if change.old is None),
            removed=tuple(change for change in rules if change.new is None),
            changed=tuple(change for change in rules if change.old is not None and change.new is not None),
            mesh=_changes(_mesh_texts(old), _mesh_texts(new)),
            sizes=_changes(old.sizes, new.sizes),
            aliases=_changes(old.aliases, new.aliases),
        )

    def _parts(self) -> tuple[object, ...]:
        return self.device_mesh, self.views, self.sizes, self._layouts, self.companions, self.aliases

    def _content(self) -> LayoutFile:
        for pattern, layout in self._layouts.items():
            if layout.device_mesh != self.device_mesh:
                grid = None if self.device_mesh is None else self.device_mesh.grid
                what = f"the layout of {pattern!r} has a different mesh than the LayoutMap, which a file cannot express"
                raise LayoutError(what, tensor=pattern, got=repr(layout), want=f"the mesh {grid!r}")
        rules = {pattern: str(value) for pattern, value in (*self._layouts.items(), *self.companions.items())}
        return LayoutFile(self.device_mesh, self.views, self.sizes, rules, self.aliases)

    def _find_rules(self, name: str, rules: Mapping[str, object]) -> list[str]:
        return [name] if name in rules else [rule for rule in rules if self._expression(rule).fullmatch(name)]

    def _expression(self, rule: str) -> re.Pattern[str]:
        compiled = self._expressions.get(rule)
        if compiled is None:
            try:
                compiled = compile_pattern(parse_name(rule).expression if has_groups(rule) else rule)
            except LayoutError:
                raise
            except ValueError as error:
                what = f"the pattern {rule!r} is not a regular expression: {error}"
                want = "a tensor's name, or a regular expression for whole names"
                next_step = "escape literal characters with a backslash"
                raise LayoutError(what, got=repr(rule), want=want, next_step=next_step) from error.__cause__
            self._expressions[rule] = compiled
        return compiled


def _from_file(content: LayoutFile, file: str, kind: type[LayoutMap] = LayoutMap) -> LayoutMap:
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
            what, want = f"there is no rule {companion.of!r}", "a rule of [tensors], as it is written there"
            raise LayoutError(f"{file}: rule {pattern!r}: {what}", file=file, got=str(companion), want=want)
    return layout_map


_BLOCKS = re.compile(r"[0-9]{1,18}(x[0-9]{1,18})*")
_RULE = re.compile(r'[^"]*')


class Companion(Struct, frozen=True):
    """The relation of a tensor to its base; exactly one of `of` and `base` is given."""

    of: str | None
    """The rule that gives the base's layout."""
    base: LayoutTree | None
    """The base's layout itself."""
    blocks: tuple[int, ...] = ()
    """A scale's block in each dim; empty for packed elements."""
    dim: int = 0
    """The dim that is packed."""
    factor: int = 1
    """Number of elements in one packed element."""

    def __str__(self) -> str:
        base = f'"{self.of}"' if self.base is None else render(self.base)
        if self.blocks:
            return f"scale({base}, {'x'.join(map(str, self.blocks))})"
        return f"packed({base}, dim={self.dim}, {self.factor})"


def inline_base(companion: Companion, base: LayoutTree) -> Companion:
    """Return the companion with its base's layout in its own text, which can be read without a map."""
    return replace(companion, of=None, base=base)


def is_companion(text: str) -> bool:
    """Return whether a rule's text is a companion's instead of a layout's."""
    return text.lstrip().startswith(("scale(", "packed("))


def parse_companion(text: str) -> Companion:
    """Parse a companion's text; LayoutError, with the text, the place and the expected token, if it is malformed."""
    reader = TextParser(text, "a companion")
    scale = is_companion(text) and text.lstrip().startswith("scale")
    reader.take("name", '"scale(" or "packed("')
    reader.take("(")
    of, base = None, None
    if reader.accept('"'):
        of = reader.raw(_RULE, "a rule")
        reader.take('"')
    else:
        base = reader.layout()
    reader.take(",")
    if scale:
        blocks = tuple(map(int, reader.raw(_BLOCKS, "blocks, such as 128x128").split("x")))
        companion = Companion(of, base, blocks)
    else:
        if reader.take("name", '"dim="') != "dim":
            raise reader.refusal('"dim=" before it')
        reader.take("=")
        dim = reader.integer("a dim's number")
        reader.take(",")
        companion = Companion(of, base, (), dim, reader.integer("a number of elements"))
    reader.take(")")
    reader.end()
    if min(companion.blocks, default=companion.factor) < 1:
        raise LayoutError(f"the companion {text.strip()[:200]!r} has a block of 0", want="blocks of 1 or more")
    return companion


def companion_shape(companion: Companion, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the global shape of a companion from its base's; the last block of a scale may be incomplete.

    LayoutError if the companion does not fit the base's dims, or the packed dim does not divide.
    """
    sizes = check_shape(shape)
    blocks = blocks_of(companion, len(sizes))
    for i, (length, block) in enumerate(zip(sizes, blocks, strict=True)):
        if not companion.blocks and length % block:
            problem, want = f"dim {i} of {length} is not a multiple of {block}", f"a multiple of {block}"
            raise LayoutError(f"{companion}: {problem}", got=str(length), want=want)
    return tuple(-(-length // block) for length, block in zip(sizes, blocks, strict=True))


def blocks_of(companion: Companion, num_dims: int) -> tuple[int, ...]:
    """Return for each dim of the base how many positions become one of the companion's; LayoutError unless it fits."""
    if companion.blocks:
        if (given := len(companion.blocks)) != num_dims:
            problem = f"has blocks of {given} dims for a tensor of {num_dims}"
            raise LayoutError(f"{companion} {problem}", got=f"{given} dims", want=f"{num_dims} dims")
        return companion.blocks
    if companion.dim >= num_dims:
        what = f"{companion} packs a dim that the tensor lacks"
        raise LayoutError(what, got=str(companion.dim), want=f"0 to {num_dims - 1}")
    return tuple(companion.factor if i == companion.dim else 1 for i in range(num_dims))


def companion_part(
    companion: Companion,
    layout: TensorLayout,
    mesh: DeviceMesh,
    coordinate: Mapping[str, int],
    shape: Sequence[int],
    *,
    sizes: Mapping[str, int] | None = None,
) -> LocalPart | None:
    """Return the part of a companion that the rank at a coordinate holds; None if it holds nothing of the base.

    Layout and global shape are the base's, in unpacked elements; other arguments and errors are as in `local_part`.
    LayoutError, with both numbers, also if a rank's part of the base begins or ends within a block.
    """
    whole = companion_shape(companion, shape)
    if not holds(layout, mesh, coordinate):
        return None
    lengths, places = places_of(layout, mesh, coordinate)
    compiled = compile_bound_dims(bind_dims(layout, shape, lengths, check_sizes(sizes)), places)
    parts = [
        _divide(part, block, (companion, layout, i))
        for i, (part, block) in enumerate(zip(compiled, blocks_of(companion, len(whole)), strict=True))
    ]
    return LocalPart(tuple(part.local_size for part in parts), product_of(parts).nests, layout.tree.sums)


PlacedDim = tuple[Companion, TensorLayout, int]
"""A dim by its companion, the base's layout and its number, for errors."""


def _divide(part: DimPart, block: int, at: PlacedDim) -> DimPart:
    """Return a dim in blocks; every bound of the rank's part must be between two blocks, or at the dim's end."""
    if block == 1:
        return part
    if part.local_size == part.global_size == sum(map(size, part.nests)) > 0 and all(
        nest.x == nest.y and all(xs == ys for _, xs, ys in nest.loops) for nest in part.nests
    ):  # each element at its global place: the blocks do not depend on how the nests cut the dim
        count = -(-part.global_size // block)
        return DimPart(count, count, (Nest(0, 0, ((count, 1, 1),)),) if count > 1 else (Nest(0, 0),))
    nests = tuple(divide_nest(nest, part.global_size, block, at) for nest in part.nests)
    return DimPart(-(-part.global_size // block), -(-part.local_size // block), nests)


def divide_nest(nest: Nest, global_size: int, block: int, at: PlacedDim) -> Nest:
    """Return a nest of a dim in blocks; refuse bounds within a block."""
    x, y, loops = nest
    # The last loop is the run of adjacent elements; without one, runs have a single element.
    *outer, (count, x_stride, y_stride) = loops or ((1, 1, 1),)
    if (x_stride, y_stride) != (1, 1):
        outer, count = list(loops), 1
    last_run = count
    if not outer and y + count == global_size:
        last_run = -(-count // block) * block  # the last block of a scale may be incomplete
    for number, name in (
        (last_run, "positions in a row"),
        (y, "the first position"),
        (x, "the first local position"),
        *((stride, "positions from one row to the next") for _, *strides in outer for stride in strides),
    ):
        if number % block:
            companion, layout, i = at
            what = f"{companion}: dim {i}, {render_dim(layout.dims[i])}: {number} is not a multiple of {block}, so "
            what += "ranks would share a block"
            got = f"{number}, {name} of a rank's part"
            next_step = f'cut at multiples only, as "/=axis%{block}" does'
            raise LayoutError(what, got=got, want=f"a multiple of {block}", next_step=next_step)
    inner = (last_run // block, 1, 1)
    return canonical(Nest(x // block, y // block, (*((n, xs // block, ys // block) for n, xs, ys in outer), inner)))


def base_layout(companion: Companion, layouts: LayoutMap) -> TensorLayout:
    """Return the layout of a companion's base."""
    if companion.of is not None:
        layout = layouts[companion.of]
        assert layout is not None  # layout files without this rule are refused
        return layout
    assert companion.base is not None
    layout = TensorLayout.from_tree(companion.base)
    return layout if layouts.device_mesh is None else layout.with_mesh(layouts.device_mesh, layouts.views)


def base_shapes(
    companion: Companion, layouts: LayoutMap, name: str, shapes: Mapping[str, tuple[int, ...]]
) -> set[tuple[int, ...]]:
    """Return the shapes that the base of a companion of that name may have; empty if its text has the base's layout."""
    if companion.of is None:
        return set()
    rule = layouts.companion_rule_for(name)
    pattern, base = None if rule is None else layouts.name_of(rule), layouts.name_of(companion.of)
    indices = None if pattern is None else pattern.indices(name)
    if base is not None and indices is not None and len(base.dims) == len(indices):
        own = base.with_indices(*indices)  # both names have the same dims, so each companion has its own base
        if own in shapes:
            return {shapes[own]}
    return {shape for other, shape in shapes.items() if layouts.rule_for(other) == companion.of}


def base_of_shape(
    companion: Companion,
    layouts: LayoutMap,
    name: str,
    shape: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[int, ...]:
    """Return the shape of the base of a companion with that global shape; LayoutError unless a single one fits.

    Arguments are as in `base_shapes`.
    """
    found = set()
    if companion.of is None:
        blocks = companion.blocks or tuple(companion.factor if i == companion.dim else 1 for i in range(len(shape)))
        if len(blocks) == len(shape):
            found.add(tuple(n * block for n, block in zip(shape, blocks, strict=True)))
    for base in base_shapes(companion, layouts, name, shapes):
        with suppress(LayoutError):
            if companion_shape(companion, base) == shape:
                found.add(base)
    if len(found) != 1:
        raise LayoutError(
            f"{name}: {companion} does not determine the shape of its base",
            tensor=name,
            got=f"{list(shape)}; bases {sorted(map(list, found))[:4]}",
            want="one base tensor, or several with the same shape",
            next_step="give a rule with the base for only these tensors",
        )
    return found.pop()
