"""A run held against its registered forecast: `ahead`, `on track`, `behind`, `off` or `not comparable`, and what the end looks like now.

`forecast.follow` reads each metric; here is what is compared with what. The newest forecast alone counts. Evaluations are as logged,
metrics of every update the mean since the evaluation before, over as large a share of the run as in the ladder. The first `EARLIEST`
of a run is not judged: rungs are fitted without theirs. The run's word is its headline evaluation's, with two exceptions: a loss that
is no positive number is `off`, and where the mean of the sets is well while one of them is `off`, the run is `behind`.
"""

import math
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from argosy import spec
from argosy.forecast import fit, follow, joint
from argosy.forecast import points as P
from argosy.judge import bridge, register, witness
from argosy.judge import points as tables
from argosy.track import forecasts, layout
from argosy.track import log as logs
from argosy.track import metrics as known

EARLIEST = 0.9 * joint.EARLIEST  # of the run
# What is good, by name: 1 where lower is better, -1 where higher is, 0 where neither is. The first that matches counts.
BETTER = (
    (r"eval_.*|train/(loss|cross_entropy_loss)", 1),
    (r".*drop(s|ped)?(_.*)?", 1),
    (r"throughput/.*time|throughput/duration", 1),
    (r"throughput/.*", -1),
    (r".*", 0),
)
CHANGE = "change"  # lineage records of what a hero does otherwise than registered

Body = dict[str, Any]


def better(metric: str) -> int:
    """1 where lower is better, -1 where higher is, 0 where neither is.

    >>> [better(m) for m in ("eval_dropless/prose/bpb", "eval/arc/acc", "moe/drop_fraction", "throughput/mfu", "grad/norm/total")]
    [1, -1, 1, -1, 0]
    """
    if P.kind(metric) == "accuracy":
        return -1
    return next(sign for pattern, sign in BETTER if re.fullmatch(pattern, metric))


class Judged(NamedTuple):
    """One metric: what the verdict says of it, and the updated forecast of what is left."""

    entry: Body
    updated: Body
    end: Body


def judge(home: Path, name: str) -> Body:
    """The verdict on a run, plain JSON values; `<home>/forecasts/<name>/page.json` is written with it.

    `verdict` is None before the first evaluation that can be compared; `why` says it in words, `since_step` is the evaluation from which
    on it holds. `metrics`: each with `verdict`, `since_step`, `why`, `step`, `actual`, `mean`, `lo90`, `hi90`, `widths_out` (beyond the
    90% band, in halves of it; negative below, 0 inside), `shift` (a lasting one, as a share, or None) and `residual`, `[step, actual / mean - 1]`.
    `end`: of the headline, `registered` and `updated` by the run's own curve. `differences`: why it is not comparable.

    `page` says so where its file could not be written.

    Raises:
        ValueError: when nothing is registered, or a file is damaged.
        OSError: when a file cannot be read.
    """
    bodies = register.all_of(home, name)
    if not bodies:
        raise ValueError(f"no forecast of {name!r} is registered; argosy forecast register {name} makes one from its ladder")
    body = bodies[-1]
    found: Body = {"name": name, "verdict": None, "why": "", "since_step": None, "forecast": marks(home, body), "metrics": {}}
    found |= {"headline": headline(body), "end": {"registered": None, "updated": None}, "differences": []}
    begun = (home / "runs" / name / "run.json").is_file()
    log = logs.read(home / "runs" / name) if begun else None
    judged = of_log(body, log) if log else {}
    found["metrics"] = {metric: one.entry for metric, one in judged.items() if one.entry}
    updated = {metric: one.updated for metric, one in judged.items() if one.updated}
    if log:
        found["differences"], changed = differences(bodies, log)
    if found["differences"]:
        for entry in found["metrics"].values():
            entry |= {"verdict": "not comparable", "since_step": changed, "why": ""}
        updated = {}
    head = registered_rows(body, found["headline"])
    if head:
        found["end"]["registered"] = {key: head[-1][key] for key in ("step", *fit.BANDS)}
        if found["headline"] in updated:
            found["end"]["updated"] = judged[found["headline"]].end
    found = layout.finite(found | said(found, body, changed if found["differences"] else None))
    try:
        write_page(home, name, found, updated, body)
    except OSError as error:  # the verdict is worth more than its picture
        found["page"] = f"not written: {error.strerror or error}"
    return found


