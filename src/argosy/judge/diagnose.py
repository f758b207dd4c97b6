"""Why a run left its forecast: every metric by its departure, grouped by cause, and what would tell the causes apart."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text

from argosy import spec
from argosy.judge import bridge, points, register, verdict
from argosy.judge import departures as D
from argosy.judge import signs as S
from argosy.judge.signs import Sign
from argosy.track import log as logs

GROUPS = ("data", "routing", "optimizer", "implementation")
LATER = 0.5  # of its weight is left to a group that departs after another, by more than one evaluation
CHANGED = 1.5  # times the weight of implementation where code or machine changed just before the first departure


def diagnose(home: Path, name: str) -> dict[str, Any]:
    """What departed from the registered forecast of a hero and the likeliest cause; plain JSON values.

    `departed`, `likeliest` (data, routing, optimizer or implementation; None where nothing departs) and `ahead`, how many times the
    weight of the second; `first_step`; `groups`, each with weight, since and signs; `metrics`, every one with widths out, sigmas and
    since; `nearest`, the event or lineage record before the first departure; `branch`, the paired run that would tell the first two
    causes apart.

    Raises:
        ValueError: when no forecast is registered or there is no such run.
    """
    bodies = register.all_of(home, name)
    if not bodies:
        raise ValueError(f"no forecast of {name!r} is registered; argosy forecast register {name} makes one")
    body = bodies[-1]
    log = logs.read(name, home)
    run = spec.from_json(log.run["run"])
    rows = points.of_run(log, sorted({r["metric"] for r in body["forecast"]["rows"]}))
    found = D.residuals(body, rows, spec.steps(run))
    out = {metric: D.departure(r) for metric, r in found.items()}
    signs = S.all_of(log, run, home, name, found, out)
    groups = weigh(signs, log, interval(found))
    ordered = sorted(groups, key=lambda g: -g["weight"])
    first = first_of(out, groups)
    answer: dict[str, Any] = {
        "name": name,
        "departed": first is not None,
        "likeliest": None,
        "ahead": None,
        "first_step": first,
    }
    answer["last_step"] = max((d.step for d in out.values()), default=0)
    answer["forecast"] = {"number": body["number"], "sha256": body["sha256"]}
    if ordered[0]["weight"]:
        second = ordered[1]["weight"]
        answer["likeliest"] = ordered[0]["group"]
        answer["ahead"] = float(f"{ordered[0]['weight'] / second:.3g}") if second else None
    answer["differences"] = verdict.differences(bodies, log)[0]
    answer["metrics"] = [told(d) for d in sorted(out.values(), key=lambda d: (-abs(d.sigmas), d.since))]
    answer["why"] = why(answer, ordered, out)
    answer["groups"] = ordered
    answer["nearest"] = nearest(log, run, first)
    answer["branch"] = branch(answer, ordered, log, run)
    return answer


def first_of(out: dict[str, D.Departure], groups: Sequence[dict[str, Any]]) -> int | None:
    """The first update of what departed: of groups by their strongest sign, of metrics that are dated well, twice `SURE` or the surest."""
    departed = [d for d in out.values() if D.departs(d)]
    enough = min(2 * D.SURE, max((abs(d.sigmas) for d in departed), default=0.0))
    dated = [d.since for d in departed if abs(d.sigmas) >= enough]
    return min([g["since"] for g in groups if g["since"] is not None] + dated, default=None)


def interval(found: dict[str, D.Residual]) -> int:
    """The updates between two evaluations."""
    gaps = [int(np.median(np.diff(r.steps))) for r in found.values()]
    return max(gaps, default=1)


def told(d: D.Departure) -> dict[str, Any]:
    departs = D.departs(d)
    numbers = {"change": d.change, "sigmas": d.sigmas, "widths_out": d.widths}
    return {"metric": d.metric, "departed": departs, "since_step": d.since if departs else None} | {
        k: float(f"{v:.4g}") for k, v in numbers.items()
    }


# ---- from signs to groups ------------------------------------------------------------------------


def weigh(signs: Sequence[Sign], log: logs.RunLog, every: int) -> list[dict[str, Any]]:
    """Each group's weight: its strongest sign in standard errors, less where it comes after another group's.

    A change of code or machine within two evaluations before the first departure speaks for the implementation, whatever departs.
    """
    first = min((s.since for s in signs), default=0)
    out = []
    for group in GROUPS:
        own = sorted((s for s in signs if s.group == group), key=lambda s: (-s.sigmas, s.since))
        since = own[0].since if own else None
        weight = max((s.sigmas for s in own), default=0.0)
        if since is not None and since > first + every:
            weight *= LATER
        lines = [s.says for s in own]
        if group == "implementation" and signs:
            change = next((c for c in reversed(changes(log)) if first - 2 * every <= c[0] < first), None)
            if change is not None:
                weight = CHANGED * max(s.sigmas for s in signs)
                since = first if since is None else since
                lines.insert(0, f"{change[1]} after update {change[0]:,}, just before the first departure")
        out.append({"group": group, "weight": float(f"{weight:.4g}"), "since": since, "signs": lines})
    return out


def changes(log: logs.RunLog) -> list[tuple[int, str]]:
    """Where code or machine changed from one attempt to the next: (updates finished, what changed)."""
    out = []
    attempts = [r for r in log.lineage if r["kind"] == "attempt"]
    for a, b in itertools.pairwise(attempts):
        was, now = a["fields"], b["fields"]
        parts = []
        if was.get("code") and now.get("code") and version(was["code"]) != version(now["code"]):
            parts.append(f"the code changed from {version(was['code'])} to {version(now['code'])}")
        if was.get("host") != now.get("host"):
            parts.append(f"the machine changed from {was.get('host')} to {now.get('host')}")
        if parts:
            out.append((int(b["step"]), " and ".join(parts)))
    return out


def version(code: dict[str, Any]) -> str:
    """What tells two code versions apart: the checksum of the sources, else the version's name."""
    return str(code.get("sources") or code.get("argosy"))


