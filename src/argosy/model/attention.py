"""Grouped-query attention with windows, document bounds, exclusive output and head gates."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from argosy import mesh, spec
from argosy.leaf import Leaf
from argosy.model import norm, shortconv
from argosy.model.attend import attend
from argosy.model.linear import linear

QK_EPS = 1e-6  # QK norm, and the exclusive output's denominator (reference_run 1.2)


class Attention(NamedTuple):
    """One layer's attention. Holds leaves, arrays, or whatever is mapped over them; an absent part is None."""

    q: Any  # D HA
    k: Any  # D NA, with N the key/value heads of a local layer
    v: Any  # D NA
    o: Any  # HA D
    conv_k: Any  # taps NA
    head_gate: Any  # D H


def leaves(run: spec.Run) -> Attention:
    """The leaves of one layer's attention."""
    m = run.model
    heads, stored = m.heads * m.head_width, m.kv_heads_local * m.head_width
    std = 0.5 / m.width**0.5
    into, out = P(mesh.FSDP, None), P(None, mesh.FSDP)
    return Attention(
        q=Leaf("D HA", (m.width, heads), into, std, "matrix", "attention"),
        k=Leaf("D NA", (m.width, stored), into, std, "matrix", "attention"),
        v=Leaf("D NA", (m.width, stored), into, std, "matrix", "attention"),
        o=Leaf("HA D", (heads, m.width), out, std, "matrix", "attention"),
        conv_k=shortconv.leaf(m.conv_taps, stored) if m.convolution != "none" else None,
        head_gate=Leaf("D H", (m.width, m.heads), into, "zeros", "gate", "head_gate") if m.head_gate != "none" else None,
    )


def attention(
    p: Attention, x: Float[Array, "B S D"], doc_start: Int[Array, "B S"], is_global: Bool[Array, ""], run: spec.Run
) -> Float[Array, "B S D"]:
    """The attention branch of one layer, for `x` that is already normed (reference_run 1.2).

    `is_global` may be traced: a layer is global by what it sees (no window), by its positions (no rotation under
    `rope_local`) and by its key/value heads (the first `kv_heads_global`). Float32 inside norms, rotation,
    softmax and gates; products in the dtype of `x`; returned in that dtype.
    """
    m = run.model
    q, k, v = linear(x, p.q), linear(x, p.k), linear(x, p.v)
    if p.conv_k is not None:
        k = shortconv.shortconv(k, p.conv_k, doc_start)
    gate = None if p.head_gate is None else linear(x, p.head_gate)
    whole, rows = P(mesh.BATCH, None, None), P(mesh.BATCH, None)
    reshard = jax.sharding.reshard
    heads = jax.shard_map(
        partial(_heads, m=m, block=run.compute.attention_block),
        in_specs=(whole, whole, whole, None if gate is None else whole, rows, P()),
        out_specs=whole,
    )
    y = heads(
        reshard(q, whole),
        reshard(k, whole),
        reshard(v, whole),
        None if gate is None else reshard(gate, whole),
        reshard(doc_start, rows),
        is_global,
    )
    return linear(reshard(y, mesh.B_S_D), p.o)


def _heads(q, k, v, gate, doc_start, is_global, *, m: spec.Model, block: int):
    """From projections [B,S,HA], [B,S,NA] to the heads' outputs [B,S,HA], on one device's sequences."""
    b, s, _ = q.shape
    q, k, v = (t.reshape(b, s, -1, m.head_width) for t in (q, k, v))
    q, k, v = _positions_and_heads(q, k, v, is_global, m)
    lower = jnp.where(is_global, doc_start, jnp.maximum(doc_start, jnp.arange(s, dtype=jnp.int32)[None, :] - (m.window - 1)))
    y = attend(q, k, v, lower, block=block)
    if m.attention == "exclusive":
        y = exclusive(y, v)
    if gate is not None:
        y = head_gated(y, gate)
    return y.reshape(b, s, -1)


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(4,))
def _positions_and_heads(q, k, v, is_global, m: spec.Model):
    """Normed, rotated, scaled q and k, with the key/value heads that this layer uses."""
    q, k = norm.rms(q, None, QK_EPS), norm.rms(k, None, QK_EPS)
    if m.position != "none":
        theta = angles(q.shape[1], m)
        if m.position == "rope_local":
            theta = jnp.where(is_global, 0.0, theta)  # a rotation by zero is exact
        q, k = rotate(q, theta), rotate(k, theta)
    q = (q.astype(jnp.float32) * m.qk_mult).astype(q.dtype)
    if m.kv_heads_global != m.kv_heads_local:
        # One program for both kinds: as many heads as both counts divide, each a copy of the one it stands for.
        n = math.lcm(m.kv_heads_local, m.kv_heads_global)
        k, v = (jnp.where(is_global, _copies(t, m.kv_heads_global, n), _copies(t, m.kv_heads_local, n)) for t in (k, v))
    return q, k, v


def _copies(t: jax.Array, heads: int, n: int) -> jax.Array:
    """The first `heads` of [B,S,N,A], each repeated so that there are `n`."""
    return jnp.repeat(t[:, :, :heads], n // heads, axis=2)


def angles(length: int, m: spec.Model) -> Float[Array, "S pairs"]:
    """Rotation angles t * theta^(-i / pairs) in radians; the pairs fill the first half of a head's dims."""
    pairs = m.head_width // 4
    rates = m.rope_theta ** (-np.arange(pairs) / pairs)
    return jnp.asarray(np.arange(length)[:, None] * rates[None, :], jnp.float32)


def rotate(x: Float[Array, "B S H A"], theta: Float[Array, "S pairs"]) -> Float[Array, "B S H A"]:
    """`x` with adjacent pairs (2i, 2i+1) of its first dims turned by `theta[:, i]`; the other dims untouched."""
    b, s, h, _ = x.shape
    pairs = theta.shape[1]
    turned = x[..., : 2 * pairs].astype(jnp.float32).reshape(b, s, h, pairs, 2)
    cos, sin = jnp.cos(theta)[None, :, None, :], jnp.sin(theta)[None, :, None, :]
    even, odd = turned[..., 0], turned[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(b, s, h, 2 * pairs)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * pairs :]], -1)


@partial(jax.checkpoint, prevent_cse=False)
def exclusive(y: Float[Array, "B S H A"], v: Float[Array, "B S N A"]) -> Float[Array, "B S H A"]:
    """y minus its part along the token's own value vector: y - (y.v) / (|v|^2 + 1e-6) v, per query head (XSA)."""
    b, s, h, a = y.shape
    n = v.shape[2]
    own = v.astype(jnp.float32)[:, :, :, None, :]
    wide = y.astype(jnp.float32).reshape(b, s, n, h // n, a)
    part = jnp.sum(wide * own, -1, keepdims=True) / (jnp.sum(own * own, -1, keepdims=True) + QK_EPS)
    return (wide - part * own).reshape(b, s, h, a).astype(y.dtype)


@partial(jax.checkpoint, prevent_cse=False)
def head_gated(y: Float[Array, "B S H A"], logit: Float[Array, "B S H"]) -> Float[Array, "B S H A"]:
    """2 sigmoid(logit) y per head: unchanged where the logit is 0."""
    return (y.astype(jnp.float32) * (2 * jax.nn.sigmoid(logit.astype(jnp.float32)))[..., None]).astype(y.dtype)
