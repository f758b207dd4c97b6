"""Every transport against the dense oracle, the oracle and the whole sparse block against numpy float64."""

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import equations

from argosy import leaf, mesh, spec
from argosy.model import exchange, experts
from argosy.model.exchange import dense, layout, local

WITH_EXPERT = ["mesh.replica=2", "mesh.context=2", "mesh.expert=2", "routing.exchange=dense"]
WITH_DATA = ["mesh.replica=2", "mesh.data=2", "mesh.context=2"]
SMALL = [
    "model.width=24", "moe.experts=8", "moe.experts_per_token=3", "moe.hidden=16", "moe.latent_width=8", "moe.shared_hidden=12",
    "data.seq_len=16", "data.batch_seqs=8", "routing.aux_loss_weight=3",
]  # fmt: skip


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def f32(tree):
    return jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), tree)


def silu(x):
    return x / (1 + np.exp(-x))


def relative(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)


def assert_near(got, expected, bound=1e-5):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(np.asarray(a)).all(), path
        assert relative(a, b) < bound, (path, relative(a, b))


# ---- routings that a transport must survive ------------------------------------------------------


def choose(rng, t, k, odds):
    """k distinct experts for each of t tokens, drawn with the given odds."""
    return np.array([rng.choice(len(odds), k, replace=False, p=odds / odds.sum()) for _ in range(t)])


def routings(t=150, e=8, k=3):
    rng = np.random.default_rng(0)
    every, skewed = np.ones(e), 2.0 ** -np.arange(e)
    even = (np.arange(t)[:, None] * k + np.arange(k)[None, :]) % e
    some = rng.random(t) < 0.7
    padding_first = np.arange(t) >= 60
    return {
        "even": (even, np.ones(t, bool)),
        "random": (choose(rng, t, k, every), np.ones(t, bool)),
        "skewed": (choose(rng, t, k, skewed), np.ones(t, bool)),
        "all to three": (np.tile([2, 5, 7], (t, 1)), np.ones(t, bool)),
        "all to one": (np.full((t, k), 6), np.ones(t, bool)),
        "an expert twice in a token": (rng.integers(0, 3, (t, k)), np.ones(t, bool)),
        "an empty expert": (choose(rng, t, k, np.where(np.arange(e) == 3, 0.0, every)), np.ones(t, bool)),
        "padding among tokens": (choose(rng, t, k, skewed), some),
        "padding first": (choose(rng, t, k, skewed), padding_first),
        "nothing valid": (choose(rng, t, k, every), np.zeros(t, bool)),
        "one valid token": (choose(rng, t, k, every), np.arange(t) == 7),
    }


ROUTINGS = routings()
each_routing = pytest.mark.parametrize("case", ROUTINGS)


def problem(case, e=8, z=8, f=6):
    chosen, valid = ROUTINGS[case]
    p = experts.Routed(0.5 * normal(0, e, z, f), 0.5 * normal(1, e, z, f), 0.5 * normal(2, e, f, z))
    return p, normal(3, len(valid), z), chosen, np.abs(normal(4, *chosen.shape)), valid


def kept(chosen, valid, rows, count=8):
    """Which assignments a capacity of `rows` accepts, one by one in flat order."""
    taken, keep = np.zeros(count, int), np.zeros(chosen.shape, bool)
    for t, k in np.ndindex(chosen.shape):
        if valid[t]:
            keep[t, k] = taken[chosen[t, k]] < rows
            taken[chosen[t, k]] += 1
    return keep


# ---- layout --------------------------------------------------------------------------------------


def test_capacity_rows_at_the_reference_shape():
    """One shard's 524,288 assignments over 384 experts at 1.15, and the smallest capacity."""
    assert layout.capacity_rows(524_288, 384, 1.15) == 1571
    assert layout.capacity_rows(3, 64, 1.0) == 1


