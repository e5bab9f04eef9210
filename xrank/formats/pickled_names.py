"""Classes and functions that a pickle names: those that frameworks write, and those that the user must know of.

xrank imports and calls none of them. A program that loads the same file with ``torch.load(weights_only=False)`` does:
the import of a module and the call of a function run code. So a pickle that makes an object and discards it is refused,
since no framework writes that; names outside the list below are reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from xrank.formats.inert_record import InertRecord
from xrank.formats.regular_file import Origin, quote

Name = tuple[str, str]
"""Module and name of a class or function."""

# Found in the files that the trainers of `make corpus` and of the oracle tests leave, and what those classes hold.
_WRITTEN_BY_FRAMEWORKS: Mapping[str, str] = {
    "__builtin__": "bool bytearray bytes complex dict float frozenset int list long object range set slice str tuple "
    "type unicode xrange",
    "_codecs": "encode",
    "accelerate.state": "PartialState",
    "accelerate.utils.dataclasses": "DeepSpeedPlugin DistributedType FullyShardedDataParallelPlugin",
    "argparse": "Namespace",
    "collections": "Counter OrderedDict defaultdict deque",
    "copyreg": "_reconstructor",
    "datetime": "date datetime timedelta timezone",
    "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "functools": "partial",
    "lightning.fabric.utilities.data": "AttributeDict",
    "lightning.pytorch.utilities.parsing": "AttributeDict",
    "lightning_fabric.utilities.data": "AttributeDict",
    "pytorch_lightning.utilities.parsing": "AttributeDict",
    "megatron.core.dist_checkpointing.core": "CheckpointingException",
    "megatron.core.dist_checkpointing.mapping": "ShardedObject ShardedTensor",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata",
    "megatron.core.enums": "Fp8Recipe ModelType",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    "megatron.core.transformer.enums": "AttnBackend AttnMaskType AttnType CudaGraphScope LayerType",
    "megatron.core.transformer.pipeline_parallel_layer_layout": "PipelineParallelLayerLayout",
    "megatron.model": "ModelType",
    "numpy": "bool bool_ dtype float16 float32 float64 int16 int32 int64 int8 ndarray uint16 uint32 uint64 uint8",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy.dtypes": "BoolDType Float32DType Float64DType Int64DType UInt32DType UInt64DType UInt8DType",
    "omegaconf.base": "ContainerMetadata Metadata",
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.nodes": "AnyNode BooleanNode FloatNode IntegerNode StringNode",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "pathlib._local": "PosixPath PurePosixPath WindowsPath",
    "torch": "Generator Size Tensor device dtype layout memory_format",
    "torch._utils": "_rebuild_device_tensor_from_numpy _rebuild_parameter _rebuild_parameter_with_state "
    "_rebuild_qtensor _rebuild_sparse_tensor _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 "
    "_rebuild_wrapper_subclass",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch.nn.parameter": "Buffer Parameter",
    "torch.serialization": "_get_layout",
    "torch.storage": "TypedStorage UntypedStorage",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharded_tensor.api": "ShardedTensor",
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties",
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    # torch 2.10 and later record the ranks of a DeviceMesh by these.
    "torch.distributed._mesh_layout": "_FlatLayout _MeshLayout",
    "torch.distributed._tensor.api": "DTensor",
    "torch.distributed._tensor.device_mesh": "DeviceMesh",
    "torch.distributed._tensor.placement_types": "DTensorSpec Partial Replicate Shard TensorMeta _Partial",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    # Megatron-core's torch_dist records the plans of ranks, too.
    "torch.distributed.checkpoint.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed.remote_device": "_remote_device",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor._api": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec ShardOrderEntry TensorMeta",
    "torch.distributed.tensor.placement_types": "MaskPartial Partial Replicate Shard _MaskPartial _StridedShard",
    "transformers.trainer_pt_utils": "AcceleratorConfig",
    "transformers.trainer_utils": "FSDPOption HubStrategy IntervalStrategy SaveStrategy SchedulerType",
    "transformers.training_args": "OptimizerNames TrainingArguments",
    "transformers.integrations.deepspeed": "HfDeepSpeedConfig HfTrainerDeepSpeedConfig",
}
_SAME = {"builtins": "__builtin__", "copy_reg": "copyreg", "torch._C": "torch"}
_TORCH_CONSTANT = re.compile(
    r"\w*Storage|(bfloat|bits|complex|float|qu?int|u?int)\d\w*|bool|strided|\w+_format|channels_last\w*"
)
"""Storages are named after their element types (torch/storage.py)."""
_KNOWN = {(module, name) for module, names in _WRITTEN_BY_FRAMEWORKS.items() for name in names.split()}


def is_known(name: Name) -> bool:
    """Return whether frameworks write a name into pickles."""
    module = _SAME.get(name[0], name[0])
    return (module, name[1]) in _KNOWN or (
        module in ("torch", "torch.cuda") and _TORCH_CONSTANT.fullmatch(name[1]) is not None
    )


def find_foreign_names(
    named: Mapping[Name, int],
    calls: Iterable[InertRecord],
    built: Iterable[Name],
    roots: Iterable[object],
    origin: Origin,
) -> dict[Name, int]:
    """Return the names that no framework writes, each with the byte of the pickle that names it first.

    Args:
        named: every class and function that the pickle names, with the byte.
        calls: the calls that it makes, without those that became plain values.
        built: names whose calls became plain values.
        roots: the pickle's value, and what was dropped from it.
        origin: the file, for errors.

    Raises:
        UnsafeError: the pickle discards the result of a call, or a name outside the list.
    """
    calls = list(calls)
    foreign = {name: at for name, at in named.items() if not is_known(name)}
    if not calls and not foreign:
        return {}
    kept = {id(record): record for record in _find_records(roots)}
    for record in calls:
        if id(record) not in kept:
            raise _discarded((record.module, record.name), named, origin)
    reached = {(record.module, record.name) for record in kept.values()}
    for name in foreign.keys() - reached - set(built):
        raise _discarded(name, named, origin)
    return {name: at for name, at in foreign.items() if name in reached}


def _discarded(name: Name, named: Mapping[Name, int], origin: Origin) -> Exception:
    text = quote(".".join(name))
    return origin.unsafe(
        f"the pickle runs {text} and discards the result, near its byte {named.get(name, 0)}", got=text
    )


def _find_records(roots: Iterable[object]) -> list[InertRecord]:
    """Return all records in trees, also those inside records."""
    seen: set[int] = set()
    found: list[InertRecord] = []
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if isinstance(node, InertRecord):
            if id(node) not in seen:
                seen.add(id(node))
                found.append(node)
                waiting += (node.args, node.kwargs, node.state, node.items)
        elif isinstance(node, (dict, list, tuple, set, frozenset)) and id(node) not in seen:
            seen.add(id(node))
            waiting += node
            if isinstance(node, dict):
                waiting += node.values()
    return found
