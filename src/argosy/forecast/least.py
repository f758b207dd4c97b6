"""Many small robust least-squares problems at once: Levenberg-Marquardt over a batch.

One law, one set of rows, many starts, weightings and perturbations are one array with a leading dimension, so that bands from
hundreds of refits cost about as much as a few fits.
"""

from collections.abc import Callable

import numpy as np

FREEDOM = 4.0  # degrees of freedom of the Student-t noise: a row far out counts for little
LONGEST = 2.0  # a parameter moves at most this many prior spreads in one step

Model = Callable[[np.ndarray, np.ndarray], np.ndarray]


def rho(z: np.ndarray) -> np.ndarray:
    """The cost of a residual of z scales: z^2 near 0, logarithmic far out.

    >>> np.round(rho(np.array([0.1, 10.0])), 2).tolist()
    [0.01, 13.03]
    """
    return FREEDOM * np.log1p(z * z / FREEDOM)


def influence(z: np.ndarray) -> np.ndarray:
    """What the square of a residual counts for: 1 near 0, falling as 1 / z^2.

    >>> influence(np.array([0.0, 2.0])).tolist()
    [1.0, 0.5]
    """
    return 1 / (1 + z * z / FREEDOM)


def solve(
    model: Model,
    value: np.ndarray,
    weight: np.ndarray,
    anchor: np.ndarray,
    start: np.ndarray,
    fixed: np.ndarray,
    *,
    iterations: int = 200,
    tolerance: float = 1e-9,
) -> tuple[np.ndarray, np.ndarray]:
    """Parameters [R, P] that minimise sum of weight rho(value - model) plus |theta - anchor|^2, and the sums [R].

    Args:
        model: from parameters [r, P] and which problems they belong to [r] to standardised predictions [r, N].
        value: standardised observations, [R, N] or [1, N].
        weight: what each row counts for, [R, N] or [1, N]; zero leaves it out.
        anchor: where the prior, of unit spread, pulls each parameter to, [R, P] or [1, P].
        start: [R, P].
        fixed: the derivative of the last Q parameters, in which the model is linear and each of which has rows of its own, [Q, N];
            Q may be 0.
    """
    theta = start.copy()
    count, size = theta.shape
    damping = np.full(count, 1e-2)

    def of(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return x if len(x) == 1 else x[rows]

    def cost(t: np.ndarray, predicted: np.ndarray, rows: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            total = (of(weight, rows) * rho(of(value, rows) - predicted)).sum(1) + ((t - of(anchor, rows)) ** 2).sum(1)
        return np.where(np.isfinite(total), total, np.inf)

    live = np.arange(count)
    predicted = model(theta, live)
    best = cost(theta, predicted, live)
    curved = size - len(fixed)
    diagonal = np.arange(curved)
    for _ in range(iterations):
        t, p = theta[live], predicted[live]
        jacobian = derivative(model, t, p, live, curved)
        z = of(value, live) - p
        heavy = of(weight, live) * influence(z)
        weighted = jacobian * heavy[:, None]
        pull = t - of(anchor, live)
        normal = weighted @ np.swapaxes(jacobian, 1, 2) + np.eye(curved)
        normal[:, diagonal, diagonal] *= 1 + damping[live][:, None]
        gradient = (weighted @ z[..., None])[..., 0] - pull[:, :curved]
        # The linear parameters share no row, so that their block is diagonal and is eliminated.
        mixed = weighted @ fixed.T
        own = (heavy @ (fixed**2).T + 1) * (1 + damping[live][:, None])
        rest = (heavy * z) @ fixed.T - pull[:, curved:]
        over = mixed / own[:, None]
        left = normal - over @ np.swapaxes(mixed, 1, 2)
        step = np.linalg.solve(left, gradient[..., None] - over @ rest[..., None])
        linear = (rest - (np.swapaxes(mixed, 1, 2) @ step)[..., 0]) / own
        moved = t + np.clip(np.concatenate([step[..., 0], linear], 1), -LONGEST, LONGEST)
        p_moved = model(moved, live)
        c_moved = cost(moved, p_moved, live)
        gain = best[live] - c_moved
        good = gain > 0
        took = live[good]
        theta[took], predicted[took], best[took] = moved[good], p_moved[good], c_moved[good]
        damping[live] = np.clip(np.where(good, damping[live] / 5, damping[live] * 4), 1e-9, 1e6)
        live = live[~((good & (gain < tolerance * (1 + c_moved))) | (damping[live] >= 1e5))]
        if not live.size:
            break
    return theta, best


def derivative(model: Model, theta: np.ndarray, predicted: np.ndarray, rows: np.ndarray, curved: int) -> np.ndarray:
    """The model's Jacobian in its first `curved` parameters, [r, curved, N], by forward differences."""
    step = 1e-5
    out = np.empty((len(theta), curved, predicted.shape[1]))
    for k in range(curved):
        moved = theta.copy()
        moved[:, k] += step
        out[:, k] = (model(moved, rows) - predicted) / step
    return out
