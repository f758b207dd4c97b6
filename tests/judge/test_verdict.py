"""A run against its registered forecast, from a store with a known law: fails when a calm run is called anything else, when an excess, a
value that is no number or one bad set goes unseen, when what differs is compared all the same, or when page and words disagree."""

import errno
import json
import math
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from rich.console import Console
from synthetic import HEADLINE

from argosy import cli, spec, voyage
from argosy.judge import points, register, report, verdict
from argosy.runs import pocket
from argosy.track import log as logs
from argosy.track import store

FEW = re.compile(r"eval_dropless/(stdlib/macro_bpb|topics/bpb)|train/loss|grad/norm/total|moe/drop_fraction|throughput/mfu")


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    """A store with a forecast that is right by construction, and its hero: the mean is the law without noise or luck.

    What is tested is the judging, not the fit. Bands are of 0.5% common to the run and 0.15% of one evaluation; 5% and 3% for what is
    no loss.
    """
    home, hero = tmp_path_factory.mktemp("home"), pocket.run()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NOISE", "OFFSET", "ROUGH"):
            patch.setattr(synthetic, name, 0.0)
        log = logs.read(synthetic.sail(home, "law", hero))
    rows: list[dict] = []
    covariance = {}
    for metric in (name for name in log.metrics if FEW.fullmatch(name)):
        common, noise = (0.005, 0.0015) if metric.startswith(("eval", "train")) else (0.05, 0.03)
        own = points.of_run(log, [metric])
        places = range(len(rows), len(rows) + len(own))
        rows += [banded(row, math.hypot(common, noise)) for row in own]
        matrix = [[common**2] * len(own)] * len(own)
        covariance[metric] = {"rows": list(places), "matrix": matrix, "noise": noise, "zero": 0.0}
    body = {"created": "2026-01-01T00:00:00+00:00", "created_s": time.time(), "late": None, "reason": "", "bridge": None}
    body |= {"hero": json.loads(json.dumps(spec.to_json(hero))), "identity": register.identity(hero, "5f1d77c2"), "ladder": []}
    body |= {"data": {"points": [], "target": []}, "method": "joint", "seed": 0}
    body["forecast"] = {"rows": rows, "fit": {"method": "joint", "alarms": []}, "covariance": covariance}
    register.write(home, "hero", body, None)
    return home, hero


def banded(row: dict, spread: float) -> dict:
    found = {key: row[key] for key in ("run", "metric", "step", "tokens")} | {"mean": row["value"]}
    edges = {"lo50": -0.6745, "hi50": 0.6745, "lo90": -1.6449, "hi90": 1.6449}
    return found | {name: row["value"] * math.exp(z * spread) for name, z in edges.items()}


@pytest.fixture
def home(registered, tmp_path) -> Path:
    """The forecasts again, so that a test may write to them."""
    shutil.copytree(registered[0] / "forecasts", tmp_path / "forecasts")
    return tmp_path


@pytest.fixture
def hero(registered) -> spec.Run:
    return registered[1]


def words(home: Path) -> str:
    out = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with out.file:
        report.show_verdict(verdict.judge(home, "hero"), out)
        return out.export_text()


def page(home: Path) -> dict:
    return json.loads((home / "forecasts/hero/page.json").read_bytes())


def test_before_the_first_comparable_evaluation_there_is_no_verdict(home, hero):
    found = verdict.judge(home, "hero")
    assert found["verdict"] is None and found["metrics"] == {}
    assert "the first one comes after update 52, 5.1% of the run" in found["why"]
    assert page(home)["verdict"]["verdict"] is None
    synthetic.sail(home, "hero", hero, 0.04)
    assert verdict.judge(home, "hero")["verdict"] is None
    synthetic.sail(home, "hero", hero, 0.06, begin=0.04)
    assert verdict.judge(home, "hero")["verdict"] == "on track"
    assert "no outside witness is recorded" in words(home)


