"""Column chunks: thousands of metric rows as numpy files, with a pyramid of summaries for drawing.

A chunk is a folder that appears whole or not at all (written aside, then renamed) and never changes:

- `steps.npy`    int64, the steps of every distinct step sequence, one after another
- `values.npy`   float64, the values of every metric, one after another
- `pyramid.npy`  float64 [4, P], per metric: smallest, largest, sum and number of the finite values in blocks of
  16 points, then of 256, 4,096, ...
- `index.json`   the attempt, and for each metric where its steps, values and summaries start, and their count

so that one metric of a long run is a few slices of memory-mapped files, and a million points are drawn from
some thousand blocks.
"""

import errno
import functools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

BRANCH = 16
SMALL_FILE_BYTES = 1 << 16  # below this a plain read is quicker than a memory map

Steps = Int64[np.ndarray, " points"]
Values = Float64[np.ndarray, " points"]
Blocks = Float64[np.ndarray, "4 blocks"]


class Column(NamedTuple):
    """One metric: strictly rising steps, their values, and the pyramid over them."""

    steps: Steps
    values: Values
    pyramid: Blocks


class Piece(NamedTuple):
    """The points `start:stop` of a column: what a view shows of it."""

    column: Column
    start: int
    stop: int


class Buckets(NamedTuple):
    """A series summarised for drawing: first and last step, smallest, largest, mean, and points per bucket.

    Non-finite values are counted in `points` and left out of the rest; a bucket with none finite is NaN.
    """

    first: Steps
    last: Steps
    low: Values
    high: Values
    mean: Values
    points: Steps


class Chunk(NamedTuple):
    """An opened chunk."""

    attempt: int
    where: dict[str, list[int]]
    steps: Any
    values: Any
    pyramid: Any


# ---- columns and their pyramid -----------------------------------------------------------------


def column(steps: Any, values: Any) -> Column:
    """A column from points in any order; of several values at one step the last one stays.

    >>> column([1, 3, 2, 3], [0.1, 0.3, 0.2, 0.4]).values.tolist()
    [0.1, 0.2, 0.4]
    """
    steps, values = np.asarray(steps, np.int64), np.asarray(values, np.float64)
    if np.any(steps[1:] <= steps[:-1]):
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
        last = np.append(steps[1:] != steps[:-1], True)
        steps, values = steps[last], values[last]
    return Column(steps, values, pyramid(values))


def _leaves(values: Values) -> Blocks:
    finite = np.isfinite(values)
    return np.stack(
        [
            np.where(finite, values, np.inf),
            np.where(finite, values, -np.inf),
            np.where(finite, values, 0.0),
            finite.astype(float),
        ]
    )


def _gather(blocks: Blocks, starts: Any) -> Float64[np.ndarray, "4 groups"]:
    """Blocks joined into groups that begin at `starts`."""
    return np.stack(
        [
            np.minimum.reduceat(blocks[0], starts),
            np.maximum.reduceat(blocks[1], starts),
            np.add.reduceat(blocks[2], starts),
            np.add.reduceat(blocks[3], starts),
        ]
    )


