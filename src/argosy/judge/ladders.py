"""A hero's ladder as it is kept: which rungs, for which hero, and how far each of them is.

`<home>/ladders/<hero>.json` holds the hero and its rungs as complete runs. The rungs themselves are runs of the same
home, named `<hero>-<rung>`.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from argosy import spec
from argosy.plan.ladder import Rung
from argosy.track import layout, log

FORMAT = 1


def path_of(home: Path, hero_name: str) -> Path:
    return home / "ladders" / f"{hero_name}.json"


def run_name(hero_name: str, rung_name: str) -> str:
    """What a rung is called as a run.

    >>> run_name("pocket", "d64-small-batch")
    'pocket-d64-small-batch'
    """
    return f"{hero_name}-{rung_name}"


def save(home: Path, hero_name: str, hero: spec.Run, rungs: Sequence[Rung]) -> Path:
    """The file of a hero's ladder, written unless it is there with the same values.

    Raises:
        ValueError: when a ladder of this name has other values and rungs that have begun, with the differences and the way
            out; when its file is damaged.
        OSError: when the disk refuses.
    """
    path = path_of(home, hero_name)
    listed = [
        {"name": run_name(hero_name, rung.name), "rung": rung.name, "purpose": rung.purpose, "run": spec.to_json(rung.run)}
        for rung in rungs
    ]
    asked = json.loads(json.dumps({"hero": spec.to_json(hero), "rungs": listed}))
    if path.is_file():
        there = load(home, hero_name)
        changed = differences(there, asked)
        if not changed:
            return path
        begun = [entry["name"] for entry in there["rungs"] if has_begun(home / "runs" / entry["name"])]
        if begun:
            more = f" and {len(changed) - 6} more" if len(changed) > 6 else ""
            raise ValueError(
                f"the ladder of {hero_name!r} exists with other values: {'; '.join(changed[:6])}{more}; {', '.join(begun)}"
                f" {'has' if len(begun) == 1 else 'have'} begun, and a ladder keeps its values for life; go on with the old ones, or"
                f" climb another with --as {hero_name}-2"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    layout.write_json(path, {"format": FORMAT, "name": hero_name, "created": time.time(), **asked})
    return path


def load(home: Path, hero_name: str) -> dict[str, Any]:
    """What `save` wrote: `format`, `name`, `created` (seconds since 1970), `hero`, `rungs` of name, rung, purpose, run.

    Raises:
        ValueError: when there is no ladder of this name, with the command that makes it; when its file is damaged.
    """
    path = path_of(home, hero_name)
    if not path.is_file():
        known = sorted(file.stem for file in path.parent.glob("*.json"))
        near = f"; nearest: {', '.join(spec.nearest(hero_name, known))}" if known else ""
        raise ValueError(
            f"no ladder of {hero_name!r} in {path.parent}{near}; argosy ladder {hero_name} --run makes and climbs it"
        )
    try:
        body = json.loads(path.read_bytes())
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError(f"it is no ladder of format {FORMAT}")
        spec.from_json(body["hero"])
        for entry in body["rungs"]:
            spec.from_json(entry["run"])
            if not all(isinstance(entry[key], str) for key in ("name", "rung", "purpose")):
                raise ValueError("a rung has no name, rung or purpose")
            if entry["name"] != run_name(hero_name, entry["rung"]) or "/" in entry["name"]:
                raise ValueError(f"a rung is called {entry['name']!r}, which is no rung's name of {hero_name!r}")
        if len({entry["name"] for entry in body["rungs"]}) < len(body["rungs"]):
            raise ValueError("it holds a rung twice")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not what was written: {what}; the runs of its rungs are untouched") from error
    return body


def state(home: Path, hero_name: str) -> list[dict[str, Any]]:
    """How far each rung of a saved ladder is, in the ladder's order.

    `name`, `rung`, `purpose`; `updates` finished of `steps`; `finished`, whether those are all; `macro_bpb`, the last held-out bits
    per byte over all sets, and `macro_bpb_at`, after how many updates (both None before the first evaluation).

    Raises:
        ValueError: when there is no ladder of this name; when its file or a rung's is damaged.
    """
    found = []
    for entry in load(home, hero_name)["rungs"]:
        run = spec.from_json(entry["run"])
        done, whole, scored = 0, False, None
        if (home / "runs" / entry["name"] / "run.json").is_file():
            its = log.read(home / "runs" / entry["name"])
            done, whole, scored = updates(its), is_finished(its), its.last(f"eval_dropless/{run.data.corpus}/macro_bpb")
        found.append(
            {
                "name": entry["name"],
                "rung": entry["rung"],
                "purpose": entry["purpose"],
                "updates": done,
                "steps": spec.steps(run),
                "finished": whole,
                "macro_bpb": None if scored is None else scored[1],
                "macro_bpb_at": None if scored is None else scored[0],
            }
        )
    return found


def differences(there: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """What another ladder has otherwise, in words: of the hero, then of the rungs."""

    def said(who: str, old: Any, new: Any) -> list[str]:
        was, now = log.flat(old), log.flat(new)
        return [f"{who} {k} {was.get(k)} -> {now.get(k)}" for k in sorted(was | now) if was.get(k) != now.get(k)]

    old, new = ({entry["rung"]: entry for entry in body["rungs"]} for body in (there, asked))
    found = said("hero", there["hero"], asked["hero"])
    found += [f"rung {name} is new" for name in new if name not in old]
    found += [f"rung {name} is left out" for name in old if name not in new]
    for name in old:
        if name in new:
            found += said(f"rung {name}", *({"purpose": e["purpose"], **e["run"]} for e in (old[name], new[name])))
    return found


def updates(its: log.RunLog) -> int:
    """Updates that a run has finished, by its newest row."""
    newest = its.last("time")
    return 0 if newest is None else newest[0]


def is_finished(its: log.RunLog) -> bool:
    """Whether these are all updates of a run."""
    return updates(its) >= spec.steps(spec.from_json(its.run["run"]))


def has_begun(folder: Path) -> bool:
    """Whether a run was ever trained for a moment."""
    return any(record["kind"] == "attempt" for record in layout.read_records(folder / "lineage.jsonl")[0])
