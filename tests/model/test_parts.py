"""Router statistics and bias of a batch from its parts, against the whole batch routed at once and against numpy counts."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy import spec
from argosy.model import parts, router

K, BINS = 2, 50


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@partial(jax.jit, static_argnums=(3,))
def seen(s, bias, valid, run):
    """One part, or the whole: statistics, what it leaves, and the bias that it would set alone."""
    routing = router.route(s, bias, K, 2.5)
    stats = router.statistics(s, routing, valid, bias)
    left = parts.part(s, routing, valid, stats, run)
    return (stats, left), router.next_bias(s, routing, valid, stats, bias, run)


both = jax.jit(partial(parts.both, k=K), static_argnames="bins")
count = jax.jit(parts.count, static_argnums=4)
moved = jax.jit(parts.moved)
next_bias = jax.jit(partial(parts.next_bias, k=K), static_argnames="run")

SCORES = {
    "normal": normal(0, 96, 6),
    "parts of very different range": normal(1, 96, 6) * np.repeat(np.float32([1e-3, 1, 1e4]), 32)[:, None],
    "far from zero": 1e6 + np.round(normal(2, 96, 6)),
    "constant": np.full((96, 6), 3.25, np.float32),
    "one outlier": np.where(np.arange(576).reshape(96, 6) == 17, np.float32(1e5), normal(5, 96, 6)),
}


@pytest.mark.parametrize("balance", ["quantile", "sign_bias"])
@pytest.mark.parametrize("case", SCORES)
def test_bias_and_counts_of_parts_are_those_of_the_whole_to_the_bit(pocket, case, balance):
    """Fails when a margin is counted into a wrong bin, or a part weighs other than by its tokens."""
    s, bias = SCORES[case], normal(9, 6)
    valid = np.random.default_rng(3).random(96) < 0.7
    valid[64:] = case != "constant"  # one case with a part that has no token at all
    run = spec.override(pocket, [f"routing.balance={balance}", f"routing.histogram_bins={BINS}"]).routing
    cut = [slice(0, 32), slice(32, 64), slice(64, 96)]
    (whole, _), expected = seen(s, bias, valid, run)
    each = [seen(s[c], bias, valid[c], run)[0] for c in cut]
    stats, left = reduce(partial(both, bins=BINS), each)
    np.testing.assert_array_equal(next_bias(stats, left, bias, run=run), expected)
    for name in ("load", "max_load", "margin_min", "margin_max", "bias_min", "bias_max", "entropy"):
        np.testing.assert_array_equal(getattr(stats, name), getattr(whole, name), name)
    for name in ("load_balancing_loss", "z"):
        np.testing.assert_allclose(getattr(stats, name), getattr(whole, name), rtol=1e-6)


def test_counts_by_numpy():
    """Every entry is the number of valid values at or above the edge, edges at the multiples of a power of two."""
    margin, valid = normal(4, 200, 5), np.random.default_rng(0).random(200) < 0.8
    low, high = margin[valid].min(), margin[valid].max()
    got = count(margin, valid, low, high, BINS)
    width = 2.0 ** np.floor(np.log2((float(high) - float(low)) / BINS))
    edges = (np.floor(low / width) + np.arange(2 * BINS + 3)) * width
    expected = (margin[valid][:, :, None] >= edges).sum(0)
    np.testing.assert_array_equal(got, expected)
    assert (expected[:, 0] == valid.sum()).all() and (expected[:, -1] == 0).all()


@pytest.mark.parametrize("seed", range(20))
def test_counts_move_to_any_wider_grid(seed):
    """Fails when bins of a narrow range are not unions of those of a wider one, at any scale and place."""
    rng = np.random.default_rng(seed)
    at, scale = rng.normal() * 10 ** rng.uniform(-2, 3), 10 ** rng.uniform(-3, 3)
    margin = (at + scale * rng.normal(size=(150, 3))).astype(np.float32)
    low, high = margin.min(), margin.max()
    wide_low, wide_high = low - np.float32(rng.exponential() * scale * 30), high + np.float32(rng.exponential() * scale)
    everyone = np.ones(150, bool)
    got = moved(
        count(margin, everyone, low, high, BINS),
        router.grid(jnp.float32(low), jnp.float32(high), BINS),
        router.grid(jnp.float32(wide_low), jnp.float32(wide_high), BINS),
    )
    np.testing.assert_array_equal(got, count(margin, everyone, wide_low, wide_high, BINS))


@pytest.mark.parametrize("seed", range(20))
def test_a_grid_is_at_least_as_fine_as_asked_and_never_too_long(seed):
    """Fails when the histogram is coarser than the reference's equal bins, or has more bins than are counted."""
    rng = np.random.default_rng(seed)
    low = np.float32(rng.normal() * 10 ** rng.uniform(-3, 3))
    high = low + np.float32(10 ** rng.uniform(-2, 4))
    first, width = (float(x) for x in router.grid(jnp.float32(low), jnp.float32(high), 1000))
    assert np.log2(width) == np.floor(np.log2(width))
    assert width <= max((float(high) - float(low)) / 1000, float(np.spacing(max(abs(low), abs(high))))) * (1 + 1e-6)
    assert first * width <= low and np.floor(high / width) - first < router.most(1000)
