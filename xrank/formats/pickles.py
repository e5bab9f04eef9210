"""Read a pickle as data: plain values are built, everything else becomes an inert record, and nothing is called."""

from __future__ import annotations

import pickletools
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from typing import TypeAlias

from xrank.errors import XrankError
from xrank.formats.regular_file import Origin, quote

MAX_DEPTH = 200
"""Largest nesting depth of a state, so callers can walk it by plain recursion."""


@dataclass(eq=False, slots=True, repr=False)
class InertRecord:
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


def build_nested_class(args: tuple[object, ...]) -> object:
    """Return the record of a nested class from the arguments of a ``getattr``; or NotImplemented.

    Protocol 2 has no other way to name it (Lib/pickle.py: save_global). torch saves objects of one such class; other
    names are not accepted.
    """
    match args:
        case (InertRecord(module=module, name="ShardedTensor" as name, args=None), "ProcessGroupState" as inner) if (
            module == "torch.distributed._shard.sharded_tensor.api"
        ):
            return InertRecord(module, f"{name}.{inner}")
    return NotImplemented


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
    """Return the error for a value that should be plain data or a tensor.

    An object that a framework writes, or that is recognized by its parts, is a `UsageError`; others are unsafe.

    Args:
        record: the value, usually an `InertRecord`.
        origin: the file.
        place: where it is in the file, such as a tensor's name.
    """
    if not isinstance(record, InertRecord):
        return origin.corrupt(f"{place or 'its content'} has the wrong kind", got=type(record).__name__)
    kind, start = quote(f"{record.module}.{record.name}"), f"{place} is" if place else "holds"
    # torch/_tensor.py: _rebuild_from_type_v2 makes all tensors of other classes, such as torchao's quantized ones.
    if (record.module, record.name) == ("torch._tensor", "_rebuild_from_type_v2"):
        kinds = [f"{a.module}.{a.name}" for a in record.args or () if isinstance(a, InertRecord) and a.args is None]
        own = next((quote(kind) for kind in kinds if not kind.startswith("torch.")), None)
        return origin.usage(
            f"{start} a tensor "
            + ("with attributes of its own" if own is None else f"of {own}, whose layout xrank does not know"),
            got=own,
            want="plain tensors",
            next_step="save the model with save_pretrained, as safetensors, or save what dequantize() of these tensors "
            "returns; then gather that",
        )
    # torch/nn/modules/module.py: Module.__init__
    if isinstance(record.state, dict) and {"_parameters", "_modules"} <= record.state.keys():
        return origin.usage(
            f"{start} a whole module, an object of {kind}, which only its own code can make",
            got=kind,
            want="the state dict of the module",
            next_step="load it where its class is, then save its state_dict() with torch.save; gather that",
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


def check_tree(value: object, max_nodes: int, origin: Origin) -> None:
    """Raise an error if a walk of the tree would be endless, too long or too deep.

    A pickle may hold a list that contains itself, or 60 lists that each hold the previous one twice: small in memory,
    but endless to walk. The contents of inert records are checked as separate trees.

    Args:
        value: the tree.
        max_nodes: largest number of nodes of the walk, which visits shared nodes again each time.
        origin: the file, for errors.

    Raises:
        CorruptError: the tree is too deep or has too many nodes.
    """
    sizes: dict[int, int] = {}
    records: set[int] = set()
    roots = [value]
    while roots:
        root = roots.pop()
        path = [_Visit(root)]
        total = 0
        while path:
            visit = path[-1]
            for child in visit.children:
                if isinstance(child, InertRecord) and id(child) not in records:
                    records.add(id(child))
                    roots += [child.args, child.kwargs, child.state, child.items]
                known = sizes.get(id(child))
                if known is None and _children(child) is not None:
                    # A container inside itself also ends here: its size stays unknown while it is open.
                    if len(path) >= MAX_DEPTH:
                        raise origin.corrupt(
                            "the pickled state is nested too deep, or holds itself", want=f"at most {MAX_DEPTH} levels"
                        )
                    path.append(_Visit(child))
                    break
                visit.size += 1 if known is None else known
            else:
                path.pop()
                total = visit.size
                if total > max_nodes:
                    raise origin.corrupt("the pickled state repeats itself without bound", want=f"{max_nodes} nodes")
                if path:
                    sizes[id(visit.node)] = total
                    path[-1].size += total


class _Visit:
    """A container whose nodes are being counted."""

    __slots__ = ("children", "node", "size")

    def __init__(self, node: object) -> None:
        self.node = node
        self.children = iter([node] if isinstance(node, InertRecord) else (_children(node) or ()))
        self.size = 1


def _children(node: object) -> Iterable[object] | None:
    """Return the items of a container, of a dict keys and values; None for a leaf."""
    if isinstance(node, dict):
        return [part for pair in node.items() for part in pair]
    if isinstance(node, (list, tuple, set, frozenset)):
        return node
    return None


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


def _build_ordered_dict(args: tuple[object, ...]) -> object:
    if not args:
        return OrderedDict()
    return NotImplemented


def _build_bytes(args: tuple[object, ...]) -> object:
    # Protocol 2 writes bytes as _codecs.encode(text, "latin1") (Lib/pickle.py: save_bytes).
    if len(args) == 2 and isinstance(args[0], str) and args[1] == "latin1":
        return args[0].encode("latin1")
    return NotImplemented


def _build_empty_bytes(args: tuple[object, ...]) -> object:
    return b"" if not args else NotImplemented


def _build_complex(args: tuple[object, ...]) -> object:
    match args:
        case (float(real), float(imaginary)):
            return complex(real, imaginary)
    return NotImplemented


# Protocol 2 writes Python 2's name of the builtins module (Lib/_compat_pickle.py).
PLAIN_BUILDERS: Mapping[tuple[str, str], Builder] = {
    ("collections", "OrderedDict"): _build_ordered_dict,
    ("_codecs", "encode"): _build_bytes,
    **{
        (module, name): builder
        for module in ("builtins", "__builtin__")
        for name, builder in (
            ("set", _collection_builder(set)),
            ("frozenset", _collection_builder(frozenset)),
            ("bytes", _build_empty_bytes),
            ("complex", _build_complex),
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


MAX_MADE_NBYTES = 1 << 28
"""Largest memory of the objects that a pickle makes, in bytes; a tensor takes about 1,000."""
STEPS_A_CHECK = 4096
"""Opcodes between two checks of the memory."""
MARK_NBYTES = 72
"""Memory of the stack below a mark."""
MEMO_NBYTES = 16
"""Memory of one memo number."""
NAME_NBYTES = 600
"""Memory of the record of a class or function, and of its names; a pickle that repeats a name makes it once."""
ODD_NBYTES = 256
"""What a step counts that no pickler writes, such as a discarded value: files with millions of them cost time."""
COSTS = [8] * 256
"""Opcode -> bytes of memory of the object that it makes.

Empty lists, dicts and sets count twice: files with millions of them are made to cost time.
"""
for _opcodes, _nbytes in {
    "\x85\x86\x87t": 64,
    "]}": 136,
    "\x91": 224,
    "\x8f": 448,
    "R\x81\x92Q": 216,
    "01\x80\x95": ODD_NBYTES,
}.items():
    for _code in _opcodes:
        COSTS[ord(_code)] = _nbytes
for _code in "JMGX\x8cCB":
    COSTS[ord(_code)] = 40
for _code in "as\x8a":  # items alone in their list or dict, and integers of 4 bytes or more, are few
    COSTS[ord(_code)] = 64


class Memo(dict[int, object]):
    """The memo. Pickle numbers its values in order, and a list of them takes a tenth of a dict's memory."""

    def __init__(self) -> None:
        super().__init__()
        self._ordered: list[object] = []

    def __setitem__(self, number: int, value: object) -> None:
        ordered = self._ordered
        if number <= len(ordered) and super().__len__():
            self.pop(number, None)
        if number == len(ordered):
            ordered.append(value)
        elif number < len(ordered):
            ordered[number] = value
        else:
            super().__setitem__(number, value)

    def __missing__(self, number: int) -> object:
        return self._ordered[number]

    def __len__(self) -> int:
        return super().__len__() + len(self._ordered)


# ruff: noqa: D102 (`pickletools.opcodes` documents the opcode of each method)


MAX_OPCODES = 20_000_000
"""Largest number of opcodes of a pickle; a tensor takes about 50."""

MAX_INTEGER_NBYTES = 256

_NEVER_MEMOIZED = frozenset({type(None), bool, int, float})


class PickleMachine:
    """The pickle virtual machine without code: a stack, the stacks below its marks, and the memo."""

    max_made_nbytes = MAX_MADE_NBYTES

    def __init__(
        self,
        data: bytes,
        origin: Origin,
        builders: Mapping[tuple[str, str], Builder],
        load_global: Callable[[str, str], object],
        load_persistent: Callable[[object], object] | None,
    ) -> None:
        self.data = data
        self.at = 0
        self.origin = origin
        self.builders = builders
        self.load_global = load_global
        self.load_persistent = load_persistent
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: MutableMapping[int, object] = Memo()
        self.memoized: object = self.memo
        """The object that was memoized last."""
        self.globals: dict[tuple[str, str], object] = {}
        """Values of the classes and functions that the pickle names."""
        self.made_nbytes = 0
        """Bytes of the objects that the pickle made, as `COSTS` counts them."""
        self.named: dict[tuple[str, str], int] = {}
        """Each class or function that the pickle names -> the first byte after its first name."""
        self.calls: MutableSequence[InertRecord] = []
        """Calls that stay inert."""
        self.built: set[tuple[str, str]] = set()
        """Names whose calls became plain values."""
        self.dropped: list[object] = []
        """Attributes of dicts, which are left out."""

    def run(self) -> object:
        data, costs, steps = self.data, COSTS, [STEPS.get(opcode) for opcode in range(256)]
        for done in range(0, MAX_OPCODES, STEPS_A_CHECK):
            made_nbytes = 0
            for _ in range(min(STEPS_A_CHECK, MAX_OPCODES - done)):
                opcode = data[self.at]
                self.at += 1
                step = steps[opcode]
                if step is not None:
                    step(self)
                    made_nbytes += costs[opcode]
                elif opcode == STOP:
                    return self.stop()
                else:
                    raise self.refusal(opcode)
            self.check_size(made_nbytes)
        raise self.origin.corrupt("the pickle takes too many steps", want=f"at most {MAX_OPCODES}")

    def check_size(self, made_nbytes: int) -> None:
        """Refuse a pickle whose objects take too much memory; a small file may describe many.

        Args:
            made_nbytes: bytes of the objects made since the last check.
        """
        self.made_nbytes += made_nbytes
        if self.made_nbytes + MARK_NBYTES * len(self.marks) + MEMO_NBYTES * len(self.memo) > self.max_made_nbytes:
            raise self.origin.usage(
                "the pickle holds more objects than xrank reads from one file",
                got=f"{self.max_made_nbytes >> 20} MB of objects in {self.at:,} of its {len(self.data):,} bytes",
                want=f"{self.max_made_nbytes >> 20} MB at most",
                next_step="if you wrote the file, save its tensors in several files, or as safetensors",
            )

    def stop(self) -> object:
        """Return the only value on the stack."""
        value = self.stack.pop()
        if self.stack or self.marks or self.at != len(self.data):
            raise ValueError("values or bytes left over")
        return value

    def refusal(self, opcode: int) -> XrankError:
        known = [info.name for info in pickletools.opcodes if info.code == chr(opcode)]
        if not known:
            return self.origin.corrupt(f"the pickle is damaged at its byte {self.at - 1}", got=f"opcode {opcode:#04x}")
        return self.origin.unsafe(f"the pickle uses opcode {known[0]}, which torch.save never writes", got=known[0])

    def take(self, nbytes: int) -> bytes:
        end = self.at + nbytes
        # Check before slicing, so a false length allocates nothing.
        if end > len(self.data):
            raise EOFError(f"{quote(nbytes)} bytes wanted, {len(self.data) - self.at} left")
        part = self.data[self.at : end]
        self.at = end
        return part

    def take_int(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def take_byte(self) -> int:
        at = self.at
        self.at = at + 1
        return self.data[at]  # an IndexError at the end

    def take_line(self) -> str:
        end = self.data.index(b"\n", self.at)
        line = self.data[self.at : end].decode("utf-8")
        self.at = end + 1
        return line

    def pop_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def pop_items(self) -> list[object]:
        items = self.pop_mark()
        if not items:  # a pickler adds none where it has none
            self.made_nbytes += ODD_NBYTES
        return items

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def memoize(self, number: int) -> None:
        value = self.stack[-1]
        # A pickler memoizes an object once, and none of these.
        if value is self.memoized or type(value) in _NEVER_MEMOIZED:
            self.made_nbytes += ODD_NBYTES
        self.memoized = self.memo[number] = value

    def skip_protocol(self) -> None:
        protocol = self.take_int(1)
        if protocol > 5:
            raise ValueError(f"protocol {protocol}")

    def push_long(self, length_nbytes: int) -> None:
        nbytes = self.take_int(length_nbytes)
        # Larger integers could not be printed (sys.int_info.default_max_str_digits).
        if nbytes > MAX_INTEGER_NBYTES:
            raise ValueError(f"an integer of {nbytes} bytes")
        self.stack.append(int.from_bytes(self.take(nbytes), "little", signed=True))

    def push_text(self, length_nbytes: int) -> None:
        # As Lib/pickle.py: load_binunicode.
        self.stack.append(self.take(self.take_int(length_nbytes)).decode("utf-8", "surrogatepass"))

    def push_bytes(self, length_nbytes: int) -> None:
        self.stack.append(self.take(self.take_int(length_nbytes)))

    def push_tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError("stack underflow")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def push_marked(self) -> None:
        items = tuple(self.pop_mark())  # first, because it changes the stack
        self.stack.append(items)

    def append(self, items: list[object]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif isinstance(target, InertRecord):
            target.items.extend(items)
        else:
            raise TypeError(f"append to {type(target).__name__}")

    def set_items(self, items: list[object]) -> None:
        target = self.stack[-1]
        pairs = zip(items[::2], items[1::2], strict=True)
        if isinstance(target, dict):
            for key, value in pairs:
                if type(key) is not str:
                    check_key(key)
                target[key] = value
        elif isinstance(target, InertRecord):
            target.items.extend(pairs)
        else:
            raise TypeError(f"set an item of {type(target).__name__}")

    def set_item(self) -> None:
        value, key, target = self.stack.pop(), self.stack.pop(), self.stack[-1]
        if type(target) is dict:
            check_key(key)
            target[key] = value
        else:
            self.set_items([key, value])

    def add_items(self) -> None:
        items = self.pop_items()
        target = self.stack[-1]
        if isinstance(target, set):
            for item in items:
                check_key(item)
            target.update(items)
        elif isinstance(target, InertRecord):
            target.items.extend(items)
        else:
            raise TypeError(f"add to {type(target).__name__}")

    def push_frozenset(self) -> None:
        items = self.pop_mark()
        for item in items:
            check_key(item)
        self.stack.append(frozenset(items))

    def push_global(self) -> None:
        module = self.take_line()
        self.push_named(module, self.take_line())

    def push_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise TypeError("a global's name is not a text")
        self.push_named(module, name)

    def push_named(self, module: str, name: str) -> None:
        key = module, name
        if key not in self.globals:
            self.made_nbytes += NAME_NBYTES
            self.named[key] = self.at
            self.globals[key] = self.load_global(module, name)
        self.stack.append(self.globals[key])

    def call(self, kwargs: object = None) -> None:
        args, target = self.stack.pop(), self.stack.pop()
        if not isinstance(args, tuple):
            raise TypeError("arguments that are not a tuple")
        if not isinstance(target, InertRecord):
            raise TypeError(f"call of {type(target).__name__}")
        if target.args is not None:
            raise self.origin.unsafe(
                f"the pickle calls the result of {quote(f'{target.module}.{target.name}')}",
                got=quote(f"{target.module}.{target.name}"),
            )
        builder = self.builders.get((target.module, target.name))
        made = NotImplemented if builder is None or kwargs else builder(args)
        if made is NotImplemented:
            made = InertRecord(target.module, target.name, args)
            self.calls.append(made)
            if kwargs:
                made.kwargs = _keyword_arguments(kwargs)
        else:
            self.built.add((target.module, target.name))
        self.stack.append(made)

    def call_with_keywords(self) -> None:
        self.call(self.stack.pop())

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
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

    def push_persistent(self) -> None:
        if self.load_persistent is None:
            raise self.origin.unsafe("the pickle refers to data outside itself", got="BINPERSID")
        self.stack.append(self.load_persistent(self.stack.pop()))


def _keyword_arguments(kwargs: object) -> dict[str, object]:
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise TypeError("keyword arguments that are not a dict")
    return kwargs


PROTOCOL = b"\x80"
"""First byte of every pickle since protocol 2."""
STOP = ord(".")
_INT32 = struct.Struct("<i")
_FLOAT = struct.Struct(">d")

# All opcodes of pickle protocols 2 to 5, without the extension registry and out-of-band buffers.
STEPS: dict[int, Callable[[PickleMachine], object]] = {
    ord(code): step
    for code, step in {
        "\x80": PickleMachine.skip_protocol,
        "\x95": lambda m: m.take(8),  # FRAME
        "(": PickleMachine.mark,
        "0": lambda m: m.stack.pop(),
        "1": PickleMachine.pop_mark,
        "N": lambda m: m.stack.append(None),
        "\x88": lambda m: m.stack.append(True),
        "\x89": lambda m: m.stack.append(False),
        "K": lambda m: m.stack.append(m.take_byte()),
        "M": lambda m: m.stack.append(m.take_int(2)),
        "J": lambda m: m.stack.append(_INT32.unpack(m.take(4))[0]),
        "\x8a": lambda m: m.push_long(1),
        "\x8b": lambda m: m.push_long(4),
        "G": lambda m: m.stack.append(_FLOAT.unpack(m.take(8))[0]),
        "\x8c": lambda m: m.push_text(1),
        "X": lambda m: m.push_text(4),
        "\x8d": lambda m: m.push_text(8),
        "C": lambda m: m.push_bytes(1),
        "B": lambda m: m.push_bytes(4),
        "\x8e": lambda m: m.push_bytes(8),
        "\x96": lambda m: m.stack.append(bytearray(m.take(m.take_int(8)))),
        ")": lambda m: m.stack.append(()),
        "\x85": lambda m: m.push_tuple(1),
        "\x86": lambda m: m.push_tuple(2),
        "\x87": lambda m: m.push_tuple(3),
        "t": PickleMachine.push_marked,
        "]": lambda m: m.stack.append([]),
        "a": lambda m: m.append([m.stack.pop()]),
        "e": lambda m: m.append(m.pop_items()),
        "}": lambda m: m.stack.append({}),
        "s": PickleMachine.set_item,
        "u": lambda m: m.set_items(m.pop_items()),
        "\x8f": lambda m: m.stack.append(set()),
        "\x90": PickleMachine.add_items,
        "\x91": PickleMachine.push_frozenset,
        "h": lambda m: m.stack.append(m.memo[m.take_byte()]),
        "j": lambda m: m.stack.append(m.memo[m.take_int(4)]),
        "q": lambda m: m.memoize(m.take_byte()),
        "r": lambda m: m.memoize(m.take_int(4)),
        "\x94": lambda m: m.memoize(len(m.memo)),
        "c": PickleMachine.push_global,
        "\x93": PickleMachine.push_stack_global,
        "R": PickleMachine.call,
        "\x81": PickleMachine.call,  # NEWOBJ: for records the same as a call
        "\x92": PickleMachine.call_with_keywords,
        "b": PickleMachine.build,
        "Q": PickleMachine.push_persistent,
    }.items()
}


MAX_PICKLE_NBYTES = 1 << 29
"""Largest pickle that is read, in bytes; a tensor takes about 150."""


@dataclass(frozen=True, slots=True)
class Pickled:
    """The content of a pickle."""

    value: object
    foreign: Mapping[tuple[str, str], int]
    """(Module, name) of each class or function that frameworks do not write -> the byte that names it first."""


def read_pickle(
    data: bytes,
    origin: Origin,
    *,
    builders: Mapping[tuple[str, str], Builder] = PLAIN_BUILDERS,
    load_global: Callable[[str, str], object] = InertRecord,
    load_persistent: Callable[[object], object] | None = None,
) -> Pickled:
    """Read a pickle; its classes and calls are inert records.

    Args:
        data: exactly the bytes of the pickle.
        origin: the file, for errors.
        builders: (module, name) of a call -> the function that builds its value.
        load_global: returns the value of a global name; the default keeps all names inert.
        load_persistent: returns the value of a persistent id; None: persistent ids are refused.

    Raises:
        CorruptError: the pickle is damaged, too long or too deep.
        UnsafeError: it uses an opcode or a call that needs code to run, or discards the result of a call.
    """
    if len(data) > MAX_PICKLE_NBYTES:
        raise origin.corrupt("the pickle is too long", got=f"{len(data)} bytes", want=f"{MAX_PICKLE_NBYTES} at most")
    machine = PickleMachine(data, origin, builders, load_global, load_persistent)
    value = run_machine(machine)
    check_tree(value, 1_000_000 + 4 * len(data), origin)
    roots = [value, *machine.dropped]
    return Pickled(value, find_foreign_names(machine.named, machine.calls, machine.built, roots, origin))


def run_machine(machine: PickleMachine) -> object:
    """Run a machine and return its value.

    Raises:
        CorruptError: the pickle is damaged, or too long.
        UnsafeError: it uses an opcode or a call that needs code to run.
    """
    try:
        return machine.run()
    except XrankError:
        raise
    # Any other failure, such as a pop from an empty stack or a text that is not UTF-8, means a damaged pickle.
    except Exception as error:
        raise machine.origin.corrupt(
            f"the pickle is damaged near its byte {machine.at}",
            got=f"{type(error).__name__}: {quote(str(error))}",
        ) from error
