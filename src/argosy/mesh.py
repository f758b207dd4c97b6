"""The only place where a device mesh is built: four axes that always exist."""

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
    """The run's mesh over this process group's devices, axes Explicit.

    Raises:
        ValueError: if the run asks for more devices than there are.
    """
    need, have = spec.devices(run), jax.device_count()
    if need > have:
        raise ValueError(
            f"the run's mesh needs {need} devices (replica x data x context x expert = {' x '.join(map(str, sizes(run)))}),"
            f" this machine has {have}; nearest legal: --set mesh.replica={max(1, have)} with the others 1"
        )
    chosen = np.asarray(jax.devices()[:need]).reshape(sizes(run))
    return Mesh(chosen, spec.AXES, axis_types=(AxisType.Explicit,) * 4)


def abstract(run: spec.Run) -> AbstractMesh:
    """The run's mesh without devices, for shape and sharding checks at any scale."""
    return AbstractMesh(sizes(run), spec.AXES, axis_types=(AxisType.Explicit,) * 4)


def gather(w: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A weight in the dtype of a product, whole on every device: cast first, so that fewer bytes travel.

    The gradient comes back summed over the batch in that dtype, then in the weight's own dtype and sharding.
    """
    return jax.sharding.reshard(w.astype(dtype), P())
