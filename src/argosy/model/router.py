"""Logits to experts and weights, and the bias that balances them: quantile balancing and its alternatives."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from argosy import spec
from argosy.leaf import Leaf
from argosy.plan import drops


class Routing(NamedTuple):
    """Who computes which token."""

    experts: Int[Array, "T K"]  # by falling biased logit; int32
    weights: Float[Array, "T K"]  # combine weights, from unbiased logits; float32
    threshold: Float[Array, "T"]  # alpha: the (K+1)-th biased logit, at K = E the K-th


class Stats(NamedTuple):
    """Routing of one layer over the valid tokens of the whole batch; outputs of the step, all float32 but `load`."""

    load: Int[Array, "E"]  # assignments that chose each expert, before any drop
    entropy: Float[Array, ""]  # -sum p ln(p + 1e-6) of the load fractions; at most ln E
    max_load: Float[Array, ""]  # largest load over the mean load
    load_balancing_loss: Float[Array, ""]  # E sum_e K f_e mean_t softmax(s)_e; K at balance
    z: Float[Array, ""]  # mean of logsumexp(s)^2
    margin_min: Float[Array, ""]
    margin_max: Float[Array, ""]
    bias_min: Float[Array, ""]  # of the bias that was used
    bias_max: Float[Array, ""]
    cells: Int[Array, "16"]  # (shard, expert) pairs by relative load, between `drops.EDGES`; as many as there are, int32


def leaf(run: spec.Run) -> Leaf:
    """The router's weight, whole on every device (reference_run 2, step 1)."""
    d, e = run.model.width, run.moe.experts
    return Leaf("D E", (d, e), P(None, None), 0.5 / d**0.5, "gate", "router")


@jax.custom_vjp
def _pick(s: Float[Array, "T E"], experts: Int[Array, "T K"]) -> Float[Array, "T K"]:
    return jnp.take_along_axis(s, experts, axis=1)


def _unpick(saved, g):
    experts, width = saved
    ids = jnp.arange(width.shape[0], dtype=experts.dtype)
    return jnp.sum(jnp.where(experts[:, :, None] == ids[None, None, :], g[:, :, None], 0.0), 1), None


_pick.defvjp(lambda s, experts: (_pick(s, experts), (experts, jnp.zeros(s.shape[1:]))), _unpick)


def route(s: Float[Array, "T E"], bias: Float[Array, "E"], k: int, combine_sum: float) -> Routing:
    """Top-k of the biased logits, weighted by the unbiased ones (reference_run 2, steps 1-3).

    `s` is float32. Ties go to the lower index. Weights are `combine_sum * sigmoid(s) / (sum of the chosen
    sigmoids + 1e-9)`; gradient reaches `s` through them alone, and never the bias.
    """
    count = s.shape[1]
    biased = jax.lax.stop_gradient(s + bias[None, :])
    # One barrier each: without, XLA:CPU merges the slices below into a sort of whole rows, seven times slower.
    top, index = (jax.lax.optimization_barrier(one) for one in jax.lax.top_k(biased, min(k + 1, count)))
    experts = index[:, :k]
    score = jax.nn.sigmoid(_pick(s, experts))
    weights = combine_sum * score / (jnp.sum(score, 1, keepdims=True) + 1e-9)
    return Routing(experts, weights, top[:, -1])


# ---- statistics ----------------------------------------------------------------------------------


def _load(experts: Int[Array, "T K"], valid: Bool[Array, "T"], count: int) -> Int[Array, "E"]:
    ids = jnp.arange(count, dtype=experts.dtype)
    hit = (experts[:, :, None] == ids[None, None, :]) & valid[:, None, None]
    return jnp.sum(jnp.sum(hit, 1, dtype=jnp.int32), 0)


