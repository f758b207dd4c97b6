"""The training loop, top to bottom. It knows neither the run store nor the page: it is given functions."""

import contextlib
import math
import platform
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from argosy import heap, processes, spec
from argosy import mesh as meshes
from argosy.data import loader
from argosy.model import exchange
from argosy.plan import flops
from argosy.train import checkpoint
from argosy.train import step as steps

Row = dict[str, float]


class Diverged(ValueError):
    """The loss, the gradient, the parameters or the router's bias are no longer finite numbers."""


def train(
    run: spec.Run,
    host: spec.Host,
    corpus: Any,
    *,
    record: Callable[[int, Row], None],
    event: Callable[..., None],
    evaluate: Callable[[steps.State], Row],
    progress: Callable[[int, Row], None],
    judge: Callable[[int], bool] = lambda step: False,
    stop_after: int | None = None,
    stopping: list[str] | None = None,
) -> steps.State:
    """Train a run from its last checkpoint, or from its seed, to its end; return the final state.

    `record(step, row)` takes the metrics once `step` updates are finished, `event(kind, step, **fields)` what
    happened, `evaluate(state)` gives held-out metrics, `progress(step, row)` is told of every update, `judge(step)` is
    asked after every evaluation and says whether to stop.
    `stop_after` ends the call once the run has that many finished updates; SIGTERM and SIGINT end it after the
    update under way. `stopping` is filled with what asked for the end, if anything did. Either way a checkpoint is
    written first. With several processes a signal to any of them ends all after the same update, process 0's clock
    decides when to save, and all call this with the same values.

    Raises:
        ValueError: when the run needs what this machine or this version does not have.
        Diverged: when loss, gradient, parameters or the router's bias are not finite; the last checkpoint is from before.
        OSError: when the disk refuses a checkpoint or the log; the last checkpoint is intact.
    """
    if run.compute.chip == "cpu":
        heap.keep()
    ready(run)
    mesh = meshes.make(run)
    end = min(spec.steps(run), stop_after or spec.steps(run))
    peak = peak_flops(run)
    processes.wait()  # what process 0 has done alone so far may have taken long
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        saved = stack.enter_context(checkpoint.opened(host.folder, host.keep_checkpoints))
        stopping = stack.enter_context(stop_signals([] if stopping is None else stopping))

        def compiled() -> Any:
            made = processes.compiled(steps.compiled(run), steps.abstract(run, mesh), steps.abstract_batch(run, mesh))
            heap.trim()
            return made

        # before anything is allocated: compiling needs much memory of its own
        train_step: Any = compiled() if checkpoint.latest_step(host.folder) < end else None
        state, broken = checkpoint.restore(saved, steps.kept(steps.abstract(run, mesh)), set_aside=True)
        for line in broken:
            event("checkpoint_broken", int(state.step) if state is not None else 0, message=line)
        if state is None:
            state = steps.init(run, mesh)
            record(0, evaluate(state))
        else:
            state = steps.resumed(run, state)
        done = saved_at = int(state.step)
        if train_step is None and done < end:  # the newest checkpoint was broken, the one taken is from before the end
            train_step = compiled()
        batches = stack.enter_context(loader.prefetch(run, corpus, mesh, done, end))

        clock, vote = Clock(run, peak), processes.voting(mesh)
        unread: tuple[int, steps.Stats] | None = None
        while done < end:
            stop, save = vote(bool(stopping), clock.save_is_due(host.checkpoint_every_s))
            if stop:
                break
            with clock.part("loading"):
                batch = next(batches)
            state, stats = train_step(state, batch)
            if unread is not None:  # read one update behind, so that the device never waits for the log
                note(run, *unread, clock, record, progress)
            done += 1
            unread = (done, stats)
            saving = done == end or save
            if due_evaluation(run, done) or saving:
                note(run, *unread, clock, record, progress)
                unread = None
            if due_evaluation(run, done):
                with clock.part("evaluation"):
                    record(done, evaluate(state))
                    if judge(done):
                        stopping.append("judged")
            if saving:  # decided once: what is saved has been read and found finite
                with clock.part("checkpoint"):
                    checkpoint.save(saved, steps.kept(state), done)
                clock.saved()
                saved_at = done
        if unread is not None:
            note(run, *unread, clock, record, progress)
        if done > saved_at:
            checkpoint.save(saved, steps.kept(state), done)
    return state


def ready(run: spec.Run) -> None:
    """Refuse what this machine or this version cannot train, before anything is made or compiled.

    Raises:
        ValueError: naming the field, its value and the nearest one that works.
    """
    exchange.transport(run.routing.exchange)
    if run.mesh.context != 1:
        raise ValueError(
            f"mesh.context={run.mesh.context} can be planned but not yet trained by this version; nearest legal 1, with"
            " mesh.replica, mesh.data or mesh.expert for more devices"
        )
    meshes.make(run)


