"""Nothing dropped on any mesh: every rank sees all tokens of its expert group, computes its own experts, returns the sums."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from argosy import spec
from argosy.model.exchange import layout, local
from argosy.model.experts import Routed


def gathered(
    p: Routed,
    x: Float[Array, "T Z"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    valid: Bool[Array, "T"],
    routing: spec.Routing,
    capacity: str,
) -> tuple[Float[Array, "T Z"], layout.Ledger]:
    """The weighted sum of each token's experts, exact for any routing, in the dtype of `x`; `p` holds this rank's experts.

    An all-gather over the axis `expert` on the way out, a float32 reduce-scatter on the way back; `capacity` changes
    nothing here. A device holds its group's tokens, and room for all their assignments in case they all come to it:
    as evaluations can afford (12.9 GB at the reference run's one sequence per device), not a large training batch.
    """
    count = p.gate.shape[0]
    wide, ids, shares, ok = (jax.lax.all_gather(a, "expert", tiled=True) for a in (x, experts, weights, valid))
    wide = checkpoint_name(wide, layout.DISPATCHED)
    ids = ids - count * jax.lax.axis_index("expert")
    mine = ok[:, None] & (ids >= 0) & (ids < count)
    rows = layout.capacity_rows(ids.size, count * jax.lax.axis_size("expert"), routing.receiver_capacity)
    y = local.exact(p, wide, jnp.where(mine, ids, 0), shares, mine, rows)
    y = jax.lax.psum_scatter(y.astype(jnp.float32), "expert", tiled=True).astype(x.dtype)
    none = jnp.int32(0)
    return y, layout.ledger(valid, experts.shape[1], none, none)
