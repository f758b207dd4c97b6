"""A change of the hero does not end its forecast: the change's effect, measured on rungs, shifts and widens the bands.

A rung is trained again with the change, from the same fraction of the run on; the log ratio of its metrics to the first rung's, at
equal fractions, is the effect at that size. Over pairs the effect is a + b x, x the decades of FLOPs from the hero: b has a prior
about 0, `TRANSFER` of the effect for each decade, which one size leaves as it is and several move; the scatter between pairs has a
prior too, the luck of two runs. A public example of such a pair: a new mixture was worth -0.80% at width 1,536 (marin#9126).
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from argosy import spec
from argosy.judge import ladders, register
from argosy.judge import points as tables
from argosy.judge.fits import Body, Say
from argosy.track import log as logs
from argosy.track import metrics as known

TRANSFER = 0.3  # of the effect, for each decade of FLOPs: prior spread of how it changes with size
LUCK = 0.0015  # of log L: a run's own offset, `forecast.joint.OFFSET`
FREEDOM = 3.0  # degrees that the prior of the scatter counts for
WINDOW = 3  # evaluations that a point of the effect's curve is the mean of
BEFORE = 3.0  # spreads: a rerun that differs more before the event did not begin as the first run
OWN = ("attempt", "ended", "corpus", "baseline", "baseline_whole", "verdict")  # records of every run, none of them a change
UNCHANGING = ("recipe", "seed", "optim.horizon_tokens")


def bridge(
    home: Path, name: str, event: str, reruns: Sequence[str], *, reason: str = "", say: Say = lambda _: None
) -> tuple[Path, Body]:
    """The newest forecast over a change: shifted, widened, registered as its successor; the file's path and what is in it.

    Args:
        event: an event or lineage record of the hero: its kind, or kind@step.
        reruns: `OLD=NEW`, a rung of the registered ladder and the run that repeats it with the change.

    Raises:
        ValueError: when nothing is registered, the event is not there or not one, or a pair is none.
        OSError: when the disk refuses.
    """
    before = register.newest(home, name)
    if before is None:
        raise ValueError(f"no forecast of {name!r} is registered, so none can be bridged; argosy forecast register {name}")
    hero, log = spec.from_json(before["hero"]), logs.read(home / "runs" / name)
    record = the_event(log, event)
    if any(covers(old, record) for old in history(before.get("bridge"))):
        raise ValueError(f"{record['kind']}@{record['step']} is bridged already, by forecast {before['number']:04d}")
    say("reading the pairs")
    pairs, changed = read_pairs(home, before, reruns, record["step"] / spec.steps(hero))
    made: Body = {
        "event": record,
        "updates": ladders.updates(log),
        "first": before["bridge"]["first"]
        if before.get("bridge")
        else {key: before[key] for key in ("number", "created", "sha256")},
        "changed": changed,
        "transfer": TRANSFER,
        "pairs": pairs,
    }
    plain = before["forecast"]
    made["effects"] = effects(plain, made, hero)
    made["before"] = before.get("bridge")
    forecast = shifted(plain, made)
    forecast["fit"] = plain["fit"] | {"alarms": plain["fit"]["alarms"] + differs_before(plain, made)}
    kept = ("late", "hero", "ladder", "data", "method", "seed")
    now = register.dated(home, name, [], before)
    body = {
        "created": register.stamp(now),
        "created_s": now,
        "reason": reason.strip() or f"bridge over {record['kind']} at step {record['step']:,}",
        "bridge": made,
        "identity": register.identity(changed_run(hero, made), corpus_of(pairs, before)),
        **{key: before[key] for key in kept},
        "forecast": forecast,
    }
    path, body = register.write(home, name, body, before)
    register.show_page(home, body)
    return path, body


def covers(made: Body, record: Body) -> bool:
    """Whether a bridge was made over a record of the run, and not before it was noted."""
    event = made["event"]
    return (event["kind"], event["step"]) == (record["kind"], record["step"]) and record["time"] <= event["time"]


def told(fields: Body) -> str:
    """What a record says."""
    return ", ".join(f"{v}" if k == "what" else f"{k} {v}" for k, v in fields.items()) or "not said what"


def the_event(log: logs.RunLog, asked: str) -> Body:
    """The one record of a run that is meant: kind, step, fields, and where it is from; records of one kind and step are one.

    Raises:
        ValueError: when there is none, or more than one, with a list.
    """
    records = [r | {"of": "event"} for r in log.events if not r["superseded"]] + [r | {"of": "lineage"} for r in log.lineage]
    there: dict[tuple[str, int], Body] = {}
    for r in sorted((r for r in records if r["kind"] not in OWN), key=lambda r: r["time"]):
        same = there.get((r["kind"], r["step"]))  # a rerun from that update on has both changes
        fields = r["fields"] if same is None else {"what": f"{told(same['fields'])}; {told(r['fields'])}"}
        there[r["kind"], r["step"]] = r | {"fields": fields}
    listed = ", ".join(f"{kind}@{step}" for kind, step in sorted(there, key=lambda k: k[1])) or "none"
    kind, _, step = asked.partition("@")
    if step and not re.fullmatch(r"\d+", step):
        raise ValueError(f"--event {asked!r} is KIND or KIND@STEP; run {log.name!r} has: {listed}")
    found = [r for (k, s), r in there.items() if k == kind and (not step or s == int(step))]
    if not found:
        raise ValueError(f"run {log.name!r} has no event or change {asked!r}; it has: {listed}")
    if len(found) > 1:
        raise ValueError(f"run {log.name!r} has {len(found)} records of {kind!r}: say which with KIND@STEP; it has: {listed}")
    return {key: found[0][key] for key in ("kind", "step", "of", "fields", "time")}


def read_pairs(home: Path, before: Body, reruns: Sequence[str], begins: float) -> tuple[list[Body], dict[str, list[Any]]]:
    """The pairs with their log ratios, and what the change is: `{key: [old, new]}` where it is one value in all of them.

    Raises:
        ValueError: for a pair that is none: not of the ladder, not finished, another size, or no difference at all.
    """
    if not reruns:
        raise ValueError("--rerun OLD=NEW: at least one rung and the run that repeats it with the change")
    rungs = {rung["name"]: rung for rung in before["ladder"]}
    metrics = list(dict.fromkeys(row["metric"] for row in before["data"]["target"]))
    zeros = {m: block.get("zero", 0.0) for m, block in before["forecast"].get("covariance", {}).items()}
    pairs, changes, seen = [], [], set()
    for text in reruns:
        old, sign, new = text.partition("=")
        old = old if old in rungs else f"{before['name']}-{old}"
        if not sign or old not in rungs:
            raise ValueError(f"--rerun {text!r} is OLD=NEW, OLD one of {', '.join(rungs)}")
        if new in seen or new == old:
            raise ValueError(f"--rerun {text!r}: {new!r} is named twice; each rerun is a run of its own")
        seen.add(new)
        first, second = logs.read(home / "runs" / old), logs.read(home / "runs" / new)
        a, b = (spec.from_json(log.run["run"]) for log in (first, second))
        changes.append(difference(text, first, second, a, b))
        place = tables.place(a, old, "", spec.steps(a))
        sums = {"checksum": tables.checksum(second)}
        pairs.append({"old": old, "new": new, "flops": place["flops"], "begins": begins, **sums})
        pairs[-1]["ratios"] = ratios(first, second, metrics, zeros)
    common = {key: value for key, value in changes[0].items() if all(change.get(key) == value for change in changes)}
    return pairs, common


def difference(text: str, first: logs.RunLog, second: logs.RunLog, a: spec.Run, b: spec.Run) -> dict[str, list[Any]]:
    """What a rerun has otherwise.

    Raises:
        ValueError: when the two are no pair.
    """
    for log, run in ((first, a), (second, b)):
        if not ladders.is_finished(log):
            raise ValueError(
                f"--rerun {text!r}: run {log.name!r} has {ladders.updates(log):,} of {spec.steps(run):,} updates; both have to be"
                " finished"
            )
    active = [tables.place(run, "", "", 1)["active_params"] for run in (a, b)]
    if abs(active[1] / active[0] - 1) > 0.05:
        raise ValueError(
            f"--rerun {text!r}: {active[0]:,} and {active[1]:,} active parameters are two sizes; a pair is one size, with and without"
            " the change"
        )
    changed = {key: [old, new] for key, (old, new) in spec.difference(a, b).items() if key not in UNCHANGING}
    told = [r for r in second.lineage if r["kind"] not in OWN]
    same_code = first.run["code"].get("sources") == second.run["code"].get("sources")
    if not changed and not told and same_code and tables.checksum(first) == tables.checksum(second):
        raise ValueError(
            f"--rerun {text!r}: the two differ in nothing (recipe, lineage, code, corpus), so their ratio is luck and no effect"
        )
    return json.loads(json.dumps(changed, default=lambda v: getattr(v, "__dict__", str(v))))


def ratios(first: logs.RunLog, second: logs.RunLog, metrics: Sequence[str], zeros: dict[str, float]) -> Body:
    """`{metric: [[fraction, log ratio], ...]}` at the rerun's evaluations."""
    out: Body = {}
    sides = [tables.of_run(log, metrics) for log in (first, second)]
    for metric in metrics:
        zero = zeros.get(metric, 0.0)
        curves = []
        for rows in sides:
            own = [r for r in rows if r["metric"] == metric and math.isfinite(r["value"]) and r["value"] + zero > 0]
            curves.append(np.array([[r["step"] / r["steps_total"], math.log(r["value"] + zero)] for r in own]).reshape(-1, 2))
        old, new = curves
        if len(old) > 1 and len(new):
            new = new[(new[:, 0] >= old[0, 0] - 1e-9) & (new[:, 0] <= old[-1, 0] + 1e-9)]
            out[metric] = [[float(g), float(y - np.interp(g, old[:, 0], old[:, 1]))] for g, y in new]
    return out