def balance_loss(
    s: Float[Array, "T E"], load: Int[Array, "E"], valid: Bool[Array, "T"], axes: tuple[str, ...]
) -> Float[Array, ""]:
    """E * sum_e f_e p_e over the whole batch: 1 at balance (Switch Transformer, arXiv 2101.03961, eq. 4).

    f_e: the fraction of assignments that chose e (`load`, summed over `axes` already; no gradient);
    p_e: the mean over valid tokens of softmax(s)_e, summed over `axes` here, so that the value does not depend on the layout.
    """
    p = jax.lax.psum(jnp.sum(jnp.where(valid[:, None], jax.nn.softmax(s, 1), 0.0), 0), axes)
    tokens = jax.lax.psum(jnp.sum(valid, dtype=jnp.int32), axes)
    f = load.astype(jnp.float32) / jnp.maximum(jnp.sum(load), 1).astype(jnp.float32)
    return s.shape[1] * jnp.sum(f * p) / jnp.maximum(tokens, 1).astype(jnp.float32)


def statistics(
    s: Float[Array, "T E"],
    routing: Routing,
    valid: Bool[Array, "T"],
    bias: Float[Array, "E"],
    axes: tuple[str, ...] = (),
) -> Stats:
    """Statistics over the valid tokens of all shards along the mesh axes `axes` (reference_run 7.1). No gradient.

    All but `cells` are the same however the batch lies on the mesh.
    """
    s = jax.lax.stop_gradient(s)
    k, count = routing.experts.shape[1], s.shape[1]
    mine = _load(routing.experts, valid, count)
    load = jax.lax.psum(mine, axes)
    share = load.astype(jnp.float32) / jnp.maximum(jnp.sum(load), 1).astype(jnp.float32)
    tokens = jnp.maximum(jax.lax.psum(jnp.sum(valid, dtype=jnp.int32), axes), 1).astype(jnp.float32)
    z = jnp.sum(jnp.where(valid, jnp.square(jax.nn.logsumexp(s, 1)), 0.0))
    lowest, highest = margin_range(s, routing.threshold, valid, axes)
    return Stats(
        load=load,
        entropy=entropy(share),
        max_load=count * jnp.max(share),
        load_balancing_loss=k * balance_loss(s, load, valid, axes),
        z=jax.lax.psum(z, axes) / tokens,
        margin_min=lowest,
        margin_max=highest,
        bias_min=jnp.min(bias),
        bias_max=jnp.max(bias),
        cells=jax.lax.psum(cells(mine), axes),
    )


def entropy(share: Float[Array, "E"]) -> Float[Array, ""]:
    """-sum p ln(p + 1e-6) of the shares of all assignments."""
    return -jnp.sum(share * jnp.log(share + 1e-6))


def cells(load: Int[Array, "E"]) -> Int[Array, "16"]:
    """How many of one shard's experts have a load, over the shard's mean, between each two of `drops.EDGES`; int32.

    A shard without a valid token counts nowhere.
    """
    mean = jnp.sum(load).astype(jnp.float32) / load.shape[0]
    above = load.astype(jnp.float32)[:, None] >= jnp.asarray(drops.EDGES, jnp.float32)[None, :] * mean
    at_least = jnp.sum(above, 0, dtype=jnp.int32)
    every = jnp.full((1,), load.shape[0], jnp.int32)
    counts = jnp.concatenate([every, at_least]) - jnp.concatenate([at_least, jnp.zeros(1, jnp.int32)])
    return jnp.where(mean > 0, counts, 0)


