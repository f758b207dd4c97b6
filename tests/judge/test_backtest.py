"""Bands of a ladder that does not forecast its own largest size."""

import math

import numpy as np
import pytest
import synthetic
from synthetic import HEADLINE

from argosy.judge import backtest, fits, points
from argosy.runs import pocket
from argosy.track import log as logs

pytestmark = pytest.mark.usefixtures("quick")

NATS, LOSS = "eval_dropless/prose/loss", "eval_dropless/prose/bpb"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    home, found = tmp_path_factory.mktemp("ladder"), []
    for rung in synthetic.rungs_of(pocket.run())[:4]:
        folder = synthetic.sail(home, f"hero-{rung.name}", rung.run)
        found += [r | {"lr": None} for r in points.of_run(logs.read(folder), [HEADLINE, NATS, LOSS])]
    return found


def of(rows, metric, lift=1.0):
    """One metric's rows, the largest size's values higher by a factor."""
    top = max(r["active_params"] for r in rows)
    return [r | {"value": r["value"] * (lift if r["active_params"] == top else 1)} for r in rows if r["metric"] == metric]


def test_a_law_that_holds_leaves_its_bands_nearly_as_they_are(rows):
    tested = backtest.backtest(of(rows, HEADLINE), "joint", 0)
    assert tested["left_out"] == ["hero-d96"] and abs(tested["error"]) < 0.02 and backtest.factor(tested) < 2.0


def test_a_largest_size_that_was_missed_widens_them_and_says_so(rows):
    own = of(rows, HEADLINE, lift=0.85)
    asked = points.asked(pocket.run(), "hero", [HEADLINE])
    found = fits.fit_rows(own, asked, "joint", 0, covariance=True, say=lambda _: None)
    plain = fits.fitting.fit(fits.P.of_rows(own), fits.P.of_rows(asked, "TARGET"), covariance=True)
    tested = found["fit"]["backtest"][HEADLINE]
    assert tested["error"] == pytest.approx(1 / 0.85 - 1, abs=0.03) and tested["inside"] < 0.5
    by = backtest.factor(tested)
    assert by > 3 and "top_rung_missed" in {a["code"] for a in found["fit"]["alarms"]}
    for old, new in zip(plain["rows"], found["rows"], strict=True):
        assert new["mean"] == old["mean"]
        for name in ("lo50", "hi50", "lo90", "hi90"):
            assert math.log(new[name] / new["mean"]) == pytest.approx(by * math.log(old[name] / old["mean"]), rel=1e-9)
    old, new = (np.array(body["covariance"][HEADLINE]["matrix"]) for body in (plain, found))
    assert np.allclose(new, old * by**2, rtol=1e-3)


def test_other_losses_are_widened_at_least_as_much_as_the_headline(rows):
    own = of(rows, HEADLINE, lift=0.85) + of(rows, LOSS)
    asked = points.asked(pocket.run(), "hero", [HEADLINE, LOSS])
    found = fits.fit_rows(own, asked, "joint", 0, say=lambda _: None)
    plain = fits.fitting.fit(fits.P.of_rows(of(rows, LOSS)), fits.P.of_rows(asked[20:], "TARGET"))
    by = backtest.factor(found["fit"]["backtest"][HEADLINE])
    assert backtest.factor(found["fit"]["backtest"][LOSS]) < by
    old, new = plain["rows"][-1], found["rows"][-1]
    assert math.log(new["hi90"] / new["mean"]) == pytest.approx(by * math.log(old["hi90"] / old["mean"]), rel=1e-9)
    assert "top_rung_missed" in [a["code"] for a in found["fit"]["alarms"]]


def test_it_is_asked_of_three_sizes_and_more(rows):
    small = [r for r in of(rows, HEADLINE) if r["run"] in ("hero-d32", "hero-d48")]
    assert backtest.backtest(small, "joint", 0) is None and backtest.factor(None) == 1.0


def test_nats_of_a_set_are_its_bits_times_a_constant(rows):
    """One fit for both, which is what a fit of its own would have given."""
    both = [r for r in rows if r["metric"] in (LOSS, NATS)]
    asked = points.asked(pocket.run(), "hero", [LOSS, NATS])
    found = fits.fit_rows(both, asked, "joint", 0, covariance=True, say=lambda _: None)
    alone = fits.fitting.fit(fits.P.of_rows(of(rows, NATS)), fits.P.of_rows(asked[20:], "TARGET"), covariance=True)
    by = backtest.factor(found["fit"]["backtest"][NATS])
    assert found["fit"]["parameters"][NATS]["as"] == LOSS
    for a, b in zip(found["rows"][20:], alone["rows"], strict=True):
        assert a["metric"] == NATS and a["mean"] == pytest.approx(b["mean"], rel=1e-6)
        assert math.log(a["hi90"] / a["mean"]) == pytest.approx(by * math.log(b["hi90"] / b["mean"]), rel=1e-3)
    assert [i - 20 for i in found["covariance"][NATS]["rows"]] == alone["covariance"][NATS]["rows"]


def test_a_trend_with_zeros_is_widened_about_its_mean():
    row = {"metric": "m", "step": 1, "mean": 0.0, "lo50": 0.0, "hi50": 0.01, "lo90": 0.0, "hi90": 0.03}
    wide = backtest.stretched(row, 2.0, 0.01)
    assert wide["mean"] == 0.0 and wide["lo90"] == pytest.approx(0.0, abs=1e-15)
    assert wide["hi90"] == pytest.approx(0.01 * (0.04 / 0.01) ** 2 - 0.01)
