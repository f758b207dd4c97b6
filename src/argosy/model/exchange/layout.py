"""Where every assignment goes: static sizes, ranks, rows, and the ledger of what was dropped."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

DISPATCHED = "dispatched"  # the rows that arrived, by this name kept under compute.remat=block_keep_dispatch
_RANK_BLOCK = 128  # tokens ranked by one triangular product


class Ledger(NamedTuple):
    """What became of the assignments of one layer and step; int32, which holds T x K up to 2^31.

    Always `accepted + sender_dropped + receiver_dropped + padding == assignments` and
    `valid + padding == assignments`. *Sender*: refused before transport for want of a sender's pool;
    *receiver*: refused for receiver capacity.
    """

    assignments: Int[Array, ""]
    valid: Int[Array, ""]
    accepted: Int[Array, ""]
    sender_dropped: Int[Array, ""]
    receiver_dropped: Int[Array, ""]
    padding: Int[Array, ""]


class Fairness(NamedTuple):
    """How evenly shards were served, over those that had a valid assignment; 1 and 0 where none had."""

    accepted_lowest: Float[Array, ""]  # smallest accepted share of a shard's valid assignments; float32
    accepted_highest: Float[Array, ""]


class Ranks(NamedTuple):
    """The order of assignments within their experts: flat token-major, so that earlier tokens win."""

    rank: Int[Array, "T K"]  # how many valid assignments before this one chose the same expert
    load: Int[Array, "E"]  # valid assignments of each expert


class Slots(NamedTuple):
    """A one-to-one map between kept assignments and rows of a buffer [E, C, Z]."""

    row: Int[Array, "T K"]  # e * C + rank of an assignment; E * C where it is refused or padding
    source: Int[Array, "E C"]  # t * K + k of a row's assignment; T * K where the row is empty


def capacity_rows(assignments: int, experts: int, factor: float) -> int:
    """Rows per expert: the mean load times the capacity factor, rounded up, at least 1 and at most all.

    >>> capacity_rows(16_384, 64, 1.15), capacity_rows(8, 64, 1.0)
    (295, 1)
    """
    return min(assignments, max(1, math.ceil(factor * assignments / experts)))


def limit(share: Float[Array, ""], most: int) -> Int[Array, ""]:
    """Rows that a `share` gives: rounded up, at least 1, at most the buffer's `most`; compared before it is a whole number,
    since a share beyond int32 has none.

    >>> int(limit(jnp.float32(2.1), 8)), int(limit(jnp.float32(1e38), 8))
    (3, 8)
    """
    up = jnp.ceil(share)
    return jnp.where(up < most, jnp.clip(up, 1, most).astype(jnp.int32), jnp.int32(most))


def ranks(experts: Int[Array, "T K"], valid: Bool[Array, "T"] | Bool[Array, "T K"], count: int) -> Ranks:
    """Rank of every assignment within its expert, and the load of each of `count` experts.

    `valid` is of tokens or of assignments; where it is false, rank and expert mean nothing.
    Ranks within a block of tokens come from one product with a triangle of ones (small whole numbers, exact in float32
    and with bfloat16 operands), which is much faster than sorting or a running sum over all tokens.
    """
    tokens = experts.shape[0]
    ids, counts = jnp.arange(count, dtype=experts.dtype), valid if valid.ndim == 2 else valid[:, None]
    hit = (experts[:, :, None] == ids[None, None, :]) & counts[:, :, None]
    taken = jnp.sum(hit, 1, dtype=jnp.int32).astype(jnp.float32)
    blocks = jnp.pad(taken, ((0, -tokens % _RANK_BLOCK), (0, 0))).reshape(-1, _RANK_BLOCK, count)
    within = jnp.einsum("ts,nse->nte", jnp.tril(jnp.ones((_RANK_BLOCK, _RANK_BLOCK), jnp.float32), -1), blocks)
    total = jnp.sum(blocks, 1).astype(jnp.int32)
    before = jnp.cumsum(total, 0) - total
    ahead = (within.astype(jnp.int32) + before[:, None, :]).reshape(-1, count)[:tokens]
    rank = jnp.take_along_axis(ahead, experts, axis=1)
    same = (experts[:, :, None] == experts[:, None, :]) & counts[:, None, :]
    twice = jnp.tril(same, -1)  # the same expert earlier in the same token
    return Ranks(rank + jnp.sum(twice, 2, dtype=jnp.int32), jnp.sum(total, 0))


def slots(experts: Int[Array, "T K"], rank: Int[Array, "T K"], keep: Bool[Array, "T K"], count: int, rows: int) -> Slots:
    """Rows for the kept assignments, whose ranks are below `rows`, and the way back."""
    return invert(jnp.where(keep, experts * rows + rank, count * rows), count, rows)


def invert(row: Int[Array, "T K"], count: int, rows: int) -> Slots:
    """The map in both directions, from the row of each assignment in a buffer [count, rows, Z]."""
    flat = jnp.arange(row.size, dtype=jnp.int32)
    source = jnp.full((count * rows,), row.size, jnp.int32).at[row.reshape(-1)].set(flat, mode="drop")
    return Slots(row, source.reshape(count, rows))


def ledger(valid: Bool[Array, "T"], k: int, sender_dropped: Int[Array, ""], receiver_dropped: Int[Array, ""]) -> Ledger:
    """The ledger of this shard; sums over shards are sums of fields."""
    assignments = jnp.int32(valid.size * k)
    good = jnp.sum(valid, dtype=jnp.int32) * k
    return Ledger(
        assignments, good, good - sender_dropped - receiver_dropped, sender_dropped, receiver_dropped, assignments - good
    )


def fairness(mine: Ledger, axes: tuple[str, ...]) -> Fairness:
    """What the shards' own ledgers, along the mesh axes `axes`, say of each other."""
    share = mine.accepted.astype(jnp.float32) / jnp.maximum(mine.valid, 1).astype(jnp.float32)
    ends = jnp.where(mine.valid > 0, jnp.stack([share, -share]), jnp.array([1.0, 0.0]))
    lowest, highest = jax.lax.pmin(ends, axes)  # one collective
    return Fairness(lowest, -highest)


