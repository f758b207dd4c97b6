"""When and how a metric left its forecast: a lasting change looked for in its residual, knowing what the forecast did not know."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import linalg

LEAST = 3  # rows of a residual below which nothing is said
SURE = 5.0  # standard errors of a change; a metric's rows and its noise's heavy tails together exceed it in under 1 in 1,000
BEND = 9.0  # of twice the log likelihood: what a ramp must gain over a step, since it dates a change earlier
WIDE = 1.645  # standard deviations from the middle to the end of a 90% band


class Residual(NamedTuple):
    """log actual less log mean at the evaluations of one metric, with the covariance that the forecast gives it."""

    metric: str
    steps: np.ndarray
    values: np.ndarray
    matrix: np.ndarray  # of what the run has in common: law, luck, distance
    noise: float  # of one evaluation on top
    widths: np.ndarray  # residual over the half of the registered 90% band on its side: 1 is the band's edge


class Departure(NamedTuple):
    """The likeliest lasting change of a residual: from which row on, how large, and in how many of its standard errors."""

    metric: str
    since: int  # the first row that is changed
    before: int  # the row before it; 0 where all rows are changed
    change: float  # of the logarithm
    sigmas: float
    widths: float  # of the last row
    step: int  # of the last row


def residuals(forecast: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Residual]:
    """Of every metric that a registered forecast and a run's rows (`points.of_run`) have in common at `LEAST` steps or more."""
    actual = {(r["metric"], int(r["step"])): float(r["value"]) for r in rows}
    blocks = forecast.get("covariance") or {}
    by_metric: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for i, row in enumerate(forecast["rows"]):
        known = row["mean"] is not None and row["lo90"] is not None
        if known and math.isfinite(actual.get((row["metric"], int(row["step"])), math.nan)):
            by_metric.setdefault(row["metric"], []).append((i, row))
    out = {}
    for metric, own in by_metric.items():
        found = residual(metric, own, actual, forecast["rows"], blocks.get(metric))
        if found is not None:
            out[metric] = found
    return out


def residual(
    metric: str,
    own: Sequence[tuple[int, dict[str, Any]]],
    actual: dict[tuple[str, int], float],
    rows: Sequence[dict[str, Any]],
    block: dict[str, Any] | None,
) -> Residual | None:
    """One metric's residual, or None where there are too few rows or values that have no logarithm.

    The covariance is registered at some rows; between them it is linear in the step. Without one the band stands for it: an error
    that is common to all rows.
    """
    zero = float((block or {}).get("zero") or 0.0)
    kept = [(i, r) for i, r in own if r["mean"] + zero > 0 and actual[metric, int(r["step"])] + zero > 0]
    if len(kept) < LEAST:
        return None
    steps = np.array([int(r["step"]) for _, r in kept])
    mean, low, high = (np.log(np.maximum([r[n] + zero for _, r in kept], 1e-12)) for n in ("mean", "lo90", "hi90"))
    values = np.log([actual[metric, int(s)] + zero for s in steps]) - mean
    half = np.maximum(np.where(values > 0, high - mean, mean - low), 1e-6)
    noise = float((block or {}).get("noise") or 0.25 * float(np.median(high - low)) / (2 * WIDE))
    if block and len(block["rows"]) > 1:
        at = np.array([int(rows[i]["step"]) for i in block["rows"]], dtype=float)
        order = np.argsort(at)
        known = np.array(block["matrix"], dtype=float)[np.ix_(order, order)]
        across = np.stack([np.interp(steps, at[order], line) for line in known])
        matrix = np.stack([np.interp(steps, at[order], line) for line in across.T], 1).T
        matrix = (matrix + matrix.T) / 2
    else:
        spread = (high - low) / (2 * WIDE)
        matrix = np.outer(spread, spread)
    return Residual(metric, steps, values, matrix, max(noise, 1e-5), values / half)


def departure(r: Residual) -> Departure:
    """The change, a step or a ramp in log step, from the row at which it explains the residual best.

    For a change x from row c on, with residuals of covariance S, the estimate is x' S^-1 r / x' S^-1 x, and the square of its
    number of standard errors is what the likelihood gains.
    """
    n = len(r.steps)
    factor = linalg.cho_factor(r.matrix + (r.noise**2 + 1e-12) * np.eye(n), lower=True)
    weighted = linalg.cho_solve(factor, r.values)
    best, found = -1.0, (0, 0.0, 0.0)
    for c in range(n):
        shapes = [((np.arange(n) >= c).astype(float), 0.0)]
        if 0 < c < n - 2:
            ramp = np.log(np.maximum(r.steps / r.steps[c - 1], 1.0))
            shapes.append((ramp / ramp[-1], BEND))
        for x, less in shapes:
            information = float(x @ linalg.cho_solve(factor, x))
            change = float(x @ weighted) / information
            if change**2 * information - less > best:
                best, found = change**2 * information - less, (c, change, change * math.sqrt(information))
    c, change, sigmas = found
    before = int(r.steps[c - 1]) if c else 0
    return Departure(r.metric, int(r.steps[c]), before, change, sigmas, float(r.widths[-1]), int(r.steps[-1]))


def contrast(one: Residual, others: Sequence[Residual]) -> Residual:
    """One residual less the median of its peers', which one of them that departs does not move: what it does and they do not.

    Peers share most of what the forecast did not know; a quarter of its covariance is kept for what they do not share.
    """
    shared = sorted(set(one.steps.tolist()).intersection(*(set(o.steps.tolist()) for o in others)))

    def at(r: Residual) -> np.ndarray:
        return np.searchsorted(r.steps, shared)

    mine = at(one)
    rest = one.values[mine] - np.median([o.values[at(o)] for o in others], axis=0)
    noise = math.sqrt(one.noise**2 + math.pi / 2 * sum(o.noise**2 for o in others) / len(others) ** 2)
    return Residual(one.metric, np.array(shared), rest, 0.25 * one.matrix[np.ix_(mine, mine)], noise, one.widths[mine])


def peers(residuals: dict[str, Residual], metrics: Sequence[str]) -> dict[str, Departure]:
    """The departure of each metric from the others of a family; of families of one, and too short ones, nothing."""
    family = [residuals[m] for m in metrics if m in residuals]
    out = {}
    for one in family:
        others = [o for o in family if o.metric != one.metric]
        if not others:
            continue
        rest = contrast(one, others)
        if len(rest.steps) >= LEAST:
            out[one.metric] = departure(rest)
    return out
