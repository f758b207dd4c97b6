"""Ladders drawn from laws, four rungs of twenty evaluations each and a hero far beyond: do the bands hold?"""

import math

import numpy as np

from argosy.forecast import joint
from argosy.forecast import points as P

FRACTIONS = np.arange(1, 21) / 20
LAWS = ("own", "envelope", "mixed", "cosine")


def loss(law: str, v: dict[str, float], n: np.ndarray, d: np.ndarray, s: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The noiseless loss: `own` is the forecaster's law; `envelope` a floor and a power of FLOPs with a shape in progress that all
    share; `mixed` has an exponent of data that depends on size; `cosine` data and release under a cosine, without a term in steps."""
    n, d = n / 3e8, d / 1e11
    if law == "own":
        r = v["A"] * n ** -v["a"] + v["B"] * d ** -v["b"] + v["G"] * (s / 1000) ** -v["c"]
        return v["E"] + r - v["K"] * r ** v["kappa"] * g ** v["bend"]
    if law == "envelope":
        shape = 1 + v["K"] * (1 - g ** v["bend"]) + v["G"] * g ** -v["c"] * 0.2
        return v["E"] + (v["A"] + v["B"]) * (n * d / g) ** -(v["a"] / 2) * shape
    if law == "mixed":
        data = v["B"] * d ** -(v["b"] * n**-0.05)
        return v["E"] + v["A"] * n ** -v["a"] + data * (1 - v["K"] * g ** v["bend"])
    half = (g + np.sin(math.pi * g) / math.pi) / 2  # area under a cosine
    r = v["A"] * n ** -v["a"] + v["B"] * (d / g * half) ** -v["b"]
    return v["E"] + r - v["K"] * r * (1 - np.cos(math.pi * g)) / 2 * 0.5


def ladder(law: str, rng: np.random.Generator, hero: np.ndarray = FRACTIONS) -> tuple[P.Table, P.Table, np.ndarray]:
    """Points of four rungs, a target at twenty fractions (or those given) and what it measures."""
    draw = lambda low, high: float(rng.uniform(low, high))  # noqa: E731
    v = {"E": draw(1.2, 1.8), "A": draw(0.5, 1.1), "a": draw(0.12, 0.32), "b": draw(0.12, 0.32), "B": draw(0.3, 0.8)}
    v |= {"G": draw(0.02, 0.12), "c": draw(0.6, 1.3), "K": draw(0.08, 0.25), "kappa": draw(0.3, 0.9), "bend": draw(0.9, 1.6)}
    ratio = draw(20, 800)
    sizes = 6e7 * np.cumprod([1.0, *rng.uniform(2, 3.2, size=3), draw(5, 20)])
    rows, truth = [], []
    for k, n in enumerate(sizes):
        total_tokens = ratio * n
        steps = round(total_tokens / (4e6 * (1 + k) if k < 4 else 4.5e7)) + 4000
        offset, name = 0.001 * rng.normal(), f"rung{k}" if k < 4 else "hero"
        for g in FRACTIONS if k < 4 else hero:
            s = max(1, round(g * steps))
            here = s / steps
            value = float(loss(law, v, n, np.array(total_tokens * here), np.array(float(s)), np.array(here)))
            value *= math.exp(offset + 0.0015 * rng.standard_t(5))
            row = {"run": name, "metric": "loss", "step": s, "steps_total": steps, "tokens": total_tokens * here}
            row |= {"active_params": n, "flops": 6 * n * total_tokens * here}
            if k < 4:
                rows.append(row | {"value": value})
            else:
                truth.append((row, value))
    return P.of_rows(rows), P.of_rows([r for r, _ in truth], "TARGET"), np.array([x for _, x in truth])


def coverage(count: int, seed: int = 0) -> dict[str, tuple[float, float, float]]:
    """By law: share of the heroes' rows within the 90% band, share within the 50% band, mean half width of the 90% band."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[tuple[float, float, float]]] = {law: [] for law in LAWS}
    for k in range(count):
        law = LAWS[k % len(LAWS)]
        points, target, actual = ladder(law, rng)
        bands = joint.predict(joint.parts(joint.fit(points, target, seed=k, draws=128), points, target))
        inside = [float(((actual >= bands[f"lo{q}"]) & (actual <= bands[f"hi{q}"])).mean()) for q in (90, 50)]
        found[law].append((*inside, float(((bands["hi90"] - bands["lo90"]) / bands["mean"] / 2).mean())))
    return {law: tuple(np.mean(rows, axis=0)) for law, rows in found.items()}
