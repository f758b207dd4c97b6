"""What speaks for a cause of a departure: sets that leave the others, layers, parameter groups, speed, values that are no numbers."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from argosy import spec
from argosy.judge import departures as D
from argosy.judge import ladders, points
from argosy.track import log as logs

SET_LOSS = re.compile(r"eval_dropless/([^/]+)/loss")
TRAINING = re.compile(r"train/(loss|cross_entropy_loss)")
ROUTING = re.compile(r"train/router/.+|moe/.+")
LAYER = re.compile(r"train/router/layer_(\d+)/(.+)")
GRADIENT = re.compile(r"grad/norm/(?!total$)(.+)")
PARAMETER = re.compile(r"params/norm/(?!total$)(.+)")
SPEED = re.compile(r"throughput/.+")
MOST = 40.0  # sigmas beyond which nothing is surer
AGREES = 2.5  # sigmas with which the training loss bears out what all sets say
RATE_OFF = 1e-4  # of the largest learning rate: beyond rounding
BEGUN = 0.05  # of a run: parameter norms are compared from there on
SMALLEST = 0.005  # of log: how well a parameter norm's growth is known at best


class Sign(NamedTuple):
    """One thing that speaks for a group: what, since which update, and how strongly, in standard errors."""

    group: str
    what: str
    since: int
    sigmas: float
    says: str


def sign(group: str, what: str, d: D.Departure, says: str = "") -> list[Sign]:
    """A departure as a sign of a group, if it is sure."""
    if abs(d.sigmas) < D.SURE:
        return []
    text = f"{what} {math.expm1(d.change):+.1%} since update {d.since:,}" + (f", {says}" if says else "")
    return [Sign(group, what, d.since, min(abs(d.sigmas), MOST), text)]


def broken(log: logs.RunLog) -> list[Sign]:
    """Losses and norms that are no numbers."""
    out = []
    for metric in ("train/loss", "grad/norm/total"):
        if metric in log.metrics:
            steps, values = log.series(metric)
            bad = steps[~np.isfinite(values)]
            if len(bad):
                out.append(Sign("implementation", metric, int(bad[0]), MOST, f"{metric} is no number from update {bad[0]:,}"))
    return out


def rates(log: logs.RunLog, run: spec.Run) -> list[Sign]:
    """A learning rate that is not the schedule's."""
    if "optim/learning_rate" not in log.metrics:
        return []
    steps, values = log.series("optim/learning_rate")
    due = np.array([points.rate(run, int(s)) for s in steps])
    off = np.flatnonzero(np.abs(values - due) > RATE_OFF * np.abs(due).max())
    if not off.size:
        return []
    k = off[0]
    says = f"the learning rate is {values[k]:.4g} at update {steps[k]:,} where the schedule has {due[k]:.4g}"
    return [Sign("optimizer", "optim/learning_rate", int(steps[k]), MOST, says)]


def of_sets(found: dict[str, D.Residual]) -> list[Sign]:
    """Evaluation sets that leave the others."""
    sets = [m for m in found if SET_LOSS.fullmatch(m)]
    out = []
    for metric, d in D.peers(found, sets).items():
        name = SET_LOSS.fullmatch(metric)
        out += sign("data", f"loss of {name.group(1) if name else metric}", d, "against the other sets")
    return out


def of_routing(found: dict[str, D.Residual], out: dict[str, D.Departure]) -> list[Sign]:
    """Layers that leave the others, and statistics of all layers."""
    signs = []
    for what in dict.fromkeys(m.group(2) for m in map(LAYER.fullmatch, found) if m):
        family = [m for m in found if (hit := LAYER.fullmatch(m)) and hit.group(2) == what]
        for metric, d in D.peers(found, family).items():
            layer = LAYER.fullmatch(metric)
            signs += sign("routing", f"{what} of layer {layer.group(1) if layer else metric}", d, "against the other layers")
    for metric, d in out.items():
        if ROUTING.fullmatch(metric) and not LAYER.fullmatch(metric):
            signs += sign("routing", metric, d)
    return signs


def of_optimizer(found: dict[str, D.Residual], out: dict[str, D.Departure]) -> list[Sign]:
    """Parameter groups whose gradients leave the others, the whole gradient, the logits' scale."""
    signs = []
    groups = [m for m in found if GRADIENT.fullmatch(m)]
    for metric, d in D.peers(found, groups).items():
        signs += sign("optimizer", f"gradient of {metric.rpartition('/')[2]}", d, "against the other groups")
    for metric in ("grad/norm/total", "train/logit_z"):
        if metric in out:
            signs += sign("optimizer", metric, out[metric])
    return signs


