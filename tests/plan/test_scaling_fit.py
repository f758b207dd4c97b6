"""Refitting the learning-rate rule: known rules come back, with the right uncertainty, and what cannot be told is not."""

import math
from dataclasses import replace

import numpy as np
import pytest

from argosy import spec
from argosy.plan import refit, scaling
from argosy.runs import pocket

RULE = scaling.FITS["marin_2026_08"]
TRUE = {"c": 0.12, "a": 0.30, "b": 0.41}
SOURCE = "a test, with a source that is longer than a line of a terminal is wide, so that it has to be given in several parts"
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def cell(width, tokens, per_step, noise=0.0, seeds=2, factors=FACTORS, draw=None, curvature=0.02):
    """Runs about the optimum of the known rule; the lowest log loss is at it, an offset for each seed."""
    best = TRUE["c"] * tokens ** -TRUE["a"] * width ** -TRUE["b"] * math.sqrt(per_step)
    trials = []
    for seed in range(seeds):
        for factor in factors:
            # the grid is off the optimum, as grids are
            lr = best * factor * 1.3
            log_loss = 1.0 - 0.05 * math.log(tokens) + 0.003 * seed + curvature * math.log(lr / best) ** 2
            if draw is not None:
                log_loss += draw.normal(0, noise)
            trials.append(refit.Trial(lr, seed, math.exp(log_loss)))
    return refit.Cell(width, tokens, per_step, tuple(trials))


GRID = [(w, t, b) for w in (256, 512, 1024) for t in (10**8, 10**9) for b in (2**16, 2**18)]


def fitted(cells, rule=RULE):
    return refit.refit(cells, rule, SOURCE, 256, (32, 4))


def test_a_known_rule_comes_back():
    """Fails when noiseless sweeps do not give the rule that they were made with, or its range."""
    found = fitted([cell(*place) for place in GRID])
    assert found.fit.coefficient == pytest.approx(TRUE["c"], rel=1e-6)
    assert (found.fit.tokens_power, found.fit.width_power) == (pytest.approx(TRUE["a"]), pytest.approx(TRUE["b"]))
    assert (found.fit.widths, found.fit.tokens) == ((256, 1024), (10**8, 10**9))
    assert (found.fit.tokens_per_step, found.fixed) == ((2**16, 2**18), ())
    assert found.r2 == pytest.approx(1.0)


def test_intervals_hold_what_they_say():
    """Fails when the 90% interval of an exponent holds the true one in less than 82% or more than 98% of 100 noisy tables (a
    standard error is 3%)."""
    draw = np.random.default_rng(4)
    held = {"tokens_power": 0, "width_power": 0, "log_c": 0}
    true = {"tokens_power": TRUE["a"], "width_power": TRUE["b"], "log_c": math.log(TRUE["c"])}
    for _ in range(100):
        found = fitted([cell(*place, noise=0.004, seeds=1, draw=draw) for place in GRID[::2]])
        for name, (low, high) in found.intervals.items():
            held[name] += low <= true[name] <= high
    assert all(82 <= count <= 98 for count in held.values()), held


