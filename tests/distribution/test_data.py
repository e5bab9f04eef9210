import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.distribution.trained_models import Perceptron, assert_same_state, perceptron_batches, take_part, train
from xrank.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, list_devices
from xrank.distribution.devices import shard_dataset


@pytest.mark.ranks(4)
def test_four_ranks_train_as_one_process_does(rank):
    batches = perceptron_batches(3)
    torch.manual_seed(3)
    whole = Perceptron()
    expected = train(whole, torch.optim.SGD(whole.parameters(), 0.1), batches, functional.mse_loss)
    torch.manual_seed(3 + rank)
    distribution = DataParallel(devices=list_devices())
    with distribution.scope():
        model = Perceptron()
    assert type(model.norm.weight) is nn.Parameter
    parts = take_part(batches, 4, rank)
    losses = torch.stack(train(model, torch.optim.SGD(model.parameters(), 0.1), parts, functional.mse_loss))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / 4, torch.stack(expected))
    assert_same_state(model, whole)
    # Gradients of two batches, added up.
    model.zero_grad(), whole.zero_grad()
    for (x, y), (part, target) in zip(batches, parts, strict=True):
        functional.mse_loss(whole(x), y).backward()
        functional.mse_loss(model(part), target).backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


# Data.


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        yield from range(self.size)


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def list_batches(loader) -> list[list[int]]:
    return [torch.as_tensor(batch[0] if isinstance(batch, list) else batch).flatten().tolist() for batch in loader]


def flat(parts) -> list[int]:
    return [number for part in parts for batch in part for number in batch]


def test_parts_of_a_batch_are_cut_in_order():
    for make in (numbers, Stream):
        parts = [list_batches(shard_dataset(DataLoader(make(16), batch_size=8), 4, shard)) for shard in range(4)]
        assert parts[1] == [[2, 3], [10, 11]] and len(parts) == 4
        assert sorted(flat(parts)) == list(range(16))
        # The last batch is smaller, but divides.
        assert list_batches(shard_dataset(DataLoader(make(12), batch_size=8), 4, 1)) == [[2, 3], [9]]
        assert list_batches(shard_dataset(DataLoader(make(13), batch_size=8, drop_last=True), 4, 1)) == [[2, 3]]
    assert len(shard_dataset(DataLoader(numbers(16), batch_size=8), 4, 0)) == 2


def test_single_samples_are_dealt_so_that_batches_are_the_same_sets():
    local = [list_batches(DataLoader(shard_dataset(numbers(8), 2, shard), batch_size=2)) for shard in range(2)]
    assert local == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert [list(shard_dataset(Stream(6), 2, shard)) for shard in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_datasets_that_are_not_cut_are_the_same_object():
    for data in (DataLoader(numbers(5), batch_size=3), numbers(5), Stream(5)):
        assert shard_dataset(data, 1, 0) is data


def test_batches_that_do_not_divide_are_refused():
    for data, message in (
        (DataLoader(numbers(6), batch_size=3), r"Global batch size must be divisible .*`global_batch_size`=3 and"),
        (DataLoader(numbers(7), batch_size=4), "last batch's size must be divisible"),
        (numbers(7), "number of samples must be divisible"),
        (DataLoader(numbers(6), batch_size=None), "batch size of the input dataset is unknown"),
        (DataLoader(Stream(6), batch_size=None), "batch size of the input dataset is unknown"),
        ([1, 2], "is not supported for auto-sharding in multi-process setting"),
    ):
        with pytest.raises(ValueError, match=message):
            shard_dataset(data, 2, 0)
    for data in (Stream(7), DataLoader(Stream(7), batch_size=4), DataLoader(numbers(4), batch_sampler=[[0, 1], [2]])):
        with pytest.raises(ValueError, match="must be divisible"):
            list(shard_dataset(data, 2, 0))


@pytest.mark.ranks(4)
def test_a_dataset_is_cut_by_the_place_along_the_batch_axis(rank):
    for axes, places in ((("batch", "model"), (0, 0, 1, 1)), (("model", "batch"), (0, 1, 0, 1))):
        layout_map = LayoutMap(DeviceMesh((2, 2), axes))
        distribution = ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        assert (distribution.data_shard_id, distribution.num_data_shards) == (places[rank], 2)
        loader = DataLoader(numbers(8), batch_size=4)
        assert list_batches(distribution.distribute_dataset(loader))[0] == [[0, 1], [2, 3]][places[rank]]
        kept = ModelParallel(layout_map=layout_map, auto_shard_dataset=False)
        assert kept.distribute_dataset(loader) is loader
    # Shuffling is one order for all, another one each epoch, whatever a rank's own seed.
    torch.manual_seed(rank)
    loader = DataParallel().distribute_dataset(DataLoader(numbers(64), batch_size=8, shuffle=True))
    epochs = [list_batches(loader), list_batches(loader)]
    every = [None] * 4
    dist.all_gather_object(every, epochs)
    for epoch in range(2):
        assert sorted(flat(ranks[epoch] for ranks in every)) == list(range(64))
    assert epochs[0] != epochs[1]
