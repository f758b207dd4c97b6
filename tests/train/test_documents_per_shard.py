"""Documents per shard, as a step counts them: against lengths counted one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from argosy import mesh as meshes
from argosy import spec
from argosy.batch import Batch
from argosy.train import step as steps


@pytest.mark.parametrize("axes", [{}, {"replica": 2, "data": 2, "expert": 2}], ids=["one", "eight"])
def test_documents_per_shard_equal_a_plain_count(pocket, axes):
    """Fails when padding counts, a cut document is lost, or the squared lengths are not those of the shard."""
    run = spec.override(pocket, [f"mesh.{axis}={n}" for axis, n in axes.items()] + ["routing.exchange=dense"])
    shards, width = int(np.prod(list(axes.values()) or [1])), 24
    lengths = [[24], [5, 19], [8, 8, 8], [1] * 24, [20, 4], [12, 12], [3, 21], [10, 2]]  # the last has 12 of padding
    start, valid = np.zeros((8, width), np.int32), np.zeros((8, width), bool)
    for row, parts in enumerate(lengths):
        ends = np.cumsum(parts)
        for end, n in zip(ends, parts, strict=True):
            start[row, end - n : end] = end - n
        valid[row, : ends[-1]] = True
    m = meshes.make(run)
    with jax.set_mesh(m):
        put = lambda x: jax.device_put(x, NamedSharding(m, meshes.B_S))  # noqa: E731
        batch = Batch(put(start), put(start), put(start), put(valid))
        count, equal = jax.jit(lambda batch: steps.documents_per_shard(run, batch))(batch)
    whole = [np.concatenate(part) for part in (np.array_split(np.array(lengths, object), shards))]
    assert count == pytest.approx(np.mean([len(part) for part in whole]))
    tokens, squares = sum(part.sum() for part in whole), sum((part.astype(float) ** 2).sum() for part in whole)
    assert equal == pytest.approx(tokens**2 / shards / squares, rel=1e-6)
    assert count.dtype == equal.dtype == jnp.float32
