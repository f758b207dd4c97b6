"""A plan for the eye: what it takes, whether it fits, when it ends; then the parts, in the order they are asked for."""

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

GIB = 2**30
WIDE = 112  # columns from which two tables stand side by side


def show(plan: dict, console: Console) -> None:
    """Print what `argosy.plan.sheet.plan` returned, for a terminal of at least 80 columns."""
    console.print()
    console.print(_title(plan))
    console.print(_shape(plan))
    console.print()
    console.print(_answers(plan))
    _side_by_side(console, [("Where a step's time goes", _step(plan)), ("Memory of one chip", _memory(plan))])
    training = Group(_training(plan), Text(), Text("Mixture", "bold"), _mixture(plan))
    _side_by_side(console, [("Parameters", _params(plan)), ("Training", training)])
    _section(console, "Tokens", _tokens(plan))
    if plan["drops"]:
        _section(console, "Expected drops, by tokens in a sequence", _drops(plan["drops"]))
    if plan["warnings"]:
        _section(console, "Where to doubt it", _warnings(plan["warnings"]))
    console.print()


def show_proposal(found: dict, console: Console) -> None:
    """Print what `argosy.runs.propose.propose` returned: the proposal, its neighbours, and its plan in short."""
    asked, chosen = found["asked"], found["proposal"]
    plan = chosen["plan"]
    console.print()
    chips = f"{asked['chips']:,} x {plan['hardware']['label']}"
    console.print(Text.assemble((chips, "bold"), (" for ", "dim"), (f"{asked['days']:g} days", "bold")))
    console.print()
    console.print(_answers(plan))
    console.print()
    console.print(_shape(plan))
    _section(console, "The proposal and its neighbours", _neighbours(found))
    _side_by_side(console, [("Training", _training(plan)), ("Memory of one chip", _memory(plan))])
    _section(console, "Where a step's time goes", _step(plan))
    if chosen["notes"]:
        _section(console, "Where it leaves what the recipe was run at", _lines(chosen["notes"]))
    console.print()


# ---- figures ------------------------------------------------------------------------------------


def count(n: int | float) -> str:
    """A count with its unit and two decimals; whole below 100,000.

    >>> count(535_477_106_688), count(4096), count(18.0e12)
    ('535.48B', '4,096', '18.00T')
    """
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= unit and n >= 1e5:
            return f"{n / unit:.2f}{letter}"
    return f"{n:,.0f}"


UNITS = ((1.0, "ms", 1e-3, 1), (120.0, "s", 1.0, 2), (7200.0, "min", 60.0, 1), (172_800.0, "h", 3600.0, 1))


def duration(seconds: int | float, like: int | float | None = None) -> str:
    """A duration in the unit that suits it, or the one that suits `like`.

    >>> duration(0.294), duration(18.727), duration(301), duration(8.5e6), duration(0.06, like=18)
    ('294.0 ms', '18.73 s', '5.0 min', '98.4 days', '0.06 s')
    """
    scale = seconds if like is None else like
    for limit, name, unit, digits in UNITS:
        if scale < limit:
            return f"{seconds / unit:.{digits}f} {name}"
    return f"{seconds / 86_400:,.1f} days"


def size(n: int | float, like: int | float | None = None) -> str:
    """Bytes in GiB, or in MiB if they, or `like`, are below one.

    >>> size(151e9), size(5e6), size(5e6, like=151e9)
    ('140.6 GiB', '4.8 MiB', '0.0 GiB')
    """
    return f"{n / GIB:,.1f} GiB" if (n if like is None else like) >= GIB else f"{n / 2**20:,.1f} MiB"


