"""Learning rates of an update: a warm-up and a linear decay, functions of the step alone."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from argosy import spec
from argosy.plan import scaling


class LearningRates(NamedTuple):
    """`muonh` is the relative step of matrices and of the readout, `adam` the learning rate of all the rest.

    Under `optim.rule=adamw` both are `adamw_lr` scheduled; under `muon` the readout belongs to the rest.
    """

    muonh: Any
    adam: Any


def fraction(run: spec.Run, step: Any) -> Any:
    """The share of its peak that a learning rate has at a zero-based update.

    With w warm-up updates of N: t / w for t < w, then 1 - (1 - final) (t - w) / (N - w), computed in the form
    final + (1 - final) (N - t) / (N - w), which loses no digits. Update 0 has 0 if there is a warm-up, and
    `final_frac` is reached at count N, one past the last update, and kept from there. Source: reference_run 3.6.

    A traced or device integer gives float32 within three units in the last place; a Python or numpy integer, or an
    array of them, gives float64.

    >>> from argosy.runs import pocket
    >>> [round(fraction(pocket.run(), t), 4) for t in (0, 5, 10, 1023)]
    [0.0, 0.5, 1.0, 0.0509]
    """
    total, warmup = spec.steps(run), scaling.rates(run).warmup_steps
    final = run.optim.final_frac
    if isinstance(step, jax.Array):
        rising = step.astype(jnp.float32) / max(warmup, 1)
        left = jnp.maximum(total - step, 0).astype(jnp.float32)
        return jnp.where(step < warmup, rising, final + (1 - final) * (left / max(total - warmup, 1)))
    left = np.maximum(total - np.asarray(step), 0)
    shares = np.where(step < warmup, step / max(warmup, 1), final + (1 - final) * (left / max(total - warmup, 1)))
    return shares if shares.ndim else float(shares)


def learning_rates(run: spec.Run, step: Any) -> LearningRates:
    """Both groups' learning rates at a zero-based update, in the number type of `fraction`."""
    share, rates = fraction(run, step), scaling.rates(run)
    matrices, rest = rates.muonh_lr, rates.adam_lr
    if run.optim.rule != "hyperball":
        rest = run.optim.adamw_lr
    if run.optim.rule == "adamw":
        matrices = rest
    return LearningRates(matrices * share, rest * share)
