"""A registered forecast as one picture: the ladder that it rests on, and the hero inside or outside its bands.

Left: every rung and the hero over training FLOPs, with the fitted law through the rungs. Right: the hero over its progress. Matplotlib is
imported here alone.
"""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from argosy import spec
from argosy.forecast import joint, trend
from argosy.forecast import points as P
from argosy.judge import points as tables
from argosy.judge import register, verdict
from argosy.plan import flops
from argosy.track import forecasts, metrics
from argosy.track import log as logs

Body = dict[str, Any]
Rows = list[Body]

FORMATS = (".png", ".pdf", ".svg")
DPI = 160
INK, SOFT, BAND, MEAN, UPDATED = "#17212b", "#566270", "#6b6459", "#4a443b", "#a3418a"
HUES = ("#3a9bd0", "#00805f", "#b07d00", "#c85200", "#a3418a", "#0068a5", "#7a3b12", "#6b6459")
MARKS = {"size": "o", "small_batch": "v", "seed": "s"}
BEGINS = 0.0499  # rows before are not fitted and would set the scale


class Curve(NamedTuple):
    """A run's points of one metric: cumulative FLOPs, share of the run, values."""

    name: str
    purpose: str
    flops: np.ndarray
    share: np.ndarray
    value: np.ndarray
    law: np.ndarray  # the fit at each point, NaN where it has none


class Picture(NamedTuple):
    """All that is drawn."""

    name: str
    metric: str
    unit: str
    meaning: str
    rungs: list[Curve]
    hero: Curve
    band: dict[str, np.ndarray]  # flops, share, mean, lo50, hi50, lo90, hi90
    updated: dict[str, np.ndarray]  # flops, share, mean, and lo90, hi90 where known
    title: str
    below: str


def page(home: Path, name: str) -> Body:
    """What page.json of a hero holds, as the page and `--json` have it; made where it is missing.

    Raises:
        ValueError: when nothing is registered, or the file is damaged.
    """
    found = forecasts.forecast(home, name)
    if not found and verdict.write_page(home, name):
        found = forecasts.forecast(home, name)
    if not found:
        raise ValueError(f"no forecast of {name!r} is registered; argosy forecast register {name} makes one from its ladder")
    return found


def picture(home: Path, name: str, metric: str = "") -> Picture:
    """What a picture of one metric shows; the headline evaluation unless another is named.

    Raises:
        ValueError: when nothing is registered, or the forecast has no such metric, naming the nearest.
    """
    drawn, body = page(home, name), register.newest(home, name)
    if body is None:
        raise ValueError(
            f"{forecasts.page_path(home, name)} is there and no registered forecast beside it; bring 0001.json back"
        )
    known = list(drawn["bands"])
    metric = metric or drawn["headline"] or known[0]
    if metric not in known:
        raise ValueError(
            f"the forecast of {name!r} has no metric {metric!r}; nearest: {', '.join(spec.nearest(metric, known))}"
        )
    hero, about = spec.from_json(body["hero"]), metrics.describe(metric)
    points = P.of_rows([row for row in body["data"]["points"] if row["metric"] == metric])
    purposes = {rung["name"]: rung.get("purpose", "") for rung in body["ladder"]}
    return Picture(
        name,
        metric,
        about.unit,
        about.meaning,
        climbed(points, fitted(body, points), purposes),
        measured(home, name, metric, hero),
        placed(drawn["bands"][metric], hero),
        placed(drawn.get("updated", {}).get(metric) or {}, hero),
        *titles(drawn, body),
    )


def fitted(body: Body, points: P.Table) -> np.ndarray:
    """The fit's own value at each point, NaN where it has none: of other methods than the joint law's, and early in a run."""
    law = np.full(len(points), math.nan)
    if P.kind(points.metric[0]) == "other":
        return np.asarray(trend.predict(trend.fit(points), points)["mean"])
    if body["method"] == "per_fraction" or P.kind(points.metric[0]) == "accuracy":
        return law
    rows = joint.chosen(points)
    own = P.take(points, rows)
    law[rows] = np.exp(joint.parts(joint.fit(points, own, body["seed"], draws=0), points, own).mean)
    return law


def climbed(points: P.Table, law: np.ndarray, purposes: dict[str, str]) -> list[Curve]:
    """The rungs, smallest first."""
    runs, share = np.array(points.run), points.step / points.steps_total
    found = []
    for run in dict.fromkeys(points.run):
        own = np.flatnonzero((runs == run) & (share > BEGINS))
        own = own[np.argsort(points.step[own])]
        found.append(Curve(run, purposes.get(run, ""), points.flops[own], share[own], points.value[own], law[own]))
    return sorted((c for c in found if len(c.flops)), key=lambda c: c.flops[-1])


