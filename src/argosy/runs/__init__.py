"""Recipes: functions that return a complete `Run`. `find` turns a name from the command line into one."""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from argosy import spec
from argosy.runs import marin_535b, pocket

RECIPES: dict[str, Callable[[], spec.Run]] = {
    "pocket": pocket.run,
    **{f"pocket/d{width}": partial(pocket.rung, width) for width in (32, 48, 64, 96)},
    "marin-535b": marin_535b.run,
    "marin-535b/ragged": marin_535b.ragged,
    **{f"marin-535b/d{width}": partial(marin_535b.rung, width) for width in (768, 1024, 1536, 2048)},
}


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
