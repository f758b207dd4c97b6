"""Forecasts on public tables beside the usual methods, each computed here.

    ARGOSY_FORECAST_TABLES=... python bench/forecast.py            every row; exit status 1 where a bound is missed
    ARGOSY_FORECAST_TABLES=... python bench/forecast.py --quick    fewer bootstraps and synthetic ladders

One default of the forecaster for all sets. Errors are mean |forecast / measured - 1|; interval scores are those of the 90% band
(width plus 20 times what lies outside), over the measured value. Baselines get bands from a bootstrap: points (of a ladder:
runs) drawn anew, and a residual drawn with each refit. Every subset of evaluations of the OLMo ladder is a row of its own, so
that coverage is over many hold-outs; bounds of accuracy are over the rows that forecast.md names.
"""

import argparse
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import forecast_baselines as baselines
import forecast_synthetic as synthetic
import forecast_tables as tables
import numpy as np
from rich.console import Console
from rich.table import Table

from argosy.forecast import fit, joint, per_fraction
from argosy.forecast import points as P

HERO_ERROR, RATIO, WORST, COVERED, SYNTHETIC, SECONDS = 0.0040, 1.0, 1.5, (0.85, 0.97), 0.85, 10.0
LEVELS = (0.05, 0.95)


def grouped(case: tables.Case, value: np.ndarray) -> float:
    """Mean over the target's runs of the mean over their rows."""
    groups = np.array(case.group)
    return float(np.mean([value[groups == g].mean() for g in dict.fromkeys(case.group)]))


def score(case: tables.Case, low: np.ndarray, high: np.ndarray) -> float:
    outside = np.maximum(low - case.actual, 0) + np.maximum(case.actual - high, 0)
    return grouped(case, (high - low + 20 * outside) / case.actual)


def ours(case: tables.Case) -> dict[str, np.ndarray]:
    body = fit.fit(case.points, case.target)
    return {name: np.array([r[name] if r[name] is not None else math.nan for r in body["rows"]]) for name in fit.BANDS}


def in_sample(method, points: P.Table) -> np.ndarray:
    """Log residuals of a method on its own points."""
    one = np.ones(len(points))
    if method is baselines.reference:
        runs = np.array(points.run)
        parts = [np.flatnonzero(runs == r) for r in dict.fromkeys(points.run)]
        out = np.concatenate([np.log(points.value[own] / method(points, P.take(points, own), one)) for own in parts])
    else:
        out = np.log(points.value / method(points, points, one))
    return out[np.isfinite(out)]


def bootstrap(method, case: tables.Case, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray] | None:
    """The 90% band of a baseline."""
    points = case.points
    rest = in_sample(method, points)
    if not rest.size:
        return None
    runs = np.array([list(dict.fromkeys(points.run)).index(r) for r in points.run])
    whole = len(set(points.run)) < len(points) and method not in (baselines.tissue, baselines.multi_power)
    drawn = []
    for _ in range(count):
        if whole:
            weight = np.bincount(rng.integers(runs.max() + 1, size=runs.max() + 1), minlength=runs.max() + 1)[runs].astype(
                float
            )
        else:
            weight = np.bincount(rng.integers(len(points), size=len(points)), minlength=len(points)).astype(float)
        extra = {"start": baselines.chinchilla.last} if method is baselines.chinchilla else {}
        try:
            found = method(P.take(points, np.flatnonzero(weight > 0)), case.target, weight[weight > 0], **extra)
        except (ValueError, np.linalg.LinAlgError):
            continue
        found = found * np.exp(rng.choice(rest, size=len(found)))
        if not np.isnan(found).any():
            drawn.append(found)
    return tuple(np.quantile(drawn, LEVELS, axis=0)) if len(drawn) >= 5 else None


def subsets(folder: Path) -> list[tables.Case]:
    """Every other evaluation of the OLMo ladder, finals from curves: more hold-outs for coverage."""
    header = tables.rows(folder / "olmo_ladder/190M-1xC.csv")[0]
    names = [n for n in header if n.startswith("eval/") and "c4_en" not in n]
    return [
        tables.case(f"OLMo {n.split('/')[1].removesuffix('-validation')}", *tables.olmo(folder, n, whole=True)) for n in names
    ]


