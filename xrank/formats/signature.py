"""Signed statements: an in-toto statement in a DSSE envelope in a Sigstore bundle, under an elliptic curve key.

The form is that of model-signing 1.1 (``model_signing/_signing/sign_ec_key.py``, ``sign_sigstore_pb.py``): the media
type of Sigstore's bundle 0.3, the public key as a hint (SHA-256 of its PEM), no log entries; the signature is over
DSSE's pre-authentication encoding (secure-systems-lab/dsse, protocol.md). The package cryptography is imported on use.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from xrank.errors import CorruptError, IncompleteError, UsageError, option, require
from xrank.storage.entries import Entry
from xrank.storage.regular_file import open_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.hashes import HashAlgorithm


STATEMENT_TYPE = "https://in-toto.io/Statement/v1"

_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_CURVES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
_MAX_NBYTES = 2 * 2**30


def read_signing_key(path: str) -> EllipticCurvePrivateKey:
    """Return a private key in PEM; one that is unreadable, has a password, or is of another kind is a UsageError."""
    key: EllipticCurvePrivateKey = _read_key(path, "private")
    return key


def read_public_key(path: str) -> EllipticCurvePublicKey:
    """Return a public key in PEM; errors as in `read_signing_key`."""
    key: EllipticCurvePublicKey = _read_key(path, "public")
    return key


def _read_key(path: str, kind: str) -> Any:
    require("cryptography", "a signature")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    is_private = kind == "private"
    try:
        with open(path, "rb") as file:
            data = file.read()
        key: Any = (
            serialization.load_pem_private_key(data, None) if is_private else serialization.load_pem_public_key(data)
        )
        if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
            return key
        got = type(key).__name__
    except (OSError, ValueError, TypeError) as error:  # TypeError: it has a password
        got = str(error)
    name = "sign" if is_private else "public_key"
    raise UsageError(
        f"{option(name)} must be an elliptic curve's {kind} key",
        file=path,
        got=got,
        want=f"a {kind} key in PEM, without a password, of the curve P-256, P-384 or P-521",
        next_step="make one with: openssl ecparam -name prime256v1 -genkey -noout -out key.pem; "
        "openssl ec -in key.pem -pubout -out key.pub",
    )


def sign_statement(statement: dict[str, Any], key: EllipticCurvePrivateKey) -> bytes:
    """Return the bundle of a statement, as a file holds it."""
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    payload = json.dumps(statement, separators=(",", ":")).encode()
    signature = key.sign(_encode(payload), ECDSA(_hash_of(key)))
    bundle = {
        "mediaType": _MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": _hint_of(key.public_key())}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": _PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(bundle).encode()


def read_signed_statement(path: str, key: EllipticCurvePublicKey) -> dict[str, Any]:
    """Return the statement of a bundle after its signature was checked."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    def fail(fault: str) -> CorruptError:
        return CorruptError(
            f"{path} is not a signature by a key",
            file=path,
            got=fault,
            want="a Sigstore bundle 0.3 with a DSSE envelope and a public key's hint",
            next_step="sign the model again, or copy the signature again",
        )

    try:
        with open_regular(path) as file:
            if file.nbytes > _MAX_NBYTES:
                raise fail(f"{file.nbytes:,} bytes")
            bundle = Entry.parse(file.read(0, file.nbytes), fail)
    except IncompleteError as error:
        problem = f"the signature {path} cannot be read: {error.message}"
        raise UsageError(problem, file=path, next_step="give the signature's file") from None
    hint = bundle["verificationMaterial"]["publicKey"]["hint"].text()
    envelope = bundle["dsseEnvelope"]
    payload = _decode(envelope["payload"])
    (signature,) = envelope["signatures"].entries(length=1)
    signed = _decode(signature["sig"])
    for entry, want in ((bundle["mediaType"], _MEDIA_TYPE), (envelope["payloadType"], _PAYLOAD_TYPE)):
        if entry.value != want:
            entry.refuse(want)
    if hint != _hint_of(key):
        got = f"a signature by the key {ascii(hint[:16])[1:-1]}"
        raise _signature_error(path, got, f"a signature by the key {_hint_of(key)[:16]}")
    try:
        key.verify(signed, _encode(payload), ECDSA(_hash_of(key)))
    except InvalidSignature:
        raise _signature_error(path, "other content than was signed", "the content that the key signed") from None
    statement = Entry.parse(payload, lambda fault: _signature_error(path, fault, "an in-toto statement 1.0"))
    if statement["_type"].value != STATEMENT_TYPE:
        statement["_type"].refuse(STATEMENT_TYPE)
    return statement.table()


