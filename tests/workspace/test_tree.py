"""Values as trees and back; refused values; and hostile trees, which run nothing."""

import collections
import dataclasses
import enum
import json
import math
import sys
import types
from collections import Counter, OrderedDict, defaultdict
from functools import cached_property
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch

from xrank.errors import UnsafeError, UsageError
from xrank.ranks.exchange import pack, unpack
from xrank.testing.workspace_contract import has_same_bytes


class Activation(enum.Enum):
    RELU = "relu"
    GELU = "gelu"


class Bits(enum.Flag):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Linear:
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    activation: Activation = Activation.RELU
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True)
class Layer:
    linear: Linear
    path: Path
    extra: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @dataclasses.dataclass(frozen=True, slots=True)
    class Place:
        stage: int
        names: tuple[str, ...] = ()


@dataclasses.dataclass
class Noted:
    """Counts its ends, as those count that hold something."""

    num_ended: ClassVar[int] = 0
    value: int = 0

    def __del__(self) -> None:
        Noted.num_ended += 1


@dataclasses.dataclass
class DictWithFields(dict):
    value: int = 0


@dataclasses.dataclass
class Renamed:
    """Reads and writes attributes under other names, as transformers' configs do with `attribute_map`."""

    width: int = 1
    calls: ClassVar[list[str]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        Renamed.calls.append(name)
        super().__setattr__("width" if name == "hidden" else name, value)

    def __getattr__(self, name: str) -> Any:
        Renamed.calls.append(name)
        raise AttributeError(name)

    @property
    def depth(self) -> int:
        return self.__dict__["_depth"]

    @depth.setter
    def depth(self, value: int) -> None:
        Renamed.calls.append("depth")
        self.__dict__["_depth"] = value

    @cached_property
    def area(self) -> int:
        return self.width * 10


@dataclasses.dataclass
class Base:
    __slots__ = ("hidden",)
    hidden: int


@dataclasses.dataclass
class Slotted(Base):
    """A slot of its own, one of its base, and a dict."""

    other: int = 3


T = TypeVar("T")


@dataclasses.dataclass
class Box(Generic[T]):
    item: T


class OwnDict(dict):
    pass


class OwnList(list):
    pass


class OwnPath(type(Path())):
    pass


class OwnText(str):
    pass


class Foreign:
    """A class of no known kind that can write itself as a dict."""

    def to_dict(self) -> dict[str, Any]:
        return {}


class Pair(NamedTuple):
    left: int
    right: int


def through(value: object) -> Any:
    """Return a value after the way through text that a message takes."""
    tree, tensors = pack(value)
    return unpack(json.loads(json.dumps(tree)), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -(1 << 80), 1.5, math.inf, -math.inf, "", "ü\ud800\0", [], (), {}, [None, [()]],
        {1: "a", "1": "b", None: 0, (1, (2,)): [], 2.5: {}, False: 3}, torch.bfloat16, torch.float8_e4m3fn,
        Path("/a/b"), Activation.GELU, Bits.HIGH, ["t", 0], ["c", "builtins:eval", []], {"d": ["d", []]},
        {Activation.RELU: Path("x"), torch.int8: 1}, Layer.Place(2, ("a",)),
        {1, 2}, set(), frozenset({Path("a")}), {frozenset({1}): {2}}, torch.Size([2, 0]), [torch.Size(())],
        OrderedDict(b=1, a=[2]), OrderedDict(), Counter("aab"), defaultdict(list, a=[1]), defaultdict(None, {1: 2}),
        PurePosixPath("/a/b"), PureWindowsPath("c:/a"), {"a": OrderedDict(x=torch.Size([1]))},
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value):
    back = through(value)
    assert back == value and type(back) is type(value)


def test_every_attribute_of_a_dataclass_comes_back_and_none_of_its_code_runs():
    sent = object.__new__(Renamed)
    sent.first = None
    sent.hidden, sent.extra, sent.depth = 5, {"quant": [1]}, 7
    sent._private = OrderedDict(a=1)
    assert sent.area == 50
    Renamed.calls.clear()
    back = through(sent)
    assert Renamed.calls == []
    assert vars(back) == vars(sent) == {
        "first": None, "width": 5, "extra": {"quant": [1]}, "_depth": 7, "_private": OrderedDict(a=1), "area": 50,
    }  # fmt: skip
    assert list(vars(back)) == list(vars(sent)) and type(back._private) is OrderedDict


def test_slots_come_back_also_beside_a_dict():
    sent = Slotted(1)
    sent.note = "kept"
    back = through(sent)
    assert (back.hidden, back.other, back.note) == (1, 3, "kept")
    assert vars(back) == {"other": 3, "note": "kept"}
    del sent.hidden
    assert not hasattr(through(sent), "hidden")


def test_the_type_arguments_of_a_generic_class_stay_behind():
    back = through(Box[int](3))
    assert back == Box(3) and vars(back) == {"item": 3}


def test_an_attribute_that_cannot_be_sent_is_named():
    sent = Linear()
    sent.hook = print
    with pytest.raises(UsageError, match=r"the value\.hook is a builtins\.builtin_function_or_method"):
        pack(sent)
    sent = Linear()
    vars(sent)["__call__"] = 1
    with pytest.raises(UsageError, match="the attribute '__call__'"):
        pack(sent)
    with pytest.raises(UsageError, match=r"the value\['a'\]\._metadata\['x'\] is a"):
        tagged = OrderedDict()
        tagged._metadata = {"x": object()}
        pack({"a": tagged})


def test_a_modules_state_dict_comes_back_with_its_versions():
    for module in (torch.nn.BatchNorm1d(2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())):
        sent = module.state_dict()
        back = through(sent)
        assert type(back) is OrderedDict and list(back) == list(sent)
        assert back._metadata == sent._metadata and type(back._metadata) is OrderedDict
        assert pack(sent)[0][2][0] == "m", "by the short way"
        assert module.load_state_dict(back).missing_keys == []
    sent._metadata["extra"] = torch.ones(1)
    back = through(sent)
    assert has_same_bytes(back["0.weight"], sent["0.weight"]) and back._metadata["extra"].item() == 1


def test_a_model_of_pydantic_comes_back_without_its_validators(monkeypatch):
    """A stand-in keeps its state as pydantic's models do: `make oracle` tries the real ones."""
    pydantic = types.ModuleType("pydantic")
    pydantic.BaseModel = BaseModel
    monkeypatch.setitem(sys.modules, "pydantic", pydantic)
    sent = object.__new__(Model)
    sent.__dict__["bits"] = 8
    sent.__pydantic_fields_set__ = {"bits"}
    back = through(sent)
    assert type(back) is Model and vars(back) == {"bits": 8} and back.__pydantic_fields_set__ == {"bits"}
    monkeypatch.delitem(sys.modules, "pydantic")
    with pytest.raises(UsageError, match="Model, which cannot be sent"):
        pack(sent)


class BaseModel:
    __slots__ = ("__dict__", "__pydantic_fields_set__")
    __pydantic_fields__: ClassVar[dict[str, Any]] = {"bits": int}

    def __init__(self) -> None:
        raise AssertionError


class Model(BaseModel):
    pass


def test_ties_survive_and_other_views_stay_apart():
    x = torch.arange(12).view(3, 4)
    back = through(
        {"a": x, "b": [x, x.view(3, 4), x.t(), x[1:], x.view(torch.uint8)], "c": torch.nn.Parameter(x.float())}
    )
    assert back["a"] is back["b"][0] is back["b"][1]
    assert len({id(t) for t in back["b"][1:]}) == 4
    assert not back["c"].requires_grad


def make_class() -> object:
    @dataclasses.dataclass
    class Local:
        x: int = 0

    return Local()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": bytearray()}, "['a']"),
        ({"a": {(b"",)}}, "an item of the value['a'][0] is a builtins.bytes"),
        ({"a": OwnDict()}, "the value['a'] is a"),
        (OwnList(), "OwnList"),
        (OwnPath("a"), "OwnPath"),
        (OwnText("a"), "OwnText"),
        (Pair(1, 2), "Pair"),
        (torch.ones(2).max(dim=0), "torch.return_types.max"),
        (collections.deque(), "deque"),
        (collections.UserDict(), "UserDict"),
        (types.MappingProxyType({}), "mappingproxy"),
        (defaultdict(Linear), "default_factory"),
        ([lambda: 0], "function"),
        (b"bytes", "bytes"),
        (object(), "object"),
        (Linear, "type"),
        (json, "module"),
        (make_class(), "not at the top level of its module"),
        (dataclasses.make_dataclass("Nameless", ["x"])(1), "not at the top level of its module"),
        (DictWithFields(), "DictWithFields"),
        (Bits.LOW | Bits.HIGH, "Bits"),
        (torch.eye(2).to_sparse(), "layout"),
        ([torch.empty(2, device="meta")], "meta"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "NestedTensor"),
        (torch.device("cpu"), "device"),
        (types.SimpleNamespace(), "SimpleNamespace"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_values_that_cannot_be_sent_are_refused_with_their_place(value, said):
    with pytest.raises(UsageError) as raised:
        pack(value)
    assert said in str(raised.value)


def test_a_tensor_whose_storage_was_freed_is_refused_before_it_is_read():
    for tensor in (torch.ones(3), torch.ones(3)[1:], torch.ones(3, 4).t()[1:], torch.nn.Parameter(torch.ones(2))):
        tensor.untyped_storage().resize_(0)
        for value in (tensor, {"a": torch.ones(2), "freed": tensor}):
            with pytest.raises(UsageError, match="has no memory: its storage was freed"):
                pack(value)
    short = torch.ones(8)[2:].as_strided((2, 2), (4, 1))
    pack(short)
    short.untyped_storage().resize_(7 * 4)  # it reaches to the eighth element
    with pytest.raises(UsageError, match="freed"):
        pack(short)


def test_values_in_themselves_are_refused():
    cycle: list[Any] = []
    cycle.append({"again": cycle})
    deep: Any = None
    for _ in range(5000):
        deep = [deep]
    for value in (cycle, deep):
        with pytest.raises(UsageError, match="contains itself"):
            pack(value)


def test_a_subclass_of_tensor_is_refused():
    class Scaled(torch.Tensor):
        pass

    with pytest.raises(UsageError, match="Scaled"):
        pack({"x": torch.ones(2).as_subclass(Scaled)})


@pytest.mark.ranks(2)
def test_a_dtensor_is_refused_with_what_to_do(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(UsageError) as raised:
        pack({"w": sharded})
    assert "DTensor" in str(raised.value) and "to_local" in str(raised.value.next_step)


def test_a_class_of_a_module_not_imported_is_named_and_not_imported():
    assert "antigravity" not in sys.modules
    for tree in (["c", "antigravity:fly", [], []], ["e", "antigravity:Fly", "A"]):
        with pytest.raises(UsageError, match="antigravity") as raised:
            unpack(tree, [])
        assert "import antigravity" in str(raised.value.next_step)
    assert "antigravity" not in sys.modules


def test_a_module_that_imports_on_demand_is_not_asked(monkeypatch):
    lazy = types.ModuleType("lazy_module")
    asked = []
    lazy.__getattr__ = asked.append
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    with pytest.raises(UsageError):
        unpack(["c", "lazy_module:Config", [], []], [])
    assert asked == []


HERE = __name__
HOSTILE = [
    ["c", "os:system", [["command", "touch ran"]], []],
    ["c", "builtins:eval", [], []],
    ["c", "builtins:object", [], []],
    ["c", "os:path", [], []],
    ["c", "os", [], []],
    ["c", ":", [], []],
    ["c", 3, [], []],
    ["c", f"{HERE}:Linear.__init__", [], []],
    ["c", f"{HERE}:Linear", [["__class__", 1]], []],
    ["c", f"{HERE}:Linear", [["__class__", 1]], ["__class__"]],
    ["c", f"{HERE}:Linear", [["__dict__", ["d", []]]], []],
    ["c", f"{HERE}:Linear", [["__dict__", ["d", []]]], ["__dict__"]],
    ["c", f"{HERE}:Linear", [[3, 1]], [3]],
    ["c", f"{HERE}:Linear", [["strange", 1]], 5],
    ["c", f"{HERE}:Linear", [["strange", 1]], []],
    ["c", f"{HERE}:Layer.Place", [["strange", 1]], ["strange"]],
    ["c", f"{HERE}:Linear", 5, []],
    ["c", f"{HERE}:Linear", []],
    ["c", f"{HERE}:Foreign", [], []],
    ["c", f"{HERE}:DictWithFields", [], []],
    ["c", f"{HERE}:Activation", [], []],
    ["c", "subprocess:Popen", [["args", "touch ran"]], ["args"]],
    ["c", "tempfile:_TemporaryFileCloser", [["name", "ran"], ["delete", True]], ["name", "delete"]],
    ["c", f"{HERE}:made_by_a_function", [], []],
    ["o", "OrderedDict", 3, [], None],
    ["o", "dict", ["d", []], [], None],
    ["o", "OrderedDict", ["d", []], [[["l", []], 1]], None],
    ["o", "defaultdict", ["d", []], [["a", 1]], None],
    ["o", "defaultdict", ["d", []], [], "eval"],
    ["x", [["l", []]]],
    ["x", 3],
    ["h", ["a"]],
    ["h", 3],
    ["q", "Path", "a"],
    ["q", "PurePosixPath", 3],
    ["e", "builtins:eval", "print"],
    ["e", f"{HERE}:Activation", "__init__"],
    ["e", f"{HERE}:Activation", "mro"],
    ["e", f"{HERE}:Linear", "weight"],
    ["y", "load"],
    ["y", "os"],
    ["t", 7],
    ["t"],
    ["d", [[["l", []], 1]]],
    ["d", 3],
    ["p", []],
    ["?", 1],
    [],
    [[]],
    {"d": 1},
]


@pytest.mark.parametrize("tree", HOSTILE, ids=map(str, range(len(HOSTILE))))
@pytest.mark.parametrize("inside", [False, True])
def test_a_strangers_tree_runs_nothing(tree, inside, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UnsafeError, UsageError)):
        unpack(["l", [["d", [["key", tree]]]]] if inside else tree, [])
    assert list(tmp_path.iterdir()) == []


def test_a_tree_nested_without_end_is_refused():
    tree: list[Any] = ["l", []]
    for _ in range(20_000):
        tree = ["l", [tree]]
    with pytest.raises(UnsafeError):
        unpack(tree, [])


def test_numpy_scalars_keep_their_type():
    numbers = [np.float32(0.1), np.float64(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.float16("nan")]
    tree, tensors = pack(numbers)
    back = unpack(json.loads(json.dumps(tree)), tensors)
    assert [(type(a), a.tobytes()) for a in back] == [(type(a), a.tobytes()) for a in numbers]
    for tree in (["s", "str", "x"], ["s", "object", 1], ["s", "float64", "1"], ["s", "void", 3]):
        with pytest.raises(UnsafeError):
            unpack(tree, [])


def test_a_dataclass_is_made_only_when_all_of_it_can_be():
    before = Noted.num_ended
    for tree in (
        ["c", f"{__name__}:Noted", [["value", ["?"]]], []],
        ["c", f"{__name__}:Noted", [["value", 1], ["other", 2]], []],
        ["c", f"{__name__}:Noted", [["value", 1], ["__other__", 2]], ["__other__"]],
    ):
        with pytest.raises(UnsafeError):
            unpack(tree, [])
    assert Noted.num_ended == before


# ---- states of many tensors


def states():
    big = torch.arange(100.0)
    yield {f"layer.{i}": big[i : i + 3] for i in range(50)}, "m"
    yield {"a": big[::2], "b": torch.ones(2, 3).t(), "c": torch.tensor(3)}, "m"
    yield {"a": big, "tied": big}, "d"
    yield {"a": big, "of one memory": big[:4]}, "d"
    yield {"empty": torch.empty(0, 3), "b": big}, "d"
    yield {"parameter": torch.nn.Parameter(big), "b": torch.ones(2)}, "d"
    yield {"none": None, "b": big}, "d"
    yield {1: big}, "d"
    yield {}, "d"


@pytest.mark.parametrize(("state", "kind"), list(states()))
def test_a_state_comes_as_it_was_by_the_short_way_and_by_the_long_one(state, kind):
    tree, tensors = pack(state)
    assert tree[0] == kind
    came = unpack(json.loads(json.dumps(tree)), tensors)
    assert list(came) == list(state)
    for name, tensor in state.items():
        assert came[name] is tensor is None or has_same_bytes(came[name], tensor.detach())
        assert tensor is None or not came[name].requires_grad
    ties = [[a is b for a in came.values()] for b in came.values()]
    assert ties == [[a is b for a in state.values()] for b in state.values()]


def test_states_that_cannot_be_sent_are_refused_by_name():
    with pytest.raises(UsageError, match=r"\['sparse'\].*layout"):
        pack({"a": torch.ones(2), "sparse": torch.eye(2).to_sparse()})


def test_a_tree_that_names_more_tensors_than_came_is_refused():
    for tree in (["m", ["a", "b"]], ["m"], ["m", 3]):
        with pytest.raises(UnsafeError):
            unpack(tree, [torch.ones(1)])