def measured(home: Path, name: str, metric: str, hero: spec.Run) -> Curve:
    """The hero's own points so far; none before its folder is there."""
    rows: Rows = []
    if (home / "runs" / name / "run.json").is_file():
        log = logs.read(home / "runs" / name)
        rows = tables.of_run(log, [metric]) if metric in log.metrics else []
    steps, values = (np.array([float(row[key]) for row in rows]) for key in ("step", "value"))
    kept = steps / spec.steps(hero) > BEGINS
    share = steps[kept] / spec.steps(hero)
    return Curve(
        name, "hero", steps[kept] * flops.train_step(hero, readout=False), share, values[kept], np.full(kept.sum(), math.nan)
    )


def placed(columns: Body, hero: spec.Run) -> dict[str, np.ndarray]:
    """A band's columns with FLOPs and progress, rows without a forecast left out."""
    if not columns.get("step") or not columns.get("mean"):
        return {}
    found = {
        key: np.array([math.nan if v is None else v for v in values], float)
        for key, values in columns.items()
        if isinstance(values, list)
    }
    found = {key: values for key, values in found.items() if len(values) == len(found["step"])}
    kept = np.isfinite(found["mean"]) & (found["step"] > 0)
    found = {key: values[kept] for key, values in found.items()}
    return found | {"share": found["step"] / spec.steps(hero), "flops": found["step"] * flops.train_step(hero, readout=False)}


def titles(drawn: Body, body: Body) -> tuple[str, str]:
    """The verdict and what was registered, in words."""
    judged = drawn.get("verdict") or {}
    said = f"{body['name']}: {judged.get('verdict') or 'registered, not judged yet'}"
    if judged.get("since_step") is not None:
        said += f" since update {judged['since_step']:,}"
    if body.get("bridge"):
        said += " (bridged)"
    registered = f"forecast {body['number']:04d} ({body['method']}), registered {body['created'][:16].replace('T', ' ')} UTC, {register.when(body)}, sha256 {body['sha256'][:12]}"
    return said, registered


# ---- drawing -----------------------------------------------------------------------------------


