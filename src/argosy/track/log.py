"""Reading a run: its log as values for notebooks, reports and the page."""

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from argosy import spec
from argosy.track import columns
from argosy.track.layout import Row, find, listing, read_lines, read_records, read_tail, rows_of, tail_path


class Attempt(NamedTuple):
    """One process's stretch of a run: after how many updates it began, and to which step the latest view shows it."""

    number: int
    at_step: int
    shown_to: int | float


@dataclass(frozen=True)
class RunLog:
    """A run as it was when it was read.

    `run` is run.json; `events` and `lineage` are records with `kind`, `step`, `attempt`, `time` (seconds since 1970)
    and `fields`, events also with `superseded`: whether a later attempt went back behind them.
    """

    folder: Path
    run: dict[str, Any] = field(repr=False)
    events: list[dict[str, Any]] = field(repr=False)
    lineage: list[dict[str, Any]] = field(repr=False)
    attempts: list[Attempt]
    chunks: list[columns.Chunk] = field(repr=False)
    tails: list[tuple[int, list[Row]]] = field(repr=False)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics, sorted; `time` is the wall clock of each row."""
        found = {name for chunk in self.chunks for name in chunk.where}
        for _, rows in self.tails:
            found.update(name for _, _, metrics in rows for name in (*metrics, "time"))
        return sorted(found)

    def series(self, name: str, attempt: int | None = None) -> tuple[columns.Steps, columns.Values]:
        """Steps (int64, rising) and values (float64) of a metric: the continuous latest view, or one attempt's own.

        Raises:
            ValueError: when the run has no such metric, naming the nearest three.
        """
        found = self.pieces(name, attempt)
        if not found:
            self.must_have(name)
            return np.zeros(0, np.int64), np.zeros(0)
        return (
            np.concatenate([p.column.steps[p.start : p.stop] for p in found]),
            np.concatenate([p.column.values[p.start : p.stop] for p in found]),
        )

    def last(self, name: str) -> tuple[int, float] | None:
        """The newest point of a metric in the latest view, or None."""
        found = self.pieces(name)
        return (
            (int(found[-1].column.steps[found[-1].stop - 1]), float(found[-1].column.values[found[-1].stop - 1]))
            if found
            else None
        )

    def must_have(self, name: str) -> None:
        """Refuse an unknown metric in words."""
        known = self.metrics
        if name not in known:
            near = f"nearest: {', '.join(spec.nearest(name, known))}" if known else "it has recorded no metric yet"
            raise ValueError(f"run {self.name!r} has no metric {name!r}; {near}")

    def pieces(
        self, name: str, attempt: int | None = None, between: tuple[float, float] = (-math.inf, math.inf)
    ) -> list[columns.Piece]:
        """A metric's stretches in rising order of step, ready for `columns.buckets`; `between` is inclusive."""
        shown = {a.number: a.shown_to if attempt is None else math.inf for a in self.attempts if attempt in (None, a.number)}
        parts = [(c.attempt, columns.pick(c, name)) for c in self.chunks if name in c.where and c.attempt in shown]
        for number, rows in self.tails:
            if name == "time":
                points = [(step, at) for step, at, _ in rows]
            else:
                points = [(step, metrics[name]) for step, _, metrics in rows if name in metrics]
            if points and number in shown:
                parts.append((number, columns.column(*zip(*points, strict=True))))
        found = []
        for number, part in parts:
            start = int(np.searchsorted(part.steps, between[0], "left"))
            stop = int(np.searchsorted(part.steps, min(between[1], shown[number]), "right"))
            found.append(columns.Piece(part, start, stop))
        return _rising([p for p in found if p.stop > p.start])


def _rising(found: Sequence[columns.Piece]) -> list[columns.Piece]:
    """Pieces that follow one another strictly; where two hold the same step, the later piece's value stays."""
    kept: list[columns.Piece] = []
    for piece in found:
        first = piece.column.steps[piece.start]
        while kept and kept[-1].column.steps[kept[-1].stop - 1] == first:
            last = kept.pop()
            if last.stop - 1 > last.start:
                kept.append(last._replace(stop=last.stop - 1))
        kept.append(piece)
    if all(a.column.steps[a.stop - 1] < b.column.steps[b.start] for a, b in itertools.pairwise(kept)):
        return kept
    steps = np.concatenate([p.column.steps[p.start : p.stop] for p in found])
    values = np.concatenate([p.column.values[p.start : p.stop] for p in found])
    whole = columns.column(steps, values)
    return [columns.Piece(whole, 0, len(whole.steps))]


