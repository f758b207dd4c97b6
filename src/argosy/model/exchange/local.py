"""All experts on this device: rows are gathered to their experts and gathered back."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from argosy import spec
from argosy.model.exchange import layout
from argosy.model.experts import Routed, swiglu


def local(
    p: Routed,
    x: Float[Array, "T Z"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    valid: Bool[Array, "T"],
    routing: spec.Routing,
    capacity: str,
) -> tuple[Float[Array, "T Z"], layout.Ledger]:
    """The weighted sum of each token's experts.

    `bounded`: each expert takes its first `receiver_capacity` x mean load assignments in flat token-major order;
    a refused assignment adds nothing and the weights of the others stay. `dropless`: exact for any routing.
    Both directions of both passes move activations by gathers alone.
    """
    tokens, k = experts.shape
    count = p.gate.shape[0]
    rank, load = layout.ranks(experts, valid, count)
    rows = layout.capacity_rows(tokens * k, count, routing.receiver_capacity) if capacity == "bounded" else tokens
    at = layout.slots(experts, rank, valid[:, None] & (rank < rows), count, rows)
    y = layout.collect(swiglu(p, layout.dispatch(x, at), layout.scale(weights, at)), at)
    return y, layout.ledger(valid, k, jnp.int32(0), jnp.sum(jnp.maximum(load - rows, 0)))
