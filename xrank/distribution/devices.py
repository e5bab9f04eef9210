"""Devices are ranks: their number, their start, the torch mesh of a mesh; and the parts of datasets for ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset

from xrank import environment
from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh
from xrank.ranks.store import read_keras_jobs, read_launch


class AbsentDeviceError(UsageError, RuntimeError):
    """No device of the requested kind is present; a RuntimeError, as jax raises under Keras."""


def list_devices(kind: str | None = None) -> list[str]:
    """Return one text for each rank of the process group, such as ``"cuda:3"``; without a group, for this process.

    Args:
        kind: ``"cpu"``, ``"cuda"`` or another of torch's kinds; ``"gpu"`` is an accelerator of any kind. None is the
            accelerator if there is one, else ``"cpu"``.

    Raises:
        AbsentDeviceError: such a device is not present.

    Example:
        >>> from xrank.distribution import list_devices
        >>> list_devices("cpu")
        ['cpu:0']
    """
    found = _present_kind(kind)
    return [f"{found}:{rank}" for rank in range(dist.get_world_size() if dist.is_initialized() else 1)]


def get_device_count(kind: str | None = None) -> int:
    """Return the number of devices in `list_devices`.

    Example:
        >>> from xrank.distribution import get_device_count
        >>> get_device_count("cpu")
        1
    """
    return len(list_devices(kind))


def _present_kind(kind: str | None) -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    present = ["cpu"] if accelerator is None else [accelerator.type, "cpu"]
    wanted = present[0] if kind is None else kind.lower()
    if wanted == "gpu" and accelerator is not None:
        return accelerator.type
    if wanted not in present:
        raise AbsentDeviceError(f"there is no device of the kind {kind!r}", got=repr(kind), want=f"one of {present}")
    return wanted


def initialize(
    job_addresses: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Start the process group of torch.distributed, in which every process is one device.

    Arguments that are None come from ``KERAS_DISTRIBUTION_JOB_ADDRESSES``, ``KERAS_DISTRIBUTION_NUM_PROCESSES`` and
    ``KERAS_DISTRIBUTION_PROCESS_ID``, one by one; without an address, from the launcher (torchrun, srun, mpirun).
    Without any of these no group is started, and this process stays alone.

    Args:
        job_addresses: ``host:port`` of the first process, or of all, between commas.
        num_processes: number of processes.
        process_id: index of this process.

    Raises:
        UsageError: addresses and processes differ in number, or the index of this process is unknown.

    Example:
        >>> from xrank.distribution import initialize
        >>> initialize()
    """
    environ = environment.environ()
    keras_jobs = read_keras_jobs(environ)
    addresses = keras_jobs.addresses if job_addresses is None else job_addresses
    count = keras_jobs.num_processes if num_processes is None else num_processes
    place = keras_jobs.process_id if process_id is None else process_id
    launch = read_launch(environ)
    if addresses and "," in addresses:
        jobs = addresses.split(",")
        if count is not None and count != len(jobs):
            why = f"The provided job_addresses {jobs} has {len(jobs)} jobs, but num_processes is {count}"
            raise UsageError(why, want=f"{count} addresses, or only the first one")
        addresses, count = jobs[0], len(jobs)
    # As in Keras, a lone process needs no process group.
    if not addresses and count is None and place is None and launch is None:
        return
    count = count if count is not None or launch is None else launch.world_size
    place = place if place is not None or launch is None else launch.rank
    if count is None or place is None or not 0 <= place < count:
        # With missing processes torch would wait until its timeout.
        raise UsageError(
            "the number of processes, or the index of this one, is unknown",
            got=f"num_processes={count}, process_id={place}",
            next_step="pass both, or set KERAS_DISTRIBUTION_NUM_PROCESSES and KERAS_DISTRIBUTION_PROCESS_ID",
        )
    method = f"tcp://{addresses.strip()}" if addresses else "env://"
    backend = None if torch.accelerator.is_available() else "gloo"
    dist.init_process_group(backend, init_method=method, world_size=count, rank=place)


