"""Summaries, the index, the table of metrics, terminal reports and provenance."""

import doctest
import json
import math
import re
import time

import pytest
import sample_forecasts
from rich.console import Console
from sample_runs import SOURCES, evaluation, row, sail, small_run

from argosy import spec
from argosy.track import columns, index, layout, log, metrics, provenance, report, server, store


def printed(body, width=120):
    out = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    out.print(body)
    out.file.close()
    return out.export_text()


def test_a_summary_says_what_a_run_has_come_to(home):
    """Fails when state, progress or headline figures are not those of the log."""
    body = index.summary(log.read("pocket", home))
    expected = {"state": "done", "outcome": "done", "attempts": 2, "step": 1024, "steps": 1024, "progress": 1.0, "eta_s": 0.0}
    assert body | expected == body
    assert body["tokens"] == 1024 * 8 * 256 and body["tokens_per_second"] == 6000 + 1024 % 7
    assert body["loss"] == row(1024, 1024)["train/cross_entropy_loss"]
    assert body["macro_bpb"] == evaluation(1024)["eval_dropless/stdlib/macro_bpb"]
    body = index.summary(log.read("planned", home))
    assert body["state"] == "planned" and body["step"] is body["loss"] is body["progress"] is None and body["steps"] == 1024


def test_states_follow_the_writer(home):
    """Fails when a live run is called stopped, a dead one running, or time to the end is not at the recent pace."""
    folder = home / "runs" / "planned"
    writer = store.open_writer(folder, 0)
    assert index.summary(log.read(folder))["state"] == "running"
    for step in range(1, 11):
        writer.record(step, {"train/loss": 1.0})
        time.sleep(0.02)
    body = index.summary(log.read(folder))
    times = log.read(folder).series("time")[1]
    assert body["eta_s"] == pytest.approx((1024 - 10) * (times[-1] - times[0]) / 9)
    assert body["tokens"] == 10 * 2048
    writer.close()
    assert index.summary(log.read(folder))["state"] == "stopped"
    with store.open_writer(folder, 10) as writer:
        writer.record(1024, {"train/loss": 1.0})
        writer.close("failed")
    body = index.summary(log.read(folder))
    assert body["state"] == body["outcome"] == "failed" and body["progress"] == 1.0
    assert "failed" in printed(report.runs_table(report.runs(home)))
    page = {name: (server.PAGE / name).read_text() for name in ("page.js", "page.css")}
    assert 'failed: "Failed"' in page["page.js"] and ".state.failed" in page["page.css"]
    for outcome, state in (("", "stopped"), ("done", "done")):
        with store.open_writer(folder, 1024) as writer:
            writer.close(outcome)
        assert index.summary(log.read(folder))["state"] == state


def line_of(**body):
    return json.dumps(body) + "\n"


def test_rungs_stand_under_their_hero(home):
    """Fails when a ladder buries its hero, or hides a run."""
    sample_forecasts.ladder(home, "pocket", small_run(), [("d32", "size"), ("d64", "size")])
    for rung in ("d32", "d64"):
        store.create(home / "runs" / f"pocket-{rung}", spec.to_json(small_run()), {})
    found = report.runs(home)
    names = [body["name"] for body in found]
    at = names.index("pocket")
    assert set(names[at + 1 : at + 3]) == {"pocket-d32", "pocket-d64"} and len(names) == 4
    assert [body["hero"] for body in found if body["name"] == "planned"] == [None]
    assert "\n  pocket-d32" in printed(report.runs_table(found))


