"""Effective speed-ups, their intervals and verdicts; comparisons and sweeps of runs in a store."""

import csv
import math
import os
from pathlib import Path

import numpy as np
import pytest

from argosy.judge import speedup

# d1536 of the public ladder under its old and its new mixture (marin#9126): dropless Paloma macro loss and bits per byte
LOSS, BPB = (2.56377, 2.54317), (0.92507, 0.91844)


def test_the_public_figures():
    """Fails when a published speed-up does not come out: 1.22x on loss, 1.20x on bits per byte, and, with the exponent kept
    while a floor is added, 1.22, 1.27, 1.43 and 2.07."""
    assert f"{speedup.speedup(*LOSS, alpha=0.0400):.2f}" == "1.22"
    got = [f"{speedup.speedup(*BPB, alpha=0.0400, floor=share * BPB[0]):.2f}" for share in speedup.FLOORS]
    assert got == ["1.20", "1.22", "1.27", "1.43", "2.07"]


def test_the_public_ladder():
    """Fails when the refitted exponent leaves the published 0.0400 by more than 3%, or when a floor moves a refitted
    speed-up much: it hardly does (published for bits per byte: 1.199 to 1.246)."""
    folder = os.environ.get("ARGOSY_FORECAST_TABLES")
    if not folder:
        pytest.skip("ARGOSY_FORECAST_TABLES names no folder of public tables")
    with (Path(folder) / "marin_ladder" / "ladder_eval.csv").open() as file:
        last = {row["rung"]: row for row in csv.DictReader(file)}
    finished = [row for row in last.values() if float(row["fraction"]) == 1.0]
    flops = [float(row["compute_flops_no_lm_head"]) for row in finished]
    losses = [float(row["dropless_paloma_macro_loss"]) for row in finished]
    assert [row["rung"] for row in finished] == ["d768", "d1024", "d1536"]
    refitted = []
    for share in speedup.FLOORS:
        law = speedup.law(flops, losses, share * LOSS[0])
        refitted.append(speedup.speedup(*LOSS, alpha=law.alpha, floor=law.floor))
        if share == 0:
            assert law.alpha == pytest.approx(0.0400, rel=0.03)
    assert f"{refitted[0]:.2f}" == "1.22"
    assert refitted == sorted(refitted) and refitted[-1] < 1.30


def ladders(seed, scatter=0.001, shared=0.0, gain=1.2, alpha=0.05, floor=0.0, sizes=5):
    """Two ladders of a known law; the variant is worth `gain` at every size; `shared` of the scatter is common to both."""
    draw = np.random.default_rng(seed)
    flops = np.geomspace(1e18, 1e20, sizes)
    common = draw.normal(0, scatter * math.sqrt(shared), sizes)
    own = draw.normal(0, scatter * math.sqrt(1 - shared), (2, sizes))
    base = floor + 20 * flops**-alpha * np.exp(common + own[0])
    variant = floor + 20 * (gain * flops) ** -alpha * np.exp(common + own[1])
    return (flops, base), (flops, variant)


@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_a_known_gain_is_found_exactly(floor):
    """Fails when the speed-up of noiseless ladders is not what they were made with, at any compute."""
    base, variant = ladders(0, scatter=0.0, gain=1.3, floor=floor)
    for at in (1e17, 1e20, 1e24):
        assert speedup.between(base, variant, at, floor).mean == pytest.approx(1.3, rel=1e-9)
    assert speedup.law(*base, floor).alpha == pytest.approx(0.05, rel=1e-9)


@pytest.mark.parametrize("shared,paired", [(0.0, True), (0.9, True), (0.0, False)])
def test_intervals_hold_what_they_say(shared, paired):
    """Fails when 90% intervals hold the true gain in less than 86% or more than 94% of 600 pairs of noisy ladders (three
    standard errors are 3.7%)."""
    inside = 0
    for seed in range(600):
        base, variant = ladders(seed, shared=shared)
        found = speedup.between(base, variant, 1e20, paired=paired)
        inside += found.low <= 1.2 <= found.high
    assert 0.863 <= inside / 600 <= 0.937


def test_the_interval_is_a_paired_regression():
    """Fails when, with an exponent known without error, the interval is not that of a line through the rungs' differences
    (computed with numpy's own least squares)."""
    base, variant = ladders(3, shared=1.0, scatter=0.002)
    flops, draw = base[0], np.random.default_rng(9)
    exact = (flops, 20 * flops**-0.05)
    noisy = (flops, variant[1] * np.exp(draw.normal(0, 0.001, len(flops))))
    x, y = np.log(flops), np.log(exact[1] / noisy[1]) / 0.05
    (slope, start), covariance = np.polyfit(x, y, 1, cov="unscaled")
    sd = math.sqrt(np.sum((y - start - slope * x) ** 2) / (len(x) - 2))
    point = np.array([x[-1], 1.0])
    half = 2.353363 * sd * math.sqrt(point @ covariance @ point)  # Student's t at 95% with 3 degrees of freedom, from a table
    found = speedup.between(exact, noisy, flops[-1])
    assert math.log(found.mean) == pytest.approx(start + slope * x[-1], abs=1e-9)
    assert math.log(found.high / found.low) / 2 == pytest.approx(half, rel=1e-5)


def test_two_sizes_have_no_interval_and_no_verdict():
    """Fails when a line through two points is taken for certain."""
    base, variant = ladders(0, sizes=2)
    found = speedup.between(base, variant, 1e20)
    assert found.low is None and speedup.verdict(found)[0] == "undecided"


@pytest.mark.parametrize(
    "effect,word", [((1.2, 1.1, 1.3), "promote"), ((0.9, 0.85, 0.99), "reject"), ((1.1, 0.9, 1.3), "undecided")]
)
def test_verdicts(effect, word):
    assert speedup.verdict(speedup.Effect(*effect))[0] == word


def test_what_has_no_law_is_refused():
    """Fails when a speed-up is computed from rising losses, or over a floor that a loss is not above."""
    with pytest.raises(ValueError, match="does not fall"):
        speedup.law([1e18, 1e19, 1e20], [3.0, 3.1, 3.2])
    with pytest.raises(ValueError, match=r"floor 2\.9 must be below the smallest loss 2\.8"):
        speedup.law([1e18, 1e19, 1e20], [3.0, 2.9, 2.8], 2.9)
    with pytest.raises(ValueError, match="at least two sizes"):
        speedup.law([1e18, 1e18], [3.0, 2.9])