def of_log(body: Body, log: logs.RunLog) -> dict[str, Judged]:
    """Every metric that the forecast has bands for and the run has logged."""
    run, ends = spec.from_json(log.run["run"]), np.array(tables.evaluated(log), dtype=np.int64)
    logged, out = set(log.metrics), {}
    for metric in dict.fromkeys(row["metric"] for row in body["forecast"]["rows"]):
        if metric in logged:
            one = of_metric(body, metric, tables.measured(log, metric, ends), spec.steps(run))
            if one is not None:
                out[metric] = one
    return out


def registered_rows(body: Body, metric: str | None) -> list[Body]:
    """A metric's rows that have bands and are judged, in order of steps."""
    rows = [r for r in body["forecast"]["rows"] if r["metric"] == metric and r["mean"] is not None and r["lo90"] is not None]
    total = spec.steps(spec.from_json(body["hero"])) if rows else 1
    return sorted((r for r in rows if r["step"] >= EARLIEST * total), key=lambda r: r["step"])


def registered(body: Body, metric: str, total: int) -> follow.Registered | None:
    """What was registered of a metric as `follow` takes it; None without bands or covariance."""
    rows, block = registered_rows(body, metric), body["forecast"].get("covariance", {}).get(metric)
    if not rows or not block or not block["rows"]:
        return None
    zero = float(block.get("zero", 0.0))
    step, *logs_ = (np.array([float(r[key]) for r in rows]) for key in ("step", "mean", "lo90", "hi90"))
    mean, low, high = (np.log(np.maximum(column + zero, 1e-300)) for column in logs_)
    knots = np.array([float(body["forecast"]["rows"][i]["step"]) for i in block["rows"]])
    order = np.argsort(knots)
    matrix = np.array(block["matrix"], float)[np.ix_(order, order)]
    low, high = np.minimum(low, mean - 1e-9), np.maximum(high, mean + 1e-9)
    return follow.Registered(step / total, mean, low, high, knots[order] / total, matrix, float(block["noise"]), zero)


def of_metric(body: Body, metric: str, measured: dict[int, float], total: int) -> Judged | None:
    """The reading of one metric, or None where nothing of it can be compared."""
    known_, rows = registered(body, metric, total), registered_rows(body, metric)
    if known_ is None:
        return None
    first, last = rows[0]["step"], rows[-1]["step"]
    steps = [s for s in sorted(measured) if first <= s <= last]
    lowest = -known_.zero
    usable = [s for s in steps if math.isfinite(measured[s]) and measured[s] > lowest]
    followed = follow.follow(known_, np.array(usable, float) / total, np.array([measured[s] for s in usable]))
    bands = future(rows, known_, followed, steps[-1] if steps else 0)
    end = {key: column[-1] for key, column in bands.items()} if bands["step"] else {}
    if not steps:
        return Judged({}, {}, end)
    reading = follow.read(known_, followed, better(metric))
    since = None if reading.since is None else usable[reading.since]
    word, why = reading.word, reading.why
    least = 0.0 if P.kind(metric) == "loss" else -math.inf  # a loss of 0 or below is no measurement either
    sound = [s for s in steps if math.isfinite(measured[s]) and measured[s] > least]
    if not sound or sound[-1] < steps[-1]:
        why = "not positive" if math.isfinite(measured[steps[-1]]) else "not finite"
        word, since = "off", min(s for s in steps if not sound or s > sound[-1])
    at = follow.at(np.array([steps[-1] / total]), known_.progress)[0]
    mean, low, high = (math.exp(float(at @ column)) - known_.zero for column in (known_.mean, known_.low, known_.high))
    entry: Body = {"verdict": word, "since_step": since, "why": why, "step": steps[-1], "actual": plain(measured[steps[-1]])}
    entry |= {"mean": mean, "lo90": max(low, 0.0), "hi90": high}
    newest = bool(usable) and usable[-1] == steps[-1]
    entry["widths_out"] = round(float(followed.widths[-1]), 4) if newest else None
    entry["shift"] = math.expm1(reading.shift or followed.shift) if followed.steps else None
    centre = np.exp(follow.at(np.array(usable, float) / total, known_.progress) @ known_.mean) - known_.zero
    entry["residual"] = [
        [s, float(f"{measured[s] / m - 1:.5g}")] for s, m in zip(usable, centre.tolist(), strict=True) if m > 0
    ]
    return Judged(entry, bands if bands["step"] else {}, end)


