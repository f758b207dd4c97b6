"""`argosy compare A B`: is B worth promoting over A? Two ladders, or runs of one size; and what the gain is in compute."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from scipy import stats

from argosy import spec
from argosy.judge import finals, ladders, speedup
from argosy.judge.finals import Final
from argosy.plan import flops
from argosy.track import layout

LIKE = 1.5  # runs whose training FLOPs are further apart than this are of different sizes


def compare(
    a: str, b: str, home: Path, *, floor: float = 0.0, with_speed: bool = False, ladder: str = "", alpha: float | None = None
) -> dict[str, Any]:
    """The baseline A against the variant B: differences, effective speed-up with a two-sided 90% interval, verdict.

    A and B are heroes with a ladder in the store, or runs, or arms of a sweep or runs that end in a seed (`NAME` stands for
    `NAME-s0`, `NAME-s1`, ...). `floor` is a share of the baseline's smallest loss. Runs take the exponent from a ladder
    (`ladder`, else one in the store with the same text) or from `alpha`. `with_speed` multiplies by the ratio of tokens
    per second. Losses are final macro bits per byte.

    Raises:
        ValueError: for unknown names, unfinished runs, or runs whose bits per byte say nothing about each other, naming why.
    """
    if not 0 <= floor < 1:
        raise ValueError(f"--floor {floor:g} is a share of the baseline's smallest loss: 0 to below 1; nearest legal 0")
    if alpha is not None and not alpha > 0:
        raise ValueError(f"--alpha {alpha:g} must be above 0; e.g. --alpha 0.04")
    if all(ladders.path_of(home, name).is_file() for name in (a, b)):
        if ladder or alpha is not None:
            raise ValueError("--ladder and --alpha are for runs: two ladders have an exponent of their own")
        return of_ladders(a, b, home, floor, with_speed)
    return of_runs(a, b, home, floor, with_speed, ladder, alpha)


# ---- ladders --------------------------------------------------------------------------------------


def of_ladders(a: str, b: str, home: Path, floor: float, with_speed: bool) -> dict[str, Any]:
    """Two ladders: each refitted, and the variant's speed-up at the largest rung that both have, and at the hero's compute."""
    sides, notes = [], []
    for name in (a, b):
        found, unfinished = sizes(name, home)
        sides.append(found)
        notes += [f"{rung} is not finished and left out" for rung in unfinished]
        if len(found) < 2:
            raise ValueError(f"the ladder of {name!r} has {len(found)} finished sizes; a law needs two, an interval three")
    shared = [rung for rung in sides[0] if rung in sides[1]]
    paired = len(shared) >= speedup.FEWEST
    if paired:
        notes += [f"{r} has no counterpart and is left out" for r in {**sides[0], **sides[1]} if r not in shared]
        sides = [{rung: side[rung] for rung in shared} for side in sides]
    else:
        notes.append(f"{len(shared)} sizes in common: the ladders count as independent")
    everything = [f for side in sides for f in side.values()]
    finals.must_be_alike(everything)
    text, values = finals.same_text(everything)
    count = len(sides[0])
    base, variant = (
        (np.array([f.flops for f in side.values()]), np.array(part))
        for side, part in zip(sides, (values[:count], values[count:]), strict=True)
    )
    hero = spec.from_json(ladders.load(home, a)["hero"])
    at, target = min(float(base[0].max()), float(variant[0].max())), float(flops.train(hero, readout=False))
    speed = speed_ratio(list(sides[0].values())[-1], list(sides[1].values())[-1]) if with_speed else 1.0
    rows = _rungs(sides, base, variant, floor, with_speed) if paired else []

    def effect(share: float, compute: float) -> dict[str, Any]:
        found = speedup.between(base, variant, compute, share * float(base[1].min()), paired)
        return _effect(speedup.Effect(*(None if v is None else v * speed for v in found)))  # type: ignore[arg-type]

    chosen = effect(floor, at)
    word, why = speedup.verdict(speedup.Effect(*chosen.values()))
    return {
        "a": a,
        "b": b,
        "kind": "ladders",
        "metric": "macro bits per byte",
        "held_out": text,
        "paired": paired,
        "rungs": rows,
        "law": _law(base, floor),
        "variant_law": _law(variant, floor),
        "at": {"flops": at, **chosen},
        "hero": {"flops": target, **effect(floor, target)},
        "floors": [{"share": share, "alpha": _law(base, share)["alpha"], **effect(share, at)} for share in speedup.FLOORS],
        "speed_ratio": speed if with_speed else None,
        "verdict": word,
        "why": f"at {at:.3g} FLOPs, the largest size that both have, {why}",
        "notes": notes,
    }


def sizes(name: str, home: Path) -> tuple[dict[str, Final], list[str]]:
    """The finished rungs of a ladder that are sizes, by rung, smallest first; and the names of the unfinished ones."""
    found, unfinished = {}, []
    for entry in ladders.load(home, name)["rungs"]:
        if entry["purpose"] != "size":
            continue
        final = finals.of_run(entry["name"], home) if finals.there(entry["name"], home) else None
        if final and final.finished:
            found[entry["rung"]] = final
        else:
            unfinished.append(entry["name"])
    return dict(sorted(found.items(), key=lambda pair: pair[1].flops)), unfinished


def _rungs(sides: list[dict[str, Final]], base: Any, variant: Any, floor: float, with_speed: bool) -> list[dict[str, Any]]:
    law = speedup.law(base[0], base[1], floor * float(base[1].min()))
    rows = []
    for i, (rung, first, second) in enumerate(zip(sides[0], sides[0].values(), sides[1].values(), strict=True)):
        gain = speedup.speedup(float(base[1][i]), float(variant[1][i]), law.alpha, law.floor) * first.flops / second.flops
        rows.append(
            {
                "rung": rung,
                "flops": [first.flops, second.flops],
                "bits_per_byte": [float(base[1][i]), float(variant[1][i])],
                "difference": float(variant[1][i] - base[1][i]),
                "speedup": gain * (speed_ratio(first, second) if with_speed else 1.0),
            }
        )
    return rows


def _law(points: Any, share: float) -> dict[str, Any]:
    """A ladder's exponent with its two-sided 90% interval."""
    law = speedup.law(points[0], points[1], share * float(points[1].min()))
    half = None if law.alpha_se is None else float(stats.t.ppf((1 + speedup.LEVEL) / 2, law.n - 2)) * law.alpha_se
    reach = (None, None) if half is None else (law.alpha - half, law.alpha + half)
    return {"alpha": law.alpha, "low": reach[0], "high": reach[1], "floor": law.floor, "scatter": law.scatter, "sizes": law.n}


