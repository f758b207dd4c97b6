"""One training step and one evaluation step: pure functions of a state and a batch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from argosy import leaf, spec
from argosy.data.loader import Batch
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

    loss: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    tokens: Int[Array, ""]
    grad_norm: dict[str, Array]
    param_norm: dict[str, Array]
    layers: Any


def init(run: spec.Run, mesh: jax.sharding.Mesh) -> State:
    """The state before the first update: parameters from the run's seed, everything else zero."""
    leaves = transformer.leaves(run)
    params = leaf.init(leaves, mesh, run.seed)
    opt = optimizer.make(run, leaves).init(params)
    with jax.set_mesh(mesh):
        bias = jnp.zeros((run.model.layers, run.moe.experts), jnp.float32)
        return State(jnp.zeros((), jnp.int32), params, opt, bias)


def abstract(run: spec.Run, mesh: jax.sharding.Mesh) -> State:
    """Shapes, dtypes and shardings of the state, nothing allocated: what a checkpoint is restored into."""
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: init(run, mesh))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)), shapes
    )


def train_step(run: spec.Run, state: State, batch: Batch) -> tuple[State, Stats]:
    """The state after one update, and its statistics.

    The loss is a sum over valid tokens divided by their number over the whole global batch, so it does not
    depend on how the batch lies on the mesh.
    """
    leaves = transformer.leaves(run)

    def objective(params: Any) -> tuple[Array, tuple[Array, transformer.Losses]]:
        out = transformer.loss(params, state.router_bias, batch, run)
        count = jnp.maximum(out.count, 1).astype(jnp.float32)
        total = (out.nll + run.model.z_loss_weight * out.z) / count if run.model.z_loss == "logit" else out.nll / count
        return total + out.aux, (total, out)

    grads, (total, out) = jax.grad(objective, has_aux=True)(state.params)
    update = optimizer.make(run, leaves).update(grads, state.opt, state.params, state.step)
    new = State(state.step + 1, update.params, update.state, out.next_bias)
    stats = Stats(
        loss=total,
        cross_entropy=out.nll / jnp.maximum(out.count, 1).astype(jnp.float32),
        tokens=out.count,
        grad_norm=update.grad_norm,
        param_norm=update.param_norm,
        layers=out.layers,
    )
    return new, stats


def compiled(run: spec.Run) -> Any:
    """`train_step` of a run as one compiled program; the old state's memory is reused for the new."""
    return jax.jit(lambda state, batch: train_step(run, state, batch), donate_argnums=0)


def learning_rates(run: spec.Run, step: int) -> dict[str, float]:
    """Both groups' learning rates at a zero-based update, as logged."""
    muonh, adam = schedule.learning_rates(run, step)
    return {"optim/learning_rate": float(muonh), "optim/adam_lr": float(adam)}


def eval_step(run: spec.Run, params: Any, router_bias: Array, batch: Batch) -> tuple[Array, Array]:
    """Summed cross-entropy in nats and the number of labels: dropless, with the pending bias, without z-loss."""
    nll = transformer.nll(params, router_bias, batch, run)
    valid = batch.valid
    return jnp.sum(jnp.where(valid, nll, 0.0)), jnp.sum(valid.astype(jnp.int32))
