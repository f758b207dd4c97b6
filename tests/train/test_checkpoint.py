"""Checkpoints that lost a part: told in plain words, whichever file it was."""

import jax
import jax.numpy as jnp
import pytest

from argosy.train import checkpoint

STATE = {"weights": jnp.arange(1000.0), "step": jnp.int32(4)}
LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE)


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("pattern", "harm", "says"),
    [
        ("_METADATA", half, "a file of it is cut short or overwritten"),
        ("manifest.ocdbt", half, "a file of it is cut short or overwritten"),
        ("d/*", half, "cut short or overwritten"),
        ("manifest.ocdbt", lambda path: path.unlink(), "a file of it is missing"),
    ],
)
def test_what_happened_to_a_file_is_said_in_plain_words(tmp_path, pattern, harm, says):
    """Fails when who has lost a part of a checkpoint is told of JSON or of a database's driver."""
    with checkpoint.opened(tmp_path, keep=1) as saved:
        checkpoint.save(saved, STATE, 4)
    for path in (tmp_path / "checkpoints" / "step_4" / "default").glob(pattern):
        harm(path)
    with checkpoint.opened(tmp_path, keep=None) as saved, pytest.raises(ValueError, match="none of the checkpoints") as refused:
        checkpoint.restore(saved, LIKE, set_aside=False)
    assert says in str(refused.value)
    assert "JSON" not in str(refused.value) and "driver" not in str(refused.value)
