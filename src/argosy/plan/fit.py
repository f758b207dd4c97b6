"""The cheapest choices of memory that fit: remat, accumulation, the type of the weights, what lies in host memory.

Every combination is planned (`memory`, `cost`); the fastest that fits is chosen. None of them changes the loss or the
update, but where capacity is bounded: it is that of each part of the batch.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from argosy import spec
from argosy.plan import cost, hardware, memory, report

KNOBS = ("remat", "accumulate", "params", "masters", "optimizer_state")


@dataclass(frozen=True)
class Candidate:
    """One combination of choices: what it takes of one device and of its share of the host."""

    remat: str
    accumulate: int
    params: str
    masters: str
    optimizer_state: str
    step_s: float
    device_bytes: float
    host_bytes: float
    over_bytes: float  # by how much it does not fit, device or host, whichever is more; at most 0 if it fits
    fullest_moment: str
    fits: bool


def fit(run: spec.Run) -> dict:
    """All combinations for a run, the one to use, and what each of its choices costs or spares against the others.

    Keys: `usable_bytes`, `host_usable_bytes`; `asked`, the run as it is; `chosen`, the fastest that fits (of equals the
    one nearest to the run, then the smallest), or None; `candidates` from fast to slow; `alternatives`, the chosen one
    with one choice changed; `set`, the settings that lead there; `notes`; and `nothing`, None if something fits.
    Bytes are per device.

    >>> from argosy.runs import marin_535b
    >>> found = fit(marin_535b.run())
    >>> found["chosen"]["fits"], found["nothing"]
    (True, None)

    Raises:
        ValueError: for an unknown chip.
    """
    asked, tried = candidate(run), [candidate(other) for other in combinations(run)]
    tried.sort(key=lambda c: (c.step_s, distance(c, asked), c.device_bytes))
    chosen = next((c for c in tried if c.fits), None)
    chip = hardware.chip(run.compute.chip)
    return {
        "recipe": run.recipe,
        "key": run.key(),
        "chip": chip.label,
        "devices": spec.devices(run),
        "usable_bytes": memory.USABLE * chip.memory_bytes,
        "host_usable_bytes": chip.host_bytes,
        "asked": asdict(asked),
        "chosen": asdict(chosen) if chosen else None,
        "candidates": [asdict(c) for c in tried],
        "alternatives": [asdict(c) for c in tried if chosen and distance(c, chosen) == 1],
        "set": [f"compute.{k}={getattr(chosen, k)}" for k in KNOBS if getattr(chosen, k) != getattr(asked, k)]
        if chosen
        else [],
        "notes": notes(run, chosen),
        "nothing": None if chosen else nothing(run, tried),
    }


def combinations(run: spec.Run) -> Iterator[spec.Run]:
    """The run with every combination of choices that training takes; those that would be the same twice are left out.

    bfloat16 weights are for bfloat16 products; without them there are no masters. Where the host's memory is the
    device's, nothing moves there. Only transports between devices have arrived rows to keep.
    """
    c = run.compute
    apart = hardware.chip(c.chip).host_bytes_per_s > 0
    places = ("device", "pinned_host") if apart else ("device",)
    weights = [("fp32", "device")] + [("bf16", place) for place in places if c.precision == "bf16"]
    moves = run.routing.exchange not in ("dense", "local")
    remats = ("none", "block_keep_dispatch", "block") if moves else ("none", "block")
    for remat, parts, (params, masters), state in itertools.product(remats, accumulations(run), weights, places):
        choices: dict[str, Any] = dict(zip(KNOBS, (remat, parts, params, masters, state), strict=True))
        yield replace(run, compute=replace(c, **choices))


def accumulations(run: spec.Run) -> list[int]:
    """Into how many equal parts the batch is cut; the balance loss needs it whole."""
    return [1] if run.routing.balance == "aux_loss" else _divisors(run)


def _divisors(run: spec.Run) -> list[int]:
    """Into how many equal parts a device's sequences can be cut."""
    seqs = run.data.batch_seqs // (spec.devices(run) // run.mesh.context)
    return [n for n in range(1, seqs + 1) if seqs % n == 0]


