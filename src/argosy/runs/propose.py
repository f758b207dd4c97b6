"""The plan turned round: from chips and days to the largest run of the reference recipe that fits both."""

import datetime
import math
from dataclasses import replace

from argosy import spec
from argosy.plan import cost, hardware, memory
from argosy.plan.sheet import plan
from argosy.runs import marin_535b
from argosy.spec import Compute, Mesh, Run

GOODPUT = 0.83  # the reference's own margin: 83 days of steps in a plan of about 100
# Widths whose heads split over key/value heads at most 6 to 1 (the rule is 4 to 1); below 512 the recipe left its
# own trend (marin#8673).
WIDTHS = tuple(d for d in range(512, 16_384 + 1, 256) if marin_535b.model(d).heads <= 6 * marin_535b.model(d).kv_heads_local)
LEAST_STEPS = 10_000  # the reference's shortest run took 11,420
SEQS = marin_535b.SEQS_PER_CHIP
# What a form adds in parts to look after has to save this share of the time.
WORTH = 0.01


def propose(
    chip: str,
    chips: int,
    days: float | int,
    goodput: float | int = GOODPUT,
    start: datetime.date | None = None,
    price: float | int | None = None,
) -> dict:
    """The largest model of the reference recipe that `chips` train in `days`, with its two neighbours.

    Width, depth, heads, experts, tokens and batch follow the recipe's rules (`runs.marin_535b`); mesh, placement of
    masters and optimizer state, sequences per chip and accumulation are searched for the shortest time that fits in
    memory. `days` is wall-clock time, of which `goodput` is spent in steps; `price` is money per chip-hour.

    Returns `{asked, proposal, smaller, larger}`; each of the last three is None or
    `{run, plan, chips_used, verdict, notes}`, where `run` is the JSON of a complete `Run` (`spec.from_json`), `plan`
    what `argosy.plan.sheet.plan` says of it, `notes` where it leaves the recipe's fitted range.

    Raises:
        ValueError: for an unknown chip (naming the nearest three), for numbers that are not above 0, and if even the
            recipe's smallest model does not fit, with the days and chips it would need.
    """
    known = hardware.chip(chip)
    if not (isinstance(chips, int) and chips > 0):
        raise ValueError(f"chips={chips!r} must be a whole number above 0; e.g. {known.domain}")
    if not (math.isfinite(days) and days > 0):
        raise ValueError(f"days={days!r} must be a finite number above 0; e.g. 90")
    start = start or datetime.date.today()
    found: dict[int, Run | None] = {}

    def feasible(i: int) -> bool:
        found[i] = best(WIDTHS[i], chip, chips, goodput)
        return found[i] is not None and cost.time(found[i], goodput)["days"] <= days  # type: ignore[arg-type]

    low, high = -1, len(WIDTHS)  # the largest feasible index is in low..high-1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if feasible(middle) else (low, middle)
    if low < 0:
        raise ValueError(_too_little(chip, chips, days, goodput))

    def described(i: int) -> dict | None:
        if not 0 <= i < len(WIDTHS):
            return None
        run = found[i] if i in found else best(WIDTHS[i], chip, chips, goodput)
        return _described(WIDTHS[i], run, chip, chips, days, goodput, start, price)

    return {
        "asked": {"chip": chip, "chips": chips, "days": float(days), "goodput": float(goodput), "start": start.isoformat()},
        "proposal": described(low),
        "smaller": described(low - 1),
        "larger": described(low + 1),
    }


def best(width: int, chip: str, chips: int, goodput: float | int = GOODPUT) -> Run | None:
    """The fastest form of the recipe at a width on at most `chips` chips; None if no form fits into memory."""
    base, chosen, least = _base(width, chip, chips), None, math.inf
    for mesh in _meshes(chip, chips):
        for compute, placed in _placements(chip):
            for split in (False, True):  # fewer sequences per chip, or the recipe's sixteen in parts
                run = _fullest(base, mesh, compute, split)
                if run is None:
                    continue
                parts = placed + (mesh.data > 1) + (run.compute.accumulate > 1)
                price = cost.time(run, goodput)["days"] * (1 + WORTH * parts)
                if price < least:
                    chosen, least = run, price
                if _whole(run):
                    break
            if run is not None and _whole(run):
                break  # the plainer placement holds the whole batch: another only adds transfers
    return chosen


def _whole(run: Run) -> bool:
    return run.data.batch_seqs == SEQS * spec.devices(run) and run.compute.accumulate == 1


def _base(width: int, chip: str, chips: int) -> Run:
    """The recipe at a width on one chip, from which forms differ by mesh, batch and placement."""
    return marin_535b.recipe(f"proposed-{chip}-{chips}", width, mesh=Mesh(replica=1, data=1, context=1, expert=1))


def leanest(width: int, chip: str, chips: int) -> Run | None:
    """The form of the recipe at a width that needs least memory, whether or not it fits."""
    base = _base(width, chip, chips)
    forms = [run for mesh in _meshes(chip, chips) for compute, _ in _placements(chip) if (run := _form(base, mesh, compute, 1))]
    return min(forms, key=lambda run: memory.plan(run)["per_device_bytes"]["device"]["total"], default=None)


