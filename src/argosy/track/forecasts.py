"""What lies beside the runs of a home and belongs on their page: a hero's ladder, and its registered forecast with the verdict.

    <home>/ladders/<hero>.json             the hero and its rungs, each a run of its own
    <home>/forecasts/<hero>/page.json      bands, verdict and updated forecast, as the page draws them

Both are written by the room of judges; here they are read.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from argosy import spec
from argosy.track import index, metrics
from argosy.track.log import flat

Body = dict[str, Any]
BAND = ("step", "mean", "lo50", "hi50", "lo90", "hi90")


def page_path(home: Path, name: str) -> Path:
    return home / "forecasts" / name / "page.json"


def ladder_path(home: Path, name: str) -> Path:
    return home / "ladders" / f"{name}.json"


def mark(home: Path, name: str) -> str:
    """Changes when the forecast or the ladder of a run does; empty without either."""
    found = []
    for path in (page_path(home, name), ladder_path(home, name)):
        with contextlib.suppress(OSError):
            found.append(str(os.stat(path).st_mtime_ns))
    return ":".join(found)


def forecast(home: Path, name: str) -> Body:
    """The registered forecast of a run as the page draws it, with `metrics`: what each is; {} where none is registered.

    Raises:
        ValueError: when the file is damaged, naming it.
    """
    remedy = f"argosy forecast judge {name} writes it again"
    body = loaded(page_path(home, name), {"forecast": dict, "bands": dict}, remedy)
    if not body:
        return {}
    if not isinstance(body.get("verdict"), dict | None):
        raise ValueError(f"{page_path(home, name)} is not what was written: its verdict is no object; {remedy}")
    for metric, band in body["bands"].items():
        columns: list[Any] = [band.get(key) for key in BAND] if isinstance(band, dict) else [None]
        if not all(isinstance(column, list) for column in columns) or len(set(map(len, columns))) > 1:
            raise ValueError(f"{page_path(home, name)} is not what was written: the columns of {metric} are uneven; {remedy}")
        if not all(isinstance(value, int | float | None) for column in columns for value in column):
            raise ValueError(f"{page_path(home, name)} is not what was written: {metric} holds more than numbers; {remedy}")
    known = {metric: metrics.describe(metric) for metric in sorted(body["bands"], key=metrics.rank)}
    about = {metric: {"unit": m.unit, "meaning": m.meaning, "panel": m.panel, "label": m.label} for metric, m in known.items()}
    told = body.get("verdict")
    headline = told.get("headline") if isinstance(told, dict) else None
    return body | {"metrics": about, "headline": headline or metrics.macro_bpb(list(known)) or next(iter(known), None)}


def loaded(path: Path, parts: dict[str, type], remedy: str) -> Body:
    """A JSON object with these parts; {} where there is no file."""
    try:
        body = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not what was written: {error}; {remedy}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    for part, kind in parts.items():
        if not isinstance(body, dict) or not isinstance(body.get(part), kind):
            raise ValueError(f"{path} is not what was written: it holds no {part}; {remedy}")
    return body


def ladder_file(home: Path, name: str) -> Body:
    """The ladder of a hero as it is saved; {} where it has none.

    Raises:
        ValueError: when the file is damaged, naming it.
    """
    body = loaded(
        ladder_path(home, name), {"hero": dict, "rungs": list}, f"move it away, and argosy ladder {name} --run writes it again"
    )
    for rung in body.get("rungs", []):
        if not isinstance(rung, dict) or not isinstance(rung.get("name"), str) or not isinstance(rung.get("run"), dict):
            raise ValueError(f"{ladder_path(home, name)} is not what was written: a rung has no name or no run")
    return body


def ladders(home: Path) -> dict[str, Body]:
    """All ladders of a home by hero; one that is damaged is left out."""
    found = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in sorted((home / "ladders").iterdir()):
            if entry.suffix == ".json":
                with contextlib.suppress(ValueError, OSError):
                    found[entry.stem] = ladder_file(home, entry.stem)
    return found


def heroes(home: Path) -> dict[str, str]:
    """The hero of each rung's run, by the rung's name."""
    return {rung["name"]: hero for hero, body in ladders(home).items() for rung in body["rungs"]}


def ladder(home: Path, name: str) -> Body:
    """The rungs of a hero with how far each is: `{"name", "created", "finished", "rungs"}`; {} where it has none.

    A rung has `name` of its run, `rung`, `purpose`, `width`, `state`, `step`, `steps`, `progress`, `tokens`, `macro_bpb` of its newest
    evaluation, `eta_s`; what is not known is None.

    Raises:
        ValueError: when the file is damaged, naming it.
    """
    body = ladder_file(home, name)
    if not body:
        return {}
    known = {found["name"]: found for found in index.summaries(home)}
    rungs = [climbed(rung, known.get(rung["name"])) for rung in body["rungs"]]
    finished = sum(rung["state"] == "done" for rung in rungs)
    return {"name": name, "created": body.get("created"), "finished": finished, "rungs": rungs}


def climbed(rung: Body, summary: Body | None) -> Body:
    """One rung and how far its run is."""
    model = rung["run"].get("model")
    about = {"name": rung["name"], "rung": rung.get("rung"), "purpose": rung.get("purpose"), "steps": steps_of(rung["run"])}
    about["width"] = model.get("width") if isinstance(model, dict) else None
    so_far: Body = {
        key: summary[key] if summary else None for key in ("state", "step", "progress", "tokens", "macro_bpb", "eta_s")
    }
    return about | so_far | {"state": so_far["state"] or "planned"}


def steps_of(run: Body) -> int | None:
    """How many updates a run has in all, if this version can read it."""
    try:
        return spec.steps(spec.from_json(run))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def planned(home: Path, name: str) -> Body:
    """What the page asks of a run, for a hero that has a ladder and no folder yet; its position is empty. {} without a ladder."""
    body = ladder_file(home, name)
    if not body:
        return {}
    hero, made = body["hero"], os.stat(ladder_path(home, name)).st_mtime
    summary: Body = {**dict.fromkeys(index.UNKNOWN), "name": name, "recipe": hero.get("recipe"), "state": "planned"}
    summary |= {"steps": steps_of(hero), "created": made, "updated": made, "attempts": 0}
    summary["horizon_tokens"] = flat(hero).get("optim.horizon_tokens")
    nothing: Body = {
        "plan": None,
        "code": None,
        "environment": None,
        "events": [],
        "lineage": [],
        "attempts": [],
        "metrics": {},
    }
    about = {"run": hero, "summary": summary, "created": made, "hero": None, "forecast": mark(home, name), "position": ""}
    return about | nothing | {"panels": [panel._asdict() for panel in metrics.PANELS]}


def unborn(home: Path, known: list[str]) -> list[Body]:
    """Summaries of the heroes that have a ladder and no folder yet; `known` are the runs that have one."""
    found = [planned(home, hero)["summary"] for hero in ladders(home) if hero not in known]
    now = time.time()
    return [body | {"age_s": max(0.0, now - body["updated"])} for body in found]
