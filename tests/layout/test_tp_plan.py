"""Tensor-parallel plans: layouts of parameters, and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.layout.cut_layouts import elements
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.terms.tp_plan import STYLES, from_tp_plan, to_tp_plan

MESH = DeviceMesh((2, 2), ("dp", "tp"))


def llama(layers=2, bias=False):
    """Names and shapes of a small model."""
    shapes = {"model.embed_tokens.weight": (12, 4), "model.norm.weight": (4,), "lm_head.weight": (12, 4)}
    for i in range(layers):
        at = f"model.layers.{i}"
        for name, shape in {"q_proj": (8, 4), "k_proj": (4, 4), "v_proj": (4, 4), "o_proj": (4, 8)}.items():
            shapes[f"{at}.self_attn.{name}.weight"] = shape
            if bias:
                shapes[f"{at}.self_attn.{name}.bias"] = shape[:1]
        shapes[f"{at}.self_attn.q_norm.weight"] = (2,)
        shapes |= {f"{at}.mlp.{name}.weight": (6, 4) for name in ("gate_proj", "up_proj")}
        shapes[f"{at}.mlp.down_proj.weight"] = (4, 6)
    return shapes


PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


def texts(layouts, names):
    return {name: str(layouts[name]) for name in names}


def test_a_dense_model():
    shapes = llama(bias=True)
    layouts = from_tp_plan(PLAN, MESH, shapes)
    said = texts(layouts, shapes)
    assert said["model.embed_tokens.weight"] == "[d0/~tp, d1]"
    assert said["model.layers.1.self_attn.q_proj.weight"] == "[d0/~tp, d1]"
    assert said["model.layers.1.self_attn.q_proj.bias"] == "[d0/~tp]"
    assert said["model.layers.0.self_attn.o_proj.weight"] == "[d0, d1/~tp]"
    assert said["model.layers.0.self_attn.o_proj.bias"] == "[d0]"  # added after the sum over the ranks
    assert said["model.layers.0.self_attn.q_norm.weight"] == "[d0]"
    assert said["model.norm.weight"] == "[d0]"  # no rule: whole
    assert said["lm_head.weight"] == "[d0/~tp, d1]"
    # One key for all layers alike, as a person would write the file.
    assert r"model\.layers\.\d+\.mlp\.down_proj\.weight" in list(layouts) and len(layouts) == len(llama(1, bias=True))
    assert layouts.find_unmatched(shapes) == [] and layouts.find_unused(shapes) == []
    assert texts(from_tp_plan(PLAN, MESH, llama(300)), shapes.keys() & llama(2)) == texts(layouts, llama(2))


def test_a_rule_of_a_parameter_goes_before_its_modules():
    shapes = {
        "layers.0.experts.gate_up_proj": (4, 6, 3),
        "layers.0.experts.down_proj": (4, 3, 6),
        "layers.0.experts.down_proj_bias": (4, 3),
        "layers.0.experts.down_proj_scale": (4, 3),
    }
    plan = {
        "layers.*.experts.gate_up_proj": "colwise",
        "layers.*.experts.down_proj": "rowwise",
        "layers.*.experts.down_proj_bias": "rowwise",  # not called bias: transformers cuts its last dim
        "layers.*.experts": "moe_tp_experts",
    }
    assert list(texts(from_tp_plan(plan, MESH, shapes), shapes).values()) == [
        "[d0, d1/~tp, d2]",
        "[d0, d1, d2/~tp]",
        "[d0, d1/~tp]",
        "[d0, d1]",
    ]
    experts = {"layers.*.experts.gate_up_proj": "grouped_gemm", "layers.*.experts": "ep_dispatch_experts"}
    by_expert = from_tp_plan(experts, MESH, shapes, axis="dp")
    assert str(by_expert["layers.0.experts.gate_up_proj"]) == "[d0/~dp, d1, d2]"


def test_packed_halves():
    shapes = {"experts.gate_up_proj": (2, 8, 3), "mlp.up.weight": (8, 3), "mlp.up.bias": (8,), "experts.other": (3, 8)}
    plan = {"experts.gate_up_proj": "packed_colwise", "mlp.up": "packed_colwise", "experts.other": "packed_rowwise"}
    layouts = from_tp_plan(plan, MESH, shapes)
    assert list(texts(layouts, shapes).values()) == [
        "[d0, <gate: d1/~tp | up: d1/~tp>, d2]",
        "[<gate: d0/~tp | up: d0/~tp>, d1]",
        "[d0/~tp]",  # transformers cuts a packed bias as if it had no halves
        "[d0, <gate: d1/~tp | up: d1/~tp>]",
    ]
    assert elements(layouts["mlp.up.weight"], MESH, (8, 1))[1] == ((4, 1), [2, 3, 6, 7])
    assert to_tp_plan(layouts, shapes) == plan
    layouts["three"] = "[3 f/tp, h]"
    with pytest.raises(LayoutError, match="has 3 pieces, and styles pack two"):
        to_tp_plan(layouts, {"three": (12, 2)})


def test_layers_of_other_dims_are_named_one_by_one():
    shapes = {"layers.0.conv.weight": (4, 2, 3), "layers.1.conv.weight": (4, 2)}
    layouts = from_tp_plan({"layers.*.conv": "colwise"}, MESH, shapes)
    assert list(layouts) == list(shapes)
    assert list(texts(layouts, shapes).values()) == ["[d0, d1/~tp, d2]", "[d0/~tp, d1]"]


def test_of_two_numbers_that_follow_each_other_the_first_is_replaced():
    """As transformers does; a rule with two stars would match nothing there."""
    layouts = from_tp_plan({"a.*.1.up": "colwise"}, MESH, {"a.3.1.up.weight": (4, 2), "a.3.2.up.weight": (4, 2)})
    assert str(layouts["a.3.1.up.weight"]) == "[d0/~tp, d1]" and str(layouts["a.3.2.up.weight"]) == "[d0, d1]"


@pytest.mark.parametrize(
    ("plan", "shapes", "message"),
    [
        ({"lm_head": "local_colwise"}, {"lm_head.weight": (4, 2)}, "style 'local_colwise' of 'lm_head' is unknown"),
        ({"lm_head": "ep_router"}, {"lm_head.weight": (4, 2)}, "style 'ep_router'"),
        ({"layers.*.up": "colwise"}, {"model.layers.0.up.weight": (4, 2)}, "match no parameter"),
        ({"head": "colwise"}, {"head.weight": ()}, "a dim that the parameter lacks"),
        ({"head": "embedding_colwise"}, {"head.weight": (3,)}, "a dim that the parameter lacks"),
        ({"head": "packed_colwise"}, {"head.weight": (5, 2)}, "not have two equal halves"),
    ],
)
def test_plans_that_are_not_known_whole_are_refused(plan, shapes, message):
    with pytest.raises(LayoutError, match=message):
        from_tp_plan(plan, MESH, shapes)


def test_rules_of_no_parameter_can_be_passed_over():
    layouts = from_tp_plan({"layers.*.up": "colwise"}, MESH, {"model.layers.0.up.weight": (4, 2)}, strict=False)
    assert str(layouts["model.layers.0.up.weight"]) == "[d0, d1]"


def test_an_unknown_axis_is_refused():
    with pytest.raises(LayoutError, match="has no axis 'ep'"):
        from_tp_plan({}, MESH, {}, axis="ep")


def test_there_and_back():
    shapes = llama(3, bias=True)
    layouts = from_tp_plan(PLAN, MESH, shapes)
    plan = to_tp_plan(layouts, shapes)
    # The plain style of each cut, and no rule for whole parameters.
    plain = {"embedding_rowwise": "colwise", "colwise_gather_output": "colwise"}
    assert plan == {
        rule: plain.get(style, style) for rule, style in PLAN.items() if style != "replicated_with_grad_allreduce"
    }
    assert texts(from_tp_plan(plan, MESH, shapes), shapes) == texts(layouts, shapes)


@settings(deadline=None)
@given(st.data())
def test_any_plan_comes_back_with_the_same_cuts(data):
    """Random styles on modules of a weight and a bias, and on parameters of their own."""
    shapes, plan = {}, {}
    for i in range(data.draw(st.integers(1, 4))):
        styles = st.sampled_from(sorted(STYLES))
        if data.draw(st.booleans()):
            shapes |= {f"a.{n}.m{i}.weight": (4, 6) for n in range(2)} | {f"a.{n}.m{i}.bias": (4,) for n in range(2)}
            plan[f"a.*.m{i}"] = data.draw(styles.filter(lambda style: style != "embedding_colwise"))
        else:
            ndim = data.draw(st.integers(2, 3))
            shapes |= {f"a.{n}.m{i}.w": (4, 6, 2)[:ndim] for n in range(2)}
            styles = styles.filter(lambda style: style != "embedding_colwise")
            plan[f"a.*.m{i}.w"] = data.draw(styles)
    layouts = from_tp_plan(plan, MESH, shapes)
    back = to_tp_plan(layouts, shapes)
    assert texts(from_tp_plan(back, MESH, shapes), shapes) == texts(layouts, shapes)
    assert to_tp_plan(from_tp_plan(back, MESH, shapes), shapes) == back


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"up.weight": "[d0/~dp, d1]"}, "cut by more than 'tp'"),
        ({"up.weight": "[d0/~tp/~dp, d1]"}, "cut by more than 'tp'"),
        ({"other": "[d0]"}, "up.weight has no layout"),
        ({"up.weight": "[d0/tp]"}, "does not have 2 dims"),
        ({"up.weight": "[d0/tp{1,3}, d1]"}, "have no such split"),
        ({"up.weight": "[d0/tp, d1] where dp=0"}, "cannot express 'where dp=0'"),
        ({"up.weight": "[d0, d1] sum(tp)"}, r"cannot express 'sum\(tp\)'"),
    ],
)
def test_layouts_that_no_plan_says_are_refused(rules, message):
    layouts = LayoutMap(MESH)
    for rule, text in rules.items():
        layouts[rule] = text
    with pytest.raises(LayoutError, match=message):
        to_tp_plan(layouts, {"up.weight": (4, 2)})


def test_layers_cut_otherwise_and_dims_that_no_style_cuts_are_refused():
    layouts = LayoutMap(MESH)
    layouts["layers.0.up.weight"] = "[f/tp, h]"
    layouts["layers.1.up.weight"] = "[f, h/tp]"
    with pytest.raises(LayoutError, match=r"layers.1.up.weight is cut differently than in earlier layers"):
        to_tp_plan(layouts, {"layers.0.up.weight": (4, 2), "layers.1.up.weight": (4, 2)})
    layouts["conv.weight"] = "[a, b/tp, c, d]"
    with pytest.raises(LayoutError, match="no style of a plan cuts"):
        to_tp_plan(layouts, {"conv.weight": (4, 4, 2, 2)})


def test_parameters_that_are_no_weight_or_bias_have_rules_of_their_own():
    """A rule of their module would change its forward, and cut what else the module has."""
    shapes = {"layers.0.attn.sinks": (4,), "layers.0.experts.up": (2, 4, 6), "layers.0.experts.down": (2, 6, 4)}
    layouts = LayoutMap(MESH)
    layouts["layers.0.attn.sinks"] = "[n/~tp]"
    layouts["layers.0.experts.up"] = "[e, f/tp, h]"
    layouts["layers.0.experts.down"] = "[e, h, f/tp]"
    plan = to_tp_plan(layouts, shapes)
    assert plan == {
        "layers.*.attn.sinks": "colwise",
        "layers.*.experts.up": "colwise",
        "layers.*.experts.down": "rowwise",
    }
