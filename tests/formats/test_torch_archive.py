"""What torch saved is found where torch put it; what lies about it is refused."""

import argparse
import collections
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.serialization import config

from tests.formats.crafted_zip import Member, archive_of
from tests.open_files import open_files, opened_since
from tests.sampled import count_of
from xrank.errors import CorruptError, IncompleteError, UnsafeError, UsageError, XrankError
from xrank.formats.pickles import refuse_inert
from xrank.formats.torch_archive import ArchivedTensor, read_archive, read_archive_in
from xrank.storage.regular_file import open_regular

pytestmark = pytest.mark.quick

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


def tensor_of(archive, leaf):
    """Return the torch tensor an archived one stands for, from the bytes of the file alone."""
    record = archive.records[leaf.key]
    with open(archive.path, "rb") as file:
        file.seek(record.offset)
        raw = bytearray(file.read(record.nbytes))
    if not raw:
        return torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype])
    flat = torch.frombuffer(raw, dtype=DTYPES[leaf.dtype])
    return torch.as_strided(flat, leaf.shape, leaf.strides, leaf.storage_offset)


def assert_same(archive, got, want):
    assert isinstance(got, ArchivedTensor)
    tensor = tensor_of(archive, got)
    assert tensor.dtype == want.dtype
    assert tensor.shape == want.shape
    assert got.strides == want.stride()
    assert raw_bytes(tensor) == raw_bytes(want.detach())


def raw_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def saved(tmp_path, value, **options):
    path = tmp_path / "state.pt"
    torch.save(value, path, **options)
    return str(path)


def content(path):
    with open(path, "rb") as file:
        return file.read()


