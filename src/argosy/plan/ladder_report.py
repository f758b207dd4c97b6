"""A ladder for the eye: what the rungs are, what they cost, what each is for, where to doubt it."""

import math
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from argosy.plan import hardware
from argosy.plan.report import count, duration


def show(body: dict, console: Console, state: Sequence[dict[str, Any]] = ()) -> None:
    """Print what `argosy.plan.ladder.sheet` returned, for a terminal of at least 80 columns.

    `state` is how far the rungs are (`judge.ladders.state`), if there is anything to say.
    """
    hero = body["hero"]
    console.print()
    console.print(
        Text.assemble(
            ("The ladder of ", "dim"),
            (hero["recipe"], "bold"),
            (f"  {count(hero['total_params'])} parameters, {count(hero['active_params'])} active", "cyan"),
            (f"  by {body['rule']}", "dim"),
        )
    )
    _section(console, "What the rungs are", _sizes(body))
    _section(console, "How they are trained", _ways(body))
    _section(console, "What they cost", _costs(body))
    console.print()
    console.print(_facts(body))
    _section(console, "What each is for", _purposes(body))
    if state:
        _section(console, "How far they are", _state(state))
    if body["rules"]:
        table = _plain()
        for rule in body["rules"]:
            table.add_row(Text(rule["about"], "bold"), Text(rule["rule"], "dim"))
        _section(console, "How they follow from the hero", table)
    if doubts := _doubts(body):
        table = _plain()
        for who, text in doubts:
            table.add_row(Text(who, "yellow"), text)
        _section(console, "Where to doubt it", table)
    console.print()


def _rows(body: dict) -> list[tuple[str, dict, str]]:
    """The hero last; repeats of a size dimmed."""
    rows = [(row["name"], row, "" if row["purpose"] == "size" else "dim") for row in body["rungs"]]
    return [*rows, ("hero", body["hero"], "bold")]


def _sizes(body: dict) -> Table:
    table = _table("rung", "parameters", "active", "layers", "heads", "tokens")
    for name, row, style in _rows(body):
        cells = (
            count(row["total_params"]),
            count(row["active_params"]),
            f"{row['layers']} x {row['width']:,}",
            f"{row['heads']} x {row['head_width']}",
            count(row["tokens"]),
        )
        table.add_row(name, *cells, style=style)
    return table


def _ways(body: dict) -> Table:
    table = _table("rung", "chips", "batch", "steps", "MuonH rate", "Adam rate")
    for name, row, style in _rows(body):
        rates = (f"{row['muonh_lr']:.4g}", f"{row['adam_lr']:.4g}")
        table.add_row(name, _chips(row), f"{row['batch_seqs']:,}", f"{row['steps']:,}", *rates, style=style)
    return table


def _chips(row: dict) -> str:
    """Chips, and how many racks or nodes they are where a rack or node is more than one."""
    size = hardware.chip(row["run"]["compute"]["chip"]).domain
    if size == 1:
        return f"{row['chips']:,}"
    word = "rack" if size > 16 else "node"
    return f"{row['chips']:,} ({row['domains']:,} {word}{'s' if row['domains'] != 1 else ''})"


def _costs(body: dict) -> Table:
    table = _table("rung", "FLOPs", "no readout", "to next", "MFU", "time", "chip-hours")
    for name, row, style in _rows(body):
        further = row.get("to_next")
        cells = (
            f"{row['flops']:.2e}",
            f"{row['flops_no_head']:.2e}",
            f"x {_times(further)}" if further else "",
            f"{row['mfu']:.1%}",
            duration(row["hours"] * 3600),
            f"{row['chip_hours']:.3g}" if row["chip_hours"] < 100 else count(row["chip_hours"]),
        )
        table.add_row(name, *cells, style=style)
    return table


def _facts(body: dict) -> Table:
    share, hours = body["share"], body["chip_hours"]
    table = _plain()
    table.add_row(
        Text("share of the hero", "bold"),
        Text.assemble(
            (f"{_share(share['flops'])} of its FLOPs", "cyan"),
            f" ({_share(share['flops_no_head'])} without readout),",
            (f" {_share(share['chip_hours'])} of its chip-hours", "cyan"),
            f" ({hours:,.3g})" if hours < 1000 else f" ({count(hours)})",
        ),
    )
    table.add_row(
        Text("to extrapolate", "bold"),
        f"x {_times(body['extrapolation'])} in FLOPs from the largest rung to the hero; the sizes span x {_times(body['span'])}",
    )
    return table


def _times(value: float) -> str:
    """A factor with three digits.

    >>> _times(8.0025), _times(47.54), _times(335.4)
    ('8.00', '47.5', '335')
    """
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _share(value: float) -> str:
    """A share in percent with two digits at least.

    >>> _share(0.00423), _share(0.718)
    ('0.42%', '71.8%')
    """
    return f"{value:.{max(1, 1 - math.floor(math.log10(100 * value)))}%}"


def _purposes(body: dict) -> Table:
    table = _plain()
    for purpose in dict.fromkeys(row["purpose"] for row in body["rungs"]):
        rows = [row for row in body["rungs"] if row["purpose"] == purpose]
        table.add_row(Text(", ".join(row["name"] for row in rows), "bold"), rows[0]["for"])
    for purpose, missing in (("small_batch", "updates and tokens cannot be told apart"), ("seed", "luck is not measured")):
        if not any(row["purpose"] == purpose for row in body["rungs"]):
            table.add_row(
                Text("none", "yellow"), f"{'in small batches' if purpose != 'seed' else 'from another seed'}: {missing}"
            )
    return table


def _state(state: Sequence[dict[str, Any]]) -> Table:
    table = _table("run", "updates", "of", "", "bits per byte")
    for row in state:
        words = "finished" if row["finished"] else "under way" if row["updates"] else "not begun"
        bits = "" if row["macro_bpb"] is None else f"{row['macro_bpb']:.4f}"
        table.add_row(row["name"], f"{row['updates']:,}", f"{row['steps']:,}", words, bits)
    return table


def _doubts(body: dict) -> list[tuple[str, str]]:
    """One line per thing that is doubted: which rungs, and what is said of the first of them."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, row, _ in _rows(body):
        for warning in row["warnings"]:
            text = warning["text"]
            key = re.sub(r"[0-9.,/]+", "#", text if warning["about"] == "memory" else re.split(r"[=:]", text)[0])
            found.setdefault(f"{warning['about']} {key}", []).append((name, text))
    every = len(body["rungs"]) + 1
    lines = []
    for told in found.values():
        names, (first, text) = [name for name, _ in told], told[0]
        who = "all" if len(names) == every else ", ".join(names) if len(names) < 4 else f"{first} and {len(names) - 1} more"
        lines.append((who, text if len(names) == 1 else f"{first}: {text}"))
    return lines


def _plain() -> Table:
    return Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for n, column in enumerate(columns):
        table.add_column(column, justify="left" if n == 0 else "right", no_wrap=True)
    return table


def _section(console: Console, title: str, table: Table) -> None:
    console.print()
    console.print(Text(title, "bold"))
    console.print(table)