def test_a_calm_run_is_on_track_and_its_numbers_are_those_of_file_and_log(home, hero, capsys):
    synthetic.sail(home, "hero", hero, 0.5)
    found = verdict.judge(home, "hero")
    assert found["verdict"] == "on track" and found["since_step"] is None
    assert {m: e["verdict"] for m, e in found["metrics"].items() if e["verdict"] != "on track"} == {}
    body = register.newest(home, "hero")
    assert body is not None
    assert set(found["metrics"]) == {row["metric"] for row in body["forecast"]["rows"]}
    log, one = logs.read(home / "runs/hero"), found["metrics"][HEADLINE]
    step, actual = log.last(HEADLINE)
    row = next(r for r in body["forecast"]["rows"] if r["metric"] == HEADLINE and r["step"] == step)
    assert (one["step"], one["actual"]) == (step, actual)
    for key in ("mean", "lo90", "hi90"):
        assert math.isclose(one[key], row[key], rel_tol=1e-9)
    assert one["residual"][-1] == [step, pytest.approx(actual / row["mean"] - 1, abs=1e-5)]
    last = [r for r in body["forecast"]["rows"] if r["metric"] == HEADLINE][-1]
    then, now = found["end"]["registered"], found["end"]["updated"]
    assert (then["step"], then["mean"], then["lo90"]) == (last["step"], last["mean"], last["lo90"])
    assert now["hi90"] - now["lo90"] < then["hi90"] - then["lo90"]  # half a run says something of the rest
    truth = synthetic.evaluation(hero, "hero", spec.steps(hero), 0)[HEADLINE]  # with this run's luck
    assert now["lo90"] < truth < now["hi90"]
    drawn = page(home)
    assert drawn["verdict"] == json.loads(json.dumps(found)) and drawn["updated"][HEADLINE]["step"][0] > step
    assert drawn["bands"][HEADLINE]["mean"] == [r["mean"] for r in body["forecast"]["rows"] if r["metric"] == HEADLINE]
    cli.main(["forecast", "judge", "hero", "--home", str(home), "--json"])
    assert json.loads(capsys.readouterr().out)["verdict"] == "on track"


def test_an_update_metric_is_compared_as_the_mean_since_the_evaluation_before(home, hero):
    synthetic.sail(home, "hero", hero, 0.3)
    one = verdict.judge(home, "hero")["metrics"]["train/loss"]
    steps, values = logs.read(home / "runs/hero").series("train/loss")
    ends = points.evaluation_steps(hero)
    before = ends[ends.index(one["step"]) - 1]
    assert math.isclose(one["actual"], values[(steps > before) & (steps <= one["step"])].mean())


def test_an_excess_that_stays_is_seen_and_the_command_says_so(home, hero, capsys):
    synthetic.sail(home, "hero", hero, 0.7, excess=(0.4, 0.25))
    found = verdict.judge(home, "hero")
    ends = [s for s in points.evaluation_steps(hero) if s >= 0.4 * spec.steps(hero)]
    assert (found["verdict"], found["since_step"]) == ("off", ends[0])
    assert found["metrics"][HEADLINE]["widths_out"] > 1 and found["metrics"][HEADLINE]["shift"] == pytest.approx(
        math.expm1(0.25), rel=0.1
    )
    with pytest.raises(SystemExit) as left:
        cli.main(["forecast", "judge", "hero", "--home", str(home)])
    said = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 3
    assert f"since update {ends[0]:,}" in said and "by its own curve the run ends at" in said


def test_a_disk_that_is_full_leaves_the_verdict(home, hero, capsys, monkeypatch):
    synthetic.sail(home, "hero", hero, 0.8, excess=(0.4, 0.25))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(verdict.layout, "write_json", full)
    with pytest.raises(SystemExit) as end:
        cli.main(["forecast", "judge", "hero", "--home", str(home), "--json"])
    told = capsys.readouterr()
    assert end.value.code == 3 and json.loads(told.out)["verdict"] == "off" and "No space left" in told.err


def test_a_run_that_is_better_is_ahead(home, hero):
    synthetic.sail(home, "hero", hero, 0.7, excess=(0.4, -0.25))
    assert verdict.judge(home, "hero")["verdict"] == "ahead"


