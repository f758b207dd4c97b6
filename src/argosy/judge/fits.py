"""Every metric of a ladder fitted, in the form of one answer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from argosy.forecast import fit as fitting
from argosy.forecast import points as P
from argosy.judge import backtest
from argosy.judge import points as tables
from argosy.track import metrics as known

Body = dict[str, Any]
Say = Callable[[str], None]

SEED = 0


def of_store(home: Path, name: str, method: str = "joint", say: Say = lambda _: None) -> Body:
    """A hero's forecast from its ladder in the store, nothing written: `{"name", "headline", "ladder", "rows", "fit"}`.

    Raises:
        ValueError: when there is no ladder, or too few of its rungs have evaluations.
    """
    gathered = tables.gather(home, name)
    tables.enough(gathered, name)
    points, asked = tables.fitted(gathered, name, method)
    found = fit_rows(points, asked, method, SEED, told=gathered.alarms, say=say)
    return {"name": name, "headline": known.macro_bpb(gathered.metrics), "ladder": gathered.rungs, **found}


def fit_rows(
    points: list[Body],
    asked: list[Body],
    method: str,
    seed: int,
    *,
    told: Sequence[Body] = (),
    covariance: bool = False,
    say: Say,
) -> Body:
    """`fit.fit` metric by metric, told as it goes: rows in the target's order, `fit` and `covariance` of all metrics.

    Bands of a law are widened where the points, without their largest size, do not forecast it: `backtest`, in `fit.backtest`; those of
    trends come wide enough from their own runs. The headline is asked first (`points.shared`): other losses are widened at least as much.
    A set's nats per token are its bits per byte times a constant: one of them is fitted. `told` are alarms that come before the fits' own.

    Raises:
        ValueError: as `fit.fit` does.
    """
    about: Body = {"method": method, "parameters": {}, "noise": {}, "backtest": {}, "alarms": [*told]}
    whole: Body = {"rows": [], "fit": about, "covariance": {}}
    metrics = list(dict.fromkeys(row["metric"] for row in asked))
    done: dict[str, Body] = {}
    for k, metric in enumerate(metrics, 1):
        say(f"fitting {k} of {len(metrics)}: {metric}")
        if method == "per_fraction" and P.kind(metric) != "loss":
            continue
        own = [row for row in points if row["metric"] == metric]
        other = metric.removesuffix("/loss") + "/bpb"
        times = constant(own, [row for row in points if row["metric"] == other]) if other in done else None
        if times is not None:
            found = scaled(done[other], other, metric, times)
        else:
            rows = P.of_rows([row for row in asked if row["metric"] == metric], "TARGET")
            found = fitting.fit(P.of_rows(own), rows, method, seed=seed, covariance=covariance)
            tested = backtest.backtest(own, method, seed) if P.kind(metric) == "loss" else None
            headline = known.macro_bpb(list(about["backtest"]))
            least = backtest.factor(about["backtest"][headline]) if headline and P.kind(metric) == "loss" else 1.0
            found = backtest.widened(found, metric, tested, least)
            found["fit"]["backtest"] = {metric: tested}
        done[metric] = found
        for name, block in found.get("covariance", {}).items():
            whole["covariance"][name] = block | {"rows": [len(whole["rows"]) + i for i in block["rows"]]}
        whole["rows"] += found["rows"]
        for part in ("parameters", "noise", "backtest"):
            about[part] |= found["fit"][part]
        about["alarms"] += found["fit"]["alarms"]
    return whole if covariance else {key: value for key, value in whole.items() if key != "covariance"}


def constant(a: list[Body], b: list[Body]) -> float | None:
    """What b's values times give a's, row by row; None where that is no constant."""
    if [(r["run"], r["step"]) for r in a] != [(r["run"], r["step"]) for r in b] or not a:
        return None
    ratios = np.array([x["value"] / y["value"] if y["value"] else np.nan for x, y in zip(a, b, strict=True)])
    middle = float(np.median(ratios))
    return middle if bool((np.abs(ratios / middle - 1) < 1e-6).all()) else None


def scaled(found: Body, metric: str, name: str, times: float) -> Body:
    """A metric's fit as that of another one whose values are so many times as large."""
    rows = []
    for row in found["rows"]:
        bands = {key: row[key] * times for key in fitting.BANDS if row[key] is not None}
        rows.append(row | bands | {"metric": name})
    fit = found["fit"]
    told = [alarm | {"message": alarm["message"].replace(f"{metric}:", f"{name}:", 1)} for alarm in fit["alarms"]]
    about = {
        **fit,
        "parameters": {name: {"as": metric, "times": times}},
        "noise": {name: fit["noise"].get(metric)},
        "backtest": {name: fit["backtest"].get(metric)},
        "alarms": told,
    }
    out = {"rows": rows, "fit": about}
    if block := found.get("covariance", {}).get(metric):
        out["covariance"] = {name: block | {"zero": block.get("zero", 0.0) * times}}
    return out
