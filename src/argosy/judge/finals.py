"""What finished runs came to: one figure each, of the same held-out text for all."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from argosy import spec
from argosy.judge import ladders, points
from argosy.plan import flops
from argosy.track import layout
from argosy.track import log as logs

LEVEL = 0.90
WHOLE, PART = "all held-out text", "the registered part of the held-out text"


class Final(NamedTuple):
    """A run and the macro bits per byte of its last evaluation.

    `whole` is of all held-out text, `part` of the registered part of it; both None until the run is finished.
    `flops` are those of training to `updates`, without the readout; `tokens_per_s` is the median over updates.
    """

    name: str
    run: spec.Run
    corpus: str  # its checksum; empty if none was logged
    updates: int
    finished: bool
    whole: float | None
    part: float | None
    flops: float
    tokens_per_s: float | None


def of_run(name: str, home: Path) -> Final:
    """The final figures of a run in the store.

    Raises:
        ValueError: when there is no such run.
    """
    log = logs.read(name, home)
    run = spec.from_json(log.run["run"])
    updates, finished = ladders.updates(log), ladders.is_finished(log)

    def last(kind: str) -> float | None:
        point = log.last(f"{kind}/{run.data.corpus}/macro_bpb")
        return point[1] if finished and point and point[0] == updates else None

    speed = log.series("throughput/tokens_per_second")[1] if "throughput/tokens_per_second" in log.metrics else ()
    return Final(
        log.name,
        run,
        points.checksum(log) or "",
        updates,
        finished,
        last("eval_whole"),
        last("eval_dropless"),
        float(updates * flops.train_step(run, readout=False)),
        float(np.median(speed)) if len(speed) else None,
    )


def there(name: str, home: Path) -> bool:
    """Whether a run of this name was begun."""
    return name in layout.names(home)


def same_text(found: Sequence[Final]) -> tuple[str, list[float]]:
    """Which held-out text all these finished runs were scored on, and their macro bits per byte; never a mixture.

    Raises:
        ValueError: when a run is unfinished, or no text is common to all.
    """
    for final in found:
        if not final.finished:
            raise ValueError(
                f"run {final.name!r} has {final.updates:,} of {spec.steps(final.run):,} updates; only finished runs are"
                " compared: the command that began it goes on with it"
            )
    for text, values in ((WHOLE, [f.whole for f in found]), (PART, [f.part for f in found])):
        known = [v for v in values if v is not None]
        if len(known) == len(found):
            return text, known
    missing = [f.name for f in found if f.part is None]
    raise ValueError(f"no held-out text was scored by all of them; without a final evaluation: {', '.join(missing)}")


def unlike(a: Final, b: Final) -> list[str]:
    """Why the bits per byte of two runs say nothing about each other: corpus, sequence length, evaluation; empty if they do."""
    found = []
    for key, left, right in (
        ("data.corpus", a.run.data.corpus, b.run.data.corpus),
        ("the corpus's checksum", a.corpus[:16], b.corpus[:16]),
        ("data.seq_len", a.run.data.seq_len, b.run.data.seq_len),
        ("evals.tokens_per_set", a.run.evals.tokens_per_set, b.run.evals.tokens_per_set),
    ):
        if left != right:
            found.append(f"{key} is {left} for {a.name} and {right} for {b.name}")
    return found


def must_be_alike(found: Sequence[Final]) -> None:
    """Refuse runs whose bits per byte say nothing about each other.

    Raises:
        ValueError: naming what differs.
    """
    for other in found[1:]:
        if differs := unlike(found[0], other):
            raise ValueError(f"{found[0].name} and {other.name} cannot be compared: {'; '.join(differs)}")


class Interval(NamedTuple):
    """A mean with its two-sided interval; `low` and `high` are None where there are too few values for one."""

    mean: float
    low: float | None
    high: float | None
    n: int


def interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """The mean of independent values and Student's two-sided interval with n - 1 degrees of freedom.

    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0])[:3]]
    [2.0, 0.314, 3.686]
    """
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return Interval(mean, None, None, n)
    half = float(stats.t.ppf((1 + level) / 2, n - 1) * np.std(values, ddof=1) / np.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)