# ---- runs -----------------------------------------------------------------------------------------


def of_runs(a: str, b: str, home: Path, floor: float, with_speed: bool, ladder: str, alpha: float | None) -> dict[str, Any]:
    """Runs of one size: paired by seed, the difference with Student's interval (n - 1), and its worth in compute."""
    sides = [seeds(name, home) for name in (a, b)]
    everything = [f for side in sides for f in side.values()]
    finals.must_be_alike(everything)
    text, values = finals.same_text(everything)
    scores = [
        dict(zip(side, part, strict=True))
        for side, part in zip(sides, (values[: len(sides[0])], values[len(sides[0]) :]), strict=True)
    ]
    first, second = (next(iter(side.values())) for side in sides)
    if not 1 / LIKE <= second.flops / first.flops <= LIKE:
        raise ValueError(
            f"{a} and {b} are of different sizes: {first.flops:.3g} and {second.flops:.3g} FLOPs of training; compare ladders,"
            f" or runs within a factor of {LIKE}"
        )
    pairs = [(scores[0][s], scores[1][s]) for s in scores[0] if s in scores[1]]
    notes = [] if pairs else ["no seed in common: the difference holds the luck of both runs"]
    pairs = pairs or [(float(np.mean([*scores[0].values()])), float(np.mean([*scores[1].values()])))]
    difference = finals.interval([y - x for x, y in pairs])
    law = exponent(first, home, floor * min(scores[0].values()), floor, ladder, alpha)
    speed = speed_ratio(first, second) if with_speed else 1.0
    scale = speed * first.flops / second.flops
    body: dict[str, Any] = {
        "a": a,
        "b": b,
        "kind": "runs",
        "metric": "macro bits per byte",
        "held_out": text,
        "pairs": len(pairs),
        "mean": [float(np.mean([x for x, _ in pairs])), float(np.mean([y for _, y in pairs]))],
        "difference": difference._asdict(),
        "law": law.body,
        "at": None,
        "floors": [],
        "speed_ratio": speed if with_speed else None,
        "notes": notes + law.notes,
    }
    if law.alpha is None:
        if with_speed or abs(math.log(scale)) > 1e-9:
            body |= {
                "verdict": "undecided",
                "why": "a difference in compute or speed weighs against one in loss by an exponent only",
            }
            return body
        body["verdict"], body["why"] = _by_loss(difference)
        return body
    found = _gain(pairs, law.alpha, law.floor, scale)
    body["at"] = {"flops": first.flops, **_effect(found)}
    body["floors"] = [
        {"share": share, "alpha": refit.alpha, **_effect(_gain(pairs, refit.alpha, refit.floor, scale))}
        for share, refit in law.floors.items()
    ]
    body["verdict"], body["why"] = speedup.verdict(found)
    return body


