"""Rows that look like those of a run."""

import math
from dataclasses import replace

from argosy import spec
from argosy.runs import pocket

SOURCES = {"library": 2.02, "prose": 2.35, "tests": 1.82, "topics": 2.28}


def small_run():
    """1,024 updates of 2,048 tokens, whatever the pocket recipe is just now."""
    run, weights = pocket.run(), (("library", 50.0), ("tests", 25.0), ("prose", 15.0), ("topics", 10.0))
    phases = (
        spec.Phase(name="main", until_frac=0.8, weights=weights),
        spec.Phase(name="cooldown", until_frac=1.0, weights=weights),
    )
    data = replace(run.data, corpus="stdlib", seq_len=256, batch_seqs=8, phases=phases)
    return replace(run, data=data, optim=replace(run.optim, horizon_tokens=2_097_152), moe=replace(run.moe, experts=32))


def row(step, steps, layers=4, experts=32):
    fall = math.exp(-step / 20)
    metrics = {
        "train/loss": 3.6 + 4.7 * fall,
        "train/cross_entropy_loss": 3.59 + 4.7 * fall,
        "run_progress": step / steps,
        "grad/norm/total": 1 + fall,
        "grad/norm/experts": 0.5 + fall,
        "params/norm/experts": 90.0,
        "optim/learning_rate": 0.01 * (1 - step / steps),
        "optim/adam_lr": 0.002 * (1 - step / steps),
        "moe/drop_fraction": 0.02 + 0.3 * fall,
        "moe/sender_drop_fraction": 0.015 + 0.2 * fall,
        "moe/receiver_drop_fraction": 0.005 + 0.1 * fall,
        "train/router/routing_entropy_mean": math.log(experts) * (0.99 - 0.1 * fall),
        "train/router/load_max_over_mean": 1.2 + fall,
        "train/router/bias_min": -1.0,
        "train/router/bias_max": 0.8,
        "throughput/tokens_per_second": 6000.0 + step % 7,
        "throughput/mfu": 0.31,
        "throughput/total_tokens": 2048.0 * step,
        "throughput/iteration_time": 0.33,
    }
    return metrics | {f"train/router/layer_{i}/load_max_over_mean": 1.1 + 0.05 * i + fall for i in range(layers)}


def evaluation(step):
    found = {f"eval_dropless/{name}/bpb": 0.88 * gzip + 4 * math.exp(-step / 30) for name, gzip in SOURCES.items()}
    return found | {"eval_dropless/stdlib/macro_bpb": sum(found.values()) / len(found)}


def sail(writer, first, last, steps):
    """Record updates first to last, with an evaluation every hundred."""
    for step in range(first, last + 1):
        writer.record(step, row(step, steps))
        if step % 100 == 0:
            writer.record(step, evaluation(step))
