"""Metrics without a law of loss (gradient norm, drops, throughput): a smooth trend in scale and progress, with honest bands.

A Gaussian process in log: a line in log C and a smooth curve in progress whose slope in log C is smooth too, an offset of each run,
noise of each row. Its spreads are those that make the points likeliest, under weak priors; bands widen by Student t with the
runs' count, since the slope over few runs is known by their number and not by their rows.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import linalg, optimize, stats

from argosy.forecast import points as P

LENGTH = 0.2  # of the square root of progress over which curves bend
THIN, ROWS = 30, 600  # rows of a run, and of all runs, that are used
ZERO_SHARE = 0.1  # of the middle value: added before the logarithm where values are 0
# Spreads: level, slope per spread of log C, curve, its slope, run offset, noise; and how far they stray from their priors.
SPREADS = np.log([1.0, 0.5, 0.3, 0.1, 0.03, 0.03])
STRAY = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.5])


class Smooth(NamedTuple):
    """What the process is conditioned on."""

    x: np.ndarray  # log C, standardised
    u: np.ndarray  # square root of progress
    run: np.ndarray
    y: np.ndarray
    level: float
    spreads: np.ndarray  # logarithms
    zero: float
    runs: int


def kernel(spreads: np.ndarray, x: np.ndarray, u: np.ndarray, x2: np.ndarray, u2: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Covariance of rows with rows; `same` says which are of one run."""
    level, slope, curve, tilt, offset = np.exp(2 * spreads[:5])
    bend = np.exp(-(((u[:, None] - u2) / LENGTH) ** 2) / 2)
    cross = x[:, None] * x2
    return level + slope * cross + (curve + tilt * cross) * bend + offset * same


def places(table: P.Table, centre: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Scale and progress of each row; zeros where a table has none."""
    cells = P.derived(table)
    total = np.where(np.isnan(cells["g"]), 1.0, cells["g"])
    whole = np.log(np.maximum(np.where(np.isnan(cells["C"]), cells["N"], cells["C"] / total), 1e-300))
    return np.nan_to_num((whole - centre[0]) / centre[1]), np.sqrt(np.nan_to_num(cells["g"], nan=1.0))


def evenly(rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of the rows, the first and the last among them."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(len(rows), count)).round().astype(int))]


def fit(points: P.Table) -> Smooth:
    """The trend of one metric's points; values may be 0 but not negative."""
    runs = np.array(points.run)
    names = list(dict.fromkeys(points.run))
    most = max(3, min(THIN, ROWS // len(names)))
    keep = np.concatenate([evenly(np.flatnonzero(runs == name), most) for name in names])
    used = P.take(points, evenly(keep, ROWS))
    raw, _ = places(used, (0.0, 1.0))
    spread = float(raw.std())
    centre = (float(raw.mean()), spread if spread > 1e-3 else 1.0)  # of one size the slope is the prior's, by factors of e
    x, u = places(used, centre)
    positive = used.value[used.value > 0]
    zero = ZERO_SHARE * float(np.median(positive)) if len(positive) and (used.value == 0).any() else 0.0
    y = np.log(np.maximum(used.value + zero, 1e-12))
    run = np.array([names.index(r) for r in used.run])
    level = float(np.mean([y[run == k].mean() for k in range(len(names))]))
    same = run[:, None] == run

    def cost(spreads: np.ndarray) -> float:
        k = kernel(spreads, x, u, x, u, same)
        k[np.diag_indices_from(k)] += np.exp(2 * spreads[5])
        try:
            factor = linalg.cholesky(k, lower=True)
        except linalg.LinAlgError:
            return 1e9
        z = linalg.solve_triangular(factor, y - level, lower=True)
        return float(z @ z / 2 + np.log(np.diag(factor)).sum() + (((spreads - SPREADS) / STRAY) ** 2).sum() / 2)

    found = optimize.minimize(cost, SPREADS, method="L-BFGS-B", bounds=[(-8, 2)] * 6, options={"maxiter": 40})
    return Smooth(x, u, run, y, level, found.x, zero, len(names))._replace(spreads=np.append(found.x, centre))


def posterior(found: Smooth, target: P.Table) -> tuple[np.ndarray, np.ndarray]:
    """Mean [N] and covariance [N, N] of the target's rows in log, without the noise of one row; runs have offsets of their own."""
    spreads, centre = found.spreads[:6], (float(found.spreads[6]), float(found.spreads[7]))
    x, u = places(target, centre)
    k = kernel(spreads, found.x, found.u, found.x, found.u, found.run[:, None] == found.run)
    k[np.diag_indices_from(k)] += math.exp(2 * spreads[5])
    cross = kernel(spreads, x, u, found.x, found.u, np.zeros((len(x), len(found.x))))
    factor = linalg.cho_factor(k, lower=True)
    mean = found.level + cross @ linalg.cho_solve(factor, found.y - found.level)
    runs = np.array(target.run)
    own = kernel(spreads, x, u, x, u, runs[:, None] == runs)
    rest = own - cross @ linalg.cho_solve(factor, cross.T)
    rest[np.diag_indices_from(rest)] = np.maximum(np.diag(rest), 0)
    return mean, rest


def wide(found: Smooth, level: int) -> float:
    """Half the band of a level over its standard deviation: Student t with the runs' count."""
    return float(stats.t.ppf(0.5 + level / 200, max(found.runs - 1, 2)))


def predict(found: Smooth, target: P.Table) -> dict[str, np.ndarray]:
    """Mean (of the middle of the distribution) and bands of the target's rows."""
    mean, common = posterior(found, target)
    spread = np.sqrt(np.diag(common) + noise(found) ** 2)
    out = {"mean": mean}
    for level in (50, 90):
        half = wide(found, level) * spread
        out[f"lo{level}"], out[f"hi{level}"] = mean - half, mean + half
    return {name: np.maximum(np.exp(np.clip(value, -600, 600)) - found.zero, 0.0) for name, value in out.items()}


def covariance(found: Smooth, target: P.Table) -> tuple[np.ndarray, float]:
    """Covariance [N, N] of the target's rows in log (of the value plus `found.zero`) and the standard deviation of one row on top.

    Both are widened as the 90% band is, so that 1.645 of their standard deviations reach its edge.
    """
    _, common = posterior(found, target)
    more = wide(found, 90) / float(stats.norm.ppf(0.95))
    return common * more**2, noise(found) * more


def noise(found: Smooth) -> float:
    """The noise of one row, in log."""
    return math.exp(float(found.spreads[5]))


def parameters(found: Smooth) -> dict[str, float]:
    """The spreads in log and the slope's scale, by name."""
    names = ("level", "slope", "curve", "tilt", "offset", "noise")
    return dict(zip(names, np.exp(found.spreads[:6]).tolist(), strict=True))
