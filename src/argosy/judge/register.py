"""A forecast as a document: made before the hero begins, with all that it rests on, dated, hashed, never changed.

`<home>/forecasts/<hero>/0001.json`, `0002.json`, ...: a later one supersedes the one before and says why. Whoever has a file can
refit it from the data inside (`verify`); that it was there before the run is for an outside witness to say (`line`, `witness.note`).
"""

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from argosy import spec
from argosy.forecast import points as P
from argosy.forecast.fit import BANDS
from argosy.judge import ladders
from argosy.judge import points as tables
from argosy.judge.fits import SEED, Body, Say, fit_rows
from argosy.plan import scaling
from argosy.track import columns, provenance
from argosy.track import log as logs

FORMAT = 1
CLOCK_S = 60.0  # machines of one house differ by less


def folder_of(home: Path, name: str) -> Path:
    return home / "forecasts" / name


def register(
    home: Path,
    name: str,
    hero_run: spec.Run | None = None,
    *,
    method: str = "joint",
    reason: str = "",
    say: Say = lambda _: None,
) -> tuple[Path, Body]:
    """The forecast of a hero from its ladder, written as the next file of its name; the file's path and what is in it.

    Args:
        home: where runs, ladders and forecasts live.
        name: the hero's name in the store.
        hero_run: the hero; the ladder's if not given.
        method: of the fit.
        reason: why it supersedes the one before; demanded when there is one.
        say: is told what is being done.

    Raises:
        ValueError: when there is no ladder, it has fewer than three sizes, the hero is another than the ladder's, a forecast is
            registered and no reason is given, or the clock is behind what is on disk.
        OSError: when the disk refuses.
    """
    before = newest(home, name)
    if before and not reason.strip():
        raise ValueError(
            f"a forecast of {name!r} is registered: {line(before)}; it stays. Another one supersedes it and says why: --reason TEXT"
        )
    gathered = tables.gather(home, name)
    hero = the_hero(home, name, gathered.hero, hero_run)
    tables.enough(gathered, name)
    dated(home, name, gathered.rungs, before)
    points, asked = tables.fitted(gathered, name, method)
    forecast = fit_rows(points, asked, method, SEED, told=gathered.alarms, covariance=True, say=say)
    now = dated(home, name, gathered.rungs, before)  # again: the hero may have begun while this was fitted
    sums = [rung["checksum"] for rung in gathered.rungs if rung["checksum"]]
    body = {
        "created": datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
        "created_s": now,
        "late": late(home, name, before),
        "reason": reason.strip(),
        "bridge": None,
        "hero": json.loads(json.dumps(spec.to_json(hero))),
        "identity": identity(hero, sums[0] if sums else ""),
        "ladder": gathered.rungs,
        "data": {"points": [lean(row) for row in points], "target": asked},
        "method": method,
        "seed": SEED,
        "forecast": forecast,
    }
    path, body = write(home, name, body, before)
    show_page(home, body)
    return path, body


def show_page(home: Path, body: Body) -> None:
    """Give the page the newest bands, the verdict under them, and who witnesses it."""
    from argosy.judge import verdict  # which rests on this module

    with contextlib.suppress(ValueError, OSError):  # the page's file can be made again
        verdict.judge(home, body["name"])


def write(home: Path, name: str, body: Body, before: Body | None) -> tuple[Path, Body]:
    """A body as the next file of its name: hashed, whole or not at all, read-only, never over another.

    Raises:
        ValueError: when another process has just registered.
    """
    number = 1 + (before["number"] if before else 0)
    body = {
        "format": FORMAT,
        "name": name,
        "number": number,
        **body,
        "supersedes": before["sha256"] if before else None,
        "code": provenance.code(),
        "packages": provenance.packages("numpy", "scipy"),
    }
    body["sha256"] = digest(body)
    folder = folder_of(home, name)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number:04d}.json"
    handle, aside = tempfile.mkstemp(".tmp", f".{number:04d}.", folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text(body))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o444)
        os.link(aside, path)  # unlike a rename, never over a file that is there
    except FileExistsError:
        raise ValueError(
            f"{path} was registered by another process in this moment; argosy forecast register {name} --reason TEXT supersedes it"
        ) from None
    finally:
        os.unlink(aside)
    columns.sync_folder(folder)
    return path, body


