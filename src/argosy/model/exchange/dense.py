"""The oracle: every expert on every token, masked. Slow and plain; nothing is ever dropped."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy import spec
from argosy.model.exchange.layout import Ledger, ledger
from argosy.model.experts import Routed


def dense(
    p: Routed,
    x: Float[Array, "T Z"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    valid: Bool[Array, "T"],
    routing: spec.Routing,
    capacity: str,
) -> tuple[Float[Array, "T Z"], Ledger]:
    """sum_k weights[t, k] * expert_{experts[t, k]}(x[t]), computed in float32, in the dtype of `x`.

    `p` holds all experts, whole. `routing` and `capacity` change nothing here.
    """
    wide = jnp.where(valid[:, None], x.astype(jnp.float32), 0.0)
    gate, up, down = (w.astype(jnp.float32) for w in p)
    chosen = jax.nn.one_hot(experts, gate.shape[0], dtype=jnp.float32)  # T K E
    share = jnp.where(valid[:, None], jnp.einsum("tke,tk->te", chosen, weights.astype(jnp.float32)), 0.0)
    hidden = jax.nn.silu(jnp.einsum("tz,ezf->etf", wide, gate)) * jnp.einsum("tz,ezf->etf", wide, up)
    y = jnp.einsum("etf,efz->etz", hidden, down)
    none = jnp.int32(0)
    return jnp.einsum("etz,te->tz", y, share).astype(x.dtype), ledger(valid, experts.shape[1], none, none)
