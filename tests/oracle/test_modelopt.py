"""ModelOpt's own merge of a model, once through its gathers and once through xrank's: the same, bit for bit.

2 pipeline stages of 2 tensor parallel ranks become one model. A stage's layers travel as whole configs, the halves of
every weight, bias and scale one by one; each format has rules of its own for what is joined, along which dimension, of
what the largest is taken, and what is computed anew.
"""

import pytest
import torch

from tests.oracle.made_models import FORMATS, TENSOR_PARALLEL, Sizes, flattened, made_part
from tests.oracle.postprocessing import GATHERS, merged, using

# The ranks import ModelOpt in the first test.
pytestmark = pytest.mark.timeout(150)


def merged_with(name, part, workspace_path=None):
    with using(GATHERS[name]):
        return merged(part, workspace_path)


def differing(ours, theirs) -> list[str]:
    ours, theirs = flattened(ours), flattened(theirs)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


@pytest.mark.ranks(4, timeout_seconds=120)
@pytest.mark.parametrize("quantization", FORMATS)
def test_the_merged_model_is_the_same(rank, quantization):
    theirs = merged_with("ModelOpt", made_part(rank, quantization))
    ours = merged_with("xrank", made_part(rank, quantization))
    assert len(ours) == len(theirs) == (1 if rank == 0 else 0)
    assert differing(ours, theirs) == []
    # And it is the model: all layers in their order, of both halves.
    for model in ours:
        assert len(model.layers) == Sizes().num_layers
        for number, layer in enumerate(model.layers):
            stage, index = divmod(number, 2)
            halves = [made_part(stage * TENSOR_PARALLEL + tp, quantization).layers[index] for tp in range(2)]
            assert torch.equal(layer.mlp.proj.weight, torch.cat([half.mlp.proj.weight for half in halves], dim=1))


@pytest.mark.ranks(4, timeout_seconds=120)
def test_the_merged_model_is_the_same_through_a_directory(rank, tmp_path):
    theirs = merged_with("ModelOpt", made_part(rank, "int8_sq"), tmp_path)
    ours = merged_with("xrank", made_part(rank, "int8_sq"), tmp_path)
    assert len(ours) == (1 if rank == 0 else 0)
    assert differing(ours, theirs) == []


@pytest.mark.ranks(4, timeout_seconds=120)
@pytest.mark.parametrize("quantization", FORMATS)
def test_parameters_and_slices_merge_as_plain_tensors_do(rank, quantization):
    """ModelOpt's own gathers refuse slices: they write a slice's whole storage into a segment of the slice's size."""
    theirs = merged_with("ModelOpt", made_part(rank, quantization))
    ours = merged_with("xrank", made_part(rank, quantization, as_in_training=True))
    assert differing(ours, theirs) == []
