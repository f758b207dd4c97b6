"""A home with a finished run, rolled back once, and a planned one."""

import pytest
from sample_runs import SOURCES, evaluation, sail, small_run

from argosy import spec
from argosy.track import store


@pytest.fixture
def home(tmp_path):
    run = small_run()
    steps = spec.steps(run)
    for name in ("planned", "pocket"):
        store.create(tmp_path / "runs" / name, spec.to_json(run), {"argosy": "0.1.0"}, environment={"python": "3.11.0"})
    folder = tmp_path / "runs" / "pocket"
    with store.open_writer(folder, 0) as writer:
        writer.lineage("corpus", 0, name="stdlib", checksum="5f1d77c2", ledger={"library": {"tokens": 2_210_034}})
        writer.event("baseline", 0, **SOURCES)
        writer.record(0, evaluation(0))
        sail(writer, 1, 420, steps)
        writer.event("loss_spike", 410, loss=9.0)
        writer.close("stopped")
    with store.open_writer(folder, 360) as writer:
        sail(writer, 361, steps, steps)
        writer.record(steps, evaluation(steps))
        writer.close("done")
    return tmp_path
