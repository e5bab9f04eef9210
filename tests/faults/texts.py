"""Mutated texts and bytes into each parser of xrank: a value, or one of xrank's errors, soon and in little memory."""

from __future__ import annotations

import io
import json
import pickle
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.cli.test_recipe import OWN
from tests.faults.families import FamilyInputs
from tests.faults.feeding import Target, feed_targets
from tests.faults.findings import Findings
from tests.faults.made_sources import LAYOUT_FILE, LINK_FILE
from tests.faults.mutation import Mutator
from tests.recipes.test_config_proof import CONFIG
from tests.recipes.test_config_proof import made_model as mixed_model
from xrank.errors import XrankError
from xrank.formats.dcp_metadata import read_metadata
from xrank.formats.pickles import read_pickle
from xrank.formats.rank_state import RankRecord, TensorRecord
from xrank.formats.safetensors_header import HeaderTensor, build_header, read_header
from xrank.formats.torch_archive import read_archive
from xrank.formats.zarr_array import parse_array
from xrank.layout.layout_map import read_layout_file
from xrank.layout.mesh import DeviceMesh, mesh_from_order
from xrank.layout.notation import parse, render
from xrank.layout.tensor_name import parse_name
from xrank.ranks.directory_messages import MessageReceipt
from xrank.ranks.store import read_launch
from xrank.recipes.config_proof import find_hole, find_misfit
from xrank.recipes.options import parse_size
from xrank.recipes.recipe import parse_side
from xrank.recipes.recipe_file import evaluate, is_term, read_recipe
from xrank.storage.commit import JournalLine
from xrank.storage.entries import check_json_object
from xrank.storage.folder_stage import encode_journal, parse_journal
from xrank.storage.manifest import (
    ManifestFile,
    ManifestSource,
    ManifestTensor,
    manifest_blocks,
    read_manifest,
    tensor_line,
)
from xrank.storage.regular_file import Origin

__all__ = ["fuzz_texts", "make_targets"]


def fuzz_texts(folder: Path, seed: int, count: int) -> Findings:
    """Feed so many inputs to the parsers."""
    findings = Findings()
    feed_targets(make_targets(folder), seed, count, findings)
    return findings


def make_targets(folder: Path) -> list[Target]:
    """Return all parsers; those of files read one in the folder."""
    shapes = {name: tuple(tensor.shape) for name, tensor in mixed_model().items()}
    families = FamilyInputs()
    path = folder / "input"

    def of_file(read: Callable[[str], object], suffix: str = "") -> Callable[[bytes], object]:
        def call(content: bytes) -> object:
            path.write_bytes(content)
            return read(str(path))

        return call

    def of_text(read: Callable[[str], object]) -> Callable[[bytes], object]:
        return lambda content: read(content.decode("utf-8", "replace"))

    def texts(*seeds: str, words: tuple[bytes, ...] = ()) -> Mutator:
        return Mutator([seed.encode() for seed in seeds], is_text=True, words=words)

    config = json.dumps({**CONFIG, "layer_types": ["full_attention", "sliding_attention"]})
    return [
        Target("layout", texts(*_LAYOUTS), of_text(_parse_layout), 60),
        Target("name", texts("layers.{8/pp}.mlp.{e/ep}.w", "a.{<_: 4 | m: 2>}.b"), of_text(parse_name), 20),
        Target("side", texts("blocks.{B}.w [g <q: r d | k: d>, h]", "a [a (s + t), l]"), of_text(parse_side), 20),
        Target("grid", texts("dp=2 tp=4 pp=8", "r=3"), of_text(DeviceMesh.parse_grid), 15),
        Target(
            "order",
            texts("tp-cp-ep-dp-pp", "dp-tp"),
            of_text(lambda text: mesh_from_order(text, {"dp": 2, "tp": 4})),
            15,
        ),
        Target("layout file", texts(LAYOUT_FILE), of_file(read_layout_file), 4),
        Target("recipe", texts(OWN, _RECIPE), of_file(read_recipe), 4),
        Target("term", texts(*_TERMS), of_text(_evaluate), 40),
        Target("link", texts(LINK_FILE), of_file(read_words_of_rates), 4),
        Target("size", texts("64MB", "1.5 GiB", "5GB"), of_text(lambda text: parse_size(text, "max_memory")), 10),
        Target(
            "variables",
            texts("RANK=0 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_STEP_TASKS_PER_NODE=4(x2),3"),
            of_text(_launch),
            15,
        ),
        Target(
            "config.json",
            texts(config),
            _of_json(lambda value: (find_misfit(value, shapes), find_hole(shapes, value))),
            2,
        ),
        Target("families", families, families.parse, 1),
        Target("JSON object", texts(config, '{"a": [1, -2.5e-3, "\\u00e9"], "b": null}'), of_file(_check_object), 10),
        Target("header", Mutator(_headers(), is_text=False), of_file(read_header), 40),
        Target(
            "header's text", texts(_headers()[0][8:].split(b"}}")[0].decode() + "}}"), of_file(_read_header_text), 15
        ),
        Target("manifest", texts(_manifest()), of_file(read_manifest), 30),
        Target("journal", Mutator([_journal()], is_text=False), parse_journal, 20),
        Target("rank record", texts(_record()), of_text(lambda text: RankRecord.from_json(text, file="x")), 30),
        Target("receipt", texts(_RECEIPT), of_text(lambda text: MessageReceipt.from_json(text, 1)), 20),
        Target("pickle", Mutator(_pickles(), is_text=False), lambda content: read_pickle(content, Origin("x")), 60),
        Target("DCP metadata", Mutator([_metadata()], is_text=False), of_file(read_metadata), 10),
        Target("archive", Mutator([_archive()], is_text=False), of_file(read_archive), 40),
        Target("zarr 2", texts(_ZARR2), lambda content: parse_array("a", content, Origin("x"), is_zarr3=False), 20),
        Target("zarr 3", texts(_ZARR3), lambda content: parse_array("a", content, Origin("x"), is_zarr3=True), 20),
    ]


