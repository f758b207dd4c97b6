"""One training step and one evaluation step: pure functions of a state and a batch."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from argosy import leaf, spec
from argosy import mesh as meshes
from argosy.batch import Batch
from argosy.leaf import Leaf
from argosy.model import exchange, parts, transformer
from argosy.train import host, optimizer, schedule


class State(NamedTuple):
    """Everything that passes from one update to the next. `step` counts finished updates; the data position is just the step.

    `params` are the weights that a forward pass reads. `router_bias` is the bias that the *next* forward pass applies. It
    is state, not a parameter: the optimizer never meets it, and every checkpoint and evaluation carries it.
    `masters` exist with `compute.params=bf16`: the float32 values of those weights that are bfloat16 in `params`.
    """

    step: Int[Array, ""]
    params: Any
    opt: Any
    router_bias: Float[Array, "L E"]
    masters: Any = None


class Stats(NamedTuple):
    """What one step reports, all on device: scalars of the loss, norms by part, router records by layer."""

    loss: Any
    cross_entropy: Any
    logit_z: Any
    tokens: Any
    grad_norm: dict[str, Any]
    param_norm: dict[str, Any]
    layers: Any  # exchange.MoeStats, a leading L
    documents: Any  # per shard: how many, and how many equally long ones they count as


def init(run: spec.Run, mesh: jax.sharding.Mesh) -> State:
    """The state before the first update: parameters from the run's seed, everything else zero.

    Like everything here it is called with the run's mesh in place (`jax.set_mesh`).
    """
    leaves, like = transformer.leaves(run), abstract(run, mesh)
    if "pinned_host" in (run.compute.masters, run.compute.optimizer_state):
        state = _leaf_by_leaf(run, leaves, mesh)
    else:
        state = _around(run, leaves, leaf.init(leaves, mesh, run.seed))
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, like)


def _around(run: spec.Run, leaves: Any, weights: Any) -> State:
    params, masters = split(run, leaves, weights)
    return _first(run, params, optimizer.make(run, leaves).init(weights), masters)


def _first(run: spec.Run, params: Any, opt: Any, masters: Any) -> State:
    return State(jnp.zeros((), jnp.int32), params, opt, jnp.zeros((run.model.layers, run.moe.experts), jnp.float32), masters)


def _leaf_by_leaf(run: spec.Run, leaves: Any, mesh: jax.sharding.Mesh) -> State:
    """The same state, each leaf's part of it moved to where it stays before the next is made: the device has room for what
    it keeps, not for all. A program makes one float32 leaf and nothing else: with more in it, its last bits would differ."""

    def one(name: str, its: Leaf) -> tuple[Any, Any, Any]:
        w = leaf.init({name: its}, mesh, run.seed)[name]
        params, masters = split(run, its, w)
        state, here = optimizer.make(run, its).init(w), NamedSharding(mesh, its.spec)
        state = jax.device_put(state, host.sharding(here, run.compute.optimizer_state))
        masters = jax.device_put(masters, host.sharding(here, run.compute.masters))
        return jax.block_until_ready((params, state, masters))

    made = zip(*(one(name, its) for name, its in leaf.flatten(leaves).items()), strict=True)
    params, opt, masters = (jax.tree.unflatten(jax.tree.structure(leaves, is_leaf=leaf.is_leaf), part) for part in made)
    return _first(run, params, opt, None if run.compute.params == "fp32" else masters)


def split(run: spec.Run, leaves: Any, weights: Any) -> tuple[Any, Any]:
    """Float32 weights as what a forward pass reads, and the masters, None where they are the same.

    With `compute.params=bf16` those that only meet bfloat16 products are bfloat16: all but embedding, gains and
    convolutions (kind plain), which are read in float32 and whose gradients sum over many tokens. So losses and updates
    are those of float32 weights, which are rounded the same way before every product.
    """
    if run.compute.params == "fp32":
        return weights, None
    params = leaf.tree_map(lambda one, w: w if one.kind == "plain" else w.astype(jnp.bfloat16), leaves, weights)
    return params, leaf.tree_map(lambda one, w: None if one.kind == "plain" else w, leaves, weights)


def weights(state: State) -> Any:
    """All weights in float32: masters, and the parameters that have none; each in the memory where it lies."""
    if state.masters is None:
        return state.params
    return jax.tree.map(lambda m, p: p if m is None else m, state.masters, state.params, is_leaf=lambda x: x is None)


def kept(state: State) -> State:
    """What a checkpoint holds of a state, or of an abstract one: float32 weights as `params`, and no second copy of them.

    So checkpoints are the same whatever a run's choices of memory are.
    """
    return state._replace(params=weights(state), masters=None)


def resumed(run: spec.Run, state: State) -> State:
    """The state of which `kept` was restored, to the bit."""
    leaves = transformer.leaves(run)

    def cast(one: Leaf, w: jax.Array) -> jax.Array:
        here = w.sharding.with_memory_kind("device")
        return w if one.kind == "plain" else jax.device_put(w, here).astype(jnp.bfloat16)

    if run.compute.params == "fp32":
        return state
    _, masters = split(run, leaves, state.params)
    return state._replace(params=leaf.tree_map(cast, leaves, state.params), masters=masters)


def abstract(run: spec.Run, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> State:
    """Shapes, dtypes, shardings and memories of the state, nothing allocated; `kept` of it is what a checkpoint is restored into."""
    leaves = transformer.leaves(run)

    def placed(memory: str) -> Callable[[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
        def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            where = NamedSharding(mesh, x.sharding.spec if x.sharding is not None else P())  # a scalar has none
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host.sharding(where, memory))

        return one

    state = jax.eval_shape(lambda w: _around(run, leaves, w), leaf.shapes(leaves, mesh))
    return jax.tree.map(placed("device"), state)._replace(
        opt=jax.tree.map(placed(run.compute.optimizer_state), state.opt),
        masters=jax.tree.map(placed(run.compute.masters), state.masters),
    )


def abstract_batch(run: spec.Run, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Batch:
    """Shapes, dtypes and shardings of a step's batch, nothing allocated."""
    shape, where = (run.data.batch_seqs, run.data.seq_len), NamedSharding(mesh, meshes.B_S)
    dtypes = Batch(tokens=jnp.int32, labels=jnp.int32, doc_start=jnp.int32, valid=jnp.bool_)
    return Batch(*(jax.ShapeDtypeStruct(shape, dtype, sharding=where) for dtype in dtypes))


