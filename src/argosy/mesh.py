"""The only place where a device mesh is built: four axes that always exist."""

from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from argosy import spec

BATCH = spec.BATCH_AXES  # a batch's sequences are divided over these axes
FSDP = ("data", "expert")  # attention, shared, latent and readout weights are divided over these

# The parts (`Leaf.part`) that may be whole on every device; every other leaf is divided over `expert` or `FSDP`.
MAY_REPLICATE = ("embed", "router", "norm", "conv")  # norm: the gains; the low-rank gates are divided

B_S = P(BATCH, "context")  # tokens, labels, masks
B_S_D = P(BATCH, "context", None)  # activations


def sizes(run: spec.Run) -> tuple[int, ...]:
    m = run.mesh
    return (m.replica, m.data, m.context, m.expert)


def make(run: spec.Run) -> Mesh:
    """The run's mesh over the devices of all its processes, axes Explicit.

    Devices are taken rack by rack, process by process, and `expert` is the innermost axis, so that what the experts
    exchange stays inside a process or a rack where it fits there.

    Raises:
        ValueError: if the run asks for more devices than there are, or leaves some of several processes' devices out.
    """
    need, have = spec.devices(run), jax.device_count()
    if need > have:
        raise ValueError(
            f"the run's mesh needs {need} devices (replica x data x context x expert = {' x '.join(map(str, sizes(run)))}),"
            f" this machine has {have}; nearest legal: --set mesh.replica={max(1, have)} with the others 1"
        )
    if need != have and jax.process_count() > 1:
        raise ValueError(
            f"the run's mesh needs {need} devices (replica x data x context x expert = {' x '.join(map(str, sizes(run)))}),"
            f" {jax.process_count()} processes have {have}, and each has to take part; nearest legal: --set mesh.replica="
            f"{have // (need // run.mesh.replica) or have}"
        )
    placed = sorted(jax.devices(), key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index, d.id))
    chosen = np.asarray(placed[:need]).reshape(sizes(run))
    return Mesh(chosen, spec.AXES, axis_types=(AxisType.Explicit,) * 4)


def abstract(run: spec.Run) -> AbstractMesh:
    """The run's mesh without devices, for shape and sharding checks at any scale."""
    return AbstractMesh(sizes(run), spec.AXES, axis_types=(AxisType.Explicit,) * 4)


def gather(w: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A weight in the dtype of a product, whole on every device: cast first, so that fewer bytes travel.

    The gradient comes back summed over the batch in that dtype, then in the weight's own dtype and sharding.
    """
    return jax.sharding.reshard(w.astype(dtype), P())


def placed(w: jax.Array) -> tuple[jax.Array, P]:
    """A weight as it goes into `shard_map`, and its `in_specs`: as it lies, and over every axis that has one device.

    Nothing moves. But a gradient is summed over each axis that the specs leave out, and XLA:CPU copies it even where that
    axis has one device: all gradients once more, in time and memory.
    """
    parts = jax.typeof(w).sharding.spec
    devices = jax.sharding.get_abstract_mesh().shape
    single = tuple(axis for axis in spec.AXES if devices[axis] == 1 and axis not in _axes(parts))
    parts = P((*_axes(parts[:1]), *single) or None, *parts[1:])
    return jax.sharding.reshard(w, parts), parts


def _axes(parts: Iterable[str | tuple[str, ...] | None]) -> tuple[str, ...]:
    """The axes that a spec names."""
    return tuple(axis for part in parts for axis in ((part,) if isinstance(part, str) else part or ()))


def varying(w: jax.Array, parts: P) -> jax.Array:
    """Inside `shard_map`: a weight laid out by `parts`, for tokens that differ over all axes: one sum of its gradient."""
    return jax.lax.pcast(w, tuple(axis for axis in spec.AXES if axis not in _axes(parts)), to="varying")


def whole(w: jax.Array, parts: P, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Inside `shard_map`: the weight of which this device was given its part by `parts`, in the dtype of a product.

    Cast first, so that fewer bytes travel. The gradient is scattered to the devices that hold the parts, summed on the
    way, and only then summed over those that hold the same part: all in that dtype, and no device receives what it
    does not keep.
    """
    w = varying(w.astype(dtype), parts)
    for dim, part in enumerate(parts):
        divided = tuple(axis for axis in _axes((part,)) if jax.lax.axis_size(axis) > 1)
        if divided:
            w = jax.lax.all_gather(w, divided, axis=dim, tiled=True)
    return w
