"""How much compute a change is worth at equal loss: two ladders, each a power law, and the interval from their scatter.

`L = E + A C^-alpha`, with the floor E as a stated choice: a share of the baseline's smallest loss. alpha is refitted for each
floor: the floor moves it in step, and the speed-up hardly changes. Keeping an exponent of another floor overstates it:
1.20x becomes 2.07x at a floor of 75%, where a refit gives 1.25x (a third party's analysis of marin#9126).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

FLOORS = (0.0, 0.10, 0.25, 0.50, 0.75)  # of the baseline's smallest loss
LEVEL = 0.90
FEWEST = 3  # sizes: a line through two has no scatter


Values = Sequence[float] | np.ndarray


class Law(NamedTuple):
    """log(L - floor) = log_a - alpha log C by least squares; `alpha_se`, `scatter` (in log) with n - 2 degrees of freedom."""

    alpha: float
    log_a: float
    floor: float
    alpha_se: float | None
    scatter: float | None
    n: int


class Effect(NamedTuple):
    """A speed-up with its two-sided interval; None where there is no scatter to take it from."""

    mean: float
    low: float | None
    high: float | None


def speedup(base: float, variant: float, alpha: float, floor: float = 0.0) -> float:
    """How many times its compute the baseline would need for the variant's loss: ((base - E) / (variant - E))^(1 / alpha).

    E is the floor. Source: marin#4447's gate; the figure is marin#9126's.

    Raises:
        ValueError: when a loss is not above the floor, or alpha not above 0.

    >>> round(speedup(2.56377, 2.54317, alpha=0.0400), 2)
    1.22
    """
    if not alpha > 0:
        raise ValueError(f"the exponent {alpha:g} must be above 0: more compute, less loss")
    if not min(base, variant) > floor:
        raise ValueError(f"the floor {floor:g} must be below both losses, {base:g} and {variant:g}; nearest legal 0")
    return math.exp(math.log((base - floor) / (variant - floor)) / alpha)


def law(flops: Values, losses: Values, floor: float = 0.0) -> Law:
    """The power law of a ladder above a floor that is in the losses' unit.

    Raises:
        ValueError: for fewer than two sizes, sizes of equal compute, losses not above the floor, or losses that do not fall.
    """
    x, y = np.log(flops), np.asarray(losses, float)
    if len(x) < 2 or not np.ptp(x) > 0:
        raise ValueError(f"a law needs at least two sizes with different compute, got {len(x)}")
    if not y.min() > floor:
        raise ValueError(f"the floor {floor:g} must be below the smallest loss {y.min():g}; nearest legal 0")
    y = np.log(y - floor)
    beta, rest, gram = _line(x, y)
    if not beta[1] < 0:
        raise ValueError(f"the loss does not fall with compute over these {len(x)} sizes: no law, so no speed-up")
    freedom = len(x) - 2
    scatter = math.sqrt(float(rest @ rest) / freedom) if freedom else None
    se = None if scatter is None else scatter * math.sqrt(gram[1, 1])
    return Law(-float(beta[1]), float(beta[0]), floor, se, scatter, len(x))


def between(
    base: tuple[Values, Values],
    variant: tuple[Values, Values],
    at: float,
    floor: float = 0.0,
    paired: bool = True,
    level: float = LEVEL,
) -> Effect:
    """The variant's effective speed-up over the baseline at a compute, from two refitted ladders.

    The interval is Student's, two-sided, of the logarithm of the speed-up: from the scatter of both ladders about their own
    laws, by the delta method, with n - 2 degrees of freedom. `paired` takes the same rungs of both in the same order, and
    with them what luck they share; else the ladders count as independent, with the degrees of freedom of both.
    Source: marin#8096, which asks for a tested 90% lack-of-fit interval.

    Args:
        base: FLOPs and losses of the baseline's rungs.
        variant: those of the variant's.
        at: FLOPs.
        floor: in the losses' unit.

    Raises:
        ValueError: as `law` does; when pairs do not match in number.
    """
    laws = law(*base, floor), law(*variant, floor)
    x = [np.log(side[0]) for side in (base, variant)]
    y = [np.log(np.asarray(side[1], float) - floor) for side in (base, variant)]
    lines = [_line(a, b) for a, b in zip(x, y, strict=True)]
    point = np.array([1.0, math.log(at)])
    gap, alpha = float(point @ (lines[0][0] - lines[1][0])), laws[0].alpha
    log_s = gap / alpha
    freedom = len(x[0]) - 2 if paired else len(x[0]) + len(x[1]) - 4
    if paired and len(x[0]) != len(x[1]):
        raise ValueError(f"pairs need equally many rungs, got {len(x[0])} and {len(x[1])}")
    if freedom < 1 or min(len(a) for a in x) < FEWEST:
        return Effect(math.exp(log_s), None, None)
    covariance = np.zeros((4, 4))
    for i in range(2):
        for j in range(2):
            if i == j or paired:
                shared = lines[i][1] @ lines[j][1] / (len(x[i]) - 2)
                middle = _design(x[i]).T @ _design(x[j])
                covariance[2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = shared * lines[i][2] @ middle @ lines[j][2]
    # d log_s: by the baseline's line, which also holds the exponent, and by the variant's
    gradient = np.concatenate([point / alpha, -point / alpha])
    gradient[1] += gap / alpha**2  # alpha is minus the baseline's slope
    half = float(stats.t.ppf((1 + level) / 2, freedom)) * math.sqrt(max(0.0, float(gradient @ covariance @ gradient)))
    return Effect(*(math.exp(v) for v in (log_s, log_s - half, log_s + half)))


def _line(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least squares of y on (1, x): coefficients, residuals, inverse of the normal matrix."""
    centred = x - x.mean()  # the inverse from centred sums: log C lies far from 0
    square = float(centred @ centred)
    slope = float(centred @ y) / square
    beta = np.array([y.mean() - slope * x.mean(), slope])
    inverse = np.array([[1 / len(x) + x.mean() ** 2 / square, -x.mean() / square], [-x.mean() / square, 1 / square]])
    return beta, y - _design(x) @ beta, inverse


def _design(x: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(x), x], 1)


def verdict(effect: Effect) -> tuple[str, str]:
    """`promote`, `reject` or `undecided`, and why, of a speed-up with its interval."""
    if effect.low is None or effect.high is None:
        return "undecided", "there is no interval: it takes at least three sizes, or two seeds"
    reach = f"the 90% interval {effect.low:.3f}x to {effect.high:.3f}x"
    if effect.low > 1:
        return "promote", f"{reach} lies above 1"
    if effect.high < 1:
        return "reject", f"{reach} lies below 1"
    return "undecided", f"{reach} holds 1"