def train_step(run: spec.Run, state: State, batch: Batch) -> tuple[State, Stats]:
    """The state after one update, and its statistics.

    The loss is a sum over valid tokens divided by their number over the whole global batch, so it does not
    depend on how the batch lies on the mesh, nor on the parts that `compute.accumulate` cuts it into.
    """
    leaves = transformer.leaves(run)
    out, grads = (_gradients if run.compute.accumulate == 1 else _accumulated)(run, state, batch)
    update = optimizer.make(run, leaves).update(grads, state.opt, weights(state), state.step)
    params, masters = split(run, leaves, update.params)
    new = State(state.step + 1, params, update.state, out.layers.next_bias, host.returned(masters, like=state.masters))
    stats = Stats(
        loss=out.sums.total / _count(out.sums.tokens) + out.aux,
        cross_entropy=out.sums.nll / _count(out.sums.tokens),
        logit_z=out.sums.z / _count(out.sums.tokens),
        tokens=out.sums.tokens,
        grad_norm=update.grad_norm,
        param_norm=update.param_norm,
        layers=out.layers,
        documents=documents_per_shard(run, batch),
    )
    return new, stats


def _gradients(run: spec.Run, state: State, batch: Batch, tokens: Array | None = None) -> tuple[transformer.Losses, Any]:
    """Sums and reports of a batch, and the gradients of its loss; `tokens` is what to divide by, the batch's own if None."""

    def objective(params: Any) -> tuple[Array, transformer.Losses]:
        out = transformer.loss(params, state.router_bias, batch, run)
        return out.sums.total / _count(out.sums.tokens if tokens is None else tokens) + out.aux, out

    (_, out), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    return out, grads


