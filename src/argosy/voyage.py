"""The main job, whole: plan, data, train, evaluate, summarise, with a live page.

The ladder and its forecast take their place between data and training; the verdict on it after the training.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from argosy import spec
from argosy.plan import report, sheet
from argosy.track import log as logs
from argosy.track import provenance, server, store


def whole(run: spec.Run, host: spec.Host, *, json: bool = False) -> dict[str, Any]:
    """Plan, build the data if missing, train to the end, evaluate; return the summary that is also printed.

    The page is served while it lasts; its address is the first thing printed. Interrupted, the same call goes on.
    """
    out = Console(stderr=json, highlight=False)
    planned = begin(run, host)
    with server.serve(host.home, host.name, host.port) as address:
        out.print(f"[bold]{host.name}[/bold]  live page: [link={address}]{address}[/link]")
        report.show(planned, out)
        train(run, host)
        result = summary(host)
        if not json:
            show_summary(result, out)
    return result


def begin(run: spec.Run, host: spec.Host) -> dict[str, Any]:
    """Make the run's folder, or find it there with the same values; return the plan.

    Raises:
        ValueError: when the run exists with other values, or needs what this version or machine has not.
    """
    from argosy.train import loop

    loop.ready(run)
    planned = sheet.plan(run)
    store.create(host.folder, spec.to_json(run), provenance.code(), environment=provenance.environment(), plan=planned)
    return planned


def corpus(run: spec.Run, host: spec.Host) -> Any:
    """The run's corpus, whole and unchanged; the standard library's is built if it is missing.

    Raises:
        ValueError: when its name is none, when it is missing and no recipe is known for it, or damaged, or too small for the run.
    """
    from argosy.data import mixture, prepare, tokens

    name, folder = run.data.corpus, tokens.corpus_folder(host.home, run.data.corpus)
    if not folder.exists():
        if name != prepare.STDLIB:
            raise ValueError(f"corpus {name!r} is not in {folder.parent}; make it: argosy data build FILES... --name {name}")
        prepare.build(name, (), host.home)
    opened = tokens.open_store(folder, verify=True)
    if not opened.held_out_sources:
        raise ValueError(
            f"corpus {name!r} holds no text out: none of its sources ({', '.join(opened.sources)}) has two documents;"
            " split the text into more documents and build it again with --force"
        )
    tokens.check(run, opened)
    mixture.check(run, opened.sizes)
    return opened


def train(run: spec.Run, host: spec.Host, stop_after: int | None = None) -> None:
    """Train a run whose folder exists, from its last checkpoint; everything that happens goes into its log.

    Raises:
        ValueError: when the corpus is not the one that the run began with, or the run cannot go on.
        OSError: when the disk refuses; the last checkpoint is intact.
    """
    opened = corpus(run, host)
    same_corpus(host, opened)
    import jax

    jax.config.update("jax_compilation_cache_dir", str((host.home / "cache").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    from argosy.evals import heldout
    from argosy.train import checkpoint, loop

    at = checkpoint.latest_step(host.folder)
    evaluate = heldout.evaluator(run, opened)
    with store.open_writer(host.folder, at, code=provenance.code()) as writer:
        began = logs.read(host.folder)
        if not any(e["kind"] == "baseline_whole" for e in began.events):
            limit = run.evals.tokens_per_set
            writer.event("baseline", at, **{s: opened.gzip_bits_per_byte(s, limit) for s in opened.held_out_sources})
            writer.event("baseline_whole", at, **{s: opened.gzip_bits_per_byte(s) for s in opened.held_out_sources})
        if not any(r["kind"] == "corpus" for r in began.lineage):
            writer.lineage("corpus", at, name=run.data.corpus, checksum=opened.checksum, ledger=opened.ledger)
        with progress_of(run, at) as progress:
            state = loop.train(
                run,
                host,
                opened,
                record=writer.record,
                event=partial(happened, writer.event),
                evaluate=evaluate,
                progress=progress,
                stop_after=stop_after,
            )
        done = int(state.step)
        if done == spec.steps(run) and not any(m.startswith("eval_whole/") for m in logs.read(host.folder).metrics):
            print("scoring all held-out text", file=sys.stderr, flush=True)
            writer.record(done, evaluate(state, whole=True))
        writer.close("done" if done == spec.steps(run) else "stopped")


def happened(record: Callable[..., None], kind: str, step: int, **fields: Any) -> None:
    """Log an event, and say it where it has words for people."""
    record(kind, step, **fields)
    if "message" in fields:
        print(f"argosy: {fields['message']}", file=sys.stderr, flush=True)


def same_corpus(host: spec.Host, opened: Any) -> None:
    """Refuse to go on with text other than a run began with."""
    for record in logs.read(host.folder).lineage:
        if record["kind"] == "corpus" and record["fields"]["checksum"] != opened.checksum:
            began = record["fields"]
            raise ValueError(
                f"run {host.name!r} began on corpus {began['name']!r} with checksum {began['checksum'][:16]}, which is now"
                f" {opened.checksum[:16]}; bring the old corpus back, or start a new run with --as {host.name}-2"
            )


@contextlib.contextmanager
def progress_of(run: spec.Run, at: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A function of (step, row) that shows progress on standard error: a bar on a terminal, else a line now and then."""
    total = spec.steps(run)
    if sys.stderr.isatty():
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total, completed=at, note="compiling")

            def draw(step: int, row: dict[str, float]) -> None:
                bar.update(task, completed=step, note=note(row))

            yield draw
        return
    last = -1e9
    print(f"training: {at:,} of {total:,} updates finished; compiling", file=sys.stderr, flush=True)

    def line(step: int, row: dict[str, float]) -> None:
        nonlocal last
        if step == total or time.monotonic() - last > 15:
            last = time.monotonic()
            print(f"{step:,}/{total:,}  {note(row)}", file=sys.stderr, flush=True)

    yield line


