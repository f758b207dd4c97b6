"""RMS norms, computed in float32, and the gated norm that follows every full-width one."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from argosy import mesh, spec
from argosy.leaf import Leaf
from argosy.model.linear import linear

EPS = 1e-5  # full-width and latent norms (reference_run 1.1)


class GatedNorm(NamedTuple):
    """One gated norm: an RMS gain and a low-rank gate. Holds leaves, arrays, or whatever is mapped over them."""

    gain: Any  # D
    down: Any  # D R
    up: Any  # R D


def leaves(model: spec.Model) -> GatedNorm:
    """The leaves of one gated norm."""
    d, r = model.width, model.gate_rank
    std = 0.5 / d**0.5
    return GatedNorm(
        gain=Leaf("D", (d,), P(None), "ones", "plain", "norm"),
        down=Leaf("D R", (d, r), P(mesh.FSDP, None), std, "matrix", "gated_norm"),
        up=Leaf("R D", (r, d), P(None, mesh.FSDP), std, "matrix", "gated_norm"),
    )


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(2,))
def rms(x: Float[Array, "... D"], gain: Float[Array, "D"] | None, eps: float) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + eps) over the last dimension, times `gain` if there is one.

    Computed in float32, returned in the dtype of `x`. Only `x` is kept for the backward pass.

    >>> rms(jnp.array([3.0, 4.0]), None, 0.0) * jnp.sqrt(12.5)
    Array([3., 4.], dtype=float32)
    """
    wide = x.astype(jnp.float32)
    y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    if gain is not None:
        # Leading ones, not `broadcast_in_dim` without a sharding: its transpose gathers the whole batch on every device.
        y = y * gain.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + gain.shape)
    return y.astype(x.dtype)


def gated_norm(p: GatedNorm, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """GN(RMS(x)) with GN(y) = y * sigmoid(silu(y down) up), in the dtype of `x` (reference_run 1.2, arXiv 2601.22966).

    The gate's nonlinearities are in float32.
    """
    y = rms(x, p.gain, EPS)
    return _gate(y, linear(y, p.down), p.up)


@partial(jax.checkpoint, prevent_cse=False)
def _gate(y: Float[Array, "B S D"], low: Float[Array, "B S R"], up: Float[Array, "R D"]) -> Float[Array, "B S D"]:
    hidden = jax.nn.silu(low.astype(jnp.float32)).astype(y.dtype)
    logit = linear(hidden, up)
    return (y.astype(jnp.float32) * jax.nn.sigmoid(logit.astype(jnp.float32))).astype(y.dtype)