def of_parameters(log: logs.RunLog, run: spec.Run, home: Path, name: str) -> list[Sign]:
    """Parameter groups whose norm grows otherwise than on the ladder's sizes at equal progress; nothing without three of them.

    Norms are not forecast: growth since `BEGUN` is compared with the mean of the sizes', and their spread is what is not known.
    """
    if not ladders.path_of(home, name).is_file():
        return []
    folders = [home / "runs" / e["name"] for e in ladders.load(home, name)["rungs"] if e["purpose"] == "size"]
    rungs = [logs.read(f) for f in folders if (f / "run.json").is_file()]
    total = spec.steps(run)
    out = []
    for metric in filter(PARAMETER.fullmatch, log.metrics):
        own = [r for r in rungs if metric in r.metrics]
        steps = np.array([s for s in points.evaluation_steps(run) if s > BEGUN * total and s <= log.series(metric)[0][-1]])
        if len(own) < 3 or len(steps) < D.LEAST:
            continue
        grown = [growth_at(r, metric, spec.steps(spec.from_json(r.run["run"])), steps / total) for r in own]
        spread = np.maximum(np.std(grown, axis=0, ddof=1) * math.sqrt(1 + 1 / len(own)), SMALLEST)
        values = growth_at(log, metric, total, steps / total) - np.mean(grown, axis=0)
        r = D.Residual(metric, steps, values, 4 * np.outer(spread, spread), np.full(len(steps), SMALLEST), np.zeros(len(steps)))
        group = PARAMETER.fullmatch(metric)
        out += sign(
            "optimizer", f"norm of {group.group(1) if group else metric}", D.departure(r), "against the ladder's growth"
        )
    return out


def growth_at(log: logs.RunLog, metric: str, total: int, shares: np.ndarray) -> np.ndarray:
    """log of a metric at shares of a run less that at `BEGUN`; linear between logged points."""
    steps, values = log.series(metric)
    at = np.interp(np.append(shares, BEGUN) * total, steps, np.log(np.maximum(values, 1e-30)))
    return at[:-1] - at[-1]


def of_speed(out: dict[str, D.Departure]) -> list[Sign]:
    return [s for metric, d in out.items() if SPEED.fullmatch(metric) for s in sign("implementation", metric, d)]


def in_common(found: dict[str, D.Residual], out: dict[str, D.Departure], signs: Sequence[Sign]) -> list[Sign]:
    """What all sets and the training loss do at once: of the implementation where routing and optimizer are quiet or move with it.

    Where only one of them moves, its own signs say it; the common loss then follows from it.
    """
    sets = [out[m] for m in found if SET_LOSS.fullmatch(m)]
    training = [d for m, d in out.items() if TRAINING.fullmatch(m)]
    if not sets or not training:
        return []
    typical = sorted(sets, key=lambda d: d.change)[len(sets) // 2]
    moved = [d for d in sets if abs(d.sigmas) >= D.SURE and d.change * typical.change > 0]
    if len(moved) < 0.75 * len(sets):
        return []
    whole = " from the first evaluation on, so rather the ladder's law or a setting than an event" if not typical.before else ""
    if not any(abs(d.sigmas) >= AGREES and d.change * typical.change > 0 for d in training):
        return sign("implementation", f"all {len(sets)} sets", typical, f"and not the training loss: the evaluation{whole}")
    others = {s.group for s in signs} & {"routing", "optimizer"}
    if len(others) == 1:
        return []
    how = "at once" + (" with routing and optimizer" if others else ", routing and optimizer quiet") + whole
    return sign("implementation", f"all {len(sets)} sets and the training loss", typical, how)


def all_of(
    log: logs.RunLog, run: spec.Run, home: Path, name: str, found: dict[str, D.Residual], out: dict[str, D.Departure]
) -> list[Sign]:
    """Every sign of a run, from its log, its residuals and their departures."""
    signs = [*broken(log), *rates(log, run), *of_sets(found), *of_routing(found, out), *of_optimizer(found, out)]
    signs += [*of_parameters(log, run, home, name), *of_speed(out)]
    return signs + in_common(found, out, signs)
