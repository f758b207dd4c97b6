"""From run logs to the tables of a forecast: one row per metric and evaluation of each rung, and the rows asked of the hero."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from argosy import spec
from argosy.forecast import alarms, surface
from argosy.judge import ladders
from argosy.plan import flops, scaling
from argosy.track import log as logs
from argosy.track import metrics as known

# What is forecast: evaluations, training losses, gradient norms, drops, routing, speed. Not: what a recipe or a corpus fixes (rates,
# tokens, documents, parameter norms under the hyperball), what has a sign (router bias and margins: no trend in log), counts that
# grow with the batch, histograms, times and memory of a process, and what is measured once (`eval_whole`).
FORECAST = re.compile(
    r"eval_dropless/[^/]+/(macro_)?(bpb|loss)"
    r"|train/(loss|cross_entropy_loss|logit_z)"
    r"|grad/norm/[^/]+"
    r"|moe/((sender_|receiver_)?drop_fraction)"
    r"|train/router/(layer_\d+/(drop_fraction|load_max_over_mean|routing_entropy)"
    r"|routing_entropy_mean|load_max_over_mean|load_balancing_loss|router_z_loss)"
    r"|throughput/(tokens_per_second|mfu)"
)
EVALUATION = re.compile(r"eval_dropless/[^/]+/macro_(loss|bpb)")
LAYER = re.compile(r"train/router/layer_\d+/")
SPEED = "throughput/"
LEAST_SIZES = 3  # that a law of size is fitted to
LEAST_POINTS = 3  # finite ones, of a metric that is fitted

Row = dict[str, Any]


def forecastable(names: Sequence[str]) -> list[str]:
    """The logged metrics that are forecast, in the order given.

    >>> forecastable(["train/loss", "optim/learning_rate", "grad/norm/total", "train/router/bias_min", "eval_whole/prose/bpb"])
    ['train/loss', 'grad/norm/total']
    """
    return [name for name in names if FORECAST.fullmatch(name)]


def evaluation_steps(run: spec.Run) -> list[int]:
    """The updates after which a run is evaluated, the last of them its end: where `loop.due_evaluation` says yes.

    >>> from argosy.runs import pocket
    >>> evaluation_steps(pocket.run())[:3], evaluation_steps(pocket.run())[-1]
    ([52, 103, 154], 1024)
    """
    total, every = spec.steps(run), spec.evaluation_every(run)
    return sorted({*(math.ceil(every * k) for k in range(1, math.floor(total / every) + 1)), total})


def rate(run: spec.Run, step: int) -> float:
    """The matrices' learning rate of the `step`-th update (from 1): what `optim/learning_rate` logs there."""
    rates, total, done = scaling.rates(run), spec.steps(run), step - 1
    peak = run.optim.adamw_lr if run.optim.rule == "adamw" else rates.muonh_lr
    if done < rates.warmup_steps:
        return peak * done / rates.warmup_steps
    final = run.optim.final_frac
    return peak * (final + (1 - final) * (total - done) / max(total - rates.warmup_steps, 1))


def place(run: spec.Run, name: str, metric: str, step: int) -> Row:
    """Every column but `value` of a run's row at a step; FLOPs without the readout, as the reference ladder counts them."""
    return {
        "run": name,
        "metric": metric,
        "step": step,
        "steps_total": spec.steps(run),
        "tokens": step * spec.tokens_per_step(run),
        "tokens_per_step": spec.tokens_per_step(run),
        "active_params": flops.active(run),
        "total_params": sum(flops.params(run).values()),
        "flops": step * flops.train_step(run, readout=False),
        "lr": rate(run, step),
    }


def evaluated(log: logs.RunLog) -> list[int]:
    """The steps at which a run was evaluated, without step 0."""
    found: set[int] = set()
    for name in log.metrics:
        if EVALUATION.fullmatch(name):
            found.update(int(step) for step in log.series(name)[0] if step > 0)
    return sorted(found)


