"""Router statistics and bias of a whole batch from those of its parts, for gradient accumulation.

A part's loads, sums and margins are kept so that they add up: the bias of the whole is the one that the unsplit batch gives,
bit for bit. Margins are counted, not kept: on their `router.grid`, whose bins join to those of any wider range.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from argosy import spec
from argosy.model import router

MARGINS = P(None, spec.AXES, None, None)  # of `Part.margins` with a leading L


class Part(NamedTuple):
    """What one layer keeps of some of a batch's tokens, beside their `router.Stats`."""

    score: Any  # E: sum over valid tokens of softmax(s), over all shards; float32
    margins: Any  # 1 E edges, or None: this shard's margins at or above each edge of their grid; int32


def specs(accumulate: int) -> Part | None:
    """How a layer's part lies on the mesh, as `jax.shard_map` takes it; None where a batch is not cut."""
    return Part(P(), P(*MARGINS[1:])) if accumulate > 1 else None


def part(
    s: Float[Array, "T E"],
    routing: router.Routing,
    valid: Bool[Array, "T"],
    stats: router.Stats,
    run: spec.Routing,
    axes: tuple[str, ...] = (),
) -> Part:
    """What these tokens leave. No gradient; margins only where the bias is their quantile."""
    s = jax.lax.stop_gradient(s)
    score = jax.lax.psum(jnp.sum(jnp.where(valid[:, None], jax.nn.softmax(s, 1), 0.0), 0), axes)
    if run.balance != "quantile":
        return Part(score, None)
    margin = s - jax.lax.stop_gradient(routing.threshold)[:, None]
    return Part(score, count(margin, valid, stats.margin_min, stats.margin_max, run.histogram_bins)[None])


def count(
    margin: Float[Array, "T E"], valid: Bool[Array, "T"], low: Float[Array, ""], high: Float[Array, ""], bins: int
) -> Int[Array, "E edges"]:
    """How many values of each column lie at or above each edge of the grid of low..high, and 0 past its last."""
    (first, width), columns = router.grid(low, high, bins), margin.shape[1]
    place = jnp.clip(jnp.floor(margin / width) - first, 0, router.most(bins) - 1).astype(jnp.int32)
    filled = jnp.zeros((columns, router.most(bins) + 1), jnp.int32)
    ids = jnp.broadcast_to(jnp.arange(columns)[None, :], place.shape)
    filled = filled.at[ids, place].add(jnp.broadcast_to(valid[:, None], place.shape).astype(jnp.int32))
    return jnp.cumsum(filled[:, ::-1], 1)[:, ::-1]


def moved(
    margins: Int[Array, "... edges"],
    old: tuple[Float[Array, ""], Float[Array, ""]],
    new: tuple[Float[Array, ""], Float[Array, ""]],
) -> Int[Array, "... edges"]:
    """Counts on the `old` grid as counts on a `new` one, whose range holds the old: every new edge that matters is an old one."""
    edges = margins.shape[-1]
    (first, width), (to_first, to_width) = old, new
    place = jnp.floor((first + jnp.arange(edges, dtype=jnp.float32)) / (to_width / width)) - to_first  # of each old bin
    index = jnp.searchsorted(place, jnp.arange(edges, dtype=jnp.float32))  # the first old bin at or above a new edge
    return jnp.take(margins, jnp.minimum(index, edges - 1), axis=-1)


def both(a: tuple[router.Stats, Part], b: tuple[router.Stats, Part], k: int, bins: int) -> tuple[router.Stats, Part]:
    """What two parts of a batch leave together, routed with one bias, `k` experts to each token."""
    (one, kept), (two, kept_two) = a, b
    low, high = jnp.minimum(one.margin_min, two.margin_min), jnp.maximum(one.margin_max, two.margin_max)
    load, experts = one.load + two.load, one.load.shape[0]
    assignments = jnp.maximum(jnp.sum(load), 1).astype(jnp.float32)
    tokens = assignments / k
    score, share = kept.score + kept_two.score, load.astype(jnp.float32) / assignments
    z = one.z * (jnp.sum(one.load).astype(jnp.float32) / k) + two.z * (jnp.sum(two.load).astype(jnp.float32) / k)
    stats = router.Stats(
        load=load,
        entropy=router.entropy(share),
        max_load=experts * jnp.max(share),
        load_balancing_loss=k * experts * jnp.sum(share * score) / tokens,
        z=z / tokens,
        margin_min=low,
        margin_max=high,
        bias_min=two.bias_min,
        bias_max=two.bias_max,
        cells=one.cells + two.cells,
    )
    if kept.margins is None or kept_two.margins is None:
        return stats, Part(score, None)
    new = router.grid(low, high, bins)
    ours = moved(kept.margins, router.grid(one.margin_min, one.margin_max, bins), new)
    theirs = moved(kept_two.margins, router.grid(two.margin_min, two.margin_max, bins), new)
    return stats, Part(score, ours + theirs)


def next_bias(
    stats: router.Stats,
    kept: Part,
    bias: Float[Array, "E"],
    k: int,
    run: spec.Routing,
    axes: tuple[str, ...] = (),
) -> Float[Array, "E"]:
    """`router.next_bias` of the whole batch, from what its parts leave together."""
    experts = bias.shape[0]
    if kept.margins is None or k == experts:
        return router.balanced(stats, bias, k, run)
    margins, bins = kept.margins[0], run.histogram_bins
    tokens = jnp.sum(stats.load) // k
    need, target = router.rank(tokens, k, experts)

    def above(edge: Int[Array, "E"]) -> Int[Array, "E"]:
        return jax.lax.psum(jnp.take_along_axis(margins, edge[:, None], 1)[:, 0], axes)

    at = router.bisect(above, need, tokens, router.most(bins), experts)
    first, width = router.grid(stats.margin_min, stats.margin_max, bins)
    return router.centred(router.interpolate(at, target, experts, first * width, width), stats, bias)
