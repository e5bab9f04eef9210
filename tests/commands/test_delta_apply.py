"""A model on disk that follows a trainer: whole at any instant, proven by what the versions record."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import xrank
from tests.readers.made_deltas import Model, change_model, make_chain, make_model, read_folder, write_delta, write_whole
from xrank.cli.main import cli
from xrank.errors import ContradictionError, CorruptError, IncompleteError, OutputExistsError, UsageError
from xrank.formats.deltas import INDEX_NAME, version_name
from xrank.storage.manifest import read_manifest

pytestmark = pytest.mark.quick


@pytest.fixture
def chain(tmp_path: Path) -> list[Model]:
    """Write a base and three versions in ``tmp_path``; return the four models."""
    generator = np.random.default_rng(3)
    models = [make_model(generator)]
    write_whole(tmp_path / "base", models[0])
    for version in (1, 2, 3):
        models.append(change_model(models[-1], generator))
        write_delta(tmp_path / "deltas", models[-2], models[-1], version, step=10 * version)
    return models


def apply(folder: Path, **options: Any) -> Any:
    return xrank.apply_deltas(folder / "base", folder / "deltas", folder / "engine", **options)


def held(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_manifest(str(folder / "engine" / "xrank_manifest.json"))["version"]
    return found


@pytest.mark.timeout(2400)
def test_random_chains_are_followed(tmp_path: Path, soak: bool) -> None:
    """By versions in their order, with some left out, and whole ones in between."""
    for seed in range(300 if soak else 12):
        models = make_chain(tmp_path / "chain", seed, 5)
        for version in (1, 2, 4, 5) if seed % 2 else (3, 5):
            report = apply(tmp_path / "chain", version=version)
            assert read_folder(tmp_path / "chain" / "engine") == models[version], (seed, version)
            assert report.details.version == version == held(tmp_path / "chain")["number"]
            assert xrank.verify_model(tmp_path / "chain" / "engine").ok
        xrank.verify_deltas(tmp_path / "chain" / "base", tmp_path / "chain" / "deltas")
        shutil.rmtree(tmp_path / "chain")


def test_the_same_call_follows(tmp_path: Path, chain: list[Model]) -> None:
    """From its own files where the versions after them are there; and it does nothing if it has the newest."""
    last = tmp_path / "deltas" / "weight_v000003"
    later = last.rename(tmp_path / "later")
    first = apply(tmp_path)
    assert first.details.num_applied == 2 and first.details.base == str(tmp_path / "base")
    assert first.details.earlier_version is None and first.source["step"] == 20
    later.rename(last)
    shutil.rmtree(tmp_path / "deltas" / "weight_v000001")  # as `clean` does
    second = apply(tmp_path)
    assert second.details.num_applied == 1 and second.details.base == str(tmp_path / "engine")
    assert second.details.earlier_version == 2 and read_folder(tmp_path / "engine") == chain[3]
    assert (tmp_path / "engine" / "config.json").exists()
    before = (tmp_path / "engine").stat().st_ino
    third = apply(tmp_path)
    assert third.output is None and third.notes[0][0] == "made-before"
    assert (tmp_path / "engine").stat().st_ino == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "deltas", "engine"]


def test_an_earlier_version_is_made_of_the_base(tmp_path: Path, chain: list[Model]) -> None:
    """A trainer that starts over from an older step."""
    apply(tmp_path)
    report = apply(tmp_path, version=1)
    assert report.details.base == str(tmp_path / "base") and read_folder(tmp_path / "engine") == chain[1]


@pytest.mark.parametrize("states", [True, False])
def test_another_run_of_the_same_numbers(tmp_path: Path, chain: list[Model], states: bool) -> None:
    """Its versions are not applied to what the first run left, with or without recorded states."""
    apply(tmp_path, version=2)
    shutil.rmtree(tmp_path / "deltas")
    generator, old = np.random.default_rng(4), chain[0]
    for version in (1, 2, 3):
        new = change_model(old, generator)
        write_delta(tmp_path / "deltas", old, new, version, states=states)
        old = new
    report = apply(tmp_path)
    assert report.details.base == str(tmp_path / "base") and read_folder(tmp_path / "engine") == old


def test_versions_that_are_named(tmp_path: Path, chain: list[Model]) -> None:
    """The base is then that of the first, whatever its number."""
    write_whole(tmp_path / "exported", chain[1])
    names = [tmp_path / "deltas" / version_name(number) for number in (3, 2)]
    report = xrank.apply_deltas(tmp_path / "exported", names, tmp_path / "engine")
    assert report.details.num_applied == 2 and read_folder(tmp_path / "engine") == chain[3]
    shutil.rmtree(tmp_path / "deltas" / "weight_v000001")
    with pytest.raises(IncompleteError, match="the changes since version 1"):
        xrank.apply_deltas(tmp_path / "exported", tmp_path / "deltas", tmp_path / "other")
    with pytest.raises(IncompleteError, match="version 9 is missing"):
        xrank.apply_deltas(tmp_path / "exported", names, tmp_path / "other", version=9)


def test_a_model_of_another_maker_stays(tmp_path: Path, chain: list[Model]) -> None:
    """Unless the caller says that it may be replaced; a base or a version is never replaced."""
    write_whole(tmp_path / "engine", chain[0])
    with pytest.raises(OutputExistsError):
        apply(tmp_path)
    assert read_folder(tmp_path / "engine") == chain[0]
    apply(tmp_path, overwrite=True)
    assert read_folder(tmp_path / "engine") == chain[3]
    for place in (tmp_path / "base", tmp_path / "deltas"):
        with pytest.raises(UsageError, match="would replace its source"):
            xrank.apply_deltas(tmp_path / "base", tmp_path / "deltas", place, overwrite=True)


def test_versions_before_a_whole_one_go(tmp_path: Path, chain: list[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a relative path, as a user types it, and not before the chain from the whole one is there."""
    monkeypatch.chdir(tmp_path)
    write_whole(tmp_path / "deltas" / "weight_v000004", chain[3], 4)
    write_delta(tmp_path / "deltas", chain[3], chain[2], 5)
    for path in (tmp_path / "deltas").iterdir():
        (path / "xrank_manifest.json").write_text("{}")
    (tmp_path / "deltas/weight_v000005").rename("weight_v000005")
    write_delta(tmp_path / "deltas", chain[2], chain[1], 6)
    assert xrank.clean("deltas").details["num_removed"] == 0
    (tmp_path / "weight_v000005").rename("deltas/weight_v000005")
    assert xrank.clean("deltas").details["num_removed"] == 3
    assert sorted(os.listdir("deltas")) == ["weight_v000004", "weight_v000005", "weight_v000006"]


