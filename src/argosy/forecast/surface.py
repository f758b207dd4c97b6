"""The law behind `joint`: one loss surface over model size, data, updates and schedule, with its priors.

    L = E + R - K (R / R0)^kappa h,    R = A (N / N0)^-a + B (D / D0)^-b + G (s / 1000)^-c

N active parameters (times (total / active)^tau where sparsity differs), D tokens (the area under the learning-rate path in tokens where the path is known), s finished updates, h
the schedule's share: released falls of the rate where the path is known (`schedule.released`), else progress^(1 + q). Each
term is there if its columns are: a set of one size has no A, a set without steps no G and no h, one with nothing but FLOPs has
R = A (C / C0)^-a. All amplitudes are positive and R falls, so that the loss falls with progress.

Parameters are standardised: theta = 0 is the prior's mean, 1 its spread. Amplitudes and exponents are logarithms.
"""

import math
from typing import NamedTuple

import numpy as np

from argosy.forecast import points as P
from argosy.forecast import schedule

# Priors, one set for every table (decisions.md says on what they were chosen). E is a share of the smallest loss seen: FLOOR at
# 1e19 FLOPs, FLOOR_RISE more with each decade, since larger models come closer to it; spread in logits.
FLOOR, FLOOR_RISE, FLOOR_SPREAD = 0.46, 0.038, 0.25
FLOOR_ONE_SIZE, FLOOR_ONE_SIZE_SPREAD = 0.75, 0.5  # where size plays no part, E holds what it costs too
# Points of one size and a target of another: nothing tells floor and size apart but that at BALANCED tokens per parameter they and
# the data's term weigh alike, as where compute is spent best. log(A / B) at the middle of the data, and E is left open.
FLOOR_UNSPLIT_SPREAD, BALANCED, SPLIT_SPREAD = 1.0, 20.0, 0.7
AMPLITUDE, AMPLITUDE_SPREAD = 0.2, 1.0  # of A and B at the middle of the data, over the middle loss
EXPONENT, EXPONENT_SPREAD = 0.25, 0.35  # of D, and of N but for the next line
# Parameters that are not active count for something: N is active^(1 - tau) total^tau, where the ratio differs by more than SPARSITY.
TOTAL, TOTAL_SPREAD, SPARSITY = 0.4, 0.2, 2.0
TILT, TILT_SPREAD = 0.0, 0.2  # log(a / b): compute-optimal N and D grow alike
COMPUTE, COMPUTE_SPREAD = 0.09, 0.35  # of C, where N and D are not known apart
EARLY, EARLY_SPREAD = 0.02, 1.0  # G over the middle loss
EARLY_POWER, EARLY_POWER_SPREAD = 0.8, 0.4
RELEASE, RELEASE_SPREAD = 0.04, 1.0  # K over the middle loss
RELEASE_TOLD = 0.08  # the same where rates are known: falls that are released in full
RELEASE_POWER, RELEASE_POWER_SPREAD = 0.6, 0.15  # kappa
BEND, BEND_SPREAD = 0.2, 0.3  # log(1 + q)
REDUCIBLE = 0.4  # R0 over the middle loss
EARLY_STEPS = 1000.0


class Setting(NamedTuple):
    """What the law needs to know about one metric's tables."""

    terms: tuple[str, ...]  # of "N", "T", "D", "C", "s", "lr", "g"
    names: tuple[str, ...]  # parameters
    centre: np.ndarray
    spread: np.ndarray
    least: float  # smallest loss of the points
    middle: float  # geometric mean of the points' losses
    shapes: tuple[schedule.Shape, ...]
    points: dict[str, np.ndarray]  # logarithms over references, and h [J, N]
    target: dict[str, np.ndarray]


def sizes(params: np.ndarray) -> int:
    """How many model sizes there are, to a thousandth."""
    return len(set(np.round(np.log(params), 3)))


