"""Parts of datasets for ranks. Each global batch is cut into equal parts, in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset

from xrank.errors import UsageError


def shard_dataset(dataset: Any, num_shards: int, shard: int) -> Any:
    """Return one part of a dataset; every rank of the process group calls it.

    A DataLoader has the global batch size: part p contains the samples from p/n to (p+1)/n of each batch, and all ranks
    shuffle alike. A Dataset or IterableDataset gives single samples: part p contains the samples p, p+n, ..., so that
    local batches of b samples together are the global batch of n*b.
    """
    if not isinstance(dataset, DataLoader | Dataset):
        why = f"The dataset type {type(dataset)} is not supported for auto-sharding in multi-process setting."
        raise UsageError(why, want="a DataLoader, Dataset or IterableDataset of torch.utils.data")
    if isinstance(dataset, DataLoader):
        return _shard_loader(dataset, num_shards, shard)
    if num_shards == 1:
        return dataset
    if isinstance(dataset, IterableDataset):
        return _Slices(dataset, num_shards, num_shards, shard, drop_last=False)
    size = len(dataset)  # type: ignore[arg-type]
    if size % num_shards:
        raise _make_indivisible_error("The number of samples", "num_samples", size, num_shards)
    return Subset(dataset, range(shard, size, num_shards))


def _shard_loader(loader: DataLoader[Any], num_shards: int, shard: int) -> DataLoader[Any]:
    batch_size = loader.batch_size
    is_stream = isinstance(loader.dataset, IterableDataset)
    if batch_size is None and (is_stream or loader.batch_sampler is None):
        raise UsageError(
            "The batch size of the input dataset is unknown. Please config the batch size for the input dataset, e.g "
            "via `DataLoader(dataset, batch_size=...)`",
            want="a DataLoader with a batch_size or a batch_sampler",
        )
    if num_shards == 1:
        return loader
    if batch_size is not None and batch_size % num_shards:
        raise _make_indivisible_error("Global batch size", "global_batch_size", batch_size, num_shards)
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
                     "generator", "prefetch_factor", "persistent_workers")
    }  # fmt: skip
    if is_stream:
        assert batch_size is not None
        slices = _Slices(loader.dataset, batch_size, num_shards, shard, drop_last=loader.drop_last)
        return DataLoader(slices, batch_size // num_shards, **options)
    if batch_size is not None and not loader.drop_last:
        rest = len(loader.sampler) % batch_size  # type: ignore[arg-type]
        if rest % num_shards:
            raise _make_indivisible_error("The last batch's size", "last_batch_size", rest, num_shards)
    sampler = _share_shuffle(loader.batch_sampler)
    return DataLoader(loader.dataset, batch_sampler=_BatchSlices(sampler, num_shards, shard), **options)


def _make_indivisible_error(what: str, name: str, size: int, num_shards: int) -> UsageError:
    return UsageError(
        f"{what} must be divisible by the number of replicas. `{name}`={size} and `num_model_replicas`={num_shards}",
        got=str(size),
        want=f"a multiple of {num_shards}",
        next_step="change the batch size, or drop the remainder (drop_last=True)",
    )


def _share_shuffle(batches: Any) -> Any:
    """Return batches in the same order on every rank: each process seeds torch's own sampler differently."""
    sampler = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or not isinstance(sampler, RandomSampler):
        return batches
    return BatchSampler(_SharedRandomSampler(sampler), batches.batch_size, batches.drop_last)


class _SharedRandomSampler(RandomSampler):
    """A RandomSampler with the first rank's seed and a new order each epoch."""

    def __init__(self, like: RandomSampler) -> None:
        super().__init__(like.data_source, like.replacement, like._num_samples)
        seed = [int(torch.empty((), dtype=torch.int64).random_(generator=like.generator).item())]
        dist.broadcast_object_list(seed, src=0)
        self.generator = torch.Generator().manual_seed(seed[0])


class _BatchSlices:
    """One part of each batch of indices."""

    def __init__(self, batches: Any, num_shards: int, shard: int) -> None:
        self._batches = batches
        self._num_shards = num_shards
        self._shard = shard

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._batches:
            if len(batch) % self._num_shards:
                raise _make_indivisible_error("A batch's size", "batch_size", len(batch), self._num_shards)
            part = len(batch) // self._num_shards
            yield list(batch)[self._shard * part : (self._shard + 1) * part]

    def __len__(self) -> int:
        return len(self._batches)


class _Slices(IterableDataset[Any]):
    """One part of each run of samples of a stream. All ranks raise at an end that does not divide."""

    def __init__(self, stream: Any, run: int, num_shards: int, shard: int, *, drop_last: bool) -> None:
        self._stream = stream
        self._run = run
        self._num_shards = num_shards
        self._shard = shard
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self._stream)
        while run := list(islice(samples, self._run)):
            if len(run) < self._run and self._drop_last:
                return
            if len(run) % self._num_shards:
                raise _make_indivisible_error("The end of the stream", "remaining", len(run), self._num_shards)
            part = len(run) // self._num_shards
            yield from run[self._shard * part : (self._shard + 1) * part]