def future(rows: list[Body], known_: follow.Registered, found: follow.Followed, after: int) -> dict[str, list[Any]]:
    """The updated forecast of the rows after a step, in the metric's unit."""
    kept = [i for i, row in enumerate(rows) if row["step"] > after]
    spread = np.sqrt(found.spread**2 + found.noise**2)
    out: dict[str, list[Any]] = {"step": [rows[i]["step"] for i in kept]}
    for key, z in (("mean", 0.0), ("lo50", -1), ("hi50", 1), ("lo90", -1), ("hi90", 1)):
        wide = follow.NORMAL50 if key.endswith("50") else follow.NORMAL90
        values = np.exp(np.clip(found.mean + z * wide * spread, -600, 600)) - known_.zero
        out[key] = [max(float(values[i]), 0.0) for i in kept]
    return out


def plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


# ---- what is compared with what ----------------------------------------------------------------


def headline(body: Body) -> str | None:
    """The evaluation whose word is the run's: macro bits per byte, else macro loss, else the first loss that is forecast."""
    names = list(dict.fromkeys(row["metric"] for row in body["forecast"]["rows"]))
    losses = [n for n in names if P.kind(n) == "loss"]
    return known.macro_bpb(names) or next((n for n in losses if n.endswith("macro_loss")), losses[0] if losses else None)


def marks(home: Path, body: Body) -> Body:
    """What a reader must know of the forecast: its number and hash, whether it was late, bridged, witnessed.

    `when` says in words before or after how many updates it was made; `witness_damaged` says what is wrong with the file of the witnesses, which are then not known; None where nothing is.
    """
    found = {key: body.get(key) for key in ("number", "sha256", "created", "method", "late", "supersedes", "reason")}
    found |= {"when": register.when(body), "bridged": body.get("bridge") is not None, "witness": [], "witness_damaged": None}
    try:
        found["witness"] = [entry["at"] for entry in witness.noted(home, body)]
    except (ValueError, OSError) as error:  # a note beside the forecast, which a verdict does not rest on
        found["witness_damaged"] = str(error)
    return found


def witnessed(about: Body) -> str:
    """Where the forecast's line was published, in words."""
    if about["witness_damaged"]:
        return f"the file of its witnesses is damaged: {about['witness_damaged']}"
    return f"published: {', '.join(about['witness'])}" if about["witness"] else "no outside witness is recorded"


def differences(bodies: list[Body], log: logs.RunLog) -> tuple[list[str], int]:
    """What the run has otherwise than registered, in words, and from which step on."""
    body, found, since = bodies[-1], [], []
    run, hero = spec.from_json(log.run["run"]), spec.from_json(body["hero"])
    plain_ = next((b for b in reversed(bodies) if b.get("bridge") is None), body)
    allowed = [body["identity"], plain_["identity"], register.identity(hero, plain_["identity"]["corpus_checksum"])]
    own = register.identity(run, tables.checksum(log) or "")
    for key, value in own.items():
        legal = {str(one[key]) for one in allowed if key in one}
        if key != "key" and value != "" and "" not in legal and str(value) not in legal:
            found.append(f"{key.replace('_', ' ')} is {value}, registered {body['identity'][key]}")
    if not found and own["key"] not in {one["key"] for one in allowed}:
        found = [
            f"{key} is {new}, registered {old}" for key, (old, new) in spec.difference(hero, run).items() if key != "seed"
        ]  # another seed is luck, which bands hold
    since += [0] * bool(found)
    bridges = bridge.history(body.get("bridge"))
    shown = {a.number: a.shown_to for a in log.attempts}
    for record in log.lineage:
        if record["kind"] != CHANGE or record["time"] <= plain_["created_s"] or any(bridge.covers(b, record) for b in bridges):
            continue
        if record["step"] <= shown.get(record["attempt"], math.inf):
            found.append(
                f"changed at update {record['step']:,}: {bridge.told(record['fields'])}; argosy forecast bridge {body['name']} --event"
                f" {CHANGE}@{record['step']} --rerun OLD=NEW measures it"
            )
            since.append(record["step"])
    return found, min(since, default=0)


# ---- words -------------------------------------------------------------------------------------


