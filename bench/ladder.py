"""How well a ladder forecasts its own top rung: every metric, with its coverage, beside a power law per fraction.

    python bench/ladder.py --home voyages --name pocket

The largest size is left out (with repeats of it), the rest is fitted as `argosy forecast fit` does, and the left-out rung's own
evaluations are compared: error at its end, mean absolute error and share of rows inside the 90% band, and the band's half width at the end.
The baseline is the straight line in log value against log FLOPs through the smaller sizes at equal fractions.
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from argosy.forecast import points as P
from argosy.judge import fits, points, register

GROUPS = {
    "headline": lambda m: m.endswith("macro_bpb"),
    "evaluation": lambda m: m.startswith("eval_"),
    "training loss": lambda m: P.kind(m) == "loss",
    "gradient norms": lambda m: m.startswith("grad/"),
    "drops": lambda m: "drop" in m,
    "speed": lambda m: m.startswith("throughput/"),
    "routing": lambda m: True,
}


def split(rows):
    """Rows of the smaller sizes, and rows of the first run of the largest size."""
    largest = max(r["active_params"] for r in rows)
    small = [r for r in rows if r["active_params"] < largest]
    top = [r for r in rows if r["active_params"] == largest]
    return small, [r for r in top if r["run"] == top[0]["run"]]


def straight(small, top):
    """The baseline's value at each of the top's rows: the first run of each size, at the same number of the evaluation."""
    by_size = {}
    for r in small:
        by_size.setdefault(r["active_params"], {}).setdefault(r["run"], []).append(r)
    firsts = [next(iter(runs.values())) for runs in by_size.values()]
    out = []
    for k, r in enumerate(top):
        have = [run[k] for run in firsts if k < len(run) and run[k]["value"] > 0]
        if len(have) < 2:
            out.append(math.nan)
            continue
        slope, level = np.polyfit([math.log(h["flops"]) for h in have], [math.log(h["value"]) for h in have], 1)
        out.append(math.exp(level + slope * math.log(r["flops"])))
    return np.array(out)


def score(rows, method):
    """What one metric's hold-out comes to."""
    small, top = split(rows)
    asked = [{k: v for k, v in r.items() if k not in ("value", "purpose")} for r in top]
    found = fits.fit_rows(small, asked, method, register.SEED, say=lambda _: None)["rows"]
    actual = np.array([r["value"] for r in top])
    mean = np.array([math.nan if f["mean"] is None else f["mean"] for f in found])
    lo, hi = (np.array([math.nan if f["mean"] is None or f[b] is None else f[b] for f in found]) for b in ("lo90", "hi90"))
    good = ~np.isnan(mean)
    with np.errstate(divide="ignore", invalid="ignore"):
        error, base = mean / actual - 1, straight(small, top) / actual - 1
        return {
            "end": error[-1],
            "mean": np.nanmean(np.abs(error[good])) if good.any() else math.nan,
            "base_end": base[-1],
            "base_mean": np.nanmean(np.abs(base[good])) if good.any() else math.nan,
            "inside": np.mean((lo[good] <= actual[good]) & (actual[good] <= hi[good])) if good.any() else math.nan,
            "half": (hi[-1] - lo[-1]) / 2 / actual[-1],
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path("voyages"))
    parser.add_argument("--name", default="pocket")
    parser.add_argument("--method", default="joint")
    parser.add_argument("--only", default="", help="metrics whose name holds this")
    args = parser.parse_args()
    gathered = points.gather(args.home, args.name)
    rows, _ = points.fitted(gathered, args.name, args.method)
    groups = {name: [] for name in GROUPS}
    for metric in gathered.metrics:
        if args.only in metric:
            groups[next(name for name, of in GROUPS.items() if of(metric))].append(metric)
    table = Table(title=f"{args.name}: the largest rung from the smaller ones ({args.method})", box=None, pad_edge=False)
    for column in ("metric", "end", "mean |error|", "line: end", "line: mean", "inside 90%", "half width"):
        table.add_column(column, justify="left" if column == "metric" else "right", no_wrap=column == "metric")
    for group, metrics in groups.items():
        scores = []
        for metric in metrics:
            print(metric, file=sys.stderr, flush=True)
            scores.append(score([r for r in rows if r["metric"] == metric], args.method))
            table.add_row(metric, *cells(scores[-1]))
        if len(scores) > 1:
            mean = {k: float(np.nanmean([abs(s[k]) for s in scores])) for k in scores[0]}
            table.add_row(f"{group}: mean of {len(scores)}", *cells(mean), style="bold")
    out = Console(width=130, highlight=False)
    out.print(table)
    for alarm in gathered.alarms:
        out.print(f"{alarm['code']}: {alarm['message']}")


def cells(s):
    return [
        f"{s['end']:+.2%}",
        f"{s['mean']:.2%}",
        f"{s['base_end']:+.2%}",
        f"{s['base_mean']:.2%}",
        f"{s['inside']:.0%}",
        f"{s['half']:.2%}",
    ]


if __name__ == "__main__":
    main()
