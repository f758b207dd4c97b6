"""Experts on other devices, through static pools: one per (sender, destination, wave), shared by the destination's experts."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from argosy import spec
from argosy.model.exchange import gathered, layout
from argosy.model.experts import Routed, keep_hidden, swiglu


class Sizes(NamedTuple):
    """Static sizes of one layer's exchange (expert_parallel A1)."""

    pool: int  # P: rows of a (sender, destination, wave)
    headers: int  # M: full-width rows that hold the pool's expert numbers
    rows: int  # R: rows of a (local expert, wave), from all senders together


def sizes(assignments: int, ranks: int, experts: int, width: int, routing: spec.Routing) -> Sizes:
    """Sizes for `assignments` = T K of each of `ranks` devices with `experts` experts each, rows `width` values wide.

    At most what can come: all of a device's assignments to one destination, all that the pools bring to one expert.

    >>> from argosy.runs import marin_535b
    >>> sizes(524_288, 64, 6, 3072, marin_535b.run().routing)
    Sizes(pool=3141, headers=2, rows=33497)
    """
    pool = max(1, math.ceil(routing.sender_capacity * assignments / (ranks * routing.waves)))
    pool = min(pool, -(-assignments // routing.waves))
    rows = min(ranks * pool, max(1, math.ceil(routing.receiver_capacity * assignments / (experts * routing.waves))))
    return Sizes(pool, math.ceil(pool / width), rows)


def pooled_wave(
    p: Routed,
    x: Float[Array, "T Z"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    valid: Bool[Array, "T"],
    routing: spec.Routing,
    capacity: str,
) -> tuple[Float[Array, "T Z"], layout.Ledger]:
    """The weighted sum of each token's experts, in the dtype of `x`; `p` holds this rank's experts.

    Assignments to a rank share its pool, filled in flat token-major order; rank modulo waves is the wave. At the receiver
    an expert's rows fill slot by slot over all senders, so that equal senders lose alike. Where an assignment is refused
    it adds nothing, and the weights of the others stay. Limits follow the valid assignments: padding lends no room.
    Two all-to-alls per wave; expert numbers travel in front of the rows. `dropless` goes through `gathered`.
    Source: expert_parallel A1.
    """
    if capacity == "dropless":
        return gathered.gathered(p, x, experts, weights, valid, routing, capacity)
    k, waves, local = experts.shape[1], routing.waves, p.gate.shape[0]
    ranks = jax.lax.axis_size("expert")
    size = sizes(experts.size, ranks, local, x.shape[1], routing)
    assert local <= spec.LOCAL_EXPERTS, local  # refused by spec.check: expert numbers travel as bfloat16
    good = jnp.sum(valid, dtype=jnp.int32) * k
    pool = _limit(good, routing.sender_capacity / (ranks * waves), size.pool)
    rows = _limit(jax.lax.psum(good, "expert"), routing.receiver_capacity / (local * ranks * waves), size.rows)

    experts = jnp.where(valid[:, None], experts, 0)
    to = experts // local
    rank = layout.ranks(to, valid, ranks).rank
    wave, slot = rank % waves, rank // waves
    keep = valid[:, None] & (slot < pool)
    each = waves * ranks * size.pool  # rows of all waves
    address = jnp.where(keep, (wave * ranks + to) * size.pool + slot, each)
    source = layout.invert(address, waves * ranks, size.pool).source
    codes = layout.take((experts % local + 1).reshape(-1), source)  # 0 in an empty slot

    y, refused = jnp.zeros(x.shape, jnp.float32), jnp.zeros((ranks,), jnp.int32)
    for w in range(waves):
        part = slice(w * ranks, (w + 1) * ranks)
        mine = address - w * ranks * size.pool
        here = layout.Slots(jnp.where((mine >= 0) & (mine < ranks * size.pool), mine, ranks * size.pool), source[part])
        sent = layout.Slots(_behind(here.row, size, ranks), here.source)
        received = _swap(pack(x, _headers(codes[part], size, x.shape[1]), sent))
        received = checkpoint_name(received, layout.DISPATCHED)
        arrived, leaving, lost = _arrange(received[:, : size.headers], size, local, rows)
        out = _compute(p, received.reshape(-1, x.shape[1]), arrived, leaving)
        y = y + layout.combine(_swap(out.reshape(ranks, size.pool, -1)), weights, here)
        refused = refused + lost
    dropped = jax.lax.psum_scatter(refused, "expert")  # each sender hears how many of its rows found no room
    return y.astype(x.dtype), layout.ledger(valid, k, good - jnp.sum(keep, dtype=jnp.int32), dropped)


def _limit(valid: jax.Array, share: float, most: int) -> jax.Array:
    """Rows that `valid` assignments may take: their share, rounded up in float32, at least 1 and at most the buffer's."""
    return layout.limit(valid.astype(jnp.float32) * share, most)


def _headers(codes: Int[Array, "X P"], size: Sizes, width: int) -> Int[Array, "X M Z"]:
    return jnp.pad(codes, ((0, 0), (0, size.headers * width - size.pool))).reshape(-1, size.headers, width)


def _behind(row: jax.Array, size: Sizes, ranks: int) -> jax.Array:
    """Numbers of rows [ranks, P] where each rank's headers come first; past the end stays past the end."""
    ends = ranks * (size.headers + size.pool)
    return jnp.where(row < ranks * size.pool, row + (row // size.pool + 1) * size.headers, ends)


@jax.custom_vjp
def pack(x: Float[Array, "T Z"], headers: Int[Array, "X M Z"], at: layout.Slots) -> Float[Array, "X MP Z"]:
    """Headers, then the rows of each destination's pool; `at.row` counts the headers too. The gradient skips them."""
    return jnp.concatenate([headers.astype(x.dtype), layout.dispatch(x, at)], 1)


pack.defvjp(lambda x, headers, at: (pack(x, headers, at), at), lambda at, g: (layout.collect(g, at), None, None))


def _swap(rows: Float[Array, "X P Z"]) -> Float[Array, "X P Z"]:
    """Block i of rank j becomes block j of rank i."""
    return jax.lax.all_to_all(rows, "expert", 0, 0, tiled=True)


def _arrange(headers: jax.Array, size: Sizes, local: int, rows: jax.Array) -> tuple[layout.Slots, layout.Slots, jax.Array]:
    """Places in [local, R] of all that arrived, headers among it, and of the slots alone; and the refused of each sender.

    What arrived counts as tokens with one assignment each. An expert's rows fill with slot 0 of every sender, then
    slot 1, and so on.
    """
    ranks = headers.shape[0]
    of = headers.reshape(ranks, -1)[:, : size.pool].astype(jnp.int32) - 1  # X P
    across = of.T.reshape(-1, 1)
    rank = layout.ranks(jnp.maximum(across, 0), across[:, 0] >= 0, local).rank.reshape(-1, ranks).T
    there = of >= 0
    keep = there & (rank < rows)
    row = jnp.where(keep, of * size.rows + rank, local * size.rows)
    slots = layout.invert(row.reshape(-1, 1), local, size.rows)
    every = jnp.pad(row, ((0, 0), (size.headers, 0)), constant_values=local * size.rows)
    arrived = layout.Slots(every.reshape(-1, 1), _behind(slots.source, size, ranks))
    return arrived, slots, jnp.sum(there & ~keep, 1, dtype=jnp.int32)


@partial(jax.checkpoint, prevent_cse=False, policy=keep_hidden)
def _compute(p: Routed, rows: Float[Array, "N Z"], arrived: layout.Slots, leaving: layout.Slots) -> Float[Array, "XP Z"]:
    """The experts' results in the places of their rows, zeros where a row was refused.

    Only the two products before the nonlinearity are kept for the backward pass. The public code keeps nothing here:
    a layer that is computed again anyway (`compute.remat`) would then compute these two a third time.
    """
    return layout.collect(swiglu(p, layout.dispatch(rows, arrived)), leaving)
