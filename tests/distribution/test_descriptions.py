"""Everything with no process group: meshes describe, layouts are checked, models stay whole."""

import threading
import warnings

import pytest
import torch
from torch import nn

import xrank.distribution as api
from tests.distribution.trained_models import PERCEPTRON_RULES, Perceptron
from xrank.distribution import (
    DataParallel,
    DeviceMesh,
    LayoutMap,
    ModelParallel,
    TensorLayout,
    distribute_tensor,
    distribution,
    get_device_count,
    initialize,
    list_devices,
    set_distribution,
)
from xrank.errors import LayoutError, UsageError

MESH = DeviceMesh((2, 4), ("batch", "model"))


@pytest.fixture(autouse=True)
def nothing_in_force():
    yield
    set_distribution(None)


def describe(rules=PERCEPTRON_RULES, **options) -> ModelParallel:
    layout_map = LayoutMap(MESH)
    layout_map.update(rules)
    return ModelParallel(layout_map=layout_map, **options)


def test_keras_eleven_names():
    assert api.__all__ == [
        "DataParallel", "DeviceMesh", "LayoutMap", "ModelParallel", "TensorLayout", "distribute_tensor", "distribution",
        "get_device_count", "initialize", "list_devices", "set_distribution",
    ]  # fmt: skip


def test_devices_of_one_process():
    assert list_devices("CPU") == ["cpu:0"] and get_device_count("cpu") == 1
    with pytest.raises(RuntimeError, match="no device of the kind 'tpu'"):
        list_devices("tpu")


@pytest.mark.parametrize(
    ("environ", "arguments", "message"),
    [
        ({}, ("a:1,b:2", 3, 0), "has 2 jobs, but num_processes is 3"),
        ({"KERAS_DISTRIBUTION_NUM_PROCESSES": "3"}, ("a:1,b:2", None, 0), "has 2 jobs, but num_processes is 3"),
        ({"KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1,b:2"}, (None, 3, 0), "has 2 jobs, but num_processes is 3"),
        ({"KERAS_DISTRIBUTION_NUM_PROCESSES": "many"}, (None, None, None), "KERAS_DISTRIBUTION_NUM_PROCESSES"),
        ({"KERAS_DISTRIBUTION_PROCESS_ID": "first"}, (None, None, None), "KERAS_DISTRIBUTION_PROCESS_ID"),
        ({}, ("a:1", None, 0), "the number of processes, or the index"),
        ({}, ("a:1,b:2", None, None), "the number of processes, or the index"),
        ({}, ("a:1", 2, 2), "the number of processes, or the index"),
    ],
)
def test_a_start_that_is_refused(monkeypatch, environ, arguments, message):
    monkeypatch.setattr("xrank.environment.environ", lambda: environ)
    with pytest.raises(ValueError, match=message):
        initialize(*arguments)


def test_a_start_of_one_process_starts_nothing(monkeypatch):
    monkeypatch.setattr("xrank.environment.environ", dict)
    initialize()
    assert not torch.distributed.is_initialized()


def test_one_distribution_is_in_force_on_each_thread():
    one, other = describe(), describe()
    assert distribution() is None
    set_distribution(one)
    with other.scope() as yielded:
        assert yielded is None and distribution() is other
        seen = []
        thread = threading.Thread(target=lambda: seen.append(distribution()))
        thread.start()
        thread.join()
        assert seen == [None]
        set_distribution("anything")
        assert distribution() == "anything"
    assert distribution() is one
    with pytest.raises(KeyError), other.scope():
        Perceptron()
        raise KeyError
    assert distribution() is one
    set_distribution(None)
    assert distribution() is None


def test_hooks_are_there_while_a_distribution_is():
    from torch.nn.modules import module

    hooks = (module._global_parameter_registration_hooks, module._global_module_registration_hooks)
    before = [len(registered) for registered in hooks]
    with describe(strict=False).scope():
        assert [len(registered) for registered in hooks] == [count + 1 for count in before]
        model = Perceptron()
        assert model._forward_pre_hooks
    assert [len(registered) for registered in hooks] == before
    assert not any(part._forward_pre_hooks for part in model.modules())
    with pytest.raises(KeyError), describe().scope():
        model = Perceptron()
        set_distribution(describe())
        nn.Linear(2, 2)
        raise KeyError
    assert [len(registered) for registered in hooks] == before
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_rules_are_checked_in_a_description():
    torch.manual_seed(0)
    with describe().scope():
        model = Perceptron()
    torch.manual_seed(0)
    for one, other in zip(model.parameters(), Perceptron().parameters(), strict=True):
        assert type(one) is nn.Parameter and one.equal(other)
    with pytest.raises(LayoutError, match="matches no parameter"), describe({"x": ("model",)}).scope():
        Perceptron()
    with pytest.raises(LayoutError, match="is not divisible by 4"), describe({"weight": ("model",)}).scope():
        nn.Linear(4, 6)
    with describe({"x": ("model",)}).scope():
        pass  # nothing was made


def test_set_distribution_lays_out_at_the_first_use_or_at_its_end():
    set_distribution(describe({"x": ("model",)}))
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(LayoutError, match="matches no parameter"):
        model(torch.ones(1, 2))
    set_distribution(describe({"x": ("model",)}))
    nn.Linear(2, 2)
    with pytest.raises(LayoutError, match="matches no parameter"):
        set_distribution(None)
    assert distribution() is None