def run_json(folder: Path) -> dict[str, Any]:
    """What run.json says: at least `run`, the resolved run, and `created`, seconds since 1970.

    Raises:
        ValueError: when the file is damaged, or is not one of ours, naming it.
    """
    path = folder / "run.json"
    try:
        body = json.loads(path.read_bytes())
        if not isinstance(body, dict) or not isinstance(body.get("run"), dict):
            raise ValueError("it holds no run")
        if not isinstance(body.get("created"), int | float) or not math.isfinite(body["created"]):
            raise ValueError("it does not say when the run was created")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not what was written: {error}; the run's other files are untouched") from error
    return body


def read(run: str | Path, home: Path | None = None) -> RunLog:
    """The log of a run, by name (under `home`, else `ARGOSY_HOME`, else `voyages/`) or by folder; live or finished.

    Raises:
        ValueError: when there is no such run, naming the nearest three; or when a file of it is damaged, naming it.
    """
    folder = find(run, home)
    body = run_json(folder)
    for tries in range(100):
        found = listing(folder)
        lineage, _ = read_records(folder / "lineage.jsonl")
        try:
            tails = [read_tail(path) for _, path in found.tails]
            chunks = [columns.load(path) for *_, path in found.chunks]
            break
        except FileNotFoundError as error:  # the writer has just turned it into a larger chunk: look again
            if tries == 99:
                raise ValueError(
                    f"{error.filename} is missing from run {folder.name!r}; its other files are untouched"
                ) from error
    events, _ = read_records(folder / "events.jsonl")
    starts = [(r["attempt"], r["step"]) for r in lineage if r["kind"] == "attempt"]
    attempts = [Attempt(n, at, min((later for m, later in starts if m > n), default=math.inf)) for n, at in starts]
    shown = {a.number: a.shown_to for a in attempts}
    for record in events:
        record["superseded"] = record["step"] > shown.get(record["attempt"], math.inf)
    return RunLog(folder, body, events, lineage, attempts, chunks, tails)


class News(NamedTuple):
    """What was added to a run: and `missed`, whether rows were, so that the series must be read afresh."""

    rows: list[Row]
    events: list[dict[str, Any]]
    lineage: list[dict[str, Any]]
    position: str
    missed: bool


def follow(folder: Path, position: str = "") -> News:
    """What was added since a position, and the position now; without one, nothing and the position now.

    Rows are missed when a new tail was begun in between, every 1,024 rows or with a new attempt.

    Raises:
        ValueError: when the position is not one that this function gave.
    """
    if position and not re.fullmatch(r"(-1|[0-9]{1,12})(:[0-9]{1,12}){3}", position):
        raise ValueError(f"position {position!r} is not of the form tail:bytes:bytes:bytes; leave it out for now")
    known = [int(part) for part in position.split(":")] if position else []
    tails = listing(folder).tails
    number = tails[-1][0] if tails else -1
    missed = bool(known) and known[0] != number
    offsets = (0 if missed else known[1], *known[2:]) if known else (0, 0, 0)
    rows, at = read_lines(tail_path(folder, number), offsets[0])
    events, events_at = read_records(folder / "events.jsonl", offsets[1])
    lineage, lineage_at = read_records(folder / "lineage.jsonl", offsets[2])
    now = f"{number}:{at}:{events_at}:{lineage_at}"
    if not known:
        return News([], [], [], now, False)
    return News([] if missed else rows_of(rows), events, lineage, now, missed)


def flat(body: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested JSON by dotted key; lists stay whole.

    >>> flat({"data": {"seq_len": 256, "phases": []}})
    {'data.seq_len': 256, 'data.phases': []}
    """
    if not isinstance(body, dict) or not body:
        return {path: body}
    return {k: v for name, part in body.items() for k, v in flat(part, f"{path}.{name}" if path else str(name)).items()}
