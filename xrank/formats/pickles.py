"""Read a pickle as data: plain values are built, everything else becomes an inert record, and nothing is called.

A scan checks all opcodes and rewrites those that would call something; then CPython's Unpickler reads the rest. It gets
opcodes for constants, tuples, and empty lists, dicts and sets only; `PickleReader` builds the rest, by this module's
rules.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from xrank.errors import XrankError
from xrank.storage.entries import MAX_INTEGER_NBYTES
from xrank.storage.regular_file import Origin, quote
from xrank.system import pause_collection

_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})

MAX_DEPTH = 200
"""Largest nesting depth of a state, so callers can walk it by plain recursion."""


class InertRecord(Struct, eq=False):
    """A class or function that a pickle names, or an object that it would have made; nothing was imported or called.

    It is mutable because a pickle fills an object after naming it. Equality is identity, so it can be a key.
    """

    module: str
    name: str
    args: tuple[object, ...] | None = None
    """Arguments of the call; None for the class or function itself."""
    kwargs: dict[str, object] = field(default_factory=dict)
    state: object = None
    """The state for ``__setstate__`` or ``__dict__``."""
    items: list[object] = field(default_factory=list)
    """The appended or added items, or the (key, value) pairs to set."""

    def __repr__(self) -> str:
        # Without the contents, which may be deep or contain the record itself.
        return f"<inert {self.module}.{self.name}{'' if self.args is None else '(...)'}>"


def is_extra_state(name: object) -> bool:
    """Return whether a name in a state dict is the key of a module's extra state; tensors' names may end alike."""
    # torch/nn/modules/module.py: _EXTRA_STATE_KEY_SUFFIX, after the module's own name
    return str(name).rpartition(".")[2] == "_extra_state"


def refuse_inert(value: object, path: str, rank: int | None = None) -> None:
    """Raise `inert_error` for a tree's first class or object; modules' extra states may be any objects."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, InertRecord):
            raise inert_error(node, Origin(path, rank))
        kept = {k: v for k, v in node.items() if not is_extra_state(k)} if isinstance(node, dict) else node
        children = _children(kept)
        if children is not None and id(node) not in seen:
            seen.add(id(node))
            waiting.extend(reversed(list(children)))


def inert_error(record: object, origin: Origin, place: str = "") -> XrankError:
    """Return the error for a value, in a file at a place such as a tensor's name, that must be plain data or a tensor.

    An object that a framework writes, or that is recognized by its parts, is a `UsageError`; others are unsafe.
    """
    if not isinstance(record, InertRecord):
        return origin.corrupt(f"{place or 'its content'} has the wrong kind", got=type(record).__name__)
    kind, start = quote(f"{record.module}.{record.name}"), f"{place} is" if place else "holds"
    # torch/_tensor.py: _rebuild_from_type_v2 makes all tensors of other classes, such as torchao's quantized ones.
    if (record.module, record.name) == ("torch._tensor", "_rebuild_from_type_v2"):
        kinds = [f"{a.module}.{a.name}" for a in record.args or () if isinstance(a, InertRecord) and a.args is None]
        own = next((quote(kind) for kind in kinds if not kind.startswith("torch.")), None)
        return origin.usage(
            f"{start} a tensor " + ("with extra attributes" if own is None else f"of {own}, which xrank cannot read"),
            got=own,
            want="plain tensors",
            next_step="save the model with save_pretrained, as safetensors, or save what dequantize() of these tensors "
            "returns; then gather that",
        )
    # torch/nn/modules/module.py: Module.__init__
    if isinstance(record.state, dict) and {"_parameters", "_modules"} <= record.state.keys():
        return origin.usage(
            f"{start} a whole module, an object of {kind}, which only its own code can load",
            got=kind,
            want="the state dict of the module",
            next_step="load it where its class can be imported, then save its state_dict() with torch.save; gather "
            "that",
        )
    names = {(each.module, each.name) for each in _find_records([record])}
    if all(is_known(name) or (name[0] == "torch._utils" and name[1].startswith("_rebuild_")) for name in names):
        return origin.usage(
            f"{start} an object of {kind}, not a plain tensor",
            got=kind,
            want="plain values and tensors",
            next_step="load it where it was saved, then save its tensors by name, as a state_dict, with torch.save",
        )
    return origin.unsafe(f"{start} an object that only running code can make: {kind}", got=kind)


def check_tree(value: object, max_nodes: int, origin: Origin) -> list[InertRecord]:
    """Return the records in a tree, also those inside of records.

    CorruptError if a walk of the tree, shared nodes each time, would be endless, too long or too deep. A pickle may
    hold a list that contains itself, or 60 lists that each hold the previous one twice: small in memory, but endless
    to walk. The contents of inert records are checked as separate trees.
    """
    sizes: dict[int, int] = {}
    records: dict[int, InertRecord] = {}
    roots = [value]
    while roots:
        root = roots.pop()
        path = [_Visit(root)]
        total = 0
        while path:
            visit = path[-1]
            for child in visit.children:
                if type(child) in _LEAVES:
                    visit.size += 1
                    continue
                if isinstance(child, InertRecord) and id(child) not in records:
                    records[id(child)] = child
                    roots += filter(None, (child.args, child.kwargs, child.state, child.items))
                known = sizes.get(id(child))
                if known is None and _children(child) is not None:
                    # A container inside itself also ends here: its size stays unknown while it is open.
                    if len(path) >= MAX_DEPTH:
                        raise origin.corrupt(
                            "the pickled state is nested too deep, or contains itself",
                            want=f"at most {MAX_DEPTH} levels",
                        )
                    path.append(_Visit(child))
                    break
                visit.size += 1 if known is None else known
            else:
                path.pop()
                total = visit.size
                if total > max_nodes:
                    problem = "the pickled state refers to its own parts too often"
                    raise origin.corrupt(problem, want=f"{max_nodes} nodes")
                if path:
                    sizes[id(visit.node)] = total
                    path[-1].size += total
    return list(records.values())


