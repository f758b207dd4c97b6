"""Tables of what was measured and of what is asked: reading, checks, derived columns.

POINTS has the columns `run, metric, step, steps_total, tokens, tokens_per_step, active_params, total_params, flops, lr, value`;
TARGET is the same without `value`. Cells that a set does not have are empty. `step` counts finished updates, `flops` are
cumulative and taken as given, a duplicate is the same (run, metric, step).
"""

import csv
import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

NUMBERS = ("step", "steps_total", "tokens", "tokens_per_step", "active_params", "total_params", "flops", "lr")
TARGET_COLUMNS = ("run", "metric", *NUMBERS)
POINTS_COLUMNS = (*TARGET_COLUMNS, "value")
LEAST, MOST = 1e-30, 1e60  # of any quantity in a table
FLOPS_PER_TOKEN = 6  # per active parameter, where a table has no FLOPs or no tokens

OTHER = re.compile(
    r"grad|norm|drop_|dropped|_drop|drops|throughput|mfu|tokens_per|per_second|tok/s|learning_rate|entropy(?!_loss)|z_loss|logit_z|bias|load|lr\b",
    re.IGNORECASE,
)
LOSS = re.compile(r"loss|bpb|bits_per|nll|cross_?entropy|perplexity|ppl", re.IGNORECASE)
ACCURACY = re.compile(r"acc(uracy)?(_norm)?\b|exact_match|pass@|pass_at", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of one table, rows in the file's order; a cell that is empty is NaN."""

    run: tuple[str, ...]
    metric: tuple[str, ...]
    step: np.ndarray
    steps_total: np.ndarray
    tokens: np.ndarray
    tokens_per_step: np.ndarray
    active_params: np.ndarray
    total_params: np.ndarray
    flops: np.ndarray
    lr: np.ndarray
    value: np.ndarray

    def __len__(self) -> int:
        return len(self.run)


def kind(metric: str) -> str:
    """What a metric's name says it is: `loss`, `accuracy` or `other` (gradient norm, drops, throughput).

    >>> [kind(m) for m in ("eval_dropless/paloma/macro/loss", "grad/norm/total", "moe/drop_fraction", "eval/arc/acc", "c4_en")]
    ['loss', 'other', 'other', 'accuracy', 'loss']
    """
    name = metric.replace("dropless", "")
    if ACCURACY.search(name):
        return "accuracy"
    if re.search(r"z_loss|router", name, re.IGNORECASE) or (OTHER.search(name) and not LOSS.search(name)):
        return "other"
    return "loss"


def take(table: Table, rows: Sequence[int] | np.ndarray) -> Table:
    """Some rows of a table, in the order given."""
    index = np.asarray(rows)
    if index.dtype == bool:
        index = np.flatnonzero(index)
    run, metric = (tuple(column[i] for i in index) for column in (table.run, table.metric))
    return Table(run, metric, *(getattr(table, name)[index.astype(int)] for name in (*NUMBERS, "value")))


def of_rows(rows: Iterable[Mapping[str, object]], what: str = "POINTS") -> Table:
    """A table of rows of names and cells (strings, numbers or None); `value` may be absent from TARGET.

    Raises:
        ValueError: for a cell that is no number, naming the row.
    """
    listed = list(rows)
    columns = {name: np.full(len(listed), math.nan) for name in (*NUMBERS, "value")}
    for i, row in enumerate(listed):
        for name, column in columns.items():
            cell = row.get(name)
            if cell is None or (isinstance(cell, str) and not cell.strip()):
                continue
            try:
                column[i] = float(cell)  # type: ignore[arg-type]
            except (TypeError, ValueError):
                raise ValueError(
                    f"{what} row {i + 1} ({row.get('run')}, {row.get('metric')}): {name} is {cell!r}; it must be a number or empty"
                ) from None
            if math.isinf(column[i]) or (math.isnan(column[i]) and name != "value"):
                raise ValueError(f"{what} row {i + 1}: {name} is {cell!r}; a cell that is not known is left empty")
    run, metric = (tuple(str(row.get(name) or "").strip() for row in listed) for name in ("run", "metric"))
    return Table(run, metric, *columns.values())


def read(path: Path | str, what: str) -> Table:
    """POINTS or TARGET from a CSV file with exactly the columns above, in any order.

    Raises:
        ValueError: for columns that are missing or not known, and for cells that are no numbers.
        OSError: where the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path} is no text in UTF-8: {error}; a table is a CSV file") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    want = POINTS_COLUMNS if what == "POINTS" else TARGET_COLUMNS
    try:
        have = [name.strip() for name in reader.fieldnames or ()]
    except csv.Error as error:
        raise ValueError(f"{what} {path} line 1 is no line of a CSV file: {error}") from error
    missing = [name for name in want if name not in have]
    extra = [repr(name)[1:-1][:80] for name in have if name not in POINTS_COLUMNS]
    if twice := sorted({name for name in have if have.count(name) > 1} - {""}):
        raise ValueError(f"{what} {path}: columns that are there twice: {', '.join(twice)[:200]}; keep one of each")
    if missing or extra:
        raise ValueError(
            f"{what} {path}: "
            + "; ".join(
                part
                for part in (
                    f"columns missing: {', '.join(missing)}" if missing else "",
                    f"columns not known: {', '.join(extra)}" if extra else "",
                )
                if part
            )
            + f"; the columns are {','.join(want)}, and cells that a set does not have are left empty"
        )
    rows = []
    try:
        for row in reader:
            if None in row or any(cell is None for cell in row.values()):
                raise ValueError(f"{what} {path} line {reader.line_num} does not have {len(have)} cells")
            if any(cell.strip() for cell in row.values()):
                rows.append({name.strip(): cell for name, cell in row.items()})
    except csv.Error as error:
        raise ValueError(f"{what} {path} line {reader.line_num} is no line of a CSV file: {error}") from error
    return of_rows(rows, what)


def check(points: Table, target: Table) -> Table:
    """POINTS without repeated rows, once both tables are found to make sense.

    Raises:
        ValueError: too few rows, values that a metric cannot have, duplicates that differ, tokens that do not grow with the
            step, quantities that are not positive, steps beyond the run's total.
    """
    for what, table in (("POINTS", points), ("TARGET", target)):
        if not len(table):
            raise ValueError(f"{what} has no rows; a forecast needs at least 3 values of each metric and one row to forecast")
        for i in range(len(table)):
            if not table.run[i] or not table.metric[i]:
                raise ValueError(
                    f"{what} row {i + 1}: run and metric must have names, they are {table.run[i]!r}, {table.metric[i]!r}"
                )
        for name in NUMBERS:
            column = getattr(table, name)
            zero = (column == 0) & (name in ("lr", "step", "tokens", "flops"))
            bad = np.flatnonzero(~(zero | np.isnan(column) | ((column >= LEAST) & (column <= MOST))))
            if bad.size:
                i = int(bad[0])
                rule = (
                    "it must be positive or empty"
                    if column[i] <= 0
                    else f"a quantity is between {LEAST:g} and {MOST:g}, or empty"
                )
                raise ValueError(f"{what} row {i + 1} ({table.run[i]}): {name} is {column[i]:g}; {rule}")
        late = np.flatnonzero(table.step > table.steps_total * (1 + 1e-9))
        if late.size:
            i = int(late[0])
            raise ValueError(
                f"{what} row {i + 1} ({table.run[i]}): step {table.step[i]:g} is beyond steps_total {table.steps_total[i]:g};"
                " step counts finished updates"
            )
    values(points)
    kept = distinct(points)
    growing(points, "POINTS")
    growing(target, "TARGET")
    for metric in dict.fromkeys(target.metric):
        count = sum(points.metric[i] == metric for i in kept)
        if 0 < count < 3:
            raise ValueError(
                f"{metric}: {count} points are too few to fit; at least 3, better 3 sizes with several points each"
            )
    shared = set(points.metric) & set(target.metric)
    if not shared:
        raise ValueError(
            f"TARGET asks for {', '.join(sorted(set(target.metric))[:4])} and POINTS have {', '.join(sorted(set(points.metric))[:4])}:"
            " no metric in common. Evaluations with drops and dropless ones, bits per byte and nats are different metrics"
        )
    return take(points, kept)


def values(points: Table) -> None:
    """Raises ValueError for a value that its metric cannot have."""
    for i, (metric, value) in enumerate(zip(points.metric, points.value, strict=True)):
        where = f"POINTS row {i + 1} ({points.run[i]}, {metric}, step {points.step[i]:g})"
        if math.isnan(value):
            raise ValueError(f"{where}: the value is empty or NaN; leave the row out")
        if abs(value) > MOST:
            raise ValueError(f"{where}: {value:g} is no measured value; leave the row out")
        what = kind(metric)
        if what == "loss" and value <= 0:
            raise ValueError(f"{where}: a loss of {value:g} is not positive; leave the row out, or check the metric's sign")
        if what == "accuracy" and not 0 <= value <= 1:
            raise ValueError(f"{where}: an accuracy of {value:g} is not between 0 and 1; divide percentages by 100")
        if what == "other" and value < 0:
            raise ValueError(f"{where}: {value:g} is negative; gradient norms, drops and rates are not")


def distinct(points: Table) -> list[int]:
    """Rows without repetitions.

    Raises:
        ValueError: where two rows of one (run, metric, step) have different values.
    """
    seen: dict[tuple[object, ...], int] = {}
    for i in range(len(points)):
        step = points.step[i]
        place: tuple[object, ...] = (float(step),)
        if math.isnan(step):
            place = tuple(str(column[i]) for column in (points.tokens, points.active_params, points.flops))
        key = (points.run[i], points.metric[i], *place)
        first = seen.setdefault(key, i)
        if points.value[first] != points.value[i]:
            raise ValueError(
                f"POINTS rows {first + 1} and {i + 1} are both {points.run[i]}, {points.metric[i]}, "
                + ("without a step or another quantity that tells them apart," if math.isnan(step) else f"step {step:g}")
                + " with values"
                f" {points.value[first]:g} and {points.value[i]:g}; keep one, or give repeated runs names of their own"
            )
    return sorted(seen.values())


def growing(table: Table, what: str) -> None:
    """Raises ValueError where tokens or FLOPs of a run do not grow with its steps."""
    curves: dict[tuple[str, str], list[int]] = {}
    for i in np.flatnonzero(~np.isnan(table.step)):
        curves.setdefault((table.run[i], table.metric[i]), []).append(int(i))
    for (run, metric), rows in curves.items():
        rows.sort(key=lambda i: table.step[i])
        for name in ("tokens", "flops"):
            column = getattr(table, name)
            known = [i for i in rows if column[i] == column[i]]
            for a, b in itertools.pairwise(known):
                if table.step[b] > table.step[a] and column[b] <= column[a]:
                    raise ValueError(
                        f"{what} {run}, {metric}: {name} go from {column[a]:g} at step {table.step[a]:g} to {column[b]:g} at step"
                        f" {table.step[b]:g}; they are cumulative and must grow"
                    )


class Rates(NamedTuple):
    """A run's learning rate: the rate after `step` finished updates, linear in between, 0 at step 0."""

    step: np.ndarray
    lr: np.ndarray


def paths(*tables: Table) -> dict[str, Rates]:
    """Each run's learning-rate path from all its rows; runs with fewer than three rates have none."""
    gathered: dict[str, dict[float, float]] = {}
    for table in tables:
        for i in range(len(table)):
            if table.step[i] == table.step[i] and table.lr[i] == table.lr[i]:
                gathered.setdefault(table.run[i], {})[float(table.step[i])] = float(table.lr[i])
    found = {}
    for run, known in gathered.items():
        if len(known) >= 3 and max(known.values()) > 0:
            steps = sorted(known)
            rates = [known[s] for s in steps]
            if steps[0] > 0:
                steps, rates = [0.0, *steps], [0.0, *rates]
            found[run] = Rates(np.array(steps), np.array(rates))
    return found


def derived(table: Table) -> dict[str, np.ndarray]:
    """N, D, s, g, C, batch and T = total / active of each row, NaN where they cannot be known.

    N: active parameters, else total; D: tokens, else steps x tokens per step, else FLOPs / 6N; C: FLOPs as given, else 6ND;
    a table with FLOPs and tokens alone gets N = C / 6D.
    """
    first = lambda *columns: np.select([~np.isnan(c) for c in columns], columns, math.nan)  # noqa: E731
    with np.errstate(divide="ignore", invalid="ignore"):  # rows from before the first update
        params = first(table.active_params, table.total_params)
        tokens = first(table.tokens, table.step * table.tokens_per_step, table.flops / (FLOPS_PER_TOKEN * params))
        flops = first(table.flops, FLOPS_PER_TOKEN * params * tokens)
        params = first(params, flops / (FLOPS_PER_TOKEN * tokens))
        batch = first(table.tokens_per_step, tokens / table.step)
        fraction = first(table.step / table.steps_total)
    return {
        "N": params,
        "D": tokens,
        "s": table.step,
        "g": fraction,
        "C": flops,
        "batch": batch,
        "T": table.total_params / table.active_params,
    }
