"""One training step and one evaluation step: pure functions of a state and a batch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from argosy import leaf, spec
from argosy.batch import Batch
from argosy.model import transformer
from argosy.train import optimizer, schedule


class State(NamedTuple):
    """Everything that a checkpoint holds. `step` counts finished updates; the data position is just the step.

    `router_bias` is the bias that the *next* forward pass applies. It is state, not a parameter: the optimizer
    never meets it, and every checkpoint and evaluation carries it.
    """

    step: Int[Array, ""]
    params: Any
    opt: Any
    router_bias: Float[Array, "L E"]


class Stats(NamedTuple):
    """What one step reports, all on device: scalars of the loss, norms by part, router records by layer."""

    loss: Any
    cross_entropy: Any
    tokens: Any
    grad_norm: dict[str, Any]
    param_norm: dict[str, Any]
    layers: Any  # exchange.MoeStats, a leading L
    documents: Any  # per shard: how many, and how many equally long ones they count as


def init(run: spec.Run, mesh: jax.sharding.Mesh) -> State:
    """The state before the first update: parameters from the run's seed, everything else zero.

    Like everything here it is called with the run's mesh in place (`jax.set_mesh`).
    """
    leaves = transformer.leaves(run)
    return _around(run, leaves, leaf.init(leaves, mesh, run.seed))


def _around(run: spec.Run, leaves: Any, params: Any) -> State:
    bias = jnp.zeros((run.model.layers, run.moe.experts), jnp.float32)
    return State(jnp.zeros((), jnp.int32), params, optimizer.make(run, leaves).init(params), bias)


def abstract(run: spec.Run, mesh: jax.sharding.Mesh) -> State:
    """Shapes, dtypes and shardings of the state, nothing allocated: what a checkpoint is restored into."""
    leaves = transformer.leaves(run)

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        where = x.sharding.spec if x.sharding is not None else P()  # a scalar has none
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, where))

    params = leaf.shapes(leaves, mesh)
    return jax.tree.map(placed, jax.eval_shape(lambda params: _around(run, leaves, params), params))


def train_step(run: spec.Run, state: State, batch: Batch) -> tuple[State, Stats]:
    """The state after one update, and its statistics.

    The loss is a sum over valid tokens divided by their number over the whole global batch, so it does not
    depend on how the batch lies on the mesh.
    """
    leaves = transformer.leaves(run)

    def objective(params: Any) -> tuple[Array, transformer.Losses]:
        out = transformer.loss(params, state.router_bias, batch, run)
        return out.sums.total / _count(out) + out.aux, out

    (total, out), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    update = optimizer.make(run, leaves).update(grads, state.opt, state.params, state.step)
    new = State(state.step + 1, update.params, update.state, out.layers.next_bias)
    stats = Stats(
        loss=total,
        cross_entropy=out.sums.nll / _count(out),
        tokens=out.sums.tokens,
        grad_norm=update.grad_norm,
        param_norm=update.param_norm,
        layers=out.layers,
        documents=documents_per_shard(run, batch),
    )
    return new, stats


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


def _count(out: transformer.Losses) -> Array:
    return jnp.maximum(out.sums.tokens, 1).astype(jnp.float32)


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
    ledger, routing = stats.layers.ledger, stats.layers.routing
    valid = np.maximum(ledger.valid.astype(np.float64), 1)  # L
    sender, receiver = ledger.sender_dropped / valid, ledger.receiver_dropped / valid
    muonh_lr, adam_lr = schedule.learning_rates(run, done - 1)
    row = {
        "train/loss": stats.loss,
        "train/cross_entropy_loss": stats.cross_entropy,
        "run_progress": done / spec.steps(run),
        "optim/learning_rate": muonh_lr,
        "optim/adam_lr": adam_lr,
        "moe/drop_fraction": np.mean(sender + receiver),
        "moe/sender_drop_fraction": np.mean(sender),
        "moe/receiver_drop_fraction": np.mean(receiver),
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
