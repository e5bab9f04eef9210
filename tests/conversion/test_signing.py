"""Signatures: made while weights are written, checked file by file; what a flipped byte, file or key is called."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.bench import run
from tests.conversion.made_workspaces import CONFIG, STEP, leave
from xrank.conversion.gather import gather_checkpoint
from xrank.conversion.verify import verify_model
from xrank.errors import UsageError
from xrank.layout import DeviceMesh
from xrank.plan.file_hashes import FileHashes
from xrank.plan.windows import WINDOW_NBYTES

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec


def make_keys(folder: Path, name: str = "key", curve: ec.EllipticCurve | None = None) -> tuple[Path, Path]:
    key = ec.generate_private_key(curve or ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def signed(tmp_path: Path) -> tuple[Path, Path]:
    """Gather a model of three files, the first of several windows, with a signature; return it and its public key."""
    model = {"big": torch.arange(1_500_000, dtype=torch.int32).view(1500, 1000), "small": torch.ones(4, 4)}
    layouts = {"big": "[a/tp, b]", "small": "[a, b]"}
    leave(tmp_path / "run", model, layouts=layouts, mesh=DeviceMesh((2,), ("tp",)))
    private, public = make_keys(tmp_path)
    out = tmp_path / "model"
    arguments: dict[str, Any] = {"recipe": "none", "max_shard_size": "1MB", "workers": 4}
    gather_checkpoint(tmp_path / "run", out, sign=private, attest=True, **arguments)
    return out, public


def read_statement(path: Path) -> dict[str, Any]:
    statement: dict[str, Any] = json.loads(base64.b64decode(json.loads(path.read_bytes())["dsseEnvelope"]["payload"]))
    return statement


def test_every_file_is_signed_and_verified(signed: tuple[Path, Path]) -> None:
    model, public = signed
    resources = {one["name"]: one["digest"] for one in read_statement(model / "model.sig")["predicate"]["resources"]}
    files = {path.name for path in model.iterdir()} - {"model.sig"}
    assert resources == {name: hashlib.sha256((model / name).read_bytes()).hexdigest() for name in files}
    report = verify_model(model, public_key=public)
    assert report.ok and report.proof.signature == str(model / "model.sig") and report.made.num_files == len(files)
    ended = run("verify", model, "--public-key", public)
    assert ended.exit_code == 0 and "every byte as signed in" in ended.stdout
    gathered = run(
        *("gather", model.parent / "run", "-o", model.parent / "by-command", "--recipe", "none"),
        *("--sign", model.parent / "key.pem"),
    )
    assert f"\nsigned  {model.parent / 'by-command'}/model.sig, every file\n" in gathered.stdout, gathered


def test_the_attestation_names_ranks_step_and_config(signed: tuple[Path, Path]) -> None:
    model, _ = signed
    statement = read_statement(model / "model.attestation.json")
    manifest = (model / "xrank_manifest.json").read_bytes()
    assert statement["subject"][0]["digest"] == {"sha256": hashlib.sha256(manifest).hexdigest()}
    source = statement["predicate"]["source"]
    assert (source["step"], source["world_size"]) == (STEP, 2)
    assert [one["ranks"] for one in source["files"]] == [[0], [1]]
    assert all(len(one["checksums_sha256"]) == 64 for one in source["files"])
    assert source["files"][0]["checksums_sha256"] != source["files"][1]["checksums_sha256"]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def drop_file(model: Path) -> None:
    (model / "config.json").unlink()


def add_file(model: Path) -> None:
    (model / "extra.bin").write_bytes(b"1")


def break_bundle(model: Path) -> None:
    (model / "model.sig").write_text("{}")


def change_statement(model: Path) -> None:
    bundle = json.loads((model / "model.sig").read_bytes())
    statement = base64.b64decode(bundle["dsseEnvelope"]["payload"]).replace(b'"config.json"', b'"config.jsom"')
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(statement).decode()
    (model / "model.sig").write_text(json.dumps(bundle))


@pytest.mark.parametrize(
    ("damage", "exit_code", "says"),
    [
        (lambda model: flip(next(model.glob("model-00001*")), 3_000_000), 4, "big (model-00001-of"),
        (lambda model: flip(model / "config.json", 3), 4, "config.json"),
        (drop_file, 3, "config.json is signed and not in"),
        (add_file, 4, "extra.bin is in"),
        (break_bundle, 4, "is not a signature by a key"),
        (change_statement, 4, "not a valid signature"),
    ],
)
def test_damage_is_named(signed: tuple[Path, Path], damage: Callable[[Path], None], exit_code: int, says: str) -> None:
    model, public = signed
    damage(model)
    report = verify_model(model, signature=model / "model.sig", public_key=public)
    assert report.exit_code == exit_code and says in str(report.fault), report.fault
    if says.startswith("big"):
        assert report.fault is not None and report.fault.tensor == "big"
        assert "made of ranks 0-1 (rank_0_state.pth, rank_1_state.pth)" in str(report.fault.next_step)


def test_another_key_is_refused(signed: tuple[Path, Path], tmp_path: Path) -> None:
    model, _ = signed
    _, other = make_keys(tmp_path, "other", ec.SECP384R1())
    assert "not a valid signature" in str(verify_model(model, public_key=other).fault)


def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    leave(tmp_path / "run", {"w": torch.ones(4, 4)}, layouts={"w": "[a, b]"}, mesh=DeviceMesh((1,), ("tp",)))
    _, public = make_keys(tmp_path)
    for wrong in ({"sign": public}, {"sign": tmp_path / "missing.pem"}, {"attest": True}):
        with pytest.raises(UsageError):
            gather_checkpoint(tmp_path / "run", tmp_path / "model", recipe="none", **wrong)  # type: ignore[arg-type]
    for options in ({"signature": tmp_path / "x.sig"}, {"public_key": public, "against": tmp_path / "run"}):
        with pytest.raises(UsageError, match="signature"):
            verify_model(tmp_path / "run", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()


def test_files_of_an_earlier_run_are_hashed_from_the_stage(
    signed: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = signed
    monkeypatch.setattr(FileHashes, "of_file", lambda self, file, nbytes: None)
    out = tmp_path / "again" / "model"
    arguments: dict[str, Any] = {"recipe": "none", "max_shard_size": "1MB", "sign": tmp_path / "key.pem"}
    gather_checkpoint(tmp_path / "run", out, attest=True, **arguments)
    first, second = (read_statement(each / "model.sig")["predicate"]["resources"] for each in (model, out))
    # ECDSA draws a number, so two attestations differ.
    assert [one for one in first if "attest" not in one["name"]] == [o for o in second if "attest" not in o["name"]]
    # An unsigned model in place of a signed one leaves no signature behind.
    del arguments["sign"]
    gather_checkpoint(tmp_path / "run", out, overwrite=True, **arguments)
    assert not (out / "model.sig").exists() and not (out / "model.attestation.json").exists()
    assert json.loads((out / "config.json").read_text()).items() >= CONFIG.items()


def test_windows_are_hashed_in_order_whichever_thread_is_first() -> None:
    windows = [bytes([i]) * (WINDOW_NBYTES if i < 3 else 10) for i in range(4)]
    hashes = FileHashes()
    threads = [
        threading.Thread(target=hashes.add, args=(0, range(i, i + 1), memoryview(windows[i]))) for i in (3, 2, 1, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nbytes = sum(map(len, windows))
    assert hashes.of_file(0, nbytes) == hashlib.sha256(b"".join(windows)).digest()
    assert hashes.of_file(0, nbytes + WINDOW_NBYTES) is None and hashes.of_file(1, 10) is None


def test_a_failure_lets_waiting_threads_go() -> None:
    hashes = FileHashes()
    waiting = threading.Thread(target=hashes.add, args=(0, range(1, 2), memoryview(b"1")))
    waiting.start()
    hashes.abort()
    waiting.join(60)
    assert not waiting.is_alive() and hashes.of_file(0, 1) is None
