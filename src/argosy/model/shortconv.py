"""A causal depthwise convolution over a few positions that stops at document starts."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from argosy import mesh
from argosy.leaf import Leaf

_IN = P(mesh.BATCH, None, None)


def leaf(taps: int, channels: int) -> Leaf:
    """The taps of one site: the identity at the start."""
    return Leaf("taps D", (taps, channels), P(None, None), "identity", "plain", "conv")


def shortconv(x: Float[Array, "B S C"], taps: Float[Array, "taps C"], doc_start: Int[Array, "B S"]) -> Float[Array, "B S C"]:
    """out[t] = sum_j taps[j] * x[t - j] over the j for which t - j >= doc_start[t] (reference_run 1.2, SConv).

    Accumulated in float32, returned in the dtype of `x`. Each sequence must be whole on one device; where the
    `context` axis divides it, it is gathered first.
    """
    local = jax.shard_map(
        lambda x, w, first: _conv(x, jax.lax.pcast(w, mesh.BATCH, to="varying"), first),
        in_specs=(_IN, P(None, None), P(mesh.BATCH, None)),
        out_specs=_IN,
    )
    reshard = jax.sharding.reshard
    y = local(reshard(x, _IN), reshard(taps, P(None, None)), reshard(doc_start, P(mesh.BATCH, None)))
    return reshard(y, mesh.B_S_D)


def _shift(x: jax.Array, by: int) -> jax.Array:
    """x[t - by] at t, zeros beyond the ends; `by` may be negative."""
    if by == 0:
        return x
    length = x.shape[1]
    pad = [(0, 0)] * x.ndim
    pad[1] = (by, 0) if by > 0 else (0, -by)
    padded = jnp.pad(x, pad)
    return padded[:, :length] if by > 0 else padded[:, -length:]


def _lag_ok(first: Int[Array, "B S"], lag: int) -> jax.Array:
    """Whether position t reads position t - lag, as [B, S, 1]."""
    return (jnp.arange(first.shape[1])[None, :] - lag >= first)[..., None]


@jax.custom_vjp
def _conv(x, taps, first):
    return _forward(x, taps, first)[0]


def _forward(x, taps, first):
    wide, w = x.astype(jnp.float32), taps.astype(jnp.float32)
    y = wide * w[0][None, None, :]
    for lag in range(1, taps.shape[0]):
        y = y + jnp.where(_lag_ok(first, lag), _shift(wide, lag), 0.0) * w[lag][None, None, :]
    return y.astype(x.dtype), (x, taps, first)


def _backward(saved, g):
    x, taps, first = saved
    wide, w, gw = x.astype(jnp.float32), taps.astype(jnp.float32), g.astype(jnp.float32)
    dx = gw * w[0][None, None, :]
    dtaps = [jnp.sum(gw * wide, (0, 1))]
    for lag in range(1, taps.shape[0]):
        heard = jnp.where(_lag_ok(first, lag), gw, 0.0)  # the cotangents of the outputs that read `lag` back
        dx = dx + _shift(heard, -lag) * w[lag][None, None, :]
        dtaps.append(jnp.sum(heard * _shift(wide, lag), (0, 1)))
    return dx.astype(x.dtype), jnp.stack(dtaps).astype(taps.dtype), None


_conv.defvjp(_forward, _backward)
