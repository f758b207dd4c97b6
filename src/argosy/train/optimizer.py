"""Optimizers by kind of leaf: MuonH for matrices, AdamH for the readout, Adam for the rest; AdamW and Muon as choices.

A pure pair in the manner of optax, with two differences: `update` takes the step as an integer, the only counter
there is, and returns new parameters, since the hyperball step rescales the weights. Source: reference_run 3.
Everything is float32, but the Newton-Schulz products where `compute.precision=bf16`.

All arithmetic is elementwise on the parameters' own shards, or a sum of squares over a group; only whole matrices
for Newton-Schulz are gathered. Memory traffic is the cost of the rest, so donate parameters and state and return them
in the order they came in: JAX pairs donated buffers with outputs of their shape by position, and a crossed pair costs
a copy of every leaf. Parameter norms are of the new values for the same reason.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from argosy import spec
from argosy.leaf import Leaf, is_leaf
from argosy.plan import scaling
from argosy.train import host, schedule

MOMENTUM = 0.95
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
NORM_EPS = 1e-8  # beside the norm of a matrix before Newton-Schulz
TINY = 1e-10  # the smallest norm that the hyperball step divides by
# Of the matrices orthogonalised together on a CPU. 256 of them, 128 x 256, two cores: jaxlib 0.10.2 one by one 137 ms, 64 at
# a time 213; jaxlib 0.12, whose batched products are better, 132 and 91.
CHUNK_ELEMENTS = 2**21 if jax.__version_info__ >= (0, 11) else 2**15
ACCELERATOR_CHUNK_ELEMENTS = 2**26  # elsewhere: enough to fill the chip, 256 MB of float32


class Momentum(NamedTuple):
    """State of a MuonH or Muon leaf: a sum of gradients, float32, divided over the mesh like its parameter."""

    m: Any


class Moments(NamedTuple):
    """State of an Adam, AdamH or AdamW leaf: averages of g and g^2, float32, divided over the mesh like their parameter."""

    m: Any
    v: Any


class Update(NamedTuple):
    """What one update gives. Norms are Frobenius norms by `Leaf.part`, and `total`: of the gradients as they came
    (before any clipping) and of the new parameters."""

    params: Any
    state: Any
    grad_norm: dict[str, Array]
    param_norm: dict[str, Array]


class Optimizer(NamedTuple):
    """`init(params) -> state` and `update(grads, state, params, step) -> Update`, both pure, both for `jax.jit`."""

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, Array], Update]


class Constants(NamedTuple):
    """Adam's: decay of both averages, and the number beside the root."""

    beta1: float
    beta2: float
    eps: float


ADAMW = Constants(0.9, 0.95, 1e-8)  # of `optim.rule=adamw`, and of the leaves that `muon` leaves to AdamW


def make(run: spec.Run, leaves: Any) -> Optimizer:
    """The optimizer of a run over a tree of `Leaf`.

    `optim.rule=hyperball`: MuonH (kind matrix), AdamH (readout), Adam (plain, gate). `adamw`: AdamW everywhere.
    `muon`: Muon as in optax, with decoupled decay, for kind matrix, and AdamW for the rest. AdamW decays the leaves
    that start as noise (matrices, readout, embedding, router), not those that start at a value with a meaning
    (gains, convolutions, head gates). `optim.decay=gates_router` belongs to `hyperball`: decoupled decay of kind
    gate, from `decay_peak` linearly to 0 over the run (reference_run 3.7).

    Gradients may have any float type; parameters are float32 masters. Parameters and state may lie in host memory; new
    state goes back there, new parameters are on the device. Needs the run's mesh (`jax.set_mesh`).
    """
    flat: list[Leaf]
    tree: Any
    flat, tree = jax.tree.flatten(leaves, is_leaf=is_leaf)

    def init(params: Any) -> Any:
        def one(leaf: Leaf, p: Array) -> Any:
            m = jnp.zeros_like(p, dtype=jnp.float32)
            return Momentum(m) if _by_momentum(run, leaf) else Moments(m, jnp.zeros_like(p, dtype=jnp.float32))

        return tree.unflatten(map(one, flat, tree.flatten_up_to(params)))

    def update(grads: Any, state: Any, params: Any, step: Int[Array, ""]) -> Update:
        wide = [g.astype(jnp.float32) for g in tree.flatten_up_to(grads)]
        grad_norm = _norms(flat, wide)
        if run.optim.clip == "global":
            keep = jnp.minimum(1.0, run.optim.clip_norm / jnp.maximum(grad_norm["total"], TINY))
            wide = [g * keep for g in wide]
        rates = schedule.learning_rates(run, step)
        new: list[Array] = []
        states = []
        for leaf, g, s, p in zip(flat, wide, tree.flatten_up_to(state), tree.flatten_up_to(params), strict=True):
            # From the host comes one leaf while the one before it is stepped: not all at once, and not during the backward pass.
            here, weight = host.fetched((s, p), after=new[-2] if len(new) > 1 else grad_norm["total"])
            stepped, moments = _step(run, leaf, g, here, weight, step, rates)
            new.append(stepped)
            states.append(host.returned(moments, like=s))
        return Update(tree.unflatten(new), tree.unflatten(states), grad_norm, _norms(flat, new))

    return Optimizer(init, update)