def test_the_error_of_an_optimum():
    """Fails when the stated standard error of a cell's best learning rate is off by more than a quarter from its spread over
    300 tables."""
    draw = np.random.default_rng(1)
    tables = [
        [cell(256, 10**8, 2**16, noise=0.002, draw=draw), cell(256, 10**8, 2**17, noise=0.002, draw=draw)] for _ in range(300)
    ]
    found = [fitted(cells) for cells in tables]
    spread = np.std([one.optima[0].log_lr for one in found])
    assert np.sqrt(np.mean([one.errors[0] ** 2 for one in found])) == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize(
    "places,free",
    [
        ([(256, 10**8, 2**16)], ()),
        ([(256, 10**8, 2**16), (256, 10**8, 2**18)], ()),
        ([(256, 10**8, 2**16), (512, 10**8, 2**16)], ("width_power",)),
        ([(256, 10**8, 2**16), (256, 10**9, 2**16)], ("tokens_power",)),
        ([(256, 10**8, 2**16), (512, 4 * 10**8, 2**16), (1024, 16 * 10**8, 2**16)], ("tokens_power",)),  # in step
        ([(256, 10**8, 2**16), (512, 10**8, 2**16), (256, 10**9, 2**16)], ("tokens_power", "width_power")),
    ],
)
def test_only_what_the_cells_tell_is_free(places, free):
    """Fails when an exponent that the cells do not tell is fitted, or is not the one of the rule in use."""
    found = fitted([cell(*place) for place in places])
    assert {*found.intervals} == {"log_c", *free}
    assert {*found.fixed} == {"tokens_power", "width_power"} - {*free}
    for name in found.fixed:
        assert getattr(found.fit, name) == getattr(RULE, name)
    width, tokens, per_step = places[0]
    at = found.fit.coefficient * tokens**-found.fit.tokens_power * width**-found.fit.width_power * math.sqrt(per_step)
    best = TRUE["c"] * tokens ** -TRUE["a"] * width ** -TRUE["b"] * math.sqrt(per_step)
    assert at == pytest.approx(best, rel=1e-6)  # whatever is fixed, the rule goes through the cells


@pytest.mark.parametrize(
    "factors,what",
    [((0.2, 0.4, 0.6), "highest"), ((2.0, 4.0, 8.0), "lowest"), ((0.5, 2.0), "a parabola needs three")],
)
def test_an_optimum_at_the_edge_is_refused(factors, what):
    """Fails when a parabola is believed beyond what was tried."""
    edge = cell(256, 10**8, 2**16, factors=factors)
    assert what in refit.optimum(edge).reason
    with pytest.raises(ValueError, match=what):
        fitted([edge])
    inner = [cell(512, 10**8, 2**16), cell(512, 10**9, 2**16)]
    both, alone = fitted([edge, *inner]), fitted(inner)
    assert both.fit == alone.fit and both.optima[0].reason


def test_three_rates_and_one_seed_have_no_error():
    """Fails when a parabola through three points is given an error of nothing."""
    with pytest.raises(ValueError, match="no residuals"):
        fitted([cell(256, 10**8, 2**16, seeds=1, factors=(0.5, 1.0, 2.0))])


def test_a_seed_that_is_missing_somewhere_does_not_move_the_optimum():
    """Fails when an offset of a seed that was not trained at all rates is taken for an effect of the rate."""
    whole = cell(256, 10**8, 2**16)
    lucky = refit.Trial(whole.trials[0].adam_lr, 7, 0.5 * whole.trials[0].loss)
    assert refit.optimum(whole._replace(trials=(*whole.trials, lucky))).log_lr == pytest.approx(refit.optimum(whole).log_lr)


def test_the_lines_to_paste_are_the_rule(monkeypatch):
    """Fails when the printed entry is not Python, or the rule that it makes gives other learning rates than the fit."""
    found = fitted([cell(*place) for place in GRID])
    made = eval("{" + refit.lines(found.fit, "mine") + "}", {"Fit": scaling.Fit})["mine"]
    assert made.source == SOURCE and max(map(len, refit.lines(found.fit, "mine").splitlines())) <= 100
    monkeypatch.setitem(scaling.FITS, "marin_2026_08", made)
    run = spec.override(
        pocket.run(), ["model.width=512", "model.head_width=128", "optim.horizon_tokens=1e9", "optim.lr_scale=1"]
    )
    best = TRUE["c"] * 1e9 ** -TRUE["a"] * 512 ** -TRUE["b"] * math.sqrt(spec.tokens_per_step(run))
    assert scaling.rates(run).adam_lr == pytest.approx(best, rel=2e-3)
    outside = scaling.outside(replace(run, optim=replace(run.optim, horizon_tokens=10**10)))
    assert any("10 times the largest fitted" in line for line in outside)
    assert not any(line.startswith("model.width") for line in outside)