def candidate(run: spec.Run) -> Candidate:
    """What a run's choices take."""
    c, planned = run.compute, memory.plan(run)
    device, host = (float(planned["per_device_bytes"][place]["total"]) for place in ("device", "host"))
    room = planned["host_usable_bytes"] or planned["device_usable_bytes"]
    return Candidate(
        **{k: getattr(c, k) for k in KNOBS},
        step_s=cost.step_s(run),
        device_bytes=device,
        host_bytes=host,
        over_bytes=max(device - planned["device_usable_bytes"], host - room),
        fullest_moment=planned["fullest_moment"],
        fits=planned["fits"],
    )


def distance(a: Candidate, b: Candidate) -> int:
    """How many choices differ; the type of the weights and where their masters lie are one choice."""
    weights = (a.params, a.masters) != (b.params, b.masters)
    return weights + sum(getattr(a, k) != getattr(b, k) for k in ("remat", "accumulate", "optimizer_state"))


def notes(run: spec.Run, chosen: Candidate | None) -> list[str]:
    """What to know about the choices."""
    found = []
    if run.compute.precision == "bf16":
        found.append(
            "bf16 weights are rounded once per update where float32 weights are rounded before every product; embedding,"
            " gains and convolutions stay float32: with their masters they give the same losses and updates"
        )
    else:
        found.append(
            f"compute.params=bf16 would change the mathematics of compute.precision={run.compute.precision}: not offered;"
            " with compute.precision=bf16, a run of its own, it can be"
        )
    if chosen and chosen.accumulate != run.compute.accumulate and run.routing.capacity == "bounded":
        found.append(
            "expert capacity is that of each part of the batch: smaller parts are less even, so somewhat more is dropped"
        )
    return found


# ---- where nothing fits -------------------------------------------------------------------------


def nothing(run: spec.Run, tried: list[Candidate]) -> dict:
    """By how much the smallest combination misses, and the nearest runs of which one fits: more devices, fewer layers."""
    least = min(tried, key=lambda c: (c.over_bytes, c.step_s))
    return {"smallest": asdict(least), "over_bytes": least.over_bytes, "nearest": [*_more_devices(run), *_fewer_layers(run)]}


def _fits(run: spec.Run) -> bool:
    return any(memory.plan(other)["fits"] for other in combinations(run))


def _more_devices(run: spec.Run) -> list[dict]:
    """The least multiple of the devices of which something fits, along the axis that divides experts or along data."""
    best: tuple[int, list[str]] | None = None
    for axis in ("expert", "data"):
        for factor in _divisors(run)[1:]:
            if best and factor >= best[0]:
                break
            ways = getattr(run.mesh, axis) * factor
            if axis == "expert" and (run.moe.experts % ways or run.mesh.expert == 1):
                continue
            more = [f"mesh.{axis}={ways}"]
            local = run.moe.experts // (ways if axis == "expert" else run.mesh.expert)
            if local % run.routing.waves:
                more.append(f"routing.waves={math.gcd(local, run.routing.waves)}")
            shards = spec.devices(run) // run.mesh.context * factor
            if run.evals.batch_seqs % shards:
                more.append(f"evals.batch_seqs={math.ceil(run.evals.batch_seqs / shards) * shards}")
            try:
                larger = spec.override(run, more)
            except ValueError:  # a batch or a width that does not divide
                continue
            if _fits(larger):
                best = (factor, more)
    if best is None:
        return []
    return [{"set": best[1], "text": f"{spec.devices(run) * best[0]:,} devices"}]


def _fewer_layers(run: spec.Run) -> list[dict]:
    """The most layers of which something fits."""
    low, high = 0, run.model.layers  # `low` fits, or is none; `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(replace(run, model=replace(run.model, layers=middle))):
            low = middle
        else:
            high = middle
    return [{"set": [f"model.layers={low}"], "text": f"{low} of {run.model.layers} layers"}] if low else []


# ---- for a terminal -----------------------------------------------------------------------------