def _by_momentum(run: spec.Run, leaf: Leaf) -> bool:
    return leaf.kind == "matrix" and run.optim.rule != "adamw"


def _step(
    run: spec.Run, leaf: Leaf, g: Array, state: Any, p: Array, step: Array, rates: schedule.LearningRates
) -> tuple[Array, Any]:
    """One leaf's new parameter and state."""
    optim = run.optim
    if _by_momentum(run, leaf):
        m = MOMENTUM * state.m + g
        if optim.rule == "hyperball":
            direction = orthogonalize(MOMENTUM * m + g, leaf, run.compute)
            return hyperball(p, direction, rates.muonh, radius_dims(leaf, optim.radius)), Momentum(m)
        # optax corrects both terms of Nesterov's sum for their start, the momentum as of the next update
        ahead = MOMENTUM / _unbias(MOMENTUM, step + 1) * m + g / _unbias(MOMENTUM, step)
        direction = orthogonalize((1 - MOMENTUM) * ahead, leaf, run.compute)
        fan_in, fan_out = leaf.shape[-2:]
        scale = math.sqrt(max(1.0, fan_out / fan_in))
        return p - rates.muonh * (scale * direction + optim.weight_decay * p), Momentum(m)

    if optim.rule == "hyperball":
        peaks = scaling.rates(run)
        direction, moments = adam(g, state, step, Constants(peaks.beta1, peaks.beta2, peaks.eps))
        if leaf.kind == "readout":
            return hyperball(p, direction, rates.muonh, tuple(range(p.ndim))), moments
        if leaf.kind == "gate" and optim.decay == "gates_router":
            left = jnp.maximum(0.0, 1.0 - step.astype(jnp.float32) / spec.steps(run))
            direction = direction + optim.decay_peak * left * p
        return p - rates.adam * direction, moments

    direction, moments = adam(g, state, step, ADAMW)
    if isinstance(leaf.init, float):
        direction = direction + optim.weight_decay * p
    return p - rates.adam * direction, moments


def adam(g: Array, state: Moments, step: Int[Array, ""], c: Constants) -> tuple[Array, Moments]:
    """Adam's bias-corrected direction m / (sqrt(v) + eps) at a zero-based step, and the new moments (reference_run 3.3)."""
    m = c.beta1 * state.m + (1 - c.beta1) * g
    v = c.beta2 * state.v + (1 - c.beta2) * g * g  # not (g * g): shared with the norm it would be stored
    direction = m / _unbias(c.beta1, step) / (jnp.sqrt(v / _unbias(c.beta2, step)) + c.eps)
    return direction, Moments(m, v)


def _unbias(beta: float, step: Int[Array, ""]) -> Float[Array, ""]:
    """1 - beta^(step + 1): expm1 keeps the digits that 1 - 0.9999^t loses in float32."""
    return -jnp.expm1((step + 1).astype(jnp.float32) * math.log(beta))


def radius_dims(leaf: Leaf, radius: str) -> tuple[int, ...]:
    """The dimensions over which one hyperball radius reaches: a matrix, and with `joint` all experts of a layer.

    Layers and shared experts keep a radius each (reference_run 3.2; `per_expert` is marin PR 8749).
    """
    letters = leaf.dims.split()
    joint = [i for i, letter in enumerate(letters[:-2]) if letter == "E" and radius == "joint"]
    return (*joint, len(letters) - 2, len(letters) - 1)