def terms(cells: dict[str, np.ndarray], asked: dict[str, np.ndarray], several: bool, paths: bool) -> tuple[str, ...]:
    """The law's terms, from which columns both tables have.

    Args:
        cells, asked: derived columns of points and target.
        several: some run has rows at three fractions or more.
        paths: every run has a learning-rate path.
    """

    def there(name: str) -> bool:
        return not (np.isnan(cells[name]).any() or np.isnan(asked[name]).any())

    size = there("N") and sizes(np.concatenate([cells["N"], asked["N"]])) > 1
    found = (["N"] if size else []) + (["D"] if there("D") else [])
    ratio = np.concatenate([cells["T"], asked["T"]])
    found += ["T"] if size and there("T") and ratio.max() > SPARSITY * ratio.min() else []
    if not there("D"):
        found = ["C"] if there("C") else []
    if several and found:
        found += ["s"] if (size or "C" in found) and there("s") and there("g") else []
        found += ["lr"] if paths else ["g"] if there("g") else []
    return tuple(found)


def prior(found: tuple[str, ...], middle: float, largest: float, ratio: float | None) -> list[tuple[str, float, float]]:
    """Name, mean and spread of each parameter; `ratio` is the tokens per parameter of points that have one size, else None."""
    one_size = not {"N", "C"} & set(found)
    share = FLOOR_ONE_SIZE if one_size else FLOOR + FLOOR_RISE * math.log10(largest / 1e19) if largest > 0 else 0.55
    share = min(max(share, 0.2), 0.85)
    log = math.log
    floor_spread = FLOOR_ONE_SIZE_SPREAD if one_size else FLOOR_UNSPLIT_SPREAD if ratio else FLOOR_SPREAD
    out = [("E", log(share / (1 - share)), floor_spread)]
    for term, names, amplitude, exponent in (
        ("N", "Aa", (AMPLITUDE, AMPLITUDE_SPREAD), (EXPONENT, EXPONENT_SPREAD)),
        ("D", "Bb", (AMPLITUDE, AMPLITUDE_SPREAD), (EXPONENT, EXPONENT_SPREAD)),
        ("C", "Aa", (2 * AMPLITUDE, AMPLITUDE_SPREAD), (COMPUTE, COMPUTE_SPREAD)),
        ("s", "Gc", (EARLY, EARLY_SPREAD), (EARLY_POWER, EARLY_POWER_SPREAD)),
    ):
        if term in found:
            out += [(names[0], log(amplitude[0] * middle), amplitude[1]), (names[1], log(exponent[0]), exponent[1])]
    if "T" in found:
        out += [("tau", TOTAL, TOTAL_SPREAD)]
    if {"N", "D"} <= set(found):
        out = [("tilt", TILT, TILT_SPREAD) if name == "a" else (name, mean, spread) for name, mean, spread in out]
    if ratio:
        split = ("split", EXPONENT * log(ratio / BALANCED), SPLIT_SPREAD)
        out = [split if name == "A" else (name, mean, spread) for name, mean, spread in out]
    if {"lr", "g"} & set(found):
        release = RELEASE_TOLD if "lr" in found else RELEASE
        out += [("K", log(release * middle), RELEASE_SPREAD), ("kappa", RELEASE_POWER, RELEASE_POWER_SPREAD)]
    if "g" in found:
        out += [("q", BEND, BEND_SPREAD)]
    return out


