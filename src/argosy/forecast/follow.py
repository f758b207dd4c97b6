"""A registered forecast followed by what was measured: the update of the rest, and lasting shifts of level.

One metric, in y = log(value + zero). Before the run

    y(t) = m(t) + u(t) + d(t) + steps(t) + noise

m is the registered mean, u has the registered covariance (law, luck, distance), d is a slow error of the law that no registered
row knows of, a step begins at one evaluation and stays. Given its weights the noise is normal, so that everything is one
Gaussian conditioning; the weight of an evaluation falls with its distance from its neighbours, so that one bad evaluation moves
nothing, and several that agree for `LASTS` of the run do. Between registered rows mean and covariance are linear in the logarithm of
progress.

Whether there is a step is asked of the likelihood ratio of one that is worth telling, `SIZE`, up or down, against none, the largest
over where it may begin: Page's test (Biometrika 41, 1954) under the model above. `TOLD` is where `bench/verdict.py` sees nine of ten
excesses of 0.5% within 5% of the run; so low, about one undisturbed run in five is once called behind by band or step, of laws that
bend otherwise than the fit's up to half. Hence `behind` is a reason to look, and only `off` needs what is sure: `SURE`.
"""

import math
from typing import NamedTuple

import numpy as np

FREEDOM = 4.0  # of the noise's Student t, as in `joint`
# The slow error: its spread in log, and the e-folds of progress over which it bends. The likeliest for the public rungs when they are
# left out (d1536 from two, d2048 from three): 0.22%, 0.94 e-folds. Their 36 rows say little: none is 1.3 units of log likelihood
# worse, 0.4% is 0.6 worse. A wide forecast has more, a sharp one never more than its own spread.
DRIFT, DRIFT_LENGTH, DRIFT_SHARE = 0.0023, 1.0, 0.25
NEIGHBOURS = 2  # on each side, or as many as lie within `LASTS`, against whose median an evaluation is weighed
SIZE, LOUD = 0.005, 2.5  # of a step worth telling, in log: the larger of this and so many scales of the noise
TOLD, SURE = 25.0, 1e5  # likelihood ratios of a step that is told, and of one that may be off
AFTER, LASTS = 3, 0.038  # evaluations, and share of the run, that a step must have lasted
EARLY = 2.0  # no step begins before the run is so many times as far as the first forecast row: until then it is the level
STEPS = 4  # most steps in one curve
FRESH = 0.1  # of the run for which a step to the worse is told by itself, wherever the sum of all is
REAL = 2.0  # standard deviations that the sum of all steps must be away from 0
MOST, NEWEST = 256, 64  # evaluations that are looked at; of those before the newest, evenly many
NORMAL50, NORMAL90 = 0.6744897501960817, 1.6448536269514722
SECOND = 1.8  # median size of a second difference of noise of scale 1: 1.65 if normal, 2.00 if Student t of four degrees
FIRST_GUESS = 10  # evaluations that the registered noise counts for against the curve's own


class Registered(NamedTuple):
    """One metric's registered forecast in log(value + zero); progress is the finished share of the run, rising."""

    progress: np.ndarray  # of the forecast rows [N]
    mean: np.ndarray  # [N]
    low: np.ndarray  # of the 90% band [N]
    high: np.ndarray
    knots: np.ndarray  # progress of the covariance's rows [K]
    covariance: np.ndarray  # [K, K]
    noise: float  # standard deviation of one evaluation
    zero: float = 0.0


class Step(NamedTuple):
    """A lasting shift of level: which evaluation it begins with, how much in log, its standard deviation, its likelihood ratio."""

    begins: int
    size: float
    spread: float
    odds: float
    age: float  # share of the run since it began


class Followed(NamedTuple):
    """What a curve so far says; all in log(value + zero)."""

    residual: np.ndarray  # of each evaluation from the registered mean [T]
    widths: np.ndarray  # how far beyond the 90% band, in halves of it; negative below, 0 inside [T]
    innovation: np.ndarray  # standardised errors of predicting each evaluation from those before [T]
    weight: np.ndarray  # what each evaluation counts for, 1 or less [T]
    steps: tuple[Step, ...]
    shift: float  # sum of the steps, 0 without any
    shift_spread: float
    mean: np.ndarray  # the updated forecast at the registered rows [N]
    spread: np.ndarray  # its standard deviation without one evaluation's noise [N]
    noise: float