def test_a_whole_version_of_another_run_is_taken(tmp_path: Path, chain: list[Model]) -> None:
    """It has the number of the one that is there, and no checksums that could differ."""
    shutil.rmtree(tmp_path / "deltas")
    for model in (chain[1], chain[2]):
        shutil.rmtree(tmp_path / "deltas", ignore_errors=True)
        write_whole(tmp_path / "deltas" / "weight_v000000", model, 0)
        apply(tmp_path)
        assert read_folder(tmp_path / "engine") == model
    before = (tmp_path / "engine").stat()
    apply(tmp_path)
    assert (tmp_path / "engine").stat().st_ino == before.st_ino


def test_an_unchanged_tensor_of_another_base_is_found(tmp_path: Path) -> None:
    """No checksum of the version covers it, but the state does; nothing appears."""
    generator = np.random.default_rng(5)
    old = make_model(generator, ["F32"])
    names = [name for name in old if old[name][2]]
    kind, shape, data = old[names[0]]
    new = {**old, names[0]: (kind, shape, data[:-1] + bytes([data[-1] ^ 9]))}
    write_delta(tmp_path / "deltas", old, new, 1)
    other = old[names[1]]
    write_whole(tmp_path / "base", {**old, names[1]: (*other[:2], bytes([other[2][0] ^ 1]) + other[2][1:])})
    for command in (
        lambda: apply(tmp_path),
        lambda: xrank.gather_checkpoint(
            tmp_path / "deltas/weight_v000001", tmp_path / "engine", base_model=tmp_path / "base"
        ),
    ):
        with pytest.raises(CorruptError, match=r"its tensors do not have the hash that .*weight_v000001 records"):
            command()
        assert not (tmp_path / "engine").exists()
    with pytest.raises(CorruptError, match="tensors that it does not change"):
        xrank.verify_deltas(tmp_path / "base", tmp_path / "deltas")
    shutil.rmtree(tmp_path / "base")
    write_whole(tmp_path / "base", old)
    apply(tmp_path)
    assert read_folder(tmp_path / "engine") == new


