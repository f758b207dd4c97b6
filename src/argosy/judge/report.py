"""Forecasts for a terminal: fitted, registered, verified, bridged, and the verdict on a run."""

import math
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from argosy import spec
from argosy.forecast import points as P
from argosy.judge import points as tables
from argosy.judge import register, verdict
from argosy.judge.fits import Body
from argosy.track import metrics as known

WORDS = ("off", "behind", "ahead", "on track")  # worst first, and what is worth reading before what is not
STYLES = {"off": "bold red", "behind": "yellow", "ahead": "cyan", "on track": "green", "not comparable": "bold magenta"}
SHOWN = 16  # metrics in a table, or as many as are not on track
NARROW = 100  # columns: a narrower terminal has no room for a table's less needed column


def show(found: Body, out: Console) -> None:
    """The headline's curve, the end of every other metric, alarms."""
    headline, rows = found["headline"], found["rows"]
    out.print(curve(found["name"], [r for r in rows if r["metric"] == headline], found["fit"]))
    out.print(ends(rows, headline, out.width >= NARROW))
    alarms(found["fit"]["alarms"], headline, out)


def curve(name: str, rows: list[Body], fit: Body) -> Table:
    """One metric's forecast over the run."""
    metric = rows[0]["metric"] if rows else ""
    noise = fit["noise"].get(metric)
    table = Table(
        title=f"forecast of {escape(name)}: {escape(metric)} ({fit['method']})",
        title_justify="left",
        box=None,
        pad_edge=False,
        caption=f"noise of one evaluation {noise:.2%}" if noise else None,
        caption_justify="left",
    )
    for column in ("update", "of the run", "mean", "50% band", "90% band", "off the mean"):
        table.add_column(column, justify="right")
    total = max((r["step"] for r in rows), default=1)
    for r in rows:
        table.add_row(f"{r['step']:,}", f"{r['step'] / total:.0%}", *cells(r), style="bold" if r is rows[-1] else "")
    return table


def ends(rows: list[Body], headline: str | None, wide: bool) -> Table:
    """The last row of every metric but the headline; the 50% band where there is room."""
    table = named(wide, title="\nat the end of the run", title_justify="left")
    for column in ("mean", *["50% band"] * wide, "90% band", "off the mean"):
        table.add_column(column, justify="right", overflow="fold")
    last = {r["metric"]: r for r in rows if r["metric"] != headline}
    for metric, r in last.items():
        mean, half, *rest = cells(r)
        table.add_row(escape(metric), mean, *[half] * wide, *rest)
    return table


def named(wide: bool, **given: Any) -> Table:
    """A table whose first column holds names of metrics, which are not broken where that can be helped."""
    table = Table(box=None, pad_edge=False, padding=(0, 1) if wide else (0, 1, 0, 0), **given)
    table.add_column("metric", min_width=34 if wide else 30, overflow="fold")
    return table


def cells(r: Body) -> list[str]:
    """Mean, bands and their width of a row."""
    if r["mean"] is None:
        return ["-", "", "", "not forecast"]
    bands = ["" if r[f"lo{k}"] is None else f"{r[f'lo{k}']:.4g} to {r[f'hi{k}']:.4g}" for k in (50, 90)]
    width = "" if r["lo90"] is None or not r["mean"] else width_of(r)
    return [f"{r['mean']:.4g}", *bands, width]


def width_of(r: Body) -> str:
    return f"{r['lo90'] / r['mean'] - 1:+.1%} {r['hi90'] / r['mean'] - 1:+.1%}"


def alarms(listed: list[Body], headline: str | None, out: Console) -> None:
    """Alarms of the headline and of the ladder in full, those of other metrics counted."""
    others: dict[str, list[str]] = {}
    for alarm in dict.fromkeys((a["code"], a["message"]) for a in listed):
        code, message = alarm
        metric, sign, _ = message.partition(": ")
        if sign and metric != headline and tables.FORECAST.fullmatch(metric):
            others.setdefault(code, []).append(metric)
        else:
            out.print(f"[yellow]{code}[/yellow]  {escape(message)}")
    for code, metrics in others.items():
        shown = ", ".join(dict.fromkeys(metrics[:3]))
        more = len(set(metrics)) - len(set(metrics[:3]))
        out.print(f"[yellow]{code}[/yellow]  also of {escape(shown)}{f' and {more} more (--json has all)' if more > 0 else ''}")