def seeds(name: str, home: Path) -> dict[int, Final]:
    """A run, or the runs `NAME-s<seed>`, by seed.

    Raises:
        ValueError: when there is neither, naming the nearest.
    """
    known = layout.names(home)
    if name in known:
        final = finals.of_run(name, home)
        return {final.run.seed: final}
    found = [finals.of_run(n, home) for n in known if re.fullmatch(re.escape(name) + r"-s\d+", n)]
    done = [f for f in found if f.finished] or found
    if done:
        return {f.run.seed: f for f in done}
    arms = sorted({re.sub(r"-s\d+$", "", n) for n in known} | set(known) | {p.stem for p in (home / "ladders").glob("*.json")})
    near = f"nearest: {', '.join(spec.nearest(name, arms))}" if arms else "no run was started there yet"
    raise ValueError(f"no run, arm or ladder {name!r} under {home}; {near}")


class Exponent(NamedTuple):
    """What turns a difference in loss into compute: an exponent over a floor, and refits over other floors; None if unknown."""

    alpha: float | None
    floor: float
    floors: dict[float, speedup.Law]
    body: dict[str, Any] | None
    notes: list[str]


def exponent(run: Final, home: Path, level: float, floor: float, ladder: str, alpha: float | None) -> Exponent:
    """The exponent for runs like this one: as given, over the floor `level`, or refitted on a ladder of the store.

    The ladder was scored on the same text; `floor` is a share of its smallest loss.

    Raises:
        ValueError: when the ladder that is asked for is unfinished, or was scored on other text.
    """
    if alpha is not None:
        return Exponent(alpha, level, {}, {"from": "--alpha", "alpha": alpha, "floor": level}, [])
    damaged = []
    for name in [ladder] if ladder else sorted(path.stem for path in (home / "ladders").glob("*.json")):
        try:
            fitted = _of_ladder(run, name, home, floor)
        except ValueError as error:
            if ladder:
                raise
            damaged.append(f"ladder {name!r} is left out: {error}")
            continue
        if not isinstance(fitted, str):
            return fitted._replace(notes=[*fitted.notes, *damaged])
        if ladder:
            raise ValueError(fitted)
    none = "no ladder in the store says what a difference is worth in compute; or give --alpha"
    return Exponent(None, 0.0, {}, None, [none, *damaged])


def _of_ladder(run: finals.Final, name: str, home: Path, floor: float) -> Exponent | str:
    """The exponent of a ladder's finished sizes, or why they have none for this run."""
    found, _ = sizes(name, home)
    unlike = [reason for other in found.values() for reason in finals.unlike(run, other)]
    if unlike:
        return f"the ladder of {name!r} says nothing about {run.name}: {unlike[0]}"
    if len(found) < speedup.FEWEST:
        return f"the ladder of {name!r} has fewer than {speedup.FEWEST} finished sizes; an exponent needs them"
    _, values = finals.same_text(list(found.values()))
    points = (np.array([f.flops for f in found.values()]), np.array(values))
    refits = {share: speedup.law(*points, share * min(values)) for share in speedup.FLOORS}
    chosen = speedup.law(*points, floor * min(values))
    note = "the interval holds the luck of seeds, not what is unsure about the exponent"
    return Exponent(chosen.alpha, chosen.floor, refits, {"from": name, **_law(points, floor)}, [note])


def _gain(pairs: Sequence[tuple[float, float]], alpha: float, floor: float, scale: float) -> speedup.Effect:
    """The speed-up over pairs of losses: mean and Student's interval of its logarithm."""
    logs = finals.interval([math.log(speedup.speedup(x, y, alpha, floor)) for x, y in pairs])
    return speedup.Effect(*(None if v is None else scale * math.exp(v) for v in logs[:3]))  # type: ignore[arg-type]