def margin_range(
    s: Float[Array, "T E"], threshold: Float[Array, "T"], valid: Bool[Array, "T"], axes: tuple[str, ...]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Smallest and largest margin s - threshold over all shards; +inf and -inf without a valid token."""
    margin = jax.lax.stop_gradient(s - threshold[:, None])
    low = jnp.min(jnp.where(valid[:, None], margin, jnp.inf))
    high = jnp.max(jnp.where(valid[:, None], margin, -jnp.inf))
    return jax.lax.pmin(low, axes), jax.lax.pmax(high, axes)


# ---- the next step's bias ------------------------------------------------------------------------


def next_bias(
    s: Float[Array, "T E"],
    routing: Routing,
    valid: Bool[Array, "T"],
    stats: Stats,
    bias: Float[Array, "E"],
    run: spec.Routing,
    axes: tuple[str, ...] = (),
) -> Float[Array, "E"]:
    """The bias of the next step, zero-mean, by `run.balance`. No gradient; zero where all experts are chosen (K = E).

    `quantile`: minus the upper K/E quantile of each expert's margins, set and not accumulated (reference_run 2,
    steps 4-6). `sign_bias`: a fixed step towards the mean load (arXiv 2408.15664). `aux_loss`: zero.
    """
    k = routing.experts.shape[1]
    if k == s.shape[1] or run.balance != "quantile":
        return balanced(stats, bias, k, run)
    margin = jax.lax.stop_gradient(s - routing.threshold[:, None])
    return centred(quantile(margin, valid, k, stats.margin_min, stats.margin_max, run.histogram_bins, axes), stats, bias)


def balanced(stats: Stats, bias: Float[Array, "E"], k: int, run: spec.Routing) -> Float[Array, "E"]:
    """The next bias where it takes no margins: by loads alone (`sign_bias`), or zero."""
    if k == bias.shape[0] or run.balance != "sign_bias":
        return jnp.zeros_like(bias)
    mean = jnp.sum(stats.load).astype(jnp.float32) / bias.shape[0]
    moved = bias + run.sign_bias_step * jnp.sign(mean - stats.load.astype(jnp.float32))
    return moved - jnp.mean(moved)


def centred(beta: Float[Array, "E"], stats: Stats, bias: Float[Array, "E"]) -> Float[Array, "E"]:
    """The bias that the quantiles set; the old one where no token was valid."""
    return jnp.where(jnp.sum(stats.load) > 0, jnp.mean(beta) - beta, bias)


class Crossing(NamedTuple):
    """Where a column's count from the top reaches its target."""

    bin: Int[Array, "E"]  # the last bin with at least `need` values in it or above
    reached: Int[Array, "E"]  # values in that bin or above
    inside: Int[Array, "E"]  # values in that bin


def quantile(
    margin: Float[Array, "T E"],
    valid: Bool[Array, "T"],
    k: int,
    low: Float[Array, ""],
    high: Float[Array, ""],
    bins: int,
    axes: tuple[str, ...] = (),
) -> Float[Array, "E"]:
    """Upper K/E quantile of each column over the valid tokens of all shards, from a histogram on the `grid` of low..high.

    `low` and `high` are the range of all margins. Between the edges of the crossing bin the quantile is linear in the
    counts (reference_run 2, step 5).
    """
    first, width = grid(low, high, bins)
    place = jnp.clip(jnp.floor(margin / width) - first, 0, most(bins) - 1).astype(jnp.int32)
    tokens = jax.lax.psum(jnp.sum(valid, dtype=jnp.int32), axes)
    need, target = rank(tokens, k, margin.shape[1])
    at = crossing(jnp.where(valid[:, None], place, -1), need, tokens, most(bins), axes)
    return interpolate(at, target, margin.shape[1], first * width, width)


def grid(low: Float[Array, ""], high: Float[Array, ""], bins: int) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The number of the lowest edge, and the width of a bin: edges lie at the multiples of the width.

    The width is the largest power of two that is at most a `bins`-th of the range, but never below the spacing of
    float32 at its ends, so that all numbers here are whole and exact. Hence the bins of a range are unions of bins of
    any range inside it, and histograms of parts of a batch add up to that of the whole (`model.parts`).
    Where there is no value (`high` below `low`) the grid is of the range 0 to 0.

    >>> grid(jnp.float32(-3.0), jnp.float32(5.0), 8)
    (Array(-3., dtype=float32), Array(1., dtype=float32))
    """
    some = high >= low
    low, high = jnp.where(some, low, 0.0), jnp.where(some, high, 0.0)
    tiny = jnp.float32(1e-20)
    fine = _power_of_two(jnp.maximum(high - low, tiny) / bins)
    spacing = _power_of_two(jnp.maximum(jnp.maximum(jnp.abs(low), jnp.abs(high)), tiny)) * 2.0**-23
    width = jnp.maximum(fine, spacing)
    return jnp.floor(low / width), width


def _power_of_two(x: Float[Array, ""]) -> Float[Array, ""]:
    """The largest power of two that is at most `x`, a normal positive float32: its exponent alone."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def most(bins: int) -> int:
    """The most bins that a `grid` has: a width is more than half of a `bins`-th of the range, whose ends may share bins."""
    return 2 * bins + 2