def test_one_bad_folder_does_not_hide_the_others(home):
    """Fails when a run.json that is not ours, or a record without its keys, ends in a traceback for every run."""
    folder = home / "runs" / "planned"
    good = (folder / "run.json").read_text()
    for bad in ('{"hello": 1}', "[]", '{"run": [], "created": 1}', '{"run": {}}', '{"run": {}, "created": NaN}'):
        (folder / "run.json").write_text(bad)
        with pytest.raises(ValueError, match=r"planned/run\.json is not what was written"):
            log.read(folder)
        with pytest.raises(ValueError, match=r"planned/run\.json is not what was written"):
            store.create(folder, {}, {})
        assert {b["name"]: b["state"] for b in index.summaries(home)} == {"pocket": "done", "planned": "damaged"}
        assert "damaged" in printed(report.runs_table(report.runs(home)))
    (folder / "run.json").write_text(good)
    whole = {"kind": "note", "step": 1, "attempt": 1, "time": 1.0, "fields": {}}
    bad = [line_of(**{k: v for k, v in whole.items() if k != gone}) for gone in whole]
    bad += [
        line_of(kind="baseline"),
        line_of(kind="attempt"),
        line_of(**whole | {"step": "x"}),
        line_of(**whole | {"fields": 3}),
    ]
    for name in ("events", "lineage"):
        (folder / f"{name}.jsonl").write_text("".join(bad) + line_of(**whole))
    (folder / "metrics" / "tail-000000.jsonl").write_text(
        '{"attempt": "x"}\n{"metrics": {}}\n{"step": 1, "time": 1, "metrics": 3}\n'
    )
    (folder / "writer.lock").write_text("[]")
    found = log.read(folder)
    assert [r["kind"] for r in found.events] == [r["kind"] for r in found.lineage] == ["note"] and found.metrics == []
    assert [r["kind"] for r in log.follow(folder, "0:0:0:0").events] == ["note"]
    assert {b["name"]: b["state"] for b in index.summaries(home)} == {"pocket": "done", "planned": "planned"}
    printed(report.show_table(report.show("planned", home=home)))
    printed(report.diff_table(report.diff("planned", "pocket", home)))
    store.create(folder, {}, {})  # no attempt was made, so the run may still change
    with store.open_writer(folder, 0) as writer:
        assert writer.attempt == 2  # the note's own attempt counts


def test_the_index_is_a_cache_that_can_be_lost(home, monkeypatch):
    """Fails when runs are read again although nothing changed, a change is missed, or a broken index stops the list."""
    read, count = index.read, []
    monkeypatch.setattr(index, "read", lambda *args: count.append(args) or read(*args))
    first = index.summaries(home)
    assert [body["name"] for body in first] == ["pocket", "planned"] and len(count) == 2
    assert [b | {"age_s": 0} for b in index.summaries(home)] == [b | {"age_s": 0} for b in first] and len(count) == 2
    with store.open_writer(home / "runs" / "planned", 0) as writer:
        writer.record(5, {"train/loss": 2.5})
        assert index.summaries(home)[0]["loss"] == 2.5
        writer.record(6, {"train/loss": 2.25})
        assert index.summaries(home)[0]["loss"] == 2.25
    assert index.summaries(home)[0]["state"] == "stopped"
    (home / "index.sqlite").write_bytes(b"no database at all" * 100)
    assert {body["name"] for body in index.summaries(home)} == {"pocket", "planned"}
    (home / "runs" / "planned" / "run.json").write_text('{"run": {"recipe')
    body = next(b for b in index.summaries(home) if b["name"] == "planned")
    assert body["state"] == "damaged" and "run.json is not what was written" in body["error"] and body.keys() >= first[0].keys()
    assert "damaged" in printed(report.runs_table(report.runs(home)))
    (home / "index.sqlite").unlink()
    assert len(index.summaries(home)) == 2
    assert index.summaries(home / "nowhere") == []


def test_every_metric_of_the_run_is_in_the_table():
    """Fails when a recorded metric is unknown, matches the wrong line, or names a panel that is not there."""
    for name in (*row(1, 10), *evaluation(1), "time", "train/router/layer_12/routing_entropy", "memory/peak_gib"):
        known = metrics.describe(name)
        assert known.meaning != "not in the table of metrics" and "<" not in known.label, name
    keys = {panel.key for panel in metrics.PANELS}
    assert {m.panel for m in metrics.METRICS} - {""} == keys
    assert metrics.describe("eval_dropless/paloma/c4_en/bpb").label == "paloma/c4_en"
    assert metrics.describe("eval_dropless/paloma/macro_bpb").label == "mean of sources"
    assert metrics.describe("grad/norm/total").label == "total"
    assert metrics.describe("grad/norm/{odd}<x>").label == "{odd}<x>"
    assert (
        metrics.macro_bpb(["eval_dropless/stdlib/macro_bpb", "eval_dropless/library/bpb"]) == "eval_dropless/stdlib/macro_bpb"
    )
    assert metrics.macro_bpb(["train/loss"]) is None