class _Visit:
    """A container whose nodes are being counted."""

    __slots__ = ("children", "node", "size")

    def __init__(self, node: object) -> None:
        self.node = node
        parts = [node] if isinstance(node, InertRecord) else (_children(node) or ())
        # Most large containers hold leaves alone, which need no look at each.
        is_flat = _LEAVES.issuperset(map(type, parts))
        self.children = iter(() if is_flat else parts)
        self.size = 1 + (len(parts) if is_flat else 0)


def _children(node: object) -> Collection[object] | None:
    """Return the items of a container, of a dict keys and values; None for a leaf."""
    if isinstance(node, dict):
        return [part for pair in node.items() for part in pair]
    if isinstance(node, (list, tuple, set, frozenset)):
        return node
    return None


class Blank(Struct, frozen=True):
    """Stands in a value for a number or a text in which the pickles of a `PickleFamily` differ."""

    number: int


def fill_blanks(value: Any, own: Sequence[object]) -> Any:
    """Return a copy of a family's value, or a part of it, with one pickle's own values in the places of blanks."""
    if not own:
        return value
    if isinstance(value, Blank):
        return own[value.number]
    if isinstance(value, (tuple, list)):
        return type(value)(fill_blanks(part, own) for part in value)
    if isinstance(value, dict):
        return type(value)((key, fill_blanks(part, own)) for key, part in value.items())
    if isinstance(value, InertRecord):
        parts = (fill_blanks(part, own) for part in (value.args, value.kwargs, value.state, value.items))
        return InertRecord(value.module, value.name, *parts)
    return value


_MAX_KEY_NODES = 64
_PLAIN_KEYS = frozenset({str, bytes, float, bool, type(None)})

Builder: TypeAlias = Callable[[tuple[object, ...]], object]
"""Builds a plain value from the arguments of a call; NotImplemented keeps the call an inert record."""


def _collection_builder(kind: type) -> Builder:
    def build(args: tuple[object, ...]) -> object:
        if len(args) > 1 or (args and not isinstance(args[0], (list, tuple))):
            return NotImplemented
        members = args[0] if args else ()
        assert isinstance(members, (list, tuple))
        if kind in (set, frozenset):
            for member in members:
                check_key(member)
        return kind(members)

    return build


def _build_bytes(args: tuple[object, ...]) -> object:
    match args:
        # Protocol 2 writes bytes as _codecs.encode(text, "latin1") (Lib/pickle.py: save_bytes).
        case (str(text), "latin1"):
            return text.encode("latin1")
    return NotImplemented


def _build_complex(args: tuple[object, ...]) -> object:
    match args:
        case (float(real), float(imaginary)):
            return complex(real, imaginary)
    return NotImplemented


def _build_member(args: tuple[object, ...]) -> object:
    """Return the record of what a ``getattr`` names of a class that frameworks write; or NotImplemented.

    Python 3.11.0 to 3.11.3 name an enum's members so (Lib/enum.py: Enum.__reduce_ex__), others call the enum with their
    value. Protocol 2 has no other way to name a nested class (Lib/pickle.py: save_global); torch has one such class.
    """
    match args:
        case (InertRecord(module=module, name="ShardedTensor", args=None), "ProcessGroupState" as inner) if (
            module == "torch.distributed._shard.sharded_tensor.api"
        ):
            return InertRecord(module, f"ShardedTensor.{inner}")
        case (InertRecord(module=module, name=name, args=None), str(member)) if is_known(
            (module, name)
        ) and not member.startswith("_"):
            return InertRecord(module, name, (member,))
    return NotImplemented


# Protocol 2 writes Python 2's name of the builtins module (Lib/_compat_pickle.py).
PLAIN_BUILDERS: Mapping[tuple[str, str], Builder] = {
    ("collections", "OrderedDict"): lambda args: NotImplemented if args else OrderedDict(),
    ("_codecs", "encode"): _build_bytes,
    **{
        (module, name): builder
        for module in ("builtins", "__builtin__")
        for name, builder in (
            ("set", _collection_builder(set)),
            ("frozenset", _collection_builder(frozenset)),
            ("bytes", lambda args: NotImplemented if args else b""),
            ("complex", _build_complex),
            ("getattr", _build_member),
        )
    },
}
"""(Module, name) of each call that makes a plain Python value -> its builder."""