def rank(tokens: Int[Array, ""], k: int, count: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """How many values lie at or above the quantile, T K / E: rounded up, and in units of 1 / E."""
    target = tokens * k
    return -(-target // count), target  # without a sum: it may be the largest int32


def interpolate(at: Crossing, target: jax.Array, count: int, low: jax.Array, width: jax.Array) -> jax.Array:
    """low + width * (bin + (reached - T K / E) / inside); counts are subtracted as whole numbers, which float32 cannot hold."""
    over = (at.reached - target // count).astype(jnp.float32) - (target % count).astype(jnp.float32) / count
    return low + width * (at.bin.astype(jnp.float32) + over / jnp.maximum(at.inside, 1).astype(jnp.float32))


def crossing(
    place: Int[Array, "T E"], need: Int[Array, ""], tokens: Int[Array, ""], bins: int, axes: tuple[str, ...]
) -> Crossing:
    """The crossing bin of each column, by bisection over the bins.

    `place` is each value's bin, -1 where it does not count; `tokens` those that count, over all shards; 1 <= `need` <= `tokens`.
    Counting the values above an edge is a compare and a sum, log2(bins) times; filling bins x E counters is a scatter.
    """

    def above(edge: Int[Array, "E"]) -> Int[Array, "E"]:
        return jax.lax.psum(jnp.sum(place >= edge[None, :], 0, dtype=jnp.int32), axes)

    return bisect(above, need, tokens, bins, place.shape[1])


def bisect(
    above: Callable[[jax.Array], jax.Array], need: Int[Array, ""], tokens: Int[Array, ""], bins: int, count: int
) -> Crossing:
    """The crossing bins of `count` columns; `above` counts, over all shards, each column's values at or above an edge of its own."""

    def halve(_: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, c_low, c_high = state
        middle = (low + high) // 2
        c = above(middle)
        enough = c >= need
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            jnp.where(enough, c, c_low),
            jnp.where(enough, c_high, c),
        )

    zero = jnp.zeros((count,), jnp.int32)
    start = (zero, zero + bins, zero + tokens, zero)
    bin_, _, reached, passed = jax.lax.fori_loop(0, (bins - 1).bit_length(), halve, start)
    return Crossing(bin_, reached, reached - passed)


def crossing_plain(
    place: Int[Array, "T E"], need: Int[Array, ""], tokens: Int[Array, ""], bins: int, axes: tuple[str, ...]
) -> Crossing:
    """The same from a histogram that is really filled: the slow twin of `crossing`."""
    columns = jnp.broadcast_to(jnp.arange(place.shape[1])[None, :], place.shape)
    histogram = jnp.zeros((place.shape[1], bins), jnp.int32)
    histogram = histogram.at[columns, jnp.maximum(place, 0)].add((place >= 0).astype(jnp.int32))
    histogram = jax.lax.psum(histogram, axes)
    above = jnp.cumsum(histogram[:, ::-1], 1)[:, ::-1]
    bin_ = jnp.sum(above >= need, 1, dtype=jnp.int32) - 1
    pick = partial(jnp.take_along_axis, indices=bin_[:, None], axis=1)
    return Crossing(bin_, pick(above)[:, 0], pick(histogram)[:, 0])
