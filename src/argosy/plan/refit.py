"""A learning-rate rule refitted from sweeps: the best rate of each cell with its error, and the rule through the cells.

A cell is one width, horizon and batch; its runs differ in learning rate and seed. The rule is that of `argosy.plan.scaling`,
`adam_lr = c T^-a d^-b sqrt(B)`.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from argosy.plan import scaling

LEVEL = 0.90
APART = 0.15  # of the spread of log T or log d that has to be left once the other is taken out, for both to be told apart


class Trial(NamedTuple):
    """One finished run of a cell: peak learning rate of the Adam group, seed, final loss."""

    adam_lr: float
    seed: int
    loss: float


class Cell(NamedTuple):
    """The runs of one width, horizon (tokens) and batch (tokens per step)."""

    width: int
    tokens: int
    tokens_per_step: int
    trials: tuple[Trial, ...]


class Optimum(NamedTuple):
    """The best log learning rate of a cell: by a parabola of log loss, its curvature, and its residuals.

    `reason` says why there is none; `rest` is the sum of squared residuals, with `freedom` degrees of freedom.
    """

    cell: Cell
    log_lr: float
    curvature: float
    rest: float
    freedom: int
    unit: float  # variance of log_lr for residuals of variance 1
    reason: str


class Refit(NamedTuple):
    """A rule through cells: its values by name (`log_c`, `tokens_power`, `width_power`), and 90% intervals of the free ones.

    `fixed` are the exponents that the cells do not tell and that are those of the rule in use; `r2` is None where cells and
    free values are equally many.
    """

    fit: scaling.Fit
    intervals: dict[str, tuple[float, float]]
    fixed: tuple[str, ...]
    r2: float | None
    optima: tuple[Optimum, ...]
    errors: tuple[float, ...]  # standard error of each used optimum, log learning rate
    predicted: tuple[float, ...]


def optimum(cell: Cell) -> Optimum:
    """The vertex of the parabola of log loss against log learning rate, an offset for each seed.

    There is none where the best of the rates is the lowest or the highest that was tried, where fewer than three rates were,
    or where the parabola has no minimum between them.
    """
    rates = sorted({t.adam_lr for t in cell.trials})

    def none(reason: str) -> Optimum:
        return Optimum(cell, math.nan, math.nan, 0.0, 0, math.nan, reason)

    if len(rates) < 3:
        return none(f"{len(rates)} learning rates; a parabola needs three")
    whole = [seed for seed in {t.seed for t in cell.trials} if {t.adam_lr for t in cell.trials if t.seed == seed} == {*rates}]
    trials = [t for t in cell.trials if t.seed in whole]
    if not trials:
        return none("no seed was trained at all of its learning rates")
    means = [np.mean([t.loss for t in trials if t.adam_lr == rate]) for rate in rates]
    best = int(np.argmin(means))
    if best in (0, len(rates) - 1):
        side = "lowest" if best == 0 else "highest"
        return none(f"its best learning rate is the {side} that was tried, {rates[best]:.3g}: sweep beyond it")
    middle = float(np.mean(np.log(rates)))
    x = np.array([math.log(t.adam_lr) - middle for t in trials])
    y = np.log([t.loss for t in trials])
    offsets = np.array([[t.seed == seed for seed in whole] for t in trials], float)
    design = np.column_stack([x**2, x, offsets])
    beta, *_ = np.linalg.lstsq(design, y, rcond=None)
    bend, slope = float(beta[0]), float(beta[1])
    vertex = -slope / (2 * bend) if bend > 0 else math.nan
    if not math.log(rates[0]) - middle < vertex < math.log(rates[-1]) - middle:
        return none("the parabola through its losses has no minimum between the learning rates that were tried")
    residuals = y - design @ beta
    gradient = np.zeros(design.shape[1])
    gradient[:2] = slope / (2 * bend**2), -1 / (2 * bend)
    unit = float(gradient @ np.linalg.inv(design.T @ design) @ gradient)
    return Optimum(cell, vertex + middle, 2 * bend, float(residuals @ residuals), len(y) - design.shape[1], unit, "")


def refit(cells: Sequence[Cell], rule: scaling.Fit, source: str, seq_len: int, experts: tuple[int, int] | None) -> Refit:
    """The rule through the optima of cells, by least squares weighted with their errors.

    What the cells do not tell stays as in `rule`. All cells share one variance of log loss about their parabolas, so that a
    cell with few runs is no more certain than it can be. Exponents are free where the cells tell them: tokens and width if
    both vary and not together, else the one that varies, else none. Intervals are Student's, 90%, of the cells' errors and
    their scatter about the rule.

    Args:
        cells: at least one with an optimum inside what was tried.
        rule: the rule in use: its exponents where the cells tell none, its beta1.
        source: what the new rule says of itself.
        seq_len: tokens in a sequence of the runs.
        experts: experts and experts per token of the runs.

    Raises:
        ValueError: when no cell has an optimum, or no cell has residuals to take an error from.
    """
    optima = [optimum(cell) for cell in cells]
    used = [o for o in optima if not o.reason]
    if not used:
        raise ValueError("no cell has an optimum: " + "; ".join(f"{label(o.cell)}: {o.reason}" for o in optima))
    freedom = sum(o.freedom for o in used)
    if not freedom:
        raise ValueError(
            "three learning rates and one seed in every cell leave no residuals to take an error from; sweep a"
            " fourth rate, or --seeds 2"
        )
    variance = sum(o.rest for o in used) / freedom
    errors = np.array([math.sqrt(variance * o.unit) for o in used])
    x = {"tokens_power": _logs(o.cell.tokens for o in used), "width_power": _logs(o.cell.width for o in used)}
    free = told_apart(x, len(used))
    fixed = tuple(name for name in x if name not in free)
    y = np.array([o.log_lr - 0.5 * math.log(o.cell.tokens_per_step) for o in used])
    y = y + sum(getattr(rule, name) * x[name] for name in fixed)
    design = np.column_stack([np.ones(len(used)), *(-x[name] for name in free)])
    # errors of exactly 0 come from noiseless tables alone
    weight = 1 / np.maximum(errors, 1e-9)
    values, *_ = np.linalg.lstsq(design * weight[:, None], y * weight, rcond=None)
    rest = (y - design @ values) * weight
    left = len(used) - len(values)
    scale, told_by = _scale(float(rest @ rest), left, freedom)
    covariance = np.linalg.pinv((design * weight[:, None]).T @ (design * weight[:, None])) * scale
    t = float(stats.t.ppf((1 + LEVEL) / 2, told_by))
    found = dict(zip(("log_c", *free), values.tolist(), strict=True))
    half = dict(zip(found, t * np.sqrt(np.diag(covariance)), strict=True))
    spread = float(np.sum(((y - np.average(y, weights=weight**2)) * weight) ** 2))
    power = {name: found.get(name, getattr(rule, name)) for name in x}
    fit = replace(
        rule,
        source=source,
        coefficient=math.exp(found["log_c"]),
        tokens_power=power["tokens_power"],
        width_power=power["width_power"],
        seq_len=seq_len,
        experts=experts,
        widths=_range(o.cell.width for o in used),
        tokens=_range(o.cell.tokens for o in used),
        tokens_per_step=_range(o.cell.tokens_per_step for o in used),
    )
    lines = design @ values - sum(getattr(rule, name) * x[name] for name in fixed)
    return Refit(
        fit=fit,
        intervals={name: (found[name] - half[name], found[name] + half[name]) for name in found},
        fixed=fixed,
        r2=1 - float(rest @ rest) / spread if left and spread > 0 and free else None,
        optima=tuple(optima),
        errors=tuple(errors.tolist()),
        predicted=tuple((lines + 0.5 * _logs(o.cell.tokens_per_step for o in used)).tolist()),
    )


def _scale(chi2: float, left: int, freedom: int) -> tuple[float, int]:
    """By how much the cells' variances are off, and the degrees of freedom that say so.

    From the cells and their scatter about the rule together; from the scatter alone where an F test at 10% finds that the rule
    misses the cells by more than their errors.
    """
    if left and chi2 / left > stats.f.ppf(LEVEL, left, freedom):
        return chi2 / left, left
    return (freedom + chi2) / (freedom + left), freedom + left


def told_apart(x: dict[str, np.ndarray], cells: int) -> tuple[str, ...]:
    """Which exponents cells tell: those whose variable varies, and not in step with the other, as far as cells suffice."""
    spread = {name: float(np.std(values)) for name, values in x.items()}
    varying = [name for name, s in spread.items() if s > 1e-6]
    if len(varying) == 2 and cells >= 3:
        correlation = float(np.corrcoef(x[varying[0]], x[varying[1]])[0, 1])
        if math.sqrt(max(0.0, 1 - correlation**2)) >= APART:
            return tuple(varying)
    if len(varying) == 2 and cells >= 2:  # in step: one of them holds what both do, the horizon, which reaches furthest
        return ("tokens_power",)
    return tuple(varying) if cells >= 2 else ()


def label(cell: Cell) -> str:
    return f"width {cell.width:,}, {cell.tokens:,} tokens, {cell.tokens_per_step:,} a step"


def lines(fit: scaling.Fit, name: str) -> str:
    """A rule as an entry of `argosy.plan.scaling.FITS`, in Python, to paste there."""
    body = ""
    for key, value in _rounded(fit).items():
        parts = textwrap.wrap(value, 76, drop_whitespace=False) if isinstance(value, str) else []
        text = "(\n" + "".join(f"            {part!r}\n" for part in parts) + "        )" if len(parts) > 1 else repr(value)
        body += f"        {key}={text},\n"
    return f'    "{name}": Fit(\n{body}    ),\n'


def _rounded(fit: scaling.Fit) -> dict[str, Any]:
    return {
        key: float(f"{value:.5g}") if isinstance(value, float) and key != "beta1" else value for key, value in vars(fit).items()
    }


def _logs(values: Any) -> np.ndarray:
    return np.log(np.array([*values], float))


def _range(values: Any) -> tuple[int, int]:
    found = [*values]
    return min(found), max(found)
