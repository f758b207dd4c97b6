"""The main job, whole: plan, data, ladder, check, forecast, register, train, judge, summarise, with a live page."""

import contextlib
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from argosy import progress, spec
from argosy.judge import ladders, register, verdict
from argosy.plan import flops, report, sheet
from argosy.plan.ladder import Rung
from argosy.track import log as logs
from argosy.track import provenance, server, store


class NoGo(ValueError):
    """The check of a ladder says that its hero should not be launched."""


def whole(
    run: spec.Run,
    host: spec.Host,
    rungs: Sequence[Rung] = (),
    *,
    stop_on: str = "nothing",
    despite_no_go: bool = False,
    as_json: bool = False,
) -> dict[str, Any] | None:
    """Plan, build the data if missing, climb the ladder, check it, register the forecast, train, judge; return the summary
    that is also printed.

    The page is served while it lasts; its address is the first thing printed. Interrupted, the same call goes on where it
    was. Without rungs there is no forecast, unless one is registered already. With several processes this is process 0's; the
    others return None.

    Raises:
        NoGo: when the ladder's check says NO-GO and `despite_no_go` is not set; nothing of the hero is trained then.
        ValueError: when the run, a rung or the ladder cannot be what is asked.
    """
    from argosy import processes

    if rungs and not processes.alone():
        raise ValueError(
            f"the ladder of {host.name} is climbed by one process: argosy ladder, with --run, then argosy forecast register"
            f" {host.name}, then this command with --ladder skip, which keeps to the registered forecast"
        )
    out = Console(stderr=as_json, highlight=False)
    planned = begin(run, host)
    if not processes.first():
        train(run, host, stop_on=stop_on)
        return None
    with server.serve(host.home, host.name, host.port) as address:
        out.print(f"[bold]{host.name}[/bold]  live page: [link={address}]{address}[/link]")
        report.show(planned, out)
        if rungs and not foretold(run, host, rungs, out, despite_no_go):
            raise KeyboardInterrupt  # a signal ended the ladder: the same command goes on
        train(run, host, stop_on=stop_on)
        result = summary(host)
        if not as_json:
            show_summary(result, out)
    return result


def foretold(run: spec.Run, host: spec.Host, rungs: Sequence[Rung], out: Console, despite_no_go: bool) -> bool:
    """Climb the ladder, check it, register the forecast if none is; whether all of that is done.

    Raises:
        NoGo: when the check says so and `despite_no_go` is not set.
    """
    from argosy.judge import check

    ladders.save(host.home, host.name, run, rungs)
    corpus(run, host)
    if not climb(host.name, rungs, host):
        return False
    with progress.telling() as say:
        found = check.check(host.home, host.name, say)
    out.print(check.show(found))
    if found["verdict"] == "NO-GO" and not despite_no_go:
        raise NoGo(
            f"the check of {host.name}'s ladder says NO-GO, see above; nothing of {host.name} is trained. Change what it names, or go on"
            " all the same with --despite-no-go"
        )
    if register.newest(host.home, host.name) is None:
        with progress.telling() as say:
            _, body = register.register(host.home, host.name, run, say=say)
        out.print("\n[bold]Forecast registered[/bold], to be published now, before there are results:")
        out.print(f"  {register.line(body)}\n", soft_wrap=True)
    return True


def judging(host: spec.Host, writer: store.Writer, stop_on: str) -> Callable[[int], bool]:
    """A function of finished updates that holds the run against its registered forecast and says whether to stop.

    A new verdict is an event of the log. What goes wrong in judging is one too, and never ends a training.
    """
    told = ""

    def judge(step: int) -> bool:
        nonlocal told
        try:
            if not any(register.files(host.home, host.name)):
                return False
            found = verdict.judge(host.home, host.name)
            word, why = found["verdict"] or "", found["why"]
        except Exception as error:  # whatever a damaged file or an odd curve makes of it: the training is worth more
            word, why = "not judged", str(error) if isinstance(error, ValueError | OSError) else repr(error)
        if word != told:
            told = word
            happened(writer.event, "verdict", step, verdict=word, message=f"against the forecast: {word}: {why}")
        return stop_on == "off" and word == "off"

    return judge


