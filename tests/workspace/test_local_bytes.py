"""A tensor's bytes by range: whatever its strides, dtype, device and lazy bits, as its row-major copy has them."""

import random
import threading

import pytest
import torch

from xrank.errors import UsageError
from xrank.ranks import memory as module
from xrank.ranks.memory import local_bytes

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
)
MAKE = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(1, 2, 0),
    "sliced": lambda x: x[1:, ::2, 1:-1],
    "one column": lambda x: x[:, 2, 3],
    "expanded": lambda x: x[:, :1, :].expand(-1, 6, -1),
    "expanded to a new dim": lambda x: x[0].expand(3, *x[0].shape),
    "of no dim": lambda x: x[2, 3, 4],
    "of one element": lambda x: x[2:3, 3:4, 4:5],
    "empty": lambda x: x[:, 2:2],
    "a slice in a row": lambda x: x[2],
}


def fill(dtype: torch.dtype, shape: tuple[int, ...] = (7, 9, 11)) -> torch.Tensor:
    """Return a tensor of random bytes: every pattern of NaN among them."""
    width = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (*shape[:-1], shape[-1] * width), dtype=torch.uint8).view(dtype)


def row_major(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def read(lent, start: int, nbytes: int, *, offset: int = 0) -> bytes:
    """Return bytes that were read to `offset` of a buffer, and see that nothing around them was touched."""
    memory = bytearray(b"\xa5" * (offset + nbytes + 16))
    lent.read_into(start, memoryview(memory)[offset : offset + nbytes])
    assert memory[:offset] == b"\xa5" * offset and memory[offset + nbytes :] == b"\xa5" * 16
    return bytes(memory[offset : offset + nbytes])


def assert_all_ranges(tensor: torch.Tensor, seed: int, repeats: int = 40) -> None:
    want, lent = row_major(tensor), local_bytes(tensor)
    assert lent.nbytes == len(want) and read(lent, 0, len(want)) == want
    chance = random.Random(seed)
    for _ in range(repeats):
        start, stop = sorted(chance.randint(0, len(want)) for _ in range(2))
        assert read(lent, start, stop - start, offset=chance.randrange(17)) == want[start:stop], (start, stop)


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_range_is_that_of_the_row_major_copy(dtype, kind):
    assert_all_ranges(MAKE[kind](fill(dtype)), seed=1)


def test_conjugated_and_negated_tensors_are_read_as_the_values_they_show():
    z = torch.randn(6, 8, dtype=torch.complex64)
    for tensor in (z.conj(), z.conj().T, z.conj().imag, z.conj().imag.T, z.real, torch.randn(3, 4, 2).mT):
        assert_all_ranges(tensor, seed=2)
    assert local_bytes(z.conj()).address is None and z.conj().is_conj() and z.conj().imag.is_neg()


def test_a_large_tensor_is_brought_in_chunks_and_never_copied_whole(monkeypatch):
    x = torch.arange(3 << 20, dtype=torch.float32).view(1536, 2048)
    largest = []
    copy = module._copy
    monkeypatch.setattr(module, "_copy", lambda *a, **k: (largest.append(a[3].nbytes), copy(*a, **k))[1])
    lent, want = local_bytes(x.T), row_major(x.T)
    assert read(lent, 0, lent.nbytes) == want
    assert read(lent, 3, lent.nbytes - 5, offset=1) == want[3:-2]
    assert max(largest) <= 1 << 20 and sum(largest) >= 2 * lent.nbytes - 16


def test_threads_read_at_once():
    x = torch.randint(0, 256, (700, 900), dtype=torch.uint8).T
    lent, want, wrong = local_bytes(x), row_major(x), []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(50):
            start = chance.randrange(len(want) - 5000)
            if read(lent, start, 5000, offset=1) != want[start : start + 5000]:
                wrong.append(start)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_change_in_place_is_seen():
    x = torch.nn.Parameter(torch.zeros(4))
    lent = local_bytes(x)
    assert lent.is_unchanged
    with torch.no_grad():
        x.add_(1)
    assert not lent.is_unchanged


def free(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
        lambda: free(torch.ones(3)),
        lambda: free(torch.ones(4, 3).t()),
    ],
    ids=["sparse", "meta", "quantized", "nested", "freed", "freed, turned"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_elements_are_refused(make):
    with pytest.raises(UsageError, match=r"dense tensor|no memory"):
        local_bytes(make())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_any_range_of_a_cuda_tensor():
    for dtype in DTYPES:
        for make in MAKE.values():
            tensor = make(fill(dtype).cuda())
            assert local_bytes(tensor).address is None
            assert_all_ranges(tensor, seed=5, repeats=5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_ranges_wait_for_what_was_queued_and_take_no_memory_of_the_tensors_size():
    x = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda").view(8192, 8192)
    torch.cuda._sleep(100_000_000)
    x.add_(3)
    lent = local_bytes(x.T)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert read(lent, 5, 3 << 20) == b"\3" * (3 << 20)
    assert torch.cuda.max_memory_allocated() - before <= 4 << 20
    z = torch.randn(300, 500, dtype=torch.complex64, device="cuda")
    for tensor in (z.conj(), z.conj().T, z.conj().imag):
        assert_all_ranges(tensor, seed=6, repeats=5)
