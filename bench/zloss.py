"""Does the check before a launch see trouble before the loss does? Small runs at a rate too high, with and without logit z-loss.

    python bench/zloss.py --home voyages                          # trains what is missing, then prints the table
    python bench/zloss.py --home voyages --arms 0.3-none --train-only

Arms are a peak rate of AdamW and a z-loss; `0.03-logit` is what the others are compared with. All arms of a seed start from the same
weights and read the same batches, so losses are compared update by update. Runs end after 30% of their updates (`--stop`), with the
schedule of the whole. `argosy.judge.findings.of_run` is asked every few updates what it would have said then.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from argosy import spec
from argosy.judge import findings, growth
from argosy.runs import pocket
from argosy.track import log as logs

ARMS = ("0.3-none", "0.3-logit", "0.1-none", "0.03-logit")
REFERENCE = "0.03-logit"
SETTINGS = [
    "model.layers=2", "optim.rule=adamw", "optim.weight_decay=0", "optim.horizon_tokens=562648", "evals.tokens_per_set=2048",
    "evals.every_frac=0.5",
]  # fmt: skip
STOP = 330  # updates, of 1,099
EVERY = 4  # updates between two questions to the check
WINDOW = 16  # updates that a difference of losses is averaged over
APART = 0.02  # nats


def run_of(arm: str, seed: int, settings: list[str]) -> spec.Run:
    rate, z_loss = arm.split("-")
    given = [*SETTINGS, f"optim.adamw_lr={rate}", f"model.z_loss={z_loss}", *settings]
    return replace(spec.override(pocket.rung(32), given), seed=seed)


def train(home: Path, name: str, run: spec.Run, stop: int) -> None:
    from argosy import voyage

    if (home / "runs" / name / "run.json").is_file() and (logs.read(home / "runs" / name).last("train/loss") or (0,))[
        0
    ] >= stop:
        return
    host = spec.Host(home=home, name=name, checkpoint_every_s=1e6)
    voyage.begin(run, host)
    voyage.train(run, host, stop)


def lasting(flags: list[bool], at: list[int]) -> int | None:
    """The first of the places from which all flags hold to the end."""
    start = len(flags)
    while start > 0 and flags[start - 1]:
        start -= 1
    return at[start] if start < len(flags) else None


def asked(log: logs.RunLog, stop: int) -> dict[str, Any]:
    """When the check first said CAUTION and NO-GO, by which rule, and what it says last. Drops of so small a batch are left out."""
    told: dict[str, Any] = {"caution": None, "no_go": None, "rule": "-", "share": 0.0}
    looks = range(10, stop + 1, EVERY)
    for at in looks:
        found = [e for e in findings.of_run(log, until=at) if e.rule != "drops"]
        worst = max(found, key=lambda e: findings.LEVELS.index(e.level), default=None)
        if worst is None or worst.level == findings.GO:
            continue
        told["share"] += 1 / len(looks)
        if told["caution"] is None:
            told["caution"], told["rule"] = at, worst.rule
        if worst.level == findings.NO_GO and told["no_go"] is None:
            told["no_go"] = at
    return told


def apart(log: logs.RunLog, reference: logs.RunLog, stop: int) -> tuple[int | None, float]:
    """The update from which on a run's loss is above the reference's by `APART` and three standard errors, to the end; the end's difference."""
    steps, loss = log.series("train/cross_entropy_loss")
    other = reference.series("train/cross_entropy_loss")[1]
    count = min(len(loss), len(other), stop)
    difference = loss[:count] - other[:count]
    ends = list(range(WINDOW, count + 1, EVERY))
    flags = []
    for end in ends:
        part = difference[end - WINDOW : end]
        flags.append(bool(part.mean() > max(APART, 3 * part.std(ddof=1) / math.sqrt(WINDOW))))
    return lasting(flags, [int(steps[end - 1]) for end in ends]), float(difference[-4 * WINDOW :].mean())


def row(arm: str, seed: int, log: logs.RunLog, reference: logs.RunLog | None, stop: int) -> dict[str, Any]:
    grown = growth.growth(log, until=stop)
    out: dict[str, Any] = {"arm": arm, "seed": seed} | asked(log, stop)
    out |= {"peak": grown["grad/norm/total"].peak, "log_sum_exp": math.sqrt(grown["train/logit_z"].last)}
    out["apart"], out["difference"] = (None, 0.0) if reference is None else apart(log, reference, stop)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path("voyages"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="RATE-none or RATE-logit")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="a further override of all arms")
    parser.add_argument("--stop", type=int, default=STOP)
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[tuple[str, int], logs.RunLog] = {}
    for arm in args.arms:
        for seed in args.seeds:
            name = f"zloss-{arm}-{seed}"
            train(args.home, name, run_of(arm, seed, args.settings), args.stop)
            found[arm, seed] = logs.read(args.home / "runs" / name)
    if args.train_only:
        return
    rows = [
        row(arm, seed, log, found.get((REFERENCE, seed)) if arm != REFERENCE else None, args.stop)
        for (arm, seed), log in found.items()
    ]
    if args.json:
        print(json.dumps({"settings": [*SETTINGS, *args.settings], "stop": args.stop, "runs": rows}, indent=1))
        return
    show(rows, args.arms)


def show(rows: list[dict[str, Any]], arms: list[str]) -> None:
    print(f"pocket/d32 with {', '.join(SETTINGS)}; losses against {REFERENCE} on the same batches")
    print(f"{'rate, z-loss':12} {'seed':>4} {'CAUTION at':>10} {'NO-GO at':>8} {'loss apart at':>13} {'apart by':>8}"
          f" {'norm peaks':>10} {'log-sum-exp':>11} {'looks against':>13}  first rule")  # fmt: skip
    for r in rows:
        caution, no_go, away = (f"{r[k]:,}" if r[k] is not None else "-" for k in ("caution", "no_go", "apart"))
        print(f"{r['arm']:12} {r['seed']:>4} {caution:>10} {no_go:>8} {away:>13} {r['difference']:>+8.3f} {r['peak']:>10.2f}"
              f" {r['log_sum_exp']:>11.2f} {r['share']:>13.0%}  {r['rule']}")  # fmt: skip
    for arm in arms:
        own = [r for r in rows if r["arm"] == arm]
        parts = []
        for key, unit in (
            ("caution", ""),
            ("no_go", ""),
            ("apart", ""),
            ("difference", " nats"),
            ("peak", ""),
            ("log_sum_exp", ""),
        ):
            values = [r[key] for r in own if r[key] is not None]
            if len(values) > 1:
                of = "" if len(values) == len(own) else f" ({len(values)} of {len(own)})"
                parts.append(f"{key} {np.mean(values):.3g} +- {np.std(values, ddof=1):.2g}{unit}{of}")
        print(f"{arm}: " + ", ".join(parts))


if __name__ == "__main__":
    main()
