"""The short convolution against numpy float64 written from reference_run 1.2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from argosy import leaf, mesh, spec
from argosy.model import shortconv

EIGHT = ["mesh.data=2", "mesh.expert=4", "routing.exchange=dense"]
B, S, C, TAPS = 8, 21, 12, 4


def reference(x, taps, doc_start):
    y = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for lag in range(taps.shape[0]):
                if t - lag >= doc_start[b, t]:
                    y[b, t] += taps[lag] * x[b, t - lag]
    return y


def documents(seed=0):
    """Starts of documents of 1 to 7 tokens, different in each sequence."""
    rng = np.random.default_rng(seed)
    starts = np.zeros((B, S), np.int32)
    for b in range(B):
        edges = np.cumsum(rng.integers(1, 8, S))
        starts[b] = [max([0, *edges[edges <= t]]) for t in range(S)]
    return starts


def put(run, x, spec, dtype=None):
    return jax.device_put(jnp.asarray(x, dtype), NamedSharding(mesh.make(run), spec))


@pytest.mark.parametrize("settings", [[], EIGHT], ids=["one", "eight"])
def test_values_and_gradients_follow_the_formula(pocket, settings):
    """Fails when a tap reads a wrong position, crosses a document start, or has a wrong gradient."""
    run = spec.override(pocket, settings)
    rng = np.random.default_rng(1)
    x, taps, ct, first = rng.normal(size=(B, S, C)), rng.normal(size=(TAPS, C)), rng.normal(size=(B, S, C)), documents()
    with jax.set_mesh(mesh.make(run)):
        args = put(run, x, mesh.B_S_D, jnp.float32), put(run, taps, P(None, None), jnp.float32)
        starts, weight = put(run, first, mesh.B_S), put(run, ct, mesh.B_S_D, jnp.float32)
        y = jax.jit(shortconv.shortconv)(*args, starts)
        dx, dtaps = jax.jit(jax.grad(lambda x, w: jnp.sum(shortconv.shortconv(x, w, starts) * weight), (0, 1)))(*args)
    np.testing.assert_allclose(y, reference(x, taps, first), rtol=1e-5, atol=1e-6)
    # The convolution is linear in each argument, so that its gradients are exact differences.
    want_dx = np.array([np.sum(ct * reference(e.reshape(x.shape), taps, first)) for e in np.eye(x.size)[::17]])
    want_dtaps = np.array([np.sum(ct * reference(x, e.reshape(taps.shape), first)) for e in np.eye(taps.size)])
    np.testing.assert_allclose(np.asarray(dx).ravel()[::17], want_dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(dtaps).ravel(), want_dtaps, rtol=1e-5, atol=1e-5)


def test_identity_at_the_start(pocket):
    """Fails when the initial taps change the input by a single bit."""
    with jax.set_mesh(mesh.make(pocket)):
        taps = leaf.init(shortconv.leaf(TAPS, C), mesh.make(pocket), 0)
        x = put(pocket, np.random.default_rng(0).normal(size=(B, S, C)), mesh.B_S_D, jnp.float32)
        np.testing.assert_array_equal(jax.jit(shortconv.shortconv)(x, taps, put(pocket, documents(), mesh.B_S)), x)


def test_a_document_does_not_hear_its_neighbours(pocket):
    """Fails when changing one document changes a bit of another's outputs or gradients."""
    rng = np.random.default_rng(2)
    x, ct = rng.normal(size=(B, S, C)), rng.normal(size=(B, S, C))
    first = np.where(np.arange(S) < 5, 0, np.where(np.arange(S) < 13, 5, 13))[None].repeat(B, 0).astype(np.int32)
    other = x.copy()
    other[:, 5:13] = rng.normal(size=(B, 8, C))
    with jax.set_mesh(mesh.make(pocket)):
        taps = put(pocket, rng.normal(size=(TAPS, C)), P(None, None), jnp.float32)
        starts, weight = put(pocket, first, mesh.B_S), put(pocket, ct, mesh.B_S_D, jnp.float32)
        f = jax.jit(lambda x: shortconv.shortconv(x, taps, starts))
        g = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(shortconv.shortconv(x, taps, starts)) * weight)))
        a, b = (put(pocket, v, mesh.B_S_D, jnp.float32) for v in (x, other))
        for fn in (f, g):
            before, after = np.asarray(fn(a)), np.asarray(fn(b))
            np.testing.assert_array_equal(np.delete(before, np.s_[5:13], 1), np.delete(after, np.s_[5:13], 1))
            assert np.all(np.any(before[:, 5:13] != after[:, 5:13], -1))


def test_sums_are_float32_for_bf16(pocket):
    """Fails when four taps are added in bf16: 1 + 3 x 2^-8 would round to 1 at each step."""
    with jax.set_mesh(mesh.make(pocket)):
        x = put(pocket, np.ones((B, S, C)), mesh.B_S_D, jnp.bfloat16)
        taps = put(pocket, np.array([1, 2**-8, 2**-8, 2**-8])[:, None].repeat(C, 1), P(None, None), jnp.float32)
        y = jax.jit(shortconv.shortconv)(x, taps, put(pocket, np.zeros((B, S), np.int32), mesh.B_S))
    assert y.dtype == jnp.bfloat16
    assert float(y[0, -1, 0]) == float(jnp.bfloat16(1 + 3 * 2**-8)) > 1