ZOO = {
    f"dtype {name}": torch.arange(24, dtype=torch.uint8).view(dtype) for name, dtype in DTYPES.items() if name != "BOOL"
}
ZOO |= {
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(2.5),
    "scalar fp8": torch.tensor(2.5).to(torch.float8_e5m2),
    "empty": torch.empty(0),
    "empty rows": torch.empty(3, 0, 2, dtype=torch.bfloat16),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "permuted": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
    "rows": torch.arange(12.0).reshape(3, 4)[1:],
    "columns": torch.arange(12.0).reshape(3, 4)[:, 1:3],
    "every other": torch.arange(10)[1::3],
    "one of a broadcast": torch.arange(3.0).expand(1, 3),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "nan payload": torch.tensor([0x7FC00001, -(2**31)], dtype=torch.int32).view(torch.float32),
    "empty tail": torch.arange(4.0)[4:],
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("alignment", [64, 4096])
def test_every_kind_of_tensor(tmp_path, protocol, alignment):
    with config.patch("save.storage_alignment", alignment):
        path = saved(tmp_path, ZOO, pickle_protocol=protocol)
    archive = read_archive(path)
    assert list(archive.value) == list(ZOO)
    for name, want in ZOO.items():
        assert_same(archive, archive.value[name], want)
        assert archive.records[archive.value[name].key].offset % alignment == 0
    assert archive.has_checksums
    assert archive.status.st_size == os.path.getsize(path)
    refuse_inert(archive.value, path)


def test_views_share_a_record(tmp_path):
    base = torch.arange(12.0)
    archive = read_archive(saved(tmp_path, [base, base[3:7], base.view(3, 4).t()]))
    assert [leaf.key for leaf in archive.value] == ["0", "0", "0"]
    assert archive.value[1] == ArchivedTensor("0", "F32", (4,), (1,), 3)
    assert list(archive.records) == ["0"]
    assert archive.records["0"].nbytes == 48


def test_a_training_state(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "size": torch.Size([2, 3])}
    state["dtype"] = torch.bfloat16
    archive = read_archive(saved(tmp_path, state))
    assert type(archive.value["model"]) is collections.OrderedDict
    assert not vars(archive.value["model"])
    for name, want in model.state_dict().items():
        assert_same(archive, archive.value["model"][name], want)
    assert archive.value["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert_same(
        archive, archive.value["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    assert archive.value["size"] == (2, 3)
    assert type(archive.value["size"]) is tuple
    assert archive.value["dtype"] == "torch.bfloat16"


def test_an_archive_inside_a_larger_file(tmp_path):
    raw = content(saved(tmp_path, ZOO["rows"]))
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(bytes(1000) + raw + raw)
    with open_regular(str(path)) as file:
        for start in (1000, 1000 + len(raw)):
            archive = read_archive_in(file, start=start, nbytes=len(raw))
            assert_same(archive, archive.value, ZOO["rows"])
        with pytest.raises(CorruptError):
            read_archive_in(file, start=999, nbytes=len(raw))
        with pytest.raises(CorruptError):
            read_archive_in(file)
        with pytest.raises(CorruptError):
            read_archive_in(file, start=1000, nbytes=2 * len(raw) + 1)
    with pytest.raises(CorruptError):
        read_archive(str(path))


def test_an_archive_without_checksums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, ZOO)
    finally:
        torch.serialization.set_crc32_options(True)
    archive = read_archive(path)
    assert not archive.has_checksums
    for name, want in ZOO.items():
        assert_same(archive, archive.value[name], want)


def test_ten_thousand_tensors_take_a_second_or_so(tmp_path):
    path = saved(tmp_path, {f"layers.{k}.weight": torch.zeros(2) for k in range(10_000)})
    started = time.process_time()
    archive = read_archive(path)
    assert time.process_time() - started < 5
    assert len(archive.records) == len(archive.value) == 10_000


# --- sound, but not for safetensors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(3.0).expand(4, 3),
        torch.arange(10.0).as_strided((3, 3), (1, 1)),
        torch.arange(10.0).as_strided((3, 2), (2, 3)),
        torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag,
        torch.zeros(2, dtype=torch.complex128),
    ],
    ids=["expanded", "windows", "interleaved", "conjugated", "negated", "complex128"],
)
def test_what_no_safetensors_file_holds_is_refused_by_name(tmp_path, value):
    path = saved(tmp_path, {"w": value})
    with pytest.raises(UsageError) as caught:
        read_archive(path, rank=5)
    assert caught.value.file == path
    assert caught.value.rank == 5
    assert path in str(caught.value)
    assert caught.value.next_step


@pytest.mark.filterwarnings("ignore")
def test_other_kinds_of_tensor_stay_inert(tmp_path):
    attributed = torch.zeros(2)
    attributed.tag = torch.ones(2)
    for value in (
        torch.eye(2).to_sparse(),
        torch.zeros(2, device="meta"),
        attributed,
        torch.zeros(3).untyped_storage(),
        torch.device("cpu"),
        argparse.Namespace(lr=1),
        torch.nn.Linear(2, 2),
    ):
        path = saved(tmp_path, {"a": [1, value]})
        archive = read_archive(path)
        with pytest.raises(UsageError) as caught:
            refuse_inert(archive.value, path, 2)
        assert caught.value.file == path


def test_no_attribute_is_looked_up_but_the_name_of_one_class(tmp_path):
    """FSDP1's ShardedTensor pickles a class within a class, which protocol 2 names by getattr."""
    api = b"ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n"

    def looked_up(owner: bytes, name: bytes) -> bytes:
        name = b"X" + struct.pack("<I", len(name)) + name
        return b"\x80\x02c__builtin__\ngetattr\n" + owner + name + b"\x86R)\x81."

    path = tmp_path / "state.pt"
    path.write_bytes(archive_of(looked_up(api, b"ProcessGroupState")))
    value = read_archive(str(path)).value
    assert (value.name, value.args) == ("ShardedTensor.ProcessGroupState", ())
    for owner, name in ((api, b"__init__"), (b"cos\npath\n", b"ProcessGroupState"), (b"cos\nos\n", b"system")):
        path.write_bytes(archive_of(looked_up(owner, name)))
        with pytest.raises(UnsafeError, match="getattr"):
            read_archive(str(path))