def of_run(
    log: logs.RunLog, metrics: Sequence[str] | None = None, purpose: str = "", share: float | int | None = None
) -> list[Row]:
    """Rows for `forecast.points.of_rows`: one per metric and evaluation of a run, NaN values among them as they were logged.

    Evaluations are as logged. What every update logs is the mean over the updates since the evaluation before, or over as large a
    share of the run as whoever is forecast has between two evaluations.

    Args:
        log: the run.
        metrics: names; all that are forecast if not given. One that the run has not logged gives no row.
        purpose: of the rung in its ladder; kept in the row, where a table does not read it.
        share: `every_frac` of whoever is forecast; the run's own if not given.
    """
    run = spec.from_json(log.run["run"])
    width = None if share in (None, run.evals.every_frac) else share * spec.steps(run)
    ends = np.array(evaluated(log), dtype=np.int64)
    wanted = forecastable(log.metrics) if metrics is None else [name for name in metrics if name in set(log.metrics)]
    rows = []
    for name in wanted:
        kept = measured(log, name, ends, width)
        rows += [place(run, log.name, name, step) | {"value": kept[step], "purpose": purpose} for step in sorted(kept)]
    return rows


def measured(log: logs.RunLog, name: str, ends: np.ndarray, width: float | int | None = None) -> dict[int, float]:
    """A metric by update: an evaluation as logged, what every update logs as `windows` up to each of `ends`."""
    steps, values = log.series(name)
    if not name.startswith("eval_"):
        return windows(steps, values, ends, width)
    return {int(s): float(v) for s, v in zip(steps, values, strict=True) if s > 0}


def windows(steps: np.ndarray, values: np.ndarray, ends: np.ndarray, width: float | int | None = None) -> dict[int, float]:
    """The mean of a metric over the updates up to each of `ends` and after the one before it; windows without a row have none.

    With a `width` over so many updates, at least one, up to each of `ends`.
    """
    after = np.concatenate([[0], ends])[:-1] if width is None else ends - max(width, 1)
    begins, stops = np.searchsorted(steps, after, "right"), np.searchsorted(steps, ends, "right")
    return {int(end): float(np.mean(values[a:b])) for end, a, b in zip(ends, begins, stops, strict=True) if b > a}


class Gathered(NamedTuple):
    """What a ladder's runs logged."""

    hero: spec.Run
    rungs: list[dict[str, Any]]  # name, purpose, key, steps (finished), steps_total, finished, checksum (of the corpus)
    rows: list[Row]
    metrics: list[str]
    alarms: list[alarms.Alarm]
    one_schedule: bool  # hero and rungs have one learning-rate path in shares of run and peak


def gather(home: Path, name: str, metrics: Sequence[str] | None = None) -> Gathered:
    """The rungs of a hero's ladder with their rows, and what is wrong with them.

    A metric is forecast if every rung that has begun logged it. Layers are compared where hero and rungs have as many; speed where all
    rungs ran on one kind of machine and on as many devices, of the chip, that the hero is planned for.

    Raises:
        ValueError: when there is no ladder of this name, or a rung's run has other values than the ladder says.
    """
    body = ladders.load(home, name)
    hero = spec.from_json(body["hero"])
    told: list[alarms.Alarm] = []
    rungs, logged = [], {}
    for entry in body["rungs"]:
        planned = spec.from_json(entry["run"])
        found = {"name": entry["name"], "purpose": entry["purpose"], "key": planned.key(), "steps": 0}
        found |= {"steps_total": spec.steps(planned), "finished": False, "checksum": None}
        rungs.append(found)
        if not (home / "runs" / entry["name"] / "run.json").is_file():
            told.append(alarms.alarm("rung_missing", f"{entry['name']} has not begun; argosy ladder {name} --run trains it"))
            continue
        log = logs.read(home / "runs" / entry["name"])
        changed = spec.difference(planned, spec.from_json(log.run["run"]))
        if changed:
            said = "; ".join(f"{key} {now} (the ladder says {was})" for key, (was, now) in changed.items())
            raise ValueError(
                f"run {entry['name']!r} is not the rung that the ladder of {name!r} holds: {said}; move that run away, or name the"
                " hero otherwise with --as"
            )
        found |= {"steps": ladders.updates(log), "finished": ladders.is_finished(log), "checksum": checksum(log)}
        if not evaluated(log):
            told.append(
                alarms.alarm("rung_missing", f"{entry['name']} has no evaluation yet; argosy ladder {name} --run goes on")
            )
            continue
        logged[entry["name"]] = (planned, log, entry["purpose"])
    common, left = shared(hero, [(run, log) for run, log, _ in logged.values()], metrics)
    rows = [row for _, log, purpose in logged.values() for row in of_run(log, common, purpose, hero.evals.every_frac)]
    broken = [row for row in rows if not math.isfinite(row["value"])]
    told += left + not_finite(broken) + differing(hero, {n: run for n, (run, _, _) in logged.items()}, rungs)
    rows = [row for row in rows if math.isfinite(row["value"])]
    left_of = Counter(row["metric"] for row in rows)
    common = [n for n in common if left_of[n] >= LEAST_POINTS]
    paths = {schedule(run) for run in [hero, *(run for run, _, _ in logged.values())]}
    return Gathered(hero, rungs, [row for row in rows if row["metric"] in set(common)], common, told, len(paths) == 1)


