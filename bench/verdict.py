"""How often undisturbed runs are called off, and how soon a lasting excess is seen.

    ARGOSY_FORECAST_TABLES=... python bench/verdict.py             every row; exit status 1 where a bound is missed
    ARGOSY_FORECAST_TABLES=... python bench/verdict.py --count 40  fewer curves

Curves are of the reference run, forecast from its four public rungs, and of heroes of synthetic ladders, each judged after every
evaluation. `own` is drawn from the forecast (refits, luck, distance) with Student-t noise; `rough` wanders on top, by 0.16% in each
e-fold of progress; `rungs` carries what the fit left of the largest public rungs when they were left out (a cubic in log progress); `envelope`, `mixed` and
`cosine` are other laws, each with ladders and fits of its own. Seeds are fresh unless one is given.
"""

import argparse
import os
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import forecast_synthetic as synthetic
import forecast_tables as tables
import numpy as np
from rich.console import Console
from rich.table import Table

from argosy.forecast import fit, follow, joint
from argosy.forecast import points as P

EXCESS, WITHIN, BEGINS, JUDGED = 0.005, 0.05, (0.10, 0.90), 0.045
OFF, SEEN = 0.05, 0.90
ONSETS = (0.1, 0.2, 0.3, 0.5, 0.91)
CADENCES = {"0.77%": 3000 / 390_251, "5%": 0.05}
LAWS = ("own", "rough", "rungs", "envelope", "mixed", "cosine")
WANDERS = 0.0016


class Sample(NamedTuple):
    """A forecast and a curve that it is of."""

    known: follow.Registered
    progress: np.ndarray
    value: np.ndarray


class Counts(NamedTuple):
    """Of one law at one cadence."""

    off: float
    behind: float
    ahead: float
    seen: float
    fresh: float  # seen, of the curves that were not behind already
    delays: np.ndarray  # shares of the run; infinite where never
    onsets: np.ndarray  # where each excess begins, and whether it was seen [curves, 2]


def registered(body: dict, total: float) -> follow.Registered:
    """A fit as `follow` takes it."""
    rows = [r for r in body["rows"] if r["mean"] is not None and r["step"] >= JUDGED * total]
    metric = rows[0]["metric"]
    block = body["covariance"][metric]
    column = lambda key: np.log([r[key] for r in rows])  # noqa: E731
    knots = np.array([body["rows"][i]["step"] for i in block["rows"]]) / total
    progress = np.array([r["step"] for r in rows]) / total
    return follow.Registered(
        progress, column("mean"), column("lo90"), column("hi90"), knots, np.array(block["matrix"]), block["noise"]
    )


def reference(cadence: float) -> tuple[P.Table, P.Table]:
    """The public rungs, and every evaluation of the reference run that a forecast is asked for."""
    folder = tables.root()
    assert folder is not None
    shares = [cadence * k for k in range(1, int(1 / cadence + 1e-9) + 1)]
    rows = [{k: v for k, v in r.items() if k != "value"} for r in tables.hero(folder, tuple(shares))]
    points = [row for rung in tables.ladder(folder).values() for row in rung]
    return P.of_rows(points), P.of_rows(rows, "TARGET")


def left_out() -> list[tuple[np.ndarray, np.ndarray]]:
    """Progress and log residual of the public rungs that are forecast without themselves: d1536 from two, d2048 from three."""
    folder = tables.root()
    assert folder is not None
    ladder, found = tables.ladder(folder), []
    for top, count in (("d1536", 2), ("d2048", 3)):
        rows = ladder[top]
        bare = [{k: v for k, v in r.items() if k != "value"} for r in rows]
        body = fit.fit(P.of_rows([r for rung in list(ladder.values())[:count] for r in rung]), P.of_rows(bare, "TARGET"))
        rest = np.log([r["value"] / f["mean"] for r, f in zip(rows, body["rows"], strict=True)])
        g = np.array([float(r["step"]) / float(r["steps_total"]) for r in rows])
        found.append((g, np.polyval(np.polyfit(np.log(g), rest, 3), np.log(g))))  # without the noise of its evaluations
    return found