def text(body: Body) -> bytes:
    """A line for each key, so that a file can be looked at."""
    lines = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in body.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def digest(body: Body) -> str:
    """SHA-256 of the canonical JSON (sorted keys, no spaces) of everything but `sha256`.

    >>> digest({"b": 1, "a": 0.5, "sha256": "x"}) == hashlib.sha256(b'{"a":0.5,"b":1}').hexdigest()
    True
    """
    kept = {key: value for key, value in body.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def lean(row: Body) -> Body:
    """A point as a file keeps it: the table's columns."""
    return {name: row[name] for name in P.POINTS_COLUMNS}


def the_hero(home: Path, name: str, ladder: spec.Run, given: spec.Run | None) -> spec.Run:
    """The hero that ladder, store and caller agree on.

    Raises:
        ValueError: naming what differs.
    """
    others = {"the run that is asked for": given}
    if ladders.has_begun(home / "runs" / name):
        others[f"run {name!r} in the store"] = spec.from_json(logs.run_json(home / "runs" / name)["run"])
    for what, run in others.items():
        if run is not None and (changed := spec.difference(ladder, run)):
            said = "; ".join(f"{key} {new}, not {old}" for key, (old, new) in changed.items())
            raise ValueError(
                f"{what} is not the hero that the ladder of {name!r} was made for: {said}; climb a ladder of its own with --as"
                f" {name}-2, or take the old values"
            )
    return ladder


def dated(home: Path, name: str, rungs: list[Body], before: Body | None) -> float:
    """Now, in seconds since 1970.

    Raises:
        ValueError: when the registration would be dated before what it rests on.
    """
    now = time.time()
    seen = []
    for rung in rungs:
        if rung["steps"]:
            last = logs.read(home / "runs" / rung["name"]).last("time")
            seen.append((last[1] if last else 0.0, f"the last row of {rung['name']}"))
    after = max(seen, default=(0.0, ""))
    if after[0] > now + CLOCK_S:
        raise ValueError(f"{after[1]} is dated {stamp(after[0])}, this machine's clock says {stamp(now)}: one of them is wrong")
    if before and now <= before["created_s"]:
        raise ValueError(
            f"forecast {before['number']:04d} of {name!r} is dated {before['created']}, this machine's clock says {stamp(now)}; a"
            " successor cannot be older: set the clock"
        )
    return now


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def late(home: Path, name: str, before: Body | None) -> Body | None:
    """`{"updates": n}` if the hero has ever finished an update, in any attempt; a predecessor's mark is kept."""
    done = [before["late"]["updates"]] if before and before.get("late") else []
    if (home / "runs" / name / "run.json").is_file():
        log = logs.read(home / "runs" / name)
        for attempt in log.attempts:
            own = log.pieces("time", attempt.number)  # none while the first program is compiled
            done += [attempt.at_step, *(int(piece.column.steps[piece.stop - 1]) for piece in own)]
        if not log.attempts:  # its lineage is lost, the rows are not
            done += [step for _, rows in log.tails for step, *_ in rows]
            done += [int(columns.pick(chunk, "time").steps[-1]) for chunk in log.chunks if "time" in chunk.where]
    most = max(done, default=0)
    return {"updates": most} if most else None


def identity(run: spec.Run, corpus_checksum: str) -> dict[str, str | int | float]:
    """What a forecast is of: a run that differs in any of these is another run.

    >>> from argosy.runs import pocket
    >>> identity(pocket.run(), "99e2")["schedule"]
    'hyperball marin_2026_08 x2, horizon 2,097,152 tokens, warm-up 10 updates, linear to 0.05'
    """
    o, r, d = run.optim, run.routing, run.data
    mixture = "; ".join(f"to {p.until_frac:g}: " + ", ".join(f"{n} {w:g}" for n, w in p.weights) for p in d.phases)
    schedule = f"{o.rule} {o.scaling} x{o.lr_scale:g}, horizon {o.horizon_tokens:,} tokens, warm-up"
    schedule += f" {scaling.rates(run).warmup_steps:,} updates, linear to {o.final_frac:g}"
    schedule += "" if o.decay == "none" else f", decay {o.decay} {o.decay_peak:g}"
    return {
        "recipe": run.recipe,
        "key": run.key(),
        "mixture": f"{mixture}; {d.epoching} epochs of {d.mixture_reference_tokens:,} tokens",
        "corpus": d.corpus,
        "corpus_checksum": corpus_checksum,
        "seq_len": d.seq_len,
        "schedule": schedule,
        "batch": spec.tokens_per_step(run),
        "updates": spec.steps(run),
        "drops": f"{r.exchange} {tables.capacity(r)}",
        "evaluation": f"{d.corpus}, {run.evals.tokens_per_set:,} tokens of each set, dropless",
    }


def all_of(home: Path, name: str) -> list[Body]:
    """Every registered forecast of a hero, oldest first, each with its own hash and that of the one before it.

    Raises:
        ValueError: for a file that is damaged or was changed, or a number that is missing.
    """
    found: list[Body] = []
    for k, path in enumerate(files(home, name), 1):
        body = load(path)
        if body["number"] != k:
            raise ValueError(
                f"{folder_of(home, name)}: {k:04d}.json is missing or holds number {body['number']}; forecasts are never removed:"
                " bring it back"
            )
        before = found[-1]["sha256"] if found else None
        if digest(body) != body["sha256"] or body["supersedes"] != before or body["name"] != name:
            raise ValueError(
                f"{path} is not what was registered here: its name, its SHA-256 or that of the one before it is another; argosy"
                f" forecast verify {path} says more; bring the file back as it was"
            )
        try:
            inside(body)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} is not as argosy forecast register writes it ({type(error).__name__}: {error}); argosy forecast verify"
                f" {path} says more"
            ) from error
        found.append(body)
    return found


