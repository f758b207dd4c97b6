"""Routed and shared SwiGLU experts, and the projections into and out of the latent width."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from argosy import mesh, spec
from argosy.leaf import Leaf
from argosy.model import norm
from argosy.model.linear import linear, turned


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


@jax.custom_vjp
def swiglu(p: Routed, rows: Float[Array, "E C Z"], scale: Float[Array, "E C"] | None = None) -> Float[Array, "E C Z"]:
    """(scale * silu(rows gate) * (rows up)) down for each expert's rows, in the dtype of `rows`.

    `scale`, 1 if None, carries the combine weights: on the narrow hidden rows they need no further pass over the wide ones.
    The nonlinearity is in float32. Under `keep_hidden` only the two products before it are kept for the backward pass.
    """
    return _swiglu(p, rows, scale)[0]


keep_hidden = jax.checkpoint_policies.save_only_these_names("expert_gate", "expert_up")


def _swiglu(p: Routed, rows: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, Any]:
    g = checkpoint_name(jnp.einsum("ecz,ezf->ecf", rows, p.gate), "expert_gate")
    u = checkpoint_name(jnp.einsum("ecz,ezf->ecf", rows, p.up), "expert_up")
    hidden = _hidden(g, u, None if scale is None else scale[:, :, None].astype(jnp.float32))
    return jnp.einsum("ecf,efz->ecz", hidden, p.down), (p, rows, scale, g, u)


def _unswiglu(saved: Any, dy: jax.Array) -> tuple[Routed, jax.Array, jax.Array | None]:
    """No product has a transposed result, as automatic differentiation would have: on a CPU ddown took twice as long."""
    p, rows, scale, gate, up = saved
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    s = jax.nn.sigmoid(g)
    h = g * s * u
    dh = jnp.einsum("ecz,efz->ecf", dy, p.down).astype(jnp.float32)
    dscale = None
    if scale is not None:
        c = scale[:, :, None].astype(jnp.float32)
        dscale = jnp.sum(dh * h, 2).astype(scale.dtype)
        h, dh = h * c, dh * c
    ddown = jnp.einsum("efc,ecz->efz", turned(h.astype(rows.dtype)), dy)
    dg, du = (dh * u * s * (1 + g * (1 - s))).astype(rows.dtype), (dh * g * s).astype(rows.dtype)
    drows = jnp.einsum("ecf,ezf->ecz", dg, p.gate) + jnp.einsum("ecf,ezf->ecz", du, p.up)
    columns = turned(rows)
    dgate, dup = jnp.einsum("ezc,ecf->ezf", columns, dg), jnp.einsum("ezc,ecf->ezf", columns, du)
    return Routed(dgate, dup, ddown), drows, dscale


swiglu.defvjp(_swiglu, _unswiglu)


def _hidden(g: jax.Array, u: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """silu(g) * u * scale, computed in float32, in the dtype of g."""
    h = jax.nn.silu(g.astype(jnp.float32)) * u.astype(jnp.float32)
    return (h if scale is None else h * scale).astype(g.dtype)


def shared(p: Shared, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """The sum of the shared experts, (silu(x gate) * (x up)) down, in the dtype of `x`; weights are gathered first."""
    weights, parts = zip(*map(mesh.placed, p), strict=True)

    def local(x: jax.Array, *p: jax.Array) -> jax.Array:
        gates, ups, downs = (jnp.unstack(mesh.whole(w, part, x.dtype)) for w, part in zip(p, parts, strict=True))
        rows = x.reshape(-1, x.shape[-1])
        y = jnp.zeros_like(rows)
        for gate, up, down in zip(gates, ups, downs, strict=True):
            y = y + _out(rows @ gate, rows @ up, down)
        return y.reshape(x.shape)

    return jax.shard_map(local, in_specs=(mesh.B_S_D, *parts), out_specs=mesh.B_S_D)(x, *weights)


@partial(jax.checkpoint, prevent_cse=False)
def _out(g: Float[Array, "T G"], u: Float[Array, "T G"], down: Float[Array, "G D"]) -> Float[Array, "T D"]:
    """The second half of a shared expert; the hidden rows are computed again in the backward pass, not kept."""
    return _hidden(g, u) @ down


def latent_down(p: Latent, x: Float[Array, "B S D"]) -> Float[Array, "B S Z"]:
    """RMS(x down) * gain: what the routed experts see (reference_run 1.2; no gate follows this norm)."""
    return norm.rms(linear(x, p.down), p.gain, norm.EPS)


def latent_up(p: Latent, y: Float[Array, "B S Z"]) -> Float[Array, "B S D"]:
    """The routed sum back in the model's width."""
    return linear(y, p.up)
