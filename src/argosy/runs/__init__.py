"""Recipes: functions that return a complete `Run`. `find` turns a name from the command line into one."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from argosy import spec
from argosy.plan import ladder as ladders
from argosy.plan.ladder import Rung
from argosy.runs import marin_535b, pocket

RECIPES: dict[str, Callable[[], spec.Run]] = {
    "pocket": pocket.run,
    **{f"pocket/d{width}": partial(pocket.rung, width) for width in (32, 48, 64, 96)},
    "marin-535b": marin_535b.run,
    "marin-535b/ragged": marin_535b.ragged,
    **{f"marin-535b/d{width}": partial(marin_535b.rung, width) for width in (768, 1024, 1536, 2048)},
}

LADDERS: dict[str, Callable[[spec.Run], tuple[Rung, ...]]] = {
    "pocket": pocket.rungs,
    "marin-535b": marin_535b.rungs,
    "marin-535b/ragged": marin_535b.rungs,
}


def ladder(recipe: str, hero: spec.Run, budget: float | int | None) -> tuple[Rung, ...]:
    """The ladder of a hero: its recipe's own, or one proposed for a budget (`ladder.propose`), always where a budget is given.

    `recipe` is the hero's name as `find` takes it; `hero` may have other settings than the recipe.

    Raises:
        ValueError: when the recipe's own does not fit such a hero, or nothing fits the budget.
    """
    if budget is not None or recipe not in LADDERS:
        return ladders.propose(hero, budget)
    try:
        return LADDERS[recipe](hero)
    except ValueError as error:
        raise ValueError(
            f"the ladder of {recipe} does not fit this hero: {error}; --budget, e.g. 1%, proposes one that does"
        ) from None


def ladder_rule(recipe: str, hero: spec.Run, rungs: Sequence[Rung], budget: float | int | None) -> str:
    """How `ladder` came to these rungs, in words; empty for a recipe's own."""
    if budget is None and recipe in LADDERS:
        return ""
    if budget is not None:
        return f"the rules below, within {100 * budget:.4g}% of its FLOPs"
    if ladders.share(hero, rungs) <= ladders.BUDGET:
        return f"the rules below, within {ladders.BUDGET:.0%} of its FLOPs"
    return f"the rules below; {ladders.BUDGET:.0%} of its FLOPs holds no four sizes, so this is the least that does"


def find(name: str) -> spec.Run:
    """The run of a recipe: a name from `RECIPES`, or `file.py:function`.

    Raises:
        ValueError: for an unknown recipe (naming the nearest three) or a file that gives no `Run`.
    """
    if name in RECIPES:
        return RECIPES[name]()
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(
            f"unknown recipe {name!r}; nearest: {', '.join(spec.nearest(name, RECIPES))}; a recipe of your own is file.py:function"
        )
    if not Path(path).is_file():
        raise ValueError(f"recipe file {path!r} does not exist; `argosy new {path}` writes a template")
    module_spec = importlib.util.spec_from_file_location("argosy_recipe_" + Path(path).stem, path)
    assert module_spec and module_spec.loader
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"recipe file {path!r} does not run: {type(error).__name__}: {error}") from error
    made = getattr(module, function, None)
    if not callable(made):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ValueError(f"{path} has no function {function!r}; nearest: {', '.join(spec.nearest(function, functions))}")
    run = made()
    if not isinstance(run, spec.Run):
        raise ValueError(f"{name} returned {type(run).__name__}, not a Run")
    return run
