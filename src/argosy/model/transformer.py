"""The network, whole: what its parameters are, and how tokens become a loss. The file to read first."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from argosy import leaf, mesh, spec
from argosy.batch import Batch
from argosy.leaf import Leaf
from argosy.model import attention, exchange, norm, shortconv
from argosy.model import loss as losses

Capacity = Literal["bounded", "dropless"]

# A loop copies each layer's weights out of their stack, forward and again backward: on two CPU cores a tenth of a step
# of four layers. More layers stay a loop: what there is to compile, and the memory of the backward pass, would grow with them.
UNROLL_LAYERS = 8


class Block(NamedTuple):
    """One layer. Holds leaves, arrays, or whatever is mapped over them; an absent part is None."""

    norm_attention: norm.GatedNorm
    attention: attention.Attention
    conv_attention: Any
    norm_moe: norm.GatedNorm
    moe: exchange.Moe
    conv_moe: Any


class Params(NamedTuple):
    """All parameters; the blocks' leaves are stacked over layers."""

    embed: Any  # V D
    norm_embed: norm.GatedNorm
    blocks: Block
    norm_final: norm.GatedNorm
    readout: Any  # D V


class Losses(NamedTuple):
    """Sums over the valid tokens of the whole batch, and what each layer reports (a leading L)."""

    sums: losses.Sums
    aux: Float[Array, ""]  # the balance loss, weighted; zero unless routing.balance=aux_loss
    layers: exchange.MoeStats


def leaves(run: spec.Run) -> Params:
    """One `Leaf` for every parameter of a run (reference_run 1.1 to 1.3)."""
    m = run.model
    d, std = m.width, 0.5 / m.width**0.5
    conv = shortconv.leaf(m.conv_taps, d) if m.convolution != "none" else None
    block = Block(
        norm_attention=norm.leaves(m),
        attention=attention.leaves(run),
        conv_attention=conv,
        norm_moe=norm.leaves(m),
        moe=exchange.leaves(run),
        conv_moe=conv,
    )
    return Params(
        embed=Leaf("V D", (m.vocab, d), P(None, None), std, "plain", "embed"),
        norm_embed=norm.leaves(m),
        blocks=leaf.stack(m.layers, block),
        norm_final=norm.leaves(m),
        readout=Leaf("D V", (d, m.vocab), P(mesh.FSDP, None), std, "readout", "readout"),
    )


def hidden(
    params: Params, router_bias: Float[Array, "L E"], batch: Batch, run: spec.Run, *, capacity: Capacity | None = None
) -> tuple[Float[Array, "B S D"], exchange.MoeStats]:
    """The last layer's normed output, in the compute dtype, and every layer's report (reference_run 1.2).

    `capacity` overrides the run's: evaluations are `dropless`.
    """
    dtype = jnp.bfloat16 if run.compute.precision == "bf16" else jnp.float32
    x = norm.gated_norm(params.norm_embed, embed(params.embed, batch.tokens, dtype))
    is_global = jnp.asarray([spec.is_global(run.model, i) for i in range(run.model.layers)])
    body = partial(layer, batch=batch, run=run, capacity=capacity)
    unroll = run.model.layers if run.model.layers <= UNROLL_LAYERS else 1
    scanned = remat(body, run, looped=unroll < run.model.layers)
    x, reports = jax.lax.scan(scanned, x, (params.blocks, router_bias, is_global), unroll=unroll)
    return norm.gated_norm(params.norm_final, x), reports


def remat(body: Callable, run: spec.Run, *, looped: bool) -> Callable:
    """A layer that keeps for its backward pass what `compute.remat` names.

    `none`: everything. `block`: its input. `block_keep_dispatch`: its input and the rows that the exchange brought, so
    that all else is computed again but no row is sent twice. In a loop the compiler cannot mistake the second
    computation for the first; unrolled, a barrier keeps it from doing so.
    """
    if run.compute.remat == "none":
        return body
    keep = exchange.KEPT if run.compute.remat == "block_keep_dispatch" else ()
    return jax.checkpoint(body, prevent_cse=not looped, policy=jax.checkpoint_policies.save_only_these_names(*keep))


def layer(
    x: Float[Array, "B S D"], scanned: tuple[Block, Array, Array], *, batch: Batch, run: spec.Run, capacity: Capacity | None
) -> tuple[Float[Array, "B S D"], exchange.MoeStats]:
    """One layer: attention, then the sparse block, each normed before and convolved after, each added to `x`."""
    p, bias, is_global = scanned
    y = attention.attention(p.attention, norm.gated_norm(p.norm_attention, x), batch.doc_start, is_global, run)
    x = x + (y if p.conv_attention is None else shortconv.shortconv(y, p.conv_attention, batch.doc_start))
    y, report = exchange.moe(p.moe, norm.gated_norm(p.norm_moe, x), bias, batch.valid, run, capacity=capacity)
    x = x + (y if p.conv_moe is None else shortconv.shortconv(y, p.conv_moe, batch.doc_start))
    return x, report


def embed(table: Float[Array, "V D"], tokens: Int[Array, "B S"], dtype: Any) -> Float[Array, "B S D"]:
    """Rows of the table, which is whole on every device: no collective in the look-up, one sum in its gradient."""

    table, parts = mesh.placed(table)

    def local(table: Array, tokens: Array) -> Array:
        table = mesh.whole(table, parts, table.dtype)
        return table.at[tokens].get(mode="promise_in_bounds").astype(dtype)

    return jax.shard_map(local, in_specs=(parts, mesh.B_S), out_specs=mesh.B_S_D)(table, tokens)


def loss(params: Params, router_bias: Float[Array, "L E"], batch: Batch, run: spec.Run) -> Losses:
    """Cross-entropy and logit z-loss of a batch, summed over its valid tokens, with every layer's report."""
    h, reports = hidden(params, router_bias, batch, run)
    weight = run.model.z_loss_weight if run.model.z_loss == "logit" else 0.0
    sums = losses.loss(h, params.readout, batch.labels, batch.valid, weight, run.compute.readout_block_tokens)
    return Losses(sums, jnp.sum(reports.aux_loss), reports)


def nll(params: Params, router_bias: Float[Array, "L E"], batch: Batch, run: spec.Run) -> Float[Array, "B S"]:
    """Each label's cross-entropy in nats, dropless, without z-loss: what evaluations sum."""
    h, _ = hidden(params, router_bias, batch, run, capacity="dropless")
    return losses.nll(h, params.readout, batch.labels, run.compute.readout_block_tokens)


def logits_at(
    params: Params, router_bias: Float[Array, "L E"], batch: Batch, row: int, at: Int[Array, ""], run: spec.Run
) -> Float[Array, "V"]:
    """Dropless float32 logits of one position of one sequence, for sampling."""
    h, _ = hidden(params, router_bias, batch, run, capacity="dropless")
    one = jax.lax.dynamic_slice_in_dim(jax.sharding.reshard(h, P())[row], at, 1)[0]
    return jnp.einsum("d,dv->v", one, mesh.gather(params.readout, one.dtype), preferred_element_type=jnp.float32)
