"""GO, CAUTION or NO-GO before a hero is launched, from its ladder, with the evidence worst first."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text
from scipy import stats

from argosy import spec
from argosy.judge import findings as F
from argosy.judge import fits, ladders, points
from argosy.judge import growth as G
from argosy.judge.findings import CAUTION, GO, LEVELS, NO_GO, Evidence
from argosy.track import log as logs
from argosy.track import metrics as known

EXIT = {GO: 0, CAUTION: 0, NO_GO: 3}
SETTLED = 0.75  # of the run: from here drops are judged, in rungs and in the hero
# Alarms of the fit that speak against a launch; the others say how sure the forecast is and are noted.
AGAINST = {
    "not_finite": NO_GO, "rung_missing": CAUTION, "unfinished_run": CAUTION, "run_off_trend": CAUTION, "early_off_trend": CAUTION,
    "leave_one_out": CAUTION, "top_rung_missed": CAUTION, "asymptote_above_known": CAUTION, "few_sizes": CAUTION, "too_few_runs": CAUTION, "rungs_differ": CAUTION,
}  # fmt: skip


class Climbed(NamedTuple):
    """A rung that has begun: what it is for, its log, and how its statistics grow."""

    name: str
    purpose: str
    run: spec.Run
    log: logs.RunLog
    grown: dict[str, G.Growth]


def check(home: Path, name: str, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The verdict on launching the hero of a ladder, or on one run where there is no ladder of this name; plain JSON values.

    `verdict` GO, CAUTION or NO-GO and `why`; `evidence`, worst first, each with level, rule, where, value, says and source; `growth`
    by rung and statistic; `with_batch` and `with_width`; `hero`, what is expected of it. `say` is told what is being done.

    Raises:
        ValueError: when there is neither a ladder nor a run of this name, or a rung is another run than the ladder says.
    """
    if not ladders.path_of(home, name).is_file() and (home / "runs" / name / "run.json").is_file():
        rung = climbed(home, name)
        return answer(name, F.of_run(rung.log) + F.planned(rung.log, rung.run), [rung])
    hero = spec.from_json(ladders.load(home, name)["hero"])
    gathered = points.gather(home, name)
    rungs = []
    for entry in (r for r in gathered.rungs if r["steps"]):
        say(f"reading {entry['name']}")
        rungs.append(climbed(home, entry["name"], entry["purpose"]))
    evidence = [
        e for r in rungs for e in [*F.of_run(r.log), *F.planned(r.log, r.run)] if e.rule not in ("drops", "router bias")
    ]
    evidence += [e for r in rungs for e in F.bias(r.log, updates=spec.steps(hero))]
    evidence += unfinished(gathered, name)
    batch, width = with_batch(rungs), with_width(rungs, hero)
    evidence += judge_batch(batch) + judge_width(width)
    say("fitting the hero's bits per byte, gradient norm, logits and drops")
    expected, more = of_hero(gathered, hero, name)
    return answer(name, evidence + more, rungs) | {"with_batch": batch, "with_width": width, "hero": expected}


def climbed(home: Path, name: str, purpose: str = "") -> Climbed:
    log = logs.read(home / "runs" / name)
    return Climbed(name, purpose, spec.from_json(log.run["run"]), log, G.growth(log))


def answer(name: str, evidence: Sequence[Evidence], rungs: Sequence[Climbed]) -> dict[str, Any]:
    """Verdict, reasons and findings as plain JSON values."""
    ordered = sorted(evidence, key=lambda e: (-LEVELS.index(e.level), -e.score if math.isfinite(e.score) else -math.inf))
    verdict = ordered[0].level if ordered else CAUTION
    against = [e for e in ordered if e.level == verdict]
    if verdict == GO:
        why = "nothing that was looked at speaks against the launch"
    elif not ordered:
        why = "nothing is logged yet that could be looked at"
    else:
        rules = list(dict.fromkeys(e.rule for e in against))
        why = ("do not launch: " if verdict == NO_GO else "look before the launch at ") + ", ".join(rules)
    return {
        "name": name,
        "verdict": verdict,
        "why": why,
        "evidence": [plain(e._asdict()) for e in ordered],
        "growth": {r.name: {n: plain(flat(g)) for n, g in r.grown.items()} for r in rungs},
    }


