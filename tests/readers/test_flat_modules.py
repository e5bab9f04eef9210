"""FSDP1's modules are exported where they lie: the folder has the tensors of the module before it was wrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import xrank
from tests.commands.exported import tensors_of
from tests.sampled import sampled
from xrank.errors import UsageError


class Block(nn.Module):
    """Sizes that no alignment divides, a buffer, and one that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)
        self.register_buffer("scale", torch.randn(3))
        self.register_buffer("cache", torch.randn(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu()) * self.scale.sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 5), nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.tail = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        for layer in self.layers:
            y = layer(y)
        return self.head(y) * self.tail(torch.ones(1))


def wrap(model: Model, strategy: str, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    if strategy == "HYBRID_SHARD":
        options["process_group"] = hybrid_groups()
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        **options,
    )


def hybrid_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's groups: of the ranks that cut, and of those that hold copies."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return rows[rank // 2], columns[rank % 2]


CASES = [(s, orig) for s in ("FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP", "NO_SHARD") for orig in (True, False)]


@pytest.mark.ranks(4)
@pytest.mark.filterwarnings("ignore")  # of FSDP1, which torch deprecates
@pytest.mark.parametrize("case", sampled(CASES, 3), ids=str)
def test_fsdp1(rank, tmp_path, case):
    strategy, orig = case
    torch.manual_seed(0)
    model = Model()
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model = wrap(model, strategy, use_orig_params=orig, ignored_modules=[model.tail])
    report = xrank.export_model(model, tmp_path / "out")
    assert report.output["tied"] and report.num_tensors == len(want) - 1
    # Background exports copy the same ranges, also after a step.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    later = xrank.export_model(model, tmp_path / "later", background=True)
    with type(model).summon_full_params(model, writeback=False):
        trained = {name.replace("_fsdp_wrapped_module.", ""): t.clone() for name, t in model.state_dict().items()}
    model(torch.arange(6)).square().sum().backward()
    optimizer.step()
    assert later.result().ok
    if rank == 0:
        for folder, values in (("out", want), ("later", trained)):
            made = tensors_of(tmp_path / folder)
            assert made.keys() | {"head.weight"} == want.keys() | {"embed.weight"}
            for name, tensor in made.items():
                assert torch.equal(tensor, values[name]), (folder, name)
        assert not torch.equal(want["tail.weight"], trained["tail.weight"])


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore")
def test_an_fsdp1_module_is_not_loaded(rank, tmp_path):
    model = wrap(Model(), "FULL_SHARD")
    xrank.export_model(model, tmp_path / "out")
    with pytest.raises(UsageError, match="FSDP1"):
        xrank.load_model(model, tmp_path / "out")
