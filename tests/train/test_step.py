"""One update, whatever is accumulated, rounded or kept in host memory: the same update.

Expected values are the unsplit batch's, float32 weights', the device's; and numpy's, from the formulas.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib._muon import orthogonalize_via_newton_schulz

from argosy import leaf, runs, spec
from argosy import mesh as meshes
from argosy.batch import Batch
from argosy.model import transformer
from argosy.plan import memory, scaling
from argosy.train import step as steps

SMALL = [
    "model.vocab=64", "model.width=16", "model.layers=1", "model.heads=2", "model.head_width=8", "model.kv_heads_local=1",
    "model.window=8", "model.gate_rank=4", "data.seq_len=16", "data.batch_seqs=8", "moe.experts=4", "moe.experts_per_token=2",
    "moe.hidden=8", "moe.latent_width=8", "moe.shared_experts=0", "model.convolution=none", "routing.capacity=dropless",
    "routing.histogram_bins=100", "compute.attention_block=16", "optim.horizon_tokens=4096", "optim.warmup_frac=0",
]  # fmt: skip


COEFFICIENTS = np.array(  # reference_run 3.2
    [[4.0848, -6.8946, 2.9270], [3.9505, -6.3029, 2.6377], [3.7418, -5.5913, 2.3037], [2.8769, -3.1427, 1.2046],
     [2.8366, -3.0525, 1.2012]], np.float32,
)  # fmt: skip


@cache
def after(*settings, updates=2):
    """The state and the statistics after some updates on one batch, a third of whose tokens are padding."""
    run = spec.override(runs.find("pocket"), [*SMALL, *settings])
    rng = np.random.default_rng(0)
    text = rng.integers(1, 64, (8, 17)).astype(np.int32)
    starts = np.repeat(np.where(np.arange(16) < 6, 0, 6).astype(np.int32)[None], 8, 0)
    valid = rng.random((8, 16)) < np.linspace(0.3, 1, 8)[:, None]  # so that parts hold different numbers of tokens
    mesh = meshes.make(run)
    where = jax.sharding.NamedSharding(mesh, meshes.B_S)
    with jax.set_mesh(mesh):
        batch = jax.tree.map(lambda x: jax.device_put(x, where), Batch(text[:, :-1], text[:, 1:], starts, valid))
        state, update = steps.init(run, mesh), steps.compiled(run)
        for like, x in zip(jax.tree.leaves(steps.abstract(run, mesh)), jax.tree.leaves(state), strict=True):
            assert (like.shape, like.dtype) == (x.shape, x.dtype) and like.sharding.is_equivalent_to(x.sharding, x.ndim)
        for _ in range(updates):
            before = jax.device_get(state)
            kinds = [x.sharding.memory_kind for x in jax.tree.leaves(state)]
            state, stats = update(state, batch)
            assert kinds == [x.sharding.memory_kind for x in jax.tree.leaves(state)]
        return run, state, before, jax.device_get(state), jax.device_get(stats)


def near(a, b, tolerance):
    """Relative error of every leaf, norm of the difference over the norm; whole numbers exactly."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        if np.issubdtype(np.asarray(x).dtype, np.integer):
            np.testing.assert_array_equal(x, y, jax.tree_util.keystr(path))
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= tolerance * np.linalg.norm(x), jax.tree_util.keystr(path)


POOLED = ["routing.exchange=pooled_wave", "routing.capacity=bounded"]
POOLED += ["routing.sender_capacity=2", "routing.receiver_capacity=4"]  # room for all, wherever they go
ADAMW = "optim.rule=adamw"  # no Newton-Schulz, which half of the time to compile would go into


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(("compute.accumulate=4",), marks=pytest.mark.slow),
        pytest.param(("compute.accumulate=2", "mesh.data=2", "mesh.replica=2"), marks=pytest.mark.slow),
        pytest.param(("compute.accumulate=2", "mesh.data=2", "mesh.expert=2", *POOLED), marks=pytest.mark.slow),
    ],
)
def test_accumulation_changes_no_number(cut):
    """Fails with a mean of means, with a bias, load or count of one part alone, with gradients weighed by parts."""
    _, _, _, whole, seen = after(ADAMW)
    _, _, _, state, stats = after(ADAMW, *cut)
    near(whole, state, 1e-6)
    keep = lambda s: (s.loss, s.cross_entropy, s.tokens, s.grad_norm, s.param_norm)  # noqa: E731
    near(keep(seen), keep(stats), 1e-6)
    near(seen.layers.ledger, stats.layers.ledger, 0)
    one, cut_up = (s.layers.routing._replace(cells=None) for s in (seen, stats))  # cells are of shards and parts
    near(one, cut_up, 1e-6)
    assert stats.layers.routing.cells.sum() > seen.layers.routing.cells.sum()
    assert stats.layers.part is None


