"""A rehearsal for the eye: the verdict's reasons in the order in which one would ask for them."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from argosy.plan.report import duration, size

KINDS = {"params": "weights", "masters": "float32 masters", "optimizer": "optimizer state", "batch": "batch"}
PHASES = ("forward", "recomputation", "backward", "optimizer")
SMALL = ("statistics", "norms", "expert counts")  # sums of a few numbers
INSIDE = "inside the rack"
WIDE = 96  # columns from which the minimum stands beside each amount


def show(found: dict, console: Console) -> None:
    """Print what `argosy.launch.rehearse.rehearse` returned, for a terminal of at least 80 columns."""
    console.print()
    console.print(_title(found))
    if found["bytes_per_device"]:
        _section(console, "What one device holds between steps", _bytes(found))
        _section(console, "What travels in one step", _collectives(found, console.width >= WIDE))
        console.print()
        console.print(_exchange(found))
    console.print()
    console.print(_verdict(found))
    console.print()


def _title(found: dict) -> Text:
    mesh = ", ".join(f"{name} {n}" for name, n in found["mesh"].items())
    devices = f"{found['devices']:,} devices"
    return Text.assemble((found["recipe"], "bold"), ("  rehearsed on ", "dim"), (devices, "cyan"), (f": {mesh}", "dim"))


def _bytes(found: dict) -> RenderableType:
    table = _table(("", "left"), ("where", "left"), ("by shardings", "right"), ("closed form", "right"), ("", "left"))
    totals = {"device": 0.0, "host": 0.0}
    for kind, places in found["bytes_per_device"].items():
        for place, n in places.items():
            planned = found["closed_form_bytes_per_device"][kind][place]
            totals[place] += n
            if n or planned:
                table.add_row(KINDS[kind], Text(place, "dim"), _held(n), Text(_held(planned), "dim"), _agree(n, planned))
    for place, n in totals.items():
        if n:
            table.add_row(Text("in all", "bold"), Text(place, "dim"), Text(_held(n), "bold"), "", "")
    temporary = found["temporary_bytes_per_device"]
    peak = totals["device"] + temporary["plan"]
    lines = Text(
        f"With activations {_held(peak)} at the fullest moment by the plan, of {size(found['usable_bytes'])} usable"
        f" ({found['chip']}). Here the CPU compiler took {_held(temporary['compiler'])} of buffers: no accelerator's figure.",
        style="dim",
    )
    return Group(table, lines)


def _held(n: float | int) -> str:
    return size(n) if n >= 2**20 else _amount(n)


def _agree(n: float | int, planned: float | int) -> Text:
    if abs(n - planned) <= 0.02 * planned:
        return Text("agrees" if n == planned else f"{n / planned - 1:+.2%}", "green")
    return Text(f"{n / planned - 1:+.1%}" if planned else "not planned", "bold red")


def _collectives(found: dict, wide: bool) -> Table:
    table = _table(
        *(("", "left"), ("over", "left"), ("link", "left"), ("times", "right"), ("per device", "right")),
        *((("minimum", "right"),) if wide else ()),
        ("rated", "right"),
    )
    fill = [""] * (5 if wide else 4)
    for phase in PHASES:
        rows = [g for g in found["collectives"] if g["phase"] == phase]
        if rows:
            table.add_row(Text(phase, "bold"), *fill, Text(duration(sum(g["time_s"] for g in rows)), "bold"))
        for g in [g for g in rows if g["what"] not in SMALL]:
            moved, least = g["bytes_per_device"], g["minimum_bytes"]
            wrong = abs(moved - least) > 0.02 * least
            table.add_row(
                Text(f"  {g['what']}{', ' + g['op'] if wide else ''}", "bold red" if wrong else ""),
                Text(g["axis"].replace("+", " "), "dim"),
                Text(_link(g), "yellow" if g["link"] != INSIDE else "dim"),
                f"{g['executions']:,}",
                Text(_amount(moved), "bold red" if wrong else ""),
                *((Text(_amount(least), "dim"),) if wide else ()),
                duration(g["time_s"]),
            )
        small = [g for g in rows if g["what"] in SMALL]
        if small:
            sums = (sum(g[key] for g in small) for key in ("executions", "bytes_per_device", "time_s"))
            times, moved, seconds = sums
            what = ", ".join(dict.fromkeys(g["what"] for g in small))
            far = any(g["link"] != INSIDE for g in small)
            link = Text("across" if far else "rack", "dim")
            row = (Text(f"  {what}", "dim"), "", link, Text(f"{times:,}", "dim"), Text(_amount(moved), "dim"))
            table.add_row(*row, *(("",) if wide else ()), Text(duration(seconds) if seconds >= 5e-5 else "0", "dim"))
    table.add_row(Text("step", "bold"), *fill, Text(duration(sum(g["time_s"] for g in found["collectives"])), "bold"))
    return table


def _link(group: dict) -> str:
    return "rack" if group["link"] == INSIDE else "across"


def _amount(n: float | int) -> str:
    """Bytes in the unit that suits them, decimal as links are rated.

    >>> _amount(355_819_585_536), _amount(1_258_024), _amount(4)
    ('355.8 GB', '1.3 MB', '4 B')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= unit:
            return f"{n / unit:,.1f} {name}"
    return f"{n:,.0f} B"


def _exchange(found: dict) -> Table:
    a2a, grid = found["all_to_all"], Table.grid(padding=(0, 3))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    if a2a["per_layer_per_wave_forward"]:
        grid.add_row(
            "experts",
            Text.assemble(
                (f"{_amount(a2a['bytes_per_token_per_layer'])} per token and layer", "bold"),
                f" forward: {a2a['per_layer_per_wave_forward']:g} all-to-alls a layer and wave",
            ),
        )
    elif a2a["bytes_per_token_per_layer"]:
        amount = _amount(a2a["bytes_per_token_per_layer"])
        grid.add_row(
            "experts", Text.assemble((f"{amount} per token and layer", "bold"), " forward: tokens gathered, sums scattered")
        )
    far = [g for g in found["collectives"] if g["link"] != INSIDE and g["what"] not in SMALL]
    names = ", ".join(dict.fromkeys(g["what"] for g in far)) or "nothing but sums of few numbers"
    grid.add_row("across", Text.assemble((names, "yellow" if far else ""), (" between scale-up domains" if far else "")))
    return grid


def _verdict(found: dict) -> Group:
    seconds = Text(f"Compiled and read in {found['seconds']:,.0f} s with {size(found['peak_memory_bytes'])}.", "dim")
    if found["ok"]:
        return Group(
            Text.assemble(("Ready. ", "bold green"), "Every byte and every collective is explained, within 2%."), seconds
        )
    count, grid = len(found["problems"]), Table.grid(padding=(0, 1))
    for problem in found["problems"]:
        grid.add_row(Text("-", "red"), problem)
    return Group(Text(f"{count} problem{'s' if count > 1 else ''}", "bold red"), grid, seconds)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _section(console: Console, title: str, body: RenderableType) -> None:
    console.print()
    console.print(Text(title, "bold"))
    console.print(body)