def due_evaluation(run: spec.Run, done: int) -> bool:
    """Whether a held-out evaluation follows the `done`-th update: at every `every_frac` of the run, and its end."""
    every = spec.evaluation_every(run)
    return done == spec.steps(run) or done // every > (done - 1) // every


def note(run: spec.Run, done: int, stats: steps.Stats, clock: "Clock", record: Any, progress: Any) -> None:
    """Read an update's statistics from the device, log them, and refuse to go on with numbers that are not finite."""
    stats = jax.device_get(stats)
    row = steps.metrics(run, done, stats) | clock.lap(done)
    row["throughput/accepted_mfu"] = row["throughput/mfu"] * flops.accepted(run, row["moe/drop_fraction"])
    record(done, row)
    progress(done, row)
    optim = run.optim
    watched = {name: row[name] for name in ("train/loss", "grad/norm/total", "params/norm/total")}
    # that of the state to be saved: what is logged is the one before, and a loss may stay finite for long with either
    watched["the router's next bias"] = float(np.max(np.abs(stats.layers.next_bias)))
    if not all(map(math.isfinite, watched.values())):
        raise Diverged(
            f"{', '.join(f'{name} is {value}' for name, value in watched.items())} after update {done:,} of"
            f" {spec.steps(run):,}; training stops, the last checkpoint is from before; the usual remedy is a lower"
            + (
                f" optim.adamw_lr (now {optim.adamw_lr})"
                if optim.rule == "adamw"
                else f" optim.lr_scale (now {optim.lr_scale})"
            )
        )


class Clock:
    """Wall time between finished updates, and the parts of it that were not the update itself.

    `iteration_time` is everything between two finished updates: loading, checkpoints, the log, garbage
    collection (a timer around the step alone hides those). Evaluation is taken out of the rates and logged beside.
    """

    def __init__(self, run: spec.Run, peak: float):
        self.run, self.peak = run, peak
        self.tick = self.save_tick = time.perf_counter()
        self.parts: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

    def save_is_due(self, every_s: float) -> bool:
        """Whether the last save, or the last time that this said yes, is so long ago: with several processes the save
        that follows is agreed on an update later, and is not to be asked for twice."""
        due = time.perf_counter() - self.save_tick >= every_s
        if due:
            self.saved()
        return due

    def saved(self) -> None:
        self.save_tick = time.perf_counter()

    def lap(self, done: int) -> Row:
        """The throughput metrics of the update that was just read."""
        now = time.perf_counter()
        iteration, parts = now - self.tick, self.parts
        self.tick, self.parts = now, {}
        busy = max(iteration - parts.get("evaluation", 0.0), 1e-9)
        per_step = flops.train_step(self.run, readout=True)
        return {
            "throughput/iteration_time": iteration,
            "throughput/duration": busy - parts.get("checkpoint", 0.0),
            "throughput/loading_time": parts.get("loading", 0.0),
            "throughput/checkpoint_time": parts.get("checkpoint", 0.0),
            "throughput/evaluation_time": parts.get("evaluation", 0.0),
            "throughput/tokens_per_second": spec.tokens_per_step(self.run) / busy,
            "throughput/gflops_per_second": per_step / busy / 1e9,
            "throughput/mfu": per_step / busy / self.peak,
            "throughput/total_tokens": float(done * spec.tokens_per_step(self.run)),
            "throughput/total_gflops": done * per_step / 1e9,
            "memory/process_gib": psutil.Process().memory_info().rss / 2**30,
        }


def peak_flops(run: spec.Run) -> float:
    """What all devices of the run could do, in FLOP/s, measured by process 0: the best of a few large products on one device.

    In the precision of the run; 2,048 wide on a CPU (the machine's sgemm, which all its devices share), 8,192 elsewhere.
    """
    machines = len(set(processes.exchange(platform.node())))
    if not processes.first():
        return math.inf  # it has no log to write the share of it into
    on_cpu = jax.default_backend() == "cpu"
    n = 2048 if on_cpu else 8192
    with jax.set_mesh(jax.sharding.Mesh(np.asarray(jax.local_devices()[:1]), "x")):
        a = jnp.ones((n, n), jnp.bfloat16 if run.compute.precision == "bf16" else jnp.float32)
        product = jax.jit(jnp.matmul)
        product(a, a).block_until_ready()
        best = math.inf
        for _ in range(5):
            start = time.perf_counter()
            product(a, a).block_until_ready()
            best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best * (machines if on_cpu else spec.devices(run))


@contextlib.contextmanager
def stop_signals(seen: list[str]) -> Iterator[list[str]]:
    """The list, filled when SIGTERM or SIGINT arrives; a second SIGINT interrupts at once."""

    def handler(number: int, _frame: Any) -> None:
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(signal.Signals(number).name)

    try:
        before = {s: signal.signal(s, handler) for s in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: signals are somebody else's
        before = {}
    try:
        yield seen
    finally:
        for number, old in before.items():
            signal.signal(number, old)