def _parse_layout(text: str) -> None:
    tree = parse(text)
    assert parse(render(tree)) == tree, "another layout once it is written down"


def _evaluate(text: str) -> None:
    if is_term(text):
        evaluate(CONFIG, [text])


def read_words_of_rates(path: str) -> object:
    """Read a link file."""
    from xrank.virtual.simulation.traffic import read_rates

    return read_rates(path)


def _launch(text: str) -> object:
    return read_launch(dict(word.split("=", 1) for word in text.split() if "=" in word))


def _of_json(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    def call(content: bytes) -> object:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return None
        return read(value) if isinstance(value, dict) else None

    return call


def _check_object(path: str) -> None:
    """Check that xrank takes a JSON object where Python's parser does."""
    content = Path(path).read_bytes()
    try:
        is_object: bool | None = isinstance(json.loads(content.decode()), dict)
    except RecursionError:
        is_object = None
    except ValueError as error:  # Python limits the digits of integers, not JSON
        is_object = None if "int_max_str_digits" in str(error) else False
    try:
        check_json_object(path)
    except XrankError:
        assert is_object is not True, "Python's parser takes it"
        raise
    assert is_object is not False, "Python's parser refuses it"


def _read_header_text(path: str) -> object:
    text = Path(path).read_bytes()
    Path(path).write_bytes(len(text).to_bytes(8, "little") + text + bytes(128))
    return read_header(path)


_LAYOUTS = (
    "[f/tp/~dp, h]",
    "[<q: r d | k: d | v: d>/tp{2,2}, pad(v, 128*tp)/=tp%4] in expert where pp=0..last, tp=1 sum(dp)",
    'flat(a [64, 64], "b.c" [h], pad 2*dp)/~dp',
    "[(a b/tp c)/~dp, (s + t)/tp, 3]",
)
_RECIPE = """extends = "megatron-llama"
framework = "own"
model_types = ["llama"]
ignored = ['.*rotary_emb\\.inv_freq']
keep_fp32 = ['.*gate']
[rename.targets]
"model." = "model.language_model."
[config]
d = ["head_dim", "hidden_size / num_attention_heads"]
experts = "layers from first_k_dense_replace and not in dense"
[must]
normalization = ["RMSNorm", "TENorm"]
rotary_percent = "any"
[sizes]
half = 64
[repeat.mtp]
sources = { "decoder.layers.{L}." = "mtp.layers.{M}." }
targets = { "model.layers.{L}." = "model.layers.{<_: L | mtp: M>}." }
[tensors]
"decoder.final_layernorm.weight [h]" = { to = "model.norm.weight [h]", unless = "tied", add = 1 }
[kept."model.visual."]
from = ["vision_model."]
tensors = ["blocks.{B}.norm1.weight [c]"]
when = "vision"
"""
_TERMS = (
    "hidden_size / num_attention_heads if tie_word_embeddings",
    "vision_config.image_size // vision_config.patch_size * 2 + 1",
    "layers from first_k and not in mlp_only",
    "num_attention_heads unless model_type = my_own",
    "not tie_word_embeddings",
    "len id2label",
)
_RECEIPT = '{"name":"x","directory":"/dev/shm","buffers":[{"offset":0,"nbytes":8}],"header":{"offset":8,"nbytes":3}}'
_ZARR2 = json.dumps(
    {"zarr_format": 2, "shape": [4, 6], "chunks": [2, 3], "dtype": "<f4", "order": "C", "filters": None}
    | {"compressor": {"id": "zstd", "level": 1}, "fill_value": None, "dimension_separator": "."}
)
_ZARR3 = json.dumps(
    {"zarr_format": 3, "node_type": "array", "shape": [4, 6], "data_type": "float32", "fill_value": 0}
    | {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}}}
    | {"chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}}
    | {
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": [2, 3],
                    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}],
                    "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
                },
            }
        ]
    }
)