def setting(points: P.Table, target: P.Table, paths: dict[str, P.Rates], several: bool) -> Setting:
    """The law for one metric's rows to fit and rows to forecast.

    Raises:
        ValueError: where the tables share no column that a law could use.
    """
    cells, asked = P.derived(points), P.derived(target)
    known = [name for name in "DC" if not np.isnan(cells[name]).any() and not np.isnan(asked[name]).any()]
    if not known:  # updates stand for tokens
        cells["D"], asked["D"] = cells["s"], asked["s"]
    found = terms(cells, asked, several, set(points.run) | set(target.run) <= set(paths))
    if not found:
        raise ValueError(
            f"{points.metric[0]}: POINTS and TARGET share no quantity to extrapolate in; give tokens with parameters, flops, or"
            " step with tokens_per_step in every row of both"
        )
    middle = float(np.exp(np.log(points.value).mean()))
    largest = float(np.max(cells["C"])) if not np.isnan(cells["C"]).any() else math.nan
    unsplit = {"N", "D"} <= set(found) and sizes(cells["N"]) == 1 and not np.isnan(cells["D"] * cells["C"]).any()
    ratio = math.exp(np.log(cells["D"] / cells["N"]).mean()) if unsplit else None
    listed = prior(found, middle, largest, ratio)
    shapes = schedule.SHAPES if "lr" in found else (schedule.Shape(0, 0, 0),)
    rows: list[dict[str, np.ndarray]] = [{}, {}]
    for out, table, c in zip(rows, (points, target), (cells, asked), strict=True):
        for name in ("N", "T", "C", "s", "g", "D"):
            if name in found:
                out[name] = c[name]
        if "lr" in found:
            out["D"], out["h"] = schedule.features(table, paths, c["D"], shapes)
    for name in ("N", "T", "C", "s", "g", "D"):
        if name in rows[0]:
            reference = {"s": EARLY_STEPS, "g": 1.0}.get(name) or math.exp(np.log(rows[0][name]).mean())
            for out in rows:
                out[name] = np.log(np.maximum(out[name], 1e-300) / reference)
    return Setting(
        found,
        tuple(p[0] for p in listed),
        np.array([p[1] for p in listed]),
        np.array([p[2] for p in listed]),
        float(points.value.min()),
        middle,
        shapes,
        *rows,
    )


def log_loss(s: Setting, theta: np.ndarray, shape: np.ndarray, rows: dict[str, np.ndarray]) -> np.ndarray:
    """log L of each row under each parameter vector, [R, N]; theta is [R, P], shape [R] picks from `s.shapes`."""
    phi = s.centre + s.spread * theta[:, : len(s.names)]
    column = {name: phi[:, k : k + 1] for k, name in enumerate(s.names)}
    if "tilt" in column:
        column["a"] = column["b"] + column["tilt"]
    if "split" in column:
        column["A"] = column["B"] + column["split"]
    with np.errstate(over="ignore", invalid="ignore"):
        reducible = np.zeros((len(theta), len(next(iter(rows.values())).T)))
        for term, amplitude, exponent in (("N", "A", "a"), ("C", "A", "a"), ("D", "B", "b"), ("s", "G", "c")):
            if term in s.terms:
                place = rows[term] + column["tau"] * rows["T"] if term == "N" and "T" in s.terms else rows[term]
                reducible += np.exp(column[amplitude] - np.exp(column[exponent]) * place)
        loss = s.least / (1 + np.exp(-column["E"])) + reducible
        if "K" in column:
            h = rows["h"][shape] if "lr" in s.terms else np.exp(np.exp(column["q"]) * rows["g"])
            loss = loss - np.exp(column["K"] + column["kappa"] * np.log(reducible / (REDUCIBLE * s.middle))) * h
        return np.log(np.maximum(loss, 1e-3 * s.middle))


def named(s: Setting, theta: np.ndarray) -> dict[str, float]:
    """The parameters of one vector in their own units: E in the metric's, exponents and amplitudes as in the law."""
    phi = dict(zip(s.names, (s.centre + s.spread * theta[: len(s.names)]).tolist(), strict=True))
    if "tilt" in phi:
        phi["a"] = phi["b"] + phi.pop("tilt")
    if "split" in phi:
        phi["A"] = phi["B"] + phi.pop("split")
    out = {name: value if name in ("kappa", "tau") else math.exp(value) for name, value in phi.items() if name != "E"}
    out["E"] = s.least / (1 + math.exp(-phi["E"]))
    if "q" in out:
        out["q"] -= 1
    return out