def schedule(run: spec.Run) -> tuple[float, float]:
    """The path of a learning rate, in shares of the run and of its peak."""
    return run.optim.warmup_frac, run.optim.final_frac


def fitted(gathered: Gathered, name: str, method: str) -> tuple[list[Row], list[Row]]:
    """The rows to fit and the rows asked, learning rates left out unless they say something.

    Where all runs have one path, progress says all of it, and the law without rates forecast pocket's ladder and hero at least as well
    (decisions.md); where paths differ, or `--method schedule` asks for them, they are told.
    """
    rates = method == "schedule" or not gathered.one_schedule
    rows = gathered.rows if rates else [row | {"lr": None} for row in gathered.rows]
    return rows, asked(gathered.hero, name, gathered.metrics, rates=rates)


def enough(gathered: Gathered, name: str) -> None:
    """Refuse a ladder of fewer than three sizes.

    Raises:
        ValueError: saying which it has.
    """
    sizes = {row["run"]: row["active_params"] for row in gathered.rows}
    if surface.sizes(np.array(list(sizes.values()) or [1.0])) < LEAST_SIZES or len(sizes) < LEAST_SIZES:
        have = ", ".join(f"{run} ({active:,} active)" for run, active in sizes.items()) or "none"
        raise ValueError(
            f"a forecast is registered from at least {LEAST_SIZES} sizes with evaluations, the ladder of {name!r} has {have};"
            f" argosy ladder {name} --run trains the rest"
        )


def checksum(log: logs.RunLog) -> str | None:
    """Of the corpus that a run began on."""
    return next((r["fields"].get("checksum") for r in log.lineage if r["kind"] == "corpus"), None)


def shared(
    hero: spec.Run, rungs: Sequence[tuple[spec.Run, logs.RunLog]], metrics: Sequence[str] | None
) -> tuple[list[str], list[alarms.Alarm]]:
    """The metrics that can be forecast, and alarms about those that cannot."""
    if not rungs:
        return [], []
    sets = [set(forecastable(log.metrics)) for _, log in rungs]
    common, some = set.intersection(*sets), set.union(*sets)
    deep = any(run.model.layers != hero.model.layers for run, _ in rungs)
    told = []
    if missing := sorted(n for n in some - common if not LAYER.match(n)):
        told.append(
            alarms.alarm(
                "not_in_every_rung", f"not forecast, since not every rung logged them: {', '.join(missing[:6])}"
                + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
            )
        )  # fmt: skip
    if deep:
        common = {n for n in common if not LAYER.match(n)}
    if not one_machine(hero, rungs):
        common = {n for n in common if not n.startswith(SPEED)}
    # A metric that is 0 throughout (drops at a sender that has no limit) says nothing.
    common = {n for n in common if any((log.series(n)[1] != 0).any() for _, log in rungs)}
    headline = known.macro_bpb(list(common))
    order = sorted(common, key=lambda n: (n != headline, known.rank(n)))
    return [n for n in order if metrics is None or n in metrics], told