def nearest(log: logs.RunLog, run: spec.Run, first: int | None) -> dict[str, Any] | None:
    """The last thing that happened or was planned to happen before the first departure."""
    if first is None:
        return None
    happened = [(int(r["step"]), r["kind"], about(r["fields"])) for r in [*log.events, *log.lineage] if not r.get("superseded")]
    happened = [h for h in happened if h[1] not in bridge.OWN]
    happened += [
        (int(r["step"]), "attempt", f"attempt {r['attempt']} goes on")
        for r in log.lineage
        if r["kind"] == "attempt" and r["step"]
    ]
    happened += [(step, "change", what) for step, what in changes(log)]
    stops = spec.phase_stops(run)[:-1]
    happened += [
        (s, "mixture", f"phase {p.name!r} of the mixture begins") for s, p in zip(stops, run.data.phases[1:], strict=True)
    ]
    before = [h for h in happened if h[0] < first]
    if not before:
        return None
    step, kind, says = max(before, key=lambda h: (h[0], h[1] == "change"))
    return {"step": step, "kind": kind, "says": says, "updates_before": first - step}


def about(fields: dict[str, Any]) -> str:
    """An event's fields in a line."""
    if "message" in fields:
        return str(fields["message"])
    return ", ".join(f"{k} {v}" for k, v in fields.items() if not isinstance(v, dict | list))[:160]


BRANCHES = {
    "data": "with the mixture as it was before update {first:,} (data.phases), or without the sources of the sets that left",
    "routing": "with routing.capacity=dropless, so that nothing is dropped",
    "optimizer": "with optim.lr_scale={half:g}, half of the run's",
    "implementation": "with the code and machine of before update {first:,}: losses of equal updates must agree to rounding",
}


