"""Who computes which token: the sparse block of a layer, and the transports that it may use."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from argosy import mesh, spec
from argosy.model import experts, parts, router
from argosy.model.exchange import dense, local, pooled_wave, ragged
from argosy.model.exchange.layout import DISPATCHED, Fairness, Ledger, fairness

__all__ = ["KEPT", "Fairness", "Ledger", "Moe", "MoeStats", "leaves", "moe", "transport"]

_TRANSPORTS: dict[str, Callable[..., tuple[jax.Array, Ledger]]] = {
    "dense": dense.dense,
    "local": local.local,
    "pooled_wave": pooled_wave.pooled_wave,
    "ragged": ragged.ragged,
}

KEPT = (DISPATCHED,)  # the names of what compute.remat=block_keep_dispatch keeps


class Moe(NamedTuple):
    """The parameters of one sparse block."""

    router: Any  # D E
    experts: experts.Experts


class MoeStats(NamedTuple):
    """What one sparse block reports of one step, over the whole batch."""

    ledger: Ledger
    fairness: Fairness
    routing: router.Stats
    aux_loss: Float[Array, ""]  # weighted, to be added to the loss; zero unless routing.balance=aux_loss
    next_bias: Float[Array, "E"]
    part: parts.Part | None  # with compute.accumulate > 1, where the bias follows from all parts of a batch


def leaves(run: spec.Run) -> Moe:
    """The leaves of one sparse block."""
    return Moe(router.leaf(run), experts.leaves(run))


def transport(name: str) -> Callable[..., tuple[jax.Array, Ledger]]:
    """The function that carries tokens to experts and back.

    All are called the same inside `moe`'s shard_map, with what this shard holds, and give the same but for what capacity
    refuses: the weighted sum of each token's experts [T, Z], and the ledger of this shard's assignments.

    Raises:
        ValueError: for a transport that there is not.
    """
    if name not in _TRANSPORTS:
        raise ValueError(
            f"routing.exchange={name!r} is not one of {', '.join(_TRANSPORTS)}; nearest: {', '.join(spec.nearest(name, _TRANSPORTS))}"
        )
    return _TRANSPORTS[name]


def moe(
    p: Moe,
    x: Float[Array, "B S D"],
    bias: Float[Array, "E"],
    valid: Bool[Array, "B S"],
    run: spec.Run,
    *,
    capacity: Literal["bounded", "dropless"] | None = None,
) -> tuple[Float[Array, "B S D"], MoeStats]:
    """Routed plus shared experts of normed activations, and what the router saw (reference_run 1.2, 2).

    `bias` is the router's state; the next step's is in the stats. `capacity` overrides the run's, for evaluations
    that must drop nothing. Tokens that are not `valid` give zeros, take no capacity, and count in no statistic.

    Products are in the dtype of `x`; logits, weights, statistics and bias are float32.

    Raises:
        ValueError: for a transport that there is not, before anything is compiled.
    """
    carry = transport(run.routing.exchange)
    bias = jax.lax.stop_gradient(bias)
    x = jnp.where(valid[:, :, None], x, jnp.zeros((), x.dtype))
    u = x if p.experts.latent is None else experts.latent_down(p.experts.latent, x)
    s = jnp.einsum("bsd,de->bse", x, mesh.gather(p.router, x.dtype), preferred_element_type=jnp.float32)
    over = () if run.routing.exchange == "dense" else ("expert",)  # the oracle holds every expert
    divided = P(*(over or (None,)), None, None)
    weights = jax.tree.map(lambda w: mesh.placed(jax.sharding.reshard(w.astype(x.dtype), divided))[0], p.experts.routed)
    divided = jax.typeof(weights.gate).sharding.spec
    same: Any = P()  # on every device
    shard = jax.shard_map(
        partial(_shard, run=run, carry=carry, divided=divided, capacity=capacity or run.routing.capacity),
        in_specs=(jax.tree.map(lambda _: divided, weights), mesh.B_S_D, mesh.B_S_D, P(None), mesh.B_S),
        out_specs=(mesh.B_S_D, MoeStats(same, same, same, same, same, parts.specs(run.compute.accumulate))),
    )
    y, stats = shard(weights, u, s, bias, valid)
    if p.experts.latent is not None:
        y = experts.latent_up(p.experts.latent, y)
    if p.experts.shared is not None:
        y = y + experts.shared(p.experts.shared, x)
    return y, stats


def _shard(
    p: experts.Routed,
    u: jax.Array,
    s: jax.Array,
    bias: jax.Array,
    valid: jax.Array,
    *,
    run: spec.Run,
    carry: Callable,
    divided: P,
    capacity: str,
) -> tuple[jax.Array, MoeStats]:
    """One shard's part: routing, exchange and statistics over its tokens."""
    tokens = valid.size
    x, s, ok = u.reshape(tokens, u.shape[-1]), s.reshape(tokens, s.shape[-1]), valid.reshape(tokens)
    routing = router.route(s, bias, run.moe.experts_per_token, run.moe.combine_sum)
    stats = router.statistics(s, routing, ok, bias, spec.AXES)
    p = jax.tree.map(partial(mesh.varying, parts=divided), p)
    y, ledger = carry(p, x, routing.experts, routing.weights, ok, run.routing, capacity)
    aux = jnp.float32(0)
    if run.routing.balance == "aux_loss":
        aux = run.routing.aux_loss_weight * router.balance_loss(s, stats.load, ok, spec.AXES)
    total, fair = jax.lax.psum(ledger, spec.AXES), fairness(ledger, spec.AXES)
    if run.compute.accumulate > 1:
        part = parts.part(s, routing, ok, stats, run.routing, spec.AXES)
        return y.reshape(u.shape), MoeStats(total, fair, stats, aux, bias, part)
    following = router.next_bias(s, routing, ok, stats, bias, run.routing, spec.AXES)
    return y.reshape(u.shape), MoeStats(total, fair, stats, aux, following, None)
