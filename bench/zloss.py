"""Does the check before a launch see growth before the loss does? Small runs at a high rate, with and without logit z-loss.

    python bench/zloss.py --home voyages          # trains what is missing, then prints the table
    python bench/zloss.py --home voyages --seeds 1 --arms none

Both arms of a seed start from the same weights and read the same batches, so their losses are compared update by update. Every
run stops one update before its end, so that all held-out text is not scored; its log stays under the home and is read again by
the next call. `argosy.judge.findings.of_run` is asked after every fortieth of a run what it had said then.
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

ARMS = ("none", "logit")
SETTINGS = [
    "model.layers=2", "optim.rule=adamw", "optim.adamw_lr=0.03", "optim.weight_decay=0", "optim.final_frac=1.0",
    "optim.horizon_tokens=562648", "evals.tokens_per_set=2048", "evals.every_frac=0.5",
]  # fmt: skip
LOOKS = 40  # in a run
APART = 0.02  # nats: a difference of the smoothed losses that matters
SMOOTH = 0.05  # of a run


def run_of(arm: str, seed: int, settings: list[str]) -> spec.Run:
    return replace(spec.override(pocket.rung(32), [*settings, f"model.z_loss={arm}"]), seed=seed)


def train(home: Path, name: str, run: spec.Run) -> None:
    from argosy import voyage

    last = spec.steps(run) - 1
    if (home / "runs" / name / "run.json").is_file() and (logs.read(home / "runs" / name).last("train/loss") or (0,))[
        0
    ] >= last:
        return
    host = spec.Host(home=home, name=name, checkpoint_every_s=1e6)
    voyage.begin(run, host)
    voyage.train(run, host, last)


def looks(log: logs.RunLog) -> list[dict[str, Any]]:
    """What the check would have said after each fortieth of the run, from the second on."""
    total = spec.steps(spec.from_json(log.run["run"]))
    out = []
    for k in range(2, LOOKS + 1):
        at = total * k // LOOKS
        found = [e for e in findings.of_run(log, until=at) if e.rule not in ("drops",)]
        against = [e for e in found if e.level != findings.GO]
        rules = sorted({e.rule for e in against})
        worst = max((findings.LEVELS.index(e.level) for e in against), default=0)
        out.append({"update": at, "level": findings.LEVELS[worst], "rules": rules})
    return out


def first_lasting(flags: list[bool], at: list[int]) -> int | None:
    """The first of the places from which all flags hold to the end."""
    start = len(flags)
    while start > 0 and flags[start - 1]:
        start -= 1
    return at[start] if start < len(flags) else None


def loss_of(log: logs.RunLog) -> tuple[np.ndarray, np.ndarray]:
    return log.series("train/cross_entropy_loss")


def apart(steps: np.ndarray, none: np.ndarray, logit: np.ndarray, total: int) -> tuple[int | None, float]:
    """From which update on the arm without z-loss is worse by more than `APART` and three standard errors to the end; the end's difference."""
    window = max(8, round(SMOOTH * total))
    ends = list(range(window, len(steps) + 1, window // 4))
    means, errors = [], []
    for end in ends:
        part = none[end - window : end] - logit[end - window : end]
        means.append(float(part.mean()))
        errors.append(float(part.std(ddof=1)) / math.sqrt(window))
    flags = [m > APART and m > 3 * e for m, e in zip(means, errors, strict=True)]
    return first_lasting(flags, [int(steps[end - 1]) for end in ends]), means[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path("voyages"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--set", dest="settings", action="append", default=[], help="a further override of both arms")
    parser.add_argument("--name", default="zloss")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    settings = [*SETTINGS, *args.settings]
    found: dict[tuple[str, int], logs.RunLog] = {}
    for seed in args.seeds:
        for arm in args.arms:
            name = f"{args.name}-{arm}-{seed}"
            train(args.home, name, run_of(arm, seed, settings))
            found[arm, seed] = logs.read(args.home / "runs" / name)
    if not args.train_only:
        report(found, settings, args.json)


def report(found: dict[tuple[str, int], logs.RunLog], settings: list[str], as_json: bool) -> None:
    total = spec.steps(spec.from_json(next(iter(found.values())).run["run"]))
    rows = []
    for (arm, seed), log in sorted(found.items()):
        grown = growth.growth(log)
        said = looks(log)
        flags = [s["level"] != findings.GO for s in said]
        once = next((s["update"] for s, flag in zip(said, flags, strict=True) if flag), None)
        steps, loss = loss_of(log)
        row: dict[str, Any] = {
            "arm": arm, "seed": seed, "loss": float(loss[-max(1, total // 20) :].mean()),
            "log-sum-exp": math.sqrt(grown["train/logit_z"].last), "gradient": grown["grad/norm/total"].last,
            "readout": grown["grad/norm/readout"].last, "exponent": grown["grad/norm/total"].late.slope,
            "first": once, "from": first_lasting(flags, [s["update"] for s in said]), "rules": sorted({r for s in said for r in s["rules"]}),
        }  # fmt: skip
        if arm == "none" and ("logit", seed) in found:
            other_steps, other = loss_of(found["logit", seed])
            count = min(len(steps), len(other_steps))
            row["apart"], row["difference"] = apart(steps[:count], loss[:count], other[:count], total)
        rows.append(row)
    if as_json:
        print(json.dumps({"settings": settings, "updates": total, "runs": rows}, indent=1))
        return
    print(
        f"pocket/d32 with {', '.join(settings)}; {total:,} updates; 'apart' is the loss without z-loss over that with it, same batches"
    )
    print(f"{'z-loss':7} {'seed':>4} {'loss':>7} {'lse':>6} {'gradient':>8} {'readout':>8} {'exponent':>8}"
          f" {'first said':>10} {'said from':>9} {'apart from':>10} {'at the end':>10}  rules")  # fmt: skip
    for r in rows:
        told = (f"{r[k]:,}" if r.get(k) is not None else "-" for k in ("first", "from", "apart"))
        first, start, away = told
        end = f"{r['difference']:+.3f}" if "difference" in r else "-"
        print(f"{r['arm']:7} {r['seed']:>4} {r['loss']:>7.3f} {r['log-sum-exp']:>6.2f} {r['gradient']:>8.3f} {r['readout']:>8.3f}"
              f" {r['exponent']:>+8.2f} {first:>10} {start:>9} {away:>10} {end:>10}  {', '.join(r['rules']) or '-'}")  # fmt: skip
    for arm in dict.fromkeys(r["arm"] for r in rows):
        own = [r for r in rows if r["arm"] == arm]
        if len(own) > 1:
            parts = []
            for key in ("loss", "log-sum-exp", "gradient", "exponent"):
                values = [r[key] for r in own]
                parts.append(f"{key} {np.mean(values):.3f} +- {np.std(values, ddof=1):.3f}")
            print(f"{arm}: {', '.join(parts)} (mean and standard deviation of {len(own)} seeds)")


if __name__ == "__main__":
    main()
