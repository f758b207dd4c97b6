"""Two processes of four devices as one run: the same numbers as one process of eight, one log, one reader of every sequence.

Each test fails when the number of processes changes what a run computes, or when one process's end leaves another waiting.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import psutil
import pytest

from argosy import mesh as meshes
from argosy import runs
from argosy.data import prepare
from argosy.launch import local
from argosy.track import log as logs
from argosy.train import checkpoint
from argosy.train import step as steps

# The launcher never loads JAX, so its forks are safe; a test process may have loaded it.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")]

UPDATES = 12
RECIPE = """
from argosy import runs, spec

TINY = [
    "model.vocab=320", "model.width=16", "model.layers=2", "model.heads=2", "model.kv_heads_local=2", "model.head_width=8",
    "model.window=8", "model.gate_rank=4", "moe.experts=8", "moe.experts_per_token=2", "moe.hidden=16", "moe.latent_width=16",
    "moe.shared_hidden=16", "data.corpus=words", "data.seq_len=32", "data.batch_seqs=8", "data.max_epochs=100",
    "evals.tokens_per_set=256", "evals.batch_seqs=8", "evals.every_frac=0.5", "compute.readout_block_tokens=64",
    'data.phases=[{"name": "main", "until_frac": 1.0, "weights": {"words": 1}}]', "optim.horizon_tokens=3072",
    "routing.exchange=pooled_wave", "mesh.data=2", "mesh.expert=4", "routing.sender_capacity=2.0", "routing.receiver_capacity=2.0",
]


def run():
    return spec.override(runs.find("pocket"), TINY)


def across():  # every expert exchange crosses the processes
    return spec.override(run(), ["mesh.data=1", "mesh.expert=8"])


def long():
    return spec.override(run(), ["optim.horizon_tokens=25600000", "data.max_epochs=10000"])
"""  # 12 updates of 8 x 32 tokens

COUNTING = """
import json, os, sys

import jax

from argosy import cli
from argosy.data import loader

read = loader.batch_numpy

def counted(run, store, step, rows=None):
    with open(os.environ["READS"] + f"-{jax.process_index()}", "a") as file:
        file.write(json.dumps([step, list(rows)]) + "\\n")
    return read(run, store, step, rows)

