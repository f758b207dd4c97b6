"""How a run's statistics grow: slopes in log after warm-up, with errors that know that neighbouring updates are alike."""

import math
import re
from typing import NamedTuple

import numpy as np
from scipy import stats

from argosy import spec
from argosy.plan import scaling
from argosy.track.log import RunLog

BEGIN = 0.1  # of the finished updates: before that loss and norms fall from where the weights began
LATE = 0.5  # of the finished updates
BLOCKS = 48  # means over updates that a slope is fitted to
FEWEST = 8  # blocks below which a slope is not told
GROUPS = re.compile(r"(grad|params)/norm/.+|train/logit_z")


class Trend(NamedTuple):
    """The exponent p of value ~ step^p, its standard error and its degrees of freedom; NaN where there are too few rows."""

    slope: float
    error: float
    degrees: float

    def bound(self, side: int, chance: float = 0.05) -> float:
        """The slope less (side -1) or plus (side 1) what chance alone exceeds with this probability."""
        return self.slope + side * float(stats.t.ppf(1 - chance, self.degrees)) * self.error


class Growth(NamedTuple):
    """One positive statistic of a run: where it stands, and how it grows.

    `whole` is the trend after the first tenth of the finished updates and the warm-up, `late` that of their second half.
    `peak_at` is the share of the run's updates at which the smoothed value was largest, `peak` that value; `last` is the mean of the
    last tenth.
    """

    metric: str
    updates: int
    whole: Trend
    late: Trend
    peak: float
    peak_at: float
    last: float


UNKNOWN = Trend(math.nan, math.nan, math.nan)


def trend(steps: np.ndarray, values: np.ndarray) -> Trend:
    """The exponent of positive values in steps, by least squares on the logarithms of block means.

    Neighbouring residuals are correlated, by the run's own noise and because no curve is a power: the error is that of
    independent ones times sqrt((1 + r) / (1 - r)), r their correlation at distance one with its small-sample bias taken out
    (Marriott and Pope 1954), and the degrees of freedom shrink alike.

    >>> steps = np.arange(100, 1000)
    >>> round(trend(steps, 3.0 * steps**0.5).slope, 3)
    0.5
    """
    good = np.isfinite(values) & (values > 0) & (steps > 0)
    steps, values = steps[good], values[good]
    blocks = min(BLOCKS, len(steps))
    if blocks < FEWEST:
        return UNKNOWN
    parts = np.array_split(np.arange(len(steps)), blocks)
    x = np.array([np.log(steps[p]).mean() for p in parts])
    y = np.array([np.log(values[p]).mean() for p in parts])
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    rest = y - slope * x
    whole = float(rest @ rest)
    alike = float(rest[1:] @ rest[:-1]) / whole if whole > 1e-24 else 0.0
    r = min(max(alike + (1 + 4 * alike) / blocks, 0.0), 0.95)
    wider = (1 + r) / (1 - r)
    return Trend(slope, math.sqrt(whole / (blocks - 2) / float(x @ x) * wider), max((blocks - 2) / wider, 2.0))


def of_series(metric: str, steps: np.ndarray, values: np.ndarray, total: int, warmup: int = 0) -> Growth:
    """Growth of one statistic from its logged points."""
    done = int(steps[-1]) if len(steps) else 0
    after = steps > max(BEGIN * done, warmup)
    late = steps > max(LATE * done, warmup)
    good = after & np.isfinite(values)
    if not good.any():
        return Growth(metric, done, UNKNOWN, UNKNOWN, math.nan, math.nan, math.nan)
    parts = np.array_split(np.flatnonzero(good), min(BLOCKS, int(good.sum())))
    means = np.array([values[p].mean() for p in parts])
    top = int(np.argmax(means))
    return Growth(
        metric,
        done,
        trend(steps[after], values[after]),
        trend(steps[late], values[late]),
        float(means[top]),
        float(steps[parts[top]].mean() / total),
        float(values[end].mean()) if (end := good & (steps > 0.9 * done)).any() else math.nan,
    )


def upto(log: RunLog, metric: str, until: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A metric's points up to an update."""
    steps, values = log.series(metric)
    keep = steps <= (until if until is not None else math.inf)
    return steps[keep], values[keep]


def watched(names: list[str]) -> list[str]:
    """The logged metrics whose growth says something: gradient norms and parameter norms by group, and the logit scale.

    >>> watched(["grad/norm/total", "train/loss", "params/norm/head_gate", "params/norm/total", "train/logit_z"])
    ['grad/norm/total', 'params/norm/head_gate', 'train/logit_z']
    """
    return [n for n in names if GROUPS.fullmatch(n) and n != "params/norm/total"]


def growth(log: RunLog, until: int | None = None) -> dict[str, Growth]:
    """Growth of a run's watched statistics, from its first `until` updates or all it has."""
    run = spec.from_json(log.run["run"])
    total, warmup = spec.steps(run), scaling.rates(run).warmup_steps
    return {n: of_series(n, *upto(log, n, until), total, warmup) for n in watched(log.metrics)}
