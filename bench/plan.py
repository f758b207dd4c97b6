"""Predictions of `argosy plan` beside what was published, one set of efficiencies for all.

    python bench/plan.py          every case with its error; exit status 1 if a step time is off by more than 10%
    python bench/plan.py --fit    the same, and the three fitted efficiencies found again from the marked cases

Marked * : used in the fit. The others were not, and tell how far the plan carries. Fitted are three efficiencies
(`cost.Efficiency`), the length beyond which documents hide context (`work.DOCUMENT_TOKENS`) and the live share of a
block (`memory.LIVE`); what is copied early from the host (`memory.PREFETCHED`) was read from a published buffer
assignment of the pooled run. Sources: issues and pull requests of marin-community/marin.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from argosy import spec
from argosy.plan import cost, memory
from argosy.runs import marin_535b
from argosy.spec import Mesh, Run

GIB = memory.GIB
ALLOWED = 0.10


class Case(NamedTuple):
    """One published figure and how the plan predicts it."""

    name: str
    kind: str  # s, tokens/s, %, GiB
    published: float
    predict: Callable[[cost.Efficiency], float]
    fitted: bool
    source: str


def elsewhere(run: Run, *, replica: int = 1, expert: int = 64, seq_len: int = 4096, chip: str = "gb200") -> Run:
    """A run at 65,536 tokens per chip on another mesh, sequence length or chip."""
    chips = replica * expert
    return replace(
        run,
        mesh=Mesh(replica=replica, data=1, context=1, expert=expert),
        data=replace(run.data, seq_len=seq_len, batch_seqs=65_536 // seq_len * chips),
        compute=replace(run.compute, chip=chip),
        evals=replace(run.evals, batch_seqs=chips),
    )


def seconds(run: Run, e: cost.Efficiency) -> float:
    return sum(r.step_s for r in cost.resources(run, e))


def peak(run: Run) -> float:
    return memory.plan(run)["per_device_bytes"]["device"]["total"] / GIB


def cases() -> list[Case]:
    pooled, ragged, d2048 = marin_535b.run(), marin_535b.ragged(), marin_535b.rung(2048)
    one_pooled, one_ragged = elsewhere(pooled), elsewhere(ragged)
    h100 = elsewhere(marin_535b.rung(1536), replica=8, expert=8, chip="h100")
    one_sequence = replace(one_ragged, data=replace(one_ragged.data, batch_seqs=64))

    def context(seq_len: int) -> Callable[[cost.Efficiency], float]:
        return lambda e: 100 * (seconds(one_ragged, e) / seconds(elsewhere(ragged, seq_len=seq_len), e) - 1)

    return [
        Case("pooled waves, 11 racks", "s", 18.45, lambda e: seconds(pooled, e), True, "#8435, steps 20-400"),
        Case("ragged, 11 racks", "s", 16.8, lambda e: seconds(ragged, e), True, "#8506, step 54k"),
        Case(
            "d2048 rung, 11 racks", "tokens/s", 24e6, lambda e: spec.tokens_per_step(d2048) / seconds(d2048, e), True, "#8435"
        ),
        Case("context 8K against 4K", "%", -1.6, context(8192), True, "#9615, one rack, step 180k"),
        Case("context 16K against 4K", "%", -3.1, context(16_384), True, "#9615, one rack, step 180k"),
        Case("pooled waves, 1 rack", "s", 17.28, lambda e: seconds(one_pooled, e), False, "#8549, 22.71% MFU"),
        Case("ragged, 1 rack", "s", 17.16, lambda e: seconds(one_ragged, e), False, "#8549, 22.87% MFU, before #8753"),
        Case("d1536 on 64 H100", "s", 2.947, lambda e: seconds(h100, e), False, "#8679"),
        Case("ragged, peak", "GiB", 137.9, lambda e: peak(ragged), True, "#8549; #8753 has 137.95"),
        Case("pooled waves, peak", "GiB", 149.9, lambda e: peak(pooled), False, "#8549, one rack"),
        Case("pooled waves, peak", "GiB", 143.7, lambda e: peak(pooled), False, "#8490, 11 racks at launch"),
        Case(
            "ragged, 1 sequence per chip, update",
            "GiB",
            111.84,
            lambda e: memory.plan(one_sequence)["moments_bytes"]["update"] / GIB,
            False,
            "moe_hero_ep/README, allocator peak",
        ),
        Case(
            "fp32 weights, steady",
            "GiB",
            35.09,
            lambda e: memory.plan(ragged)["steady_device_bytes"] / GIB,
            False,
            "moe_hero_ep/README",
        ),
    ]


def error(case: Case, e: cost.Efficiency) -> float:
    """Relative error; for a context's cost, of the step time that it implies."""
    got = case.predict(e)
    return (100 + case.published) / (100 + got) - 1 if case.kind == "%" else got / case.published - 1


def fit(all_cases: list[Case]) -> cost.Efficiency:
    """The efficiencies of products, attention and memory that fit the marked times best (least squares)."""
    from scipy.optimize import least_squares

    marked = [c for c in all_cases if c.fitted and c.kind != "GiB"]

    def residuals(x: list[float]) -> list[float]:
        e = replace(cost.EFFICIENCY, products=float(x[0]), attention=float(x[1]), memory=float(x[2]))
        return [error(c, e) * (10 if c.kind == "%" else 1) for c in marked]  # a point of context cost weighs as ten

    found = least_squares(residuals, [0.5, 0.2, 0.4], bounds=([0.02] * 3, [1.0] * 3)).x
    return replace(cost.EFFICIENCY, products=float(found[0]), attention=float(found[1]), memory=float(found[2]))


def shown(kind: str, value: float) -> str:
    return {"s": f"{value:.2f} s", "tokens/s": f"{value / 1e6:.2f}M tok/s", "%": f"{value:+.1f}%", "GiB": f"{value:.1f} GiB"}[
        kind
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the efficiencies again")
    wants = parser.parse_args()
    console, found = Console(), cases()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "published", "predicted", "error", "source"):
        table.add_column(name, justify="left" if name in ("", "source") else "right", no_wrap=name != "source")
    worst = 0.0
    for case in found:
        off = error(case, cost.EFFICIENCY)
        worst = max(worst, abs(off)) if case.kind != "GiB" else worst
        star = "* " if case.fitted else "  "
        got = case.predict(cost.EFFICIENCY)
        table.add_row(star + case.name, shown(case.kind, case.published), shown(case.kind, got), f"{off:+.1%}", case.source)
    console.print(table)
    console.print(
        f"* in the fit; errors of a context's cost are of the step time. Worst step time {worst:.1%} of {ALLOWED:.0%} allowed."
    )
    if wants.fit:
        again = fit(found)
        for name in ("products", "attention", "memory"):
            console.print(f"{name:10} {getattr(cost.EFFICIENCY, name):.2f}, fitted {getattr(again, name):.4f}")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