def test_a_loss_that_is_no_number_is_off(home, hero):
    bad = lambda _, done, row: {k: math.nan if k == "train/loss" and done > 0.25 else v for k, v in row.items()}  # noqa: E731
    synthetic.sail(home, "hero", hero, 0.5, fault=bad)
    found = verdict.judge(home, "hero")
    assert found["verdict"] == "off" and found["why"].startswith("train/loss is not a finite number since update 308")
    assert found["metrics"]["train/loss"]["actual"] is None and found["metrics"][HEADLINE]["verdict"] == "on track"


@pytest.mark.parametrize("value", [0.0, -1.3])
def test_a_loss_that_is_not_positive_is_off(home, hero, value):
    bad = lambda _, done, row: {k: value if k == HEADLINE and done > 0.25 else v for k, v in row.items()}  # noqa: E731
    synthetic.sail(home, "hero", hero, 0.5, fault=bad)
    found = verdict.judge(home, "hero")
    assert found["verdict"] == "off" and found["why"].startswith(f"{HEADLINE} is not a positive number since update 308")


def test_one_bad_set_makes_a_run_behind_and_is_named(home, hero):
    bad = lambda _, done, row: {k: v * (1.6 if "topics" in k and done > 0.3 else 1) for k, v in row.items()}  # noqa: E731
    synthetic.sail(home, "hero", hero, 0.6, fault=bad)
    found = verdict.judge(home, "hero")
    assert (
        found["metrics"][HEADLINE]["verdict"] == "on track" and found["metrics"]["eval_dropless/topics/bpb"]["verdict"] == "off"
    )
    assert found["verdict"] == "behind" and found["why"].startswith("eval_dropless/topics/bpb is off since update")
    assert words(home).index("topics/bpb") < words(home).rindex("macro_bpb")  # worst first


def test_a_metric_without_a_good_side_is_off_by_its_band_alone(home, hero):
    bad = lambda _, done, row: {k: v * (30 if k.startswith("grad") and done > 0.3 else 1) for k, v in row.items()}  # noqa: E731
    synthetic.sail(home, "hero", hero, 0.6, fault=bad)
    found = verdict.judge(home, "hero")
    assert found["metrics"]["grad/norm/total"]["verdict"] == "off" and found["verdict"] == "on track"


def test_another_run_is_not_comparable_and_what_differs_is_named(home, hero):
    other = replace(hero, optim=replace(hero.optim, lr_scale=1.0))
    synthetic.sail(home, "hero", other, 0.3)
    found = verdict.judge(home, "hero")
    assert (found["verdict"], found["since_step"], len(found["differences"])) == ("not comparable", 0, 1)
    assert re.match(r"schedule is .* x1, .*, registered .* x2, ", found["differences"][0])
    assert found["end"]["updated"] is None and page(home)["updated"] == {}
    assert found["metrics"][HEADLINE]["verdict"] == "not comparable"


def test_another_corpus_is_not_comparable(home, hero):
    synthetic.sail(home, "hero", hero, 0.3, corpus="0000beef")
    found = verdict.judge(home, "hero")
    assert found["verdict"] == "not comparable" and found["differences"] == ["corpus checksum is 0000beef, registered 5f1d77c2"]


