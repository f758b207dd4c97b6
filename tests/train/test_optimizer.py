"""Optimizers against numpy float64 written from the formulas, against optax, and against themselves on eight devices."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from optax.contrib import muon as optax_muon
from optax.contrib._muon import orthogonalize_via_newton_schulz

from argosy import leaf, mesh, spec
from argosy.leaf import Leaf
from argosy.plan import scaling
from argosy.train import optimizer, schedule

FSDP = ("data", "expert")
LEAVES = {
    "wide": Leaf("D F", (16, 24), P(FSDP, None), 0.1, "matrix", "latent"),
    "tall": Leaf("L HA D", (3, 24, 16), P(None, None, FSDP), 0.1, "matrix", "attention"),
    "experts": Leaf("L E Z F", (2, 8, 8, 16), P(None, "expert", None, "data"), 0.1, "matrix", "routed"),
    "shared": Leaf("L J D G", (2, 2, 16, 8), P(None, None, FSDP, None), 0.1, "matrix", "shared"),
    "readout": Leaf("D V", (16, 40), P(FSDP, None), 0.1, "readout", "readout"),
    "embed": Leaf("V D", (40, 16), P(None, None), 0.1, "plain", "embed"),
    "gain": Leaf("L D", (2, 16), P(None, None), "ones", "plain", "norm"),
    "taps": Leaf("L taps D", (2, 4, 16), P(None, None, None), "identity", "plain", "conv"),
    "router": Leaf("L D E", (2, 16, 8), P(None, None, None), 0.1, "gate", "router"),
    "head_gate": Leaf("L D H", (2, 16, 4), P(None, FSDP, None), "zeros", "gate", "head_gate"),
}
RADIUS = {  # dims that share one radius, written out by hand
    "joint": {"wide": (0, 1), "tall": (1, 2), "experts": (1, 2, 3), "shared": (2, 3)},
    "per_expert": {"wide": (0, 1), "tall": (1, 2), "experts": (2, 3), "shared": (2, 3)},
}
DION = np.array(  # the five-step table of reference_run 3.2, typed in once more
    [
        [4.0848, -6.8946, 2.9270],
        [3.9505, -6.3029, 2.6377],
        [3.7418, -5.5913, 2.3037],
        [2.8769, -3.1427, 1.2046],
        [2.8366, -3.0525, 1.2012],
    ]
)


def a_run(pocket, *settings):
    """200 updates of pocket, past a short warm-up at once."""
    return spec.override(pocket, ["optim.horizon_tokens=409600", "optim.warmup_frac=0.005", *settings])


def gradients(step, leaves=LEAVES):
    """Gradients of uneven size over layers and experts; expert 3 never gets a token."""
    rng = np.random.default_rng(step)
    out = {
        name: rng.normal(size=x.shape) * rng.lognormal(size=(*x.shape[:-2], 1, 1)) for name, x in leaves.items() if x.shape[1:]
    }
    if "experts" in out:
        out["experts"][:, 3] = 0.0
    return {name: jnp.asarray(g, jnp.float32) for name, g in out.items()}


def on_mesh(device_mesh, leaves, arrays):
    return {name: jax.device_put(arrays[name], NamedSharding(device_mesh, x.spec)) for name, x in leaves.items()}


def first(leaves=LEAVES):
    """Parameters to start from: noise where leaves start as noise."""
    fixed = {"ones": jnp.ones, "identity": jnp.ones, "zeros": jnp.zeros}
    noise = {name: 0.1 * np.random.default_rng(i).normal(size=x.shape) for i, (name, x) in enumerate(leaves.items())}
    return {
        name: fixed[x.init](x.shape) if x.init in fixed else jnp.asarray(noise[name], jnp.float32) for name, x in leaves.items()
    }


def some(*names):
    return {name: LEAVES[name] for name in names}


def train(run, steps, leaves=LEAVES, gradient=None):
    """Parameters after each update, and the last `Update`, on the run's mesh."""
    gradient = gradient or partial(gradients, leaves=leaves)
    device_mesh = mesh.make(run)
    with jax.set_mesh(device_mesh):
        opt = optimizer.make(run, leaves)
        params = on_mesh(device_mesh, leaves, first(leaves))
        state = opt.init(params)
        one = jax.jit(opt.update)
        history, update = [jax.device_get(params)], None
        for step in range(steps):
            update = one(on_mesh(device_mesh, leaves, gradient(step)), state, params, jnp.int32(step))
            params, state = update.params, update.state
            history.append(jax.device_get(params))
    return history, update


