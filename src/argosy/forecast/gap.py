"""What the law misses alike in all runs: a smooth curve in progress, with a slope in scale, found in the law's own residuals.

A Gaussian process as in `trend`, on log residuals. Its spreads begin near nothing (0.03%) and may grow a hundredfold where the points
ask for it: on ladders that the law fits it adds a few hundredths of a percent; where small runs pass through a phase that no power law
describes, all of them miss it at like fractions, more so the larger ones, and so will the target.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import linalg, optimize

from argosy.forecast import points as P
from argosy.forecast import trend

# Spreads: level, slope per spread of log C, curve, its slope, run offset, noise; and how far they stray from these, in log.
SPREADS = np.log([0.0003, 0.0003, 0.0003, 0.0003, 0.0015, 0.002])
STRAY = np.array([2.0, 2.0, 2.0, 2.0, 0.5, 1.0])
NOISE_LEAST = 0.001
DOUBT = 0.5  # of what is added: no law carries it beyond the points, so half of it is its spread, common to all rows
ROWS = 400  # thinned to so many


class Gap(NamedTuple):
    """What is to be added to the law's log, its covariance [N, N] over the target's rows, and the noise left in one row."""

    mean: np.ndarray
    covariance: np.ndarray
    noise: float


def find(points: P.Table, residual: np.ndarray, run_of: np.ndarray, target: P.Table) -> Gap:
    """The gap at the target's rows, from the law's log residuals at the points.

    Args:
        points: the rows that were fitted.
        residual: log of value over law, of each of them.
        run_of: which run each belongs to.
        target: the rows to forecast.
    """
    keep = trend.evenly(np.arange(len(residual)), ROWS)
    raw, _ = trend.places(points, (0.0, 1.0))
    spread = float(raw.std())
    centre = (float(raw.mean()), spread if spread > 1e-3 else 1.0)
    x, u = (column[keep] for column in trend.places(points, centre))
    y, run = residual[keep], run_of[keep]
    same = run[:, None] == run

    def rows(spreads: np.ndarray) -> np.ndarray:
        k = trend.kernel(spreads, x, u, x, u, same)
        k[np.diag_indices_from(k)] += np.exp(2 * spreads[5])
        return k

    def cost(spreads: np.ndarray) -> float:
        factor = linalg.cholesky(rows(spreads), lower=True)
        z = linalg.solve_triangular(factor, y, lower=True)
        return float(z @ z / 2 + np.log(np.diag(factor)).sum() + (((spreads - SPREADS) / STRAY) ** 2).sum() / 2)

    spreads = optimize.minimize(cost, SPREADS, method="L-BFGS-B", bounds=[(-10, 0)] * 5 + [(-8, 0)], options={"maxiter": 40}).x
    factor = linalg.cho_factor(rows(spreads), lower=True)
    x2, u2 = trend.places(target, centre)
    nothing = np.zeros((len(x2), len(x2)))  # the target's own offset is the law's luck
    cross = trend.kernel(spreads, x2, u2, x, u, np.zeros((len(x2), len(x))))
    own = trend.kernel(spreads, x2, u2, x2, u2, nothing)
    mean = cross @ linalg.cho_solve(factor, y)
    doubt = np.outer(DOUBT * mean, DOUBT * mean)
    return Gap(mean, own - cross @ linalg.cho_solve(factor, cross.T) + doubt, max(math.exp(float(spreads[5])), NOISE_LEAST))
