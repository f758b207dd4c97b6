"""A store as a ladder and a hero leave it: pocket's runs, their metrics from a law that is known, plus noise.

Noise is a function of (seed, run, metric kind, step): a hero that is written in pieces equals one written at once.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy import spec
from argosy.forecast import joint
from argosy.judge import ladders
from argosy.judge import points as P
from argosy.plan import flops
from argosy.plan.ladder import Rung
from argosy.runs import pocket
from argosy.track import store

SETS = {
    "library": (1.00, 0.384),
    "packages": (0.97, 0.377),
    "prose": (1.12, 0.413),
    "tests": (0.95, 0.366),
    "topics": (1.02, 0.402),
}
PARTS = {"total": 1.0, "attention": 0.45, "embed": 0.15, "readout": 0.8, "routed": 0.07, "router": 0.006, "shared": 0.22}
LAW = {"E": 1.6, "A": 0.9, "a": 0.28, "B": 1.1, "b": 0.26, "G": 0.15, "c": 0.8, "K": 0.15, "q": 0.25}
NOISE, OFFSET, ROUGH = 0.001, 0.001, 0.03  # of log loss: an evaluation, a run's luck; of other metrics, an update

Row = dict[str, float]
Fault = Callable[[str, float, Row], Row]  # (run's name, progress, row) -> row


def loss(run: spec.Run, step: int) -> float:
    """The law's loss in nats: falls with size, tokens, updates and the schedule."""
    if step == 0:
        return math.log(run.model.vocab)
    law, done = LAW, step / spec.steps(run)
    size, tokens = flops.active(run) / 300_000, step * spec.tokens_per_step(run) / 1e6
    reducible = law["A"] * size ** -law["a"] + law["B"] * tokens ** -law["b"] + law["G"] * (step / 100) ** -law["c"]
    return law["E"] + reducible - law["K"] * done ** (1 + law["q"])