def test_remarks_on_a_tensor_are_dropped(tmp_path):
    tensor, parameter = torch.arange(3.0), torch.nn.Parameter(torch.arange(4.0))
    tensor.ds_id, parameter.tag, parameter.frozen = "0_1", 7, None
    archive = read_archive(saved(tmp_path, [tensor, parameter]))
    assert_same(archive, archive.value[0], tensor)
    assert_same(archive, archive.value[1], parameter)
    parameter.tag = [1]
    assert (
        repr(read_archive(saved(tmp_path, parameter)).value)
        == "<inert torch._utils._rebuild_parameter_with_state(...)>"
    )


def test_the_name_it_was_saved_under_stays(tmp_path):
    path = saved(tmp_path, [1])
    shutil.copy(path, tmp_path / "other.pt")
    assert read_archive(str(tmp_path / "other.pt")).name == "state"
    with open(tmp_path / "stream.pt", "wb") as stream:
        torch.save([1], stream)
    assert read_archive(str(tmp_path / "stream.pt")).name == "archive"


def test_big_endian_is_refused(tmp_path):
    path = tmp_path / "big"
    path.write_bytes(archive_of(b"\x80\x02N.", byteorder=b"big"))
    with pytest.raises(UsageError, match="big-endian"):
        read_archive(str(path))
    path.write_bytes(archive_of(b"\x80\x02N.", byteorder=b"middle"))
    with pytest.raises(CorruptError, match="byte order"):
        read_archive(str(path))
    path.write_bytes(archive_of(b"\x80\x02N.", byteorder=None))
    assert read_archive(str(path)).value is None


# --- lies ----------------------------------------------------------------------------------------------------------


def storage(key="0", count=4, kind="torch\nFloatStorage", first="storage", location="cpu"):
    parts = [first, None, key, location, count]
    dumped = [pickle.dumps(part, 2)[2:-1] for part in parts]
    dumped[1] = b"c" + kind.encode() + b"\n"
    return b"(" + b"".join(dumped) + b"tQ"


def plain(value):
    return pickle.dumps(value, 2)[2:-1]