loader.batch_numpy = counted
cli.main()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    draw = random.Random(0)
    words = ["sail", "wind", "rope", "deck", "mast", "keel", "tide", "star", "port", "crew"]
    texts = (" ".join(draw.choices(words, k=60)) + f" {i}." for i in range(80))
    (home / "words.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare.build("words", [str(home / "words.jsonl")], home, vocab=320)
    (home / "tiny.py").write_text(RECIPE)
    (home / "counting.py").write_text(COUNTING)
    return home


def train(home, name, *more, recipe="run"):
    return ["train", f"{home / 'tiny.py'}:{recipe}", "--as", name, "--home", str(home), *more]


def launched(words, processes=2):
    """A launcher under way."""
    devices = str(8 // processes)
    start = [
        sys.executable,
        "-m",
        "argosy.cli",
        "launch",
        "local",
        "--processes",
        str(processes),
        "--devices-per-process",
        devices,
    ]
    return subprocess.Popen([*start, "--", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process, timeout=200):
    """Exit status, standard output and standard error of a launcher."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def sail(home, name, *more, processes=2, recipe="run"):
    status, out, err = ended(launched(train(home, name, *more, recipe=recipe), processes))
    assert status == 0, err
    return out, err


def numbers(home, name):
    """Every row of a run's metrics that does not depend on the clock, by step."""
    log = logs.read(name, home)
    kept = [m for m in log.metrics if not m.startswith(("throughput/", "memory/"))]
    return {m: dict(zip(*(part.tolist() for part in log.series(m)), strict=True)) for m in kept}


def final(home, name, recipe="run"):
    """The last checkpoint, on this process's eight devices."""
    run = runs.find(f"{home / 'tiny.py'}:{recipe}")
    mesh = meshes.make(run)
    with jax.set_mesh(mesh), checkpoint.opened(home / "runs" / name, keep=None) as saved:
        state, broken = checkpoint.restore(saved, steps.abstract(run, mesh), set_aside=False)
    assert not broken
    return jax.device_get(state)


def same(home, a, b, recipe="run"):
    """Two runs' metrics and last states, within 1e-5."""
    first, second = numbers(home, a), numbers(home, b)
    assert first.keys() == second.keys()
    for metric, points in first.items():
        assert points.keys() == second[metric].keys(), metric
        for step, value in points.items():
            assert value == pytest.approx(second[metric][step], rel=1e-5, abs=1e-6), (metric, step)
    one, two = final(home, a, recipe), final(home, b, recipe)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y) + 1e-12
    return all((x == y).all() for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


@pytest.fixture(scope="module")
def single(home):
    """The run in one process of eight devices."""
    return sail(home, "single", processes=1)


@pytest.fixture(scope="module")
def pair(home):
    """The run in two processes of four devices, which write down what they read."""
    os.environ["READS"] = str(home / "reads")
    status = local.run(train(home, "pair"), 2, 4, (sys.executable, str(home / "counting.py")))
    assert status == 0
    return logs.read("pair", home)


def test_two_processes_compute_what_one_computes(home, single, pair):
    print("to the bit:", same(home, "pair", "single"))


def test_the_log_has_every_row_once(home, pair):
    steps_, losses = pair.series("train/loss")
    assert steps_.tolist() == list(range(1, UPDATES + 1))
    lines = [record["kind"] for record in pair.lineage]
    assert [lines.count(kind) for kind in ("attempt", "corpus", "ended")] == [1, 1, 1]
    assert [e["kind"] for e in pair.events] == ["baseline", "baseline_whole"]
    assert len(pair.series("eval_dropless/words/bpb")[0]) == 3  # before, in the middle, at the end
    assert np.isfinite(losses).all()


def test_every_sequence_is_read_by_one_process(home, pair):
    read = {n: [json.loads(line) for line in (home / f"reads-{n}").read_text().splitlines()] for n in range(2)}
    for step in range(UPDATES):
        rows = [sorted(r for s, rows in read[n] if s == step for r in rows) for n in range(2)]
        assert rows == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_experts_divided_over_processes_compute_the_same(home):
    sail(home, "across-2", recipe="across")
    sail(home, "across-1", processes=1, recipe="across")
    print("to the bit:", same(home, "across-2", "across-1", "across"))


def test_one_process_goes_on_with_what_two_began_and_two_with_what_one_began(home, single):
    sail(home, "moved", "--stop-after", "4")
    sail(home, "moved", "--stop-after", "8", processes=1)
    sail(home, "moved")
    same(home, "moved", "single")


def test_json_alone_is_printed_and_text_is_sampled_by_two(home, pair):
    out, _ = sail(home, "pair", "--json")
    assert json.loads(out)["updates"] == UPDATES
    words = ["sample", "pair", "sail wind", "--tokens", "8", "--temperature", "0", "--home", str(home)]
    texts = [ended(launched(words, n)) for n in (1, 2)]
    assert [status for status, _, _ in texts] == [0, 0], texts
    assert texts[0][1] == texts[1][1]
    alone = subprocess.run(
        [sys.executable, "-m", "argosy.cli", *words],
        env=local.environment(os.environ, 1),
        capture_output=True,
        text=True,
        check=True,
    )
    assert alone.stdout == texts[0][1]
    assert texts[0][1].startswith("sail wind") and len(texts[0][1]) > len("sail wind\n")


def updates(home, name):
    try:
        return int(logs.read(name, home).series("train/loss")[0][-1])
    except (ValueError, OSError, IndexError, TypeError):
        return 0


def under_way(home, name, process):
    """Once some updates of a run are logged."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (reached := updates(home, name)) >= 3:
            return reached
        time.sleep(0.2)
    raise AssertionError(ended(process))


def children(process):
    """The run's processes, by their number."""
    found = {}
    for child in psutil.Process(process.pid).children():
        words = child.cmdline()
        if "--process" in words:
            found[int(words[words.index("--process") + 1])] = child
    return found


def test_a_killed_process_ends_the_others_and_the_next_call_goes_on(home):
    process = launched(train(home, "killed", "--checkpoint-every", "0", recipe="long"))
    under_way(home, "killed", process)
    crew = children(process)
    began = time.monotonic()
    crew[1].send_signal(signal.SIGKILL)
    status, _, err = ended(process, timeout=60)
    assert time.monotonic() - began < 25  # seconds, with room for a busy machine
    assert status == 128 + signal.SIGKILL
    assert "process 1 of 2 was ended by SIGKILL" in err and "Traceback" not in err
    assert not any(child.is_running() for child in crew.values())
    saved = checkpoint.latest_step(home / "runs" / "killed")
    assert saved > 0
    sail(home, "killed", "--stop-after", str(saved + 2), recipe="long")
    assert checkpoint.latest_step(home / "runs" / "killed") == saved + 2
    starts = [r["step"] for r in logs.read("killed", home).lineage if r["kind"] == "attempt"]
    assert starts == [0, saved]


@pytest.mark.parametrize("to", ["launcher", "one process"])
def test_sigterm_to_the_launcher_or_to_any_process_saves_and_ends_all(home, to):
    name = f"stopped-{to.replace(' ', '-')}"
    process = launched(train(home, name, recipe="long"))
    under_way(home, name, process)
    if to == "launcher":
        process.send_signal(signal.SIGTERM)
    else:
        children(process)[1].send_signal(signal.SIGTERM)
    status, _, err = ended(process, timeout=60)
    assert status == 0, err
    assert checkpoint.latest_step(home / "runs" / name) == updates(home, name) > 0
    assert logs.read(name, home).lineage[-1]["fields"]["outcome"] == "stopped"


def by_hand(*words):
    """Two processes started without the launcher; exit status and standard error of each."""
    address = f"127.0.0.1:{local.free_port()}"
    environment = local.environment(os.environ, 4)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "argosy.cli", *own, "--coordinator", address, "--processes", "2", "--process", str(n)],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for n, own in enumerate(words)
    ]  # fmt: skip
    return [(p.returncode, err) for p in started for err in [p.communicate(timeout=200)[1]]]


def test_processes_that_were_not_started_alike_are_refused_with_the_difference(home):
    results = by_hand(train(home, "alike"), train(home, "alike", "--set", "optim.lr_scale=3.5"))
    for status, err in results:
        assert status == 2
        assert err.strip() == (
            "argosy: process 1 of 2 was not started as process 0 was: optim.lr_scale is 3.5, not 2.0; start all with one command"
        )
    assert not (home / "runs" / "alike").exists()


def test_a_corpus_that_one_process_misses_is_told_by_all(home, tmp_path):
    (tmp_path / "runs").symlink_to(home / "runs")
    mine, others = by_hand(train(home, "missing"), train(home, "missing", "--home", str(tmp_path)))
    says = f"corpus 'words' is not in {tmp_path / 'corpora'}"
    assert mine[0] == others[0] == 2
    assert mine[1].startswith(f"argosy: process 1 of 2: {says}")
    assert others[1].startswith(f"argosy: {says}")


def test_a_home_that_is_not_shared_is_refused(home, tmp_path):
    results = by_hand(train(home, "apart"), train(home, "apart", "--home", str(tmp_path)))
    assert [status for status, _ in results] == [2, 2]
    assert all("--home has to be on storage that all processes share" in err for _, err in results)


def test_what_fails_in_process_0_alone_ends_the_other(home, pair):
    """A log that another process writes to: process 0 alone finds out."""
    import fcntl

    folder = Path(home / "runs" / "pair")
    handle = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        results = by_hand(train(home, "pair"), train(home, "pair"))
    finally:
        os.close(handle)
    assert [status for status, _ in results] == [2, 2]
    assert all("is being written by" in err for _, err in results)
