"""Routed and shared SwiGLU experts, and the projections into and out of the latent width."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from argosy import mesh, spec
from argosy.leaf import Leaf
from argosy.model import norm


class Routed(NamedTuple):
    """The routed experts of a layer, divided over the `expert` axis."""

    gate: Any  # E Z F
    up: Any  # E Z F
    down: Any  # E F Z


class Latent(NamedTuple):
    """The way into the experts' width and back (arXiv 2601.18089)."""

    down: Any  # D Z
    gain: Any  # Z
    up: Any  # Z D


class Shared(NamedTuple):
    """The experts that every token visits, each slice one matrix."""

    gate: Any  # J D G
    up: Any  # J D G
    down: Any  # J G D


class Experts(NamedTuple):
    """All expert weights of one layer; None for what the run does not have."""

    routed: Routed
    latent: Latent | None
    shared: Shared | None


def leaves(run: spec.Run) -> Experts:
    """The leaves of one layer, all matrices with std 0.5 / sqrt(D) (reference_run 1.1)."""
    d, moe = run.model.width, run.moe
    e, f, z, j, g = moe.experts, moe.hidden, spec.expert_width(moe, run.model), moe.shared_experts, moe.shared_hidden
    std = 0.5 / d**0.5
    width = "D" if moe.latent == "none" else "Z"
    split = P("expert", None, None)
    routed = Routed(
        gate=Leaf(f"E {width} F", (e, z, f), split, std, "matrix", "routed"),
        up=Leaf(f"E {width} F", (e, z, f), split, std, "matrix", "routed"),
        down=Leaf(f"E F {width}", (e, f, z), split, std, "matrix", "routed"),
    )
    latent = Latent(
        down=Leaf("D Z", (d, z), P(mesh.FSDP, None), std, "matrix", "latent"),
        gain=Leaf("Z", (z,), P(None), "ones", "plain", "norm"),
        up=Leaf("Z D", (z, d), P(None, mesh.FSDP), std, "matrix", "latent"),
    )
    shared = Shared(
        gate=Leaf("J D G", (j, d, g), P(None, mesh.FSDP, None), std, "matrix", "shared"),
        up=Leaf("J D G", (j, d, g), P(None, mesh.FSDP, None), std, "matrix", "shared"),
        down=Leaf("J G D", (j, g, d), P(None, None, mesh.FSDP), std, "matrix", "shared"),
    )
    return Experts(routed, None if moe.latent == "none" else latent, shared if j else None)


def swiglu(p: Routed, rows: Float[Array, "E C Z"], scale: Float[Array, "E C"]) -> Float[Array, "E C Z"]:
    """(scale * silu(rows gate) * (rows up)) down for each expert's rows, in the dtype of `rows`.

    `scale` carries the combine weights: applied to the narrow hidden rows, they need no second pass over the wide ones.
    The nonlinearity is in float32.
    """
    g = jnp.einsum("ecz,ezf->ecf", rows, p.gate)
    u = jnp.einsum("ecz,ezf->ecf", rows, p.up)
    hidden = jax.nn.silu(g.astype(jnp.float32)) * u.astype(jnp.float32) * scale.astype(jnp.float32)[:, :, None]
    return jnp.einsum("ecf,efz->ecz", hidden.astype(rows.dtype), p.down)


def shared(p: Shared, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """The sum of the shared experts, (silu(x gate) * (x up)) down, in the dtype of `x`; weights are gathered first."""
    parts = zip(*(jnp.unstack(mesh.gather(w, x.dtype)) for w in p), strict=True)
    y = None
    for gate, up, down in parts:
        hidden = _act(jnp.einsum("bsd,dg->bsg", x, gate), jnp.einsum("bsd,dg->bsg", x, up))
        one = jnp.einsum("bsg,gd->bsd", hidden, down)
        y = one if y is None else y + one
    assert y is not None
    return y


def _act(g, u):
    return (jax.nn.silu(g.astype(jnp.float32)) * u.astype(jnp.float32)).astype(g.dtype)


def latent_down(p: Latent, x: Float[Array, "B S D"]) -> Float[Array, "B S Z"]:
    """RMS(x down) * gain: what the routed experts see (reference_run 1.2; no gate follows this norm)."""
    return norm.rms(jnp.einsum("bsd,dz->bsz", x, mesh.gather(p.down, x.dtype)), p.gain, norm.EPS)


def latent_up(p: Latent, y: Float[Array, "B S Z"]) -> Float[Array, "B S D"]:
    """The routed sum back in the model's width."""
    return jnp.einsum("bsz,zd->bsd", y, mesh.gather(p.up, y.dtype))