def branch(answer: dict[str, Any], ordered: Sequence[dict[str, Any]], log: logs.RunLog, run: spec.Run) -> dict[str, Any] | None:
    """The paired run that tells the first cause from the second: as the reference run does, 200 updates on the same batches."""
    first = answer["first_step"]
    if answer["likeliest"] is None:
        return None
    cause, second = ordered[0]["group"], ordered[1]["group"]
    setting = BRANCHES[cause].format(first=first, half=run.optim.lr_scale / 2)
    if cause == "routing" and run.routing.capacity == "dropless":
        setting = "with routing.balance held: the router's bias of the checkpoint, not updated"
    says = (
        f"From the last checkpoint before update {first:,}, 200 updates as they were and 200 {setting}, on the same batches. If the"
        f" difference goes away it is {cause}"
        + (f"; if it stays, try {second} next" if ordered[1]["weight"] else "; if it stays, it is none of what was looked at")
    )
    return {
        "from_before": first,
        "updates": 200,
        "cause": cause,
        "second": second if ordered[1]["weight"] else None,
        "says": says + ".",
    }


def why(answer: dict[str, Any], ordered: Sequence[dict[str, Any]], out: dict[str, D.Departure]) -> str:
    if not out:
        return f"the run has fewer than {D.LEAST} evaluations that the forecast covers: too early to say"
    if answer["departed"] and answer["likeliest"] is None:
        return f"metrics depart since update {answer['first_step']:,}, but none of data, routing, optimizer and implementation by itself"
    if answer["likeliest"] is None:
        text = f"nothing departs for sure of {len(out)} metrics that are held against their forecast up to update {answer['last_step']:,}"
        if beyond := [d.metric for d in out.values() if d.widths]:
            more = f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""
            text += f"; beyond their bands now, as one in ten may be: {', '.join(beyond[:3])}{more}"
        within = [d for d in out.values() if D.sure(d)]
        if within:
            most = max(within, key=lambda d: abs(d.sigmas))
            text += f"; within its band {most.metric} moved most, by {math.expm1(most.change):+.1%} since update {most.since:,}"
        return text
    ahead = f", {answer['ahead']:.1f} times {ordered[1]['group']}" if answer["ahead"] else ", alone"
    return f"most likely {answer['likeliest']}{ahead}: {ordered[0]['signs'][0]}"


# ---- for people ----------------------------------------------------------------------------------


def show(body: dict[str, Any]) -> Stack:
    """The likeliest cause in words, signs by group, the metrics that departed, the nearest event and the branch."""
    head = Text.assemble((body["name"], "bold"), ": ", (body["why"], "" if body["departed"] else "bold green"))
    other = [Text(f"It is not the run that was registered: {d}", style="bold magenta") for d in body["differences"]]
    if not body["departed"]:
        return Stack(head, *other)
    groups = Table(box=None, pad_edge=False)
    for column in ("group", "weight", "since", "signs"):
        groups.add_column(column, justify="right" if column in ("weight", "since") else "left")
    for g in body["groups"]:
        signs = "; ".join(g["signs"][:3]) + (f"; {len(g['signs']) - 3} more" if len(g["signs"]) > 3 else "")
        groups.add_row(g["group"], f"{g['weight']:.1f}", "" if g["since"] is None else f"{g['since']:,}", signs or "quiet")
    metrics = Table(box=None, pad_edge=False, title="departed, the surest first", title_justify="left")
    for column in ("metric", "since", "change", "sigmas", "beyond the band"):
        metrics.add_column(column, justify="left" if column == "metric" else "right")
    departed = [m for m in body["metrics"] if m["departed"]]
    for m in departed[:12]:
        metrics.add_row(
            m["metric"],
            f"{m['since_step']:,}",
            f"{math.expm1(m['change']):+.1%}",
            f"{m['sigmas']:+.1f}",
            f"{m['widths_out']:+.2f}",
        )
    notes = [f"{len(departed)} of {len(body['metrics'])} metrics departed; forecast {body['forecast']['number']:04d}"]
    if body["nearest"]:
        n = body["nearest"]
        notes.append(
            f"before the first departure, by {n['updates_before']:,} updates: {n['kind']} at {n['step']:,}: {n['says']}"
        )
    if body["branch"]:
        notes.append(f"to tell: {body['branch']['says']}")
    return Stack(head, *other, Text(""), groups, Text(""), metrics, Text(""), *map(Text, notes))