def _headers() -> list[bytes]:
    tensors = [HeaderTensor("a.weight", "F32", (2, 3), 0, 24), HeaderTensor("b", "BF16", (4,), 24, 32)]
    header = build_header(tensors, {"format": "pt"}, alignment=8)
    return [header + bytes(32), build_header(tensors, {}, alignment=64) + bytes(32)]


def _manifest() -> str:
    tensor = ManifestTensor("F32", (2, 3), "model.safetensors", "xxh3:" + "1" * 32, (), 1)
    source = ("rank_0_state.pth", 0, 64, 24)
    return b"".join(
        manifest_blocks(
            ManifestSource("workspace", 2, "run", 3),
            [ManifestFile("model.safetensors", 120, "xxh3:" + "0" * 32)],
            [("a", tensor_line(tensor, [source]))],
            companions=[ManifestFile("config.json", 2, "xxh128:" + "2" * 32)],
            tied={"b": "a"},
            cast={"a": "BF16"},
            notes=[["code", "text"]],
            plan="0" * 32,
        )
    ).decode()


def _journal() -> bytes:
    return encode_journal("plan", "host", 3, [JournalLine("model.safetensors", 5, "0" * 32)])


def _record() -> str:
    return RankRecord(
        rank=0, world_size=2, run_id="run", attempt=None, step=3, host="h", tensors={"a": TensorRecord(shape=(2, 3))}
    ).to_json()


def _pickles() -> list[bytes]:
    namespace = {"args": Namespace(a=1, b=[2.5, None], c="x"), "model": OrderedDict(w=(1, 2)), 3: {4, 5}}
    stream = io.BytesIO()
    torch.save({"a": torch.ones(2, 3), "b": [torch.zeros(4, dtype=torch.bfloat16)], "c": {"d": "e"}}, stream)
    content = stream.getvalue()
    at = content.index(b"\x80\x02")
    return [
        *(pickle.dumps(namespace, protocol) for protocol in (2, 4)),
        pickle.dumps([list(range(300)), "é" * 300, b"x" * 300, 2**70, -1, True]),
        content[at : content.index(b".", content.index(b"c", at)) + 400],
    ]


def _metadata() -> bytes:
    chunks = [ChunkStorageMetadata(torch.Size((i, 0)), torch.Size((1, 3))) for i in range(2)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((2, 3)), chunks)
    places = {MetadataIndex("a", torch.Size((i, 0)), i): _StorageInfo(f"__{i}_0.distcp", 0, 500) for i in range(2)}
    return pickle.dumps(Metadata({"a": tensor}, {"a": ("a",)}, places))


def _archive() -> bytes:
    stream = io.BytesIO()
    torch.save({"a": torch.ones(2, 3)}, stream)
    return stream.getvalue()