def test_names_are_those_of_the_outermost_module():
    seen = []

    class Noting(ModelParallel):
        def lay_out(self, roots):
            seen.append([type(root).__name__ for root in roots])
            return super().lay_out(roots)

    layout_map = LayoutMap(MESH)
    layout_map["0.dense.0.weight"] = ("model",)
    with Noting(layout_map=layout_map).scope():
        nn.Sequential(
            Perceptron(),
            nn.ModuleDict({"x": nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)}),
        )
    assert seen == [["TransformerEncoderLayer", "Sequential"]]  # the encoder copies the layer that it is given
    with Noting(layout_map=layout_map, strict=False).scope():
        model = nn.Sequential(Perceptron())
        model(torch.ones(1, 8))  # used before the end
        model.append(nn.Linear(4, 8))
        model(torch.ones(1, 8))
    assert seen[1:] == [["Sequential"], ["Sequential"]]


def test_layouts_are_asked_for():
    layouts = describe()
    assert str(layouts.get_variable_layout("dense.1.weight", (4, 16))) == "[d0, d1/model]"
    assert layouts.get_variable_layout("norm.weight", (8,)) == TensorLayout((None,), MESH)
    assert layouts.get_tensor_layout("norm.weight") is None
    assert layouts.get_data_layout((8, 3)) == TensorLayout(("batch", None), MESH)
    with pytest.raises(IndexError):
        layouts.get_data_layout(())
    # Fewer axes than dims: the rest is whole. More: refused.
    assert layouts.get_variable_layout("dense.0.bias", (16, 3)).axes == ("model", None)
    with pytest.raises(ValueError, match="more dims than the tensor"):
        layouts.get_variable_layout("dense.1.weight", (4,))
    for arguments in (("dense.0.bias",), (torch.ones(3),)):
        with pytest.raises(LayoutError):
            layouts.get_variable_layout(*arguments)
    assert (layouts.num_model_replicas, layouts.num_processes, layouts.data_shard_id) == (2, 1, 0)
    assert repr(layouts) == "<ModelParallel device_mesh=<DeviceMesh shape=(2, 4), axis_names=('batch', 'model')>>"


def test_model_parallel_takes_what_keras_takes():
    layout_map = LayoutMap(MESH)
    assert ModelParallel(layout_map=layout_map).batch_dim_name == "batch"
    assert ModelParallel(device_mesh=MESH, layout_map=layout_map, batch_dim_name="model").num_model_replicas == 4
    unknown = ModelParallel(layout_map=layout_map, batch_dim_name="x")
    for act in (lambda: unknown.num_model_replicas, lambda: unknown.get_data_layout((2,))):
        with pytest.raises(ValueError, match="'x'"):
            act()
    with pytest.raises(TypeError):
        ModelParallel(layout_map)
    for options, message in (
        ({}, "You must specify a layout_map"),
        ({"layout_map": {}}, "must be a `LayoutMap` instance"),
        ({"layout_map": LayoutMap(None)}, "has no mesh"),
        ({"layout_map": layout_map, "device_mesh": DeviceMesh((8,), ("x",))}, "not the mesh of the layout_map"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelParallel(**options)
    with pytest.warns(UserWarning, match="unknown arguments: strcit"):
        ModelParallel(layout_map=layout_map, strcit=False)


def test_data_parallel_takes_what_keras_takes():
    assert DataParallel().device_mesh.shape == (1,) and DataParallel().batch_dim_name == "batch"
    assert DataParallel(devices=["cpu:0", "cpu:1"]).num_model_replicas == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DataParallel(DeviceMesh((4,), ("x",))).batch_dim_name == "x"
    with pytest.warns(UserWarning, match="first axis will be used"):
        assert DataParallel(MESH, devices=[0]).num_model_replicas == 2
    with pytest.raises(ValueError, match="Expect `mesh` to be an instance"):
        DataParallel((2, 4))
    replicated = DataParallel(devices=[0, 1])
    assert replicated.get_tensor_layout("x") is None
    assert replicated.get_variable_layout("x", (2, 3)) == TensorLayout((None, None), replicated.device_mesh)
    with replicated.scope():
        assert type(nn.Linear(2, 2).weight) is nn.Parameter
    assert replicated.distribute_dataset("anything") == "anything"


def test_tensors_are_checked_and_stay_whole():
    tensor = torch.ones(4, 8)
    assert distribute_tensor(tensor, TensorLayout((None, "model"), MESH)) is tensor
    for layout, message in (
        (TensorLayout((None, "model")), "Cannot create sharding when device mesh is not set"),
        (TensorLayout(("model", None, None), MESH), "more dims"),
        (("model",), "is not a layout"),
        (TensorLayout.parse("[f, h] sum(model)", MESH), "has partial sums on ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            distribute_tensor(tensor, layout)
    with pytest.raises(ValueError, match="is not divisible"):
        distribute_tensor(torch.ones(4, 6), TensorLayout((None, "model"), MESH))


def test_a_launched_process_without_its_group_is_refused(monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="rank 1 of 8, and there is no process group"), describe().scope():
        Perceptron()
