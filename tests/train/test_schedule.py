"""The schedule against the printed formula in exact arithmetic."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from argosy import spec
from argosy.plan import scaling
from argosy.train import schedule


def of_length(run, steps, warmup_frac="0.01", *settings):
    tokens = steps * spec.tokens_per_step(run)
    return spec.override(run, [f"optim.horizon_tokens={tokens}", f"optim.warmup_frac={warmup_frac}", *settings])


def exact(t, w, n, final):
    """reference_run 3.6 as printed: peak t/w below w, else peak (1 - (1 - final)(t - w)/(N - w))."""
    if t < w:
        return Fraction(t, w)
    return 1 - (1 - Fraction(final)) * Fraction(t - w, n - w)


def hero(run):
    sizes = ["model.width=6144", "data.batch_seqs=11264", "data.seq_len=4096"]
    return spec.override(run, [*sizes, f"optim.horizon_tokens={791 * 22_762_487_808}", "optim.lr_scale=1"])


@pytest.mark.parametrize(
    "steps,frac,final", [(1024, "0.01", "0.05"), (390_251, "0.01", "0.05"), (37, "0.3", "0"), (50, "0.1", "1")]
)
def test_every_kind_of_integer_gives_the_formula(pocket, steps, frac, final):
    """Fails when update 0, 1, w-1, w, the middle or the last is off by one, or when digits are lost near the end."""
    run = of_length(pocket, steps, frac, f"optim.final_frac={final}")
    w, n = scaling.rates(run).warmup_steps, spec.steps(run)
    assert n == steps
    updates = sorted({0, 1, w - 1, w, w + 1, n // 2, n - 2, n - 1})
    traced = jax.jit(lambda t: schedule.fraction(run, t))
    arrays = schedule.fraction(run, np.array(updates))
    for i, t in enumerate(updates):
        want = float(exact(t, w, n, final))
        assert schedule.fraction(run, t) == pytest.approx(want, rel=1e-14, abs=1e-16)
        assert schedule.fraction(run, np.int64(t)) == schedule.fraction(run, t) == arrays[i]
        got = traced(jnp.int32(t))
        assert got.dtype == jnp.float32
        assert float(got) == pytest.approx(want, rel=4e-7, abs=1e-12)


def test_the_end_is_one_past_the_last_update_and_stays(pocket):
    """Fails when the floor is reached at the last update instead of after it, or crossed by a longer run."""
    run = of_length(pocket, 100)
    assert schedule.fraction(run, 99) == pytest.approx(0.05 + 0.95 / 99)
    for t in (100, 101, 10**6):
        assert schedule.fraction(run, t) == 0.05
        assert float(schedule.fraction(run, jnp.int32(t))) == np.float32(0.05)


@pytest.mark.parametrize(
    "steps,frac,want", [(1, "0.01", [1.0]), (1, "1", [0.0]), (3, "1", [0, 1 / 3, 2 / 3]), (2, "0", [1, 0.525])]
)
def test_shortest_runs(pocket, steps, frac, want):
    """Fails when a run of one update, without warm-up or of nothing but warm-up divides by zero."""
    run = of_length(pocket, steps, frac)
    assert [schedule.fraction(run, t) for t in range(steps)] == pytest.approx(want)
    assert [float(schedule.fraction(run, jnp.int32(t))) for t in range(steps)] == pytest.approx(want, rel=1e-6)


def test_the_public_run_logged_this_learning_rate(pocket):
    """Fails when peak or warm-up differ from the public run, which logged 8.43266e-6 at step 10.

    That record is optax's float32 warm-up, peak - peak (1 - t/w), which has lost 1.4e-5 of its value by
    cancellation: the peak times 10/3902 is 8.43278e-6. Both are checked, the record by optax itself.
    """
    run = hero(pocket)
    peak = scaling.rates(run).muonh_lr
    ours = schedule.learning_rates(run, 10).muonh
    assert f"{ours:.6e}" == f"{float(Fraction(peak) * Fraction(10, 3902)):.6e}" == "8.432781e-06"
    assert ours == pytest.approx(8.43266e-6, rel=2e-5)
    theirs = optax.linear_schedule(0.0, peak, scaling.rates(run).warmup_steps)(jnp.int32(10))
    assert f"{float(theirs):.5e}" == "8.43266e-06"
    traced = jax.jit(lambda t: schedule.learning_rates(run, t).muonh)(jnp.int32(10))
    assert float(traced) == pytest.approx(ours, rel=3e-7)


def test_both_groups_share_the_shape_and_keep_their_peaks(pocket):
    """Fails when a named alternative takes another rule's peak."""
    peaks = scaling.rates(pocket)
    for rule, muonh, adam in [
        ("hyperball", peaks.muonh_lr, peaks.adam_lr),
        ("muon", peaks.muonh_lr, 3e-3),
        ("adamw", 3e-3, 3e-3),
    ]:
        run = spec.override(pocket, [f"optim.rule={rule}"])
        got = schedule.learning_rates(run, 500)
        share = float(exact(500, 10, 1024, "0.05"))
        assert got == pytest.approx((muonh * share, adam * share), rel=1e-12)