def effects(plain: Body, made: Body, hero: spec.Run) -> Body:
    """The effect on each metric from the pairs alone: `{metric: {"step", "shift", "spread", "freedom", "sizes"}}`.

    `shift` is in log of the value at each `step`; `spread` and `freedom` are of the Student-t about it that the hero's own shift has.
    """
    place = tables.place(hero, "", "", spec.steps(hero))
    x = np.array([math.log10(pair["flops"] / place["flops"]) for pair in made["pairs"]])
    out: Body = {}
    for metric in dict.fromkeys(row["metric"] for row in plain["rows"]):
        steps = [r["step"] for r in plain["rows"] if r["metric"] == metric and r["step"] > made["event"]["step"]]
        curves = [np.array(pair["ratios"].get(metric, [])).reshape(-1, 2) for pair in made["pairs"]]
        curves = [curve[curve[:, 0] > made["event"]["step"] / spec.steps(hero)] for curve in curves]
        have = [k for k, curve in enumerate(curves) if len(curve)]
        if not steps or not have:
            continue
        g = np.array(steps) / spec.steps(hero)
        values = np.array([np.interp(g, *smooth(curves[k]).T) for k in have])
        noise = plain["fit"]["noise"].get(metric) or LUCK
        found = pooled(values, x[have], noise)
        out[metric] = {"step": steps, **found, "sizes": len(set(np.round(x[have], 2)))}
    return out