def of_reference(law: str, cadence: float, count: int, rng: np.random.Generator) -> list[Sample]:
    """Curves about the reference run's forecast."""
    points, target = reference(cadence)
    body = fit.fit(points, target, covariance=True)
    total = float(target.steps_total[0])
    known = registered(body, total)
    kept = np.flatnonzero([r["mean"] is not None and r["step"] >= JUDGED * total for r in body["rows"]])
    judged = P.take(target, kept)
    fitted = joint.fit(points, judged)
    parts = joint.parts(fitted, points, judged)
    g, rungs, samples = target.step[kept] / total, left_out() if law == "rungs" else [], []
    for k in range(count):
        if law == "rungs":
            at, rest = rungs[k % len(rungs)]
            curve = known.mean + rng.choice([-1, 1]) * np.interp(g, at, rest) + parts.luck * rng.normal()
        else:
            curve = known.mean + parts.curves[rng.integers(len(parts.curves))] - np.median(parts.curves, axis=0)
            curve = curve + parts.luck * rng.normal() + parts.drift * rng.normal()
        if law == "rough":
            curve = curve + WANDERS * np.cumsum(rng.normal(size=len(g)) * np.sqrt(np.diff(np.log(g), prepend=np.log(g[0]))))
        noise = parts.noise * rng.standard_t(4, size=len(g)) if law == "own" else 0.0015 * rng.standard_t(5, size=len(g))
        samples.append(Sample(known, g, np.exp(curve + noise)))
    return samples


def of_ladders(law: str, cadence: float, count: int, rng: np.random.Generator) -> list[Sample]:
    """Heroes of synthetic ladders under another law, with their own forecasts."""
    shares = cadence * np.arange(1, int(1 / cadence + 1e-9) + 1)
    samples = []
    for _ in range(count):
        points, target, actual = synthetic.ladder(law, rng, shares)
        body = fit.fit(points, target, seed=int(rng.integers(1 << 30)), covariance=True)
        total = float(target.steps_total[0])
        kept = np.array([r["mean"] is not None and r["step"] >= JUDGED * total for r in body["rows"]])
        samples.append(Sample(registered(body, total), target.step[kept] / total, actual[kept]))
    return samples


def words(sample: Sample, value: np.ndarray, begin: int = 1, end: int | None = None) -> list[str]:
    """The verdict after each evaluation from the `begin`-th on."""
    return [
        follow.read(sample.known, follow.follow(sample.known, sample.progress[:n], value[:n]), 1).word
        for n in range(begin, (end or len(value)) + 1)
    ]


def measure(samples: list[Sample], rng: np.random.Generator, say) -> Counts:
    """What undisturbed curves read, and when an excess that begins at a random evaluation is seen."""
    ever, seen, fresh, delays, onsets = [], [], [], [], []
    for k, sample in enumerate(samples):
        say(f"{k + 1} of {len(samples)} curves")
        calm = words(sample, sample.value)
        ever.append([w in calm for w in ("off", "behind", "ahead")])
        g = sample.progress
        at = int(np.searchsorted(g, rng.uniform(*BEGINS)))
        value = sample.value * np.where(np.arange(len(g)) >= at, np.exp(EXCESS), 1.0)
        within = min(int(np.searchsorted(g, g[at] + 0.2, "right")), len(g))
        read = words(sample, value, at + 1, within)
        hits = [i for i, w in enumerate(read) if w in ("behind", "off")]
        delay = g[at + hits[0]] - g[at] if hits else np.inf
        already = calm[at - 1] in ("behind", "off")
        seen.append(delay <= WITHIN + 1e-9)
        onsets.append([g[at], seen[-1]])
        if not already:
            fresh.append(delay <= WITHIN + 1e-9)
            delays.append(delay)
    return Counts(*np.mean(ever, axis=0), float(np.mean(seen)), float(np.mean(fresh)), np.array(delays), np.array(onsets))


def real() -> str:
    """What the verdict says of the reference run's first fifth."""
    folder = tables.root()
    assert folder is not None
    points, target = reference(CADENCES["0.77%"])
    body = fit.fit(points, target, covariance=True)
    total = 390_251
    known = registered(body, total)
    rows = [r for r in tables.hero(folder) if r["step"] / total >= known.progress[0] * (1 - 1e-9)]
    g, value = np.array([r["step"] for r in rows]) / total, np.array([r["value"] for r in rows])
    told, before = [], ""
    for n in range(1, len(g) + 1):
        found = follow.follow(known, g[:n], value[:n])
        reading = follow.read(known, found, 1)
        if reading.word != before:
            told.append(f"{reading.word} from {g[n - 1]:.1%} on{f' ({reading.why})' if reading.why else ''}")
            before = reading.word
    spread = float(np.hypot(found.spread[-1], found.noise))
    ends = [float(np.exp(found.mean[-1] + z * spread)) for z in (0, -1.645, 1.645)]
    return (
        f"the reference run, 5% to 20%: {'; '.join(told)}. Error of the mean {100 * np.mean(np.abs(np.expm1(found.residual))):.2f}%."
        f" End registered {np.exp(known.mean[-1]):.4f} ({np.exp(known.low[-1]):.4f} to {np.exp(known.high[-1]):.4f}), updated"
        f" {ends[0]:.4f} ({ends[1]:.4f} to {ends[2]:.4f})"
    )


