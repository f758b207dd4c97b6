"""The usual ways to extrapolate losses, written plainly: what the forecaster is measured against.

Each takes a case's points and target and weights of the points (for bootstraps) and returns the predicted values, NaN where the
method has nothing to say. Sources: Chinchilla approach 3 (2203.15556), variable projection with non-negative least squares
(Open-Athena 2026), Multi-Power Law (2503.12811), annealing momentum law (2408.11029).
"""

import itertools
import math

import numpy as np
from scipy.optimize import least_squares, minimize, nnls
from scipy.special import logsumexp

from argosy.forecast import per_fraction
from argosy.forecast import points as P

HUBER = 1e-3


def naive(points: P.Table, target: P.Table, weight: np.ndarray) -> np.ndarray:
    """log L linear in log C: at equal fraction in a ladder, over the runs of equal tokens per parameter, else on the frontier."""
    return by_family(points, target, weight, power)


def with_floor(points: P.Table, target: P.Table, weight: np.ndarray) -> np.ndarray:
    """E + A C^-a with E free, on the same families."""
    return by_family(points, target, weight, floored)


def power(x: np.ndarray, y: np.ndarray, w: np.ndarray, at: np.ndarray) -> np.ndarray:
    if len(np.unique(x[w > 0])) < 2:
        return np.full(at.shape, math.nan)
    slope, intercept = np.polyfit(x, np.log(y), 1, w=np.sqrt(w))
    return np.exp(intercept + slope * at)