def test_every_flipped_bit_of_a_body_is_found(tmp_path: Path, chain: list[Model], in_full: bool) -> None:
    """In a chain of several versions; what was there stays."""
    apply(tmp_path, version=1)
    generator, num_harmless = np.random.default_rng(6), 0
    for folder in (tmp_path / "deltas" / "weight_v000002", tmp_path / "deltas" / "weight_v000003"):
        for file in folder.glob("*.safetensors"):
            content = file.read_bytes()
            size = 8 + int.from_bytes(content[:8], "little")
            for at in generator.integers(size * 8, len(content) * 8, 40 if in_full else 5):
                flipped = bytearray(content)
                flipped[at // 8] ^= 1 << at % 8
                file.write_bytes(flipped)
                # A frame has a bit that means nothing: then all is as before.
                with suppress(CorruptError, ContradictionError):
                    xrank.verify_deltas(tmp_path / "base", tmp_path / "deltas")
                    report = apply(tmp_path)
                    assert report.details.num_applied == 2 and read_folder(tmp_path / "engine") == chain[3]
                    apply(tmp_path, version=1)
                    num_harmless += 1
                assert read_folder(tmp_path / "engine") == chain[1]
            file.write_bytes(content)
    assert num_harmless < 5
    apply(tmp_path)
    assert read_folder(tmp_path / "engine") == chain[3]


def test_manifests_of_versions_are_compared(tmp_path: Path) -> None:
    """A flipped bit in a header's blanks is in no tensor."""
    for number, value in enumerate((1, 2)):
        xrank.save_model({"a.weight": __import__("torch").full((64,), value)}, tmp_path / f"step-{number}")
    xrank.make_delta(tmp_path / "step-0", tmp_path / "step-1", tmp_path / "deltas" / "weight_v000001")
    report = xrank.verify_deltas(tmp_path / "step-0", tmp_path / "deltas")
    assert report.details.num_checksums == 1 and report.details.num_digests == 1
    (file,) = (tmp_path / "deltas" / "weight_v000001").glob("*.safetensors")
    content = file.read_bytes()
    at = content.index(b"   ")
    file.write_bytes(content[:at] + b"\t" + content[at + 1 :])
    with pytest.raises(CorruptError):
        xrank.verify_deltas(tmp_path / "step-0", tmp_path / "deltas")


def test_the_commands(tmp_path: Path, chain: list[Model]) -> None:
    """Each prints what it did; inspect lists versions as JSON, too."""
    write_whole(tmp_path / "deltas" / "weight_v000004", chain[3], 4)
    base, deltas, out = (str(tmp_path / name) for name in ("base", "deltas", "engine"))
    shown = CliRunner().invoke(cli, ["delta", "apply", base, deltas, "-o", out, "--version", "3"])
    assert shown.exit_code == 0 and "3 versions to" in shown.stdout and "version 3" in shown.stdout
    shown = CliRunner().invoke(cli, ["delta", "apply", base, deltas, "-o", out, "--version", "3"])
    assert shown.exit_code == 0 and "has version 3 already" in shown.stdout
    shown = CliRunner().invoke(cli, ["delta", "apply", base, deltas, "-o", out])
    assert shown.exit_code == 0 and read_folder(tmp_path / "engine") == chain[3]
    shown = CliRunner().invoke(cli, ["delta", "verify", base, deltas])
    assert shown.exit_code == 0 and "4 versions" in shown.stdout
    shown = CliRunner().invoke(cli, ["delta", "inspect", deltas, "--json"])
    rows = json.loads(shown.stdout)["versions"]
    assert [(row["version"], row["is_whole"], row["step"]) for row in rows] == [
        *((number, False, 10 * number) for number in (1, 2, 3)),
        (4, True, None),
    ]
    assert "whole: " in CliRunner().invoke(cli, ["delta", "inspect", deltas]).stdout
    shown = CliRunner().invoke(cli, ["delta", "verify", base, f"{deltas}/weight_v000001"])
    assert shown.exit_code == 0
    (tmp_path / "deltas" / "weight_v000002" / INDEX_NAME).unlink()
    shown = CliRunner().invoke(cli, ["delta", "verify", base, deltas])
    assert shown.exit_code == 3 and "version 2" in shown.stderr