def smooth(curve: np.ndarray) -> np.ndarray:
    """A curve's running mean over `WINDOW` of its points, fewer at the ends."""
    half = WINDOW // 2
    mean = [curve[max(0, k - half) : k + half + 1, 1].mean() for k in range(len(curve))]
    return np.column_stack([curve[:, 0], mean])


def pooled(values: np.ndarray, x: np.ndarray, noise: float) -> Body:
    """The hero's shift at each fraction from pairs [P, J] at x decades from the hero, with its spread.

    Levels of the pairs are a + b x + scatter; the curve about its level is their middle one.
    """
    levels = values.mean(1)
    curve = np.median(values - levels[:, None], axis=0)
    scatter = math.sqrt(2) * max(LUCK, noise)  # two runs' luck and noise
    slope = TRANSFER * abs(float(np.median(levels))) + scatter / 10
    weight = np.ones(len(levels))
    for _ in range(20):  # Student-t weights: one odd pair does not decide
        a, b, covariance = line(levels, x, weight, scatter, slope)
        off = levels - a - b * x
        left = float((weight * off**2).sum())
        scale = math.sqrt((FREEDOM * scatter**2 + left) / (FREEDOM + len(levels) - 1))
        weight = 5 / (4 + (off / scale) ** 2)
    grown = max(1.0, scale / scatter) ** 2
    variance = covariance * grown + scale**2
    freedom = FREEDOM + len(levels) - 1
    return {"shift": [float(v) for v in a + curve], "spread": math.sqrt(variance), "freedom": freedom, "slope": b}


def line(levels: np.ndarray, x: np.ndarray, weight: np.ndarray, scatter: float, slope: float) -> tuple[float, float, float]:
    """Level at x = 0, slope, and the level's variance, by least squares with a prior about 0 on the slope."""
    design = np.column_stack([np.ones_like(x), x])
    inner = design.T @ (design * weight[:, None]) / scatter**2 + np.diag([0.0, slope**-2])
    a, b = np.linalg.solve(inner, design.T @ (weight * levels) / scatter**2)
    return float(a), float(b), float(np.linalg.inv(inner)[0, 0])