def flat(g: G.Growth) -> dict[str, Any]:
    return {
        "slope": g.whole.slope, "error": g.whole.error, "late_slope": g.late.slope, "late_error": g.late.error,
        "peak": g.peak, "peak_at": g.peak_at, "last": g.last,
    }  # fmt: skip


def plain(body: dict[str, Any]) -> dict[str, Any]:
    """Numbers that are none as None, so that it is JSON; the rest to five digits."""
    return {k: (float(f"{v:.5g}") if math.isfinite(v) else None) if isinstance(v, float) else v for k, v in body.items()}


def unfinished(gathered: points.Gathered, name: str) -> list[Evidence]:
    """Rungs that are not finished, and sizes that are missing for a law."""
    out, sizes = [], [rung for rung in gathered.rungs if rung["purpose"] == "size"]
    goes_on = f"argosy ladder {name} --run goes on"
    for rung in gathered.rungs:
        if not rung["finished"]:
            done = rung["steps"] / rung["steps_total"]
            says = f"{rung['steps']:,} of {rung['steps_total']:,} updates; {goes_on}"
            out.append(Evidence(CAUTION, "unfinished rung", rung["name"], done, says, "ours", 2 - done))
    done = sum(rung["finished"] for rung in sizes)
    if done < points.LEAST_SIZES:
        says = f"{done} of {len(sizes)} sizes are finished; a law of size needs {points.LEAST_SIZES}; {goes_on}"
        out.append(Evidence(NO_GO, "too few sizes", name, float(done), says, "ours", math.inf))
    return out


# ---- how growth changes from rung to rung --------------------------------------------------------


def compared(rungs: Sequence[Climbed]) -> list[str]:
    """The statistics whose growth is compared: logits, gradients that weigh in some rung, parameters that move."""
    names = dict.fromkeys(n for r in rungs for n in F.heavy(r.grown))
    names |= dict.fromkeys(n for r in rungs for n in r.grown if not n.startswith("grad/"))
    everywhere = [n for n in names if all(n in r.grown and math.isfinite(r.grown[n].whole.slope) for r in rungs)]
    return [n for n in everywhere if any(abs(r.grown[n].whole.slope) > 1e-3 for r in rungs)]


def luck(rungs: Sequence[Climbed], names: Sequence[str]) -> float:
    """The standard deviation of a slope between runs that differ in their seed alone, over all statistics; 0 where none do."""
    squares = []
    for seed, size in twins(rungs, "seed"):
        squares += [(seed.grown[n].whole.slope - size.grown[n].whole.slope) ** 2 / 2 for n in names]
    return math.sqrt(float(np.mean(squares))) if squares else 0.0


def twins(rungs: Sequence[Climbed], purpose: str) -> list[tuple[Climbed, Climbed]]:
    """Each rung of a purpose with the size that it repeats."""
    same = {"seed": {"seed"}, "small_batch": {"data.batch_seqs", "optim.horizon_tokens"}}[
        purpose
    ]  # or half of each: as many updates
    sizes = [r for r in rungs if r.purpose == "size"]
    found = []
    for rung in (r for r in rungs if r.purpose == purpose):
        found += [(rung, size) for size in sizes if set(spec.difference(rung.run, size.run)) <= same][:1]
    return found


def with_batch(rungs: Sequence[Climbed]) -> list[dict[str, Any]]:
    """How much larger the exponent of each statistic is for every doubling of the batch, with its standard error."""
    names, out = compared(rungs), []
    spread = luck(rungs, names)
    for small, size in twins(rungs, "small_batch"):
        doublings = math.log2(size.run.data.batch_seqs / small.run.data.batch_seqs)
        for n in names:
            a, b = small.grown[n].whole, size.grown[n].whole
            error = math.sqrt(a.error**2 + b.error**2 + 2 * spread**2) / doublings
            row = {"rung": small.name, "size": size.name, "metric": n, "more": (b.slope - a.slope) / doublings, "error": error}
            out.append(plain(row | {"degrees": min(a.degrees, b.degrees)}))
    return out


