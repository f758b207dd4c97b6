"""Hyper-parameters from the size of a run: fitted rules, where each comes from, and how far it reaches.

All rules have one form, with T the horizon in tokens, d the width and B_t the tokens of a step:
`adam_lr = c T^-a d^-b sqrt(B_t)` and `muonh_lr = 13/3 adam_lr`, each at most 0.05.
They were published per sequence (`sqrt(batch)`, for `muonh_lr`); c is the published coefficient over
`13/3 sqrt(seq_len)`. Only the standard library is imported.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from argosy import spec

LR_CAP = 0.05
MUONH_PER_ADAM = 13 / 3
EPS = 9.676e-18
BETA2_TOKENS = 131_072  # beta2 is 0.999 at this many tokens per step
BETA2_RANGE = (0.95, 0.9999)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One learning-rate rule, its source and the runs it was fitted on; None where the source does not say."""

    source: str
    coefficient: float
    tokens_power: float
    width_power: float
    beta1: float
    seq_len: int
    widths: tuple[int, int] | None
    tokens_per_step: tuple[int, int] | None
    tokens: tuple[int, int] | None
    experts: tuple[int, int] | None  # experts, experts per token


FITS: dict[str, Fit] = {
    "marin_2026_08": Fit(
        source=(
            "Marin's August refit (marin#7856, used by #8003 and #8435): R^2 0.978 over 122 runs, 30 to 600 tokens per active"
            " parameter, five learning rates each; the longest complete cell is width 1,280 at 600"
        ),
        coefficient=0.087571,
        tokens_power=0.3461,
        width_power=0.3448,
        beta1=0.90,
        seq_len=8192,
        widths=(512, 2048),
        tokens_per_step=(32 * 8192, 512 * 8192),
        tokens=(555_000_000, 158_280_000_000),
        experts=(128, 4),
    ),
    "marin_2026_05": Fit(
        source="Marin's May refit (marin#5951): R^2 0.996 over 17 cells, 10 to 240 tokens per active parameter",
        coefficient=0.06602,
        tokens_power=0.395,
        width_power=0.150,
        beta1=0.9062,
        seq_len=4096,
        widths=(512, 1280),
        tokens_per_step=(32 * 4096, 256 * 4096),
        tokens=None,
        experts=None,
    ),
    "marin_2026_04": Fit(
        source="Marin's April fit for AdamH (marin#4225): R^2 0.995 over 186 runs",
        coefficient=0.025469,
        tokens_power=0.2813,
        width_power=0.3678,
        beta1=0.9062,
        seq_len=4096,
        widths=None,
        tokens_per_step=None,
        tokens=None,
        experts=None,
    ),
}


@dataclass(frozen=True)
class Rates:
    """Peak learning rates, Adam's constants and the warm-up of a run.

    `adam_lr` multiplies Adam's update; `muonh_lr` is the relative step of MuonH and AdamH (the share of a
    weight's norm that one update moves). `eps` is Adam's and AdamH's; `warmup_steps` counts updates.
    """

    adam_lr: float
    muonh_lr: float
    beta1: float
    beta2: float
    eps: float
    warmup_steps: int


def rates(run: spec.Run) -> Rates:
    """The peaks and constants that `optim.scaling` gives for this run's width, horizon and tokens per step.

    `optim.lr_scale` multiplies both learning rates after their caps, so that a sweep over it is a sweep.
    `beta2 = 0.999^(B_t / 131,072)` within 0.95 to 0.9999 and `eps = 9.676e-18 sqrt(T / B_t)` belong to all
    rules. Warm-up is the whole updates in `optim.warmup_frac` of the run. Source: reference_run 3.5, 3.6.

    >>> from argosy.runs import pocket
    >>> rates(pocket.run()).warmup_steps
    10
    """
    horizon, per_step = run.optim.horizon_tokens, spec.tokens_per_step(run)
    adam_lr, muonh_lr = (min(LR_CAP, lr) * run.optim.lr_scale for lr in _uncapped(run))
    return Rates(
        adam_lr=adam_lr,
        muonh_lr=muonh_lr,
        beta1=FITS[run.optim.scaling].beta1,
        beta2=min(max(0.999 ** (per_step / BETA2_TOKENS), BETA2_RANGE[0]), BETA2_RANGE[1]),
        eps=EPS * math.sqrt(horizon / per_step),
        # the decimal that the recipe wrote, so that 0.07 of 100 updates is 7 and not 6
        warmup_steps=int(Fraction(str(run.optim.warmup_frac)) * spec.steps(run)),
    )


def outside(run: spec.Run) -> list[str]:
    """Where the run leaves what its rule was fitted on: one plain sentence each, empty if nowhere.

    A range that the source does not give is not judged. `optim.rule=adamw` takes its learning rate from
    `optim.adamw_lr` and leaves no range.
    """
    if run.optim.rule == "adamw":
        return []
    fit, d, moe = FITS[run.optim.scaling], run.data, run.moe
    found = [
        _beyond("model.width", run.model.width, fit.widths),
        _beyond("optim.horizon_tokens", run.optim.horizon_tokens, fit.tokens),
        _beyond("tokens per step", spec.tokens_per_step(run), fit.tokens_per_step),
    ]
    if d.seq_len != fit.seq_len:
        found.append(f"data.seq_len={d.seq_len:,}: fitted at {fit.seq_len:,} alone")
    if fit.experts and (moe.experts, moe.experts_per_token) != fit.experts:
        found.append(
            f"{moe.experts:,} experts, top-{moe.experts_per_token}: fitted at {fit.experts[0]}, top-{fit.experts[1]}, alone"
        )
    for name, lr in zip(("adam_lr", "muonh_lr"), _uncapped(run), strict=True):
        if lr > LR_CAP:
            found.append(f"{name}: the rule gives {lr:.4g} and is cut to its cap {LR_CAP}")
    return [line for line in found if line]


def _uncapped(run: spec.Run) -> tuple[float, float]:
    fit = FITS[run.optim.scaling]
    tokens, width = run.optim.horizon_tokens, run.model.width
    adam = fit.coefficient * tokens**-fit.tokens_power * width**-fit.width_power * math.sqrt(spec.tokens_per_step(run))
    return adam, MUONH_PER_ADAM * adam


def _beyond(name: str, value: int, fitted: tuple[int, int] | None) -> str:
    if fitted is None or fitted[0] <= value <= fitted[1]:
        return ""
    low, high = fitted
    ratio = f"{value / high:.3g} times the largest" if value > high else f"1/{low / value:.3g} of the smallest"
    return f"{name}={value:,} is {ratio} fitted ({low:,} to {high:,})"
