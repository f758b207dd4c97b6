"""A rehearsal for the eye: the verdict's reasons in the order in which one would ask for them."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from argosy.plan.report import duration, size

KINDS = {"params": "weights", "masters": "float32 masters", "optimizer": "optimizer state", "batch": "batch"}
PHASES = {"forward": "forward", "recomputation": "recomputation", "backward": "backward", "optimizer": "optimizer"}


def show(found: dict, console: Console) -> None:
    """Print what `argosy.launch.rehearse.rehearse` returned, for a terminal of at least 80 columns."""
    console.print()
    console.print(_title(found))
    if found["bytes_per_device"]:
        _section(console, "What one device holds between steps", _bytes(found))
        _section(console, "What travels in one step", _collectives(found))
        console.print()
        console.print(_exchange(found))
    console.print()
    console.print(_verdict(found))
    console.print()


def _title(found: dict) -> Text:
    mesh = "  ".join(f"{name} {n}" for name, n in found["mesh"].items())
    return Text.assemble(
        (found["recipe"], "bold"),
        "  ",
        (f"{found['devices']:,} devices", "cyan"),
        (" as ", "dim"),
        mesh,
        (f"   {found['chip']}", "dim"),
    )


def _bytes(found: dict) -> RenderableType:
    table = _table(("", "left"), ("where", "left"), ("by shardings", "right"), ("closed form", "right"), ("", "left"))
    totals = {"device": 0.0, "host": 0.0}
    for kind, places in found["bytes_per_device"].items():
        for place, n in places.items():
            planned = found["closed_form_bytes_per_device"][kind][place]
            totals[place] += n
            if n or planned:
                table.add_row(KINDS[kind], Text(place, "dim"), size(n), Text(size(planned), "dim"), _agree(n, planned))
    for place, n in totals.items():
        if n:
            table.add_row(Text("in all", "bold"), Text(place, "dim"), Text(size(n), "bold"), "", "")
    temporary = found["temporary_bytes_per_device"]
    lines = Text.assemble(
        ("beyond that, at the fullest moment: ", "dim"),
        (size(temporary["plan"]), ""),
        (" by the plan", "dim"),
        (f"; the CPU compiler's buffers, {size(temporary['compiler'])}, are no accelerator's", "dim"),
    )
    return Group(table, lines)


def _agree(n: float, planned: float) -> Text:
    if abs(n - planned) <= 0.02 * planned:
        return Text("agrees" if n == planned else f"{n / planned - 1:+.2%}", "green")
    return Text(f"{n / planned - 1:+.1%}" if planned else "not planned", "bold red")


def _collectives(found: dict) -> Table:
    table = _table(
        *(("", "left"), ("operation", "left"), ("over", "left"), ("times", "right"), ("per device", "right")),
        *(("minimum", "right"), ("at full rate", "right")),
    )
    groups = found["collectives"]
    for phase, title in PHASES.items():
        rows = [g for g in groups if g["phase"] == phase]
        if not rows:
            continue
        whole = sum(g["time_s"] for g in rows)
        table.add_row(Text(title, "bold"), "", "", "", "", "", Text(duration(whole), "bold"))
        for g in rows:
            over = g["axis"].replace("+", " ") if len(g["axis"]) < 20 else "all axes"
            far = g["link"] != "inside the rack"
            style = "bold red" if g["what"] == "unexplained" else ""
            moved, least = g["bytes_per_device"], g["minimum_bytes"]
            wrong = abs(moved - least) > 0.02 * least
            table.add_row(
                Text(f"  {g['what']}", style),
                Text(g["op"].replace("ragged-all-to-all", "ragged a-t-a"), "dim"),
                Text(over, "yellow" if far else "dim"),
                f"{g['executions']:,}",
                Text(_amount(moved), "bold red" if wrong else ""),
                Text("" if g["what"] in ("statistics", "norms", "expert counts") else _amount(least), "dim"),
                duration(g["time_s"]) if g["time_s"] >= 5e-5 else Text("~0", "dim"),
            )
    table.add_row(Text("step", "bold"), "", "", "", "", "", Text(duration(sum(g["time_s"] for g in groups)), "bold"))
    return table


def _amount(n: float) -> str:
    """Bytes in the unit that suits them, decimal as links are rated.

    >>> _amount(355_819_585_536), _amount(1_258_024), _amount(4)
    ('355.8 GB', '1.3 MB', '4 B')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= unit:
            return f"{n / unit:,.1f} {name}"
    return f"{n:,.0f} B"


def _exchange(found: dict) -> Group:
    a2a = found["all_to_all"]
    crossing = sorted({g["what"] for g in found["collectives"] if g["link"] != "inside the rack"})
    lines = []
    if a2a["per_layer_per_wave_forward"]:
        lines.append(
            Text.assemble(
                ("experts   ", "dim"),
                (f"{a2a['per_layer_per_wave_forward']:g} all-to-alls per layer and wave forward, ", ""),
                (f"{_amount(a2a['bytes_per_token_per_layer'])} per token and layer", "bold"),
            )
        )
    names = ", ".join(crossing) if crossing else "nothing"
    lines.append(
        Text.assemble(
            ("racks     ", "dim"),
            (names, "yellow" if crossing else ""),
            (" goes across" if len(crossing) < 2 else " go across", ""),
        )
    )
    return Group(*lines)


def _verdict(found: dict) -> Group:
    seconds = f"compiled and read in {duration(found['seconds'])} with {size(found['peak_memory_bytes'])}"
    if found["ok"]:
        return Group(
            Text.assemble(
                ("ready  ", "bold green"),
                "every byte and every collective is what the run needs, within 2%  ",
                (seconds, "dim"),
            )
        )
    count = len(found["problems"])
    grid = Table.grid(padding=(0, 1))
    for problem in found["problems"]:
        grid.add_row(Text("-", "red"), problem)
    return Group(Text.assemble((f"{count} problem{'s' if count > 1 else ''}  ", "bold red"), (seconds, "dim")), grid)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def _section(console: Console, title: str, body: RenderableType) -> None:
    console.print()
    console.print(Text(title, "bold"))
    console.print(body)