def judge_batch(rows: Sequence[dict[str, Any]]) -> list[Evidence]:
    """The statistic whose exponent surely grows most with the batch."""
    if not rows:
        return []
    sure = [r["more"] - float(stats.t.ppf(1 - F.CHANCE / len(rows), r["degrees"])) * r["error"] for r in rows]
    k = int(np.argmax(sure))
    r = rows[k]
    says = f"the exponent of {F.words(r['metric'])} is {r['more']:+.2f} +- {r['error']:.2f} per doubling of the batch, at least {sure[k]:+.2f}"
    return [F.found("growth with batch", f"{r['rung']}, {r['size']}", sure[k], says)]


def with_width(rungs: Sequence[Climbed], hero: spec.Run) -> list[dict[str, Any]]:
    """Each statistic's exponent over the width of the sizes: a weighted line in log, its slope, and its value at the hero's width."""
    sizes = [r for r in rungs if r.purpose == "size"]
    names = compared(sizes) if len({r.run.model.width for r in sizes}) >= points.LEAST_SIZES else []
    spread = luck(rungs, compared(rungs))
    x = np.log([r.run.model.width for r in sizes]) - math.log(hero.model.width)
    out = []
    for n in names:
        y = np.array([r.grown[n].whole.slope for r in sizes])
        weight = 1 / (np.array([r.grown[n].whole.error for r in sizes]) ** 2 + spread**2 + 1e-12)
        design = np.stack([np.ones_like(x), x], 1)
        covariance = np.linalg.inv(design.T @ (weight[:, None] * design))
        line = covariance @ (design.T @ (weight * y))
        excess = max(float((weight * (y - design @ line) ** 2).sum()) / (len(x) - 2), 1.0)
        errors = np.sqrt(np.diag(covariance) * excess)
        row = {"metric": n, "at_hero": line[0], "at_hero_error": errors[0], "per_e": line[1], "per_e_error": errors[1]}
        out.append(plain({k: float(v) if k != "metric" else v for k, v in row.items()} | {"degrees": float(len(x) - 2)}))
    return out


def judge_width(rows: Sequence[dict[str, Any]]) -> list[Evidence]:
    """The statistic that is expected to grow fastest in the hero among those whose exponent surely rises with width."""
    told = []
    for r in rows:
        t = float(stats.t.ppf(1 - F.CHANCE / len(rows), r["degrees"]))
        if r["per_e"] - t * r["per_e_error"] > 0:
            told.append((r["at_hero"], f"{F.words(r['metric'])}: exponent {r['at_hero']:.2f} +- {r['at_hero_error']:.2f} at the hero's width,"
                         f" {r['per_e'] * math.log(2):+.2f} per doubling"))  # fmt: skip
    if not rows:
        return []
    if not told:
        return [F.found("growth with width", "sizes", 0.0, "no exponent surely rises with width")]
    value, says = max(told)
    return [F.found("growth with width", "sizes", value, says)]


# ---- what is expected of the hero ----------------------------------------------------------------


