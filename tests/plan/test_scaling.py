"""The scaling rules against the printed figures of the reference run and its rungs."""

import math
from fractions import Fraction

import pytest

from argosy import spec
from argosy.plan import scaling


def sized(run, width, batch, tokens, *settings):
    sizes = [
        f"model.width={width}",
        f"data.batch_seqs={batch}",
        "data.seq_len=4096",
        f"optim.horizon_tokens={tokens}",
        "optim.lr_scale=1",
    ]
    return spec.override(run, [*sizes, *settings])


# width, batch, active parameters, steps, adam_lr, muonh_lr, eps, beta2, warm-up: reference_run 1.3, 3.5, 3.6, 5.1
PRINTED = [
    (768, 1024, 60_555_264, 11_420, "3.6505e-03", "0.015819", "1.034e-15", "0.96849", 114),
    (1024, 2048, 162_004_992, 15_276, "3.3257e-03", "0.014411", "1.196e-15", "0.95", 152),
    (1536, 6144, 481_296_384, 15_128, "3.4360e-03", "0.014889", "1.190e-15", "0.95", 151),
    (2048, 11264, 1_170_735_104, 20_072, "3.0973e-03", "0.013422", "1.371e-15", "0.95", 200),
    (6144, 11264, 22_762_487_808, 390_251, "7.5934e-04", "0.0032905", "6.045e-15", "0.95", 3902),
]


@pytest.mark.parametrize("horizon", ["791 x active", "steps x tokens"])
@pytest.mark.parametrize("row", PRINTED, ids=lambda row: f"d{row[0]}")
def test_every_rung_prints_as_published(pocket, row, horizon):
    """Fails when a coefficient, an exponent, the unit of a batch or the rounding of the warm-up is wrong, or when
    the figures hang on which of the two published horizons is meant."""
    width, batch, active, steps, adam, muonh, eps, beta2, warmup = row
    run = sized(pocket, width, batch, 791 * active if horizon == "791 x active" else steps * batch * 4096)
    got = scaling.rates(run)
    assert spec.steps(run) == steps
    assert f"{got.adam_lr:.4e}" == adam
    assert f"{got.muonh_lr:.{5}g}" == muonh.rstrip("0")
    assert f"{got.eps:.3e}" == eps
    assert f"{got.beta2:.5g}" == beta2
    assert (got.beta1, got.warmup_steps) == (0.9, warmup)


def test_the_reference_run(pocket):
    """Fails when the hero's five registered figures do not come out."""
    got = scaling.rates(sized(pocket, 6144, 11264, 791 * 22_762_487_808))
    assert [f"{got.adam_lr:.5g}", f"{got.muonh_lr:.5g}", f"{got.eps:.5g}"] == ["0.00075934", "0.0032905", "6.0446e-15"]
    assert (got.beta2, got.warmup_steps) == (0.95, 3902)


def test_published_forms_per_sequence(pocket):
    """Fails when a rule's coefficient is not the published per-sequence one: `muonh_lr = C T^-a d^-b sqrt(sequences)`
    with C = 34.35 at 8,192 (August), 18.31 at 4,096 (May); `adam_lr` with 1.63 at 4,096 (April)."""
    tokens, width, batch = 10**10, 1024, 128
    for name, seq_len, c, a, b in [
        ("marin_2026_08", 8192, 34.35, 0.3461, 0.3448),
        ("marin_2026_05", 4096, 18.31, 0.395, 0.150),
        ("marin_2026_04", 4096, 1.63 * 13 / 3, 0.2813, 0.3678),
    ]:
        run = sized(pocket, width, batch, tokens, f"data.seq_len={seq_len}", f"optim.scaling={name}")
        published = c * tokens**-a * width**-b * math.sqrt(batch)
        assert scaling.rates(run).muonh_lr == pytest.approx(published, rel=3e-4)


def test_caps_bind_and_lr_scale_multiplies_after_them(pocket):
    """Fails when a learning rate above 0.05 passes, or when a sweep's multiplier is lost in the cap."""
    small = sized(pocket, 128, 64, 10**8)
    got = scaling.rates(small)
    assert got.muonh_lr == 0.05 and got.adam_lr < 0.05
    doubled = scaling.rates(spec.override(small, ["optim.lr_scale=2"]))
    assert (doubled.muonh_lr, doubled.adam_lr) == (0.1, 2 * got.adam_lr)
    assert any(line.startswith("muonh_lr") and "cap 0.05" in line for line in scaling.outside(small))


def test_beta2_stays_in_its_range(pocket):
    """Fails when small batches give a beta2 above 0.9999 or large ones one below 0.95."""
    for batch, beta2 in [(1, 0.9999), (32, 0.999), (64, 0.998001), (100_000, 0.95)]:
        assert scaling.rates(sized(pocket, 512, batch, 10**12)).beta2 == pytest.approx(beta2, rel=1e-12)


@pytest.mark.parametrize("frac,steps", [(0.07, 100), (0.29, 100), (0.01, 390_251), (0.0, 10), (1.0, 7), (0.001, 10)])
def test_warmup_counts_whole_updates(pocket, frac, steps):
    """Fails when binary rounding loses an update (0.29 x 100 is 28.999... in floating point)."""
    run = spec.override(pocket, [f"optim.warmup_frac={frac}", f"optim.horizon_tokens={steps * spec.tokens_per_step(pocket)}"])
    assert scaling.rates(run).warmup_steps == math.floor(Fraction(str(frac)) * steps)


def test_outside_names_what_leaves_the_fit(pocket):
    """Fails when a run at a fitted cell is called outside, or when the reference run's leaps go unnamed."""
    inside = ["data.seq_len=8192", "moe.experts=128", "moe.experts_per_token=4"]
    assert scaling.outside(sized(pocket, 1024, 128, 8_750_000_000, *inside)) == []
    hero = scaling.outside(sized(pocket, 6144, 11264, 791 * 22_762_487_808, "moe.experts=384", "moe.experts_per_token=8"))
    assert [line.split("=")[0] for line in hero[:4]] == [
        "model.width",
        "optim.horizon_tokens",
        "tokens per step",
        "data.seq_len",
    ]
    assert "is 3 times the largest fitted (512 to 2,048)" in hero[0]
    assert "384 experts, top-8" in hero[4]
    assert scaling.outside(spec.override(pocket, ["optim.rule=adamw"])) == []
    assert "1/4 of the smallest fitted" in scaling.outside(pocket)[0]
