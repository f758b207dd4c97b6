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
from argosy.model import shortconv
from argosy.model.attend import attend
from argosy.model.linear import linear, linears

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
    weights = [p.q, p.k, p.v] if p.head_gate is None else [p.q, p.k, p.v, p.head_gate]
    q, k, v, *gate = linears(x, weights)
    if p.conv_k is not None:
        k = shortconv.shortconv(k, p.conv_k, doc_start)
    whole, rows = P(mesh.BATCH, None, None), P(mesh.BATCH, None)  # each sequence whole on one device
    heads = jax.shard_map(
        partial(_heads, m=m, block=run.compute.attention_block),
        in_specs=(rows, P(), whole, whole, whole, *[whole for _ in gate]),
        out_specs=whole,
    )
    reshard = jax.sharding.reshard
    y = heads(reshard(doc_start, rows), is_global, *(reshard(t, whole) for t in (q, k, v, *gate)))
    return linear(reshard(y, mesh.B_S_D), p.o)


def _heads(doc_start, is_global, q, k, v, gate=None, *, m: spec.Model, block: int):
    """From projections [B,S,HA], [B,S,NA], [B,S,H] to the heads' outputs [B,S,HA], on one device's sequences."""
    b, s, _ = q.shape
    q, k, v = (t.reshape(b, s, -1, m.head_width) for t in (q, k, v))
    cos, sin = turns(angles(s, is_global, m), m.head_width)
    q, k = placed(q, cos, sin, m.qk_mult), placed(k, cos, sin, 1.0)
    if m.kv_heads_global != m.kv_heads_local:
        # One program for both kinds: as many heads as both counts divide, each a copy of the one it stands for.
        n = math.lcm(m.kv_heads_local, m.kv_heads_global)
        k, v = (jnp.where(is_global, _copies(t, m.kv_heads_global, n), _copies(t, m.kv_heads_local, n)) for t in (k, v))
    lower = jnp.where(is_global, doc_start, jnp.maximum(doc_start, jnp.arange(s, dtype=jnp.int32)[None, :] - (m.window - 1)))
    y = attend(q, k, v, lower, block=block)
    return outputs(y, v if m.attention == "exclusive" else None, gate).reshape(b, s, -1)