# ---- moving rows: every one is a gather, forward and backward --------------------------------------


def take(x: Num[Array, "N ..."], index: Int[Array, "..."]) -> Num[Array, "..."]:
    """x[index], zeros where the index is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x: Float[Array, "T Z"], at: Slots) -> Float[Array, "E C Z"]:
    """The buffer of rows: a copy of each kept assignment's token, zeros in empty rows. One gather."""
    return take(x, at.source // at.row.shape[1])  # an empty row's T * K becomes T, past the last token


@jax.custom_vjp
def collect(rows: Float[Array, "E C Z"], at: Slots) -> Float[Array, "T Z"]:
    """The transpose of `dispatch`: the sum of each token's rows, in float32; refused assignments add nothing."""
    total = jnp.zeros((at.row.shape[0], rows.shape[-1]), jnp.float32)
    for k in range(at.row.shape[1]):  # unrolled, gather and sum fuse: no [T, K, Z] is written
        one, there = _row(rows, at, k)
        total = total + jnp.where(there, one, 0.0)
    return total.astype(rows.dtype)


dispatch.defvjp(lambda x, at: (dispatch(x, at), at), lambda at, g: (collect(g, at), None))
collect.defvjp(lambda rows, at: (collect(rows, at), at), lambda at, g: (dispatch(g, at), None))


@jax.custom_vjp
def scale(weights: Float[Array, "T K"], at: Slots) -> Float[Array, "E C"]:
    """The combine weight of each row, zero for empty ones."""
    return take(weights.reshape(-1), at.source)


def unscale(rows: Float[Array, "E C"], at: Slots) -> Float[Array, "T K"]:
    """The transpose of `scale`: each assignment's value from its row, zero where it has none."""
    return take(rows.reshape(-1), at.row)


scale.defvjp(lambda w, at: (scale(w, at), at), lambda at, g: (unscale(g, at), None))


@jax.custom_vjp
def combine(rows: Float[Array, "X P Z"], weights: Float[Array, "T K"], at: Slots) -> Float[Array, "T Z"]:
    """The weighted sum of each token's rows, in float32; refused assignments add nothing."""
    total = jnp.zeros((weights.shape[0], rows.shape[-1]), jnp.float32)
    for k in range(weights.shape[1]):
        one, there = _row(rows, at, k)
        total = total + jnp.where(there, one * weights[:, k, None], 0.0)
    return total


def _row(rows: jax.Array, at: Slots, k: int) -> tuple[jax.Array, jax.Array]:
    """Each token's k-th row in float32, and whether it has one."""
    flat, row = rows.reshape(-1, rows.shape[-1]), at.row[:, k]
    return flat.at[row].get(mode="clip").astype(jnp.float32), (row < flat.shape[0])[:, None]


def _combine_backward(saved: Any, g: jax.Array) -> Any:
    rows, weights, at = saved
    wide = take(g.astype(rows.dtype), at.source // weights.shape[1]).astype(jnp.float32)
    d_rows = wide * scale(weights, at)[:, :, None]
    picked = [_row(rows, at, k) for k in range(weights.shape[1])]
    d_weights = [jnp.sum(jnp.where(there, one * g, 0.0), 1) for one, there in picked]
    return d_rows.astype(rows.dtype), jnp.stack(d_weights, 1), None


combine.defvjp(lambda rows, weights, at: (combine(rows, weights, at), (rows, weights, at)), _combine_backward)
