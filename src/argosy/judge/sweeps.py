"""A sweep: one recipe under several values of a few keys, each with several seeds, and what the values did."""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from argosy import runs, spec
from argosy.judge import finals
from argosy.plan import cost, flops
from argosy.plan.ladder import Rung
from argosy.track import log as logs

FIXED = {
    "seed": "give --seeds, which repeats every value with equal seeds",
    "data.corpus": "bits per byte of other text say nothing about each other",
    "data.seq_len": "bits per byte under another length of context say nothing about each other",
    "evals.tokens_per_set": "the registered part of the held-out text would not be the same",
}


class Member(NamedTuple):
    """One run of a sweep: its name in the store, its arm's name, and what it was given."""

    name: str
    arm: str
    values: dict[str, Any]
    seed: int
    run: spec.Run


class Sweep(NamedTuple):
    """Every run of a sweep in the order of training: the values of an arm with one seed after the other.

    `own` is the arm whose values are the recipe's own; empty if none is.
    """

    name: str
    swept: dict[str, list[Any]]
    members: tuple[Member, ...]
    own: str


# ---- from words to runs ---------------------------------------------------------------------------


def split(text: str, like: Any) -> list[str]:
    """The values in the text of a setting: at commas outside brackets and quotes; a number with commas for thousands is one.

    A comma with a space behind it always separates: "1,024, 2,048". A value of a free name (`like` a string that is no
    named choice) is split as well; what is legal as one JSON value stays one.

    Raises:
        ValueError: where a comma could be either, naming both ways to write it.

    >>> split("1,2,4", 1.0), split("2,097,152", 1), split("1,024, 2,048", 1), split('[{"a": 1}, {"b": 2}]', ())
    (['1', '2', '4'], ['2,097,152'], ['1,024', '2,048'], ['[{"a": 1}, {"b": 2}]'])
    """
    if not isinstance(like, int | float | str):
        try:
            json.loads(text)
            return [text.strip()]
        except ValueError:
            pass
    elif re.search(r",\s", text):
        return [part.strip() for part in re.split(r",\s+", text.strip())]
    elif not isinstance(like, str) and re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text.strip()):
        return [text.strip()]
    parts, depth, quoted, start = [], 0, False, 0
    for i, letter in enumerate(text):
        if letter == '"':
            quoted = not quoted
        elif not quoted:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and depth == 0:
                parts.append(text[start:i].strip())
                start = i + 1
    parts.append(text[start:].strip())
    if len(parts) > 1 and isinstance(like, int | float) and any(re.fullmatch(r"0\d+", part) for part in parts):
        raise ValueError(
            f"{text!r} may be values or thousands; write thousands as 1_048_576, or values with a space after"
            " each comma: 1,024, 2,048"
        )
    return parts


def make(base: spec.Run, name: str, settings: Sequence[str], seeds: int) -> Sweep:
    """All runs of a sweep over a recipe, built and checked.

    Args:
        base: the recipe.
        name: what the recipe's run is called in the store; members are `<name>-sweep-<key>-<value>-s<seed>`.
        settings: `key=value`, or `key=a,b,c` for a swept key; several swept keys make a grid.
        seeds: how many seeds for each, from the recipe's own upwards.

    Raises:
        ValueError: when nothing is swept, a value is given twice, a key cannot be swept, or any of the runs cannot be.
    """
    if not 1 <= seeds <= 1000:
        raise ValueError(f"--seeds {seeds} is how often every value is trained; nearest legal {min(max(seeds, 1), 1000)}")
    known, fixed = spec.keys(base), []
    swept: dict[str, list[str]] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        key = key.strip()
        if not sign or key not in known:
            spec.override(base, [setting])  # says what is wrong with it
        parts = split(text, known[key])
        if len(parts) == 1:
            fixed.append(setting)
            continue
        if key in FIXED:
            raise ValueError(f"{key} cannot be swept: {FIXED[key]}")
        if key in swept:
            raise ValueError(f"{key} is swept twice; give all its values in one --set {key}=a,b,c")
        swept[key] = parts
    if not swept:
        raise ValueError(
            "nothing is swept: give at least one key several values, e.g. --set optim.lr_scale=1,2,4 (now"
            f" {known['optim.lr_scale']:g}); a number with commas for thousands counts as one value"
        )
    begun = spec.override(base, fixed)
    members: list[Member] = []
    given: dict[str, list[Any]] = {key: [] for key in swept}
    for texts in itertools.product(*swept.values()):
        run = spec.override(begun, [f"{key}={text}" for key, text in zip(swept, texts, strict=True)])
        values = {key: spec.keys(run)[key] for key in swept}
        arm = f"{name}-sweep-" + "-".join(f"{short(key)}-{plain(value)}" for key, value in values.items())
        for key, value in values.items():
            if value not in given[key]:
                given[key].append(value)
        members += [
            Member(f"{arm}-s{seed}", arm, values, seed, replace(run, seed=seed))
            for seed in range(begun.seed, begun.seed + seeds)
        ]
    twice = [member for member, times in Counter(m.name for m in members).items() if times > 1]
    if twice:
        raise ValueError(f"a value is given twice: it would be run {twice[0]!r} both times")
    longest = max((m.name for m in members), key=len)
    if len(longest) > 100 or any(c in m.name for c in "/\\\0" for m in members):
        raise ValueError(f"{longest!r} is no plain folder name of at most 100 characters; give a short one with --as")
    own = next((m.arm for m in members if m.run == begun), "")
    return Sweep(name, given, tuple(members), own)