_MESHES: dict[DeviceMesh, tuple[object, TorchMesh]] = {}
"""torch meshes with their process groups: making one makes groups, so each is made once."""


def live_mesh(mesh: DeviceMesh) -> TorchMesh | None:
    """Return the torch mesh of a mesh on the process group; None without a group, where a mesh only describes.

    All ranks of the group call this together.
    """
    if not dist.is_initialized():
        launch = read_launch(environment.environ())
        if launch is not None and launch.world_size > 1 and mesh.size > 1:
            raise UsageError(
                f"this process is rank {launch.rank} of {launch.world_size}, and there is no process group: each "
                f"process would train a separate copy of the model",
                rank=launch.rank,
                next_step="call xrank.distribution.initialize() first",
            )
        return None
    world = dist.group.WORLD
    known = _MESHES.get(mesh)
    if known is not None and known[0] is world:
        return known[1]
    _check_ranks(mesh)
    kind = mesh.device_kind or ("cpu" if dist.get_backend() == "gloo" else None)
    # Meshes stay unflattened, although torch suggests it: over a flattened mesh torch 2.13 silently gathers a dim that
    # two axes cut unevenly in a wrong order (_redistribute.py merges the two gathers into one).
    made = TorchMesh(
        _present_kind(kind), torch.tensor(mesh.ranks).view(mesh.shape), mesh_dim_names=tuple(mesh.axis_names)
    )
    for other in [other for other, (group, _) in _MESHES.items() if group is not world]:
        del _MESHES[other]  # its group has ended; its mesh keeps the threads of its process groups
    _MESHES[mesh] = (world, made)
    return made


def _check_ranks(mesh: DeviceMesh) -> None:
    world_size = dist.get_world_size()
    if mesh.device_kind is None and mesh.ranks == tuple(range(mesh.size)) and mesh.size != world_size:
        raise LayoutError(
            f"Shape does not match the number of devices. Received: shape={mesh.shape}; devices.shape=({world_size},)",
            got=f"{world_size} ranks",
            want=f"{mesh.size} ranks, for the mesh {mesh.grid!r}",
        )
    absent = [rank for rank in mesh.ranks if rank >= world_size]
    if absent:
        why = f"Device not found: rank {absent[0]} of the mesh {mesh.grid!r}"
        raise LayoutError(why, rank=absent[0], want=f"ranks 0 to {world_size - 1}")
    if (rank := dist.get_rank()) not in mesh:
        why = f"rank {rank} is not in the mesh {mesh.grid!r}"
        raise UsageError(why, rank=rank, want=f"one of the ranks {list(mesh.ranks)}")
    for axis in mesh.axis_names:
        # torch sorts its groups by rank, which would contradict the mesh's order.
        if any(list(group) != sorted(group) for group in mesh.groups(axis)):
            raise LayoutError(
                f"the ranks along {axis!r} descend: torch orders the parts of a dim by rank, so the parts would be on "
                f"different devices than the mesh defines",
                got=f"ranks {list(mesh.ranks)} on the mesh {mesh.grid!r}",
                next_step="give the mesh its devices in ascending order, as list_devices() returns them",
            )


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
    batches: Any = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if type(batches) is BatchSampler and isinstance(sampler, RandomSampler):
        # The same order on every rank: each process seeds torch's own sampler differently.
        batches = BatchSampler(_SharedRandomSampler(sampler), batches.batch_size, batches.drop_last)
    return DataLoader(loader.dataset, batch_sampler=_BatchSlices(batches, num_shards, shard), **options)


def _make_indivisible_error(what: str, name: str, size: int, num_shards: int) -> UsageError:
    return UsageError(
        f"{what} must be divisible by the number of replicas. `{name}`={size} and `num_model_replicas`={num_shards}",
        got=str(size),
        want=f"a multiple of {num_shards}",
        next_step="change the batch size, or drop the remainder (drop_last=True)",
    )


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
