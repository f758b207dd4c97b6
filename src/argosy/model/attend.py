"""Causal softmax attention with a lower bound per query: in blocks with its own VJP, and its plain twin."""

import functools
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int


def attend_plain(
    q: Float[Array, "B S H A"], k: Float[Array, "B S N A"], v: Float[Array, "B S N A"], lower: Int[Array, "B S"]
) -> Float[Array, "B S H A"]:
    """Attention of query i over the keys lower[i] <= j <= i, in float32 with all S x S scores: the slow twin."""
    b, s, h, a = q.shape
    n = k.shape[2]
    wide = q.astype(jnp.float32).reshape(b, s, n, h // n, a)
    scores = jnp.einsum("bsnga,btna->bngst", wide, k.astype(jnp.float32)) / np.float32(np.sqrt(a))
    at = jnp.arange(s, dtype=jnp.int32)
    seen = (at[None, None, :] <= at[None, :, None]) & (at[None, None, :] >= lower[:, :, None])
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bngst,btna->bsnga", weights, v.astype(jnp.float32)).reshape(b, s, h, a).astype(q.dtype)


def attend(
    q: Float[Array, "B S H A"], k: Float[Array, "B S N A"], v: Float[Array, "B S N A"], lower: Int[Array, "B S"], *, block: int
) -> Float[Array, "B S H A"]:
    """Attention of query i over the keys lower[i] <= j <= i, in blocks: never S x S, memory linear in S.

    Query head h reads key/value head h // (H/N). Scale 1/sqrt(A). A query sees at least itself: a bound above its
    own position counts as its position. Operands of products in the dtype given, sums and softmax in float32,
    returned in the dtype of `q`. The backward pass recomputes the weights from each query's saved logsumexp.

    Few blocks are laid out one after another, each query block against all keys up to its end; many are loops that
    skip the key blocks below the least bound of a query block over all sequences on this device.
    S need not be a multiple of `block`.
    """
    s = q.shape[1]
    return _attend(q, k, v, jnp.minimum(lower, jnp.arange(s, dtype=lower.dtype)[None, :]), min(block, s))


_UNROLL_BLOCKS = 4  # beyond these, loops: the program and the scores of a query block would grow with S
_UNROLL_BYTES = 2**21  # of a query block's scores: larger ones leave the cache, and loops over small tiles win
_UNSEEN = -1e30  # a masked score: its exponential is exactly 0 beside any real one


def _unrolled(q: jax.Array, block: int) -> bool:
    b, s, h, _ = q.shape
    return s <= _UNROLL_BLOCKS * block and 4 * b * h * block * s <= _UNROLL_BYTES


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q, k, v, lower, block: int):
    return _attend_forward(q, k, v, lower, block)[0]


def _attend_forward(q, k, v, lower, block: int):
    forward = _unrolled_forward if _unrolled(q, block) else _looped_forward
    y, lse = forward(q, k, v, lower, block)
    return y, (q, k, v, lower, y, lse)


def _attend_backward(block: int, saved, dy):
    q, k, v, lower, y, lse = saved
    inner = jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32), -1, keepdims=True)  # each row's sum of p dp
    backward = _unrolled_backward if _unrolled(q, block) else _looped_backward
    return *backward(q, k, v, lower, lse, inner, dy, block), None


_attend.defvjp(_attend_forward, _attend_backward)


# ---- tiles: the query heads of a key/value head are rows of one product, [B,N,group x rows,A] by [B,N,keys,A] ----


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _seen(lower: jax.Array, first_row: Any, first_key: Any, keys: int, group: int) -> jax.Array:
    """Which of `keys` keys the rows with bounds `lower` [B,rows] see, as [B, 1, group x rows, keys]."""
    b, rows = lower.shape
    row = first_row + jnp.arange(rows, dtype=jnp.int32)
    key = first_key + jnp.arange(keys, dtype=jnp.int32)
    seen = (key[None, None, :] <= row[None, :, None]) & (key[None, None, :] >= lower[:, :, None])
    return jnp.broadcast_to(seen[:, None], (b, group, rows, keys)).reshape(b, 1, group * rows, keys)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return _product("bnqa,bnka->bnqk", q, k) * np.float32(1 / np.sqrt(q.shape[-1]))