SHOWN = 10  # candidates in the table
NEAR = 2  # other numbers of parts on either side of the chosen one


def show(found: dict, console: Console) -> None:
    """Print what `fit` returned, for a terminal of at least 80 columns."""
    usable, chosen = found["usable_bytes"], found["chosen"]
    console.print()
    console.print(Text.assemble((found["recipe"], "bold"), f"  memory choices on {found['devices']:,} x {found['chip']}"))
    console.print()
    if chosen is None:
        least = found["nothing"]["smallest"]
        console.print(Text(f"nothing fits: the smallest misses by {report.size(found['nothing']['over_bytes'])}", "bold red"))
        console.print(_table(found, [least]))
        for near in found["nothing"]["nearest"]:
            console.print(f"nearest: {near['text']}:  {' '.join(f'--set {s}' for s in near['set'])}")
    else:
        step, size = report.duration(chosen["step_s"]), report.size(chosen["device_bytes"])
        console.print(
            Text.assemble((f"{step} per step", "bold cyan"), f" in {size} of {report.size(usable)} usable per device")
        )
        words = " ".join(f"--set {s}" for s in found["set"])
        console.print(Text(words or "the run's own choices: nothing to set", "bold"))
        console.print()
        console.print(Text("One choice changed", "bold"))
        console.print(_table(found, sorted([chosen, *_near(found)], key=lambda c: c["step_s"])))
        console.print()
        fitting = [c for c in found["candidates"] if c["fits"]]
        console.print(Text(f"The fastest of {len(fitting)} that fit, of {len(found['candidates'])} combinations", "bold"))
        console.print(_table(found, fitting[:SHOWN]))
    unit = "GiB" if (chosen or found["nothing"]["smallest"])["device_bytes"] >= report.GIB else "MiB"
    about = f"> chosen  = the run as it is; sizes in {unit} per device; weights: type and, of bf16, where the masters lie"
    console.print(Text(about, "dim"))
    for note in found["notes"]:
        console.print(Text(f"- {note}", "dim"))
    console.print()


def _near(found: dict) -> list[dict]:
    """The alternatives, of those with another number of parts only the nearest."""
    parts = found["chosen"]["accumulate"]
    others = sorted({c["accumulate"] for c in found["alternatives"]} - {parts})
    less, more = [n for n in others if n < parts][-NEAR:], [n for n in others if n > parts][:NEAR]
    return [c for c in found["alternatives"] if c["accumulate"] in (parts, *less, *more)]


def _table(found: dict, rows: list[dict]) -> Table:
    """Choices with their time and bytes, and how both differ from the chosen one."""
    chosen = found["chosen"] or rows[0]
    unit = report.GIB if chosen["device_bytes"] >= report.GIB else 2**20
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    left = ("", "remat", "weights", "state")
    for head in ("", "remat", "parts", "weights", "state", "step", " ", "device", "  ", "host", "   "):
        table.add_column(head, justify="left" if head in left else "right", no_wrap=True)
    for c in rows:
        same = c == chosen
        time, size = c["step_s"] / chosen["step_s"] - 1, (c["device_bytes"] - chosen["device_bytes"]) / unit
        table.add_row(
            (">" if c == found["chosen"] else " ") + ("=" if c == found["asked"] else " "),
            c["remat"].removeprefix("block_keep_"),
            str(c["accumulate"]),
            c["params"] + (f"/{c['masters'].removeprefix('pinned_')}" if c["params"] == "bf16" else ""),
            c["optimizer_state"].removeprefix("pinned_"),
            report.duration(c["step_s"], chosen["step_s"]),
            Text("" if same else f"{time:+.1%}", "dim"),
            f"{c['device_bytes'] / unit:,.1f}",
            Text("" if same else f"{size:+,.{0 if abs(size) >= 100 else 1}f}", "dim"),
            f"{c['host_bytes'] / unit:,.1f}" if c["host_bytes"] else "",
            Text("" if c["fits"] else "no room", "red"),
            style="bold" if c == found["chosen"] else "",
        )
    return table