def _copies(t: jax.Array, heads: int, n: int) -> jax.Array:
    """The first `heads` of [B,S,N,A], each repeated so that there are `n`."""
    return jnp.repeat(t[:, :, :heads], n // heads, axis=2)


# ---- QK norm and position ------------------------------------------------------------------------


def angles(length: int, is_global: Bool[Array, ""], m: spec.Model) -> Float[Array, "S pairs"]:
    """Rotation angles t * theta^(-i / pairs) in radians, for the pairs that fill the first half of a head's dims.

    Zero, which turns nothing, by the rule `none` and on global layers by `rope_local`.
    """
    pairs = m.head_width // 4
    rates = m.rope_theta ** (-np.arange(pairs) / pairs)
    theta = jnp.asarray(np.arange(length)[:, None] * rates[None, :] * (m.position != "none"), jnp.float32)
    return jnp.where(is_global, 0.0, theta) if m.position == "rope_local" else theta


def turns(theta: Float[Array, "S pairs"], width: int) -> tuple[Float[Array, "S A"], Float[Array, "S A"]]:
    """What `turn` multiplies by: cos, and sin with the sign of the pair's member; 1 and 0 on the dims that stay."""
    length, pairs = theta.shape
    sign = np.tile(np.array([-1, 1], np.float32), pairs)[None, :]
    stay = jnp.zeros((length, width - 2 * pairs), jnp.float32)
    cos, sin = jnp.repeat(jnp.cos(theta), 2, axis=1), jnp.repeat(jnp.sin(theta), 2, axis=1) * sign
    return jnp.concatenate([cos, stay + 1], 1), jnp.concatenate([sin, stay], 1)


def turn(x: Float[Array, "B S H A"], cos: Float[Array, "S A"], sin: Float[Array, "S A"]) -> Float[Array, "B S H A"]:
    """`x` with its adjacent pairs (2i, 2i+1) turned, in float32. The transpose is the turn by -sin.

    Each dim meets its partner through a reversal of the pairs, which a CPU does several times faster than taking
    even and odd dims apart and together again.
    """
    b, s, h, a = x.shape
    x = x.astype(jnp.float32)
    partner = x.reshape(b, s, h, a // 2, 2)[..., ::-1].reshape(b, s, h, a)
    return x * cos[None, :, None, :] + partner * sin[None, :, None, :]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def placed(
    x: Float[Array, "B S H A"], cos: Float[Array, "S A"], sin: Float[Array, "S A"], scale: float
) -> Float[Array, "B S H A"]:
    """scale * turn(RMS(x)) per head, without gain: what queries and keys are compared by."""
    return _placed_forward(x, cos, sin, scale)[0]


def _placed_forward(x, cos, sin, scale: float):
    y = (turn(_unit(x), cos, sin) * scale).astype(x.dtype)
    return y, (x, y, cos, sin)


def _unit(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) * _inverse_rms(x)


def _inverse_rms(x: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + QK_EPS)


def _placed_backward(scale: float, saved, dy):
    x, y, cos, sin = saved
    # Turning keeps products, so that the part along unit(x) is read off y: dy.y = scale * (turned back dy).unit(x).
    along = jnp.mean(dy.astype(jnp.float32) * y.astype(jnp.float32), -1, keepdims=True)
    dx = _inverse_rms(x) * (scale * turn(dy, cos, -sin) - _unit(x) * along)
    return dx.astype(x.dtype), None, None


placed.defvjp(_placed_forward, _placed_backward)


# ---- exclusive output and head gate --------------------------------------------------------------


@jax.custom_vjp
def outputs(
    y: Float[Array, "B S H A"], v: Float[Array, "B S N A"] | None, gate: Float[Array, "B S H"] | None
) -> Float[Array, "B S H A"]:
    """2 sigmoid(gate) (y - (y.v) / (|v|^2 + 1e-6) v) per query head, `v` being its own token's value (XSA).

    Without `v` nothing is taken out, without `gate` nothing is scaled. Computed in float32.
    """
    return _outputs_forward(y, v, gate)[0]


def _outputs_forward(y, v, gate):
    z = y.astype(jnp.float32)
    if v is not None:
        own, share, _ = _own(y, v)
        z = z - share * own
    return (z * _twice(gate)).astype(y.dtype), (y, v, gate)


def _own(y: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each query head's own value, how much of it is in `y`, and its squared length."""
    own = jnp.repeat(v, y.shape[2] // v.shape[2], axis=2).astype(jnp.float32)
    squared = jnp.sum(jnp.square(own), -1, keepdims=True) + QK_EPS
    return own, jnp.sum(y.astype(jnp.float32) * own, -1, keepdims=True) / squared, squared


def _twice(gate: jax.Array | None) -> Any:
    return 1.0 if gate is None else 2 * jax.nn.sigmoid(gate.astype(jnp.float32))[..., None]


def _outputs_backward(saved, dz):
    y, v, gate = saved
    wide, twice = dz.astype(jnp.float32), _twice(gate)
    dy = twice * wide
    dv = dgate = None
    along = jnp.sum(wide * y.astype(jnp.float32), -1, keepdims=True)  # dz.y, then dz.(y - share own)
    if v is not None:
        own, share, squared = _own(y, v)
        by_own = jnp.sum(wide * own, -1, keepdims=True)
        along = along - share * by_own
        lean = twice * by_own / squared
        per_head = 2 * share * lean * own - share * dy - lean * y.astype(jnp.float32)
        dy = dy - lean * own
        group = y.shape[2] // v.shape[2]
        dv = sum(per_head[:, :, i::group] for i in range(group)).astype(v.dtype)
    if gate is not None:
        dgate = (along * twice * (1 - twice / 2))[..., 0].astype(gate.dtype)
    return dy.astype(y.dtype), dv, dgate


outputs.defvjp(_outputs_forward, _outputs_backward)
