"""Signatures: made while weights are written, checked file by file; what a flipped byte, file or key is called."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.bench import run
from tests.commands.made_workspaces import CONFIG, STEP, leave
from xrank.commands.gather import gather_checkpoint
from xrank.commands.verify import verify_model
from xrank.engine.windows import WINDOW_NBYTES, FileHashes
from xrank.errors import UsageError
from xrank.layout import DeviceMesh

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import hashes, serialization
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with keys, states, and a model of three files with a signature, the first file of several windows."""
    folder = tmp_path_factory.mktemp("signed")
    model = {"big": torch.arange(1_500_000, dtype=torch.int32).view(1500, 1000), "small": torch.ones(4, 4)}
    layouts = {"big": "[a/tp, b]", "small": "[a, b]"}
    leave(folder / "run", model, layouts=layouts, mesh=DeviceMesh((2,), ("tp",)))
    private, _ = make_keys(folder)
    arguments: dict[str, Any] = {"recipe": "none", "max_shard_size": "1MB", "workers": 4}
    gather_checkpoint(folder / "run", folder / "model", sign=private, attest=True, **arguments)
    return folder


@pytest.fixture
def signed(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the signed model, and its public key."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "model", tmp_path / "key.pub"


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
        (drop_file, 3, "config.json is signed but not in"),
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


def sign_again(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a statement, and sign it with the same key: the signature holds, the content is odd."""
    key = serialization.load_pem_private_key((model.parent / "key.pem").read_bytes(), None)
    bundle = json.loads((model / "model.sig").read_bytes())
    statement = read_statement(model / "model.sig")
    change(statement)
    payload = json.dumps(statement).encode()
    kind = bundle["dsseEnvelope"]["payloadType"].encode()
    signed = key.sign(b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload), ec.ECDSA(hashes.SHA256()))
    bundle["dsseEnvelope"] |= {"payload": base64.b64encode(payload).decode()}
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(signed).decode()
    (model / "model.sig").write_text(json.dumps(bundle))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda resources: resources[0].update(name=3), "predicate.resources[0].name is 3, not a text"),
        (lambda resources: resources[0].update(name="\ud800"), "not a text in UTF-8"),
        (lambda resources: resources[0].update(name=["a"]), "name is a list of 1, not a text"),
        (lambda resources: resources[0].update(digest="zz"), "not a text of hexadecimal digits"),
        (lambda resources: resources.__setitem__(0, None), "is None, not an object with name"),
    ],
)
def test_signed_statements_of_another_structure(
    signed: tuple[Path, Path], change: Callable[[list[Any]], object], says: str
) -> None:
    """The key's owner signs anything; what a statement says is checked beyond its signature."""
    model, public = signed
    sign_again(model, lambda statement: change(statement["predicate"]["resources"]))
    ended = run("verify", model, "--signature", model / "model.sig", "--public-key", public, "--json")
    error = json.loads(ended.stdout)["error"]
    assert ended.exit_code == 4 and error["type"] == "CorruptError", ended.stdout
    assert "does not sign the files of a model" in error["message"] and says in error["got"], error


@pytest.mark.parametrize("text", ["[" * 100_000, '{"verificationMaterial": 1e999}', '{"a": ' + "9" * 5000 + "}"])
def test_bundles_of_another_structure(signed: tuple[Path, Path], text: str) -> None:
    model, public = signed
    (model / "model.sig").write_text(text)
    report = verify_model(model, signature=model / "model.sig", public_key=public)
    assert report.exit_code == 4 and "is not a signature by a key" in str(report.fault)


def _put_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _put_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may be at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def _link_outside(model: Path, name: str, *, is_folder: bool) -> None:
    target = model.parent / "outside"
    target.mkdir() if is_folder else target.write_text("{}")
    (target / "evil.py").write_text("1") if is_folder else None
    (model / name).symlink_to(target)


def _link_signed(model: Path) -> None:
    (model / "again.json").symlink_to("config.json")


def _replace_by_link(model: Path) -> None:
    (model / "config.json").rename(model.parent / "config.json")
    (model / "config.json").symlink_to("../config.json")


def _hide_in_folder(model: Path) -> None:
    (model / "model.sig").rename(model.parent / "own.sig")
    (model / "model.sig").mkdir()
    (model / "model.sig" / "evil.py").write_text("1")


def _link_signature(model: Path) -> None:
    (model / "model.sig").rename(model.parent / "own.sig")
    (model / "model.sig").symlink_to("../own.sig")


def _link_inner(model: Path) -> None:
    (model / "inner").mkdir()
    (model / "inner" / "up").symlink_to("..")


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a linked folder": (lambda model: _link_outside(model, "tools", is_folder=True), "tools is not a file"),
    "a linked file": (lambda model: _link_outside(model, "extra.json", is_folder=False), "extra.json is not a file"),
    "a link to a signed file": (_link_signed, "again.json is not a file"),
    "a link in the place of a signed file": (_replace_by_link, "config.json is not a file"),
    "a broken link": (lambda model: (model / "gone").symlink_to("nowhere"), "gone is not a file"),
    "a link in a circle": (_link_inner, "inner/up is not a file"),
    "a FIFO": (lambda model: _put_fifo(model / "pipe"), "pipe is not a file"),
    "a FIFO in the place of a signed file": (
        lambda model: _put_fifo(model / "config.json"),
        "config.json is not a file",
    ),
    "a FIFO in the signature's place": (lambda model: _put_fifo(model / "model.sig"), "is not a regular file"),
    "a link in the signature's place": (_link_signature, "model.sig is not a file"),
    "a socket": (lambda model: _put_socket(model / "door"), "door is not a file"),
    "a folder with the signature's name": (_hide_in_folder, "model.sig is not a file"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_file_is_refused_and_not_followed(signed: tuple[Path, Path], kind: str) -> None:
    """A statement is about files: a link leads elsewhere, and reading a FIFO would never end."""
    model, public = signed
    put, said = KINDS[kind]
    put(model)
    own = model.parent / "own.sig"
    more = ["--signature", own] if own.exists() and kind == "a folder with the signature's name" else []
    ended = run("verify", model, "--public-key", public, *more)
    assert ended.exit_code == 4 and said in ended.stdout + ended.stderr, ended


def test_files_that_a_signature_leaves_out_are_noted(signed: tuple[Path, Path]) -> None:
    model, public = signed
    (model / ".git").mkdir()
    (model / ".git" / "config").write_text("any")
    report = verify_model(model, public_key=public)
    assert report.ok and ".git/" in dict(report.notes)["unsigned-files"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_read_is_not_passed_over(signed: tuple[Path, Path]) -> None:
    model, public = signed
    (model / "closed").mkdir(mode=0)
    assert run("verify", model, "--public-key", public).exit_code != 0
    (model / "closed").chmod(0o700)


@pytest.mark.parametrize("name", ["model.sig", "model.attestation.json", "xrank_manifest.json"])
def test_a_folder_in_the_place_of_the_signature_is_not_copied(tmp_path: Path, name: str) -> None:
    private, _ = make_keys(tmp_path)
    leave(tmp_path / "run", {"small": torch.ones(4, 4)}, layouts={"small": "[a, b]"}, mesh=DeviceMesh((2,), ("tp",)))
    base = tmp_path / "base"
    (base / name).mkdir(parents=True)
    (base / name / "x.py").write_text("1")
    (base / "config.json").write_text(json.dumps(CONFIG))
    save_file({"small": torch.ones(4, 4)}, base / "model.safetensors")
    ended = run("gather", tmp_path / "run", "--out", tmp_path / "out", "--base-model", base, "--sign", private)
    assert ended.exit_code == 2 and name in ended.stderr, ended
    assert not (tmp_path / "out").exists()


def test_a_fifo_in_the_place_of_a_gathered_file_is_named(signed: tuple[Path, Path]) -> None:
    """By the manifest, too, a comparison never waits for a writer."""
    _put_fifo(signed[0] / "config.json")
    ended = run("verify", signed[0])
    assert ended.exit_code == 4 and "config.json" in ended.stdout + ended.stderr


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
    for options in (
        {"signature": tmp_path / "x.sig"},
        {"public_key": public, "against": tmp_path / "run"},
        {"public_key": public, "world_size": 2},
    ):
        with pytest.raises(UsageError, match="signature"):
            verify_model(tmp_path / "run", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "model").exists()


def test_files_of_an_earlier_run_are_hashed_from_the_stage(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made / "model"
    monkeypatch.setattr(FileHashes, "of_file", lambda self, file, nbytes: None)
    out = tmp_path / "again" / "model"
    arguments: dict[str, Any] = {"recipe": "none", "max_shard_size": "1MB", "sign": made / "key.pem"}
    gather_checkpoint(made / "run", out, attest=True, **arguments)
    first, second = (read_statement(each / "model.sig")["predicate"]["resources"] for each in (model, out))
    # ECDSA draws a number, so two attestations differ.
    assert [one for one in first if "attest" not in one["name"]] == [o for o in second if "attest" not in o["name"]]
    # An unsigned model in place of a signed one leaves no signature behind.
    del arguments["sign"]
    gather_checkpoint(made / "run", out, overwrite=True, **arguments)
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
