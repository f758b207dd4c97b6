"""What a reader of a forecast must be told: one code and one sentence each.

few_sizes, unfinished_run, inside_range, early_off_trend, run_off_trend, row_off_trend, ill_conditioned, asymptote_above_known, leave_one_out,
envelope_pointwise, forms_disagree, too_few_runs, repeated_rows, untrained_rows, batch_changes, steps_total_changes, mixed_params,
no_progress, coarse_rates, law_misses
"""

import math

import numpy as np

from argosy.forecast import joint, least, surface
from argosy.forecast import points as P

UNFINISHED = 0.975  # of its steps
ONE_PERCENT = 0.01
GAP = 0.02  # of log L, added to the law
CONDITION, LOOSE = 1e5, 3  # of the points' derivatives in prior spreads; directions that they leave to the prior
OFF_TREND, OTHER_UNITS = 0.03, 0.25  # of log L, the middle of a run's residuals
TWO_UNITS = 0.5  # of log L between the middles of two runs: bits per byte and nats are a factor of 2 to 3
EARLY = 0.004  # of log L, a run's first point
FLOOR_MOVED = surface.FLOOR_SPREAD  # logits of the floor's share, either way
FAR, FALL = 0.1, 0.15  # of the run between two rows, and of the peak rate: together, a schedule that its rows do not tell
EQUAL = 3.0  # of twice the log likelihood: forms closer than this fit equally

Alarm = dict[str, str]


def alarm(code: str, message: str) -> Alarm:
    return {"code": code, "message": message}


def tables(points: P.Table, target: P.Table, metric: str) -> list[Alarm]:
    """Alarms from the tables of one metric alone."""
    cells, asked = P.derived(points), P.derived(target)
    found = []
    if not np.isnan(cells["N"]).any() and (count := surface.sizes(cells["N"])) < 3:
        found.append(
            alarm("few_sizes", f"{metric}: {count} model size(s); fewer than three leave floor and exponent to the prior")
        )
    elif np.isnan(cells["N"]).any() and len(set(points.run)) < 3:
        found.append(alarm("too_few_runs", f"{metric}: {len(set(points.run))} run(s); the trend in scale is the prior's"))
    fraction = cells["g"]
    runs = np.array(points.run)
    if (
        P.kind(metric) == "loss" and len(names := list(dict.fromkeys(points.run))) == 2
    ):  # whose law would take up any difference
        apart = float(np.diff([np.median(np.log(points.value[runs == name])) for name in names])[0])
        if abs(apart) > TWO_UNITS:
            said = f"{metric}: {names[1]} lies {math.expm1(apart):+.0%} off {names[0]}: mixed units? Two runs alone cannot tell"
            found.append(alarm("run_off_trend", said))
    if (
        np.isnan(fraction).any()
        and len(runs) >= 3 * len(set(points.run))
        and not set(points.run) <= set(P.paths(points, target))
    ):
        found.append(
            alarm(
                "no_progress",
                f"{metric}: runs have several rows but no step and steps_total: each row counts as a finished run",
            )
        )
    for run in dict.fromkeys(points.run):
        own = fraction[runs == run]
        if not np.isnan(own).any() and own.max() < UNFINISHED:
            found.append(
                alarm("unfinished_run", f"{metric}: {run} ends at {own.max():.1%} of its updates; its end is forecast too")
            )
    if not np.isnan(cells["C"]).any() and not np.isnan(asked["C"]).all():
        top, least_ = cells["C"].max(), np.nanmin(asked["C"])
        ahead = np.nanmax(asked["C"])
        if ahead <= top * (1 + 1e-9):
            found.append(
                alarm(
                    "inside_range",
                    f"{metric}: the target's {ahead:.3g} FLOPs lie within the points' range (to {top:.3g}): no extrapolation",
                )
            )
        elif least_ <= top and surface.sizes(np.concatenate([cells["N"], asked["N"]])) == surface.sizes(cells["N"]):
            found.append(
                alarm(
                    "inside_range",
                    f"{metric}: the target's size is among the points' and its first rows lie within their FLOPs (to {top:.3g})",
                )
            )
    elif np.isnan(cells["C"]).all() and not np.isnan(cells["s"]).any() and np.nanmax(asked["s"]) <= cells["s"].max():
        found.append(
            alarm("inside_range", f"{metric}: the target's {np.nanmax(asked['s']):.0f} updates lie within the points' range")
        )
    return found


