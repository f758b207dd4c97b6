"""Blocked cross-entropy against numpy float64 written from reference_run 1.2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from argosy import mesh, spec
from argosy.model import loss

EIGHT = ["mesh.data=2", "mesh.expert=4", "routing.exchange=dense"]
B, S, D, V, Z = 8, 13, 16, 50, 1e-2  # a z weight large enough to matter in the comparison


def logsumexp(x):
    top = x.max(-1, keepdims=True)
    return np.log(np.sum(np.exp(x - top), -1)) + top[..., 0]


def token_nll(h, w, labels):
    logits = h @ w
    return logsumexp(logits) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]


def reference(h, w, labels, valid):
    """nll, z and total in float64."""
    nll, z = np.sum(token_nll(h, w, labels)[valid]), np.sum(logsumexp(h @ w)[valid] ** 2)
    return nll, z, nll + Z * z


def gradients(h, w, labels, valid):
    """Of the total, by the chain rule: dlogits = p - 1[label] + 2 Z logsumexp p on valid tokens."""
    lse = logsumexp(h @ w)
    p = np.exp(h @ w - lse[..., None])
    dlogits = (p * (1 + 2 * Z * lse)[..., None] - np.eye(w.shape[1])[labels]) * valid[..., None]
    return dlogits @ w.T, np.einsum("bsd,bsv->dv", h, dlogits)


def draw(seed=0):
    rng = np.random.default_rng(seed)
    h, w = 2 * rng.normal(size=(B, S, D)), rng.normal(size=(D, V))
    return h, w, rng.integers(0, V, (B, S)).astype(np.int32), rng.random((B, S)) < 0.8


def placed(run, h, w, labels, valid, dtype=jnp.float32):
    put = lambda x, where, dtype=None: jax.device_put(jnp.asarray(x, dtype), NamedSharding(mesh.make(run), where))  # noqa: E731
    return put(h, mesh.B_S_D, dtype), put(w, P(mesh.FSDP, None), dtype), put(labels, mesh.B_S), put(valid, mesh.B_S)


def sums_and_gradients(args, block, scale=1.0):
    def total(h, w):
        sums = loss.loss(h, w, *args[2:], Z, block)
        return sums.total * scale, sums

    return jax.jit(jax.grad(total, (0, 1), has_aux=True))(*args[:2])


def test_reference_gradients_are_those_of_the_reference_sum():
    """Fails when the expected gradients below are themselves wrong: compared with finite differences."""
    h, w, labels, valid = draw()
    rng = np.random.default_rng(1)
    along = rng.normal(size=h.shape), rng.normal(size=w.shape)
    ends = [reference(h + e * along[0], w + e * along[1], labels, valid)[2] for e in (1e-6, -1e-6)]
    slope = sum(np.sum(g * a) for g, a in zip(gradients(h, w, labels, valid), along, strict=True))
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize(("settings", "block"), [([], 512), ([], 104), ([], 30), ([], 1), (EIGHT, 5)])
def test_sums_and_gradients_follow_the_formula(pocket, settings, block):
    """Fails when a block is lost, counted twice, or padded with weight, in the sums or the gradients."""
    run = spec.override(pocket, settings)
    values = draw()
    with jax.set_mesh(mesh.make(run)):
        args = placed(run, *values)
        (dh, dw), sums = sums_and_gradients(args, block, scale=0.25)
        alone = jax.jit(lambda *a: loss.loss(*a, Z, block))(*args)
        each = jax.jit(lambda *a: loss.nll(*a, block))(*args[:3])
    nll, z, total = reference(*values)
    for found in (sums, alone):
        np.testing.assert_allclose([found.nll, found.z, found.total], [nll, z, total], rtol=1e-5)
        assert int(found.tokens) == values[3].sum()
    np.testing.assert_allclose(each, token_nll(*values[:3]), rtol=1e-4, atol=1e-5)
    want_h, want_w = gradients(*values)
    np.testing.assert_allclose(dh, want_h / 4, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw, want_w / 4, rtol=1e-4, atol=1e-5)


def test_invalid_tokens_change_nothing(pocket):
    """Fails when padding leaks into a sum or a gradient, by a single bit."""
    h, w, labels, valid = draw()
    other, changed = np.where(valid[..., None], h, 7.0), np.where(valid, labels, 3)
    with jax.set_mesh(mesh.make(pocket)):
        a = sums_and_gradients(placed(pocket, h, w, labels, valid), 30)
        b = sums_and_gradients(placed(pocket, other, w, changed, valid), 30)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.any(np.asarray(a[0][0])[~valid])


def test_no_valid_token_gives_zeros(pocket):
    """Fails when an all-padding batch gives a nan or a gradient."""
    h, w, labels, _ = draw()
    with jax.set_mesh(mesh.make(pocket)):
        found = sums_and_gradients(placed(pocket, h, w, labels, np.zeros((B, S), bool)), 30)
    assert all(not np.any(x) for x in jax.tree.leaves(found))


def test_large_logits_stay_finite(pocket):
    """Fails when the largest logit is not taken out before the exponential."""
    h, w, labels, valid = draw()
    with jax.set_mesh(mesh.make(pocket)):
        _, sums = found = sums_and_gradients(placed(pocket, 300 * h, w, labels, valid), 30)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(found))
    np.testing.assert_allclose(sums.nll, reference(300 * h, w, labels, valid)[0], rtol=1e-5)


def test_bf16_operands_give_float32_sums(pocket):
    """Fails when logits or sums are rounded to bf16: on the same rounded operands the sums must agree closely."""
    h, w, labels, valid = draw()
    with jax.set_mesh(mesh.make(pocket)):
        args = placed(pocket, h, w, labels, valid, jnp.bfloat16)
        (dh, dw), sums = sums_and_gradients(args, 30)
    rounded = [np.asarray(x, np.float64) for x in args[:2]]
    np.testing.assert_allclose([sums.nll, sums.z], reference(*rounded, labels, valid)[:2], rtol=1e-5)
    for got, want in zip((dh, dw), gradients(*rounded, labels, valid), strict=True):
        assert got.dtype == jnp.bfloat16
        error = np.asarray(got, np.float64) - want
        assert np.sqrt(np.mean(error**2) / np.mean(want**2)) < 2**-8


def test_memory_does_not_grow_with_tokens_times_vocabulary(pocket):
    """Fails when more than a few blocks of logits are held at once."""
    tokens, v, block = 4096, 4096, 64
    with jax.set_mesh(mesh.make(pocket)):
        args = placed(
            pocket,
            np.zeros((8, tokens // 8, D)),
            np.zeros((D, v)),
            np.zeros((8, tokens // 8), np.int32),
            np.ones((8, tokens // 8), bool),
        )
        f = jax.jit(jax.grad(lambda h, w: loss.loss(h, w, *args[2:], Z, block).total, (0, 1)))
        temp = f.lower(*args[:2]).compile().memory_analysis().temp_size_in_bytes
    assert temp < 8 * 4 * block * v + 4 * 4 * D * (v + tokens) < 4 * tokens * v / 4, temp