@pytest.mark.parametrize(
    ("share", "most", "want"),
    [(0.0, 5, 1), (2.1, 8, 3), (7.5, 8, 8), (8.0, 8, 8), (3e9, 100, 100), (float("inf"), 2**31 - 1, 2**31 - 1)],
)
def test_a_share_beyond_int32_fills_the_buffer(share, most, want):
    """Fails when a share is cast before it is bounded, where a device wraps instead of saturating."""
    found = jax.jit(layout.limit, static_argnums=1)(jnp.float32(share), most)
    assert (int(found), found.dtype) == (want, jnp.int32)


ranks = jax.jit(layout.ranks, static_argnums=2)


@each_routing
def test_ranks_count_earlier_assignments(case):
    chosen, valid = ROUTINGS[case]
    got = ranks(jnp.asarray(chosen, jnp.int32), jnp.asarray(valid), 8)
    seen = np.zeros(8, int)
    for t, k in np.ndindex(chosen.shape):
        if valid[t]:
            assert got.rank[t, k] == seen[chosen[t, k]]
            seen[chosen[t, k]] += 1
    np.testing.assert_array_equal(got.load, seen)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 40), share=st.floats(0, 1))
def test_slots_are_one_to_one(seed, rows, share):
    rng = np.random.default_rng(seed)
    chosen = choose(rng, 40, 2, np.ones(5))
    keep = kept(chosen, rng.random(40) < share, rows, 5)
    rank = np.array(
        [[np.sum(keep.ravel()[: t * 2 + k] & (chosen.ravel()[: t * 2 + k] == chosen[t, k])) for k in (0, 1)] for t in range(40)]
    )
    at = layout.slots(*(jnp.asarray(x) for x in (chosen.astype(np.int32), rank.astype(np.int32), keep)), 5, rows)
    row, source = np.asarray(at.row), np.asarray(at.source).ravel()
    assert (row[~keep] == 5 * rows).all()
    assert len(set(row[keep])) == keep.sum() == (source < 80).sum()
    np.testing.assert_array_equal(source[row[keep]], np.flatnonzero(keep))
    np.testing.assert_array_equal(row[keep] // rows, chosen[keep])


def test_fairness_is_of_the_shards_that_have_work():
    """Five shards: one without a valid assignment counts for nothing; the others accept 5 of 10, 8 of 8, 3 of 4, 0 of 3."""
    m = jax.sharding.Mesh(np.asarray(jax.devices()[:5]), ("expert",))

    def fairness(valid, accepted):
        n = jnp.int32(0)
        return layout.fairness(layout.Ledger(n, valid[0], accepted[0], n, n, n), ("expert",))

    shard = jax.jit(jax.shard_map(fairness, mesh=m, in_specs=P("expert"), out_specs=P()))
    assert shard(jnp.array([10, 0, 8, 4, 3]), jnp.array([5, 0, 8, 3, 0])) == (0, 1)
    assert shard(jnp.array([10, 0, 0, 4, 0]), jnp.array([5, 0, 0, 3, 0])) == (0.5, 0.75)
    assert shard(jnp.zeros(5, jnp.int32), jnp.zeros(5, jnp.int32)) == (1, 0)


# ---- the oracle ----------------------------------------------------------------------------------


def plain_exchange(p, x, chosen, weights, valid):
    y = np.zeros_like(x)
    for t, k in np.ndindex(chosen.shape):
        if valid[t]:
            e = chosen[t, k]
            y[t] += weights[t, k] * ((silu(x[t] @ p.gate[e]) * (x[t] @ p.up[e])) @ p.down[e])
    return y


def run_of(pocket, *settings_):
    return spec.override(pocket, [*SMALL, *settings_])


@lru_cache
def program(carry, routing, capacity):
    """Outputs, ledger, and gradients to experts, tokens and weights for one random cotangent."""

    def loss(p, x, weights, chosen, valid):
        y, book = carry(p, x, chosen, weights, valid, routing, capacity)
        return jnp.sum(y * f32(normal(9, *x.shape))), (y, book)

    return programs.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


def carried(carry, p, x, chosen, weights, valid, routing, capacity):
    arguments = (*f32((p, x, weights)), jnp.asarray(chosen, jnp.int32), jnp.asarray(valid))
    (_, (y, book)), grads = program(carry, routing, capacity)(*arguments)
    return jax.device_get((y, grads, tuple(map(int, book))))


@each_routing
def test_dense_equals_plain(pocket, case):
    p, x, chosen, weights, valid = problem(case)
    y, _, book = carried(dense.dense, p, x, chosen, weights, valid, pocket.routing, "bounded")
    assert relative(y, plain_exchange(p, x, chosen, weights, valid)) < 1e-5
    assert book == (450, 3 * valid.sum(), 3 * valid.sum(), 0, 0, 3 * (~valid).sum())


# ---- local against the oracle --------------------------------------------------------------------


@each_routing
def test_bounded_equals_dense_without_the_dropped_assignments(pocket, case):
    p, x, chosen, weights, valid = problem(case)
    tight = run_of(pocket, "routing.receiver_capacity=0.8").routing
    keep = kept(chosen, valid, math.ceil(0.8 * 450 / 8))
    y, (dp, dx, dw), book = carried(local.local, p, x, chosen, weights, valid, tight, "bounded")
    y_dense, (dp_dense, dx_dense, dw_dense), _ = carried(
        dense.dense, p, x, chosen, weights * keep, valid, pocket.routing, "bounded"
    )
    assert_near((y, dp, dx), (y_dense, dp_dense, dx_dense))
    assert_near(dw, np.where(keep, dw_dense, 0))  # no gradient to the weight of a dropped assignment
    dropped = (valid[:, None] & ~keep).sum()
    assert book == (450, 3 * valid.sum(), keep.sum(), 0, dropped, 3 * (~valid).sum())
    assert book[2] + book[3] + book[4] + book[5] == book[0]
    assert dropped > 0 or case in ("nothing valid", "one valid token")


@each_routing
def test_dropless_equals_dense(pocket, case):
    p, x, chosen, weights, valid = problem(case)
    tight = run_of(pocket, "routing.receiver_capacity=0.5").routing
    y, grads, book = carried(local.local, p, x, chosen, weights, valid, tight, "dropless")
    y_dense, grads_dense, book_dense = carried(dense.dense, p, x, chosen, weights, valid, pocket.routing, "bounded")
    assert_near((y, grads), (y_dense, grads_dense))
    assert book == book_dense


def test_dropless_computes_only_the_blocks_that_it_needs():
    """150 rows over in one expert and 1 in another: two blocks of 128 and one, of at most 450 // 128 + 8."""
    over = jnp.array([0, 150, 0, 1, 0, 0, 0, 0], jnp.int32)
    chosen = jnp.tile(jnp.array([[1, 3, 5]], jnp.int32), (150, 1))
    rank = jnp.stack([jnp.arange(150), jnp.arange(-149, 1), jnp.full(150, -1)], 1).astype(jnp.int32)
    blocks = local._blocks(chosen, rank, jnp.ones((150, 3), bool), over)
    assert int(blocks.used) == 3 and blocks.expert.shape == (450 // 128 + 8,)
    np.testing.assert_array_equal(blocks.expert[:3], [1, 1, 3])
    np.testing.assert_array_equal((blocks.at.source < 450).sum(1)[:4], [128, 22, 1, 0])


# ---- the whole block -----------------------------------------------------------------------------


def placed(run, m):
    """Random parameters, tokens and validity on the mesh, the same for every mesh."""
    rng = np.random.default_rng(3)
    put = lambda x, where: jax.device_put(np.asarray(x, np.float32), NamedSharding(m, where))  # noqa: E731
    p = leaf.tree_map(lambda one: put(rng.normal(size=one.shape) * 2 / run.model.width**0.5, one.spec), exchange.leaves(run))
    valid = jax.device_put(normal(1, 8, 16) < 1, NamedSharding(m, mesh.B_S))
    return p, put(normal(0, 8, 16, run.model.width), mesh.B_S_D), valid


@lru_cache
def whole(run, capacity):
    """y, stats and gradients to parameters, tokens and bias; the statistics are in the loss, to show that they have none."""

    def loss(p, x, b, valid):
        y, stats = exchange.moe(p, x, b, valid, run, capacity=capacity)
        out = jax.sharding.reshard(f32(normal(2, *x.shape)), mesh.B_S_D)
        quiet = [jnp.sum(v) for v in jax.tree.leaves(stats) if v.dtype == jnp.float32]
        return jnp.sum(y.astype(jnp.float32) * out) + sum(quiet), (y, stats)

    return programs.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


def block(run, bias=None, capacity=None, spoil=False, dtype=jnp.float32):
    """The sparse block on the run's mesh; `spoil` puts NaN into the padding."""
    m = mesh.make(run)
    with jax.set_mesh(m):
        p, x, valid = placed(run, m)
        x = jnp.where(valid[:, :, None], x, jnp.nan if spoil else 0.0).astype(dtype)
        b = jnp.zeros(run.moe.experts) if bias is None else f32(bias)
        (_, (y, stats)), grads = whole(run, capacity)(p, x, b, valid)
        assert not np.asarray(grads[2]).any(), "no gradient reaches the bias"
        return jax.device_get((y, stats, grads[:2], p, x, valid))


def plain_block(p, x, valid, bias, moe):
    """The sparse block token by token, without drops."""
    y = np.zeros_like(x)
    for at in zip(*np.nonzero(valid), strict=True):
        t = x[at]
        s = t @ p.router
        chosen = np.argsort(-(s + bias), kind="stable")[: moe.experts_per_token]
        score = 1 / (1 + np.exp(-s[chosen]))
        weights = moe.combine_sum * score / score.sum()
        u = t
        if p.experts.latent is not None:
            u = t @ p.experts.latent.down
            u = u / np.sqrt((u**2).mean() + 1e-5) * p.experts.latent.gain
        r = p.experts.routed
        routed = sum(c * ((silu(u @ r.gate[e]) * (u @ r.up[e])) @ r.down[e]) for c, e in zip(weights, chosen, strict=True))
        y[at] = routed if p.experts.latent is None else routed @ p.experts.latent.up
        if p.experts.shared is not None:
            h = p.experts.shared
            y[at] += sum((silu(t @ h.gate[j]) * (t @ h.up[j])) @ h.down[j] for j in range(len(h.gate)))
    return y


@pytest.mark.parametrize(
    "changes",
    [[], ["moe.latent=none", "moe.shared_experts=0"], pytest.param(["moe.experts_per_token=8"], marks=pytest.mark.slow)],
)
def test_block_equals_plain(pocket, changes):
    run = run_of(pocket, *changes, "routing.capacity=dropless")
    bias = 0.3 * normal(5, 8)
    y, stats, _, p, x, valid = block(run, bias)
    wide = jax.tree.map(lambda w: np.asarray(w, np.float64), (p, x))
    assert relative(y, plain_block(*wide, valid, np.asarray(bias, np.float32), run.moe)) < 1e-5
    assert int(stats.ledger.receiver_dropped) == 0


def test_nan_in_padding_reaches_nothing(pocket):
    for capacity in ("bounded", "dropless"):
        run = run_of(pocket, f"routing.capacity={capacity}")
        clean, spoiled = (block(run, spoil=spoil)[:3] for spoil in (False, True))
        for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(spoiled), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("balance", "devices"), [("quantile", WITH_EXPERT), ("aux_loss", WITH_DATA)], ids=["expert", "data"])
def test_eight_devices_equal_one(pocket, balance, devices):
    """Output, gradients, statistics, auxiliary loss, ledger and next bias do not depend on the mesh."""
    choices = [f"routing.balance={balance}", "routing.capacity=dropless"]
    one, eight = block(run_of(pocket, *choices)), block(run_of(pocket, *choices, *devices))
    assert_near((eight[0], eight[2]), (one[0], one[2]))
    assert (sum(one[1].routing.cells), sum(eight[1].routing.cells)) == (8, 64)  # of each shard: the one thing that differs
    shared = [stats._replace(routing=stats.routing._replace(cells=None)) for stats in (eight[1], one[1])]
    for a, b in zip(*map(jax.tree.leaves, shared), strict=True):
        if np.asarray(a).dtype == np.int32:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert (one[1].aux_loss > 0) == (balance == "aux_loss")


@pytest.mark.parametrize("transport", ["pooled_wave", "ragged"])
def test_block_over_ranks_equals_dense(pocket, transport):
    """Output, gradients of router, experts, latent, shared and tokens, statistics and next bias, with NaN in the padding."""
    oracle = block(run_of(pocket, "routing.balance=quantile", "routing.capacity=dropless", *WITH_EXPERT))
    room = ["routing.sender_capacity=2", "routing.receiver_capacity=8", "routing.waves=2"]
    run = run_of(pocket, *WITH_EXPERT, f"routing.exchange={transport}", *room)
    y, stats, grads, *_ = block(run, spoil=True)
    assert_near((y, grads), (oracle[0], oracle[2]))
    assert stats.ledger == oracle[1].ledger
    assert_near((stats.routing, stats.next_bias), (oracle[1].routing, oracle[1].next_bias))


def test_evaluations_drop_nothing_where_training_drops(pocket):
    run = run_of(pocket, "routing.receiver_capacity=0.6")
    bounded, dropless = block(run), block(run, capacity="dropless")
    exact = block(run_of(pocket, "routing.capacity=dropless"))
    assert int(bounded[1].ledger.receiver_dropped) > 0 == int(dropless[1].ledger.receiver_dropped)
    assert_near((dropless[0], dropless[2]), (exact[0], exact[2]))
    assert relative(bounded[0], exact[0]) > 0.01


@pytest.mark.parametrize(
    "where",
    [[], pytest.param([*WITH_EXPERT, "routing.exchange=pooled_wave", "routing.waves=2"], marks=pytest.mark.slow)],
    ids=["local", "pooled_wave"],
)
def test_bf16_follows_fp32(pocket, where):
    room = ["routing.sender_capacity=2", "routing.receiver_capacity=8"] if where else []
    wide, narrow = block(run_of(pocket)), block(run_of(pocket, *where, *room), dtype=jnp.bfloat16)
    assert narrow[0].dtype == jnp.bfloat16 and narrow[1].next_bias.dtype == np.float32
    assert all(g.dtype == np.float32 for g in jax.tree.leaves(narrow[2][0]))
    ok = wide[5]
    error = np.linalg.norm(narrow[0].astype(np.float64) - wide[0], axis=-1)[ok] / np.linalg.norm(wide[0], axis=-1)[ok]
    assert np.median(error) < 0.01  # a token whose selection changed may differ more
    assert int(narrow[1].ledger.accepted) == 3 * ok.sum()


# ---- what the program is made of -----------------------------------------------------------------


@pytest.mark.parametrize("capacity", ["bounded", "dropless"])
@pytest.mark.parametrize("where", [[], [*WITH_EXPERT, "routing.exchange=pooled_wave"]], ids=["local", "pooled_wave"])
def test_no_scatter_moves_activations(pocket, where, capacity):
    """Scatters write whole numbers alone: maps, never activations, forward or backward."""
    run = run_of(pocket, *where)
    m = mesh.make(run)
    with jax.set_mesh(m):
        p, x, valid = placed(run, m)
        loss = lambda p, x: jnp.sum(exchange.moe(p, x, jnp.zeros(8), valid, run, capacity=capacity)[0])  # noqa: E731
        found = list(equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(p, x).jaxpr))
    names = {one.primitive.name for one in found}
    assert {"gather", "dot_general", "scatter"} <= names
    for one in found:
        if one.primitive.name.startswith("scatter"):
            assert one.outvars[0].aval.dtype == jnp.int32, one


def test_an_unknown_transport_is_refused():
    with pytest.raises(ValueError, match=r"'ring' is not one of dense, local, pooled_wave, ragged; nearest: "):
        exchange.transport("ring")