def test_a_change_ends_comparison_until_it_is_bridged(home, hero):
    synthetic.sail(home, "hero", hero, 0.3)
    with store.open_writer(home / "runs/hero", 307) as writer:
        writer.lineage("change", 307, what="gates decay")
    synthetic.sail(home, "hero", hero, 0.5, begin=0.3)
    found = verdict.judge(home, "hero")
    assert (found["verdict"], found["since_step"]) == ("not comparable", 307)
    assert "changed at update 307: gates decay; argosy forecast bridge hero --event change@307" in found["why"]
    before = register.newest(home, "hero")
    assert before is not None
    noted = store.read(home / "runs/hero").lineage[-1]["time"]
    step = {
        "event": {"kind": "change", "step": 307, "of": "lineage", "time": noted},
        "before": None,
        "updates": 512,
        "first": before,
    }
    made = {"format", "name", "number", "supersedes", "code", "packages", "sha256"}
    register.write(home, "hero", {k: v for k, v in before.items() if k not in made} | {"bridge": step}, before)
    found = verdict.judge(home, "hero")
    assert found["verdict"] == "on track" and found["forecast"]["bridged"] and found["forecast"]["number"] == 2
    said = f"after 512 updates, over a change; it shifts the forecast of {before['created'][:10]}, made before the run's first update"
    assert found["forecast"]["when"] == said and said in " ".join(words(home).split())
    with store.open_writer(home / "runs/hero", 512) as writer:
        writer.lineage("change", 307, what="decay too")
        writer.lineage("change", 512, what="another")
    told = [d[:32] for d in verdict.judge(home, "hero")["differences"]]
    assert told == ["changed at update 307: decay too", "changed at update 512: another; "]


def test_a_superseded_forecast_is_not_used_and_a_late_one_is_marked(home, hero):
    synthetic.sail(home, "hero", hero, 0.3)
    before = register.newest(home, "hero")
    assert before is not None
    lower = [
        row | {key: row[key] / 2 for key in ("mean", "lo50", "hi50", "lo90", "hi90")} for row in before["forecast"]["rows"]
    ]
    made = {"format", "name", "number", "supersedes", "code", "packages", "sha256"}
    body = {k: v for k, v in before.items() if k not in made}
    body |= {"forecast": before["forecast"] | {"rows": lower}, "late": {"updates": 307}, "reason": "test"}
    register.write(home, "hero", body, before)
    found = verdict.judge(home, "hero")
    assert found["verdict"] == "off" and found["forecast"]["number"] == 2
    assert "registered late, after 307 updates" in " ".join(words(home).split())


def test_without_a_registered_forecast_the_error_names_the_command(tmp_path):
    with pytest.raises(ValueError, match="argosy forecast register hero"):
        verdict.judge(tmp_path, "hero")
    assert verdict.write_page(tmp_path, "hero") is None


def test_every_metric_that_is_forecast_has_a_side():
    """From what pocket logs, written out: a new metric that falls through to no side shows here."""
    run = pocket.run()
    logged = [*synthetic.update(run, "x", 5, 0), *synthetic.evaluation(run, "x", 52, 0)]
    sides = {name: verdict.better(name) for name in points.forecastable(logged)}
    for name, side in sides.items():
        losses = (
            name.startswith("eval_dropless") or name in ("train/loss", "train/cross_entropy_loss") or "drop_fraction" in name
        )
        assert side == (1 if losses else -1 if name in ("throughput/mfu", "throughput/tokens_per_second") else 0), name


@pytest.mark.parametrize(("stop_on", "stops"), [("off", True), ("nothing", False)])
def test_training_stops_at_off_where_it_was_asked_to(home, hero, stop_on, stops):
    folder = synthetic.sail(home, "hero", hero, 0.7, excess=(0.4, 0.25))
    with store.open_writer(folder, 717) as writer:
        judge = voyage.judging(spec.Host(home=home, name="hero"), writer, stop_on)
        assert [judge(717), judge(718)] == [stops, stops]
    assert [e["fields"]["verdict"] for e in logs.read(folder).events if e["kind"] == "verdict"] == ["off"]


def test_nothing_that_goes_wrong_in_judging_ends_a_training(home, hero, monkeypatch, capsys):
    folder = synthetic.sail(home, "hero", hero, 0.1)
    monkeypatch.setattr(verdict, "judge", lambda *_: {}["rows"])
    with store.open_writer(folder, 102) as writer:
        assert voyage.judging(spec.Host(home=home, name="hero"), writer, "off")(103) is False
    assert [e["fields"]["verdict"] for e in logs.read(folder).events if e["kind"] == "verdict"] == ["not judged"]
    assert "not judged: KeyError('rows')" in capsys.readouterr().err