def registered(path: Path, body: Body) -> Body:
    """What `argosy forecast register` and `bridge` print as JSON: all but data and numbers."""
    headline = known.macro_bpb([row["metric"] for row in body["data"]["target"]])
    keys = ("name", "number", "created", "late", "supersedes", "reason", "identity", "ladder", "method", "sha256")
    last = [r for r in body["forecast"]["rows"] if r["metric"] == headline][-1:]
    return {
        "path": str(path),
        "line": register.line(body),
        **{key: body[key] for key in keys},
        "bridged": body["bridge"] is not None,
        "metrics": len({r["metric"] for r in body["forecast"]["rows"]}),
        "end": last[0] if last else None,
        "alarms": body["forecast"]["fit"]["alarms"],
    }


def show_registered(path: Path, body: Body, out: Console) -> None:
    """Where the file is, what it says, and the line to publish."""
    told = registered(path, body)
    headline = told["end"]["metric"] if told["end"] else None
    alarms(told["alarms"], headline, out)
    out.print(
        f"registered [bold]{escape(str(path))}[/bold]: {told['metrics']} metrics from {len(body['ladder'])} rungs, read-only"
    )
    if told["end"] and told["end"]["mean"] is not None:
        mean, lo, hi, wide = cells(told["end"])[0], told["end"]["lo90"], told["end"]["hi90"], cells(told["end"])[3]
        out.print(
            f"{escape(headline or '')} at the end: {mean}" + ("" if lo is None else f", 90% {lo:.4g} to {hi:.4g} ({wide})")
        )
    if body["late"]:
        out.print(
            f"[yellow]late[/yellow]  the hero had finished {body['late']['updates']:,} updates: this stays marked in the file for ever"
        )
    say_line(body, out)


def say_line(body: Body, out: Console) -> None:
    """The line to publish, and where."""
    name, number = body["name"], f"{body['number']:04d}"
    line = register.line(body)
    early = "" if body["late"] or body["bridge"] else ", before the run has results"
    out.print(f"\nPublish this line where others can see its date, now{early}:")
    out.print(f"  [bold]{escape(line)}[/bold]", soft_wrap=True)
    out.print(f"  a git tag     git tag -a forecast-{escape(name)}-{number} -m '...' && git push --tags", soft_wrap=True)
    out.print("  a commit      the line in a file or message of a public repository", soft_wrap=True)
    out.print("  a time stamp  a public service that dates a SHA-256 (RFC 3161, OpenTimestamps)", soft_wrap=True)
    out.print(f"and note where: argosy forecast witness {escape(name)} --at URL", soft_wrap=True)


def show_verified(found: Body, out: Console) -> None:
    """Whether a file holds, and what does not."""
    out.print(f"{escape(found['path'])}: {escape(found['name'])} {found['number']:04d}, dated {found['created']}")
    for what, said in (
        ("hash", f"sha256 {found['sha256']}"),
        ("numbers", numbers(found)),
        ("chain", "its place among the others"),
    ):
        mark = "[green]holds[/green]" if found[what] else "[red]FAILS[/red]"
        out.print(f"  {what:8} {mark}  {escape(said)}", soft_wrap=True)
    for problem in found["problems"]:
        out.print(f"[red]{escape(problem)}[/red]", soft_wrap=True)
    if found["differs"]:
        table = Table(box=None, pad_edge=False)
        for column in ("metric", "update", "what", "in the file", "refitted"):
            table.add_column(column, justify="left" if column in ("metric", "what") else "right")
        for d in found["differs"][:12]:
            table.add_row(d.get("metric", ""), str(d.get("step", "")), d["what"], brief(d["registered"]), brief(d["refitted"]))
        out.print(table)
        if len(found["differs"]) > 12:
            out.print(f"and {len(found['differs']) - 12} more (--json has all)")