def floored(x: np.ndarray, y: np.ndarray, w: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The floor on a grid of shares of the smallest loss; the rest is a line."""
    if len(np.unique(x[w > 0])) < 3:
        return np.full(at.shape, math.nan)
    best, found = math.inf, np.full(at.shape, math.nan)
    for floor in np.linspace(0, 0.98, 99) * y[w > 0].min():
        slope, intercept = np.polyfit(x, np.log(y - floor), 1, w=np.sqrt(w) * (y - floor) / y)
        cost = float((w * (np.log(floor + np.exp(intercept + slope * x)) - np.log(y)) ** 2).sum())
        if cost < best:
            best, found = cost, floor + np.exp(intercept + slope * at)
    return found


def by_family(points, target, weight, rule) -> np.ndarray:
    p, t = P.derived(points), P.derived(target)
    out = np.full(len(target), math.nan)
    if np.isnan(p["C"]).any():
        return out
    x, at = np.log(p["C"]), np.log(t["C"])
    fractions = not np.isnan(p["g"]).any() and len(set(points.run)) < len(points)
    if fractions and ratio_families(points) is None:
        for i, g in enumerate(t["g"]):
            rows = []
            for run in dict.fromkeys(points.run):
                own = np.flatnonzero([r == run for r in points.run])
                nearest = own[np.abs(p["g"][own] - g).argmin()]
                if abs(p["g"][nearest] - g) < 0.026:
                    rows.append(nearest)
            if len(rows) > 1:
                out[i] = rule(x[rows], points.value[rows], weight[rows], at[i : i + 1])[0]
        return out
    rows = last_rows(points)
    families = ratio_families(points)
    if families is None:
        order = rows[np.argsort(x[rows])]
        frontier = [i for k, i in enumerate(order) if points.value[i] <= points.value[order[: k + 1]].min()]
        return rule(x[frontier], points.value[frontier], weight[frontier], at)
    ratio = np.round(np.log2(t["D"] / t["N"] / 10)).astype(int)
    for r in set(ratio):
        own = [i for i in rows if families[i] == r]
        if own:
            out[ratio == r] = rule(x[own], points.value[own], weight[own], at[ratio == r])
    return out


def last_rows(points: P.Table) -> np.ndarray:
    last: dict[str, int] = {}
    for i, run in enumerate(points.run):
        if run not in last or not points.step[i] <= points.step[last[run]]:
            last[run] = i
    return np.array(sorted(last.values()))


def ratio_families(points: P.Table) -> dict[int, int] | None:
    """Last rows by tokens per parameter, where several sizes share several ratios (a grid); else None."""
    rows, cells = last_rows(points), P.derived(points)
    ratio = {int(i): round(math.log2(cells["D"][i] / cells["N"][i] / 10)) for i in rows if cells["D"][i] == cells["D"][i]}
    sizes = {r: {round(math.log(cells["N"][i]), 3) for i in ratio if ratio[i] == r} for r in set(ratio.values())}
    grid = len(sizes) >= 3 and all(len(s) >= 2 for s in sizes.values()) and len(rows) < 40
    return ratio if grid and len(set(np.round(np.log(cells["N"][rows]), 3))) <= 3 else None


def pointwise(points: P.Table, weight: np.ndarray) -> tuple[np.ndarray, ...]:
    """What the pointwise surfaces are fitted to: every finished model, or every row of a ladder."""
    cells = P.derived(points)
    rows = (
        last_rows(points)
        if ratio_families(points) is not None or len(set(points.run)) == len(points)
        else np.arange(len(points))
    )
    return np.log(cells["N"][rows]), np.log(cells["D"][rows]), points.value[rows], weight[rows]


STARTS = list(itertools.product((0.0, 1.0), (0.2, 0.5, 1.0), (0.2, 0.5, 1.0), (5.0, 10.0), (5.0, 10.0)))


def chinchilla(points: P.Table, target: P.Table, weight: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """E + A N^-a + B D^-b, sum of Huber losses of log L, L-BFGS from a grid of starts."""
    n, d, y, w = pointwise(points, weight)
    t = P.derived(target)
    if np.isnan(n).any() or np.isnan(d).any():
        return np.full(len(target), math.nan)
    y = np.log(y)

    def terms(v: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
        return np.stack([v[3] - v[1] * n, v[4] - v[2] * d, np.full(n.shape, v[0])])

    def cost(v: np.ndarray) -> tuple[float, np.ndarray]:
        parts = terms(v, n, d)
        total = logsumexp(parts, axis=0)
        r = total - y
        inside = np.abs(r) <= HUBER
        value = np.where(inside, r * r / 2, HUBER * (np.abs(r) - HUBER / 2))
        slope = w * np.where(inside, r, HUBER * np.sign(r))
        share = np.exp(parts - total) * slope
        return float((w * value).sum()) * 1e3, 1e3 * np.array(
            [share[2].sum(), -(share[0] * n).sum(), -(share[1] * d).sum(), share[0].sum(), share[1].sum()]
        )

    starts = STARTS if start is None else [start]
    found = [
        minimize(cost, v, jac=True, method="L-BFGS-B", options={"maxiter": 2000, "ftol": 1e-13, "gtol": 1e-9}) for v in starts
    ]
    best = min(found, key=lambda f: f.fun)
    chinchilla.last = best.x  # where a bootstrap starts
    return np.exp(logsumexp(terms(best.x, np.log(t["N"]), np.log(t["D"])), axis=0))


def vpnls(points: P.Table, target: P.Table, weight: np.ndarray) -> np.ndarray:
    """The same surface, relative least squares: exponents on a grid and refined, E, A, B by non-negative least squares."""
    n, d, y, w = pointwise(points, weight)
    t = P.derived(target)
    if np.isnan(n).any() or np.isnan(d).any():
        return np.full(len(target), math.nan)
    scale = np.sqrt(w) / y
    n0, d0 = n.mean(), d.mean()

    def inner(v: np.ndarray) -> tuple[np.ndarray, float]:
        design = np.stack([np.ones_like(n), np.exp(-v[0] * (n - n0)), np.exp(-v[1] * (d - d0))], 1)
        return nnls(design * scale[:, None], y * scale)

    grid = [(a, b) for a in np.linspace(0.05, 1.2, 16) for b in np.linspace(0.05, 1.2, 16)]
    best = min(grid, key=lambda v: inner(np.array(v))[1])
    v = minimize(lambda v: inner(np.clip(v, 0.01, 3))[1], best, method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-9}).x
    e, a, b = inner(np.clip(v, 0.01, 3))[0]
    return e + a * np.exp(-v[0] * (np.log(t["N"]) - n0)) + b * np.exp(-v[1] * (np.log(t["D"]) - d0))


def reference(points: P.Table, target: P.Table, weight: np.ndarray) -> np.ndarray:
    """The reference ladder's per-fraction method; weights of 0 leave rows out of nothing, so its bootstrap is over runs."""
    t = P.derived(target)
    try:
        found = per_fraction.curve(P.take(points, np.flatnonzero(weight > 0)), float((t["C"] / t["g"])[-1]))
    except ValueError:
        return np.full(len(target), math.nan)
    return per_fraction.at(found, t["g"])["mean"]


# ---- schedules -----------------------------------------------------------------------------------


def every_step(points: P.Table, target: P.Table) -> dict[str, np.ndarray]:
    """The rate of every update from the first row on; a run's rates are linear between its rows."""
    rates = P.paths(points, target)
    return {run: np.interp(np.arange(int(path.step[-1]) + 1), path.step, path.lr) for run, path in rates.items()}


def schedule_case(points: P.Table, target: P.Table) -> bool:
    return np.isnan(points.tokens).all() and not np.isnan(points.lr).any()


def fit_curves(points, target, weight, features, start, law) -> np.ndarray:
    """Huber-free least squares of log L on features of every row, then the target's rows."""
    if not schedule_case(points, target):
        return np.full(len(target), math.nan)
    known, asked = features(points), features(target)
    y = np.log(points.value)
    f = lambda v: np.sqrt(weight) * (np.log(np.maximum(law(v, known), 0.1)) - y)  # noqa: E731
    found = [least_squares(f, s, loss="soft_l1", f_scale=1e-3, max_nfev=400) for s in start]
    return law(min(found, key=lambda r: r.cost).x, asked)


def tissue(points: P.Table, target: P.Table, weight: np.ndarray, decay: float = 0.999) -> np.ndarray:
    """L0 + A S1^-a - C S2, S2 the momentum area of the rate's drops."""
    rates = every_step(points, target) if schedule_case(points, target) else {}

    def features(table: P.Table) -> tuple[np.ndarray, np.ndarray]:
        s1, s2 = np.zeros(len(table)), np.zeros(len(table))
        for run in dict.fromkeys(table.run):
            lr = rates[run]
            own = np.flatnonzero([r == run for r in table.run])
            momentum = np.zeros(len(lr))
            for k in range(int(np.argmax(lr)) + 1, len(lr)):
                momentum[k] = decay * momentum[k - 1] + lr[k - 1] - lr[k]
            at = table.step[own].astype(int)
            s1[own], s2[own] = np.cumsum(lr)[at], np.cumsum(momentum)[at]
        return s1, s2

    law = lambda v, f: v[0] + np.exp(v[1]) * f[0] ** -np.exp(v[2]) - np.exp(v[3]) * f[1]  # noqa: E731
    starts = [(2.8, math.log(0.5), math.log(a), math.log(c)) for a in (0.4, 0.6) for c in (0.2, 1.0)]
    return fit_curves(points, target, weight, features, starts, law)


def multi_power(points: P.Table, target: P.Table, weight: np.ndarray) -> np.ndarray:
    """L0 + A S^-a - B sum of drops times 1 - (1 + C eta_k^-g S_k)^-b."""
    rates = every_step(points, target) if schedule_case(points, target) else {}

    def features(table: P.Table) -> list[tuple[np.ndarray, ...]]:
        found = []
        for run in dict.fromkeys(table.run):
            lr = rates[run]
            own = np.flatnonzero([r == run for r in table.run])
            total = np.cumsum(lr)
            grid = np.unique(np.linspace(int(np.argmax(lr)), len(lr) - 1, 257).astype(int))  # drops in up to 256 pieces
            drop = lr[grid[:-1]] - lr[grid[1:]]
            grid, drop = grid[1:][drop != 0], drop[drop != 0]
            at = table.step[own].astype(int)
            found.append((own, total[at], drop, lr[grid], np.maximum(total[at][:, None] - total[grid][None], 0)))
        return found

    def law(v: np.ndarray, features) -> np.ndarray:
        out = np.zeros(sum(len(f[0]) for f in features))
        for own, s, drop, lr, since in features:
            gain = (drop * (1 - (1 + np.exp(v[4]) * lr ** -v[6] * since) ** -np.exp(v[5]))).sum(1) if len(drop) else 0.0
            out[own] = v[0] + np.exp(v[1]) * s ** -np.exp(v[2]) - np.exp(v[3]) * gain
        return out

    starts = [(2.8, math.log(0.5), math.log(0.5), math.log(400.0), math.log(1.0), math.log(b), 0.6) for b in (0.4, 0.6)]
    return fit_curves(points, target, weight, features, starts, law)


METHODS = {
    "naive": naive,
    "power+E": with_floor,
    "Chinchilla": chinchilla,
    "VPNLS": vpnls,
    "per_fraction": reference,
    "Tissue": tissue,
    "MPL": multi_power,
}
