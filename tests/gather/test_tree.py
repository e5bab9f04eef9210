"""Values as trees and back; refused values; and hostile trees, which run nothing."""

import dataclasses
import enum
import json
import math
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from xrank.errors import UnsafeError, UsageError
from xrank.gather.tree import pack, unpack
from xrank.testing.workspace_contract import has_same_bytes, tensor_zoo


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
class Late:
    value: int = dataclasses.field(init=False)


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
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value):
    back = through(value)
    assert back == value and type(back) is type(value)


def test_not_a_number_and_signed_zero_survive():
    back = through([math.nan, -0.0])
    assert math.isnan(back[0]) and math.copysign(1, back[1]) == -1


def test_dataclasses_are_rebuilt_field_by_field():
    layer = Layer(Linear(torch.arange(3), activation=Activation.GELU), Path("out"), {0: Layer.Place(1)})
    back = through(layer)
    assert type(back) is Layer and type(back.linear) is Linear and back.path == Path("out")
    assert torch.equal(back.linear.weight, torch.arange(3)) and back.linear.bias is None
    assert back.linear.activation is Activation.GELU and back.extra == {0: Layer.Place(1)}
    assert back.linear.made == 1, "the fields are sent; __post_init__ does not run again"


def test_a_field_without_a_value_stays_without():
    assert not hasattr(through(Late()), "value")
    late = Late()
    late.value = 3
    assert through(late).value == 3


def test_ties_survive_and_other_views_stay_apart():
    x = torch.arange(12).view(3, 4)
    back = through(
        {"a": x, "b": [x, x.view(3, 4), x.t(), x[1:], x.view(torch.uint8)], "c": torch.nn.Parameter(x.float())}
    )
    assert back["a"] is back["b"][0] is back["b"][1]
    assert len({id(t) for t in back["b"][1:]}) == 4
    assert not back["c"].requires_grad


def test_every_kind_of_tensor_is_packed():
    for name, tensor in tensor_zoo().items():
        assert has_same_bytes(through({"x": tensor})["x"], tensor), name


def make_class() -> object:
    @dataclasses.dataclass
    class Local:
        x: int = 0

    return Local()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": {1, 2}}, "['a']"),
        ([lambda: 0], "function"),
        (b"bytes", "bytes"),
        (object(), "object"),
        (Linear, "type"),
        (json, "module"),
        (make_class(), "its module does not contain"),
        (dataclasses.make_dataclass("Nameless", ["x"])(1), "its module does not contain"),
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
    for tree in (["c", "antigravity:fly", []], ["e", "antigravity:Fly", "A"]):
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
        unpack(["c", "lazy_module:Config", []], [])
    assert asked == []


HERE = __name__
HOSTILE = [
    ["c", "os:system", [["command", "touch ran"]]],
    ["c", "builtins:eval", []],
    ["c", "builtins:object", []],
    ["c", "os:path", []],
    ["c", "os", []],
    ["c", ":", []],
    ["c", 3, []],
    ["c", f"{HERE}:Linear.__init__", []],
    ["c", f"{HERE}:Linear", [["__class__", 1]]],
    ["c", f"{HERE}:Linear", [["__dict__", ["d", []]]]],
    ["c", f"{HERE}:Linear", 5],
    ["c", f"{HERE}:made_by_a_function", []],
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
        ["c", f"{__name__}:Noted", [["value", ["?"]]]],
        ["c", f"{__name__}:Noted", [["value", 1], ["other", 2]]],
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
        with pytest.raises((UnsafeError, ValueError)):
            unpack(tree, [torch.ones(1)])
