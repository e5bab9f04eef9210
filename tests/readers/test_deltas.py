"""Chains of versions: every command reads the newest model, and refuses by name what is missing or foreign."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import xrank
from tests.readers.made_deltas import (
    Model,
    change_model,
    make_chain,
    make_model,
    read_folder,
    write_delta,
    write_files,
    write_whole,
)
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UnknownFormatError, UsageError
from xrank.formats.deltas import INDEX_NAME, version_name
from xrank.readers.deltas import choose_target, find_versions
from xrank.readers.discovery import find_source
from xrank.readers.hugging_face.folder import read_facts

pytestmark = pytest.mark.quick


def check_versions(folder: Path, models: list[Model]) -> None:
    """Gather every version, and compare it with the whole model."""
    has_whole = False
    for number in range(1, len(models)):
        path, out = folder / "deltas" / version_name(number), folder / f"out{number}"
        has_whole |= read_facts(str(path)) is None
        xrank.gather_checkpoint(path, out, base_model=None if has_whole else folder / "base")
        assert read_folder(out) == models[number], number
        assert (out / "config.json").read_text() == '{"model_type": "made"}'


@pytest.mark.timeout(2400)
def test_random_chains_are_equal_to_whole_models(tmp_path: Path, soak: bool) -> None:
    """Types, sizes, encodings, checksums, and whole versions in between, by chance; 1,000 chains with --soak."""
    for seed in range(1000 if soak else 20):
        check_versions(tmp_path / "chain", make_chain(tmp_path / "chain", seed))
        shutil.rmtree(tmp_path / "chain")


@pytest.fixture
def chain(tmp_path: Path) -> list[Model]:
    """Write three versions of changes on a base in ``tmp_path``."""
    generator = np.random.default_rng(7)
    models = [make_model(generator, ["BF16"])]
    write_whole(tmp_path / "base", models[0])
    for version in (1, 2, 3):
        models.append(change_model(models[-1], generator))
        write_delta(tmp_path / "deltas", models[-2], models[-1], version, step=10 * version)
    return models


def test_other_commands_read_a_chain(tmp_path: Path, chain: list[Model]) -> None:
    """What they do with a folder of whole tensors, they do with a version of changes."""
    path, base = tmp_path / "deltas" / "weight_v000003", tmp_path / "base"
    write_whole(tmp_path / "whole", chain[-1])
    assert xrank.verify_model(path, base_model=base).ok
    assert xrank.verify_model(path, against=tmp_path / "whole", base_model=base).ok
    name, (kind, shape, data) = next(one for one in chain[-1].items() if one[1][1])
    write_whole(tmp_path / "other", {**chain[-1], name: (kind, shape, bytes([0, 0]) + data[2:])})
    assert not xrank.verify_model(path, against=tmp_path / "other", base_model=base).ok
    opened = xrank.open_checkpoint(path, base_model=base)
    for name, (_, shape, data) in chain[-1].items():
        assert tuple(opened[name].shape) == shape
        assert opened[name].view(-1).view(dtype=__import__("torch").uint8).numpy().tobytes() == data
    report = xrank.gather_checkpoint(path, tmp_path / "fp32", base_model=base, dtype="fp32")
    assert {kind for kind, _, _ in read_folder(tmp_path / "fp32").values()} == {"F32"}
    assert report.source["step"] == 30 and report.source["format"] == "deltas"
    assert any(note[0] == "chain" and "3 versions" in note[1] for note in report.notes)


def test_a_folder_of_versions_means_the_newest(tmp_path: Path, chain: list[Model]) -> None:
    """A version that is still being written has no index yet."""
    (tmp_path / "deltas" / "weight_v000004").mkdir()
    assert find_source(str(tmp_path / "deltas")).path == str(tmp_path / "deltas" / "weight_v000003")
    report = xrank.gather_checkpoint(tmp_path / "deltas", tmp_path / "out", base_model=tmp_path / "base")
    assert read_folder(tmp_path / "out") == chain[3]
    assert (
        "newest-version",
        f"the newest of 3 versions in {tmp_path / 'deltas'} is read: weight_v000003",
    ) in report.notes


def test_a_version_without_changes(tmp_path: Path, chain: list[Model]) -> None:
    """Its folder has an index alone."""
    write_delta(tmp_path / "deltas", chain[3], chain[3], 4)
    xrank.gather_checkpoint(tmp_path / "deltas" / "weight_v000004", tmp_path / "out", base_model=tmp_path / "base")
    assert read_folder(tmp_path / "out") == chain[3]


def gather(folder: Path, version: int = 3, **options: object) -> None:
    options = {"base_model": folder / "base", **options}
    xrank.gather_checkpoint(folder / "deltas" / version_name(version), folder / "out", **options)  # type: ignore[arg-type]


def test_missing_versions_are_named(tmp_path: Path, chain: list[Model]) -> None:
    """A gap, or a chain whose beginning is nowhere."""
    with pytest.raises(IncompleteError, match="the changes since version 0, which is missing"):
        gather(tmp_path, base_model=None)
    shutil.rmtree(tmp_path / "deltas" / "weight_v000002")
    with pytest.raises(IncompleteError, match="weight_v000003 contains the changes since version 2") as caught:
        gather(tmp_path)
    assert "weight_v000001, weight_v000003" in str(caught.value.got)
    assert not (tmp_path / "out").exists()


def test_a_renamed_version_is_refused(tmp_path: Path, chain: list[Model]) -> None:
    """Its number is part of the chain."""
    (tmp_path / "deltas" / "weight_v000003").rename(tmp_path / "deltas" / "weight_v000004")
    with pytest.raises(ContradictionError, match="has the name of a different version"):
        gather(tmp_path, 4)


def test_states_that_disagree_are_refused(tmp_path: Path, chain: list[Model]) -> None:
    """Two runs whose versions have the same numbers."""
    index = tmp_path / "deltas" / "weight_v000002" / INDEX_NAME
    facts = json.loads(index.read_text())
    facts["metadata"]["xrank"]["base_state"] = "0" * 32
    index.write_text(json.dumps(facts))
    with pytest.raises(ContradictionError, match=r"changes to different weights than those of .*weight_v000001"):
        gather(tmp_path)
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused(tmp_path: Path, chain: list[Model]) -> None:
    """By names and sizes at once, and by checksums before the output appears."""
    name, (kind, shape, data) = next((name, one) for name, one in chain[0].items() if one[2] and one != chain[1][name])
    shutil.rmtree(tmp_path / "base")
    write_whole(tmp_path / "base", {other: one for other, one in chain[0].items() if other != name})
    with pytest.raises(ContradictionError, match="the base lacks this tensor") as caught:
        gather(tmp_path)
    assert caught.value.tensor == name
    shutil.rmtree(tmp_path / "base")
    write_whole(tmp_path / "base", {**chain[0], name: (kind, (len(data) // 2 + 1,), data + b"00")})
    with pytest.raises(ContradictionError, match="its size in the base is different"):
        gather(tmp_path)
    shutil.rmtree(tmp_path / "base")
    write_whole(tmp_path / "base", {**chain[0], name: (kind, shape, data[:-1] + bytes([data[-1] ^ 1]))})
    with pytest.raises(CorruptError, match="does not reproduce the bytes of its writer") as wrong:
        gather(tmp_path)
    assert wrong.value.tensor == name and not (tmp_path / "out").exists()


def test_files_that_are_not_changes_are_refused(tmp_path: Path, chain: list[Model]) -> None:
    """Tensors of another type, without a checksum, or with a body that is no frame."""
    folder = tmp_path / "deltas" / "weight_v000004"
    facts = {**json.loads((tmp_path / "deltas" / "weight_v000003" / INDEX_NAME).read_text())["metadata"]}
    facts |= {"version": "000004", "base_version": "000003", "xrank": {}}
    name = next(iter(chain[0]))
    for tensor, texts, problem in (
        (("BF16", (4,), b"12345678"), {name: "00"}, "is not a change of a tensor"),
        (("U8", (8,), b"12345678"), {}, "is not a change of a tensor"),
        (("U8", (8,), b"12345678"), {name: "00"}, "its changes are damaged"),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        write_files(folder, [{name: tensor}], [texts], facts)
        with pytest.raises(CorruptError, match=problem):
            gather(tmp_path, 4)


def test_facts_that_xrank_does_not_know_are_refused(tmp_path: Path, chain: list[Model]) -> None:
    """Another encoding may come; it must not be read as one of those."""
    index = tmp_path / "deltas" / "weight_v000003" / INDEX_NAME
    facts = json.loads(index.read_text())
    facts["metadata"]["delta_encoding"] = "sum"
    index.write_text(json.dumps(facts))
    with pytest.raises(CorruptError, match="delta_encoding is not known"):
        gather(tmp_path)


def test_a_base_model_is_whole(tmp_path: Path, chain: list[Model]) -> None:
    """A version of changes defines no names and shapes by itself."""
    with pytest.raises(UsageError, match="is a delta of version 2 on base 1, not a model"):
        gather(tmp_path, base_model=tmp_path / "deltas" / "weight_v000002")


def test_a_stage_of_another_chain_is_not_resumed(tmp_path: Path, chain: list[Model]) -> None:
    """The plan's digest knows the changes, also where the files look alike."""
    from xrank.recipes.decision import plan_gather
    from xrank.recipes.options import GatherOptions

    def digest() -> str:
        path = str(tmp_path / "deltas" / "weight_v000003")
        return plan_gather(path, GatherOptions(), base_model=tmp_path / "base").digest

    first = digest()
    assert digest() == first
    file = next((tmp_path / "deltas" / "weight_v000002").glob("*.safetensors"))
    status, content = file.stat(), file.read_bytes()
    at = content.index(b'__metadata__":{"') + len('__metadata__":{"')
    at = content.index(b'":"', at) + 3
    flipped = bytearray(content)
    flipped[at] = ord("0") if flipped[at] != ord("0") else ord("1")
    with file.open("r+b") as opened:
        opened.write(flipped)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest() != first


def test_a_version_that_is_asked_for(tmp_path: Path, chain: list[Model]) -> None:
    """Of a folder of versions, or of versions that are named."""
    deltas = str(tmp_path / "deltas")
    versions = find_versions([deltas])
    assert list(versions) == [1, 2, 3] and versions == find_versions([*reversed(versions.values())])
    assert choose_target(versions, None) == versions[3] and choose_target(versions, 1) == versions[1]
    with pytest.raises(IncompleteError, match="version 4 is missing"):
        choose_target(versions, 4)
    with pytest.raises(UsageError, match="version 2 is given twice"):
        find_versions([deltas, versions[2]])
    with pytest.raises(UnknownFormatError, match="contains no version"):
        find_versions([str(tmp_path / "base")])