def _levels(count: int) -> list[int]:
    """Blocks in each level of the pyramid over `count` points, finest first.

    >>> _levels(5000)
    [313, 20, 2]
    """
    sizes = []
    while count > BRANCH:
        count = -(-count // BRANCH)
        sizes.append(count)
    return sizes


def pyramid(values: Values) -> Blocks:
    """All levels over the values, finest first, side by side."""
    level, levels = _leaves(values), [np.zeros((4, 0))]
    for _ in _levels(len(values)):
        level = _gather(level, np.arange(0, level.shape[1], BRANCH))
        levels.append(level)
    return np.concatenate(levels, axis=1)


# ---- drawing -----------------------------------------------------------------------------------


def _blocks(piece: Piece, power: int) -> tuple[Any, Blocks]:
    """Where the piece's blocks of 16**power points begin, and their summaries; cut blocks are counted afresh."""
    (steps, values, summary), start, stop = piece
    if power == 0:
        return np.arange(start, stop), _leaves(values[start:stop])
    size, total = BRANCH**power, len(steps)
    first, last = -(-start // size), -(-stop // size) if stop == total else stop // size
    if first >= last:
        return np.array([start]), _gather(_leaves(values[start:stop]), [0])
    offset = sum(_levels(total)[: power - 1])
    starts, parts = [np.arange(first, last) * size], [summary[:, offset + first : offset + last]]
    if start < first * size:
        starts.insert(0, np.array([start]))
        parts.insert(0, _gather(_leaves(values[start : first * size]), [0]))
    if last * size < stop:
        starts.append(np.array([last * size]))
        parts.append(_gather(_leaves(values[last * size : stop]), [0]))
    return np.concatenate(starts), np.concatenate(parts, axis=1)


def buckets(pieces: Sequence[Piece], most: int) -> Buckets:
    """At most `most` buckets over consecutive pieces; one per point when there are no more points than that.

    The pyramid level is the coarsest whose blocks still fit into a bucket, so the work grows with `most`, not with
    the number of points.

    >>> b = buckets([Piece(column(range(100), np.arange(100.0)), 0, 100)], 3)
    >>> b.last.tolist(), b.mean.tolist()
    ([47, 95, 99], [23.5, 71.5, 97.5])
    """
    pieces = [p for p in pieces if p.stop > p.start]
    points = sum(p.stop - p.start for p in pieces)
    if not pieces:
        none, empty = np.zeros(0, np.int64), np.zeros(0)
        return Buckets(none, none, empty, empty, empty, none)
    power = 0
    while BRANCH ** (power + 1) * most <= points and power < max(len(_levels(len(p.column.steps))) for p in pieces):
        power += 1
    firsts, lasts, sizes, parts = [], [], [], []
    for piece in pieces:
        fine = min(power, len(_levels(len(piece.column.steps))))
        starts, summary = _blocks(piece, fine)
        ends = np.append(starts[1:], piece.stop)
        firsts.append(piece.column.steps[starts])
        lasts.append(piece.column.steps[ends - 1])
        sizes.append(ends - starts)
        parts.append(summary)
    blocks = np.concatenate(parts, axis=1)
    group = max(1, -(-blocks.shape[1] // most))
    starts = np.arange(0, blocks.shape[1], group)
    ends = np.append(starts[1:], blocks.shape[1])
    low, high, total, finite = _gather(blocks, starts)
    some = finite > 0
    return Buckets(
        first=np.concatenate(firsts)[starts],
        last=np.concatenate(lasts)[ends - 1],
        low=np.where(some, low, np.nan),
        high=np.where(some, high, np.nan),
        mean=np.where(some, total / np.maximum(finite, 1.0), np.nan),
        points=np.add.reduceat(np.concatenate(sizes), starts),
    )


# ---- files -------------------------------------------------------------------------------------


def from_rows(rows: Sequence[tuple[int, float, Mapping[str, float]]]) -> dict[str, Column]:
    """Columns of rows (step, time, metrics); the row's time becomes the metric `time`, seconds since 1970."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, (_, _, metrics) in enumerate(rows):
        alike.setdefault(tuple(metrics), []).append(index)
    parts: dict[str, list[tuple[Any, Any, Any]]] = {}
    for names, members in alike.items():  # rows with the same metrics become a table at once
        steps = np.array([rows[i][0] for i in members], np.int64)
        table = np.array([(*rows[i][2].values(), rows[i][1]) for i in members], np.float64)
        for at, name in enumerate((*names, "time")):
            parts.setdefault(name, []).append((np.array(members), steps, table[:, at]))
    found = {}
    for name, tables in parts.items():
        order, steps, values = (np.concatenate(part) for part in zip(*tables, strict=True))
        rank = np.argsort(order)
        found[name] = column(steps[rank], values[rank])
    return found


def save(folder: Path, columns: Mapping[str, Column], attempt: int) -> None:
    """Write a chunk; it is complete under its name, or absent.

    Raises:
        OSError: when the disk refuses; nothing of the new chunk stays behind.
    """
    where: dict[str, list[int]] = {}
    shared: dict[bytes, int] = {}
    steps: list[Steps] = []
    steps_at = values_at = blocks_at = 0
    for name, (own_steps, values, summary) in columns.items():
        key = own_steps.tobytes()
        if key not in shared:
            shared[key] = steps_at
            steps.append(own_steps)
            steps_at += len(own_steps)
        where[name] = [shared[key], values_at, blocks_at, len(values)]
        values_at += len(values)
        blocks_at += summary.shape[1]
    aside = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        _write(aside / "steps.npy", lambda f: np.save(f, np.concatenate(steps)))
        _write(aside / "values.npy", lambda f: np.save(f, np.concatenate([c.values for c in columns.values()])))
        _write(aside / "pyramid.npy", lambda f: np.save(f, np.concatenate([c.pyramid for c in columns.values()], axis=1)))
        _write(aside / "index.json", lambda f: f.write(json.dumps({"attempt": attempt, "columns": where}).encode()))
        os.rename(aside, folder)
        sync_folder(folder.parent)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write(path: Path, write: Any) -> None:
    try:
        with path.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error  # numpy's word for a short write


def sync_folder(folder: Path) -> None:
    """Make renames and deletions in a folder last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(folder: Path) -> Chunk:
    """An opened chunk; chunks never change, so the last 256 stay open.

    Raises:
        FileNotFoundError: when it is gone (it was merged into a larger one).
        ValueError: when a file of it is damaged, naming it.
    """
    return _load(folder, os.stat(folder).st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _load(folder: Path, _version: int) -> Chunk:
    try:
        body = json.loads((folder / "index.json").read_bytes())
        attempt, where = body["attempt"], body["columns"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / 'index.json'} is not what was written: {error}; the chunk's other files are untouched"
        ) from error
    arrays = []
    for name in ("steps.npy", "values.npy", "pyramid.npy"):
        path = folder / name
        try:
            arrays.append(np.load(path, mmap_mode="r" if path.stat().st_size > SMALL_FILE_BYTES else None))
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not what was written: {error}; the chunk's other files are untouched") from error
    return Chunk(attempt, where, *arrays)


def pick(chunk: Chunk, name: str) -> Column:
    """One metric of a chunk, without reading the others."""
    steps_at, values_at, blocks_at, count = chunk.where[name]
    width = sum(_levels(count))
    return Column(
        np.asarray(chunk.steps[steps_at : steps_at + count]),
        np.asarray(chunk.values[values_at : values_at + count]),
        np.asarray(chunk.pyramid[:, blocks_at : blocks_at + width]),
    )


def merge(chunks: Sequence[Chunk]) -> dict[str, Column]:
    """The columns of several chunks as one, in their order."""
    names = {name: None for chunk in chunks for name in chunk.where}
    merged = {}
    for name in names:
        parts = [pick(chunk, name) for chunk in chunks if name in chunk.where]
        merged[name] = column(np.concatenate([p.steps for p in parts]), np.concatenate([p.values for p in parts]))
    return merged