def _accumulated(run: spec.Run, state: State, batch: Batch) -> tuple[transformer.Losses, Any]:
    """The same, one part of the batch after another; gradients are summed in float32.

    What is a sum over tokens is added up, and divided once; what is not, the bias and some statistics, comes from
    sums (`model.parts`). Expert capacity is that of each part.
    """
    tokens, routing = jnp.sum(batch.valid, dtype=jnp.int32), run.routing

    def add(total: Any, part: Batch) -> tuple[Any, None]:
        (out, grads), (more, more_grads) = total, _gradients(run, state, part, tokens)
        grads = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), grads, more_grads)
        return (_joined(run, out, more), grads), None

    def nothing(x: jax.ShapeDtypeStruct, dtype: Any = None) -> Array:
        return jnp.zeros(x.shape, dtype or x.dtype, out_sharding=x.sharding.spec)

    split_batch = _parts(batch, run.compute.accumulate)
    shapes, grads = jax.eval_shape(lambda part: _gradients(run, state, part, tokens), jax.tree.map(lambda x: x[0], split_batch))
    empty = jax.tree.map(nothing, shapes)
    bounds = jnp.full((run.model.layers,), jnp.inf, jnp.float32)
    no_tokens = empty.layers.routing._replace(margin_min=bounds, margin_max=-bounds)
    no_shards = empty.layers.fairness._replace(accepted_lowest=jnp.ones_like(bounds))
    start = empty._replace(layers=empty.layers._replace(routing=no_tokens, fairness=no_shards))
    (out, grads), _ = jax.lax.scan(add, (start, jax.tree.map(partial(nothing, dtype=jnp.float32), grads)), split_batch)

    def whole(stats: Any, part: parts.Part, bias: Array) -> Array:
        one = partial(parts.next_bias, k=run.moe.experts_per_token, run=routing, axes=spec.AXES)
        return jax.vmap(one)(stats, part, bias)

    layers = out.layers
    following = jax.shard_map(whole, in_specs=(P(), parts.Part(P(), parts.MARGINS), P()), out_specs=P())
    bias = following(layers.routing, layers.part, state.router_bias)
    return out._replace(layers=layers._replace(next_bias=bias, part=None)), grads


def _parts(batch: Batch, count: int) -> Batch:
    """A batch as `count` batches, a leading dimension: of every shard's sequences the first few, the next few, and so on."""

    def cut(x: Array) -> Array:
        return x.reshape(count, -1, *x.shape[1:])

    over = P(None, *meshes.B_S)
    return jax.tree.map(jax.shard_map(cut, in_specs=meshes.B_S, out_specs=over), batch)


def _joined(run: spec.Run, a: transformer.Losses, b: transformer.Losses) -> transformer.Losses:
    """Sums and reports of two parts of a batch together; the next bias is left to the end."""

    def layers(stats: Any, part: Any, more: Any, part_more: Any) -> Any:
        one = partial(parts.both, k=run.moe.experts_per_token, bins=run.routing.histogram_bins)
        return jax.vmap(one)((stats, part), (more, part_more))

    kept_spec = parts.Part(P(), parts.MARGINS)
    joined = jax.shard_map(layers, in_specs=(P(), kept_spec, P(), kept_spec), out_specs=(P(), kept_spec))
    routing, part = joined(a.layers.routing, a.layers.part, b.layers.routing, b.layers.part)
    ledger = jax.tree.map(jnp.add, a.layers.ledger, b.layers.ledger)
    one, two = a.layers.fairness, b.layers.fairness
    fairness = exchange.Fairness(
        jnp.minimum(one.accepted_lowest, two.accepted_lowest), jnp.maximum(one.accepted_highest, two.accepted_highest)
    )
    reports = b.layers._replace(ledger=ledger, fairness=fairness, routing=routing, part=part)
    return transformer.Losses(jax.tree.map(jnp.add, a.sums, b.sums), a.aux + b.aux, reports)