def short(key: str) -> str:
    """A key as part of a folder's name: without its section where no other section has it."""
    last = key.rpartition(".")[2]
    sections = [part.type for part in fields(spec.Run) if is_dataclass(part.type)]
    return key if sum(last in {f.name for f in fields(section)} for section in sections) > 1 else last


def plain(value: Any) -> str:
    """A value as part of a folder's name.

    >>> plain(2.0), plain(1_048_576), plain("pooled_wave"), plain(0.5)
    ('2', '1048576', 'pooled_wave', '0.5')
    """
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, int | str):
        return str(value)
    return hashlib.sha256(json.dumps(value, default=asdict).encode()).hexdigest()[:8]


def rungs(recipe: str, names: str) -> list[Rung]:
    """The rungs of a recipe's ladder with these names, divided by commas.

    Raises:
        ValueError: when the ladder has no rung of a name, naming those that it has.
    """
    ladder = {rung.name: rung for rung in runs.ladder(recipe, runs.find(recipe), None)}
    for name in names.split(","):
        if name.strip() not in ladder:
            raise ValueError(f"the ladder of {recipe} has no rung {name.strip()!r}; it has {', '.join(ladder)}")
    return [ladder[name.strip()] for name in names.split(",")]


def must_fit(sweep: Sweep, home: Path) -> None:
    """Refuse a sweep whose runs were begun with other values.

    Raises:
        ValueError: naming the run, what differs and the way out.
    """
    for member in sweep.members:
        if not finals.there(member.name, home):
            continue
        before = spec.from_json(logs.run_json(home / "runs" / member.name)["run"])
        differs = [f"{key} {old} -> {new}" for key, (old, new) in spec.difference(before, member.run).items()]
        if differs:
            raise ValueError(
                f"run {member.name!r} exists with other values: {'; '.join(differs[:4])}; give this sweep a name of its own,"
                f" e.g. --as {sweep.name}-2"
            )


# ---- the plan ---------------------------------------------------------------------------------------


def plan(sweep: Sweep, home: Path) -> dict[str, Any]:
    """What a sweep takes before anything is trained: runs, those still to do, FLOPs without readout, hours as planned."""
    left = [m for m in sweep.members if not _finished(m, home)]
    return {
        "sweep": sweep.name,
        "runs": len(sweep.members),
        "to_train": len(left),
        "flops": sum(spec.steps(m.run) * flops.train_step(m.run, readout=False) for m in sweep.members),
        "hours": sum(cost.time(m.run)["days"] for m in left) * 24,
    }