def begin(run: spec.Run, host: spec.Host, stop_after: int | None = None) -> dict[str, Any]:
    """Make the run's folder, or find it there with the same values; return the plan.

    Raises:
        ValueError: when the run exists with other values, or needs what this version or machine has not; when processes
            were started with different values, or do not share the folder.
    """
    from argosy import processes
    from argosy.train import loop

    same_command(run, host, stop_after)
    loop.ready(run)
    planned = sheet.plan(run)
    about = {"environment": provenance.environment(), "plan": planned}
    processes.on_first(lambda: store.create(host.folder, spec.to_json(run), provenance.code(), **about))
    processes.together(lambda: shared(host))
    return planned


def same_command(run: spec.Run, host: spec.Host, stop_after: int | None) -> None:
    """Refuse processes that were started with different values or have different code; each says the difference."""
    from argosy import processes

    if processes.alone():
        return
    code = provenance.code()["sources"]
    mine = {**logs.flat(spec.to_json(run)), "--as": host.name, "--stop-after": stop_after, "the code's checksum": code}
    digests = processes.exchange(hashlib.sha256(json.dumps(mine).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    told = processes.exchange(mine)
    other = next(n for n, digest in enumerate(digests) if digest != digests[0])
    changed = [f"{k} is {told[other].get(k)}, not {told[0].get(k)}" for k in sorted({*told[0], *told[other]})
               if told[0].get(k) != told[other].get(k)]  # fmt: skip
    raise ValueError(
        f"process {other} of {len(told)} was not started as process 0 was: {'; '.join(changed[:6])}; start all with one command"
    )


def shared(host: spec.Host) -> None:
    """Refuse a process that does not see what process 0 has made.

    Raises:
        ValueError: naming the folder.
    """
    if not (host.folder / "run.json").is_file():
        raise ValueError(
            f"{host.folder}, which process 0 has just made, is not there; --home has to be on storage that all processes share"
        )


def corpus(run: spec.Run, host: spec.Host) -> Any:
    """The run's corpus, whole and unchanged; the standard library's is built if it is missing.

    With several processes, process 0 builds and verifies it; the others find the same one, there or in a copy of their own.

    Raises:
        ValueError: when its name is none, when it is missing and no recipe is known for it, or damaged, or too small for
            the run, or not the same in all processes.
    """
    from argosy import processes
    from argosy.data import tokens

    processes.on_first(lambda: build_missing(run, host))
    opened = processes.together(lambda: open_corpus(run, host, verify=processes.first()))
    checksums = processes.exchange(opened.checksum)
    for process, checksum in enumerate(checksums):
        if checksum != checksums[0]:
            raise ValueError(
                f"process {process} of {len(checksums)} has another corpus {run.data.corpus!r} than process 0: checksum"
                f" {checksum[:16]}, not {checksums[0][:16]}; copy {tokens.corpus_folder(host.home, run.data.corpus)} there"
            )
    return opened


def build_missing(run: spec.Run, host: spec.Host) -> None:
    """Build the standard library's corpus where it is wanted and missing."""
    from argosy.data import prepare, tokens

    if run.data.corpus == prepare.STDLIB and not tokens.corpus_folder(host.home, prepare.STDLIB).exists():
        prepare.build(prepare.STDLIB, (), host.home)


def open_corpus(run: spec.Run, host: spec.Host, verify: bool) -> Any:
    from argosy.data import mixture, tokens

    name, folder = run.data.corpus, tokens.corpus_folder(host.home, run.data.corpus)
    if not folder.exists():
        raise ValueError(f"corpus {name!r} is not in {folder.parent}; make it: argosy data build FILES... --name {name}")
    opened = tokens.open_store(folder, verify=verify)
    if not opened.held_out_sources:
        raise ValueError(
            f"corpus {name!r} holds no text out: none of its sources ({', '.join(opened.sources)}) has two documents;"
            " split the text into more documents and build it again with --force"
        )
    tokens.check(run, opened)
    mixture.check(run, opened.sizes)
    return opened


def train(
    run: spec.Run,
    host: spec.Host,
    stop_after: int | None = None,
    *,
    stop_on: str = "nothing",
    score: bool = True,
    show: progress.Show = progress.of_run,
    stopping: list[str] | None = None,
) -> int:
    """Train a run whose folder exists, from its last checkpoint; everything that happens goes into its log.

    Returns how many updates are finished. `score` is whether a finished run is scored on all held-out text. Every evaluation is held against the registered forecast, if there is one;
    `stop_on="off"` ends the training when that verdict is `off`. `show` shows them; `stopping` is filled with what asked for the end, if anything
    did. With several processes all call this alike; process 0 alone writes.

    Raises:
        ValueError: when the corpus is not the one that the run began with, or the run cannot go on.
        OSError: when the disk refuses; the last checkpoint is intact.
    """
    import jax

    from argosy import processes
    from argosy.evals import heldout
    from argosy.train import checkpoint, loop

    opened = corpus(run, host)
    jax.config.update("jax_compilation_cache_dir", str((host.home / "cache").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    evaluate = heldout.evaluator(run, opened)
    at = processes.on_first(lambda: checkpoint.latest_step(host.folder))
    with contextlib.ExitStack() as stack:
        writer = processes.together(lambda: stack.enter_context(log_of(run, host, opened, at)) if processes.first() else None)
        shown = stack.enter_context(show(run, at)) if writer else nothing
        record = writer.record if writer else nothing
        state = loop.train(
            run,
            host,
            opened,
            record=record,
            event=partial(happened, writer.event) if writer else nothing,
            evaluate=evaluate,
            progress=shown,
            judge=judging(host, writer, stop_on) if writer else lambda step: False,
            stop_after=stop_after,
            stopping=stopping,
        )
        done = int(state.step)
        if score and processes.on_first(lambda: done == spec.steps(run) and not scored_whole(logs.read(host.folder))):
            if writer:
                print("scoring all held-out text", file=sys.stderr, flush=True)
            record(done, evaluate(state, whole=True))
        if writer:
            writer.close("done" if done == spec.steps(run) else "stopped")
    return done


def climb(hero_name: str, rungs: Sequence[Rung], host: spec.Host) -> bool:
    """Train the rungs of a ladder under the host's home, the cheapest first, each from where it stopped.

    Returns whether all are finished: not after a signal to stop, which leaves a checkpoint. Finished rungs are left alone.

    Raises:
        ValueError: when any rung cannot be trained here, or exists with other values.
    """
    runs = [(ladders.run_name(hero_name, rung.name), rung.run) for rung in rungs]
    return in_turn(sorted(runs, key=lambda named: flops.train(named[1], readout=True)), host, "ladder", "rung", score=False)


def in_turn(runs: Sequence[tuple[str, spec.Run]], host: spec.Host, whole: str, one: str, *, score: bool = True) -> bool:
    """Train several runs one after another in this process, by name under the host's home, each from where it stopped.

    Returns whether all are finished: not after a signal to stop, which leaves a checkpoint; the same call goes on with it.
    Finished runs are left alone, and when all are, nothing is opened. `whole` and `one` are what the runs are called on
    standard error, which shows how far all of them are, in FLOPs. `score` is whether each ends with a score of all held-out
    text: forecasts use the registered part alone.

    Raises:
        ValueError: when any of the runs cannot be trained or exists with other values; before the first is trained.
    """
    left = {name: run for name, run in runs if not complete(run, replace(host, name=name), score)}
    if not left:
        return True
    import jax

    from argosy import processes
    from argosy.train import loop

    for name, run in left.items():
        loop.ready(run)
        store.there(replace(host, name=name).folder, spec.to_json(run))
    stopping: list[str] = []
    with progress.of_several(dict(runs), list(left), whole, one) as showing, loop.stop_signals(stopping):
        for name, run in left.items():
            here = replace(host, name=name)
            begin(run, here)
            done = train(run, here, score=score, show=showing(name), stopping=stopping)
            if any(processes.exchange(bool(stopping) or done < spec.steps(run))):
                return False
            jax.clear_caches()  # the next run's program is another
    return True


def complete(run: spec.Run, host: spec.Host, score: bool) -> bool:
    """Whether a run is trained to its end and, if that is asked, scored on all held-out text."""
    if not (host.folder / "run.json").is_file():
        return False
    log = logs.read(host.folder)
    same = spec.from_json(log.run["run"]) == run
    return same and ladders.is_finished(log) and (scored_whole(log) or not score)


def nothing(*_: Any, **__: Any) -> None:
    """What the processes beside process 0 do with rows and events."""


def scored_whole(log: logs.RunLog) -> bool:
    return any(m.startswith("eval_whole/") for m in log.metrics)


@contextlib.contextmanager
def log_of(run: spec.Run, host: spec.Host, opened: Any, at: int) -> Iterator[store.Writer]:
    """The run's log, opened for an attempt that begins after `at` updates; where the run comes from is noted in it once.

    Raises:
        ValueError: when another process writes to it, or the run began on another corpus.
    """
    same_corpus(host, opened)
    with store.open_writer(host.folder, at, code=provenance.code()) as writer:
        began = logs.read(host.folder)
        if not any(e["kind"] == "baseline_whole" for e in began.events):
            limit = run.evals.tokens_per_set
            writer.event("baseline", at, **{s: opened.gzip_bits_per_byte(s, limit) for s in opened.held_out_sources})
            writer.event("baseline_whole", at, **{s: opened.gzip_bits_per_byte(s) for s in opened.held_out_sources})
        if not any(r["kind"] == "corpus" for r in began.lineage):
            writer.lineage("corpus", at, name=run.data.corpus, checksum=opened.checksum, ledger=opened.ledger)
        yield writer


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


def summary(host: spec.Host) -> dict[str, Any]:
    """What a finished or stopped run came to, from its log and its registered forecast alone.

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
    if not ladders.updates(log):
        raise ValueError(f"run {host.name!r} has no finished update yet; the same command goes on with it")
    rates = log.series("throughput/tokens_per_second")[1].tolist()
    scored = log.last(f"{prefix}/{corpus_name}/macro_bpb")
    return {
        "run": log.name,
        "folder": str(log.folder),
        "updates": ladders.updates(log),
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
        "forecast": verdict.judge(host.home, host.name) if any(register.files(host.home, host.name)) else None,
    }


def against(found: dict[str, Any]) -> str:
    """How a run compares with its registered forecast, in plain words."""
    about, one = found["forecast"], found["metrics"].get(found["headline"])
    first = f"Registered on {about['created'][:10]}, {about['when']}; {verdict.witnessed(about)}."
    if one is None or one["actual"] is None or not one["mean"] or found["verdict"] in (None, "not comparable"):
        return f"{first}\n{(found['verdict'] or 'no verdict yet').capitalize()}: {found['why']}."
    unit = "bits per byte" if found["headline"].endswith("bpb") else ""
    off = one["actual"] / one["mean"] - 1
    inside = one["lo90"] <= one["actual"] <= one["hi90"]
    return (
        f"{first}\nThe small runs said {one['mean']:.3f} {unit} at update {one['step']:,}, and 9 to 1 on {one['lo90']:.3f} to"
        f" {one['hi90']:.3f}. The run is at {one['actual']:.3f}: {abs(off):.1%} {'worse' if off > 0 else 'better'} than the middle,"
        f" {'inside' if inside else 'outside'} that band.\nVerdict: {found['verdict']}"
        + (f" since update {one['since_step']:,}" if one["since_step"] is not None else "")
        + f". All metrics: argosy forecast judge {found['name']}"
    )


def show_summary(result: dict[str, Any], out: Console) -> None:
    """The last screen: what was learned, how it compares with the forecast, how fast, and what to do next."""
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
    if result["forecast"]:
        out.print("\n[bold]Against its forecast[/bold]")
        out.print(against(result["forecast"]))
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
