"""What `argosy runs`, `argosy show` and `argosy diff` say: plain dicts for JSON, and tables and small charts for a terminal."""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from argosy.track import columns, forecasts, index, metrics
from argosy.track.layout import finite
from argosy.track.log import RunLog, flat, read

TABLE_POINTS = 12
STYLES = {"running": "cyan", "done": "green", "stopped": "yellow", "failed": "red", "damaged": "red"}
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # the eight dots of a braille letter, rows by columns


# ---- the dicts ---------------------------------------------------------------------------------


def runs(home: Path) -> list[dict[str, Any]]:
    """The summary of every run under a home, newest first, a ladder's rungs after their `hero`; see `index.summary` for the keys."""
    heroes = forecasts.heroes(home)
    found = [body | {"hero": heroes.get(body["name"])} for body in index.summaries(home)]
    there = {body["name"] for body in found}
    tops = [body for body in found if body["hero"] not in there]
    return [body for top in tops for body in (top, *(rung for rung in found if rung["hero"] == top["name"]))]


def show(run: str | Path, metric: str = "", home: Path | None = None) -> dict[str, Any]:
    """A run in short, or one metric of it.

    Without a metric: `summary`, `sources` (held-out bits per byte and gzip's, where known), `events`, `lineage`,
    `metrics`. With one: its meaning, and `points` in at most 200 buckets (`step`, `mean`, `low`, `high`).

    Raises:
        ValueError: for an unknown run or metric, naming the nearest three.
    """
    log = read(run, home)
    if metric:
        log.must_have(metric)
        known = metrics.describe(metric)
        drawn = columns.buckets(log.pieces(metric), 200)
        rows = zip(drawn.last.tolist(), *(number(part) for part in (drawn.mean, drawn.low, drawn.high)), strict=True)
        points = [dict(zip(("step", "mean", "low", "high"), row, strict=True)) for row in rows]
        return {"run": log.name, "metric": metric, "unit": known.unit, "meaning": known.meaning, "points": points}
    body = {
        "folder": str(log.folder),
        "summary": index.summary(log),
        "sources": sources(log),
        "events": log.events,
        "lineage": log.lineage,
        "metrics": sorted(log.metrics, key=metrics.rank),
    }
    return finite(body)


def sources(log: RunLog) -> dict[str, dict[str, float | None]]:
    """Held-out bits per byte of each source at the newest evaluation, and gzip's on the same text."""
    baseline: dict[str, float] = next((e["fields"] for e in reversed(log.events) if e["kind"] == "baseline"), {})
    found: dict[str, dict[str, float | None]] = {}
    for name in log.metrics:
        known = metrics.describe(name)
        if known.panel == "heldout" and not name.endswith("/macro_bpb"):
            point = log.last(name)
            found[known.label] = {"bits_per_byte": number([point[1]])[0] if point else None, "gzip": baseline.get(known.label)}
    return found


def diff(a: str | Path, b: str | Path, home: Path | None = None) -> dict[str, Any]:
    """Where two runs differ: `run`, `code`, `data` and `environment`, each `{key: [value in a, value in b]}`.

    Raises:
        ValueError: for an unknown run, naming the nearest three.
    """
    logs = read(a, home), read(b, home)
    sides = [
        {"run": log.run["run"], "code": _code(log), "data": _data(log), "environment": log.run.get("environment")}
        for log in logs
    ]
    found: dict[str, Any] = {"a": logs[0].name, "b": logs[1].name}
    for section in ("run", "code", "data", "environment"):
        left, right = (flat(side[section] or {}) for side in sides)
        keys = [k for k in dict.fromkeys([*left, *right]) if left.get(k) != right.get(k)]
        found[section] = {key: [left.get(key), right.get(key)] for key in keys}
    return finite(found)


def _code(log: RunLog) -> dict[str, Any]:
    """The code of the newest attempt, else the one that the run was made with."""
    later = [r["fields"]["code"] for r in log.lineage if r["kind"] == "attempt" and isinstance(r["fields"].get("code"), dict)]
    return later[-1] if later else log.run.get("code", {})