def plan_table(planned: Sequence[dict[str, Any]]) -> RenderableType:
    """What `plan` returned, a line for each sweep."""
    grid = Table(box=None, pad_edge=False)
    for column in ("sweep", "runs", "to train", "FLOPs", "as planned"):
        grid.add_column(column, justify="left" if column == "sweep" else "right", no_wrap=True)
    for row in planned:
        hours = row["hours"]
        span = f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"
        grid.add_row(row["sweep"], f"{row['runs']}", f"{row['to_train']}", f"{row['flops']:.2e}", span)
    return Group(grid, Text("Time as planned is of updates alone: compiling and evaluating come on top.", "dim"))


def _finished(member: Member, home: Path) -> bool:
    return finals.there(member.name, home) and finals.of_run(member.name, home).whole is not None


# ---- what it showed -----------------------------------------------------------------------------------


def result(sweep: Sweep, home: Path) -> dict[str, Any]:
    """The table of a sweep: per arm mean, spread and paired difference of the final macro bits per byte.

    Every figure is of the same held-out text: all of it if all finished runs were scored on it, else the registered part.
    `spread` is the standard deviation over seeds; `difference` is to the recipe's own values, or to the first arm with
    a finished run, over seeds that both have, with Student's two-sided 90% interval.
    """
    done = {m.name: finals.of_run(m.name, home) for m in sweep.members if finals.there(m.name, home)}
    finished = [m for m in sweep.members if m.name in done and done[m.name].finished]
    body: dict[str, Any] = {
        "sweep": sweep.name,
        "metric": "macro bits per byte",
        "held_out": None,
        "swept": sweep.swept,
        "finished": len(finished),
        "runs": len(sweep.members),
        "against": None,
        "best": None,
        "arms": [],
    }
    scores: dict[str, dict[int, float]] = {m.arm: {} for m in sweep.members}
    if finished:
        finals.must_be_alike([done[m.name] for m in finished])
        body["held_out"], values = finals.same_text([done[m.name] for m in finished])
        for member, value in zip(finished, values, strict=True):
            scores[member.arm][member.seed] = value
        against = sweep.own if scores.get(sweep.own) else next(arm for arm, found in scores.items() if found)
        body["against"] = against
        body["best"] = min((arm for arm, found in scores.items() if found), key=lambda arm: np.mean([*scores[arm].values()]))
    for arm, found in scores.items():
        first = next(m for m in sweep.members if m.arm == arm)
        row: dict[str, Any] = {"arm": arm, "values": first.values, "n": len(found), "mean": None, "spread": None}
        if found:
            row["mean"] = float(np.mean([*found.values()]))
            row["spread"] = float(np.std([*found.values()], ddof=1)) if len(found) > 1 else None
            row["by_seed"] = found
            paired = [value - scores[body["against"]][seed] for seed, value in found.items() if seed in scores[body["against"]]]
            if arm != body["against"] and paired:
                row["difference"] = finals.interval(paired)._asdict()
        body["arms"].append(row)
    return body


def table(body: dict[str, Any]) -> RenderableType:
    """What `result` returned, for a terminal."""
    grid = Table(box=None, pad_edge=False)
    for key in body["swept"]:
        grid.add_column(key, justify="right")
    for column in ("seeds", "mean", "spread", "difference", "90% interval", ""):
        grid.add_column(column, justify="right" if column else "left")
    for row in body["arms"]:
        values = [plain(v) for v in row["values"].values()]
        if row["mean"] is None:
            grid.add_row(*values, "0", *[""] * 4, "not finished", style="dim")
            continue
        spread = "" if row["spread"] is None else f"{row['spread']:.4f}"
        notes = [w for w, arm in (("lowest", body["best"]), ("compared with", body["against"])) if arm == row["arm"]]
        gap, reach = "", ""
        if found := row.get("difference"):
            gap = f"{found['mean']:+.4f}"
            reach = f"{found['low']:+.4f} to {found['high']:+.4f}" if found["low"] is not None else "one seed"
        style = "bold" if row["arm"] == body["best"] else ""
        grid.add_row(*values, str(row["n"]), f"{row['mean']:.4f}", spread, gap, reach, ", ".join(notes), style=style)
    title = f"{body['sweep']}: macro bits per byte" + (f" of {body['held_out']}" if body["held_out"] else "")
    under = f"{body['finished']} of {body['runs']} runs finished. Differences are over equal seeds; a negative one is better."
    return Group(Text(title, "bold"), grid, Text(under, "dim"))
