"""What ModelOpt documents of its workspace and its gathers, through its own functions and through xrank's.

ModelOpt ships no tests of them. A last part holds where the two differ, as docs/switching-from-modelopt.md lists it.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from modelopt.torch.export.distribute import NFSWorkspace as ModelOptWorkspace
from modelopt.torch.export.model_config import DecoderLayerConfig, LayernormConfig, LinearConfig, MLPConfig, ModelConfig

from tests.oracle.config_classes import is_same
from tests.oracle.postprocessing import GATHERS, using
from xrank import NFSWorkspace
from xrank.errors import ContradictionError, UsageError

pytestmark = pytest.mark.timeout(200)

WORKSPACES = {"ModelOpt": ModelOptWorkspace, "xrank": NFSWorkspace}
BOTH = pytest.mark.parametrize("name", ["ModelOpt", "xrank"])


# ---- the workspace


@BOTH
def test_without_a_path_it_is_not_initialized(name):
    workspace = WORKSPACES[name]()
    assert workspace.is_initialized is False
    with pytest.raises(ValueError, match="not initiali"):
        workspace.write_configs_and_weights({}, {})
    with pytest.raises(ValueError, match="not initiali"):
        workspace.read_configs_and_weights_from_rank(0)


@BOTH
def test_the_file_of_a_state(name, tmp_path):
    workspace = WORKSPACES[name](str(tmp_path / "deep" / "er"))
    assert workspace.is_initialized and workspace.path == tmp_path / "deep" / "er" and workspace.path.is_dir()
    assert workspace.rank == 0 and workspace.state_path == workspace.path / "rank_0_state.pth"
    workspace.write_configs_and_weights({"a": [1]}, {"w": torch.ones(2)})
    assert workspace.state_path.is_file()
    config, weights = workspace.read_configs_and_weights_from_rank(0)
    assert config == {"a": [1]} and torch.equal(weights["w"], torch.ones(2))
    workspace.write_configs_and_weights({"a": 2}, {})
    assert workspace.read_configs_and_weights_from_rank(0) == ({"a": 2}, {})
    WORKSPACES[name](workspace.path)
    assert not workspace.state_path.exists(), "construction removes this rank's state"


@BOTH
@pytest.mark.parametrize("target", [1, 7, -1])
def test_a_missing_rank_reads_as_none(name, target, tmp_path):
    assert WORKSPACES[name](tmp_path).read_configs_and_weights_from_rank(target) == (None, None)


@pytest.mark.parametrize(("writer", "reader"), [("ModelOpt", "xrank"), ("xrank", "ModelOpt")])
def test_each_reads_the_others_states(writer, reader, tmp_path):
    WORKSPACES[writer](tmp_path).write_configs_and_weights({"a": [1]}, {"w": torch.arange(3.0)})
    (tmp_path / "rank_0_state.pth").rename(tmp_path / "rank_1_state.pth")
    if writer == "xrank":  # its record names the rank
        (tmp_path / "rank_1_state.pth").rename(tmp_path / "rank_0_state.pth")
        workspace, target = ModelOptWorkspace(None), 0
        workspace.path, workspace._is_initialized = tmp_path, True
    else:
        workspace, target = NFSWorkspace(tmp_path, rank=0, world_size=2), 1
    config, weights = workspace.read_configs_and_weights_from_rank(target)
    assert config == {"a": [1]} and weights["w"].tolist() == [0, 1, 2]


# ---- the gathers


@pytest.mark.ranks(3, timeout_seconds=140)
@BOTH
@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 0, 1]])
def test_tensors_come_in_the_order_of_ranks(rank, name, ranks):
    with using(GATHERS[name]):
        from modelopt.torch.export import postprocess

        with postprocess.get_tensors_parallel(torch.full((2, 3), float(rank)), ranks) as tensors:
            values = [tensor[0, 0].item() for tensor in tensors]
            assert values == (ranks if rank == ranks[0] else [])
            assert all(tensor.shape == (2, 3) and tensor.device.type == "cpu" for tensor in tensors)


def layer(rank: int) -> DecoderLayerConfig:
    # Some of ModelOpt's segments are too short for what torch.save writes; these sizes fit.
    linear = LinearConfig(weight=torch.full((64, 64), float(rank)).half(), weights_scaling_factor=torch.ones(64))
    norm = LayernormConfig(weight=torch.ones(64), eps=1e-6)
    return DecoderLayerConfig(input_layernorm=norm, mlp=MLPConfig(fc=linear, hidden_act="silu"), num_attention_heads=2)


@pytest.mark.ranks(2, timeout_seconds=140)
@BOTH
@pytest.mark.parametrize("through", ["memory", "a directory"])
def test_configs_come_whole(rank, name, through, tmp_path):
    makes = (
        layer,
        lambda rank: LinearConfig(weight=torch.full((64, 64), rank)),
        lambda rank: LayernormConfig(torch.ones(4096) * rank),
        lambda rank: ModelConfig(vocab_size=4, layers=[layer(rank)]),
    )
    with using(GATHERS[name]):
        from modelopt.torch.export import postprocess

        for make in makes:
            path = None if through == "memory" else tmp_path
            with postprocess.get_configs_parallel(make(rank), [0, 1], None, path) as gathered:
                assert len(gathered) == (2 if rank == 0 else 0)
            for sender, came in enumerate(gathered):  # the list stays valid after the body
                assert is_same(came, make(sender)), sender


# ---- where they differ


@pytest.mark.ranks(3, timeout_seconds=140)
def test_none_keeps_its_place_where_modelopt_drops_it(rank):
    config = None if rank == 1 else LayernormConfig(torch.ones(2) * rank)
    came = {}
    for name, gathers in GATHERS.items():
        with using(gathers):
            from modelopt.torch.export import postprocess

            with postprocess.get_configs_parallel(config, [0, 1, 2], None) as gathered:
                came[name] = [None if one is None else one.weight[0].item() for one in gathered]
    assert came == ({"ModelOpt": [0, 2], "xrank": [0, None, 2]} if rank == 0 else {"ModelOpt": [], "xrank": []})


@pytest.mark.ranks(2, timeout_seconds=140)
def test_classes_that_differ_need_a_key(rank):
    config = LayernormConfig(torch.ones(2)) if rank else LinearConfig(weight=torch.ones(2, 2))
    gather = GATHERS["xrank"]["get_configs_parallel"]
    with gather(config, [0, 1], None, key="the head") as gathered:
        assert [type(one) for one in gathered] == ([LinearConfig, LayernormConfig] if rank == 0 else [])
    refused = pytest.raises((ContradictionError, RuntimeError), match="they sent different classes")
    with refused, gather(config, [0, 1], None):
        pass


@pytest.mark.ranks(2, timeout_seconds=140)
def test_a_state_of_modelopts_class_in_a_running_job(rank, tmp_path):
    ModelOptWorkspace(tmp_path)
    dist.barrier()
    if rank == 1:
        ModelOptWorkspace(tmp_path).write_configs_and_weights({"a": 1}, {"w": torch.ones(1)})
    dist.barrier()
    if rank == 0:
        with pytest.raises(ContradictionError, match=r"the state of rank 1 .* records no run"):
            NFSWorkspace(tmp_path).read_configs_and_weights_from_rank(1)
        config, weights = NFSWorkspace(tmp_path, run_id="").read_configs_and_weights_from_rank(1)
        assert config == {"a": 1} and weights["w"].item() == 1
    dist.barrier()


@pytest.mark.ranks(2, timeout_seconds=140)
def test_what_modelopt_asserts_works(rank):
    tensors, configs = GATHERS["xrank"]["get_tensors_parallel"], GATHERS["xrank"]["get_configs_parallel"]
    with tensors(None if rank else torch.ones(1), [0, 1]) as parts:
        assert [part is None for part in parts] == ([False, True] if rank == 0 else [])
    with configs({"rank": rank}, [rank], None) as gathered:
        assert gathered == [{"rank": rank}]
    with pytest.raises(UsageError, match="different ranks"), tensors(torch.ones(1), [0, 1, 1]):
        pass
