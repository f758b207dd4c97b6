"""What speaks for a cause of a departure: sets that leave the others, layers, parameter groups, speed, values that are no numbers."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from argosy import spec
from argosy.forecast import follow
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
SMALLEST = 0.02  # of log: how well a parameter norm's growth is known at best


class Sign(NamedTuple):
    """One thing that speaks for a group: what, since which update, and how strongly, in standard errors."""

    group: str
    what: str
    since: int
    sigmas: float
    says: str


def sign(group: str, what: str, d: D.Departure, says: str = "") -> list[Sign]:
    """A change as a sign of a group, if it is sure."""
    if not D.sure(d):
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


def alone(found: dict[str, D.Residual], out: dict[str, D.Departure], family: Sequence[str]) -> dict[str, D.Departure]:
    """Members of a family that depart from their forecast and from the others: peers may share less than the forecast thinks."""
    return {m: d for m, d in D.peers(found, family).items() if D.departs(out[m])}


def of_sets(found: dict[str, D.Residual], out: dict[str, D.Departure]) -> list[Sign]:
    """Evaluation sets that leave the others."""
    sets = [m for m in found if SET_LOSS.fullmatch(m)]
    signs = []
    for metric, d in alone(found, out, sets).items():
        name = SET_LOSS.fullmatch(metric)
        signs += sign("data", f"loss of {name.group(1) if name else metric}", d, "against the other sets")
    return signs


def of_routing(found: dict[str, D.Residual], out: dict[str, D.Departure]) -> list[Sign]:
    """Layers that leave the others, and statistics of all layers."""
    signs = []
    for what in dict.fromkeys(m.group(2) for m in map(LAYER.fullmatch, found) if m):
        family = [m for m in found if (hit := LAYER.fullmatch(m)) and hit.group(2) == what]
        for metric, d in alone(found, out, family).items():
            layer = LAYER.fullmatch(metric)
            signs += sign("routing", f"{what} of layer {layer.group(1) if layer else metric}", d, "against the other layers")
    for metric, d in out.items():
        if ROUTING.fullmatch(metric) and not LAYER.fullmatch(metric) and D.departs(d):
            signs += sign("routing", metric, d)
    return signs


def of_optimizer(found: dict[str, D.Residual], out: dict[str, D.Departure]) -> list[Sign]:
    """Parameter groups whose gradients leave the others, the whole gradient, the logits' scale."""
    signs = []
    groups = [m for m in found if GRADIENT.fullmatch(m)]
    for metric, d in alone(found, out, groups).items():
        signs += sign("optimizer", f"gradient of {metric.rpartition('/')[2]}", d, "against the other groups")
    for metric in ("grad/norm/total", "train/logit_z"):
        if metric in out and D.departs(out[metric]):
            signs += sign("optimizer", metric, out[metric])
    return signs


def of_parameters(log: logs.RunLog, run: spec.Run, home: Path, name: str) -> list[Sign]:
    """Parameter groups whose norm grows otherwise than the ladder's sizes say at equal progress; nothing without three of them.

    Norms are not forecast: growth since `BEGUN` is compared with a line in log width through the sizes', and with what is not known
    of that line, by Student t, and of how far it may be followed.
    """
    if not ladders.path_of(home, name).is_file():
        return []
    try:
        folders = [home / "runs" / e["name"] for e in ladders.load(home, name)["rungs"] if e["purpose"] == "size"]
        rungs = [logs.read(f) for f in folders if (f / "run.json").is_file()]
    except ValueError:  # the registered forecast is whole without the ladder
        return []
    total = spec.steps(run)
    out = []
    for metric in filter(PARAMETER.fullmatch, log.metrics):
        own = [r for r in rungs if metric in r.metrics]
        steps = np.array([s for s in points.evaluation_steps(run) if s > BEGUN * total and s <= log.series(metric)[0][-1]])
        if len(own) < 3 or len(steps) < D.LEAST:
            continue
        widths = [spec.from_json(r.run["run"]) for r in own]
        grown = np.array([growth_at(r, metric, spec.steps(w), steps / total) for r, w in zip(own, widths, strict=True)])
        due, spread = followed(np.log([w.model.width / run.model.width for w in widths]), grown)
        values, noise = growth_at(log, metric, total, steps / total) - due, np.full(len(steps), SMALLEST)
        spread = np.maximum.accumulate(spread)
        alike = follow.drift(steps / total, steps / total, 1.0)
        r = D.Residual(metric, steps, values, alike * np.outer(spread, spread), noise, np.zeros(len(steps)))
        group = PARAMETER.fullmatch(metric)
        out += sign(
            "optimizer", f"norm of {group.group(1) if group else metric}", D.departure(r), "against the ladder's growth"
        )
    return out


def followed(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The value at x = 0 of lines through columns y, and a standard deviation: of a new point by Student t, and half of the way there."""
    n, centre = len(x), x - x.mean()
    slope = centre @ y / (centre @ centre) if np.ptp(x) > 0 else np.zeros(y.shape[1])
    at = y.mean(0) - slope * x.mean()
    rest = y - y.mean(0) - np.outer(centre, slope)
    error = np.sqrt((rest**2).sum(0) / max(n - 2, 1) * (1 + 1 / n + x.mean() ** 2 / max(float(centre @ centre), 1e-9)))
    wider = float(stats.t.ppf(0.95, max(n - 2, 1)) / stats.norm.ppf(0.95))
    way = 0.5 * np.abs(at - y[np.argmax(x)])
    return at, np.maximum(np.hypot(wider * error, way), SMALLEST)


def growth_at(log: logs.RunLog, metric: str, total: int, shares: np.ndarray) -> np.ndarray:
    """log of a metric at shares of a run less that at `BEGUN`; linear between logged points."""
    steps, values = log.series(metric)
    at = np.interp(np.append(shares, BEGUN) * total, steps, np.log(np.maximum(values, 1e-30)))
    return at[:-1] - at[-1]


def of_speed(out: dict[str, D.Departure]) -> list[Sign]:
    far = [metric for metric, d in out.items() if SPEED.fullmatch(metric) and D.departs(d)]
    return [s for metric in far for s in sign("implementation", metric, out[metric])]


def in_common(found: dict[str, D.Residual], out: dict[str, D.Departure], signs: Sequence[Sign]) -> list[Sign]:
    """What all sets and the training loss do at once: of the implementation where routing and optimizer are quiet or move with it.

    Where only one of them moves, its own signs say it; the common loss then follows from it.
    """
    sets = [out[m] for m in found if SET_LOSS.fullmatch(m)]
    training = [d for m, d in out.items() if TRAINING.fullmatch(m)]
    if not sets or not training:
        return []
    typical = sorted(sets, key=lambda d: d.change)[len(sets) // 2]
    moved = [d for d in sets if D.sure(d) and d.change * typical.change > 0]
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
    signs = [*broken(log), *rates(log, run), *of_sets(found, out), *of_routing(found, out), *of_optimizer(found, out)]
    signs += [*of_parameters(log, run, home, name), *of_speed(out)]
    return signs + in_common(found, out, signs)