def said(found: Body, body: Body, changed: int | None) -> Body:
    """The run's verdict, why and since when."""
    head, metrics = found["headline"], found["metrics"]
    if changed is not None:
        return {"verdict": "not comparable", "why": "; ".join(found["differences"]), "since_step": changed}
    one = metrics.get(head)
    for metric in sorted(metrics, key=known.rank):
        entry = metrics[metric]
        if entry["why"] in ("not finite", "not positive") and P.kind(metric) == "loss":
            why = f"{metric} is not a {entry['why'].removeprefix('not ')} number since update {entry['since_step']:,}"
            return {"verdict": "off", "why": why, "since_step": entry["since_step"]}
    if one is None:
        rows = registered_rows(body, head)
        if not rows:
            return {"verdict": None, "why": "the forecast has no bands of an evaluation, so nothing can be held against it"}
        if head not in body["forecast"].get("covariance", {}):
            why = f"the method {body['method']} does not say how far evaluations depart together: its bands are drawn, no verdict is given"
            return {"verdict": None, "why": why}
        total = spec.steps(spec.from_json(body["hero"]))
        first = f"update {rows[0]['step']:,}, {rows[0]['step'] / total:.1%} of the run"
        return {"verdict": None, "why": f"no evaluation can be compared yet; the first one comes after {first}"}
    why = sentence(head, one, found["end"])
    if one["verdict"] in ("ahead", "on track"):
        others = [m for m in metrics if m.startswith("eval_") and m != head and metrics[m]["verdict"] == "off"]
        if others:
            worst = max(others, key=lambda m: metrics[m]["widths_out"] or 0)
            since = metrics[worst]["since_step"]
            why = f"{worst} is off since update {since:,} ({distance(worst, metrics[worst])}), though {why}"
            return {"verdict": "behind", "why": why, "since_step": since}
    return {"verdict": one["verdict"], "why": why, "since_step": one["since_step"]}


def distance(metric: str, one: Body) -> str:
    """How far a value is from its forecast, in words.

    >>> distance("x/loss", {"actual": 2.1, "mean": 2.0, "widths_out": 0.5, "why": "band", "shift": None})
    '5.00% above its forecast, 0.5 half widths beyond its 90% band'
    """
    if one["actual"] is None:
        return "not a finite number"
    if not one["mean"]:
        return "its forecast is 0"
    off = one["actual"] / one["mean"] - 1
    text = f"{abs(off):.2%} {'above' if off > 0 else 'below'} its forecast"
    out = one["widths_out"]
    text += ", inside its 90% band" if not out else f", {abs(out):.1f} half widths beyond its 90% band"
    if one["why"] == "shift" and one["shift"]:
        text += f", with a lasting shift of {one['shift']:+.2%}"
    return text


def sentence(metric: str, one: Body, end: Body) -> str:
    """What was forecast, what was measured, since when, and what the end looks like."""
    text = f"{metric} at update {one['step']:,} is {number(one['actual'])}, forecast {number(one['mean'])}"
    text += f" (90%: {number(one['lo90'])} to {number(one['hi90'])}): {distance(metric, one)}"
    if one["since_step"] is not None:
        text += f", since update {one['since_step']:,}"
    if end["updated"] and end["registered"]:
        now, then = end["updated"], end["registered"]
        text += f"; by its own curve the run ends at {number(now['mean'])} ({number(now['lo90'])} to {number(now['hi90'])}),"
        text += f" registered {number(then['mean'])} ({number(then['lo90'])} to {number(then['hi90'])})"
    return text


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:#.4g}".rstrip(".")


# ---- the page ----------------------------------------------------------------------------------


def write_page(
    home: Path, name: str, found: Body | None = None, updated: Body | None = None, body: Body | None = None
) -> Path | None:
    """Write what the page draws, `<home>/forecasts/<name>/page.json`, whole or not at all: bands, verdict, updated forecast.

    Without a verdict it says that there is none yet. Returns its path, or None where nothing is registered.
    """
    body = body or register.newest(home, name)
    if body is None:
        return None
    bands: Body = {}
    for row in body["forecast"]["rows"]:
        if row["mean"] is not None:
            band = bands.setdefault(row["metric"], {key: [] for key in forecasts.BAND})
            for key in forecasts.BAND:
                band[key].append(row[key])
    page = {"forecast": marks(home, body), "bands": bands, "verdict": found, "updated": updated or {}, "time": time.time()}
    path = forecasts.page_path(home, name)
    layout.write_json(path, layout.finite(page))
    return path
