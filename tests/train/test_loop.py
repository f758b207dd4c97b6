"""The loop on a small corpus: resume, evaluation, checkpoints that break, losses that are not finite.

Each test fails when a run's numbers depend on anything but (run, step), or when a failure costs more than it must.
"""

import contextlib
import json
import os
import signal

import jax
import numpy as np
import pytest

from argosy import mesh as meshes
from argosy import runs, spec
from argosy.data import prepare, tokens
from argosy.evals import heldout
from argosy.model import exchange
from argosy.train import checkpoint, loop
from argosy.train import step as steps

TINY = [
    "model.vocab=320", "model.width=32", "model.layers=2", "model.head_width=8", "model.window=8", "model.gate_rank=4",
    "data.seq_len=32", "data.batch_seqs=4", "data.corpus=tiny", "data.max_epochs=100", "moe.experts=8", "moe.experts_per_token=2",
    "moe.hidden=16", "moe.latent_width=16", "moe.shared_hidden=16", "optim.horizon_tokens=1280", "optim.warmup_frac=0.2",
    "evals.tokens_per_set=256", "evals.batch_seqs=4", "evals.every_frac=0.5", "compute.readout_block_tokens=64",
    'data.phases=[{"name":"main","until_frac":0.6,"weights":[["a",2],["b",1]]},{"name":"end","until_frac":1.0,"weights":[["a",1]]}]',
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with a corpus of two sources, deterministic and small."""
    home = tmp_path_factory.mktemp("home")
    rng = np.random.default_rng(0)
    words = ["sail", "wind", "rope", "deck", "mast", "keel", "tide", "star", "port", "crew"]
    files = []
    for source in "ab":
        path = home / f"{source}.jsonl"
        texts = (" ".join(rng.choice(words, 60)) + f" {source}{i}." for i in range(60))
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        files.append(str(path))
    prepare.build("tiny", files, home, vocab=320)
    jax.config.update("jax_compilation_cache_dir", str(home / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    yield home
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="module")
def run():
    return spec.override(runs.find("pocket"), TINY)


def sail(run, home, name, stop_after=None, evaluate=True, record=None, progress=None, judge=lambda step: False):
    """One call of the loop; the final state and the rows by step."""
    corpus = tokens.open_store(home / "corpora" / "tiny")
    rows, events = {}, []
    state = loop.train(
        run,
        spec.Host(home=home, name=name, checkpoint_every_s=1e9),
        corpus,
        record=record or (lambda step, row: rows.setdefault(step, {}).update(row)),
        event=lambda kind, step, **fields: events.append((kind, step, fields)),
        evaluate=heldout.evaluator(run, corpus) if evaluate else lambda state: {},
        progress=progress or (lambda step, row: None),
        judge=judge,
        stop_after=stop_after,
    )
    return jax.device_get(state), rows, events


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def numbers(rows):
    """What must not depend on the clock."""
    skip = ("throughput/", "memory/")
    return {step: {k: v for k, v in row.items() if not k.startswith(skip)} for step, row in rows.items()}


@pytest.mark.slow  # its twin with every choice of memory is in the fast suite
def test_ten_steps_equal_five_and_five_to_the_bit(run, home):
    whole, rows, _ = sail(run, home, "whole")
    assert sorted(rows) == list(range(11))
    first, before, _ = sail(run, home, "parts", stop_after=3)
    assert int(first.step) == 3
    _, between, _ = sail(run, home, "parts", stop_after=5)
    last, after, _ = sail(run, home, "parts")
    same(whole, last)
    assert numbers(rows) == numbers({**before, **between, **after})


IN_HOST = ["compute.precision=bf16", "compute.params=bf16", "compute.masters=pinned_host"]
IN_HOST += ["compute.optimizer_state=pinned_host"]


@pytest.mark.parametrize(
    "choices",
    [["compute.accumulate=2", "compute.remat=block", *IN_HOST, "optim.rule=adamw", "model.layers=1"]]
    + [
        pytest.param(c, marks=pytest.mark.slow)
        for c in (
            ["compute.accumulate=4"],
            ["compute.precision=bf16", "compute.params=bf16"],
            ["compute.optimizer_state=pinned_host", "optim.rule=adamw"],
            IN_HOST,
            ["compute.remat=block_keep_dispatch", "mesh.expert=2", "routing.exchange=pooled_wave"],
        )
    ],
    ids="+".join,
)
def test_resume_to_the_bit_with_every_choice_of_memory(run, home, choices):
    """Fails when a checkpoint loses a master, rounds it, or comes back in another memory or order."""
    run, name = spec.override(run, choices), "-".join(choices)[:60]
    whole, rows, _ = sail(run, home, f"{name}-whole", evaluate=False)
    first, before, _ = sail(run, home, f"{name}-parts", stop_after=5, evaluate=False)
    last, after, _ = sail(run, home, f"{name}-parts", evaluate=False)
    assert int(first.step) == 5 and min(after) == 6
    same(whole, last)
    assert numbers({s: r for s, r in rows.items() if s}) == numbers({s: r for s, r in {**before, **after}.items() if s})


@pytest.mark.parametrize("late", [0, 1], ids=["alone", "several processes"])
def test_a_save_that_is_due_is_written_once(run, home, monkeypatch, late):
    """Fails when a wish that processes agree on an update later is uttered again meanwhile: every save came twice."""
    wishes, saves, clocks = [(False, False)] * late, [], []
    start = loop.Clock.__init__

    def vote(stop, save):
        wishes.append((stop, save))
        return wishes[-1 - late]

    def progress(step, row):
        clocks[0].save_tick -= 2e9 * (step == 3)  # the third update is read while the fourth is computed

    monkeypatch.setattr(loop.processes, "voting", lambda mesh: vote)
    monkeypatch.setattr(loop.Clock, "__init__", lambda self, *args: (clocks.append(self), start(self, *args))[1])
    monkeypatch.setattr(loop.checkpoint, "save", lambda manager, state, step: saves.append(step))
    sail(run, home, f"once-{late}", evaluate=False, progress=progress)
    assert saves == [5 + late, 10]


def test_a_judge_is_asked_after_every_evaluation_and_may_stop_the_run(run, home):
    asked = []
    state, _, _ = sail(run, home, "judged", judge=lambda step: asked.append(step) or True)
    assert asked == [5] and int(state.step) == 5
    assert checkpoint.latest_step(home / "runs" / "judged") == 5
    state, _, _ = sail(run, home, "judged", judge=lambda step: bool(asked.append(step)))
    assert asked == [5, 10] and int(state.step) == 10


@pytest.mark.slow
def test_evaluation_leaves_training_alone_and_repeats_itself(run, home):
    with_evals, _, _ = sail(run, home, "evals")
    without, _, _ = sail(run, home, "no-evals", evaluate=False)
    same(with_evals, without)
    corpus = tokens.open_store(home / "corpora" / "tiny")
    mesh = meshes.make(run)
    with jax.set_mesh(mesh):
        state = steps.init(run, mesh)
    evaluate = heldout.evaluator(run, corpus)
    assert evaluate(state) == evaluate(state)


@pytest.mark.slow
def test_training_learns(run, home):
    _, rows, _ = sail(spec.override(run, ["optim.horizon_tokens=5120"]), home, "learns")
    assert rows[40]["train/loss"] < rows[1]["train/loss"] - 1
    assert rows[40]["eval_dropless/tiny/macro_bpb"] < rows[0]["eval_dropless/tiny/macro_bpb"] / 1.5


def test_learning_rates_are_logged_for_the_update_that_used_them(run, home):
    _, rows, _ = sail(run, home, "rates", evaluate=False)
    peak = rows[3]["optim/learning_rate"]  # warm-up is 2 of 10 updates: zero-based update 2 is at the peak
    assert [rows[s]["optim/learning_rate"] / peak for s in (1, 2)] == pytest.approx([0, 0.5])
    assert rows[10]["optim/learning_rate"] / peak == pytest.approx(1 - 0.95 * 7 / 8)


@pytest.mark.slow
@pytest.mark.parametrize("last", [6, 10], ids=["under way", "finished"])
def test_a_broken_checkpoint_costs_only_what_came_after_the_one_before(run, home, last):
    whole, _, _ = sail(run, home, f"unbroken-{last}")
    host = spec.Host(home=home, name=f"broken-{last}")
    sail(run, home, host.name, stop_after=4)
    sail(run, home, host.name, stop_after=last)
    for path in (host.folder / "checkpoints" / f"step_{last}").rglob("*"):
        if path.is_file() and path.stat().st_size > 200 and "d" in path.parts:
            path.write_bytes(b"not a checkpoint")
    state, rows, events = sail(run, home, host.name)
    assert min(rows) == 5
    assert events[0][0] == "checkpoint_broken"
    assert f"step {last}" in events[0][2]["message"]
    same(whole, state)
    assert checkpoint.latest_step(host.folder) == 10


@pytest.mark.slow
def test_when_no_checkpoint_restores_the_run_is_refused_and_nothing_moves(run, home):
    """A change of code that adds a parameter must not begin a run again from its seed."""
    sail(run, home, "other", stop_after=2, evaluate=False)
    other = spec.override(run, ["model.head_gate=none"])
    with pytest.raises(ValueError, match="none of the checkpoints"):
        sail(other, home, "other", evaluate=False)
    assert checkpoint.latest_step(home / "runs" / "other") == 2


def test_a_reader_leaves_the_folder_of_a_live_run_alone(run, home):
    sail(run, home, "read", stop_after=2, evaluate=False)
    unfinished = home / "runs" / "read" / "checkpoints" / "step_3.orbax-checkpoint-tmp"
    unfinished.mkdir()
    mesh = meshes.make(run)
    with jax.set_mesh(mesh), checkpoint.opened(home / "runs" / "read", keep=None) as saved:
        state, _ = checkpoint.restore(saved, steps.abstract(run, mesh), set_aside=False)
    assert int(state.step) == 2
    assert unfinished.exists()


@pytest.mark.slow
def test_parameters_that_are_not_finite_are_never_saved(run, home):
    """The loss of an update is of the parameters before it, so it alone would be seen one checkpoint too late."""
    wild = spec.override(run, ["optim.rule=adamw", "optim.adamw_lr=1e38", "optim.weight_decay=1e30", "optim.warmup_frac=0"])
    with pytest.raises(loop.Diverged, match="params/norm/total"):
        sail(wild, home, "wilder", stop_after=1, evaluate=False)
    assert checkpoint.latest_step(home / "runs" / "wilder") == 0


def test_sigterm_ends_after_the_update_with_a_checkpoint(run, home):
    def stop(step, row):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    state, _, _ = sail(run, home, "signalled", progress=stop)
    done = int(state.step)
    assert 3 <= done <= 5
    assert checkpoint.latest_step(home / "runs" / "signalled") == done
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(run, home):
    wild = spec.override(run, ["optim.rule=adamw", "optim.adamw_lr=1e30", "optim.warmup_frac=0"])
    with pytest.raises(loop.Diverged, match=r"optim\.adamw_lr"):
        sail(wild, home, "wild", evaluate=False)


def test_a_router_bias_that_is_not_finite_stops_the_run(run, monkeypatch):
    """Fails when router logits so large that their bias is NaN go on to the next checkpoint with a loss that is finite."""
    row = dict.fromkeys(["train/loss", "grad/norm/total", "params/norm/total", "moe/drop_fraction"], 1.0)
    monkeypatch.setattr(loop.steps, "metrics", lambda run, done, stats: row)
    nothing = lambda kind: kind(*[None] * len(kind._fields))  # noqa: E731
    for bias, fine in ((0.5, True), (np.nan, False), (-np.inf, False)):
        layers = nothing(exchange.MoeStats)._replace(next_bias=np.array([[0.0, bias], [1.0, 2.0]]))
        stats = nothing(steps.Stats)._replace(layers=layers)
        clock = loop.Clock(run, 1e9)
        with contextlib.nullcontext() if fine else pytest.raises(loop.Diverged, match="router's next bias is"):
            loop.note(run, 3, stats, clock, lambda *_: None, lambda *_: None)


@pytest.mark.slow
def test_the_log_refusing_a_row_ends_the_run_with_its_error(run, home):
    def full(step, row):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        sail(run, home, "full", record=full)


@pytest.mark.parametrize(("every", "expected"), [(0.5, [5, 10]), (0.25, [3, 5, 8, 10]), (0.3, [3, 6, 9, 10]), (1.0, [10])])
def test_evaluations_fall_on_fractions_of_the_run(run, every, expected):
    one = spec.override(run, [f"evals.every_frac={every}"])
    assert [n for n in range(1, 11) if loop.due_evaluation(one, n)] == expected