def one_machine(hero: spec.Run, rungs: Sequence[tuple[spec.Run, logs.RunLog]]) -> bool:
    """Whether speeds may be compared: one chip, as many devices, one kind of machine."""
    chips = {(run.compute.chip, spec.devices(run)) for run in [hero, *(run for run, _ in rungs)]}
    about = [log.run.get("environment") or {} for _, log in rungs]
    return len(chips) == 1 and len({(e.get("machine"), e.get("processors")) for e in about}) == 1


def not_finite(broken: Sequence[Row]) -> list[alarms.Alarm]:
    """One alarm for each run with values that are no numbers."""
    found = []
    for run in dict.fromkeys(row["run"] for row in broken):
        own = [row for row in broken if row["run"] == run]
        names = list(dict.fromkeys(row["metric"] for row in own))
        found.append(
            alarms.alarm(
                "not_finite",
                f"{run}: {', '.join(names[:3])}{f' and {len(names) - 3} more metrics' if len(names) > 3 else ''} are NaN or infinite from"
                f" step {min(row['step'] for row in own)}: left out. A rung that diverged is no rung: train it again or change the recipe",
            )
        )
    return found


SAME = {  # what hero and rungs must share for one law to hold all of them
    "data.corpus": lambda r: r.data.corpus,
    "data.seq_len": lambda r: r.data.seq_len,
    "data.phases": lambda r: tuple((p.until_frac, p.weights) for p in r.data.phases),
    "model.vocab": lambda r: r.model.vocab,
    "evals.tokens_per_set": lambda r: r.evals.tokens_per_set,
    "moe.experts": lambda r: r.moe.experts,
    "moe.experts_per_token": lambda r: r.moe.experts_per_token,
    "routing.balance": lambda r: r.routing.balance,
    "routing.capacity": lambda r: capacity(r.routing),
    "optim.rule": lambda r: r.optim.rule,
    "optim.scaling": lambda r: r.optim.scaling,
    "optim.lr_scale": lambda r: r.optim.lr_scale,
    "optim.warmup_frac": lambda r: r.optim.warmup_frac,
    "optim.final_frac": lambda r: r.optim.final_frac,
    "model.z_loss": lambda r: r.model.z_loss,
}


def capacity(routing: spec.Routing) -> str:
    """What decides drops in training.

    >>> from argosy.runs import pocket
    >>> capacity(pocket.run().routing)
    'bounded receiver 1.15'
    """
    if routing.capacity != "bounded":
        return routing.capacity
    sender = f" sender {routing.sender_capacity:g}" if routing.exchange == "pooled_wave" else ""
    return f"bounded receiver {routing.receiver_capacity:g}{sender}"


def differing(hero: spec.Run, runs: dict[str, spec.Run], rungs: Sequence[dict[str, Any]]) -> list[alarms.Alarm]:
    """Alarms about what the rungs do not share with the hero, or one corpus with another."""
    found = []
    for field, of in SAME.items():
        other = [name for name, run in runs.items() if of(run) != of(hero)]
        if other:
            found.append(
                alarms.alarm(
                    "rungs_differ",
                    f"{field} is {short(of(hero))} in the hero and {short(of(runs[other[0]]))} in {', '.join(other)}: the forecast is of a"
                    " run like the rungs",
                )
            )
    sums = {r["checksum"]: r["name"] for r in rungs if r["checksum"]}
    if len(sums) > 1:
        said = ", ".join(f"{name} {str(value)[:16]}" for value, name in sums.items())
        found.append(
            alarms.alarm("rungs_differ", f"the corpus has other checksums: {said}; the rungs did not read the same text")
        )
    return found


def short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def asked(hero: spec.Run, name: str, metrics: Sequence[str], *, rates: bool = False) -> list[Row]:
    """The target's rows, metric by metric; with the learning rates or without."""
    rows = [place(hero, name, metric, step) for metric in metrics for step in evaluation_steps(hero)]
    return rows if rates else [row | {"lr": None} for row in rows]
