"""The public loss tables as forecasting cases: points, target and what was measured at the target."""

import csv
import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from argosy.forecast import points as P

FLOPS_BUDGETS = (6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21)
OLMO_PARAMS = {"190M": 190_354_176, "370M": 371_262_464, "760M": 758_220_288}
TRAINED = ("cosine_24000", "constant_24000", "wsdcon_9")
MACRO = "eval_dropless/paloma/macro/loss"


class Case(NamedTuple):
    name: str
    points: P.Table
    target: P.Table
    actual: np.ndarray
    group: tuple[str, ...]  # of each target row: errors are averaged within a group, then over groups


def root() -> Path | None:
    place = os.environ.get("ARGOSY_FORECAST_TABLES")
    return Path(place) if place and Path(place).is_dir() else None


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as handle:
        return list(csv.DictReader(handle))


def case(name: str, points: list[dict], target: list[dict], group: str = "run") -> Case:
    actual = np.array([row["value"] for row in target], float)
    groups = tuple(str(row[group]) for row in target)
    bare = [{k: v for k, v in row.items() if k != "value"} for row in target]
    return Case(name, P.of_rows(points), P.of_rows(bare, "TARGET"), actual, groups)


def ladder(folder: Path) -> dict[str, list[dict]]:
    meta = {r["rung"]: r for r in rows(folder / "marin_ladder/ladder_meta.csv")}
    found: dict[str, list[dict]] = {}
    for r in rows(folder / "marin_ladder/ladder_eval.csv"):
        batch = int(meta[r["rung"]]["batch_seqs"]) * int(meta[r["rung"]]["seq_len"])
        found.setdefault(r["rung"], []).append(
            {
                "run": r["rung"],
                "metric": MACRO,
                "step": int(r["step"]) + 1,
                "steps_total": r["steps_total"],
                "tokens": r["tokens"],
                "tokens_per_step": batch,
                "active_params": r["active_params"],
                "total_params": r["total_params"],
                "flops": r["compute_flops_no_lm_head"],
                "value": float(r["dropless_paloma_macro_loss"]),
            }
        )
    return found


def hero(folder: Path, fractions: tuple[float, ...] = ()) -> list[dict]:
    """The hero's measured rows, or its curve read at fractions of the run (linear between evaluations)."""
    measured = rows(folder / "marin_ladder/hero_eval_first_20pct.csv")
    step = np.array([int(r["step"]) + 1 for r in measured], float)
    loss = np.array([float(r["dropless_paloma_macro_loss"]) for r in measured])
    total, per_step, batch = 390_251, 6.690294608796058e18, 11_264 * 4096
    wanted = [f * total for f in fractions] or [s for s in step if s >= 0.05 * total]
    return [
        {
            "run": "hero",
            "metric": MACRO,
            "step": s,
            "steps_total": total,
            "tokens": s * batch,
            "tokens_per_step": batch,
            "active_params": 22_762_487_808,
            "total_params": 535_477_106_688,
            "flops": s * per_step,
            "value": float(np.interp(s, step, loss)),
        }
        for s in wanted
    ]


def isoflop(folder: Path) -> tuple[list[dict], list[dict]]:
    points, target = [], []
    for i, r in enumerate(rows(folder / "chinchilla_epoch/svg_extracted_data.csv")):
        c, n = float(r["Training FLOP"]), float(r["Model Size"])
        budget = min(FLOPS_BUDGETS, key=lambda b: abs(math.log(c / b)))
        row = {
            "run": f"m{i}",
            "metric": "loss",
            "active_params": n,
            "tokens": c / (6 * n),
            "flops": c,
            "value": float(r["loss"]),
        }
        if budget <= 3e20:
            points.append(row)
        elif budget == 1e21:
            target.append(row)
    return points, target


def steplaw(folder: Path, largest: float) -> tuple[list[dict], list[dict]]:
    best: dict[tuple[float, float], dict[str, str]] = {}
    for r in rows(folder / "steplaw/dense_lr_bs_loss.csv"):
        key = (float(r["N"]), float(r["D"]))
        if r["smooth loss"] and (key not in best or float(r["smooth loss"]) < float(best[key]["smooth loss"])):
            best[key] = r
    points, target = [], []
    for (n, d), r in sorted(best.items()):
        row = {
            "run": f"N{n:.0f}-D{d:.0f}",
            "metric": "loss",
            "step": r["ti"],
            "steps_total": r["ti"],
            "tokens": d,
            "tokens_per_step": float(r["bs"]) * 2048,
            "active_params": n,
            "flops": 6 * n * d,
            "lr": r["lr"],
            "value": float(r["smooth loss"]),
        }
        (points if n <= largest else target).append(row)
    return points, target


def olmo(folder: Path, metric: str, whole: bool) -> tuple[list[dict], list[dict]]:
    points, target = [], []
    for path in sorted((folder / "olmo_ladder").glob("*.csv")):
        size = path.stem.split("-")[0]
        read = [r for r in rows(path) if r[metric]]
        total = int(read[-1]["_step"])
        found = [
            {
                "run": path.stem,
                "metric": metric,
                "step": int(r["_step"]),
                "steps_total": total,
                "tokens": float(r["throughput/total_tokens"]),
                "tokens_per_step": float(r["batch_size_in_tokens"]),
                "active_params": OLMO_PARAMS[size],
                "flops": 6 * OLMO_PARAMS[size] * float(r["throughput/total_tokens"]),
                "lr": r["optim/learning_rate_group0"],
                "value": float(r[metric]),
            }
            for r in read
        ]
        if size == "760M":
            target += found[-1:]
        else:
            points += found if whole else found[-1:]
    return points, target


def curves(folder: Path, size: str, every: int = 1) -> tuple[list[dict], list[dict]]:
    points, target = [], []
    for path in sorted((folder / "multipowerlaw").glob(f"{size}_*.csv")):
        name = path.stem.removeprefix(f"{size}_")
        read = rows(path)
        found = [
            {
                "run": name,
                "metric": "loss",
                "step": int(r["step"]),
                "steps_total": max(int(read[-1]["step"]), 1),
                "lr": r["lr"],
                "value": float(r["loss"]),
            }
            for r in read[::every]
        ]
        if name in TRAINED:
            points += found
        else:
            target += found
    return points, target


def cases(folder: Path) -> list[Case]:
    rungs = ladder(folder)
    three = rungs["d768"] + rungs["d1024"] + rungs["d1536"]
    found = [
        case("ladder -> hero 5, 10, 15, 20%", three + rungs["d2048"], hero(folder, (0.05, 0.1, 0.15, 0.2))),
        case("ladder: d2048 from three", three, rungs["d2048"]),
        case("ladder: d1536 from two", rungs["d768"] + rungs["d1024"], rungs["d1536"]),
        case("Chinchilla <= 3e20 -> 1e21", *isoflop(folder)),
        case("StepLaw N <= 429M -> larger", *steplaw(folder, 4.3e8)),
    ]
    c4 = "eval/c4_en-validation/CrossEntropyLoss"
    found.append(case("OLMo 190M-370M -> 760M, finals", *olmo(folder, c4, whole=False)))
    found.append(case("OLMo 190M-370M -> 760M, curves", *olmo(folder, c4, whole=True)))
    found += [case(f"schedules {size}", *curves(folder, size)) for size in ("25M", "100M")]
    return found


def error(c: Case, predicted: np.ndarray) -> float:
    """Mean over groups of the mean relative error."""
    relative = np.abs(predicted / c.actual - 1)
    groups = np.array(c.group)
    return float(np.mean([relative[groups == g].mean() for g in dict.fromkeys(c.group)]))