def check_key(key: object) -> None:
    """Raise ValueError if a key is expensive to hash or to compare.

    CPython hashes nested tuples by unbounded recursion, visits shared parts each time, and gives integers that differ
    by a multiple of 2**61 - 1 the same hash: each allows a small file to bring a process down.
    """
    if type(key) in _PLAIN_KEYS:
        return
    waiting = [key]
    for _ in range(_MAX_KEY_NODES):
        node = waiting.pop()
        if isinstance(node, Blank):
            raise ValueError("keys that differ between pickles")
        if isinstance(node, (tuple, frozenset)):
            waiting.extend(node)
        elif isinstance(node, int) and not -(1 << 63) <= node < 1 << 64:
            raise ValueError("a key too large")
        if not waiting:
            return
    raise ValueError("a key with too many parts")


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
    kept: Iterable[InertRecord],
    origin: Origin,
) -> dict[Name, int]:
    """Return the names that no framework writes, each with the byte of the pickle that names it first.

    A pickle that discards the result of a call, or a name outside the list, is unsafe. `built` are the names of the
    calls that became plain values, and `calls` are the others. `kept` are the records in the pickle's value, and in
    what was dropped from it.
    """
    calls = list(calls)
    foreign = {name: at for name, at in named.items() if not is_known(name)}
    if not calls and not foreign:
        return {}
    kept = list(kept)
    places = set(map(id, kept))
    for record in calls:
        if id(record) not in places:
            raise _discarded((record.module, record.name), named, origin)
    reached = {(record.module, record.name) for record in kept}
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


# ---- the scan of the opcodes

MAX_PICKLE_NBYTES = 1 << 29
"""Largest pickle that is read, in bytes; a tensor takes about 150."""
MAX_MADE_NBYTES = 1 << 28
"""Largest memory of the objects that a pickle makes, in bytes; a tensor takes about 1,000."""
PROTOCOL, STOP = b"\x80", ord(".")
RUN = 0
"""Opcode of a `PickleRun`; no pickle has it."""

_NAME_NBYTES = 600
"""Memory of the record of a class or function, and of its names."""
_BLOCK_NBYTES = 1 << 18
_MARK, _MARK_TAKERS = ord("("), list(b"teu1\x90\x91")
_FRAME, _MEMOIZE, _BINPUT, _LONG_BINPUT, _BINGET, _LONG_BINGET, _GLOBAL, _STACK_GLOBAL = b"\x95\x94qrhjc\x93"
_COUNTED = {**dict.fromkeys(b"\x8a\x8cC", 1), **dict.fromkeys(b"\x8bXB", 4), **dict.fromkeys(b"\x8d\x8e\x96", 8)}
"""Opcode -> bytes of the length before its argument."""
OPCODE_LENGTHS = [0] * 256
"""Opcode -> its bytes with its argument; 0 if they depend on it, or if picklers of protocols 2 to 5 never write it.

Never written are the text opcodes, INST, OBJ, DUP, the copyreg extensions and out-of-band buffers, as in
``torch/_weights_only_unpickler.py``.
"""
_COSTS = [8] * 256
"""Opcode -> bytes of memory of the object that it makes. Empty lists, dicts and sets, and opcodes that call this
module, count more: files with millions of them are made to cost time."""
for _opcodes, _value in {
    b"(01N\x88\x89)\x85\x86\x87t]ae}su\x8f\x90\x91\x93\x94R\x81\x92bQ": 1,
    b"\x80Khq": 2,
    b"M": 3,
    b"Jjr": 5,
    b"G\x95": 9,
}.items():
    for _opcode in _opcodes:
        OPCODE_LENGTHS[_opcode] = _value
for _opcodes, _value in {
    b"qr\x94": 16,
    b"JMGX\x8cCB": 40,
    b"(\x85\x86\x87t\x8aeub\x90": 64,
    b"as": 128,
    b"]}": 136,
    b"R\x81\x92Q": 216,
    b"\x91": 224,
    b"\x8f": 448,
}.items():
    for _opcode in _opcodes:
        _COSTS[_opcode] = _value
_ACTIONS: Mapping[int, bytes] = {
    **dict.fromkeys(b"aR\x81b", b"\x86Q"),
    **dict.fromkeys(b"s\x92", b"\x87Q"),
    **dict.fromkeys(b"eu\x90", b"t\x86Q"),
    ord("\x91"): b"tQ",
    ord("Q"): b"Q",
}
"""Opcode that calls something or fills an object -> opcodes that hand its operands to `persistent_load`, as a tuple."""


def _mask_opcodes(opcodes: Iterable[int]) -> npt.NDArray[np.bool_]:
    """Return which of all opcodes these are: a table, because np.isin imports numpy.ma, which takes longer."""
    found = np.zeros(256, np.bool_)
    found[list(opcodes)] = True
    return found


_TAKES_MARK, _IS_PUT = _mask_opcodes(_MARK_TAKERS), _mask_opcodes((_MEMOIZE, _BINPUT, _LONG_BINPUT))
_IS_ACTION = _mask_opcodes((RUN, *_ACTIONS))

_Places: TypeAlias = npt.NDArray[np.int64]
_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Block: TypeAlias = tuple[int, int, _Bytes, int, int]
"""First byte, the byte after the last one, mask of the opcodes, packed, and numbers of puts and runs before it."""


class PickleRun:
    """Objects that were cut out of a pickle: the opcode `RUN` stands for them, and makes one value of some of the memo.

    `gets` are the BINGET or LONG_BINGET, with its argument, of each memo value.
    """

    def __init__(self, gets: tuple[bytes, ...]) -> None:
        self.gets = gets
        self.num_memos = 0
        """Number of memo values that the objects set."""
        self.first_memo = 0


