"""Pooled waves against the dense oracle: with room for all, and with exactly the refused assignments removed."""

import dataclasses
import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from argosy import runs, spec
from argosy.model import experts
from argosy.model.exchange import dense, pooled_wave

E, K, Z, F = 8, 3, 8, 6
TOKENS = 120  # over all ranks


def tuned(waves=1, **changes):
    return dataclasses.replace(runs.find("pocket").routing, waves=waves, **changes)


def on_ranks(ranks, function):
    """`function` in a shard_map over a mesh whose axis `expert` has that many ranks."""
    mesh = Mesh(np.asarray(jax.devices()[:ranks]).reshape(1, 1, 1, ranks), spec.AXES, axis_types=(AxisType.Explicit,) * 4)
    split = P("expert")
    return mesh, jax.shard_map(function, in_specs=(split,) * 5, out_specs=split)


@lru_cache
def program(ranks, choice, capacity="bounded"):
    """Outputs, each rank's ledger, and gradients to experts, tokens and weights for one random cotangent."""

    def one(p, x, chosen, weights, valid):
        y, book = pooled_wave.pooled_wave(p, x, chosen, weights, valid, choice, capacity)
        return y, jax.tree.map(lambda n: n[None] + 0 * chosen[:1, 0], book)

    mesh, shard = on_ranks(ranks, one)

    def loss(p, x, weights, chosen, valid):
        y, book = shard(p, x, chosen, weights, valid)
        out = np.random.default_rng(9).normal(size=x.shape).astype(np.float32)
        return jnp.sum(y * jax.sharding.reshard(jnp.asarray(out), P("expert", None))), (y, book)

    return mesh, jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@lru_cache
def oracle():
    def loss(p, x, weights, chosen, valid):
        y, _ = dense.dense(p, x, chosen, weights, valid, tuned(), "bounded")
        out = np.random.default_rng(9).normal(size=x.shape).astype(np.float32)
        return jnp.sum(y * jnp.asarray(out)), y

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


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
    pool = math.ceil(choice.sender_capacity * assignments / (ranks * waves))
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


@pytest.mark.parametrize(("ranks", "waves"), [(1, 1), (2, 2), (4, 1), (8, 3)])
def test_with_room_it_equals_dense(ranks, waves):
    choice = tuned(waves, sender_capacity=ranks + 1.0, receiver_capacity=E + 1.0)
    for case in ROUTINGS:
        assert check(case, ranks, choice) == (0, 0), case


@pytest.mark.parametrize(("ranks", "waves"), [(1, 2), (4, 3), (8, 1)])
def test_without_room(ranks, waves):
    choice = tuned(waves, sender_capacity=0.9, receiver_capacity=0.8)
    print([check(case, ranks, choice) for case in ROUTINGS])


@pytest.mark.parametrize("ranks", [4])
def test_dropless(ranks):
    choice = tuned(2, sender_capacity=0.9, receiver_capacity=0.5)
    for case in ROUTINGS:
        check(case, ranks, choice, "dropless")
