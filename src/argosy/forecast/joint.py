"""One law for all runs and fractions, with bands: the default method.

The law is `surface.log_loss`. Residuals are of log L, Student-t; each run with several rows has an offset of its own (the luck
of one run, and what the law misses about it). Bands come from refits: each draws new noise, a new place for every prior, a shape
of release by its weight, and leaves one run out now and then (many runs: weights them at random). To that the target's own
offset, what the law misses alike in all runs, noise of one evaluation and a share of the distance in scale are added.
"""

import math
from typing import NamedTuple

import numpy as np

from argosy.forecast import gap, least, surface, trend
from argosy.forecast import points as P

OFFSET = 0.0015  # spread of a run's offset in log L
NOISE_START, NOISE_LEAST = 0.003, 0.001  # no law is better than the latter
ROWS = 20  # a run's rows together count for at most this many
THIN, THIN_TABLE = 40, 1200  # and at most this many of them are used, and of all runs together, but for three of each
EARLIEST = 0.0499  # of a run; what lies before is not fitted where at least five rows lie after
STARTS, DRAWS = 8, 256
KEPT_SHAPES = 6
GAP_ROWS = 5  # two runs with as many say what the law misses alike in both
FEW_CURVES = 3  # with fewer runs the law's form is not tested by any
FEW_RUNS = 12  # up to here refits leave runs out; beyond, runs are weighted at random
PRIOR_DOUBT = 1.4  # the priors' places are drawn this many spreads wide: they are themselves guesses
STRAY = 0.02  # of log L: a row that lies this far off both of its neighbours says nothing of the law
WILD = 4.0  # robust spreads of the refits at a row: what lies beyond counts as this far
PER_DECADE = 0.002  # of log L, for each decade of FLOPs beyond the largest run
PER_DECADE_OF_RATIO = (
    0.015  # the same for tokens per parameter outside the runs': how N and D share the work is what a fit knows least
)
LEVELS = {"lo50": 0.25, "hi50": 0.75, "lo90": 0.05, "hi90": 0.95}


class Fitted(NamedTuple):
    """One metric's fit; draws are refits, [R, P]."""

    setting: surface.Setting
    rows: np.ndarray  # of the points given, those that were fitted
    runs: tuple[str, ...]
    run_of: np.ndarray
    best: np.ndarray
    shape: int
    draws: np.ndarray
    draw_shapes: np.ndarray
    left_out: np.ndarray  # of each draw: the run that it leaves out, -1 for none
    noise: float
    residual: np.ndarray  # log, of the fitted rows, offsets taken out
    cost: float


