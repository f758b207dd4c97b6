"""Blocked cross-entropy with logit z-loss: never more than one block of tokens' logits at once."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from argosy import mesh, spec
from argosy.model.linear import turned


class Sums(NamedTuple):
    """Sums over the valid tokens of the whole batch, so that sums of sums are right; float32, tokens int32."""

    total: Float[Array, ""]  # nll + z_weight * z: the one that has a gradient
    nll: Float[Array, ""]  # nats
    z: Float[Array, ""]  # squared logsumexp of the logits
    tokens: Int[Array, ""]


def loss(
    h: Float[Array, "B S D"],
    readout: Float[Array, "D V"],
    labels: Int[Array, "B S"],
    valid: Bool[Array, "B S"],
    z_weight: float,
    block_tokens: int,
) -> Sums:
    """Cross-entropy of `labels` under the logits h readout, plus `z_weight` times logsumexp^2 (reference_run 1.2).

    Products take operands in the dtype of `h` and give float32; the rest is float32. Each device holds the logits
    of at most `block_tokens` tokens. Differentiated, one pass over the blocks computes the sums and both
    gradients, which the backward pass only scales: three products of T x D x V in all, none of them repeated.
    """

    readout, parts = mesh.placed(readout)

    def local(h, w, labels, valid):
        t = labels.size
        w = mesh.whole(w, parts, h.dtype)
        sums = _sums(h.reshape(t, -1), w, labels.reshape(t), valid.reshape(t), z_weight, block_tokens)
        return tuple(lax.psum(x, spec.AXES) for x in (*sums, jnp.sum(valid, dtype=jnp.int32)))

    sharded = jax.shard_map(local, in_specs=(mesh.B_S_D, parts, mesh.B_S, mesh.B_S), out_specs=P())
    return Sums(*sharded(h, readout, labels, valid))


def nll(
    h: Float[Array, "B S D"], readout: Float[Array, "D V"], labels: Int[Array, "B S"], block_tokens: int
) -> Float[Array, "B S"]:
    """Each token's negative log-likelihood in nats, float32: for evaluations, without z-loss or gradient."""

    readout, parts = mesh.placed(readout)

    def local(h, w, labels):
        t = labels.size
        w = mesh.whole(w, parts, h.dtype)

        def one(_, xs):
            h, labels = xs
            logits = _logits(h, w)
            return None, _logsumexp(logits) - _at(logits, labels)

        _, out = lax.scan(one, None, _blocks((h.reshape(t, -1), labels.reshape(t)), block_tokens))
        return out.reshape(-1)[:t].reshape(labels.shape)

    sharded = jax.shard_map(local, in_specs=(mesh.B_S_D, parts, mesh.B_S), out_specs=mesh.B_S)
    return sharded(h, readout, labels)


def _blocks(arrays: tuple[jax.Array, ...], block: int) -> tuple[jax.Array, ...]:
    """Arrays [T, ...] as [blocks, tokens, ...], zeros after the end: as few blocks as `block` allows, of equal size."""
    t = arrays[0].shape[0]
    count = -(-t // block)
    size = -(-t // count)
    pad = count * size - t
    return tuple(jnp.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)).reshape(count, size, *a.shape[1:]) for a in arrays)


def _logits(h: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("td,dv->tv", h, w, preferred_element_type=jnp.float32)


def _logsumexp(logits: jax.Array) -> jax.Array:
    top = _max(logits)
    return top + jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), -1))


def _max(logits: jax.Array) -> jax.Array:
    """Each row's largest; on a CPU the plain maximum, which looks out for NaN, is four times slower than this."""
    return lax.reduce(logits, np.float32(-np.inf), lambda x, y: jnp.where(x > y, x, y), (1,))


def _at(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sums(h, w, labels, valid, z_weight: float, block: int):
    return _forward(h, w, labels, valid, z_weight, block, gradient=False)[0]


def _forward(h, w, labels, valid, z_weight: float, block: int, gradient: bool = True):
    zero = jnp.zeros_like(w, dtype=jnp.float32, shape=())  # like `w`, so that it varies over devices as `w` does
    start = (zero, zero, jnp.zeros_like(w, dtype=jnp.float32) if gradient else None)
    w_turned = turned(w)

    def one(carry, xs):
        nll, z, dw = carry
        h, labels, valid = xs
        logits = _logits(h, w)
        top = _max(logits)
        e = jnp.exp(logits - top[:, None])
        total = jnp.sum(e, -1)
        lse = top + jnp.log(total)
        weight = valid.astype(jnp.float32)
        nll += jnp.sum((lse - _at(logits, labels)) * weight)
        z += jnp.sum(jnp.square(lse) * weight)
        if not gradient:
            return (nll, z, None), None
        # A row of dlogits is weight * slope / total times (e, less total / slope at the label): the row's factor goes onto
        # the narrow side of both products, and the label's part into e itself, so that no pass over T x V is made for either.
        slope = 1 + 2 * z_weight * lse
        e = e.at[jnp.arange(e.shape[0]), labels].add(-total / slope, mode="drop", unique_indices=True).astype(h.dtype)
        factor = (weight * slope / total)[:, None]
        dh = jnp.einsum("tv,vd->td", e, w_turned, preferred_element_type=jnp.float32) * factor
        narrow = turned((h.astype(jnp.float32) * factor).astype(h.dtype))
        dw += jnp.einsum("dt,tv->dv", narrow, e, preferred_element_type=jnp.float32)
        return (nll, z, dw), dh.astype(h.dtype)

    (nll, z, dw), dh = lax.scan(one, start, _blocks((h, labels, valid), block))
    sums = (nll + z_weight * z, nll, z)
    if dw is None:
        return sums, None
    return sums, (dh.reshape(-1, h.shape[1])[: h.shape[0]], dw.astype(w.dtype))


def _backward(z_weight: float, block: int, saved, cotangents):
    dh, dw = saved
    g = cotangents[0]  # nll and z are reported, not differentiated
    return (dh.astype(jnp.float32) * g).astype(dh.dtype), (dw.astype(jnp.float32) * g).astype(dw.dtype), None, None


_sums.defvjp(_forward, _backward)