class WrongRunError(Exception):
    """A run has the form, but not the classes, of the objects that it was taken for."""


class PickleScan:
    """The opcodes of a pickle, checked, and rewritten so that CPython's Unpickler runs nothing.

    The scan follows the opcodes from the first to the last by their lengths. It refuses unknown opcodes, lengths beyond
    the pickle, and more objects than `max_made_nbytes` allows. CPython 3.11 allocates any memo index that a file names
    (python/cpython#115952): indexes are bounded by their number, and values that nothing refers to are not kept.
    """

    def __init__(
        self, data: bytes, origin: Origin, max_made_nbytes: int = MAX_MADE_NBYTES, runs: Sequence[PickleRun] = ()
    ) -> None:
        self._data, self._origin, self.runs = data, origin, runs
        self._bytes = np.frombuffer(data, np.uint8)
        self._blocks: list[_Block] = []
        self.gets = [np.array([int.from_bytes(get[1:], "little") for run in runs for get in run.gets], np.int64)]
        """The memo numbers that are read."""
        self.is_in_order = True
        """Whether the pickle numbers its memo values in order, as picklers do (Modules/_pickle.c: memo_put)."""
        self.named_at = array("q")  # as numbers of Python, those of a hostile pickle would take 40 times its bytes
        """For each time that the pickle names a class or function, the byte after the name."""
        lengths, costs = [int(bool(runs)), *OPCODE_LENGTHS[1:]], np.array(_COSTS)
        made_nbytes = num_marks = largest = num_puts = num_runs = start = 0
        while start < len(data):
            part, at = data[start : start + _BLOCK_NBYTES], 0
            mask, end = bytearray(len(part)), len(part)
            while at < end:
                mask[at] = 1
                at += lengths[part[at]] or measure_opcode(data, start + at, origin)
            block = (start, start + at, np.packbits(np.frombuffer(mask, np.uint8)), num_puts, num_runs)
            self._blocks.append(block)
            start += at
            places, opcodes = self._opcodes_of(block)
            counts = np.bincount(opcodes, minlength=256)
            made_nbytes += int(counts @ costs)
            if made_nbytes > max_made_nbytes:
                raise refuse_size(origin, max_made_nbytes, start, len(data))
            open_marks = num_marks + np.cumsum((opcodes == _MARK).astype(np.int64) - _TAKES_MARK[opcodes])
            num_marks = int(open_marks[-1])
            ordinals = self._number_puts(block, opcodes)
            for opcode, nbytes in ((_BINPUT, 1), (_LONG_BINPUT, 4)):
                numbers = self._arguments(places[opcodes == opcode], nbytes)
                self.is_in_order &= np.array_equal(numbers, ordinals[opcodes == opcode])
                largest = max(largest, int(numbers.max(initial=0)))
            for opcode, nbytes in ((_BINGET, 1), (_LONG_BINGET, 4)):
                self.gets.append(self._arguments(places[opcodes == opcode], nbytes))
            is_name = (opcodes == _GLOBAL) | (opcodes == _STACK_GLOBAL)
            self.named_at.frombytes(np.append(places, start)[1:][is_name].tobytes())
            num_puts, num_runs = int(ordinals[-1]) + 1, num_runs + int(counts[RUN])
            if start > len(data):
                raise _damaged(origin, len(data), "data without an end")
            if open_marks.min() < 0 or self._arguments(places[opcodes == PROTOCOL[0]], 1).max(initial=0) > 5:
                raise _damaged(origin, start, "opcodes without a mark" if open_marks.min() < 0 else "a later protocol")
        if not data or opcodes[-1] != STOP:
            raise _damaged(origin, len(data), "data without an end")
        if num_marks or largest > num_puts + 255:
            raise _damaged(origin, len(data), f"{num_marks} open marks" if num_marks else f"memo number {largest}")
        self._num_puts = num_puts

    def start_of(self, place: int) -> int:
        """Return the first byte of the opcode with the byte at that place."""
        block = self._blocks[bisect_right(self._blocks, place, key=itemgetter(0)) - 1]
        places = self._opcodes_of(block)[0]
        return int(places[np.searchsorted(places, place, side="right") - 1])

    def _opcodes_of(self, block: _Block) -> tuple[_Places, _Bytes]:
        """Return the places of a block's opcodes in the pickle, and the opcodes."""
        places = np.flatnonzero(np.unpackbits(block[2])) + block[0]
        return places, self._bytes[places]

    def _arguments(self, places: _Places, nbytes: int) -> _Places:
        """Return the unsigned arguments of opcodes at these places."""
        found = np.zeros(len(places), np.int64)
        for k in range(1, nbytes + 1):
            found |= self._bytes[np.minimum(places + k, len(self._bytes) - 1)].astype(np.int64) << 8 * (k - 1)
        return found

    def _number_puts(self, block: _Block, opcodes: _Bytes) -> _Places:
        """Return for each opcode of a block the number of values that the memo has after it, less one."""
        counts = _IS_PUT[opcodes].astype(np.int64)
        is_run = np.flatnonzero(opcodes == RUN)
        runs = self.runs[block[4] : block[4] + len(is_run)]
        counts[is_run] = [run.num_memos for run in runs]
        numbers: _Places = block[3] - 1 + np.cumsum(counts)
        for run, at in zip(runs, is_run, strict=True):
            run.first_memo = int(numbers[at]) + 1 - run.num_memos
        return numbers

    def rewrite(self) -> tuple[bytes, bytes]:
        """Return opcodes for CPython's Unpickler, and the original opcode of each `persistent_load` in them."""
        gets, is_used = np.concatenate(self.gets), np.ones(max(1, self._num_puts), np.bool_)
        if self.is_in_order:
            if gets.max(initial=-1) >= self._num_puts:
                raise _damaged(self._origin, 0, f"no memo value {gets.max()}")
            is_used[:] = False
            is_used[gets] = True
        used = np.flatnonzero(is_used)
        parts = [self._rewrite_block(block, is_used, used) for block in self._blocks]
        # The value comes alone in a tuple, so that values left below it are seen.
        code = b"(" + b"".join(code for code, _ in parts)[:-1] + b"t."
        return b"\x80\x04\x95" + len(code).to_bytes(8, "little") + code, b"".join(actions for _, actions in parts)

    def _rewrite_block(self, block: _Block, is_used: npt.NDArray[np.bool_], used: _Places) -> tuple[bytes, bytes]:
        start, stop = block[:2]
        places, opcodes = self._opcodes_of(block)
        data, repeats = self._bytes[start:stop].copy(), np.ones(stop - start, np.int8)
        for opcode, nbytes in ((PROTOCOL[0], 2), (_FRAME, 9)):
            for k in range(nbytes):
                repeats[places[opcodes == opcode] - start + k] = 0
        if self.is_in_order:
            is_dropped = ~is_used[np.maximum(self._number_puts(block, opcodes), 0)]
            for opcode, nbytes in ((_MEMOIZE, 1), (_BINPUT, 2), (_LONG_BINPUT, 5)):
                puts = places[opcodes == opcode] - start
                data[puts] = _MEMOIZE
                for k in range(1, nbytes):
                    repeats[puts + k] = 0
                repeats[puts[is_dropped[opcodes == opcode]]] = 0
            for opcode, nbytes in ((_BINGET, 1), (_LONG_BINGET, 4)):
                gets = places[opcodes == opcode]
                wanted = np.searchsorted(used, self._arguments(gets, nbytes))
                for k in range(nbytes):
                    data[gets - start + 1 + k] = wanted >> 8 * k & 0xFF
        codes = [(places[opcodes == opcode] - start, code) for opcode, code in _ACTIONS.items()]
        at_runs = places[opcodes == RUN] - start
        runs = self.runs[block[4] : block[4] + len(at_runs)]
        old = [int.from_bytes(get[1:], "little") for run in runs for get in run.gets]
        numbers = iter(np.searchsorted(used, old).tolist())
        run_codes = []
        for run in runs:
            parts = [get[:1] + next(numbers).to_bytes(len(get) - 1, "little") for get in run.gets]
            run_codes.append(np.frombuffer(b"".join((b"(", *parts, b"tQ")), np.uint8))
        repeats[at_runs] = list(map(len, run_codes))
        for at, code in codes:
            repeats[at] = len(code)
        result, ends = np.repeat(data, repeats), np.cumsum(repeats)
        for at, code in codes:
            for k, byte in enumerate(reversed(code), 1):
                result[ends[at] - k] = byte
        for end, run_code in zip(ends[at_runs].tolist(), run_codes, strict=True):
            result[end - len(run_code) : end] = run_code
        return result.tobytes(), opcodes[_IS_ACTION[opcodes]].tobytes()


