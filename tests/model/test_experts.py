"""Routed and shared experts and the latent projections against numpy float64 from reference_run 1.2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from argosy import leaf, mesh, spec
from argosy.model import experts

HERO = [
    "model.width=6144", "moe.experts=384", "moe.experts_per_token=8", "moe.hidden=3072", "moe.latent_width=3072",
    "moe.shared_experts=2", "moe.shared_hidden=3072",
]  # fmt: skip


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def arrays(tree, dtype=jnp.float32):
    return jax.tree.map(lambda w: jnp.asarray(w, dtype), tree)


def silu(x):
    return x / (1 + np.exp(-x))


def plain_swiglu(p, rows, scale):
    out = np.zeros_like(rows)
    for e in range(len(rows)):
        for c in range(rows.shape[1]):
            hidden = silu(rows[e, c] @ p.gate[e]) * (rows[e, c] @ p.up[e])
            out[e, c] = scale[e, c] * hidden @ p.down[e]
    return out


def plain_shared(p, x):
    return sum((silu(x @ p.gate[j]) * (x @ p.up[j])) @ p.down[j] for j in range(len(p.gate)))


def plain_down(p, x):
    u = x @ p.down
    return u / np.sqrt((u**2).mean(-1, keepdims=True) + 1e-5) * p.gain


def routed(seed=0, e=5, z=6, f=7):
    return experts.Routed(normal(seed, e, z, f), normal(seed + 1, e, z, f), normal(seed + 2, e, f, z))


def check_with_gradient(fast, plain, *arguments):
    """Values, and the derivative along random directions against central differences of the float64 formula."""
    out = plain(*arguments)
    weight = normal(99, *out.shape)
    np.testing.assert_allclose(jax.jit(fast)(*map(arrays, arguments)), out, rtol=1e-4, atol=1e-5)
    loss = lambda *a: jnp.sum(fast(*a) * jnp.asarray(weight, jnp.float32))  # noqa: E731
    grads = jax.jit(jax.grad(loss, tuple(range(len(arguments)))))(*map(arrays, arguments))
    for i, leaves in enumerate(map(jax.tree.leaves, arguments)):
        for n, w in enumerate(leaves):
            direction = normal(i + n, *w.shape)

            def moved(by, i=i, n=n, direction=direction):
                parts, tree = jax.tree.flatten(arguments[i])
                parts[n] = parts[n] + by * direction
                return (plain(*arguments[:i], jax.tree.unflatten(tree, parts), *arguments[i + 1 :]) * weight).sum()

            slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
            got = (np.asarray(jax.tree.leaves(grads[i])[n], np.float64) * direction).sum()
            assert got == pytest.approx(slope, rel=1e-4, abs=1e-4), (i, n)


def test_swiglu_and_its_gradients():
    check_with_gradient(experts.swiglu, plain_swiglu, routed(), normal(5, 5, 4, 6), normal(6, 5, 4))


def placed(function):
    """The function of weights and activations, these placed as every layer has them."""
    return lambda p, x: function(p, jax.sharding.reshard(x, mesh.B_S_D))


def test_shared_and_its_gradients(pocket):
    p = experts.Shared(normal(0, 3, 6, 4), normal(1, 3, 6, 4), normal(2, 3, 4, 6))
    with jax.set_mesh(mesh.make(pocket)):
        check_with_gradient(placed(experts.shared), plain_shared, p, normal(3, 2, 5, 6))


def test_latent_projections_and_their_gradients(pocket):
    p = experts.Latent(normal(0, 6, 4), 1 + 0.3 * normal(1, 4), normal(2, 4, 6))
    with jax.set_mesh(mesh.make(pocket)):
        check_with_gradient(placed(experts.latent_down), plain_down, p, 0.01 * normal(3, 2, 5, 6))  # small: eps 1e-5 shows
        check_with_gradient(placed(experts.latent_up), lambda p, y: y @ p.up, p, normal(4, 2, 5, 4))


def test_bf16_follows_fp32():
    p, rows, scale = routed(0, 5, 32, 16), normal(5, 5, 40, 32), normal(6, 5, 40)
    got = experts.swiglu(arrays(p, jnp.bfloat16), arrays(rows, jnp.bfloat16), arrays(scale))
    expected = plain_swiglu(p, rows, scale)
    assert got.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(got, np.float64) - expected) < 0.01 * np.linalg.norm(expected)


# ---- leaves --------------------------------------------------------------------------------------


def count(leaves, part):
    return sum(one.size for one in leaf.flatten(leaves).values() if one.part == part)


def test_reference_leaves_hold_the_published_numbers(pocket):
    """Parameters of one layer, times 48 the figures of reference_run 1.3; shapes alone, nothing is allocated."""
    one = experts.leaves(spec.override(pocket, HERO))
    assert 48 * count(one, "routed") == 521_838_526_464
    assert 48 * count(one, "latent") == 1_811_939_328
    assert 48 * count(one, "shared") == 5_435_817_984
    assert count(one, "norm") == 3072
    assert {x.init for x in leaf.flatten(one).values() if x.kind == "matrix"} == {0.5 / 6144**0.5}


def test_leaves_follow_the_choices(pocket):
    wide = experts.leaves(spec.override(pocket, ["moe.latent=none", "moe.shared_experts=0"]))
    assert wide.latent is None and wide.shared is None
    assert wide.routed.gate.shape == (32, 128, 64) and wide.routed.gate.dims == "E D F"
    assert wide.routed.down.shape == (32, 64, 128)


def test_leaves_divide_over_the_mesh(pocket):
    """Every dimension that is divided is divisible at data 2 x expert 4, and only the gain is whole."""
    eight = spec.override(pocket, ["mesh.data=2", "mesh.expert=4", "routing.exchange=dense"])
    for name, one in leaf.flatten(experts.leaves(eight)).items():
        sharded = jax.sharding.NamedSharding(mesh.abstract(eight), one.spec).shard_shape(one.shape)
        divided = one.size // int(np.prod(sharded))
        assert divided == {"routed": 4, "norm": 1}.get(one.part, 8), name
