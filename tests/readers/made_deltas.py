"""Chains of versions, as a trainer leaves them, and the whole model of each version."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from xrank.formats import deltas
from xrank.formats.deltas import BodyWriter, DeltaFacts, new_checksum, state_digest, version_name
from xrank.formats.safetensors_header import HeaderTensor, build_header

Model = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name -> element type, shape, bytes."""
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F64": 8}
NAMES = (
    *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    *(f"model.layers.0.{name}.weight" for name in ("self_attn.qkv_proj", "mlp.gate_up_proj", "input_layernorm")),
    *(f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(3)),
    "model.layers.0.mlp.experts.gate_up_proj",
)


def make_model(generator: np.random.Generator, kinds: Sequence[str] = tuple(WIDTHS), most: int = 40) -> Model:
    """Return a model of random bytes with odd sizes."""
    made: Model = {}
    for name in NAMES:
        kind, shape = str(generator.choice(kinds)), tuple(map(int, generator.integers(1, most, 2)))
        shape = (0, *shape) if generator.random() < 0.03 else shape
        made[name] = kind, shape, generator.bytes(int(np.prod(shape)) * WIDTHS[kind])
    return made


def change_model(model: Model, generator: np.random.Generator) -> Model:
    """Return a model with tensors that are equal, changed in some bytes, or in all."""
    made: Model = {}
    for name, (kind, shape, data) in model.items():
        bits = np.frombuffer(data, np.uint8).copy()
        share = generator.choice([0, 0, 0.02, 0.3, 1])
        bits[generator.random(len(bits)) < share] ^= np.uint8(generator.integers(1, 256))
        made[name] = kind, shape, bits.tobytes()
    return made


def write_files(folder: Path, bodies: Sequence[Model], metadata: Sequence[Mapping[str, str]], index: object) -> Path:
    """Write a folder of safetensors files with an index; each of `bodies` is a file."""
    folder.mkdir(parents=True)
    weight_map = {}
    for number, (own, texts) in enumerate(zip(bodies, metadata, strict=True)):
        name = f"model-{number:05d}-of-{len(bodies):05d}.safetensors"
        entries, end = [], 0
        for key, (kind, shape, data) in own.items():
            entries.append(HeaderTensor(key, kind, shape, end, end + len(data)))
            end += len(data)
        content = build_header(entries, texts, alignment=8) + b"".join(data for _, _, data in own.values())
        (folder / name).write_bytes(content)
        weight_map |= dict.fromkeys(own, name)
    (folder / deltas.INDEX_NAME).write_text(json.dumps({"metadata": index, "weight_map": weight_map}))
    return folder


def write_whole(
    folder: Path, model: Model, version: int | None = None, *, config: bool = True, step: int | None = None
) -> Path:
    """Write a whole model as a trainer does, in two files."""
    names = list(model)
    parts = [{name: model[name] for name in own} for own in (names[::2], names[1::2])]
    metadata: dict[str, Any] = {} if version is None else {"version": f"{version:06d}"}
    if step is not None:
        metadata["xrank"] = {"step": step}
    write_files(folder, parts, [{"format": "pt"}] * 2, metadata)
    if config:
        (folder / "config.json").write_text(json.dumps({"model_type": "made"}))
    return folder


def digest_state(model: Model) -> str:
    """Return the state digest of a whole model."""
    known = {name: (kind, shape, xxhash.xxh3_128(data).hexdigest()) for name, (kind, shape, data) in model.items()}
    return state_digest(known)


def write_delta(
    folder: Path,
    old: Model,
    new: Model,
    version: int,
    *,
    base_version: int | None = None,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    num_files: int = 2,
    states: bool = True,
    step: int | None = None,
) -> Path:
    """Write `weight_v…` in a folder with the changes of a model; return it."""
    bodies: list[Model] = [{} for _ in range(num_files)]
    metadata: list[dict[str, str]] = [{} for _ in range(num_files)]
    for name, (_, _, data) in new.items():
        before, after = (np.frombuffer(one, np.uint8) for one in (old[name][2], data))
        writer = BodyWriter(encoding, len(data))
        for start in range(0, len(data), 1000):
            writer.add(before[start : start + 1000], after[start : start + 1000])
        body = writer.finish()
        if body is None:
            continue
        state = new_checksum(checksum)
        state.update(data)
        number = len(name) % num_files
        bodies[number][name] = "U8", (len(body),), body
        metadata[number][name] = state.hexdigest()
    known = [digest_state(one) if states else None for one in (new, old)]
    base = version - 1 if base_version is None else base_version
    facts = DeltaFacts(version, base, encoding, checksum, *known, step)
    kept = [number for number in range(num_files) if bodies[number]]
    files = [bodies[number] for number in kept], [metadata[number] for number in kept]
    return write_files(folder / version_name(version), *files, facts.to_metadata())


def make_chain(folder: Path, seed: int, num_versions: int = 4, *, with_base: bool | None = None) -> list[Model]:
    """Write a random chain: the base in ``folder/base``, versions in ``folder/deltas``; return all models."""
    generator, choices = np.random.default_rng(seed), random.Random(seed)
    models = [make_model(generator)]
    if with_base is not False:
        write_whole(folder / "base", models[0])
    (folder / "deltas").mkdir(parents=True)
    for version in range(1, num_versions + 1):
        before = models[-1]
        if version > 1 and choices.random() < 0.2:
            new = make_model(generator) if choices.random() < 0.5 else change_model(before, generator)
            write_whole(folder / "deltas" / version_name(version), new, version)
        else:
            new = change_model(before, generator)
            write_delta(
                folder / "deltas",
                before,
                new,
                version,
                encoding=choices.choice(deltas.ENCODINGS),
                checksum=choices.choice(("xxh3-128", "adler32")),
                num_files=choices.randint(1, 3),
                states=choices.random() < 0.7,
            )
        models.append(new)
    return models


def read_folder(folder: Path) -> Model:
    """Return the tensors in all safetensors files of a folder."""
    found: Model = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + size]).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                data = content[8 + size + start : 8 + size + end]
                found[name] = entry["dtype"], tuple(entry["shape"]), data
    return found