def _damaged(origin: Origin, at: int, got: str) -> XrankError:
    return origin.corrupt(f"the pickle is damaged near its byte {at}", got=got)


def measure_opcode(data: bytes, at: int, origin: Origin) -> int:
    """Return the bytes of an opcode whose length depends on its argument."""
    opcode = data[at]
    if opcode in _COUNTED:
        start = at + 1 + _COUNTED[opcode]
        nbytes = int.from_bytes(data[at + 1 : start], "little")
        if nbytes > len(data) - start or (opcode in b"\x8a\x8b" and nbytes > MAX_INTEGER_NBYTES):
            raise _damaged(origin, at, f"{quote(nbytes)} bytes wanted, {max(0, len(data) - start)} left")
        return start + nbytes - at
    if opcode == _GLOBAL:
        first = data.find(b"\n", at)
        second = data.find(b"\n", first + 1)
        if first < 0 or second < 0:
            raise _damaged(origin, at, "a name without a terminator")
        return second + 1 - at
    if opcode == STOP:
        if at + 1 < len(data):
            raise _damaged(origin, at, f"{len(data) - at - 1} bytes after its end")
        return 1
    known = [info.name for info in pickletools.opcodes if info.code == chr(opcode)]
    if not known:
        raise _damaged(origin, at, f"opcode {opcode:#04x}")
    raise origin.unsafe(f"the pickle uses opcode {known[0]}, which torch.save never writes", got=known[0])


