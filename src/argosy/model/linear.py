"""Weights applied to every position."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from argosy import mesh


def linear(x: Float[Array, "B S I"], w: Float[Array, "I O"]) -> Float[Array, "B S O"]:
    """x w in the dtype of `x`, each device multiplying its own positions by the gathered weight.

    Positions are flattened to one dimension first: with two, XLA:CPU writes a transposed copy of the cotangent for
    the weight's gradient, and a gated layer of width 128 took twice as long, forward and backward.
    """
    return _flat(x, mesh.gather(w, x.dtype))


def linears(x: Float[Array, "B S I"], weights: Sequence[Float[Array, "I _"]]) -> list[Float[Array, "B S _"]]:
    """x w for each of the weights, as one product: forward, for the gradient of `x`, and for the weights'."""
    joined = jnp.concatenate([mesh.gather(w, x.dtype) for w in weights], axis=1)
    ends = np.cumsum([w.shape[1] for w in weights])[:-1]
    return jnp.split(_flat(x, joined), ends.tolist(), axis=-1)


def _flat(x: jax.Array, w: jax.Array) -> jax.Array:
    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])

    return jax.shard_map(local, in_specs=(mesh.B_S_D, P()), out_specs=mesh.B_S_D)(x, w)
