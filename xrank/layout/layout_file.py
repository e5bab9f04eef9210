"""The layout file: a layout map as TOML.

[mesh]
grid = "pp=2 dp=2 tp=2"               last axis fastest
order = "tp-dp-pp"                    instead of the grid's own order, as Megatron writes it: first name fastest
ranks = [0, 1, 2, 3, 4, 5, 6, 7]      the ranks, if they are not 0, 1, 2, ...
view.expert = "pp=2 ep=2 etp=2"       a second factoring of the same ranks

[sizes]
d = 128                               names that shapes do not define

[tensors]
"layers.{8/pp}.mlp.up" = "[f/tp, h]"  a name with dims, or a pattern: a name, else a regular expression for names

[alias]
"lm_head" = "embed"                   tied: compared, written once
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from xrank import system
from xrank.errors import AGAIN, LayoutError, UsageError
from xrank.layout.binding import check_sizes
from xrank.layout.mesh import NAME_RULE, DeviceMesh, is_name
from xrank.layout.mesh_views import mesh_from_order
from xrank.layout.toml_text import parse_toml
from xrank.stores import places

MAX_FILE_NBYTES = 64 << 20
"""The largest layout file that is read, in bytes."""


@dataclass(frozen=True, slots=True)
class LayoutFile:
    """The content of a layout file; rules are still texts.

    Args:
        mesh: the mesh, if it has one.
        views: the mesh's views by name.
        sizes: sizes by name.
        rules: pattern -> text, in the file's order.
        aliases: tied name -> the name that it stands for.
    """

    mesh: DeviceMesh | None = None
    views: Mapping[str, DeviceMesh] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def with_mesh(self, mesh: DeviceMesh, file: str) -> LayoutFile:
        """Return the content on another mesh, with the views as views of that mesh.

        Raises:
            LayoutError: a view does not fit the mesh, or a size has the name of an axis.
        """
        try:
            views = {name: mesh.view(view.grid) for name, view in self.views.items()}
        except LayoutError as error:
            raise name_file(error, "a view of [mesh]", file) from error
        _sizes(dict(self.sizes), [mesh, *views.values()], file)
        return replace(self, mesh=mesh, views=views)


def read_layout_file(file: str) -> LayoutFile:
    """Read a layout file.

    Raises:
        UsageError: the file cannot be read.
        LayoutError: it is not TOML, or has unknown content.
    """
    file = places.enter(file)
    try:
        with places.open_file(file) as stream:
            # One byte more than allowed is enough to refuse a file of any size.
            content = stream.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UsageError(
            f"the layout file {file} cannot be read: {reason}",
            file=file,
            next_step="name a layout file that can be read; xrank layout show PATH --toml prints one to start from",
        ) from error
    if len(content) > MAX_FILE_NBYTES:
        raise LayoutError(f"{file} is too large for a layout file", file=file, want=f"at most {MAX_FILE_NBYTES} bytes")
    try:
        tables = parse_toml(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise LayoutError(
            f"the layout file {file} is not text", file=file, got=f"{error.reason} at byte {error.start}", want="UTF-8"
        ) from error
    except ValueError as error:
        raise LayoutError(
            f"the layout file {file} is not TOML: {error}",
            file=file,
            want="TOML",
            next_step=f"correct the file, then {AGAIN}",
        ) from error
    return parse_tables(tables, file)


def parse_tables(tables: dict[str, Any], file: str) -> LayoutFile:
    """Check a layout file's tables and return their content."""
    _refuse_unknown(tables, {"mesh", "sizes", "tensors", "alias"}, "table", file)
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise LayoutError(f"{file}: {name!r} is not a table", file=file, got=repr(table)[:80], want=f"[{name}]")
    mesh, views = _meshes(tables["mesh"], file) if "mesh" in tables else (None, {})
    sizes = _sizes(tables.get("sizes", {}), [m for m in (mesh, *views.values()) if m is not None], file)
    for pattern, text in tables.get("tensors", {}).items():
        if not isinstance(text, str) or not text.lstrip().startswith(("[", "flat(", "scale(", "packed(")):
            raise LayoutError(
                f"{file}: the rule {pattern!r} has no layout's text",
                file=file,
                got=repr(text)[:80],
                want='"pattern" = "[f/tp, h]", the pattern in quotes',
            )
    return LayoutFile(mesh, views, sizes, tables.get("tensors", {}), _aliases(tables.get("alias", {}), file))


def _aliases(table: dict[str, Any], file: str) -> dict[str, str]:
    for name, target in table.items():
        if not isinstance(target, str) or name == target:
            raise LayoutError(
                f"{file}: the alias {name!r} names no other tensor", file=file, got=repr(target)[:80], want="a name"
            )
        if target in table:
            raise LayoutError(
                f"{file}: the alias {name!r} stands for {target!r}, an alias itself",
                file=file,
                want="the name of a tensor with a layout",
            )
    return table


def _sizes(table: dict[str, Any], meshes: list[DeviceMesh], file: str) -> dict[str, int]:
    for name in table:
        if not is_name(name):
            raise LayoutError(f"{file}: {name!r} is not a name of a size", file=file, got=repr(name), want=NAME_RULE)
        if any(name in mesh.axis_names for mesh in meshes):
            raise LayoutError(
                f"{file}: {name!r} is both a size and an axis", file=file, want="another name for the size"
            )
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
        raise LayoutError(
            f"{file}: the order of [mesh] is not a text", file=file, got=repr(order)[:80], want='order = "tp-dp-pp"'
        )
    if ranks is not None and (not isinstance(ranks, list) or any(type(rank) is not int for rank in ranks)):
        raise LayoutError(
            f"{file}: ranks of [mesh] is not a list of integers",
            file=file,
            got=repr(ranks)[:80],
            want="[0, 1, 2, 3]",
        )
    views = {} if views is None else views
    if not isinstance(views, dict) or any(
        not isinstance(text, str) or not is_name(name) for name, text in views.items()
    ):
        raise LayoutError(
            f"{file}: a view of [mesh] is not a grid with a name",
            file=file,
            got=repr(views)[:80],
            want='view.expert = "pp=2 ep=4"',
        )
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
        raise LayoutError(
            f"{file}: {unknown[0]!r} is not a {kind}", file=file, got=repr(unknown[0]), want=f"one of {sorted(known)}"
        )


def name_file(error: LayoutError, where: str, file: str) -> LayoutError:
    """Return the error with the file and the place in it before the message."""
    return LayoutError(
        f"{file}: {where}: {error.message}", file=file, got=error.got, want=error.want, next_step=error.next_step
    )


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


def write_text(text: str, file: str) -> None:
    """Write a layout file, whole or not at all.

    Raises:
        LayoutError: the text is not Unicode.
        UsageError: the file cannot be written.
    """
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise LayoutError(
            "a name in the LayoutMap cannot be written as UTF-8", file=file, got=ascii(error.object[error.start])
        ) from error
    try:
        write_whole(content, file)  # an incomplete layout file would be read as one with fewer rules
    except OSError as error:
        raise UsageError(
            f"the layout file {file} cannot be written: {error.strerror}",
            file=file,
            next_step="write the file into a folder that exists and may be written to",
        ) from error


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
    """Write a small file under a name that appears once the file is whole.

    Raises:
        OSError: it cannot be written; the old file remains.
    """
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
        # A rename would put a file in the place of /dev/stdout or /dev/null.
        raise OSError(errno.EINVAL, "a device, FIFO or socket is there", file)
    # Random, because ranks in separate containers may share the folder and the process number.
    part = f"{file}.{secrets.token_hex(8)}.part"
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