def tell(cadence: str, law: str, text: str) -> None:
    """Progress on standard error."""
    print(f"\r{cadence} {law}: {text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="curves of all laws together, for each cadence")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--laws", nargs="*", default=LAWS, choices=LAWS)
    parser.add_argument("--cadences", nargs="*", default=list(CADENCES), choices=list(CADENCES))
    asked = parser.parse_args()
    if tables.root() is None:
        print("ARGOSY_FORECAST_TABLES is not set to a folder: nothing to do", file=sys.stderr)
        return 0
    out, began = Console(width=120, highlight=False), time.perf_counter()
    seed = asked.seed if asked.seed is not None else int.from_bytes(os.urandom(4))
    rng = np.random.default_rng(seed)
    table = Table(title=f"verdicts, seed {seed}; delays in shares of the run, of curves not behind before")
    for name in (
        "cadence",
        "law",
        "curves",
        "ever off",
        "behind",
        "ahead",
        "+0.5% seen in 5%",
        "of new",
        "delay median",
        "90th",
    ):
        table.add_column(name, justify="left" if name in ("cadence", "law") else "right")
    missed, told = [], []
    for cadence in asked.cadences:
        rows = []
        each = -(-asked.count // len(asked.laws))
        for law in asked.laws:
            say = partial(tell, cadence, law)
            say("fitting")
            make = of_reference if law in ("own", "rough", "rungs") else of_ladders
            rows.append((law, measure(make(law, CADENCES[cadence], each, rng), rng, say)))
            table.add_row(cadence, law, str(each), *cells(rows[-1][1]))
        whole = Counts(
            *(float(np.mean([getattr(c, f) for _, c in rows])) for f in Counts._fields[:5]),
            np.concatenate([c.delays for _, c in rows]),
            np.concatenate([c.onsets for _, c in rows]),
        )
        told.append(f"{cadence}: seen within {WITHIN:.0%} by onset: {by_onset(whole.onsets)}")
        table.add_row(cadence, "all", str(each * len(rows)), *cells(whole), style="bold", end_section=True)
        if whole.off > OFF:
            missed.append(f"{cadence}: {whole.off:.1%} of undisturbed curves are off, at most {OFF:.0%}")
        if cadence == "0.77%" and whole.seen < SEEN:
            missed.append(f"{cadence}: {whole.seen:.1%} of excesses are seen within {WITHIN:.0%}, at least {SEEN:.0%}")
    print(file=sys.stderr)
    out.print(table)
    for line in (*told, real()):
        out.print(line)
    for line in missed:
        out.print(f"MISSED {line}")
    out.print(f"{time.perf_counter() - began:.0f} s")
    return 1 if missed else 0


def by_onset(onsets: np.ndarray) -> str:
    """The share of excesses that is seen, and their number, by where they begin."""
    parts = []
    for low, high in pairwise(ONSETS):
        inside = onsets[(onsets[:, 0] >= low) & (onsets[:, 0] < high), 1]
        parts.append(f"{low:.0%} to {high:.0%} {f'{inside.mean():.0%}' if inside.size else 'none'} of {inside.size}")
    return ", ".join(parts)


def cells(c: Counts) -> list[str]:
    known = np.sort(c.delays)
    quantile = lambda q: known[min(int(q * len(known)), len(known) - 1)] if len(known) else np.nan  # noqa: E731
    text = lambda v: f"{v:.1%}" if np.isfinite(v) else "over 20%"  # noqa: E731
    return [
        f"{c.off:.1%}",
        f"{c.behind:.1%}",
        f"{c.ahead:.1%}",
        f"{c.seen:.1%}",
        f"{c.fresh:.1%}",
        text(quantile(0.5)),
        text(quantile(0.9)),
    ]


if __name__ == "__main__":
    sys.exit(main())
