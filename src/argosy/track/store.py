"""Writing a run: its folder, and the one pen that appends metrics, events and lineage to it.

A row is with the operating system before `Writer.record` returns, so a killed process loses nothing that it
recorded; a torn last line is left out by readers and closed off by the next writer. The files are described in
`argosy.track.layout`.

Every `open_writer` begins an attempt after the number of updates that it starts from. Rows of earlier attempts
beyond that step stay on disk and leave the default view, which is one continuous history (operations.md 2.26).
"""

import contextlib
import fcntl
import itertools
import json
import operator
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex

from argosy.track import columns
from argosy.track.layout import (
    Row,
    append,
    chunk_path,
    line,
    listing,
    open_lines,
    read_records,
    read_tail,
    signature,
    tail_path,
    write_json,
)
from argosy.track.log import RunLog, flat, read, run_json

__all__ = ["RunLog", "Writer", "create", "open_writer", "read"]

FORMAT = 1
TAIL_ROWS = 1024
MERGE = 8
LARGEST_CHUNK_TAILS = 512


def create(folder: Path, run: dict[str, Any], code: dict[str, Any], **about: Any) -> None:
    """Make the folder of a run; one that is there with the same run is left as it is.

    Args:
        folder: `<home>/runs/<name>`.
        run: the resolved run, `spec.to_json(run)`.
        code: the code version, `provenance.code()`.
        about: further records, `environment` and `plan`. The corpus is a lineage record: it may not be there yet.

    Raises:
        ValueError: when the folder holds a run with other values, naming them and the two ways out; when its run.json is damaged.
        OSError: when the disk refuses.
    """
    if there(folder, run):
        return
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    body = {"format": FORMAT, "name": folder.name, "created": time.time(), "run": run, "code": code, **about}
    write_json(folder / "run.json", body)


def there(folder: Path, run: dict[str, Any]) -> bool:
    """Whether the folder holds this run; False too where it holds another that never began.

    Raises:
        ValueError: when it holds a run with other values, naming them and the two ways out; when its run.json is damaged.
    """
    if not (folder / "run.json").is_file():
        return False
    old, asked = flat(run_json(folder)["run"]), flat(json.loads(line(run)))
    changed = [f"{k} {old.get(k)} -> {asked.get(k)}" for k in sorted(old | asked) if old.get(k) != asked.get(k)]
    if changed and any(r["kind"] == "attempt" for r in read_records(folder / "lineage.jsonl")[0]):
        raise ValueError(
            f"run {folder.name!r} exists with other values: {'; '.join(changed)}; a run keeps its values for life;"
            f" go on with the old ones, or start a new run with --as {folder.name}-2"
        )
    return not changed


def open_writer(folder: Path, at_step: SupportsIndex, **about: Any) -> "Writer":
    """The run's only writer, at the start of a new attempt that begins after `at_step` finished updates.

    `about` is kept with the attempt's lineage record, e.g. `code=...` when it differs from the run's.

    Raises:
        ValueError: when another live process writes to this run, or the folder holds no run.
        OSError: when the folder cannot be written.
    """
    if not (folder / "run.json").is_file():
        raise ValueError(f"{folder} holds no run (no run.json); store.create(folder, run, code) makes it")
    at_step = operator.index(at_step)
    if at_step < 0:
        raise ValueError(f"at_step={at_step} counts finished updates and is at least 0; nearest legal 0")
    lock = _take_lock(folder)
    try:
        (folder / "metrics").mkdir(exist_ok=True)
        attempt, tail = _settle(folder)
        return Writer(folder, attempt, at_step, tail, lock, about)
    except BaseException:
        os.close(lock)
        raise


def _take_lock(folder: Path) -> int:
    """An exclusive lock that ends with its process, however that ends; the file says whose it is."""
    handle = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.pwrite(handle, line(signature()), 0)
    except BlockingIOError:
        owner = "another process"
        with contextlib.suppress(ValueError, KeyError, TypeError):
            body = json.loads(os.pread(handle, 4096, 0))
            owner = f"process {body['pid']} on {body['host']}"
        os.close(handle)
        raise ValueError(
            f"run {folder.name!r} is being written by {owner}; a run has one writer at a time; wait for it, end it,"
            f" or start another run with --as {folder.name}-2"
        ) from None
    except OSError:
        os.close(handle)
        raise
    return handle


