"""A ladder as it is climbed: killed, stopped, resumed, finished; the rungs end as if nobody had disturbed them."""

import json
import re
import signal
import subprocess
import sys

import commands
import pytest

from argosy import cli, spec, voyage
from argosy.judge import ladders
from argosy.plan.ladder import Rung
from argosy.runs import pocket
from argosy.track import log, store

# Two sizes, and the smaller one from another seed: two programs to compile.
CLIMB = """
import sys
from dataclasses import replace
from pathlib import Path

from argosy import runs, spec, voyage
from argosy.judge import ladders
from argosy.plan.ladder import Rung

hero = spec.override(runs.find("pocket"), [
    "model.vocab=320", "model.width=64", "model.head_width=16", "model.layers=1", "model.window=8", "model.gate_rank=4",
    "moe.experts=4", "moe.experts_per_token=2", "moe.hidden=32", "moe.latent_width=32", "moe.shared_hidden=32",
    "data.corpus=words", "data.seq_len=16", "data.batch_seqs=8", "data.max_epochs=100", "optim.horizon_tokens=200000",
    "evals.tokens_per_set=256", "evals.batch_seqs=4", "evals.every_frac=0.5", "compute.readout_block_tokens=64",
    'data.phases=[{"name": "main", "until_frac": 1.0, "weights": {"words": 1}}]',
])
small = runs.pocket.rung(16, hero)
rungs = (Rung("d32", runs.pocket.rung(32, hero), "size"), Rung("d16", small, "size"), Rung("d16-seed1", replace(small, seed=1), "seed"))
home, name = Path(sys.argv[1]), sys.argv[2]
ladders.save(home, name, hero, rungs)
sys.exit(0 if voyage.climb(name, rungs, spec.Host(home=home, checkpoint_every_s=0.5)) else 130)
"""


def climb(home, name):
    return [sys.executable, "-c", CLIMB, str(home), name]


def finished(home, name):
    done = subprocess.run(climb(home, name), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return commands.make(tmp_path_factory.mktemp("home"), 100)


def until(process, pattern):
    """Read what a climb says until a line matches."""
    for line in process.stderr:
        if found := re.search(pattern, line):
            return found
    pytest.fail(f"the climb never said {pattern}")


def ends(home, name):
    """What each rung came to: every held-out figure and loss, to the bit."""
    found = {}
    for row in ladders.state(home, name):
        its = log.read(home / "runs" / row["name"])
        metrics = [m for m in its.metrics if m.startswith("eval") and not m.endswith("time")] + ["train/loss"]
        found[row["rung"]] = (row["updates"], row["finished"], {m: its.last(m) for m in metrics})
    return found


@pytest.mark.slow
def test_killed_and_stopped_it_goes_on_to_the_same_end(home):
    """SIGKILL in the first rung, SIGTERM in the second: no rung begins after a stop, none is trained twice, all end alike."""
    said = finished(home, "whole")
    assert all(row["finished"] for row in ladders.state(home, "whole"))
    assert re.search(r"rung 3 of 3, whole-d32: .* 100\.0% of the ladder's FLOPs", said)

    killed = subprocess.Popen(climb(home, "broken"), stderr=subprocess.PIPE, text=True)
    until(killed, r"rung 1 of 3, \S+: \d+/\d+ ")
    killed.kill()
    killed.communicate(timeout=60)

    stopped = subprocess.Popen(climb(home, "broken"), stderr=subprocess.PIPE, text=True)
    until(stopped, r"rung 2 of 3, \S+: \d+/\d+ ")
    stopped.send_signal(signal.SIGTERM)
    _, err = stopped.communicate(timeout=120)
    assert stopped.returncode == 130, err
    assert "rung 3 of 3" not in err
    done = [row["name"] for row in ladders.state(home, "broken") if row["finished"]]
    assert "broken-d32" not in done

    said = finished(home, "broken")
    assert not any(f", {name}: " in said for name in done)
    assert ends(home, "broken") == ends(home, "whole")
    assert finished(home, "broken") == ""


def test_the_command_saves_climbs_and_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    """Fails when --run does not keep the ladder, hides a stop, or answers a finished ladder with nothing."""
    climbed = []
    monkeypatch.setattr(voyage, "climb", lambda name, rungs, host: climbed.append((name, rungs, host.home)))
    words = ["ladder", "pocket", "--as", "mine", "--run", "--home", str(tmp_path), "--json"]
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    out = capsys.readouterr()
    assert (stop.value.code, climbed) == (130, [("mine", pocket.rungs(), tmp_path)])
    assert "the same command goes on" in out.err
    assert [row["updates"] for row in json.loads(out.out)["state"]] == [0] * len(pocket.rungs())
    monkeypatch.setattr(voyage, "climb", lambda name, rungs, host: True)
    monkeypatch.setattr(ladders, "state", lambda home, name: [{"finished": True}])
    cli.main(words)
    assert "all 5 rungs of mine were finished before" in capsys.readouterr().err


def test_finished_rungs_open_nothing(tmp_path, monkeypatch):
    """Fails when a finished ladder opens its corpus or begins a run."""
    monkeypatch.setattr(voyage, "complete", lambda run, host, score: True)
    monkeypatch.setattr(voyage, "train", lambda *_, **__: pytest.fail("trained"))
    assert voyage.climb("pocket", pocket.rungs(), spec.Host(home=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked", ["in the loop", "at the last update"])
def test_a_stop_ends_the_climb_even_at_a_rungs_last_update(tmp_path, monkeypatch, asked):
    """Fails when a signal that comes too late to stop a rung does not stop the ladder, or the order is not by cost."""
    trained = []

    def train(run, host, *, score, show, stopping):
        trained.append(host.name)
        with show(run, 0):
            pass
        if len(trained) == 2:
            stopping.append("SIGINT")
            return spec.steps(run) - (asked == "in the loop")
        return spec.steps(run)

    monkeypatch.setattr(voyage, "begin", lambda run, host: {})
    monkeypatch.setattr(voyage, "train", train)
    rungs = tuple(Rung(f"d{width}", pocket.rung(width), "size") for width in (64, 32, 48))
    assert not voyage.climb("pocket", rungs, spec.Host(home=tmp_path))
    assert trained == ["pocket-d32", "pocket-d48"]


def test_a_rung_that_exists_with_other_values_is_refused_before_any_is_trained(tmp_path, monkeypatch):
    """Fails when hours are spent on small rungs before a large one is found to be another run."""
    monkeypatch.setattr(voyage, "train", lambda *_, **__: pytest.fail("trained"))
    rungs = pocket.rungs()
    other = spec.override(rungs[2].run, ["optim.lr_scale=1"])
    folder = tmp_path / "runs" / "pocket-d64"
    store.create(folder, spec.to_json(other), {})
    store.open_writer(folder, 0).close()
    with pytest.raises(ValueError, match=r"'pocket-d64' exists with other values: optim.lr_scale 1.0 -> 2.0"):
        voyage.climb("pocket", rungs, spec.Host(home=tmp_path))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["pocket-d64"]