def _data(log: RunLog) -> dict[str, Any]:
    """The corpus and its ledger, from the lineage."""
    noted = [r["fields"] for r in log.lineage if r["kind"] == "corpus"]
    return noted[-1] if noted else {}


def number(values: Any) -> list[float | None]:
    """Plain floats; what is not finite becomes None, as JSON wants it."""
    return [float(v) if math.isfinite(v) else None for v in values]


# ---- for the terminal --------------------------------------------------------------------------


def runs_table(found: list[dict[str, Any]]) -> RenderableType:
    """The list of runs; a recipe only where it says more than the run's name."""
    if not found:
        return Text("No run here yet; argosy voyage pocket starts one.")
    there = {body["name"] for body in found}
    rows: list[dict[str, RenderableType]] = []
    for body in found:
        rung, state = body["hero"] in there, Text(body["state"], style=STYLES.get(body["state"], ""))
        step = "" if body["step"] is None else f"{body['step']:,}" + (f"/{body['steps']:,}" if body["steps"] else "")
        rate = "" if body["tokens_per_second"] is None else f"{body['tokens_per_second']:,.0f}"
        rows.append({
            "run": Text(f"  {body['name']}") if rung else Text(body["name"], style="bold"),
            "recipe": Text("" if rung or body["recipe"] == body["name"] else str(body["recipe"] or "")),
            "state": state, "update": step, "tokens": compact(body["tokens"]), "loss": fixed(body["loss"]),
            "bits/byte": fixed(body["macro_bpb"]), "tokens/s": rate, "age": age(body["age_s"]),
        })  # fmt: skip
    table = Table(box=None, pad_edge=False)
    shown = [name for name in rows[0] if name != "recipe" or any(str(row["recipe"]) for row in rows)]
    for name in shown:
        named = name in ("run", "recipe")  # these go on below on a narrow terminal: beginnings do not tell rungs apart
        table.add_column(name, justify="left" if named or name == "state" else "right", overflow="fold", no_wrap=not named)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def show_table(body: dict[str, Any], width: int = 72) -> RenderableType:
    """A run in short, or a metric as a small chart with a table of points."""
    if "points" in body:
        return _metric_table(body, width)
    s = body["summary"]
    table = Table(box=None, pad_edge=False, show_header=False)
    rows = {
        "state": f"{s['state']}, {age(time.time() - s['updated'])} ago",
        "progress": ""
        if s["progress"] is None
        else f"{s['progress']:.0%}: update {s['step']:,} of {s['steps']:,}, {compact(s['tokens'])} tokens",
        "training loss": fixed(s["loss"]),
        "held-out": "" if s["macro_bpb"] is None else f"{s['macro_bpb']:.3f} bits/byte, mean of sources",
        "speed": "" if s["tokens_per_second"] is None else f"{s['tokens_per_second']:,.0f} tokens/s",
        "MFU": "" if s["mfu"] is None else f"{s['mfu']:.1%}",
        "dropped": "" if s["drop_fraction"] is None else f"{s['drop_fraction']:.2%} of assignments",
        "attempts": str(s["attempts"]),
        "folder": body["folder"],
    }
    for key, value in rows.items():
        if value:
            table.add_row(Text(key, style="dim"), value)
    parts: list[RenderableType] = [Text(s["name"], style="bold"), table]
    if body["sources"]:
        heldout = Table(box=None, pad_edge=False)
        for name in ("source", "bits/byte", "gzip -9"):
            heldout.add_column(name, justify="left" if name == "source" else "right")
        for name, row in body["sources"].items():
            heldout.add_row(name, fixed(row["bits_per_byte"]), fixed(row["gzip"]))
        parts += [Text(), heldout]
    happened = sorted((*body["lineage"], *body["events"]), key=lambda record: record["time"])
    kinds = [f"{record['step']:,} {record['kind'].replace('_', ' ')}" for record in happened]
    parts += [
        Text(),
        Text(
            f"{len(body['metrics'])} metrics (argosy show {s['name']} METRIC); happened at: {', '.join(kinds[-12:])}",
            style="dim",
        ),
    ]
    return Group(*parts)


