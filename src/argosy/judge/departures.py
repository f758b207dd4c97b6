"""When and how a metric left its forecast: a lasting change looked for in its residual, knowing what the forecast did not know.

The model of a residual is that of `forecast.follow`: the registered covariance, a slow error of the law, noise whose scale the curve
itself may raise, and less weight for an evaluation that its neighbours do not bear out. There a change must be certain at any time;
here the run is over or stopped, and the question is where the change began and how large it is.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import linalg

from argosy.forecast import follow
from argosy.forecast import points as P
from argosy.judge import verdict

LEAST = 3  # rows of a residual below which nothing is said
SURE = 5.0  # standard errors of a change; a metric's rows and its noise's heavy tails together exceed it in under 1 in 1,000
BEND = 9.0  # of twice the log likelihood: what a ramp must gain over a step, since it dates a change earlier
UNSHARED = 0.25  # of a metric's covariance that its peers do not share


class Residual(NamedTuple):
    """log actual less log mean at the evaluations of one metric, with the covariance that the forecast gives it."""

    metric: str
    steps: np.ndarray
    values: np.ndarray
    matrix: np.ndarray  # of what the rows have in common: law, luck, distance, the law's slow error
    noise: np.ndarray  # standard deviation of each row on top
    widths: np.ndarray  # how far beyond the registered 90% band, in halves of it; 0 inside


class Departure(NamedTuple):
    """The likeliest lasting change of a residual: from which row on, how large, and in how many of its standard errors."""

    metric: str
    since: int  # the first row that is changed
    before: int  # the row before it; 0 where all rows are changed
    change: float  # of the logarithm
    sigmas: float
    widths: float  # of the last row
    step: int  # of the last row


def residuals(body: dict[str, Any], rows: Sequence[dict[str, Any]], total: int) -> dict[str, Residual]:
    """Of every metric that a registered forecast and a run's rows (`points.of_run`) have in common at `LEAST` steps or more."""
    measured: dict[str, dict[int, float]] = {}
    for row in rows:
        measured.setdefault(row["metric"], {})[int(row["step"])] = float(row["value"])
    found = {metric: residual(body, metric, values, total) for metric, values in measured.items()}
    return {metric: r for metric, r in found.items() if r is not None}


def residual(body: dict[str, Any], metric: str, measured: dict[int, float], total: int) -> Residual | None:
    """One metric's residual, or None without bands, with too few rows, or with none that has a logarithm."""
    known = verdict.registered(body, metric, total)
    if known is None:
        return None
    first, last = known.progress[0] * total, known.progress[-1] * total
    steps = [s for s in sorted(measured) if first - 0.5 < s < last + 0.5]
    steps = [s for s in steps if math.isfinite(measured[s]) and measured[s] + known.zero > 0]
    if len(steps) < LEAST:
        return None
    progress = np.array(steps) / total
    place, reads = follow.at(progress, known.progress), follow.at(progress, known.knots)
    values = np.log(np.array([measured[s] for s in steps]) + known.zero) - place @ known.mean
    high, low = place @ (known.high - known.mean), place @ (known.mean - known.low)
    scale = follow.scale_of(known, values)
    matrix = reads @ known.covariance @ reads.T + follow.drift(progress, progress, follow.drift_spread(known))
    widths = np.maximum(values - high, 0) / high - np.maximum(-values - low, 0) / low
    return Residual(metric, np.array(steps), values, matrix, scale / np.sqrt(follow.weights(values, scale)), widths)


def departure(r: Residual) -> Departure:
    """The change, a step or a ramp in log step, from the row at which it explains the residual best.

    For a change x from row c on, with residuals of covariance S, the estimate is x' S^-1 r / x' S^-1 x, and the square of its
    number of standard errors is what the likelihood gains.
    """
    n = len(r.steps)
    factor = linalg.cho_factor(r.matrix + np.diag(r.noise**2 + 1e-12), lower=True)
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


def sure(d: Departure) -> bool:
    """Whether there was a change that chance does not make."""
    return abs(d.sigmas) >= SURE


def departs(d: Departure) -> bool:
    """Whether a change is one from the forecast: sure, and of a loss or of what is beyond its band now.

    How a loss may bend is the law's to say. Of other metrics the ladder's few runs say it, and no covariance from five runs is known
    to five standard errors: in five undisturbed runs of pocket the gradient of attention moved by 40%, at 7 to 8 of them, within bands
    that are as wide as so few runs make them.
    """
    return sure(d) and (P.kind(d.metric) == "loss" or d.widths != 0)


def contrast(one: Residual, others: Sequence[Residual]) -> Residual:
    """One residual less the median of its peers', which one of them that departs does not move: what it does and they do not.

    Peers share most of what the forecast did not know; `UNSHARED` of its covariance is kept for what they do not share.
    """
    shared = sorted(set(one.steps.tolist()).intersection(*(set(o.steps.tolist()) for o in others)))

    def at(r: Residual) -> np.ndarray:
        return np.searchsorted(r.steps, shared)

    mine = at(one)
    rest = one.values[mine] - np.median([o.values[at(o)] for o in others], axis=0)
    theirs = np.sum([o.noise[at(o)] ** 2 for o in others], axis=0) / len(others) ** 2
    noise = np.sqrt(one.noise[mine] ** 2 + math.pi / 2 * theirs)
    return Residual(one.metric, np.array(shared), rest, UNSHARED * one.matrix[np.ix_(mine, mine)], noise, one.widths[mine])


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
