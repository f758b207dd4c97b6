"""The router against numpy float64 written from reference_run 2 and 7.1."""

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy import spec
from argosy.model import router

SUM = 2.5


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def f32(x):
    return jnp.asarray(x, jnp.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def plain_route(s, bias, k):
    """Experts, weights and thresholds, token by token."""
    experts, weights, alpha = [], [], []
    for row in s:
        biased = row + bias
        order = sorted(range(len(row)), key=lambda e: (-biased[e], e))
        chosen = order[:k]
        score = sigmoid(row[chosen])
        experts.append(chosen)
        weights.append(SUM * score / (score.sum() + 1e-9))
        alpha.append(biased[order[min(k, len(row) - 1)]])
    return np.array(experts), np.array(weights), np.array(alpha)


def routing_of(pocket, **changes):
    return spec.override(pocket, [f"routing.{key}={value}" for key, value in changes.items()]).routing


@partial(jax.jit, static_argnums=(3, 4))
def step(s, bias, valid, k, run):
    """Routing, statistics and the next bias of one batch on one device."""
    routing = router.route(s, bias, k, SUM)
    stats = router.statistics(s, routing, valid, bias)
    return routing, stats, router.next_bias(s, routing, valid, stats, bias, run)


# ---- selection and weights -----------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "experts", "k"), [(37, 16, 4), (5, 8, 8), (9, 1, 1), (64, 33, 1)])
def test_route_equals_plain(tokens, experts, k):
    s, bias = normal(0, tokens, experts), 0.5 * normal(1, experts)
    s, bias = s.astype(np.float32), bias.astype(np.float32)
    got = jax.jit(router.route, static_argnums=(2, 3))(f32(s), f32(bias), k, SUM)
    chosen, weights, alpha = plain_route(s.astype(np.float64), bias.astype(np.float64), k)
    np.testing.assert_array_equal(got.experts, chosen)
    np.testing.assert_allclose(got.weights, weights, rtol=2e-6)
    np.testing.assert_allclose(got.threshold, alpha, rtol=1e-6, atol=1e-6)
    assert got.experts.dtype == jnp.int32 and got.weights.dtype == jnp.float32


@pytest.mark.parametrize("compiled", [False, True])
def test_ties_go_to_the_lower_index(compiled):
    s = np.zeros((300, 24), np.float32)
    s[1::3, 7:] = 1.0
    s[2::3, [3, 11, 20, 23]] = 2.0

    def route(s):
        return router.route(s, jnp.zeros(24), 4, SUM)

    experts = np.asarray((jax.jit(route) if compiled else route)(f32(s)).experts)
    assert (experts[0::3] == [0, 1, 2, 3]).all()
    assert (experts[1::3] == [7, 8, 9, 10]).all()
    assert (experts[2::3] == [3, 11, 20, 23]).all()


def test_equal_logits_give_equal_weights():
    weights = router.route(jnp.full((6, 8), -3.0), jnp.zeros(8), 4, SUM).weights
    np.testing.assert_allclose(weights, SUM / 4, rtol=1e-6)


def test_the_bias_selects_but_does_not_weigh():
    s = f32(normal(0, 20, 8))
    bias = jnp.zeros(8).at[5].set(100.0)
    got = router.route(s, bias, 2, SUM)
    assert (np.asarray(got.experts[:, 0]) == 5).all()
    a, b = (
        sigmoid(np.asarray(s, np.float64))[:, 5],
        sigmoid(np.take_along_axis(np.asarray(s), np.asarray(got.experts), 1))[:, 1],
    )
    np.testing.assert_allclose(got.weights[:, 0], SUM * a / (a + b), rtol=1e-5)


def test_weights_gradient_against_finite_differences():
    s, bias, out = normal(0, 11, 9), normal(1, 9), normal(2, 11, 3)

    def loss(s, bias):
        return jnp.sum(router.route(s, bias, 3, SUM).weights * f32(out))

    ds, dbias = jax.grad(loss, (0, 1))(f32(s), f32(bias))
    assert not np.asarray(dbias).any()
    expected = np.zeros_like(s)
    for at in np.ndindex(s.shape):
        moved = np.zeros_like(s)
        moved[at] = 1e-6
        up, down = plain_route(s + moved, bias, 3)[1], plain_route(s - moved, bias, 3)[1]
        expected[at] = ((up - down) * out).sum() / 2e-6
    np.testing.assert_allclose(ds, expected, atol=2e-6)


# ---- statistics ----------------------------------------------------------------------------------


def test_statistics_equal_the_definitions(pocket):
    t, e, k = 90, 12, 3
    s, bias = normal(0, t, e).astype(np.float32), normal(1, e).astype(np.float32)
    valid = np.arange(t) % 5 != 0
    _, stats, _ = step(f32(s), f32(bias), jnp.asarray(valid), k, pocket.routing)
    chosen, _, alpha = plain_route(s.astype(np.float64), bias.astype(np.float64), k)
    load = np.bincount(chosen[valid].ravel(), minlength=e)
    share = load / load.sum()
    wide = s[valid].astype(np.float64)
    p = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
    margin = (s - alpha[:, None])[valid]
    np.testing.assert_array_equal(stats.load, load)
    assert stats.load.dtype == jnp.int32
    expected = {
        "entropy": -(share * np.log(share + 1e-6)).sum(),
        "max_load": load.max() / load.mean(),
        "load_balancing_loss": e * (k * share * p.mean(0)).sum(),
        "z": (np.log(np.exp(wide).sum(1)) ** 2).mean(),
        "margin_min": margin.min(),
        "margin_max": margin.max(),
        "bias_min": bias.min(),
        "bias_max": bias.max(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(stats, name), value, rtol=2e-5, err_msg=name)


def test_statistics_at_balance(pocket):
    """Entropy ln E and load balancing loss K when every expert gets the same share (reference_run 2.4)."""
    s = f32(10 * np.stack([np.roll(np.arange(8) < 2, i) for i in range(8)]))
    stats = step(s, jnp.zeros(8), jnp.ones(8, bool), 2, pocket.routing)[1]
    np.testing.assert_allclose(stats.entropy, np.log(8), atol=1e-5)
    np.testing.assert_allclose(stats.load_balancing_loss, 2, rtol=1e-5)
    np.testing.assert_allclose(stats.max_load, 1, rtol=1e-6)


def test_cells_count_every_expert_of_every_shard_once(pocket):
    """Fails when a bin of the histogram of loads, an edge of it, or an empty shard is counted otherwise than defined."""
    rng = np.random.default_rng(0)
    for load in (rng.integers(0, 200, 64), rng.poisson(3, 64), np.full(64, 7), np.eye(64, dtype=int)[3] * 50):
        expected = np.histogram(load / load.mean(), (0, *(2 ** (np.arange(-7, 8) / 4)), np.inf))[0]
        found = router.cells(jnp.asarray(load, jnp.int32))
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, expected)
    assert not np.asarray(router.cells(jnp.zeros(64, jnp.int32))).any()


def test_no_gradient_flows_through_statistics_or_the_next_bias(pocket):
    def loss(s):
        _, stats, following = step(s, jnp.zeros(8), jnp.ones(30, bool), 2, pocket.routing)
        return sum(jnp.sum(v * v) for v in (*stats[1:-1], following))

    assert not np.asarray(jax.grad(loss)(f32(normal(0, 30, 8)))).any()


# ---- the histogram quantile ----------------------------------------------------------------------

MARGINS = {
    "normal": normal(0, 700, 12),
    "skewed": np.exp(2 * normal(1, 700, 12)) - 3,
    "shifted columns": normal(2, 700, 12) + 5 * np.arange(12),
    "ties": np.round(normal(3, 700, 12)),
    "constant": np.full((700, 12), 50.25),
    "far from zero": 1e6 + np.round(normal(4, 700, 12)),
    "one outlier": np.where(np.arange(8400).reshape(700, 12) == 17, 1e5, normal(5, 700, 12)),
}


quantile = jax.jit(router.quantile, static_argnums=(2, 5))
bisected = jax.jit(router.crossing, static_argnums=(3, 4))
filled = jax.jit(router.crossing_plain, static_argnums=(3, 4))


@pytest.mark.parametrize("bins", [1, 2, 7, 10_000])
def test_bisection_equals_the_filled_histogram_exactly(bins):
    for margin in MARGINS.values():
        span = np.ptp(margin) or 1.0
        place = np.clip((margin - margin.min()) / span * bins, 0, bins - 1).astype(np.int32)
        place[np.arange(700) % 7 == 3] = -1
        for need in (1, 50, 299, 600):
            arguments = (jnp.asarray(place), jnp.int32(need), jnp.int32(600), bins, ())
            for fast, slow in zip(bisected(*arguments), filled(*arguments), strict=True):
                np.testing.assert_array_equal(fast, slow)


@pytest.mark.parametrize("case", ["constant", "far from zero"])
def test_a_range_near_zero_width_gives_a_finite_quantile(case):
    margin = f32(MARGINS[case])
    got = quantile(margin, jnp.ones(700, bool), 3, jnp.min(margin), jnp.max(margin), 10_000)
    np.testing.assert_allclose(got, np.quantile(MARGINS[case], 1 - 3 / 12, axis=0), rtol=2e-6)


@pytest.mark.parametrize("case", ["normal", "skewed", "shifted columns", "ties"])
def test_quantile_is_within_one_bin_of_an_exact_sort(case):
    margin = MARGINS[case].astype(np.float32)
    valid = np.arange(700) % 7 != 3
    low, high, bins, k = margin[valid].min(), margin[valid].max(), 10_000, 5
    got = quantile(f32(margin), jnp.asarray(valid), k, f32(low), f32(high), bins)
    down = -np.sort(-margin[valid], 0)
    exact = down[-(-valid.sum() * k // 12) - 1]  # the value of rank ceil(T K / E), counted from the largest
    width = (float(high) - float(low)) / bins
    assert np.abs(np.asarray(got, np.float64) - exact).max() <= width * 1.01


def test_quantile_interpolates_inside_a_bin():
    """One bin from 0 to 8 that holds 8 of 8 values, T K / E = 2: 0 + 8 * (8 - 2) / 8 = 6."""
    margin = jnp.tile(jnp.arange(8.0)[:, None], (1, 4))
    got = quantile(margin, jnp.ones(8, bool), 1, jnp.float32(0), jnp.float32(8), 1)
    np.testing.assert_array_equal(got, 6.0)


def test_interpolation_at_the_reference_shape_is_exact():
    """Ranks near 961,195 of 46.1 million: fails when counts are subtracted as float32."""
    tokens, k, experts = 46_137_344, 8, 384
    low, width, crossing, reached, inside = -92.0, 163 / 10_000, 6_321, 961_232, 41
    at = router.Crossing(*(jnp.full((1,), n, jnp.int32) for n in (crossing, reached, inside)))
    got = router.interpolate(at, jnp.int32(tokens * k), experts, f32(low), f32(width))[0]
    r = Fraction(tokens * k, experts)
    expected = low + width * (crossing + float((reached - r) / inside))
    assert abs(float(got) - expected) < width * 2e-3


@pytest.mark.parametrize(("tokens", "k", "experts"), [(2**31 - 1, 1, 384), (2**28 - 1, 8, 384), (10, 3, 4), (8, 3, 4)])
def test_the_rank_of_the_quantile_is_rounded_up(tokens, k, experts):
    """Also of as many assignments as an int32 holds: fails when a sum on the way is larger."""
    need, target = router.rank(jnp.int32(tokens), k, experts)
    assert (int(need), int(target)) == (-(-tokens * k // experts), tokens * k)


# ---- the next bias -------------------------------------------------------------------------------


def test_next_bias_is_minus_the_quantile_with_zero_mean(pocket):
    t, e, k = 400, 10, 2
    s, bias = normal(0, t, e) + np.arange(e) / 5, normal(1, e)
    routing, _, following = step(f32(s), f32(bias), jnp.ones(t, bool), k, pocket.routing)
    margin = np.asarray(s - np.asarray(routing.threshold, np.float64)[:, None])
    beta = (-np.sort(-margin, 0))[t * k // e - 1]
    np.testing.assert_allclose(following, beta.mean() - beta, atol=2 * (margin.max() - margin.min()) / 10_000)
    assert abs(np.asarray(following).mean()) < 1e-6


def test_padding_changes_neither_statistics_nor_bias(pocket):
    s, bias = normal(0, 256, 16), normal(1, 16)
    alone = step(f32(s), f32(bias), jnp.ones(256, bool), 4, pocket.routing)
    padded = np.concatenate([1e3 * normal(2, 64, 16), s])
    valid = jnp.asarray(np.arange(320) >= 64)
    with_padding = step(f32(padded), f32(bias), valid, 4, pocket.routing)
    for a, b in zip(jax.tree.leaves(alone[1:]), jax.tree.leaves(with_padding[1:]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("balance", ["quantile", "aux_loss", "sign_bias"])
@pytest.mark.parametrize(("experts", "k"), [(6, 6), (1, 1)])
def test_nothing_to_balance_where_all_experts_are_chosen(pocket, balance, experts, k):
    s = f32(normal(0, 50, experts))
    _, stats, following = step(s, jnp.zeros(experts), jnp.ones(50, bool), k, routing_of(pocket, balance=balance))
    np.testing.assert_array_equal(following, 0.0)
    np.testing.assert_array_equal(stats.load, 50)


@pytest.mark.parametrize("balance", ["quantile", "sign_bias"])
def test_a_batch_without_valid_tokens_keeps_the_bias(pocket, balance):
    bias = f32([0.5, -0.25, 0.0, -0.25])
    _, stats, following = step(f32(normal(0, 9, 4)), bias, jnp.zeros(9, bool), 2, routing_of(pocket, balance=balance))
    np.testing.assert_array_equal(following, bias)
    assert np.isfinite([stats.entropy, stats.max_load, stats.load_balancing_loss, stats.z]).all()


def test_quantile_balancing_settles_a_skewed_distribution(pocket):
    """The largest load within 10% of the mean after 50 steps, 4,096 assignments per expert (issue 2)."""
    t, e, k = 32_768, 16, 2
    lean = f32(np.linspace(-2, 2, e))[None, :]

    @jax.jit
    def one(bias, seed):
        s = lean + jax.random.normal(jax.random.key(seed), (t, e))
        _, stats, following = step(s, bias, jnp.ones(t, bool), k, pocket.routing)
        return following, stats.max_load

    bias, first = one(jnp.zeros(e), 0)
    for seed in range(1, 50):
        bias, last = one(bias, seed)
    assert first > 3
    assert last < 1.1


def test_sign_bias_steps_towards_the_mean_load(pocket):
    t, e, k = 200, 8, 2
    s = f32(normal(0, t, e) + np.arange(e))
    run = routing_of(pocket, balance="sign_bias", sign_bias_step=0.25)
    bias = f32(normal(1, e))
    _, stats, following = step(s, bias, jnp.ones(t, bool), k, run)
    load = np.asarray(stats.load, np.float64)
    moved = np.asarray(bias) + 0.25 * np.sign(load.mean() - load)
    np.testing.assert_allclose(following, moved - moved.mean(), atol=1e-6)
    assert (following != bias).all()


def test_aux_loss_against_its_definition_and_finite_differences():
    t, e, k = 40, 6, 2
    s = normal(0, t, e)
    valid = np.arange(t) % 4 != 1
    load = np.bincount(plain_route(s, np.zeros(e), k)[0][valid].ravel(), minlength=e)

    def plain(s):
        p = np.exp(s[valid]) / np.exp(s[valid]).sum(1, keepdims=True)
        return e * (load / load.sum() * p.mean(0)).sum()

    def loss(s):
        return router.balance_loss(s, jnp.asarray(load, jnp.int32), jnp.asarray(valid), ())

    value, ds = jax.value_and_grad(loss)(f32(s))
    np.testing.assert_allclose(value, plain(s), rtol=1e-5)
    expected = np.zeros_like(s)
    for at in np.ndindex(s.shape):
        moved = np.zeros_like(s)
        moved[at] = 1e-6
        expected[at] = (plain(s + moved) - plain(s - moved)) / 2e-6
    np.testing.assert_allclose(ds, expected, atol=1e-7)
    assert not np.asarray(ds)[~valid].any()


def test_leaf(pocket):
    leaf = router.leaf(pocket)
    assert leaf.shape == (128, 32) and leaf.kind == "gate" and leaf.init == pytest.approx(0.5 / 128**0.5)
