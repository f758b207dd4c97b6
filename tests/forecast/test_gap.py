"""What the law misses alike in all runs. Fails when such a miss is not carried to the target, or is invented where there is none."""

import numpy as np
import pytest

from argosy.forecast import fit
from argosy.forecast import points as P

SIZES = {"small": 4e7, "middle": 1.2e8, "large": 4e8}
HERO = 1.6e9


def curve(run, params, bump, rng, noise=0.001):
    """Rows of a power law in parameters and tokens with a bump at 60% of the run that grows with log C."""
    rows = []
    for k in range(1, 21):
        g, tokens = k / 20, 20 * params * k / 20
        loss = 1.6 + 300 * params**-0.3 + 400 * tokens**-0.3
        miss = bump * (1 + 0.3 * np.log10(params / 4e7)) * np.exp(-(((g - 0.6) / 0.25) ** 2))
        rows.append({"run": run, "metric": "loss", "step": 500 * k, "steps_total": 10_000, "tokens": tokens, "tokens_per_step": tokens / (500 * k),
                     "active_params": params, "value": loss * np.exp(miss + noise * rng.normal())})  # fmt: skip
    return rows


def forecast(bump, seed=0):
    rng = np.random.default_rng(seed)
    points = [row for name, params in SIZES.items() for row in curve(name, params, bump, rng)]
    hero = curve("hero", HERO, bump, rng, noise=0.0)
    actual = np.array([row.pop("value") for row in hero])
    body = fit.fit(P.of_rows(points), P.of_rows(hero, "TARGET"))
    bands = {name: np.array([row[name] for row in body["rows"]], float) for name in fit.BANDS}
    return bands, actual, [a["code"] for a in body["fit"]["alarms"]]


@pytest.mark.parametrize("bump", [0.05, -0.05])
def test_a_phase_that_all_rungs_pass_is_carried_to_the_target(bump):
    bands, actual, codes = forecast(bump)
    error = np.log(bands["mean"] / actual)
    assert np.abs(error).max() < 0.02  # the bump itself is 0.074 there
    assert ((bands["lo90"] <= actual) & (actual <= bands["hi90"])).mean() >= 0.8
    assert "law_misses" in codes


def test_where_the_law_holds_nothing_is_added():
    bands, actual, codes = forecast(0.0)
    assert np.abs(np.log(bands["mean"] / actual)).max() < 0.01
    assert "law_misses" not in codes