def note(row: dict[str, float]) -> str:
    return (
        f"loss {row['train/loss']:.3f}  {row['throughput/tokens_per_second']:,.0f} tokens/s"
        f"  drops {100 * row['moe/drop_fraction']:.1f}%"
    )


def summary(host: spec.Host) -> dict[str, Any]:
    """What a finished or stopped run came to, from its log alone.

    Bits per byte are of all held-out text once the run is finished, until then of the registered part of it.
    """
    log = logs.read(host.folder)
    corpus_name = log.run["run"]["data"]["corpus"]

    def last(metric: str) -> float | None:
        point = log.last(metric)
        return None if point is None else point[1]

    whole = last(f"eval_whole/{corpus_name}/macro_bpb") is not None
    prefix, kind = ("eval_whole", "baseline_whole") if whole else ("eval_dropless", "baseline")
    gzip: dict[str, float] = next((e["fields"] for e in reversed(log.events) if e["kind"] == kind), {})
    if log.last("train/loss") is None:
        raise ValueError(f"run {host.name!r} has no finished update yet; the same command goes on with it")
    rates = log.series("throughput/tokens_per_second")[1].tolist()
    scored = log.last(f"{prefix}/{corpus_name}/macro_bpb")
    return {
        "run": log.name,
        "folder": str(log.folder),
        "updates": int(log.series("train/loss")[0][-1]),
        "updates_total": spec.steps(spec.from_json(log.run["run"])),
        "loss": last("train/loss"),
        "held_out": "all" if whole else "registered part",
        "held_out_at_update": scored[0] if scored else None,
        "macro_bits_per_byte": last(f"{prefix}/{corpus_name}/macro_bpb"),
        "gzip_mean": statistics.fmean(gzip.values()) if gzip else None,
        "sources": {s: {"bits_per_byte": last(f"{prefix}/{s}/bpb"), "gzip": bits} for s, bits in gzip.items()},
        "tokens": last("throughput/total_tokens"),
        "tokens_per_second": statistics.median(rates),
        "mfu": statistics.median(log.series("throughput/mfu")[1].tolist()),
        "prompt": "def " if corpus_name == "stdlib" else "The ",
        "drop_fraction_last": last("moe/drop_fraction"),
    }


def show_summary(result: dict[str, Any], out: Console) -> None:
    """The last screen: what was learned, how fast, and what to do next."""
    when = f", at update {result['held_out_at_update']:,}" if result["held_out_at_update"] != result["updates"] else ""
    title = f"Held-out bits per byte, dropless ({result['held_out']}{when})"
    table = Table(box=None, pad_edge=False)
    for column in ("source", "model", "gzip -9", "of gzip"):
        table.add_column(column, justify="left" if column == "source" else "right")
    rows = {**result["sources"], "mean": {"bits_per_byte": result["macro_bits_per_byte"], "gzip": result["gzip_mean"]}}
    for name, row in rows.items():
        if row["bits_per_byte"] is not None and row["gzip"]:
            bits, gzip = row["bits_per_byte"], row["gzip"]
            table.add_row(name, f"{bits:.3f}", f"{gzip:.3f}", f"{bits / gzip:.0%}", style="bold" if name == "mean" else "")
    out.print(f"\n[bold]{title}[/bold]")
    out.print(table)
    of = "" if result["updates"] == result["updates_total"] else f" of {result['updates_total']:,}"
    out.print(
        f"\n{result['updates']:,}{of} updates, {result['tokens']:,.0f} tokens, {result['tokens_per_second']:,.0f} tokens/s (median),"
        f" {result['mfu']:.1%} of this machine's matrix-product peak, final loss {result['loss']:.3f}."
    )
    if of:
        out.print("The same command goes on from here.")
    out.print(f"Log and checkpoints: {result['folder']}")
    out.print(
        f"Next: argosy sample {result['run']} {result['prompt']!r}   argosy show {result['run']}   argosy serve {result['run']}"
    )