def chosen(points: P.Table) -> np.ndarray:
    """The rows to fit: without the first 5% of a run, at most `THIN` of each run and `THIN_TABLE` of all, the last ones among them."""
    fraction = P.derived(points)["g"]
    runs = np.array(points.run)
    keep: list[int] = []
    names = dict.fromkeys(points.run)
    most = min(THIN, max(3, THIN_TABLE // len(names)))
    for run in names:
        own = np.flatnonzero(runs == run)
        own = own[np.argsort(points.step[own], kind="stable")]
        late = own[~(fraction[own] < EARLIEST)]
        own = late if len(late) >= 5 else own
        keep += trend.evenly(own, most).tolist()
    return np.array(sorted(keep))


def fit(points: P.Table, target: P.Table, seed: int = 0, draws: int = DRAWS) -> Fitted:
    """The law's best parameters for one metric and `draws` refits of them.

    Args:
        points, target: rows of one metric, checked.
        seed: of the draws.
        draws: refits behind the bands; 0 for the best fit alone.
    """
    rows = chosen(points)
    used = P.take(points, rows)
    runs = tuple(dict.fromkeys(used.run))
    run_of = np.array([runs.index(r) for r in used.run])
    counts = np.bincount(run_of)
    s = surface.setting(used, target, P.paths(points, target), bool((counts >= 3).any()))
    several = np.flatnonzero(counts >= 3)
    offsets = OFFSET * (several[:, None] == run_of).astype(float)
    weight = np.minimum(1, ROWS / counts[run_of])
    y = np.log(used.value)
    rng = np.random.default_rng(seed)
    size = len(s.names) + len(several)
    noise = NOISE_START

    def model(which: np.ndarray):
        return lambda t, r: (surface.log_loss(s, t, which[r], s.points) + t[:, len(s.names) :] @ offsets) / noise

    which = np.zeros(STARTS, int)
    start = np.zeros((STARTS, size))
    start[1:, : len(s.names)] = rng.normal(size=(STARTS - 1, len(s.names)))
    theta, cost = np.zeros((1, size)), np.zeros(1)
    for round_ in range(3):
        theta, cost = least.solve(model(which), y[None] / noise, weight[None], np.zeros((1, size)), start, offsets / noise)
        order = np.argsort(cost)
        if round_ == 0:
            which = np.arange(len(s.shapes))
            start = np.repeat(theta[order[:1]], len(which), 0)
        else:
            which, start = which[order[:KEPT_SHAPES]], theta[order[:KEPT_SHAPES]]
        best = theta[order[0]]
        shape = int(which[0]) if round_ else 0
        residual = y - surface.log_loss(s, best[None], np.array([shape]), s.points)[0] - best[len(s.names) :] @ offsets
        if round_ < 2:
            noise = spread(residual, weight, len(s.names))
    theta, cost, which = theta[order][:KEPT_SHAPES], cost[order][:KEPT_SHAPES], which
    found = Fitted(s, rows, runs, run_of, best, shape, theta[:1], which[:1], np.full(1, -1), noise, residual, float(cost[0]))
    return refits(found, y, weight, offsets, theta, which, cost, rng, draws) if draws else found


def spread(residual: np.ndarray, weight: np.ndarray, parameters: int) -> float:
    """The noise of one row: root mean square of residuals clipped at three robust scales, for the parameters spent."""
    robust = 3 * math.sqrt(float(np.median(residual**2)) / 0.4549)
    mean = float((weight * np.minimum(residual**2, robust**2)).sum() / weight.sum())
    return max(math.sqrt(mean * len(residual) / max(1.0, len(residual) - 0.7 * parameters)), NOISE_LEAST)


def refits(found, y, weight, offsets, theta, which, cost, rng, draws) -> Fitted:
    """The fit with its draws."""
    s, noise = found.setting, found.noise
    likely = np.exp(-(cost - cost.min()) / 2)
    pick = rng.choice(len(which), size=draws, p=likely / likely.sum())
    counts = len(found.runs)
    weights = np.repeat(weight[None], draws, 0)
    left_out = np.full(draws, -1)
    if 3 <= counts <= FEW_RUNS:
        left_out = np.arange(draws) % (2 * counts)
        left_out[left_out >= counts] = -1
        weights *= left_out[:, None] != found.run_of
    elif counts > FEW_RUNS:
        weights *= rng.exponential(size=(draws, counts))[:, found.run_of]
    value = (y + noise * rng.normal(size=(draws, len(y))) / np.sqrt(weight)) / noise
    anchor = rng.normal(size=(draws, theta.shape[1]))
    anchor[:, : len(s.names)] *= PRIOR_DOUBT

    def model(t: np.ndarray, r: np.ndarray) -> np.ndarray:
        return (surface.log_loss(s, t, which[pick[r]], s.points) + t[:, len(s.names) :] @ offsets) / noise

    drawn, _ = least.solve(model, value, weights, anchor, theta[pick], offsets / noise, iterations=20, tolerance=1e-4)
    return found._replace(draws=drawn, draw_shapes=which[pick], left_out=left_out)


class Parts(NamedTuple):
    """What makes up the target's band, in log: the law, what is common to a run beyond it, and one evaluation."""

    mean: np.ndarray  # of the best fit, with what the law misses alike in all runs [N]
    curves: np.ndarray  # of the refits [R, N], with draws of that
    luck: float  # spread of the run's offset
    drift: np.ndarray  # spread of the distance in scale, common to the run [N]
    noise: float  # scale of one evaluation's noise, Student t


def parts(found: Fitted, points: P.Table, target: P.Table) -> Parts:
    """What `predict` and `covariance` are made of.

    Where runs differ in size, have fractions, and two of them rows enough, what the law misses alike in all of them is added (`gap`).
    """
    s = found.setting
    mean = surface.log_loss(s, found.best[None], np.array([found.shape]), s.target)[0]
    curves = surface.log_loss(s, found.draws, found.draw_shapes, s.target)
    noise = found.noise
    curved = {"N", "C"} & set(s.terms) and {"g", "lr"} & set(s.terms)
    if curved and (np.bincount(found.run_of) >= GAP_ROWS).sum() >= 2:
        own = P.take(points, found.rows)
        law = surface.log_loss(s, found.best[None], np.array([found.shape]), s.points)[0]
        rest = np.log(own.value) - law
        missed = gap.find(own, rest - alone(rest, found.run_of, own.step), found.run_of, target)
        values, vectors = np.linalg.eigh(missed.covariance)
        spread = vectors * np.sqrt(np.maximum(values, 0))
        curves = curves + np.random.default_rng(2).normal(size=curves.shape) @ spread.T
        mean, noise = mean + missed.mean, missed.noise
    return Parts(mean, curves, luck(found), drift(points, target), noise)


def alone(residual: np.ndarray, run_of: np.ndarray, step: np.ndarray) -> np.ndarray:
    """How far each row lies off its two neighbours in its run, where both lie far from it alone (a bad evaluation); else 0."""
    off, bend = np.zeros(len(residual)), []
    for k in range(run_of.max() + 1):
        own = np.flatnonzero(run_of == k)
        own = own[np.argsort(step[own], kind="stable")]
        if len(own) < 3:
            continue
        three = np.stack([residual[own[:-2]], residual[own[1:-1]], residual[own[2:]]])
        off[own[1:-1]] = three[1] - np.median(three, axis=0)
        bend += (three[1] - (three[0] + three[2]) / 2).tolist()
    scale = float(np.median(np.abs(bend))) / 0.6745 if bend else 0.0
    return np.where(np.abs(off) > max(STRAY, 6 * scale), off, 0)


def predict(p: Parts, seed: int = 1) -> dict[str, np.ndarray]:
    """Mean and bands of the target's rows, in the metric's unit."""
    rng = np.random.default_rng(seed)
    own = rng.normal(size=(3, len(p.curves), 1))
    heavy = np.sqrt(least.FREEDOM / rng.chisquare(least.FREEDOM, size=(len(p.curves), 1)))
    noisy = p.curves + p.luck * own[0] + p.noise * heavy * own[1] + p.drift * own[2]
    centre = np.median(p.curves, axis=0)
    bands = {name: np.exp(p.mean + np.quantile(noisy, q, axis=0) - centre) for name, q in LEVELS.items()}
    return {"mean": np.exp(p.mean), **bands}


def covariance(p: Parts) -> tuple[np.ndarray, float]:
    """Covariance [N, N] of log L between the target's rows of one run, and the standard deviation of one evaluation on top.

    It is of what `predict` draws: the refits' curves, the run's luck, the distance in scale. Curves far out count only as far as
    `WILD` robust spreads.
    """
    common = drawn_covariance(p.curves)
    return common + p.luck**2 + np.outer(p.drift, p.drift), p.noise * math.sqrt(least.FREEDOM / (least.FREEDOM - 2))


def drawn_covariance(curves: np.ndarray) -> np.ndarray:
    """Covariance [N, N] of drawn curves [R, N] about their median, each cut at `WILD` robust spreads."""
    rest = curves - np.median(curves, axis=0)
    bound = WILD * np.median(np.abs(rest), axis=0) / 0.6745
    rest = np.clip(rest, -bound, bound)
    return rest.T @ rest / len(rest)


def luck(found: Fitted) -> float:
    """Spread of the target's offset in log L: `OFFSET`, or more where the fitted runs' own offsets say so or there are only one or two."""
    own = found.best[len(found.setting.names) :]
    return OFFSET * max(1.0, FEW_CURVES / len(found.runs), math.sqrt((4 + 2 * float((own**2).sum())) / (4 + len(own))))


def drift(points: P.Table, target: P.Table) -> np.ndarray:
    """Spread of the target's rows in log L, common to all, for their distance from the points in FLOPs and in tokens per parameter.

    Points without sizes have no such ratio; there tokens or updates stand for it if fewer than three runs say how the loss falls with them.
    """
    cells, asked = P.derived(points), P.derived(target)
    if np.isnan(cells["N"]).any():
        name = "s" if np.isnan(cells["D"]).any() else "D"
        few = len(set(points.run)) < FEW_CURVES
        known, wanted = (cells[name], asked[name]) if few else (np.ones(1), np.ones(len(target)))
    else:
        known, wanted = cells["D"] / cells["N"], asked["D"] / asked["N"]
    far = PER_DECADE * beyond(cells["C"], asked["C"])
    return np.hypot(far, PER_DECADE_OF_RATIO * beyond(known, wanted, below=True))


def beyond(known: np.ndarray, asked: np.ndarray, below: bool = False) -> np.ndarray:
    """Decades from the largest that is known (or, `below`, from the smallest) to each that is asked; 0 inside or where not known."""
    if np.isnan(known).all():
        return np.zeros(len(asked))
    out = np.log10(np.maximum(asked, 1e-300) / np.nanmax(known))
    if below:
        out = np.maximum(out, np.log10(np.nanmin(known) / np.maximum(asked, 1e-300)))
    return np.nan_to_num(np.maximum(out, 0))
