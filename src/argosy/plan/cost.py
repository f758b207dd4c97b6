"""How long a step and a run take, what they cost: floors from rated rates, times at one stated set of efficiencies."""

import datetime
import math
from dataclasses import asdict, dataclass, replace

from argosy import spec
from argosy.plan import flops, hardware, work

DAY_S = 86_400.0
GOODPUT = 0.86  # share of wall-clock time spent in steps that count: the reference's first three weeks (operations 1)
FITTED_SEQ_LEN = 16_384  # the longest sequence whose cost was published


@dataclass(frozen=True)
class Efficiency:
    """Shares of rated rates that a step reaches, and the share of transfers that hides behind other work.

    `products`, `attention` and `memory` are fitted on GB200 to three published step times and two published costs of
    context (bench/plan.py prints the fit and its errors); the others are taken from measurements: NVLink all-to-alls
    of 600 to 740 of 900 GB/s (expert_parallel A5), 176 to 211 of 225 GB/s from Grace (NVIDIA/Megatron-LM#6491), half
    of the collectives' time hidden in the reference's profile (marin#8053). The same set serves every chip.
    """

    products: float = 0.56
    attention: float = 0.27
    memory: float = 0.34
    scale_up: float = 0.7
    scale_out: float = 0.8
    host: float = 0.8
    hidden: float = 0.5


EFFICIENCY = Efficiency()


@dataclass(frozen=True)
class Resource:
    """One thing that a step needs time of: the least time at the rated rate, and its part of the step."""

    name: str
    amount: float
    unit: str
    per_s: float
    floor_s: float
    step_s: float


def resources(run: spec.Run, efficiency: Efficiency = EFFICIENCY) -> list[Resource]:
    """What a step needs of one device, resource by resource; `step_s` of all of them add up to the step.

    A transfer over an axis that fits into the chips' scale-up domain goes at its rate, else what leaves the domain
    goes at the network's. Axes nest, inner to outer, as expert, context, data, replica. Of all transfers the stated
    share hides behind other work, as far as there is other work; the rest is each transfer's part of the step.

    Raises:
        ValueError: for an unknown chip.
    """
    c, w, e, mesh = hardware.chip(run.compute.chip), work.step(run), efficiency, run.mesh
    peak = hardware.flops_per_s(run)

    def computed(name: str, flop: float, share: float) -> Resource:
        return Resource(name, flop, "FLOP", peak, flop / peak, flop / peak / share)

    def link(name: str, size: float, reach: int) -> Resource:
        rate, share = (c.scale_up_bytes_per_s, e.scale_up) if reach <= c.domain else (c.scale_out_bytes_per_s, e.scale_out)
        return Resource(name, size, "B", rate, size / rate, size / rate / share)

    between = w.expert  # beyond a domain, what stays inside it costs the network nothing
    if mesh.expert > c.domain:
        between *= (mesh.expert - c.domain) / (mesh.expert - 1)
    memory_s = w.memory / c.memory_bytes_per_s
    inner = mesh.expert * mesh.context
    busy = [
        computed("products", w.products, e.products),
        computed("attention", w.attention, e.attention),
        Resource("memory traffic", w.memory, "B", c.memory_bytes_per_s, memory_s, memory_s / e.memory),
    ]
    transfers = [
        link("tokens gathered" if work.gathered(run) else "expert all-to-all", between, mesh.expert),
        link("keys gathered", w.context, inner),
        link("weights gathered", w.fsdp, inner * mesh.data),
        link("gradients reduced", w.reduce, spec.devices(run)),
    ]
    if w.host:
        rate = c.host_bytes_per_s or c.memory_bytes_per_s
        transfers.append(Resource("host link", w.host, "B", rate, w.host / rate, w.host / rate / e.host))
    whole = sum(r.step_s for r in transfers)
    hidden = min(e.hidden * whole, sum(r.step_s for r in busy))
    seen = [replace(r, step_s=r.step_s * (1 - hidden / whole)) for r in transfers if r.amount > 0]
    return [r for r in busy if r.amount > 0] + seen


def step_s(run: spec.Run) -> float:
    """Seconds of one optimizer step at the stated efficiencies."""
    return sum(r.step_s for r in resources(run))


def time(run: spec.Run, goodput: float | int = GOODPUT) -> dict:
    """Step time, days and throughput.

    `floor_step_s` is the time of the busiest resource at its rated rate with all others hidden behind it: no
    implementation of this run is faster. `days` is wall-clock time, `goodput` included; `step_days` leaves it out.
    `mfu` divides the model's FLOPs (readout included, no recomputation) by the rated FLOPs of the step.

    Raises:
        ValueError: if `goodput` is not above 0 and at most 1.
    """
    if not 0 < goodput <= 1:
        raise ValueError(
            f"goodput={goodput} is the share of time spent in steps that count: above 0, at most 1; e.g. {GOODPUT}"
        )
    parts = resources(run)
    busiest = max(parts, key=lambda r: r.floor_s)
    step = sum(r.step_s for r in parts)
    rated = step * spec.devices(run) * hardware.flops_per_s(run)
    return {
        "floor_step_s": busiest.floor_s,
        "floor_resource": busiest.name,
        "step_s": step,
        "step_days": spec.steps(run) * step / DAY_S,
        "days": spec.steps(run) * step / goodput / DAY_S,
        "goodput": float(goodput),
        "tokens_per_s": spec.tokens_per_step(run) / step,
        "mfu": flops.train_step(run, readout=True) / rated,
        "mfu_no_head": flops.train_step(run, readout=False) / rated,
        "resources": [asdict(r) for r in parts],
        "efficiency": asdict(EFFICIENCY),
    }


def money(run: spec.Run, days: float, price: float | int | None) -> dict:
    """Chip-hours, energy at rated power, and money at `price` per chip-hour (None: not asked).

    Energy is None where the chip's power is not published.

    Raises:
        ValueError: for a price that is negative or not finite.
    """
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise ValueError(f"price per chip-hour {price} must be a finite number of at least 0; e.g. 3.5")
    watts = hardware.chip(run.compute.chip).watts
    chip_hours = days * 24 * spec.devices(run)
    return {
        "chip_hours": chip_hours,
        "energy_mwh": None if watts is None else chip_hours * watts / 1e6,
        "price_per_chip_hour": price,
        "money": None if price is None else price * chip_hours,
    }


def slack(days: float, deadline: float | int | str | None, start: datetime.date) -> dict | None:
    """Days between the planned end and a deadline, negative if it is missed; None without a deadline.

    `deadline` is a number of days from `start`, or a date as `2027-03-01`.

    Raises:
        ValueError: for a deadline that is neither, or does not lie after `start`.
    """
    if deadline is None:
        return None
    try:
        allowed = float(deadline)
    except ValueError:
        try:
            allowed = float((datetime.date.fromisoformat(str(deadline)) - start).days)
        except ValueError:
            raise ValueError(f"deadline {deadline!r} must be a number of days, e.g. 100, or a date, e.g. 2027-03-01") from None
    if not (math.isfinite(allowed) and allowed > 0):
        raise ValueError(f"deadline {deadline!r} is {allowed:g} days from the start {start}; it must lie after it")
    return {"deadline_days": allowed, "slack_days": allowed - days, "met": allowed >= days}


def end_date(start: datetime.date, days: float) -> str | None:
    """The date `days` after `start`, rounded up; None beyond the calendar."""
    try:
        return (start + datetime.timedelta(days=math.ceil(days))).isoformat()
    except OverflowError:
        return None