def luck(seed: int, name: str, step: int, count: int) -> np.ndarray:
    """Standard normal numbers of a run and a step; step -1 are the run's own."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), step + 1]).normal(size=count)


def evaluation(run: spec.Run, name: str, step: int, seed: int, excess: float = 0.0) -> Row:
    """A held-out evaluation: losses and bits per byte of each set and their means."""
    own, common = luck(seed, name, -1, 1)[0], luck(seed, name, step, len(SETS) + 1)
    whole = loss(run, step) * math.exp(OFFSET * own + NOISE * common[0] + excess)
    row = {}
    for k, (source, (share, bits)) in enumerate(SETS.items()):
        nats = whole * share * math.exp(NOISE * common[k + 1])
        row |= {f"eval_dropless/{source}/loss": nats, f"eval_dropless/{source}/bpb": nats * bits}
    corpus = run.data.corpus
    for unit in ("loss", "bpb"):
        row[f"eval_dropless/{corpus}/macro_{unit}"] = float(np.mean([row[f"eval_dropless/{s}/{unit}"] for s in SETS]))
    return row


def update(run: spec.Run, name: str, step: int, seed: int, excess: float = 0.0) -> Row:
    """What an update logs."""
    done, scale = step / spec.steps(run), math.log(flops.train_step(run, readout=False) * spec.steps(run) / 1e12)
    rough = np.exp(ROUGH * luck(seed, name, 1_000_000 + step, 8))
    nats = loss(run, step) * math.exp(OFFSET * luck(seed, name, -1, 1)[0] + excess) * rough[0] ** 0.2
    norm = math.exp(0.1 + 0.05 * scale - 0.4 * done) * rough[1]
    entropy = math.log(run.moe.experts) * (0.995 - 0.003 * done)
    layers = range(run.model.layers)
    return (
        {
            "train/loss": nats + 0.01,
            "train/cross_entropy_loss": nats,
            "run_progress": done,
            "moe/drop_fraction": 0.03 * math.exp(-0.05 * scale) * rough[2],
            "moe/sender_drop_fraction": 0.0,
            "moe/receiver_drop_fraction": 0.03 * math.exp(-0.05 * scale) * rough[2],
            "train/router/routing_entropy_mean": entropy * rough[3] ** 0.01,
            "train/router/load_max_over_mean": 1.5 * rough[4],
            "train/router/load_balancing_loss": 4.0 * rough[3] ** 0.1,
            "train/router/router_z_loss": 17.0 * rough[3] ** 0.1,
            "train/router/bias_min": -2.0 * rough[5],
            "train/router/bias_max": 1.6 * rough[5],
            "optim/learning_rate": P.rate(run, step),
            "throughput/tokens_per_second": 2e10 / flops.train_step(run, readout=True) * spec.tokens_per_step(run) * rough[6],
            "throughput/mfu": 0.2 * rough[6],
            "throughput/total_tokens": float(step * spec.tokens_per_step(run)),
        }
        | {f"grad/norm/{part}": share * norm for part, share in PARTS.items()}
        | {f"train/router/layer_{i}/load_max_over_mean": 1.4 * rough[4] * (1 + 0.02 * i) for i in layers}
        | {f"train/router/layer_{i}/drop_fraction": 0.03 * math.exp(-0.05 * scale) * rough[2] for i in layers}
        | {f"train/router/layer_{i}/routing_entropy": entropy * rough[3] ** 0.01 for i in layers}
    )


def sail(
    home: Path,
    name: str,
    run: spec.Run,
    until: float = 1.0,
    begin: float = 0.0,
    excess: tuple[float, float] | None = None,
    fault: Fault | None = None,
    seed: int = 0,
    corpus: str = "5f1d77c2",
    code: dict[str, Any] | None = None,
) -> Path:
    """Write a run's updates after `begin` and up to `until` (shares of it): every hundredth and those before an evaluation.

    Args:
        excess: (share of the run, log): losses from there on are higher by this.
        fault: changes any row before it is recorded.
        code: the version that this attempt says it runs.
    """
    folder, total = home / "runs" / name, spec.steps(run)
    store.create(
        folder,
        spec.to_json(run),
        {"argosy": "0.1.0"},
        environment={"python": "3.11.0", "machine": "x86_64", "processors": 2},
    )
    first, last = round(begin * total), round(until * total)
    evaluations = set(P.evaluation_steps(run))
    steps = evaluations | {max(1, round(total * k / 100)) for k in range(101)}
    change = fault or (lambda _name, _done, row: row)
    with store.open_writer(folder, first, **({} if code is None else {"code": code})) as writer:
        if not first:
            writer.lineage("corpus", 0, name=run.data.corpus, checksum=corpus, ledger={})
            writer.event("baseline", 0, **dict.fromkeys(SETS, 2.0))
            writer.record(0, change(name, 0.0, evaluation(run, name, 0, seed)))
        for step in sorted(s for s in steps if first < s <= last):
            done = step / total
            more = excess[1] if excess and done >= excess[0] else 0.0
            writer.record(step, change(name, done, update(run, name, step, seed, more)))
            if step in evaluations:
                writer.record(step, change(name, done, evaluation(run, name, step, seed, more)))
        writer.close("done" if last == total else "stopped")
    return folder


def rungs_of(hero: spec.Run) -> tuple[Rung, ...]:
    """Four sizes with tokens by active parameters, one of them again at half the batch and with another seed."""
    sizes = [Rung(f"d{width}", pocket.rung(width, hero), "size") for width in (32, 48, 64, 96)]
    again = sizes[2].run
    half = replace(again, data=replace(again.data, batch_seqs=again.data.batch_seqs // 2))
    return (*sizes, Rung("d64-small-batch", half, "small_batch"), Rung("d64-seed1", replace(again, seed=1), "seed"))


def voyage(
    home: Path,
    name: str = "hero",
    *,
    hero: spec.Run | None = None,
    rungs: Sequence[Rung] | None = None,
    hero_until: float = 0.0,
    excess: tuple[float, float] | None = None,
    fault: Fault | None = None,
    seed: int = 0,
    **more: Any,
) -> spec.Run:
    """A finished ladder under `home` and the hero up to a share of its updates (0: not begun); returns the hero.

    `excess` is the hero's alone; `fault` is asked about every row of every run.
    """
    hero = hero or pocket.run()
    rungs = rungs_of(hero) if rungs is None else rungs
    ladders.save(home, name, hero, rungs)
    for rung in rungs:
        sail(home, f"{name}-{rung.name}", rung.run, fault=fault, seed=seed, **more)
    if hero_until:
        sail(home, name, hero, hero_until, excess=excess, fault=fault, seed=seed, **more)
    return hero


HEADLINE = "eval_dropless/stdlib/macro_bpb"


def few(_name: str, _done: float, row: Row) -> Row:
    """A fault that leaves two metrics: fits are what costs."""
    return {k: v for k, v in row.items() if k in (HEADLINE, "grad/norm/total")}


def sealed(body: dict[str, Any]) -> dict[str, Any]:
    """A registered forecast with the hash of what is in it, by the definition alone."""
    kept = {k: v for k, v in body.items() if k != "sha256"}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return kept | {"sha256": hashlib.sha256(canonical.encode()).hexdigest()}


def quick(patch: pytest.MonkeyPatch) -> None:
    """Fewer refits behind the bands, where a test is not about their width."""
    patch.setattr(joint, "fit", partial(joint.fit, draws=32))