def refuse_size(origin: Origin, max_made_nbytes: int, at: int, nbytes: int) -> XrankError:
    """Return the error for a pickle whose objects take too much memory; a small file may describe many."""
    return origin.usage(
        "the pickle contains more objects than xrank reads from one file",
        got=f"{max_made_nbytes >> 20} MB of objects in {at:,} of its {nbytes:,} bytes",
        want=f"{max_made_nbytes >> 20} MB at most",
        next_step="if you wrote the file, save its tensors in several files, or as safetensors",
    )


# ---- the reader


class _Stream:
    """A pickle's first 11 bytes, then its only frame at once: as a file, without a copy of it."""

    def __init__(self, code: bytes) -> None:
        self._head, self._frame = io.BytesIO(code[:11]), code[11:]
        self.readline = self._head.readline

    def read(self, nbytes: int) -> bytes:
        return self._head.read(nbytes) or self._frame[:nbytes]


class PickleReader(pickle.Unpickler):
    """Builds what a scanned pickle describes; its methods replace the opcodes that would run code.

    `builders` make the values of calls by (module, name), `load_global` those of global names, and `load_persistent`
    those of persistent ids, which are refused without it. The objects may take `max_made_nbytes` of memory.
    """

    def __init__(
        self,
        data: bytes,
        origin: Origin,
        builders: Mapping[tuple[str, str], Builder],
        load_global: Callable[[str, str], object] = InertRecord,
        load_persistent: Callable[[object], object] | None = None,
        *,
        max_made_nbytes: int = MAX_MADE_NBYTES,
    ) -> None:
        self._max_made_nbytes = max_made_nbytes
        self.scanned = self.scan(data, origin, max_made_nbytes)
        code, actions = self.scanned.rewrite()
        super().__init__(_Stream(code))
        self.origin = origin
        self.nbytes = len(data)
        self.builders, self.load_global = builders, load_global
        self.globals: dict[tuple[str, str], object] = {}
        """Values of the classes and functions that the pickle names."""
        self.named: dict[tuple[str, str], int] = {}
        """Each class or function that the pickle names -> the first byte after its first name."""
        self.calls: MutableSequence[InertRecord] = []
        """Calls that stay inert."""
        self.built: set[tuple[str, str]] = set()
        """Names whose calls became plain values."""
        self.dropped: list[object] = []
        """Attributes of dicts, which are left out."""
        self._actions, self._named_at = iter(actions), iter(self.scanned.named_at)
        self._steps: dict[int, Callable[[Any], object]] = {
            ord("a"): self.append,
            ord("e"): self.extend,
            ord("s"): lambda operands: self.set_items((operands[0], operands[1:])),
            ord("u"): self.set_items,
            0x90: self.add_items,
            0x91: self.build_frozenset,
            ord("R"): self.call,
            0x81: self.call,  # NEWOBJ: for records the same as a call
            0x92: lambda operands: self.call(operands[:2], operands[2]),
            ord("b"): self.build,
            ord("Q"): load_persistent or self.refuse_id,
            RUN: self.take_run,
        }

    def scan(self, data: bytes, origin: Origin, max_made_nbytes: int) -> PickleScan:
        """Return the scanned pickle."""
        return PickleScan(data, origin, max_made_nbytes)

    def take_run(self, operands: tuple[object, ...]) -> object:
        """Return what stands for a run on the stack; for subclasses whose `scan` cuts runs out."""
        raise NotImplementedError

    def read(self) -> object:
        """Return the value of the pickle, unless it is damaged or needs code to run."""
        try:
            (value,) = self.load()
        except (XrankError, WrongRunError):
            raise
        # Any other failure, such as a pop from an empty stack or a text that is not UTF-8, means a damaged pickle.
        except Exception as error:
            at = max(self.named.values(), default=0)
            raise self.origin.corrupt(
                f"the pickle is damaged after its byte {at}", got=f"{type(error).__name__}: {quote(str(error))}"
            ) from error
        finally:
            self._steps = {}  # its methods refer back to this object
        return value

    def persistent_load(self, operands: Any) -> object:
        """Take the step of an opcode of the original pickle."""
        return self._steps[next(self._actions)](operands)

    def find_class(self, module: str, name: str) -> object:
        """Return the value of a global name; nothing is imported."""
        at, key = next(self._named_at), (module, name)
        if key not in self.globals:
            if type(module) is not str or type(name) is not str:
                raise TypeError("a global's name is not a text")
            if len(self.globals) * _NAME_NBYTES > self._max_made_nbytes // 2:
                raise refuse_size(self.origin, self._max_made_nbytes, at, self.nbytes)
            self.named[key] = at
            self.globals[key] = self.load_global(module, name)
        return self.globals[key]

    def refuse_id(self, saved_id: object) -> NoReturn:
        """Refuse a persistent id."""
        raise self.origin.unsafe("the pickle refers to data outside itself", got="BINPERSID")

    def append(self, operands: tuple[object, object]) -> object:
        """Append an item to a list or a record."""
        return self.extend((operands[0], operands[1:]))

    def extend(self, operands: tuple[object, tuple[object, ...]]) -> object:
        """Append items to a list or a record."""
        target, items = operands
        if type(target) is list:
            target.extend(items)
        elif isinstance(target, InertRecord):
            target.items.extend(items)
        else:
            raise TypeError(f"append to {type(target).__name__}")
        return target

    def set_items(self, operands: tuple[object, tuple[object, ...]]) -> object:
        """Set items of a dict or a record."""
        target, items = operands
        keys, values = items[::2], items[1::2]
        if len(keys) != len(values):
            raise ValueError("a key without a value")
        if isinstance(target, dict):
            for key in keys:
                if type(key) is not str:
                    check_key(key)
            target.update(zip(keys, values, strict=True))
        elif isinstance(target, InertRecord):
            target.items.extend(zip(keys, values, strict=True))
        else:
            raise TypeError(f"set an item of {type(target).__name__}")
        return target

    def add_items(self, operands: tuple[object, tuple[object, ...]]) -> object:
        """Add items to a set or a record."""
        target, items = operands
        if isinstance(target, set):
            target.update(self.build_frozenset(items))
        elif isinstance(target, InertRecord):
            target.items.extend(items)
        else:
            raise TypeError(f"add to {type(target).__name__}")
        return target

    def build_frozenset(self, items: tuple[object, ...]) -> frozenset[object]:
        """Return a frozenset."""
        for item in items:
            check_key(item)
        return frozenset(items)

    def call(self, operands: tuple[object, object], kwargs: object = None) -> object:
        """Build the value of a call, or make its record."""
        target, args = operands
        if not isinstance(args, tuple) or not isinstance(target, InertRecord):
            raise TypeError(f"call of {type(target).__name__} with {type(args).__name__}")
        if target.args is not None:
            name = quote(f"{target.module}.{target.name}")
            raise self.origin.unsafe(f"the pickle calls the result of {name}", got=name)
        builder = self.builders.get((target.module, target.name))
        made = NotImplemented if builder is None or kwargs else builder(args)
        if made is not NotImplemented:
            self.built.add((target.module, target.name))
            return made
        made = InertRecord(target.module, target.name, args)
        self.calls.append(made)
        if kwargs:
            if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
                raise TypeError("keyword arguments that are not a dict")
            made.kwargs = kwargs
        return made

    def build(self, operands: tuple[object, object]) -> object:
        """Set the state of a record."""
        target, state = operands
        if isinstance(target, InertRecord) and target.args is None:
            name = quote(f"{target.module}.{target.name}")
            raise self.origin.unsafe(f"the pickle sets attributes of {name} itself", got=name)
        if isinstance(target, InertRecord) and target.state is None:
            target.state = state
        # A state dict has the versions of its modules in an attribute, `_metadata` (torch/nn/modules/module.py:
        # state_dict). Attributes of a dict are not data and could hide its methods, so they are dropped.
        elif type(target) is OrderedDict:
            self.dropped.append(state)
        else:
            raise TypeError(f"set the state of {type(target).__name__}")
        return target


