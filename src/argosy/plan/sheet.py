"""The plan of a run: everything that can be known before it starts, as one dict of plain JSON values."""

import datetime
from dataclasses import asdict

from argosy import spec
from argosy.plan import accounting, cost, drops, flops, hardware, memory, scaling

GIB = memory.GIB


def plan(
    run: spec.Run,
    price: float | int | None = None,
    deadline: float | int | str | None = None,
    goodput: float | int = cost.GOODPUT,
    start: datetime.date | None = None,
    fitted: dict | None = None,
) -> dict:
    """Sizes, FLOPs, tokens, learning rates, memory, time and cost of a run.

    `price` is money per chip-hour, in the user's currency. `deadline` is a number of days from `start` (today if
    None), or a date. `fitted` is the drop model's number from a run's log (`drops.refit`); the published one if None.
    Bytes are per device; times are seconds and days; FLOPs and parameters are whole numbers where the formulas give
    whole numbers.

    >>> from argosy.runs import pocket
    >>> plan(pocket.run())["steps"]
    1024

    Raises:
        ValueError: for an unknown chip, a goodput outside 0 to 1, a bad price or deadline.
    """
    chip = hardware.chip(run.compute.chip)
    start = start or datetime.date.today()
    parts, time, fits = flops.params(run), cost.time(run, goodput), memory.plan(run)
    dropped = drops.plan(run, fitted)
    step, no_head, steps = flops.train_step(run, readout=True), flops.train_step(run, readout=False), spec.steps(run)
    return {
        "recipe": run.recipe,
        "key": run.key(),
        "params": {
            "total": sum(parts.values()),
            "active": flops.active(run),
            "active_convention": flops.CONVENTION,
            "active_variants": flops.active_variants(run),
            "by_kind": parts,
            "accounting": accounting.params(run),
        },
        "flops": {
            "forward_per_token": flops.forward_per_token(run, readout=True),
            "forward_per_token_no_head": flops.forward_per_token(run, readout=False),
            "train_step": float(step),
            "train_step_no_head": float(no_head),
            "train_total": float(steps * step),
            "train_total_no_head": float(steps * no_head),
        },
        "tokens": {
            "per_step": spec.tokens_per_step(run),
            "horizon": run.optim.horizon_tokens,
            "trained": steps * spec.tokens_per_step(run),
            "per_active_param": run.optim.horizon_tokens / flops.active(run),
            "mixture_reference": run.data.mixture_reference_tokens,
            "epoching": run.data.epoching,
            "phases": accounting.phases(run),
            "accounting": accounting.tokens(run),
        },
        "steps": steps,
        "optim": {"rule": run.optim.rule, "scaling": run.optim.scaling, **asdict(scaling.rates(run))}
        | ({"adamw_lr": run.optim.adamw_lr, "weight_decay": run.optim.weight_decay} if run.optim.rule == "adamw" else {}),
        "memory": fits,
        "drops": dropped,
        "time": {**time, "start": start.isoformat(), "end": cost.end_date(start, time["days"])},
        "cost": {**cost.money(run, time["days"], price), "deadline": cost.slack(time["days"], deadline, start)},
        "hardware": {
            "chip": chip.name,
            "label": chip.label,
            "chips": spec.devices(run),
            "mesh": asdict(run.mesh),
            "flops_per_s": hardware.flops_per_s(run),
            "source": chip.source,
        },
        "model": asdict(run.model) | asdict(run.moe),
        "compute": asdict(run.compute) | {"exchange": run.routing.exchange},
        "warnings": warnings(run, fits, dropped),
    }


def warnings(run: spec.Run, fits: dict, dropped: dict | None) -> list[dict]:
    """Where the plan should not be taken at its word: `{about, text}`, with about one of memory, drops, time, rates."""
    chip = hardware.chip(run.compute.chip)
    found = []
    device, host = (fits["per_device_bytes"][place]["total"] for place in ("device", "host"))
    if device > fits["device_usable_bytes"]:
        found.append(
            ("memory", f"needs {device / GIB:,.1f} GiB of {fits['device_usable_bytes'] / GIB:,.1f} usable per {chip.label}")
        )
    if host > (fits["host_usable_bytes"] or fits["device_usable_bytes"]):
        found.append(
            ("memory", f"needs {host / GIB:,.1f} GiB of host memory per chip; it has {fits['host_usable_bytes'] / GIB:,.1f}")
        )
    if dropped is not None:
        own = dropped["by_seq_len"][0]["transports"][dropped["own"]]
        if own["sender"] + own["receiver"] > drops.FLAGGED:
            sides = " and ".join(f"{own[side]:.1%} at the {side}" for side in ("sender", "receiver") if own[side] >= 0.0005)
            text = f"expected to be dropped, of all assignments: {sides}; flagged past {drops.FLAGGED:.0%}"
            found.append(("drops", text))
    if chip.name != "gb200":
        found.append(("time", f"efficiencies were fitted on GB200 and are only assumed for {chip.label}"))
    elif not 2048 <= run.model.width <= 6144:
        found.append(("time", f"model.width={run.model.width:,}: step times were fitted at widths 2,048 and 6,144"))
    if run.data.seq_len > cost.FITTED_SEQ_LEN:
        found.append(
            ("time", f"data.seq_len={run.data.seq_len:,}: costs of context are published up to {cost.FITTED_SEQ_LEN:,}")
        )
    if run.mesh.expert > chip.domain:
        found.append(("time", f"mesh.expert={run.mesh.expert} leaves the {chip.domain} chips of a scale-up domain"))
    found += [("rates", line) for line in scaling.outside(run)]
    return [{"about": about, "text": text} for about, text in found]