def run_case(case: tables.Case, count: int, table: Table, rng: np.random.Generator) -> dict[str, float]:
    """One row of the table, and its figures."""
    began = time.perf_counter()
    found = ours(case)
    seconds = time.perf_counter() - began
    error = tables.error(case, found["mean"])
    inside = {q: grouped(case, (case.actual >= found[f"lo{q}"]) & (case.actual <= found[f"hi{q}"])) for q in (50, 90)}
    own = score(case, found["lo90"], found["hi90"])
    errors, scores = {}, {}
    for name, method in baselines.METHODS.items():
        with np.errstate(all="ignore"):
            predicted = method(case.points, case.target, np.ones(len(case.points)))
            if np.isnan(predicted).any():
                continue
            errors[name] = tables.error(case, predicted)
            if count and (band := bootstrap(method, case, count, rng)) is not None:
                scores[name] = score(case, *band)
    best = min(errors, key=errors.__getitem__)
    sharpest = min(scores, key=scores.__getitem__) if scores else ""
    table.add_row(
        case.name,
        f"{error:.2%}",
        *(f"{errors[n]:.2%}" if n in errors else "" for n in baselines.METHODS),
        f"{error / errors[best]:.2f}",
        f"{inside[50]:.0%}",
        f"{inside[90]:.0%}",
        f"{np.mean((found['hi90'] - found['lo90']) / found['mean']) / 2:.2%}",
        f"{own:.2%}",
        f"{scores[sharpest]:.2%} {sharpest}" if scores else "",
        f"{seconds:.1f}",
    )
    out = {
        "error": error,
        "ratio": error / errors[best],
        "in50": inside[50],
        "in90": inside[90],
        "score": own,
        "seconds": seconds,
    }
    return out | {"peer": scores.get(sharpest, math.nan), "inside_all": float(inside[90] == 1)}


def reference_digits(case: tables.Case) -> tuple[float, float]:
    whole = 6.690294608796058e18 * 390_251
    given, own = (per_fraction.curve(case.points, whole, c).mean[-1] for c in (0.005, None))
    return float(given), float(own)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bootstraps", type=int, default=60, help="refits behind a baseline's band; 0 for no bands")
    parser.add_argument("--ladders", type=int, default=500, help="synthetic ladders; 0 for none")
    args = parser.parse_args()
    count, ladders = (12, 40) if args.quick else (args.bootstraps, args.ladders)
    folder = tables.root()
    if folder is None:
        print("skipped: ARGOSY_FORECAST_TABLES names no folder with the public loss tables")
        return 0
    console, rng = Console(width=200), np.random.default_rng(0)
    table = Table(title="forecasts of public tables, one default")
    columns = ("set", "joint", *baselines.METHODS, "ratio", "in 50%", "in 90%", "half 90%", "score", "best bootstrap", "s")
    for name in columns:
        table.add_column(name, justify="left" if name == "set" else "right")
    named = tables.cases(folder)
    results = {c.name: run_case(c, count, table, rng) for c in named}
    more = {c.name: run_case(c, count, table, rng) for c in subsets(folder)[: 3 if args.quick else None]}
    console.print(table)

    hero, others = results[named[0].name], [results[c.name] for c in named[1:]]
    every = [*results.values(), *more.values()]
    ratio = math.exp(np.mean([math.log(r["ratio"]) for r in others]))
    worst = max(r["ratio"] for r in others)
    covered = float(np.mean([r["in90"] for r in every]))
    compared = [r for r in every if not math.isnan(r["peer"])]
    mine, peer = (float(np.mean([r[k] for r in compared])) if compared else math.nan for k in ("score", "peer"))
    given, own = reference_digits(named[0])
    made = synthetic.coverage(ladders) if ladders else {}
    for law, (in90, in50, half) in made.items():
        console.print(f"synthetic ladders, {law}: in 90% {in90:.1%}, in 50% {in50:.1%}, half width of 90% {half:.2%}")
    checks = [
        (f"hero's 5, 10, 15, 20%: mean error {hero['error']:.2%} (at most {HERO_ERROR:.2%})", hero["error"] <= HERO_ERROR),
        ("hero: each within the 90% band", hero["inside_all"] == 1),
        (f"geometric mean of error over best baseline's {ratio:.2f} (at most {RATIO})", ratio <= RATIO),
        (f"largest ratio {worst:.2f} (at most {WORST})", worst <= WORST),
        (
            f"in the 90% band {covered:.1%}, in the 50% band {np.mean([r['in50'] for r in every]):.1%}",
            COVERED[0] <= covered <= COVERED[1],
        ),
        (
            f"slowest fit {max(r['seconds'] for r in every):.1f} s (below {SECONDS:.0f})",
            max(r["seconds"] for r in every) < SECONDS,
        ),
        (
            f"reference method {given:.11f} (2.03878459867), own correction {own:.5f} (published with rounded errors: 2.03714)",
            abs(given - 2.03878459867) < 1e-10,
        ),
    ]
    if compared:
        checks.append((f"mean 90% interval score {mine:.2%}; mean of each set's best bootstrap {peer:.2%}", mine <= peer))
    if made:
        whole = float(np.mean([m[0] for m in made.values()]))
        checks.append((f"{ladders} synthetic ladders within 90% {whole:.1%} (at least {SYNTHETIC:.0%})", whole >= SYNTHETIC))
    for text, good in checks:
        console.print(f"{'ok  ' if good else 'MISS'} {text}", highlight=False)
    console.print(
        f"defaults: {joint.DRAWS} draws, offset {joint.OFFSET:.2%} a run, {joint.PER_DECADE:.2%} a decade beyond",
        highlight=False,
    )
    return 0 if all(good for _, good in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
