"""Nothing dropped on any mesh: every rank sees all tokens of its expert group, computes its own experts, returns the sums."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from argosy import spec
from argosy.model.exchange import layout, local
from argosy.model.experts import Routed
from argosy.plan import work


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
    nothing here. All assignments of the gathered tokens may come to one rank, which needs room for them; so the tokens
    go in parts (`work.gathered_parts`), one after another. Between ranks this moves X tokens for each one, where other transports move K rows:
    as evaluations can afford, not a large training batch.
    """
    count, ranks = p.gate.shape[0], jax.lax.axis_size("expert")
    held = jax.tree.map(lambda w: w.astype(jnp.float32), p)  # in which the parts' gradients are summed

    def one(part: tuple[jax.Array, ...]) -> jax.Array:
        wide, ids, shares, ok = (jax.lax.all_gather(a, "expert", tiled=True) for a in part)
        wide = checkpoint_name(wide, layout.DISPATCHED)
        ids = ids - count * jax.lax.axis_index("expert")
        mine = ok[:, None] & (ids >= 0) & (ids < count)
        rows = layout.capacity_rows(ids.size, count * ranks, routing.receiver_capacity)
        here = jax.tree.map(lambda w: w.astype(x.dtype), held)
        y = local.exact(here, wide, jnp.where(mine, ids, 0), shares, mine, rows)
        return jax.lax.psum_scatter(y.astype(jnp.float32), "expert", tiled=True).astype(x.dtype)

    mine = (x, experts, weights, valid)
    cut = work.gathered_parts(experts.shape[0], experts.shape[1], ranks)
    if cut == 1:
        y = one(mine)
    else:
        y = jax.lax.map(one, tuple(a.reshape(cut, -1, *a.shape[1:]) for a in mine)).reshape(x.shape)
    none = jnp.int32(0)
    return y, layout.ledger(valid, experts.shape[1], none, none)