def of_hero(gathered: points.Gathered, hero: spec.Run, name: str) -> tuple[dict[str, Any], list[Evidence]]:
    """The hero's headline, gradient norm, logit scale and drops as the ladder forecasts them, and the fit's alarms."""
    headline = known.macro_bpb(gathered.metrics)
    asked = [n for n in (headline, "grad/norm/total", "train/logit_z", "moe/drop_fraction") if n and n in gathered.metrics]
    out = [alarmed(a, name) for a in gathered.alarms]
    counts = {n: sum(row["metric"] == n for row in gathered.rows) for n in asked}
    asked = [n for n in asked if counts[n] >= 3]
    if not asked:
        return {}, out
    rows, wanted = ([row for row in part if row["metric"] in asked] for part in points.fitted(gathered, name, "joint"))
    try:
        body = fits.fit_rows(rows, wanted, "joint", fits.SEED, say=lambda _: None)  # as it is registered
    except ValueError as error:
        return {}, [*out, Evidence(CAUTION, "no fit", name, math.nan, str(error), "ours", 1.0)]
    out += [alarmed(a, name) for a in body["fit"]["alarms"] if headline and a["message"].startswith(headline)]
    expected = {}
    for metric in asked:
        own = [r for r in body["rows"] if r["metric"] == metric and r["mean"] is not None]
        if not own:
            continue
        begin = SETTLED if metric == "moe/drop_fraction" else G.BEGIN  # drops are high until the biases have settled
        after = [r for r in own if r["step"] > begin * spec.steps(hero)]
        top = max(after, key=lambda r: r["mean"])
        expected[metric] = {"end": own[-1], "highest": top}
        out += levels(metric, top, hero, name)
    return expected, list(dict.fromkeys(out))


def levels(metric: str, top: dict[str, Any], hero: spec.Run, name: str) -> list[Evidence]:
    """What the hero's forecast says under the rules for levels."""
    band = f"{top['mean']:.3g} (90%: {top['lo90']:.3g} to {top['hi90']:.3g}), highest at update {top['step']:,}"
    if metric == "grad/norm/total":
        return [F.found("gradient level", f"{name}, forecast", top["mean"], f"gradient norm of the hero: {band}")]
    if metric == "moe/drop_fraction":
        return [F.found("drops", f"{name}, forecast", top["mean"], f"drops of the hero: {band}")]
    if metric == "train/logit_z":
        scale = math.sqrt(top["mean"]) / math.log(hero.model.vocab)
        return [F.found("logit scale", f"{name}, forecast", scale, f"squared log-sum-exp of the hero: {band}")]
    return []


def alarmed(alarm: dict[str, str], name: str) -> Evidence:
    """An alarm of the fit as a finding."""
    level = AGAINST.get(alarm["code"], GO)
    return Evidence(
        level, alarm["code"].replace("_", " "), f"{name}, fit", math.nan, alarm["message"], "ours", 1.0 if level != GO else 0.5
    )


# ---- for people ----------------------------------------------------------------------------------


def show(body: dict[str, Any]) -> Group:
    """The verdict in plain words, then the evidence worst first: everything against a launch, and the nearest of each rule for it."""
    style = {GO: "bold green", CAUTION: "bold yellow", NO_GO: "bold red"}
    table = Table(box=None, pad_edge=False)
    for column in ("", "rule (limits)", "what was found"):
        table.add_column(column, no_wrap=column != "what was found")
    shown: set[tuple[str, bool]] = set()
    for e in body["evidence"]:
        kind = (e["rule"], e["where"].endswith("forecast"))
        if e["level"] == GO and kind in shown:
            continue
        shown.add(kind)
        rule = e["rule"] + (f" ({limits(e)})" if limits(e) else "")
        table.add_row(Text(e["level"], style[e["level"]]), rule, f"{e['where']}: {e['says']}")
    first = Text.assemble((f"{body['verdict']}  ", style[body["verdict"]]), f"{body['name']}: {body['why']}")
    told = dict.fromkeys((e["rule"], e["source"]) for e in body["evidence"] if e["rule"] in F.LIMITS)
    lines = [f"{rule}: {source}" for rule, source in told]
    return Group(first, Text(""), table, Text("\nLimits (caution / no-go)"), Text("\n".join(lines), style="dim"))


def limits(e: dict[str, Any]) -> str:
    limit = F.LIMITS.get(e["rule"])
    if limit is None:
        return ""
    return f"{limit.caution:g}" + (f" / {limit.no_go:g}" if limit.caution < limit.no_go < math.inf else "")