def inside(body: Body) -> None:
    """Raise what is wrong with the inside of a forecast, whose hash may fit all the same."""
    missing = identity(spec.from_json(body["hero"]), "").keys() - body["identity"].keys()
    rows = body["forecast"]["rows"]
    if missing or not rows:
        raise ValueError(f"no {', '.join(sorted(missing)) or 'rows'}")
    for row in rows:
        if not isinstance(row["metric"], str) or not isinstance(row["step"], int):
            raise TypeError("a row without metric or step")
        for band in BANDS:
            float(row[band] or 0.0)
    for rung in body["ladder"]:
        str(rung["name"])
    for metric, block in body["forecast"].get("covariance", {}).items():
        matrix, size = np.array(block["matrix"], float), len(block["rows"])
        rows[max(block["rows"], default=0)]
        if matrix.shape != (size, size) or (size and np.linalg.eigvalsh(matrix)[0] < -0.01 * np.abs(matrix).max()):
            raise ValueError(f"{metric} has no covariance of its rows")
    if body["bridge"] is not None:
        str(body["bridge"]["event"]["kind"]), int(body["bridge"]["event"]["step"])
        when(body)


def files(home: Path, name: str) -> Iterator[Path]:
    return iter(sorted(p for p in folder_of(home, name).glob("*.json") if re.fullmatch(r"\d{4,}\.json", p.name)))


def newest(home: Path, name: str) -> Body | None:
    """The forecast that holds now, or None."""
    found = all_of(home, name)
    return found[-1] if found else None


NEEDED: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "number": int,
    "created": str,
    "created_s": (int, float),
    "supersedes": (str, type(None)),
    "late": (dict, type(None)),
    "bridge": (dict, type(None)),
    "hero": dict,
    "identity": dict,
    "ladder": list,
    "data": dict,
    "method": str,
    "seed": int,
    "forecast": dict,
    "code": dict,
    "sha256": str,
}


def load(path: Path) -> Body:
    """What is in a registered file.

    Raises:
        ValueError: when it is no such file, or damaged.
        OSError: when it cannot be read.
    """
    try:
        body = json.loads(path.read_bytes(), parse_constant=no_number)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError(f"it is no registered forecast of format {FORMAT}")
        wrong = [key for key, kind in NEEDED.items() if key not in body or not isinstance(body[key], kind)]
        if wrong:
            raise ValueError(f"it has no {', '.join(wrong)} as it is registered")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not what was registered: {error}") from error
    return body


def no_number(text: str) -> float:
    raise ValueError(f"it holds {text}")


def line(body: Body) -> str:
    """One line to publish elsewhere: name, number, date, hash.

    >>> line({"name": "pocket", "number": 1, "created": "2026-11-29T22:00:00+00:00", "sha256": "ab12", "late": {"updates": 3}})
    'argosy forecast pocket 0001 2026-11-29T22:00:00+00:00 late (after 3 updates) sha256 ab12'
    """
    mark = f" late (after {body['late']['updates']:,} updates)" if body.get("late") else ""
    mark += f" bridged (after {body['bridge']['updates']:,} updates)" if body.get("bridge") else ""
    return f"argosy forecast {body['name']} {body['number']:04d} {body['created']}{mark} sha256 {body['sha256']}"


def when(body: Body) -> str:
    """When a forecast was made, in the run's updates, in words.

    >>> when({"late": None, "bridge": None})
    "before the run's first update"
    >>> when({"late": None, "bridge": {"updates": 400, "first": {"created": "2026-11-29T22:00:00+00:00"}}})
    "after 400 updates, over a change; it shifts the forecast of 2026-11-29, made before the run's first update"
    """
    made = body.get("bridge")
    first = f"late, after {body['late']['updates']:,} updates" if body.get("late") else "before the run's first update"
    if not made:
        return first
    return f"after {made['updates']:,} updates, over a change; it shifts the forecast of {made['first']['created'][:10]}, made {first}"