def bar(share: float, width: int = 20, style: str = "cyan") -> Text:
    """A bar of `width` cells, filled to `share` of them in half cells.

    >>> str(bar(0.3, 5))
    '━╸───'
    """
    halves = round(max(0.0, min(1.0, share)) * width * 2)
    filled = "━" * (halves // 2) + "╸" * (halves % 2)
    return Text.assemble((filled, style), ("─" * (width - len(filled)), "bright_black"))


# ---- parts of the page ----------------------------------------------------------------------------


def _title(plan: dict) -> Text:
    hardware, params = plan["hardware"], plan["params"]
    chips = f"{hardware['chips']:,} x {hardware['label']}" if hardware["chip"] != "cpu" else hardware["label"]
    return Text.assemble(
        (plan["recipe"], "bold"),
        ("  ", ""),
        (f"{count(params['total'])} parameters, {count(params['active'])} active", "cyan"),
        ("  on ", "dim"),
        chips,
    )


def _shape(plan: dict) -> Text:
    m = plan["model"]
    latent = f" in a latent width of {m['latent_width']:,}" if m["latent"] != "none" else ""
    return Text(
        f"{m['layers']} layers of width {m['width']:,}; {m['heads']} heads over {m['kv_heads_local']} local, {m['kv_heads_global']}"
        f" global key/value heads; {m['experts']} experts of {m['hidden']:,}, top-{m['experts_per_token']},{latent};"
        f" {m['shared_experts']} shared; vocabulary {m['vocab']:,}".replace(",;", ";"),
        "dim",
    )


def _answers(plan: dict) -> Table:
    time, memory, cost, device = plan["time"], plan["memory"], plan["cost"], plan["memory"]["per_device_bytes"]["device"]
    ends = f", ends {time['end']}" if time["days"] >= 2 and time["end"] else ""
    speed = (
        f"{count(time['tokens_per_s'])} tokens/s, MFU {time['mfu']:.1%}; floor {duration(time['floor_step_s'], time['step_s'])}"
    )
    share, style = device["total"] / memory["device_usable_bytes"], "cyan" if memory["fits"] else "bold red"
    fits = "" if memory["fits"] else ", does not fit"
    rows = [
        ("time", _fact(duration(time["days"] * 86_400), f"at goodput {time['goodput']:.0%}{ends}")),
        ("step", _fact(duration(time["step_s"]), f"{speed} ({time['floor_resource']})")),
        (
            "memory",
            _fact(size(device["total"]), f"of {size(memory['device_usable_bytes'])} usable{fits}  ", style if fits else "bold")
            + bar(share, 16, style),
        ),
    ]
    hours, energy = f"{count(cost['chip_hours'])} chip-hours", cost["energy_mwh"]
    rated = "" if energy is None else f"{energy:,.4g} MWh at rated power"
    if cost["money"] is not None:
        rest = f"for {hours} at {cost['price_per_chip_hour']:g}{'; ' if rated else ''}{rated}"
        rows.append(("cost", _fact(f"{cost['money']:,.0f}", rest)))
    elif cost["chip_hours"] >= 100:
        rows.append(("cost", _fact(hours, rated)))
    if cost["deadline"]:
        slack, allowed = cost["deadline"]["slack_days"], cost["deadline"]["deadline_days"]
        words = f"{abs(slack):,.1f} days {'late' if slack < 0 else 'to spare'}"
        rows.append(("deadline", _fact(words, f"of {allowed:,.4g}", "bold red" if slack < 0 else "bold green")))
    return _grid(rows)


def _step(plan: dict) -> RenderableType:
    table = _table(("", "left"), ("in the step", "right"), ("", "left"), ("rated", "right"))
    total = plan["time"]["step_s"]
    for r in sorted(plan["time"]["resources"], key=lambda r: -r["step_s"]):
        if r["step_s"] / total >= 0.0005:
            rated = Text(duration(r["floor_s"], total), "dim")
            table.add_row(r["name"], duration(r["step_s"], total), bar(r["step_s"] / total, 10), rated)
    table.add_row(Text("step", "bold"), Text(duration(total), "bold"), "", "")
    if plan["hardware"]["chips"] == 1:
        return table
    return Group(table, Text(f"{plan['time']['efficiency']['hidden']:.0%} of transfers hide behind the rest", "dim"))


KINDS = {
    "params": "weights",
    "masters": "float32 masters",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "accumulated": "gradients so far",
    "margins": "counted margins",
    "saved": "saved for backward",
    "block": "the block at work",
    "gathered": "gathered weights",
    "prefetched": "early from the host",
    "readout": "readout and logits",
    "iterates": "Newton-Schulz",
}


def _memory(plan: dict) -> Table:
    memory = plan["memory"]
    table = _table(("", "left"), ("at the peak", "right"), ("", "left"))
    device, host = (memory["per_device_bytes"][place] for place in ("device", "host"))
    total = device["total"]
    for kind, n in sorted(device.items(), key=lambda item: -item[1]):
        if kind != "total" and n / total >= 0.0005:
            table.add_row(KINDS[kind], size(n, total), bar(n / total, 10))
    table.add_row(Text(f"{memory['fullest_moment']}, the fullest moment", "bold"), Text(size(total), "bold"), "")
    for kind, n in host.items():
        if kind != "total":
            table.add_row(Text(f"in host memory: {KINDS[kind]}", "dim"), Text(size(n, total), "dim"), "")
    return table


def _params(plan: dict) -> Table:
    parts, total = plan["params"]["by_kind"], plan["params"]["total"]
    table = _table(("", "left"), ("parameters", "right"), ("share", "right"))
    for part, n in sorted(parts.items(), key=lambda item: -item[1]):
        if n:
            table.add_row(part.replace("_", " "), f"{n:,}", Text(f"{n / total:.2%}" if n / total >= 5e-5 else "", "dim"))
    table.add_row()
    for row in plan["params"]["accounting"]:
        if row["name"] != "optimized":
            style = "bold" if row["name"] in ("total", "active") else "dim"
            table.add_row(Text(row["name"], style), Text(f"{row['params']:,}", style), "")
    return table


def _training(plan: dict) -> Table:
    optim, flops, mesh, compute = plan["optim"], plan["flops"], plan["hardware"]["mesh"], plan["compute"]
    per_step, seq_len = plan["tokens"]["per_step"], plan["tokens"]["phases"][0]["seq_len"]
    adamw = optim["rule"] == "adamw"
    rates = (
        f"AdamW {optim['adamw_lr']:.5g}"
        if adamw
        else f"{'MuonH' if optim['rule'] == 'hyperball' else 'Muon'} {optim['muonh_lr']:.5g}"
    )
    rows = [
        ("tokens", f"{count(plan['tokens']['trained'])}, {plan['tokens']['per_active_param']:,.4g} per active parameter"),
        ("batch", f"{per_step // seq_len:,} x {seq_len:,} = {per_step:,} tokens"),
        ("steps", f"{plan['steps']:,}, warm-up {optim['warmup_steps']:,}"),
        ("learning rates", rates + ("" if adamw else f", Adam {optim['adam_lr']:.5g}")),
        ("constants", f"beta2 {optim['beta2']:.5g}, eps {optim['eps']:.5g}"),
        ("FLOPs per step", f"{flops['train_step']:.5g}, without readout {flops['train_step_no_head']:.5g}"),
        ("FLOPs in all", f"{flops['train_total']:.5g}, without readout {flops['train_total_no_head']:.5g}"),
        ("mesh", "  ".join(f"{name} {n}" for name, n in mesh.items())),
        ("exchange", f"{compute['exchange'].replace('_', ' ')}, remat {compute['remat'].replace('_', ' ')}"),
        ("weights", f"{compute['params']} for {compute['precision']} products"),
    ]
    if compute["accumulate"] > 1:
        rows.append(("accumulation", f"{compute['accumulate']} parts of the batch, one after another"))
    if compute["params"] == "bf16":
        rows.append(("masters", f"fp32, {compute['masters'].replace('_', ' ')}"))
    rows.append(("optimizer state", compute["optimizer_state"].replace("_", " ")))
    return _grid([(name, Text(value)) for name, value in rows], gap=2)


def _mixture(plan: dict) -> Table:
    phases = plan["tokens"]["phases"]
    table = _table(("", "left"), *((p["name"], "right") for p in phases))
    for source in dict.fromkeys(name for p in phases for name in p["weights"]):
        table.add_row(source.replace("_", " "), *(f"{p['weights'].get(source, 0.0):.1%}" for p in phases))
    return table


def _tokens(plan: dict) -> Table:
    table = _table(("", "left"), ("tokens", "right"), ("steps", "right"), ("what it is", "left"))
    for row in plan["tokens"]["accounting"]:
        steps = "" if row["steps"] is None else f"{row['steps']:,}"
        table.add_row(row["name"], f"{row['tokens']:,}", steps, Text(row["meaning"], "dim"))
    return table


def _drops(drops: dict) -> RenderableType:
    lengths = _lengths(drops["by_seq_len"])
    table = _table(("", "left"), ("", "left"), *((f"{name} ", "right") for name, _ in lengths))
    documents = (f"{row['documents_per_shard']:,.4g} " for _, row in lengths)
    table.add_row(*(Text(cell, "dim") for cell in ("documents", "per device", *documents)))
    for name in lengths[0][1]["transports"]:
        own = name == drops["own"]
        label, first = name.replace("_", " "), True
        for side in ("sender", "receiver"):
            found = [row["transports"][name] for _, row in lengths]
            if all(drop[side] == 0 for drop in found) and (side == "sender" or not first):
                continue
            cells = (_share(drop, side, drops["flag_above"], own) for drop in found)
            table.add_row(Text(label if first else "", "bold" if own else ""), f"at the {side}", *cells)
            first = False
    return Group(table, Text(), _drops_words(drops))


def _lengths(rows: list[dict], most: int = 6) -> list[tuple[str, dict]]:
    """Columns of lengths: one for all with the same documents per device, and not more than fit a narrow terminal."""
    groups: dict[float, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["documents_per_shard"], []).append(row)
    found = []
    for group in groups.values():
        ends = dict.fromkeys(_length(row["seq_len"]) for row in (group[0], group[-1]))
        found.append((" to ".join(ends), group[0]))
    if len(found) <= most:
        return found
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]


