"""From run logs to the tables of a forecast: one row per metric and evaluation of each rung, and the rows asked of the hero."""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from argosy import spec
from argosy.forecast import points as P
from argosy.plan import flops, scaling
from argosy.track import log as logs

# What is forecast: evaluations, training losses, gradient norms, drops, routing, speed. Not: what a recipe or a corpus fixes (rates,
# tokens, documents, parameter norms under the hyperball), what has a sign (router bias and margins: no trend in log), counts that
# grow with the batch, histograms, times and memory of a process, and what is measured once (`eval_whole`).
FORECAST = re.compile(
    r"eval_dropless/[^/]+/(macro_)?(bpb|loss)"
    r"|train/(loss|cross_entropy_loss|logit_z_loss)"
    r"|grad/norm/[^/]+"
    r"|moe/((sender_|receiver_)?drop_fraction)"
    r"|train/router/(layer_\d+/(drop_fraction|load_max_over_mean|routing_entropy)"
    r"|routing_entropy_mean|load_max_over_mean|load_balancing_loss|router_z_loss)"
    r"|throughput/(tokens_per_second|mfu)"
)
EVALUATION = re.compile(r"eval_dropless/[^/]+/macro_loss")
LAYER = re.compile(r"train/router/layer_\d+/")
SPEED = "throughput/"

Row = dict[str, Any]


def forecastable(names: Sequence[str]) -> list[str]:
    """The logged metrics that are forecast, in the order given.

    >>> forecastable(["train/loss", "optim/learning_rate", "grad/norm/total", "train/router/bias_min", "eval_whole/prose/bpb"])
    ['train/loss', 'grad/norm/total']
    """
    return [name for name in names if FORECAST.fullmatch(name)]


def evaluation_steps(run: spec.Run) -> list[int]:
    """The updates after which a run is evaluated, the last of them its end: where `loop.due_evaluation` says yes.

    >>> from argosy.runs import pocket
    >>> evaluation_steps(pocket.run())[:3], evaluation_steps(pocket.run())[-1]
    ([52, 103, 154], 1024)
    """
    total = spec.steps(run)
    every = Fraction(str(run.evals.every_frac)) * total
    marks = (math.ceil(every * k) for k in range(1, math.floor(total / every) + 1))
    return sorted({max(1, step) for step in marks} | {total})


def rate(run: spec.Run, step: int) -> float:
    """The matrices' learning rate of the `step`-th update (from 1): what `optim/learning_rate` logs there."""
    rates, total, done = scaling.rates(run), spec.steps(run), step - 1
    peak = run.optim.adamw_lr if run.optim.rule == "adamw" else rates.muonh_lr
    if done < rates.warmup_steps:
        return peak * done / rates.warmup_steps
    final = run.optim.final_frac
    return peak * (final + (1 - final) * (total - done) / max(total - rates.warmup_steps, 1))


def place(run: spec.Run, name: str, metric: str, step: int) -> Row:
    """Every column but `value` of a run's row at a step; FLOPs without the readout, as the reference ladder counts them."""
    return {
        "run": name,
        "metric": metric,
        "step": step,
        "steps_total": spec.steps(run),
        "tokens": step * spec.tokens_per_step(run),
        "tokens_per_step": spec.tokens_per_step(run),
        "active_params": flops.active(run),
        "total_params": sum(flops.params(run).values()),
        "flops": step * flops.train_step(run, readout=False),
        "lr": rate(run, step),
    }


def evaluated(log: logs.RunLog) -> list[int]:
    """The steps at which a run was evaluated, without step 0."""
    found: set[int] = set()
    for name in log.metrics:
        if EVALUATION.fullmatch(name):
            found.update(int(step) for step in log.series(name)[0] if step > 0)
    return sorted(found)


def of_run(log: logs.RunLog, metrics: Sequence[str] | None = None, purpose: str = "") -> list[Row]:
    """Rows for `forecast.points.of_rows`: one per metric and evaluation of a run, NaN values among them as they were logged.

    Evaluations are as logged. What every update logs is the mean over the updates since the evaluation before.

    Args:
        log: the run.
        metrics: names; all that are forecast if not given. One that the run has not logged gives no row.
        purpose: of the rung in its ladder; kept in the row, where a table does not read it.
    """
    run = spec.from_json(log.run["run"])
    ends = np.array(evaluated(log), dtype=np.int64)
    wanted = forecastable(log.metrics) if metrics is None else [name for name in metrics if name in set(log.metrics)]
    rows = []
    for name in wanted:
        steps, values = log.series(name)
        if name.startswith("eval_"):
            kept = {int(s): float(v) for s, v in zip(steps, values, strict=True) if s > 0}
        else:
            kept = windows(steps, values, ends)
        rows += [place(run, log.name, name, step) | {"value": kept[step], "purpose": purpose} for step in sorted(kept)]
    return rows


def windows(steps: np.ndarray, values: np.ndarray, ends: np.ndarray) -> dict[int, float]:
    """The mean of a metric over the updates up to each of `ends` and after the one before it; windows without a row have none."""
    edges = np.searchsorted(steps, np.concatenate([[0], ends]), "right")
    return {int(end): float(np.mean(values[a:b])) for end, a, b in zip(ends, edges[:-1], edges[1:], strict=True) if b > a}


def of_ladder(home: Path, hero_name: str, metrics: Sequence[str] | None = None) -> P.Table:
    """The points of a hero's ladder: every finite value of its rungs' metrics that are forecast.

    Raises:
        ValueError: when there is no ladder of this name, or a rung's run has other values than the ladder says.
    """
    return P.of_rows(gather(home, hero_name, metrics).rows)  # noqa: F821


def target(hero: spec.Run, name: str, metrics: Sequence[str]) -> P.Table:
    """What is asked: every metric at every evaluation of the hero."""
    return P.of_rows(asked(hero, name, metrics), "TARGET")


def asked(hero: spec.Run, name: str, metrics: Sequence[str]) -> list[Row]:
    """The target's rows, metric by metric."""
    return [place(hero, name, metric, step) for metric in metrics for step in evaluation_steps(hero)]