def _tile_forward(q, k, v, seen, before):
    """The tile's (largest score, sum, weighted values) of its rows, joined with those of the tiles `before` it."""
    scores = jnp.where(seen, _scores(q, k), _UNSEEN)
    top = jnp.max(scores, -1, keepdims=True)
    if before is not None:
        top = jnp.maximum(top, before[0])
    p = jnp.exp(scores - top)
    total = jnp.sum(p, -1, keepdims=True)
    y = _product("bnqk,bnka->bnqa", p.astype(v.dtype), v)
    if before is not None:
        keep = jnp.exp(before[0] - top)
        total, y = total + keep * before[1], y + keep * before[2]
    return top, total, y


def _tile_backward(q, k, v, seen, lse, inner, dy):
    """The tile's parts of dq as [B,N,rows,A] and of dk, dv as [B,N,A,keys], float32.

    The two come transposed because then the operand that the product has to transpose is the small one: more than
    twice as fast on a CPU.
    """
    p = jnp.where(seen, jnp.exp(_scores(q, k) - lse), 0.0)
    dp = _product("bnqa,bnka->bnqk", dy, v)
    ds = (p * (dp - inner) * np.float32(1 / np.sqrt(q.shape[-1]))).astype(q.dtype)
    dq = _product("bnqk,bnka->bnqa", ds, k)
    dk = _product("bnqa,bnqk->bnak", q, ds)
    dv = _product("bnqa,bnqk->bnak", dy, p.astype(dy.dtype))
    return dq, dk, dv


# ---- few blocks: each query block against all keys up to its end ---------------------------------