def _by_loss(difference: finals.Interval) -> tuple[str, str]:
    if difference.low is None or difference.high is None:
        return "undecided", "there is no interval: it takes two seeds"
    reach = f"the 90% interval of the difference, {difference.low:+.4f} to {difference.high:+.4f} bits per byte,"
    if difference.high < 0:
        return "promote", f"{reach} lies below 0"
    return ("reject", f"{reach} lies above 0") if difference.low > 0 else ("undecided", f"{reach} holds 0")


def speed_ratio(a: Final, b: Final) -> float:
    """Median tokens per second of B over A's.

    Raises:
        ValueError: when one has logged none.
    """
    if not a.tokens_per_s or not b.tokens_per_s:
        raise ValueError(f"--with-speed: {a.name if not a.tokens_per_s else b.name} has logged no tokens per second")
    return b.tokens_per_s / a.tokens_per_s


def _effect(found: speedup.Effect) -> dict[str, float | None]:
    return {"speedup": found.mean, "low": found.low, "high": found.high}


# ---- for a terminal ---------------------------------------------------------------------------------

STYLES = {"promote": "bold green", "reject": "bold red", "undecided": "bold yellow"}


def table(body: dict[str, Any]) -> RenderableType:
    """What `compare` returned, for a terminal."""
    parts: list[RenderableType] = [
        Text.assemble((body["b"], "bold"), " against ", (body["a"], "bold"), f": {body['metric']} of {body['held_out']}", "\n")
    ]
    if body["kind"] == "ladders" and body["rungs"]:
        grid = _grid("rung", "FLOPs", "A", "B", "B - A", "speed-up")
        for row in body["rungs"]:
            left, right = row["bits_per_byte"]
            grid.add_row(
                row["rung"],
                f"{row['flops'][0]:.3g}",
                f"{left:.4f}",
                f"{right:.4f}",
                f"{row['difference']:+.4f}",
                f"{row['speedup']:.3f}x",
            )
        parts.append(grid)
    if body["kind"] == "runs":
        grid, gap = _grid("pairs of seeds", "A", "B", "B - A", "90% interval"), body["difference"]
        reach = "" if gap["low"] is None else f"{gap['low']:+.4f} to {gap['high']:+.4f}"
        grid.add_row(str(body["pairs"]), *(f"{v:.4f}" for v in body["mean"]), f"{gap['mean']:+.4f}", reach)
        parts.append(grid)
    if law := body["law"]:
        reach = "" if law.get("low") is None else f" ({law['low']:.4f} to {law['high']:.4f})"
        source = f", from {law['from']}" if "from" in law else f" of {body['a']}'s ladder"
        parts.append(Text(f"\nExponent {law['alpha']:.4f}{reach}{source}, over a floor of {law['floor']:.4g}"))
    if body["at"]:
        grid = _grid("", "exponent", "speed-up at equal loss", "90% interval")
        at = f"at {body['at']['flops']:.3g} FLOPs"
        grid.add_row(at, f"{law['alpha']:.4f}", *_figures(body["at"]), style="bold")
        if body.get("hero"):
            grid.add_row(f"at the hero's {body['hero']['flops']:.3g}", f"{law['alpha']:.4f}", *_figures(body["hero"]))
        for row in body["floors"]:
            grid.add_row(f"floor of {row['share']:.0%}, refitted", f"{row['alpha']:.4f}", *_figures(row), style="dim")
        parts.append(grid)
    if body["speed_ratio"]:
        parts.append(
            Text(f"Tokens per second, B over A: {body['speed_ratio']:.3f} (medians, without an interval), counted in.")
        )
    parts.append(Text.assemble("\n", (body["verdict"], STYLES[body["verdict"]]), f": {body['why']}."))
    parts += [Text(note + ".", "dim") for note in body["notes"]]
    return Group(*parts)


def _figures(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['speedup']:.3f}x", "" if row["low"] is None else f"{row['low']:.3f}x to {row['high']:.3f}x"


def _grid(*columns: str) -> Table:
    grid = Table(box=None, pad_edge=False)
    for i, column in enumerate(columns):
        grid.add_column(column, justify="right" if i else "left", no_wrap=True)
    return grid
