"""Documents changed by their structure into each parser of xrank: a value, or one of xrank's errors, within bounds.

The texts of `tests.faults.texts` are mostly damaged as texts. These keep their form, their checksums and signatures,
and lie in their fields: another type, a missing or a further key, numbers beyond all bounds, deep nesting, surrogates,
repeated keys, other encodings.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import tensorstore
import torch
import xxhash
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import xrank
from tests.faults.feeding import Target, feed_targets
from tests.faults.findings import Findings
from tests.faults.mutation import change_value, write_json
from xrank.commands.signing import check_signature
from xrank.errors import IncompleteError
from xrank.formats import signature
from xrank.formats.rank_state import RankRecord, TensorRecord
from xrank.formats.zarr_array import parse_array
from xrank.ranks.byte_service import _Receipt
from xrank.ranks.directory_messages import MessageReceipt
from xrank.ranks.memory_messages import MemoryPlace
from xrank.readers.base import Hints
from xrank.readers.orbax import OrbaxReader, read_leaves
from xrank.readers.torch_checkpointing import find_model_files
from xrank.refit.directory import Address, find_trainer_ranks, read_trainer_model
from xrank.refit.peers import STATUS_NBYTES, EngineWatch, PeerRank, Phase, RankStatus
from xrank.refit.receive import RelayedEngines
from xrank.storage.bucket_stage import BucketPlace, BucketStage, read_journal, read_record
from xrank.storage.commit import seal
from xrank.storage.folder_stage import parse_journal
from xrank.storage.manifest import read_manifest

__all__ = ["fuzz_documents"]

MAX_ADDED_NBYTES = 400_000_000
_Mutate = Callable[[random.Random], bytes]


def fuzz_documents(folder: Path, seed: int, count: int) -> Findings:
    """Feed so many documents to the parsers."""
    targets = _make_targets(folder)
    before = _peak_nbytes()
    findings = Findings()

    def check_memory(example: str) -> None:
        if _peak_nbytes() > before + MAX_ADDED_NBYTES:
            findings.report(f"{MAX_ADDED_NBYTES:,} bytes of memory: {example.partition(' of ')[0]}", example)

    feed_targets(targets, seed, count, findings, slow_seconds=3.0, after=check_memory)
    return findings


def _peak_nbytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _json(document: Any) -> _Mutate:
    """Return what changes a document and writes it as JSON."""
    return lambda rng: write_json(rng, _changed(rng, document))


def _changed(rng: random.Random, value: Any) -> Any:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = change_value(rng, value)
    return value


def _make_targets(folder: Path) -> list[Target]:
    """Return all parsers; those of files read some in the folder."""
    from tests.faults import texts

    path = folder / "input"

    def of_file(read: Callable[[str], object]) -> Callable[[bytes], object]:
        def call(content: bytes) -> object:
            path.write_bytes(content)
            return read(str(path))

        return call

    def of_text(read: Callable[[str], object]) -> Callable[[bytes], object]:
        return lambda content: read(content.decode("utf-8", "replace"))

    def target(name: str, document: Any, call: Callable[[bytes], object], share: int = 10) -> Target:
        return Target(name, _json(document), call, share)

    record = RankRecord(
        *("run", None, 3, 0, 2, "h", ((("r",), (2,), (0, 1)),)),
        {"a": TensorRecord(layout="[n/r, m]", mesh=0, shape=(4, 3))},
    )
    memory = MemoryPlace(1, 2, 3, 4, 5, "n", "space", "host")
    service = {"socket": "s", "port": 1, "addresses": ["127.0.0.1"], "token": "00"}
    receipt = {"service": service, "number": 1, "sizes": [8, 3], "digest": "0" * 32}
    message = {"name": ".rank_0.message", "directory": "/dev/shm"}
    message |= {"buffers": [_part(0, 8)], "header": _part(8, 3)}
    return [
        *_orbax(folder / "orbax"),
        *_torch_checkpointing(folder / "tc"),
        *_signatures(folder / "signed"),
        *_cards(folder / "cards"),
        *_journals(),
        Target("status", _statuses, lambda content: RankStatus.from_bytes(content), 5),
        target("manifest", json.loads(texts._manifest()), of_file(read_manifest)),
        target("rank record", json.loads(record.to_json()), of_text(lambda t: RankRecord.from_json(t, file="x"))),
        target("memory place", json.loads(memory.to_json()), of_text(lambda text: MemoryPlace.from_json(text, 0)), 3),
        target("message receipt", message, of_text(lambda text: MessageReceipt.from_json(text, 0)), 3),
        target("socket receipt", receipt, of_text(lambda text: _Receipt.from_json(text, 0, None)), 3),
    ]


def _part(offset: int, nbytes: int) -> dict[str, Any]:
    return {"offset": offset, "nbytes": nbytes, "digest": "0" * 32}


# ---- Orbax


def _orbax(folder: Path) -> list[Target]:
    from tests.faults import texts

    entry = {
        "key_metadata": [{"key": "params", "key_type": 2}, {"key": "0", "key_type": 1}],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }
    tree = {"tree_metadata": {"('params', '0')": entry}, "use_ocdbt": False, "use_zarr3": False}
    arrays = {False: json.loads(texts._ZARR2), True: json.loads(texts._ZARR3)}
    made = []
    for is_zarr3, name in ((False, ".zarray"), (True, "zarr.json")):
        array = folder / name.strip(".") / "params.0"
        array.mkdir(parents=True)
        spec = {"driver": "zarr3" if is_zarr3 else "zarr", "kvstore": f"file://{array}/", "create": True}
        keys = ("shape", "chunk_grid", "codecs") if is_zarr3 else ("shape", "chunks", "compressor")
        spec["metadata"] = {key: arrays[is_zarr3][key] for key in keys}
        tensorstore.open(spec, dtype="float32", shape=[4, 6]).result().write([[1.0] * 6] * 4).result()
        document = json.loads((array / name).read_text())
        (array.parent / "_METADATA").write_text(json.dumps(tree))

        def read(content: bytes, array: Path = array, name: str = name) -> object:
            (array / name).write_bytes(content)
            return OrbaxReader().read(str(array.parent), Hints())

        def parse(content: bytes, is_zarr3: bool = is_zarr3) -> object:
            return parse_array("a", content, texts.Origin("x"), is_zarr3=is_zarr3)

        made.append(Target(f"Orbax, {name}", _json(document), read, 10))
        made.append(Target(f"zarr, {name}", _json(document), parse, 20))
    whole = folder / "tree"
    shutil.copytree(folder / "zarray", whole)

    def read_tree(content: bytes) -> object:
        (whole / "_METADATA").write_bytes(content)
        return OrbaxReader().read(str(whole), Hints()), read_leaves(str(whole))

    return [*made, Target("Orbax, _METADATA", _json(tree), read_tree, 20)]


# ---- torch_checkpointing


def _torch_checkpointing(folder: Path) -> list[Target]:
    folder.mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(2, 3)}, folder / f"model_{rank}.pt")
    spec = {"mesh_shape": (2,), "mesh_data": (0, 1), "mesh_dim_names": ("r",)}
    data = {"global_shape": (4, 3), "dtype": "torch.float32", "mesh_spec": spec}
    data["placements"] = [{"type": "StridedShard", "dim": 0, "split_factor": 2}]
    group = {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": (0, 1)}
    layouts = {
        r: {"file_path": f"model_{r}.pt", "serialization_format": {"type": "TorchSerialization"}} for r in (0, 1)
    }
    item = {"nested_path_to_metadata": {'["w"]': [group]}, "rank_to_layout_info": layouts}
    content = {"metadata": {"model": item}, "world_size": 2, "version": "2.0"}
    odd = (0, -1, 2**31, 2**63, 2**64, 10**400, 1.5, float("inf"), float("nan"), None, True, "", "x", "\0", "\ud800")
    odd += ("../x", b"w", [], (), {}, [[]], {1: 2}, {(1, 2): 3}, {1, 2}, '["a"', "[]", '[["a"]]', "[1e999]", "[NaN]")
    odd += ("[" * 5000, '["\\ud800"]', "9" * 5000, [{}], ("r", "r"), [2**62] * 40, 2j, (0,) * 3000, _nested(150))

    def mutate(rng: random.Random) -> bytes:
        value = content
        for _ in range(rng.choice((1, 1, 2, 4))):
            value = change_value(rng, value, odd)
        return pickle.dumps(value, rng.choice((2, 4)))

    def read(content: bytes) -> object:
        (folder / "metadata.pkl").write_bytes(content)
        found = find_model_files(str(folder))
        return found if found.metadata is None else found.metadata.cuts_of(0)

    return [Target("torch_checkpointing", mutate, read, 40)]


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# ---- signatures


def _signatures(folder: Path) -> list[Target]:
    model = folder / "model"
    model.mkdir(parents=True)
    key = ec.generate_private_key(ec.SECP256R1())
    public = folder / "key.pub"
    pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    public.write_bytes(pem)
    (model / "a.bin").write_bytes(b"x" * 10)
    (model / "config.json").write_bytes(b"{}")
    digests = {name: hashlib.sha256((model / name).read_bytes()).digest() for name in ("a.bin", "config.json")}
    whole = signature.make_files_statement("model", digests, "model.sig")
    shards = json.loads(json.dumps(whole))
    shards["predicate"]["serialization"] |= {"method": "shards", "shard_size": 5}
    shards["predicate"]["resources"] = [
        {"name": f"a.bin:{start}:{start + 5}", "digest": hashlib.sha256(b"x" * 5).hexdigest()} for start in (0, 5)
    ]
    bundle = json.loads(signature.sign_statement(whole, key))
    path = folder / "model.sig"

    def check(content: bytes) -> object:
        path.write_bytes(content)
        return check_signature(str(model), str(path), str(public), 1)

    def sign(payload: bytes) -> bytes:
        made = key.sign(signature._encode(payload), ec.ECDSA(hashes.SHA256()))
        envelope = bundle["dsseEnvelope"] | {"payload": base64.b64encode(payload).decode()}
        envelope["signatures"] = [{"sig": base64.b64encode(made).decode(), "keyid": ""}]
        return json.dumps({**bundle, "dsseEnvelope": envelope}).encode()

    def statement(rng: random.Random) -> bytes:
        value = _changed(rng, rng.choice((whole, shards)))
        # Its own digest agrees again in most cases, so that the rest of it is looked at.
        try:
            resources = value["predicate"]["resources"]
            found = hashlib.sha256(b"".join(bytes.fromhex(one["digest"]) for one in resources)).hexdigest()
            value = {**value, "subject": [{"name": "model", "digest": {"sha256": found}}]}
        except (ValueError, TypeError, KeyError):
            pass
        return sign(write_json(rng, value))

    return [Target("signature", _json(bundle), check, 10), Target("signed statement", statement, check, 20)]


# ---- cards and statuses


def _cards(folder: Path) -> list[Target]:
    """Return the parsers of cards, which describe the memory of this process."""
    model = {"a.weight": torch.ones(4, 3), "b": torch.ones(5)}
    offer = xrank.offer_weights(model, folder, snapshot=True)
    offer.publish(1)
    taken = xrank.take_weights({name: torch.zeros_like(t) for name, t in model.items()}, folder, relay=True)
    taken.update()
    found = {name.partition("-")[0]: name for name in os.listdir(folder) if not name.startswith(".")}
    cards = {kind: json.loads((folder / name).read_text()) for kind, name in found.items() if name.endswith(".json")}
    place = Address(folder)

    def call(kind: str, read: Callable[[], object]) -> Callable[[bytes], object]:
        path = folder / found[kind]

        def parse(content: bytes) -> object:
            good = path.read_bytes()
            try:
                path.write_bytes(content)
                return read()
            finally:
                path.write_bytes(good)

        return parse

    def read_trainer() -> None:
        card = place.read_trainer()
        assert card is not None
        read_trainer_model(card)
        for rank, description in find_trainer_ranks(card):
            PeerRank("trainer rank", rank, description).close()

    def read_engines() -> None:
        engines = EngineWatch(place, 1, is_first=True)
        engines._refresh()
        engines.close()
        (folder / found["engine"]).touch()

    def read_relays() -> None:
        from contextlib import ExitStack

        with ExitStack() as loan:
            engines, _ = RelayedEngines(place, loan, "own").find()
            for engine in engines:
                engine.read_model()

    def whole(rng: random.Random) -> bytes:
        """Change the trainer's card, or a rank's description in it, which is a text."""
        card = cards["trainer.json"]
        if rng.random() < 0.5:
            own = json.loads(card["parts"][0]["model"])
            if rng.random() < 0.5:
                own["record"] = write_json(rng, _changed(rng, json.loads(own["record"]))).decode("utf-8", "replace")
            else:
                own = _changed(rng, own)
            text = write_json(rng, own).decode("utf-8", "replace")
            card = {**card, "parts": [{**card["parts"][0], "model": text}]}
            return json.dumps(card).encode()
        return write_json(rng, _changed(rng, card))

    return [
        Target("trainer's card", whole, call("trainer.json", read_trainer), 20),
        Target("engine's card", _json(cards["engine"]), call("engine", read_engines), 10),
        Target("relay's card", _json(cards["relay"]), call("relay", read_relays), 20),
    ]


def _statuses(rng: random.Random) -> bytes:
    """Return a status with a right checksum."""
    numbers = [rng.choice((0, 1, -1, 7, 11, 255, 2**62, -(2**63), rng.randrange(12))) for _ in range(7)]
    if rng.random() < 0.5:
        numbers[0] = rng.choice([*Phase])
    text = rng.choice((b"", b"cause", b"\xff\xfe", b"\xed\xa0\x80", b"x" * 400))
    body = struct.pack("<qqqqqqqH", *numbers, rng.choice((len(text), len(text), 2**16 - 1, 0))) + text
    length = min(struct.unpack_from("<H", body, 56)[0] + 58, len(body))
    content = crc32(body[:length]).to_bytes(4, "little") + body
    return content.ljust(STATUS_NBYTES, b"\0")[:STATUS_NBYTES]


# ---- journals


def _journals() -> list[Target]:
    part = {"number": 1, "nbytes": 10, "etag": '"e"', "crc32": 5}
    old = {"last": "model.safetensors.index.json", "version": "v", "manifest_version": "m"}
    old |= {"weights": ["model.safetensors"], "small": ["config.json"]}
    journal = {"stage": "s", "plan": "p", "host": "h", "pid": 7, "beat": 1, "last": "", "version": 1}
    journal |= {"uploads": {"model.safetensors": {"upload_id": "u", "part_nbytes": 10, "name": "model.safetensors"}}}
    journal |= {"replaced": old}
    record = {"stage": "s", "upload_id": "u", "nbytes": 10, "digest": "xxh3:" + "0" * 32, "version": 1}
    record |= {"tensors": ["0" * 32], "parts": [part]}
    good = {
        "journal.json": _seal(json.dumps(journal).encode()),
        "model.safetensors.json": _seal(json.dumps(record).encode()),
    }

    def at(name: str) -> Callable[[bytes], object]:
        def call(content: bytes) -> object:
            place = BucketPlace(_Objects({**good, name: content}), "model")
            found = read_journal(place)
            read_record(place, "model.safetensors")
            if found is None or found[0] is None:
                return None
            uploads = SimpleNamespace(list_parts=lambda key, upload: {1: (10, '"e"', 5)}, head=lambda key: None)
            stage = BucketStage(place, uploads, SimpleNamespace(content=found[0]))
            return [stage.recall(name) for name in stage.finished]

        return call

    def sealed(document: Any) -> _Mutate:
        return lambda rng: _seal(write_json(rng, _changed(rng, document)))

    def lines(rng: random.Random) -> bytes:
        head = {"version": 1, "plan": "p", "host": "h", "pid": 3}
        line = {"file": "model.safetensors", "nbytes": 5, "digest": "0" * 32}
        made = []
        for one in (head, line):
            value = _changed(rng, one) if rng.random() < 0.6 else one
            if isinstance(value, dict):
                value = {**value, "xxh3": xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())}
            made.append(write_json(rng, value) + b"\n")
        return b"".join(made)

    return [
        Target("bucket's journal", sealed(journal), at("journal.json"), 20),
        Target("bucket's record", sealed(record), at("model.safetensors.json"), 20),
        Target("bucket's seal", _json(json.loads(good["journal.json"])), at("journal.json"), 5),
        Target("journal", lines, parse_journal, 10),
    ]


def _seal(content: bytes) -> bytes:
    """Return JSON as a journal's record with its checksum; what is not a record stays as it is."""
    try:
        record = json.loads(content)
        return seal(record) if isinstance(record, dict) else content
    except (ValueError, RecursionError):
        return content


class _Objects:
    """The objects of a store, as far as a journal is read."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._contents = contents

    def _content(self, key: str) -> bytes:
        name = key.rpartition("/")[2]
        if name not in self._contents:
            raise IncompleteError(f"{key}: there is no such object", file=key)
        return self._contents[name]

    def head(self, key: str) -> SimpleNamespace:
        return SimpleNamespace(nbytes=len(self._content(key)), version="v")

    def read(self, key: str, offset: int, nbytes: int, status: object) -> memoryview:
        return memoryview(self._content(key))

    def url(self, key: str) -> str:
        return f"s3://bucket/{key}"
