"""Every next step of a reader, by what the user does who follows it, and the test that does so mechanically.

An advice that the table does not know fails: its author names the test that follows it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import xrank
from tests.test_error_texts import texts, tree_of

pytestmark = pytest.mark.quick

READERS = Path(xrank.__file__).parent / "readers"
TESTS = Path(__file__).parents[1]

COPIED = "../xrank/testing/reader_contract.py::test_fault"
"""The contract of readers damages each file, then puts the intact one in its place and runs the same command again."""
SAVED = "readers/test_next_steps.py::test_whatever_is_moved_away"
"""All ranks write again, into an empty folder and over the files that were refused."""
FORM = "readers/test_save_advice.py::test_a_checkpoint_that_is_saved_as_advised"
ANOTHER = "a checkpoint of another form, which its framework makes; the tests of its reader gather it"
MEGATRON = "workspace/test_megatron_refusals.py::test_ambiguous_or_missing_facts_are_refused"
NOTHING = "the user looks, and changes nothing"

PART = "a text within another one"

FOLLOWED: Mapping[str, str] = {
    r"step {}": PART,
    # files
    r"(copy|bring|fetch) .*": COPIED,
    r"rank {}'s, again from where it was saved|nodes without a shared disk keep their own( files)?": COPIED,
    r"all files must come from one save( of one run)?": COPIED,
    r"if a save into this folder was interrupted, use a different checkpoint": COPIED,
    r"if not, copy the whole folder again": COPIED,
    r"use (a different step|an earlier checkpoint|a checkpoint with a finished save)": COPIED,
    r"in this one a pipeline stage wrote nothing|run as its owner, let this user read it": COPIED,
    r"let all ranks save into an empty folder": "readers/test_next_steps.py::test_whatever_is_moved_away",
    r"move .*|runs with MiCS, whose partitions repeat, are not read": (
        "readers/test_next_steps.py::test_every_advice_to_move_files_has_a_case"
    ),
    r"put (the config\.json of this model into the folder|the model's config\.json into {}|{}|it into {}, then {})": (
        "readers/test_layout_advice.py::test_a_config_that_is_put_beside"
    ),
    # paths
    r"(if each file is a whole model, |gather each component separately: )?give ({} as the path|the path (of|to) .*)": (
        "readers/test_next_steps.py::test_a_path_that_is_advised"
    ),
    r"give ({} itself|the checkpoint's own folder)|this marker was tampered with": (
        "readers/test_next_steps.py::test_a_path_that_is_advised"
    ),
    r"(if they are the parts of ranks, )?(gather|give) the (checkpoint|model|Hugging Face folder|ZeRO checkpoint).*": (
        "readers/test_foreign_kinds.py::test_other_formats_beside_a_model_are_no_hindrance"
    ),
    r"(give the model's safetensors files|give another step's folder|the folder of an item|transformers 4 makes).*": (
        "readers/test_foreign_kinds.py::test_other_formats_beside_a_model_are_no_hindrance"
    ),
    r"gather a checkpoint that a ZeRO optimizer saved": COPIED,
    r"if each is (a stage of one model, gather each separately|a whole model), .*": (
        "readers/test_next_steps.py::test_stages_of_their_own_folders_are_joined_as_advised"
    ),
    r"give the folder of a version that is whole .*|the engine that pulls these deltas applies them to it": (
        "readers/test_weight_folders.py::test_a_delta_is_not_a_model"
    ),
    r"give the model (of version {} with {base_model}|that the version is based on)": (
        "readers/test_deltas.py::test_another_base_is_refused"
    ),
    r"wait until it is written, then {}|leave {version} out|give each version once": (
        "readers/test_deltas.py::test_a_version_that_is_asked_for"
    ),
    r"if the trained model has no values there, give a base model with the same empty tensors as {base_model}": (
        "readers/test_weight_folders.py::test_placeholders_of_zero_3"
    ),
    # training states
    r"continue (in the framework that saved it|on the same number of ranks)": NOTHING,
    r"xrank gather writes only the model": NOTHING,
    r"give a checkpoint of one optimizer": ANOTHER,
    r"safetensors can open these files": NOTHING,
    # options
    r"choose one(: {}| of them with {part}|: {part})": "readers/test_next_steps.py::test_a_part_that_is_advised",
    r"choose one with {format}": "readers/test_next_steps.py::test_a_format_that_is_advised",
    r"omit {format}: formats are recognized automatically|leave {part} out": (
        "readers/test_layout_advice.py::test_an_option_that_is_left_out"
    ),
    r"correct {world_size}": "readers/test_next_steps.py::test_a_number_of_ranks_that_is_advised",
    r"leave it out with {exclude}": "readers/test_layout_advice.py::test_a_value_that_is_left_out",
    r"if you trust its writer, omit {strict_pickles}": (
        "readers/test_foreign_names.py::test_class_of_the_user_is_refused_if_asked_for"
    ),
    r"give {layouts}( with (this tensor's layout|its layout|lines such as .*))?"
    r'|"\[{}\]" if it holds a part of the rows': ("readers/test_layout_advice.py::test_a_layout_file_that_is_given"),
    r'give a rule like "{}" = "flat\(a \[7, 10\], b \[7\]\)/~fsdp" by {layouts}': (
        "readers/test_layout_advice.py::test_numbers_of_a_flat_buffer"
    ),
    r"give ({base_model}|the base model that was trained)( to prove its shapes)?|if the folder contains shards of .*": (
        "readers/test_layout_advice.py::test_a_base_model_that_is_given"
    ),
    r"give {base_model} \(its config\.json is used\)": (
        "readers/test_layout_advice.py::test_a_base_model_whose_config_wins"
    ),
    # layout files
    r"write numbers into the layout|write one rule per buffer name|save only one of the two": (
        "readers/test_layout_advice.py::test_numbers_of_a_flat_buffer"
    ),
    r"correct the (layout file|mesh of the layout file)|its axes are tp and etp|add a table like \[mesh\] .*": (
        "readers/test_layout_advice.py::test_a_layout_file_that_is_given"
    ),
    r"write rules for that tensor and for this one that match their names only|keep one of them"
    r"|change the layout file's patterns: only one may match each name": (
        "readers/test_layout_advice.py::test_rules_that_match_too_much"
    ),
    r"delete the tensor's rule from the layout file": "readers/test_layout_advice.py::test_a_rule_that_is_taken_out",
    # other saves
    r"load it and save it again with torch|load it, and save its tensors by name": FORM,
    r"load and save it with torch's default planner, .*": FORM,
    r"save with coordination .*|write the tensor with \.contiguous\(\)|leave one of them out": FORM,
    r"save (the model's part in a checkpoint of its own|only the model's state_dict\(\))": FORM,
    r"have the file written again .*": FORM,
    r"let all ranks write (one config|a config of plain values|their states in the same way)": FORM,
    r"write DTensors|plain tensors with layouts|let (rank {}|{}) write again, then {}": FORM,
    r"let (all ranks|the ranks?|rank {}) write (again|its state again.*)|let the ranks write with NFSWorkspace": SAVED,
    r"write the states again|save again|save the state dict of all ranks again|run ds_to_universal\.py again": SAVED,
    r"all ranks must come from one run( and step)?|check that the files come from one run": SAVED,
    r"(let the training run|save|load|convert) .*|make the module with .*": ANOTHER,
    r"give (the layers tensors .*|each layer its own key)|tie the tensor .*|stage 3 saves no others": ANOTHER,
    r"with a stage of ZeRO|if experts are cut in another way, save as torch_dist": ANOTHER,
    r"(redistribute|reduce) the tensor .*": "readers/test_fsdp_ranks.py::test_addends_of_a_sum_are_refused",
    # live models
    r"for other calls, make them within .*|give the module itself to .*": (
        "commands/test_export_refusals.py::test_what_zero_3_has_partitioned_is_refused_by_name"
    ),
    r"give (mesh=|the mesh of the run).*": "workspace/test_megatron_refusals.py::test_a_mesh_that_is_given_as_advised",
    r"none if Megatron's process groups are initialized": (
        "workspace/test_megatron_refusals.py::test_process_groups_of_other_ranks_are_refused"
    ),
    r"write the same model, of one run and step and with the same layouts, on all ranks": (
        "readers/test_live_ranks.py::test_ranks_that_get_the_same_layouts_as_advised"
    ),
    r"give all ranks the same process group": (
        "workspace/test_megatron_refusals.py::test_ranks_that_get_the_same_group_as_advised"
    ),
    r"give each chunk once, .*": "workspace/test_megatron_refusals.py::test_a_chunk_given_twice_is_refused",
    r"correct (the layout map|it)|give the LayoutMap a mesh|leave the tensor out on this rank|set layouts.sizes.*": (
        "workspace/test_nfs.py::test_a_layout_map_that_is_corrected_as_advised"
    ),
    r"set num_local_experts .*|make it contiguous": "workspace/test_megatron_refusals.py::test_advice_that_is_followed",
    r"let all ranks of the world take part|set (layer_number|the attributes that Megatron's).*": MEGATRON,
    r"without ep, where every rank holds all experts": MEGATRON,
    r"export the (chunks as Megatron makes them|part that has a decoder of its own, .*)": MEGATRON,
    r"give layouts= with this tensor's rule.*|rename the axes of mesh= to Megatron's|dp is for replicas": MEGATRON,
    r"materialize the module .*|on its final device": (
        "commands/test_load.py::test_modules_that_cannot_be_filled_are_refused"
    ),
    r"give a state dict of DTensors .*|make FSDP .*|export from a checkpoint .*": ANOTHER,
    r"give the folder with the weights|if they belong here, .*": (
        "readers/test_foreign_kinds.py::test_folder_without_weights_is_named"
    ),
    r"use the same version of xrank on all ranks": NOTHING,
    r"give the module|its state dict": "commands/test_export_refusals.py::test_arguments_of_wrong_types_are_named",
    # looks
    r"check .*|do not use this .*|use a version of xrank that supports it|report it to the authors of .*": NOTHING,
    r"nothing was written|if all are there, {}": NOTHING,
    r"if the rank had no piece for it, {}|where it was written|the node of rank {}|ranks? {}|{}, pickled whole": PART,
    r"{}, then {}|{}|if each is a model, {}": PART,
}
"""Expression for a clause of advice, and the test that follows it, or why none does."""


# Methods of Origin and Subject, and helpers of readers, by the place of their next step.
_REFUSALS = dict.fromkeys(("contradiction", "corrupt", "incomplete", "layout", "usage"), 3)
_REFUSALS |= dict.fromkeys(("make", "disagreement", "rank_error"), 4)


class _Advice(ast.NodeVisitor):
    """Collects the texts of next steps in a module."""

    def __init__(self, tree: ast.Module) -> None:
        self.names: dict[str, list[ast.expr]] = {}
        self.found: list[ast.expr] = []
        self.places: dict[str, int] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.names.setdefault(target.id, []).append(node.value)
            if isinstance(node, ast.ClassDef):
                fields = [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]  # type: ignore[union-attr]
                if "next_step" in fields:
                    self.places[node.name] = fields.index("next_step")
        self.visit(tree)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        self.found += [keyword.value for keyword in node.keywords if keyword.arg == "next_step"]
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if len(node.args) > _REFUSALS.get(name, len(node.args)):
            self.found.append(node.args[_REFUSALS[name]])
        if name == "advise":
            self.found += node.args[:1]
        if name in self.places and len(node.args) > self.places[name]:
            self.found.append(node.args[self.places[name]])


def with_options(node: ast.expr) -> ast.expr:
    """Return an expression in which ``option("name")`` is the text ``{name}``."""

    class Named(ast.NodeTransformer):
        def visit_FormattedValue(self, part: ast.FormattedValue) -> ast.AST:
            call = part.value
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "option":
                return ast.Constant(f"{{{ast.literal_eval(call.args[0])}}}")
            return part

    return Named().visit(ast.parse(ast.unparse(node), mode="eval")).body  # type: ignore[no-any-return]


@cache
def list_advice() -> dict[str, str]:
    """Return the texts of all next steps of readers, each with the module that has it."""
    trees = {path: _Advice(tree_of(path)) for path in sorted(READERS.rglob("*.py"))}
    shared = {name: values for each in trees.values() for name, values in each.names.items() if name.isupper()}
    found: dict[str, str] = {}
    for path, each in trees.items():
        for step in each.found:
            names = [node.id for node in ast.walk(step) if isinstance(node, ast.Name)]
            values = [value for name in names for value in each.names.get(name, shared.get(name, []))]
            for text in _texts([step, *values]):
                found.setdefault(text, str(path.relative_to(READERS)))
    return found


def _texts(expressions: list[ast.expr]) -> Iterator[str]:
    for expression in expressions:
        for text in texts(ast.Module([ast.Assign([], with_options(expression))], [])):
            if " " in text.strip():
                yield text


def list_clauses(advice: str) -> list[str]:
    return [clause.strip(" ,") for clause in re.split(r"; (?:or )?|, or\b", advice) if clause.strip(" ,")]


def test_every_advice_is_in_the_table() -> None:
    advice = list_advice()
    assert len(advice) > 150
    unknown = {
        clause: place
        for text, place in advice.items()
        for clause in list_clauses(text)
        if not any(re.fullmatch(one, clause) for one in FOLLOWED)
    }
    assert unknown == {}


def test_every_line_of_the_table_is_used() -> None:
    clauses = [clause for text in list_advice() for clause in list_clauses(text)]
    assert [one for one in FOLLOWED if not any(re.fullmatch(one, clause) for clause in clauses)] == []


def test_every_test_of_the_table_exists() -> None:
    for place in FOLLOWED.values():
        file, _, name = place.partition("::")
        if name:
            assert re.search(rf"^ *def {name}\(", (TESTS / file).read_text(), re.MULTILINE), place
