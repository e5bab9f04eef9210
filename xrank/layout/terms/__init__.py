"""Convert the layout terms of other systems to xrank's layouts and back."""

from xrank.layout.terms.sharded_tensor import PlacedTensor, ShardedTensorData, from_sharded_tensor, to_sharded_tensors
from xrank.layout.terms.tensors import (
    describe_keras_mesh,
    describe_mesh,
    from_keras_axes,
    from_partition_spec,
    from_placements,
    to_keras_axes,
    to_partition_spec,
    to_placements,
)
from xrank.layout.terms.tp_plan import from_tp_plan, to_tp_plan

__all__ = [
    "PlacedTensor",
    "ShardedTensorData",
    "describe_keras_mesh",
    "describe_mesh",
    "from_keras_axes",
    "from_partition_spec",
    "from_placements",
    "from_sharded_tensor",
    "from_tp_plan",
    "to_keras_axes",
    "to_partition_spec",
    "to_placements",
    "to_sharded_tensors",
    "to_tp_plan",
]
