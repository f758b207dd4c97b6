"""Pooled waves against the dense oracle: with room for all, and with exactly the refused assignments removed."""

import dataclasses
import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P
from programs import equations

from argosy import runs, spec
from argosy.model import experts
from argosy.model.exchange import dense, pooled_wave
from argosy.plan import work

E, K, Z, F = 8, 3, 8, 6
TOKENS = 120  # over all ranks


def tuned(waves=1, **changes):
    return dataclasses.replace(runs.find("pocket").routing, waves=waves, **changes)


# ---- the transport on a mesh whose axis `expert` has some ranks --------------------------------------


@lru_cache
def program(ranks, choice, capacity="bounded"):
    """Outputs, each rank's ledger, and gradients to experts, tokens and weights for one random cotangent."""

    def one(p, x, chosen, weights, valid):
        y, book = pooled_wave.pooled_wave(p, x, chosen, weights, valid, choice, capacity)
        return y, jax.tree.map(lambda n: n[None] + 0 * chosen[:1, 0], book)

    def loss(p, x, weights, chosen, valid):
        y, book = jax.shard_map(one, in_specs=(P("expert"),) * 5, out_specs=P("expert"))(p, x, chosen, weights, valid)
        return jnp.sum(y * jax.sharding.reshard(cotangent(x), P("expert", None))), (y, book)

    mesh = Mesh(np.asarray(jax.devices()[:ranks]).reshape(1, 1, 1, ranks), spec.AXES, axis_types=(AxisType.Explicit,) * 4)
    return mesh, programs.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


def cotangent(x):
    return jnp.asarray(np.random.default_rng(9).normal(size=x.shape).astype(np.float32))


@lru_cache
def oracle():
    def loss(p, x, weights, chosen, valid):
        y, _ = dense.dense(p, x, chosen, weights, valid, tuned(), "bounded")
        return jnp.sum(y * cotangent(x)), y

    return programs.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


def problem(chosen, valid):
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    p = experts.Routed(0.5 * normal(E, Z, F), 0.5 * normal(E, Z, F), 0.5 * normal(E, F, Z))
    return p, normal(len(valid), Z), np.abs(normal(*chosen.shape)), chosen.astype(np.int32), valid


def relative(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)


def choose(rng, odds):
    return np.array([rng.choice(E, K, replace=False, p=odds / odds.sum()) for _ in range(TOKENS)])


