"""From run logs to tables."""

import math
from dataclasses import replace

import numpy as np
import pytest
import synthetic

from argosy import spec
from argosy.forecast import points as P
from argosy.judge import ladders, points
from argosy.plan import flops
from argosy.plan.ladder import Rung
from argosy.runs import marin_535b, pocket
from argosy.track import log as logs
from argosy.track import store
from argosy.train import loop, schedule


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    found = tmp_path_factory.mktemp("store")
    synthetic.voyage(found, hero_until=0.3)
    return found


def test_evaluations_are_where_the_loop_puts_them():
    for run in (
        pocket.run(),
        pocket.rung(32),
        *(replace(pocket.run(), evals=replace(pocket.run().evals, every_frac=f)) for f in (0.07, 1 / 11, 1e-9)),
    ):
        due = [done for done in range(1, spec.steps(run) + 1) if loop.due_evaluation(run, done)]
        assert points.evaluation_steps(run) == due
    big = marin_535b.run()
    assert points.evaluation_steps(big) == [*range(3000, 390_001, 3000), 390_251]  # the reference's: every 3,000 updates
    assert [done for done in range(2990, 6010) if loop.due_evaluation(big, done)] == [3000, 6000]


def test_the_rate_is_the_one_that_an_update_logs():
    for run in (pocket.run(), pocket.rung(48)):
        for step in (1, 2, 7, 11, 200, spec.steps(run)):
            assert points.rate(run, step) == pytest.approx(float(schedule.learning_rates(run, step - 1).muonh), rel=1e-12)


def test_a_row_holds_what_the_run_had_done(home):
    run = pocket.rung(64)
    log = logs.read(home / "runs" / "hero-d64")
    rows = points.of_run(log, ["eval_dropless/library/loss"], "size")
    assert [r["step"] for r in rows] == points.evaluation_steps(run)
    last = rows[-1]
    assert last["tokens"] == spec.steps(run) * run.data.batch_seqs * run.data.seq_len
    assert last["flops"] == spec.steps(run) * flops.train_step(run, readout=False)
    assert (last["active_params"], last["total_params"]) == (flops.active(run), sum(flops.params(run).values()))
    assert (last["purpose"], last["steps_total"]) == ("size", 524)
    assert last["value"] == log.last("eval_dropless/library/loss")[1]


def test_what_updates_log_is_the_mean_since_the_evaluation_before(home):
    log = logs.read(home / "runs" / "hero-d64")
    steps, values = log.series("grad/norm/total")
    rows = points.of_run(log, ["grad/norm/total"])
    ends = [0, *points.evaluation_steps(pocket.rung(64))]
    for row, after, to in zip(rows, ends, ends[1:], strict=False):
        assert row["value"] == pytest.approx(values[(steps > after) & (steps <= to)].mean(), rel=1e-12)
    assert points.windows(np.array([1, 2, 9]), np.array([1.0, 3.0, 8.0]), np.array([5, 7, 9])) == {5: 2.0, 9: 8.0}
    assert points.windows(np.array([1, 2, 9]), np.array([1.0, 3.0, 8.0]), np.array([5, 7, 9]), 4) == {5: 3.0, 9: 8.0}


def test_a_hero_that_is_evaluated_more_often_is_compared_over_equal_shares(tmp_path):
    """Fails when the ladder's means reach further back than the hero's: what falls is then forecast too high."""
    hero = pocket.run()
    hero = replace(hero, evals=replace(hero.evals, every_frac=0.01))
    rungs = [Rung("d64", pocket.rung(64), "size")]
    ladders.save(tmp_path, "hero", hero, rungs)
    synthetic.sail(tmp_path, "hero-d64", rungs[0].run)
    row = next(r for r in points.gather(tmp_path, "hero").rows if r["metric"] == "train/loss" and r["step"] == 53)
    steps, values = logs.read(tmp_path / "runs/hero-d64").series("train/loss")
    assert row["value"] == pytest.approx(values[(steps > 53 - 5.24) & (steps <= 53)].mean(), rel=1e-12)


def test_each_metric_that_is_forecast_has_its_kind(home):
    gathered = points.gather(home, "hero")
    assert not gathered.alarms
    for name in gathered.metrics:
        law = name.startswith("eval_") or name in ("train/loss", "train/cross_entropy_loss")
        assert P.kind(name) == ("loss" if law else "other"), name
    assert P.kind("train/logit_z") == "other"
    assert {"train/router/layer_3/load_max_over_mean", "grad/norm/total", "throughput/mfu"} <= set(gathered.metrics)
    assert not {"optim/learning_rate", "train/router/bias_min", "moe/sender_drop_fraction"} & set(gathered.metrics)
    assert all(points.forecastable([name]) for name in gathered.metrics)


def test_the_targets_are_the_heros_evaluations(home):
    hero = pocket.run()
    table = P.of_rows(points.asked(hero, "hero", ["grad/norm/total", "train/loss"]), "TARGET")
    assert len(table) == 40 and set(table.metric) == {"grad/norm/total", "train/loss"}
    assert table.step[:20].tolist() == points.evaluation_steps(hero)
    points_, run = P.of_rows(points.fitted(points.gather(home, "hero"), "hero", "joint")[0]), logs.read(home / "runs" / "hero")
    assert P.check(points_, table) is not None
    assert {r["step"] for r in points.of_run(run)} == {s for s in points.evaluation_steps(hero) if s <= 0.3 * 1024}