def test_the_training_steps_metrics_are_in_the_table():
    """Fails when the loop records a name that the page does not know."""
    source = (layout.Path(report.__file__).parents[1] / "train").glob("*.py")
    names = {
        name for path in source for name in re.findall(r'"((?:train|throughput|moe|optim|memory)/[a-z_/]+)"', path.read_text())
    }
    assert len(names) > 20
    unknown = [name for name in sorted(names) if metrics.describe(name).meaning == "not in the table of metrics"]
    assert unknown == []


def test_reports_for_the_terminal(home):
    """Fails when argosy runs, show or diff lose a figure, or cannot be printed as JSON."""
    text = printed(report.runs_table(report.runs(home)))
    assert re.search(r"pocket +done +1,024/1,024 +2.1M +3.590 +1.863 +6,002", text)
    assert "planned" in text
    assert "argosy voyage pocket" in printed(report.runs_table([]))

    body = report.show("pocket", home=home)
    assert body["sources"] == {
        n: {"bits_per_byte": evaluation(1024)[f"eval_dropless/{n}/bpb"], "gzip": g} for n, g in SOURCES.items()
    }
    text = printed(report.show_table(body))
    assert "100%: update 1,024 of 1,024" in text and "1.863 bits/byte" in text and re.search(r"prose +2.068 +2.350", text)

    body = report.show("pocket", "train/loss", home)
    assert body["unit"] == "nats/token" and len(body["points"]) <= 200 and body["points"][-1]["step"] == 1024
    text = printed(report.show_table(body))
    assert "what is minimised" in text and "3.6" in text and "⠀" in text

    other = spec.override(small_run(), ["data.seq_len=128", "data.batch_seqs=16"])
    store.create(home / "runs" / "other", spec.to_json(other), {"argosy": "0.2.0"}, environment={"python": "3.12.0"})
    with store.open_writer(home / "runs" / "other", 0) as writer:
        writer.lineage("corpus", 0, name="stdlib", checksum="99", ledger={"library": {"tokens": 7}})
    body = report.diff("pocket", "other", home)
    assert body["run"] == {"data.seq_len": [256, 128], "data.batch_seqs": [8, 16]}
    assert body["code"] == {"argosy": ["0.1.0", "0.2.0"]} and body["environment"] == {"python": ["3.11.0", "3.12.0"]}
    assert body["data"] == {"checksum": ["5f1d77c2", "99"], "ledger.library.tokens": [2_210_034, 7]}
    text = printed(report.diff_table(body))
    assert re.search(r"data.seq_len +256 +128", text) and "2210034" in text
    assert "configuration: the same" in printed(report.diff_table(report.diff("pocket", "planned", home)))
    for body in (
        report.runs(home),
        report.show("pocket", home=home),
        report.show("pocket", "time", home),
        report.diff("pocket", "other", home),
    ):
        json.dumps(body, allow_nan=False)


def test_a_run_without_anything_can_be_shown(home):
    """Fails when show breaks on a run that has not begun, or on a metric without a finite value."""
    assert "planned" in printed(report.show_table(report.show("planned", home=home)))
    with store.open_writer(home / "runs" / "planned", 0) as writer:
        writer.record(1, {"train/loss": math.nan})
    body = report.show("planned", "train/loss", home)
    assert body["points"] == [{"step": 1, "mean": None, "low": None, "high": None}]
    assert "No finite value" in printed(report.show_table(body))
    with pytest.raises(ValueError, match=r"no metric 'train/los'; nearest: train/loss"):
        report.show("planned", "train/los", home)
    with pytest.raises(ValueError, match=r"no run 'plannde' .*nearest: planned, "):
        report.show("plannde", home=home)


def test_code_version_changes_with_the_code(home):
    """Fails when two attempts with different code look alike in diff."""
    found = provenance.code()
    assert re.fullmatch(r"[0-9a-f]{16}", found["sources"]) and found["argosy"] == provenance.argosy.__version__
    with store.open_writer(home / "runs" / "planned", 0, code={**found, "commit": "abc"}) as writer:
        sail(writer, 1, 3, 1024)
    assert report.diff("pocket", "planned", home)["code"]["commit"] == [None, "abc"]
    assert provenance.packages("numpy", "no-such-thing").keys() == {"numpy"}
    assert {"python", "machine", "packages"} <= provenance.environment().keys()


@pytest.mark.parametrize("module", [columns, layout, log, metrics, report])
def test_examples_in_docstrings(module):
    """Fails when a docstring shows what the code does not do."""
    assert doctest.testmod(module).failed == 0