def sums(a, b, dims):
    return np.sum(a * b, axis=dims, keepdims=True)


def newton_schulz64(g):
    tall = g.shape[0] > g.shape[1]
    x = g.T if tall else g
    x = x / (np.linalg.norm(x) + 1e-8)
    for a, b, c in DION:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def hyperball64(w, d, eta, dims):
    norm = np.sqrt(sums(w, w, dims))
    moved = w - eta * norm * d / np.maximum(np.sqrt(sums(d, d, dims)), 1e-10)
    return moved * norm / np.maximum(np.sqrt(sums(moved, moved, dims)), 1e-10)


def each_matrix(f, x):
    return np.stack([f(m) for m in x.reshape(-1, *x.shape[-2:])]).reshape(x.shape)


def close(got, want, rtol):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


def with_optax(theirs, start, steps, leaves=LEAVES):
    """The parameters after `steps` updates by an optax transformation, on one device."""
    with jax.numpy_dtype_promotion("standard"):
        params = jax.tree.map(jnp.asarray, start)
        state, update = theirs.init(params), jax.jit(theirs.update)
        for t in range(steps):
            updates, state = update(gradients(t, leaves), state, params)
            params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("shape", [(128, 256), (64, 64), (96, 32), (1, 8)])
@pytest.mark.parametrize("spectrum,rtol", [("noise", 2e-5), ("steep", 2e-5), ("rank one", 3e-4)])
def test_newton_schulz_equals_optax(shape, spectrum, rtol):
    """Fails when a coefficient, the transposition, the starting norm or the order of a product differs from optax.

    Five steps raise small singular values 493-fold, and with them the rounding beside a matrix of rank one."""
    u, values, v = np.linalg.svd(np.random.default_rng(1).normal(size=shape), full_matrices=False)
    values = {"noise": values, "steep": np.geomspace(1, 1e-4, len(values)), "rank one": np.eye(1, len(values))[0]}[spectrum]
    g = jnp.asarray(1e-3 * (u * values) @ v, jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        theirs = orthogonalize_via_newton_schulz(g, jnp.asarray(DION, jnp.float32))
    ours = optimizer.newton_schulz(g[None])[0]
    close(ours, theirs, rtol)
    close(ours, newton_schulz64(np.asarray(g, np.float64)), rtol)


def test_bfloat16_products_stay_near_float32():
    """Fails when more than the operands of the products are rounded: the direction would turn by more than 1%."""
    g = jnp.asarray(np.random.default_rng(2).normal(size=(4, 64, 128)), jnp.float32)
    exact, low = optimizer.newton_schulz(g), optimizer.newton_schulz(g, jnp.bfloat16)
    assert low.dtype == jnp.float32
    cosine = jnp.sum(exact * low) / jnp.sqrt(jnp.sum(exact**2) * jnp.sum(low**2))
    assert 0.9999 < float(cosine) < 0.9999999


@pytest.mark.parametrize("radius", ["joint", "per_expert"])
def test_muonh_equals_float64(pocket, radius):
    """Fails when momentum, Nesterov, the per-matrix direction, the group of a radius or the step differs from the formulas."""
    run = a_run(pocket, f"optim.radius={radius}")
    matrices = some(*RADIUS[radius])
    history, update = train(run, 3, matrices)
    for name, dims in RADIUS[radius].items():
        w = np.asarray(history[0][name], np.float64)
        momentum = np.zeros_like(w)
        for step in range(3):
            g = np.asarray(gradients(step, matrices)[name], np.float64)
            momentum = 0.95 * momentum + g
            direction = each_matrix(newton_schulz64, 0.95 * momentum + g)
            w = hyperball64(w, direction, schedule.learning_rates(run, step).muonh, dims)
        close(history[3][name], w, 1e-5)
        close(update.state[name].m, momentum, 1e-6)
        assert not np.allclose(history[3][name], history[0][name], rtol=1e-3)


@pytest.mark.parametrize("radius", ["joint", "per_expert"])
def test_radii_are_kept(pocket, radius):
    """Fails when a Frobenius radius moves by more than 1e-5 of itself over 200 updates, or experts do not trade norm
    under `joint`."""
    run = a_run(pocket, f"optim.radius={radius}", "optim.lr_scale=2")
    history, _ = train(run, 200, some(*RADIUS[radius], "readout"))
    for name, dims in {**RADIUS[radius], "readout": (0, 1)}.items():
        before, after = (np.asarray(h[name], np.float64) for h in (history[0], history[-1]))
        ratio = np.sqrt(sums(after, after, dims) / sums(before, before, dims))
        assert np.abs(ratio - 1).max() < 1e-5
        assert np.sqrt(((after - before) ** 2).sum() / (before**2).sum()) > 0.5  # it went somewhere
    each = [np.linalg.norm(np.asarray(h["experts"], np.float64), axis=(2, 3)) for h in (history[0], history[-1])]
    assert (np.abs(each[1] / each[0] - 1).max() > 1e-2) == (radius == "joint")


def test_adam_equals_optax_and_float64(pocket):
    """Fails when a moment, a bias correction or epsilon differs; against optax where float32 keeps its 1 - beta^t
    (beta2 0.95), against float64 where it does not (0.9999)."""
    large = a_run(pocket, "data.batch_seqs=65536", "optim.horizon_tokens=3355443200", "optim.warmup_frac=0")
    assert scaling.rates(large).beta2 == 0.95 and scaling.rates(pocket).beta2 == 0.9999
    leaves = {name: x for name, x in LEAVES.items() if x.kind in ("plain", "gate")}
    for run in (large, a_run(pocket)):
        history, _ = train(run, 5, leaves)
        c = scaling.rates(run)
        theirs = optax.adam(lambda t, run=run: schedule.learning_rates(run, t).adam, c.beta1, c.beta2, c.eps)
        for name in leaves:
            p = np.asarray(history[0][name], np.float64)
            m, v = np.zeros_like(p), np.zeros_like(p)
            for t in range(5):
                g = np.asarray(gradients(t, leaves)[name], np.float64)
                m, v = c.beta1 * m + (1 - c.beta1) * g, c.beta2 * v + (1 - c.beta2) * g**2
                u = m / (1 - c.beta1 ** (t + 1)) / (np.sqrt(v / (1 - c.beta2 ** (t + 1))) + c.eps)
                p = p - schedule.learning_rates(run, t).adam * u
            close(history[5][name], p, 1e-6)
        if c.beta2 == 0.95:
            params = with_optax(theirs, history[0], 5, leaves)
            for name in leaves:
                close(history[5][name], params[name], 1e-6)


def test_adamh_equals_float64(pocket):
    """Fails when the readout's direction is not Adam's, or its step not the hyperball's at the MuonH rate."""
    run = a_run(pocket)
    history, _ = train(run, 4, some("readout"))
    c = scaling.rates(run)
    w = np.asarray(history[0]["readout"], np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t in range(4):
        g = np.asarray(gradients(t, some("readout"))["readout"], np.float64)
        m, v = 0.9 * m + 0.1 * g, c.beta2 * v + (1 - c.beta2) * g**2
        u = m / (1 - 0.9 ** (t + 1)) / (np.sqrt(v / (1 - c.beta2 ** (t + 1))) + c.eps)
        w = hyperball64(w, u, schedule.learning_rates(run, t).muonh, (0, 1))
    close(history[4]["readout"], w, 1e-6)


def test_adamw_equals_optax(pocket):
    """Fails when AdamW's update, its constants, its rate or the set of decayed leaves is another."""
    run = a_run(pocket, "optim.rule=adamw", "optim.weight_decay=0.3")
    leaves = {name: x for name, x in LEAVES.items() if name not in ("wide", "tall")}
    history, update = train(run, 10, leaves)
    mask = {name: name in ("experts", "shared", "readout", "embed", "router") for name in leaves}
    theirs = optax.adamw(lambda t: 3e-3 * schedule.fraction(run, t), 0.9, 0.95, 1e-8, weight_decay=0.3, mask=mask)
    params = with_optax(theirs, history[0], 10, leaves)
    for name in leaves:
        close(history[10][name], params[name], 3e-6)
    assert all(isinstance(s, optimizer.Moments) for s in update.state.values())


def test_muon_equals_optax(pocket):
    """Fails when Muon's momentum, its start, the scale by shape, or the matrices of a stack differ from optax."""
    run, leaves = a_run(pocket, "optim.rule=muon", "optim.weight_decay=0.3"), some("wide", "tall", "experts", "readout", "gain")
    history, update = train(run, 10, leaves)
    matrix = {"wide": MuonDimensionNumbers(0, 1), "tall": MuonDimensionNumbers(1, 2), "experts": MuonDimensionNumbers(2, 3)}
    share = partial(schedule.fraction, run)
    theirs = optax.partition(
        {
            "muon": optax_muon(
                lambda t: schedule.learning_rates(run, t).muonh,
                ns_coeffs="dion",
                weight_decay=0.3,
                muon_weight_dimension_numbers=lambda p: {
                    n: matrix[n] if not isinstance(x, optax.MaskedNode) else x for n, x in p.items()
                },
            ),
            "decayed": optax.adamw(lambda t: 3e-3 * share(t), 0.9, 0.95, 1e-8, weight_decay=0.3),
            "rest": optax.adam(lambda t: 3e-3 * share(t), 0.9, 0.95, 1e-8),
        },
        dict.fromkeys(matrix, "muon") | {"readout": "decayed", "gain": "rest"},
    )
    params = with_optax(theirs, history[0], 10, leaves)
    for name in leaves:
        close(history[10][name], params[name], 3e-5)
    assert isinstance(update.state["experts"], optimizer.Momentum) and isinstance(update.state["readout"], optimizer.Moments)


def test_decay_of_gates_and_router(pocket):
    """Fails when wd(t) = 0.02 (1 - t / N) is not added to Adam's direction of gates and router, or reaches another leaf."""
    leaves = some("router", "head_gate", "embed")
    plain = train(a_run(pocket), 3, leaves)[0]
    run = a_run(pocket, "optim.decay=gates_router", "optim.decay_peak=5")
    decayed = train(run, 3, leaves)[0]
    for name in leaves:
        assert np.array_equal(plain[3][name], decayed[3][name]) == (name not in ("router", "head_gate"))
    # the moments do not know of the decay, so both runs have the same directions
    p = np.asarray(plain[0]["router"], np.float64)
    for t in range(3):
        lr = schedule.learning_rates(run, t).adam
        moved = np.asarray(plain[t + 1]["router"], np.float64) - np.asarray(plain[t]["router"], np.float64)
        p = p + moved - lr * 5 * (1 - t / 200) * p
    close(decayed[3]["router"], p, 1e-5)


@pytest.mark.parametrize("rule", ["hyperball", "muon", "adamw"])
def test_no_gradient_gives_no_nan_and_no_turn(pocket, rule):
    """Fails when an expert without tokens, or a run whose first gradients are all zero, divides by zero."""
    run = a_run(pocket, f"optim.rule={rule}", "optim.weight_decay=0", "optim.warmup_frac=0")
    leaves = some("experts", "readout", "embed")
    history, update = train(run, 3, leaves, lambda step: {n: g * float(step > 0) for n, g in gradients(step, leaves).items()})
    for name in leaves:
        close(history[1][name], history[0][name], 1e-6)
        assert np.isfinite(history[3][name]).all()
    assert all(np.isfinite(norm) for norm in update.grad_norm.values())
    if rule != "adamw":
        before, after = history[0]["experts"][:, 3], history[3]["experts"][:, 3]
        close(after / np.sqrt(sums(after, after, (1, 2))), before / np.sqrt(sums(before, before, (1, 2))), 1e-6)


@pytest.mark.parametrize(
    "rule,names",
    [
        ("hyperball", ["wide", "experts", "shared", "readout", "head_gate"]),
        ("muon", ["experts", "readout"]),
        ("adamw", ["experts", "embed"]),
    ],
)
def test_eight_devices_equal_one(pocket, rule, names):
    """Fails when a norm of a divided leaf counts shards twice or not at all, when Newton-Schulz sees a piece of a matrix,
    or when a state or a parameter leaves its leaf's sharding."""
    settings, leaves = [f"optim.rule={rule}", "optim.clip=global"], some(*names)
    settings += ["optim.decay=gates_router"] if rule == "hyperball" else []
    alone, one = train(a_run(pocket, *settings), 4, leaves)
    many, eight = train(a_run(pocket, *settings, "mesh.data=2", "mesh.expert=4", "routing.exchange=dense"), 4, leaves)
    for name, x in leaves.items():
        close(many[4][name], alone[4][name], 1e-5)
        for array in (eight.params[name], *eight.state[name]):
            assert array.sharding.spec == x.spec and array.sharding.num_devices == 8
            assert array.dtype == jnp.float32
    for got, want in ((eight.grad_norm, one.grad_norm), (eight.param_norm, one.param_norm)):
        assert got.keys() == want.keys()
        assert all(float(got[k]) == pytest.approx(float(want[k]), rel=1e-5) for k in want)


def test_norms_by_part_and_clipping(pocket):
    """Fails when a norm misses a leaf, mixes parts, or is taken after the clipping; when clipping differs from optax."""
    leaves = some("experts", "embed", "gain") | {
        "more": Leaf("L E F Z", (2, 8, 16, 8), LEAVES["experts"].spec, 0.1, "matrix", "routed")
    }
    for limit in (0.7, 1e6):
        run = a_run(pocket, "optim.clip=global", f"optim.clip_norm={limit}", "optim.rule=adamw")
        history, update = train(run, 1, leaves)
        for got, arrays in ((update.grad_norm, gradients(0, leaves)), (update.param_norm, history[1])):
            square = {name: np.square(np.asarray(x, np.float64)).sum() for name, x in arrays.items()}
            parts = {"routed": square["experts"] + square["more"], "embed": square["embed"], "norm": square["gain"]}
            want = {part: np.sqrt(v) for part, v in parts.items()} | {"total": np.sqrt(sum(square.values()))}
            assert {k: float(v) for k, v in got.items()} == pytest.approx(want, rel=1e-6)
        clipped, _ = optax.clip_by_global_norm(limit).update(gradients(0, leaves), optax.EmptyState())
        for name in leaves:
            close(update.state[name].m, 0.1 * np.asarray(clipped[name]), 1e-6)


def test_the_step_alone_says_which_update_it_is(pocket):
    """Fails when the optimizer counts its own calls: equal arguments give equal bits, another step another update."""
    run, leaves = a_run(pocket), some("experts", "embed")
    start = train(run, 2, leaves)[1]
    with jax.set_mesh(mesh.make(run)):
        one = jax.jit(optimizer.make(run, leaves).update)
        first, second, late = (one(gradients(7, leaves), start.state, start.params, jnp.int32(t)) for t in (7, 7, 150))
    for name in leaves:
        assert np.array_equal(first.params[name], second.params[name])
        assert not np.array_equal(first.params[name], late.params[name])
    assert {x.shape for x in jax.tree.leaves(start.state)} == {leaf.shape for leaf in leaves.values()}


@pytest.mark.parametrize("rule,extra_leaves", [("adamw", 0), ("hyperball", 1)])
def test_donated_buffers_are_updated_in_place(pocket, rule, extra_leaves):
    """Fails when a step stores more than one direction per matrix, or a moment, a square or an old parameter at all."""
    x = Leaf("L E D F", (8, 8, 128, 64), P(None, "expert", "data", None), 0.1, "matrix", "routed")
    run, size = a_run(pocket, f"optim.rule={rule}"), 4 * x.size
    with jax.set_mesh(mesh.make(run)):
        opt, params = optimizer.make(run, {"x": x}), leaf.shapes({"x": x}, mesh.make(run))
        state = jax.eval_shape(opt.init, params)
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh.make(run), P()))

        def update(params, state, grads, step):
            done = opt.update(grads, state, params, step)
            return done.params, done.state, done.grad_norm, done.param_norm

        memory = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, params, step).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size * len(jax.tree.leaves((params, state)))
    assert memory.temp_size_in_bytes < (extra_leaves + 0.5) * size