def residuals(found: joint.Fitted, points: P.Table, metric: str) -> list[Alarm]:
    """Alarms from what the fit leaves over.

    Raises:
        ValueError: where a run lies so far off the others that its unit must be another.
    """
    used = P.take(points, found.rows)
    fraction = P.derived(used)["g"]
    out = []
    s = found.setting
    law = np.log(used.value) - surface.log_loss(s, found.best[None], np.array([found.shape]), s.points)[0]
    middles = [float(np.median(law[found.run_of == k])) for k in range(len(found.runs))]
    for run, middle in zip(found.runs, middles, strict=True):
        if abs(middle) > OTHER_UNITS and 2 < len(found.runs) <= joint.FEW_RUNS:
            raise ValueError(
                f"{metric}: {run} lies {math.expm1(middle):+.0%} off the other runs: mixed units? Bits per byte and nats, evaluations with"
                " drops and dropless ones are different metrics; give them different names, or leave the run out"
            )
    wide = [k for k, middle in enumerate(middles) if abs(middle) > max(OFF_TREND, 6 * found.noise)]
    for k in wide[:3]:
        out.append(
            alarm(
                "run_off_trend",
                f"{metric}: {found.runs[k]} lies {math.expm1(middles[k]):+.1%} off the trend of the others (other units, drops against"
                " dropless, a failed run?)",
            )
        )
    early = []
    for k, run in enumerate(found.runs):
        own = (found.run_of == k) & (fraction <= 0.1 + 1e-3)
        rest = (found.run_of == k) & (fraction > 0.1 + 1e-3)
        if own.any() and rest.sum() >= 3:
            first = float(fraction[own].min())
            off = float(found.residual[own & (fraction == first)][0])
            if abs(off) > max(3 * found.noise, EARLY):
                early.append(f"{run} at {first:.0%} {math.expm1(off):+.2%}")
    apart = joint.alone(law, found.run_of, used.step)
    if strays := [f"{used.run[i]} at step {used.step[i]:g} {math.expm1(apart[i]):+.1%}" for i in np.flatnonzero(apart)]:
        out.append(alarm("row_off_trend", f"{metric}: rows lie far off the ones beside them: {', '.join(strays[:4])}"))
    if early:
        out.append(alarm("early_off_trend", f"{metric}: early points lie off the law: {', '.join(early)}"))
    return out


def coarse_rates(found: joint.Fitted, points: P.Table, target: P.Table, metric: str) -> list[Alarm]:
    """Whether a learning rate changes between two rows so far apart that the line between them is a guess."""
    if "lr" not in found.setting.terms:
        return []
    out = []
    for run, path in P.paths(points, target).items():
        wide = (
            (np.diff(path.step) > FAR * path.step[-1])
            & (np.abs(np.diff(path.lr)) > FALL * path.lr.max())
            & (path.step[:-1] > 0)
        )
        if wide.any():
            i = int(np.argmax(wide))
            out.append(
                f"{run} from {path.lr[i]:.3g} at step {path.step[i]:g} to {path.lr[i + 1]:.3g} at step {path.step[i + 1]:g}"
            )
    if not out:
        return []
    return [
        alarm(
            "coarse_rates",
            f"{metric}: learning rates are taken as linear between far rows: {', '.join(out[:3])}; give more rows",
        )
    ]