def shifted(plain: Body, made: Body) -> Body:
    """A forecast's rows and covariances after the event moved by the effects, and wider; rows before it as they were.

    A metric whose effect is not known has no forecast after the event.
    """
    rows, step = [], made["event"]["step"]
    zeros = {m: block.get("zero", 0.0) for m, block in plain.get("covariance", {}).items()}
    for row in plain["rows"]:
        effect = made["effects"].get(row["metric"])
        if row["step"] <= step or row["mean"] is None:
            rows.append(row)
        elif effect is None:
            reason = "the rerun rungs did not log it: its change is not known"
            rows.append({**row, **dict.fromkeys(("mean", "lo50", "hi50", "lo90", "hi90")), "reason": reason})
        else:
            rows.append(moved(row, effect, zeros.get(row["metric"], 0.0)))
    joined = {
        m: widened(block, plain["rows"], made["effects"].get(m), step) for m, block in plain.get("covariance", {}).items()
    }
    return {**plain, "rows": rows, "covariance": {m: block for m, block in joined.items() if block["rows"]}}


def moved(row: Body, effect: Body, zero: float) -> Body:
    """One row, shifted and widened."""
    shift = effect["shift"][effect["step"].index(row["step"])]
    out = {**row, "mean": max((row["mean"] + zero) * math.exp(shift) - zero, 0.0)}
    for level in (50, 90):
        own = stats.t.ppf(0.5 + level / 200, effect["freedom"]) * effect["spread"]
        for side, sign in (("lo", -1), ("hi", 1)):
            edge = row[f"{side}{level}"]
            if edge is None:
                continue
            half = abs(math.log(max(edge + zero, 1e-300) / max(row["mean"] + zero, 1e-300)))
            at = math.log(max(row["mean"] + zero, 1e-300)) + shift + sign * math.hypot(half, own)
            out[f"{side}{level}"] = max(math.exp(at) - zero, 0.0)
    return out


def widened(block: Body, rows: Sequence[Body], effect: Body | None, step: int) -> Body:
    """A covariance with the effect's variance, which all rows after the event have in common."""
    after = np.array([rows[i]["step"] > step for i in block["rows"]], dtype=bool)
    if effect is None:
        keep = np.flatnonzero(~after)
        matrix = np.array(block["matrix"])[np.ix_(keep, keep)]
        return block | {"rows": [block["rows"][i] for i in keep], "matrix": matrix.tolist()}
    wide = stats.t.ppf(0.95, effect["freedom"]) / stats.norm.ppf(0.95) * effect["spread"]
    matrix = np.array(block["matrix"]) + wide**2 * np.outer(after, after)
    return block | {"matrix": [[float(f"{v:.4g}") for v in line] for line in matrix]}


def differs_before(plain: Body, made: Body) -> list[Body]:
    """An alarm for each rerun whose headline differs before the event: it did not begin as the first run did."""
    headline = known.macro_bpb([row["metric"] for row in plain["rows"]])
    out = []
    for pair in made["pairs"]:
        early = [y for g, y in pair["ratios"].get(headline or "", []) if g <= pair["begins"]]
        limit = BEFORE * math.sqrt(2) * max(LUCK, plain["fit"]["noise"].get(headline) or 0.0)
        if early and abs(off := float(np.mean(early))) > limit:
            said = f"{pair['new']} lies {math.expm1(off):+.2%} off {pair['old']} before the event: the change is in it from its start"
            out.append({"code": "rerun_differs_before", "message": said + "; its effect at equal fractions may be too large"})
    return out


def changed_run(hero: spec.Run, made: Body | None) -> spec.Run:
    """The hero with every bridged change that has one value in all pairs; a change that it cannot hold is left out."""
    for step in history(made):
        body = spec.to_json(hero)
        for key, (_, new) in step["changed"].items():
            section, _, field = key.rpartition(".")
            (body[section] if section else body)[field] = new
        try:
            hero = spec.from_json(body)
        except ValueError:
            continue
    return hero


def history(made: Body | None) -> list[Body]:
    """The bridges of a forecast, oldest first."""
    return [] if made is None else [*history(made.get("before")), made]


def corpus_of(pairs: Sequence[Body], before: Body) -> str:
    """The checksum of the corpus after the change."""
    sums = {pair["checksum"] for pair in pairs}
    return (sums.pop() if len(sums) == 1 else None) or before["identity"]["corpus_checksum"]


def applied(forecast: Body, made: Body | None, hero: spec.Run) -> tuple[Body, list[Body]]:
    """A fit with all its bridges' shifts, computed again from their pairs, and each bridge's effects, oldest first."""
    found = []
    for one in history(made):
        found.append(effects(forecast, one, hero))
        forecast = shifted(forecast, one | {"effects": found[-1]})
    return forecast, found