def at(progress: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Weights [T, N] that read values at `known` progress at other places, linear in log, constant outside.

    >>> at(np.array([0.1, 0.2]), np.array([0.1, 0.4])).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    x, k = np.log(progress), np.log(known)
    upper = np.clip(np.searchsorted(k, x, "right"), 1, max(len(k) - 1, 1))
    out = np.zeros((len(x), len(k)))
    if len(k) == 1:
        return out + 1.0
    share = np.clip((x - k[upper - 1]) / (k[upper] - k[upper - 1]), 0, 1)
    rows = np.arange(len(x))
    out[rows, upper - 1], out[rows, upper] = 1 - share, share
    return out


def drift(a: np.ndarray, b: np.ndarray, spread: float) -> np.ndarray:
    """Covariance of the slow error at two lists of progress, squared exponential in log progress."""
    return spread**2 * np.exp(-(((np.log(a)[:, None] - np.log(b)) / DRIFT_LENGTH) ** 2) / 2)


def drift_spread(known: Registered) -> float:
    """The spread of the slow error, in log."""
    whole = float(np.sqrt(np.diag(known.covariance).mean()))
    return max(DRIFT_SHARE * whole, min(DRIFT, whole))


def scale_of(known: Registered, residual: np.ndarray) -> float:
    """The scale of the noise: between the registered one and what second differences of the curve say, by their number."""
    scale = known.noise / math.sqrt(FREEDOM / (FREEDOM - 2))
    count = max(len(residual) - 2, 0)
    if count < 3:
        return scale
    own = float(np.median(np.abs(np.diff(residual, 2)))) / SECOND
    return math.sqrt((FIRST_GUESS * scale**2 + count * own**2) / (FIRST_GUESS + count))


def weights(residual: np.ndarray, scale: float, neighbours: int = NEIGHBOURS) -> np.ndarray:
    """What each evaluation counts for: 1 near the median of its neighbours and itself, falling with the square of the distance."""
    padded = np.pad(residual, neighbours, constant_values=math.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * neighbours + 1)
    apart = (residual - np.nanmedian(windows, axis=1)) / scale
    return np.minimum(1.0, (FREEDOM + 1) / (FREEDOM + apart**2))


def evidence(inverse: np.ndarray, residual: np.ndarray, size: float) -> np.ndarray:
    """log likelihood ratio of a step of this size, up or down, that begins with each evaluation, against none; `inverse` of the covariance."""
    pull = np.cumsum((inverse @ residual)[::-1])[::-1]
    tail = np.cumsum(np.cumsum(inverse[::-1, ::-1], axis=0), axis=1)
    return size * np.abs(pull) - size**2 * np.diag(tail)[::-1] / 2


def thinned(count: int) -> np.ndarray:
    """Which of many evaluations are looked at: the newest, and evenly spread ones before."""
    if count <= MOST:
        return np.arange(count)
    old = np.linspace(0, count - NEWEST - 1, MOST - NEWEST).round().astype(int)
    return np.concatenate([old, np.arange(count - NEWEST, count)])


def follow(known: Registered, progress: np.ndarray, value: np.ndarray) -> Followed:
    """The registered forecast given the evaluations so far.

    Args:
        known: what was registered.
        progress: of the evaluations, rising, none before the first registered row [T]; T may be 0.
        value: what was measured, finite, in the metric's unit [T].

    Raises:
        ValueError: for progress that does not rise or lies before the first row, and for values that have no logarithm.
    """
    checked(known, progress, value)
    place = at(progress, known.progress)
    y = np.log(value + known.zero)
    residual = y - place @ known.mean
    high, low = place @ known.high - place @ known.mean, place @ known.mean - place @ known.low
    widths = np.maximum(residual - high, 0) / high - np.maximum(-residual - low, 0) / low
    scale = scale_of(known, residual)
    near = round(LASTS / float(np.median(np.diff(progress)))) if len(y) > 1 else 0
    weight = weights(residual, scale, max(NEIGHBOURS, near)) if len(y) else np.zeros(0)
    slow = drift_spread(known)

    seen = thinned(len(y))
    g, r = progress[seen], residual[seen]
    reads, reads_rows = at(g, known.knots), at(known.progress, known.knots)
    base = reads @ known.covariance @ reads.T + drift(g, g, slow) + np.diag(scale**2 / weight[seen])
    cross = reads_rows @ known.covariance @ reads.T + drift(known.progress, g, slow)
    own = np.einsum("nk,kl,nl->n", reads_rows, known.covariance, reads_rows) + slow**2
    may = (g >= EARLY * known.progress[0]) & (g <= g[-1:] - LASTS) & (np.arange(len(g)) <= len(g) - AFTER)
    begins, odds, sizes = search(base, r, max(SIZE, LOUD * scale), may, g)
    stairs = (np.arange(len(r))[:, None] >= np.array(begins, int)) * sizes  # [T, steps]
    later = (known.progress[:, None] >= g[np.array(begins, int)]) * sizes if begins else np.zeros((len(own), 0))
    inverse = np.linalg.inv(base + stairs @ stairs.T)
    cross = cross + later @ stairs.T
    mean = known.mean + cross @ inverse @ r
    spread = np.sqrt(np.maximum(own + (later**2).sum(1) - np.einsum("nt,tu,nu->n", cross, inverse, cross), 0))
    heights = sizes * (stairs.T @ inverse @ r)
    joint = np.diag(sizes**2) - np.outer(sizes, sizes) * (stairs.T @ inverse @ stairs)
    steps = tuple(
        Step(int(seen[b]), float(h), math.sqrt(max(float(v), 0)), o, float(g[-1] - g[b]))
        for b, h, v, o in zip(begins, heights, np.diag(joint), odds, strict=True)
    )
    innovation = np.full(len(y), math.nan)
    if len(r):
        innovation[seen] = np.linalg.solve(np.linalg.cholesky(base), r)
    total = math.sqrt(max(float(joint.sum()), 0)) if begins else 0.0
    return Followed(residual, widths, innovation, weight, steps, float(heights.sum()), total, mean, spread, known.noise)


def search(
    base: np.ndarray, residual: np.ndarray, size: float, may: np.ndarray, progress: np.ndarray
) -> tuple[list[int], list[float], np.ndarray]:
    """Where steps begin, in order of time, their likelihood ratios and prior spreads: the likeliest first, then one beside it, and so on."""
    begins: list[int] = []
    odds: list[float] = []
    sizes: list[float] = []
    k = base.copy()
    while len(begins) < STEPS and may.any():
        inverse = np.linalg.inv(k)
        found = np.where(may, evidence(inverse, residual, size), -np.inf)
        best = int(found.argmax())
        if found[best] < math.log(TOLD):
            break
        stair = (np.arange(len(residual)) >= best).astype(float)
        height = abs(float(stair @ inverse @ residual) / float(stair @ inverse @ stair))
        begins.append(best)
        may = may & (np.abs(progress - progress[best]) >= LASTS)
        odds.append(math.exp(min(found[best], 600.0)))
        sizes.append(max(size, height))  # a large one is believed
        k += sizes[-1] ** 2 * np.outer(stair, stair)
    order = np.argsort(begins)
    return [begins[i] for i in order], [odds[i] for i in order], np.array([sizes[i] for i in order])


def checked(known: Registered, progress: np.ndarray, value: np.ndarray) -> None:
    """Raises ValueError for a curve that cannot be followed."""
    if len(progress) != len(value):
        raise ValueError(f"{len(progress)} places and {len(value)} values; each evaluation has one of both")
    if (np.diff(progress) <= 0).any():
        raise ValueError("evaluations must be in order of progress, each place once")
    if len(progress) and progress[0] < known.progress[0] * (1 - 1e-6):
        raise ValueError(
            f"an evaluation at {progress[0]:.2%} of the run comes before the first forecast row, {known.progress[0]:.2%}; leave it out"
        )
    if not (np.isfinite(value).all() and (value + known.zero > 0).all()):
        raise ValueError("values must be finite and above 0; judge those that are not apart")


class Reading(NamedTuple):
    """A verdict on one curve: the word, which evaluation it holds since (None where it always did), why, and by what lasting shift in log."""

    word: str
    since: int | None
    why: str  # band, shift or "" where on track
    shift: float = 0.0


def read(known: Registered, found: Followed, better: int) -> Reading:
    """The verdict `ahead`, `on track`, `behind` or `off` on a curve.

    Args:
        known: what was registered.
        found: of `follow`.
        better: 1 where lower is better, -1 where higher is, 0 where neither is: then `off` to either side, and nothing else.
    """
    if not len(found.widths):
        return Reading("on track", None, "")
    beyond = found.widths if better >= 0 else -found.widths
    size, half = better * found.shift, float(np.mean((known.high - known.low) / 2))
    real = abs(found.shift) > max(REAL * found.shift_spread, found.noise / 2)
    far = np.abs(beyond) > 1 if better == 0 else beyond > 1
    readings = []
    if (since := lasting(far)) is not None:
        readings.append(Reading("off", since, "band"))
    if not better:
        return readings[0] if readings else Reading("on track", None, "")
    begins = began(found.steps) if real else None
    if begins is not None and size > half and max(s.odds for s in found.steps) > SURE:
        readings.append(Reading("off", begins, "shift", found.shift))
    if (since := lasting(beyond > 0)) is not None:
        readings.append(Reading("behind", since, "band"))
    if begins is not None and size > 0:
        readings.append(Reading("behind", begins, "shift", found.shift))
    newest = found.steps[-1] if found.steps else None
    if (
        newest and newest.age <= FRESH and better * newest.size > REAL * newest.spread
    ):  # what an earlier step the other way hides
        readings.append(Reading("behind", newest.begins, "shift", newest.size))
    if (since := lasting(beyond < 0)) is not None:
        readings.append(Reading("ahead", since, "band"))
    if begins is not None and size < 0:
        readings.append(Reading("ahead", begins, "shift", found.shift))
    return readings[0] if readings else Reading("on track", None, "")


def lasting(there: np.ndarray) -> int | None:
    """Since which evaluation something holds without a break, if it does at the last two."""
    if len(there) < 2 or not there[-2:].all():
        return None
    gaps = np.flatnonzero(~there)
    return int(gaps[-1]) + 1 if gaps.size else 0


def began(steps: tuple[Step, ...]) -> int | None:
    """With which step the present sum of all steps got its sign."""
    if not steps:
        return None
    sums = np.cumsum([s.size for s in steps])
    other = np.flatnonzero(np.sign(sums) != np.sign(sums[-1]))
    return steps[int(other[-1]) + 1 if other.size else 0].begins