BF16 = ("compute.precision=bf16",)
HALF = (*BF16, "compute.params=bf16", "compute.masters=pinned_host", "compute.optimizer_state=pinned_host")


@pytest.mark.slow
def test_bf16_weights_with_masters_in_host_memory_change_no_bit():
    """Fails when an update starts from rounded weights, or a weight is rounded that float32 weights would not be."""
    _, _, _, full, seen = after(*BF16)
    _, live, _, half, stats = after(*HALF)
    jax.tree.map(np.testing.assert_array_equal, steps.kept(full), steps.kept(half))
    jax.tree.map(np.testing.assert_array_equal, seen, stats)
    flat = leaf.flatten(transformer.leaves(after(*HALF)[0]))
    kinds = {name: one.kind for name, one in flat.items()}
    for name, p in zip(kinds, jax.tree.leaves(live.params), strict=True):
        assert p.dtype == ("float32" if kinds[name] == "plain" else "bfloat16"), name
        assert p.sharding.memory_kind == "device"
    for x in (*jax.tree.leaves(live.opt), *jax.tree.leaves(live.masters)):
        assert x.dtype == "float32" and x.sharding.memory_kind == "pinned_host"
    assert len(jax.tree.leaves(live.masters)) == sum(kind != "plain" for kind in kinds.values())
    for path, m in jax.tree_util.tree_leaves_with_path(half.masters):
        p = dict(jax.tree_util.tree_leaves_with_path(half.params))[path]
        np.testing.assert_array_equal(p, m.astype(p.dtype), leaf.name(path))


@pytest.mark.parametrize(
    "settings", [pytest.param(HALF, marks=pytest.mark.slow), ("compute.optimizer_state=pinned_host",)], ids=["masters", "state"]
)
def test_a_start_in_host_memory_is_the_same_and_made_leaf_by_leaf(monkeypatch, settings):
    """Fails when where masters and state stay changes a bit of them, or all of them are on the device before they move."""
    run = spec.override(runs.find("pocket"), [*SMALL, "mesh.data=2", *settings])
    mesh, init, seen = meshes.make(run), leaf.init, []

    def held(arrays, place):
        return sum(x.nbytes for x in arrays if x.sharding.memory_kind == place)

    def watched(leaves, *rest):
        mine = [x for x in jax.live_arrays() if id(x) not in known]
        seen.append((*leaf.flatten(leaves), held(mine, "device"), held(mine, "pinned_host")))
        return init(leaves, *rest)

    with jax.set_mesh(mesh):
        whole = leaf.init(transformer.leaves(run), mesh, run.seed)
        known = {id(x): x for x in jax.live_arrays()}  # kept, so that no other array is given their place
        monkeypatch.setattr(leaf, "init", watched)
        state = steps.init(run, mesh)
    jax.tree.map(np.testing.assert_array_equal, steps.weights(state), whole)
    assert not any(np.any(x) for x in jax.tree.leaves((state.opt, state.router_bias, state.step)))
    for like, x in zip(jax.tree.leaves(steps.abstract(run, mesh)), jax.tree.leaves(state), strict=True):
        assert (like.shape, like.dtype, like.sharding.memory_kind) == (x.shape, x.dtype, x.sharding.memory_kind)
        assert like.sharding.is_equivalent_to(x.sharding, x.ndim)
    # As each is made, exactly those before it are there, and where they stay.
    assert [name for name, *_ in seen] == list(leaf.flatten(transformer.leaves(run)))
    stay = {name: [0, 0] for name, *_ in seen}
    for part in (state.params, state.opt, state.masters):
        for path, x in jax.tree_util.tree_leaves_with_path(part):
            name = next(known for known in stay if f"{leaf.name(path)}/".startswith(f"{known}/"))
            stay[name][x.sharding.memory_kind == "pinned_host"] += x.nbytes
    before = np.cumsum([[0, 0], *stay.values()], 0)[:-1]
    np.testing.assert_array_equal([sizes for _, *sizes in seen], before)


