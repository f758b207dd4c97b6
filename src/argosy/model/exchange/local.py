"""All experts on this device: rows are gathered to their experts and gathered back."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy import spec
from argosy.model.exchange import layout
from argosy.model.experts import Routed, keep_hidden, swiglu

_BLOCK = 128  # rows of a block of the dropless path


def local(
    p: Routed,
    x: Float[Array, "T Z"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    valid: Bool[Array, "T"],
    routing: spec.Routing,
    capacity: str,
) -> tuple[Float[Array, "T Z"], layout.Ledger]:
    """The weighted sum of each token's experts, in the dtype of `x`.

    `bounded`: each expert takes its first `receiver_capacity` x mean load assignments in flat token-major order;
    a refused assignment adds nothing and the weights of the others stay. `dropless`: what is beyond that capacity
    goes through further blocks of rows, as many as the routing needs: exact for any routing.
    Activations move by gathers alone, forward and backward.
    """
    tokens, k = experts.shape
    count = p.gate.shape[0]
    rows = layout.capacity_rows(tokens * k, count, routing.receiver_capacity)
    if capacity == "dropless":
        y = exact(p, x, experts, weights, jnp.broadcast_to(valid[:, None], experts.shape), rows)
        return y, layout.ledger(valid, k, jnp.int32(0), jnp.int32(0))
    rank, load = layout.ranks(experts, valid, count)
    at = layout.slots(experts, rank, valid[:, None] & (rank < rows), count, rows)
    return _bounded(p, x, weights, at), layout.ledger(valid, k, jnp.int32(0), jnp.sum(jnp.maximum(load - rows, 0)))


def exact(
    p: Routed,
    x: Float[Array, "T Z"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    counts: Bool[Array, "T K"],
    rows: int,
) -> Float[Array, "T Z"]:
    """The dropless sum over the assignments that `counts` marks, `rows` of each expert in one product, the others in blocks.

    Every expert's number must be one of `p`, also where it does not count.
    """
    count = p.gate.shape[0]
    rank, load = layout.ranks(experts, counts, count)
    y = _bounded(p, x, weights, layout.slots(experts, rank, counts & (rank < rows), count, rows))
    return y + _overflow(p, x, weights, _blocks(experts, rank - rows, counts, jnp.maximum(load - rows, 0)))


@partial(jax.checkpoint, prevent_cse=False, policy=keep_hidden)
def _bounded(p: Routed, x: jax.Array, weights: jax.Array, at: layout.Slots) -> jax.Array:
    return layout.collect(swiglu(p, layout.dispatch(x, at), layout.scale(weights, at)), at)


# ---- beyond capacity: blocks of rows, each of one expert, in a loop of dynamic length -------------


class _Blocks(NamedTuple):
    at: layout.Slots  # rows of blocks: the buffer is [blocks, rows, Z]
    expert: Int[Array, "N"]  # of each block
    used: Int[Array, ""]  # blocks that hold rows


def _blocks(experts: jax.Array, rank: jax.Array, counts: jax.Array, over: jax.Array) -> _Blocks:
    """Blocks for the assignments with `rank` >= 0, the ranks counted from the capacity on; `over` of each expert."""
    tokens, k = experts.shape
    count = over.shape[0]
    rows = min(_BLOCK, tokens)
    most = tokens * k // rows + count  # each expert leaves at most one block unfilled
    ends = jnp.cumsum((over + rows - 1) // rows)
    first = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1]])
    place = first[experts] * rows + rank
    row = jnp.where(counts & (rank >= 0), place, most * rows)
    of = jnp.minimum(jnp.searchsorted(ends, jnp.arange(most, dtype=ends.dtype), side="right"), count - 1)
    return _Blocks(layout.invert(row, most, rows), of.astype(jnp.int32), ends[-1])


@jax.custom_vjp
def _overflow(p: Routed, x: jax.Array, weights: jax.Array, blocks: _Blocks) -> jax.Array:
    """The same as `_bounded`, block by block. A loop of dynamic length has no derivative, so it has its own."""
    scale = layout.scale(weights, blocks.at)

    def one(i: jax.Array, buffer: jax.Array) -> jax.Array:
        out = swiglu(_of(p, blocks.expert[i]), _rows(x, blocks, i), scale[i][None])
        return jax.lax.dynamic_update_index_in_dim(buffer, out[0], i, 0)

    return layout.collect(jax.lax.fori_loop(0, blocks.used, one, _buffer(blocks, x)), blocks.at)


def _overflow_forward(p: Routed, x: jax.Array, weights: jax.Array, blocks: _Blocks) -> Any:
    return _overflow(p, x, weights, blocks), (p, x, weights, blocks)


def _overflow_backward(saved: Any, g: jax.Array) -> Any:
    p, x, weights, blocks = saved
    scale = layout.scale(weights, blocks.at)

    def one(i: jax.Array, carry: Any) -> Any:
        dp, dx, dscale = carry
        e = blocks.expert[i]
        _, pull = jax.vjp(swiglu, _of(p, e), _rows(x, blocks, i), scale[i][None])
        dp_one, dx_one, dscale_one = pull(_rows(g, blocks, i))
        dp = jax.tree.map(lambda all_, d: jax.lax.dynamic_update_index_in_dim(all_, all_[e] + d[0], e, 0), dp, dp_one)
        dx = jax.lax.dynamic_update_index_in_dim(dx, dx_one[0], i, 0)
        return dp, dx, jax.lax.dynamic_update_index_in_dim(dscale, dscale_one[0], i, 0)

    start = (jax.tree.map(lambda w: _zeros(blocks, w.shape, w), p), _buffer(blocks, x), _zeros(blocks, scale.shape, scale))
    dp, dx, dscale = jax.lax.fori_loop(0, blocks.used, one, start)
    return dp, layout.collect(dx, blocks.at), layout.unscale(dscale, blocks.at), None


_overflow.defvjp(_overflow_forward, _overflow_backward)


def _of(p: Routed, e: jax.Array) -> Routed:
    """The weights of one expert, as a stack of one."""
    return jax.tree.map(lambda w: jax.lax.dynamic_slice_in_dim(w, e, 1, 0), p)


def _rows(x: jax.Array, blocks: _Blocks, i: jax.Array) -> jax.Array:
    """The tokens of block i, as a stack of one."""
    return layout.take(x, blocks.at.source[i] // blocks.at.row.shape[1])[None]


def _buffer(blocks: _Blocks, x: jax.Array) -> jax.Array:
    return _zeros(blocks, (*blocks.at.source.shape, x.shape[1]), x)


def _zeros(blocks: _Blocks, shape: tuple[int, ...], like: jax.Array) -> jax.Array:
    """Zeros that vary over the mesh as the blocks do, which the loop's carry must."""
    return jnp.broadcast_to((blocks.used * 0).astype(like.dtype), shape)