def _meshes(chip: str, chips: int) -> list[Mesh]:
    """Meshes on at most `chips` chips: expert ranks that divide the experts, a few ways of dividing weights further."""
    exact = math.gcd(chips, 384)
    inside = max(n for n in range(1, min(exact, hardware.chip(chip).domain) + 1) if exact % n == 0)
    return [
        Mesh(replica=chips // expert // data, data=data, context=1, expert=expert)
        for expert in sorted({1, 8, 16, 32, 64, inside})
        for data in (1, 4, 16)
        if expert <= chips and chips // expert % data == 0
    ]


def _fullest(base: Run, mesh: Mesh, compute: Compute, split: bool) -> Run | None:
    """The form with most sequences at once per chip that fits into memory and leaves enough steps."""
    for less in (1, 2, 4, 8, 16):
        seqs, accumulate = (SEQS, less) if split else (SEQS // less, 1)
        run = _form(base, mesh, replace(compute, accumulate=accumulate), seqs)
        if run is None or (spec.steps(run) < LEAST_STEPS and seqs > 1):
            continue
        if memory.plan(run)["fits"]:
            return run
    return None


def _placements(chip: str) -> list[tuple[Compute, int]]:
    """Where masters and optimizer state may live on a chip, with the parts that adds."""
    base = replace(marin_535b.LAUNCH, chip=chip, masters="device", optimizer_state="device")
    if not hardware.chip(chip).host_bytes:
        return [(replace(base, precision="fp32", params="fp32"), 0)]
    state = replace(base, params="fp32", optimizer_state="pinned_host")
    both = replace(base, masters="pinned_host", optimizer_state="pinned_host")
    return [(base, 0), (state, 1), (both, 2)]


def _form(base: Run, mesh: Mesh, compute: Compute, seqs: int) -> Run | None:
    """The base on a mesh; None where a size does not divide over it."""
    chips = mesh.replica * mesh.data * mesh.expert
    try:
        return replace(
            base,
            mesh=mesh,
            compute=compute,
            routing=marin_535b.routing(mesh.expert),
            data=replace(base.data, batch_seqs=seqs * chips),
            evals=replace(base.evals, batch_seqs=chips),
        )
    except ValueError:
        return None


def _described(
    width: int,
    run: Run | None,
    chip: str,
    chips: int,
    days: float | int,
    goodput: float | int,
    start: datetime.date,
    price: float | int | None,
) -> dict:
    fits = run is not None
    run = run or leanest(width, chip, chips)
    if run is None:
        return {"run": None, "plan": None, "chips_used": 0, "verdict": "no mesh divides it", "notes": []}
    sheet = plan(run, price=price, deadline=float(days), goodput=goodput, start=start)
    needed = sheet["time"]["days"]
    gib = sheet["memory"]["per_device_bytes"]["device"]["total"] / memory.GIB
    if not fits:
        verdict = (
            f"does not fit: {gib:,.0f} GiB of {sheet['memory']['device_usable_bytes'] / memory.GIB:,.0f} usable at its leanest"
        )
    elif needed > days:
        verdict = f"{needed - days:,.1f} days too many"
    else:
        verdict = f"ends {days - needed:,.1f} days early"
    used = spec.devices(run)
    return {
        "run": spec.to_json(run),
        "plan": sheet,
        "chips_used": used,
        "verdict": verdict,
        "notes": _notes(run, chips - used) + [w["text"] for w in sheet["warnings"] if w["about"] != "memory"],
    }


def _notes(run: Run, idle: int) -> list[str]:
    """Where a proposal leaves what the reference recipe was run at."""
    m, steps, per_step = run.model, spec.steps(run), spec.tokens_per_step(run)
    found = []
    if idle:
        found.append(f"{idle:,} chips stay idle: {spec.devices(run):,} is what the mesh divides into")
    if not 768 <= m.width <= 6144:
        found.append(f"model.width={m.width:,}: the recipe was run from 768 to 6,144")
    if m.width > 2048:
        by_rule = round(m.width / (55 + 4 * math.log2(m.width)))
        if by_rule + by_rule % 2 > m.layers:
            found.append(f"{m.layers} layers, the reference's own; the depth rule of its rungs gives {by_rule + by_rule % 2}")
    if m.kv_heads_local != max(1, m.heads // 4) or m.kv_heads_global != max(1, m.heads // 8):
        found.append(
            f"key/value heads {m.kv_heads_local}/{m.kv_heads_global}: a quarter and an eighth do not divide {m.heads} heads"
        )
    if steps < LEAST_STEPS:
        found.append(f"{steps:,} steps: the reference's shortest run took 11,420")
    if per_step > 46_137_344:
        found.append(f"{per_step:,} tokens per step: the reference's largest batch is 46,137,344")
    if run.mesh.expert != marin_535b.EXPERT_RANKS:
        found.append(f"experts over {run.mesh.expert} ranks: the reference used {marin_535b.EXPERT_RANKS}")
    return found


def _too_little(chip: str, chips: int, days: float | int, goodput: float | int) -> str:
    asked = f"{chips:,} x {chip} for {days:g} days"
    run = best(WIDTHS[0], chip, chips, goodput)
    if run is None:
        lean = leanest(WIDTHS[0], chip, chips)
        assert lean is not None, "one chip divides everything"
        held = memory.plan(lean)
        gib, usable = held["per_device_bytes"]["device"]["total"] / memory.GIB, held["device_usable_bytes"] / memory.GIB
        return f"{asked}: the recipe's smallest model (width {WIDTHS[0]}) needs {gib:,.1f} GiB of {usable:,.1f} usable per chip; nearest: more chips"
    needed = cost.time(run, goodput)["days"]
    more = math.ceil(chips * needed / days)
    return (
        f"{asked}: the recipe's smallest model (width {WIDTHS[0]}, {run.optim.horizon_tokens / 1e9:,.1f}B tokens) takes"
        f" {needed:,.1f} days at goodput {goodput:g}; nearest: {math.ceil(needed):,} days, or about {more:,} chips"
    )
