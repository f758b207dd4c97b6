"""`argosy scaling fit`: the learning-rate rule that sweeps in the store say, with intervals and the range that they cover."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from scipy import stats

from argosy import spec
from argosy.judge import finals
from argosy.judge.finals import Final
from argosy.plan import refit, scaling
from argosy.track import layout

SWEPT = {"optim.lr_scale", "seed"}  # what may differ within a cell


def fit(names: Sequence[str], home: Path) -> dict[str, Any]:
    """The rule refitted from the finished runs of sweeps over `optim.lr_scale`.

    `names` are what the sweeps were of: `pocket-d32` for all `pocket-d32-sweep-...`, `pocket` also for
    those of its rungs.

    Raises:
        ValueError: when there are no such runs, when they cannot share a rule (naming what differs), or when no cell has an
            optimum inside the learning rates that were tried.
    """
    found, notes = gather(names, home)
    finals.must_be_alike(found)
    text, losses = finals.same_text(found)
    must_share_a_rule(found)
    cells, refused = cells_of(found, losses)
    first = found[0].run
    rule = scaling.FITS[first.optim.scaling]
    source = f"argosy scaling fit {' '.join(names)}: {len(found)} runs, final macro bits per byte of {text}"
    if not cells:
        raise ValueError("no cell can be used: " + "; ".join(refused))
    made = refit.refit(cells, rule, source, first.data.seq_len, (first.moe.experts, first.moe.experts_per_token))
    return {
        "names": list(names),
        "runs": len(found),
        "metric": "macro bits per byte",
        "held_out": text,
        "rule_in_use": first.optim.scaling,
        "cells": _cells(made),
        "fit": asdict(made.fit),
        "intervals": {name: list(reach) for name, reach in made.intervals.items()},
        "fixed": {name: getattr(made.fit, name) for name in made.fixed},
        "r2": made.r2,
        "paste": refit.lines(made.fit, "mine"),
        "notes": notes + refused,
    }


def gather(names: Sequence[str], home: Path) -> tuple[list[Final], list[str]]:
    """The finished runs of the sweeps of these names, and what was left out."""
    known = layout.names(home)
    found: list[Final] = []
    notes: list[str] = []
    for name in names:
        members = [n for n in known if n.startswith(f"{name}-") and "-sweep-" in n]
        if not members:
            swept = sorted({n.partition("-sweep-")[0] for n in known if "-sweep-" in n})
            near = f"nearest: {', '.join(spec.nearest(name, swept))}" if swept else "there is no sweep yet"
            raise ValueError(
                f"no sweep of {name!r} under {home}; {near}; argosy sweep NAME --set optim.lr_scale=1,2,4 makes one"
            )
        finals_ = [finals.of_run(n, home) for n in members if n not in {f.name for f in found}]
        found += [f for f in finals_ if f.finished]
        notes += [f"{f.name} is not finished and left out" for f in finals_ if not f.finished]
    if not found:
        raise ValueError(f"no run of the sweeps of {', '.join(names)} is finished; argosy sweep goes on with them")
    return found, notes


def must_share_a_rule(found: Sequence[Final]) -> None:
    """Refuse runs to which no one learning-rate rule can apply.

    Raises:
        ValueError: naming two runs and what differs.
    """
    first = found[0]
    if first.run.optim.rule == "adamw":
        raise ValueError(f"{first.name} has optim.rule=adamw, whose learning rate is optim.adamw_lr and follows no rule")
    for other in found[1:]:
        for key in (
            "optim.rule",
            "optim.scaling",
            "moe.experts",
            "moe.experts_per_token",
            "optim.warmup_frac",
            "optim.final_frac",
        ):
            left, right = (spec.keys(f.run)[key] for f in (first, other))
            if left != right:
                raise ValueError(f"{key} is {left} in {first.name} and {right} in {other.name}: no one rule is fitted to both")


def cells_of(found: Sequence[Final], losses: Sequence[float]) -> tuple[list[refit.Cell], list[str]]:
    """Runs grouped by width, horizon and tokens per step; and the cells that are no cell, with the reason.

    Raises:
        ValueError: when runs of a cell differ in more than learning rate and seed.
    """
    groups: dict[tuple[int, int, int], list[tuple[Final, float]]] = {}
    for final, loss in zip(found, losses, strict=True):
        run = final.run
        groups.setdefault((run.model.width, run.optim.horizon_tokens, spec.tokens_per_step(run)), []).append((final, loss))
    cells, refused = [], []
    for key, members in sorted(groups.items()):
        first = members[0][0]
        for other, _ in members[1:]:
            differs = {k: v for k, v in spec.difference(first.run, other.run).items() if k not in SWEPT}
            if differs:
                k, (left, right) = next(iter(differs.items()))
                raise ValueError(f"{k} is {left} in {first.name} and {right} in {other.name}, of one cell; fit them apart")
        rates = [scaling.rates(f.run) for f, _ in members]
        cell = refit.Cell(
            *key, tuple(refit.Trial(r.adam_lr, f.run.seed, loss) for r, (f, loss) in zip(rates, members, strict=True))
        )
        if any(not math.isclose(r.muonh_lr, scaling.MUONH_PER_ADAM * r.adam_lr, rel_tol=1e-9) for r in rates):
            refused.append(
                f"{refit.label(cell)}: the rule's cap of {scaling.LR_CAP} cuts one of both learning rates, so it is left out"
            )
        else:
            cells.append(cell)
    return cells, refused


def _cells(made: refit.Refit) -> list[dict[str, Any]]:
    errors, predicted = iter(made.errors), iter(made.predicted)
    freedom = sum(o.freedom for o in made.optima if not o.reason)
    t = float(stats.t.ppf((1 + refit.LEVEL) / 2, freedom))
    rows = []
    for o in made.optima:
        means: dict[float, list[float]] = {}
        for trial in o.cell.trials:
            means.setdefault(trial.adam_lr, []).append(trial.loss)
        row: dict[str, Any] = {
            "width": o.cell.width,
            "tokens": o.cell.tokens,
            "tokens_per_step": o.cell.tokens_per_step,
            "runs": len(o.cell.trials),
            "tried": {f"{lr:.6g}": float(np.mean(means[lr])) for lr in sorted(means)},
            "adam_lr": None,
            "reason": o.reason or None,
        }
        if not o.reason:
            error, line = next(errors), next(predicted)
            row |= {
                "adam_lr": math.exp(o.log_lr),
                "low": math.exp(o.log_lr - t * error),
                "high": math.exp(o.log_lr + t * error),
            }
            row |= {"standard_error": error, "rule": math.exp(line)}
        rows.append(row)
    return rows


def table(body: dict[str, Any]) -> RenderableType:
    """What `fit` returned, for a terminal, with the lines to paste."""
    grid = Table(box=None, pad_edge=False)
    for column in ("width", "tokens", "a step", "runs", "tried adam_lr", "best", "90% interval", "by the rule"):
        grid.add_column(column, justify="right", no_wrap=True)
    for row in body["cells"]:
        tried = [float(lr) for lr in row["tried"]]
        cells = [f"{row['width']:,}", f"{row['tokens']:,}", f"{row['tokens_per_step']:,}", f"{row['runs']}"]
        cells.append(f"{tried[0]:.3g} to {tried[-1]:.3g}")
        if row["reason"]:
            grid.add_row(*cells, "none", "", "", style="dim")
        else:
            grid.add_row(*cells, f"{row['adam_lr']:.4g}", f"{row['low']:.4g} to {row['high']:.4g}", f"{row['rule']:.4g}")
    made, reach = body["fit"], body["intervals"]
    rule = Table(box=None, pad_edge=False)
    for column in ("adam_lr = c T^-a d^-b sqrt(B)", "value", "90% interval"):
        rule.add_column(column, justify="left" if column.startswith("adam") else "right", no_wrap=True)
    rule.add_row("c", f"{made['coefficient']:.4g}", " to ".join(f"{math.exp(v):.3g}" for v in reach["log_c"]))
    for letter, name in (("a, of tokens", "tokens_power"), ("b, of width", "width_power")):
        inside = f"as in {body['rule_in_use']}" if name in body["fixed"] else " to ".join(f"{v:.3f}" for v in reach[name])
        rule.add_row(letter, f"{made[name]:.4f}", inside)
    r2 = "" if body["r2"] is None else f"R^2 {body['r2']:.3f}. "
    fixed = " and ".join({"tokens_power": "a", "width_power": "b"}[name] for name in body["fixed"])
    told = f"The cells do not tell {fixed}: as in the rule in use. " if fixed else ""
    outside = f"argosy plan warns outside widths {made['widths'][0]:,} to {made['widths'][1]:,}, {made['tokens'][0]:,} to"
    outside += f" {made['tokens'][1]:,} tokens, {made['tokens_per_step'][0]:,} to {made['tokens_per_step'][1]:,} a step."
    reasons = [f"{r['width']:,} wide, {r['tokens']:,} tokens: {r['reason']}" for r in body["cells"] if r["reason"]]
    return Group(
        Text(f"{body['runs']} runs, {body['metric']} of {body['held_out']}\n", "bold"),
        grid,
        Text(),
        rule,
        Text(f"{r2}{told}{outside}", "dim"),
        *(Text(line, "yellow") for line in [*reasons, *body["notes"]]),
        Text("\nFor FITS in src/argosy/plan/scaling.py; name it in spec.Optim.scaling too:\n" + body["paste"]),
    )
