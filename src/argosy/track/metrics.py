"""Every metric of a run: its unit, what it means, and on which panel of the page it is drawn.

Names follow the reference run (reference_run.md 7.1), so that curves can be laid over each other. A part in angle
brackets stands for anything, e.g. `grad/norm/<part>` for `grad/norm/routed`.
"""

import functools
import re
from typing import Literal, NamedTuple

Style = Literal["smooth", "sources", "lines", "band", "heat"]


class Panel(NamedTuple):
    """One chart of the page, in the order in which charts appear.

    `style`: `smooth` draws raw values faintly under a running mean, `sources` one colour per data source with its
    baseline, `lines` plain lines, `band` the area between a smallest and a largest value, `heat` layers against steps.
    `place`: `main` is always shown, `more` on request.
    """

    key: str
    title: str
    look: str
    unit: str
    style: Style
    scale: Literal["linear", "log"] = "linear"
    place: Literal["main", "more"] = "main"


class Metric(NamedTuple):
    """One kind of metric; `panel` is empty where it is only read, not drawn."""

    pattern: str
    unit: str
    meaning: str
    panel: str
    label: str


PANELS = (
    Panel("loss", "Training loss", "Falls fast, then slowly; a rise that stays is trouble.", "nats/token", "smooth"),
    Panel(
        "heldout",
        "Held-out text",
        "Bits per byte of text that the model never trained on; dashed: gzip -9 on the same text.",
        "bits/byte",
        "sources",
    ),
    Panel("entropy", "Routing entropy", "How evenly tokens spread over experts, as a share of the most possible.", "share", "lines"),
    Panel("load", "Largest load", "Tokens of the busiest expert over the mean; 1 is perfect balance.", "times the mean", "lines"),
    Panel("drops", "Dropped assignments", "Share of token-expert pairs that found no room.", "share", "lines"),
    Panel("bias", "Router bias", "From the smallest to the largest bias that balancing adds to an expert's score.", "logits", "band"),
    Panel("heat", "Load by layer", "The busiest expert of each layer over the mean, from the first layer up.", "times the mean", "heat"),
    Panel("speed", "Tokens per second", "All of training's time but evaluations; dips are checkpoints or a busy machine.", "tokens/s", "lines"),
    Panel("mfu", "Use of the hardware", "Model FLOPs over what the devices could do.", "share", "lines"),
    Panel("grad", "Gradient norms", "By part of the network; all rising together means trouble ahead.", "norm", "lines", "log"),
    Panel("rates", "Learning rates", "Warm-up, then linear decay, both groups alike.", "rate", "lines"),
    Panel("params", "Parameter norms", "Hyperball parts stay where they began; the others may drift.", "norm", "lines", "log", "more"),
    Panel("heldout_loss", "Held-out loss", "Cross-entropy on held-out text.", "nats/token", "sources", "linear", "more"),
    Panel("margins", "Router margins", "From the smallest to the largest score above the threshold of its token.", "logits", "band", "linear", "more"),
    Panel("logits", "Logit scale", "Squared log-sum-exp of the readout's logits: what z-loss holds down.", "nats^2", "smooth", "log", "more"),
    Panel("router_loss", "Router statistics", "The load-balancing loss is K at balance.", "", "lines", "log", "more"),
    Panel("documents", "Documents per shard", "The fewer a shard holds, the more unevenly it fills its experts.", "documents", "lines", "linear", "more"),
    Panel("time", "Where the time goes", "Seconds per update and the parts of it that are not the update.", "s", "lines", "linear", "more"),
    Panel("memory", "Memory", "Of the process, and of a device where it can be read.", "GiB", "lines", "linear", "more"),
)  # fmt: skip