def documents_per_shard(run: spec.Run, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Documents in a shard's tokens, the mean over shards; and (sum of lengths)^2 / (sum of squared lengths).

    The second is what decides drops (`plan.drops`): its harmonic mean over shards. Lengths are of valid tokens; a document
    that a sequence cuts counts as one in each. With accumulation a shard is one part of a device's tokens.
    """
    shards = run.mesh.replica * run.mesh.data * run.mesh.expert * run.compute.accumulate
    into = jnp.arange(batch.doc_start.shape[1], dtype=jnp.int32)[None, :] - batch.doc_start  # 0, 1, ... n - 1 in a document
    # the first n odd numbers sum to n^2
    squares = jnp.sum(jnp.where(batch.valid, 2 * into + 1, 0).astype(jnp.float32))
    tokens = jnp.sum(batch.valid, dtype=jnp.int32).astype(jnp.float32)
    count = jnp.sum(batch.valid & (into == 0), dtype=jnp.int32).astype(jnp.float32)
    return count / shards, tokens * tokens / (shards * jnp.maximum(squares, 1.0))


def _count(tokens: Array) -> Array:
    return jnp.maximum(tokens, 1).astype(jnp.float32)


def compiled(run: spec.Run) -> Any:
    """`train_step` of a run as one compiled program; the old state's memory is reused for the new."""
    return jax.jit(lambda state, batch: train_step(run, state, batch), donate_argnums=0)


def eval_step(run: spec.Run, params: Any, router_bias: Array, batch: Batch) -> tuple[Array, Array]:
    """Summed cross-entropy in nats and the number of labels: dropless, with the pending bias, without z-loss."""
    nll = transformer.nll(params, router_bias, batch, run)
    return jnp.sum(jnp.where(batch.valid, nll, 0.0)), jnp.sum(batch.valid, dtype=jnp.int32)


def metrics(run: spec.Run, done: int, stats: Stats) -> dict[str, float]:
    """The logged metrics of the update that made `done`, from statistics already on the host (reference_run 7.1).

    Drop fractions are of valid assignments. Learning rates are those of the zero-based update `done - 1`.
    """
    ledger, fairness, routing = stats.layers.ledger, stats.layers.fairness, stats.layers.routing
    valid = np.maximum(ledger.valid.astype(np.float64), 1)  # L
    sender, receiver = ledger.sender_dropped / valid, ledger.receiver_dropped / valid
    muonh_lr, adam_lr = schedule.learning_rates(run, done - 1)
    row = {
        "train/loss": stats.loss,
        "train/cross_entropy_loss": stats.cross_entropy,
        "train/logit_z": stats.logit_z,
        "run_progress": done / spec.steps(run),
        "optim/learning_rate": muonh_lr,
        "optim/adam_lr": adam_lr,
        "moe/drop_fraction": np.mean(sender + receiver),
        "moe/sender_drop_fraction": np.mean(sender),
        "moe/receiver_drop_fraction": np.mean(receiver),
        "moe/accepted_share_lowest": np.min(fairness.accepted_lowest),
        "moe/accepted_share_highest": np.max(fairness.accepted_highest),
        "moe/dropped_assignments": np.sum(ledger.sender_dropped.astype(np.int64) + ledger.receiver_dropped),
        "train/router/routing_entropy_mean": np.mean(routing.entropy),
        "train/router/load_max_over_mean": np.max(routing.max_load),
        "train/router/load_balancing_loss": np.mean(routing.load_balancing_loss),
        "train/router/router_z_loss": np.mean(routing.z),
        "train/router/margin_min": np.min(routing.margin_min),
        "train/router/margin_max": np.max(routing.margin_max),
        "train/router/bias_min": np.min(routing.bias_min),
        "train/router/bias_max": np.max(routing.bias_max),
        "data/documents_per_shard": stats.documents[0],
        "data/equal_documents_per_shard": stats.documents[1],
    }
    cells = np.sum(routing.cells, 0, dtype=np.float64)
    row |= {f"moe/cell_load_histogram/bin_{i:02d}": n for i, n in enumerate(cells / max(cells.sum(), 1.0))}
    for i in range(run.model.layers):
        row |= {
            f"train/router/layer_{i}/routing_entropy": routing.entropy[i],
            f"train/router/layer_{i}/load_max_over_mean": routing.max_load[i],
            f"train/router/layer_{i}/drop_fraction": (sender + receiver)[i],
        }
    row |= {f"grad/norm/{part}": value for part, value in stats.grad_norm.items()}
    row |= {f"params/norm/{part}": value for part, value in stats.param_norm.items()}
    return {name: float(value) for name, value in row.items()}
