"""Readers of other packages, installed as a real distribution's metadata."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.bench import run
from xrank.errors import UnknownFormatError, XrankError
from xrank.readers import Hints, discovery
from xrank.readers.discovery import find_source

CODE = """
class Reader:
    name = "nuts"
    def recognize(self, path):
        import os
        return None if os.path.exists(os.path.join(path, "nuts")) else "no nuts in it"
    def read(self, path, hints):
        raise NotImplementedError("two\\nlines")
class Odd(Reader):
    name = "odd"
    def recognize(self, path):
        return 1 / 0
class Raising(Reader):
    def read(self, path, hints):
        from pathlib import Path
        kind = Path(path, "nuts").read_text()
        if kind == "dict":
            return {}
        raise {"missing": FileNotFoundError, "forbidden": PermissionError, "key": KeyError}[kind]("shell")
object_reader = Reader()
class Unnamed(Reader):
    name = None
no_reader = 3
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose metadata names readers; the caller writes entry_points.txt."""
    (tmp_path / "nutshell.py").write_text(CODE)
    info = tmp_path / "nutshell-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nutshell\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    discovery.plugin_readers.cache_clear()
    yield info / "entry_points.txt"
    discovery.plugin_readers.cache_clear()
    sys.modules.pop("nutshell", None)


@pytest.mark.parametrize("what", ["Reader", "object_reader"])
def test_a_reader_of_another_package(installed: Path, tmp_path: Path, what: str) -> None:
    installed.write_text(f"[xrank.readers]\nnuts = nutshell:{what}\n")
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(UnknownFormatError) as caught:
        find_source(str(source))
    assert caught.value.got is not None and "nuts: no nuts in it" in caught.value.got
    (source / "nuts").touch()
    assert find_source(str(source))[1].name == "nuts"
    assert find_source(str(source), format_name="nuts")[0] == str(source)


def test_one_that_does_not_load_is_a_warning(installed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    installed.write_text("[xrank.readers]\na = nutshell:missing\nb = nutshell:no_reader\nnuts = nutshell:Reader\n")
    source = tmp_path / "source"
    source.mkdir()
    (source / "nuts").touch()
    assert find_source(str(source))[1].name == "nuts"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all("of the package nutshell fails to load" in text for text in said)
    assert "lacks 'name'" in said[1]


def test_a_failure_of_one_names_its_package(installed: Path, tmp_path: Path) -> None:
    installed.write_text("[xrank.readers]\nnuts = nutshell:Reader\nodd = nutshell:Odd\n")
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(UnknownFormatError) as unknown:
        find_source(str(source))
    assert unknown.value.got is not None
    assert (
        "odd: the reader odd of the package nutshell failed: ZeroDivisionError: division by zero" in unknown.value.got
    )
    (source / "nuts").touch()
    place = find_source(str(source))
    with pytest.raises(
        XrankError, match="reader nuts of the package nutshell failed: NotImplementedError: two"
    ) as raised:
        place.reader.read(place.path, Hints())
    assert "\n" not in raised.value.message and raised.value.exit_code == 1 and raised.value.file == str(source)


@pytest.mark.parametrize(("kind", "exit_code"), [("missing", 3), ("forbidden", 2), ("key", 1), ("dict", 1)])
def test_each_failure_of_one_ends_a_command_in_one_line(
    installed: Path, tmp_path: Path, kind: str, exit_code: int
) -> None:
    installed.write_text("[xrank.readers]\nnuts = nutshell:Raising\n")
    source = tmp_path / "source"
    source.mkdir()
    (source / "nuts").write_text(kind)
    ended = run("gather", source, "-o", tmp_path / "out")
    assert ended.exit_code == exit_code
    first, *rest = ended.stderr.splitlines()
    assert "the reader nuts of the package nutshell failed: " in first
    assert [line.split()[0] for line in rest] == ["try"]


def test_a_reader_without_a_name_does_not_load(installed: Path) -> None:
    installed.write_text("[xrank.readers]\nnuts = nutshell:Unnamed\n")
    assert discovery.find_plugins() == [
        ("nutshell", "nuts", "TypeError: the name of nutshell:Unnamed is None, not a text")
    ]


def test_a_format_that_nobody_reads(tmp_path: Path) -> None:
    with pytest.raises(UnknownFormatError, match="no format is called walnuts"):
        find_source(str(tmp_path), format_name="walnuts")
