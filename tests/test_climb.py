"""`argosy ladder NAME --run` as its user meets it: killed, stopped, resumed, finished; the rungs end as if nobody had disturbed them."""

import json
import random
import re
import signal
import subprocess
import sys

import pytest

from argosy import spec, voyage
from argosy.judge import ladders
from argosy.plan.ladder import Rung
from argosy.runs import pocket
from argosy.track import log

RECIPE = """
from argosy import runs, spec


def run():
    return spec.override(runs.find("pocket"), [
        "model.vocab=320", "model.width=128", "model.layers=1", "model.window=8", "model.gate_rank=4", "moe.experts=4",
        "moe.experts_per_token=2", "data.corpus=words", "data.seq_len=16", "data.batch_seqs=8", "data.max_epochs=100",
        "optim.horizon_tokens=50000", "evals.tokens_per_set=256", "evals.batch_seqs=4", "compute.readout_block_tokens=64",
        'data.phases=[{"name": "main", "until_frac": 1.0, "weights": {"words": 1}}]',
    ])
"""


def command(home, *words):
    return [sys.executable, "-m", "argosy.cli", *words, "--home", str(home)]


def call(home, *words):
    return subprocess.run(command(home, *words), capture_output=True, text=True, check=False, timeout=600)


def climb(home, name, *more):
    return command(home, "ladder", f"{home / 'tiny.py'}:run", "--as", name, "--run", *more)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    (home / "tiny.py").write_text(RECIPE)
    draw = random.Random(0)
    words = ["sail", "wind", "rope", "deck", "mast", "keel", "tide", "star", "port", "crew"]
    texts = [" ".join(draw.choices(words, k=60)) + f" {i}." for i in range(80)]
    (home / "words.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    built = call(home, "data", "build", str(home / "words.jsonl"), "--name", "words", "--vocab", "320")
    assert built.returncode == 0, built.stderr
    return home


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
    """SIGKILL in the first rung, SIGTERM in a later one: no rung begins after a stop, none is trained twice, all end alike."""
    whole = subprocess.run(climb(home, "whole", "--json"), capture_output=True, text=True, check=False, timeout=600)
    assert whole.returncode == 0, whole.stderr
    body = json.loads(whole.stdout)
    assert all(row["finished"] for row in body["state"])
    assert len(body["state"]) == 6
    assert "rung 6 of 6" in whole.stderr
    assert "100.0% of the ladder's FLOPs" in whole.stderr

    killed = subprocess.Popen(climb(home, "broken"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(killed, r"rung 1 of 6, .*: \d+/\d+ ")
    killed.kill()
    killed.communicate(timeout=60)

    stopped = subprocess.Popen(climb(home, "broken"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    name = until(stopped, r"rung 3 of 6, (\S+): \d+/\d+ ")[1]
    stopped.send_signal(signal.SIGTERM)
    _, err = stopped.communicate(timeout=120)
    assert stopped.returncode == 130, err
    assert "rung 4 of 6" not in err
    assert "the same command goes on" in err
    done = [row["name"] for row in ladders.state(home, "broken") if row["finished"]]
    assert len(done) in (2, 3)

    again = subprocess.run(climb(home, "broken"), capture_output=True, text=True, check=False, timeout=600)
    assert again.returncode == 0, again.stderr
    assert name in again.stderr or name in done
    assert not any(f", {old}: " in again.stderr for old in done)
    assert ends(home, "broken") == ends(home, "whole")

    last = subprocess.run(climb(home, "broken", "--json"), capture_output=True, text=True, check=False, timeout=60)
    assert last.returncode == 0
    assert "all 6 rungs" in last.stderr
    assert json.loads(last.stdout)["state"] == ladders.state(home, "broken")

    other = subprocess.run(
        climb(home, "broken", "--set", "optim.lr_scale=1"), capture_output=True, text=True, check=False, timeout=60
    )
    assert other.returncode == 2
    assert "optim.lr_scale 2.0 -> 1" in other.stderr
    assert "--as broken-2" in other.stderr


def test_finished_rungs_open_nothing(tmp_path, monkeypatch):
    """Fails when a finished ladder opens its corpus or begins a run."""
    monkeypatch.setattr(voyage, "complete", lambda run, host: True)
    monkeypatch.setattr(voyage, "train", lambda *_, **__: pytest.fail("trained"))
    assert voyage.climb("pocket", pocket.rungs(), spec.Host(home=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asked", ["in the loop", "at the last update"])
def test_a_stop_ends_the_climb_even_at_a_rungs_last_update(tmp_path, monkeypatch, asked):
    """Fails when a signal that comes too late to stop a rung does not stop the ladder, or the order is not by cost."""
    trained = []

    def train(run, host, *, show, stopping):
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