@pytest.mark.slow
def test_masters_are_stepped_by_the_formulas():
    """Adam on the router's masters and MuonH's radius and length on those of q, in numpy, from the recorded moments."""
    run, _, before, state, _ = after(*HALF)
    rates, t = scaling.rates(run), 1  # the second update; no warm-up, a linear decay to final_frac
    share = 1 - (1 - run.optim.final_frac) * t / spec.steps(run)
    m, v, w = (np.asarray(x, np.float64) for x in (*state.opt.blocks.moe.router, before.masters.blocks.moe.router))
    u = m / (1 - rates.beta1 ** (t + 1)) / (np.sqrt(v / (1 - rates.beta2 ** (t + 1))) + rates.eps)
    np.testing.assert_allclose(state.masters.blocks.moe.router, w - rates.adam_lr * share * u, rtol=1e-5, atol=1e-9)
    old, new = (np.asarray(s.masters.blocks.attention.q[0], np.float64) for s in (before, state))
    radius, eta = np.linalg.norm(old), rates.muonh_lr * share
    assert np.linalg.norm(new) == pytest.approx(radius, rel=1e-5)
    gram = np.asarray(state.opt.blocks.attention.q.m[0], np.float64)
    g = 0.95 * gram + gram - 0.95 * np.asarray(before.opt.blocks.attention.q.m[0], np.float64)
    direction = np.asarray(orthogonalize_via_newton_schulz(jnp.asarray(g, jnp.float32), jnp.asarray(COEFFICIENTS)), np.float64)
    ahead = old - eta * radius * direction / np.linalg.norm(direction)
    expected = ahead * radius / np.linalg.norm(ahead)
    assert np.linalg.norm(new - expected) < 0.02 * np.linalg.norm(expected - old)  # its products are bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["hyperball", "adamw"])
def test_optimizer_state_in_host_memory_changes_no_bit(rule):
    """Fails when a leaf is stepped with another's state, or with an old one."""
    _, _, _, here, seen = after(f"optim.rule={rule}")
    _, live, _, there, stats = after(f"optim.rule={rule}", "compute.optimizer_state=pinned_host", "mesh.replica=1")
    jax.tree.map(np.testing.assert_array_equal, here, there)
    jax.tree.map(np.testing.assert_array_equal, seen, stats)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(live.opt)} == {"pinned_host"}


@pytest.mark.parametrize("settings", [(), HALF, (*HALF, "mesh.replica=2", "mesh.expert=2", "routing.exchange=pooled_wave")])
def test_state_takes_the_bytes_that_are_planned(settings):
    """Fails when a leaf lies elsewhere, is wider, or is divided otherwise than `argosy plan` counts."""
    run = spec.override(runs.find("pocket"), [*SMALL, *settings])
    mesh = meshes.make(run)
    with jax.set_mesh(mesh):
        state = steps.abstract(run, mesh)
    found = {"device": {}, "host": {}}
    for kind, tree in (("params", state.params), ("masters", state.masters), ("optimizer_state", state.opt)):
        for x in jax.tree.leaves(tree):
            place = "host" if x.sharding.memory_kind == "pinned_host" else "device"
            size = np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            found[place][kind] = found[place].get(kind, 0) + size
    assert found == memory.steady(run)


def test_a_checkpoint_holds_the_same_whatever_the_choices():
    """Fails when a choice of memory changes what is saved, or a restored state is not the one that was saved."""
    run, live, _, state, _ = after(ADAMW, *HALF)
    plain = spec.override(runs.find("pocket"), [*SMALL, ADAMW, *BF16])
    for choices in (run, plain, replace(plain, compute=replace(plain.compute, accumulate=2))):
        with jax.set_mesh(meshes.make(choices)):
            held = steps.kept(steps.abstract(choices, meshes.make(choices)))
        shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(held)]
        assert shapes == [(x.shape, x.dtype) for x in jax.tree.leaves(steps.kept(state))]
        assert jax.tree.structure(held) == jax.tree.structure(steps.kept(state))
    with jax.set_mesh(meshes.make(run)):
        again = steps.resumed(run, steps.kept(live))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), state)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(live), strict=True):
        assert a.dtype == b.dtype and a.sharding.memory_kind == b.sharding.memory_kind