def test_a_rung_with_other_values_is_refused(home, tmp_path):
    synthetic.voyage(tmp_path, rungs=synthetic.rungs_of(pocket.run())[:3])
    body = ladders.load(tmp_path, "hero")
    other = replace(pocket.rung(48), seed=5)
    body["rungs"][1]["run"] = spec.to_json(other)
    (tmp_path / "ladders" / "hero.json").write_text(__import__("json").dumps(body))
    with pytest.raises(ValueError, match=r"hero-d48.*seed 0 \(the ladder says 5\)"):
        points.gather(tmp_path, "hero")


def codes(home, name="hero"):
    return {a["code"]: a["message"] for a in points.gather(home, name).alarms}


def test_what_is_wrong_with_a_ladder_is_named(tmp_path):
    base = synthetic.rungs_of(pocket.run())
    long = replace(base[2].run, data=replace(base[2].run.data, seq_len=128))
    dropless = replace(base[3].run, routing=replace(base[3].run.routing, capacity="dropless"))
    rungs = (base[0], base[1], Rung("d64", long, "size"), Rung("d96", dropless, "size"), base[5])

    def fault(name, done, row):
        if name == "hero-d48" and done > 0.9:
            row = {k: math.nan if k.startswith("eval_") else v for k, v in row.items()}
        if name == "hero-d32":
            row.pop("grad/norm/shared", None)
        return row

    synthetic.voyage(tmp_path, rungs=rungs[:4], fault=fault)
    ladders.path_of(tmp_path, "hero").unlink()
    ladders.save(tmp_path, "hero", pocket.run(), rungs)
    gathered = points.gather(tmp_path, "hero")
    told = codes(tmp_path)
    assert told["rung_missing"].startswith("hero-d64-seed1 has not begun")
    assert "hero-d48" in told["not_finite"] and "step 380" in told["not_finite"]
    assert "grad/norm/shared" in told["not_in_every_rung"]
    assert sum(a["code"] == "rungs_differ" for a in gathered.alarms) == 2
    assert any("data.seq_len is 256 in the hero and 128 in hero-d64" in a["message"] for a in gathered.alarms)
    assert any(
        "routing.capacity is bounded receiver 1.15 in the hero and dropless in hero-d96" in a["message"]
        for a in gathered.alarms
    )
    assert all(math.isfinite(row["value"]) for row in gathered.rows)


def test_rungs_of_another_corpus_and_another_machine(tmp_path):
    synthetic.voyage(tmp_path, rungs=synthetic.rungs_of(pocket.run())[:2])
    log = tmp_path / "runs" / "hero-d48"
    text = (log / "run.json").read_text()
    (log / "run.json").write_text(text.replace('"processors": 2', '"processors": 96'))
    lineage = log / "lineage.jsonl"
    lineage.write_text(lineage.read_text().replace("5f1d77c2", "00000000"))
    gathered = points.gather(tmp_path, "hero")
    assert not any(m.startswith("throughput/") for m in gathered.metrics)
    assert "checksums" in codes(tmp_path)["rungs_differ"]


def test_a_metric_that_is_never_a_number_is_left_out_and_the_others_stay(tmp_path):
    broken = lambda _name, _done, row: {k: math.inf if k == "grad/norm/routed" else v for k, v in row.items()}  # noqa: E731
    synthetic.voyage(tmp_path, fault=broken)
    found = points.gather(tmp_path, "hero")
    assert "grad/norm/routed" not in found.metrics and "grad/norm/shared" in found.metrics
    assert {row["metric"] for row in found.rows} == set(found.metrics)
    assert any(a["code"] == "not_finite" and "grad/norm/routed" in a["message"] for a in found.alarms)


def test_layers_are_compared_where_depths_agree(tmp_path):
    base = synthetic.rungs_of(pocket.run())
    deep = replace(base[1].run, model=replace(base[1].run.model, layers=8))
    synthetic.voyage(tmp_path, rungs=(base[0], Rung("d48", deep, "size")))
    gathered = points.gather(tmp_path, "hero")
    assert not any("layer_" in m for m in gathered.metrics)
    assert not any(a["code"] == "not_in_every_rung" for a in gathered.alarms)


def test_a_rolled_back_rung_counts_its_latest_history(tmp_path):
    run = pocket.rung(32)
    folder = synthetic.sail(tmp_path, "hero-d32", run, until=0.5)
    synthetic.sail(tmp_path, "hero-d32", run, begin=0.4)
    with store.open_writer(folder, spec.steps(run)) as writer:
        writer.close("done")
    rows = points.of_run(logs.read(folder), ["eval_dropless/library/loss"])
    assert [r["step"] for r in rows] == points.evaluation_steps(run)


def test_rates_are_told_where_schedules_differ(tmp_path):
    base = synthetic.rungs_of(pocket.run())
    slow = replace(base[1].run, optim=replace(base[1].run.optim, final_frac=0.5))
    synthetic.voyage(tmp_path, rungs=(base[0], Rung("d48", slow, "size")))
    gathered = points.gather(tmp_path, "hero")
    assert not gathered.one_schedule and "optim.final_frac" in codes(tmp_path)["rungs_differ"]
    rows, asked = points.fitted(gathered, "hero", "joint")
    assert all(row["lr"] is not None for row in rows + asked)
    synthetic.voyage(tmp_path, "other", rungs=base[:2])
    gathered = points.gather(tmp_path, "other")
    assert all(row["lr"] is None for part in points.fitted(gathered, "other", "joint") for row in part)
    assert all(row["lr"] is not None for part in points.fitted(gathered, "other", "schedule") for row in part)