def test_the_reference_shapes_trace_on_704_devices(pocket):
    """Fails when a leaf of the reference run cannot be stepped on 11 x 64 devices."""
    run = spec.override(pocket, ["mesh.replica=11", "mesh.expert=64", "data.batch_seqs=704", "evals.batch_seqs=704", "model.width=6144",
                                 "moe.experts=384", "routing.exchange=pooled_wave"])  # fmt: skip
    leaves = {
        "experts": Leaf("L E Z F", (48, 384, 3072, 3072), P(None, "expert", None, "data"), 0.1, "matrix", "routed"),
        "q": Leaf("L D HA", (48, 6144, 6144), P(None, FSDP, None), 0.1, "matrix", "attention"),
        "readout": Leaf("D V", (6144, 128256), P(FSDP, None), 0.1, "readout", "readout"),
    }
    with jax.sharding.use_abstract_mesh(mesh.abstract(run)):
        params = leaf.shapes(leaves, mesh.abstract(run))
        opt = optimizer.make(run, leaves)
        state = jax.eval_shape(opt.init, params)
        grads = leaf.shapes(leaves, mesh.abstract(run), jnp.bfloat16)
        out = jax.eval_shape(opt.update, grads, state, params, jax.ShapeDtypeStruct((), jnp.int32))
        for name, x in leaves.items():
            for array in (out.params[name], *state[name], *out.state[name]):
                assert array.sharding.spec == x.spec and array.dtype == jnp.float32


