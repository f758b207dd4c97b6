"""The reference ladder's own method: at each twentieth of training, one line through the rungs (marin#8435).

At the nominal fractions g = 5%, 10%, ..., 100%: log(L_r(g) - 1.5) is linear in log(g C_r) over the rungs r, with L_r(g) the
rung's evaluation nearest to g and C_r its whole FLOPs; the target is read at g of its own C, linear between fractions. An
unfinished rung goes on along the straight line through its last five fractions, plus a correction.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from argosy.forecast import points as P

ASYMPTOTE = 1.5
FRACTIONS = np.arange(1, 21) / 20
TAIL_POINTS = 5
NEAREST = 0.025  # an evaluation stands for the nominal fraction within this distance

WITHIN = 0.01  # of the first fraction: a run's own step count does not meet it exactly


class Tail(NamedTuple):
    """How unfinished rungs were continued."""

    correction: float
    source: str  # given, or the rule's mean error at 100% on finished rungs
    rungs: tuple[str, ...]


class Curve(NamedTuple):
    """The target's losses at the twenty fractions, NaN where the rungs have none, and the fit behind each."""

    mean: np.ndarray
    half: dict[int, np.ndarray]  # half width of the 50% and 90% interval, relative to L - 1.5, in log
    scale: np.ndarray
    exponent: np.ndarray
    tail: Tail


def snapped(table: P.Table) -> tuple[np.ndarray, float]:
    """One rung's loss at each of the twenty fractions (NaN where it has none) and its whole FLOPs."""
    cells = P.derived(table)
    fraction = cells["g"]
    value = np.full(len(FRACTIONS), math.nan)
    for i, g in enumerate(FRACTIONS):
        nearest = int(np.nanargmin(np.abs(fraction - g)))
        if abs(fraction[nearest] - g) <= NEAREST * (1 + 1e-9):
            value[i] = table.value[nearest]
    last = int(np.nanargmax(table.step))
    return value, float(cells["C"][last] / table.step[last] * table.steps_total[last])


def line(value: np.ndarray, end: int) -> np.ndarray:
    """The straight line through the five fractions up to `end`, at all fractions."""
    x = FRACTIONS[end + 1 - TAIL_POINTS : end + 1]
    slope, intercept = np.polyfit(x, value[end + 1 - TAIL_POINTS : end + 1], 1)
    return intercept + slope * FRACTIONS


def finished(rungs: dict[str, np.ndarray], correction: float | None) -> tuple[dict[str, np.ndarray], Tail]:
    """Rungs with their unfinished tails continued, and how.

    Raises:
        ValueError: for an unfinished rung with fewer than five fractions before its end.
    """
    cut = {name: int(np.flatnonzero(~np.isnan(v))[-1]) for name, v in rungs.items()}
    last = len(FRACTIONS) - 1
    short = tuple(name for name, end in cut.items() if end < last)
    if not short:
        return rungs, Tail(0.0, "no rung is unfinished", ())
    whole = [name for name in rungs if name not in short]
    source = "given"
    if correction is None:
        ends = {cut[name] for name in short}
        errors = [rungs[name][last] - line(rungs[name], end)[last] for name in whole for end in ends if end + 1 >= TAIL_POINTS]
        correction = float(np.mean(errors)) if errors else 0.0
        source = (
            f"the tail rule's mean error at 100% on {len(whole)} finished rungs" if errors else "no finished rung to measure it"
        )
    done = dict(rungs)
    for name in short:
        end = cut[name]
        if end + 1 < TAIL_POINTS or np.isnan(rungs[name][end + 1 - TAIL_POINTS : end + 1]).any():
            raise ValueError(
                f"{name} ends at {FRACTIONS[end]:.0%} of its run: per_fraction continues an unfinished rung from its last"
                f" {TAIL_POINTS} twentieths, which are not all there; leave the rung out or use --method joint"
            )
        done[name] = np.where(np.arange(last + 1) > end, line(rungs[name], end) + correction, rungs[name])
    return done, Tail(correction, source, short)


def curve(points: P.Table, target_flops: float, correction: float | None = None) -> Curve:
    """The target's curve at the twenty fractions from one metric's points.

    Args:
        points: rows of one metric, several runs, with step, steps_total and flops.
        target_flops: the target's FLOPs at 100%.
        correction: added to the continued part of unfinished rungs; None takes the rule's mean error on finished rungs.

    Raises:
        ValueError: fewer than two rungs, cells that the method needs and that are empty, losses not above 1.5.
    """
    names = list(dict.fromkeys(points.run))
    if len(names) < 2:
        raise ValueError(f"per_fraction draws a line through rungs and has {len(names)}; it needs at least 2")
    tables = {name: P.take(points, np.array([r == name for r in points.run])) for name in names}
    for name, table in tables.items():
        if np.isnan(P.derived(table)["g"]).all() or np.isnan(P.derived(table)["C"]).all():
            raise ValueError(f"per_fraction needs step, steps_total and flops, which {name} does not have; use --method joint")
        if (table.value <= ASYMPTOTE).any():
            raise ValueError(
                f"per_fraction takes {ASYMPTOTE} nats as the loss that no run gets below, and {name} has {table.value.min():g};"
                " it is a method for losses in nats per token of such a size; use --method joint"
            )
    read = {name: snapped(table) for name, table in tables.items()}
    values, tail = finished({name: v for name, (v, _) in read.items() if not np.isnan(v).all()}, correction)
    mean, scale, exponent = (np.full(len(FRACTIONS), math.nan) for _ in range(3))
    half = {level: np.full(len(FRACTIONS), math.nan) for level in (50, 90)}
    for i, g in enumerate(FRACTIONS):
        there = [name for name in values if not np.isnan(values[name][i])]
        if len(there) < 2:
            continue
        x = np.log([g * read[name][1] for name in there])
        y = np.log([values[name][i] - ASYMPTOTE for name in there])
        slope, intercept = np.polyfit(x, y, 1)
        at = math.log(g * target_flops)
        mean[i] = ASYMPTOTE + math.exp(intercept + slope * at)
        scale[i], exponent[i] = math.exp(intercept), -slope
        free = len(there) - 2
        if free:
            spread = math.sqrt(float(((y - intercept - slope * x) ** 2).sum()) / free)
            spread *= math.sqrt(1 + 1 / len(there) + (at - x.mean()) ** 2 / float(((x - x.mean()) ** 2).sum()))
            for level in half:
                half[level][i] = stats.t.ppf(0.5 + level / 200, free) * spread
    return Curve(mean, half, scale, exponent, tail)


def at(found: Curve, fraction: np.ndarray) -> dict[str, np.ndarray]:
    """Mean and bands at fractions of the run, linear between the twenty; NaN below the first that the rungs have."""
    known = ~np.isnan(found.mean)
    if not known.any():
        return {name: np.full(fraction.shape, math.nan) for name in ("mean", "lo50", "hi50", "lo90", "hi90")}
    read = {"mean": found.mean}
    for level, half in found.half.items():
        read[f"lo{level}"] = ASYMPTOTE + (found.mean - ASYMPTOTE) * np.exp(-half)
        read[f"hi{level}"] = ASYMPTOTE + (found.mean - ASYMPTOTE) * np.exp(half)
    first, last = FRACTIONS[known][[0, -1]]
    outside = (fraction < first * (1 - WITHIN)) | (fraction > last * (1 + WITHIN)) | np.isnan(fraction)
    return {
        name: np.where(outside, math.nan, np.interp(np.nan_to_num(fraction), FRACTIONS[known], column[known]))
        for name, column in read.items()
    }