def _decode(entry: Entry) -> bytes:
    try:
        return base64.b64decode(entry.text(), validate=True)
    except (binascii.Error, ValueError):
        entry.refuse("a text in base64")


def _encode(payload: bytes) -> bytes:
    return b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)


def name_key(path: str) -> str:
    """Return the SHA-256 of the public key that belongs to a private one; raises as `read_signing_key` does."""
    return _hint_of(read_signing_key(path).public_key())


def _hint_of(key: EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _hash_of(key: EllipticCurvePrivateKey | EllipticCurvePublicKey) -> HashAlgorithm:
    from cryptography.hazmat.primitives import hashes

    made: HashAlgorithm = getattr(hashes, _CURVES[key.curve.name])()
    return made


def _signature_error(path: str, got: str, want: str) -> CorruptError:
    return CorruptError(
        f"{path} is not a valid signature of the given key",
        file=path,
        got=got,
        want=want,
        next_step="do not use the model before its origin is known; check that key and signature belong together",
    )


_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_GIT_PATHS = (".git", ".gitattributes", ".github", ".gitignore")
_HASHES = ("sha256", "blake2b")
_SHARD = re.compile(r"(?as)(.+):(\d{1,18}):(\d{1,18})")


class Stretch(Struct, frozen=True):
    """Bytes of a file with one digest: all of it, or a shard."""

    file: str
    """Path relative to the model folder, with "/"."""
    start: int = 0
    end: int | None = None
    """One past the last byte; None: the file's end."""


class SignedFiles(Struct, frozen=True):
    """The digests of a signed statement."""

    hash_name: str
    """Name in hashlib."""
    shard_nbytes: int | None
    """Bytes of a shard; None: whole files."""
    digests: Mapping[Stretch, bytes]
    ignored: tuple[str, ...]
    """Paths that the statement leaves out, with all below them."""


def make_files_statement(name: str, digests: Mapping[str, bytes], ignored: str) -> dict[str, Any]:
    """Return the statement about files: path in the model folder, with "/" -> SHA-256; it ignores the signature.

    By whole files: ``model_signing verify`` has no other way, though its Python API also takes shards.
    """
    # model-signing sorts by the parts of a path.
    files = sorted(digests, key=lambda path: path.split("/"))
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": _hash_all(digests[file] for file in files)}}],
        "predicateType": _PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [ignored, *_GIT_PATHS],
            },
            "resources": [{"name": file, "algorithm": "sha256", "digest": digests[file].hex()} for file in files],
        },
    }


def _hash_all(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def read_files_statement(statement: Mapping[str, Any], path: str) -> SignedFiles:
    """Return the digests of a statement whose signature was checked."""

    def fail(fault: str) -> CorruptError:
        return CorruptError(
            f"{path} does not sign the files of a model",
            file=path,
            got=fault,
            want=f"a statement of model-signing 1, by files or shards, with {' or '.join(_HASHES)}",
            next_step="sign the model again",
        )

    whole = Entry(statement, fail)
    if whole["predicateType"].value != _PREDICATE_TYPE:
        whole["predicateType"].refuse(_PREDICATE_TYPE)
    form, resources = whole["predicate"]["serialization"], whole["predicate"]["resources"].entries()
    hash_name = {"sha256": "sha256", "blake2b": "blake2b", "blake2": "blake2b"}.get(form["hash_type"].text())
    if hash_name is None:
        form["hash_type"].refuse(" or ".join(_HASHES))
    if form["method"].text() not in ("files", "shards"):
        form["method"].refuse("files or shards")
    shard_nbytes = form["shard_size"].count(low=1) if form["method"].text() == "shards" else None
    digests = {_stretch(one["name"], shard_nbytes): one["digest"].digest() for one in resources}
    if len(digests) != len(resources):
        raise fail("a file is named twice")
    subject = whole["subject"].entries(length=1)[0]["digest"]["sha256"]
    if _hash_all(digests.values()) != subject.text():
        raise fail("its digests do not agree with their own digest")
    ignored = form.get("ignore_paths")
    return SignedFiles(hash_name, shard_nbytes, digests, (*(() if ignored is None else ignored.texts()), *_GIT_PATHS))


def _stretch(entry: Entry, shard_nbytes: int | None) -> Stretch:
    name = entry.text()
    if shard_nbytes is None:
        return Stretch(name)
    found = _SHARD.fullmatch(name)
    if found is None or int(found[2]) > int(found[3]):
        entry.refuse("FILE:START:END")
    return Stretch(found[1], int(found[2]), int(found[3]))
