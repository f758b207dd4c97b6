"""Whether a registered forecast is what it says: its hash, and its numbers refitted from the data inside."""

import math
from pathlib import Path
from typing import Any

from argosy import spec
from argosy.forecast import fit as fitting
from argosy.judge import bridge, fits, register
from argosy.judge import points as tables
from argosy.judge.fits import Body, Say
from argosy.track import provenance

# Of every number. The fit is deterministic on one machine; another library of linear algebra sums in another order, and then
# forecasts may be off by so much of half a 90% band: 0.05 was the most on a processor without AVX2, 3e-6 of any loss.
TOLERANCE = 1e-6
NEAR = 0.1
FAR = 0.1  # of noise, backtest and a law's zero: no processor is so far off
COVARIANCE_TOLERANCE, COVARIANCE_NEAR = 2e-3, 0.1  # of the largest entry: it is written with four digits


def verify(path: Path, say: Say = lambda _: None) -> Body:
    """`{"ok", "hash", "numbers", "chain", "problems": [...], "differs": [...], ...}` of a registered file.

    `hash` is whether the file's SHA-256 is that of its contents; `numbers` whether a refit gives every row within `NEAR` of half its 90%
    band, `exact` whether to `TOLERANCE`, relative, as on the machine that registered it;
    `chain` whether it supersedes the file before it, where that is beside it. `differs` lists rows: run, metric, step, what,
    registered, refitted.

    Raises:
        ValueError: when the file is no registered forecast.
        OSError: when it cannot be read.
    """
    body = register.load(path)
    problems: list[str] = []
    found = register.digest(body)
    hashed = found == body["sha256"]
    if not hashed:
        problems.append(
            f"hash: the contents have {found}, the file says {body['sha256']}: something was changed after registration"
        )
    chain = supersedes(path, body)
    problems += chain
    differs: list[Body] = []
    far = math.inf
    try:
        problems += consistent(body)
        again, differs = refitted(body, say)
        differs += compared(body["forecast"], again)
        problems += silent(body["forecast"]["fit"]["alarms"], again["fit"]["alarms"])
        far = farthest(body["forecast"]["rows"], again["rows"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        problems.append(f"numbers: the data inside cannot be fitted: {type(error).__name__}: {error}")
    near = far < NEAR and not any(
        d["what"] in ("rows", "effect", "run", "metric", "step", "tokens") or d["what"].endswith("far off") for d in differs
    )
    note = ""
    if differs:
        note = (
            f"{len(differs)} differ from a refit by more than {TOLERANCE:g} of their size, forecasts by {far:.2g} of half a 90% band at"
            " most"
        )
        if near:
            note = (
                f"numbers: {note}: as much as another processor's linear algebra may do, and no more than that is vouched for"
            )
        else:
            problems.append(f"numbers: {note}")
    numbers = not any(p.startswith("numbers") for p in problems)
    code, rows = body["code"], body["forecast"].get("rows")
    same_code = code.get("sources") == provenance.code()["sources"]
    if not numbers and not same_code:
        where = ", ".join(f"{key} {code[key]}" for key in ("argosy", "sources", "commit") if key in code)
        problems.append(f"it was registered with other code ({where}); a refit with that one decides")
    return {
        "path": str(path),
        "name": body["name"],
        "number": body["number"],
        "created": body["created"],
        "sha256": body["sha256"],
        "late": body.get("late"),
        "bridged": body.get("bridge") is not None,
        "ok": not problems,
        "hash": hashed,
        "numbers": numbers,
        "exact": not differs and math.isfinite(far),
        "note": note if near else "",
        "chain": not chain,
        "same_code": same_code,
        "tolerance": TOLERANCE,
        "rows": len(rows) if isinstance(rows, list) else 0,
        "problems": problems,
        "differs": differs,
        "packages": body.get("packages", {}),
    }


def supersedes(path: Path, body: Body) -> list[str]:
    """What is wrong with a file's place among its neighbours."""
    number = body["number"]
    if number == 1:
        return [] if body["supersedes"] is None else ["chain: number 0001 supersedes nothing, this one says it does"]
    before = path.with_name(f"{number - 1:04d}.json")
    if not body["supersedes"]:
        return [f"chain: number {number:04d} does not say what it supersedes"]
    if not before.is_file():
        return []
    older = register.load(before)
    wrong = []
    if older["sha256"] != body["supersedes"]:
        wrong.append(f"chain: it supersedes {body['supersedes']}, and {before.name} is {older['sha256']}")
    if older["created_s"] >= body["created_s"]:
        wrong.append(f"chain: it is dated {body['created']}, not after {before.name} of {older['created']}")
    return wrong


def consistent(body: Body) -> list[str]:
    """What the file says of its hero against the hero inside."""
    hero = spec.from_json(body["hero"])
    wrong = []
    said = body["identity"]
    told = register.identity(bridge.changed_run(hero, body.get("bridge")), said.get("corpus_checksum", ""))
    for key in sorted(told.keys() | said.keys()):
        if told.get(key) != said.get(key):
            wrong.append(f"numbers: identity says {key} {said.get(key)!r}, its hero has {told.get(key)!r}")
    if register.stamp(body["created_s"]) != body["created"]:
        wrong.append(f"numbers: it is dated {body['created']} and {register.stamp(body['created_s'])}")
    rungs = {rung["name"] for rung in body["ladder"]}
    if strangers := {row["run"] for row in body["data"]["points"]} - rungs:
        wrong.append(f"numbers: points of {', '.join(sorted(strangers))}, which the ladder does not have")
    for rung in body["ladder"]:
        last = max((row["step"] for row in body["data"]["points"] if row["run"] == rung["name"]), default=0)
        if not last <= rung["steps"] <= rung["steps_total"] or rung["finished"] != (rung["steps"] == rung["steps_total"]):
            wrong.append(
                f"numbers: {rung['name']} is said to have {rung['steps']:,} of {rung['steps_total']:,} updates, points to {last:,}"
            )
    metrics = list(dict.fromkeys(row["metric"] for row in body["data"]["target"]))
    rates = any(row["lr"] is not None for row in body["data"]["target"])
    if body["data"]["target"] != tables.asked(hero, body["name"], metrics, rates=rates):
        wrong.append("numbers: the rows asked are not the hero's evaluations")
    places = {(row["metric"], row["step"]) for row in body["data"]["target"]}
    if not {(row["metric"], row["step"]) for row in body["forecast"]["rows"]} <= places:
        wrong.append("numbers: there are forecasts of rows that were not asked")
    return wrong


def refitted(body: Body, say: Say) -> tuple[Body, list[Body]]:
    """The forecast again, from the data inside, and what differs of the effects of its bridges."""
    points, asked, made = body["data"]["points"], body["data"]["target"], body.get("bridge")
    plain = fits.fit_rows(points, asked, body["method"], body["seed"], covariance=True, say=say)
    again, effects = bridge.applied(plain, made, spec.from_json(body["hero"]))
    differs = [
        {"metric": metric, "what": "effect", "registered": "as in the file", "refitted": "another"}
        for one, found in zip(bridge.history(made), effects, strict=True)
        for metric in sorted(one["effects"].keys() | found.keys())
        if not same(one["effects"].get(metric), found.get(metric), TOLERANCE)
    ]
    return again, differs


def compared(registered: Body, again: Body) -> list[Body]:
    """The numbers that differ."""
    out = []
    if len(registered["rows"]) != len(again["rows"]):
        out.append({"what": "rows", "registered": len(registered["rows"]), "refitted": len(again["rows"])})
    for old, new in zip(registered["rows"], again["rows"], strict=False):
        place = {key: old.get(key) for key in ("run", "metric", "step")}
        for name in ("run", "metric", "step", "tokens", *fitting.BANDS):
            if not same(old.get(name), new.get(name), TOLERANCE):
                out.append({**place, "what": name, "registered": old.get(name), "refitted": new.get(name)})
    for metric in sorted(registered.get("covariance", {}).keys() | again["covariance"].keys()):
        old, new = registered.get("covariance", {}).get(metric), again["covariance"].get(metric)
        if not alike(old, new, COVARIANCE_TOLERANCE):
            what = "covariance" if alike(old, new, COVARIANCE_NEAR) else "covariance far off"
            out.append({"metric": metric, "what": what, "registered": "as in the file", "refitted": "another"})
    for part in ("parameters", "noise", "backtest"):
        old, new = registered["fit"].get(part) or {}, again["fit"][part] or {}
        for m in sorted(old.keys() | new.keys()):
            if not same(old.get(m), new.get(m), 1e3 * TOLERANCE):  # parameters trade off against one another; rows do not
                near = m in old and m in new and (part == "parameters" or same(old[m], new[m], FAR))
                what = part if near else f"{part} far off"
                out.append({"metric": m, "what": what, "registered": old.get(m), "refitted": new.get(m)})
    return out


def silent(registered: Any, again: Any) -> list[str]:
    """What a refit warns of and the file does not, by code and metric."""

    def warned(alarms: Any) -> set[str]:
        return {" of ".join((a["code"], *a["message"].split(": ")[:1][: ": " in a["message"]])) for a in alarms}

    missing = sorted(warned(again) - warned(registered))
    return [f"numbers: a refit has alarms that the file does not: {', '.join(missing)}"] if missing else []


def farthest(registered: Any, again: Any) -> float:
    """The largest difference between two forecasts of a row, mean or edge, in halves of its 90% band."""
    far = 0.0
    for old, new in zip(registered, again, strict=False):
        for name in fitting.BANDS:
            if old.get(name) != new.get(name):
                both = all(row.get(key) is not None for row in (old, new) for key in (name, "lo90", "hi90"))
                wide = (new["hi90"] - new["lo90"]) / 2 if both else 0.0
                far = max(far, abs(old[name] - new[name]) / wide if wide > 0 else math.inf)
    return far


def same(a: Any, b: Any, tolerance: float) -> bool:
    """Equal, numbers to a relative tolerance, dictionaries and lists by their parts."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k], tolerance) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-12) if numbers else a == b


def alike(a: Any, b: Any, tolerance: float) -> bool:
    """Whether two covariances are the same to a share of the largest entry."""
    if not (isinstance(a, dict) and isinstance(b, dict)) or a.get("rows") != b.get("rows"):
        return False
    top = max((abs(v) for line in b["matrix"] for v in line), default=0.0)
    entries = all(
        len(x) == len(y) and all(abs(v - w) <= tolerance * top for v, w in zip(x, y, strict=True))
        for x, y in zip(a["matrix"], b["matrix"], strict=False)
    )
    whole = len(a["matrix"]) == len(b["matrix"]) and same(a.get("zero", 0.0), b.get("zero", 0.0), tolerance)
    return entries and whole and same(a["noise"], b["noise"], tolerance)