def _length(tokens: int) -> str:
    """A sequence length as it is spoken of.

    >>> _length(512), _length(4096), _length(65_536)
    ('512', '4K', '65K')
    """
    return f"{tokens // 1000}K" if tokens >= 1000 else str(tokens)


def _share(drop: dict, side: str, flag_above: float, own: bool) -> Text:
    """One side's share, marked where both together pass the limit and this one is the larger."""
    share, total = drop[side], drop["sender"] + drop["receiver"]
    text = "0" if share == 0 else "<0.01%" if share < 5e-5 else f"{share:.2%}" if share < 9.95e-4 else f"{share:.1%}"
    if total > flag_above and share >= total / 2:
        return Text(text + "*", "bold red" if own else "yellow")
    return Text(text + " ", "bold" if own else "")


def _drops_words(drops: dict) -> Table:
    """What the figures rest on, and how far they can be trusted."""
    fitted, rows = drops["fitted"], drops["by_seq_len"]
    error = max(
        drop[side] for row in rows for drop in row["transports"].values() for side in ("sender_error", "receiver_error")
    )
    simulated = f"simulated to {100 * error:.1g} points"
    if fitted is None:
        scaled = "" if drops["alpha"] == drops["published_alpha"] else ", scaled by experts / top-k"
        model = f"alpha {drops['alpha']:.3g}, from one published figure{scaled}; {simulated}"
    else:
        said = {"": f"{fitted['low']:.3g} to {fitted['high']:.3g}", "least": "or less", "most": "or more"}[fitted["edge"]]
        scaled = "" if drops["alpha"] == fitted["alpha"] else f"{drops['alpha']:.3g}, scaled by experts / top-k from "
        model = f"alpha {scaled}{fitted['alpha']:.3g} ({said}) from {fitted['updates']} updates of {fitted['run']},"
        model += f" top-{fitted['experts_per_token']} of {fitted['experts']} experts; {simulated}"
    capacity = f"{drops['receiver_capacity']:g} x the mean at the receiver"
    if drops["senders"] > 1:
        capacity = f"{drops['sender_capacity']:g} x the mean at the sender, {capacity}, {drops['waves']} waves or chunks"
    facts = [("model", model)]
    if fitted and fitted["predicted"]:
        predicted, logged = (sum(fitted[kind][side] for side in ("sender", "receiver")) for kind in ("predicted", "logged"))
        held = f"held as much as {fitted['documents']:.1f} equally long documents per device"
        facts.append((fitted["run"], f"{held}: {predicted:.1%} dropped by the model, {logged:.1%} by its log"))
    facts.append(("capacity", capacity))
    facts.append(("assumed", "one document per sequence; long sequences hold several in reality, and drop less"))
    if any(name.startswith("cell") for name in rows[0]["transports"]):
        facts.append(("cell", "room for each pair of sender and expert: the older scheme, planned for and not built"))
    facts.append(("*", f"past {drops['flag_above']:.0%} of all assignments, both sides together"))
    return _grid([(name, Text(value, "dim")) for name, value in facts], gap=2)


