"""From a run's log to the drops of a plan: `argosy plan NAME --drops-from RUN`."""

import json

import numpy as np
import pytest
from sample_runs import row, small_run

from argosy import cli, spec
from argosy.plan import drops
from argosy.track import loads, log, store


def bins(rng, alpha, documents):
    """One update's histogram over the cells of four layers, rows of 32 experts drawn one by one."""
    p = np.minimum(rng.dirichlet(np.full(32, alpha), (4, documents)), 0.25)
    for _ in range(20):
        p = np.minimum(p / p.sum(-1, keepdims=True), 0.25)
    load = rng.binomial(2048 // documents, 4 * p).sum(1)
    return np.histogram(load / load.mean(1, keepdims=True), (0, *drops.EDGES, np.inf))[0] / load.size


@pytest.fixture(scope="module")
def sailed(tmp_path_factory):
    """A home with a run whose loads are of alpha 3 at first and of alpha 1 in its last quarter, at 8 documents a shard."""
    home, rng = tmp_path_factory.mktemp("home"), np.random.default_rng(4)
    store.create(home / "runs" / "sailed", spec.to_json(small_run()), {"argosy": "0.1.0"})
    with store.open_writer(home / "runs" / "sailed", 0) as writer:
        for step in range(1, 401):
            counts = bins(rng, 3.0 if step <= 300 else 1.0, 8)
            more = {f"moe/cell_load_histogram/bin_{i:02d}": n for i, n in enumerate(counts)}
            drop = {"moe/sender_drop_fraction": 0.0, "moe/receiver_drop_fraction": 0.08}
            writer.record(step, row(step, 400) | more | drop | {"data/equal_documents_per_shard": 8.0})
        writer.close("done")
    return home


def test_the_last_quarter_is_read(sailed):
    """Fails when updates before the last quarter, or columns in another order, reach the fit."""
    run, logged = loads.logged(log.read("sailed", sailed))
    assert run == small_run()
    assert logged.histogram.shape == (100, drops.BINS)
    np.testing.assert_allclose(logged.histogram.sum(1), 1)
    assert (logged.receiver == 0.08).all() and (logged.sender == 0).all() and (logged.documents == 8).all()


def test_a_plan_with_a_runs_own_number(sailed, capsys):
    """Fails when alpha is not that of the log, is not used in the table, or its check is not beside it."""
    cli.main(["plan", "pocket", "--drops-from", "sailed", "--home", str(sailed), "--json"])
    found = json.loads(capsys.readouterr().out)["drops"]
    fitted = found["fitted"]
    assert fitted["low"] <= 1.0 <= fitted["high"] and found["alpha"] == fitted["alpha"]
    assert (fitted["run"], fitted["updates"]) == ("sailed", 100)
    assert (fitted["documents"], fitted["logged"]["receiver"]) == (pytest.approx(8), pytest.approx(0.08))
    assert fitted["predicted"]["receiver"] == pytest.approx(found["by_seq_len"][0]["transports"]["local"]["receiver"], rel=0.02)
    cli.main(["plan", "pocket", "--drops-from", "sailed", "--home", str(sailed)])
    out = " ".join(capsys.readouterr().out.split())
    assert f"alpha {fitted['alpha']:.3g} ({fitted['low']:.3g} to {fitted['high']:.3g})" in out and "8.0% by its log" in out


def test_for_other_experts_the_number_is_scaled(sailed, capsys):
    """Fails when alpha of 32 experts, top-4, is taken for 384, top-8: sixfold experts per choice, so CV^2 six times as large."""
    cli.main(["plan", "marin-535b", "--drops-from", "sailed", "--home", str(sailed), "--json"])
    found = json.loads(capsys.readouterr().out)["drops"]
    squared = 6 * 31 / (32 * found["fitted"]["alpha"] + 1)
    assert found["alpha"] == pytest.approx((383 / squared - 1) / 384)
    cli.main(["plan", "marin-535b", "--drops-from", "sailed", "--home", str(sailed)])
    assert f"alpha {found['alpha']:.3g}, scaled by experts / top-k from" in " ".join(capsys.readouterr().out.split())


def test_a_run_without_loads_is_refused(home, capsys):
    """Fails when a run of before, or none at all, gives a traceback or the published number in its place."""
    for name, words in (("pocket", "moe/cell_load_histogram/bin_00"), ("nothing", "no run 'nothing'")):
        with pytest.raises(SystemExit) as stop:
            cli.main(["plan", "pocket", "--drops-from", name, "--home", str(home)])
        assert stop.value.code == 2 and words in capsys.readouterr().err