class Pickled(Struct, frozen=True):
    """The content of a pickle."""

    value: object
    foreign: Mapping[tuple[str, str], int]
    """(Module, name) of each class or function that frameworks do not write -> the byte that names it first."""
    own: tuple[object, ...] | None = None
    """This pickle's own number or text for each `Blank` in the value; None if no other pickle shares the value."""
    key: object = None
    """The key of the family's first pickle."""


def read_pickle(
    data: bytes,
    origin: Origin,
    *,
    builders: Mapping[tuple[str, str], Builder] = PLAIN_BUILDERS,
    load_global: Callable[[str, str], object] = InertRecord,
    load_persistent: Callable[[object], object] | None = None,
    families: PickleFamilies | None = None,
    key: object = None,
) -> Pickled:
    """Read a pickle; its classes and calls are inert records. The other arguments are those of `PickleReader`.

    A pickle of one of the `families` is not read again. Any other one is the first of a new family. Builders give
    families of equal keys the same values.
    """
    if len(data) > MAX_PICKLE_NBYTES:
        raise origin.corrupt("the pickle is too long", got=f"{len(data)} bytes", want=f"{MAX_PICKLE_NBYTES} at most")
    arguments = (builders, load_global, load_persistent)
    with pause_collection():
        for family in families or ():
            found = family.read(data, origin, *arguments) if family.key == key else None
            if found is not None:
                return found
        reader = PickleReader(data, origin, *arguments)
        value = reader.read()
        kept = check_tree(value, 1_000_000 + 4 * len(data), origin)
        kept += _find_records(reader.dropped)
        foreign = find_foreign_names(reader.named, reader.calls, reader.built, kept, origin)
    if families is not None:
        families.append(PickleFamily(data, reader.scanned, foreign, key))
    return Pickled(value, foreign)


# ---- pickles that are alike

_LEAF_OPCODES = b"KMJX\x8c"  # BININT1, BININT2, BININT, BINUNICODE, SHORT_BINUNICODE
_MAX_BLANKS = 16
_MAX_FAMILIES = 8
"""Families, as of the stages of a pipeline or groups of experts, with which the next pickle is compared."""