def condition(found: joint.Fitted, metric: str) -> list[Alarm]:
    """Whether the data hold the parameters, or the prior does."""
    s = found.setting
    size = len(s.names)

    def model(theta: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return surface.log_loss(s, theta, np.full(len(rows), found.shape), s.points) / found.noise

    theta = found.best[None, :size]
    jacobian = least.derivative(model, theta, model(theta, np.arange(1)), np.arange(1), size)[0]
    values = np.linalg.svd(jacobian, compute_uv=False)
    loose = int((values < 1).sum())
    if loose >= LOOSE or values[0] > CONDITION * values[-1]:
        return [
            alarm(
                "ill_conditioned",
                f"{metric}: condition number {values[0] / max(values[-1], 1e-12):.2g}; {loose} of {size} directions of the law are held"
                " by its prior more than by the points",
            )
        ]
    return []


def refit(
    found: joint.Fitted, points: P.Table, weight: np.ndarray, s: surface.Setting | None = None
) -> tuple[np.ndarray, float]:
    """The target's log losses and the points' cost when rows are weighted otherwise or the prior is another."""
    s = s or found.setting
    several = len(found.best) - len(s.names)
    counts = np.bincount(found.run_of)
    offsets = (
        joint.OFFSET * (np.flatnonzero(counts >= 3)[:, None] == found.run_of).astype(float)
        if several
        else np.zeros((0, len(weight)))
    )
    shape = np.array([found.shape])
    y = np.log(points.value[found.rows])
    base = np.minimum(1, joint.ROWS / counts[found.run_of])

    def model(theta: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return (surface.log_loss(s, theta, shape[[0] * len(rows)], s.points) + theta[:, len(s.names) :] @ offsets) / found.noise

    anchor = np.zeros((1, len(found.best)))
    start = found.best[None].copy()
    start[:, : len(s.names)] = np.where(s.spread > 1e-3, start[:, : len(s.names)], 0)
    theta, _ = least.solve(
        model, y[None] / found.noise, (weight * base)[None], anchor, start, offsets / found.noise, iterations=100
    )
    cost = float((base * least.rho(y / found.noise - model(theta, np.arange(1))[0])).sum())
    return surface.log_loss(s, theta, shape, s.target)[0], cost


def gap(found: joint.Fitted, bands: dict[str, np.ndarray]) -> np.ndarray:
    """What is added to the law's log at the target's rows, for what it misses alike in all runs; zeros where nothing is."""
    return (
        np.log(bands["mean"])
        - surface.log_loss(found.setting, found.best[None], np.array([found.shape]), found.setting.target)[0]
    )


def law_misses(found: joint.Fitted, bands: dict[str, np.ndarray], metric: str) -> list[Alarm]:
    """Whether the forecast rests on what the law misses."""
    missed = gap(found, bands)
    i = int(np.argmax(np.abs(missed)))
    if abs(missed[i]) < GAP:
        return []
    message = (
        f"{metric}: the runs miss the law alike at like fractions, the larger ones more; the forecast follows them, by"
        f" {math.expm1(missed[-1]):+.1%} at the target's last row"
        + (f", {math.expm1(missed[i]):+.1%} at most" if abs(missed[i]) > 1.05 * abs(missed[-1]) else "")
    )
    return [alarm("law_misses", message)]


def leaving_out(found: joint.Fitted, points: P.Table, bands: dict[str, np.ndarray], metric: str) -> list[Alarm]:
    """Whether the forecast without one run leaves the 90% band."""
    if not 3 <= len(found.runs) <= joint.FEW_RUNS:
        return []
    missed = gap(found, bands)
    out = []
    for k, run in enumerate(found.runs):
        curve = np.exp(refit(found, points, (found.run_of != k).astype(float))[0] + missed)
        outside = (curve < bands["lo90"]) | (curve > bands["hi90"])
        if outside.mean() > 0.1:
            i = int(np.argmax(np.abs(np.log(curve / bands["mean"]))))
            out.append(
                alarm(
                    "leave_one_out",
                    f"{metric}: without {run} the forecast is {curve[i]:.4g}, outside the 90% band {bands['lo90'][i]:.4g} to"
                    f" {bands['hi90'][i]:.4g}",
                )
            )
    return out


def forms(found: joint.Fitted, points: P.Table, bands: dict[str, np.ndarray], metric: str) -> list[Alarm]:
    """Whether other forms of the law fit as well and say something else at the target's last row."""
    s = found.setting
    others: dict[str, tuple[str, float]] = {}
    if "kappa" in s.names:
        others |= {
            "a last fall of the loss that is alike at all sizes": ("kappa", 0.0),
            "a last fall in proportion to what is reducible": ("kappa", 1.0),
        }
    centre = s.centre[s.names.index("E")]
    for value in (centre - FLOOR_MOVED, centre + FLOOR_MOVED):
        others[f"a floor of {s.least / (1 + math.exp(-value)):.3g}"] = ("E", value)
    one, missed = np.ones(len(found.run_of)), gap(found, bands)
    _, cost = refit(found, points, one)
    last = int(np.argmin(bands["mean"]))
    disagree = []
    for name, (parameter, value) in others.items():
        k = s.names.index(parameter)
        pinned = s._replace(centre=s.centre.copy(), spread=s.spread.copy())
        pinned.centre[k], pinned.spread[k] = value, 1e-6
        curve, other = refit(found, points, one, pinned)
        off = math.exp(curve[last] + missed[last]) / bands["mean"][last] - 1
        if other - cost < EQUAL and abs(off) > ONE_PERCENT:
            disagree.append(f"{name} {off:+.1%}")
    if not disagree:
        return []
    return [alarm("forms_disagree", f"{metric}: forms that fit as well differ at the target's end by {', '.join(disagree)}")]


def envelope(points: P.Table, target: P.Table, bands: dict[str, np.ndarray], metric: str) -> list[Alarm]:
    """A floor and a power of FLOPs through the best finished values, against the law; and its floor against the largest run."""
    cells, asked = P.derived(points), P.derived(target)
    last = int(np.argmin(bands["mean"]))
    if np.isnan(cells["C"]).any() or np.isnan(asked["C"][last]):
        return []
    runs = np.array(points.run)
    ends = np.array([own[np.argmax(cells["C"][own])] for own in (np.flatnonzero(runs == r) for r in dict.fromkeys(points.run))])
    if not np.isnan(cells["g"]).any():
        ends = ends[cells["g"][ends] >= UNFINISHED]
        if asked["g"][last] < UNFINISHED:
            return []
    ends = ends[np.argsort(cells["C"][ends])]
    x, y = np.log(cells["C"][ends]), points.value[ends]
    bins = np.round(x / math.log(2))
    best = [own[np.argmin(y[own])] for own in (np.flatnonzero(bins == b) for b in dict.fromkeys(bins))]
    best = [i for k, i in enumerate(best) if y[i] <= y[best[: k + 1]].min()]
    if len(best) < 4:
        return []
    x, y = x[best], y[best]
    floor, at = power(x, y, np.log(asked["C"][last]))
    out = []
    off = at / bands["mean"][last] - 1
    if abs(off) > ONE_PERCENT:
        out.append(
            alarm(
                "envelope_pointwise",
                f"{metric}: a floor and a power of FLOPs through the best finished values says {at:.4g} ({off:+.1%})",
            )
        )
    floor, _ = power(x[:-1], y[:-1], x[-1])
    if floor > y[-1]:
        out.append(
            alarm(
                "asymptote_above_known",
                f"{metric}: the floor fitted without the largest run, {floor:.4g}, is above what it reached, {y[-1]:.4g}",
            )
        )
    return out


def power(x: np.ndarray, y: np.ndarray, at: float) -> tuple[float, float]:
    """The floor E and the value at `at` of E + exp(i - a x), E on a grid below the smallest y."""
    best, found = math.inf, (0.0, math.nan)
    for floor in np.linspace(0, 0.995, 200) * y.min():
        slope, intercept = np.polyfit(x, np.log(y - floor), 1, w=(y - floor) / y)
        cost = float(((np.log(floor + np.exp(intercept + slope * x)) - np.log(y)) ** 2).sum())
        if cost < best and slope <= 0:
            best, found = cost, (float(floor), float(floor + np.exp(intercept + slope * at)))
    return found


def all_of(found: joint.Fitted, points: P.Table, target: P.Table, bands: dict[str, np.ndarray], metric: str) -> list[Alarm]:
    """Every alarm of one metric's joint fit."""
    return [
        *tables(points, target, metric),
        *residuals(found, points, metric),
        *coarse_rates(found, points, target, metric),
        *condition(found, metric),
        *leaving_out(found, points, bands, metric),
        *law_misses(found, bands, metric),
        *forms(found, points, bands, metric),
        *envelope(points, target, bands, metric),
    ]
