"""What one run shows besides its loss: findings, each with its rule, its number and where the limit comes from.

Where the public reference run gives a number it is taken and named (operations.md 1, marin#8435); the rest is ours and says so.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from argosy import spec
from argosy.judge import growth as G
from argosy.plan import drops
from argosy.track import metrics as known
from argosy.track.log import RunLog

GO, CAUTION, NO_GO = "GO", "CAUTION", "NO-GO"
LEVELS = (GO, CAUTION, NO_GO)
CHANCE = 0.05  # of one false finding among all groups of a run
FINISHED = 0.9  # of a run: before that norms of healthy runs grow as fast as those of others, and no exponent is judged
WEIGHT = 0.1  # of the whole gradient's square: groups below it do not decide


class Limit(NamedTuple):
    """From where on a number is a caution, from where on it forbids; infinite where it never does. And who says so."""

    caution: float
    no_go: float
    source: str

    def level(self, value: float) -> str:
        return GO if not value > self.caution else CAUTION if not value > self.no_go else NO_GO


LIMITS = {
    "gradient level": Limit(2.0, 4.0, "reference run: its alert is at 2; a rung above 4 made it add z-loss (marin#8435)"),
    "gradient growth": Limit(0.5, math.inf, "ours: the root of the updates; 1.4 did the reference no harm (marin#9149)"),
    "parameter growth": Limit(0.5, math.inf, "ours: a random walk; the reference's attention gates grew unseen (marin#8818)"),
    "logit scale": Limit(1.5, 2.5, "ours: times that of uniform logits, ln(vocabulary)"),
    "growth with batch": Limit(0.1, math.inf, "ours: more of the exponent per doubling of the batch"),
    "growth with width": Limit(0.5, math.inf, "ours: the exponent at the hero's width"),
    "drops": Limit(0.07, 0.15, "reference run: its alert is at 7%; 15% is ours"),
    "drops against plan": Limit(1.0, math.inf, "ours: twice what is planned and one percent"),
    "router bias": Limit(200.0, 400.0, "reference run: its alert is at 400; 200 is ours"),
    "loss rise": Limit(1.0, 1.0, "reference run's spike rule: 0.05 and six deviations above the mean before"),
}  # fmt: skip


class Evidence(NamedTuple):
    """One finding: its level, the rule, where it was found, the number, all of it in words, and whose limit it is.

    `score` is the number over the limit of caution: findings of one level are sorted by it.
    """

    level: str
    rule: str
    where: str
    value: float
    says: str
    source: str
    score: float


def found(rule: str, where: str, value: float, says: str) -> Evidence:
    """A finding under one of `LIMITS`."""
    limit = LIMITS[rule]
    return Evidence(limit.level(value), rule, where, value, says, limit.source, value / limit.caution)


def of_run(log: RunLog, until: int | None = None) -> list[Evidence]:
    """What a run shows in its first `until` updates, or in all that it has; one that has hardly begun shows nothing.

    How fast norms grow is judged once a run is nearly finished.
    """
    run = spec.from_json(log.run["run"])
    grown = G.growth(log, until=until)
    rates = []
    if max((g.updates for g in grown.values()), default=0) >= FINISHED * spec.steps(run):
        rates = late(log.name, "gradient growth", [grown[n] for n in heavy(grown)])
        rates += late(log.name, "parameter growth", [g for n, g in grown.items() if n.startswith("params/norm/")])
    return [
        *losses(log, until),
        *level(log.name, grown),
        *rates,
        *logits(log.name, run, grown.get("train/logit_z")),
        *dropped(log, run, until),
        *bias(log, until),
    ]


def losses(log: RunLog, until: int | None = None) -> list[Evidence]:
    """Values that are no numbers, and a training loss that rises and stays."""
    name = next((n for n in ("train/cross_entropy_loss", "train/loss") if n in log.metrics), None)
    if name is None:
        return []
    steps, values = G.upto(log, name, until)
    broken = steps[~np.isfinite(values)]
    if len(broken):
        says = f"the training loss is no number from update {broken[0]:,}"
        return [Evidence(NO_GO, "finite", log.name, math.nan, says, "ours", math.inf)]
    last = max(len(values) // 20, 5)
    recent, before = values[-last:], values[-max(len(values) // 3, 25) : -last]
    if len(before) < 20:
        return []
    deviation = 1.4826 * float(np.median(np.abs(np.diff(before)))) / math.sqrt(2)  # neither the fall nor a rise widens it
    band = max(0.05, 6 * deviation)
    rise = float(recent.min() - before.mean())
    says = f"the last 5% of the updates are at least {rise:+.3f} nats from the mean before; a rise is {band:.3f}"
    return [found("loss rise", log.name, rise / band, says)]


def heavy(grown: dict[str, G.Growth]) -> list[str]:
    """The gradient norms that decide: the whole, and the groups that make up a tenth of its square or more."""
    total = grown.get("grad/norm/total")
    if total is None:
        return []
    parts = [n for n in grown if n.startswith("grad/norm/") and n != total.metric]
    return [total.metric, *(n for n in parts if grown[n].last ** 2 >= WEIGHT * total.last**2)]


def level(name: str, grown: dict[str, G.Growth]) -> list[Evidence]:
    """The gradient's norm where it is largest."""
    total = grown.get("grad/norm/total")
    if total is None or not math.isfinite(total.peak):
        return []
    says = f"the norm peaks at {total.peak:.3g}, at {total.peak_at:.0%} of the run; {total.last:.3g} at the end"
    return [found("gradient level", name, total.peak, says)]