class PickleFamily:
    """A pickle, and others that differ from it in a few numbers and texts alone, as those of a run's ranks do.

    They have one value, with a `Blank` in the place of each difference. It is read when a second pickle comes, and
    again when a later one differs in further places. Pickles of one family have the same opcodes, so that what holds
    for the first one, of its size, depth and classes, holds for all.
    """

    def __init__(self, data: bytes, scan: PickleScan, foreign: Mapping[Name, int], key: object) -> None:
        self.key, self._data, self._scan, self._foreign = key, data, scan, foreign
        self._blanks: set[tuple[int, int]] = set()
        """First byte in the pickle, and the byte after the last one, of each opcode in which others differ."""
        self._parts: list[bytes] | None = None
        """The bytes between blanks; None before the value is read."""
        self._value: object = None
        self._is_alone = False
        """Whether a difference was in a key, or in the numbers of a tensor, which builders check."""

    def read(
        self,
        data: bytes,
        origin: Origin,
        builders: Mapping[tuple[str, str], Builder],
        load_global: Callable[[str, str], object],
        load_persistent: Callable[[object], object] | None,
    ) -> Pickled | None:
        """Return the value of a pickle; None if it is not of this family. The arguments are those of `read_pickle`."""
        own = self._find_own(data)
        if own is None:
            blanks = None if self._is_alone else _find_differences(self._data, self._scan, data)
            if blanks is None or len(blanks | self._blanks) > _MAX_BLANKS:
                return None
            self._blanks |= blanks
            edges = [0, *(edge for blank in sorted(self._blanks) for edge in blank), len(self._data)]
            self._parts = [self._data[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]
            try:
                self._value = _TemplateReader(self._parts, origin, builders, load_global, load_persistent).read()
            except XrankError:
                self._is_alone, self._parts = True, None
            own = self._find_own(data)
        return None if own is None else Pickled(self._value, self._foreign, own, self.key)

    def _find_own(self, data: bytes) -> tuple[object, ...] | None:
        """Return what a pickle has in the places of the blanks; None if it differs in others."""
        own, at = [], 0
        for k, part in enumerate(self._parts or ()):
            if k:
                leaf = _read_leaf(data, at)
                if leaf is None:
                    return None
                own.append(leaf[0])
                at = leaf[1]
            if not data.startswith(part, at):
                return None
            at += len(part)
        return tuple(own) if self._parts and at == len(data) else None


PickleFamilies: TypeAlias = MutableSequence[PickleFamily]


def new_families() -> PickleFamilies:
    """Return the families of no pickles yet."""
    return deque(maxlen=_MAX_FAMILIES)


class _TemplateReader(PickleReader):
    """Reads the first pickle of a family, with blanks between its parts."""

    def __init__(
        self,
        parts: Sequence[bytes],
        origin: Origin,
        builders: Mapping[tuple[str, str], Builder],
        load_global: Callable[[str, str], object],
        load_persistent: Callable[[object], object] | None,
    ) -> None:
        self._cuts = [PickleRun(()) for _ in parts[1:]]
        self._blanks = map(Blank, range(len(self._cuts)))
        super().__init__(bytes([RUN]).join(parts), origin, builders, load_global, load_persistent)

    def scan(self, data: bytes, origin: Origin, max_made_nbytes: int) -> PickleScan:
        return PickleScan(data, origin, max_made_nbytes, self._cuts)

    def take_run(self, operands: tuple[object, ...]) -> Blank:
        return next(self._blanks)

    def call(self, operands: tuple[object, object], kwargs: object = None) -> object:
        target, args = operands
        is_built = isinstance(target, InertRecord) and (target.module, target.name) in self.builders
        if is_built and _has_blank(args):  # builders look at the values
            raise ValueError("built from values that differ between pickles")
        return super().call(operands, kwargs)


def _has_blank(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_blank, value.values()))
    return any(map(_has_blank, value)) if isinstance(value, (tuple, list)) else isinstance(value, Blank)


def _find_differences(data: bytes, scan: PickleScan, other: bytes) -> set[tuple[int, int]] | None:
    """Return the spans of the opcodes in which another pickle differs; None if it differs in more than leaves."""
    found: set[tuple[int, int]] = set()
    at = there = 0
    while len(found) <= _MAX_BLANKS:
        num_same = _count_same(data[at:], other[there:])
        if at + num_same == len(data) or there + num_same == len(other):
            return found if len(data) - at == len(other) - there else None
        start = scan.start_of(at + num_same)
        leaf, other_leaf = _read_leaf(data, start), _read_leaf(other, start - at + there)
        if leaf is None or other_leaf is None:
            return None
        found.add((start, leaf[1]))
        at, there = leaf[1], other_leaf[1]
    return None


def _count_same(a: bytes, b: bytes) -> int:
    """Return the number of bytes with which both begin."""
    nbytes = min(len(a), len(b))
    differs = np.frombuffer(a, np.uint8, nbytes) != np.frombuffer(b, np.uint8, nbytes)
    first = int(differs.argmax()) if nbytes else 0
    return first if nbytes and differs[first] else nbytes


def _read_leaf(data: bytes, at: int) -> tuple[object, int] | None:
    """Return the number or the text of an opcode, and the byte after it; None for another opcode or a damaged one."""
    opcode = data[at : at + 1]
    if not opcode or opcode not in _LEAF_OPCODES:
        return None
    is_text, start = opcode[0] in _COUNTED, at + 1 + _COUNTED.get(opcode[0], 0)
    end = start + int.from_bytes(data[at + 1 : start], "little") if is_text else at + OPCODE_LENGTHS[opcode[0]]
    if end > len(data):
        return None
    with suppress(UnicodeDecodeError):
        raw = data[start:end]
        return raw.decode() if is_text else int.from_bytes(raw, "little", signed=opcode == pickle.BININT), end
    return None