@pytest.mark.parametrize(
    ("dims", "shape", "where", "matrices"),
    [
        ("L D F", (8, 16, 24), P(None, FSDP, None), 1),
        ("L D F", (6, 16, 24), P(None, FSDP, None), 1),
        ("L D F", (9, 16, 24), P(None, None, FSDP), 2),
        ("L E Z F", (4, 8, 16, 24), P(None, "expert", None, "data"), 4),
        ("L J D G", (3, 2, 16, 24), P(None, None, FSDP, None), 1),
        ("L E Z F", (3, 4, 16, 24), P(None, "expert", None, None), 3),
        ("D F", (16, 24), P(FSDP, None), 1),
    ],
)
def test_each_device_orthogonalises_its_share_of_whole_matrices(pocket, monkeypatch, dims, shape, where, matrices):
    """Fails when a matrix is computed twice along the axes that divide its leaf, or comes back elsewhere or changed."""
    run = spec.override(pocket, ["mesh.data=2", "mesh.expert=4", "routing.exchange=dense"])
    one, devices = Leaf(dims, shape, where, 0.1, "matrix", "x"), mesh.make(run)
    g, each, seen = jax.random.normal(jax.random.key(0), shape, jnp.float32), optimizer._each, []
    want = each(g, run.compute)
    monkeypatch.setattr(optimizer, "_each", lambda g, compute: seen.append(g.shape) or each(g, compute))
    with jax.set_mesh(devices):
        placed = jax.device_put(g, NamedSharding(devices, where))
        found = jax.jit(lambda g: optimizer.orthogonalize(g, one, run.compute))(placed)
    assert found.sharding.spec == where
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    assert [math.prod(s[:-2]) for s in seen] == [matrices]
    assert seen[0][-2:] == shape[-2:]
