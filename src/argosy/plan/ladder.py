"""The scaling ladder: small runs of the hero's recipe, from which the hero is forecast."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from argosy import spec
from argosy.plan import cost, flops, hardware, memory, scaling
from argosy.plan.rung import RULES, attempt, laid


class Rung(NamedTuple):
    """One run of a ladder.

    `name` is unique within its ladder and a plain folder name ("d64", "d64-small-batch", "d64-seed1"); `purpose` is `size`, `small_batch`
    (a size again with a smaller batch: tells updates from tokens apart) or `seed` (a size again with another seed: tells luck).
    """

    name: str
    run: spec.Run
    purpose: str


PURPOSES = {
    "size": "a size: how the loss falls with parameters and tokens",
    "small_batch": "the same size, tokens and text in smaller batches: tells updates from tokens",
    "seed": "the same again from another seed: how far luck moves a run",
}

SIZES = 4
APART = 3.0  # at least, in FLOPs, between neighbours, and between the largest and the hero
USUAL = 292 ** (1 / 3)  # the reference ladder spans a factor of 292 with four rungs (reference_run 5.1)
BUDGET = 0.01
LEAST_STEPS = 50  # evaluations 2.5 updates apart: fewer would be the same update twice


def carried(table: Sequence[Rung], base: spec.Run, hero: spec.Run) -> tuple[Rung, ...]:
    """The rungs that a recipe gives its hero `base`, for a hero with other settings.

    What is the same at all rungs as in `base` takes the new hero's value; batches scale with its batch, tokens so that they stay
    the hero's per active parameter; evaluations that the table sets for itself stay.

    Raises:
        ValueError: when a setting has its own value at each rung, such as the width.
    """
    changed = {key: new for key, (_, new) in spec.difference(base, hero).items() if key != "recipe"}
    if not changed:
        return tuple(table)
    found = []
    for rung in table:
        run, own = rung.run, spec.difference(base, rung.run)
        parts: dict[str, dict[str, Any]] = {}
        for key, new in changed.items():
            section, _, name = key.partition(".")
            if key == "data.batch_seqs":
                parts.setdefault(section, {})[name] = max(1, round(run.data.batch_seqs * new / base.data.batch_seqs))
            elif key not in own:
                parts.setdefault(section, {})[name] = new
            elif key not in ("seed", "optim.horizon_tokens") and section != "evals":
                raise ValueError(f"{key} has its own value at each rung")
        sections = {section: replace(getattr(run, section), **values) for section, values in parts.items() if section != "seed"}
        made = replace(run, seed=(run.seed + hero.seed - base.seed) % 2**32, **sections)
        more = Fraction(hero.optim.horizon_tokens, base.optim.horizon_tokens) * Fraction(flops.active(base), flops.active(hero))
        tokens = int(run.optim.horizon_tokens * more * flops.active(made) / flops.active(run))
        found.append(rung._replace(run=replace(made, optim=replace(made.optim, horizon_tokens=tokens))))
    return tuple(found)


# ---- a ladder for a budget ------------------------------------------------------------------------


class Size(NamedTuple):
    """A width that can be a rung, with its FLOPs without and with readout, and how many sizes can stand below it."""

    run: spec.Run
    flops: int
    paid: int
    below: int


def propose(hero: spec.Run, budget: float | int | None) -> tuple[Rung, ...]:
    """Four sizes at least three-fold apart in FLOPs, one again in batches of about half and one from another seed, within a budget.

    `budget` is the whole ladder's share of the hero's FLOPs, readout included; None takes 1%, or the least that is possible where that
    is more. Of all ladders that fit, the one with the largest top is taken: it leaves the least to extrapolate. The others follow
    it a factor of 6.6 apart, as in the reference ladder, or nearer where the hero is too small for that.

    Raises:
        ValueError: for a budget that is no share, or holds no such ladder, with the nearest legal one; for a hero that is too
            small for any.
    """
    if budget is not None and not 0 < budget <= 1:
        raise ValueError(f"budget {budget!r} is a share of the hero's FLOPs, above 0% and at most 100%; e.g. --budget 1%")
    limit = BUDGET if budget is None else budget
    every = sizes(hero)
    found = [ladder for top in reversed(every) if top.below >= SIZES - 1 for ladder in _under(top, every, hero)]
    if not found and any(top.below >= SIZES - 1 for top in every):
        raise ValueError(
            f"no rung's batch can be halved: with data.batch_seqs={hero.data.batch_seqs:,} at the hero, batches of rungs are"
            f" {', '.join(dict.fromkeys(f'{s.run.data.batch_seqs:,}' for s in every))}; {_halvable(hero)}"
        )
    if not found:
        raise ValueError(
            f"no ladder of {SIZES} sizes, {APART:g}-fold apart in FLOPs and of {LEAST_STEPS} steps each, stands below {hero.recipe!r} of"
            f" width {hero.model.width:,} and {spec.steps(hero):,} steps; a hero with more width or steps has one"
        )
    for ladder in found:
        if share(hero, ladder) <= limit:
            return ladder
    least = min(found, key=lambda ladder: share(hero, ladder))
    if budget is None:
        return least
    raise ValueError(
        f"--budget {100 * budget:.4g}% of the hero's FLOPs holds no ladder of {SIZES} sizes {APART:g}-fold apart with a small batch and a"
        f" second seed; nearest legal --budget {_up(100 * share(hero, least))}%"
    )


def _halvable(hero: spec.Run) -> str:
    """The hero's batch, doubled until it has a ladder, in words."""
    more = hero
    while True:
        more = replace(more, data=replace(more.data, batch_seqs=more.data.batch_seqs * 2))
        every = sizes(more)
        tops = [top for top in every if top.below >= SIZES - 1]
        if not tops:  # fewer steps than a ladder needs
            return "nearest legal: a larger data.batch_seqs with a larger optim.horizon_tokens"
        if any(True for top in tops for _ in _under(top, every, more)):
            return f"nearest legal data.batch_seqs={more.data.batch_seqs:,}"


