"""Where the files of a run lie, and how their lines are written and read.

    <home>/runs/<run>/
      run.json                 the resolved run, code version, environment, plan
      metrics/chunk-A-B/       columns of finished stretches (see `argosy.track.columns`)
      metrics/tail-N.jsonl     the newest rows, one JSON object a line
      events.jsonl             what happened at which step
      lineage.jsonl            attempts, the corpus, parents and changes
      writer.lock              held by the one writer

Tail N becomes chunk N-N; chunks A-B and B+1-C become chunk A-C. Whatever a larger chunk covers is no longer looked
at, so a crash between writing the new and deleting the old does no harm.
"""

import contextlib
import json
import math
import os
import re
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from argosy import spec

Row = tuple[int, float, dict[str, float]]


def home_folder() -> Path:
    """Where runs and corpora live: `ARGOSY_HOME`, or `voyages` in the current folder."""
    return Path(os.environ.get("ARGOSY_HOME") or "voyages")


def names(home: Path) -> list[str]:
    """The names of all runs under a home, sorted."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(entry.name for entry in os.scandir(home / "runs") if (Path(entry.path) / "run.json").is_file())
    return []


def find(run: str | Path, home: Path | None = None) -> Path:
    """The folder of a run given by name (under `home`, else `home_folder()`) or by folder.

    Raises:
        ValueError: when there is no such run, naming the nearest three.
    """
    home = home or home_folder()
    known = names(home)
    if str(run) in known:
        return home / "runs" / run
    if (Path(run) / "run.json").is_file():
        return Path(run)
    near = f"nearest: {', '.join(spec.nearest(str(run), known))}" if known else "no run was started there yet"
    raise ValueError(f"no run {str(run)!r} under {home / 'runs'}; {near}")


def tail_path(folder: Path, number: int) -> Path:
    return folder / "metrics" / f"tail-{number:06d}.jsonl"


def chunk_path(folder: Path, first: int, last: int) -> Path:
    return folder / "metrics" / f"chunk-{first:06d}-{last:06d}"


class Listing(NamedTuple):
    """Chunks by (first, last) tail and tails by number, in order; and what larger chunks cover."""

    chunks: list[tuple[int, int, Path]]
    tails: list[tuple[int, Path]]
    covered: list[Path]


def listing(folder: Path) -> Listing:
    """What holds the rows of a run; other names are not looked at."""
    chunks, tails = [], []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder / "metrics"):
            if chunk_name := re.fullmatch(r"chunk-([0-9]+)-([0-9]+)", entry.name):
                chunks.append((int(chunk_name[1]), int(chunk_name[2]), Path(entry.path)))
            elif tail_name := re.fullmatch(r"tail-([0-9]+)\.jsonl", entry.name):
                tails.append((int(tail_name[1]), Path(entry.path)))
    kept: list[tuple[int, int, Path]] = []
    covered = []
    for chunk in sorted(chunks, key=lambda c: (c[0], -c[1])):
        if kept and chunk[1] <= kept[-1][1]:
            covered.append(chunk[2])
        else:
            kept.append(chunk)
    left = []
    for number, path in sorted(tails):
        if any(first <= number <= last for first, last, _ in kept):
            covered.append(path)
        else:
            left.append((number, path))
    return Listing(kept, left, covered)


def write_json(path: Path, body: Any) -> None:
    """Write a JSON file that is there whole or not at all: aside, synced, renamed. Its folder has to be there.

    Raises:
        OSError: when the disk refuses; what was there before stays.
    """
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two processes may write one file at a time
    try:
        with aside.open("wb") as file:
            file.write(json.dumps(body, indent=1, default=plain).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# ---- JSON lines --------------------------------------------------------------------------------


def line(body: Any) -> bytes:
    """One line of JSON; numpy and JAX values become numbers and lists, paths become text."""
    return json.dumps(body, default=plain).encode() + b"\n"


def plain(value: Any) -> Any:
    """What `json.dumps` asks for a value that it does not know."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def finite(body: Any) -> Any:
    """The same JSON value with null for every number that is not finite, as strict readers want it.

    >>> finite({"loss": [1.0, float("nan")]})
    {'loss': [1.0, None]}
    """
    if isinstance(body, dict):
        return {key: finite(value) for key, value in body.items()}
    if isinstance(body, list | tuple):
        return [finite(value) for value in body]
    return None if isinstance(body, float) and not math.isfinite(body) else body


def open_lines(path: Path) -> int:
    """A file handle for appending lines; a line that a killed process left unfinished is closed off."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            append(handle, b"\n")
    except OSError:
        os.close(handle)
        raise
    return handle


def append(handle: int, text: bytes) -> None:
    """Append all of a text, or nothing and raise OSError."""
    before, rest = os.fstat(handle).st_size, text
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, before)
        raise


def read_lines(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines from a byte offset on, and the offset after them; unreadable lines are left out.

    A file that is not there reads as empty.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
    except FileNotFoundError:
        return [], 0
    text = text[: text.rfind(b"\n") + 1]
    found = []
    for part in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            body = json.loads(part)
            if isinstance(body, dict):
                found.append(body)
    return found, offset + len(text)


def read_records(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The events or the lineage among the whole lines from a byte offset on, and the offset after them."""
    found, after = read_lines(path, offset)
    return [body for body in found if _has(body, kind=str, step=int, attempt=int, time=int | float, fields=dict)], after


def rows_of(bodies: list[dict[str, Any]]) -> list[Row]:
    """The metric rows among the lines of a tail."""
    return [
        (body["step"], body["time"], body["metrics"])
        for body in bodies
        if _has(body, step=int, time=int | float, metrics=dict)
        and all(isinstance(value, int | float) for value in body["metrics"].values())
    ]


def _has(body: dict[str, Any], **kinds: Any) -> bool:
    return all(isinstance(body.get(key), kind) for key, kind in kinds.items())


def read_tail(path: Path) -> tuple[int, list[Row]]:
    """The attempt that wrote a tail, and its rows.

    Raises:
        FileNotFoundError: when the tail is gone (it became a chunk).
    """
    os.stat(path)
    bodies, _ = read_lines(path)
    return next((body["attempt"] for body in bodies if _has(body, attempt=int)), 0), rows_of(bodies)


# ---- who writes --------------------------------------------------------------------------------


def signature() -> dict[str, Any]:
    """This process, so that a later one with the same number is not taken for it."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": psutil.Process().create_time()}


def writing(folder: Path) -> bool:
    """Whether a live process is the run's writer; one on another machine counts while it wrote in the last two minutes."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
        body = json.loads((folder / "writer.lock").read_bytes())
        if body["host"] != socket.gethostname():
            return any(time.time() - os.stat(path).st_mtime < 120 for _, path in listing(folder).tails)
        return abs(psutil.Process(body["pid"]).create_time() - body["started"]) < 10
    return False
