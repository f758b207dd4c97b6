"""Task accuracy from loss: a sigmoid between chance and certainty, fitted to rows that have both (2412.04403, its second step).

    accuracy = low + (1 - low) / (1 + exp(slope (loss - middle)))

The target's loss comes from its own forecast, so that the band holds the loss's band, the sigmoid's and the noise of a task.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from argosy.forecast import joint, least
from argosy.forecast import points as P

NOISE_LEAST = 0.003
CLOSE = 0.8  # share of an accuracy's rows that must have a loss beside them


class Sigmoid(NamedTuple):
    """Parameters [R, 3] of the draws, the best first: logit of low, log slope, middle; standardised by centre and spread."""

    theta: np.ndarray
    centre: np.ndarray
    spread: np.ndarray
    noise: float
    loss: str


def curve(found: Sigmoid, theta: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Accuracy at losses [R, N] under each parameter vector."""
    phi = found.centre + found.spread * theta
    low = 1 / (1 + np.exp(-phi[:, :1]))
    return low + (1 - low) / (1 + np.exp(np.clip(np.exp(phi[:, 1:2]) * (loss - phi[:, 2:3]), -50, 50)))


def pairs(points: P.Table, metric: str, loss: str) -> tuple[np.ndarray, np.ndarray]:
    """Accuracies and the losses measured at the same place."""
    at = {
        (r, str(s), str(d)): v
        for r, m, s, d, v in zip(points.run, points.metric, points.step, points.tokens, points.value, strict=True)
        if m == loss
    }
    found = [
        (v, at[key])
        for r, m, s, d, v in zip(points.run, points.metric, points.step, points.tokens, points.value, strict=True)
        if m == metric and (key := (r, str(s), str(d))) in at
    ]
    return np.array([f[0] for f in found]), np.array([f[1] for f in found])


def fit(points: P.Table, metric: str, seed: int = 0, draws: int = joint.DRAWS) -> Sigmoid:
    """The sigmoid over the loss that explains the accuracy best.

    Raises:
        ValueError: where no loss of POINTS stands beside the accuracy.
    """
    count = sum(m == metric for m in points.metric)
    best: tuple[float, Sigmoid] | None = None
    for loss in dict.fromkeys(m for m in points.metric if P.kind(m) == "loss"):
        y, x = pairs(points, metric, loss)
        if len(y) < max(4, CLOSE * count):
            continue
        floor = float(np.clip(y.min() * 0.95, 0.02, 0.9))
        centre = np.array([np.log(floor / (1 - floor)), np.log(2 / max(x.std(), 1e-3) / 2), float(x.min())])
        sigmoid = Sigmoid(np.zeros((1, 3)), centre, np.array([0.7, 1.0, max(2 * x.std(), 1e-3)]), 0.02, loss)
        rng = np.random.default_rng(seed)
        start = np.concatenate([np.zeros((1, 3)), rng.normal(size=(7, 3))])
        for _ in range(3):
            noise = sigmoid.noise
            model = lambda t, r: curve(sigmoid, t, x[None]) / noise  # noqa: E731, B023
            theta, cost = least.solve(
                model, y[None] / noise, np.ones((1, len(y))), np.zeros((1, 3)), start, np.zeros((0, len(y)))
            )
            start = theta
            top = theta[cost.argmin()][None]
            rest = y - curve(sigmoid, top, x[None])[0]
            sigmoid = sigmoid._replace(noise=max(float(np.sqrt((rest**2).sum() / max(1, len(y) - 2))), NOISE_LEAST))
        noise = sigmoid.noise
        value = (y + noise * rng.normal(size=(draws, len(y)))) / noise
        model = lambda t, r: curve(sigmoid, t, x[None]) / noise  # noqa: E731, B023
        drawn, _ = least.solve(
            model,
            value,
            np.ones((1, len(y))),
            rng.normal(size=(draws, 3)),
            np.repeat(top, draws, 0),
            np.zeros((0, len(y))),
            iterations=30,
        )
        if best is None or sigmoid.noise < best[0]:
            best = sigmoid.noise, sigmoid._replace(theta=np.concatenate([top, drawn]))
    if best is None:
        raise ValueError(
            f"{metric}: an accuracy is forecast from a loss, and POINTS have no loss at the same runs and steps; add the"
            " evaluation loss of the same checkpoints"
        )
    return best[1]


def drawn(sigmoid: Sigmoid, points: P.Table, target: P.Table, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy of the best fit [N] and of the draws [R, N], the run's luck among them and the noise of one evaluation not."""
    asked = replace(target, metric=(sigmoid.loss,) * len(target))
    found = joint.fit(points, asked)
    p = joint.parts(found, points, asked)
    size = min(len(p.curves), len(sigmoid.theta) - 1)
    loss = np.exp(p.curves[:size] + p.luck * rng.normal(size=(size, 1)))
    return curve(sigmoid, sigmoid.theta[:1], np.exp(p.mean)[None])[0], curve(sigmoid, sigmoid.theta[1 : size + 1], loss)


def predict(sigmoid: Sigmoid, points: P.Table, target: P.Table, seed: int = 2) -> dict[str, np.ndarray]:
    """Mean and bands of the target's rows through the forecast of its loss.

    Args:
        sigmoid: of `fit`.
        points: the rows of the sigmoid's loss.
        target: the accuracy's rows.
    """
    rng = np.random.default_rng(seed)
    mean, curves = drawn(sigmoid, points, target, rng)
    noisy = curves + sigmoid.noise * rng.normal(size=(len(curves), 1))
    bands = {name: np.clip(np.quantile(noisy, q, axis=0), 0, 1) for name, q in joint.LEVELS.items()}
    return {"mean": mean, **bands}


def covariance(sigmoid: Sigmoid, points: P.Table, target: P.Table, seed: int = 2) -> tuple[np.ndarray, float]:
    """Covariance [N, N] of the log accuracy between the target's rows, and the standard deviation of one evaluation on top."""
    mean, curves = drawn(sigmoid, points, target, np.random.default_rng(seed))
    return joint.drawn_covariance(np.log(curves)), float(sigmoid.noise / np.median(mean))


def parameters(sigmoid: Sigmoid) -> dict[str, float | str]:
    """The best sigmoid's parameters in their own units."""
    phi = sigmoid.centre + sigmoid.spread * sigmoid.theta[0]
    return {
        "low": float(1 / (1 + np.exp(-phi[0]))),
        "slope": float(np.exp(phi[1])),
        "middle": float(phi[2]),
        "loss": sigmoid.loss,
    }