def routings():
    rng = np.random.default_rng(0)
    every, all_valid, skewed = np.ones(E), np.ones(TOKENS, bool), 2.0 ** -np.arange(E)
    some = rng.random(TOKENS) < 0.7
    some[TOKENS // 8 * 3 : TOKENS // 8 * 5] = False  # of 8 ranks, 3 and 4 have no valid token
    return {
        "even": ((np.arange(TOKENS)[:, None] * K + np.arange(K)[None, :]) % E, all_valid),
        "skewed": (choose(rng, skewed), all_valid),
        "all to one": (np.full((TOKENS, K), 5), all_valid),
        "an empty expert": (choose(rng, np.where(np.arange(E) == 3, 0.0, every)), all_valid),
        "padding": (choose(rng, skewed), some),
        "nothing valid": (choose(rng, every), np.zeros(TOKENS, bool)),
    }


ROUTINGS = routings()


def simulated(chosen, valid, ranks, choice, assignments):
    """Which assignments are accepted, and each sender's and receiver's refusals: A1 row by row, in numpy."""
    local, waves = E // ranks, choice.waves
    ceil32 = lambda a, b: int(np.ceil(np.float32(a) * np.float32(b)))  # noqa: E731
    pool = min(assignments, math.ceil(choice.sender_capacity * assignments / (ranks * waves)))
    most = math.ceil(choice.receiver_capacity * assignments / (local * waves))
    keep = np.zeros(chosen.shape, bool)
    by_rank = np.arange(len(valid)).reshape(ranks, -1)
    sent = np.zeros((waves, ranks, ranks, pool), object)  # wave, destination, sender, slot
    sender = np.zeros(ranks, int)
    for s, tokens in enumerate(by_rank):
        v = int(valid[tokens].sum()) * K
        limit = min(max(ceil32(v, choice.sender_capacity / (ranks * waves)), 1), pool)
        count = np.zeros(ranks, int)
        for t in tokens[valid[tokens]]:
            for k in range(K):
                to = chosen[t, k] // local
                wave, slot = count[to] % waves, count[to] // waves
                count[to] += 1
                if slot < limit:
                    sent[wave, to, s, slot] = (t, k)
                else:
                    sender[s] += 1
    rows = min(max(ceil32(int(valid.sum()) * K, choice.receiver_capacity / (E * waves)), 1), most)
    receiver = np.zeros(ranks, int)
    for w in range(waves):
        for to in range(ranks):
            taken = np.zeros(E, int)
            for slot in range(pool):
                for s in range(ranks):
                    if sent[w, to, s, slot]:
                        t, k = sent[w, to, s, slot]
                        taken[chosen[t, k]] += 1
                        keep[t, k] = taken[chosen[t, k]] <= rows
                        receiver[s] += not keep[t, k]
    return keep, sender, receiver


def check(case, ranks, choice, capacity="bounded"):
    chosen, valid = ROUTINGS[case]
    p, x, weights, chosen, valid = problem(chosen, valid)
    keep, sender, receiver = simulated(chosen, valid, ranks, choice, TOKENS // ranks * K)
    if capacity == "dropless":
        keep, sender, receiver = np.broadcast_to(valid[:, None], chosen.shape), 0 * sender, 0 * receiver
    spoiled = (
        np.where(valid[:, None], x, np.nan),
        np.where(valid[:, None], weights, np.nan),
        np.where(valid[:, None], chosen, 10**6),
    )
    mesh, run = program(ranks, choice, capacity)
    with jax.set_mesh(mesh):
        put = lambda a: jax.device_put(a, jax.NamedSharding(mesh, P("expert")))  # noqa: E731
        args = jax.tree.map(put, (p, spoiled[0], spoiled[1], spoiled[2].astype(np.int32), valid))
        (_, (y, book)), grads = jax.device_get(run(*args))
    (_, y_dense), (dp, dx, dw) = oracle()(p, x, weights * keep, chosen, valid)
    expected = (y_dense, dp, dx, np.where(keep, dw, 0))
    for a, b in zip(jax.tree.leaves((y, *grads)), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(a).all()
        assert relative(a, b) < 1e-5
    per = valid.reshape(ranks, -1).sum(1) * K
    np.testing.assert_array_equal(book.valid, per)
    np.testing.assert_array_equal(book.sender_dropped, sender)
    np.testing.assert_array_equal(book.receiver_dropped, receiver)
    np.testing.assert_array_equal(book.accepted, keep.reshape(ranks, -1).sum(1))
    np.testing.assert_array_equal(book.padding, TOKENS // ranks * K - per)
    assert (book.accepted + book.sender_dropped + book.receiver_dropped + book.padding == book.assignments).all()
    return int(sender.sum()), int(receiver.sum())


@pytest.mark.parametrize(
    ("ranks", "waves"), [(1, 3), (4, 2), *(pytest.param(*c, marks=pytest.mark.slow) for c in [(2, 1), (8, 3)])]
)
def test_with_room_for_all_it_equals_dense(ranks, waves):
    choice = tuned(waves, sender_capacity=float(ranks), receiver_capacity=float(E))
    for case in ROUTINGS:
        assert check(case, ranks, choice) == (0, 0), case


def test_room_ends_where_nothing_more_can_come():
    """However large the factors: a wave's part of a device's 90 assignments in a pool, all pools' rows at an expert."""
    choice = tuned(4, sender_capacity=1e9, receiver_capacity=1e30)
    assert pooled_wave.sizes(90, 4, 2, 8, choice) == (23, 3, 4 * 23)
    for case in ("skewed", "all to one"):
        assert check(case, 4, choice) == (0, 0), case


@pytest.mark.parametrize(("ranks", "waves"), [pytest.param(4, 3, marks=pytest.mark.slow), (8, 2)])
def test_without_room_it_equals_dense_without_the_refused(ranks, waves):
    """Which are refused is told by `simulated`; both kinds occur."""
    choice = tuned(waves, sender_capacity=0.9, receiver_capacity=0.8)
    sender, receiver = zip(*(check(case, ranks, choice) for case in ROUTINGS), strict=True)
    assert sum(s > 0 for s in sender) >= 3 and sum(r > 0 for r in receiver) >= 3
    assert (sender[-1], receiver[-1]) == (0, 0)  # nothing valid


def test_dropless_over_ranks_equals_dense():
    """At a capacity that would refuse many. Two waves of four ranks, as of any, are as exact as none."""
    choice = tuned(2, sender_capacity=0.5, receiver_capacity=0.5)
    for case in ROUTINGS:
        check(case, 4, choice, "dropless")


def test_dropless_in_parts_equals_dense(monkeypatch):
    """In memory for a fifth of the rows: 30 tokens of each of four ranks go six at a time."""
    monkeypatch.setattr(work, "GATHERED_ROWS", 4 * 6 * K)
    assert work.gathered_parts(30, K, 4) == 5
    program.cache_clear()
    check("padding", 4, tuned(2, sender_capacity=0.5, receiver_capacity=0.5), "dropless")
    program.cache_clear()


arrange = jax.jit(pooled_wave._arrange, static_argnums=(1, 2))


def test_equal_senders_lose_alike():
    """4 senders with 3 rows each for one expert that takes 6: 2, 2, 1, 1 are kept, slot by slot over the senders."""
    size = pooled_wave.Sizes(pool=3, headers=1, rows=6)
    arrived, at, lost = arrange(jnp.ones((4, 1, 8)), size, 1, jnp.int32(6))
    np.testing.assert_array_equal(lost, [1, 1, 2, 2])
    np.testing.assert_array_equal(at.source, [[0, 3, 6, 9, 1, 4]])  # sender x 3 + slot of each row
    np.testing.assert_array_equal(arrived.source, [[1, 5, 9, 13, 2, 6]])  # behind one header row of each sender


def test_expert_numbers_survive_bfloat16():
    """256 local experts in the headers of rows of 100 values; one more is refused (`spec`)."""
    codes = jnp.arange(257, dtype=jnp.int32)[None]
    size = pooled_wave.Sizes(pool=257, headers=3, rows=1)
    sent = pooled_wave._headers(codes, size, 100).astype(jnp.bfloat16)
    assert sent.shape == (1, 3, 100)
    _, at, lost = arrange(sent, size, 256, jnp.int32(1))
    np.testing.assert_array_equal(at.source[:, 0], np.arange(1, 257))  # slot 0 was empty
    assert not lost.any()
    with pytest.raises(ValueError, match=r"257.*mesh\.expert"):
        spec.override(runs.find("pocket"), ["routing.exchange=pooled_wave", "moe.experts=257"])


# ---- the reference shape: 64 ranks, 65,536 tokens each -----------------------------------------------


@pytest.mark.parametrize(("latent", "kilobytes"), [("norm", 113.1), ("none", 226.2)])
def test_the_traced_exchange_of_the_reference_run(latent, kilobytes):
    """Two all-to-alls per wave and no other; bytes per token and layer from their operands in bfloat16.

    56.6 kB out, headers with them, and 56.5 kB back; twice that without the latent width (expert_parallel A1).
    """
    run = spec.override(runs.find("marin-535b"), [f"moe.latent={latent}"])
    z, f, e, k = spec.expert_width(run.moe, run.model), run.moe.hidden, run.moe.experts, run.moe.experts_per_token
    tokens = spec.tokens_per_step(run) // spec.devices(run)
    size = pooled_wave.sizes(tokens * k, 64, 6, z, run.routing)
    assert (size.pool, size.headers, size.rows) == (3141, 2 if latent == "norm" else 1, 33_497)

    mesh = AbstractMesh((1, 1, 1, 64), spec.AXES, axis_types=(AxisType.Explicit,) * 4)

    def array(dtype, *shape):
        where = jax.sharding.NamedSharding(mesh, P("expert", *(None,) * (len(shape) - 1)))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def whole(p, x, chosen, weights, valid):
        return pooled_wave.pooled_wave(p, x, chosen, weights, valid, run.routing, "bounded")[0]

    p = experts.Routed(*(array(jnp.bfloat16, e, *s) for s in ((z, f), (z, f), (f, z))))
    n = 64 * tokens
    rest = array(jnp.bfloat16, n, z), array(jnp.int32, n, k), array(jnp.float32, n, k), array(jnp.bool_, n)
    with jax.sharding.use_abstract_mesh(mesh):
        shard = jax.shard_map(whole, in_specs=(P("expert"),) * 5, out_specs=P("expert"))
        found = list(equations(jax.make_jaxpr(shard)(p, *rest).jaxpr))
    sent = [one.invars[0].aval for one in found if one.primitive.name == "all_to_all"]
    assert [a.shape for a in sent[:2]] == [(64, size.pool + size.headers, z), (64, size.pool, z)]
    assert len(sent) == 2 * run.routing.waves == 6
    assert sum(a.size * a.dtype.itemsize for a in sent) / tokens / 1000 == pytest.approx(kilobytes, abs=0.05)
    others = {one.primitive.name for one in found} & {"all_gather", "psum", "ppermute", "ragged_all_to_all", "reduce_scatter"}
    counted = [one for one in found if one.primitive.name in ("psum_invariant", "reduce_scatter")]
    assert others <= {"reduce_scatter"} and sum(one.invars[0].aval.size for one in counted) == 1 + 64  # whole numbers