def hyperball(w: Array, direction: Array, eta: Float[Array, ""], dims: tuple[int, ...]) -> Array:
    """w after a step of relative length `eta` against `direction`, scaled back to its norm over `dims`.

    W^ = W - eta ||W|| D / ||D||, then W^ ||W|| / ||W^||; the norm of W^ follows from the sums of W W, W D and D D,
    so that W is read twice and written once. A zero direction leaves w. Source: reference_run 3.2.

    >>> hyperball(jnp.array([[3.0, 4.0]]), jnp.array([[0.0, 2.0]]), jnp.float32(1.0), (0, 1)).round(4)
    Array([[ 4.7434, -1.5811]], dtype=float32)
    """
    ww, wd, dd = (jnp.sum(a * b, dims, keepdims=True) for a, b in ((w, w), (w, direction), (direction, direction)))
    radius = jnp.sqrt(ww)
    length = eta * radius / jnp.maximum(jnp.sqrt(dd), TINY)
    after = jnp.sqrt(jnp.maximum(ww - 2 * length * wd + length * length * dd, 0.0))
    return (w - length * direction) * (radius / jnp.maximum(after, TINY))


def orthogonalize(g: Array, leaf: Leaf, compute: spec.Compute) -> Array:
    """Newton-Schulz of every matrix (last two dims) of a leaf on its own, float32 in and out, sharded as `leaf.spec`.

    Each device takes whole matrices: the axes that divide a matrix divide the stack instead, filled up with zeros
    where they do not divide it, so that none is computed twice along them. One all-to-all there, one back.
    """
    (dim, over), *more = [(d, leaf.spec[d]) for d in (-2, -1) if leaf.spec[d] is not None] or [(-1, None)]
    assert not more, leaf

    def local(g: Array) -> Array:
        ways = jax.lax.axis_size(over) if over is not None else 1
        if ways == 1:
            return _each(g, compute)
        stack = g.reshape(-1, *g.shape[-2:])
        filled = jnp.pad(stack, [(0, -len(stack) % ways), (0, 0), (0, 0)])
        whole = jax.lax.all_to_all(filled, over, 0, 3 + dim, tiled=True)
        back = jax.lax.all_to_all(_each(whole, compute), over, 3 + dim, 0, tiled=True)
        return back[: len(stack)].reshape(g.shape)

    return jax.shard_map(local, in_specs=leaf.spec, out_specs=leaf.spec)(g)


def _each(g: Float[Array, "*stack rows cols"], compute: spec.Compute) -> Float[Array, "*stack rows cols"]:
    """Newton-Schulz of a local stack, a few matrices at a time, each written over its own input."""
    rows, cols = g.shape[-2:]
    count, limit = math.prod(g.shape[:-2]), CHUNK_ELEMENTS if compute.chip == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
    together = max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or n * rows * cols <= limit))
    dtype = jnp.bfloat16 if compute.precision == "bf16" else jnp.float32

    def replace(i: Any, stack: Array) -> Array:
        chunk = jax.lax.dynamic_slice_in_dim(stack, i * together, together)
        return jax.lax.dynamic_update_slice_in_dim(stack, newton_schulz(chunk, dtype), i * together, 0)

    return jax.lax.fori_loop(0, count // together, replace, g.reshape(count, rows, cols)).reshape(g.shape)


def newton_schulz(g: Float[Array, "stack rows cols"], dtype: Any = jnp.float32) -> Float[Array, "stack rows cols"]:
    """Each matrix with its singular values moved towards 1 by five quintic steps; zero stays zero (reference_run 3.2).

    X = g / (||g|| + 1e-8), then X <- a X + (b A + c A A) X with A = X X^T, rows at most columns (transposed if not).
    Operands of the products are in `dtype`; sums and the rest in float32.
    """
    tall = g.shape[-2] > g.shape[-1]
    x = jnp.swapaxes(g, -1, -2) if tall else g
    x = x / (jnp.sqrt(jnp.sum(x * x, (-2, -1), keepdims=True)) + NORM_EPS)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def quintic(x: Array, row: Float[Array, "3"]) -> tuple[Array, None]:
        low = x.astype(dtype)
        square = product("smk,snk->smn", low, low)
        low_square = square.astype(dtype)
        polynomial = row[1] * square + row[2] * product("smk,skn->smn", low_square, low_square)
        return row[0] * x + product("smk,skn->smn", polynomial.astype(dtype), low), None

    x, _ = jax.lax.scan(quintic, x, jnp.asarray(NEWTON_SCHULZ, jnp.float32))
    return jnp.swapaxes(x, -1, -2) if tall else x


def _norms(leaves: list[Leaf], arrays: list[Array]) -> dict[str, Array]:
    """Frobenius norms by part and in total, from float32 sums of squares."""
    squares: dict[str, Array] = {}
    for leaf, x in zip(leaves, arrays, strict=True):
        square = jnp.sum(x * x)
        squares[leaf.part] = squares[leaf.part] + square if leaf.part in squares else square
    total = jnp.stack(list(squares.values())).sum()
    return {part: jnp.sqrt(square) for part, square in squares.items()} | {"total": jnp.sqrt(total)}
