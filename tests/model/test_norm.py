"""Norms against numpy float64 written from reference_run 1.2."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from argosy import leaf, mesh, spec
from argosy.model import norm

EIGHT = ["mesh.data=2", "mesh.expert=4", "routing.exchange=dense"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(x, gain, down, up):
    y = gain * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5)
    low = y @ down
    return y * sigmoid((low * sigmoid(low)) @ up)


def draw(model, seed=0):
    """Float64 values of one gated norm, gain away from 1, and an input of uneven size."""
    rng = np.random.default_rng(seed)
    d, r = model.width, model.gate_rank
    p = norm.GatedNorm(1 + 0.3 * rng.normal(size=d), rng.normal(size=(d, r)) / d**0.5, rng.normal(size=(r, d)) / r**0.5)
    return p, rng.normal(size=(8, 6, d)) * np.exp(rng.normal(size=(8, 6, 1)))


def placed(run, p, x, dtype=np.float32):
    m = mesh.make(run)
    put = lambda value, spec: jax.device_put(jnp.asarray(value, dtype), NamedSharding(m, spec))  # noqa: E731
    leaves = norm.leaves(run.model)
    return norm.GatedNorm(*(put(v, leaf.spec) for v, leaf in zip(p, leaves, strict=True))), put(x, mesh.B_S_D)


@pytest.mark.parametrize("settings", [[], EIGHT], ids=["one", "eight"])
def test_values_and_gradients_follow_the_formula(pocket, settings):
    """Fails when a norm, its gate or a gradient departs from the formula, on one device or on eight."""
    run = spec.override(pocket, settings)
    p64, x64 = draw(run.model)
    weight = np.random.default_rng(1).normal(size=x64.shape)
    with jax.set_mesh(mesh.make(run)):
        p, x = placed(run, p64, x64)
        np.testing.assert_allclose(jax.jit(norm.gated_norm)(p, x), reference(x64, *p64), rtol=2e-5, atol=2e-6)
        ct = jax.device_put(jnp.asarray(weight, jnp.float32), x.sharding)
        grads = jax.jit(jax.grad(lambda p, x: jnp.sum(norm.gated_norm(p, x) * ct), (0, 1)))(p, x)
    values, found = [*p64, x64], [*grads[0], grads[1]]
    for i in range(len(values)):
        along = np.random.default_rng(i).normal(size=values[i].shape)
        ends = [[*values[:i], values[i] + e * along, *values[i + 1 :]] for e in (1e-6, -1e-6)]
        up, down = (np.sum(weight * reference(v[3], *v[:3])) for v in ends)
        slope = (up - down) / 2e-6
        assert np.sum(np.asarray(found[i], np.float64) * along) == pytest.approx(slope, rel=2e-4, abs=1e-3), i


def test_rms_in_bf16_is_the_rounded_float32_result():
    """Fails when the mean of squares or the division is done in bf16."""
    x = jax.random.normal(jax.random.key(0), (4, 256)).astype(jnp.bfloat16) * jnp.bfloat16(30)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-6)
    y = jax.jit(lambda x: norm.rms(x, None, 1e-6))(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8)


def test_zeros_stay_zeros_with_finite_gradients():
    """Fails when eps is outside the root or missing: an all-zero row is legal (padding)."""
    x = jnp.zeros((2, 8))
    assert not np.any(norm.rms(x, None, norm.EPS))
    assert np.all(np.isfinite(jax.grad(lambda x: jnp.sum(norm.rms(x, None, norm.EPS)))(x)))


def test_hero_has_as_many_gated_norm_parameters_as_published(pocket):
    """Fails when a gate's shape departs from reference_run 1.3: 150,994,944 in 48 layers of two."""
    hero = norm.leaves(dataclasses.replace(pocket.model, width=6144, gate_rank=128))
    assert 48 * 2 * (hero.down.size + hero.up.size) == 150_994_944
    assert [x.kind for x in hero] == ["plain", "matrix", "matrix"]


def test_gates_are_near_half_at_the_start(pocket):
    """Fails when a gate's initial values are not small."""
    with jax.set_mesh(mesh.make(pocket)):
        p = leaf.init(norm.leaves(pocket.model), mesh.make(pocket), 0)
        x = jax.device_put(jax.random.normal(jax.random.key(1), (8, 4, 128)), NamedSharding(mesh.make(pocket), mesh.B_S_D))
        ratio = np.asarray(jax.jit(norm.gated_norm)(p, x)) / np.asarray(norm.rms(x, p.gain, norm.EPS))
    assert np.all(np.abs(ratio - 0.5) < 0.1)