def _metric_table(body: dict[str, Any], width: int) -> RenderableType:
    points = [p for p in body["points"] if p["mean"] is not None]
    head = Text.assemble((body["metric"], "bold"), f"  {body['unit']}\n", (body["meaning"], "dim"))
    if not points:
        return Group(head, Text("No finite value was recorded."))
    table = Table(box=None, pad_edge=False)
    for name in ("update", "mean", "smallest", "largest"):
        table.add_column(name, justify="right")
    for i in sorted({round(k * (len(points) - 1) / (TABLE_POINTS - 1)) for k in range(TABLE_POINTS)}):
        table.add_row(f"{points[i]['step']:,}", *(f"{points[i][k]:.5g}" for k in ("mean", "low", "high")))
    drawing = chart([p["step"] for p in points], [p["mean"] for p in points], width - 12, 10)
    return Group(head, Text(), Text(drawing), Text(), table)


def chart(steps: list[int], values: list[float], width: int = 60, height: int = 10) -> str:
    """A line of braille dots, `width` by `height` letters, with its range at the left and its steps below.

    The range is that of the points after the first 5%, so that a steep beginning leaves the rest readable; what is
    outside lies on the edge.

    >>> print(chart([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0], width=2, height=1))
             3 ⡤⠚
               0 3
    """
    columns_, rows = 2 * width, 4 * height
    late = [v for step, v in zip(steps, values, strict=True) if step >= steps[0] + 0.05 * (steps[-1] - steps[0])]
    low, high = (min(late), max(late)) if len(values) > 20 else (min(values), max(values))
    xs = np.interp(np.linspace(0, 1, 4 * columns_), [0, 1], [steps[0], steps[-1]])
    ys = np.clip(np.interp(xs, steps, values), low, high)
    letters = np.full((height, width), 0x2800)
    for i, y in enumerate(ys):
        column, row = i // 4, round((rows - 1) * (1 - (y - low) / ((high - low) or 1)))
        letters[row // 4, column // 2] |= DOTS[row % 4][column % 2]
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"} if height > 1 else {0: f"{high:.4g}"}
    lines = [f"{labels.get(i, ''):>10} {''.join(map(chr, row))}" for i, row in enumerate(letters)]
    left, right = f"{steps[0]:,}", f"{steps[-1]:,}"
    return "\n".join([*lines, " " * 11 + left + " " * max(1, width - len(left) - len(right)) + right])


def diff_table(body: dict[str, Any]) -> RenderableType:
    """What differs between two runs, section by section."""
    parts: list[RenderableType] = []
    for section, title in (("run", "configuration"), ("code", "code"), ("data", "data"), ("environment", "environment")):
        if not body[section]:
            parts.append(Text(f"{title}: the same", style="dim"))
            continue
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in ("", body["a"], body["b"]):
            table.add_column(name, overflow="fold")
        for key, (left, right) in body[section].items():
            table.add_row(key, *("none" if v is None else str(v) for v in (left, right)))
        parts.append(table)
    return Group(*parts)


def fixed(value: float | int | None) -> str:
    return "" if value is None else f"{value:.3f}"


def compact(value: float | int | None) -> str:
    """A large number in four letters or so.

    >>> compact(2_097_152), compact(18_005_000_000_000), compact(None)
    ('2.1M', '18T', '')
    """
    if value is None:
        return ""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{float(f'{value / size:.3g}'):g}{unit}"
    return f"{value:g}"


def age(seconds: float | int) -> str:
    """A time span in its largest unit.

    >>> age(3), age(200), age(90_000)
    ('3s', '3m', '25h')
    """
    for size, unit, most in ((1, "s", 120), (60, "m", 120), (3600, "h", 48)):
        if seconds < size * most:
            return f"{max(0, seconds) // size:.0f}{unit}"
    return f"{seconds // 86_400:.0f}d"