def _neighbours(found: dict) -> Table:
    table = _table(
        *(
            (name, "left" if name in ("", "verdict") else "right")
            for name in ("", "width", "total", "active", "tokens", "memory", "days", "verdict")
        )
    )
    for name in ("smaller", "proposal", "larger"):
        item = found[name]
        if item is None or item["plan"] is None:
            table.add_row(Text(name, "dim"), *[Text("none", "dim")] + [""] * 6)
            continue
        plan = item["plan"]
        cells = (
            f"{plan['model']['width']:,}",
            count(plan["params"]["total"]),
            count(plan["params"]["active"]),
            count(plan["tokens"]["horizon"]),
            size(plan["memory"]["per_device_bytes"]["device"]["total"]),
            f"{plan['time']['days']:,.1f}",
            item["verdict"],
        )
        style = "bold" if name == "proposal" else "dim"
        table.add_row(*(Text(cell, style) for cell in (name, *cells)))
    return table


SUBJECTS = {"memory": "memory", "drops": "drops", "time": "step time", "rates": "learning rates"}


def _warnings(found: list[dict]) -> Table:
    grid = Table.grid(padding=(0, 3))
    grid.add_column(no_wrap=True)
    grid.add_column()
    before = ""
    for w in found:
        style = "bold red" if w["about"] == "memory" else "yellow"
        grid.add_row(Text("" if w["about"] == before else SUBJECTS[w["about"]], style), w["text"])
        before = w["about"]
    return grid


# ---- layout -------------------------------------------------------------------------------------


def _lines(lines: Iterable[str]) -> Table:
    grid = Table.grid(padding=(0, 1))
    for line in lines:
        grid.add_row(Text("-", "yellow"), line)
    return grid


def _fact(head: str, rest: str, style: str = "bold") -> Text:
    return Text.assemble((head, style), "  ", (rest, "dim"))


def _grid(rows: list[tuple[str, Text]], gap: int = 3) -> Table:
    grid = Table.grid(padding=(0, gap))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=justify == "right" or not name)  # type: ignore[arg-type]
    return table


def _section(console: Console, title: str, body: RenderableType) -> None:
    console.print()
    console.print(Text(title, "bold"))
    console.print(body)


def _side_by_side(console: Console, sections: list[tuple[str, RenderableType]]) -> None:
    if console.width < WIDE:
        for title, body in sections:
            _section(console, title, body)
        return
    grid = Table.grid(expand=True, padding=(0, 4, 0, 0))
    for _ in sections:
        grid.add_column(ratio=1)
    grid.add_row(*(Group(Text(title, "bold"), body) for title, body in sections))
    console.print()
    console.print(grid)
