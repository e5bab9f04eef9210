"""The commands of `xrank recipe` as calls that return reports."""

from __future__ import annotations

import os
import time
from typing import Any

from msgspec.structs import asdict

from xrank.commands.report import model_facts
from xrank.engine.report import RecipeDetails, Report, SourceFacts, timed_report
from xrank.errors import LayoutError, UsageError, XrankError
from xrank.layout.stored_model import StoredModel
from xrank.recipes.config_proof import check_source
from xrank.recipes.recipe import target_sides
from xrank.recipes.recipe_choice import RecipeFit, fit_recipe, load_recipe
from xrank.recipes.recipe_file import list_shipped_recipes, load_shipped_recipes, read_shipped_text
from xrank.recipes.sources import open_base_model, read_source
from xrank.storage import places
from xrank.system import peak_rss_nbytes
from xrank.words import plural


def list_recipes() -> Report:
    """Return the report of the recipes that come with xrank."""
    rows = []
    for recipe in load_shipped_recipes():
        types = list(recipe.model_types)
        row = {"name": recipe.name, "framework": recipe.framework, "model_types": types, "num_rules": len(recipe.rules)}
        rows.append(row)
    return Report("recipe list", peak_rss_nbytes=peak_rss_nbytes(), details=RecipeDetails(recipes=rows))


def show_recipe(name: str, *, is_merged: bool = False) -> Report:
    """Return the report of a shipped recipe, whose text, merged with what it extends if asked, is in the details."""
    if name not in list_shipped_recipes():
        raise UsageError(
            f"no recipe that comes with xrank is called {name}",
            got=name,
            want=f"one of {', '.join(list_shipped_recipes())}",
            next_step="run: xrank recipe list",
        )
    details = RecipeDetails(toml=read_shipped_text(name, is_merged=is_merged))
    return Report("recipe show", path=name, peak_rss_nbytes=peak_rss_nbytes(), details=details)


def check_recipe(
    recipe: str | os.PathLike[str], path: str | os.PathLike[str], *, base_model: str | os.PathLike[str] | None = None
) -> Report:
    """Check a recipe, a file or one that comes with xrank, against a source from metadata alone.

    The report is ``ok`` if all of the source fits; else its ``fault`` names what to correct first. A source with
    Hugging Face's names is read with the recipe backwards. `base_model` has the names and shapes that the recipe must
    make.
    """
    started = time.monotonic()
    asked = load_recipe(os.fspath(recipe))
    base = open_base_model(base_model) if base_model is not None else None
    found = read_source(places.enter(path), base=base, keeps_names=True)
    fit = fit_recipe(asked, found.model, found.config)
    fault = _fault(fit, found.model)
    if fault is None and base is not None and fit.renamed is not None:
        try:
            check_source(base, fit.renamed, found.config)
        except XrankError as error:
            fault = _misfit(fit, found.model, error)
    source = SourceFacts(path=found.model.path, format=found.model.format, **model_facts(found.model))
    details = _details(fit, found.model)
    return timed_report("recipe check", started, path=asked.name, source=source, fault=fault, details=details)


def _details(fit: RecipeFit, model: StoredModel) -> RecipeDetails:
    found, places, shapes = fit.found, fit.places, {shard.name: shard.shape for shard in model.shards}
    tensors: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    for at, names in found.used.items():
        rule = found.recipe.rules[at[0]]
        texts = {
            "rule": str(found.side_at(at)),
            "targets": [str(side) for side in target_sides(rule, found.is_reversed)],
            "place": places[at],
        }
        tensors += [{"name": name, "shape": list(shapes[name]), "fits": at not in fit.wrong, **texts} for name in names]
        if at in fit.wrong:
            wrong.append({**texts, "tensors": list(names), **fit.wrong[at].to_dict()})
    return RecipeDetails(
        is_reversed=found.is_reversed,
        sizes=dict(fit.sizes),
        tensors=tensors,
        wrong_rules=wrong,
        unknown=[asdict(one) for one in fit.unknown],
        missing=list(found.missing),
        ignored=list(found.ignored),
    )


def _fault(fit: RecipeFit, model: StoredModel) -> LayoutError | None:
    """Return the first thing to correct, and the number of all; None if the recipe fits."""
    if fit.whole is not None:
        return _misfit(fit, model, fit.whole)
    name = fit.found.recipe.name
    counts = [
        plural(len(fit.wrong), "wrong rule") if fit.wrong else "",
        plural(len(fit.found.unknown), "unknown name") if fit.unknown else "",
        plural(len(fit.found.missing), "missing target") if fit.found.missing else "",
    ]
    if fit.wrong:
        at, error = next(iter(fit.wrong.items()))
        tensor, step = error.tensor or fit.found.used[at][0], f"correct the rule in {fit.places[at]}: {error.message}"
    elif fit.unknown:
        one = fit.unknown[0]
        near = f"; the nearest rule is {one.nearest}" if one.nearest is not None else ""
        tensor, step = one.name, f"add a rule for {one.name} to {name}{near}"
    elif fit.found.missing:
        tensor = None
        step = f"add a rule that makes {fit.found.missing[0]} to {name}, or check that the source is whole"
    else:
        return None
    if name in list_shipped_recipes():
        step = f'choose a different recipe of `xrank recipe list`, or write one that begins with extends = "{name}"'
    return LayoutError(
        f"the recipe {name} does not fit {model.path}",
        tensor=tensor,
        file=name,
        got=", ".join(filter(None, counts)),
        want="a rule for each tensor, and a tensor for each rule that every model needs",
        next_step=step,
    )


def _misfit(fit: RecipeFit, model: StoredModel, error: XrankError) -> LayoutError:
    return LayoutError(
        f"the recipe {fit.found.recipe.name} does not fit {model.path}: {error.message}",
        tensor=error.tensor,
        file=fit.found.recipe.name,
        got=error.got,
        want=error.want,
        next_step=error.next_step or "correct the recipe",
    )