METRICS = (
    Metric("train/cross_entropy_loss", "nats/token", "cross-entropy of the training batch", "loss", "cross-entropy"),
    Metric("train/loss", "nats/token", "what is minimised: cross-entropy with z-loss and balancing losses", "loss", "total loss"),
    Metric("eval_dropless/<corpus>/macro_bpb", "bits/byte", "held-out bits per UTF-8 byte, mean over sources, no drops", "heldout", "mean of sources"),
    Metric("eval_dropless/<set>/bpb", "bits/byte", "held-out bits per UTF-8 byte, no drops", "heldout", "<set>"),
    Metric("eval_dropless/<corpus>/macro_loss", "nats/token", "held-out cross-entropy, mean over sources, no drops", "heldout_loss", "mean of sources"),
    Metric("eval_dropless/<set>/loss", "nats/token", "held-out cross-entropy, no drops", "heldout_loss", "<set>"),
    Metric("eval_whole/<set>/bpb", "bits/byte", "bits per UTF-8 byte of all held-out text, at the end of the run", "", "<set>"),
    Metric("eval_whole/<set>/loss", "nats/token", "cross-entropy of all held-out text, at the end of the run", "", "<set>"),
    Metric("train/logit_z", "nats^2", "mean squared log-sum-exp of the readout's logits, whether z-loss weighs it or not", "logits", "logits"),
    Metric("train/router/routing_entropy_mean", "nats", "entropy of the share of tokens per expert, mean over layers; at most ln(experts)", "entropy", "mean over layers"),
    Metric("train/router/load_max_over_mean", "times the mean", "largest load of an expert over the mean, worst layer", "load", "worst layer"),
    Metric("moe/drop_fraction", "share", "dropped over valid assignments", "drops", "all"),
    Metric("moe/sender_drop_fraction", "share", "dropped for lack of room at the sender", "drops", "at the sender"),
    Metric("moe/receiver_drop_fraction", "share", "dropped for lack of room at the receiver", "drops", "at the receiver"),
    Metric("moe/accepted_share_lowest", "share", "accepted over valid assignments of the device that fared worst in a layer", "", "worst device"),
    Metric("moe/accepted_share_highest", "share", "accepted over valid assignments of the device that fared best in a layer", "", "best device"),
    Metric("moe/dropped_assignments", "pairs", "token-expert pairs dropped in the update, all layers", "", "dropped"),
    Metric("moe/cell_load_histogram/bin_<i>", "share", "cells (one shard's rows for one expert) by load over their shard's mean, all layers: bin 0 is below 2^-7/4, each next a factor 2^1/4 on", "", "bin <i>"),
    Metric("data/documents_per_shard", "documents", "documents in one shard's tokens, mean over shards", "documents", "documents"),
    Metric("data/equal_documents_per_shard", "documents", "how many equally long documents they count as: what decides drops", "documents", "as equally long"),
    Metric("train/router/bias_min", "logits", "smallest router bias", "bias", "smallest"),
    Metric("train/router/bias_max", "logits", "largest router bias", "bias", "largest"),
    Metric("train/router/margin_min", "logits", "smallest score above its token's threshold", "margins", "smallest"),
    Metric("train/router/margin_max", "logits", "largest score above its token's threshold", "margins", "largest"),
    Metric("train/router/layer_<i>/load_max_over_mean", "times the mean", "largest load of an expert of this layer over the mean", "heat", "<i>"),
    Metric("train/router/layer_<i>/routing_entropy", "nats", "routing entropy of this layer", "", "<i>"),
    Metric("train/router/layer_<i>/<what>", "", "a router statistic of this layer", "", "<i> <what>"),
    Metric("train/router/load_balancing_loss", "", "E sum(f p): K at balance; only logged unless balance is aux_loss", "router_loss", "load-balancing loss"),
    Metric("train/router/router_z_loss", "", "mean squared log-sum-exp of the router's scores", "router_loss", "router z-loss"),
    Metric("throughput/tokens_per_second", "tokens/s", "tokens over wall time between updates, evaluations left out", "speed", "tokens/s"),
    Metric("throughput/mfu", "share", "model FLOPs over the devices' peak", "mfu", "MFU"),
    Metric("throughput/accepted_mfu", "share", "the same without the FLOPs of dropped assignments", "mfu", "accepted work"),
    Metric("throughput/iteration_time", "s", "wall time from one finished update to the next, everything included", "time", "whole iteration"),
    Metric("throughput/duration", "s", "wall time of the update", "time", "update"),
    Metric("throughput/loading_time", "s", "time spent waiting for data", "time", "data"),
    Metric("throughput/checkpoint_time", "s", "time spent in checkpoints", "time", "checkpoint"),
    Metric("throughput/evaluation_time", "s", "time spent in evaluations", "time", "evaluation"),
    Metric("throughput/gflops_per_second", "GFLOP/s", "model FLOPs per second", "", "GFLOP/s"),
    Metric("throughput/total_tokens", "tokens", "tokens trained on so far", "", "tokens"),
    Metric("throughput/total_gflops", "GFLOP", "model FLOPs so far", "", "GFLOP"),
    Metric("grad/norm/total", "norm", "norm of the whole gradient", "grad", "total"),
    Metric("grad/norm/<part>", "norm", "norm of this part's gradient", "grad", "<part>"),
    Metric("params/norm/<part>", "norm", "Frobenius norm of this part's parameters", "params", "<part>"),
    Metric("optim/learning_rate", "rate", "learning rate of the matrices", "rates", "matrices"),
    Metric("optim/adam_lr", "rate", "learning rate of the Adam group", "rates", "Adam"),
    Metric("memory/<what>_gib", "GiB", "memory", "memory", "<what>"),
    Metric("run_progress", "share", "finished share of the run", "", "progress"),
    Metric("time", "s", "wall clock of the row, seconds since 1970", "", "time"),
)  # fmt: skip


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"<(\w+)>", pattern)
    return re.compile("".join(re.escape(p) if i % 2 == 0 else f"(?P<{p}>.+)" for i, p in enumerate(parts)))


def describe(name: str) -> Metric:
    """What is known of a metric, its label filled in; an unknown one is plain and not drawn.

    >>> describe("grad/norm/experts").label, describe("train/router/layer_3/load_max_over_mean").label
    ('experts', '3')
    >>> describe("mine/own").meaning
    'not in the table of metrics'
    """
    for metric in METRICS:
        found = _regex(metric.pattern).fullmatch(name)
        if found:
            parts = found.groupdict()
            return metric._replace(pattern=name, label=metric.label.replace("<", "{").replace(">", "}").format(**parts))
    return Metric(name, "", "not in the table of metrics", "", name)


def rank(name: str) -> tuple[int, str]:
    """Sorts metric names in the order of the table, then by name."""
    found = (i for i, metric in enumerate(METRICS) if _regex(metric.pattern).fullmatch(name))
    return next(found, len(METRICS)), name


def macro_bpb(names: list[str]) -> str | None:
    """The headline evaluation among metric names: `eval_dropless/<corpus>/macro_bpb`."""
    return next((name for name in sorted(names) if _regex("eval_dropless/<corpus>/macro_bpb").fullmatch(name)), None)
