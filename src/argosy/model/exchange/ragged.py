"""Rows to their experts through `lax.ragged_all_to_all`: nothing is padded on the way, little is dropped.

All ranks gather how many rows each has for each expert, and each computes the same table of what the receivers take
(expert_parallel A2). After that every slice's place is known on both sides, so that rows alone travel.
"""

import dataclasses
import math
import os
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from argosy import spec
from argosy.model.exchange import gathered, layout, local
from argosy.model.experts import Routed

AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class How:
    """By which operations rows travel and experts multiply. The results are the same."""

    move: Literal["ragged_all_to_all", "gather"]  # `gather`: all ranks' rows, then those that belong here
    products: Literal["ragged_dot", "padded"]  # `padded`: as `local` does


_GROUPED = ("xla_gpu_experimental_use_ragged_dot_fusion=true", "xla_gpu_experimental_use_ragged_dot_grouped_gemm=true")


def how(ranks: int) -> How:
    """What suits the devices that a program is traced for: those of the mesh, or the default backend's.

    A mesh without devices is traced for its `abstract_device`. One rank alone sends nothing. XLA:CPU has no ragged
    all-to-all, and its `ragged_dot` is 35 times slower than products of padded rows. XLA:GPU writes `ragged_dot` out as
    products of all rows with every expert unless XLA_FLAGS asks for grouped ones, of cuDNN or hipBLASLt (openxla/xla#40189).
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    grouped = platform != "gpu" or any(flag in os.environ.get("XLA_FLAGS", "") for flag in _GROUPED)
    return How(
        "gather" if platform == "cpu" or ranks == 1 else "ragged_all_to_all",
        "ragged_dot" if platform != "cpu" and grouped else "padded",
    )


def ragged(
    p: Routed,
    x: Float[Array, "T Z"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    valid: Bool[Array, "T"],
    routing: spec.Routing,
    capacity: str,
    *,
    by: How | None = None,
) -> tuple[Float[Array, "T Z"], layout.Ledger]:
    """The weighted sum of each token's experts, in the dtype of `x`; `p` holds this rank's experts.

    A rank's experts are served in `routing.waves` chunks, one after another. A chunk takes `receiver_capacity` x its
    mean load, shared by its experts (`accept`) and, within an expert, fairly by the senders (`split`); of a sender's
    rows the first in flat token-major order. What a chunk refuses is the ledger's `receiver_dropped`; a refused
    assignment adds nothing and the weights of the others stay. Senders refuse nothing. `dropless` is exact.

    Activations move by gathers and ragged all-to-alls alone, forward and backward.
    """
    if capacity == "dropless":
        return gathered.gathered(p, x, experts, weights, valid, routing, capacity)
    ranks, here, assignments = lax.axis_size(AXIS), p.gate.shape[0], experts.size
    by = how(ranks) if by is None else by
    rank, load = layout.ranks(experts, valid, ranks * here)
    demand = lax.all_gather(load, AXIS)
    most = chunk_rows(assignments, ranks, routing)
    kept, chunks = plan(demand, most, routing)
    mine = kept[lax.axis_index(AXIS)]
    keep = valid[:, None] & (rank < mine[experts])
    at = layout.invert(jnp.where(keep, (jnp.cumsum(load) - load)[experts] + rank, assignments), 1, assignments)
    rows = layout.dispatch(x, at)[0]
    back = _blank(assignments, x, load)
    for i, chunk in enumerate(chunks):
        if i:
            rows, back = lax.optimization_barrier((rows, back))  # a chunk waits for the one before: one buffer at a time
        part = jax.tree.map(lambda w, i=i: w[i * here // routing.waves : (i + 1) * here // routing.waves], p)
        buffer, rows = send(rows, chunk, most, i + 1 == len(chunks), by.move)
        buffer = products(part, checkpoint_name(buffer, layout.DISPATCHED), chunk.load, by.products)
        back = bring(buffer, back, chunk, by.move)
    y = layout.combine(back[None], weights, at).astype(x.dtype)
    return y, layout.ledger(valid, experts.shape[1], jnp.int32(0), jnp.sum(load - mine))


# ---- the table: what every receiver takes of every sender -----------------------------------------


class Trip(NamedTuple):
    """Slices of rows that one rank sends and gets, one for each pair of a peer and an expert of the chunk, peer-major."""

    start: Int[Array, "N"]  # where a slice that is sent begins in this rank's rows
    sent: Int[Array, "N"]  # its rows
    land: Int[Array, "N"]  # where it begins in the receiver's rows
    got: Int[Array, "N"]  # rows of the slice that comes from there


class Chunk(NamedTuple):
    """The travels of one chunk, and the rows of each of its experts on this rank, which lie one after another."""

    out: Trip
    back: Trip
    load: Int[Array, "E"]


def chunk_rows(assignments: int, ranks: int, routing: spec.Routing) -> int:
    """Rows of one chunk's buffer: the mean load of its experts together, times the capacity factor, rounded up.

    `assignments` are those of one rank. At least 1, at most all that could come.
    """
    return min(ranks * assignments, max(1, math.ceil(routing.receiver_capacity * assignments / routing.waves)))


def plan(demand: Int[Array, "X E"], most: int, routing: spec.Routing) -> tuple[Int[Array, "X E"], list[Chunk]]:
    """How many rows of each sender each expert takes, and the chunks' travels seen from this rank.

    Capacity follows the valid assignments of all ranks, rounded up in float32, and never exceeds the buffer:
    padding brings no free room.
    """
    ranks, count = demand.shape
    waves = routing.waves
    assert count % (ranks * waves) == 0, (demand.shape, waves)
    share = jnp.sum(demand).astype(jnp.float32) * jnp.float32(routing.receiver_capacity / (ranks * waves))
    taken = accept(jnp.sum(demand, 0).reshape(ranks * waves, -1), layout.limit(share, most))
    kept = split(demand, taken.reshape(-1))
    by_chunk = (ranks, ranks, waves, count // ranks // waves)  # sender, receiver, chunk, its expert
    start = (jnp.cumsum(demand, 1) - demand).reshape(by_chunk)
    place = ((jnp.cumsum(taken, 1) - taken).reshape(-1)[None, :] + jnp.cumsum(kept, 0) - kept).reshape(by_chunk)
    rows, loads, me = kept.reshape(by_chunk), taken.reshape(by_chunk[1:]), lax.axis_index(AXIS)
    chunks = []
    for i in range(waves):
        sent, got = rows[me, :, i].reshape(-1), rows[:, me, i].reshape(-1)
        out = Trip(start[me, :, i].reshape(-1), sent, place[me, :, i].reshape(-1), got)
        back = Trip(place[:, me, i].reshape(-1), got, start[:, me, i].reshape(-1), sent)
        chunks.append(Chunk(out, back, loads[me, i]))
    return kept, chunks


def accept(total: Int[Array, "N E"], room: Int[Array, ""]) -> Int[Array, "N E"]:
    """What each expert takes of its `total` where the experts of a row share `room`: the first ones first."""
    filled = jnp.minimum(jnp.cumsum(total, 1), room)
    return jnp.diff(filled, axis=1, prepend=0)


def split(demand: Int[Array, "X E"], taken: Int[Array, "E"]) -> Int[Array, "X E"]:
    """How many rows of each sender make up `taken`, at most its demand: as if the senders took turns.

    Senders that ask for the same get the same, the first of them at most one more. The public code lets the first
    senders win. Water is poured to the largest whole level: at most `level` of each sender, then one each to the
    first that have more. Asks `taken <= sum(demand)`.
    """
    senders = demand.shape[0]
    up = jnp.sort(demand, 0)
    poured = jnp.cumsum(up, 0) - up + jnp.arange(senders, 0, -1, dtype=up.dtype)[:, None] * up  # at the level of each
    whole = poured <= taken[None, :]
    left = taken - jnp.sum(jnp.where(whole, up, 0), 0)
    others = senders - jnp.sum(whole, 0, dtype=up.dtype)
    level = jnp.where(others == 0, up[-1], left // jnp.maximum(others, 1))
    above = demand > level[None, :]
    turn = jnp.cumsum(above, 0, dtype=up.dtype) <= (left - level * others)[None, :]
    return jnp.minimum(demand, level[None, :] + (above & turn).astype(up.dtype))


# ---- travelling: each way's transpose is the other way --------------------------------------------


def travel(rows: Float[Array, "N Z"], into: Float[Array, "M Z"], there: Trip, back: Trip, move: str) -> Float[Array, "M Z"]:
    """`into` with the rows that arrive on the way `there` written over it; `back` is the same way reversed."""
    if move == "ragged_all_to_all":
        return lax.ragged_all_to_all(rows, into, there.start, there.sent, there.land, there.got, axis_name=AXIS)
    every = lax.all_gather(rows, AXIS, tiled=True)
    place = jnp.arange(into.shape[0], dtype=jnp.int32)[:, None]
    begin, end = back.start[None, :], (back.start + there.got)[None, :]
    inside = (begin <= place) & (place < end)
    slices = there.got.size
    first = jnp.arange(slices, dtype=jnp.int32) // (slices // lax.axis_size(AXIS)) * rows.shape[0]  # the peer's row 0
    source = jnp.sum(jnp.where(inside, (first + back.land)[None, :] + place - begin, 0), 1)
    return jnp.where(jnp.any(inside, 1)[:, None], every.at[source].get(mode="promise_in_bounds"), into)


def _blank(size: int, like: jax.Array, after: jax.Array) -> jax.Array:
    """Zeros to write into, which wait for `after`: constants would be shared, and copied before each use."""
    zero, _ = lax.optimization_barrier(((after[0] * 0).astype(like.dtype), after))
    return jnp.broadcast_to(zero, (size, *like.shape[1:]))


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def send(
    rows: Float[Array, "N Z"], chunk: Chunk, size: int, last: bool, move: str
) -> tuple[Float[Array, "M Z"], Float[Array, "N Z"]]:
    """A chunk's buffer of `size` rows, expert-major, zeros after its load; and `rows`, for the next chunk unless `last`.

    Handing `rows` on lets the chunks' gradients, which lie in different rows, be written into one array.
    """
    return travel(rows, _blank(size, rows, chunk.load), chunk.out, chunk.back, move), rows


def _send_backward(size: int, last: bool, move: str, chunk: Chunk, g: Any) -> Any:
    buffer, rows = g
    into = _blank(rows.shape[0], buffer, chunk.load) if last else rows
    return travel(buffer, into, chunk.back, chunk.out, move), None


send.defvjp(lambda rows, chunk, size, last, move: (send(rows, chunk, size, last, move), chunk), _send_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def bring(buffer: Float[Array, "M Z"], into: Float[Array, "N Z"], chunk: Chunk, move: str) -> Float[Array, "N Z"]:
    """A chunk's rows back in their senders' order, written into what the chunks before it brought, zeros at first."""
    return travel(buffer, into, chunk.back, chunk.out, move)


def _bring_backward(move: str, saved: Any, g: jax.Array) -> Any:
    chunk, empty = saved
    # The other chunks' gradient keeps the rows of this one: they do not read them.
    return travel(g, _blank(empty.shape[0], g, chunk.load), chunk.out, chunk.back, move), g, None


bring.defvjp(
    lambda buffer, into, chunk, move: (bring(buffer, into, chunk, move), (chunk, jnp.zeros((buffer.shape[0], 0)))),
    _bring_backward,
)


# ---- the experts of a chunk ----------------------------------------------------------------------


def products(p: Routed, rows: Float[Array, "N Z"], load: Int[Array, "E"], form: str) -> Float[Array, "N Z"]:
    """(silu(rows gate) * (rows up)) down, of the expert that each row belongs to; zeros after the last expert's.

    Experts have their `load` of rows, one after another; whatever lies behind reaches neither result nor gradient.
    """
    if form == "ragged_dot":
        return _ragged_dots(p, rows, load)
    ends = jnp.cumsum(load)
    place, count = jnp.arange(rows.shape[0], dtype=ends.dtype), load.shape[0]
    owner = jnp.minimum(jnp.sum(place[:, None] >= ends[None, :], 1, dtype=jnp.int32), count - 1)[:, None]
    filled = (place < ends[-1])[:, None]
    return local.exact(p, rows, owner, filled.astype(jnp.float32), filled, -(-rows.shape[0] // count))


_keep = jax.checkpoint_policies.save_only_these_names("ragged_gate", "ragged_up")


@partial(jax.checkpoint, prevent_cse=False, policy=_keep)
def _ragged_dots(p: Routed, rows: jax.Array, load: jax.Array) -> jax.Array:
    filled = (jnp.arange(rows.shape[0], dtype=load.dtype) < jnp.sum(load))[:, None]

    def product(rows: jax.Array, w: jax.Array) -> jax.Array:
        # What an implementation leaves in rows of no group is anything; here it ends, before it meets a product.
        return jnp.where(filled, lax.ragged_dot(rows, w, load), jnp.zeros((), rows.dtype))

    g = checkpoint_name(product(rows, p.gate), "ragged_gate")
    u = checkpoint_name(product(rows, p.up), "ragged_up")
    hidden = jax.nn.silu(g.astype(jnp.float32)) * u.astype(jnp.float32)
    return product(hidden.astype(rows.dtype), p.down)
