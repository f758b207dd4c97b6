"""`argosy sweep` as its user meets it: trained for real, killed, interrupted, gone on with, and left alone once finished."""

import json
import re
import signal

import commands
import pytest
from commands import files, finished, spawn

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path):
    """A home with a recipe and a corpus."""
    return commands.make(tmp_path, 100)


def sweep(home):
    return ("sweep", f"{home / 'tiny.py'}:run", "--as", "t", "--set", "optim.lr_scale=1,4", "--seeds", "2", "--json")


def ended_by(home, number, signal_number):
    """A sweep that gets a signal once an update of its run of this number is told of."""
    process = spawn(home, *sweep(home))
    for line in process.stderr:
        if re.match(rf"run {number} of 4, \S+: \d+/\d+ ", line):
            break
    else:
        pytest.fail(f"the sweep told of no run {number}")
    process.send_signal(signal_number)
    process.communicate(timeout=300)
    return process.returncode


def test_a_sweep_killed_and_interrupted_comes_to_the_same_end(home):
    """Fails when a sweep does not go on where it was ended, trains a finished run again, or comes to other figures than
    a run that was trained by itself."""
    assert ended_by(home, 2, signal.SIGKILL) == -signal.SIGKILL
    first = home / "runs" / "t-sweep-lr_scale-1-s0"
    before = files(first)
    assert ended_by(home, 3, signal.SIGINT) == 130
    ends = finished(home, *sweep(home))
    assert ends.returncode == 0, ends.stderr
    (found,) = json.loads(ends.stdout)["sweeps"]
    assert (found["finished"], found["runs"], found["held_out"]) == (4, 4, "all held-out text")
    assert files(first) == before
    assert sorted(p.name for p in (home / "runs").iterdir()) == [f"t-sweep-lr_scale-{v}-s{s}" for v in (1, 4) for s in (0, 1)]
    everything = files(home / "runs")
    again = finished(home, *sweep(home))
    (same,) = json.loads(again.stdout)["sweeps"]
    assert same.pop("plan")["to_train"] == 0 and found.pop("plan")["runs"] == 4
    assert same == found
    assert files(home / "runs") == everything
    alone = finished(
        home, "train", f"{home / 'tiny.py'}:run", "--as", "alone", "--set", "optim.lr_scale=4", "--seed", "1", "--json"
    )
    assert json.loads(alone.stdout)["macro_bits_per_byte"] == found["arms"][1]["by_seed"]["1"]
    clash = finished(home, *sweep(home), "--set", "optim.final_frac=0.5")
    assert (clash.returncode, clash.stdout) == (2, "")
    assert "exists with other values: optim.final_frac" in clash.stderr
