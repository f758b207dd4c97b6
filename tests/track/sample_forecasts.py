"""Forecasts and ladders as the room of judges leaves them for the page."""

import json
from dataclasses import replace

import numpy as np

from argosy import spec
from argosy.track import layout

WHY = {
    "ahead": "The mean of sources is below its 90% band in three evaluations running.",
    "on track": "All evaluations since the first lie inside their 90% bands.",
    "behind": "The mean of sources lies above its 90% band since update 512, by 0.4 band widths now.",
    "off": "The mean of sources lies 2.1 band widths above its band and moves away from it.",
    "not comparable": "The run differs from what was registered, so its figures say nothing about the forecast.",
}


def band(steps, mean, half):
    """Columns of a band around a mean; the first has no forecast."""
    mean, half = np.asarray(mean, float), np.asarray(half, float)
    columns = {"mean": mean, "lo50": mean * np.exp(-0.41 * half), "hi50": mean * np.exp(0.41 * half)}
    columns |= {"lo90": mean * np.exp(-half), "hi90": mean * np.exp(half)}
    return {"step": list(map(int, steps)), **{key: [None, *column[1:].tolist()] for key, column in columns.items()}}


def forecast(
    curves,
    steps,
    verdict="on track",
    at=0,
    late=0,
    number=1,
    bridged=False,
    witness=None,
    head="eval_dropless/stdlib/macro_bpb",
):
    """page.json: `curves` gives each metric's forecast mean as a function of the step; `at` is the step judged last."""
    grid = np.unique(np.round(np.linspace(0.02, 1, 25) * steps).astype(int))
    share = grid / steps
    bands = {name: band(grid, curve(grid), 0.006 + 0.012 * share) for name, curve in curves.items()}
    about = {
        "number": number, "sha256": "3fa1" * 16, "created": "2026-11-29T21:04:05+00:00", "method": "joint",
        "late": {"updates": late} if late else None, "supersedes": "0" * 64 if number > 1 else None,
        "reason": "a rung was repeated with more updates" if number > 1 else "", "bridged": bridged, "witness": witness,
    }  # fmt: skip
    body = {"forecast": about, "bands": bands, "verdict": None, "updated": {}, "time": 1_790_000_000.0}
    if verdict is None:
        return body
    off = {"ahead": -0.02, "on track": 0.001, "behind": 0.012, "off": 0.03}.get(verdict, 0.002)
    rest = grid[grid >= at]
    judged = {}
    for name, curve in curves.items():
        own, done = bands[name], grid[(grid <= at) & (grid > grid[0])]
        k = int(np.searchsorted(grid, done[-1])) if len(done) else 1
        actual = own["mean"][k] * (1 + off)
        judged[name] = {
            "verdict": verdict, "since_step": int(done[len(done) // 2]) if len(done) else None, "step": int(grid[k]), "actual": actual,
            **{key: own[key][k] for key in ("mean", "lo90", "hi90")}, "widths_out": max(0.0, (abs(off) - 0.018) / 0.036),
            "residual": [[int(step), off * min(1, i / 5) + 0.001 * (-1) ** i] for i, step in enumerate(done)],
        }  # fmt: skip
        body["updated"][name] = band(
            [at, *rest], [1, *curve(rest) * (1 + off)], 0.001 + 0.006 * np.linspace(0, 1, len(rest) + 1)
        )
    end = {"registered": bands[head], "updated": body["updated"][head]}
    body["verdict"] = {
        "name": "pocket", "verdict": verdict, "why": WHY[verdict], "since_step": judged[head]["since_step"], "forecast": about,
        "metrics": judged, "end": {key: {part: one[part][-1] for part in ("mean", "lo90", "hi90")} for key, one in end.items()},
        "differences": ["data.seq_len is 512, registered with 256"] if verdict == "not comparable" else [],
    }  # fmt: skip
    return body


def write(home, name, body):
    path = home / "forecasts" / name / "page.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    layout.write_json(path, body)


def ladder(home, name, hero, rungs):
    """A ladder of (rung, purpose) with the hero's own spec at other seeds."""
    listed = [
        {"name": f"{name}-{rung}", "rung": rung, "purpose": purpose, "run": spec.to_json(replace(hero, seed=i + 1))}
        for i, (rung, purpose) in enumerate(rungs)
    ]
    path = home / "ladders" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"format": 1, "name": name, "created": "2026-11-29", "hero": spec.to_json(hero), "rungs": listed})
    )
