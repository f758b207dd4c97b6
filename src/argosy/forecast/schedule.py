"""What a learning-rate path does to a curve: effective data, and what the falling rate has released so far.

With r the rate over its own peak, S(t) the integral of r over updates (the area under the path, which takes the place of tokens
in the law), and a fall of r by dr at update k, the released share is

    H(t) = sum over k <= t of dr_k (1 - (1 + (S(t) - S(k)) r_k^-gamma / T)^-beta)

after the Multi-Power Law (2503.12811) in relative rates; a falling rate releases loss over the T r^gamma updates that follow.
With slow release it is close to the annealing area of 2408.11029. (T, beta, gamma) come from a grid, and bands average over it.
"""

from typing import NamedTuple

import numpy as np

from argosy.forecast import points as P

FLOOR = 1e-3  # rates are not taken below this share of the peak where they divide


class Shape(NamedTuple):
    """How a fall of the rate is released: over about `updates`, with power `power`, slower at low rates by `slowing`."""

    updates: float
    power: float
    slowing: float


SHAPES = tuple(Shape(t, b, g) for t in (10.0, 30.0, 100.0, 300.0, 1000.0) for b in (0.3, 0.6, 1.2) for g in (0.0, 0.5, 1.0))


class Area(NamedTuple):
    """A path's knots: updates, rate over peak, area so far, and the segments over which the rate changes after its peak."""

    step: np.ndarray
    rate: np.ndarray
    area: np.ndarray
    changes: np.ndarray


def area(path: P.Rates) -> Area:
    """The area under a path at its knots."""
    rate = path.lr / path.lr.max()
    grown = np.concatenate([[0.0], np.cumsum(np.diff(path.step) * (rate[1:] + rate[:-1]) / 2)])
    peak = int(np.argmax(rate >= 0.999))
    changes = np.flatnonzero(np.abs(np.diff(rate)) > 1e-9)
    return Area(path.step, rate, grown, changes[changes >= peak])


def effective(known: Area, steps: np.ndarray) -> np.ndarray:
    """S: the area under the path up to `steps`, in updates at the peak rate; beyond the last knot the last rate goes on.

    >>> half = P.Rates(np.array([0.0, 10.0, 20.0]), np.array([2.0, 2.0, 0.0]))
    >>> effective(area(half), np.array([5.0, 10.0, 20.0])).tolist()
    [5.0, 10.0, 15.0]
    """
    i = np.clip(np.searchsorted(known.step, steps, side="right") - 1, 0, len(known.step) - 2)
    width = known.step[i + 1] - known.step[i]
    past = steps - known.step[i]
    inside = np.minimum(past, width)
    slope = (known.rate[i + 1] - known.rate[i]) / width
    return known.area[i] + known.rate[i] * inside + slope * inside**2 / 2 + known.rate[i + 1] * (past - inside)


def released(known: Area, steps: np.ndarray, shape: Shape) -> np.ndarray:
    """H at `steps`: 0 at the peak rate, towards 1 after a fall to zero; a rising rate takes back.

    >>> drop = P.Rates(np.array([0.0, 10.0, 11.0, 10000.0]), np.array([1.0, 1.0, 0.5, 0.5]))
    >>> np.round(released(area(drop), np.array([10.0, 30.0, 10000.0]), Shape(10.0, 1.2, 0.0)), 2).tolist()
    [0.0, 0.28, 0.5]
    """
    k = known.changes
    if not k.size:
        return np.zeros(len(steps))
    fall = known.rate[k] - known.rate[k + 1]
    level = np.maximum((known.rate[k] + known.rate[k + 1]) / 2, FLOOR)
    passed = np.clip((steps[:, None] - known.step[k]) / (known.step[k + 1] - known.step[k]), 0, 1)
    s = effective(known, steps)[:, None]
    middle = np.where(passed < 1, (known.area[k] + s) / 2, (known.area[k] + known.area[k + 1]) / 2)
    since = np.maximum(s - middle, 0) * level**-shape.slowing / shape.updates
    return (fall * passed * (1 - (1 + since) ** -shape.power)).sum(1)


def features(
    table: P.Table, paths: dict[str, P.Rates], tokens: np.ndarray, shapes: tuple[Shape, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Effective tokens of each row, [N], and the released share for each shape, [J, N].

    Args:
        table: rows whose runs all have a path.
        paths: the learning rate of each run.
        tokens: of each row; updates where the table has no tokens.
        shapes: how falls are released.
    """
    share, out = np.zeros(len(table)), np.zeros((len(shapes), len(table)))
    runs = np.array(table.run)
    for run in dict.fromkeys(table.run):
        own = np.flatnonzero(runs == run)
        known = area(paths[run])
        share[own] = effective(known, table.step[own]) / table.step[own]
        for j, shape in enumerate(shapes):
            out[j, own] = released(known, table.step[own], shape)
    return share * tokens, out