def draw(made: Picture) -> Any:
    """The picture as a Matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 6.2), dpi=DPI, layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.08), height_ratios=(2.2, 1))
    left, right = figure.add_subplot(grid[:, 0]), figure.add_subplot(grid[0, 1])
    strip = figure.add_subplot(grid[1, 1], sharex=right)
    figure.suptitle(made.title, fontsize=15, fontweight="bold", color=INK, x=0.012, ha="left")
    figure.supxlabel(made.below, fontsize=8.5, color=SOFT, x=0.012, ha="left")
    ladder(left, made)
    progress(right, made)
    distance(strip, made)
    label = f"{made.metric} [{made.unit}]" if made.unit else made.metric
    for axes in (left, right, strip):
        axes.set_ylabel("from the forecast [%]" if axes is strip else label, color=INK)
        axes.grid(True, color="#e0ded6", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=SOFT, labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#b9b5aa")
    return figure


def ladder(axes: Any, made: Picture) -> None:
    """Every rung and the hero over FLOPs."""
    shade(axes, made.band, "flops", legend=False)
    sizes = list(dict.fromkeys(c.name for c in made.rungs if c.purpose == "size"))
    for turn, curve in enumerate(made.rungs):
        hue = HUES[turn % len(HUES)]
        axes.plot(curve.flops, curve.law, color=hue, linewidth=1.2, zorder=2)
        mark = MARKS.get(curve.purpose, "o")
        short = curve.name.removeprefix(f"{made.name}-")
        axes.plot(
            curve.flops,
            curve.value,
            mark,
            color=hue,
            markersize=4,
            markerfacecolor=hue if curve.name in sizes else "white",
            zorder=3,
            label=short,
        )
    axes.plot(
        made.hero.flops,
        made.hero.value,
        "o",
        color=INK,
        markersize=4,
        zorder=4,
        label=made.name if len(made.hero.flops) else None,
    )
    axes.set_xscale("log")
    axes.set_xlabel("training FLOPs so far, without the readout", color=INK)
    axes.set_title("The ladder: points and fit; the hero's registered bands", loc="left", fontsize=10.5, color=INK)
    level(axes, made)
    middle = made.band.get("mean", np.zeros(0))
    where = "lower left" if len(middle) and middle[-1] < middle[0] else "best"  # below all curves that fall
    axes.legend(fontsize=8, edgecolor="none", framealpha=0.75, ncols=1 if where == "lower left" else 2, loc=where)


def progress(axes: Any, made: Picture) -> None:
    """The hero over its progress."""
    shade(axes, made.band, "share", legend=True)
    if made.updated:
        x, label = made.updated["share"], f"updated by its own curve, end {ending(made.updated)}"
        axes.plot(x, made.updated["mean"], "--", color=UPDATED, linewidth=1.6, label=label, zorder=3)
        if {"lo90", "hi90"} <= set(made.updated):
            axes.fill_between(x, made.updated["lo90"], made.updated["hi90"], color=UPDATED, alpha=0.15, linewidth=0)
    if len(made.hero.share):
        label = f"measured, last {short(made.hero.value[-1])} at {made.hero.share[-1]:.0%}"
        axes.plot(made.hero.share, made.hero.value, "o-", color=INK, markersize=4, linewidth=1.1, label=label, zorder=4)
    axes.tick_params(labelbottom=False)
    axes.set_title(f"The hero: {made.meaning}", loc="left", fontsize=10.5, color=INK)
    axes.legend(fontsize=8.5, edgecolor="none", framealpha=0.75)


def distance(axes: Any, made: Picture) -> None:
    """The hero over its forecast, less 1, in per cent, with the bands."""
    band, middle = made.band, made.band.get("mean", np.zeros(0))

    def percent(share: np.ndarray, value: np.ndarray) -> np.ndarray:
        return 100 * (value / np.interp(share, band["share"], middle, left=math.nan, right=math.nan) - 1)

    if len(middle) and (middle > 0).all():
        for width, alpha in (("90", 0.18), ("50", 0.28)):
            low, high = (percent(band["share"], band[f"{side}{width}"]) for side in ("lo", "hi"))
            axes.fill_between(band["share"], low, high, color=BAND, alpha=alpha, linewidth=0)
        axes.axhline(0, color=MEAN, linewidth=1.1)
        if made.updated:
            axes.plot(
                made.updated["share"], percent(made.updated["share"], made.updated["mean"]), "--", color=UPDATED, linewidth=1.6
            )
        axes.plot(made.hero.share, percent(made.hero.share, made.hero.value), "o-", color=INK, markersize=4, linewidth=1.1)
    axes.set_xlim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:+.3g}" if abs(y) > 1e-9 else "0")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.set_xlabel("share of the run", color=INK)


def ending(columns: dict[str, np.ndarray]) -> str:
    """The last row in words.

    >>> ending({"mean": np.array([1.3, 1.2154]), "lo90": np.array([1.2, 1.203]), "hi90": np.array([1.4, 1.226])})
    '1.215 (90%: 1.203 to 1.226)'
    """
    low, high = (columns[key][-1] if key in columns else math.nan for key in ("lo90", "hi90"))
    return short(columns["mean"][-1]) + (f" (90%: {short(low)} to {short(high)})" if low < high else "")


def short(value: float) -> str:
    """Four digits.

    >>> short(1.23), short(0.0264), short(41234.5)
    ('1.230', '0.02640', '41,234')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}"


def shade(axes: Any, band: dict[str, np.ndarray], across: str, legend: bool) -> None:
    """The registered bands and their mean."""
    if not len(band.get("mean", ())):
        return
    for width, alpha in (("90", 0.18), ("50", 0.28)):
        label = f"registered {width}% band" if legend else None
        axes.fill_between(
            band[across], band[f"lo{width}"], band[f"hi{width}"], color=BAND, alpha=alpha, linewidth=0, label=label
        )
    axes.plot(
        band[across],
        band["mean"],
        color=MEAN,
        linewidth=1.1,
        label=f"registered mean, end {ending(band)}" if legend else "hero, registered",
    )


def level(axes: Any, made: Picture) -> None:
    """A logarithmic vertical axis where values span more than a factor of eight."""
    values = np.concatenate([made.band.get("mean", np.zeros(0)), *(c.value for c in (*made.rungs, made.hero))])
    if values.size and values.min() > 0 and values.max() > 8 * values.min():
        axes.set_yscale("log")


def save(made: Picture, out: Path) -> Path:
    """The picture as a file, whole or not at all; the format is the name's ending.

    Raises:
        ValueError: for another ending.
        OSError: when the disk refuses.
    """
    aside = legal(out).with_name(f".{out.name}.{os.getpid()}{out.suffix}")
    try:
        draw(made).savefig(aside)
        os.replace(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    return out


def legal(out: Path) -> Path:
    """The same path, refused before anything is computed where it is no picture's or its folder is not there."""
    if out.suffix.lower() not in FORMATS:
        nearest = out.with_suffix(".png") if out.name else out / "forecast.png"
        raise ValueError(f"--out {out} must end in {', '.join(FORMATS)}; nearest legal {nearest}")
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"--out {out}: there is no folder {out.absolute().parent}")
    return out