def late(name: str, rule: str, groups: Sequence[G.Growth]) -> list[Evidence]:
    """The group that surely grows fastest in the second half of the updates."""
    told = [g for g in groups if math.isfinite(g.late.slope)]
    if not told:
        return []
    worst = max(told, key=lambda g: g.late.bound(-1, CHANCE / len(told)))
    sure = worst.late.bound(-1, CHANCE / len(told))
    grows = f"{words(worst.metric)} grows as updates^{worst.late.slope:.2f} +- {worst.late.error:.2f} in the second half"
    return [found(rule, name, sure, f"{grows}, at least ^{sure:.2f}")]


def words(metric: str) -> str:
    """A metric as people say it.

    >>> words("grad/norm/readout"), words("params/norm/head_gate"), words("train/logit_z")
    ('gradient norm of readout', 'norm of head_gate', 'logits')
    """
    kind, _, group = metric.rpartition("/")
    return {
        "grad/norm": f"gradient norm of {group}",
        "params/norm": f"norm of {'the norms' if group == 'norm' else group}",
    }.get(kind, known.describe(metric).label)


def logits(name: str, run: spec.Run, grown: G.Growth | None) -> list[Evidence]:
    """The root mean square of the logits' log-sum-exp over that of uniform logits."""
    if grown is None or not math.isfinite(grown.last):
        return []
    level = math.sqrt(grown.last)
    scale = level / math.log(run.model.vocab)
    says = f"log-sum-exp is {level:.3g}, {scale:.2f} times ln(vocabulary)"
    if math.isfinite(grown.late.slope):
        says += f"; it goes as updates^{grown.late.slope / 2:.2f} +- {grown.late.error / 2:.2f}"
    return [found("logit scale", name, scale, says)]


def tail(log: RunLog, metric: str, until: int | None = None, share: float = 0.25) -> float:
    """The mean of a metric's last points; NaN where there is none."""
    if metric not in log.metrics:
        return math.nan
    _, values = G.upto(log, metric, until)
    return float(values[-max(round(share * len(values)), 1) :].mean()) if len(values) else math.nan


def dropped(log: RunLog, run: spec.Run, until: int | None = None) -> list[Evidence]:
    """The share of assignments that found no room in the last quarter."""
    level = tail(log, "moe/drop_fraction", until)
    if not math.isfinite(level) or not drops.bounded(run):
        return []
    return [found("drops", log.name, level, f"{level:.1%} of the assignments dropped in the last quarter")]


def planned(log: RunLog, run: spec.Run) -> list[Evidence]:
    """The same against what the plan expects of the run's transport at the documents per shard that it logged."""
    level, documents = tail(log, "moe/drop_fraction"), tail(log, "data/equal_documents_per_shard")
    if not math.isfinite(level) or not math.isfinite(documents) or not drops.bounded(run):
        return []
    _, kind, bounds = drops.transports(run)[0]
    at = replace(drops.shape(run), documents=round(documents, 2))
    expected = drops.expected(at, kind, bounds, drops.assumed(run.moe.experts, run.moe.experts_per_token)).total
    says = f"{level:.1%} dropped in the last quarter, {expected:.1%} planned"
    return [found("drops against plan", log.name, level / (2 * expected + 0.01), says)]


def bias(log: RunLog, until: int | None = None, updates: int | None = None) -> list[Evidence]:
    """The router bias farthest from 0 at the end, or at `updates` of the hero if it goes on growing as it does."""
    if not {"train/router/bias_max", "train/router/bias_min"} <= set(log.metrics):
        return []
    steps, high = G.upto(log, "train/router/bias_max", until)
    low = G.upto(log, "train/router/bias_min", until)[1]
    far = np.maximum(np.abs(high), np.abs(low))
    if not len(far):
        return []
    now = float(far[-max(len(far) // 10, 1) :].mean())
    says, value = f"the bias farthest from 0 is {now:.3g}", now
    begun = steps > G.LATE * steps[-1]
    rate = G.trend(steps[begun], far[begun])
    sure = rate.bound(-1) if math.isfinite(rate.slope) else math.nan
    if sure > 0:
        says += f" and goes as updates^{rate.slope:.2f} +- {rate.error:.2f}"
        if updates is not None:
            value = now * max(updates / int(steps[-1]), 1.0) ** rate.slope
            says += f": {value:.3g} after the hero's {updates:,}"
    return [found("router bias", log.name, value, says)]
