"""What a registered forecast keeps of its law beside the bands: fails when covariance and band disagree, when rows of a run are told to
be independent, or when a forecast changes because its covariance is asked for."""

import math

import numpy as np
import pytest
from scipy import stats

from argosy.forecast import fit
from argosy.forecast import points as P

SIZES = {"a": (1e8, 8000), "b": (3e8, 10000), "c": (9e8, 12000), "d": (2.5e9, 15000)}


def rows(name: str, n: float, steps: int, count: int, rng: np.random.Generator | None) -> list[dict]:
    """One run's evaluation loss, gradient norm and drops, from formulas."""
    out = []
    offset = 0.0 if rng is None else 0.001 * rng.normal()
    for k in range(1, count + 1):
        g = k / count
        common = {"run": name, "step": round(steps * g), "steps_total": steps, "tokens": 300 * n * g, "active_params": n}
        common |= {"flops": 1800 * n * n * g}
        r = 0.8 * (n / 3e8) ** -0.2 + 0.5 * (300 * n * g / 1e11) ** -0.22 + 0.08 * (steps * g / 1000) ** -1.0
        loss = 1.5 + r - 0.15 * r**0.6 * g**1.2
        values = {
            "loss": loss,
            "grad/norm/total": 0.4 * n**-0.02 * (1 + g),
            "moe/drop_fraction": 0.0 if k % 7 == 3 else 0.01 * (1 + g),
        }
        for metric, value in values.items():
            noise = 0.0 if rng is None else math.exp(offset + (0.0015 if metric == "loss" else 0.03) * rng.normal()) - 1
            out.append(common | {"metric": metric, "value": value * (1 + noise)})
        out.append(common | {"metric": "eval/arc/acc", "value": 0.25 + 0.75 / (1 + math.exp(3 * (loss - 2.6)))})
    return out


def body(covariance: bool = True) -> dict:
    rng = np.random.default_rng(0)
    points = [row for name, size in SIZES.items() for row in rows(name, *size, 20, rng)]
    hero = [{k: v for k, v in row.items() if k != "value"} for row in rows("hero", 3e10, 60000, 60, None)]
    return fit.fit(P.of_rows(points), P.of_rows(hero, "TARGET"), covariance=covariance)


@pytest.fixture(scope="module")
def asked() -> dict:
    return body()


def test_bands_are_the_covariance_and_the_noise(asked):
    """Half the 90% band in log is 1.645 standard deviations of one evaluation, within what 256 draws leave open."""
    assert set(asked["covariance"]) == {"loss", "grad/norm/total", "moe/drop_fraction", "eval/arc/acc"}
    for metric, found in asked["covariance"].items():
        band = [asked["rows"][i] for i in found["rows"]]
        assert {r["metric"] for r in band} == {metric}
        trend, z = metric in ("grad/norm/total", "moe/drop_fraction"), found["zero"]
        low = "mean" if trend else "lo90"  # a trend's band is even in log, and its lower edge is cut at 0
        half = np.array([math.log((r["hi90"] + z) / (r[low] + z)) for r in band]) / (1 if trend else 2)
        matrix = np.array(found["matrix"])
        spread = np.sqrt(np.diag(matrix) + found["noise"] ** 2)
        np.testing.assert_allclose(stats.norm.ppf(0.95) * spread, half, rtol=0.002 if trend else 0.15, err_msg=metric)


def test_rows_reach_over_the_run_and_hang_together(asked):
    for metric, found in asked["covariance"].items():
        steps = [asked["rows"][i]["step"] for i in found["rows"]]
        forecast = [r["step"] for r in asked["rows"] if r["metric"] == metric and r["mean"] is not None]
        assert len(steps) <= 20 and steps == sorted(set(steps)) and (steps[0], steps[-1]) == (forecast[0], forecast[-1])
        matrix = np.array(found["matrix"])
        np.testing.assert_allclose(matrix, matrix.T)
        assert np.linalg.eigvalsh(matrix).min() > -1e-3 * np.diag(matrix).max()  # four digits
        spread = np.sqrt(np.diag(matrix))
        assert (matrix / np.outer(spread, spread)).min() > 0.1  # a run that lies high early lies high late
        assert found["noise"] > 0


def test_asking_changes_nothing_else(asked):
    plain = body(covariance=False)
    assert "covariance" not in plain
    assert plain == {k: v for k, v in asked.items() if k != "covariance"}


def test_two_runs_of_a_target_have_offsets_of_their_own():
    """Of two runs at one place, the trend's covariance is smaller by the offset than of one run with itself."""
    from argosy.forecast import trend

    rng = np.random.default_rng(0)
    points = P.of_rows(
        [r for name, size in SIZES.items() for r in rows(name, *size, 20, rng) if r["metric"].startswith("grad")]
    )
    hero = [r for r in rows("x", 3e10, 60000, 4, None) if r["metric"].startswith("grad")]
    found = trend.fit(points)
    _, matrix = trend.posterior(found, P.of_rows(hero + [r | {"run": "y"} for r in hero]))
    offset = math.exp(2 * float(found.spreads[4]))
    np.testing.assert_allclose(matrix[:4, :4] - matrix[:4, 4:], offset, rtol=1e-6, atol=1e-12)