def _settle(folder: Path) -> tuple[int, int]:
    """Tidy what an earlier process left, note the end of an attempt that was killed; the next attempt and tail."""
    for leftover in (folder / "metrics").glob("*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    for path in listing(folder).covered:
        _remove(path)
    for number, path in listing(folder).tails:
        _finish_tail(folder, number, path)
    chunks = [(last, columns.load(path)) for _, last, path in listing(folder).chunks]
    lineage, _ = read_records(folder / "lineage.jsonl")
    newest = max([r["attempt"] for r in lineage] + [c.attempt for _, c in chunks], default=0)
    if newest and not any(r["kind"] == "ended" for r in lineage if r["attempt"] == newest):
        reached = [int(c.steps.max()) for _, c in chunks if c.attempt == newest]
        reached += [r["step"] for r in lineage if r["attempt"] == newest]
        handle = open_lines(folder / "lineage.jsonl")
        try:
            _note(handle, "ended", max(reached), newest, {"outcome": "killed"})
        finally:
            os.close(handle)
    return newest + 1, 1 + max((last for last, _ in chunks), default=-1)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _finish_tail(folder: Path, number: int, path: Path) -> None:
    """Turn a tail into a chunk, then drop it."""
    attempt, rows = read_tail(path)
    if rows:
        columns.save(chunk_path(folder, number, number), columns.from_rows(rows), attempt)
    path.unlink()


def _merge_chunks(folder: Path) -> None:
    """Join the newest eight neighbours of one size and attempt, again and again, up to the largest size."""
    while True:
        newest = listing(folder).chunks[-MERGE:]
        loaded = [columns.load(path) for *_, path in newest]
        sizes = {last - first + 1 for first, last, _ in newest}
        neighbours = all(a[1] + 1 == b[0] for a, b in itertools.pairwise(newest))
        alike = len(newest) == MERGE and len(sizes) == 1 and len({c.attempt for c in loaded}) == 1 and neighbours
        if not alike or sizes.pop() * MERGE > LARGEST_CHUNK_TAILS:
            return
        columns.save(chunk_path(folder, newest[0][0], newest[-1][1]), columns.merge(loaded), loaded[0].attempt)
        for *_, path in newest:
            _remove(path)


def note(folder: Path, kind: str, step: SupportsIndex, **fields: Any) -> None:
    """Add a record to a run's lineage from outside its writer, live or not; it belongs to the newest attempt.

    Raises:
        ValueError: when the run has not begun, or for a step below 0.
        OSError: when the disk refuses.
    """
    begun = [r["attempt"] for r in read_records(folder / "lineage.jsonl")[0] if r["kind"] == "attempt"]
    if not begun:
        raise ValueError(
            f"run {folder.name!r} has not begun, so nothing of it has changed; start it with the values that it is to have"
        )
    if operator.index(step) < 0:
        raise ValueError(f"step {step} counts finished updates; nearest legal 0")
    handle = open_lines(folder / "lineage.jsonl")
    try:
        _note(handle, kind, step, max(begun), fields)
        os.fsync(handle)
    finally:
        os.close(handle)


def _note(handle: int, kind: str, step: SupportsIndex, attempt: int, fields: dict[str, Any]) -> None:
    body = {"kind": kind, "step": operator.index(step), "attempt": attempt, "time": time.time(), "fields": fields}
    append(handle, line(body))


class Writer:
    """One attempt's pen. Made by `open_writer`; usable as a context manager; safe to call from several threads.

    Every method may raise OSError (a full disk, a folder that became read-only); what is on disk stays whole, and the
    line that did not fit is not there.
    """

    def __init__(self, folder: Path, attempt: int, at_step: int, tail: int, lock: int, about: dict[str, Any]):
        self.folder, self.attempt, self.at_step = folder, attempt, at_step
        self._reached, self._number, self._lock = at_step, tail, lock
        self._guard = threading.RLock()
        self._rows: list[Row] = []
        with contextlib.ExitStack() as undo:
            self._events = open_lines(folder / "events.jsonl")
            undo.callback(os.close, self._events)
            self._lineage = open_lines(folder / "lineage.jsonl")
            undo.callback(os.close, self._lineage)
            self._tail = self._open_tail(tail)
            undo.callback(os.close, self._tail)
            self.lineage("attempt", at_step, **signature(), **about)
            undo.pop_all()

    def _open_tail(self, number: int) -> int:
        handle = open_lines(tail_path(self.folder, number))
        try:
            append(handle, line({"attempt": self.attempt}))
        except OSError:
            os.close(handle)
            raise
        return handle

    def record(self, step: SupportsIndex, metrics: Mapping[str, SupportsFloat]) -> None:
        """Add the metrics of a step; several rows may share a step, the last value of a metric stays."""
        row: Row = (operator.index(step), time.time(), {name: float(value) for name, value in metrics.items()})
        text = json.dumps({"step": row[0], "time": row[1], "metrics": row[2]}).encode() + b"\n"
        with self._guard:
            append(self._tail, text)
            self._rows.append(row)
            self._reached = row[0]
            if len(self._rows) >= TAIL_ROWS:
                self._roll()

    def event(self, kind: str, step: SupportsIndex, **fields: Any) -> None:
        """Note that something happened at a step."""
        with self._guard:
            _note(self._events, kind, step, self.attempt, fields)

    def lineage(self, kind: str, step: SupportsIndex, **fields: Any) -> None:
        """Note where the run comes from or what was changed: `lineage("change", 58_014, what="decay of gates")`."""
        with self._guard:
            _note(self._lineage, kind, step, self.attempt, fields)
            os.fsync(self._lineage)

    def _roll(self) -> None:
        """Begin the next tail, then turn the full one into a chunk; if that fails, the full one stays a tail."""
        fresh = self._open_tail(self._number + 1)
        full, rows, number = self._tail, self._rows, self._number
        self._tail, self._rows, self._number = fresh, [], number + 1
        os.close(full)
        columns.save(chunk_path(self.folder, number, number), columns.from_rows(rows), self.attempt)
        tail_path(self.folder, number).unlink()
        _merge_chunks(self.folder)

    def close(self, outcome: str = "") -> None:
        """End the attempt and let go of the run. `outcome` is `done`, `stopped`, `failed` or nothing said."""
        with self._guard:
            if self._lock < 0:
                return
            try:
                os.fsync(self._tail)
                os.fsync(self._events)
                self.lineage("ended", self._reached, outcome=outcome)
                for number, path in listing(self.folder).tails:
                    _finish_tail(self.folder, number, path)
            finally:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._lock, 0)
                for handle in (self._tail, self._events, self._lineage, self._lock):
                    os.close(handle)
                self._lock = -1

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        outcome = "" if kind is None else "stopped" if issubclass(kind, KeyboardInterrupt) else "failed"
        with contextlib.suppress(OSError) if kind else contextlib.nullcontext():  # what went wrong first is what is told
            self.close(outcome)
