"""What each run has come to, and an SQLite table of it, so that a long list of runs is quick.

The table can be deleted at any time: it is made again from the folders.
"""

import contextlib
import json
import math
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np

from argosy import spec
from argosy.track import metrics
from argosy.track.layout import listing, names, writing
from argosy.track.log import RunLog, flat, read

RECENT_ROWS = 50
FORMAT = 2  # raised when the same files give another summary
UNKNOWN = (
    "recipe", "outcome", "step", "steps", "tokens", "horizon_tokens", "progress", "eta_s", "loss", "macro_bpb", "tokens_per_second",
    "mfu", "drop_fraction",
)  # fmt: skip


def total_steps(log: RunLog) -> int | None:
    """How many updates the run has in all, if this version can read its spec."""
    try:
        return spec.steps(spec.from_json(log.run["run"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def summary(log: RunLog) -> dict[str, Any]:
    """What a run has come to, as plain JSON values; what is not known is None.

    `state` is `planned` (nothing recorded), `running` (a live process writes it), or how its newest attempt ended:
    `done`, `failed` or else `stopped`; in `summaries` also `damaged`, with `error`. `eta_s` is seconds to the end at
    the recent pace of wall time, evaluations and checkpoints included.
    """
    steps = total_steps(log)
    started = [r["attempt"] for r in log.lineage if r["kind"] == "attempt"]
    ended = {r["attempt"]: r["fields"].get("outcome") for r in log.lineage if r["kind"] == "ended"}
    newest, pace = log.last("time"), _pace(log)
    step, updated = newest if newest else (None, None)
    headline = metrics.macro_bpb(log.metrics)
    tokens = _last(log, "throughput/total_tokens")
    if tokens is None and step is not None:
        with contextlib.suppress(KeyError, TypeError):
            tokens = step * log.run["run"]["data"]["batch_seqs"] * log.run["run"]["data"]["seq_len"]
    noted = [r["time"] for r in (*log.events, *log.lineage)]
    return {
        "name": log.name,
        "recipe": log.run["run"].get("recipe"),
        "created": log.run["created"],
        "state": _state(log, started, ended),
        "outcome": ended.get(started[-1]) if started else None,
        "attempts": len(started),
        "step": step,
        "steps": steps,
        "tokens": tokens,
        "horizon_tokens": flat(log.run["run"]).get("optim.horizon_tokens"),
        "progress": min(1.0, step / steps) if step is not None and steps else None,
        "eta_s": (steps - step) / pace if steps and step is not None and pace else None,
        "updated": max([t for t in (updated, *noted) if t is not None], default=log.run["created"]),
        "loss": _last(log, "train/cross_entropy_loss") if log.last("train/cross_entropy_loss") else _last(log, "train/loss"),
        "macro_bpb": _last(log, headline) if headline else None,
        "tokens_per_second": _last(log, "throughput/tokens_per_second"),
        "mfu": _last(log, "throughput/mfu"),
        "drop_fraction": _last(log, "moe/drop_fraction"),
    }


def _pace(log: RunLog) -> float | None:
    """Updates per second of wall time over the newest attempt's latest rows."""
    pieces = log.pieces("time", log.attempts[-1].number)[-2:] if log.attempts else []
    points = [(p.column.steps[p.start : p.stop], p.column.values[p.start : p.stop]) for p in pieces]
    if not points:
        return None
    steps, times = (np.concatenate(part)[-RECENT_ROWS:] for part in zip(*points, strict=True))
    return float((steps[-1] - steps[0]) / (times[-1] - times[0])) if times[-1] > times[0] else None


def _last(log: RunLog, name: str) -> float | None:
    point = log.last(name)
    return point[1] if point and math.isfinite(point[1]) else None


def _state(log: RunLog, started: list[int], ended: dict[int, Any]) -> str:
    if not started:
        return "planned"
    if started[-1] not in ended and writing(log.folder):
        return "running"
    outcome = ended.get(started[-1])
    return outcome if outcome in ("done", "failed") else "stopped"


# ---- the table ---------------------------------------------------------------------------------


def summaries(home: Path) -> list[dict[str, Any]]:
    """The summary of every run under a home, newest first, with `age_s`: seconds since something was written.

    Runs whose files have not changed come from `<home>/index.sqlite`; without a writable home everything is read.
    """
    try:
        with contextlib.closing(_open(home)) as table:
            found = [_cached(table, home / "runs" / name) for name in names(home)]
            table.commit()
    except sqlite3.DatabaseError:
        found = [_summary(home / "runs" / name) for name in names(home)]
    now = time.time()
    return sorted(({**body, "age_s": max(0.0, now - body["updated"])} for body in found), key=lambda body: -body["updated"])


def _open(home: Path) -> sqlite3.Connection:
    path = home / "index.sqlite"
    for tries in range(2):
        table = sqlite3.connect(path, timeout=5)
        try:
            table.execute("CREATE TABLE IF NOT EXISTS runs (name TEXT PRIMARY KEY, version TEXT, summary TEXT)")
            return table
        except sqlite3.DatabaseError as error:
            table.close()
            if tries or isinstance(error, sqlite3.OperationalError):
                raise
            path.unlink(missing_ok=True)  # not a database: make it again
    raise sqlite3.DatabaseError(path)


def _cached(table: sqlite3.Connection, folder: Path) -> dict[str, Any]:
    version = _version(folder)
    row = table.execute("SELECT version, summary FROM runs WHERE name = ?", (folder.name,)).fetchone()
    if row and row[0] == version:
        return json.loads(row[1])
    body = _summary(folder)
    table.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", (folder.name, version, json.dumps(body)))
    return body


def _summary(folder: Path) -> dict[str, Any]:
    """The summary of a run; one damaged file does not hide the other runs."""
    try:
        return summary(read(folder))
    except (ValueError, OSError) as error:
        at = os.stat(folder / "run.json").st_mtime
        known = {"name": folder.name, "state": "damaged", "error": str(error), "created": at, "updated": at, "attempts": 0}
        return {**dict.fromkeys(UNKNOWN), **known}


def _version(folder: Path) -> str:
    """Changes whenever the summary could: sizes and times of the files that grow, and whether a writer lives."""
    paths = [folder / "run.json", folder / "events.jsonl", folder / "lineage.jsonl", folder / "metrics"]
    marks = [FORMAT, int(writing(folder))]
    for path in [*paths, *(path for _, path in listing(folder).tails)]:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(path)
            marks += [found.st_mtime_ns, found.st_size]
    return json.dumps(marks)
