"""Text from a checkpoint. How it is drawn is tested with whole runs (test_voyage, launch/test_processes)."""

from argosy import spec
from argosy.export import sample


def test_a_run_over_ranks_is_sampled_on_one_device(pocket):
    """Fails when a bound of the exchange, at most 256 experts of a rank in pooled waves, meets a device that holds all."""
    ranks = ["moe.experts=512", "mesh.replica=2", "mesh.expert=4", "routing.exchange=pooled_wave", "routing.waves=2"]
    run = spec.override(pocket, ranks)
    one = sample.on_one_device(run)
    assert spec.devices(one) == 1
    assert set(spec.difference(run, one)) == {"mesh.replica", "mesh.expert", "routing.exchange"}