def share(hero: spec.Run, rungs: Sequence[Rung], *, readout: bool = True) -> float:
    """A ladder's FLOPs over the hero's."""
    return sum(flops.train(rung.run, readout=readout) for rung in rungs) / flops.train(hero, readout=readout)


def _up(value: float) -> str:
    """Rounded up to three digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-9) * unit:.6g}"


def sizes(hero: spec.Run) -> list[Size]:
    """All sizes that can be rungs of a hero, the smallest first: a third of its FLOPs at most, `LEAST_STEPS` at least."""
    unit = 16 if hero.model.width <= 1024 else 64
    found: list[Size] = []
    for width in range(unit, hero.model.width, unit):
        run = attempt(hero, width)
        if run is None or spec.steps(run) < LEAST_STEPS:
            continue
        own, paid = flops.train(run, readout=False), flops.train(run, readout=True)
        if own * APART <= flops.train(hero, readout=False) and paid * APART <= flops.train(hero, readout=True):
            below = max((s.below + 1 for s in found if s.flops * APART <= own and s.paid * APART <= paid), default=0)
            found.append(Size(run, own, paid, below))
    return found


def _under(top: Size, every: Sequence[Size], hero: spec.Run) -> Iterator[tuple[Rung, ...]]:
    """The ladders under a top: the usual one, and those with cheaper repeats."""
    ratio = min(max((top.paid / every[0].paid) ** (1 / (SIZES - 1)), APART), USUAL)
    chosen = [top]
    for more in reversed(range(SIZES - 1)):
        last = chosen[0]
        legal = [s for s in every if s.below >= more and s.flops * APART <= last.flops and s.paid * APART <= last.paid]
        chosen.insert(0, min(legal, key=lambda s: abs(math.log(s.paid * ratio / last.paid))))
    rungs = tuple(Rung(f"d{s.run.model.width}", s.run, "size") for s in chosen)
    for again in (chosen[-2].run, chosen[1].run, chosen[0].run):
        half = laid(again, hero, again.data.batch_seqs / 2)
        if not 0.4 <= half.data.batch_seqs / again.data.batch_seqs <= 0.6:
            continue  # the nearest legal batch is no half
        seed = (again.seed + 1) % 2**32
        name = f"d{again.model.width}"
        yield (
            *rungs,
            Rung(f"{name}-small-batch", half, "small_batch"),
            Rung(f"{name}-seed{seed}", replace(again, seed=seed), "seed"),
        )


# ---- the table ------------------------------------------------------------------------------------


def sheet(hero: spec.Run, rungs: Sequence[Rung], proposed: str = "") -> dict:
    """The ladder as one dict of plain JSON values: the hero, each rung, shares, what is left to extrapolate, doubts.

    FLOPs are of whole runs, chip-hours are steps at the predicted speed (`cost.time`, no allowance for what fails). `to_next` is how
    many times the next larger size's FLOPs without readout are this one's, the largest's next being the hero. `proposed` names the
    rule when the rungs follow `RULES` and not a recipe's own table.
    """
    every = [{"name": rung.name, "purpose": rung.purpose, "for": PURPOSES[rung.purpose], **figures(rung.run)} for rung in rungs]
    top = figures(hero)
    ladder = sorted((row for row in every if row["purpose"] == "size"), key=lambda row: row["flops_no_head"])
    for row in every:
        larger = [other for other in (*ladder, top) if other["flops_no_head"] > row["flops_no_head"]]
        row["to_next"] = larger[0]["flops_no_head"] / row["flops_no_head"] if row["purpose"] == "size" and larger else None

    def of_hero(what: str) -> float:
        return sum(row[what] for row in every) / top[what]

    return {
        "hero": top,
        "rungs": every,
        "share": {what: of_hero(what) for what in ("flops", "flops_no_head", "chip_hours")},
        "flops": sum(row["flops"] for row in every),
        "flops_no_head": sum(row["flops_no_head"] for row in every),
        "chip_hours": sum(row["chip_hours"] for row in every),
        "extrapolation": top["flops_no_head"] / ladder[-1]["flops_no_head"],
        "span": ladder[-1]["flops_no_head"] / ladder[0]["flops_no_head"],
        "rules": [{"about": about, "rule": rule} for about, rule in RULES] if proposed else [],
        "rule": proposed or "the recipe's own table",
    }


def figures(run: spec.Run) -> dict:
    """A run's sizes, cost, rates and doubts, and the run itself."""
    from argosy.plan import sheet as sheets  # brings NumPy, which commands that plan nothing do without

    chip, time, rates = hardware.chip(run.compute.chip), cost.time(run), scaling.rates(run)
    steps, fits = spec.steps(run), memory.plan(run)
    return {
        "recipe": run.recipe,
        "key": run.key(),
        "total_params": sum(flops.params(run).values()),
        "active_params": flops.active(run),
        "width": run.model.width,
        "layers": run.model.layers,
        "heads": run.model.heads,
        "head_width": run.model.head_width,
        "chips": spec.devices(run),
        "domains": domains(run, chip.domain),
        "batch_seqs": run.data.batch_seqs,
        "tokens_per_step": spec.tokens_per_step(run),
        "steps": steps,
        "tokens": steps * spec.tokens_per_step(run),
        "flops": float(flops.train(run, readout=True)),
        "flops_no_head": float(flops.train(run, readout=False)),
        "muonh_lr": rates.muonh_lr,
        "adam_lr": rates.adam_lr,
        "mfu": time["mfu"],
        "step_s": time["step_s"],
        "hours": steps * time["step_s"] / 3600,
        "chip_hours": steps * time["step_s"] / 3600 * spec.devices(run),
        "warnings": sheets.warnings(run, fits, None),
        "run": spec.to_json(run),
    }


def domains(run: spec.Run, size: int) -> int:
    """How many scale-up domains (racks, nodes) of so many chips a run takes, when no replica is cut that fits into one."""
    group = spec.devices(run) // run.mesh.replica
    together = size // group
    return math.ceil(run.mesh.replica / together) if together else run.mesh.replica * math.ceil(group / size)