def rebuilt(offset=0, shape=(4,), strides=(1,), stored=None, version=2, rest=b"", hooks=b"N"):
    parts = (storage() if stored is None else stored) + plain(offset) + plain(shape) + plain(strides) + plain(False)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v%d\n(" % version + parts + hooks + rest + b"tR."


def v3(dtype=b"ctorch\nuint16\n", **parts):
    stored = parts.pop("stored", storage(count=16, kind="torch.storage\nUntypedStorage"))
    return rebuilt(stored=stored, version=3, rest=dtype, **parts)


@pytest.fixture
def crafted(tmp_path):
    def read(pickled, records=(bytes(16),), **options):
        path = tmp_path / "crafted.pt"
        path.write_bytes(archive_of(pickled, records, **options))
        return read_archive(str(path), rank=9)

    return read


def test_the_crafted_pickles_are_sound_when_they_do_not_lie(crafted):
    assert crafted(rebuilt()).value == ArchivedTensor("0", "F32", (4,), (1,), 0)
    assert crafted(rebuilt(rest=b"}")).value.shape == (4,)
    assert crafted(v3(shape=(8,))).value == ArchivedTensor("0", "U16", (8,), (1,), 0)
    assert crafted(rebuilt(shape=(0, 1 << 62), strides=(1 << 62, 1))).value.shape == (0, 1 << 62)
    assert crafted(rebuilt(shape=(2, 1), strides=(2, 0))).value.strides == (2, 0)


LIES = {
    "count above the record": rebuilt(stored=storage(count=400)),
    "count below the record": rebuilt(stored=storage(count=3), shape=(3,)),
    "count negative": rebuilt(stored=storage(count=-4)),
    "count true": rebuilt(stored=storage(count=True)),
    "count a text": rebuilt(stored=storage(count="4")),
    "count beyond all": rebuilt(stored=storage(count=1 << 2000)),
    "record missing": rebuilt(stored=storage(key="1")),
    "record by another path": rebuilt(stored=storage(key="../data.pkl")),
    "key a number": rebuilt(stored=storage(key=0)),
    "key with half a pair": rebuilt(stored=storage(key="\ud800")),
    "not a storage": rebuilt(stored=storage(first="module")),
    "kind of another module": rebuilt(stored=storage(kind="os\nFloatStorage")),
    "kind unknown": rebuilt(stored=storage(kind="torch\nFatStorage")),
    "kind wider than the record": rebuilt(stored=storage(kind="torch\nDoubleStorage")),
    "id a text": b"\x80\x02" + plain("storage") + b"Q.",
    "id too short": b"\x80\x02" + plain(("storage", "0")) + b"Q.",
    "storage a number": rebuilt(stored=b"K\x05"),
    "view past the end": rebuilt(shape=(5,)),
    "offset past the end": rebuilt(offset=1),
    "offset of nothing past the end": rebuilt(offset=5, shape=(0,)),
    "offset negative": rebuilt(offset=-1),
    "stride past the end": rebuilt(shape=(2,), strides=(4,)),
    "stride negative": rebuilt(offset=3, strides=(-1,)),
    "stride beyond all": rebuilt(shape=(2,), strides=(1 << 64,)),
    "shape negative": rebuilt(shape=(-1,)),
    "shape beyond all": rebuilt(shape=(1 << 62, 1 << 62), strides=(1 << 62, 1)),
    "shape a list": rebuilt(shape=[4]),
    "shape of texts": rebuilt(shape=("4",)),
    "shape of floats": rebuilt(shape=(4.0,)),
    "shape of truths": rebuilt(shape=(True,)),
    "shape without strides": rebuilt(strides=()),
    "too many dimensions": rebuilt(shape=(1,) * 65, strides=(1,) * 65),
    "too few parts": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "too many parts": rebuilt(rest=b"NN"),
    "untyped in v2": rebuilt(stored=storage(count=16, kind="torch.storage\nUntypedStorage")),
    "typed otherwise in v3": v3(stored=storage()),
    "element type a number": v3(dtype=b"K\x05"),
    "v3 past the end": v3(shape=(9,)),
}


@pytest.mark.parametrize("kind", LIES)
def test_every_lie_of_a_tensor_is_refused(crafted, kind):
    with pytest.raises(CorruptError) as caught:
        crafted(LIES[kind])
    assert caught.value.rank == 9
    assert "crafted.pt" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_quantized_storages_and_lazy_tensors_are_refused(crafted):
    for pickled in (
        rebuilt(stored=storage(kind="torch\nQInt8Storage", count=16)),
        rebuilt(rest=plain({"conj": True})),
        rebuilt(rest=plain({"neg": True})),
        v3(dtype=b"ctorch\nuint16\n" + plain({"conj": True}), shape=(8,)),
        v3(dtype=b"ctorch\nbits8\n"),
        v3(dtype=plain("torch.nonsense")),
        rebuilt(strides=(0,)),
    ):
        with pytest.raises(UsageError):
            crafted(pickled)
    # A quantized rebuild of an ordinary storage makes no tensor.
    quantized = rebuilt().replace(b"_rebuild_tensor_v2", b"_rebuild_qtensor")
    with pytest.raises(UnsafeError, match="qtensor"):
        refuse_inert(crafted(quantized).value, "f")


def test_hooks_and_parameters_of_something_else_are_refused(crafted):
    with pytest.raises(UnsafeError, match="hooks"):
        crafted(rebuilt(hooks=plain({1: 2})))
    with pytest.raises(UnsafeError, match="hooks"):
        crafted(rebuilt(hooks=b"cos\nsystem\n"))
    value = crafted(b"\x80\x02ctorch._utils\n_rebuild_parameter\n" + plain(("no tensor", True, None)) + b"R.").value
    with pytest.raises(UsageError, match="_rebuild_parameter"):
        refuse_inert(value, "f")


def test_lies_of_the_archive(crafted):
    good = rebuilt()
    for records, options in (
        ([Member("archive/data/0", bytes(16), nbytes=12)], {}),
        ([Member("archive/data/0", bytes(16), method=8)], {}),
        ([Member("archive/data/0", bytes(16)), Member("archive/data/1", header=0, local_name="archive/data.pkl")], {}),
        ([Member("archive/data/0", bytes(16)), Member("archive/data/0", bytes(16))], {}),
        ([Member("archive/data/0", bytes(16)), Member("other/data/1", bytes(16))], {}),
        ([Member("other/data/0", bytes(16))], {}),
        ([bytes(16)], {"byteorder": bytes(100)}),
    ):
        with pytest.raises(CorruptError):
            crafted(good, records, **options)


def test_an_archive_of_something_else(tmp_path):
    path = tmp_path / "other"
    for raw in (b"", b"PK\3\4", os.urandom(5000), pickle.dumps({"a": 1}), bytes(100_000)):
        path.write_bytes(raw)
        with pytest.raises(CorruptError) as caught:
            read_archive(str(path), rank=3)
        assert str(path) in str(caught.value)
    torch.save({"a": torch.zeros(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UsageError, match="old format"):
        read_archive(str(path))
    path.write_bytes(archive_of(b"N.").replace(b"data.pkl", b"data.pkm"))
    with pytest.raises(CorruptError, match=r"no data\.pkl"):
        read_archive(str(path))


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, "/dev/zero"):
        with pytest.raises(CorruptError, match="not a regular file"):
            read_archive(str(path))
    with pytest.raises(IncompleteError):
        read_archive(str(tmp_path / "none"))


def test_no_descriptor_is_left_open(tmp_path):
    path = saved(tmp_path, ZOO)
    before = open_files()
    read_archive(path)
    os.truncate(path, 2000)
    with pytest.raises(CorruptError):
        read_archive(path)
    assert not opened_since(before)


class Acts:
    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_that_torch_would_run_runs(tmp_path, protocol):
    marker = tmp_path / "marker"
    for act in (
        Acts(os.system, (f"touch {marker}",)),
        Acts(open, (str(marker), "w")),
        Acts(eval, (f"open({str(marker)!r}, 'w')",)),
        Acts(torch.load, (str(marker),)),
    ):
        path = saved(tmp_path, {"w": torch.zeros(2), "x": [act]}, pickle_protocol=protocol)
        archive = read_archive(path, rank=1)
        assert isinstance(archive.value["w"], ArchivedTensor)
        with pytest.raises(UnsafeError, match="rank 1"):
            refuse_inert(archive.value, path, 1)
        assert not marker.exists()
    torch.load(saved(tmp_path, Acts(os.system, (f"touch {marker}",))), weights_only=False)
    assert marker.exists()


# --- damage --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sample(tmp_path):
    value = {"a": torch.arange(300.0).view(20, 15).t(), "b": [torch.zeros(3, dtype=torch.uint16)], "n": 5}
    path = saved(tmp_path, value)
    return path, content(path), read_archive(path)


def outcome(path, raw):
    with open(path, "r+b") as file:
        file.truncate(0)
        file.write(raw)
    try:
        return read_archive(path, rank=3)
    except XrankError as error:
        assert path in str(error)
        assert error.rank == 3
        return None


def test_truncation_at_two_hundred_lengths(sample):
    path, raw, _ = sample
    for length in sorted({*range(40), *range(len(raw) - 60, len(raw)), *random.Random(2).sample(range(len(raw)), 100)}):
        assert outcome(path, raw[:length]) is None, length


def test_zeroed_tails(sample):
    path, raw, _ = sample
    for start in random.Random(3).sample(range(len(raw) - 30), 200):
        assert outcome(path, raw[:start] + bytes(len(raw) - start)) is None, start


def test_every_bit_of_the_pickle_counts(sample):
    path, raw, _ = sample
    start = raw.index(b"\x80\x02}")
    for at in range(start, raw.index(b"PK\7\x08")):
        mangled = bytearray(raw)
        mangled[at] ^= 1 << (at % 8)
        assert outcome(path, mangled) is None, at


def test_flips_in_the_directory_and_the_headers(sample):
    path, raw, want = sample
    directory = raw.index(b"PK\1\2")
    spots = [*range(directory, len(raw))]
    for found in range(len(raw)):
        if raw.startswith((b"PK\3\4", b"PK\7\x08"), found):
            spots += range(found, found + 30)
    survived = 0
    for at in spots:
        mangled = bytearray(raw)
        mangled[at] ^= 1 << (at % 8)
        got = outcome(path, mangled)
        if got is not None:
            survived += 1
            assert got.value == want.value
            assert got.records == want.records
            assert got.has_checksums
    assert survived


def test_random_damage_without_checksums_raises_nothing_foreign(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, {"a": torch.zeros(5, dtype=torch.bfloat16), "b": torch.nn.Parameter(torch.ones(2, 3))})
    finally:
        torch.serialization.set_crc32_options(True)
    raw = content(path)
    pickled = range(raw.index(b"\x80\x02}"), raw.index(b"PK\7\x08"))
    chance = random.Random(4)
    read = 0
    for _ in range(count_of(4000)):
        mangled = bytearray(raw)
        for _ in range(chance.choice([1, 1, 2, 4])):
            at = chance.choice(pickled) if chance.random() < 0.7 else chance.randrange(len(raw))
            mangled[at] = chance.randrange(256)
        got = outcome(path, mangled)
        read += got is not None
        # Whatever is taken stays inside its record, and the record inside the file.
        for leaf in got.value.values() if got is not None and isinstance(got.value, dict) else ():
            if isinstance(leaf, ArchivedTensor) and 0 not in leaf.shape:
                last = leaf.storage_offset + sum((n - 1) * s for n, s in zip(leaf.shape, leaf.strides, strict=True))
                record = got.records[leaf.key]
                assert (last + 1) * DTYPES[leaf.dtype].itemsize <= record.nbytes
                assert record.offset + record.nbytes <= len(raw)
    assert read > 100


def test_a_small_file_cannot_take_much_memory(tmp_path):
    """Claims of sizes, memo indices and counts are refused before anything is allocated for them."""
    bombs = [
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x02Nr\xff\xff\xff\xff.",
        b"\x80\x02]" + b"q\0" + b"".join(b"0](h%ch%ceq%c" % (k, k, k + 1) for k in range(100)) + b".",
        b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
        b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.",
    ]
    for k, bomb in enumerate(bombs):
        (tmp_path / f"{k}.pt").write_bytes(archive_of(bomb))
    code = (
        "import sys, resource\n"
        "from xrank.errors import XrankError\n"
        "from xrank.formats.torch_archive import read_archive\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "for path in sys.argv[1:]:\n"
        "    try: print(read_archive(path).value)\n"
        "    except XrankError as error: print(type(error).__name__)\n"
    )
    files = [str(tmp_path / f"{k}.pt") for k in range(len(bombs))]
    done = subprocess.run([sys.executable, "-c", code, *files], check=True, capture_output=True, text=True, timeout=150)
    assert done.stdout.split() == ["CorruptError"] * 5


def test_torch_is_not_imported(tmp_path):
    path = saved(tmp_path, ZOO["rows"])
    code = "import sys; from xrank.formats.torch_archive import read_archive; read_archive(sys.argv[1]);"
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, path], check=True)