def numbers(found: Body) -> str:
    if found["note"]:
        return found["note"].removeprefix("numbers: ")
    return f"{found['rows']} rows refitted from the data inside, to {found['tolerance']:g} of each value"


def brief(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, int | float) else str(value)[:40]


def show_bridged(path: Path, body: Body, out: Console) -> None:
    """What a bridge says of the change, then as `show_registered`."""
    made, hero = body["bridge"], spec.from_json(body["hero"])
    event = made["event"]
    out.print(
        f"bridge over {escape(event['kind'])} at update {event['step']:,} ({event['step'] / spec.steps(hero):.0%} of the run), made when"
        f" {made['updates']:,} updates were finished, from {len(made['pairs'])} pair(s):"
        f" {escape(', '.join(p['old'] + ' = ' + p['new'] for p in made['pairs']))}"
    )
    for key, (old, new) in made["changed"].items():
        out.print(f"  {key}: {escape(tables.short(old))} -> {escape(tables.short(new))}")
    table = Table(title="effect at the hero's end", title_justify="left", box=None, pad_edge=False)
    for column in ("metric", "effect", "90% interval"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric, effect in made["effects"].items():
        if P.kind(metric) == "loss":
            shift, half = effect["shift"][-1], register_half(effect)
            table.add_row(
                escape(metric),
                f"{math.expm1(shift):+.2%}",
                f"{math.expm1(shift - half):+.2%} to {math.expm1(shift + half):+.2%}",
            )
    out.print(table)
    show_registered(path, body, out)


def register_half(effect: Body) -> float:
    """Half of the 90% interval of a shift, in log."""
    from scipy import stats

    return float(stats.t.ppf(0.95, effect["freedom"]) * effect["spread"])


def show_verdict(found: Body, out: Console) -> None:
    """A verdict for a terminal: the word and why, the forecast's marks, every metric with the worst first."""
    word = found["verdict"] or "no verdict yet"
    about = found["forecast"]
    head = Text.assemble((word, STYLES.get(word, "bold")), f"  {found['name']}: {found['why']}.")
    marked = f"forecast {about['number']:04d} of {about['created']}"
    marked += f", registered {about['when']}" if about["late"] or about["bridged"] else ""
    marked += f"; {verdict.witnessed(about)}"
    wide = out.width >= NARROW
    table = named(wide, header_style="bold")
    for column in ("verdict", "since", "measured", *["forecast"] * wide, "90% band", "out"):
        table.add_column(column, justify="left" if column == "verdict" else "right", overflow="fold")
    order = {w: i for i, w in enumerate(WORDS)}
    entries = found["metrics"].items()
    ranked = sorted(entries, key=lambda m: (order.get(m[1]["verdict"], 9), -abs(m[1]["widths_out"] or 0), known.rank(m[0])))
    calm = sum(one["verdict"] == "on track" for _, one in ranked)
    for metric, one in ranked[: max(SHOWN, len(ranked) - calm)]:
        out_by = one["widths_out"]
        table.add_row(
            metric,
            Text(one["verdict"], STYLES[one["verdict"]]),
            "" if one["since_step"] is None else f"{one['since_step']:,}",
            verdict.number(one["actual"]),
            *[verdict.number(one["mean"])] * wide,
            f"{verdict.number(one['lo90'])} to {verdict.number(one['hi90'])}",
            f"{out_by:+.2f}" if out_by else "",
        )
    more = len(ranked) - table.row_count
    note = Text("out: beyond the band, in halves of its width; + above, - below", "dim")
    note.append("\nahead and behind also tell what has shifted for good inside its band")
    note.append(f"\n{more} more are on track; --json has all" if more else "")
    rest: list[Any] = [Text(""), table, note] if found["metrics"] else []
    out.print(Group(head, Text(marked, "dim"), *rest))