def _rows(t: jax.Array, n: int, start: int, end: int) -> jax.Array:
    """Positions start..end of [B,S,H,A] as [B, N, group x rows, A]."""
    b, _, h, a = t.shape
    return t[:, start:end].reshape(b, end - start, n, h // n, a).transpose(0, 2, 3, 1, 4).reshape(b, n, -1, a)


def _positions(parts: list[jax.Array], group: int) -> jax.Array:
    """Row blocks [B, N, group x rows, A] as [B,S,H,A]."""
    b, n, _, a = parts[0].shape
    split = [t.reshape(b, n, group, -1, a).transpose(0, 3, 1, 2, 4) for t in parts]
    return jnp.concatenate(split, 1).reshape(b, -1, n * group, a)


def _unrolled_forward(q, k, v, lower, block: int):
    s, n = q.shape[1], k.shape[2]
    group = q.shape[2] // n
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    ys, lses = [], []
    for start in range(0, s, block):
        end = min(start + block, s)
        seen = _seen(lower[:, start:end], start, 0, end, group)
        top, total, y = _tile_forward(_rows(q, n, start, end), k[:, :, :end], v[:, :, :end], seen, None)
        ys.append((y / total).astype(q.dtype))
        lses.append(top + jnp.log(total))
    return _positions(ys, group), _positions(lses, group)


def _unrolled_backward(q, k, v, lower, lse, inner, dy, block: int):
    s, n = q.shape[1], k.shape[2]
    group = q.shape[2] // n
    heads_k, heads_v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    dqs, dks, dvs = [], [], []
    for start in range(0, s, block):
        end = min(start + block, s)
        seen = _seen(lower[:, start:end], start, 0, end, group)
        rows = [_rows(t, n, start, end) for t in (q, lse, inner, dy)]
        part_q, part_k, part_v = _tile_backward(rows[0], heads_k[:, :, :end], heads_v[:, :, :end], seen, *rows[1:])
        beyond = [(0, 0), (0, 0), (0, 0), (0, s - end)]
        dqs.append(part_q.astype(q.dtype))
        dks.append(jnp.pad(part_k, beyond))
        dvs.append(jnp.pad(part_v, beyond))
    dk, dv = (functools.reduce(operator.add, parts).transpose(0, 3, 1, 2) for parts in (dks, dvs))
    return _positions(dqs, group), dk.astype(k.dtype), dv.astype(v.dtype)


# ---- many blocks: loops over query blocks and the key blocks that they see -----------------------


def _stacked(t: jax.Array, n: int, block: int) -> jax.Array:
    """[B,S,H,A] as blocks [blocks, B, N, group x rows, A], zeros after the end."""
    b, s, h, a = t.shape
    count = -(-s // block)
    t = jnp.pad(t, [(0, 0), (0, count * block - s), (0, 0), (0, 0)])
    return t.reshape(b, count, block, n, h // n, a).transpose(1, 0, 3, 4, 2, 5).reshape(count, b, n, -1, a)


def _unstacked(t: jax.Array, group: int, length: int) -> jax.Array:
    count, b, n, rows, a = t.shape
    t = t.reshape(count, b, n, group, rows // group, a).transpose(1, 0, 4, 2, 3, 5)
    return t.reshape(b, -1, n * group, a)[:, :length]


def _bounds(lower: jax.Array, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per query block: its index, its rows' bounds [B,rows], and the first key block that any of them sees."""
    b, s = lower.shape
    count = -(-s // block)
    after = jnp.broadcast_to(jnp.arange(s, count * block, dtype=lower.dtype)[None, :], (b, count * block - s))
    lower = jnp.concatenate([lower, after], 1).reshape(b, count, block).swapaxes(0, 1)
    return jnp.arange(count, dtype=jnp.int32), lower, jnp.min(lower, (1, 2)) // block


def _looped_forward(q, k, v, lower, block: int):
    s, n = q.shape[1], k.shape[2]
    group = q.shape[2] // n
    keys, values = _stacked(k, n, block), _stacked(v, n, block)

    def query_block(_, xs):
        rows, (i, lower, first) = xs

        def tile(j, before):
            seen = _seen(lower, i * block, j * block, block, group)
            return _tile_forward(rows, keys[j], values[j], seen, before)

        top, total, y = lax.fori_loop(first, i, tile, tile(i, None))  # its own block first: there each row sees itself
        return None, ((y / total).astype(q.dtype), top + jnp.log(total))

    _, (y, lse) = lax.scan(query_block, None, (_stacked(q, n, block), _bounds(lower, block)))
    return _unstacked(y, group, s), _unstacked(lse, group, s)


def _looped_backward(q, k, v, lower, lse, inner, dy, block: int):
    s, n = q.shape[1], k.shape[2]
    group = q.shape[2] // n
    keys, values = _stacked(k, n, block), _stacked(v, n, block)

    def query_block(carry, xs):
        (rows, *others), (i, lower, first) = xs

        def tile(j, sums):
            dq, dk, dv = sums
            seen = _seen(lower, i * block, j * block, block, group)
            part_q, part_k, part_v = _tile_backward(rows, keys[j], values[j], seen, *others)
            return dq + part_q, dk.at[j].add(part_k), dv.at[j].add(part_v)

        dq, *carry = lax.fori_loop(first, i + 1, tile, (jnp.zeros_like(rows, dtype=jnp.float32), *carry))
        return tuple(carry), dq.astype(q.dtype)

    count, b, _, _, a = keys.shape
    zeros = jnp.zeros_like(keys, dtype=jnp.float32, shape=(count, b, n, a, block))
    xs = (tuple(_stacked(t, n, block) for t in (q, lse, inner, dy)), _bounds(lower, block))
    (dk, dv), dq = lax.scan(query_block, (zeros, zeros), xs)
    dk, dv = (_unstacked(t.swapaxes(3, 4), 1, s) for t in (dk, dv))
    return _unstacked(dq, group, s), dk.astype(k.dtype), dv.astype(v.dtype)
