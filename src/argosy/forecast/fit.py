"""A forecast from two tables: rows with bands, and what was fitted."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from argosy.forecast import accuracy, alarms, consistent, joint, per_fraction, surface, trend
from argosy.forecast import points as P

METHODS = ("joint", "per_fraction", "schedule")
BANDS = ("mean", "lo50", "hi50", "lo90", "hi90")
KNOTS, DIGITS = 20, 4  # rows of a covariance, and its digits
NEEDED = {"N": "active_params", "D": "tokens", "C": "flops", "s": "step", "g": "steps_total"}

Body = dict[str, Any]


def from_files(points: Path | str, target: Path | str, method: str = "joint", tail_correction: float | None = None) -> Body:
    """The forecast of TARGET's rows from POINTS, both CSV files: what `argosy forecast fit --json` prints.

    Raises:
        ValueError: for tables that make no sense, naming the row.
        OSError: for files that cannot be read.
    """
    return fit(P.read(points, "POINTS"), P.read(target, "TARGET"), method, tail_correction)


def fit(
    points: P.Table,
    target: P.Table,
    method: str = "joint",
    tail_correction: float | None = None,
    seed: int = 0,
    covariance: bool = False,
) -> Body:
    """`{"rows": [...], "fit": {"method", "parameters", "noise", "alarms"}}` for the target's rows, in their order.

    Args:
        points: what was measured.
        target: what is asked.
        method: `joint`, `per_fraction` or `schedule` (joint with every run's learning-rate path demanded).
        tail_correction: of `per_fraction`; None takes the tail rule's own mean error.
        seed: of the draws behind the bands.
        covariance: adds `"covariance": {metric: ...}`, see `covariances`; not for `per_fraction`, which has no bands.

    Raises:
        ValueError: for an unknown method and for tables that make no sense.
    """
    if method not in METHODS:
        raise ValueError(f"--method {method!r} is none of {', '.join(METHODS)}; nearest legal joint")
    if tail_correction is not None and method != "per_fraction":
        raise ValueError(f"--tail-correction belongs to --method per_fraction, not to {method}")
    if tail_correction is not None and not abs(tail_correction) < 1:
        raise ValueError(
            f"--tail-correction {tail_correction} is added to a loss, and is small: between -1 and 1, e.g. 0.005; leave it out for the"
            " rule's own mean error"
        )
    checked = P.check(points, target)
    fitted, wanted, remarks = consistent.tidied(checked, target)
    out: dict[str, list[Any]] = {name: [None] * len(target) for name in (*BANDS, "reason")}
    about: Body = {"method": method, "parameters": {}, "noise": {}, "alarms": [alarms.alarm(*r) for r in remarks]}
    joined: Body | None = {} if covariance else None
    if len(checked) < len(points):
        about["alarms"].append(
            alarms.alarm("repeated_rows", f"{len(points) - len(checked)} rows of POINTS repeat others and count once")
        )
    for metric in dict.fromkeys(target.metric):
        asked = np.flatnonzero([m == metric for m in target.metric])
        own = P.take(fitted, np.flatnonzero([m == metric for m in fitted.metric]))
        if not len(own):
            fill(out, asked, {}, np.array([f"POINTS have no {metric}"] * len(asked)))
            continue
        rows = P.take(wanted, asked)
        if method == "per_fraction":
            by_fraction(out, about, asked, own, rows, metric, tail_correction)
        elif P.kind(metric) == "other":
            if len(own) < 3:
                raise ValueError(f"{metric}: {len(own)} points are too few for a trend; at least 3")
            smooth = trend.fit(own)
            about["parameters"][metric], about["noise"][metric] = trend.parameters(smooth), trend.noise(smooth)
            about["alarms"] += alarms.tables(own, rows, metric)
            reasons = unplaced(own, rows)
            bad, good = (np.flatnonzero([bool(r) is is_bad for r in reasons]) for is_bad in (True, False))
            fill(out, asked[bad], {}, reasons[bad])
            if not good.size:
                continue
            rows = P.take(rows, good)
            fill(out, asked[good], trend.predict(smooth, rows), none(rows))
            if joined is not None:
                joined[metric] = covariances(asked[good], rows, *trend.covariance(smooth, rows), smooth.zero)
        else:
            by_law(out, about, joined, asked, fitted, own, rows, metric, method, seed)
    body = {"rows": [row(target, out, i) for i in range(len(target))], "fit": about}
    return body if joined is None else body | {"covariance": joined}


def covariances(asked: np.ndarray, rows: P.Table, matrix: np.ndarray, noise: float, zero: float = 0.0) -> Body:
    """`{"rows": [...], "matrix": [[...]], "noise": s, "zero": z}` of one metric, at no more than `KNOTS` of its rows.

    `rows` are indices into the answer's rows; `matrix` is the covariance of log(value + z) between them of all that a run has in
    common; s the standard deviation of one evaluation on top.
    """
    some = knots(rows)
    digits = [[float(f"{v:.{DIGITS}g}") for v in line] for line in matrix[np.ix_(some, some)]]
    return {"rows": [int(i) for i in asked[some]], "matrix": digits, "noise": float(f"{noise:.{DIGITS}g}"), "zero": zero}


def knots(rows: P.Table) -> np.ndarray:
    """Which rows stand for all: the first, the last, and between them even steps of the cube root of progress, denser early."""
    cells = P.derived(rows)
    place = next((cells[name] for name in "sDC" if not np.isnan(cells[name]).any()), np.arange(len(rows)) + 1.0)
    order = np.argsort(place, kind="stable")
    root = np.cbrt(place[order])
    even = np.linspace(root[0], root[-1], min(KNOTS, len(rows)))
    return order[np.unique(np.abs(root[:, None] - even).argmin(0))]


def by_law(out, about, joined, asked, points, own, rows, metric, method, seed) -> None:
    """Forecast a loss by the joint law, or an accuracy through a loss."""
    sigmoid = None
    if P.kind(metric) == "accuracy":
        sigmoid = accuracy.fit(points, metric)
        about["parameters"][metric], about["noise"][metric] = accuracy.parameters(sigmoid), sigmoid.noise
        own = P.take(points, np.flatnonzero([m == sigmoid.loss for m in points.metric]))
    if method == "schedule":
        missing = [run for run in dict.fromkeys((*own.run, *rows.run)) if run not in P.paths(own, rows)]
        if missing:
            raise ValueError(
                f"--method schedule needs the learning rate of every run at three steps or more, in column lr; {missing[0]} has fewer."
                " Use --method joint"
            )
    reasons = reasons_of(own, rows)
    good = np.flatnonzero([not r for r in reasons])
    if not good.size:
        fill(out, asked, {}, reasons)
        return
    usable = P.take(rows, good)
    if sigmoid is None:
        found = joint.fit(own, usable, seed)
        parts = joint.parts(found, own, usable)
        bands = joint.predict(parts)
        about["parameters"][metric] = surface.named(found.setting, found.best)
        if "lr" in found.setting.terms:
            about["parameters"][metric] |= found.setting.shapes[found.shape]._asdict()
        about["noise"][metric] = parts.noise
        about["alarms"] += alarms.all_of(found, own, usable, bands, metric)
        common = joint.covariance(parts) if joined is not None else None
    else:
        bands = accuracy.predict(sigmoid, own, usable)
        about["alarms"] += alarms.tables(own, usable, metric)
        common = accuracy.covariance(sigmoid, own, usable) if joined is not None else None
    if common is not None:
        joined[metric] = covariances(asked[good], usable, *common)
    fill(out, asked[good], bands, np.array([""] * len(good)))
    bad = np.flatnonzero([bool(r) for r in reasons])
    fill(out, asked[bad], {}, reasons[bad])


def none(rows: P.Table) -> np.ndarray:
    return np.array([""] * len(rows))


def unplaced(points: P.Table, rows: P.Table) -> np.ndarray:
    """Why a trend has no value at a row of the target, "" where it has one: it has not what places the points."""
    cells, asked = P.derived(points), P.derived(rows)
    name = next((name for name in "CDs" if not np.isnan(cells[name]).any()), None)
    lost = np.isnan(asked[name]) if name else np.zeros(len(rows), bool)
    return np.where(lost, f"the row has no {NEEDED.get(name or '', 'step')}, which POINTS have", "").astype(object)


def reasons_of(points: P.Table, rows: P.Table) -> np.ndarray:
    """Why a row of the target has no forecast, "" where it has one."""
    cells, asked = P.derived(points), P.derived(rows)
    out = np.full(len(rows), "", dtype=object)
    for name, column in NEEDED.items():
        if np.isnan(cells[name]).any() or np.isnan(asked[name]).all():
            continue
        if name == "C" and not np.isnan(cells["D"]).any():
            continue
        for i in np.flatnonzero(np.isnan(asked[name])):
            out[i] = out[i] or f"the row has no {column}, which POINTS and other rows of TARGET have"
    used = joint.chosen(points)
    step, fraction = cells["s"][used], cells["g"][used]
    told = set(points.run) | set(rows.run) <= set(P.paths(points, rows))  # with rates, warm-up is known and updates count
    with np.errstate(invalid="ignore"):
        early = asked["s"] < 0.9 * step.min()
        if not told:
            early = np.where(np.isnan(asked["g"]), early, asked["g"] < 0.9 * fraction.min())
        nothing = (asked["s"] == 0) | (asked["D"] == 0) | (asked["C"] == 0)
    for i in np.flatnonzero(early | nothing):
        out[i] = out[i] or (
            f"step {asked['s'][i]:g} of the run comes before what is fitted of the points, which begins at step {step.min():g}"
            + ("" if told or np.isnan(fraction).any() else f" and {fraction.min():.1%} of a run")
            + ": the start of a run is not forecast"
        )
    return out


def by_fraction(out, about, asked, own, rows, metric, tail_correction) -> None:
    """Forecast by the reference method, run by run of the target."""
    cells = P.derived(rows)
    if P.kind(metric) != "loss":
        fill(out, asked, {}, np.array(["per_fraction forecasts losses in nats per token alone"] * len(rows), dtype=object))
        return
    about["alarms"] += alarms.tables(own, rows, metric)
    for run in dict.fromkeys(rows.run):
        mine = np.flatnonzero([r == run for r in rows.run])
        known = mine[~np.isnan(cells["C"][mine] / cells["g"][mine]) & (cells["g"][mine] > 0)]
        if not known.size:
            fill(out, asked[mine], {}, np.array(["per_fraction needs step, steps_total and flops"] * len(mine), dtype=object))
            continue
        found = per_fraction.curve(own, float(np.median(cells["C"][known] / cells["g"][known])), tail_correction)
        bands = per_fraction.at(found, cells["g"][mine])
        first = per_fraction.FRACTIONS[~np.isnan(found.mean)][0]
        reasons = np.array(
            ["" if not math.isnan(m) else f"per_fraction has no forecast below {first:.0%} of the run" for m in bands["mean"]],
            dtype=object,
        )
        fill(out, asked[mine], bands, reasons)
        about["parameters"][metric] = {
            "asymptote": per_fraction.ASYMPTOTE,
            "fractions": per_fraction.FRACTIONS.tolist(),
            "scale": clean(found.scale),
            "exponent": clean(found.exponent),
            "tail_correction": found.tail.correction,
            "tail_correction_source": found.tail.source,
            "tail_rungs": list(found.tail.rungs),
        }
        about["noise"][metric] = None


def clean(column: np.ndarray) -> list[float | None]:
    return [None if math.isnan(v) else float(v) for v in column]


def fill(out: dict[str, list[Any]], at: np.ndarray, bands: dict[str, np.ndarray], reasons: np.ndarray) -> None:
    """Write forecasts, or reasons, into the rows `at`."""
    for k, i in enumerate(at):
        out["reason"][i] = str(reasons[k]) or None
        for name in BANDS:
            value = float(bands[name][k]) if name in bands else math.nan
            out[name][i] = value if math.isfinite(value) and not reasons[k] else None


def row(target: P.Table, out: dict[str, list[Any]], i: int) -> Body:
    """One row of the answer; `reason` only where there is no forecast."""

    def cell(column: np.ndarray) -> float | int | None:
        value = float(column[i])
        return None if math.isnan(value) else int(value) if value.is_integer() else value

    found = {"run": target.run[i], "metric": target.metric[i], "step": cell(target.step), "tokens": cell(target.tokens)}
    found |= {name: out[name][i] for name in BANDS}
    return found if out["mean"][i] is not None else found | {"reason": out["reason"][i] or "the fit has no value here"}


def table(body: Body) -> Table:
    """The rows for a terminal; alarms and noise below."""
    metrics = list(dict.fromkeys(r["metric"] for r in body["rows"]))
    notes = [f"noise of {metric}: {value:.2%}" for metric, value in body["fit"]["noise"].items() if value is not None]
    notes += [f"{a['code']}: {a['message']}" for a in body["fit"]["alarms"]]
    title = f"forecast ({body['fit']['method']})" + (f" of {metrics[0]}" if len(metrics) == 1 else "")
    out = Table(title=title, caption="\n".join(notes), caption_justify="left")
    for name in ("run", *(["metric"] if len(metrics) > 1 else []), "step", "mean", "50%", "90%"):
        out.add_column(name, justify="left" if name in ("run", "metric") else "right")
    for r in body["rows"]:
        cells = [r["run"], *([r["metric"]] if len(metrics) > 1 else []), "" if r["step"] is None else f"{r['step']:,.0f}"]
        if r["mean"] is None:
            out.add_row(*cells, "", r["reason"], "")
            continue
        bands = ["" if r[f"lo{k}"] is None else f"{r[f'lo{k}']:.5g} to {r[f'hi{k}']:.5g}" for k in (50, 90)]
        out.add_row(*cells, f"{r['mean']:.5g}", *bands)
    return out
