"""How a ladder forecasts its own largest size: a band that missed it is widened, and says so.

A law that holds leaves its top rung inside the band that the smaller rungs give. Where it does not (small models that are still
learning to use context fall faster than a power law that is fitted before), nothing within the fit knows; this does.
"""

import math
from typing import Any

import numpy as np
from scipy import stats

from argosy.forecast import alarms, surface
from argosy.forecast import fit as fitting
from argosy.forecast import points as P

LEAST_SIZES = 3
NORMAL90 = float(stats.norm.ppf(0.95))
MOST = 10.0  # beyond it the law is not worth a band, and the alarm says so
MISSED = 1.0  # of the 90% band: the typical row of the later half lies outside

Body = dict[str, Any]


def backtest(rows: list[Body], method: str, seed: int) -> Body | None:
    """What one metric's points say of themselves when the largest size is left out; None where that cannot be asked.

    `left_out`: the runs of the largest size; `run`: the first of them, which is forecast; `error` of the mean at its last row and
    `mean_error` over all (forecast over measured, less one); `inside`: share of rows in the 90% band; `widths`: the later half's root
    mean square error over the half width of the 90% band.
    """
    sizes = np.array([row["active_params"] for row in rows])
    if not len(rows) or surface.sizes(sizes) < LEAST_SIZES:
        return None
    largest = sizes.max()
    small = [row for row in rows if row["active_params"] < largest]
    left = list(dict.fromkeys(row["run"] for row in rows if row["active_params"] == largest))
    top = [row for row in rows if row["run"] == left[0]]
    try:
        found = fitting.fit(P.of_rows(small), P.of_rows([row | {"value": None} for row in top], "TARGET"), method, seed=seed)[
            "rows"
        ]
    except ValueError:
        return None
    both = [(f, row["value"]) for f, row in zip(found, top, strict=True) if f["mean"] and f["lo90"] and row["value"] > 0]
    if not both:
        return None
    error = np.array([math.log(f["mean"] / value) for f, value in both])
    half = np.array([math.log(f["hi90"] / f["lo90"]) / 2 for f, _ in both])
    later = slice(len(both) // 2, None)
    return {
        "left_out": left,
        "run": left[0],
        "error": math.expm1(error[-1]),
        "mean_error": float(np.abs(np.expm1(error)).mean()),
        "inside": float(np.mean([f["lo90"] <= value <= f["hi90"] for f, value in both])),
        "widths": float(np.sqrt(np.mean((error[later] / np.maximum(half[later], 1e-12)) ** 2))),
    }


def factor(tested: Body | None) -> float:
    """By how much the bands of a metric are widened: as many spreads as the left-out size lay off, where that is more than one.

    >>> factor({"widths": 0.4}), round(factor({"widths": 2.0}), 2)
    (1.0, 3.29)
    """
    return min(max(1.0, NORMAL90 * tested["widths"]), MOST) if tested else 1.0


def widened(found: Body, metric: str, tested: Body | None, least: float = 1.0) -> Body:
    """A metric's fit with its bands and covariance widened about the mean, and an alarm where the largest size was missed.

    `least` is the headline's factor: one ladder and one law are behind all losses, and a set's own test is a single draw.
    """
    by = max(factor(tested), least)
    if by == 1.0:
        return found
    zero = found.get("covariance", {}).get(metric, {}).get("zero", 0.0)
    rows = [stretched(row, by, zero) for row in found["rows"]]
    out = {**found, "rows": rows}
    if block := found.get("covariance", {}).get(metric):
        matrix = [[float(f"{v * by * by:.4g}") for v in line] for line in block["matrix"]]
        out["covariance"] = found["covariance"] | {metric: block | {"matrix": matrix}}
    if tested and tested["widths"] > MISSED:
        message = (
            f"{metric}: without {', '.join(tested['left_out'])} the end of {tested['run']} is forecast {tested['error']:+.1%} off,"
            f" {tested['inside']:.0%} of its evaluations in the 90% band: the law does not hold over this ladder; bands are"
            f" {by:.1f} times as wide"
        )
        out["fit"] = found["fit"] | {"alarms": [*found["fit"]["alarms"], alarms.alarm("top_rung_missed", message)]}
    return out


def stretched(row: Body, by: float, zero: float) -> Body:
    """A row whose bands are so many times as wide, in log of the value and what was added to it."""
    if row["mean"] is None or row["lo90"] is None:
        return row
    out = dict(row)
    middle = math.log(max(row["mean"] + zero, 1e-300))
    for name in ("lo50", "hi50", "lo90", "hi90"):
        at = middle + by * (math.log(max(row[name] + zero, 1e-300)) - middle)
        out[name] = max(math.exp(min(at, 600.0)) - zero, 0.0)
    return out
